//! Tests of the scheduler, rule by rule.

mod model;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::DeviceType;
use rpc_transports::tracker::{DeviceOffer, ServerRequest, ServerStatus, Use};

use super::{ClaimId, Event, GrantedSlot, Offer, Policy, Scheduler, ServerId, unservable};

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
        max_reserving: 2,
    }
}

fn offer(key: &str, capacity: u32) -> Arc<Offer> {
    Arc::new(Offer { key: key.to_owned(), labels: BTreeMap::new(), devices: Vec::new(), capacity, by_key_only: false })
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
        let offer = Offer {
            key: "k".to_owned(),
            labels: BTreeMap::new(),
            devices: devices.clone(),
            capacity: 1,
            by_key_only: false,
        };
        scheduler.register(now, "p", Arc::new(offer), &no_uses()).unwrap();
        let wanted: rpc_core::VirtualDevice = wanted.parse().unwrap();
        scheduler.request(now, "c", ServerRequest::any().virtual_device(wanted.clone())).unwrap();
        assert_eq!(granted(&mut scheduler).len(), usize::from(is_there), "{wanted}");
        // All of several constraints have to be satisfied.
        let (mut scheduler, now) = self::scheduler();
        let offer = Offer {
            key: "k".to_owned(),
            labels: BTreeMap::new(),
            devices: devices.clone(),
            capacity: 1,
            by_key_only: false,
        };
        scheduler.register(now, "p", Arc::new(offer), &no_uses()).unwrap();
        let both = ServerRequest::any().virtual_device(DeviceType::CPU).virtual_device(wanted.clone());
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
fn a_server_that_drains_is_given_to_nobody_and_no_request_waits_for_it() {
    let (mut scheduler, now) = scheduler();
    let drained = scheduler.register(now, "p", offer("k", 2), &no_uses()).unwrap();
    let first = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    assert_eq!(granted(&mut scheduler)[0].0, first);
    assert!(scheduler.set_draining(now, drained, true) && scheduler.set_draining(now, drained, true));
    let server = scheduler.server(drained).unwrap();
    assert_eq!((server.free(), server.holders().count()), (0, 1), "the slot that was granted stays");
    let (both, one) = (ServerRequest::new("k").count(2), ServerRequest::new("k"));
    assert_eq!(scheduler.draining_for(&one), 1);
    // It does not reserve the other server's slot for a request that needs both servers.
    scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let both = scheduler.request(now, "c", both).unwrap();
    let one = scheduler.request(now, "c", one).unwrap();
    let [(claim, _)] = granted(&mut scheduler)[..] else { panic!() };
    assert_eq!(claim, one);
    let possible: Vec<_> = scheduler.waiting().map(|(_, possible)| possible).collect();
    assert_eq!(possible, [1]);
    // Its reports change nothing.
    scheduler.report(now, drained, &no_uses());
    assert_eq!(granted(&mut scheduler), []);
    // The first ticket is gone with its time, so both slots are free.
    let later = now + TICKET;
    scheduler.report(later, drained, &ServerStatus { now_ms: TICKET.as_millis() as u64, ..no_uses() });
    assert!(scheduler.set_draining(later, drained, false));
    let [(claim, slots)] = &granted(&mut scheduler)[..] else { panic!() };
    assert_eq!((*claim, slots.len()), (both, 2));
    assert!(slots.iter().all(|slot| slot.server == drained));
    assert!(!scheduler.set_draining(later, ServerId(99), true));
}

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
            ServerRequest::new("k").device(DeviceType::CUDA, 1 + number),
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

/// Regression: a server that came or went was compared with each request that waited for its key;
/// and with each of those that differed in the number of slots, in the type of a virtual device, or
/// in a label after the first one.
#[test]
fn a_registration_looks_at_few_of_the_requests_that_wait() {
    const REQUESTS: u64 = 5000;
    let limits = Policy { max_servers: 10, max_servers_per_peer: 10, max_waiting: 10_000, ..policy() };
    let (mut scheduler, now) = (Scheduler::new(Policy { max_waiting_per_client: 10_000, ..limits }), Instant::now());
    for number in 0..REQUESTS {
        let kind: DeviceType = format!("device{}", 1000 + number).parse().unwrap();
        let count = 1000 + u32::try_from(number).unwrap();
        let request = match number % 7 {
            0 => ServerRequest::new("k").count(count),
            1 => ServerRequest::any().count(count).distinct(),
            2 => ServerRequest::new("k").label("host", &format!("node{number}")),
            3 => ServerRequest::any().device(kind, 1),
            4 => ServerRequest::any().device(DeviceType::CPU, 1).device(kind, 1),
            5 => ServerRequest::new("k").virtual_device(kind),
            _ => ServerRequest::new("k").label("a", "common").label("host", &format!("node{number}")),
        };
        scheduler.request(now, "c", request.priority(i32::try_from(number).unwrap())).unwrap();
    }
    assert!(granted(&mut scheduler).is_empty() && scheduler.totals().waiting == REQUESTS);
    scheduler.compared.set(0);
    let mut offer = (*offer("k", 4)).clone();
    offer.labels.insert("a".to_owned(), "common".to_owned());
    offer.devices.push(DeviceOffer::new("cpu", 1));
    let id = scheduler.register(now, "p", Arc::new(offer), &no_uses()).unwrap();
    scheduler.report(now, id, &no_uses());
    scheduler.unregister(now, id);
    let compared = scheduler.compared.get();
    assert!((2..20).contains(&compared), "{compared} comparisons for {REQUESTS} requests");
    assert!(granted(&mut scheduler).is_empty());
}

/// Regression: each was a class of its own, which looked at all servers at each change.
#[test]
fn requests_that_say_the_same_in_different_ways_look_at_few_servers() {
    const REQUESTS: u32 = 90;
    let (mut scheduler, now) = scheduler();
    let mut with_gpus = (*offer("k", 1000)).clone();
    with_gpus.devices.push(DeviceOffer::new("cuda", 2));
    for _ in 0..10 {
        scheduler.register(now, "p", Arc::new(with_gpus.clone()), &no_uses()).unwrap();
    }
    let busy = Use { id: 1, serial: None, direct: true, client: "c".to_owned(), for_ms: 0, silent_ms: 0 };
    let status = ServerStatus { uses: vec![busy], ..no_uses() };
    scheduler.register(now, "p", Arc::new(Offer { capacity: 1, ..with_gpus }), &status).unwrap();
    let mut last = ClaimId(0);
    for number in 0..REQUESTS {
        let mut request = ServerRequest::new("k").count(11).distinct();
        for times in 0..number {
            let mut wanted = DeviceOffer::new("cuda", [2, 1, 0][times as usize % 3]);
            wanted.memory_scopes.push(format!("scope{number}"));
            request.devices.push(wanted);
            request = request.virtual_device(DeviceType::CUDA);
        }
        request.devices.insert(0, DeviceOffer::new("cuda", 2));
        request = request.virtual_device(DeviceType::CUDA);
        last = scheduler.request(now, "c", request).unwrap();
    }
    scheduler.compared.set(0);
    scheduler.cancel(now, last);
    let compared = scheduler.compared.get();
    assert!(compared < 200, "{compared} comparisons for {REQUESTS} requests");
    assert!(granted(&mut scheduler).is_empty());
}

#[test]
fn a_request_that_can_never_be_served_fails_after_its_time_and_says_why() {
    let (mut scheduler, now) = scheduler();
    let second = Duration::from_secs(1);
    let wanted = || ServerRequest::new("k").count(2).unservable_timeout(60 * second);
    let first = scheduler.register(now, "p", offer("k", 1), &no_uses()).unwrap();
    let report = |scheduler: &mut Scheduler, id, now| assert!(scheduler.report(now, id, &no_uses()));
    let claim = scheduler.request(now, "c", wanted()).unwrap();
    // A server that comes and goes begins the time anew.
    let mut now = now;
    let pass = |scheduler: &mut Scheduler, now: &mut Instant, time: Duration| {
        let end = *now + time;
        while *now < end {
            *now += second;
            scheduler.handle_timeout(*now);
            report(scheduler, first, *now);
        }
    };
    pass(&mut scheduler, &mut now, 50 * second);
    let busy = Use { id: 1, serial: None, direct: true, client: "c".to_owned(), for_ms: 0, silent_ms: 0 };
    let status = ServerStatus { uses: vec![busy], ..no_uses() };
    let other = scheduler.register(now, "p", offer("k", 1), &status).unwrap();
    scheduler.unregister(now, other);
    pass(&mut scheduler, &mut now, 59 * second);
    assert_eq!(scheduler.poll_event(), None);
    pass(&mut scheduler, &mut now, second);
    let Some(Event::Unservable { claim: told, request, possible }) = scheduler.poll_event() else { panic!() };
    assert_eq!((told, possible), (claim, 1));
    let error = unservable(&request, possible, 0, scheduler.keys());
    let text = error.message();
    assert!(text.contains("for 60s: 2 slots with the key 'k'") && text.contains("have 1; "), "{text}");
    assert!(text.ends_with("keys: k"), "{text}");

    // One that comes and goes without making the request possible does not. Regression: it did,
    // and a request for many waited without end while one server crashed again and again.
    let hopeless = scheduler.request(now, "c", wanted().count(3)).unwrap();
    for _ in 0..59 {
        let other = scheduler.register(now, "p", offer("k", 1), &status).unwrap();
        scheduler.unregister(now, other);
        pass(&mut scheduler, &mut now, second);
    }
    assert_eq!(scheduler.poll_event(), None);
    pass(&mut scheduler, &mut now, second);
    let Some(Event::Unservable { claim, .. }) = scheduler.poll_event() else { panic!() };
    assert_eq!(claim, hopeless);

    // Requests that could be served, or that have a time limit of their own, wait.
    let patient = scheduler.request(now, "c", wanted().timeout(3600 * second)).unwrap();
    let endless = scheduler.request(now, "c", wanted().unservable_timeout(Duration::MAX)).unwrap();
    pass(&mut scheduler, &mut now, 3599 * second);
    assert_eq!(scheduler.poll_event(), None);
    [patient, endless].iter().for_each(|claim| scheduler.cancel(now, *claim));
    scheduler.unregister(now, first);
    assert_eq!((scheduler.next_timeout(), scheduler.classes.checked_len()), (None, 0));
}

/// Regression: the timer of a request that could be served was set to the present time again and
/// again, if the request did not wait at all while it could not be served.
#[test]
fn a_request_that_may_not_be_impossible_for_a_moment_waits_while_it_is_possible() {
    let (mut scheduler, now) = scheduler();
    let busy = Use { id: 1, serial: None, direct: true, client: "c".to_owned(), for_ms: 0, silent_ms: 0 };
    let status = ServerStatus { uses: vec![busy], ..no_uses() };
    let id = scheduler.register(now, "p", offer("k", 1), &status).unwrap();
    let wanted = || ServerRequest::new("k").unservable_timeout(Duration::ZERO);
    let possible = scheduler.request(now, "c", wanted()).unwrap();
    scheduler.handle_timeout(now);
    assert_eq!(scheduler.poll_event(), None);
    let claim = scheduler.request(now, "c", wanted().count(2)).unwrap();
    let Some(Event::Unservable { claim: told, .. }) = scheduler.poll_event() else { panic!() };
    assert_eq!(told, claim);
    scheduler.unregister(now, id);
    scheduler.handle_timeout(now);
    let Some(Event::Unservable { claim: told, .. }) = scheduler.poll_event() else { panic!() };
    assert_eq!((told, scheduler.next_timeout()), (possible, None));
}

/// Regression: each request that failed sorted the keys of all servers.
#[test]
fn the_error_of_an_impossible_request_looks_at_few_of_the_keys() {
    let keys: Vec<String> = (0..8000).map(|number| format!("k{number}")).collect();
    let seen = std::cell::Cell::new(0);
    let registered = keys.iter().map(|key| {
        seen.set(seen.get() + 1);
        key.as_str()
    });
    let error = unservable(&ServerRequest::new("board"), 0, 0, registered);
    assert!(error.message().ends_with("k0, k1, k2, k3, k4, k5, k6, k7 and 7992 others"), "{error}");
    assert!(seen.get() < 10, "{} keys", seen.get());

    let (mut scheduler, now) = scheduler();
    for key in ["c", "a", "b"] {
        scheduler.register(now, "p", offer(key, 1), &no_uses()).unwrap();
    }
    assert_eq!(scheduler.keys().collect::<Vec<_>>(), ["a", "b", "c"]);
}

/// Regression: each of them looked at all servers at each change.
#[test]
fn requests_for_different_servers_that_wait_look_at_few_servers() {
    let limits = Policy { max_servers: 100, max_servers_per_peer: 100, max_waiting: 1000, ..policy() };
    let (mut scheduler, now) = (Scheduler::new(Policy { max_waiting_per_client: 1000, ..limits }), Instant::now());
    let busy = Use { id: 1, serial: None, direct: true, client: "c".to_owned(), for_ms: 0, silent_ms: 0 };
    let status = ServerStatus { uses: vec![busy], ..no_uses() };
    let id = scheduler.register(now, "p", offer("k", 1), &status).unwrap();
    for _ in 0..9 {
        scheduler.register(now, "p", offer("k", 1000), &no_uses()).unwrap();
    }
    let wanted = || ServerRequest::new("k").count(10).distinct();
    let first = scheduler.request(now, "c", wanted()).unwrap();
    for _ in 1..500 {
        scheduler.request(now, "c", wanted()).unwrap();
    }
    scheduler.compared.set(0);
    let other = scheduler.register(now, "p", offer("other", 1), &no_uses()).unwrap();
    scheduler.unregister(now, other);
    scheduler.give_back(now, ClaimId(0), &[]);
    scheduler.set_reachable(id, false);
    scheduler.cancel(now, ClaimId(400));
    let compared = scheduler.compared.get();
    assert!(compared < 1000, "{compared}");
    assert!(granted(&mut scheduler).is_empty());
    // One that asks for less than they leave is served.
    let small = scheduler.request(now, "c", ServerRequest::new("k").count(9).distinct()).unwrap();
    let served = granted(&mut scheduler);
    assert_eq!(served.iter().map(|(claim, _)| *claim).collect::<Vec<_>>(), [small]);
    // They are served in their order, as soon as that can be.
    scheduler.report(now, id, &no_uses());
    let served = granted(&mut scheduler);
    assert_eq!(served.iter().map(|(claim, _)| *claim).collect::<Vec<_>>(), [first]);
}

#[cfg(feature = "tvm")]
#[test]
fn a_server_that_does_not_report_is_taken_until_it_says_that_it_is_free() {
    let (mut scheduler, now) = scheduler();
    let by_key_only = Arc::new(Offer { by_key_only: true, ..(*offer("k", 1)).clone() });
    let server = scheduler.register(now, "p", by_key_only, &no_uses()).unwrap();
    scheduler.keep_without_lease(server);
    let any = scheduler.request(now, "c", ServerRequest::any().timeout(Duration::ZERO)).unwrap();
    assert!(matches!(scheduler.poll_event(), Some(Event::TimedOut { claim, .. }) if claim == any));
    let first = scheduler.request(now, "c", ServerRequest::new("k")).unwrap();
    let [(claim, slots)] = &granted(&mut scheduler)[..] else { panic!("one server") };
    assert_eq!(*claim, first);
    let serial = slots[0].serial;
    scheduler.use_granted(now, server, serial);
    // Neither tickets nor leases end, and no client gives back what it may be using.
    let later = now + 1000 * LEASE;
    scheduler.handle_timeout(later);
    scheduler.abandon(later, first, vec![(server, serial)]);
    scheduler.handle_timeout(later + LEASE);
    assert_eq!(scheduler.give_back(later, first, &[(server, serial)]), 0);
    let taken = |scheduler: &Scheduler| scheduler.server(server).unwrap().holders().count();
    assert_eq!((scheduler.poll_event(), taken(&scheduler)), (None, 1));
    assert!(scheduler.set_free(later, server));
    scheduler.handle_timeout(later + 1000 * LEASE);
    assert_eq!((scheduler.poll_event(), taken(&scheduler)), (None, 0));
    // Of the next grant no client has been told.
    let _second = scheduler.request(later, "c", ServerRequest::new("k")).unwrap();
    assert_eq!((granted(&mut scheduler).len(), taken(&scheduler)), (1, 1));
    assert!(scheduler.set_free(later, server));
    assert_eq!(taken(&scheduler), 0);
    assert!(scheduler.unregister(later, server) && !scheduler.set_free(later, server));
}
