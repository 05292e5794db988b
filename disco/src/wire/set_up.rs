//! Set-up of a node: what the controller asks a node to become, and what the node answers.

use std::net::IpAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::options::Hosting;
use crate::wire::plan::Layout;

/// What a host is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SetUp {
    pub(crate) layout: Layout,
    /// The first of its workers.
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) hosting: Hosting,
    pub(crate) pin: bool,
    /// Up to which level the controller wants to see logs, if at all.
    pub(crate) logs: Option<u8>,
    /// How much executed credit is worth a report, in bytes.
    pub(crate) report_every: u64,
    /// How often those below it are tested.
    pub(crate) keep_alive_ms: u64,
    /// Set by controllers that hope to be in the same process.
    pub(crate) local: u64,
    /// The nodes below it.
    pub(crate) below: Vec<Below>,
}

impl SetUp {
    pub(crate) fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms)
    }

    /// How many workers there are, those below included.
    pub(crate) fn workers(&self) -> u32 {
        // Saturating: it may come from anybody.
        u32::try_from(self.nodes()).unwrap_or(u32::MAX).saturating_mul(self.count)
    }

    /// How many nodes there are, with this one.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.below.iter().map(Below::nodes).sum::<usize>()
    }
}

/// A node that another one opens, with as many workers as that has itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Below {
    pub(crate) address: String,
    pub(crate) below: Vec<Self>,
}

impl Below {
    /// How many nodes this is.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.below.iter().map(Self::nodes).sum::<usize>()
    }
}

/// What a controller learns of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HostInfo {
    /// Its processes and those below it, in the order of their workers.
    pub(crate) leaves: Vec<Leaf>,
    /// Whether any of the links below it is encrypted.
    pub(crate) is_encrypted_below: bool,
    /// Where the workers of its node and of those below listen for data, as far as their operators say, in the order of nodes.
    pub(crate) data_addresses: Vec<Option<IpAddr>>,
}

/// One process, and how many workers it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Leaf {
    pub(crate) count: u32,
    /// Equal where processes can share memory; empty where that is not known.
    pub(crate) machine: String,
    /// Which process of which job of MPI it is, if it is one.
    pub(crate) mpi: Option<MpiSeat>,
}

/// A process of a job of MPI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MpiSeat {
    /// What the processes of one job, and no others, have in common.
    pub(crate) job: String,
    pub(crate) rank: u32,
}
