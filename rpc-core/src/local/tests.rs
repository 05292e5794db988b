//! Tests of local sessions beyond the conformance suite: threads, queues, and the time for which
//! objects are kept.

use std::collections::HashSet;
use std::sync::atomic::AtomicUsize;
use std::sync::{Barrier, mpsc};
use std::time::Duration;

use bytes::Bytes;

use super::*;
use crate::device::{AllocRequest, DeviceApi, DeviceAttribute, Memory, Stream, WhenDone};
use crate::dlpack::DeviceType;
use crate::error::Result;
use crate::function::context::{Context, ThreadPlace};
use crate::function::convert::Shared as SharedObject;
use crate::function::handler::Rest;
use crate::reply::{PendingReply, ReplySink};
use crate::value::Reference;

const YEAR: Duration = Duration::from_secs(365 * 86400);

/// Time limit of each wait; long enough for every expected event.
const LIMIT: Duration = Duration::from_secs(20);

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LIMIT, "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Gate that holds calls until it is opened.
#[derive(Default)]
struct Gate {
    state: Mutex<(usize, usize)>,
    changed: parking_lot::Condvar,
}

impl Gate {
    /// Waits until one more call is let through.
    fn pass(&self) {
        let mut state = lock(&self.state);
        state.0 += 1;
        self.changed.wait_while(&mut state, |(_, open)| *open == 0);
        state.1 -= 1;
    }

    fn waiting(&self) -> usize {
        lock(&self.state).0
    }

    fn open(&self, count: usize) {
        lock(&self.state).1 += count;
        self.changed.notify_all();
    }
}

fn handle(session: &LocalSession, name: &str) -> Handle {
    let get = Request::new(Operation::GetFunction { name: name.to_owned() });
    match session.submit(get).reply().wait().unwrap() {
        Value::Object(Reference::Function(handle)) => handle,
        other => panic!("{other:?}"),
    }
}

fn call(function: Handle, args: Vec<Value>) -> Request {
    Request::new(Operation::Call { function, args })
}

fn concurrent(function: Handle) -> Request {
    call(function, Vec::new()).on(Lane::CONCURRENT)
}

fn wait_all(replies: impl IntoIterator<Item = PendingReply>) {
    for reply in replies {
        reply.wait().unwrap();
    }
}

#[test]
fn deadlines_of_completed_requests_are_dropped() {
    let registry = Registry::new();
    registry.add("nothing", || ());
    let session = LocalSession::new(registry);
    let nothing = handle(&session, "nothing");
    for _ in 0..3000 {
        let request = Request { deadline: Some(Instant::now() + YEAR), ..call(nothing, Vec::new()) };
        session.submit(request).reply().wait().unwrap();
    }
    let (kept, id) = {
        let deadlines = lock(&session.0.0.deadlines);
        (deadlines.len(), deadlines.session())
    };
    assert!(kept <= 70, "{kept} deadlines are kept");
    assert_eq!(timer::calls(id), 1);
    drop(session);
    eventually("the timer forgets the session", || timer::calls(id) == 0);
}

#[test]
fn a_deadline_fires_independently_of_other_deadlines() {
    let gate = Arc::new(Gate::default());
    let registry = Registry::new();
    let waits = gate.clone();
    registry.add("wait", move || waits.pass()).add("nothing", || ());
    let session = LocalSession::new(registry);
    let (wait, nothing) = (handle(&session, "wait"), handle(&session, "nothing"));
    let within = |time| Some(Instant::now() + time);
    let later = session.submit(Request { deadline: within(YEAR), ..concurrent(wait) }).reply();
    // The timer sleeps for a year, or for less.
    for _ in 0..300 {
        session.submit(Request { deadline: within(YEAR), ..concurrent(nothing) }).reply().wait().unwrap();
    }
    for millis in [30, 10, 20] {
        let request = Request { deadline: within(Duration::from_millis(millis)), ..concurrent(wait) };
        let error = session.submit(request).reply().wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, true));
    }
    // Requests that run when the session ends keep their deadlines.
    let last = session.submit(Request { deadline: within(Duration::from_millis(50)), ..concurrent(wait) }).reply();
    eventually("all run", || gate.waiting() == 5);
    session.close(RpcError::new(ErrorKind::Closed, "over"));
    assert_eq!(last.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    gate.open(5);
    drop(later);
}

