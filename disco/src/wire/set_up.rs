//! Set-up of a node: what the controller asks a node to become, and what the node answers.

use std::net::IpAddr;
use std::time::Duration;

use rpc_core::{Packed, Result};
use rpc_transports::MessageFamily;
use serde::{Deserialize, Serialize};

use crate::options::Hosting;
use crate::wire::plan::Layout;

/// All messages between a controller, its nodes and its workers. Version 1 did not carry its
/// number.
pub(crate) const MESSAGES: MessageFamily = MessageFamily::new("Disco's messages", 11);

/// Set-up of a node: its workers, and the nodes that it is to open below it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SetUp {
    /// Version of [`MESSAGES`] at the sender. Read before the other fields.
    pub(crate) version: u32,
    pub(crate) layout: Layout,
    /// The first of its workers.
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) hosting: Hosting,
    pub(crate) pin: bool,
    /// Level up to which the controller wants to see logs, if at all.
    pub(crate) logs: Option<u8>,
    /// Bytes of executed credit that are worth a report.
    pub(crate) report_every: u64,
    /// Interval at which the nodes below are tested, in milliseconds.
    pub(crate) keep_alive_ms: u64,
    /// The nodes below it.
    pub(crate) children: Vec<ChildNode>,
    /// Random number of the session, by which people find its workers at different nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) session: Option<u64>,
    /// Position behind which the workers begin, if they take the place of lost ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) begin_after: Option<CommandPosition>,
}

/// Position in the commands of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct CommandPosition {
    /// Number of the last command.
    pub(crate) sequence: u64,
    /// Credit that the commands up to that one have taken.
    pub(crate) credit: u64,
}

impl CommandPosition {
    /// Largest of both numbers: far more than a session comes to, and far from where they overflow.
    pub(crate) const MAX: u64 = 1 << 62;

    /// Returns true if commands can follow.
    pub(crate) fn is_valid(self) -> bool {
        self.sequence <= Self::MAX && self.credit <= Self::MAX
    }
}

impl SetUp {
    /// Decodes a set-up.
    ///
    /// # Errors
    ///
    /// Those of [`MessageFamily::decode`].
    pub(crate) fn decode(packed: &Packed) -> Result<Self> {
        MESSAGES.decode(packed, "the controller", "the node")
    }

    /// Returns the position behind which the workers begin.
    pub(crate) fn position(&self) -> CommandPosition {
        self.begin_after.unwrap_or_default()
    }

    pub(crate) fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms)
    }

    /// Returns the number of workers there are, those below included.
    pub(crate) fn workers(&self) -> u32 {
        // Saturating: the numbers come from a peer.
        u32::try_from(self.nodes()).unwrap_or(u32::MAX).saturating_mul(self.count)
    }

    /// Returns the number of nodes there are, with this one.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.children.iter().map(ChildNode::nodes).sum::<usize>()
    }
}

/// A node that another one opens, with as many workers as that has itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ChildNode {
    pub(crate) address: String,
    pub(crate) children: Vec<Self>,
}

impl ChildNode {
    /// Returns the number of nodes this is.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.children.iter().map(Self::nodes).sum::<usize>()
    }
}

/// Description of a node that a controller has opened.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct NodeInfo {
    /// Processes of the node and of those below it, in the order of their workers.
    pub(crate) processes: Vec<WorkerProcess>,
    /// True if any of the links below it is encrypted.
    pub(crate) is_encrypted_below: bool,
    /// Addresses at which the workers of its node and of those below listen for data, as far as
    /// their operators name them, in the order of nodes.
    pub(crate) data_addresses: Vec<Option<IpAddr>>,
}

/// One process, and how many workers it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerProcess {
    pub(crate) count: u32,
    /// Equal where processes can share memory; empty where that is not known.
    pub(crate) machine: String,
    /// Process of a job of MPI that it is, if it is one.
    pub(crate) mpi: Option<MpiProcess>,
}

/// A process of a job of MPI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MpiProcess {
    /// Text that the processes of one job, and no others, have in common.
    pub(crate) job: String,
    pub(crate) rank: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::golden::assert_refused;

    fn set_up() -> SetUp {
        SetUp {
            version: MESSAGES.version(),
            layout: Layout { world_size: 4, num_groups: 2 },
            first: 2,
            count: 1,
            hosting: Hosting::Threads,
            pin: false,
            logs: Some(2),
            report_every: 2_097_152,
            keep_alive_ms: 200,
            children: vec![ChildNode { address: "tcp://b:1".to_owned(), children: Vec::new() }],
            session: None,
            begin_after: None,
        }
    }

    #[test]
    fn another_version_is_refused_in_words() {
        /// Set-up of version 1, as far as matters here.
        #[derive(Serialize)]
        struct Version1 {
            first: u32,
            below: Vec<u32>,
        }
        let old = Packed::encode(&Version1 { first: 0, below: Vec::new() }).unwrap();
        let newer = MESSAGES.version() + 1;
        let new = Packed::encode(&SetUp { version: newer, ..set_up() }).unwrap();
        for (packed, version) in [(old, 1), (new, newer)] {
            assert_refused(SetUp::decode(&packed), ("the controller", version), "the node");
        }
        SetUp::decode(&Packed::encode(&set_up()).unwrap()).unwrap();
    }
}
