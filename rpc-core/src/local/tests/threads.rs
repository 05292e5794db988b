//! Tests of the threads of sessions: their limits and quotas, and jobs that wait for one.

use super::*;

/// Counter of the calls that are inside at one time.
#[derive(Default)]
struct ConcurrencyCounter {
    now: AtomicUsize,
    most: AtomicUsize,
}

impl ConcurrencyCounter {
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
    session.local_inner().lanes.lock().threads.live()
}

#[test]
fn a_session_has_no_more_threads_than_its_limit() {
    let crowd = Arc::new(ConcurrencyCounter::default());
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
    eventually("all threads are idle", || session.local_inner().lanes.lock().threads.idle() == 4);
}

#[test]
fn jobs_without_a_thread_run_in_the_order_in_which_they_came() {
    let gate = Arc::new(Gate::default());
    let (waits, order) = (gate.clone(), Arc::new(Mutex::new(Vec::new())));
    let (entries, inline) = (order.clone(), order.clone());
    let registry = Registry::new();
    registry
        .add("wait", move || waits.pass())
        .add("note", move |n: i64| entries.lock().push(n))
        .add_inline("note.inline", move |n: i64| inline.lock().push(n));
    let session = with_threads(registry, 1);
    let [wait, note, inline] = ["wait", "note", "note.inline"].map(|name| handle(&session, name));
    // A lane that always has work does not keep the thread for itself.
    let mut replies: Vec<_> = vec![session.submit(call(wait, vec![])).reply()];
    replies.extend((10..13).map(|n| session.submit(call(note, vec![n.into()])).reply()));
    replies.extend((0..3_u32).map(|n| session.submit(call(note, vec![n.into()]).on(Lane(n + 1))).reply()));
    // Inline functions need no thread.
    session.submit(call(inline, vec![99.into()]).on(Lane(9))).reply().wait().unwrap();
    assert_eq!(*order.lock(), [99]);
    gate.open(1);
    wait_all(replies);
    assert_eq!(*order.lock(), [99, 0, 1, 2, 10, 11, 12]);
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
    let held: Arc<Mutex<Vec<ThreadPermit>>> = Arc::default();
    let permits = held.clone();
    registry.add("reserve", move |context: Context| -> Result<()> {
        let permit = context.reserve_thread()?;
        permits.lock().push(permit);
        Ok(())
    });
    let limits = SessionLimits { max_threads: 3, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).total_threads(quota.clone()).build();
    let reserve = handle(&session, "reserve");
    let idle = || session.local_inner().lanes.lock().threads.idle();
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
fn functions_leave_the_last_thread_for_calls() {
    let registry = Registry::new();
    let held: Arc<Mutex<Vec<ThreadPermit>>> = Arc::default();
    let permits = held.clone();
    registry.add("block", || 1).add_inline("reserve", move |context: Context| -> Result<()> {
        let permit = context.reserve_thread()?;
        permits.lock().push(permit);
        Ok(())
    });
    for (max_threads, allowed) in [(1, 0), (3, 2)] {
        let session = with_threads(registry.clone(), max_threads);
        let (reserve, block) = (handle(&session, "reserve"), handle(&session, "block"));
        // An inline function takes no thread of its own.
        let reserve = || session.submit(concurrent(reserve)).reply().wait();
        for _ in 0..2 {
            for _ in 0..allowed {
                reserve().unwrap();
            }
            assert_eq!(reserve().unwrap_err().kind(), ErrorKind::LimitExceeded);
            session.submit(concurrent(block)).reply().wait().unwrap();
            // Returned permits count no more.
            held.lock().clear();
        }
    }
}

#[test]
fn an_idle_thread_makes_room_for_one_that_a_function_starts() {
    let (quota, gate) = (ThreadQuota::new(8), Arc::new(Gate::default()));
    let registry = Registry::new();
    let held: Arc<Mutex<Vec<ThreadPermit>>> = Arc::default();
    let (permits, waits) = (held.clone(), gate.clone());
    registry.add("wait", move || waits.pass()).add("reserve", move |context: Context| -> Result<()> {
        let permit = context.reserve_thread()?;
        permits.lock().push(permit);
        Ok(())
    });
    let limits = SessionLimits { max_threads: 3, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).total_threads(quota.clone()).build();
    let (wait, reserve) = (handle(&session, "wait"), handle(&session, "reserve"));
    let idle = || session.local_inner().lanes.lock().threads.idle();
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
    crate::local::threads::REFUSE.set(true);
    // More than the stack would hold if each continued the next one.
    let hold = session.submit(call(one, vec![])).reply();
    let calls: Vec<_> = (0..500).map(|n| session.submit(call([wait, future][n % 2], vec![])).reply()).collect();
    for reply in calls {
        let error = reply.wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::LimitExceeded, false), "{error}");
    }
    drop(hold);
    assert_eq!((live_threads(&session), session.backlog()), (0, Backlog::default()));
    crate::local::threads::REFUSE.set(false);
    let first = session.submit(concurrent(wait)).reply();
    eventually("it runs", || gate.waiting() == 1);
    crate::local::threads::REFUSE.set(true);
    let second = session.submit(concurrent(future)).reply();
    let third = session.submit(concurrent(future)).reply();
    assert!(!second.is_done() && !third.is_done());
    gate.open(1);
    wait_all([first, second, third]);
    assert_eq!(live_threads(&session), 1);
    crate::local::threads::REFUSE.set(false);
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