#[test]
fn capacity_is_counted_in_bytes_of_memory() {
    let gate = Arc::new(Gate::default());
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move |_: Rest| waits.pass());
    let limits = SessionLimits { max_queued_bytes: 1 << 20, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).build();
    let wait = handle(&session, "wait");
    // 4 KiB on the wire.
    let nulls = || Value::List(vec![Value::Null; 4096]);
    let replies: Vec<_> = (0..6).map(|_| session.submit(call(wait, vec![nulls()]).on(Lane::CONCURRENT))).collect();
    let each = nulls().size_hint();
    assert!(each > 4096 * size_of::<Value>());
    let fit = (1 << 20) / each;
    let backlog = Backlog {
        admitted_requests: fit,
        admitted_bytes: fit * each,
        waiting_requests: 6 - fit,
        waiting_bytes: (6 - fit) * each,
    };
    assert_eq!(session.backlog(), backlog);
    assert_eq!(replies.iter().filter(|reply| reply.is_admitted()).count(), fit);
    // A request that is given up leaves the queue.
    let mut replies = replies;
    drop(replies.pop());
    assert_eq!(session.backlog().waiting_bytes, (5 - fit) * each);
    gate.open(5);
    wait_all(replies.into_iter().map(Submission::reply));
    eventually("nothing is left", || session.backlog() == Backlog::default());
}

