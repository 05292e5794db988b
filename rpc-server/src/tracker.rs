//! The tracker: it registers servers and gives each of them to one client after another.
//!
//! `scheduler` decides which client gets which server, `service` has the functions that servers and
//! clients call, `advertised_addresses` checks the addresses that servers advertise, `history`
//! keeps the last hour, `serve` makes a server of it, `page` shows it to browsers, and `display`
//! and `wait_reason` have the texts that the page shares with `rpc-cli status`. The part of a
//! server is in `server/ticket_gate` and `server/registrar`.
//!
//! With `--metrics` a tracker has the metrics of a server, and:
//!
//! | metric | what it is |
//! | --- | --- |
//! | `rpc_tracker_servers` | servers that are registered |
//! | `rpc_tracker_slots` | slots that they have |
//! | `rpc_tracker_slots_free` | slots that are free |
//! | `rpc_tracker_requests_waiting` | requests that wait |
//! | `rpc_tracker_slots_granted_total` | slots that were granted |

mod advertised_addresses;
pub(crate) mod display;
mod history;
mod limits;
mod page;
mod scheduler;
mod serve;
mod service;
pub(crate) mod wait_reason;

use std::time::Duration;

pub(crate) use self::scheduler::Offer;
pub use self::serve::RunningTracker;
#[cfg(feature = "tvm")]
pub(crate) use self::service::ServerObject;
#[cfg(feature = "tvm")]
pub(crate) use self::service::tvm::{TvmClaim, TvmGrant, TvmListing, TvmPlace};
pub use self::service::{Tracker, TrackerOptions};

/// Returns a time in milliseconds, saturated.
pub(crate) fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
