//! Who gets which server next: a state machine without I/O and without a clock.
//!
//! What happens is told to it, with the time that it is: servers register, renew and go, requests come and are given up.
//! [`poll_event`](Scheduler::poll_event) says what follows of it, and [`next_timeout`](Scheduler::next_timeout) when to call
//! [`handle_timeout`](Scheduler::handle_timeout).
//!
//! A server has so many *places*. A place is free, *granted* (somebody has a ticket for it), or *in use*. A request asks for a
//! number of places at servers that have what it names, and gets all of them at once or waits. The rules, which the tests
//! compare with a simpler program:
//!
//! 1. Requests are looked at by priority, and within one in the order in which they came. Whoever can be served then is.
//! 2. A request that has to wait *holds back* all free places that it could use from those behind it. So places come together
//!    for a request for many, and single requests do not take them away one by one. Those that compete for nothing that it
//!    could use pass it.
//! 3. A request that all servers together could not serve, if they were free, holds nothing back: it waits for servers to
//!    register, and nobody knows whether they will.
//! 4. Places are taken at as many servers as possible: one at each, those that can be reached first, then those with most
//!    free places, then those that were granted the longest time ago.
//!
//! With all places of a request granted in one step, no two requests ever hold part of what the other one needs.
//!
//! A granted place is free again when the server says that the ticket was used and is no more, or when it says by a clock that
//! has passed the ticket's end that it has not seen the ticket. A report that is late makes a place come back late, and never
//! twice. A server that says nothing is forgotten with all of its places when its lease is over.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Result, RpcError};
use rpc_transports::tracker::{DeviceOffer, ServerRequest, ServerStatus};

use super::millis;

#[cfg(test)]
mod tests;

/// A registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ServerId(pub(crate) u64);

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ClaimId(pub(crate) u64);

/// How long things last, and how many there may be.
#[derive(Clone, Debug)]
pub(crate) struct Policy {
    /// How long a registration lasts without being renewed.
    pub(crate) lease: Duration,
    /// How long a ticket is good.
    pub(crate) ticket: Duration,
    pub(crate) max_servers: usize,
    pub(crate) max_servers_per_peer: usize,
    pub(crate) max_waiting: usize,
    pub(crate) max_waiting_per_client: usize,
}

/// What a server offers.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) key: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) devices: Vec<DeviceOffer>,
    pub(crate) capacity: u32,
}

/// What follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// A request has its places.
    Granted { claim: ClaimId, places: Vec<Place> },
    /// The time of a request is over. `possible` places could serve it if they were free.
    TimedOut { claim: ClaimId, wanted: u32, possible: u64 },
    /// A server was not heard of for the length of its lease, and is forgotten.
    LeaseExpired { server: ServerId },
}

/// A place that was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) server: ServerId,
    /// The number of the ticket.
    pub(crate) serial: u64,
    /// When the ticket stops being good, by the server's clock.
    pub(crate) expires_ms: u64,
}

/// A place that is not free.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) client: String,
    pub(crate) since: Instant,
    pub(crate) kind: HeldKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeldKind {
    Granted,
    InUse,
    Direct,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Timer {
    Lease(ServerId),
    Claim(ClaimId),
}

/// The order of requests: the higher priority first, then the earlier one.
type Order = (Reverse<i32>, ClaimId);

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) offer: Arc<Offer>,
    peer: String,
    /// By the server's own numbers.
    uses: BTreeMap<u64, Held>,
    /// By the numbers of the tickets.
    granted: BTreeMap<u64, Granted>,
    reachable: bool,
    lease_end: Instant,
    pub(crate) registered: Instant,
    pub(crate) heard: Instant,
    /// What its clock said when it was heard.
    clock_ms: u64,
    /// When it was granted last, counted in grants.
    last_granted: u64,
}

#[derive(Debug)]
struct Granted {
    claim: ClaimId,
    client: String,
    since: Instant,
    /// When the ticket stops being good, by the server's clock.
    expires_ms: u64,
}

