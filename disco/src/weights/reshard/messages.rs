//! Messages of a reshard: the arguments and results of the functions `disco.reshard.*`.
//!
//! They belong to the family [`MESSAGES`](crate::wire::set_up::MESSAGES).

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use rpc_core::{DataType, VirtualDevice};
use serde::{Deserialize, Serialize};

use super::byte_runs::ByteRuns;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::SessionKey;
#[cfg(target_os = "linux")]
use crate::ccl::host::Ticket;
use crate::wire::plan::WorkerLocation;

/// Request to say how others reach a worker: the same for all workers of a session.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct ReshardRequest {
    /// Address at which each worker is to listen; empty if none is.
    pub(super) listen: Vec<IpAddr>,
    /// Ranks of a segment that worker 0 is to make; 0 for none.
    pub(super) segment: u32,
}

/// Description of a worker, as it takes part in a reshard.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WorkerEnd {
    /// Random text of its process.
    pub(super) process: String,
    /// Address at which it listens.
    pub(super) address: Option<SocketAddr>,
    /// Ticket to the segment that it has made.
    #[cfg(target_os = "linux")]
    pub(super) ticket: Option<Ticket>,
    /// Its tensors; none where it is to make one.
    pub(super) tensors: Vec<Option<TensorPart>>,
}

/// A worker's part of a tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TensorPart {
    pub(super) dtype: DataType,
    pub(super) shape: Vec<i64>,
}

impl fmt::Display for TensorPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?}", self.dtype, self.shape)
    }
}

/// Request to meet the workers of both sessions: the same for all workers of one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct JoinRequest {
    /// Number of the [exchange](crate::worker::exchanges).
    pub(super) number: u64,
    /// Rank of the session's first worker in the group of both sessions.
    pub(super) first: u32,
    /// Number of workers of the session that has the tensors: the first ranks.
    pub(super) sources: u32,
    /// Number of ranks.
    pub(super) size: u32,
    pub(super) timeouts: CollectiveTimeouts,
    pub(super) meeting: Meeting,
}

/// Means by which the workers of two sessions reach each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Meeting {
    /// All are threads of one process, and have this key in common.
    Process { key: SessionKey },
    /// All are on one machine.
    #[cfg(target_os = "linux")]
    Segment { ticket: Ticket },
    /// Addresses and locations of all ranks.
    Sockets { key: SessionKey, encrypt: bool, addresses: Vec<SocketAddr>, locations: Vec<WorkerLocation> },
}

/// Work of one worker: the moves that it takes part in, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerTask {
    pub(super) moves: Vec<WorkerMove>,
    /// The tensors that it is to have; empty for a worker that sends.
    pub(super) parts: Vec<TensorPart>,
    /// Constraint on their device; `None` is its default device.
    pub(super) device: Option<VirtualDevice>,
}

/// Bytes that a worker sends or receives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WorkerMove {
    /// Number of the tensor.
    pub(super) tensor: u32,
    /// Rank of the other worker.
    pub(super) peer: u32,
    pub(super) runs: ByteRuns,
    /// Bytes that are sent at a time.
    pub(super) piece: u64,
}

/// Piece of a move that goes through the controller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct RelayedPiece {
    /// The worker that has the bytes, or gets them.
    pub(super) worker: u32,
    pub(super) tensor: u32,
    pub(super) runs: ByteRuns,
    /// The piece: the first byte of the runs, and the number of bytes.
    pub(super) start: u64,
    pub(super) len: u64,
}

/// Adds the messages of reshards to `all`.
#[cfg(test)]
pub(in crate::weights) fn golden_requests(all: &mut crate::wire::golden::Samples) {
    use std::net::Ipv4Addr;
    use std::time::Duration;

    let localhost = IpAddr::from(Ipv4Addr::LOCALHOST);
    all.packed("ReshardRequest", &ReshardRequest { listen: vec![localhost], segment: 6 });
    let part = TensorPart { dtype: DataType::BF16, shape: vec![4, 2] };
    all.packed("TensorPart", &part);
    let address = SocketAddr::new(localhost, 7);
    let key: SessionKey = serde_json::from_value(vec![5; 32].into()).unwrap();
    let location = WorkerLocation { machine: 1, is_local: true };
    let meeting =
        Meeting::Sockets { key: key.clone(), encrypt: true, addresses: vec![address], locations: vec![location] };
    all.packed("Meeting Process", &Meeting::Process { key });
    all.packed("Meeting Sockets", &meeting);
    #[cfg(target_os = "linux")]
    {
        let ticket = serde_json::json!({"process": 1, "descriptor": 3, "nonce": vec![9; 16], "size": 2, "epoch": 1});
        let ticket: Ticket = serde_json::from_value(ticket).unwrap();
        all.packed("Meeting Segment", &Meeting::Segment { ticket: ticket.clone() });
        let ticket = Some(ticket);
        let process = "0123".to_owned();
        all.packed(
            "WorkerEnd",
            &WorkerEnd { process, address: Some(address), ticket, tensors: vec![Some(part.clone())] },
        );
    }
    let limit = Duration::from_secs(3);
    let timeouts = CollectiveTimeouts { entry: Some(limit), stall: limit, join: limit, direct: limit };
    all.packed("JoinRequest", &JoinRequest { number: 1 << 62, first: 2, sources: 2, size: 6, timeouts, meeting });
    let runs = ByteRuns { len: 24, start: 5, run: 4, outer: vec![(2, 100), (3, 10)] };
    all.packed("ByteRuns", &runs);
    let one = WorkerMove { tensor: 1, peer: 4, runs: runs.clone(), piece: 512 };
    all.packed("WorkerMove", &one);
    all.packed("WorkerTask", &WorkerTask { moves: vec![one], parts: vec![part], device: None });
    all.packed("RelayedPiece", &RelayedPiece { worker: 1, tensor: 2, runs, start: 4, len: 8 });
}
