//! Parts of tensors that the nodes of workers may have had before: the caches of the nodes, as a
//! loader uses them, and the digests of parts that the controller would send.

use std::collections::HashMap;

use parking_lot::Mutex;
use ring::digest::{Context as Hasher, SHA256};
use rpc_core::client::Digest;
use rpc_core::{Result, Value};

use super::Part;
use super::node_cache::finish;
use super::tensor_slice::{ReadAt, TensorSlice};
use crate::completion::Completion;
use crate::controller::dref::DRef;
use crate::controller::session::{Content, DiscoSession};
use crate::error::WorkerId;

/// Bytes from which a part is looked for by its digest. Smaller ones are sent, which costs about as
/// much as the question.
const SMALLEST: u64 = 64 << 10;

/// Part of a cache that a loader leaves free: a cache that is full removes up to as much at once,
/// the contents that were used longest ago, which would be the loader's own.
const FREE_PART: u64 = 8;

/// Files that a cache may hold: each takes this part of its limit at least.
const MAX_FILES: u64 = 65_536;

/// Bytes that are read and hashed at a time.
const PIECE: u64 = 4 << 20;

/// The caches of the nodes of a session, and what a loader has put there.
///
/// A loader looks for no more in a cache than fits: of a model that is larger, each part would have
/// been removed by the time when it is loaded again.
#[derive(Debug)]
pub(super) struct NodeCaches {
    /// For each worker, the bytes that the cache of its node may hold; 0 if there is none.
    limits: Vec<u64>,
    /// For each worker, the number of its machine. Nodes of one machine may share their cache.
    machines: Vec<usize>,
    /// For each machine, the bytes of the loader's parts.
    used: Mutex<Vec<u64>>,
}

impl NodeCaches {
    /// Caches with these limits, of the workers of this session.
    pub(super) fn new(session: &DiscoSession, limits: Vec<u64>) -> Self {
        let links = session.controller().links();
        let processes = links.iter().flat_map(|link| &link.info.processes);
        let names = processes.flat_map(|process| std::iter::repeat_n(process.machine.as_str(), process.count as usize));
        Self::of_machines(limits, names)
    }

    fn of_machines<'a>(limits: Vec<u64>, names: impl Iterator<Item = &'a str>) -> Self {
        let (mut known, mut count) = (HashMap::new(), 0);
        let mut next = || {
            count += 1;
            count - 1
        };
        // A machine that has no name is another one for each worker.
        let machines =
            names.map(|name| if name.is_empty() { next() } else { *known.entry(name).or_insert_with(&mut next) });
        let machines: Vec<_> = machines.collect();
        Self { limits, used: Mutex::new(vec![0; count]), machines }
    }

    /// Returns, for each worker, true if its part of a tensor, of `part_len` bytes, is to go
    /// through the cache of its node; nothing if that is so for none. `wanted` says which workers
    /// get theirs over the network.
    pub(super) fn admit(&self, part: &Part, part_len: u64, wanted: impl Fn(u32) -> bool) -> Vec<bool> {
        if part_len < SMALLEST {
            return Vec::new();
        }
        let mut used = self.used.lock();
        // The whole tensor is in a cache once, however many workers get it.
        let is_same = matches!(part, Part::Whole | Part::With { .. });
        let mut counted = vec![false; used.len()];
        let mut admit = |worker: usize| {
            let (Some(limit), Some(machine)) = (self.limits.get(worker), self.machines.get(worker)) else {
                return false;
            };
            let charge = part_len.max(limit / MAX_FILES);
            let added = if is_same && counted[*machine] { 0 } else { charge };
            if used[*machine].saturating_add(added) > limit - limit / FREE_PART {
                return false;
            }
            used[*machine] += added;
            counted[*machine] = true;
            true
        };
        let admitted: Vec<_> = (0..self.limits.len()).map(|at| wanted(at as u32) && admit(at)).collect();
        if admitted.contains(&true) { admitted } else { Vec::new() }
    }

    /// Returns, of the workers that have got parts which their nodes lacked, those that leave them
    /// in the caches: of a tensor that all get, one for each machine.
    pub(super) fn keepers(&self, part: &Part, mut new: Vec<bool>) -> Vec<bool> {
        if matches!(part, Part::Whole | Part::With { .. }) {
            let mut has_keeper = vec![false; self.used.lock().len()];
            for (is_new, machine) in new.iter_mut().zip(&self.machines) {
                *is_new &= !has_keeper[*machine];
                has_keeper[*machine] |= *is_new;
            }
        }
        new
    }
}

