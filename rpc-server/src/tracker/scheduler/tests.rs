//! Tests of the scheduler against a simple model that follows the rules.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rpc_transports::tracker::{DeviceOffer, ServerRequest, ServerStatus, Use};

use super::{ClaimId, Event, GrantedSlot, Offer, Policy, Scheduler, ServerId};

const LEASE: Duration = Duration::from_secs(10);
const TICKET: Duration = Duration::from_secs(20);

fn policy() -> Policy {
    Policy {
        lease: LEASE,
        ticket: TICKET,
        max_servers: 12,
        max_servers_per_peer: 5,
        max_waiting: 16,
        max_waiting_per_client: 7,
    }
}

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
    Request {
        peer: u8,
        key: u8,
        arch: u8,
        gpus: u32,
        count: u32,
        distinct: bool,
        priority: i32,
        timeout: Option<u16>,
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

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..2u8, 0..2u8, 0..3u32, 1..4u32, 0..4u8).prop_map(|(peer, key, arch, gpus, capacity, direct)| {
            Step::Register { peer, key, arch, gpus, capacity, direct: direct.saturating_sub(2) }
        }),
        2 => any::<u8>().prop_map(Step::Renew),
        1 => any::<u8>().prop_map(Step::Unregister),
        8 => (
            0..3u8, 0..3u8, 0..3u8, 0..2u32, 1..6u32, any::<bool>(), -1..2i32, proptest::option::of(0..30_000u16),
        ).prop_map(
            |(peer, key, arch, gpus, count, distinct, priority, timeout)| Step::Request {
                peer, key, arch, gpus, count, distinct, priority, timeout,
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
        self.offer.capacity.saturating_sub((self.known_uses + self.known_granted.len()) as u32)
    }

    fn send_report(&mut self, now: Instant) {
        let uses = self.uses.values().cloned().collect();
        self.unreceived.push_back(ServerStatus {
            now_ms: self.clock_ms(now),
            uses,
            spent: self.spent.clone(),
            leaving: false,
        });
    }

    fn suits(&self, request: &ServerRequest) -> bool {
        let gpus = |devices: &[DeviceOffer]| devices.first().map_or(0, |device| device.count);
        (request.key.is_empty() || request.key == self.offer.key)
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
    serials: BTreeSet<u64>,
    next_use: u64,
}

impl Model {
    fn new() -> Self {
        let now = Instant::now();
        let scheduler = Scheduler::new(policy());
        Self { scheduler, now, servers: BTreeMap::new(), waiting: Vec::new(), serials: BTreeSet::new(), next_use: 0 }
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
            Step::Request { peer, key, arch, gpus, count, distinct, priority, timeout } => {
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
        let mut granted = Vec::new();
        let mut timed_out = BTreeSet::new();
        while let Some(event) = self.scheduler.poll_event() {
            match event {
                Event::LeaseExpired { server } => assert!(overdue.remove(&server), "{server:?} was lost"),
                Event::TimedOut { claim, .. } => {
                    assert!(timed_out.insert(claim));
                }
                Event::Granted { claim, slots } => granted.push((claim, slots)),
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
        assert!(
            self.waiting.iter().all(|(_, _, _, until)| until.is_none_or(|until| until > now)),
            "a request waits longer than it wants to"
        );
        self.assert_no_request_was_overtaken(&before, &granted);
        self.assert_no_request_is_stuck();
        self.counts_agree();
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
    /// one was served in the same step, or could not be served by all servers together.
    fn assert_no_request_was_overtaken(
        &self,
        before: &[(ClaimId, u8, ServerRequest, Option<Instant>)],
        granted: &[(ClaimId, Vec<GrantedSlot>)],
    ) {
        for (winner, slots) in granted {
            let Some((_, _, won, _)) = before.iter().find(|(id, ..)| id == winner) else { continue };
            for (other, _, request, _) in &self.waiting {
                let in_front = (-request.priority, *other) < (-won.priority, *winner);
                if !in_front || !self.is_possible(request) {
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
            assert!(total < request.count, "{claim:?} waits for {} of {total} free slots", request.count);
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
        let capacity: u64 = self.servers.values().map(|server| u64::from(server.offer.capacity)).sum();
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
        for waiting in self.scheduler.waiting() {
            let possible: u64 = self.servers.values().map(|server| slots(&waiting.request, server)).sum();
            assert_eq!(waiting.possible, possible, "{waiting:?}");
        }
        assert_eq!(self.scheduler.pools.values().map(|pool| pool.servers.len()).sum::<usize>(), self.servers.len());
        assert_eq!(self.scheduler.priorities.len(), self.waiting.len());
        assert_eq!(self.scheduler.queues.values().map(BTreeSet::len).sum::<usize>(), self.waiting.len());
    }

    /// Ends all sessions and requests, and checks that all slots are free. Then removes all
    /// servers, and checks that the scheduler keeps no state of them.
    fn remove_all(&mut self) {
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
    fn the_scheduler_keeps_its_rules_for_any_sequence_of_events(steps in proptest::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        for step in &steps {
            model.apply(step);
        }
        model.remove_all();
    }
}

fn offer(key: &str, capacity: u32) -> Arc<Offer> {
    Arc::new(Offer { key: key.to_owned(), labels: BTreeMap::new(), devices: Vec::new(), capacity })
}

/// Returns the report of a server without sessions.
fn no_uses() -> ServerStatus {
    ServerStatus::default()
}

/// Returns a scheduler without tight limits, and the present time.
fn scheduler() -> (Scheduler, Instant) {
    let policy = Policy {
        max_servers: 100,
        max_servers_per_peer: 100,
        max_waiting: 100,
        max_waiting_per_client: 100,
        ..policy()
    };
    (Scheduler::new(policy), Instant::now())
}

fn granted(scheduler: &mut Scheduler) -> Vec<(ClaimId, Vec<GrantedSlot>)> {
    let events = std::iter::from_fn(|| scheduler.poll_event());
    events
        .map(|event| match event {
            Event::Granted { claim, slots } => (claim, slots),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_virtual_device_is_satisfied_by_one_of_the_devices() {
    let cuda = |arch: &str, count| DeviceOffer {
        target: format!("cuda -arch={arch}").parse().ok(),
        memory_scopes: vec!["host".to_owned()],
        ..DeviceOffer::new("cuda", count)
    };
    let devices = vec![DeviceOffer::new("cpu", 1), cuda("sm_80", 2), cuda("sm_90", 1)];
    for (wanted, is_there) in [
        ("*", true),
        ("cpu:0", true),
        ("cpu:1", false),
        ("cuda:2,target=cuda -arch=sm_90", true),
        ("cuda:1,target=cuda -arch=sm_90", false),
        ("cuda:3", false),
        ("*:1,scope=host", true),
        ("cpu,scope=host", false),
        ("*,target=llvm", true),
        ("vulkan", false),
        ("*:2147483647", false),
    ] {
        let (mut scheduler, now) = scheduler();
        let offer = Offer { key: "k".to_owned(), labels: BTreeMap::new(), devices: devices.clone(), capacity: 1 };
        scheduler.register(now, "p", Arc::new(offer), &no_uses()).unwrap();
        let wanted: rpc_core::VirtualDevice = wanted.parse().unwrap();
        scheduler.request(now, "c", ServerRequest::any().virtual_device(wanted.clone())).unwrap();
        assert_eq!(granted(&mut scheduler).len(), usize::from(is_there), "{wanted}");
        // All of several constraints have to be satisfied.
        let (mut scheduler, now) = self::scheduler();
        let offer = Offer { key: "k".to_owned(), labels: BTreeMap::new(), devices: devices.clone(), capacity: 1 };
        scheduler.register(now, "p", Arc::new(offer), &no_uses()).unwrap();
        let both = ServerRequest::any().virtual_device(rpc_core::DeviceType::CPU).virtual_device(wanted.clone());
        scheduler.request(now, "c", both).unwrap();
        assert_eq!(granted(&mut scheduler).len(), usize::from(is_there), "{wanted}");
    }
}

#[test]
fn a_request_for_many_is_not_starved_by_single_ones_behind_it() {
    let (mut scheduler, now) = scheduler();
    let one = scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let two = scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let first = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(claim, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    assert_eq!(*claim, first);
    let GrantedSlot { server: busy, serial, .. } = slots[0];

    let both = scheduler.request(now, "c", ServerRequest::new("k").count(2)).unwrap();
    let single = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), [], "one is free, and is kept for the one that wants two");

    assert_eq!(scheduler.give_back(now, first, &[(busy, serial)]), 1);
    let served = granted(&mut scheduler);
    assert_eq!(served.len(), 1);
    assert_eq!(served[0].0, both);
    let servers: BTreeSet<_> = served[0].1.iter().map(|slot| slot.server).collect();
    assert_eq!(servers, [one, two].into());

    let GrantedSlot { server: id, serial, .. } = served[0].1[0];
    assert_eq!(scheduler.give_back(now, both, &[(id, serial)]), 1);
    assert_eq!(granted(&mut scheduler)[0].0, single);
}

#[test]
fn impossible_request_reserves_nothing() {
    let (mut scheduler, now) = scheduler();
    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let many = scheduler.request(now, "c", ServerRequest::new("k").count(3)).unwrap();
    let single = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let served = granted(&mut scheduler);
    assert_eq!(served[0].0, single);

    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let late = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), [], "now it can be, and two are kept for it");
    let GrantedSlot { server: id, serial, .. } = served[0].1[0];
    assert_eq!(scheduler.give_back(now, single, &[(id, serial)]), 1);
    assert_eq!(granted(&mut scheduler)[0].0, many);
    scheduler.cancel(now, late);
}

#[test]
fn a_higher_priority_comes_first_although_it_arrived_later() {
    let (mut scheduler, now) = scheduler();
    let low = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let high = scheduler.request(now, "c", ServerRequest::new("k").priority(1)).unwrap();
    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    assert_eq!(granted(&mut scheduler)[0].0, high);
    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    assert_eq!(granted(&mut scheduler)[0].0, low);
}

#[test]
fn slots_are_spread_over_servers_and_unreachable_ones_come_last() {
    let (mut scheduler, now) = scheduler();
    let lost = scheduler.register(now, "p", offer("k", 4), &no_uses()).unwrap();
    let (one, two) = (
        scheduler.register(now, "p", offer("k", 2), &no_uses()).unwrap(),
        scheduler.register(now, "p", offer("k", 2), &no_uses()).unwrap(),
    );
    scheduler.set_reachable(lost, false);
    scheduler.request(now, "c", ServerRequest::new("k").count(2)).unwrap();
    let servers: BTreeSet<_> = granted(&mut scheduler)[0].1.iter().map(|slot| slot.server).collect();
    assert_eq!(servers.len(), 2, "{servers:?}");
    scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(_, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    assert!([one, two].contains(&slots[0].server));
}

/// A restarted tracker learns the sessions of servers from the servers themselves.
#[test]
fn a_server_that_registers_in_use_is_not_granted_again() {
    let (mut scheduler, now) = scheduler();
    let used = Use { id: 9, serial: Some(1), direct: false, client: "c".to_owned(), for_ms: 1000, silent_ms: 0 };
    let status = ServerStatus { uses: vec![used], ..no_uses() };
    let id = scheduler.register(now, "p", offer("k", 1), &status).unwrap();
    let claim = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), []);
    assert!(scheduler.report(now, id, &no_uses()));
    assert_eq!(granted(&mut scheduler)[0].0, claim);
}

#[test]
fn request_without_time_is_served_at_once_or_fails() {
    let (mut scheduler, now) = scheduler();
    let mut request = ServerRequest::new("k");
    request.timeout_ms = Some(0);
    let claim = scheduler.request(now, "c", request).unwrap();
    assert_eq!(scheduler.poll_event(), Some(Event::TimedOut { claim, wanted: 1, possible: 0 }));
    assert_eq!(scheduler.next_timeout(), None);
}

/// Regression test: a granted slot once became free some seconds after the ticket's expiry. A
/// client that came at the last moment, to a server whose report was slower than that, shared its
/// slot with the next client.
#[test]
fn a_slot_is_not_granted_again_before_the_server_reports_that_it_is_unused() {
    let (mut scheduler, now) = scheduler();
    let id = scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(_, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    let GrantedSlot { serial, expires_ms, .. } = slots[0];
    let next = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();

    // The report is made half a lease before the ticket's expiry, and received as long after it.
    let mut heard = now;
    for said_ms in [5_000, 10_000, expires_ms - 1] {
        heard += LEASE * 3 / 4;
        scheduler.handle_timeout(heard);
        assert!(scheduler.report(heard, id, &ServerStatus { now_ms: said_ms, ..no_uses() }));
        assert_eq!(granted(&mut scheduler), [], "a client may have come in the last millisecond");
    }
    let used = Use { id: 1, serial: Some(serial), direct: false, client: "c".to_owned(), for_ms: 1, silent_ms: 0 };
    let with_client = ServerStatus { now_ms: expires_ms + 5_000, uses: vec![used], ..no_uses() };
    assert!(scheduler.report(heard, id, &with_client));
    assert_eq!(granted(&mut scheduler), []);
    let after = ServerStatus { now_ms: expires_ms + 6_000, spent: vec![serial], ..no_uses() };
    assert!(scheduler.report(heard, id, &after));
    let [(claim, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    assert_eq!(*claim, next);

    // The next ticket is never used.
    let expires_ms = slots[0].expires_ms;
    let last = scheduler.request(heard, "c", ServerRequest::new("k")).unwrap();
    assert!(scheduler.report(heard, id, &ServerStatus { now_ms: expires_ms - 1, ..no_uses() }));
    assert_eq!(granted(&mut scheduler), []);
    assert!(scheduler.report(heard, id, &ServerStatus { now_ms: expires_ms, ..no_uses() }));
    assert_eq!(granted(&mut scheduler)[0].0, last);
}

/// Regression: a request for a label that no server has looked at all servers, and so did each
/// change for every such request that waited.
#[test]
fn requests_with_odd_properties_look_at_few_servers() {
    const SERVERS: u32 = 1000;
    let limits = Policy { max_servers: 10_000, max_servers_per_peer: 10_000, max_waiting: 1000, ..policy() };
    let (mut scheduler, now) = (Scheduler::new(Policy { max_waiting_per_client: 1000, ..limits }), Instant::now());
    let labels = |number: u32| [("os", "linux".to_owned()), ("host", format!("node{number}"))];
    let devices = |number: u32| if number == 7 { vec![DeviceOffer::new("cuda", 1)] } else { Vec::new() };
    let offer = |number: u32| Offer {
        labels: labels(number).map(|(name, value)| (name.to_owned(), value)).into(),
        devices: devices(number),
        ..(*offer("k", 1)).clone()
    };
    let mut ids = Vec::new();
    for number in 0..SERVERS {
        ids.push(scheduler.register(now, "p", Arc::new(offer(number)), &no_uses()).unwrap());
    }
    // The only server with the rare properties is in use.
    let rare = || ServerRequest::new("k").label("os", "linux").label("host", "node7");
    scheduler.request(now, "c", rare()).unwrap();
    assert_eq!(granted(&mut scheduler).len(), 1);
    let compared = |scheduler: &Scheduler| scheduler.compared.replace(0);
    compared(&scheduler);
    for number in 0..100 {
        for request in [
            ServerRequest::new("k").label("host", &format!("none{number}")),
            ServerRequest::any().label(&format!("odd{number}"), "yes"),
            ServerRequest::new("k").device(rpc_core::DeviceType::CUDA, 1 + number),
            rare().label(&format!("odd{number}"), "no"),
        ] {
            scheduler.request(now, "c", request).unwrap();
        }
    }
    let asked = compared(&scheduler);
    // Each change considers all that waits.
    scheduler.set_reachable(ids[1], false);
    scheduler.unregister(now, ids[2]);
    let changed = compared(&scheduler);
    assert!(asked < 2000 && changed < 1000, "{asked} and {changed}");
    assert_eq!(granted(&mut scheduler), []);
    ids.iter().for_each(|id| _ = scheduler.unregister(now, *id));
    assert!(scheduler.properties.is_empty());
}

#[test]
fn the_unused_slots_of_a_client_that_is_gone_come_back_and_the_used_ones_do_not() {
    let (mut scheduler, now) = scheduler();
    let ids = [1, 2].map(|_| scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap());
    let claim = scheduler.request(now, "c", ServerRequest::new("k").count(2)).unwrap();
    let [(_, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    let slots = slots.clone();
    let next = [1, 2].map(|_| scheduler.request(now, "d", ServerRequest::new("k")).unwrap());
    scheduler.abandon(now, claim, slots.iter().map(|slot| (slot.server, slot.serial)).collect());
    // The client has reached one of them before it died, and the report was on its way.
    let used =
        Use { id: 1, serial: Some(slots[0].serial), direct: false, client: "c".to_owned(), for_ms: 1, silent_ms: 0 };
    scheduler.report(now, slots[0].server, &ServerStatus { now_ms: 1, uses: vec![used], ..no_uses() });
    assert_eq!(granted(&mut scheduler), []);
    let due = scheduler.next_timeout().unwrap();
    assert!(due < now + LEASE && due < now + TICKET);
    scheduler.handle_timeout(due);
    let [(claim, slots_of_next)] = &granted(&mut scheduler)[..] else { panic!() };
    assert_eq!((*claim, slots_of_next[0].server), (next[0], slots[1].server));
    assert!(ids.contains(&slots_of_next[0].server) && scheduler.abandoned.is_empty());
}
