//! The scheduler of leases: a state machine without I/O and without a clock that gives each device
//! to one request at a time.
//!
//! Inputs are events with their times: requests arrive, are released, and their sessions end.
//! [`poll_event`](LeaseScheduler::poll_event) returns the consequences, and
//! [`next_timeout`](LeaseScheduler::next_timeout) the time for
//! [`handle_timeout`](LeaseScheduler::handle_timeout). The rules, which the tests check against a
//! simpler program:
//!
//! 1. A device has at most one holder at a time.
//! 2. The step that frees a device grants it to the next request: by priority, and within a
//!    priority in the order of arrival.
//! 3. A lease that has lasted as long as it may is *overdue*. Its session has to end, and its
//!    device is free only once that has happened.
//! 4. With a session all its requests end, those that wait and those that hold a device.
//!
//! Each event takes time proportional to the logarithm of the number of requests, for each request
//! that it ends.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use rpc_core::{Device, Result, RpcError};

#[cfg(test)]
mod tests;

/// Id of a request, and of the lease that it is granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct LeaseId(pub(super) u64);

/// Id of a session that may have leases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SessionId(pub(super) u64);

/// Limits of a scheduler.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LeaseLimits {
    /// Maximum time of a lease. A request may ask for less.
    pub(crate) max_duration: Duration,
    /// Maximum number of requests, with those that hold a device.
    pub(crate) max_requests: usize,
    /// Maximum number of those of one session.
    pub(crate) max_requests_per_session: usize,
}

/// Consequence of an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LeaseEvent {
    Granted {
        id: LeaseId,
        waited: Duration,
        /// Time after which the lease is overdue.
        duration: Duration,
    },
    /// A device has no holder any more.
    Freed { device: Device },
    /// A lease is overdue: its session has to end.
    Overdue { session: SessionId, device: Device, duration: Duration },
}

/// A device that is leased, and the requests that wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLeases {
    pub(crate) device: Device,
    /// Time for which the present lease has been held.
    pub(crate) held: Duration,
    /// Time that is left to it.
    pub(crate) left: Duration,
    /// Number of requests that wait.
    pub(crate) waiting: u64,
}

/// Numbers for metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct LeaseTotals {
    pub(crate) held: u64,
    pub(crate) waiting: u64,
    pub(crate) granted: u64,
    pub(crate) overdue: u64,
    /// Time that granted requests have waited.
    pub(crate) waited: Duration,
    /// Time for which ended leases were held.
    pub(crate) held_time: Duration,
}

/// The order of requests: the higher priority first, then the earlier one.
type QueueOrder = (Reverse<i32>, LeaseId);

#[derive(Debug)]
struct Lease {
    session: SessionId,
    device: Device,
    priority: i32,
    duration: Duration,
    requested: Instant,
    granted: Option<Grant>,
}

#[derive(Clone, Copy, Debug)]
struct Grant {
    since: Instant,
    /// Timer of the lease; `None` once it is overdue, and for a time that no clock can express.
    timer: Option<Instant>,
}

impl Lease {
    fn order(&self, id: LeaseId) -> QueueOrder {
        (Reverse(self.priority), id)
    }
}

/// Holder of a device, and the requests that wait for it. A device that is free has none.
#[derive(Debug)]
struct DeviceQueue {
    holder: LeaseId,
    waiting: BTreeSet<QueueOrder>,
}

/// Scheduler of a server; see the [module](self).
#[derive(Debug)]
pub(crate) struct LeaseScheduler {
    limits: LeaseLimits,
    leases: HashMap<LeaseId, Lease>,
    devices: BTreeMap<Device, DeviceQueue>,
    by_session: HashMap<SessionId, BTreeSet<LeaseId>>,
    timers: BTreeSet<(Instant, LeaseId)>,
    events: VecDeque<LeaseEvent>,
    totals: LeaseTotals,
    last_id: u64,
}

impl LeaseScheduler {
    pub(crate) fn new(limits: LeaseLimits) -> Self {
        Self {
            limits,
            leases: HashMap::new(),
            devices: BTreeMap::new(),
            by_session: HashMap::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            totals: LeaseTotals::default(),
            last_id: 0,
        }
    }

    /// Adds a request, which is granted at once if the device is free. `max_duration` shortens the
    /// maximum time of a lease.
    ///
    /// # Errors
    ///
    /// A limit is reached. The error names it.
    pub(crate) fn request(
        &mut self,
        now: Instant,
        session: SessionId,
        device: Device,
        priority: i32,
        max_duration: Option<Duration>,
    ) -> Result<LeaseId> {
        let LeaseLimits { max_duration: longest, max_requests, max_requests_per_session } = self.limits;
        let of_session = self.by_session.get(&session).map_or(0, BTreeSet::len);
        for (name, limit, present) in [
            ("max_lease_requests", max_requests, self.leases.len()),
            ("max_lease_requests_per_session", max_requests_per_session, of_session),
        ] {
            if present >= limit {
                return Err(RpcError::limit(name, limit as u64, present as u64 + 1));
            }
        }
        self.last_id += 1;
        let id = LeaseId(self.last_id);
        let duration = max_duration.map_or(longest, |asked| asked.min(longest));
        let lease = Lease { session, device, priority, duration, requested: now, granted: None };
        let order = lease.order(id);
        self.leases.insert(id, lease);
        self.by_session.entry(session).or_default().insert(id);
        match self.devices.get_mut(&device) {
            Some(leased) => {
                leased.waiting.insert(order);
                self.totals.waiting += 1;
            }
            None => {
                self.devices.insert(device, DeviceQueue { holder: id, waiting: BTreeSet::new() });
                self.grant(now, id);
            }
        }
        Ok(id)
    }

