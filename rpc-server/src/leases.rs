//! Leases: exclusive use of a device among the sessions of one server.
//!
//! The [`LeaseTable`] of a server queues the requests of all its sessions; [`scheduler`] decides
//! which is next. A session sees a [`LeaseService`], which the functions `rpc.lease.*` use: in the
//! server's own process that is the table itself, and in the process of an isolated session the
//! link to the server. Either way the server ends the session of a lease that lasts too long.
//!
//! Sessions without a lease share a device with its holder, wait, or are refused: the operator says
//! which, in a [`LeasePolicy`], and the [`LeaseGate`] of each session sees to it. Where they do not
//! share, a lease begins when the requests of other sessions that use the device have ended, and
//! the gates count these.

mod lease_gate;
mod lease_policy;
mod lease_table;
mod scheduler;

use std::fmt;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rpc_core::{Device, DeviceUse, Result};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::tracker::display::plain;

pub(crate) use self::lease_gate::LeaseGate;
pub(crate) use self::lease_policy::LeasePolicy;
pub use self::lease_policy::{LeaseRule, LeaseRuleError, UnleasedUse};
pub(crate) use self::lease_table::{LeaseTable, SessionLeases};
pub(crate) use self::scheduler::{LeaseId, LeaseLimits, LeaseTotals};

/// Maximum number of requests of one session, those that hold a device included.
pub(crate) const MAX_REQUESTS_PER_SESSION: usize = 16;

/// Maximum number of requests of all sessions together. Each takes a few hundred bytes.
pub(crate) const MAX_REQUESTS: usize = 65_536;

/// Maximum number of devices in a list.
pub(crate) const MAX_LISTED: usize = 64;

/// Maximum number of waiting requests that are shown of a device.
pub(crate) const MAX_NEXT: usize = 3;

/// Largest number of requests ahead that is counted.
pub(crate) const MAX_AHEAD: usize = 1000;

/// A leased device of a server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeasedDevice {
    /// The device, such as `cuda:0`.
    pub device: String,
    /// Time for which the present lease has been held, in seconds.
    pub held_seconds: f64,
    /// Time after which the session of the holder is ended, in seconds.
    pub left_seconds: f64,
    /// Number of requests that wait for the device.
    pub waiting: u64,
    /// Number of other sessions that still use the device, which nobody has leased: the first
    /// request waits for them.
    #[serde(default)]
    pub used_by: u64,
    /// Client that holds the device.
    #[serde(default)]
    pub holder: Option<LeaseClient>,
    /// The first requests that wait, in the order in which they are granted; at most three.
    #[serde(default)]
    pub next: Vec<WaitingLease>,
}

/// Client that has asked for a lease.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseClient {
    /// Identity of the client, with the kind of its proof, such as `token:alice`; cut after 48
    /// bytes.
    pub identity: String,
    /// Number of the client's session at the server, in the order of arrival.
    pub session: u64,
}

/// A request that waits for a lease.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct WaitingLease {
    /// Client that has made the request.
    pub client: LeaseClient,
    /// Priority of the request.
    pub priority: i32,
    /// Time for which the request has waited, in seconds.
    pub waited_seconds: f64,
}

impl LeaseClient {
    /// Maximum length of an identity in bytes.
    const MAX_IDENTITY: usize = 48;

    /// Returns the client with this identity, which it chose in part: shortened, and without
    /// characters that act on a terminal.
    pub(crate) fn new(identity: &str, session: u64) -> Self {
        let mut identity = plain(identity);
        if identity.len() > Self::MAX_IDENTITY {
            let end = (0..=Self::MAX_IDENTITY - CUT.len()).rev().find(|end| identity.is_char_boundary(*end));
            identity.truncate(end.unwrap_or(0));
            identity.push_str(CUT);
        }
        Self { identity, session }
    }
}

/// Mark at the end of a text that was cut.
const CUT: &str = "…";

impl fmt::Display for LeaseClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (session {})", plain(&self.identity), self.session)
    }
}

/// Request for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseRequest {
    pub(crate) device: Device,
    pub(crate) priority: i32,
    /// Maximum time of the lease, if that of the operator is too long.
    pub(crate) max_duration: Option<Duration>,
}

/// A request that has been granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseGrant {
    pub(crate) since: Instant,
    pub(crate) waited: Duration,
    /// Time after which the lease is overdue.
    pub(crate) duration: Duration,
}

/// Grant of a request, once there is one. The sender is dropped when the request ends without it.
pub(crate) type GrantReceiver = watch::Receiver<Option<LeaseGrant>>;

/// A request in the queue of its device.
#[derive(Debug)]
pub(crate) struct QueuedRequest {
    /// Number of the request, chosen by the service.
    pub(crate) number: u64,
    pub(crate) grant: GrantReceiver,
}

/// Leases as one session sees them.
#[async_trait]
pub(crate) trait LeaseService: Send + Sync {
    /// Adds a request to the queue of its device.
    ///
    /// # Errors
    ///
    /// A limit is reached, or the server does not answer.
    async fn request(&self, request: LeaseRequest) -> Result<QueuedRequest>;

    /// Ends a request or a lease. Does not block.
    fn release(&self, number: u64);

    /// Returns the number of requests that will be granted before this one, with the one that holds
    /// the device; at most [`MAX_AHEAD`].
    ///
    /// # Errors
    ///
    /// The server does not answer.
    async fn ahead(&self, number: u64) -> Result<u64>;

    /// Returns the leased devices of the server.
    ///
    /// # Errors
    ///
    /// The server does not answer.
    async fn leased_devices(&self) -> Result<Vec<LeasedDevice>>;

    /// Begins a use of a device: `Ready(None)` if the device is reserved for another session, and
    /// `Pending` if that is not known yet. Wakes `waker` once this may have changed. Neither this
    /// nor the drop of the use blocks.
    fn poll_use(&self, device: Device, waker: &Waker) -> Poll<Option<DeviceUse>>;
}

/// The lease service of a session, for its functions
/// ([`Context::extension`](rpc_core::Context::extension)).
pub(crate) struct Leases(pub(crate) Arc<dyn LeaseService>);

#[cfg(test)]
mod tests {
    use super::LeaseClient;

    #[test]
    fn names_of_clients_are_cut_and_cannot_act_on_a_terminal() {
        let shown = |identity: &str| LeaseClient::new(identity, 7).identity;
        assert_eq!(shown("token:alice"), "token:alice");
        assert_eq!(shown("cert:a\u{1b}[2J\n\u{202e}b"), "cert:a\u{fffd}[2J\u{fffd}\u{fffd}b");
        for name in ["x".repeat(1000), "ü".repeat(1000), "\u{0}".repeat(1000)] {
            let shown = shown(&format!("via:gate/{name}"));
            assert!((44..=LeaseClient::MAX_IDENTITY).contains(&shown.len()), "{shown}");
            assert!(shown.starts_with("via:gate/") && shown.ends_with('…'), "{shown}");
        }
        // What comes from a server is not trusted either.
        let received = LeaseClient { identity: "\u{1b}[2J".to_owned(), session: 3 };
        assert_eq!(received.to_string(), "\u{fffd}[2J (session 3)");
    }
}
