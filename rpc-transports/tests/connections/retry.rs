//! Tests of sessions that repeat requests: what is repeated, when, and where objects are by then.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::{
    DataType, Device, ErrorKind, Lane, LocalSession, Operation, Registry, RemoteTensor, Request, Result, RpcError,
    RpcSession, Session, Submission,
};
use rpc_transports::{Bind, Connector, RetryBudget, RetryPolicy, RetrySession, ServeOptions, Server};

/// A session whose requests fail as a script says; the others go on to the session inside.
struct Scripted {
    next: LocalSession,
    /// Errors of the next requests of some operation. A request that may have run reaches the
    /// session inside, whose answer nobody gets.
    script: Arc<Mutex<VecDeque<(&'static str, RpcError)>>>,
    /// Number of requests so far, other than releases.
    requests: Arc<AtomicU32>,
}

impl RpcSession for Scripted {
    fn submit(&self, request: Request) -> Submission {
        if !matches!(request.operation, Operation::Release { .. }) {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        let mut script = self.script.lock();
        if script.front().is_some_and(|(name, _)| *name == request.operation.name()) {
            let (_, error) = script.pop_front().unwrap();
            drop(script);
            if error.request_may_have_run() {
                self.next.submit(request).reply().detach();
            }
            return Submission::ready(Err(error));
        }
        drop(script);
        self.next.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.next)
    }

    /// Its errors stand for those of a connection.
    fn is_local(&self) -> bool {
        false
    }
}

/// Sessions that fail as their scripts say, and what has been asked of them.
#[derive(Default)]
struct Sessions {
    script: Arc<Mutex<VecDeque<(&'static str, RpcError)>>>,
    requests: Arc<AtomicU32>,
    opened: Arc<AtomicU32>,
    /// Arguments of the calls that ran.
    calls: Arc<Mutex<Vec<i64>>>,
}

impl Sessions {
    fn fails(&self, operation: &'static str, kind: ErrorKind, may_have_run: bool) {
        self.script.lock().push_back((operation, RpcError::new(kind, "as the script says").may_have_run(may_have_run)));
    }

    fn make(&self) -> impl Fn() -> Session + Send + Sync + 'static + use<> {
        let (script, requests, opened, calls) =
            (self.script.clone(), self.requests.clone(), self.opened.clone(), self.calls.clone());
        move || {
            let registry = Registry::new();
            let counted = calls.clone();
            registry.add_inline("get", move |x: i64| {
                counted.lock().push(x);
                x
            });
            registry.add_inline("same", |x: rpc_core::Tensor| x);
            opened.fetch_add(1, Ordering::Relaxed);
            let next = LocalSession::new(registry);
            Session::new(Scripted { next, script: script.clone(), requests: requests.clone() })
        }
    }

    fn reopening(&self, policy: RetryPolicy) -> Session {
        let make = self.make();
        Session::new(RetrySession::reopening(
            move || {
                let session = make();
                async move { Ok(session) }
            },
            policy,
        ))
    }

    fn opened(&self) -> u32 {
        self.opened.load(Ordering::Relaxed)
    }

    fn calls(&self) -> usize {
        self.calls.lock().len()
    }
}

fn kind<T: std::fmt::Debug>(outcome: Result<T>) -> ErrorKind {
    outcome.unwrap_err().kind()
}

#[tokio::test(start_paused = true)]
async fn a_request_that_did_not_run_is_made_again_in_a_new_session() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default());
    let get = session.get_function("get").await.unwrap();
    assert_eq!(sessions.opened(), 1);
    for kind in [ErrorKind::PeerLost, ErrorKind::Draining, ErrorKind::Closed, ErrorKind::SessionTimeout] {
        let (opened, calls) = (sessions.opened(), sessions.calls());
        sessions.fails("call", kind, false);
        // The function is that of the next session by then.
        assert_eq!(get.call::<i64>((7,)).await.unwrap(), 7, "{kind}");
        assert_eq!((sessions.opened(), sessions.calls()), (opened + 1, calls + 1), "{kind}");
    }
    // What is busy is asked of the same session.
    sessions.fails("call", ErrorKind::Busy, false);
    let opened = sessions.opened();
    assert_eq!(get.call::<i64>((8,)).await.unwrap(), 8);
    assert_eq!(sessions.opened(), opened);
}

