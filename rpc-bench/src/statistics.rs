//! Samples, and the numbers that are reported of them.

use std::time::Duration;

use serde::Serialize;

/// Limits that end the measurement of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Maximum number of samples of our probe.
    pub(crate) iterations: usize,
    /// Time of all probes together.
    pub(crate) time: Duration,
}

/// Unit of a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Micros,
    GigabytesPerSecond,
    CallsPerSecond,
    ObjectsPerSecond,
}

impl Unit {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Micros => "µs",
            Self::GigabytesPerSecond => "GB/s",
            Self::CallsPerSecond => "calls/s",
            Self::ObjectsPerSecond => "objects/s",
        }
    }

    fn lower_is_better(self) -> bool {
        self == Self::Micros
    }
}

/// Result of one case: a line of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct CaseResult {
    pub(crate) suite: String,
    pub(crate) case: String,
    pub(crate) unit: &'static str,
    pub(crate) median: f64,
    /// 99th percentile, counted from the fast end.
    pub(crate) p99: f64,
    pub(crate) n: usize,
    /// `lower` or `higher`: the better direction of values and ratios.
    pub(crate) better: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) baseline: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) direct: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ratio_direct: Option<f64>,
}

impl CaseResult {
    /// Returns a result without comparisons.
    pub(crate) fn new(suite: &str, case: &str, unit: Unit, samples: &Samples) -> Self {
        let slow = if unit.lower_is_better() { 0.99 } else { 0.01 };
        Self {
            suite: suite.to_owned(),
            case: case.to_owned(),
            unit: unit.name(),
            median: rounded(samples.median()),
            p99: rounded(samples.quantile(slow)),
            n: samples.all.len(),
            better: if unit.lower_is_better() { "lower" } else { "higher" },
            baseline: None,
            ratio: None,
            direct: None,
            ratio_direct: None,
        }
    }
}

/// Samples of one probe, in blocks that were measured in turn with those of the other probes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Samples {
    all: Vec<f64>,
    /// Median of each block.
    blocks: Vec<f64>,
}

impl Samples {
    pub(crate) fn add_block(&mut self, block: &[f64]) {
        self.blocks.push(quantile(block, 0.5));
        self.all.extend_from_slice(block);
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len()
    }

    pub(crate) fn median(&self) -> f64 {
        quantile(&self.all, 0.5)
    }

    fn quantile(&self, fraction: f64) -> f64 {
        quantile(&self.all, fraction)
    }

    /// Returns the median of the ratios of neighbouring blocks, which were measured under the same
    /// conditions.
    pub(crate) fn ratio_to(&self, other: &Self) -> f64 {
        let ratios: Vec<f64> = self.blocks.iter().zip(&other.blocks).map(|(ours, theirs)| ours / theirs).collect();
        quantile(&ratios, 0.5)
    }
}

/// Returns the value that this fraction of the samples does not exceed, interpolated between
/// neighbours.
pub(crate) fn quantile(samples: &[f64], fraction: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let position = last as f64 * fraction;
    let (below, above) = (sorted[position.floor() as usize], sorted[position.ceil() as usize]);
    below + (above - below) * position.fract()
}

/// Rounds to five significant digits.
pub(crate) fn rounded(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let scale = 10_f64.powi(4 - value.abs().log10().floor() as i32);
    (value * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_and_ratios() {
        let mut ours = Samples::default();
        let mut bare = Samples::default();
        for (block, factor) in [(1.0, 2.0), (10.0, 3.0), (100.0, 4.0)] {
            ours.add_block(&[block * factor, block * factor]);
            bare.add_block(&[block]);
        }
        assert_eq!(ours.ratio_to(&bare), 3.0);
        assert_eq!(ours.median(), 30.0);
        assert_eq!(quantile(&[1.0, 2.0], 0.5), 1.5);
        assert_eq!(quantile(&[], 0.5), 0.0);
        assert_eq!(rounded(123_456.7), 123_460.0);
    }

    #[test]
    fn the_slow_end_of_a_rate_is_the_low_one() {
        let mut samples = Samples::default();
        samples.add_block(&(1..=100).map(f64::from).collect::<Vec<_>>());
        assert!(CaseResult::new("tcp", "call", Unit::Micros, &samples).p99 > 98.0);
        assert!(CaseResult::new("tcp", "copy", Unit::GigabytesPerSecond, &samples).p99 < 3.0);
    }
}