/// Counter of the calls that are inside at one time.
#[derive(Default)]
struct Crowd {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Crowd {
    fn visit(&self) {
        self.most.fetch_max(self.now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_millis(1));
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

fn with_threads(registry: Registry, max_threads: usize) -> LocalSession {
    let limits = SessionLimits { max_threads, ..SessionLimits::default() };
    LocalSession::builder(registry).limits(limits).build()
}

fn live_threads(session: &LocalSession) -> usize {
    lock(&session.0.0.lanes).threads.live()
}

#[test]
fn a_session_has_no_more_threads_than_its_limit() {
    let crowd = Arc::new(Crowd::default());
    let (blocking, future) = (crowd.clone(), crowd.clone());
    let registry = Registry::new();
    registry.add("visit", move || blocking.visit()).add_async("visit.async", move || {
        let crowd = future.clone();
        async move { crowd.visit() }
    });
    let session = with_threads(registry, 4);
    let functions = [handle(&session, "visit"), handle(&session, "visit.async")];
    let calls = (0..300_u32).map(|n| {
        // Several on one lane, too: each waits for its turn with the others.
        let lane = if n % 3 == 0 { Lane(n % 7) } else { Lane::CONCURRENT };
        session.submit(call(functions[n as usize % 2], Vec::new()).on(lane)).reply()
    });
    wait_all(calls.collect::<Vec<_>>());
    assert_eq!(crowd.most.load(Ordering::SeqCst), 4);
    assert_eq!(live_threads(&session), 4);
    eventually("all threads are idle", || lock(&session.0.0.lanes).threads.idle() == 4);
}

#[test]
fn jobs_without_a_thread_run_in_the_order_in_which_they_came() {
    let gate = Arc::new(Gate::default());
    let (waits, order) = (gate.clone(), Arc::new(Mutex::new(Vec::new())));
    let (entries, inline) = (order.clone(), order.clone());
    let registry = Registry::new();
    registry
        .add("wait", move || waits.pass())
        .add("note", move |n: i64| lock(&entries).push(n))
        .add_inline("note.inline", move |n: i64| lock(&inline).push(n));
    let session = with_threads(registry, 1);
    let [wait, note, inline] = ["wait", "note", "note.inline"].map(|name| handle(&session, name));
    // A lane that always has work does not keep the thread for itself.
    let mut replies: Vec<_> = vec![session.submit(call(wait, vec![])).reply()];
    replies.extend((10..13).map(|n| session.submit(call(note, vec![n.into()])).reply()));
    replies.extend((0..3_u32).map(|n| session.submit(call(note, vec![n.into()]).on(Lane(n + 1))).reply()));
    // Inline functions need no thread.
    session.submit(call(inline, vec![99.into()]).on(Lane(9))).reply().wait().unwrap();
    assert_eq!(*lock(&order), [99]);
    gate.open(1);
    wait_all(replies);
    assert_eq!(*lock(&order), [99, 0, 1, 2, 10, 11, 12]);
    assert_eq!(live_threads(&session), 1);
}

#[test]
fn a_job_that_waits_for_a_thread_can_be_cancelled_and_ends_with_the_session() {
    let gate = Arc::new(Gate::default());
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move || waits.pass()).add_inline("one", || 1);
    let session = with_threads(registry, 1);
    let (wait, one) = (handle(&session, "wait"), handle(&session, "one"));
    let first = session.submit(call(wait, vec![])).reply();
    eventually("it runs", || gate.waiting() == 1);
    let parked = session.submit(call(wait, vec![]).on(Lane(1))).reply();
    let behind = session.submit(call(one, vec![]).on(Lane(1))).reply();
    assert!(!parked.is_done() && !behind.is_done());
    parked.cancel();
    assert_eq!(parked.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    assert_eq!(behind.wait().unwrap(), Value::Int(1));
    let late = Request { deadline: Some(Instant::now() + Duration::from_millis(10)), ..concurrent(wait) };
    let error = session.submit(late).reply().wait().unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, false));
    let parked = session.submit(concurrent(wait)).reply();
    session.close(RpcError::new(ErrorKind::Closed, "over"));
    assert_eq!(parked.wait().unwrap_err().kind(), ErrorKind::Closed);
    gate.open(1);
    first.wait().unwrap();
    eventually("the thread ends", || live_threads(&session) == 0);
    // A removed request is answered first; the timer may not have counted the removal yet.
    eventually("nothing is left", || session.backlog() == Backlog::default());
    assert_eq!(gate.waiting(), 1);
}

#[test]
fn sessions_share_a_thread_quota_and_have_one_thread_each_besides_it() {
    let (gate, quota) = (Arc::new(Gate::default()), ThreadQuota::new(2));
    let session = || {
        let registry = Registry::new();
        let waits = gate.clone();
        registry.add("wait", move || waits.pass());
        LocalSession::builder(registry).total_threads(quota.clone()).build()
    };
    let (first, second, third) = (session(), session(), session());
    let calls = |session: &LocalSession, count| -> Vec<_> {
        let wait = handle(session, "wait");
        (0..count).map(|_| session.submit(concurrent(wait)).reply()).collect()
    };
    let greedy = calls(&first, 10);
    eventually("it has all there is", || gate.waiting() == 3);
    let modest = calls(&second, 2);
    let last = calls(&third, 2);
    eventually("each has one", || gate.waiting() == 5);
    assert_eq!((live_threads(&first), live_threads(&second), live_threads(&third), quota.used()), (3, 1, 1, 2));
    // Waiting sessions keep nothing of a session that is gone.
    drop((third, last));
    // For all of them, because the order of the calls is not defined.
    gate.open(14);
    wait_all(greedy);
    wait_all(modest);
    drop((first, second));
    eventually("all is given back", || quota.used() == 0);
}

#[test]
fn threads_that_functions_start_count_until_they_end() {
    let quota = ThreadQuota::new(8);
    let registry = Registry::new();
    let held: Arc<Mutex<Vec<ThreadPlace>>> = Arc::default();
    let places = held.clone();
    registry.add("reserve", move |context: Context| -> Result<()> {
        let place = context.reserve_thread()?;
        places.lock().push(place);
        Ok(())
    });
    let limits = SessionLimits { max_threads: 3, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).total_threads(quota.clone()).build();
    let reserve = handle(&session, "reserve");
    let idle = || lock(&session.0.0.lanes).threads.idle();
    // The reply comes before the thread is idle again: without the wait, the next call would start
    // another.
    let call = || {
        let outcome = session.submit(concurrent(reserve)).reply().wait();
        eventually("its thread is idle", || idle() == 1);
        outcome
    };
    // One of them is the thread that runs the function.
    call().unwrap();
    call().unwrap();
    assert_eq!(call().unwrap_err().kind(), ErrorKind::LimitExceeded);
    assert_eq!((live_threads(&session), quota.used()), (3, 2));
    held.lock().clear();
    assert_eq!((live_threads(&session), quota.used()), (1, 0));
    call().unwrap();
}

#[test]
fn an_idle_thread_makes_room_for_one_that_a_function_starts() {
    let (quota, gate) = (ThreadQuota::new(8), Arc::new(Gate::default()));
    let registry = Registry::new();
    let held: Arc<Mutex<Vec<ThreadPlace>>> = Arc::default();
    let (places, waits) = (held.clone(), gate.clone());
    registry.add("wait", move || waits.pass()).add("reserve", move |context: Context| -> Result<()> {
        let place = context.reserve_thread()?;
        places.lock().push(place);
        Ok(())
    });
    let limits = SessionLimits { max_threads: 3, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).total_threads(quota.clone()).build();
    let (wait, reserve) = (handle(&session, "wait"), handle(&session, "reserve"));
    let idle = || lock(&session.0.0.lanes).threads.idle();
    let waiting: Vec<_> = (0..3).map(|_| session.submit(concurrent(wait)).reply()).collect();
    eventually("it has all there are", || gate.waiting() == 3);
    gate.open(3);
    wait_all(waiting);
    for left in [2, 1] {
        eventually("all are idle", || idle() == left + 1);
        session.submit(concurrent(reserve)).reply().wait().unwrap();
        eventually("one has gone", || idle() == left);
        assert_eq!((live_threads(&session), quota.used()), (3, 2));
    }
    let refused = session.submit(concurrent(reserve)).reply().wait().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::LimitExceeded);
    held.lock().clear();
    eventually("the two that left are forgotten", || (live_threads(&session), quota.used()) == (1, 0));
}

