//! Weights: tensors of safetensors files, loaded straight to the workers, each of which reads its
//! own part.
//!
//! `format` has the files' header, `files` the files of a model, `tensor_part` the parts of a
//! tensor, `in_parallel` reading while something else is done, `messages` the requests of the
//! controller, `reader` and `worker` the part of the workers, `loader` and `load_progress` that of
//! the controller.

mod files;
pub(crate) mod folders;
mod format;
mod in_parallel;
pub(crate) mod load_progress;
mod loader;
mod messages;
mod reader;
mod tensor_part;
mod worker;

use serde::{Deserialize, Serialize};

use crate::wire::command::Scope;

pub use format::TensorInfo;
pub use loader::{ShardLoader, Unreadable};
#[cfg(test)]
pub(crate) use messages::golden_requests;
pub use reader::WeightReader;
pub(crate) use worker::register;

/// Part of a tensor that each worker gets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Part {
    /// All of it.
    Whole,
    /// One of as many equal parts as there are workers in the scope, in the order of their ranks.
    Shard {
        /// The dimension that is divided, from 0. It has to divide evenly.
        dim: usize,
        /// Workers that share the tensor: all, or those of each group, so that every group has the
        /// whole tensor.
        scope: Scope,
    },
    /// Value that a function on the workers makes of the tensor. The function takes a
    /// [`Shared<WeightReader>`](WeightReader), and nothing else but what a call itself gives, such
    /// as a [`WorkerContext`](crate::WorkerContext), which names the worker that gets the part. Its
    /// result is the worker's value, usually a tensor.
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
        /// The name under which the function is registered.
        function: String,
    },
}

impl Part {
    /// Returns a part for each worker of all groups together.
    pub fn shard(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::World }
    }

    /// Returns a part for each worker of a group.
    pub fn shard_in_group(dim: usize) -> Self {
        Self::Shard { dim, scope: Scope::Group }
    }

    /// Returns the part that this function makes.
    pub fn with(function: impl Into<String>) -> Self {
        Self::With { function: function.into() }
    }
}