    /// Ends a request or a lease. One that has ended already is ignored.
    pub(crate) fn release(&mut self, now: Instant, id: LeaseId) {
        let Some(lease) = self.leases.remove(&id) else { return };
        if let Some(of_session) = self.by_session.get_mut(&lease.session) {
            of_session.remove(&id);
            if of_session.is_empty() {
                self.by_session.remove(&lease.session);
            }
        }
        let Some(leased) = self.devices.get_mut(&lease.device) else { return };
        let Some(Grant { since, timer }) = lease.granted else {
            leased.waiting.remove(&lease.order(id));
            self.totals.waiting -= 1;
            return;
        };
        if let Some(timer) = timer {
            self.timers.remove(&(timer, id));
        }
        self.totals.held -= 1;
        self.totals.held_time += now.saturating_duration_since(since);
        match leased.waiting.pop_first() {
            Some((_, next)) => {
                leased.holder = next;
                self.totals.waiting -= 1;
                self.grant(now, next);
            }
            None => {
                self.devices.remove(&lease.device);
                self.events.push_back(LeaseEvent::Freed { device: lease.device });
            }
        }
    }

    /// Ends the requests of a session that wait. Returns them.
    pub(crate) fn cancel_waiting(&mut self, now: Instant, session: SessionId) -> Vec<LeaseId> {
        let waits = |id: &LeaseId| self.leases.get(id).is_some_and(|lease| lease.granted.is_none());
        let of_session = self.by_session.get(&session).into_iter().flatten();
        let waiting: Vec<_> = of_session.copied().filter(waits).collect();
        for id in &waiting {
            self.release(now, *id);
        }
        waiting
    }

    /// Ends all requests and leases of a session. Returns the requests that waited.
    pub(crate) fn end_session(&mut self, now: Instant, session: SessionId) -> Vec<LeaseId> {
        // Those that wait first, so that none of them is granted what another one frees.
        let waiting = self.cancel_waiting(now, session);
        for id in self.by_session.get(&session).cloned().unwrap_or_default() {
            self.release(now, id);
        }
        waiting
    }

    /// Handles the timers that are due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        while let Some((_, id)) = self.timers.first().copied().filter(|(due, _)| *due <= now) {
            self.timers.pop_first();
            let Some(lease) = self.leases.get_mut(&id) else { continue };
            if let Some(grant) = &mut lease.granted {
                grant.timer = None;
            }
            self.totals.overdue += 1;
            let Lease { session, device, duration, .. } = *lease;
            self.events.push_back(LeaseEvent::Overdue { session, device, duration });
        }
    }

    /// Returns the next consequence. Must be called until it returns `None`.
    pub(crate) fn poll_event(&mut self) -> Option<LeaseEvent> {
        self.events.pop_front()
    }

    /// Returns the time at which [`handle_timeout`](Self::handle_timeout) must be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Returns the session and the device of a request that has not ended.
    pub(crate) fn request_of(&self, id: LeaseId) -> Option<(SessionId, Device)> {
        self.leases.get(&id).map(|lease| (lease.session, lease.device))
    }

    /// Returns the session that holds a device.
    pub(crate) fn holder(&self, device: Device) -> Option<SessionId> {
        let leased = self.devices.get(&device)?;
        self.leases.get(&leased.holder).map(|lease| lease.session)
    }

    /// Returns the devices that sessions other than this one hold.
    pub(crate) fn held_by_others(&self, session: SessionId) -> impl Iterator<Item = Device> {
        self.devices.keys().copied().filter(move |device| self.holder(*device) != Some(session))
    }

    /// Returns the number of requests that will be granted before this one as things stand, with
    /// the one that holds the device; at most `limit`. Zero once it is granted or has ended.
    pub(crate) fn ahead(&self, id: LeaseId, limit: usize) -> usize {
        let Some(lease) = self.leases.get(&id).filter(|lease| lease.granted.is_none()) else { return 0 };
        let waiting = self.devices.get(&lease.device).map(|leased| leased.waiting.range(..lease.order(id)));
        // Counted up to the limit only: clients may ask often.
        1 + waiting.map_or(0, |waiting| waiting.take(limit.saturating_sub(1)).count())
    }

    /// Returns the leased devices, in their order.
    pub(crate) fn devices(&self, now: Instant) -> impl Iterator<Item = DeviceLeases> {
        self.devices.iter().map(move |(device, leased)| {
            let holder = self.leases.get(&leased.holder);
            let held = holder
                .and_then(|lease| lease.granted)
                .map_or(Duration::ZERO, |grant| now.saturating_duration_since(grant.since));
            let left = holder.map_or(Duration::ZERO, |lease| lease.duration.saturating_sub(held));
            DeviceLeases { device: *device, held, left, waiting: leased.waiting.len() as u64 }
        })
    }

    pub(crate) fn totals(&self) -> LeaseTotals {
        self.totals
    }

    /// Grants a request that its device has as its holder.
    fn grant(&mut self, now: Instant, id: LeaseId) {
        let Some(lease) = self.leases.get_mut(&id) else { return };
        let timer = now.checked_add(lease.duration);
        lease.granted = Some(Grant { since: now, timer });
        let (waited, duration) = (now.saturating_duration_since(lease.requested), lease.duration);
        self.timers.extend(timer.map(|timer| (timer, id)));
        self.totals.held += 1;
        self.totals.granted += 1;
        self.totals.waited += waited;
        self.events.push_back(LeaseEvent::Granted { id, waited, duration });
    }
}
