//! A registered server: its offer, its free and occupied slots, and the requests that it suits.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use rpc_transports::tracker::{DeviceOffer, ServerRequest, ServerSummary};

use super::types::{ClaimId, Occupancy, OccupancyKind, Offer, ServerId};

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) offer: Arc<Offer>,
    pub(super) peer: String,
    /// Sessions by the ids of the server.
    pub(super) uses: BTreeMap<u64, Occupancy>,
    /// Granted slots by the serial numbers of their tickets.
    pub(super) granted: BTreeMap<u64, GrantedTicket>,
    pub(super) reachable: bool,
    /// End of the lease. `None` for a server that is kept without one.
    pub(super) lease_end: Option<Instant>,
    pub(crate) registered: Instant,
    pub(crate) heard: Instant,
    /// Time of the server's clock in the last report.
    pub(super) clock_ms: u64,
    /// Serial number of the server's last grant.
    pub(super) last_granted: u64,
    /// True while the server is given to no client.
    pub(super) is_draining: bool,
}

#[derive(Debug)]
pub(super) struct GrantedTicket {
    pub(super) claim: ClaimId,
    pub(super) client: String,
    pub(super) since: Instant,
    /// Expiry of the ticket, by the server's clock.
    pub(super) expires_ms: u64,
}

/// Order of rule 4: unreachable, free slots, last grant, id.
pub(super) type GrantOrder = (bool, Reverse<u32>, u64, ServerId);

impl Server {
    /// Returns the number of free slots. There may be more sessions than slots, because clients
    /// without tickets have sessions too. A server that drains has none.
    pub(crate) fn free(&self) -> u32 {
        if self.is_draining {
            return 0;
        }
        let taken = u32::try_from(self.granted.len() + self.uses.len()).unwrap_or(u32::MAX);
        self.offer.capacity.saturating_sub(taken)
    }

    /// Returns the server's grant order, if it has free slots.
    pub(super) fn grant_order(&self, id: ServerId) -> Option<GrantOrder> {
        let free = self.free();
        (free > 0).then_some((!self.reachable, Reverse(free), self.last_granted, id))
    }

    /// Returns true if the server has reported this session.
    pub(crate) fn has_session(&self, id: u64) -> bool {
        self.uses.contains_key(&id)
    }

    /// Returns the occupied slots.
    pub(crate) fn holders(&self) -> impl Iterator<Item = Occupancy> {
        let granted = self.granted.values().map(|granted| Occupancy {
            client: granted.client.clone(),
            since: granted.since,
            kind: OccupancyKind::Granted,
            session: None,
            silent_ms: 0,
        });
        self.uses.values().cloned().chain(granted)
    }
}

impl Offer {
    /// Returns the offer of a server as clients see it.
    pub(crate) fn of(server: &ServerSummary) -> Self {
        let ServerSummary { key, labels, devices, capacity, address, .. } = server;
        // Servers of TVM have an address with the scheme of their protocol.
        let by_key_only = address.first().is_some_and(|address| address.starts_with("tvm:"));
        Self { key: key.clone(), labels: labels.clone(), devices: devices.clone(), capacity: *capacity, by_key_only }
    }

    /// Returns true if the server has the properties that a request names.
    pub(crate) fn suits(&self, request: &ServerRequest) -> bool {
        let has_device = |wanted: &DeviceOffer| {
            let of_kind = self.devices.iter().filter(|device| device.kind == wanted.kind);
            of_kind.map(|device| u64::from(device.count)).sum::<u64>() >= u64::from(wanted.count)
        };
        ((request.key.is_empty() && !self.by_key_only) || request.key == self.key)
            && request.labels.iter().all(|(name, value)| self.labels.get(name) == Some(value))
            && request.devices.iter().all(has_device)
            && request.virtual_devices.iter().all(|wanted| DeviceOffer::any_satisfies(&self.devices, wanted))
    }
}

/// Returns the number of `free` slots of one server that a request could use.
pub(in crate::tracker) fn usable(request: &ServerRequest, free: u32) -> u32 {
    if request.distinct { free.min(1) } else { free }
}
