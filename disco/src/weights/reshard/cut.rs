//! [`Cut`]: how a tensor is divided among the workers of a session.

use std::fmt;
use std::ops::Range;

use rpc_core::{Result, RpcError};

use super::region::Region;
use crate::error::WorkerId;
use crate::wire::command::Scope;
use crate::wire::plan::Layout;

/// Division of a tensor among the workers of a session. Several workers may have the same elements.
///
/// ```
/// use disco::Cut;
///
/// let rows = Cut::shard(0);
/// let uneven = Cut::lengths(0, [3, 1]);
/// // Worker 0 has the upper left corner, worker 1 all rows of the last column, worker 2 nothing.
/// let boxes = Cut::boxes([vec![0..2, 0..2], vec![0..4, 3..4], vec![0..0]]);
/// assert_ne!(rows, uneven);
/// # let _ = boxes;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Cut {
    /// Every worker has all of it.
    Whole,
    /// Each worker has one of as many equal shards as there are workers in the scope, in the order
    /// of their ranks, as [`Part::Shard`](crate::Part::Shard) loads them.
    Shard {
        /// Dimension that is divided, from 0. Its length must be a multiple of the number of
        /// workers.
        dim: usize,
        /// Workers that share one tensor: all, or those of each group, so that each group has the
        /// whole tensor.
        scope: Scope,
    },
    /// Each worker has the next elements of a dimension.
    Lengths {
        /// Dimension that is divided.
        dim: usize,
        /// For each worker the number of elements, which may be 0.
        lengths: Vec<i64>,
    },
    /// Each worker has a box.
    Boxes(
        /// For each worker the ranges of the first dimensions, and all of the others.
        Vec<Vec<Range<i64>>>,
    ),
}

impl Cut {
    /// Returns the division into equal shards for all workers.
    pub fn shard(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::World }
    }

    /// Returns the division into equal shards for the workers of each group.
    pub fn shard_in_group(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::Group }
    }

    /// Returns the division of a dimension into these lengths, one for each worker.
    pub fn lengths(dim: usize, lengths: impl Into<Vec<i64>>) -> Self {
        Self::Lengths { dim, lengths: lengths.into() }
    }

    /// Returns the division into these boxes, one for each worker.
    pub fn boxes(boxes: impl Into<Vec<Vec<Range<i64>>>>) -> Self {
        Self::Boxes(boxes.into())
    }

    /// Returns the part of each worker of a session.
    ///
    /// # Errors
    ///
    /// The tensor cannot be cut like this, or not for so many workers.
    pub(super) fn regions(&self, layout: Layout, shape: &[i64]) -> Result<Vec<Region>> {
        let whole = Region::whole(shape);
        let workers = layout.world_size as usize;
        let length = |dim: usize| {
            let missing = || RpcError::invalid_argument(format!("there is no dimension {dim} in {shape:?}"));
            shape.get(dim).copied().ok_or_else(missing)
        };
        let along = |dim: usize, range: Range<i64>| {
            let mut region = whole.clone();
            region.0[dim] = range;
            region
        };
        let check_count = |count: usize| {
            if count == workers {
                return Ok(());
            }
            Err(RpcError::invalid_argument(format!("{count} parts for the {workers} workers of a session")))
        };
        match self {
            Self::Whole => Ok(vec![whole; workers]),
            Self::Shard { dim, scope } => {
                let (length, grouping) = (length(*dim)?, layout.grouping(*scope));
                let size = i64::from(grouping.size());
                if !grouping.divides(layout.world_size) || length % size != 0 {
                    return Err(RpcError::invalid_argument(format!(
                        "dimension {dim} of {shape:?} does not divide among {grouping} of {workers} workers: say how \
                         many elements each has (Cut::lengths)"
                    )));
                }
                let each = length / size;
                let rank = |worker| i64::from(grouping.rank(WorkerId(worker)).0);
                let region = |worker| along(*dim, rank(worker) * each..(rank(worker) + 1) * each);
                Ok((0..layout.world_size).map(region).collect())
            }
            Self::Lengths { dim, lengths } => {
                check_count(lengths.len())?;
                let length = length(*dim)?;
                let sum = lengths.iter().try_fold(0_i64, |sum, one| sum.checked_add(*one).filter(|_| *one >= 0));
                if sum != Some(length) {
                    let text = format!("the lengths {lengths:?} are not those of dimension {dim} of {shape:?}");
                    return Err(RpcError::invalid_argument(text));
                }
                let mut end = 0;
                let region = |one: &i64| {
                    end += one;
                    along(*dim, end - one..end)
                };
                Ok(lengths.iter().map(region).collect())
            }
            Self::Boxes(boxes) => {
                check_count(boxes.len())?;
                let region = |ranges: &Vec<Range<i64>>| {
                    let is_in = |(dim, range): (usize, &Range<i64>)| {
                        shape
                            .get(dim)
                            .is_some_and(|length| (0..=range.end).contains(&range.start) && range.end <= *length)
                    };
                    if !ranges.iter().enumerate().all(is_in) {
                        return Err(RpcError::invalid_argument(format!("{ranges:?} is no box of {shape:?}")));
                    }
                    let mut region = whole.clone();
                    region.0[..ranges.len()].clone_from_slice(ranges);
                    Ok(region)
                };
                boxes.iter().map(region).collect()
            }
        }
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole on every worker"),
            Self::Shard { dim, scope: Scope::World } => write!(f, "in equal shards of dimension {dim}"),
            Self::Shard { dim, .. } => write!(f, "in equal shards of dimension {dim}, for each group"),
            Self::Lengths { dim, lengths } => write!(f, "in lengths {lengths:?} of dimension {dim}"),
            Self::Boxes(boxes) => write!(f, "in {} boxes", boxes.len()),
        }
    }
}

