//! Plan of the data plane: the shape of a session, and how its workers join each other for collectives.

use std::ops::Range;

use rpc_core::Device;
use serde::{Deserialize, Serialize};

use crate::ccl::Rank;
use crate::ccl::host::{self, Address, SessionKey};
use crate::ccl::membership::Limits;
use crate::ccl::nccl::Flavour;
use crate::error::WorkerId;
use crate::wire::command::On;

/// The shape of a session: how many workers, in how many groups of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) world_size: u32,
    pub(crate) num_groups: u32,
}

impl Layout {
    pub(crate) fn group_size(self) -> u32 {
        self.world_size / self.num_groups
    }

    pub(crate) fn group(self, worker: WorkerId) -> u32 {
        worker.0 / self.group_size()
    }

    pub(crate) fn rank_in_group(self, worker: WorkerId) -> Rank {
        Rank(worker.0 % self.group_size())
    }

    /// Whether a command that is `on` some workers is for any of these.
    pub(crate) fn concerns(self, on: On, mut workers: Range<u32>) -> bool {
        match on {
            On::All => true,
            On::Worker0 => workers.contains(&0),
            On::FirstOfGroups => workers.any(|worker| worker % self.group_size() == 0),
        }
    }

    /// Whether groups need communicators of their own.
    pub(crate) fn has_groups(self) -> bool {
        self.num_groups > 1
    }
}

/// How all workers of a session meet.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) epoch: u64,
    pub(crate) way: Way,
    /// By what the data of tensors on GPUs moves; without it those on host memory go the way.
    pub(crate) accelerated: Option<Flavour>,
    pub(crate) limits: Limits,
    /// The default device of each worker; empty where those stay as they are.
    pub(crate) devices: Vec<Device>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Way {
    /// All are threads of one process.
    Threads,
    /// All are on one machine. First the world's, then those of the groups if there are several.
    #[cfg(target_os = "linux")]
    Segments(Vec<host::Ticket>),
    /// Each worker's address for the world, and for its group if there are several.
    Sockets {
        key: SessionKey,
        encrypt: bool,
        world: Vec<Address>,
        groups: Vec<Address>,
        /// Where each worker is.
        places: Vec<Place>,
    },
    /// All are processes of one job of MPI, with these numbers there.
    Mpi { key: SessionKey, encrypt: bool, ranks: Vec<u32> },
    /// They do not.
    Apart { why: String },
}

/// Where a worker is, seen from the others.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    /// Its machine, by a number.
    pub(crate) machine: u32,
    /// Whether its address is of use on that machine only.
    pub(crate) is_local: bool,
}

/// What `disco.listen` replies for one worker.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Listening {
    pub(crate) world: Address,
    pub(crate) group: Option<Address>,
}