#[test]
fn a_session_that_waits_for_the_quota_gets_the_thread_that_another_returns() {
    let (gate, quota) = (Arc::new(Gate::default()), ThreadQuota::new(1));
    let session = || {
        let registry = Registry::new();
        let waits = gate.clone();
        registry.add("wait", move || waits.pass());
        LocalSession::builder(registry).total_threads(quota.clone()).build()
    };
    let (first, second) = (session(), session());
    let other = Arc::new(Gate::default());
    let registry = Registry::new();
    let waits = other.clone();
    registry.add("wait", move || waits.pass());
    let holder = LocalSession::builder(registry).total_threads(quota.clone()).build();
    let wait = handle(&holder, "wait");
    let held = [holder.submit(concurrent(wait)).reply(), holder.submit(concurrent(wait)).reply()];
    eventually("it has two", || other.waiting() == 2);
    let wait = [handle(&first, "wait"), handle(&second, "wait")];
    let calls: Vec<_> = (0..2).map(|_| first.submit(concurrent(wait[0])).reply()).collect();
    eventually("one runs and one waits", || gate.waiting() == 1);
    assert_eq!(live_threads(&first), 1);
    // The session's own thread is still busy.
    other.open(2);
    wait_all(held);
    eventually("both run", || gate.waiting() == 2);
    gate.open(2);
    wait_all(calls);
    drop(second);
}

#[test]
fn when_the_system_refuses_threads_jobs_wait_for_existing_ones_or_fail() {
    let gate = Arc::new(Gate::default());
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move || waits.pass()).add_async("async", || async { 1 }).add_inline("one", || 1);
    let session = LocalSession::new(registry);
    let [wait, future, one] = ["wait", "async", "one"].map(|name| handle(&session, name));
    threads::REFUSE.set(true);
    // More than the stack would hold if each continued the next one.
    let hold = session.submit(call(one, vec![])).reply();
    let calls: Vec<_> = (0..500).map(|n| session.submit(call([wait, future][n % 2], vec![])).reply()).collect();
    for reply in calls {
        let error = reply.wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::LimitExceeded, false), "{error}");
    }
    drop(hold);
    assert_eq!((live_threads(&session), session.backlog()), (0, Backlog::default()));
    threads::REFUSE.set(false);
    let first = session.submit(concurrent(wait)).reply();
    eventually("it runs", || gate.waiting() == 1);
    threads::REFUSE.set(true);
    let second = session.submit(concurrent(future)).reply();
    let third = session.submit(concurrent(future)).reply();
    assert!(!second.is_done() && !third.is_done());
    gate.open(1);
    wait_all([first, second, third]);
    assert_eq!(live_threads(&session), 1);
    threads::REFUSE.set(false);
}