#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) request: Arc<ServerRequest>,
    /// Whose it is, as limits are counted.
    peer: String,
    pub(crate) since: Instant,
    until: Option<Instant>,
    /// How many places could serve it if they were free. Kept up to date, because it is asked for more often than it changes.
    pub(crate) possible: u64,
}

/// The servers with one key.
#[derive(Debug, Default)]
struct Pool {
    servers: BTreeSet<ServerId>,
    /// Those with free places, in the order in which these are granted.
    with_free: BTreeSet<Rank>,
    free: u64,
}

/// The order of rule 4: can it be reached, how many places are free, when was it granted last.
type Rank = (bool, Reverse<u32>, u64, ServerId);

/// How much there is of everything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) capacity: u64,
    pub(crate) free: u64,
    pub(crate) waiting: u64,
    /// Places granted so far.
    pub(crate) granted: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Scheduler {
    policy: Policy,
    servers: HashMap<ServerId, Server>,
    pools: HashMap<String, Pool>,
    by_peer: HashMap<String, usize>,
    waiting: BTreeMap<Order, Waiting>,
    /// The same by key, with an empty one for those that take any.
    queues: HashMap<String, BTreeSet<Order>>,
    priorities: HashMap<ClaimId, i32>,
    waiting_by_peer: HashMap<String, usize>,
    timers: BTreeSet<(Instant, Timer)>,
    events: VecDeque<Event>,
    totals: Totals,
    next_server: u64,
    next_claim: u64,
    next_serial: u64,
}

impl Scheduler {
    pub(crate) fn new(policy: Policy) -> Self {
        Self {
            policy,
            servers: HashMap::new(),
            pools: HashMap::new(),
            by_peer: HashMap::new(),
            waiting: BTreeMap::new(),
            queues: HashMap::new(),
            priorities: HashMap::new(),
            waiting_by_peer: HashMap::new(),
            timers: BTreeSet::new(),
            events: VecDeque::new(),
            totals: Totals::default(),
            next_server: 1,
            next_claim: 1,
            next_serial: 1,
        }
    }

