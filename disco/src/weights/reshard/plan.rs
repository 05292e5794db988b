//! The plan of a reshard: which worker of one session sends which bytes of a tensor to which worker
//! of the other one. Nothing is read or written here.
//!
//! The tensor is seen as the elements of its whole. A worker's part of it is a [`Region`]. What a
//! destination needs is taken from the sources that have it, in as few boxes as there can be, and
//! each box is a [`Move`]: runs of bytes in the memory of both. Sources that have the same elements
//! share the load.
//!
//! Moves are in an order in which workers can do theirs one after the other, each waiting for its
//! peer: of all that are left, the first one has both its workers. Those of a round have different
//! workers on both sides, so that all of a round are under way at once.

use std::collections::{HashMap, HashSet};

use rpc_core::{DataType, ErrorKind, Result, RpcError};

use super::byte_runs::ByteRuns;
use super::region::Region;
use crate::weights::tensor_slice::TensorSlice;

/// Most moves of a plan. More are cuts that no one needs, and would take long to make.
const MAX_MOVES: usize = 1 << 18;

/// Bytes of a move below which it is not divided among sources that have the same elements.
const SPLIT_FROM: u64 = 256 << 10;

/// A tensor, as the workers of two sessions have it.
#[derive(Clone, Debug)]
pub(super) struct CutTensor {
    pub(super) name: String,
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
    /// Part of each worker of the session that has the tensor.
    pub(super) from: Vec<Region>,
    /// Part of each worker of the session that gets it.
    pub(super) to: Vec<Region>,
}

/// Bytes that one worker sends to another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Move {
    /// Number of the tensor.
    pub(super) tensor: usize,
    /// Number of the worker in the session that has the tensor.
    pub(super) source: u32,
    /// Number of the worker in the session that gets it.
    pub(super) destination: u32,
    /// The bytes in the source's part.
    pub(super) from: ByteRuns,
    /// The same bytes in the destination's part.
    pub(super) to: ByteRuns,
}

/// Plans the moves by which all destinations get their parts. `is_near` says if a source and a
/// destination are on one machine: sources that are go before others.
///
/// # Errors
///
/// Elements that no source has; parts that begin or end within a byte; too many moves.
pub(super) fn plan(tensors: &[CutTensor], is_near: &dyn Fn(u32, u32) -> bool) -> Result<Vec<Move>> {
    let mut loads = HashMap::new();
    let mut moves = Vec::new();
    for (number, tensor) in tensors.iter().enumerate() {
        let mut planner = Planner { number, tensor, loads: &mut loads, moves: &mut moves, is_near };
        planner.plan().map_err(|error| error.context(format_args!("tensor '{}'", tensor.name)))?;
    }
    let workers = |side: fn(&CutTensor) -> usize| tensors.iter().map(side).max().unwrap_or(0);
    let period = workers(|tensor| tensor.from.len()).max(workers(|tensor| tensor.to.len())).max(1) as u32;
    let round = |one: &Move| (one.destination + period - one.source % period) % period;
    moves.sort_by_key(|one| (round(one), one.source, one.destination, one.tensor, one.to.start));
    Ok(moves)
}

/// The planner of one tensor.
struct Planner<'a> {
    number: usize,
    tensor: &'a CutTensor,
    /// Bytes that each source sends by the plan so far.
    loads: &'a mut HashMap<u32, u64>,
    moves: &'a mut Vec<Move>,
    is_near: &'a dyn Fn(u32, u32) -> bool,
}

impl Planner<'_> {
    fn plan(&mut self) -> Result<()> {
        let tensor = self.tensor;
        let held = held(tensor);
        for (destination, wanted) in (0..).zip(&tensor.to).filter(|(_, wanted)| !wanted.is_empty()) {
            let mut left = vec![wanted.clone()];
            for held in &held {
                if left.iter().any(|one| one.meets(held.region)) {
                    for one in std::mem::take(&mut left) {
                        match one.intersection(held.region) {
                            Some(found) => {
                                left.extend(one.without(&found));
                                self.take(found, destination, held)?;
                            }
                            None => left.push(one),
                        }
                    }
                }
                if left.is_empty() {
                    break;
                }
            }
            if let Some(missing) = left.first() {
                let text = format!(
                    "no worker has the elements {:?} of it, which worker {destination} of the other session is to get",
                    missing.0
                );
                return Err(RpcError::invalid_argument(text));
            }
        }
        Ok(())
    }

    /// Plans how a destination gets elements of a region that sources have.
    fn take(&mut self, region: Region, destination: u32, held: &Held<'_>) -> Result<()> {
        let is_near = |source: &u32| (self.is_near)(*source, destination);
        let near: Vec<u32> = held.sources.iter().copied().filter(is_near).collect();
        let sources = if near.is_empty() { &held.sources } else { &near };
        let bytes = self.runs(&region, &self.tensor.to[destination as usize])?.len;
        let count = if bytes < SPLIT_FROM { 1 } else { sources.len().div_ceil(held.takers.max(1)) };
        // Elements of less than a byte are not to be divided within one.
        let is_whole = |part: &Region| {
            let mut holders = sources.iter().map(|source| &self.tensor.from[*source as usize]);
            self.runs(part, &self.tensor.to[destination as usize]).is_ok()
                && holders.all(|one| self.runs(part, one).is_ok())
        };
        let parts = region.clone().split(count);
        let parts = if parts.iter().all(is_whole) { parts } else { vec![region] };
        for part in parts {
            if self.moves.len() == MAX_MOVES {
                return Err(RpcError::limit("moves of a reshard", MAX_MOVES as u64, MAX_MOVES as u64 + 1));
            }
            // Of sources with the same load, each destination begins with another one.
            let turn = |at: usize| (at + sources.len() - destination as usize % sources.len()) % sources.len();
            let load = |source: &u32| self.loads.get(source).copied().unwrap_or(0);
            let least = sources.iter().enumerate().min_by_key(|(at, source)| (load(source), turn(*at)));
            let Some((_, &source)) = least else {
                return Err(RpcError::new(ErrorKind::Internal, "a region that no source has"));
            };
            let from = self.runs(&part, &self.tensor.from[source as usize])?;
            let to = self.runs(&part, &self.tensor.to[destination as usize])?;
            *self.loads.entry(source).or_default() += to.len;
            self.moves.push(Move { tensor: self.number, source, destination, from, to });
        }
        Ok(())
    }

    /// Returns the runs of a region in the memory of a part.
    fn runs(&self, region: &Region, part: &Region) -> Result<ByteRuns> {
        Ok(TensorSlice::new(self.tensor.dtype, &part.shape(), &region.within(part))?.runs())
    }
}

/// A region that sources have.
struct Held<'a> {
    region: &'a Region,
    /// The sources that have all of it.
    sources: Vec<u32>,
    /// Number of destinations that take from it.
    takers: usize,
}

/// Returns the regions that sources have, the smallest first: of a part and the whole tensor, both
/// sources then have the elements of a box.
fn held(tensor: &CutTensor) -> Vec<Held<'_>> {
    let CutTensor { from, to, .. } = tensor;
    let mut known = HashSet::new();
    let regions = from.iter().filter(|region| !region.is_empty() && known.insert(*region));
    let held = regions.map(|region| Held {
        region,
        sources: (0..).zip(from).filter(|(_, part)| part.contains(region)).map(|(source, _)| source).collect(),
        takers: to.iter().filter(|wanted| region.meets(wanted)).count(),
    });
    let mut held: Vec<_> = held.collect();
    held.sort_by_key(|held| held.region.volume());
    held
}

#[cfg(test)]
mod tests;
