//! Types of the scheduler: ids, policy, offers, events, slots.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_transports::tracker::{DeviceOffer, ServerRequest};

/// Id of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ServerId(pub(crate) u64);

/// Id of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClaimId(pub(crate) u64);

/// Durations and limits of the scheduler.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// Time that a registration lasts without a report.
    pub(crate) lease: Duration,
    /// Validity of a ticket.
    pub(crate) ticket: Duration,
    pub(crate) max_servers: usize,
    pub(crate) max_servers_per_peer: usize,
    pub(crate) max_waiting: usize,
    pub(crate) max_waiting_per_client: usize,
    /// Number of requests for the same, for slots at different servers, that must wait and reserve
    /// slots whatever they ask for.
    pub(crate) max_reserving: u32,
}

/// Offer of a server.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) key: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) devices: Vec<DeviceOffer>,
    pub(crate) capacity: u32,
    /// True if only requests that name the key get the server: others come from clients that may
    /// not know its protocol.
    pub(crate) by_key_only: bool,
}

/// Consequence of an input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A request is granted its slots.
    Granted { claim: ClaimId, slots: Vec<GrantedSlot> },
    /// A request has timed out. `possible` slots could serve it if they were free.
    TimedOut { claim: ClaimId, wanted: u32, possible: u64 },
    /// For as long as a request allows, all servers together could not serve it.
    Unservable { claim: ClaimId, request: Arc<ServerRequest>, possible: u64 },
    /// A server was silent for the length of its lease, and is dropped.
    LeaseExpired { server: ServerId },
}

/// A granted slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantedSlot {
    pub(crate) server: ServerId,
    /// Serial number of the ticket.
    pub(crate) serial: u64,
    /// Expiry of the ticket, by the server's clock.
    pub(crate) expires_ms: u64,
}

/// Occupancy of a slot.
#[derive(Clone, Debug)]
pub(crate) struct Occupancy {
    pub(crate) client: String,
    pub(crate) since: Instant,
    pub(crate) kind: OccupancyKind,
    /// Server's number of the session, if there is one.
    pub(crate) session: Option<u64>,
    /// Time for which the client has been silent, as the server reports it.
    pub(crate) silent_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OccupancyKind {
    Granted,
    InUse,
    Direct,
}

/// Sums over servers and requests: all of them, or those of one key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SlotTotals {
    pub(crate) capacity: u64,
    pub(crate) free: u64,
    pub(crate) waiting: u64,
    /// Number of slots granted so far.
    pub(crate) granted: u64,
    /// Time that the requests for these slots have waited, summed over the slots.
    pub(crate) waited_ms: u64,
}
