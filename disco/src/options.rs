//! Settings of a session.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use tracing::Level;

/// How the workers of one node run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Hosting {
    /// As threads of the node's process. One that crashes takes the others with it, and they share one memory.
    #[default]
    Threads,
    /// Each in a process of its own, which is the node's program started again: it has to call [`serve_if_worker`](crate::serve_if_worker).
    /// `rpc-server` does.
    Processes,
}

/// Settings of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How many bytes of commands the workers may be behind before whoever issues more has to wait; a small command counts 128. Default: 16 MiB.
    pub window: u64,
    /// How nodes run their workers. Default: as threads.
    pub hosting: Hosting,
    /// Whether each worker's thread stays on one processor: among those that its process may use, in turn by the number of the worker. On
    /// Linux. Default: no.
    pub pin_workers: bool,
    /// What workers in other processes log (by `tracing`, on their own threads) up to this level is logged here, with the number of the worker in front: by
    /// this program's subscriber under the target `disco::worker`, or on standard error if it has none. The programs of nodes need a
    /// [`WorkerLogLayer`](crate::WorkerLogLayer) for that; `rpc-server` has one. Default: up to `INFO`.
    pub worker_logs: Option<Level>,
    /// The address of each node at which its workers listen for the data of others, in the order of nodes. Needed where they are not all on one
    /// machine; without this, workers of one machine share memory. Default: none.
    pub data_addresses: Vec<IpAddr>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            window: 16 << 20,
            hosting: Hosting::default(),
            pin_workers: false,
            worker_logs: Some(Level::INFO),
            data_addresses: Vec::new(),
        }
    }
}
