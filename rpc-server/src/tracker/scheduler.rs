//! The scheduler: a state machine without I/O and without a clock that gives servers to requests.
//!
//! Inputs are events with their times: servers register, renew and leave; requests arrive and are
//! cancelled. [`poll_event`](Scheduler::poll_event) returns the consequences, and
//! [`next_timeout`](Scheduler::next_timeout) the time for
//! [`handle_timeout`](Scheduler::handle_timeout).
//!
//! A server has a number of *slots*. A slot is free, *granted* (a client has a ticket for it), or
//! *in use*. A request asks for a number of slots at servers with the properties that it names, and
//! gets all of them at once or waits. The rules, which the tests check against a simpler program:
//!
//! 1. Requests are considered by priority, and within a priority in the order of arrival. A request
//!    that can be served then is served.
//! 2. A request that must wait *reserves* all free slots that it could use against later requests.
//!    So slots accumulate for a request for many, and single requests do not take them one by one.
//!    Requests that compete for none of these slots overtake it. Of the requests that ask for
//!    the same, each slot at another server, the first [`Policy::max_reserving`] that must wait
//!    reserve slots. Those behind them that ask for more slots than these leave reserve none, and
//!    may be overtaken until one of these is served. Behind twice as many, none is considered.
//! 3. A request that all servers together could not serve, even if they were free, reserves
//!    nothing: it waits for servers that may never register, and fails when it has waited so for
//!    longer than it allows.
//! 4. Slots are taken from as many servers as possible: one from each, reachable servers first,
//!    then those with most free slots, then those with the least recent grant.
//!
//! All slots of a request are granted in one step, so no two requests ever hold slots that the
//! other needs.
//!
//! A granted slot is free again when the server reports that the session of the ticket has ended,
//! or reports at a time past the expiry of the ticket, by its own clock, that it has not seen the
//! ticket. A late report returns a slot late, and never twice. A server that is silent for the
//! length of its lease is dropped with all of its slots.
//!
//! A server that *drains* has no slots for requests, as if it were not registered: no client gets
//! it, and no request waits or reserves for it. Its sessions and granted slots stay.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::tracker::{ServerRequest, ServerStatus};

use self::property_index::PropertyIndex;
use self::request_classes::{ClassId, RequestClasses};
pub(in crate::tracker) use self::server::usable;
use self::server::{GrantOrder, GrantedTicket, Server};
use super::millis;

pub(crate) use self::types::{
    ClaimId, Event, GrantedSlot, Occupancy, OccupancyKind, Offer, Policy, ServerId, SlotTotals,
};

mod next_grants;
mod property_index;
mod request_classes;
mod server;
#[cfg(test)]
mod tests;
mod types;
#[cfg(feature = "tvm")]
mod unreported;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Lease(ServerId),
    Claim(ClaimId),
    Unservable(ClaimId),
    Abandoned(ClaimId),
}

/// Time that servers have to report the tickets of a client that is gone as used. They report each
/// session at once.
const REPORT_TIME: Duration = Duration::from_secs(1);

/// The order of requests: the higher priority first, then the earlier one.
type QueueOrder = (Reverse<i32>, ClaimId);

#[derive(Debug)]
pub(crate) struct PendingRequest {
    pub(crate) request: Arc<ServerRequest>,
    /// Peer that the request counts against.
    peer: String,
    pub(crate) since: Instant,
    /// Timer of the request. One has at most one.
    timer: Option<(Instant, Timer)>,
    class: ClassId,
}

/// Servers with one key.
#[derive(Debug, Default)]
struct Pool {
    servers: BTreeSet<ServerId>,
    /// Servers with free slots, in the order of grants.
    with_free: BTreeSet<GrantOrder>,
    /// Sums over the servers. Requests are not counted here, since they may wait for a key that no
    /// server has.
    totals: SlotTotals,
}

