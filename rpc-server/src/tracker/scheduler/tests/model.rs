//! Random events, applied to the scheduler and to a simple model that follows the rules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rpc_transports::tracker::{DeviceOffer, ServerRequest, ServerStatus, Use};

use super::{LEASE, TICKET, no_uses, policy};
use crate::tracker::scheduler::{ClaimId, Event, GrantedSlot, Offer, Scheduler, ServerId};

/// Step of a test. Its numbers select among the existing servers, requests and tickets.
#[derive(Clone, Debug)]
enum Step {
    Register {
        peer: u8,
        key: u8,
        arch: u8,
        gpus: u32,
        capacity: u32,
        direct: u8,
    },
    Renew(u8),
    Unregister(u8),
    /// A server begins or ends to drain.
    Drain(u8, bool),
    Request {
        peer: u8,
        key: u8,
        arch: u8,
        gpus: u32,
        count: u32,
        distinct: bool,
        priority: i32,
        timeout: Option<u16>,
        unservable_timeout: Option<u16>,
    },
    Cancel(u8),
    /// The holder of a valid ticket opens its session.
    Use(u8),
    /// The holder of a valid ticket opens its session and ends it, before the server reports.
    UseAndEnd(u8),
    /// A session ends.
    End(u8),
    /// A server sends a report of its present sessions. The tracker has not received it yet.
    SendReport(u8),
    /// The tracker receives the oldest report that this server has sent.
    ReceiveReport(u8),
    GiveBack(u8),
    Pass(u16),
}

/// Returns steps with so many kinds of servers. If there is one kind only, all requests ask for the
/// same and many compete.
fn step(kinds: u8) -> impl Strategy<Value = Step> {
    let (wanted, distinct) = if kinds == 1 { (1, 0.9) } else { (kinds + 1, 0.5) };
    let distinct = proptest::bool::weighted(distinct);
    prop_oneof![
        4 => (0..3u8, 0..kinds, 0..kinds, 0..=u32::from(kinds), 1..4u32, 0..4u8).prop_map(
            |(peer, key, arch, gpus, capacity, direct)| {
                Step::Register { peer, key, arch, gpus, capacity, direct: direct.saturating_sub(2) }
            }
        ),
        2 => any::<u8>().prop_map(Step::Renew),
        1 => any::<u8>().prop_map(Step::Unregister),
        3 => any::<(u8, bool)>().prop_map(|(at, is_draining)| Step::Drain(at, is_draining)),
        8 => (
            0..3u8, 0..wanted, 0..wanted, 0..u32::from(kinds), 1..6u32, distinct, -1..2i32,
            proptest::option::of(0..30_000u16),
            proptest::option::of(prop_oneof![Just(0), 0..20_000u16]),
        ).prop_map(
            |(peer, key, arch, gpus, count, distinct, priority, timeout, unservable_timeout)| Step::Request {
                peer, key, arch, gpus, count, distinct, priority, timeout, unservable_timeout,
            }
        ),
        1 => any::<u8>().prop_map(Step::Cancel),
        4 => any::<u8>().prop_map(Step::Use),
        1 => any::<u8>().prop_map(Step::UseAndEnd),
        4 => any::<u8>().prop_map(Step::End),
        8 => any::<u8>().prop_map(Step::SendReport),
        8 => any::<u8>().prop_map(Step::ReceiveReport),
        1 => any::<u8>().prop_map(Step::GiveBack),
        2 => (0..12_000u16).prop_map(Step::Pass),
    ]
}

/// Model of a server: its real state, and the state that the tracker may know.
#[derive(Clone, Debug)]
struct ModelServer {
    peer: u8,
    offer: Arc<Offer>,
    lease_end: Instant,
    /// Start of the server's clock.
    started: Instant,
    uses: BTreeMap<u64, Use>,
    /// Tickets that the server would accept, with their claims and expiry.
    tickets: BTreeMap<u64, (ClaimId, u64)>,
    spent: Vec<u64>,
    /// Reports that the tracker has not received yet.
    unreceived: VecDeque<ServerStatus>,
    /// State that the tracker knows, with its grants since.
    known_uses: usize,
    known_granted: BTreeMap<u64, (ClaimId, u64)>,
    is_draining: bool,
}