/// Asks all workers for the bytes that the caches of their nodes may hold.
pub(super) struct AskedLimits(Vec<Completion<Content>>);

impl AskedLimits {
    /// Issues the question.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub(super) fn issue(session: &DiscoSession) -> crate::error::Result<Self> {
        let limits = session.get_global_func("disco.weights.cache_limit")?.call(())?;
        Ok(Self(of_all(session, &limits)))
    }

    /// Returns the answers, by worker.
    ///
    /// # Errors
    ///
    /// As [`issue`](Self::issue).
    pub(super) fn wait(self) -> crate::error::Result<Vec<u64>> {
        let limit = |answer: Completion<Content>| match answer.wait()? {
            Content::Value(Value::Int(limit)) => Ok(u64::try_from(limit).unwrap_or(0)),
            _ => Ok(0),
        };
        self.0.into_iter().map(limit).collect()
    }
}

/// Fetches a register of all workers. All are asked before the first answer is waited for.
pub(super) fn of_all(session: &DiscoSession, register: &DRef) -> Vec<Completion<Content>> {
    (0..session.num_workers()).map(|worker| session.debug_get_from_remote(register, WorkerId(worker))).collect()
}

/// Returns the digest of a part, which is read from `source`.
///
/// # Errors
///
/// Those of `source`.
pub(super) fn digest_of_part(slice: &TensorSlice, source: &dyn ReadAt) -> Result<Digest> {
    let mut hasher = Hasher::new(&SHA256);
    // At most one piece, which fits memory.
    let mut piece = vec![0; PIECE.min(slice.size_bytes) as usize];
    for at in (0..slice.size_bytes).step_by(PIECE as usize) {
        let piece = &mut piece[..(slice.size_bytes - at).min(PIECE) as usize];
        slice.read(source, at, piece, &mut |_| ())?;
        hasher.update(piece);
    }
    Ok(finish(hasher))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: u64 = 8 << 20;

    fn caches(limits: &[u64], machines: &[&str]) -> NodeCaches {
        NodeCaches::of_machines(limits.to_vec(), machines.iter().copied())
    }

    #[test]
    fn a_loader_looks_for_no_more_in_a_cache_than_fits() {
        let caches = caches(&[LIMIT, LIMIT, 0, LIMIT], &["a", "a", "b", ""]);
        let admit = |part: &Part, len| caches.admit(part, len, |_| true);
        let (whole, shard) = (Part::Whole, Part::shard(0));
        assert_eq!(admit(&shard, SMALLEST - 1), [false; 0]);
        // Workers of one machine share a cache, in which the whole tensor is once.
        assert_eq!(admit(&shard, 2 << 20), [true, true, false, true]);
        assert_eq!(admit(&whole, 3 << 20), [true, true, false, true]);
        // 7 MiB of the cache of `a` are taken, and the rest stays free.
        assert_eq!(admit(&shard, 1 << 20), [false, false, false, true]);
        assert_eq!(admit(&whole, 2 << 20), [false; 0]);
        assert_eq!(caches.admit(&shard, 1 << 20, |worker| worker < 3), [false; 0]);
        // A part that was not admitted takes no room.
        assert_eq!(admit(&shard, 1 << 20), [false, false, false, true]);
    }

    #[test]
    fn one_worker_of_a_machine_keeps_a_whole_tensor() {
        let caches = caches(&[LIMIT; 4], &["a", "a", "b", "a"]);
        let keepers = |part: &Part, new: [bool; 4]| caches.keepers(part, new.to_vec());
        assert_eq!(keepers(&Part::Whole, [false, true, true, true]), [false, true, true, false]);
        assert_eq!(keepers(&Part::Whole, [true; 4]), [true, false, true, false]);
        assert_eq!(keepers(&Part::shard(0), [false, true, true, true]), [false, true, true, true]);
    }

    #[test]
    fn many_small_parts_fill_a_large_cache_as_its_files_do() {
        let limit = 64 << 30;
        let caches = caches(&[limit], &["a"]);
        let admitted = (0..MAX_FILES).take_while(|_| !caches.admit(&Part::Whole, SMALLEST, |_| true).is_empty());
        assert_eq!(admitted.count() as u64, MAX_FILES - MAX_FILES / FREE_PART);
    }
}