/// Scheduler of a tracker; see the [module](self).
#[derive(Debug)]
pub(crate) struct Scheduler {
    policy: Policy,
    servers: HashMap<ServerId, Server>,
    /// Pools by key, in order: an error lists the first keys.
    pools: BTreeMap<String, Pool>,
    properties: PropertyIndex,
    by_peer: HashMap<String, usize>,
    waiting: BTreeMap<QueueOrder, PendingRequest>,
    classes: RequestClasses,
    priorities: HashMap<ClaimId, i32>,
    waiting_by_peer: HashMap<String, usize>,
    waiting_by_key: HashMap<String, usize>,
    timers: BTreeSet<(Instant, Timer)>,
    /// Granted slots of claims whose clients are gone, until their timers.
    abandoned: HashMap<ClaimId, Vec<(ServerId, u64)>>,
    events: VecDeque<Event>,
    totals: SlotTotals,
    next_server: u64,
    next_claim: u64,
    next_serial: u64,
    /// Number of times that a server was compared with a request.
    #[cfg(test)]
    compared: std::cell::Cell<u64>,
}

impl Scheduler {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            servers: HashMap::new(),
            pools: BTreeMap::new(),
            properties: PropertyIndex::default(),
            by_peer: HashMap::new(),
            waiting: BTreeMap::new(),
            classes: RequestClasses::default(),
            priorities: HashMap::new(),
            waiting_by_peer: HashMap::new(),
            waiting_by_key: HashMap::new(),
            timers: BTreeSet::new(),
            abandoned: HashMap::new(),
            events: VecDeque::new(),
            totals: SlotTotals::default(),
            next_server: 1,
            next_claim: 1,
            next_serial: 1,
            #[cfg(test)]
            compared: std::cell::Cell::default(),
        }
    }

    /// Registers a server of `peer` with its first report.
    ///
    /// # Errors
    ///
    /// A limit is reached. The error names it.
    pub(crate) fn register(
        &mut self,
        now: Instant,
        peer: &str,
        offer: Arc<Offer>,
        status: &ServerStatus,
    ) -> Result<ServerId> {
        let policy = &self.policy;
        let of_peer = self.by_peer.get(peer).copied().unwrap_or_default();
        check_room("max_servers", policy.max_servers, self.servers.len())?;
        check_room("max_servers_per_peer", policy.max_servers_per_peer, of_peer)?;
        let id = ServerId(self.next_server);
        self.next_server += 1;
        *self.by_peer.entry(peer.to_owned()).or_default() += 1;
        let lease_end = now + policy.lease;
        let server = Server {
            offer,
            peer: peer.to_owned(),
            uses: BTreeMap::new(),
            granted: BTreeMap::new(),
            reachable: true,
            lease_end: Some(lease_end),
            registered: now,
            heard: now,
            clock_ms: status.now_ms,
            last_granted: 0,
            is_draining: false,
        };
        let offer = server.offer.clone();
        self.add_slots(now, id, &server);
        self.timers.insert((lease_end, Timer::Lease(id)));
        self.servers.insert(id, server);
        self.take_report(now, id, status);
        // The new slots may serve a request together with slots that were free before.
        self.serve(now, Some(&offer.key));
        Ok(id)
    }

    /// Takes a report of a server and renews its lease. Returns false if the server is not
    /// registered (any more).
    pub(crate) fn report(&mut self, now: Instant, id: ServerId, status: &ServerStatus) -> bool {
        let free = self.servers.get(&id).map(Server::free);
        if !self.take_report(now, id, status) {
            return false;
        }
        // Most reports free no slot, and then no request can be served.
        if let Some(server) = self.servers.get(&id).filter(|server| Some(server.free()) > free) {
            let key = server.offer.key.clone();
            self.serve(now, Some(&key));
        }
        true
    }

    fn take_report(&mut self, now: Instant, id: ServerId, status: &ServerStatus) -> bool {
        let lease = self.policy.lease;
        let Some(server) = self.servers.get_mut(&id) else { return false };
        (server.heard, server.clock_ms) = (now, status.now_ms);
        if let Some(lease_end) = &mut server.lease_end {
            self.timers.remove(&(*lease_end, Timer::Lease(id)));
            *lease_end = now + lease;
            self.timers.insert((*lease_end, Timer::Lease(id)));
        }
        self.change(id, |server| {
            let mut before = std::mem::take(&mut server.uses);
            for used in &status.uses {
                let granted = used.serial.and_then(|serial| server.granted.remove(&serial));
                let (client, since) = match (granted, before.remove(&used.id)) {
                    (Some(granted), _) => (granted.client, now),
                    (None, Some(held)) => (held.client, held.since),
                    (None, None) => {
                        let since = now.checked_sub(Duration::from_millis(used.for_ms)).unwrap_or(now);
                        (used.client.clone(), since)
                    }
                };
                let kind = if used.direct { OccupancyKind::Direct } else { OccupancyKind::InUse };
                let (session, silent_ms) = (Some(used.id), used.silent_ms);
                server.uses.insert(used.id, Occupancy { client, since, kind, session, silent_ms });
            }
            for serial in &status.spent {
                server.granted.remove(serial);
            }
            // The server refuses these tickets from now on, and would have reported them if it had
            // seen them.
            server.granted.retain(|_, granted| granted.expires_ms > status.now_ms);
        });
        true
    }

    /// Sets whether the server is reachable. Reachable servers are granted first.
    pub(crate) fn set_reachable(&mut self, id: ServerId, reachable: bool) {
        self.change(id, |server| server.reachable = reachable);
    }

    /// Begins or ends the draining of a server. Returns false if it is not registered.
    pub(crate) fn set_draining(&mut self, now: Instant, id: ServerId, is_draining: bool) -> bool {
        let Some(mut server) = self.servers.remove(&id) else { return false };
        let key = server.offer.key.clone();
        match (server.is_draining, is_draining) {
            (false, true) => {
                self.remove_slots(now, id, &server);
                server.is_draining = true;
            }
            (true, false) => {
                server.is_draining = false;
                self.add_slots(now, id, &server);
            }
            _ => {}
        }
        self.servers.insert(id, server);
        // Slots have come, or requests reserve none any more that the server alone could serve.
        self.serve(now, Some(&key));
        true
    }

    /// Returns the number of servers that drain and would suit a request.
    pub(crate) fn draining_for(&self, request: &ServerRequest) -> usize {
        self.servers.values().filter(|server| server.is_draining && server.offer.suits(request)).count()
    }

    /// Removes a server with all its grants.
    pub(crate) fn unregister(&mut self, now: Instant, id: ServerId) -> bool {
        let Some(server) = self.forget(now, id) else { return false };
        // A request that cannot be served without this server no longer reserves slots.
        self.serve(now, Some(&server.offer.key));
        true
    }

    /// Adds a request, which may be served at once.
    ///
    /// # Errors
    ///
    /// A limit is reached. The error names it.
    pub(crate) fn request(&mut self, now: Instant, peer: &str, request: ServerRequest) -> Result<ClaimId> {
        let policy = &self.policy;
        let of_peer = self.waiting_by_peer.get(peer).copied().unwrap_or_default();
        check_room("max_waiting", policy.max_waiting, self.waiting.len())?;
        check_room("max_waiting_per_client", policy.max_waiting_per_client, of_peer)?;
        let id = ClaimId(self.next_claim);
        self.next_claim += 1;
        let priority = request.priority;
        self.priorities.insert(id, priority);
        *self.waiting_by_peer.entry(peer.to_owned()).or_default() += 1;
        *self.waiting_by_key.entry(request.key.clone()).or_default() += 1;
        let (key, request, order) = (request.key.clone(), Arc::new(request), (Reverse(priority), id));
        let mut classes = std::mem::take(&mut self.classes);
        let class = classes.insert(now, order, &request, || {
            self.candidates(&request).map(|server| u64::from(usable(&request, server.offer.capacity))).sum()
        });
        self.classes = classes;
        let timer = request.timeout_ms.and_then(|millis| after(now, millis, Timer::Claim(id)));
        self.timers.extend(timer);
        let waiting = PendingRequest { request, peer: peer.to_owned(), since: now, timer, class };
        self.waiting.insert(order, waiting);
        self.check_servable(now, id);
        self.serve(now, Some(&key));
        // A request with a time limit of zero is served at once or not at all.
        self.handle_timeout(now);
        Ok(id)
    }

    /// Cancels a request. The slots that it reserved may serve others.
    pub(crate) fn cancel(&mut self, now: Instant, id: ClaimId) {
        if let Some(waiting) = self.remove_waiting(id) {
            self.serve(now, Some(&waiting.request.key));
        }
    }

    /// Takes back unused granted slots of `claim`. Returns their number.
    pub(crate) fn give_back(&mut self, now: Instant, claim: ClaimId, slots: &[(ServerId, u64)]) -> usize {
        let count = self.take_back(claim, slots);
        if count > 0 {
            self.serve(now, None);
        }
        count
    }

    /// As [`give_back`](Self::give_back), without serving requests.
    fn take_back(&mut self, claim: ClaimId, slots: &[(ServerId, u64)]) -> usize {
        let mut count = 0;
        for (id, serial) in slots {
            let granted = self.servers.get(id).and_then(|server| server.granted.get(serial));
            if granted.is_some_and(|granted| granted.claim == claim) {
                self.change(*id, |server| _ = server.granted.remove(serial));
                count += 1;
            }
        }
        count
    }

    /// Takes back the granted slots of a claim whose client is gone, as soon as their servers have
    /// had time to report that they are in use.
    pub(crate) fn abandon(&mut self, now: Instant, claim: ClaimId, slots: Vec<(ServerId, u64)>) {
        if !slots.is_empty() && self.abandoned.insert(claim, slots).is_none() {
            self.timers.insert((now + REPORT_TIME, Timer::Abandoned(claim)));
        }
    }

    /// Handles the timers that are due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let mut freed = false;
        // All timers are handled first: no server may be granted whose lease ends at the same
        // moment.
        while let Some((_, timer)) = self.timers.first().copied().filter(|(due, _)| *due <= now) {
            self.timers.pop_first();
            match timer {
                Timer::Lease(server) => {
                    if self.forget(now, server).is_some() {
                        freed = true;
                        self.events.push_back(Event::LeaseExpired { server });
                    }
                }
                Timer::Abandoned(claim) => {
                    let slots = self.abandoned.remove(&claim).unwrap_or_default();
                    freed |= self.take_back(claim, &slots) > 0;
                }
                Timer::Claim(claim) => {
                    let possible = self.possible(claim);
                    if let Some(PendingRequest { request, .. }) = self.remove_waiting(claim) {
                        self.events.push_back(Event::TimedOut { claim, wanted: request.count, possible });
                        freed = true;
                    }
                }
                Timer::Unservable(claim) => self.check_servable(now, claim),
            }
        }
        if freed {
            self.serve(now, None);
        }
    }

    /// Ends a request that has been impossible for as long as it allows. Otherwise looks again when
    /// that may be so: at that time, or once the request becomes impossible.
    fn check_servable(&mut self, now: Instant, claim: ClaimId) {
        let Some(order) = self.priorities.get(&claim).map(|priority| (Reverse(*priority), claim)) else { return };
        let Some(waiting) = self.waiting.get_mut(&order) else { return };
        let limit = waiting.request.unservable_timeout_ms.filter(|_| waiting.request.timeout_ms.is_none());
        let (Some(limit), Some(class)) = (limit, self.classes.get_mut(waiting.class)) else { return };
        let possible = class.possible;
        let Some(members) = class.members_mut(waiting.request.count) else { return };
        let Some(since) = members.impossible_since else {
            // No timer runs meanwhile: it would be due again at once if the limit is zero.
            waiting.timer = None;
            members.unobserved.insert(order);
            return;
        };
        // The request may have come later.
        waiting.timer = after(since.max(waiting.since), limit, Timer::Unservable(claim));
        match waiting.timer.filter(|(due, _)| *due <= now) {
            Some(_) => {
                let request = waiting.request.clone();
                self.remove_waiting(claim);
                self.events.push_back(Event::Unservable { claim, request, possible });
            }
            None => self.timers.extend(waiting.timer),
        }
    }

    /// Returns the number of slots that could serve a waiting request if they were free.
    fn possible(&self, claim: ClaimId) -> u64 {
        let order = self.priorities.get(&claim).map(|priority| (Reverse(*priority), claim));
        let waiting = order.and_then(|order| self.waiting.get(&order));
        waiting.and_then(|waiting| self.classes.get(waiting.class)).map_or(0, |class| class.possible)
    }

    /// Returns the keys of registered servers in order.
    pub(crate) fn keys(&self) -> impl ExactSizeIterator<Item = &str> {
        self.pools.keys().map(String::as_str)
    }

    /// Returns the next consequence. Must be called until it returns `None`.
    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Returns the time at which [`handle_timeout`](Self::handle_timeout) must be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    pub(crate) fn totals(&self) -> SlotTotals {
        SlotTotals { waiting: self.waiting.len() as u64, ..self.totals }
    }

    /// Returns the sums over the servers with this key and over the requests that name it. Those of
    /// granted slots begin again when the last of the servers has left.
    pub(crate) fn totals_of(&self, key: &str) -> SlotTotals {
        let totals = self.pools.get(key).map(|pool| pool.totals).unwrap_or_default();
        SlotTotals { waiting: self.waiting_by_key.get(key).map_or(0, |waiting| *waiting as u64), ..totals }
    }

    /// Returns the keys that waiting requests name, each with the number of these.
    #[cfg(feature = "tvm")]
    pub(crate) fn waiting_by_key(&self) -> impl Iterator<Item = (&str, usize)> {
        self.waiting_by_key.iter().map(|(key, waiting)| (key.as_str(), *waiting))
    }

    pub(crate) fn server(&self, id: ServerId) -> Option<&Server> {
        self.servers.get(&id)
    }

    /// Returns the waiting requests in the order of rule 1, each with the number of slots that
    /// could serve it if they were free.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (&PendingRequest, u64)> {
        let possible = |waiting: &PendingRequest| self.classes.get(waiting.class).map_or(0, |class| class.possible);
        self.waiting.values().map(move |waiting| (waiting, possible(waiting)))
    }

    /// Grants slots after a change for servers or requests of `key`, or of any key.
    fn serve(&mut self, now: Instant, key: Option<&str>) {
        if self.waiting.is_empty() {
            return;
        }
        for (order, slots) in self.next_grants(key) {
            self.grant(now, order, slots);
        }
    }

    /// Removes a server like [`unregister`](Self::unregister), without serving requests.
    fn forget(&mut self, now: Instant, id: ServerId) -> Option<Server> {
        let server = self.servers.remove(&id)?;
        if let Some(lease_end) = server.lease_end {
            self.timers.remove(&(lease_end, Timer::Lease(id)));
        }
        if !server.is_draining {
            self.remove_slots(now, id, &server);
        }
        count_down(&mut self.by_peer, &server.peer);
        Some(server)
    }

    /// Makes the slots of a server available to requests, without serving these.
    fn add_slots(&mut self, now: Instant, id: ServerId, server: &Server) {
        let offer = server.offer.clone();
        self.count_possible(now, &offer, |possible, slots| *possible += slots);
        self.properties.insert(id, &offer);
        let pool = self.pools.entry(offer.key.clone()).or_default();
        pool.servers.insert(id);
        pool.with_free.extend(server.grant_order(id));
        for totals in [&mut pool.totals, &mut self.totals] {
            totals.free += u64::from(server.free());
            totals.capacity += u64::from(offer.capacity);
        }
    }

    /// Takes back the slots of a server from requests.
    fn remove_slots(&mut self, now: Instant, id: ServerId, server: &Server) {
        let offer = server.offer.clone();
        self.properties.remove(id, &offer);
        self.count_possible(now, &offer, |possible, slots| *possible -= slots);
        self.totals.capacity -= u64::from(offer.capacity);
        self.totals.free -= u64::from(server.free());
        if let Some(pool) = self.pools.get_mut(&offer.key) {
            pool.totals.free -= u64::from(server.free());
            pool.totals.capacity -= u64::from(offer.capacity);
            if let Some(grant_order) = server.grant_order(id) {
                pool.with_free.remove(&grant_order);
            }
            pool.servers.remove(&id);
            if pool.servers.is_empty() {
                self.pools.remove(&offer.key);
            }
        }
    }

    /// Updates the possible slots of waiting requests when a server with this offer comes or goes.
    fn count_possible(&mut self, now: Instant, offer: &Offer, count: impl Fn(&mut u64, u64)) {
        #[cfg(test)]
        let compared = &self.compared;
        let mut to_observe = Vec::new();
        self.classes.for_offer(offer, |class| {
            #[cfg(test)]
            compared.set(compared.get() + 1);
            if offer.suits(&class.request) {
                let slots = u64::from(usable(&class.request, offer.capacity));
                class.change_possible(now, |possible| count(possible, slots), &mut to_observe);
            }
        });
        for order in to_observe {
            let Some(waiting) = self.waiting.get_mut(&order) else { continue };
            let limit = waiting.request.unservable_timeout_ms;
            waiting.timer = limit.and_then(|millis| after(now, millis, Timer::Unservable(order.1)));
            self.timers.extend(waiting.timer);
        }
    }

    fn grant(&mut self, now: Instant, order: QueueOrder, servers: Vec<ServerId>) {
        let claim = order.1;
        let Some(waiting) = self.remove_waiting(claim) else { return };
        let client = &waiting.request.client;
        let waited_ms = millis(now.saturating_duration_since(waiting.since));
        let ticket = self.policy.ticket;
        let mut slots = Vec::with_capacity(servers.len());
        for id in servers {
            let serial = self.next_serial;
            self.next_serial += 1;
            let key = self.servers.get(&id).map(|server| server.offer.key.as_str());
            let pool = key.and_then(|key| self.pools.get_mut(key)).map(|pool| &mut pool.totals);
            for totals in std::iter::once(&mut self.totals).chain(pool) {
                totals.granted += 1;
                totals.waited_ms += waited_ms;
            }
            self.change(id, |server| {
                // The clock of the server has advanced since its report.
                let expires_ms =
                    server.clock_ms.saturating_add(millis(now.saturating_duration_since(server.heard) + ticket));
                server.last_granted = serial;
                server.granted.insert(serial, GrantedTicket { claim, client: client.clone(), since: now, expires_ms });
                slots.push(GrantedSlot { server: id, serial, expires_ms });
            });
        }
        self.events.push_back(Event::Granted { claim, slots });
    }

    fn remove_waiting(&mut self, id: ClaimId) -> Option<PendingRequest> {
        let priority = self.priorities.remove(&id)?;
        let waiting = self.waiting.remove(&(Reverse(priority), id))?;
        if let Some(timer) = waiting.timer {
            self.timers.remove(&timer);
        }
        self.classes.remove(waiting.class, waiting.request.count, (Reverse(priority), id));
        count_down(&mut self.waiting_by_peer, &waiting.peer);
        count_down(&mut self.waiting_by_key, &waiting.request.key);
        Some(waiting)
    }

    /// Changes a server, and updates the free counts and its grant order.
    fn change(&mut self, id: ServerId, change: impl FnOnce(&mut Server)) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        let (before, grant_order) = (u64::from(server.free()), server.grant_order(id));
        change(server);
        let after = u64::from(server.free());
        self.totals.free = self.totals.free - before + after;
        if let Some(pool) = self.pools.get_mut(&server.offer.key) {
            pool.totals.free = pool.totals.free - before + after;
            if let Some(grant_order) = grant_order {
                pool.with_free.remove(&grant_order);
            }
            pool.with_free.extend(server.grant_order(id));
        }
    }

    /// Returns the servers with the properties that a request names.
    fn candidates<'a>(&'a self, request: &'a ServerRequest) -> impl Iterator<Item = &'a Server> {
        let rarest = self.rarest(request, |pool| pool.servers.len());
        let pools = self.pools_of(request).filter(move |_| rarest.is_none());
        let servers = rarest.into_iter().chain(pools.map(|pool| &pool.servers)).flatten();
        servers.filter_map(|id| self.servers.get(id)).filter(|server| self.suits(server, request))
    }

    /// Returns the servers with the rarest property that a request names, if they are fewer than
    /// those that `count` counts in the pools of its key.
    fn rarest(&self, request: &ServerRequest, count: impl Fn(&Pool) -> usize) -> Option<&BTreeSet<ServerId>> {
        let rarest = self.properties.rarest(request)?;
        (rarest.len() < self.pools_of(request).map(count).sum()).then_some(rarest)
    }

    /// Returns the pools of the key that a request names. No server has an empty key.
    fn pools_of(&self, request: &ServerRequest) -> impl Iterator<Item = &Pool> {
        let all = request.key.is_empty().then(|| self.pools.values());
        all.into_iter().flatten().chain(self.pools.get(&request.key))
    }

    /// Returns true if the server has the properties that a request names.
    fn suits(&self, server: &Server, request: &ServerRequest) -> bool {
        #[cfg(test)]
        self.compared.set(self.compared.get() + 1);
        server.offer.suits(request)
    }
}