    /// A server comes, from `peer`, and says who uses it.
    ///
    /// # Errors
    ///
    /// A limit that is reached, by its name.
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
            lease_end,
            registered: now,
            heard: now,
            clock_ms: status.now_ms,
            last_granted: 0,
        };
        let offer = server.offer.clone();
        self.count_possible(&offer, |possible, places| *possible += places);
        let pool = self.pools.entry(offer.key.clone()).or_default();
        pool.servers.insert(id);
        pool.with_free.extend(server.rank(id));
        pool.free += u64::from(server.free());
        self.totals.free += u64::from(server.free());
        self.totals.capacity += u64::from(offer.capacity);
        self.timers.insert((lease_end, Timer::Lease(id)));
        self.servers.insert(id, server);
        self.take_report(now, id, status);
        // Others may be served by it together with those that were free already.
        self.serve(now, Some(&offer.key));
        Ok(id)
    }

    /// A server says who uses it, and which tickets were used and are of no more use. Its lease begins anew. `false` if it is
    /// not registered (any more).
    pub(crate) fn report(&mut self, now: Instant, id: ServerId, status: &ServerStatus) -> bool {
        let free = self.servers.get(&id).map(Server::free);
        if !self.take_report(now, id, status) {
            return false;
        }
        // Most reports free nothing, and then nobody can be served who could not before.
        if let Some(server) = self.servers.get(&id).filter(|server| Some(server.free()) > free) {
            let key = server.offer.key.clone();
            self.serve(now, Some(&key));
        }
        true
    }

    fn take_report(&mut self, now: Instant, id: ServerId, status: &ServerStatus) -> bool {
        let lease = self.policy.lease;
        let Some(server) = self.servers.get_mut(&id) else { return false };
        self.timers.remove(&(server.lease_end, Timer::Lease(id)));
        server.lease_end = now + lease;
        (server.heard, server.clock_ms) = (now, status.now_ms);
        self.timers.insert((server.lease_end, Timer::Lease(id)));
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
                let kind = if used.direct { HeldKind::Direct } else { HeldKind::InUse };
                server.uses.insert(used.id, Held { client, since, kind });
            }
            for serial in &status.spent {
                server.granted.remove(serial);
            }
            // It takes these no more, and would have named them if it had.
            server.granted.retain(|_, granted| granted.expires_ms > status.now_ms);
        });
        true
    }

    /// Whether the server has been found at its address. Others are granted first.
    pub(crate) fn set_reachable(&mut self, id: ServerId, reachable: bool) {
        self.change(id, |server| server.reachable = reachable);
    }

    /// A server goes. What was granted of it is no longer.
    pub(crate) fn unregister(&mut self, now: Instant, id: ServerId) -> bool {
        let Some(server) = self.forget(id) else { return false };
        // A request that cannot be served without it holds nothing back any more.
        self.serve(now, Some(&server.offer.key));
        true
    }

    /// A request comes. It may be served before this returns.
    ///
    /// # Errors
    ///
    /// A limit that is reached, by its name.
    pub(crate) fn request(&mut self, now: Instant, peer: &str, request: ServerRequest) -> Result<ClaimId> {
        let policy = &self.policy;
        let of_peer = self.waiting_by_peer.get(peer).copied().unwrap_or_default();
        check_room("max_waiting", policy.max_waiting, self.waiting.len())?;
        check_room("max_waiting_per_client", policy.max_waiting_per_client, of_peer)?;
        let id = ClaimId(self.next_claim);
        self.next_claim += 1;
        let until = request.timeout_ms.and_then(|millis| now.checked_add(Duration::from_millis(millis)));
        if let Some(until) = until {
            self.timers.insert((until, Timer::Claim(id)));
        }
        let priority = request.priority;
        self.priorities.insert(id, priority);
        *self.waiting_by_peer.entry(peer.to_owned()).or_default() += 1;
        self.queues.entry(request.key.clone()).or_default().insert((Reverse(priority), id));
        let possible = self.candidates(&request).map(|server| u64::from(usable(&request, server.offer.capacity))).sum();
        let (key, request) = (request.key.clone(), Arc::new(request));
        let waiting = Waiting { request, peer: peer.to_owned(), since: now, until, possible };
        self.waiting.insert((Reverse(priority), id), waiting);
        self.serve(now, Some(&key));
        // Whoever has no time is served at once or not at all.
        self.handle_timeout(now);
        Ok(id)
    }

    /// A request is given up. Those that it held back are looked at.
    pub(crate) fn cancel(&mut self, now: Instant, id: ClaimId) {
        if let Some(waiting) = self.remove_waiting(id) {
            self.serve(now, Some(&waiting.request.key));
        }
    }

    /// Places that were granted to `claim` are not taken. Says how many of them were.
    pub(crate) fn give_back(&mut self, now: Instant, claim: ClaimId, places: &[(ServerId, u64)]) -> usize {
        let mut count = 0;
        for (id, serial) in places {
            let granted = self.servers.get(id).and_then(|server| server.granted.get(serial));
            if granted.is_some_and(|granted| granted.claim == claim) {
                self.change(*id, |server| _ = server.granted.remove(serial));
                count += 1;
            }
        }
        if count > 0 {
            self.serve(now, None);
        }
        count
    }

    /// Does what is due.
    pub(crate) fn handle_timeout(&mut self, now: Instant) {
        let mut freed = false;
        // All that is due, before anybody is served: nobody is granted a server whose lease ends at the same moment.
        while let Some((_, timer)) = self.timers.first().copied().filter(|(due, _)| *due <= now) {
            self.timers.pop_first();
            match timer {
                Timer::Lease(server) => {
                    if self.forget(server).is_some() {
                        freed = true;
                        self.events.push_back(Event::LeaseExpired { server });
                    }
                }
                Timer::Claim(claim) => {
                    if let Some(Waiting { request, possible, .. }) = self.remove_waiting(claim) {
                        self.events.push_back(Event::TimedOut { claim, wanted: request.count, possible });
                        freed = true;
                    }
                }
            }
        }
        if freed {
            self.serve(now, None);
        }
    }

    /// What follows of what has been told. To be called until it gives nothing more.
    pub(crate) fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called.
    pub(crate) fn next_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals { waiting: self.waiting.len() as u64, ..self.totals }
    }

    pub(crate) fn server(&self, id: ServerId) -> Option<&Server> {
        self.servers.get(&id)
    }

    /// Requests that wait, in the order in which they are looked at.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &Waiting> {
        self.waiting.values()
    }

    /// Grants what can be granted, where something has changed for servers or requests of `key`, or of any.
    fn serve(&mut self, now: Instant, key: Option<&str>) {
        if self.waiting.is_empty() {
            return;
        }
        for (order, places) in self.plan(key) {
            self.grant(now, order, places);
        }
    }

    /// What can be granted: rules 1 to 3. Looks only at keys of which places are free, and at no two requests in full that ask
    /// for the same and get nothing, so that a long queue costs little while there is nothing for it.
    fn plan(&self, changed: Option<&str>) -> Vec<(Order, Vec<ServerId>)> {
        let mut plan = Vec::new();
        let mut left = self.totals.free;
        // What is granted here or held back: of each server, and of each key.
        let mut taken: HashMap<ServerId, u32> = HashMap::new();
        let mut taken_of: HashMap<&str, u64> = HashMap::new();
        // For whom there is nothing left.
        let mut nothing_for = HashSet::new();
        let free_of = |key: &str| self.pools.get(key).map_or(0, |pool| pool.free);
        // Requests of different keys have to do with each other only through those that take any.
        let alone = changed.filter(|key| !key.is_empty() && !self.queues.contains_key(""));
        let queues: Vec<(&str, &BTreeSet<Order>)> = match alone {
            Some(key) => self.queues.get_key_value(key).map(|(key, queue)| (key.as_str(), queue)).into_iter().collect(),
            None => self.queues.iter().map(|(key, queue)| (key.as_str(), queue)).collect(),
        };
        let with_free = queues.into_iter().filter(|(key, _)| key.is_empty() || free_of(key) > 0);
        // The next one of each queue.
        let mut next: BTreeSet<(Order, &str)> =
            with_free.filter_map(|(key, queue)| Some((*queue.first()?, key))).collect();
        while let Some((order, key)) = next.pop_first().filter(|_| left > 0) {
            if let Some(Waiting { request, possible, .. }) = self.waiting.get(&order)
                && *possible >= u64::from(request.count)
            {
                let wants = (key, &request.labels, &request.devices, &request.virtual_devices);
                if !nothing_for.contains(&wants) {
                    let found = self.find(request, &taken);
                    let total: u64 = found.iter().map(|(_, places)| u64::from(*places)).sum();
                    let is_served = total >= u64::from(request.count);
                    let took: Vec<(ServerId, u32)> = if is_served {
                        let places = choose(request.count, found);
                        plan.push((order, places.clone()));
                        places.into_iter().map(|id| (id, 1)).collect()
                    } else {
                        if !request.distinct {
                            nothing_for.insert(wants);
                        }
                        found.into_iter().map(|((.., id), places)| (id, places)).collect()
                    };
                    for (id, places) in took {
                        *taken.entry(id).or_default() += places;
                        left -= u64::from(places);
                        if let Some(server) = self.servers.get(&id) {
                            *taken_of.entry(&server.offer.key).or_default() += u64::from(places);
                        }
                    }
                }
            }
            let is_over = !key.is_empty() && free_of(key) <= taken_of.get(key).copied().unwrap_or_default();
            let behind = self.queues.get(key).filter(|_| !is_over);
            if let Some(order) = behind.and_then(|queue| queue.range((Bound::Excluded(order), Bound::Unbounded)).next())
            {
                next.insert((*order, key));
            }
        }
        plan
    }

    /// The free places that a request could use and that are not `taken`, by servers in the order of rule 4. The first one is
    /// enough for a request for one, unless something is taken.
    fn find(&self, request: &ServerRequest, taken: &HashMap<ServerId, u32>) -> Vec<(Rank, u32)> {
        let all = request.key.is_empty().then(|| self.pools.values());
        let pools = all.into_iter().flatten().chain(self.pools.get(&request.key));
        let suits = |rank: &&Rank| self.servers.get(&rank.3).is_some_and(|server| server.offer.suits(request));
        let is_simple = request.count == 1 && taken.is_empty();
        let limit = if is_simple { 1 } else { usize::MAX };
        let ranks = pools.flat_map(|pool| pool.with_free.iter().filter(suits).take(limit));
        let left = |(unreachable, Reverse(free), last_granted, id): Rank| {
            let free = free - taken.get(&id).copied().unwrap_or_default();
            ((unreachable, Reverse(free), last_granted, id), usable(request, free))
        };
        let mut found: Vec<_> = ranks.copied().map(left).filter(|(_, places)| *places > 0).collect();
        found.sort_unstable();
        found
    }

    /// As [`unregister`](Self::unregister), and looks at nobody who waits.
    fn forget(&mut self, id: ServerId) -> Option<Server> {
        let server = self.servers.remove(&id)?;
        self.timers.remove(&(server.lease_end, Timer::Lease(id)));
        let offer = server.offer.clone();
        self.count_possible(&offer, |possible, places| *possible -= places);
        self.totals.capacity -= u64::from(offer.capacity);
        self.totals.free -= u64::from(server.free());
        if let Some(pool) = self.pools.get_mut(&offer.key) {
            pool.free -= u64::from(server.free());
            if let Some(rank) = server.rank(id) {
                pool.with_free.remove(&rank);
            }
            pool.servers.remove(&id);
            if pool.servers.is_empty() {
                self.pools.remove(&offer.key);
            }
        }
        count_down(&mut self.by_peer, &server.peer);
        Some(server)
    }

    /// A server with this offer comes or goes: counts it for those who wait for such.
    fn count_possible(&mut self, offer: &Offer, count: impl Fn(&mut u64, u64)) {
        for order in ["", &offer.key].into_iter().filter_map(|key| self.queues.get(key)).flatten() {
            if let Some(waiting) = self.waiting.get_mut(order).filter(|waiting| offer.suits(&waiting.request)) {
                count(&mut waiting.possible, u64::from(usable(&waiting.request, offer.capacity)));
            }
        }
    }

    fn grant(&mut self, now: Instant, order: Order, servers: Vec<ServerId>) {
        let claim = order.1;
        let Some(waiting) = self.remove_waiting(claim) else { return };
        let client = &waiting.request.client;
        let ticket = self.policy.ticket;
        let mut places = Vec::with_capacity(servers.len());
        for id in servers {
            let serial = self.next_serial;
            self.next_serial += 1;
            self.totals.granted += 1;
            self.change(id, |server| {
                // Its clock has gone on since.
                let expires_ms =
                    server.clock_ms.saturating_add(millis(now.saturating_duration_since(server.heard) + ticket));
                server.last_granted = serial;
                server.granted.insert(serial, Granted { claim, client: client.clone(), since: now, expires_ms });
                places.push(Place { server: id, serial, expires_ms });
            });
        }
        self.events.push_back(Event::Granted { claim, places });
    }

    fn remove_waiting(&mut self, id: ClaimId) -> Option<Waiting> {
        let priority = self.priorities.remove(&id)?;
        let waiting = self.waiting.remove(&(Reverse(priority), id))?;
        if let Some(until) = waiting.until {
            self.timers.remove(&(until, Timer::Claim(id)));
        }
        if let Some(queue) = self.queues.get_mut(&waiting.request.key) {
            queue.remove(&(Reverse(priority), id));
            if queue.is_empty() {
                self.queues.remove(&waiting.request.key);
            }
        }
        count_down(&mut self.waiting_by_peer, &waiting.peer);
        Some(waiting)
    }

    /// Changes a server, and with it the counts of what is free and its rank.
    fn change(&mut self, id: ServerId, change: impl FnOnce(&mut Server)) {
        let Some(server) = self.servers.get_mut(&id) else { return };
        let (before, rank) = (u64::from(server.free()), server.rank(id));
        change(server);
        let after = u64::from(server.free());
        self.totals.free = self.totals.free - before + after;
        if let Some(pool) = self.pools.get_mut(&server.offer.key) {
            pool.free = pool.free - before + after;
            if let Some(rank) = rank {
                pool.with_free.remove(&rank);
            }
            pool.with_free.extend(server.rank(id));
        }
    }

    /// The servers that have what a request names. None has an empty key.
    fn candidates<'a>(&'a self, request: &'a ServerRequest) -> impl Iterator<Item = &'a Server> {
        let all = request.key.is_empty().then(|| self.pools.values());
        let pools = all.into_iter().flatten().chain(self.pools.get(&request.key));
        let servers = pools.flat_map(|pool| &pool.servers).filter_map(|id| self.servers.get(id));
        servers.filter(move |server| server.offer.suits(request))
    }
}

