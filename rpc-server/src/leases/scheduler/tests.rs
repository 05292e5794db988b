//! Tests of the scheduler: random histories against a simple model, and its size and limits.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rpc_core::{Device, ErrorKind};

use super::{LeaseEvent, LeaseId, LeaseLimits, LeaseScheduler, SessionId};

const LIMITS: LeaseLimits =
    LeaseLimits { max_duration: Duration::from_secs(60), max_requests: 40, max_requests_per_session: 12 };

/// Step of a history. Its numbers select among the existing requests and sessions.
#[derive(Clone, Debug)]
enum Step {
    Request { session: u8, device: u8, priority: i32, max_seconds: Option<u8> },
    Release(u8),
    CancelWaiting(u8),
    EndSession(u8),
    Pass(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..4u8, 0..3u8, -1..2i32, proptest::option::of(1..90u8)).prop_map(
            |(session, device, priority, max_seconds)| Step::Request { session, device, priority, max_seconds }
        ),
        4 => any::<u8>().prop_map(Step::Release),
        1 => (0..4u8).prop_map(Step::CancelWaiting),
        1 => (0..4u8).prop_map(Step::EndSession),
        3 => (0..40u8).prop_map(Step::Pass),
    ]
}

/// Request as the model keeps it: in a list, in the order of arrival.
#[derive(Clone, Debug)]
struct ModelRequest {
    id: LeaseId,
    session: SessionId,
    device: Device,
    priority: i32,
    duration: Duration,
    requested: Instant,
    granted: Option<Instant>,
    overdue: bool,
}

/// The rules in the simplest form, beside the scheduler that is checked.
struct Model {
    now: Instant,
    scheduler: LeaseScheduler,
    requests: Vec<ModelRequest>,
    /// Devices that were held after the step before.
    held: BTreeSet<Device>,
}

impl Model {
    fn new() -> Self {
        Self {
            now: Instant::now(),
            scheduler: LeaseScheduler::new(LIMITS),
            requests: Vec::new(),
            held: BTreeSet::new(),
        }
    }

    fn apply(&mut self, step: &Step) {
        match *step {
            Step::Request { session, device, priority, max_seconds } => {
                self.request(SessionId(session.into()), Device::cuda(device.into()), priority, max_seconds);
            }
            Step::Release(selector) => {
                if let Some(at) = usize::from(selector).checked_rem(self.requests.len()) {
                    let request = self.requests.remove(at);
                    self.scheduler.release(self.now, request.id);
                    // A second release changes nothing.
                    self.scheduler.release(self.now, request.id);
                }
            }
            Step::CancelWaiting(session) => {
                let session = SessionId(session.into());
                self.requests.retain(|request| request.session != session || request.granted.is_some());
                self.scheduler.cancel_waiting(self.now, session);
            }
            Step::EndSession(session) => {
                let session = SessionId(session.into());
                self.requests.retain(|request| request.session != session);
                self.scheduler.end_session(self.now, session);
            }
            Step::Pass(seconds) => {
                self.now += Duration::from_secs(seconds.into());
                self.scheduler.handle_timeout(self.now);
            }
        }
        self.check();
    }

    fn request(&mut self, session: SessionId, device: Device, priority: i32, max_seconds: Option<u8>) {
        let of_session = self.requests.iter().filter(|request| request.session == session).count();
        let has_room = of_session < LIMITS.max_requests_per_session && self.requests.len() < LIMITS.max_requests;
        let asked = max_seconds.map(|seconds| Duration::from_secs(seconds.into()));
        match self.scheduler.request(self.now, session, device, priority, asked) {
            Ok(id) => {
                assert!(has_room);
                let duration = asked.unwrap_or(LIMITS.max_duration).min(LIMITS.max_duration);
                let (requested, granted, overdue) = (self.now, None, false);
                let request = ModelRequest { id, session, device, priority, duration, requested, granted, overdue };
                self.requests.push(request);
            }
            Err(error) => assert!(!has_room && error.kind() == ErrorKind::LimitExceeded, "{error}"),
        }
    }