#[test]
fn threads_of_one_session_can_meet_as_many_as_its_limit() {
    let registry = Registry::new();
    let barrier = Arc::new(Barrier::new(SessionLimits::default().max_threads));
    let meets = barrier.clone();
    registry.add("meet", move || _ = meets.wait());
    let session = LocalSession::new(registry);
    let meet = handle(&session, "meet");
    let calls = (0..SessionLimits::default().max_threads).map(|_| session.submit(concurrent(meet)).reply());
    wait_all(calls.collect::<Vec<_>>());
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Runtime that is shutting down, at once or a little later.
#[derive(Default)]
struct Dropping {
    later: Option<Mutex<mpsc::Sender<Task>>>,
}

impl Spawner for Dropping {
    fn spawn(&self, future: Task) {
        match &self.later {
            Some(later) => drop(lock(later).send(future)),
            None => drop(future),
        }
    }
}

#[test]
fn a_future_that_its_runtime_drops_gets_a_reply_and_leaves_its_lane() {
    let registry = Registry::new();
    registry.add_async("async", std::future::pending::<()>).add_inline("one", || 1);
    let (sender, dropped) = mpsc::channel();
    let later = Dropping { later: Some(Mutex::new(sender)) };
    for spawner in [Dropping::default(), later] {
        let waits = spawner.later.is_some();
        let session = LocalSession::builder(registry.clone()).spawner(Arc::new(spawner)).build();
        let (future, one) = (handle(&session, "async"), handle(&session, "one"));
        // More than the stack would hold if each continued the next one.
        let calls: Vec<_> = (0..1000).map(|_| session.submit(call(future, vec![])).reply()).collect();
        let behind = session.submit(call(one, vec![])).reply();
        if waits {
            // Each arrives when the previous one has ended.
            (0..1000).for_each(|_| drop(dropped.recv_timeout(LIMIT).unwrap()));
        }
        for reply in calls {
            let error = reply.wait().unwrap_err();
            assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Internal, true), "{error}");
        }
        assert_eq!(behind.wait().unwrap(), Value::Int(1));
        assert_eq!(session.backlog(), Backlog::default());
    }
}

/// Counter of live values.
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[test]
fn a_release_stays_behind_requests_that_wait_for_admission() {
    let (gate, alive) = (Arc::new(Gate::default()), Arc::new(AtomicUsize::new(0)));
    let (waits, count) = (gate.clone(), alive.clone());
    let registry = Registry::new();
    registry
        .add("wait", move || waits.pass())
        .add_inline("new", move || {
            count.fetch_add(1, Ordering::SeqCst);
            SharedObject(Arc::new(Counted(count.clone())))
        })
        .add_inline("use", |_: SharedObject<Counted>| 7);
    let limits = SessionLimits { max_requests: 1, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).build();
    let [wait, new, uses] = ["wait", "new", "use"].map(|name| handle(&session, name));
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    let named = object.handles()[0];
    let held = session.submit(call(wait, vec![]).on(Lane(1))).reply();
    let used = session.submit(call(uses, vec![object.clone()])).reply();
    let release = |handles| session.submit(Request::new(Operation::Release { handles })).reply().wait().unwrap();
    // Repeated, and with handles that name nothing: no more is queued than there are objects to
    // free.
    for forged in 0..1000 {
        release(vec![named, Handle::from_bits(forged)]);
    }
    {
        let lanes = lock(&session.0.0.lanes);
        assert_eq!(lanes.releasing_len(), (1, 1));
    }
    let late = session.submit(call(uses, vec![object])).reply();
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    gate.open(1);
    held.wait().unwrap();
    assert_eq!(used.wait().unwrap(), Value::Int(7));
    assert_eq!(late.wait().unwrap_err().kind(), ErrorKind::InvalidHandle);
    assert_eq!((alive.load(Ordering::SeqCst), session.usage().handles), (0, 3));
    // Without waiting requests, at once.
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    release(object.handles());
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    // Behind a request that is given up, as soon as it is.
    let object = session.submit(call(new, vec![])).reply().wait().unwrap();
    let held = session.submit(call(wait, vec![]).on(Lane(1))).reply();
    let given_up = session.submit(call(uses, vec![object.clone()])).reply();
    release(object.handles());
    assert_eq!(alive.load(Ordering::SeqCst), 1);
    drop(given_up);
    assert_eq!(alive.load(Ordering::SeqCst), 0);
    gate.open(1);
    held.wait().unwrap();
}

