//! The two sides of a callback on their own, over a local session. Their work together over any
//! session is in the conformance suite.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use super::{MAX_RUNNING, RemoteCallback};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::callback::{CREATE, DONE, NEXT};
use crate::function::context::Context;
use crate::function::function::Function;
use crate::function::handler::Rest;
use crate::{Lane, LocalSession, Pack, Pending, Registry, RemoteFunction, RemoteObject, Session, Value};

/// A client that makes the requests of a callback without its threads.
struct Client {
    local: LocalSession,
    session: Session,
    function: RemoteFunction,
    source: RemoteObject,
    next: RemoteFunction,
    done: RemoteFunction,
}

type Taken = (RemoteObject, Vec<Value>, Option<u32>);

impl Client {
    fn new() -> Self {
        let local = LocalSession::new(registry());
        let session = Session::new(local.clone());
        let get = |name| session.get_function(name).wait().unwrap();
        let (function, source) = get(CREATE).call(()).wait().unwrap();
        Self { next: get(NEXT), done: get(DONE), local, session, function, source }
    }

    fn call(&self, lane: u32, arg: i64) -> Pending<i64> {
        self.function.call((arg,)).lane(Lane(lane)).start()
    }

    /// Does not keep the source.
    fn next(&self) -> Pending<Option<Taken>> {
        let source = Value::Object(crate::Reference::Object(self.source.handle()));
        self.next.call(vec![source]).concurrent().start()
    }

    fn take(&self) -> Taken {
        self.next().wait().unwrap().expect("a call")
    }

    fn done(&self, call: &RemoteObject, value: i64) -> Result<()> {
        self.done.call((call, value)).concurrent().wait()
    }

    fn handles(&self) -> u64 {
        self.local.usage().handles
    }
}

fn registry() -> Registry {
    let registry = Registry::new();
    registry.add("apply", |context: Context, function: Function, Rest(args): Rest| context.call(&function, args));
    registry
}

fn is_let_go(outcome: Result<i64>, may_have_run: bool) {
    let error = outcome.unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::InvalidHandle, may_have_run), "{error}");
    assert!(error.message().contains("let go") && !error.ends_session(), "{error}");
}

#[test]
fn each_call_is_taken_once_and_answered_in_any_order() {
    let client = Client::new();
    let waiting = [client.next(), client.next()];
    let calls: Vec<_> = (0..4).map(|n| client.call(n + 1, n.into())).collect();
    let mut taken: Vec<Taken> = waiting.into_iter().map(|next| next.wait().unwrap().unwrap()).collect();
    taken.extend([client.take(), client.take()]);
    taken.sort_by_key(|(_, args, _)| format!("{args:?}"));
    for (n, (call, args, lane)) in taken.iter().enumerate().rev() {
        assert_eq!((&args[..], *lane), (&[Value::Int(n as i64)][..], Some(n as u32 + 1)));
        client.done(call, 10 * n as i64).unwrap();
    }
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(call.wait().unwrap(), 10 * n as i64);
    }
}

#[test]
fn the_end_of_the_source_is_the_end_of_all_calls() {
    let client = Client::new();
    let (taken, queued) = (client.call(1, 1), client.call(2, 2));
    let (call, args, _) = client.take();
    let (taken, queued) = if args == [Value::Int(1)] { (taken, queued) } else { (queued, taken) };
    client.session.free_handle(client.source.handle()).wait().unwrap();
    is_let_go(taken.wait(), true);
    is_let_go(queued.wait(), false);
    is_let_go(client.call(3, 3).wait(), false);
    // An answer that comes too late is taken, and goes nowhere.
    client.done(&call, 1).unwrap();
    assert_eq!(client.next().wait().unwrap_err().kind(), ErrorKind::InvalidHandle);
}

#[test]
fn a_wait_for_a_call_ends_with_either_side() {
    let client = Client::new();
    let waiting = [client.next(), client.next()];
    client.session.free_handle(client.source.handle()).wait().unwrap();
    for next in waiting {
        assert!(next.wait().unwrap().is_none());
    }
    let client = Client::new();
    let waiting = [client.next(), client.next()];
    client.session.free_handle(client.function.handle()).wait().unwrap();
    for next in waiting {
        assert!(next.wait().unwrap().is_none());
    }
}

#[test]
fn a_call_that_its_taker_lets_go_of_is_answered() {
    let client = Client::new();
    let waiting = client.call(1, 1);
    drop(client.take());
    is_let_go(waiting.wait(), true);
    // The next one is not affected.
    let waiting = client.call(1, 2);
    let (call, ..) = client.take();
    client.done(&call, 3).unwrap();
    drop(call);
    assert_eq!(waiting.wait().unwrap(), 3);
}