impl ModelServer {
    fn clock_ms(&self, now: Instant) -> u64 {
        now.duration_since(self.started).as_millis() as u64
    }

    /// Returns the number of further clients that the server could have without sharing slots.
    fn room(&self) -> u32 {
        self.offer.capacity.saturating_sub((self.uses.len() + self.tickets.len()) as u32)
    }

    /// Returns the number of free slots as far as the tracker can know it.
    fn free(&self) -> u32 {
        self.offered().saturating_sub((self.known_uses + self.known_granted.len()) as u32)
    }

    /// Returns the number of slots that requests may use, free or not.
    fn offered(&self) -> u32 {
        if self.is_draining { 0 } else { self.offer.capacity }
    }

    fn send_report(&mut self, now: Instant) {
        let uses = self.uses.values().cloned().collect();
        self.unreceived.push_back(ServerStatus {
            now_ms: self.clock_ms(now),
            uses,
            spent: self.spent.clone(),
            leaving: false,
            details: None,
        });
    }

    fn suits(&self, request: &ServerRequest) -> bool {
        let gpus = |devices: &[DeviceOffer]| devices.first().map_or(0, |device| device.count);
        !self.is_draining
            && (request.key.is_empty() || request.key == self.offer.key)
            && (request.labels.is_empty() || request.labels == self.offer.labels)
            && gpus(&request.devices) <= gpus(&self.offer.devices)
    }
}

/// Expected state of the pool.
struct Model {
    scheduler: Scheduler,
    now: Instant,
    servers: BTreeMap<ServerId, ModelServer>,
    /// Waiting requests in the order of arrival.
    waiting: Vec<(ClaimId, u8, ServerRequest, Option<Instant>)>,
    /// Times since which waiting requests have been impossible.
    impossible: BTreeMap<ClaimId, Instant>,
    serials: BTreeSet<u64>,
    next_use: u64,
}

impl Model {
    fn new() -> Self {
        let now = Instant::now();
        let scheduler = Scheduler::new(policy());
        Self {
            scheduler,
            now,
            servers: BTreeMap::new(),
            waiting: Vec::new(),
            impossible: BTreeMap::new(),
            serials: BTreeSet::new(),
            next_use: 0,
        }
    }

    fn server_at(&self, at: u8) -> Option<ServerId> {
        self.servers.keys().copied().nth(usize::from(at) % self.servers.len().max(1))
    }

    /// Returns one of the valid tickets.
    fn ticket_at(&self, at: u8) -> Option<(ServerId, u64, ClaimId)> {
        let of = |(id, server): (&ServerId, &ModelServer)| {
            let id = *id;
            server.tickets.iter().map(move |(serial, (claim, _))| (id, *serial, *claim)).collect::<Vec<_>>()
        };
        let all: Vec<_> = self.servers.iter().flat_map(of).collect();
        (!all.is_empty()).then(|| all[usize::from(at) % all.len()])
    }

