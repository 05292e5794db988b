//! Samples, and what is said about them.

use std::time::Duration;

use serde::Serialize;

/// When a case has been measured enough.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Samples of ours.
    pub(super) iterations: usize,
    /// Time, of all sides together.
    pub(super) time: Duration,
}

/// What a sample measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Micros,
    GigabytesPerSecond,
    CallsPerSecond,
    ObjectsPerSecond,
}

impl Unit {
    pub(super) fn name(self) -> &'static str {
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

/// The result of one case: a line of the JSON output.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Line {
    pub(super) suite: String,
    pub(super) case: String,
    pub(super) unit: &'static str,
    pub(super) median: f64,
    /// The slow end.
    pub(super) p99: f64,
    pub(super) n: usize,
    /// `lower` or `higher`: of the values and of the ratios.
    pub(super) better: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) baseline: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) direct: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ratio_direct: Option<f64>,
}

impl Line {
    /// A line without comparisons.
    pub(super) fn new(suite: &str, case: &str, unit: Unit, samples: &Samples) -> Self {
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

/// The samples of one side, in blocks that were measured in turn with those of the other sides.
#[derive(Clone, Debug, Default)]
pub(super) struct Samples {
    all: Vec<f64>,
    /// The median of each block.
    blocks: Vec<f64>,
}

impl Samples {
    pub(super) fn add_block(&mut self, block: &[f64]) {
        self.blocks.push(quantile(block, 0.5));
        self.all.extend_from_slice(block);
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn median(&self) -> f64 {
        quantile(&self.all, 0.5)
    }

    fn quantile(&self, fraction: f64) -> f64 {
        quantile(&self.all, fraction)
    }

    /// The median of the ratios of neighbouring blocks: the machine was in the same mood for both.
    pub(super) fn ratio_to(&self, other: &Self) -> f64 {
        let ratios: Vec<f64> = self.blocks.iter().zip(&other.blocks).map(|(ours, theirs)| ours / theirs).collect();
        quantile(&ratios, 0.5)
    }
}

/// The value that this fraction of the samples does not exceed; half-way values are those of the two neighbours' middle.
pub(in crate::cli) fn quantile(samples: &[f64], fraction: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = last as f64 * fraction;
    let (below, above) = (sorted[place.floor() as usize], sorted[place.ceil() as usize]);
    below + (above - below) * place.fract()
}

/// Five significant digits: more say nothing.
pub(in crate::cli) fn rounded(value: f64) -> f64 {
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
        assert!(Line::new("tcp", "call", Unit::Micros, &samples).p99 > 98.0);
        assert!(Line::new("tcp", "copy", Unit::GigabytesPerSecond, &samples).p99 < 3.0);
    }
}
