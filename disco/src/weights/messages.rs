//! Messages of loaders: the arguments of the functions `disco.weights.*`, as the controller sends
//! them to the workers.
//!
//! They belong to the family [`MESSAGES`](crate::wire::set_up::MESSAGES).

use std::ops::Range;

use rpc_core::client::Digest;
use rpc_core::{DataType, Result, RpcError, VirtualDevice};
use serde::{Deserialize, Serialize};

use super::Part;
use super::tensor_slice::TensorSlice;
use crate::error::WorkerId;
use crate::wire::command::Scope;
use crate::wire::grouping::Grouping;
use crate::worker::context::WorkerContext;

/// Request to open a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RequestedFile {
    pub(super) path: String,
    /// Identity that the file must have.
    pub(super) identity: FileIdentity,
}

/// Identity by which files on several machines are taken for the same: the length, and the SHA-256
/// of the header with its length prefix. The content of the tensors is not part of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    pub(super) len: u64,
    /// Length of the header in bytes, without the prefix that contains this number.
    pub(super) header_len: u64,
    pub(super) header: [u8; 32],
}

/// Request to load a tensor: the same for all workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoadRequest {
    /// Number of the file that contains the tensor.
    pub(super) file: u32,
    pub(super) name: String,
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
    /// Start in the file, in bytes.
    pub(super) start: u64,
    pub(super) part: Part,
    /// Constraint on the device; `None` is each worker's default device.
    pub(super) device: Option<VirtualDevice>,
    /// For each worker, the worker that reads for it.
    pub(super) readers: Vec<u32>,
    /// For each worker, true if its part goes through the cache of its node: the digest of the part
    /// is compared before its bytes are sent, and a part that has come is kept there. Empty if that
    /// is so for none.
    pub(super) cached: Vec<bool>,
    /// Number of the loader that progress is reported to; 0 for none.
    pub(super) loader: u64,
}

impl LoadRequest {
    /// Returns the bytes of the tensor that `worker` gets.
    pub(super) fn slice(&self, worker: WorkerId, world_size: u32, num_groups: u32) -> Result<TensorSlice> {
        let ranges = match &self.part {
            Part::Whole | Part::With { .. } => Vec::new(),
            Part::Shard { dim, scope } => {
                let grouping = match scope {
                    Scope::World => Grouping::of_blocks(world_size),
                    Scope::Group => Grouping::of_blocks(world_size / num_groups.max(1)),
                    Scope::Groups(grouping) => *grouping,
                };
                if !grouping.divides(world_size) {
                    let text = format!("{world_size} workers do not divide into {grouping}");
                    return Err(RpcError::invalid_argument(text));
                }
                shard(&self.shape, *dim, grouping.rank(worker).0, grouping.size())?
            }
        };
        TensorSlice::new(self.dtype, &self.shape, &ranges)
    }

    /// Returns true if the part of `worker` goes through the cache of its node.
    pub(super) fn is_cached(&self, worker: WorkerId) -> bool {
        self.cached.get(worker.index()).copied().unwrap_or(false)
    }

    /// Adds the name of the tensor to an error.
    pub(super) fn with_tensor_name(&self, error: RpcError) -> RpcError {
        error.context(format_args!("tensor '{}'", self.name))
    }

    /// Returns the bytes that the worker `of` gets, in the session of `worker`.
    pub(super) fn slice_for(&self, worker: &WorkerContext, of: WorkerId) -> Result<TensorSlice> {
        self.slice(of, worker.world_size(), worker.num_groups())
    }
}

/// Request to look for the parts of a tensor in the caches of the nodes: the same for all workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FindRequest {
    pub(super) load: LoadRequest,
    /// SHA-256 of each part that differs: one if all workers get the whole tensor, and otherwise
    /// one for each rank of a group.
    pub(super) digests: Vec<Digest>,
}

impl FindRequest {
    /// Returns the digest of the part of `worker`, if that goes through the cache of its node.
    pub(super) fn digest_for(&self, worker: &WorkerContext) -> Option<&Digest> {
        let rank = match &self.load.part {
            Part::Whole | Part::With { .. } => 0,
            Part::Shard { scope, .. } => worker.rank_in(*scope).index(),
        };
        self.digests.get(rank).filter(|_| self.load.is_cached(worker.worker_id()))
    }
}

/// Returns the ranges of shard `rank` of `size` equal shards.
fn shard(shape: &[i64], dim: usize, rank: u32, size: u32) -> Result<Vec<Range<i64>>> {
    let Some(length) = shape.get(dim) else {
        return Err(RpcError::invalid_argument(format!("there is no dimension {dim} in {shape:?}")));
    };
    let size = i64::from(size.max(1));
    if length % size != 0 {
        return Err(RpcError::invalid_argument(format!(
            "dimension {dim} of {shape:?} does not divide among {size} workers: load the tensor whole, by another \
             dimension, or with a function that divides it (Part::With)"
        )));
    }
    let each = length / size;
    let mut ranges: Vec<_> = shape[..dim].iter().map(|length| 0..*length).collect();
    ranges.push(i64::from(rank) * each..(i64::from(rank) + 1) * each);
    Ok(ranges)
}

/// Adds the messages of loaders to `all`.
#[cfg(test)]
pub(crate) fn golden_requests(all: &mut crate::wire::golden::Samples) {
    let identity = FileIdentity { len: 1 << 33, header_len: 80, header: [5; 32] };
    all.packed("FileIdentity", &identity);
    all.packed("RequestedFile", &RequestedFile { path: "/m/model.safetensors".to_owned(), identity });
    let shard = Part::Shard { dim: 1, scope: Scope::World };
    all.packed("Part Whole", &Part::Whole);
    all.packed("Part Shard", &shard);
    all.packed("Part With", &Part::With { function: "f".to_owned() });
    all.packed("Scope Group", &Scope::Group);
    all.packed("Scope World", &Scope::World);
    all.packed("Scope Groups", &Scope::Groups(Grouping::new(2, 3).unwrap()));
    let request = LoadRequest {
        file: 1,
        name: "t".to_owned(),
        dtype: DataType::BF16,
        shape: vec![4, 2],
        start: 88,
        part: shard,
        device: None,
        readers: vec![0, 0],
        cached: vec![false, true],
        loader: 3,
    };
    all.packed("LoadRequest", &request);
    let digests = vec![Digest::from_bytes([7; Digest::LEN])];
    all.packed("FindRequest", &FindRequest { load: request, digests });
    super::reshard::golden_requests(all);
}
