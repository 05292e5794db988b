//! Choice of the algorithm of a collective, and the table of the bytes that move from one rank's
//! input to another's output.

use std::ops::Range;

use super::segment::INLINE;
use crate::ccl::{Collective, Operation};

/// Output size in bytes from which a rank writes around its caches: they would not hold the result
/// anyway.
const BYPASS: usize = 4 << 20;

/// Algorithm of a collective in shared memory. It follows from the launch kind, the call, and the
/// aliasing of buffers alone, which every rank knows of every other. All algorithms fold in the
/// order of ranks, so that not even the bits of the result depend on the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Algorithm {
    /// Inputs travel with the announcements, and every rank does the whole work for itself: one
    /// step.
    Small,
    /// Ranks of one address space read each other's inputs and write each other's outputs: data
    /// moves once.
    Direct,
    /// Ranks read from each other's inputs and, for an allreduce, from each other's outputs.
    Read,
    /// Data goes in chunks through the segment, several under way at a time.
    Staged,
}

/// Access of the ranks of a group to each other's buffers: the same for all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reach {
    /// Ranks use the buffers' addresses, as threads of one process.
    Addresses,
    /// Ranks read from each other's processes data of at least so many bytes.
    Reads(usize),
    /// Ranks cannot reach the others' buffers: all data for others goes into the segment.
    Segment,
}

impl Algorithm {
    /// Chooses the algorithm for `collective`, of `bytes`, among `size` ranks.
    pub(super) fn of(collective: &Collective, bytes: usize, size: usize, reach: Reach, any_in_place: bool) -> Self {
        if reach.travels_inline(collective.operation, bytes, size) {
            return Self::Small;
        }
        // Two ranks that exchange in place would each overwrite what the other has yet to read.
        let exchanges_in_place = collective.operation == Operation::AllToAll && any_in_place;
        match reach {
            Reach::Addresses if !exchanges_in_place => Self::Direct,
            Reach::Reads(from) if !exchanges_in_place && bytes >= from => Self::Read,
            _ => Self::Staged,
        }
    }
}

/// Number of ranks from which each rank does not read the inputs of all to reduce them for itself.
const CROWD: usize = 32;

impl Reach {
    /// Returns true if the inputs of such a collective travel with the announcements, in a group
    /// that shares memory.
    pub(super) fn travels_inline(self, operation: Operation, bytes: usize, size: usize) -> bool {
        let is_crowd = size > CROWD && matches!(operation, Operation::Allreduce(_));
        let is_short = match self {
            _ if !is_crowd => true,
            // One rank, or a few, reduce it for all.
            Self::Addresses => false,
            Self::Reads(_) | Self::Segment => bytes.saturating_mul(size) <= CROWD * INLINE,
        };
        is_short && travels_inline(operation, bytes, size)
    }
}

/// Returns true if the inputs of such a collective travel with the announcements.
pub(super) fn travels_inline(operation: Operation, bytes: usize, size: usize) -> bool {
    input_bytes(operation, bytes, size) <= INLINE
}

/// Returns the size of the input of a rank that has one.
pub(super) fn input_bytes(operation: Operation, bytes: usize, size: usize) -> usize {
    match operation {
        Operation::ReduceScatter(_) | Operation::Scatter { .. } | Operation::AllToAll => bytes.saturating_mul(size),
        Operation::Barrier => 0,
        _ => bytes,
    }
}

/// Returns true if `rank` has an input that others need.
pub(super) fn has_input(operation: Operation, rank: usize) -> bool {
    match operation {
        Operation::Broadcast { root } | Operation::Scatter { root } => root.index() == rank,
        Operation::Barrier => false,
        _ => true,
    }
}

/// Returns true if results so large bypass the caches.
pub(super) fn bypasses(bytes: usize) -> bool {
    bytes >= BYPASS
}

/// Returns the start of the `bytes` that `from` has for `to`, in the input of the one and, unless
/// they are reduced, in the output of the other; `None` if it has none for it.
pub(super) fn route(operation: Operation, bytes: usize, from: usize, to: usize) -> Option<(usize, usize)> {
    match operation {
        Operation::Allgather => Some((0, from * bytes)),
        Operation::Broadcast { root } => (root.index() == from).then_some((0, 0)),
        Operation::Scatter { root } => (root.index() == from).then_some((to * bytes, 0)),
        Operation::Gather { root } => (root.index() == to).then_some((0, from * bytes)),
        Operation::AllToAll => Some((to * bytes, from * bytes)),
        Operation::ReduceScatter(_) => Some((to * bytes, 0)),
        Operation::Allreduce(_) | Operation::Barrier | Operation::Send { .. } | Operation::Recv { .. } => None,
    }
}

/// Returns true if a rank has other bytes for each rank, rather than the same ones for all that get
/// any.
pub(super) fn is_personal(operation: Operation) -> bool {
    matches!(operation, Operation::Scatter { .. } | Operation::AllToAll | Operation::ReduceScatter(_))
}

/// Returns the part of an allreduce of `bytes` that `rank` reduces for all: whole cache lines, and
/// about as many for each.
pub(super) fn share(bytes: usize, rank: usize, size: usize) -> Range<usize> {
    let per_rank = bytes.div_ceil(size).next_multiple_of(64);
    let at = |rank: usize| rank.saturating_mul(per_rank).min(bytes);
    at(rank)..at(rank + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_in_whole_lines() {
        for bytes in [0, 8, 64, 100 * 8, 4096, 1 << 20, (1 << 20) + 8] {
            for size in 1..9 {
                let mut at = 0;
                for rank in 0..size {
                    let share = share(bytes, rank, size);
                    assert_eq!(share.start, at);
                    assert!(share.end == bytes || share.end.is_multiple_of(64));
                    at = share.end;
                }
                assert_eq!(at, bytes);
            }
        }
    }
}
