//! Tests of the scheduler: random histories against a simple model, and its size and limits.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use rpc_core::{Device, ErrorKind};

use super::{LeaseEvent, LeaseId, LeaseLimits, LeasePolicy, LeaseScheduler, SessionId};

const LIMITS: LeaseLimits =
    LeaseLimits { max_duration: Duration::from_secs(60), max_requests: 40, max_requests_per_session: 12 };

/// Sessions in processes of their own; 0 and 1 are in the process of the server.
const REMOTE: [SessionId; 2] = [SessionId(2), SessionId(3)];

/// Device that sessions share with the holder of a lease.
const SHARED: Device = Device::cuda(2);

fn policy() -> LeasePolicy {
    LeasePolicy::new(&["cuda=wait", "cuda:2=share"].map(|rule| rule.parse().unwrap()))
}

/// Step of a history. Its numbers select among the existing requests and sessions.
#[derive(Clone, Debug)]
enum Step {
    Request {
        session: u8,
        device: u8,
        priority: i32,
        max_seconds: Option<u8>,
    },
    Release(u8),
    CancelWaiting(u8),
    EndSession(u8),
    Pass(u8),
    BeginUse {
        session: u8,
        device: u8,
    },
    EndUse(u8),
    /// The process of the session is sent the list of reserved devices.
    List(u8),
    /// The oldest answer of the process arrives.
    Answer(u8),
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
        5 => (0..4u8, 0..3u8).prop_map(|(session, device)| Step::BeginUse { session, device }),
        4 => any::<u8>().prop_map(Step::EndUse),
        4 => (2..4u8).prop_map(Step::List),
        6 => (2..4u8).prop_map(Step::Answer),
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

/// Process of a session, which counts its uses itself.
#[derive(Debug, Default)]
struct ModelProcess {
    next_list: u64,
    /// Number and devices of the last list.
    reserved: Option<(u64, BTreeSet<Device>)>,
    /// Answers that have not arrived.
    answers: VecDeque<(u64, Device)>,
}

/// The rules in the simplest form, beside the scheduler that is checked.
struct Model {
    now: Instant,
    scheduler: LeaseScheduler,
    requests: Vec<ModelRequest>,
    /// Sessions that devices were reserved for after the step before.
    reserved: BTreeMap<Device, SessionId>,
    uses: Vec<(SessionId, Device)>,
    processes: BTreeMap<SessionId, ModelProcess>,
    /// Processes that may use a device as far as the server knows, with the first list whose answer
    /// counts.
    asked: BTreeMap<(Device, SessionId), u64>,
}

impl Model {
    fn new() -> Self {
        let mut scheduler = LeaseScheduler::new(LIMITS, policy());
        REMOTE.into_iter().for_each(|session| scheduler.add_remote(session));
        Self {
            now: Instant::now(),
            scheduler,
            requests: Vec::new(),
            reserved: BTreeMap::new(),
            uses: Vec::new(),
            processes: REMOTE.map(|session| (session, ModelProcess::default())).into(),
            asked: BTreeMap::new(),
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
                let was_remote = self.processes.remove(&session).is_some();
                if was_remote {
                    // With its process all that it does ends.
                    self.uses.retain(|(user, _)| *user != session);
                    self.asked.retain(|(_, asked), _| *asked != session);
                }
                self.scheduler.end_session(self.now, session);
                self.check();
                if was_remote {
                    // Another session takes the number.
                    self.processes.insert(session, ModelProcess::default());
                    self.scheduler.add_remote(session);
                }
            }
            Step::Pass(seconds) => {
                self.now += Duration::from_secs(seconds.into());
                self.scheduler.handle_timeout(self.now);
            }
            Step::BeginUse { session, device } => {
                self.begin_use(SessionId(session.into()), Device::cuda(device.into()))
            }
            Step::EndUse(selector) => {
                if let Some(at) = usize::from(selector).checked_rem(self.uses.len()) {
                    self.end_use(at);
                }
            }
            Step::List(session) => self.send_list(SessionId(session.into())),
            Step::Answer(session) => self.take_answer(SessionId(session.into())),
        }
        self.check();
    }

    fn begin_use(&mut self, session: SessionId, device: Device) {
        if device == SHARED {
            // Gates do not count them.
            return;
        }
        let may = match self.processes.get(&session) {
            Some(process) => process.reserved.as_ref().is_some_and(|(_, reserved)| !reserved.contains(&device)),
            None => {
                let may = self.reserved.get(&device).is_none_or(|other| *other == session);
                assert_eq!(self.scheduler.begin_use(session, device), may);
                may
            }
        };
        if may {
            self.uses.push((session, device));
        }
    }

    fn end_use(&mut self, at: usize) {
        let used = self.uses.remove(at);
        let (session, device) = used;
        match self.processes.get_mut(&session) {
            Some(process) => {
                if let Some((list, reserved)) = &process.reserved
                    && reserved.contains(&device)
                    && !self.uses.contains(&used)
                {
                    process.answers.push_back((*list, device));
                }
            }
            None => self.scheduler.end_use(self.now, session, device),
        }
    }

    fn send_list(&mut self, session: SessionId) {
        let Some(process) = self.processes.get_mut(&session) else { return };
        let (number, reserved) = self.scheduler.take_reserved_for_others(session).unwrap();
        assert_eq!(number, process.next_list);
        process.next_list += 1;
        let for_others = self.reserved.iter().filter(|(device, other)| **device != SHARED && **other != session);
        assert!(for_others.map(|(device, _)| *device).eq(reserved.iter().copied()));
        let unused = reserved.iter().filter(|device| !self.uses.contains(&(session, **device)));
        process.answers.extend(unused.map(|device| (number, *device)));
        process.reserved = Some((number, reserved.into_iter().collect()));
    }

