//! The scheduler against a model that knows the rules, and little else.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rpc_transports::tracker::{DeviceOffer, ServerRequest, Use};

use super::{ClaimId, Event, Offer, Policy, Scheduler, ServerId};

const LEASE: Duration = Duration::from_secs(10);
const GRANT: Duration = Duration::from_secs(20);

fn policy() -> Policy {
    Policy {
        lease: LEASE,
        grant: GRANT,
        max_servers: 12,
        max_servers_per_peer: 5,
        max_waiting: 16,
        max_waiting_per_client: 7,
    }
}

/// One thing that happens. Numbers choose among what there is.
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
    /// The holder of a granted place opens its session.
    Use(u8),
    /// It does, and ends it, before the server says anything.
    UseAndEnd(u8),
    /// A session ends.
    End(u8),
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
        8 => (0..3u8, 0..3u8, 0..3u8, 0..2u32, 1..6u32, any::<bool>(), -1..2i32, proptest::option::of(0..30_000u16)).prop_map(
            |(peer, key, arch, gpus, count, distinct, priority, timeout)| Step::Request {
                peer, key, arch, gpus, count, distinct, priority, timeout,
            }
        ),
        1 => any::<u8>().prop_map(Step::Cancel),
        4 => any::<u8>().prop_map(Step::Use),
        1 => any::<u8>().prop_map(Step::UseAndEnd),
        4 => any::<u8>().prop_map(Step::End),
        1 => any::<u8>().prop_map(Step::GiveBack),
        2 => (0..12_000u16).prop_map(Step::Pass),
    ]
}

/// A server, as the model knows it.
#[derive(Clone, Debug)]
struct ModelServer {
    peer: u8,
    offer: Offer,
    lease_end: Instant,
    uses: BTreeMap<u64, Use>,
    /// Tickets that are out: whose, and until when.
    granted: BTreeMap<u64, (ClaimId, Instant)>,
}

impl ModelServer {
    fn free(&self) -> u32 {
        self.offer.capacity.saturating_sub((self.uses.len() + self.granted.len()) as u32)
    }

    fn suits(&self, request: &ServerRequest) -> bool {
        let gpus = |devices: &[DeviceOffer]| devices.first().map_or(0, |device| device.count);
        (request.key.is_empty() || request.key == self.offer.key)
            && (request.labels.is_empty() || request.labels == self.offer.labels)
            && gpus(&request.devices) <= gpus(&self.offer.devices)
    }
}

/// The pool as it should be.
struct Model {
    scheduler: Scheduler,
    now: Instant,
    servers: BTreeMap<ServerId, ModelServer>,
    /// In the order of arrival.
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

    /// One of the tickets that are out.
    fn grant_at(&self, at: u8) -> Option<(ServerId, u64, ClaimId)> {
        let all: Vec<_> = self
            .servers
            .iter()
            .flat_map(|(id, server)| server.granted.iter().map(move |(serial, (claim, _))| (*id, *serial, *claim)))
            .collect();
        (!all.is_empty()).then(|| all[usize::from(at) % all.len()])
    }