/// Device that only has streams, made by a function of their names.
struct StreamsAlone<F>(F);

const NOTING: DeviceType = DeviceType::EXT_DEV;

struct NotingStream(&'static str, Arc<Mutex<HashSet<&'static str>>>);

impl Stream for NotingStream {
    fn device(&self) -> Device {
        Device::new(NOTING, 0)
    }

    fn synchronize(&self) -> Result<()> {
        lock(&self.1).insert(self.0);
        Ok(())
    }

    fn wait_for(&self, _: &dyn Stream) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl<F: Fn(&'static str) -> Arc<dyn Stream> + Send + Sync> DeviceApi for StreamsAlone<F> {
    fn kind(&self) -> DeviceType {
        NOTING
    }

    fn count(&self) -> Result<i32> {
        Ok(1)
    }

    fn attribute(&self, _: i32, _: DeviceAttribute) -> Result<Value> {
        Ok(Value::Null)
    }

    fn allocate(&self, _: i32, _: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Err(RpcError::unsupported("no memory"))
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Ok((self.0)("created"))
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Ok((self.0)("default"))
    }
}

#[test]
fn a_stream_set_by_a_concurrent_request_is_seen_by_no_other() {
    /// Waits for the current stream while the request that set one is being answered.
    struct Waiter(LocalSession, mpsc::Sender<Outcome>);
    impl ReplySink for Waiter {
        fn deliver(&self, _: u64, outcome: Outcome) {
            outcome.unwrap();
            self.1.send(wait_for_stream(&self.0, Lane::CONCURRENT)).unwrap();
        }
    }
    fn wait_for_stream(session: &LocalSession, lane: Lane) -> Outcome {
        let wait = Operation::StreamWait { device: Device::new(NOTING, 0), stream: None };
        session.submit(Request::new(wait).on(lane)).reply().wait()
    }

    let (gate, noted) = (Arc::new(Gate::default()), Arc::new(Mutex::default()));
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move |_: Rest| waits.pass());
    let notes = noted.clone();
    let streams = StreamsAlone(move |name| Arc::new(NotingStream(name, notes.clone())) as Arc<dyn Stream>);
    let devices = Devices::new().with(Arc::new(streams));
    let limits = SessionLimits { max_queued_bytes: 1000, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).devices(devices).limits(limits).build();
    let (wait, device) = (handle(&session, "wait"), Device::new(NOTING, 0));
    let stream = session.submit(Request::new(Operation::CreateStream { device })).reply().wait().unwrap().handles()[0];
    let set = |lane| Request::new(Operation::SetStream { device, stream: Some(stream) }).on(lane);
    // It waits for admission, behind the second of these, so that its reply is delivered while it
    // is being run.
    let large = || call(wait, vec![Bytes::from(vec![0; 600]).into()]).on(Lane::CONCURRENT);
    let held = [session.submit(large()).reply(), session.submit(large()).reply()];
    let (sender, outcomes) = mpsc::channel();
    let _canceller =
        session.submit(set(Lane::CONCURRENT)).reply().deliver_to(Arc::new(Waiter(session.clone(), sender)), 1);
    gate.open(2);
    wait_all(held);
    outcomes.recv_timeout(LIMIT).unwrap().unwrap();
    assert_eq!(*lock(&noted), HashSet::from(["default"]));
    assert!(lock(&session.0.0.streams).is_empty());
    // A named lane keeps its stream.
    session.submit(set(Lane(1))).reply().wait().unwrap();
    wait_for_stream(&session, Lane(1)).unwrap();
    assert_eq!(*lock(&noted), HashSet::from(["default", "created"]));
}

