//! The tracker: who has which server, and who gets one next. And the other side of it, at the servers that it gives out.
//!
//! `scheduler` decides, `service` puts functions around it, `advertise` looks at the addresses that servers tell, `history`
//! remembers the last hour, `serve` makes a server of it, `page` shows it to browsers in the `words` of `rpc-cli status`. At a server, `gate` lets in who has a ticket, and `registrar` tells the tracker who is there.
//!
//! With `--metrics` a tracker shows those of a server, and:
//!
//! | metric | what it is |
//! | --- | --- |
//! | `rpc_tracker_servers` | servers that are registered |
//! | `rpc_tracker_places` | places that they have |
//! | `rpc_tracker_places_free` | places that nobody has |
//! | `rpc_tracker_requests_waiting` | requests that wait |
//! | `rpc_tracker_places_granted_total` | places that were granted |

mod advertise;
mod gate;
mod history;
mod limits;
mod page;
mod registrar;
mod scheduler;
mod serve;
mod service;
pub(crate) mod words;

use std::time::Duration;

pub use self::serve::RunningTracker;
pub use self::service::{Tracker, TrackerOptions};

pub(crate) use self::gate::Gate;
pub(crate) use self::registrar::{Registrar, Told};

/// As times are told: too long is as long as can be said.
fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