    fn apply(&mut self, step: &Step) {
        let now = self.now;
        match *step {
            Step::Register { peer, key, arch, gpus, capacity, direct } => {
                let offer = Offer {
                    key: format!("k{key}"),
                    labels: [("arch".to_owned(), format!("a{arch}"))].into(),
                    devices: vec![DeviceOffer { kind: "cuda".to_owned(), count: gpus }],
                    capacity,
                };
                let uses: Vec<_> = (0..direct).map(|_| self.new_use(None)).collect();
                let full = self.servers.len() >= policy().max_servers
                    || self.servers.values().filter(|server| server.peer == peer).count()
                        >= policy().max_servers_per_peer;
                match self.scheduler.register(now, &format!("p{peer}"), offer.clone(), &uses) {
                    Ok(id) => {
                        assert!(!full, "more servers than allowed");
                        let uses = uses.into_iter().map(|used| (used.id, used)).collect();
                        let server =
                            ModelServer { peer, offer, lease_end: now + LEASE, uses, granted: BTreeMap::new() };
                        assert!(self.servers.insert(id, server).is_none(), "a number was used twice");
                    }
                    Err(error) => assert!(full, "{error}"),
                }
            }
            Step::Renew(at) => {
                if let Some(id) = self.server_at(at) {
                    self.report(id, &[]);
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
                request.devices.push(DeviceOffer { kind: "cuda".to_owned(), count: gpus });
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
                if let Some((id, serial, _)) = self.grant_at(at) {
                    let used = self.new_use(Some(serial));
                    let server = self.servers.get_mut(&id).unwrap();
                    server.granted.remove(&serial);
                    server.uses.insert(used.id, used);
                    self.report(id, &[]);
                }
            }
            Step::UseAndEnd(at) => {
                if let Some((id, serial, _)) = self.grant_at(at) {
                    self.servers.get_mut(&id).unwrap().granted.remove(&serial);
                    self.report(id, &[serial]);
                }
            }
            Step::End(at) => {
                if let Some(id) = self.server_at(at) {
                    self.servers.get_mut(&id).unwrap().uses.pop_first();
                    self.report(id, &[]);
                }
            }
            Step::GiveBack(at) => {
                if let Some((id, serial, claim)) = self.grant_at(at) {
                    assert_eq!(
                        self.scheduler.give_back(now, ClaimId(u64::MAX), &[(id, serial)]),
                        0,
                        "somebody else's place"
                    );
                    assert_eq!(self.scheduler.give_back(now, claim, &[(id, serial)]), 1);
                    self.servers.get_mut(&id).unwrap().granted.remove(&serial);
                }
            }
            Step::Pass(millis) => self.pass(Duration::from_millis(millis.into())),
        }
        self.settle();
    }

    fn new_use(&mut self, serial: Option<u64>) -> Use {
        self.next_use += 1;
        Use { id: self.next_use, serial, direct: serial.is_none(), client: "somebody".to_owned(), for_ms: 5 }
    }

    fn report(&mut self, id: ServerId, spent: &[u64]) {
        let server = self.servers.get_mut(&id).unwrap();
        let uses: Vec<_> = server.uses.values().cloned().collect();
        server.lease_end = self.now + LEASE;
        assert!(self.scheduler.report(self.now, id, &uses, spent));
    }

    /// Lets time go by, from one moment at which something is due to the next.
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

    /// Takes what the scheduler says, and compares all of it with the rules.
    fn settle(&mut self) {
        let now = self.now;
        for server in self.servers.values_mut() {
            server.granted.retain(|_, (_, until)| *until > now);
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
                Event::Granted { claim, places } => granted.push((claim, places)),
            }
        }
        assert!(overdue.is_empty(), "servers are still there whose lease is over: {overdue:?}");

        let before = self.waiting.clone();
        for (claim, places) in &granted {
            self.take(*claim, places);
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
        self.nobody_was_passed_over(&before, &granted);
        self.nobody_is_forgotten();
        self.counts_agree();
    }

    /// A grant: all or nothing, only what suits, and only what is free.
    fn take(&mut self, claim: ClaimId, places: &[(ServerId, u64)]) {
        let at = self.waiting.iter().position(|(id, ..)| *id == claim).expect("only those get something who wait");
        let (_, _, request, _) = self.waiting.remove(at);
        assert_eq!(places.len(), request.count as usize, "all or nothing");
        let servers: BTreeSet<_> = places.iter().map(|(id, _)| *id).collect();
        assert!(!request.distinct || servers.len() == places.len(), "the same server twice");
        for (id, serial) in places {
            let server = self.servers.get_mut(id).expect("the server is there");
            assert!(server.suits(&request), "{server:?} for {request:?}");
            assert!(server.free() > 0, "a place was granted twice");
            assert!(self.serials.insert(*serial), "a number was used twice");
            server.granted.insert(*serial, (claim, self.now + GRANT));
        }
    }

    /// Of two that wait for the same places, the one behind has got none unless the one in front was served too, in the same
    /// step, or could not be served by all servers together.
    fn nobody_was_passed_over(
        &self,
        before: &[(ClaimId, u8, ServerRequest, Option<Instant>)],
        granted: &[(ClaimId, Vec<(ServerId, u64)>)],
    ) {
        for (winner, places) in granted {
            let Some((_, _, won, _)) = before.iter().find(|(id, ..)| id == winner) else { continue };
            for (other, _, request, _) in &self.waiting {
                let in_front = (-request.priority, *other) < (-won.priority, *winner);
                if !in_front || !self.is_possible(request) {
                    continue;
                }
                for (id, _) in places {
                    let server = &self.servers[id];
                    // Of a server of which it wants one place only, the rest may be taken.
                    let wants_more = !request.distinct || server.free() == 0;
                    assert!(!(server.suits(request) && wants_more), "{winner:?} passed {other:?} at {id:?}");
                }
            }
        }
    }

    fn is_possible(&self, request: &ServerRequest) -> bool {
        let places = |server: &ModelServer| if request.distinct { 1 } else { server.offer.capacity };
        let all: u32 = self.servers.values().filter(|server| server.suits(request)).map(places).sum();
        all >= request.count
    }

    /// Whoever waits could not be served from what is free behind those in front.
    fn nobody_is_forgotten(&self) {
        let mut order: Vec<_> = self.waiting.iter().collect();
        order.sort_by_key(|(id, _, request, _)| (-request.priority, *id));
        let mut free: BTreeMap<_, _> = self.servers.iter().map(|(id, server)| (*id, server.free())).collect();
        for (claim, _, request, _) in order {
            let suitable = self.servers.iter().filter(|(_, server)| server.suits(request)).map(|(id, _)| *id);
            let usable: Vec<(ServerId, u32)> =
                suitable.map(|id| (id, if request.distinct { free[&id].min(1) } else { free[&id] })).collect();
            let total: u32 = usable.iter().map(|(_, places)| places).sum();
            assert!(total < request.count, "{claim:?} waits for {} of {total} free places", request.count);
            if self.is_possible(request) {
                for (id, places) in usable {
                    *free.get_mut(&id).unwrap() -= places;
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
            assert_eq!(theirs.holders().count(), server.uses.len() + server.granted.len());
        }
        let timers =
            self.servers.len() + self.waiting.len() + self.servers.values().map(|s| s.granted.len()).sum::<usize>();
        assert!(self.scheduler.timers.len() <= timers, "timers are left of what there is no more");
        assert_eq!(self.scheduler.pools.values().map(|pool| pool.servers.len()).sum::<usize>(), self.servers.len());
        assert_eq!(self.scheduler.priorities.len(), self.waiting.len());
        assert_eq!(self.scheduler.queues.values().map(BTreeSet::len).sum::<usize>(), self.waiting.len());
    }

    /// When everybody leaves, all places are free, and nothing is remembered.
    fn everybody_leaves(&mut self) {
        for id in self.servers.keys().copied().collect::<Vec<_>>() {
            self.servers.get_mut(&id).unwrap().uses.clear();
            self.report(id, &[]);
            self.settle();
        }
        while let Some((id, ..)) = self.waiting.first().cloned() {
            self.waiting.remove(0);
            self.scheduler.cancel(self.now, id);
            self.settle();
        }
        while let Some((id, serial, claim)) = self.grant_at(0) {
            self.servers.get_mut(&id).unwrap().granted.remove(&serial);
            assert_eq!(self.scheduler.give_back(self.now, claim, &[(id, serial)]), 1);
            self.settle();
        }
        let totals = self.scheduler.totals();
        assert_eq!(totals.free, totals.capacity, "a place was lost");
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
    // The same cases each time; PROPTEST_CASES and PROPTEST_RNG_SEED ask for others.
    #![proptest_config(ProptestConfig {
        cases: 256,
        rng_seed: RngSeed::Fixed(0x7261_636b),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn it_keeps_its_rules_whatever_happens(steps in proptest::collection::vec(step(), 1..120)) {
        let mut model = Model::new();
        for step in &steps {
            model.apply(step);
        }
        model.everybody_leaves();
    }
}

fn offer(key: &str, capacity: u32) -> Offer {
    Offer { key: key.to_owned(), labels: BTreeMap::new(), devices: Vec::new(), capacity }
}

/// A scheduler with room, and a moment.
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

fn granted(scheduler: &mut Scheduler) -> Vec<(ClaimId, Vec<(ServerId, u64)>)> {
    let events = std::iter::from_fn(|| scheduler.poll_event());
    events
        .map(|event| match event {
            Event::Granted { claim, places } => (claim, places),
            other => panic!("{other:?}"),
        })
        .collect()
}

#[test]
fn a_request_for_many_is_not_starved_by_single_ones_behind_it() {
    let (mut scheduler, now) = scheduler();
    let one = scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    let two = scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    let first = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(claim, places)] = &granted(&mut scheduler)[..] else { panic!() };
    assert_eq!(*claim, first);
    let (busy, serial) = places[0];

    let both = scheduler.request(now, "c", ServerRequest::new("k").count(2)).unwrap();
    let single = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), [], "one is free, and is kept for the one that wants two");

    assert_eq!(scheduler.give_back(now, first, &[(busy, serial)]), 1);
    let served = granted(&mut scheduler);
    assert_eq!(served.len(), 1);
    assert_eq!(served[0].0, both);
    let servers: BTreeSet<_> = served[0].1.iter().map(|(id, _)| *id).collect();
    assert_eq!(servers, [one, two].into());

    let (id, serial) = served[0].1[0];
    assert_eq!(scheduler.give_back(now, both, &[(id, serial)]), 1);
    assert_eq!(granted(&mut scheduler)[0].0, single);
}

#[test]
fn what_cannot_be_served_holds_nobody_back_until_it_can() {
    let (mut scheduler, now) = scheduler();
    scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    let many = scheduler.request(now, "c", ServerRequest::new("k").count(3)).unwrap();
    let single = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let served = granted(&mut scheduler);
    assert_eq!(served[0].0, single);

    scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    let late = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), [], "now it can be, and two are kept for it");
    let (id, serial) = served[0].1[0];
    assert_eq!(scheduler.give_back(now, single, &[(id, serial)]), 1);
    assert_eq!(granted(&mut scheduler)[0].0, many);
    scheduler.cancel(now, late);
}

