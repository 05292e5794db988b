//! Groupings: divisions of the workers of a session into groups of equal size.

use std::fmt;
use std::ops::Range;

use rpc_core::RpcError;
use serde::{Deserialize, Serialize};

use crate::ccl::Rank;
use crate::error::WorkerId;

/// Division of a session's workers into groups of equal size, whose members are numbers in equal
/// steps: with a size of 2 and a stride of 3, workers 0 and 3, 1 and 4, 2 and 5, and so on. The
/// workers along an axis of a [`Mesh`](crate::Mesh) are such groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "Fields")]
pub struct Grouping {
    size: u32,
    stride: u32,
}

/// The fields of a grouping as they come from a peer.
#[derive(Deserialize)]
struct Fields {
    size: u32,
    stride: u32,
}

impl Grouping {
    /// Creates a grouping. A group of one worker has no steps: its stride is 1.
    ///
    /// # Errors
    ///
    /// A size or stride of 0, or a product of both of 2^32 or more.
    pub(crate) fn new(size: u32, stride: u32) -> Result<Self, RpcError> {
        if size == 0 || stride == 0 || size.checked_mul(stride).is_none() {
            return Err(RpcError::invalid_argument(format!("no groups of {size} workers, {stride} apart")));
        }
        Ok(Self { size, stride: if size == 1 { 1 } else { stride } })
    }

    /// Returns the grouping whose groups are `size` workers with consecutive numbers, at least one.
    pub(crate) fn of_blocks(size: u32) -> Self {
        Self { size: size.max(1), stride: 1 }
    }

    /// Returns the number of workers in each group.
    #[must_use]
    pub fn size(self) -> u32 {
        self.size
    }

    /// Returns the difference between the numbers of a group's neighbours.
    #[must_use]
    pub fn stride(self) -> u32 {
        self.stride
    }

    /// Returns true if so many workers can be divided like this.
    pub(crate) fn divides(self, world_size: u32) -> bool {
        world_size.is_multiple_of(self.block())
    }

    /// Returns the number of groups of so many workers.
    pub(crate) fn count(self, world_size: u32) -> u32 {
        world_size / self.size
    }

    /// Returns the rank of a worker in its group.
    #[must_use]
    pub fn rank(self, worker: WorkerId) -> Rank {
        Rank(worker.0 / self.stride % self.size)
    }

    /// Returns the number of a worker's group.
    #[must_use]
    pub fn group(self, worker: WorkerId) -> u32 {
        worker.0 / self.block() * self.stride + worker.0 % self.stride
    }

    /// Returns the first worker in the group of a worker.
    pub(crate) fn first(self, worker: WorkerId) -> WorkerId {
        WorkerId(worker.0 - self.rank(worker).0 * self.stride)
    }

    /// Returns the worker that has this rank in the group of a worker.
    pub(crate) fn member(self, of: WorkerId, rank: Rank) -> WorkerId {
        // Saturating: the worker of another session's grouping is only named in an error.
        WorkerId(self.first(of).0.saturating_add(rank.0.saturating_mul(self.stride)))
    }

    /// Returns the workers in the group of a worker, in the order of ranks.
    pub fn members(self, of: WorkerId) -> impl Iterator<Item = WorkerId> {
        (0..self.size).map(move |rank| self.member(of, Rank(rank)))
    }

    /// Returns true if any of these workers is the first of its group.
    pub(crate) fn has_first(self, workers: Range<u32>) -> bool {
        let is_first = workers.start % self.block() < self.stride;
        let next = workers.start.checked_next_multiple_of(self.block());
        !workers.is_empty() && (is_first || next.is_some_and(|next| next < workers.end))
    }

    /// Returns the number of workers after which the pattern of groups repeats.
    fn block(self) -> u32 {
        self.size * self.stride
    }
}

impl TryFrom<Fields> for Grouping {
    type Error = RpcError;

    fn try_from(Fields { size, stride }: Fields) -> Result<Self, RpcError> {
        Self::new(size, stride)
    }
}

impl fmt::Display for Grouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, stride } = self;
        match (size, stride) {
            (1, _) => f.write_str("groups of one worker"),
            (_, 1) => write!(f, "groups of {size} workers"),
            _ => write!(f, "groups of {size} workers, {stride} apart"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks the arithmetic of each grouping of each number of workers against a division that is
    /// written down worker by worker.
    #[test]
    fn every_worker_has_its_rank_and_its_group() {
        for world in 1..=24_u32 {
            for (size, stride) in (1..=world).flat_map(|size| (1..=world).map(move |stride| (size, stride))) {
                let grouping = Grouping::new(size, stride).unwrap();
                if !grouping.divides(world) {
                    continue;
                }
                let mut groups: Vec<Vec<u32>> = Vec::new();
                for worker in 0..world {
                    // A worker that no group has begins one.
                    if groups.iter().all(|group| !group.contains(&worker)) {
                        groups.push((0..size).map(|rank| worker + rank * grouping.stride()).collect());
                    }
                }
                assert_eq!(grouping.count(world) as usize, groups.len());
                for (number, group) in groups.iter().enumerate() {
                    for (rank, worker) in group.iter().enumerate() {
                        let worker = WorkerId(*worker);
                        assert_eq!(grouping.rank(worker), Rank::of(rank), "{grouping}: {worker}");
                        assert_eq!(grouping.group(worker) as usize, number, "{grouping}: {worker}");
                        assert_eq!(grouping.first(worker).0, group[0], "{grouping}: {worker}");
                        assert_eq!(grouping.members(worker).map(|one| one.0).collect::<Vec<_>>(), *group);
                    }
                }
                for (start, end) in (0..=world).flat_map(|start| (0..=world).map(move |end| (start, end))) {
                    let expected = (start..end).any(|worker| groups.iter().any(|group| group[0] == worker));
                    assert_eq!(grouping.has_first(start..end), expected, "{grouping}: {start}..{end}");
                }
            }
        }
    }

    #[test]
    fn groups_that_cannot_be_are_refused() {
        for (size, stride) in [(0, 1), (1, 0), (1 << 16, 1 << 16), (u32::MAX, 2)] {
            Grouping::new(size, stride).unwrap_err();
            let packed = rpc_core::Packed::encode(&serde_json::json!({"size": size, "stride": stride})).unwrap();
            packed.decode::<Grouping>().unwrap_err();
        }
        assert!(!Grouping::of_blocks(4).divides(6));
        assert!(!Grouping::of_blocks(7).has_first(u32::MAX - 2..u32::MAX));
    }
}
