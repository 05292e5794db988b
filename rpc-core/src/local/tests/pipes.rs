//! Tests of kept results: what they count for, and what is left of them at each kind of end.

use super::*;
use crate::handle::PipeId;
use crate::memory_quota::MemoryQuota;

fn result(pipe: PipeId) -> Value {
    Value::Object(Reference::Pipe(pipe.handle()))
}

fn kept(pipe: PipeId, request: Request) -> Request {
    Request { pipe: Some(pipe), ..request }
}

fn release(session: &LocalSession, pipe: PipeId) {
    session.submit(Request::new(Operation::Release { handles: vec![pipe.handle()] })).reply().detach();
}

/// Session with `echo`, `probe`, whose objects `alive` counts, and `wait`, which waits at the gate.
fn session(limits: SessionLimits) -> (LocalSession, Arc<Gate>, Arc<()>) {
    let (registry, gate, alive) = (Registry::new(), Arc::new(Gate::default()), Arc::new(()));
    registry.add_inline("echo", |value: crate::LocalValue| value);
    let made = alive.clone();
    registry.add_inline("probe", move || SharedObject(Arc::new(Some(made.clone()))));
    let held = gate.clone();
    registry.add("wait", move || held.pass());
    (LocalSession::builder(registry).limits(limits).build(), gate, alive)
}

#[test]
fn the_end_of_the_session_frees_results_and_fails_those_who_wait_for_them() {
    let (session, gate, alive) = session(SessionLimits::default());
    let (echo, probe, wait) = (handle(&session, "echo"), handle(&session, "probe"), handle(&session, "wait"));
    let (one, two) = (PipeId::unused(), PipeId::unused());
    session.submit(kept(one, call(probe, Vec::new()))).reply().wait().unwrap();
    assert_eq!(Arc::strong_count(&alive), 3);
    let held = session.submit(call(wait, Vec::new())).reply();
    eventually("the call runs", || gate.waiting() == 1);
    let queued = session.submit(kept(two, call(probe, Vec::new()))).reply();
    let dependent = session.submit(call(echo, vec![result(one), result(two)])).reply();
    let inner = session.local_inner().clone();
    // Three functions, two cells, and one object.
    assert_eq!(session.usage().handles, 6);
    session.close(RpcError::new(ErrorKind::Closed, "over"));
    for reply in [queued, dependent] {
        assert_eq!(reply.wait().unwrap_err().kind(), ErrorKind::Closed);
    }
    eventually("the results are freed", || Arc::strong_count(&alive) == 2);
    assert_eq!((session.usage().handles, inner.staging.used()), (0, 0));
    gate.open(1);
    held.wait().unwrap();
}

#[test]
fn a_result_that_is_released_while_it_is_made_is_dropped() {
    let (registry, gate) = (Registry::new(), Arc::new(Gate::default()));
    let (held, alive) = (gate.clone(), Arc::new(()));
    let made = alive.clone();
    registry.add("make", move || {
        held.pass();
        SharedObject(Arc::new(Some(made.clone())))
    });
    let session = LocalSession::new(registry);
    let (make, pipe) = (handle(&session, "make"), PipeId::unused());
    let reply = session.submit(kept(pipe, call(make, Vec::new()))).reply();
    eventually("the call runs", || gate.waiting() == 1);
    release(&session, pipe);
    assert_eq!(session.usage().handles, 1);
    gate.open(1);
    assert_eq!(reply.wait().unwrap(), Value::Null);
    eventually("the result is dropped", || Arc::strong_count(&alive) == 2);
    assert_eq!((session.usage().handles, session.local_inner().staging.used()), (1, 0));
}

