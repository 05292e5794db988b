//! The scheduler of leases: a state machine without I/O and without a clock that gives each device
//! to one request at a time.
//!
//! Inputs are events with their times: requests arrive, are released, and their sessions end; and
//! sessions use devices without a lease.
//! [`poll_event`](LeaseScheduler::poll_event) returns the consequences, and
//! [`next_timeout`](LeaseScheduler::next_timeout) the time for
//! [`handle_timeout`](LeaseScheduler::handle_timeout). The rules, which the tests check against a
//! simpler program:
//!
//! 1. A device has at most one holder at a time.
//! 2. A device that is free goes to the next request: by priority, and within a priority in the
//!    order of arrival. Until then the device is *reserved* for the session of that request: no
//!    other session begins to use it.
//! 3. The step that ends the last use by another session grants the request. Its own session may
//!    use the device meanwhile.
//! 4. A lease that has lasted as long as it may is *overdue*. Its session has to end, and its
//!    device is free only once that has happened.
//! 5. With a session all its requests end, those that wait and those that hold a device. Uses that
//!    go on after their session last until they end.
//!
//! Sessions in processes of their own count their uses themselves, and are *asked*: when a device
//! that was open to such a session is reserved for another one, it counts as used until the session
//! answers that it is not. Answers name the [list](LeaseScheduler::take_reserved_for_others) that
//! they follow, since a device may open and close again before an answer arrives.
//!
//! Each event takes time proportional to the logarithm of the number of requests, for each request
//! that it ends.

use std::cmp::Reverse;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::time::{Duration, Instant};

use rpc_core::{Device, Result, RpcError};

use super::LeasePolicy;

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
    /// A device is reserved for a session, and for no other: it holds the device, or will hold it
    /// next.
    Reserved { device: Device, session: SessionId },
    /// A device is reserved for no session any more.
    Freed { device: Device },
    /// A lease is overdue: its session has to end.
    Overdue { session: SessionId, device: Device, duration: Duration },
}

/// A device that is leased, and the requests that wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DeviceLeases {
    pub(crate) device: Device,
    /// Session that holds the device.
    pub(crate) holder: Option<SessionId>,
    /// Time for which the present lease has been held; zero if there is none.
    pub(crate) held: Duration,
    /// Time that is left to it.
    pub(crate) left: Duration,
    /// Number of requests that wait.
    pub(crate) waiting: u64,
    /// Number of sessions whose uses the first request waits for; zero while the device is held.
    pub(crate) used_by: u64,
    /// The first requests that wait, in their order.
    pub(crate) next: Vec<NextLease>,
}

/// A request that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NextLease {
    pub(crate) session: SessionId,
    pub(crate) priority: i32,
    pub(crate) waited: Duration,
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

/// Holder of a device, the requests that wait for it, and its uses. A device without any has no
/// entry.
#[derive(Debug, Default)]
struct DeviceQueue {
    holder: Option<LeaseId>,
    waiting: BTreeSet<QueueOrder>,
    /// Session that the device is reserved for: that of the holder, or of the first request.
    reserved_for: Option<SessionId>,
    /// Numbers of uses, by session.
    uses: HashMap<SessionId, u64>,
    /// Sessions that are asked if they use the device, with the number of the first list whose
    /// answer counts.
    asked: HashMap<SessionId, u64>,
}

impl DeviceQueue {
    /// Returns the number of sessions other than this one that use the device, or may use it. One
    /// that is asked does not count uses here.
    fn used_by_others(&self, session: SessionId) -> usize {
        let own = usize::from(self.uses.contains_key(&session)) + usize::from(self.asked.contains_key(&session));
        self.uses.len() + self.asked.len() - own
    }

    fn is_empty(&self) -> bool {
        self.holder.is_none() && self.waiting.is_empty() && self.uses.is_empty() && self.asked.is_empty()
    }
}