#[test]
fn a_wait_that_is_given_up_leaves_the_call_to_another() {
    let client = Client::new();
    drop((client.next(), client.next()));
    let waiting = client.next();
    let call = client.call(1, 1);
    let (taken, ..) = waiting.wait().unwrap().unwrap();
    client.done(&taken, 5).unwrap();
    assert_eq!(call.wait().unwrap(), 5);
}

#[test]
fn a_deadline_ends_a_call_whether_it_is_taken_or_not() {
    let client = Client::new();
    let call = || client.function.call::<i64>((1,)).concurrent().timeout(Duration::from_millis(20)).start();
    let error = call().wait().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    // The call that timed out has left the queue.
    let waiting = client.next();
    let last = client.call(1, 7);
    let (taken, args, _) = waiting.wait().unwrap().unwrap();
    assert_eq!(args, [Value::Int(7)]);
    client.done(&taken, 7).unwrap();
    assert_eq!(last.wait().unwrap(), 7);
    // Anew where the machine was too slow for the call to be taken before its deadline.
    for _ in 0..100 {
        let waiting = client.next();
        let error = call().wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
        let last = client.call(1, 8);
        let (mut taken, args, _) = waiting.wait().unwrap().unwrap();
        let was_taken = args == [Value::Int(1)];
        if was_taken {
            assert!(error.request_may_have_run(), "{error}");
            // Its answer is discarded.
            client.done(&taken, 1).unwrap();
            (taken, ..) = client.take();
        }
        client.done(&taken, 8).unwrap();
        assert_eq!(last.wait().unwrap(), 8);
        if was_taken {
            return;
        }
    }
    panic!("no call was taken before its deadline");
}

#[test]
fn an_error_is_answered_with_all_its_facts() {
    let client = Client::new();
    let waiting = client.call(1, 1);
    let (call, ..) = client.take();
    let error = RpcError::new(ErrorKind::Application, "no paper")
        .may_have_run(true)
        .with_peer("tcp://printer")
        .with_backtrace("frame 0")
        .with_application_kind("Printer")
        .from_next_hop();
    client.done.call::<()>((&call, (), Pack(&error))).wait().unwrap();
    assert_eq!(waiting.wait().unwrap_err(), error);
    let garbage = client.done.call::<()>((&call, (), crate::Packed::encode(&7).unwrap())).wait().unwrap_err();
    assert_eq!(garbage.kind(), ErrorKind::InvalidArgument);
    let not_a_call = client.done.call::<()>((&client.source, 1)).wait().unwrap_err();
    assert_eq!(not_a_call.kind(), ErrorKind::InvalidArgument);
}

#[test]
fn a_call_that_the_session_cannot_hold_fails_and_the_next_one_does_not() {
    let limits = crate::SessionLimits { max_handles: 6, ..crate::SessionLimits::default() };
    let session = Session::new(LocalSession::builder(registry()).limits(limits).build());
    let sum = session.callback(|list: Vec<RemoteFunction>| list.len() as i64).wait().unwrap();
    let echo = sum.function();
    // The session holds four objects of the callback's, and one more for each call. This one needs
    // two others.
    is_let_go(echo.call(Vec::from([Value::List(vec![reference(echo), reference(echo)])])).wait(), true);
    assert_eq!(echo.call::<i64>(Vec::from([Value::List(vec![reference(echo)])])).wait().unwrap(), 1);
}

fn reference(function: &RemoteFunction) -> Value {
    Value::Object(crate::Reference::Function(function.handle()))
}

#[test]
fn a_callback_that_is_given_to_itself_leaks_nothing() {
    let client = Client::new();
    let before = client.handles();
    let call = || client.function.call::<i64>((&client.function,)).concurrent().start();
    let waiting = [call(), call()];
    let (call, args, _) = client.take();
    args.iter().for_each(|arg| client.session.release(arg));
    client.done(&call, 1).unwrap();
    drop(call);
    client.session.free_handle(client.source.handle()).wait().unwrap();
    let outcomes = waiting.map(Pending::wait);
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    assert_eq!(client.handles(), before - 1);
}

/// Waits until the holder of the sender has dropped it.
fn gone(receiver: &Receiver<()>) {
    assert!(matches!(receiver.recv_timeout(Duration::from_secs(60)), Err(mpsc::RecvTimeoutError::Disconnected)));
}

/// Creates a callback. The receiver ends when its closure is dropped.
fn watched(session: &Session) -> (RemoteCallback, Receiver<()>) {
    let (alive, dropped) = mpsc::channel::<()>();
    let callback = session.callback(move |x: i64| {
        let _ = &alive;
        x
    });
    (callback.wait().unwrap(), dropped)
}