    /// Applies the rules to the model, and compares the scheduler with it.
    fn check(&mut self) {
        let mut expected = Vec::new();
        for index in 0..3 {
            let device = Device::cuda(index);
            let of_device = || self.requests.iter().enumerate().filter(|(_, request)| request.device == device);
            if of_device().any(|(_, request)| request.granted.is_some()) {
                continue;
            }
            // Of requests with the same priority `max_by_key` would choose the last one.
            let next = of_device().rev().max_by_key(|(_, request)| request.priority).map(|(at, _)| at);
            if let Some(at) = next {
                let request = &mut self.requests[at];
                request.granted = Some(self.now);
                let (id, waited, duration) = (request.id, self.now - request.requested, request.duration);
                expected.push(LeaseEvent::Granted { id, waited, duration });
            }
        }
        let of_holders = self.requests.iter().filter(|request| request.granted.is_some());
        let held: BTreeSet<_> = of_holders.map(|request| request.device).collect();
        expected.extend(self.held.difference(&held).map(|device| LeaseEvent::Freed { device: *device }));
        self.held = held;
        for request in &mut self.requests {
            let is_due = request.granted.is_some_and(|granted| granted + request.duration <= self.now);
            if is_due && !std::mem::replace(&mut request.overdue, is_due) {
                let ModelRequest { session, device, duration, .. } = *request;
                expected.push(LeaseEvent::Overdue { session, device, duration });
            }
        }
        let mut events: Vec<_> = std::iter::from_fn(|| self.scheduler.poll_event()).collect();
        let order = |event: &LeaseEvent| format!("{event:?}");
        events.sort_by_key(order);
        expected.sort_by_key(order);
        assert_eq!(events, expected);

        let timers = self.requests.iter().filter(|request| !request.overdue);
        let timers = timers.filter_map(|request| request.granted.map(|granted| granted + request.duration));
        assert_eq!(self.scheduler.next_timeout(), timers.min());
        let held = self.requests.iter().filter(|request| request.granted.is_some()).count() as u64;
        let totals = self.scheduler.totals();
        assert_eq!((totals.held, totals.waiting), (held, self.requests.len() as u64 - held));
        for request in &self.requests {
            let before = |other: &&ModelRequest| {
                let overtakes = (other.priority, request.id) > (request.priority, other.id);
                other.device == request.device && (other.granted.is_some() || overtakes) && other.id != request.id
            };
            let ahead = self.requests.iter().filter(before).count();
            let expected = if request.granted.is_some() { 0 } else { ahead };
            assert_eq!(self.scheduler.ahead(request.id, 100), expected);
        }
        for leased in self.scheduler.devices(self.now) {
            let of_device = || self.requests.iter().filter(|request| request.device == leased.device);
            let holder = of_device().find_map(|request| Some((request.granted?, request.duration, request.session)));
            let (granted, duration, session) = holder.expect("a device without a holder has no entry");
            let held = self.now - granted;
            assert_eq!((leased.held, leased.left), (held, duration.saturating_sub(held)));
            assert_eq!(leased.waiting, of_device().count() as u64 - 1);
            assert_eq!(self.scheduler.holder(leased.device), Some(session));
            assert!(!self.scheduler.held_by_others(session).any(|device| device == leased.device));
        }
        let of_nobody = SessionId(u64::MAX);
        assert!(self.scheduler.held_by_others(of_nobody).eq(self.held.iter().copied()));
    }
}

proptest! {
    // The cases are the same each time; PROPTEST_CASES and PROPTEST_RNG_SEED select others.
    #![proptest_config(ProptestConfig {
        cases: 128,
        rng_seed: RngSeed::Fixed(0x6c65_6173),
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn leases_keep_their_rules_for_any_sequence_of_events(steps in proptest::collection::vec(step(), 1..100)) {
        let mut model = Model::new();
        for step in &steps {
            model.apply(step);
        }
        for session in 0..4 {
            model.apply(&Step::EndSession(session));
        }
        let LeaseScheduler { leases, devices, by_session, timers, .. } = &model.scheduler;
        let left = (leases.len(), devices.len(), by_session.len(), timers.len());
        prop_assert_eq!(left, (0, 0, 0, 0), "something is left after the end of all sessions");
    }
}

#[test]
fn ten_thousand_wait_for_one_device_and_get_it_in_their_order() {
    const WAITING: u64 = 10_000;
    let limits = LeaseLimits { max_requests: usize::MAX, max_requests_per_session: 2, ..LIMITS };
    let (mut scheduler, now) = (LeaseScheduler::new(limits), Instant::now());
    let mut requested = Vec::new();
    for number in 0..WAITING {
        let priority = (number % 7) as i32;
        let id = scheduler.request(now, SessionId(number), Device::cuda(0), priority, None).unwrap();
        requested.push((number == 0, priority, id));
    }
    // The first one found the device free; of the others the highest priority comes first, and
    // within one priority the sort keeps their order.
    requested.sort_by_key(|(first, priority, _)| (!first, -priority));
    let last = requested[requested.len() - 1].2;
    assert_eq!(scheduler.ahead(last, 100), 100);
    for (_, _, id) in &requested {
        assert!(matches!(scheduler.poll_event(), Some(LeaseEvent::Granted { id: granted, .. }) if granted == *id));
        assert_eq!(scheduler.poll_event(), None);
        scheduler.release(now, *id);
    }
    assert_eq!(scheduler.poll_event(), Some(LeaseEvent::Freed { device: Device::cuda(0) }));
    assert_eq!((scheduler.totals().granted, scheduler.devices(now).count()), (WAITING, 0));
}