#[test]
fn a_higher_priority_comes_first_whenever_it_came() {
    let (mut scheduler, now) = scheduler();
    let low = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let high = scheduler.request(now, "c", ServerRequest::new("k").priority(1)).unwrap();
    scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    assert_eq!(granted(&mut scheduler)[0].0, high);
    scheduler.register(now, "p", offer("k", 1), &[]).unwrap();
    assert_eq!(granted(&mut scheduler)[0].0, low);
}

#[test]
fn places_are_spread_and_servers_that_cannot_be_reached_come_last() {
    let (mut scheduler, now) = scheduler();
    let lost = scheduler.register(now, "p", offer("k", 4), &[]).unwrap();
    let (one, two) = (
        scheduler.register(now, "p", offer("k", 2), &[]).unwrap(),
        scheduler.register(now, "p", offer("k", 2), &[]).unwrap(),
    );
    scheduler.set_reachable(lost, false);
    scheduler.request(now, "c", ServerRequest::new("k").count(2)).unwrap();
    let servers: BTreeSet<_> = granted(&mut scheduler)[0].1.iter().map(|(id, _)| *id).collect();
    assert_eq!(servers.len(), 2, "{servers:?}");
    scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(_, places)] = &granted(&mut scheduler)[..] else { panic!() };
    assert!([one, two].contains(&places[0].0));
}

/// A restarted tracker learns from the servers themselves who uses them.
#[test]
fn a_server_that_registers_in_use_is_not_granted_again() {
    let (mut scheduler, now) = scheduler();
    let used = Use { id: 9, serial: Some(1), direct: false, client: "c".to_owned(), for_ms: 1000 };
    let id = scheduler.register(now, "p", offer("k", 1), std::slice::from_ref(&used)).unwrap();
    let claim = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler), []);
    assert!(scheduler.report(now, id, &[], &[]));
    assert_eq!(granted(&mut scheduler)[0].0, claim);
}

#[test]
fn whoever_has_no_time_is_served_at_once_or_told_why_not() {
    let (mut scheduler, now) = scheduler();
    let mut request = ServerRequest::new("k");
    request.timeout_ms = Some(0);
    let claim = scheduler.request(now, "c", request).unwrap();
    assert_eq!(scheduler.poll_event(), Some(Event::TimedOut { claim, wanted: 1, possible: 0 }));
    assert_eq!(scheduler.next_timeout(), None);
}