#[test]
fn the_closure_goes_with_the_last_clone_and_with_the_session() {
    let local = LocalSession::new(registry());
    let session = Session::new(local.clone());
    let (callback, dropped) = watched(&session);
    assert_eq!(callback.function().call::<i64>((3,)).wait().unwrap(), 3);
    drop(callback.clone());
    assert_eq!(callback.function().call::<i64>((4,)).wait().unwrap(), 4);
    let function = callback.function().clone();
    drop(callback);
    gone(&dropped);
    is_let_go(function.call((5,)).wait(), false);

    let (callback, dropped) = watched(&session);
    local.close(RpcError::new(ErrorKind::SessionTimeout, "the session has lasted long enough"));
    // Only the function is left, and no client runs its calls.
    drop(callback);
    gone(&dropped);

    let session = Session::new(LocalSession::new(registry()));
    let (callback, dropped) = watched(&session);
    session.shutdown().wait().unwrap();
    drop(callback);
    gone(&dropped);
}

#[test]
fn a_shutdown_leaves_the_callbacks_of_other_sessions_alone() {
    let [one, other] = [(); 2].map(|()| Session::new(LocalSession::new(registry())));
    let (kept, _alive) = watched(&one);
    let (_stopped, _gone) = watched(&other);
    other.shutdown().wait().unwrap();
    assert_eq!(kept.function().call::<i64>((3,)).wait().unwrap(), 3);
}

/// Calls itself through the session until that is an error, and then comes back all the way.
#[test]
fn deeper_than_the_limit_is_an_error_and_no_deadlock() {
    let session = Session::new(LocalSession::new(registry()));
    let apply = session.get_function("apply").wait().unwrap();
    let (give, own) = mpsc::channel::<RemoteFunction>();
    let own = std::sync::Mutex::new((own, None));
    let inner = apply.clone();
    let deeper = session.callback(move |depth: i64| -> Result<i64> {
        let mut own = own.lock().unwrap();
        if own.1.is_none() {
            own.1 = own.0.recv().ok();
        }
        let this = own.1.clone().unwrap();
        drop(own);
        match inner.call::<i64>((&this, depth + 1)).concurrent().wait() {
            Err(error) if error.kind() == ErrorKind::LimitExceeded => Ok(depth),
            outcome => outcome,
        }
    });
    let deeper = deeper.wait().unwrap();
    give.send(deeper.function().clone()).unwrap();
    for _ in 0..3 {
        let mut depths = (0..1000).map(|_| apply.call::<i64>((&deeper, 1)).wait().unwrap());
        // A closure counts until its thread goes on behind the answer, which may be later than its
        // caller does.
        let deepest = depths.find(|depth| *depth >= MAX_RUNNING as i64);
        assert_eq!(deepest, Some(MAX_RUNNING as i64));
    }
}

#[test]
fn a_request_on_the_lane_that_waits_for_the_closure_is_misuse() {
    let session = Session::new(LocalSession::new(registry()));
    let inner = session.clone();
    let tell = session.callback(move |x: i64| -> Result<i64> {
        let get = || inner.get_function("apply");
        let tensor = inner.alloc(crate::Device::cpu(), crate::DataType::U8, &[1]).concurrent().wait()?;
        let outcomes = [
            get().wait().map(drop),
            inner.copy_to_remote(&tensor, vec![1]).wait(),
            inner.copy_from_remote(&tensor).wait().map(drop),
        ];
        let [Err(one), Err(two), Err(three)] = &outcomes else { return Ok(-1) };
        assert!([one, two, three].iter().all(|error| error.kind() == ErrorKind::ApiMisuse));
        get().concurrent().wait()?;
        get().lane(Lane(7)).wait()?;
        Ok(x)
    });
    let tell = tell.wait().unwrap();
    assert_eq!(tell.function().call::<i64>((1,)).wait().unwrap(), 1);
    // Behind a concurrent call every lane is free, and so is the lane of one after the other.
    assert_eq!(tell.function().call::<i64>((1,)).concurrent().wait().unwrap(), -1);
    session.get_function("apply").wait().unwrap();
}

#[test]
fn a_closure_that_runs_when_it_is_let_go_of_comes_to_its_end() {
    let session = Session::new(LocalSession::new(registry()));
    let (started, has_started) = mpsc::channel();
    let (go, may_go) = mpsc::channel::<()>();
    let (end, has_ended): (Sender<i64>, _) = mpsc::channel();
    let may_go = std::sync::Mutex::new(may_go);
    let slow = session.callback(move |x: i64| {
        started.send(()).unwrap();
        may_go.lock().unwrap().recv().unwrap();
        end.send(x).unwrap();
        x
    });
    let slow = slow.wait().unwrap();
    let call = slow.function().call::<i64>((9,)).start();
    has_started.recv().unwrap();
    drop(slow);
    is_let_go(call.wait(), true);
    go.send(()).unwrap();
    assert_eq!(has_ended.recv().unwrap(), 9);
    assert!(has_ended.recv().is_err(), "the closure is dropped behind it");
}