/// Returns a timer that is due so long after `now`, if that is not for ever.
fn after(now: Instant, millis: u64, timer: Timer) -> Option<(Instant, Timer)> {
    Some((now.checked_add(Duration::from_millis(millis))?, timer))
}

/// Checks that a limit allows one more.
fn check_room(limit: &'static str, max: usize, now: usize) -> Result<()> {
    if now < max { Ok(()) } else { Err(RpcError::limit(limit, max as u64, now as u64 + 1)) }
}

fn count_down(counts: &mut HashMap<String, usize>, name: &str) {
    if let Some(count) = counts.get_mut(name) {
        *count -= 1;
        if *count == 0 {
            counts.remove(name);
        }
    }
}

/// Returns the error of a request that has timed out.
pub(crate) fn timed_out(wanted: u32, possible: u64, key: &str) -> RpcError {
    let what = if key.is_empty() { String::new() } else { format!(" with the key '{key}'") };
    let text = if possible < u64::from(wanted) {
        format!(
            "the time is over: {wanted} slots{what} were asked for, and the servers that are registered have {possible}"
        )
    } else {
        format!("the time is over: {wanted} of {possible} slots{what} were asked for, and others have them")
    };
    RpcError::new(ErrorKind::DeadlineExceeded, text)
}

/// Largest number of keys that an error lists.
const MAX_LISTED: usize = 8;

