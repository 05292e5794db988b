//! Servers that report neither sessions nor tickets, such as those of TVM: the tracker concludes
//! what it can from the rest of what they say.
//!
//! A granted slot counts as in use from the moment at which its client has been told, since no
//! ticket expires there. It is free again when the server says so, and with the server's end.

use std::time::Instant;

use rpc_transports::tracker::ServerStatus;

use super::types::{Occupancy, OccupancyKind, ServerId};
use super::{Scheduler, Timer};

impl Scheduler {
    /// Records that the client of a granted slot has been told where its server is. Does nothing if
    /// the slot is not granted any more.
    pub(crate) fn use_granted(&mut self, now: Instant, id: ServerId, serial: u64) {
        self.change(id, |server| {
            let Some(granted) = server.granted.remove(&serial) else { return };
            let kind = OccupancyKind::InUse;
            let held = Occupancy { client: granted.client, since: now, kind, session: None, silent_ms: 0 };
            server.uses.insert(serial, held);
        });
    }

    /// Frees all slots of a server, which says that it has no client. Returns false if it is not
    /// registered (any more).
    pub(crate) fn set_free(&mut self, now: Instant, id: ServerId) -> bool {
        let granted = self.servers.get(&id).map(|server| server.granted.keys().copied().collect());
        // With the clock at zero no ticket has expired.
        granted.is_some_and(|spent| self.report(now, id, &ServerStatus { spent, ..ServerStatus::default() }))
    }

    /// Keeps a server until it is unregistered, however long it says nothing.
    pub(crate) fn keep_without_lease(&mut self, id: ServerId) {
        let lease_end = self.servers.get_mut(&id).and_then(|server| server.lease_end.take());
        if let Some(lease_end) = lease_end {
            self.timers.remove(&(lease_end, Timer::Lease(id)));
        }
    }
}