impl Server {
    /// How many places are free. There may be more sessions than places, of clients without tickets.
    pub(crate) fn free(&self) -> u32 {
        let taken = u32::try_from(self.granted.len() + self.uses.len()).unwrap_or(u32::MAX);
        self.offer.capacity.saturating_sub(taken)
    }

    /// Where it stands among those with free places, if it has any.
    fn rank(&self, id: ServerId) -> Option<Rank> {
        let free = self.free();
        (free > 0).then_some((!self.reachable, Reverse(free), self.last_granted, id))
    }

    /// Who has it.
    pub(crate) fn holders(&self) -> impl Iterator<Item = Held> {
        let granted = self.granted.values().map(|granted| Held {
            client: granted.client.clone(),
            since: granted.since,
            kind: HeldKind::Granted,
        });
        self.uses.values().cloned().chain(granted)
    }
}

impl Offer {
    /// Whether the server has what a request names.
    fn suits(&self, request: &ServerRequest) -> bool {
        let has_device = |wanted: &DeviceOffer| {
            let of_kind = self.devices.iter().filter(|device| device.kind == wanted.kind);
            of_kind.map(|device| u64::from(device.count)).sum::<u64>() >= u64::from(wanted.count)
        };
        (request.key.is_empty() || request.key == self.key)
            && request.labels.iter().all(|(name, value)| self.labels.get(name) == Some(value))
            && request.devices.iter().all(has_device)
            && request.virtual_devices.iter().all(|wanted| DeviceOffer::any_satisfies(&self.devices, wanted))
    }
}

