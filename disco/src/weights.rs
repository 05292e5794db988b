//! Weights: tensors of safetensors files, loaded directly by the workers, each of which reads its
//! own part.
//!
//! The controller: `loader` and `load_progress`. The workers: `worker` and `reader`. Requests from
//! one to the other: `messages`. Parts that nodes have had before: `cached_parts` (the controller)
//! and `node_cache` (the workers). Files: `format` (the header of one file), `files` (the files of
//! a model), `folders` (the ones that workers may read), `tensor_slice` (the bytes of a part),
//! `in_parallel` (reading during a copy). From one session to another: `reshard`.

mod cached_parts;
mod files;
pub(crate) mod folders;
mod format;
mod in_parallel;
pub(crate) mod load_progress;
mod loader;
mod messages;
mod node_cache;
mod reader;
mod reshard;
mod tensor_slice;
mod worker;

use rpc_core::Registry;
use serde::{Deserialize, Serialize};

use crate::wire::command::Scope;

pub use format::TensorInfo;
pub use loader::{ShardLoader, Unreadable};
#[cfg(test)]
pub(crate) use messages::golden_requests;
pub use reader::WeightReader;
pub use reshard::{Cut, DataRoute, Reshard, Resharded};

/// Adds the functions of workers that loaders and reshards call to `registry`.
pub(crate) fn register(registry: &Registry) {
    worker::register(registry);
    reshard::register(registry);
}

/// Part of a tensor that each worker gets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Part {
    /// All of it.
    Whole,
    /// One of as many equal shards as there are workers in the scope, in the order of their ranks.
    Shard {
        /// Dimension that is divided, from 0. Its length must be a multiple of the number of
        /// workers.
        dim: usize,
        /// Workers that share one tensor: all, or those of each group, so that each group has the
        /// whole tensor.
        scope: Scope,
    },
    /// Result of a function that runs on each worker. The function takes a
    /// [`Shared<WeightReader>`](WeightReader), from which it reads the tensor, and no other
    /// argument except what each call provides, such as a [`WorkerContext`](crate::WorkerContext),
    /// which names the worker. Its result, usually a tensor, is the worker's value.
    ///
    /// ```
    /// use disco::{WeightReader, WorkerContext};
    /// use rpc_core::{Registry, Result, Shared, Tensor};
    ///
    /// // Shares rows out that need not divide.
    /// let registry = Registry::new();
    /// let read_rows = |worker: WorkerContext, weight: Shared<WeightReader>| -> Result<Tensor> {
    ///     let (id, n) = (i64::from(worker.worker_id().0), i64::from(worker.world_size()));
    ///     let rows = weight.0.shape()[0];
    ///     weight.0.read_range(0, rows * id / n..rows * (id + 1) / n)
    /// };
    /// registry.add("rows", read_rows);
    /// ```
    With {
        /// Name of the registered function.
        function: String,
    },
}

impl Part {
    /// Returns a shard for each worker of the session.
    pub fn shard(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::World }
    }

    /// Returns a shard for each worker of a group.
    pub fn shard_in_group(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::Group }
    }

    /// Returns the part that the function of this name makes.
    pub fn with(function: impl Into<String>) -> Self {
        Self::With { function: function.into() }
    }
}