/// Stream whose work is done when the test says so.
#[derive(Clone, Default)]
struct Telling(Arc<Mutex<Vec<WhenDone>>>);

impl Telling {
    /// Ends the oldest wait.
    fn tell(&self, outcome: Result<()>) {
        let done = lock(&self.0).remove(0);
        done(outcome);
    }

    fn waits(&self) -> usize {
        lock(&self.0).len()
    }
}

impl Stream for Telling {
    fn device(&self) -> Device {
        Device::new(NOTING, 0)
    }

    fn synchronize(&self) -> Result<()> {
        panic!("the session must not block")
    }

    fn when_done(&self, done: WhenDone) -> std::result::Result<(), WhenDone> {
        lock(&self.0).push(done);
        Ok(())
    }

    fn wait_for(&self, _: &dyn Stream) -> Result<()> {
        Ok(())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[test]
fn waits_for_streams_hold_their_lanes_and_no_thread() {
    let device = Telling::default();
    let devices = || {
        let stream = device.clone();
        Devices::new().with(Arc::new(StreamsAlone(move |_| Arc::new(stream.clone()) as Arc<dyn Stream>)))
    };
    let registry = Registry::new();
    registry.add("blocking", || 7).add_inline("inline", || 8);
    let limits = SessionLimits { max_threads: 1, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).devices(devices()).limits(limits).build();
    let [blocking, inline] = ["blocking", "inline"].map(|name| handle(&session, name));
    let wait = || Request::new(Operation::StreamWait { device: Device::new(NOTING, 0), stream: None });
    let waits = [1, 2, 3].map(|lane| session.submit(wait().on(Lane(lane))).reply());
    let behind = [1, 2, 3].map(|lane| {
        let function = if lane == 2 { blocking } else { inline };
        session.submit(call(function, vec![]).on(Lane(lane))).reply()
    });
    eventually("all three wait", || device.waits() == 3);
    // The only thread is free, and the lanes are busy.
    let other = session.submit(call(blocking, vec![]).on(Lane(4))).reply();
    assert_eq!(other.wait().unwrap(), Value::Int(7));
    // A reply is sent before its request is counted as complete.
    eventually("the lanes alone are left", || session.backlog().admitted_requests == 6);
    device.tell(Ok(()));
    device.tell(Ok(()));
    device.tell(Err(RpcError::new(ErrorKind::DeviceLost, "a kernel trapped")));
    let outcomes = waits.map(PendingReply::wait);
    assert_eq!(outcomes[..2], [Ok(Value::Null), Ok(Value::Null)]);
    assert_eq!(outcomes[2].as_ref().unwrap_err().kind(), ErrorKind::DeviceLost);
    assert_eq!(behind.map(|reply| reply.wait().unwrap()), [8, 7, 8].map(Value::Int));
    eventually("nothing is left", || session.backlog() == Backlog::default());

    // The deadline may pass before the stream is done, and the session may end: a later callback
    // then has no effect.
    let deadline = Some(Instant::now() + Duration::from_millis(1));
    let late = session.submit(Request { deadline, ..wait() }).reply();
    assert_eq!(late.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    let last = session.submit(wait().on(Lane(9))).reply();
    eventually("it waits", || device.waits() >= 1 && lock(&device.0).len() == session.backlog().admitted_requests);
    drop(session);
    while device.waits() > 0 {
        device.tell(Ok(()));
    }
    _ = last.wait();
    // A device that drops a wait without calling back ends it with an error.
    let session = LocalSession::builder(Registry::new()).devices(devices()).build();
    let forgotten = session.submit(wait()).reply();
    eventually("it waits", || device.waits() == 1);
    lock(&device.0).clear();
    assert_eq!(forgotten.wait().unwrap_err().kind(), ErrorKind::Internal);
}