#[tokio::test(start_paused = true)]
async fn an_error_that_a_function_returns_does_not_end_its_session() {
    let opened = Arc::new(AtomicU32::new(0));
    let count = opened.clone();
    let open = move || {
        count.fetch_add(1, Ordering::Relaxed);
        let registry = Registry::new();
        registry.add_inline("ask", |kind: i64| -> Result<()> {
            let kind = if kind == 0 { ErrorKind::PeerLost } else { ErrorKind::Draining };
            Err(RpcError::new(kind, "of another session").may_have_run(true))
        });
        let session = Session::new(LocalSession::new(registry));
        async move { Ok(session) }
    };
    let session = Session::new(RetrySession::reopening(open, RetryPolicy::default().idempotent(["ask"])));
    let tensor = session.upload(&[1], &[7_u8]).await.unwrap();
    let ask = session.get_function("ask").await.unwrap();
    for (number, error) in [ErrorKind::PeerLost, ErrorKind::Draining].into_iter().enumerate() {
        assert_eq!(kind(ask.call::<()>((number as i64,)).await), error);
    }
    assert_eq!(session.download::<u8>(&tensor).await.unwrap(), [7]);
    assert_eq!(opened.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_session_that_ended_for_any_reason_is_replaced() {
    let inner = Arc::new(Mutex::new(Vec::new()));
    let opened = inner.clone();
    let open = move || {
        let registry = Registry::new();
        registry.add_inline("get", |x: i64| x);
        let local = LocalSession::new(registry);
        opened.lock().push(local.clone());
        async move { Ok(Session::new(local)) }
    };
    let session = Session::new(RetrySession::reopening(open, RetryPolicy::default()));
    let get = session.get_function("get").await.unwrap();
    inner.lock()[0].close(RpcError::new(ErrorKind::Protocol, "the peer speaks in tongues"));
    assert_eq!(kind(get.call::<i64>((1,)).await), ErrorKind::Protocol);
    assert_eq!(get.call::<i64>((2,)).await.unwrap(), 2);
    assert_eq!(inner.lock().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_session_is_held_by_none_who_waited_for_its_end() {
    let inner = Arc::new(());
    let held = inner.clone();
    let open = move || {
        let _held = &held;
        async { Ok(Session::new(LocalSession::new(Registry::new()))) }
    };
    let session = RetrySession::reopening(open, RetryPolicy::default());
    drop(session.ended());
    let ended = session.ended().reply();
    assert_eq!(Arc::strong_count(&inner), 2);
    drop(session);
    assert_eq!(ended.await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(Arc::strong_count(&inner), 1);
}

#[tokio::test(start_paused = true)]
async fn all_who_need_a_session_share_an_opening_that_fails() {
    let (opened, gate) = (Arc::new(AtomicU32::new(0)), Arc::new(tokio::sync::Semaphore::new(0)));
    let (count, opens) = (opened.clone(), gate.clone());
    let open = move || {
        count.fetch_add(1, Ordering::Relaxed);
        let opens = opens.clone();
        async move {
            opens.acquire().await.map_err(|_| RpcError::internal("closed"))?.forget();
            Err(RpcError::new(ErrorKind::PeerLost, "nobody is there"))
        }
    };
    let policy = RetryPolicy::default().attempts(1);
    let session = Session::new(RetrySession::reopening(open, policy));
    let lookups: Vec<_> = (0..10).map(|_| session.get_function("get").concurrent().start()).collect();
    while opened.load(Ordering::Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
    // All ten have come as far as the opening by the time that virtual time goes on.
    tokio::time::sleep(Duration::from_secs(1)).await;
    gate.add_permits(10);
    for lookup in lookups {
        assert_eq!(kind(lookup.await), ErrorKind::PeerLost);
    }
    assert_eq!(opened.load(Ordering::Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_may_have_run_is_made_again_only_if_it_is_idempotent() {
    let sessions = Sessions::default();
    let careful = sessions.reopening(RetryPolicy::default());
    let get = careful.get_function("get").await.unwrap();
    sessions.fails("call", ErrorKind::PeerLost, true);
    let error = get.call::<i64>((7,)).await.unwrap_err();
    assert!(error.kind() == ErrorKind::PeerLost && error.request_may_have_run(), "{error}");
    assert_eq!(sessions.calls(), 1);
    // The next request opens a session.
    assert_eq!(get.call::<i64>((8,)).await.unwrap(), 8);

    let bold = sessions.reopening(RetryPolicy::default().idempotent(["g*"]));
    let get = bold.get_function("get").await.unwrap();
    sessions.fails("call", ErrorKind::PeerLost, true);
    assert_eq!(get.call::<i64>((9,)).await.unwrap(), 9);
    // The first one of both attempts ran, too.
    assert_eq!(sessions.calls(), 4);
    // Lookups and allocations leave nothing behind in a session that was lost.
    sessions.fails("get_function", ErrorKind::PeerLost, true);
    sessions.fails("alloc", ErrorKind::PeerLost, true);
    bold.get_function("get").await.unwrap();
    bold.alloc(Device::cpu(), DataType::U8, &[4]).await.unwrap();
    // Errors that do not pass are those of the request.
    for (at, lasting) in [ErrorKind::Application, ErrorKind::NotFound, ErrorKind::Refused].into_iter().enumerate() {
        sessions.fails("call", lasting, at == 0);
        assert_eq!(kind(get.call::<i64>((1,)).await), lasting);
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_whose_object_went_with_its_session_fails_with_the_error_of_the_connection() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default().idempotent(["same"]));
    for may_have_run in [true, false] {
        let same = session.get_function("same").await.unwrap();
        let tensor = session.upload(&[1], &[7_u8]).await.unwrap();
        sessions.fails("call", ErrorKind::PeerLost, may_have_run);
        let error = same.call::<RemoteTensor>((&tensor,)).await.unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::PeerLost, may_have_run), "{error}");
        // From now on the object is what is wrong.
        assert_eq!(kind(same.call::<RemoteTensor>((&tensor,)).await), ErrorKind::InvalidHandle);
    }
    assert_eq!(sessions.opened(), 3);
}

#[tokio::test(start_paused = true)]
async fn attempts_are_bounded_and_their_pauses_grow() {
    let sessions = Sessions::default();
    let policy = RetryPolicy::default().attempts(3).pauses(Duration::from_secs(10), Duration::from_secs(60));
    let session = sessions.reopening(policy);
    let get = session.get_function("get").await.unwrap();
    for _ in 0..3 {
        sessions.fails("call", ErrorKind::Busy, false);
    }
    let (start, before) = (tokio::time::Instant::now(), sessions.requests.load(Ordering::Relaxed));
    assert_eq!(kind(get.call::<i64>((7,)).await), ErrorKind::Busy);
    assert_eq!(sessions.requests.load(Ordering::Relaxed), before + 3);
    // Half of ten seconds and of twenty at least, and not more than the whole of both.
    let paused = start.elapsed();
    assert!(paused >= Duration::from_secs(15) && paused <= Duration::from_secs(31), "{paused:?}");
    assert!(sessions.script.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_repeated_behind_its_deadline_or_when_it_is_cancelled() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default().pauses(Duration::from_secs(60), Duration::from_secs(60)));
    let get = session.get_function("get").await.unwrap();
    sessions.fails("call", ErrorKind::Busy, false);
    let start = tokio::time::Instant::now();
    // The error itself, at once: no attempt could begin in time.
    assert_eq!(kind(get.call::<i64>((7,)).timeout(Duration::from_secs(5)).await), ErrorKind::Busy);
    assert!(start.elapsed() < Duration::from_secs(5));
    sessions.fails("call", ErrorKind::Busy, false);
    let mut call = get.call::<i64>((7,)).start();
    assert!(tokio::time::timeout(Duration::from_secs(1), &mut call).await.is_err());
    call.cancel();
    assert_eq!(kind(call.await), ErrorKind::Busy);
    assert_eq!(sessions.calls(), 0);
    assert!(start.elapsed() < Duration::from_secs(30));
}

#[tokio::test(start_paused = true)]
async fn the_budget_stops_repetition_while_most_requests_fail() {
    let sessions = Sessions::default();
    let budget = RetryBudget::new(6, 1.0);
    let session = sessions.reopening(RetryPolicy::default().attempts(100).budget(budget.clone()));
    let get = session.get_function("get").await.unwrap();
    for _ in 0..50 {
        sessions.fails("call", ErrorKind::Busy, false);
    }
    let before = sessions.requests.load(Ordering::Relaxed);
    assert_eq!(kind(get.call::<i64>((7,)).await), ErrorKind::Busy);
    // Three failures leave three of six tokens, which is not more than half.
    assert_eq!(sessions.requests.load(Ordering::Relaxed), before + 3);
    for _ in 0..5 {
        assert_eq!(kind(get.call::<i64>((7,)).await), ErrorKind::Busy);
    }
    assert_eq!(sessions.requests.load(Ordering::Relaxed), before + 8);
    sessions.script.lock().clear();
    for _ in 0..6 {
        get.call::<i64>((7,)).await.unwrap();
    }
    sessions.fails("call", ErrorKind::Busy, false);
    get.call::<i64>((7,)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn objects_of_a_lost_session_are_invalid_and_those_of_the_next_one_are_not() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default());
    let same = session.get_function("same").await.unwrap();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[4]).await.unwrap();
    let echoed: RemoteTensor = same.call((&tensor,)).await.unwrap();
    session.copy_to_remote(&echoed, vec![1, 2, 3, 4]).await.unwrap();
    sessions.fails("attribute", ErrorKind::PeerLost, false);
    session.attribute(Device::cpu(), rpc_core::DeviceAttribute::Exists).await.unwrap();
    assert_eq!(sessions.opened(), 2);
    assert_eq!(kind(same.call::<RemoteTensor>((&tensor,)).await), ErrorKind::InvalidHandle);
    assert_eq!(kind(session.copy_from_remote(&echoed).await), ErrorKind::InvalidHandle);
    let fresh = session.alloc(Device::cpu(), DataType::U8, &[4]).await.unwrap();
    let echoed: RemoteTensor = same.call((&fresh,)).await.unwrap();
    assert_eq!(session.copy_from_remote(&echoed).await.unwrap(), [0; 4][..]);
}

#[tokio::test(start_paused = true)]
async fn a_lane_keeps_its_order_while_a_request_is_repeated() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default());
    let get = session.get_function("get").await.unwrap();
    sessions.fails("call", ErrorKind::Busy, false);
    let call = |x: i64, lane: Lane| get.call::<i64>((x,)).lane(lane).start();
    for call in [call(1, Lane(1)), call(2, Lane(1)), call(3, Lane(2)), call(4, Lane(1))] {
        call.await.unwrap();
    }
    // The other lane did not wait.
    assert_eq!(*sessions.calls.lock(), [3, 1, 2, 4]);
}

#[tokio::test(start_paused = true)]
async fn a_failed_opening_counts_as_an_attempt() {
    let sessions = Sessions::default();
    let (make, fails) = (sessions.make(), Arc::new(AtomicU32::new(2)));
    let left = fails.clone();
    let open = move || {
        let refused = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok();
        let opened = if refused { Err(RpcError::new(ErrorKind::PeerLost, "nobody is there")) } else { Ok(make()) };
        async move { opened }
    };
    let session = Session::new(RetrySession::reopening(open, RetryPolicy::default().attempts(2)));
    assert_eq!(kind(session.get_function("get").await), ErrorKind::PeerLost);
    session.get_function("get").await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_requests_that_are_repeated() {
    let sessions = Sessions::default();
    let session = sessions.reopening(RetryPolicy::default());
    let get = session.get_function("get").await.unwrap();
    sessions.fails("call", ErrorKind::Busy, false);
    let call = get.call::<i64>((7,)).start();
    session.shutdown().await.unwrap();
    assert_eq!(call.await.unwrap(), 7);
    assert_eq!(session.ended().await.kind(), ErrorKind::Closed);
    assert_eq!(kind(get.call::<i64>((7,)).await), ErrorKind::Closed);
    assert_eq!(kind(session.shutdown().await), ErrorKind::Closed);
}

/// The server is stopped while a call waits in it, and another one starts at the same address.
#[tokio::test]
async fn a_session_goes_on_when_its_server_was_started_again() {
    let address = "memory:retry-test";
    let (starts, ran) = (Arc::new(tokio::sync::Notify::new()), Arc::new(AtomicU32::new(0)));
    let serve = async || {
        let registry = Registry::new();
        registry.add_inline("add", |a: i64, b: i64| a + b);
        let (starts, ran) = (starts.clone(), ran.clone());
        registry.add_async("first_time_never", move || {
            let is_first = ran.fetch_add(1, Ordering::Relaxed) == 0;
            starts.notify_one();
            async move { if is_first { std::future::pending().await } else { 5_i64 } }
        });
        let server = Server::new(Arc::new(registry), ServeOptions::default());
        server.listen(&address.parse().unwrap(), &Bind::default()).await.unwrap();
        server
    };
    let server = serve().await;
    let policy = RetryPolicy::default()
        .attempts(1000)
        .pauses(Duration::from_millis(1), Duration::from_millis(50))
        .budget(RetryBudget::new(10_000, 1.0))
        .idempotent(["first_time_never"]);
    let session = Connector::new().connect_retrying(address, policy).await.unwrap();
    let add = session.function::<(i64, i64), i64>("add").await.unwrap();
    let waits = session.get_function("first_time_never").await.unwrap();
    assert_eq!(add.call((1, 2)).await.unwrap(), 3);
    let call = waits.call::<i64>(()).lane(Lane(1)).start();
    starts.notified().await;
    server.stop();
    server.stopped(Duration::from_secs(60)).await;
    let later = add.call((3, 4)).start();
    let server = serve().await;
    assert_eq!((later.await.unwrap(), call.await.unwrap()), (7, 5));
    assert_eq!(ran.load(Ordering::Relaxed), 2);
    // A server that drains is left for the next one.
    let draining = tokio::spawn(async move { server.drain(Duration::from_secs(60)).await });
    draining.await.unwrap();
    let next = serve().await;
    assert_eq!(add.call((5, 6)).await.unwrap(), 11);
    session.shutdown().await.unwrap();
    next.idle().await;
}