#[test]
fn requests_that_wait_for_room_keep_their_order_with_results_and_releases() {
    let limits = SessionLimits { max_requests: 2, ..SessionLimits::default() };
    let (session, gate, alive) = session(limits);
    let (echo, probe, wait) = (handle(&session, "echo"), handle(&session, "probe"), handle(&session, "wait"));
    let holds: Vec<_> = (0..2).map(|_| session.submit(call(wait, Vec::new())).reply()).collect();
    eventually("a call runs", || gate.waiting() == 1);
    // All of these wait for admission, the release as well.
    let (pipe, later) = (PipeId::unused(), PipeId::unused());
    let made = session.submit(kept(pipe, call(probe, Vec::new()))).reply();
    let used = session.submit(call(echo, vec![result(pipe)])).reply();
    let early = session.submit(call(echo, vec![result(later)])).reply();
    let cancelled = session.submit(kept(later, call(probe, Vec::new()))).reply();
    let dependent = session.submit(call(echo, vec![result(later)])).reply();
    release(&session, pipe);
    cancelled.cancel();
    assert_eq!(cancelled.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    gate.open(2);
    wait_all(holds);
    assert_eq!(made.wait().unwrap(), Value::Null);
    let value = used.wait().unwrap();
    assert_eq!(early.wait().unwrap_err().kind(), ErrorKind::Cancelled);
    let error = dependent.wait().unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Cancelled, false), "{error}");
    assert_eq!(Arc::strong_count(&alive), 3);
    session.submit(Request::new(Operation::Release { handles: value.handles() })).reply().detach();
    release(&session, later);
    eventually("everything is freed", || Arc::strong_count(&alive) == 2 && session.usage().handles == 3);
}

#[test]
fn a_deadline_that_passes_while_the_request_runs_fails_those_that_name_its_result() {
    // A longer one if the machine stood still, and the call has not begun.
    for limit in [50, 500, 5000].map(Duration::from_millis) {
        let (session, gate, _) = session(SessionLimits::default());
        let (echo, wait, pipe) = (handle(&session, "echo"), handle(&session, "wait"), PipeId::unused());
        let deadline = Some(Instant::now() + limit);
        let late = session.submit(kept(pipe, Request { deadline, ..call(wait, Vec::new()) })).reply();
        let dependent = session.submit(call(echo, vec![result(pipe)])).reply();
        assert_eq!(late.wait().unwrap_err().kind(), ErrorKind::DeadlineExceeded);
        gate.open(1);
        let error = dependent.wait().unwrap_err();
        assert!(!error.request_may_have_run(), "{error}");
        if gate.waiting() == 1 {
            assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
            return;
        }
    }
    panic!("no call has begun before its deadline");
}

#[test]
fn a_result_has_its_bytes_for_itself() {
    let (session, ..) = session(SessionLimits::default());
    let (echo, device, dtype) = (handle(&session, "echo"), crate::Device::cpu(), crate::DataType::U8);
    let fetched = |pipe: PipeId| {
        let fetch = Request::new(Operation::Fetch { handle: pipe.handle() });
        match session.submit(fetch).reply().wait().unwrap() {
            Value::List(mut values) => values.pop().unwrap(),
            value => value,
        }
    };
    // A part of something large.
    let (large, pipe) = (Bytes::from(vec![7; 1 << 20]), PipeId::unused());
    let part = Value::List(vec![Value::Bytes(large.slice(..8))]);
    session.submit(kept(pipe, call(echo, vec![part]))).reply().wait().unwrap();
    let Value::Bytes(bytes) = fetched(pipe) else { panic!("no bytes") };
    assert!(bytes[..] == [7; 8] && !large.as_ptr_range().contains(&bytes.as_ptr()));

    // Bytes that were read: the tensor can be written.
    let alloc = Operation::Alloc { device, dtype, shape: vec![8], scope: None, alignment: 0 };
    let Value::Object(Reference::Tensor(tensor)) = session.submit(Request::new(alloc)).reply().wait().unwrap() else {
        panic!("no tensor")
    };
    let pipe = PipeId::unused();
    let read = Operation::Read { from: tensor.clone(), offset: 0, len: 8, into: None };
    session.submit(kept(pipe, Request::new(read))).reply().wait().unwrap();
    let write = Operation::Write { to: tensor, offset: 0, data: large.slice(..8) };
    session.submit(Request::new(write)).reply().wait().unwrap();
    assert_eq!(fetched(pipe), Value::Bytes(Bytes::from(vec![0; 8])));
}