    fn apply(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Register { peer, key, arch, gpus, capacity, direct } => {
                let offer = Arc::new(Offer {
                    key: format!("k{key}"),
                    labels: [("arch".to_owned(), format!("a{arch}"))].into(),
                    devices: vec![DeviceOffer::new("cuda", gpus)],
                    capacity,
                    by_key_only: false,
                });
                let uses: Vec<_> = (0..direct).map(|_| self.new_use(None)).collect();
                let status = ServerStatus { uses: uses.clone(), ..no_uses() };
                let full = self.servers.len() >= policy().max_servers
                    || self.servers.values().filter(|server| server.peer == peer).count()
                        >= policy().max_servers_per_peer;
                match self.scheduler.register(now, &format!("p{peer}"), offer.clone(), &status) {
                    Ok(id) => {
                        assert!(!full, "more servers than allowed");
                        let server = ModelServer {
                            peer,
                            offer,
                            lease_end: now + LEASE,
                            started: now,
                            known_uses: uses.len(),
                            uses: uses.into_iter().map(|used| (used.id, used)).collect(),
                            tickets: BTreeMap::new(),
                            spent: Vec::new(),
                            unreceived: VecDeque::new(),
                            known_granted: BTreeMap::new(),
                            is_draining: false,
                        };
                        assert!(self.servers.insert(id, server).is_none(), "a number was used twice");
                    }
                    Err(error) => assert!(full, "{error}"),
                }
            }
            Step::Renew(at) => {
                if let Some(id) = self.server_at(at) {
                    self.report(id);
                }
            }
            Step::SendReport(at) => {
                if let Some(id) = self.server_at(at) {
                    self.servers.get_mut(&id).unwrap().send_report(now);
                }
            }
            Step::ReceiveReport(at) => {
                if let Some(id) = self.server_at(at) {
                    self.receive_report(id);
                }
            }
            Step::Unregister(at) => {
                if let Some(id) = self.server_at(at) {
                    assert!(self.scheduler.unregister(now, id));
                    self.servers.remove(&id);
                }
            }
            Step::Drain(at, is_draining) => {
                if let Some(id) = self.server_at(at) {
                    assert!(self.scheduler.set_draining(now, id, is_draining));
                    self.servers.get_mut(&id).unwrap().is_draining = is_draining;
                }
            }
            Step::Request { peer, key, arch, gpus, count, distinct, priority, timeout, unservable_timeout } => {
                let mut request = ServerRequest::any().count(count).priority(priority);
                request.distinct = distinct;
                if key < 2 {
                    request.key = format!("k{key}");
                }
                if arch < 2 {
                    request = request.label("arch", &format!("a{arch}"));
                }
                request.devices.push(DeviceOffer::new("cuda", gpus));
                request.timeout_ms = timeout.map(u64::from);
                request.unservable_timeout_ms = unservable_timeout.map(u64::from);
                let of_peer = self.waiting.iter().filter(|(_, of, _, _)| *of == peer).count();
                let full = self.waiting.len() >= policy().max_waiting || of_peer >= policy().max_waiting_per_client;
                match self.scheduler.request(now, &format!("p{peer}"), request.clone()) {
                    Ok(id) => {
                        assert!(!full, "more requests than allowed");
                        let until = timeout.map(|millis| now + Duration::from_millis(millis.into()));
                        self.waiting.push((id, peer, request, until));
                    }
                    Err(error) => assert!(full, "{error}"),
                }
            }
            Step::Cancel(at) => {
                if !self.waiting.is_empty() {
                    let (id, ..) = self.waiting.remove(usize::from(at) % self.waiting.len());
                    self.scheduler.cancel(now, id);
                }
            }
            Step::Use(at) => {
                if let Some((id, serial, _)) = self.ticket_at(at) {
                    let used = self.new_use(Some(serial));
                    let server = self.servers.get_mut(&id).unwrap();
                    server.tickets.remove(&serial);
                    server.uses.insert(used.id, used);
                }
            }
            Step::UseAndEnd(at) => {
                if let Some((id, serial, _)) = self.ticket_at(at) {
                    let server = self.servers.get_mut(&id).unwrap();
                    server.tickets.remove(&serial);
                    server.spent.push(serial);
                }
            }
            Step::End(at) => {
                if let Some(id) = self.server_at(at) {
                    let server = self.servers.get_mut(&id).unwrap();
                    if let Some((_, used)) = server.uses.pop_first() {
                        server.spent.extend(used.serial);
                    }
                }
            }
            Step::GiveBack(at) => {
                if let Some((id, serial, claim)) = self.ticket_at(at) {
                    let slot = &[(id, serial)];
                    assert_eq!(self.scheduler.give_back(now, ClaimId(u64::MAX), slot), 0, "the slot of another client");
                    assert_eq!(self.scheduler.give_back(now, claim, slot), 1);
                    let server = self.servers.get_mut(&id).unwrap();
                    server.tickets.remove(&serial);
                    server.known_granted.remove(&serial);
                }
            }
            Step::Pass(millis) => self.pass(Duration::from_millis(millis.into())),
        }
        self.settle();
    }

    fn new_use(&mut self, serial: Option<u64>) -> Use {
        self.next_use += 1;
        Use {
            id: self.next_use,
            serial,
            direct: serial.is_none(),
            client: "a client".to_owned(),
            for_ms: 5,
            silent_ms: 0,
        }
    }

    /// Sends a report of a server, and delivers it and all earlier ones.
    fn report(&mut self, id: ServerId) {
        let now = self.now;
        self.servers.get_mut(&id).unwrap().send_report(now);
        while self.receive_report(id) {
            self.settle();
        }
    }

    /// Delivers the oldest report of a server, if there is one.
    fn receive_report(&mut self, id: ServerId) -> bool {
        let server = self.servers.get_mut(&id).unwrap();
        let Some(report) = server.unreceived.pop_front() else { return false };
        server.lease_end = self.now + LEASE;
        server.known_uses = report.uses.len();
        server.spent.retain(|serial| !report.spent.contains(serial));
        let names =
            |serial: &u64| report.spent.contains(serial) || report.uses.iter().any(|u| u.serial == Some(*serial));
        server.known_granted.retain(|serial, (_, expires_ms)| *expires_ms > report.now_ms && !names(serial));
        assert!(self.scheduler.report(self.now, id, &report));
        true
    }

    /// Advances the time, in steps from one due timer to the next.
    fn pass(&mut self, time: Duration) {
        let end = self.now + time;
        while let Some(due) = self.scheduler.next_timeout().filter(|due| *due <= end) {
            assert!(due >= self.now, "something has been due for a while");
            self.now = due;
            self.scheduler.handle_timeout(due);
            self.settle();
        }
        self.now = end;
    }

    /// Takes the scheduler's events, and compares all of them with the rules.
    fn settle(&mut self) {
        let now = self.now;
        for server in self.servers.values_mut() {
            let clock_ms = server.clock_ms(now);
            server.tickets.retain(|_, (_, expires_ms)| *expires_ms > clock_ms);
        }
        let expired: Vec<_> =
            self.servers.iter().filter(|(_, server)| server.lease_end <= now).map(|(id, _)| *id).collect();
        let mut overdue: BTreeSet<_> = expired.iter().copied().collect();
        self.servers.retain(|id, _| !overdue.contains(id));
        let impossible = self.waiting.iter().filter(|(_, _, request, _)| !self.is_possible(request));
        self.impossible = impossible.map(|(id, ..)| (*id, *self.impossible.get(id).unwrap_or(&now))).collect();
        let mut granted = Vec::new();
        let mut timed_out = BTreeSet::new();
        let mut unservable = BTreeSet::new();
        while let Some(event) = self.scheduler.poll_event() {
            match event {
                Event::LeaseExpired { server } => assert!(overdue.remove(&server), "{server:?} was lost"),
                Event::TimedOut { claim, .. } => {
                    assert!(timed_out.insert(claim));
                }
                Event::Granted { claim, slots } => granted.push((claim, slots)),
                Event::Unservable { claim, .. } => {
                    assert!(unservable.insert(claim));
                }
            }
        }
        assert!(overdue.is_empty(), "servers are still there whose lease is over: {overdue:?}");

        let before = self.waiting.clone();
        for (claim, slots) in &granted {
            self.take(*claim, slots);
        }
        for claim in &timed_out {
            let at = self.waiting.iter().position(|(id, ..)| id == claim).expect("it waited");
            let (_, _, _, until) = self.waiting.remove(at);
            assert!(until.is_some_and(|until| until <= now), "too early");
        }
        for claim in &unservable {
            let at = self.waiting.iter().position(|(id, ..)| id == claim).expect("it waited");
            let (_, _, request, _) = self.waiting.remove(at);
            let due = self.unservable_at(*claim, &request);
            assert!(due.is_some_and(|due| due <= now), "too early: {due:?} at {now:?}");
        }
        for (claim, _, request, _) in &self.waiting {
            let due = self.unservable_at(*claim, request);
            // At its very time the timer may be due still.
            assert!(due.is_none_or(|due| due >= now), "{claim:?} has been impossible for too long");
        }
        assert!(
            self.waiting.iter().all(|(_, _, _, until)| until.is_none_or(|until| until > now)),
            "a request waits longer than it wants to"
        );
        self.assert_no_request_was_overtaken(&before, &granted);
        self.assert_no_request_is_stuck();
        self.counts_agree();
    }

    /// Returns the time at which a request ends if it stays impossible.
    fn unservable_at(&self, claim: ClaimId, request: &ServerRequest) -> Option<Instant> {
        let limit = request.unservable_timeout_ms.filter(|_| request.timeout_ms.is_none())?;
        Some(*self.impossible.get(&claim)? + Duration::from_millis(limit))
    }

    /// Checks a grant: it is complete, only suitable servers are granted, and only free slots.
    fn take(&mut self, claim: ClaimId, slots: &[GrantedSlot]) {
        let at = self.waiting.iter().position(|(id, ..)| *id == claim).expect("only those get something who wait");
        let (_, _, request, _) = self.waiting.remove(at);
        assert_eq!(slots.len(), request.count as usize, "all or nothing");
        let servers: BTreeSet<_> = slots.iter().map(|slot| slot.server).collect();
        assert!(!request.distinct || servers.len() == slots.len(), "the same server twice");
        for GrantedSlot { server, serial, expires_ms } in slots {
            let server = self.servers.get_mut(server).expect("the server is there");
            assert!(server.suits(&request), "{server:?} for {request:?}");
            assert!(server.free() > 0, "a slot that the tracker knows to be taken");
            assert!(server.room() > 0, "a slot was granted twice");
            assert!(self.serials.insert(*serial), "a number was used twice");
            // A delayed report makes the server's clock look slow, and never fast.
            let latest = server.clock_ms(self.now) + TICKET.as_millis() as u64;
            assert!(*expires_ms <= latest, "a ticket that is good for too long");
            server.tickets.insert(*serial, (claim, *expires_ms));
            server.known_granted.insert(*serial, (claim, *expires_ms));
        }
    }

    /// Checks pairs of requests for the same slots: the later one has got none, unless the earlier
    /// one was served in the same step, could not be served by all servers together, or is one for
    /// different servers behind as many for the same as reserve slots.
    fn assert_no_request_was_overtaken(
        &self,
        before: &[(ClaimId, u8, ServerRequest, Option<Instant>)],
        granted: &[(ClaimId, Vec<GrantedSlot>)],
    ) {
        for (winner, slots) in granted {
            let Some((_, _, won, _)) = before.iter().find(|(id, ..)| id == winner) else { continue };
            for (other, _, request, _) in &self.waiting {
                let in_front = (-request.priority, *other) < (-won.priority, *winner);
                if !in_front || !self.is_possible(request) || self.is_behind(1, *other, request) {
                    continue;
                }
                for GrantedSlot { server: id, .. } in slots {
                    let server = &self.servers[id];
                    // If it wants only one slot of a server, the rest may be taken.
                    let wants_more = !request.distinct || server.free() == 0;
                    assert!(!(server.suits(request) && wants_more), "{winner:?} passed {other:?} at {id:?}");
                }
            }
        }
    }

    /// Returns true if `times` as many requests for the same wait in front of this one as reserve
    /// slots.
    fn is_behind(&self, times: u32, claim: ClaimId, request: &ServerRequest) -> bool {
        let in_front = self.waiting.iter().filter(|(id, _, other, _)| {
            (-other.priority, *id) < (-request.priority, claim)
                && (&other.key, &other.labels, &other.devices) == (&request.key, &request.labels, &request.devices)
                && other.distinct
                && self.is_possible(other)
        });
        request.distinct && in_front.count() >= (times * policy().max_reserving) as usize
    }

    fn is_possible(&self, request: &ServerRequest) -> bool {
        let slots = |server: &ModelServer| if request.distinct { 1 } else { server.offer.capacity };
        let all: u32 = self.servers.values().filter(|server| server.suits(request)).map(slots).sum();
        all >= request.count
    }

    /// Checks that no waiting request could be served from the slots that earlier requests leave
    /// free.
    fn assert_no_request_is_stuck(&self) {
        let mut order: Vec<_> = self.waiting.iter().collect();
        order.sort_by_key(|(id, _, request, _)| (-request.priority, *id));
        let mut free: BTreeMap<_, _> = self.servers.iter().map(|(id, server)| (*id, server.free())).collect();
        for (claim, _, request, _) in order {
            let suitable = self.servers.iter().filter(|(_, server)| server.suits(request)).map(|(id, _)| *id);
            let usable: Vec<(ServerId, u32)> =
                suitable.map(|id| (id, if request.distinct { free[&id].min(1) } else { free[&id] })).collect();
            let total: u32 = usable.iter().map(|(_, slots)| slots).sum();
            let is_considered = !self.is_behind(2, *claim, request);
            assert!(!is_considered || total < request.count, "{claim:?} waits for {} of {total} free", request.count);
            if self.is_possible(request) {
                for (id, slots) in usable {
                    *free.get_mut(&id).unwrap() -= slots;
                }
            }
        }
    }

    fn counts_agree(&self) {
        let totals = self.scheduler.totals();
        let free: u64 = self.servers.values().map(|server| u64::from(server.free())).sum();
        let capacity: u64 = self.servers.values().map(|server| u64::from(server.offered())).sum();
        assert_eq!((totals.free, totals.capacity, totals.waiting), (free, capacity, self.waiting.len() as u64));
        for (id, server) in &self.servers {
            let theirs = self.scheduler.server(*id).expect("no server is lost");
            assert_eq!(theirs.free(), server.free());
            assert_eq!(theirs.holders().count(), server.known_uses + server.known_granted.len());
        }
        let timers = self.servers.len() + self.waiting.len();
        assert!(self.scheduler.timers.len() <= timers, "timers are left of what there is no more");
        let with_free = self.servers.values().filter(|server| server.free() > 0).count();
        assert_eq!(self.scheduler.pools.values().map(|pool| pool.with_free.len()).sum::<usize>(), with_free);
        let slots = |request: &ServerRequest, server: &ModelServer| {
            let usable = if request.distinct { 1 } else { server.offer.capacity };
            if server.suits(request) { u64::from(usable) } else { 0 }
        };
        for (waiting, told) in self.scheduler.waiting() {
            let possible: u64 = self.servers.values().map(|server| slots(&waiting.request, server)).sum();
            assert_eq!(told, possible, "{waiting:?}");
        }
        let offered = self.servers.values().filter(|server| !server.is_draining).count();
        assert_eq!(self.scheduler.pools.values().map(|pool| pool.servers.len()).sum::<usize>(), offered);
        assert_eq!(self.scheduler.priorities.len(), self.waiting.len());
        assert_eq!(self.scheduler.classes.checked_len(), self.waiting.len());
    }

    /// Ends all sessions and requests, and checks that all slots are free. Then removes all
    /// servers, and checks that the scheduler keeps no state of them.
    fn remove_all(&mut self) {
        for id in self.servers.keys().copied().collect::<Vec<_>>() {
            self.scheduler.set_draining(self.now, id, false);
            self.servers.get_mut(&id).unwrap().is_draining = false;
            self.settle();
        }
        for id in self.servers.keys().copied().collect::<Vec<_>>() {
            let server = self.servers.get_mut(&id).unwrap();
            let ended = std::mem::take(&mut server.uses);
            server.spent.extend(ended.values().filter_map(|used| used.serial));
            self.report(id);
        }
        while let Some((id, ..)) = self.waiting.first().cloned() {
            self.waiting.remove(0);
            self.scheduler.cancel(self.now, id);
            self.settle();
        }
        // Slots of unused tickets are free again with the first report after the tickets' expiry.
        let end = self.now + TICKET;
        while self.now < end {
            self.pass(LEASE / 2);
            for id in self.servers.keys().copied().collect::<Vec<_>>() {
                self.report(id);
            }
        }
        let totals = self.scheduler.totals();
        assert_eq!(totals.free, totals.capacity, "a slot was lost");
        for id in self.servers.keys().copied().collect::<Vec<_>>() {
            assert!(self.scheduler.unregister(self.now, id));
            self.servers.remove(&id);
            self.settle();
        }
        let left = &self.scheduler;
        assert!(left.timers.is_empty() && left.by_peer.is_empty() && left.waiting_by_peer.is_empty());
    }
}

proptest! {
    // The cases are the same each time; PROPTEST_CASES and PROPTEST_RNG_SEED select others.
    #![proptest_config(ProptestConfig {
        cases: 256,
        rng_seed: RngSeed::Fixed(0x7261_636b),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn the_scheduler_keeps_its_rules_for_any_sequence_of_events(
        steps in prop_oneof![2 => vec(step(2), 1..120), 1 => vec(step(1), 1..120)]
    ) {
        let mut model = Model::new();
        for step in &steps {
            model.apply(step);
        }
        model.remove_all();
    }
}
