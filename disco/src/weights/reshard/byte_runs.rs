//! Runs of bytes: the bytes of a box of a tensor, as they lie in the memory of a part that has it.

use std::ops::Range;

use rpc_core::{Result, RpcError};
use serde::{Deserialize, Serialize};

/// Most dimensions along which runs are repeated.
const MAX_OUTER: usize = 32;

/// Runs of equal length in the memory of a tensor. They are numbered in the order of their
/// elements, so that byte `n` of the runs of one tensor is byte `n` of those of another one that
/// has the same box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::weights) struct ByteRuns {
    /// Length of all runs together, in bytes.
    pub(in crate::weights) len: u64,
    /// Start of the first run, in bytes from the beginning of the tensor.
    pub(in crate::weights) start: u64,
    /// Length of a run, in bytes. Only runs of no bytes have no length.
    pub(in crate::weights) run: u64,
    /// Number of runs along each of the outer dimensions, and the distance between their starts.
    pub(in crate::weights) outer: Vec<(u64, u64)>,
}

impl ByteRuns {
    /// Returns true if all bytes are in one run.
    pub(super) fn are_contiguous(&self) -> bool {
        self.run == self.len
    }

    /// Checks runs of a peer: they are in a tensor of `size` bytes, and there are as many as their
    /// length says.
    ///
    /// # Errors
    ///
    /// They are not.
    pub(super) fn check(&self, size: u64) -> Result<()> {
        let count = self.outer.iter().try_fold(1_u64, |count, (times, _)| count.checked_mul(*times));
        let len = count.and_then(|count| count.checked_mul(self.run));
        let end = self.outer.iter().try_fold(self.start.checked_add(self.run), |end, (times, step)| {
            Some(end?.checked_add(times.checked_sub(1)?.checked_mul(*step)?))
        });
        // The iterator takes one step more, and goes back.
        let end = end.filter(|_| self.outer.iter().all(|(_, step)| *step <= size));
        let fits = len == Some(self.len) && end.flatten().is_some_and(|end| end <= size);
        let is_empty = self.len == 0 && self.run == 0 && self.outer.is_empty();
        if self.outer.len() > MAX_OUTER || !(fits || is_empty) {
            return Err(RpcError::invalid_argument(format!("{self:?} are no runs of a tensor of {size} bytes")));
        }
        Ok(())
    }

    /// Returns the ranges in the tensor that have the bytes `wanted` of the runs, in their order.
    pub(super) fn ranges(&self, wanted: Range<u64>) -> Ranges<'_> {
        let run = wanted.start.checked_div(self.run).unwrap_or(0);
        let mut rest = run;
        let mut indices = vec![0; self.outer.len()];
        let mut from = self.start;
        for (index, (count, step)) in indices.iter_mut().zip(&self.outer).rev() {
            *index = rest % count;
            from += *index * step;
            rest /= count;
        }
        let skipped = wanted.start - run * self.run;
        Ranges { runs: self, indices, from, skipped, left: wanted.end.min(self.len).saturating_sub(wanted.start) }
    }
}

/// Iterator over ranges of a tensor.
#[derive(Debug)]
pub(super) struct Ranges<'a> {
    runs: &'a ByteRuns,
    /// Number of the run along each of the outer dimensions.
    indices: Vec<u64>,
    /// Start of the run.
    from: u64,
    /// Bytes of the run that were not asked for, or have been.
    skipped: u64,
    /// Bytes that have been asked for.
    left: u64,
}

impl Iterator for Ranges<'_> {
    type Item = Range<u64>;

    fn next(&mut self) -> Option<Range<u64>> {
        if self.left == 0 {
            return None;
        }
        let start = self.from + self.skipped;
        let len = (self.runs.run - self.skipped).min(self.left);
        (self.left, self.skipped) = (self.left - len, 0);
        // As the hands of a clock: the innermost dimension goes on first.
        for (index, (count, step)) in self.indices.iter_mut().zip(&self.runs.outer).rev() {
            *index += 1;
            self.from += step;
            if *index < *count {
                break;
            }
            self.from -= *index * step;
            *index = 0;
        }
        Some(start..start + len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs() -> ByteRuns {
        ByteRuns { len: 24, start: 5, run: 4, outer: vec![(2, 100), (3, 10)] }
    }

    #[test]
    fn ranges_follow_the_outer_dimensions_and_begin_within_a_run() {
        let all: Vec<_> = runs().ranges(0..24).collect();
        assert_eq!(all, [5..9, 15..19, 25..29, 105..109, 115..119, 125..129]);
        assert_eq!(runs().ranges(6..17).collect::<Vec<_>>(), [17..19, 25..29, 105..109, 115..116]);
        assert_eq!(runs().ranges(24..24).count() + runs().ranges(23..99).count(), 1);
        let whole = ByteRuns { len: 7, start: 2, run: 7, outer: Vec::new() };
        assert!(whole.ranges(1..4).eq(std::iter::once(3..6)));
        let none = ByteRuns { len: 0, start: 0, run: 0, outer: Vec::new() };
        assert_eq!(none.ranges(0..0).count(), 0);
    }

    #[test]
    fn runs_of_a_peer_have_to_be_in_the_tensor() {
        runs().check(129).unwrap();
        ByteRuns { len: 0, start: 0, run: 0, outer: Vec::new() }.check(0).unwrap();
        runs().check(128).unwrap_err();
        ByteRuns { len: 4, start: 5, run: 4, outer: vec![(1, u64::MAX)] }.check(128).unwrap_err();
        let odd = |change: &dyn Fn(&mut ByteRuns)| {
            let mut runs = runs();
            change(&mut runs);
            runs.check(u64::MAX).unwrap_err();
        };
        odd(&|runs| runs.len = 25);
        odd(&|runs| runs.len = 0);
        odd(&|runs| runs.start = u64::MAX);
        odd(&|runs| runs.outer[0].0 = 0);
        odd(&|runs| runs.outer[0] = (u64::MAX, 2));
        odd(&|runs| runs.outer[0].1 = u64::MAX);
        odd(&|runs| runs.outer.extend([(1, 0); MAX_OUTER]));
        odd(&|runs| (runs.run, runs.outer[0]) = (0, (2, 1)));
        odd(&|runs| (runs.len, runs.run, runs.outer[0].0) = (0, 0, 0));
    }
}