/// Which of the places that were `found` to take, in their order: rule 4. There are enough.
fn choose(count: u32, mut found: Vec<(Rank, u32)>) -> Vec<ServerId> {
    let count = count as usize;
    let mut chosen = Vec::with_capacity(count);
    while chosen.len() < count && !found.is_empty() {
        for ((.., id), free) in &mut found {
            if chosen.len() < count {
                chosen.push(*id);
                *free -= 1;
            }
        }
        found.retain(|(_, free)| *free > 0);
    }
    chosen
}

/// How many of `free` places of one server a request could use.
fn usable(request: &ServerRequest, free: u32) -> u32 {
    if request.distinct { free.min(1) } else { free }
}

/// Looks whether there is room for one more.
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

/// Why a request got nothing within its time.
pub(crate) fn timed_out(wanted: u32, possible: u64, key: &str) -> RpcError {
    let what = if key.is_empty() { String::new() } else { format!(" with the key '{key}'") };
    let text = if possible < u64::from(wanted) {
        format!(
            "the time is over: {wanted} places{what} were asked for, and the servers that are registered have {possible}"
        )
    } else {
        format!("the time is over: {wanted} of {possible} places{what} were asked for, and others have them")
    };
    RpcError::new(ErrorKind::DeadlineExceeded, text)
}