#[cfg(test)]
mod tests {
    // Ranges of dimensions, and not what is in them.
    #![allow(clippy::single_range_in_vec_init)]

    use super::*;

    const LAYOUT: Layout = Layout { world_size: 4, num_groups: 2 };

    fn ranges(cut: &Cut, dim: usize) -> Vec<Range<i64>> {
        cut.regions(LAYOUT, &[8, 6]).unwrap().into_iter().map(|region| region.0[dim].clone()).collect()
    }

    #[test]
    fn each_worker_has_its_part() {
        assert_eq!(ranges(&Cut::Whole, 0), [0..8, 0..8, 0..8, 0..8]);
        assert_eq!(ranges(&Cut::shard(0), 0), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(ranges(&Cut::shard(0), 1), [0..6, 0..6, 0..6, 0..6]);
        assert_eq!(ranges(&Cut::shard_in_group(1), 1), [0..3, 3..6, 0..3, 3..6]);
        assert_eq!(ranges(&Cut::lengths(1, [1, 0, 3, 2]), 1), [0..1, 1..1, 1..4, 4..6]);
        let boxes = Cut::boxes([vec![1..2], vec![0..8, 5..6], vec![], vec![3..3]]);
        assert_eq!(ranges(&boxes, 0), [1..2, 0..8, 0..8, 3..3]);
        assert_eq!(ranges(&boxes, 1), [0..6, 5..6, 0..6, 0..6]);
    }

    #[test]
    fn a_cut_that_does_not_fit_is_refused() {
        for (cut, words) in [
            (Cut::shard(1), "does not divide among"),
            (Cut::shard(2), "there is no dimension 2"),
            (Cut::lengths(0, [8]), "1 parts for the 4 workers"),
            (Cut::lengths(0, [8, 1, -1, 0]), "the lengths"),
            (Cut::lengths(0, [2, 2, 2, 3]), "the lengths"),
            (Cut::lengths(0, [i64::MAX, i64::MAX, 0, 0]), "the lengths"),
            (Cut::boxes([vec![0..9], vec![], vec![], vec![]]), "is no box of"),
            (Cut::boxes([vec![-1..2], vec![], vec![], vec![]]), "is no box of"),
            (Cut::boxes([vec![Range { start: 3, end: 2 }], vec![], vec![], vec![]]), "is no box of"),
            (Cut::boxes([vec![0..1, 0..1, 0..1], vec![], vec![], vec![]]), "is no box of"),
            (Cut::boxes([vec![]]), "1 parts for"),
        ] {
            let error = cut.regions(LAYOUT, &[8, 6]).unwrap_err();
            assert!(error.message().contains(words), "{error}");
        }
    }
}