#[test]
fn results_cannot_double_themselves_without_end() {
    let limits = SessionLimits { max_queued_bytes: 1 << 20, ..SessionLimits::default() };
    let (session, ..) = session(limits);
    let echo = handle(&session, "echo");
    // Each list has the one before twice.
    let mut value = Value::Null;
    let mut refused = None;
    for doubled in 0..64 {
        let pipe = PipeId::unused();
        let twice = Value::List(vec![value.clone(), value]);
        if let Err(error) = session.submit(kept(pipe, call(echo, vec![twice]))).reply().wait() {
            refused = Some((doubled, error));
            break;
        }
        value = result(pipe);
    }
    let (doubled, error) = refused.expect("memory has an end");
    assert!(error.kind() == ErrorKind::LimitExceeded && doubled < 16, "{doubled}: {error}");
    assert!(session.local_inner().staging.used() <= 1 << 20);

    // Each list has the one before alone, and so is nested one level deeper.
    let mut value = Value::Null;
    let outcome = (0..1000).try_for_each(|_| {
        let pipe = PipeId::unused();
        let nested = Value::List(vec![std::mem::take(&mut value)]);
        value = result(pipe);
        session.submit(kept(pipe, call(echo, vec![nested]))).reply().wait().map(drop)
    });
    let error = outcome.unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidArgument && error.message().contains("nested"), "{error}");
    // The call has not seen it.
    assert!(!error.request_may_have_run(), "{error}");
}

#[test]
fn there_are_so_many_results_of_a_session_and_their_bytes_count_for_all_sessions() {
    let total = MemoryQuota::new("max_total", 1 << 20, None);
    let registry = Registry::new();
    registry.add_inline("echo", |value: crate::LocalValue| value);
    let session = LocalSession::builder(registry).total_memory(total.clone()).build();
    let (echo, text) = (handle(&session, "echo"), "x".repeat(300 << 10));
    let pipes: Vec<_> = (0..4).map(|_| PipeId::unused()).collect();
    for (at, pipe) in pipes.iter().enumerate() {
        let outcome = session.submit(kept(*pipe, call(echo, vec![text.as_str().into()]))).reply().wait();
        match outcome {
            Ok(_) => assert!(at < 3),
            Err(error) => assert!(at == 3 && error.message().contains("max_total"), "{error}"),
        }
    }
    assert!(total.used() > 900 << 10);
    pipes.into_iter().for_each(|pipe| release(&session, pipe));
    assert_eq!(total.used(), 0);

    let mut count = 0;
    let error = loop {
        match session.submit(kept(PipeId::unused(), call(echo, vec![1.into()]))).reply().wait() {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
        assert!(count < 1 << 16);
    };
    assert!(error.message().contains("max_pipes") && count == 4096, "{count}: {error}");
    assert_eq!(session.usage().handles, 4097);
}

#[test]
fn a_result_that_panics_when_it_is_dropped_leaves_its_lane_alone() {
    struct Panics;
    impl Drop for Panics {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    let (registry, gate) = (Registry::new(), Arc::new(Gate::default()));
    let (held, waits) = (gate.clone(), Arc::new(AtomicBool::new(false)));
    let wait = waits.clone();
    registry.add_inline("echo", |value: crate::LocalValue| value);
    registry.add("make", move || {
        if wait.load(Ordering::Relaxed) {
            held.pass();
        }
        SharedObject(Arc::new(Panics))
    });
    registry.add("large", || {
        let object = crate::LocalValue::Object(Object::Opaque(crate::function::object::Opaque::new(Arc::new(Panics))));
        crate::LocalValue::List(vec![object, Value::Bytes(Bytes::from(vec![0; 2 << 20]))])
    });
    let limits = SessionLimits { max_queued_bytes: 1 << 20, ..SessionLimits::default() };
    let session = LocalSession::builder(registry).limits(limits).build();
    let [echo, make, large] = ["echo", "make", "large"].map(|name| handle(&session, name));
    let works = |what: &str| {
        let reply = session.submit(call(echo, vec![1.into()])).reply();
        assert_eq!(reply.wait().unwrap(), 1.into(), "after {what}");
    };
    let pipe = PipeId::unused();
    session.submit(kept(pipe, call(make, Vec::new()))).reply().wait().unwrap();
    let free = Request::new(Operation::Free { handle: pipe.handle() });
    assert_eq!(session.submit(free).reply().wait().unwrap(), Value::Null);
    works("an explicit free");

    session.submit(kept(pipe, call(make, Vec::new()))).reply().wait().unwrap();
    release(&session, pipe);
    works("a release");

    waits.store(true, Ordering::Relaxed);
    let running = session.submit(kept(pipe, call(make, Vec::new()))).reply();
    eventually("the call runs", || gate.waiting() == 1);
    release(&session, pipe);
    gate.open(1);
    assert_eq!(running.wait().unwrap(), Value::Null);
    works("a release while the request ran");

    let error = session.submit(kept(pipe, call(large, Vec::new()))).reply().wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    works("a result without room");
    release(&session, pipe);
    assert_eq!((session.usage().handles, session.local_inner().staging.used()), (3, 0));
}