/// Returns the error of a request that no servers with the keys `registered` could have served for
/// the time that it allows. Lists the first of these keys, and counts the others. `draining` more
/// servers suit the request.
pub(crate) fn unservable<'a>(
    request: &ServerRequest,
    possible: u64,
    draining: usize,
    registered: impl ExactSizeIterator<Item = &'a str>,
) -> RpcError {
    let key = if request.key.is_empty() { String::new() } else { format!(" with the key '{}'", request.key) };
    let labels: String = request.labels.iter().map(|(name, value)| format!(", label {name}={value}")).collect();
    let kinds: String =
        request.devices.iter().map(|device| format!(", {} devices of {}", device.count, device.kind)).collect();
    let constraints: String = request.virtual_devices.iter().map(|device| format!(", device {device}")).collect();
    let others = registered.len().saturating_sub(MAX_LISTED);
    let keys: Vec<_> = registered.take(MAX_LISTED).collect();
    let keys = match (keys.is_empty(), others) {
        (true, _) => "no server is registered".to_owned(),
        (false, 0) => format!("servers are registered with the keys: {}", keys.join(", ")),
        (false, others) => format!("servers are registered with the keys: {} and {others} others", keys.join(", ")),
    };
    let (wanted, limit) = (request.count, Duration::from_millis(request.unservable_timeout_ms.unwrap_or_default()));
    let slots = if wanted == 1 { "slot" } else { "slots" };
    let distinct = if request.distinct && wanted > 1 { ", each at another server" } else { "" };
    let draining = match draining {
        0 => String::new(),
        1 => "; one more that suits is draining".to_owned(),
        more => format!("; {more} more that suit are draining"),
    };
    let text = format!(
        "no servers that could serve the request have come for {limit:?}: {wanted} {slots}{key}{labels}{kinds}\
         {constraints}{distinct} were asked for, and the servers that are registered have {possible}; {keys}{draining}"
    );
    RpcError::new(ErrorKind::DeadlineExceeded, text)
}