    fn take_answer(&mut self, session: SessionId) {
        let answer = self.processes.get_mut(&session).and_then(|process| process.answers.pop_front());
        let Some((list, device)) = answer else { return };
        self.scheduler.take_unused(self.now, session, list, device);
        if self.asked.get(&(device, session)).is_some_and(|first| *first <= list) {
            self.asked.remove(&(device, session));
        }
    }

    /// Returns the sessions other than this one that keep a device from being granted.
    fn users(&self, device: Device, session: SessionId) -> BTreeSet<SessionId> {
        let here = self.uses.iter().filter(|(user, used)| *used == device && !self.processes.contains_key(user));
        let asked = self.asked.keys().filter(|(of, _)| *of == device).map(|(_, asked)| *asked);
        here.map(|(user, _)| *user).chain(asked).filter(|user| *user != session).collect()
    }

    /// Ends all uses, and lets all processes answer. After that nothing keeps a device from being
    /// granted.
    fn end_uses(&mut self) {
        while !self.uses.is_empty() {
            self.apply(&Step::EndUse(0));
        }
        for session in [2, 3] {
            self.apply(&Step::List(session));
            while !self.processes[&SessionId(session.into())].answers.is_empty() {
                self.apply(&Step::Answer(session));
            }
        }
        for request in &self.requests {
            let held = self.requests.iter().any(|other| other.device == request.device && other.granted.is_some());
            assert!(held, "{request:?} waits for a device without a holder");
        }
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
            let held = of_device().any(|(_, request)| request.granted.is_some());
            // Of requests with the same priority `max_by_key` would choose the last one.
            let next = of_device().rev().max_by_key(|(_, request)| (request.granted.is_some(), request.priority));
            let next = next.map(|(at, request)| (at, request.session));
            let before = self.reserved.get(&device).copied();
            if before != next.map(|(_, session)| session) {
                expected.push(match next {
                    Some((_, session)) => LeaseEvent::Reserved { device, session },
                    None => LeaseEvent::Freed { device },
                });
                self.reserved.remove(&device);
                if let Some((_, session)) = next {
                    self.reserved.insert(device, session);
                    let open_to = |other: SessionId| before.is_none_or(|before| before == other) && other != session;
                    let open = self.processes.iter().filter(|(other, _)| open_to(**other) && device != SHARED);
                    self.asked.extend(open.map(|(other, process)| ((device, *other), process.next_list)));
                }
            }
            let Some((at, session)) = next.filter(|(_, session)| !held && self.users(device, *session).is_empty())
            else {
                continue;
            };
            // What no rule of the scheduler may break: others neither use the device, nor begin to.
            let by_others = self.uses.iter().any(|(user, used)| *used == device && *user != session);
            assert!(!by_others, "{device} is granted while another session uses it");
            let mut others = self.processes.iter().filter(|(other, _)| **other != session && device != SHARED);
            let closed =
                others.all(|(_, process)| process.reserved.as_ref().is_none_or(|list| list.1.contains(&device)));
            assert!(closed, "{device} is granted while another session may begin to use it");
            let request = &mut self.requests[at];
            request.granted = Some(self.now);
            let (id, waited, duration) = (request.id, self.now - request.requested, request.duration);
            expected.push(LeaseEvent::Granted { id, waited, duration });
        }
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
        let listed: Vec<_> = self.scheduler.devices(self.now, 2).collect();
        assert!(listed.iter().map(|leased| leased.device).eq(self.reserved.keys().copied()));
        for leased in listed {
            let of_device = || self.requests.iter().filter(|request| request.device == leased.device);
            let holder = of_device().find_map(|request| Some((request.granted?, request.duration)));
            let session = self.reserved[&leased.device];
            let (held, left) = holder.map_or_else(Default::default, |(granted, duration)| {
                let held = self.now - granted;
                (held, duration.saturating_sub(held))
            });
            assert_eq!((leased.held, leased.left), (held, left));
            assert_eq!(leased.waiting, of_device().count() as u64 - u64::from(holder.is_some()));
            assert_eq!(leased.holder, holder.map(|_| session));
            let mut waiting: Vec<_> = of_device().filter(|request| request.granted.is_none()).collect();
            // The sort keeps the order of arrival.
            waiting.sort_by_key(|request| -request.priority);
            let waiting = waiting.iter().take(2);
            let next = waiting.map(|request| (request.session, request.priority, self.now - request.requested));
            assert!(leased.next.iter().map(|next| (next.session, next.priority, next.waited)).eq(next));
            let users = if holder.is_some() { 0 } else { self.users(leased.device, session).len() };
            assert_eq!(leased.used_by, users as u64);
            assert!(!self.scheduler.is_reserved_for_other(leased.device, session));
            assert!(self.scheduler.is_reserved_for_other(leased.device, SessionId(u64::MAX)));
        }
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
        model.end_uses();
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
    let (mut scheduler, now) = (LeaseScheduler::new(limits, policy()), Instant::now());
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
        assert!(matches!(scheduler.poll_event(), Some(LeaseEvent::Reserved { .. })));
        assert!(matches!(scheduler.poll_event(), Some(LeaseEvent::Granted { id: granted, .. }) if granted == *id));
        assert_eq!(scheduler.poll_event(), None);
        scheduler.release(now, *id);
    }
    assert_eq!(scheduler.poll_event(), Some(LeaseEvent::Freed { device: Device::cuda(0) }));
    assert_eq!((scheduler.totals().granted, scheduler.devices(now, 2).count()), (WAITING, 0));
}