/// Scheduler of a server; see the [module](self).
#[derive(Debug)]
pub(crate) struct LeaseScheduler {
    limits: LeaseLimits,
    /// Rules that say which devices sessions without a lease may share with the holder: their uses
    /// do not matter.
    policy: LeasePolicy,
    leases: HashMap<LeaseId, Lease>,
    devices: BTreeMap<Device, DeviceQueue>,
    by_session: HashMap<SessionId, BTreeSet<LeaseId>>,
    /// Sessions that count their uses themselves, with the number of the next list for each.
    remote: BTreeMap<SessionId, u64>,
    timers: BTreeSet<(Instant, LeaseId)>,
    events: VecDeque<LeaseEvent>,
    totals: LeaseTotals,
    last_id: u64,
}

impl LeaseScheduler {
    pub(crate) fn new(limits: LeaseLimits, policy: LeasePolicy) -> Self {
        Self {
            limits,
            policy,
            leases: HashMap::new(),
            devices: BTreeMap::new(),
            by_session: HashMap::new(),
            remote: BTreeMap::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            totals: LeaseTotals::default(),
            last_id: 0,
        }
    }

    /// Adds a request, which is granted at once if the device is free and unused. `max_duration`
    /// shortens the maximum time of a lease.
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
        self.devices.entry(device).or_default().waiting.insert(order);
        self.totals.waiting += 1;
        self.settle(now, device);
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
        let Some(queue) = self.devices.get_mut(&lease.device) else { return };
        match lease.granted {
            None => {
                queue.waiting.remove(&lease.order(id));
                self.totals.waiting -= 1;
            }
            Some(Grant { since, timer }) => {
                queue.holder = None;
                if let Some(timer) = timer {
                    self.timers.remove(&(timer, id));
                }
                self.totals.held -= 1;
                self.totals.held_time += now.saturating_duration_since(since);
            }
        }
        self.settle(now, lease.device);
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
        // First, so that it is not asked any more.
        let was_remote = self.remote.remove(&session).is_some();
        // Those that wait first, so that none of them is granted what another one frees.
        let waiting = self.cancel_waiting(now, session);
        for id in self.by_session.get(&session).cloned().unwrap_or_default() {
            self.release(now, id);
        }
        if was_remote {
            let asked = |(device, queue): (&Device, &mut DeviceQueue)| queue.asked.remove(&session).map(|_| *device);
            let asked: Vec<_> = self.devices.iter_mut().filter_map(asked).collect();
            asked.into_iter().for_each(|device| self.settle(now, device));
        }
        waiting
    }

    /// Counts a use of a device by a session, unless the device is reserved for another one.
    /// Returns true if it is counted; [`end_use`](Self::end_use) ends it.
    pub(crate) fn begin_use(&mut self, session: SessionId, device: Device) -> bool {
        if self.is_reserved_for_other(device, session) {
            return false;
        }
        *self.devices.entry(device).or_default().uses.entry(session).or_default() += 1;
        true
    }

    /// Ends a use.
    pub(crate) fn end_use(&mut self, now: Instant, session: SessionId, device: Device) {
        let Some(queue) = self.devices.get_mut(&device) else { return };
        if let Entry::Occupied(mut uses) = queue.uses.entry(session) {
            *uses.get_mut() -= 1;
            if *uses.get() == 0 {
                uses.remove();
                self.settle(now, device);
            }
        }
    }

    /// Lets a session count its uses itself from now on. It uses nothing yet.
    pub(crate) fn add_remote(&mut self, session: SessionId) {
        self.remote.insert(session, 0);
    }

    /// Returns the devices that are reserved for others than this session, which counts its uses
    /// itself, of those that it may not share; and the number of this list.
    pub(crate) fn take_reserved_for_others(&mut self, session: SessionId) -> Option<(u64, Vec<Device>)> {
        let next = self.remote.get_mut(&session)?;
        let number = *next;
        *next += 1;
        let reserved =
            self.devices.iter().filter(|(_, queue)| queue.reserved_for.is_some_and(|other| other != session));
        let devices = reserved.map(|(device, _)| *device).filter(|device| !self.policy.is_shared(*device));
        Some((number, devices.collect()))
    }

    /// Takes the answer of a session that it does not use a device, and will not before it has had
    /// a later list than that of this number.
    pub(crate) fn take_unused(&mut self, now: Instant, session: SessionId, number: u64, device: Device) {
        let Some(queue) = self.devices.get_mut(&device) else { return };
        if queue.asked.get(&session).is_some_and(|first| *first <= number) {
            queue.asked.remove(&session);
            self.settle(now, device);
        }
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

    /// Returns true if the device is reserved for another session than this one.
    pub(crate) fn is_reserved_for_other(&self, device: Device, session: SessionId) -> bool {
        let reserved_for = self.devices.get(&device).and_then(|queue| queue.reserved_for);
        reserved_for.is_some_and(|other| other != session)
    }

    /// Returns the number of requests that will be granted before this one as things stand, with
    /// the one that holds the device; at most `limit`. Zero for the first that waits for the end of
    /// uses, and for one that is granted or has ended.
    pub(crate) fn ahead(&self, id: LeaseId, limit: usize) -> usize {
        let Some(lease) = self.leases.get(&id).filter(|lease| lease.granted.is_none()) else { return 0 };
        let Some(queue) = self.devices.get(&lease.device) else { return 0 };
        // Counted up to the limit only: clients may ask often.
        let held = usize::from(queue.holder.is_some());
        held + queue.waiting.range(..lease.order(id)).take(limit.saturating_sub(held)).count()
    }

    /// Returns the devices that are held or asked for, in their order, with up to `max_next` of the
    /// requests that wait for each.
    pub(crate) fn devices(&self, now: Instant, max_next: usize) -> impl Iterator<Item = DeviceLeases> {
        self.devices.iter().filter_map(move |(device, queue)| {
            let reserved_for = queue.reserved_for?;
            let holder = queue.holder.and_then(|holder| self.leases.get(&holder));
            let held = holder
                .and_then(|lease| lease.granted)
                .map_or(Duration::ZERO, |grant| now.saturating_duration_since(grant.since));
            let left = holder.map_or(Duration::ZERO, |lease| lease.duration.saturating_sub(held));
            let used_by = if holder.is_some() { 0 } else { queue.used_by_others(reserved_for) as u64 };
            let next = queue.waiting.iter().take(max_next).filter_map(|(_, id)| {
                let Lease { session, priority, requested, .. } = self.leases.get(id)?;
                let waited = now.saturating_duration_since(*requested);
                Some(NextLease { session: *session, priority: *priority, waited })
            });
            Some(DeviceLeases {
                device: *device,
                holder: holder.map(|lease| lease.session),
                held,
                left,
                waiting: queue.waiting.len() as u64,
                used_by,
                next: next.collect(),
            })
        })
    }

    pub(crate) fn totals(&self) -> LeaseTotals {
        self.totals
    }

    /// Reserves and grants a device as its requests and uses demand, and removes its entry if there
    /// are none.
    fn settle(&mut self, now: Instant, device: Device) {
        let Some(queue) = self.devices.get_mut(&device) else { return };
        let next = queue.holder.or_else(|| queue.waiting.first().map(|(_, id)| *id));
        let reserved_for = next.and_then(|id| self.leases.get(&id)).map(|lease| lease.session);
        let before = std::mem::replace(&mut queue.reserved_for, reserved_for);
        if before != reserved_for {
            self.events.push_back(match reserved_for {
                Some(session) => LeaseEvent::Reserved { device, session },
                None => {
                    // The next reservation asks all of them again, by a later list.
                    queue.asked.clear();
                    LeaseEvent::Freed { device }
                }
            });
            if reserved_for.is_some() && !self.policy.is_shared(device) {
                // Those that could use the device until now. To the others it is closed already.
                let open_to = self.remote.iter().filter(|(session, _)| {
                    before.is_none_or(|before| before == **session) && Some(**session) != reserved_for
                });
                queue.asked.extend(open_to.map(|(session, number)| (*session, *number)));
            }
        }
        if let (None, Some(id), Some(session)) = (queue.holder, next, reserved_for)
            && queue.used_by_others(session) == 0
        {
            queue.waiting.pop_first();
            queue.holder = Some(id);
            self.totals.waiting -= 1;
            self.grant(now, id);
        } else if queue.is_empty() {
            self.devices.remove(&device);
        }
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
