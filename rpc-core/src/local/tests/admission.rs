//! Tests of deadlines, and of the capacity that admission keeps to.

use super::*;

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
        let deadlines = session.local_inner().deadlines.lock();
        (deadlines.len(), deadlines.session())
    };
    assert!(kept <= 70, "{kept} deadlines are kept");
    assert_eq!(deadlines::calls(id), 1);
    drop(session);
    eventually("the timer forgets the session", || deadlines::calls(id) == 0);
}

#[test]
fn a_deadline_fires_independently_of_other_deadlines() {
    let (gate, begun) = (Arc::new(Gate::default()), Arc::<Mutex<HashSet<i64>>>::default());
    let registry = Registry::new();
    let (waits, begins) = (gate.clone(), begun.clone());
    let wait = move |number: i64| {
        begins.lock().insert(number);
        waits.pass();
    };
    registry.add("wait", wait).add("nothing", || ());
    let session = LocalSession::new(registry);
    let (wait, nothing) = (handle(&session, "wait"), handle(&session, "nothing"));
    let within = |time| Some(Instant::now() + time);
    let submit = |number: i64, time| {
        let call = call(wait, vec![number.into()]).on(Lane::CONCURRENT);
        session.submit(Request { deadline: within(time), ..call }).reply()
    };
    let later = submit(0, YEAR);
    // Makes a call that begins before its deadline. Where the machine is too busy for that, the
    // call is made again, under another number.
    let mut numbers = 1..1000;
    let mut begun_within = |time| {
        let in_time = |number| {
            let (end, reply) = (Instant::now() + time, submit(number, time));
            while !begun.lock().contains(&number) {
                if Instant::now() >= end {
                    return None;
                }
                std::thread::yield_now();
            }
            Some(reply)
        };
        numbers.find_map(in_time).expect("a call that has begun in time")
    };
    // The timer sleeps for a year, or for less.
    for _ in 0..300 {
        session.submit(Request { deadline: within(YEAR), ..concurrent(nothing) }).reply().wait().unwrap();
    }
    for millis in [30, 10, 20] {
        let expiring = begun_within(Duration::from_millis(millis));
        let error = expiring.wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::DeadlineExceeded, true));
    }
    // Requests that run when the session ends keep their deadlines.
    let last = begun_within(Duration::from_millis(50));
    session.close(RpcError::new(ErrorKind::Closed, "over"));
    assert_eq!(last.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
    gate.open(usize::MAX);
    drop(later);
}

#[test]
fn capacity_is_counted_in_bytes_of_memory() {
    let gate = Arc::new(Gate::default());
    let waits = gate.clone();
    let registry = Registry::new();
    registry.add("wait", move |_: Rest| waits.pass());
    // 4 KiB on the wire.
    let nulls = || Value::List(vec![Value::Null; 4096]);
    let each = nulls().size_hint();
    assert!(each > 4096 * size_of::<Value>());
    let fit = 3;
    let limits = SessionLimits { max_queued_bytes: fit * each + each / 2, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).build();
    let wait = handle(&session, "wait");
    let replies: Vec<_> = (0..6).map(|_| session.submit(call(wait, vec![nulls()]).on(Lane::CONCURRENT))).collect();
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
