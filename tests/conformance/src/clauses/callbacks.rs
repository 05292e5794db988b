//! Closures of the client as functions of the session.

use std::collections::BTreeMap;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Barrier, Mutex};

use bytes::Bytes;
use rpc_core::{
    DataType, Device, Element, ErrorKind, Lane, Pending, RemoteCallback, RemoteFunction, RemoteTensor, Result,
    RpcError, Session, Shape, Value, dlpack,
};

use super::functions::samples;
use crate::functions::OutOfPaper;
use crate::harness::{Harness, TestClient, on_thread};

/// A closure that waits in the middle until it is let through, and says so.
struct Held {
    callback: RemoteCallback,
    started: Arc<Mutex<Receiver<()>>>,
    go: Sender<()>,
}

impl Held {
    async fn new(client: &TestClient<'_>) -> Self {
        let ((start, started), (go, may_go)) = (mpsc::channel(), mpsc::channel());
        let may_go = Mutex::new(may_go);
        let callback = client.session.callback(move |x: i64| {
            // Nobody may be there any more to hear it.
            let _ = start.send(());
            let _ = may_go.lock().unwrap().recv();
            x
        });
        Self { callback: client.get(callback).await, started: Arc::new(Mutex::new(started)), go }
    }

    /// Returns when the closure has started once more.
    async fn starts(&self) {
        let started = self.started.clone();
        on_thread(move || started.lock().unwrap().recv().unwrap()).await;
    }

    /// Starts a call of the closure through a function.
    fn apply(&self, client: &TestClient<'_>) -> Pending<i64> {
        client.call("apply", (&self.callback, 5)).lane(Lane(3)).start()
    }
}

/// A closure is called by the client itself and by functions, and gets and returns values of every
/// type.
pub async fn a_closure_takes_and_returns_every_value(harness: &Harness) {
    let client = harness.client().await;
    let echo = client.get(client.session.callback(|value: Value| value)).await;
    for value in samples() {
        assert_eq!(client.run::<Value>("apply", (&echo, value.clone())).await, value);
    }
    let all = Value::List(samples());
    assert_eq!(client.get(echo.function().call::<Value>((all.clone(),))).await, all);
}

/// A closure has the parameters and the return that its types say.
pub async fn closures_convert_arguments_and_returns(harness: &Harness) {
    let client = harness.client().await;
    let session = &client.session;
    let nothing = client.get(session.callback(|| ())).await;
    client.run::<()>("apply", (&nothing,)).await;
    let all =
        session.callback(|a: i64, b: f64, c: String, d: Bytes, e: Shape, f: Option<u8>, g: Vec<bool>, h: Device| {
            let named = BTreeMap::from([(c, Value::Float(b)), ("len".to_owned(), (d.len() as i64).into())]);
            (a, named, e, f, g, h.to_string())
        });
    let all = client.get(all).await;
    let args = (&all, 1, 2, "c", Bytes::from_static(b"four"), Shape(vec![5]), (), vec![true], Device::cpu());
    type Returned = (i64, BTreeMap<String, Value>, Shape, Option<u8>, Vec<bool>, String);
    let (a, named, e, f, g, h) = client.run::<Returned>("apply", args).await;
    assert_eq!((a, e, f, g, h.as_str()), (1, Shape(vec![5]), None, vec![true], "cpu:0"));
    assert_eq!(named, BTreeMap::from([("c".to_owned(), Value::Float(2.0)), ("len".to_owned(), Value::Int(4))]));
}

/// Arguments that do not fit a closure are refused with their place, their objects are freed, and
/// it does not run.
pub async fn arguments_that_do_not_fit_a_closure_are_refused_and_freed(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let picky = client.session.callback(|_: i64, _: RemoteFunction| -> i64 { unreachable!("it does not run") });
    let picky = client.get(picky).await;
    let function = client.function("add");
    for (args, place) in [
        (vec![Value::Int(1), Value::Int(2)], "argument 1: expected function"),
        (vec![Value::Str("one".to_owned()), reference(function)], "argument 0: expected int"),
        (vec![reference(function)], "1 arguments"),
        (vec![Value::List(vec![reference(function)]), reference(function), Value::Null], "3 arguments"),
    ] {
        let args = [vec![reference(picky.function())], args].concat();
        let error = client.try_run::<Value>("apply", args).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        assert!(error.message().contains(place), "{error} should name {place}");
    }
    drop(picky);
    client.settles_at(baseline).await;
}

fn reference(function: &RemoteFunction) -> Value {
    Value::Object(rpc_core::Reference::Function(function.handle()))
}

/// Thousands of calls in a row and pipelined: each runs the closure once.
pub async fn each_call_runs_the_closure_once(harness: &Harness) {
    let client = harness.client().await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let noted = seen.clone();
    let note = client.session.callback(move |x: i64| {
        noted.lock().unwrap().push(x);
        -x
    });
    let note = client.get(note).await;
    let calls: Vec<_> =
        (0..200_i64).map(|n| client.call::<i64>("apply", (&note, n)).lane(Lane(n as u32 % 4)).start()).collect();
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(client.get(call).await, -(n as i64));
    }
    let mut seen = std::mem::take(&mut *seen.lock().unwrap());
    for lane in 0..4 {
        let of_lane = seen.iter().filter(|n| *n % 4 == lane);
        assert!(of_lane.is_sorted(), "each lane keeps its order");
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..200).collect::<Vec<_>>());
}

/// A closure reads a tensor that it is given, and returns one that it has made; each is freed with
/// its last reference.
pub async fn a_closure_reads_and_returns_tensors(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let inner = client.session.clone();
    let double = client.session.callback(move |x: RemoteTensor| -> Result<RemoteTensor> {
        let doubled: Vec<f32> = download(&inner, &x)?.into_iter().map(|x: f32| 2.0 * x).collect();
        let y = inner.alloc(Device::cpu(), DataType::F32, x.shape()).concurrent().wait()?;
        inner.copy_to_remote(&y, dlpack::to_bytes(&doubled)).lane(Lane::CONCURRENT).wait()?;
        Ok(y)
    });
    let double = client.get(double).await;
    let x = client.session.upload(&[3], &[1.0_f32, 2.0, 3.0]).await.unwrap();
    let y: RemoteTensor = client.run("apply", (&double, &x)).await;
    assert_eq!(client.session.download::<f32>(&y).await.unwrap(), [2.0, 4.0, 6.0]);
    // Inside of other values, too.
    let inner = client.session.clone();
    let sums =
        client.session.callback(move |by_name: BTreeMap<String, RemoteTensor>| -> Result<BTreeMap<String, f32>> {
            let sum = |(name, tensor)| Ok((name, download::<f32>(&inner, &tensor)?.into_iter().sum()));
            by_name.into_iter().map(sum).collect()
        });
    let sums = client.get(sums).await;
    let named = BTreeMap::from([("x", &x), ("y", &y)]);
    let sums_of_both: BTreeMap<String, f32> = client.run("apply", (&sums, named)).await;
    assert_eq!(sums_of_both, BTreeMap::from([("x".to_owned(), 6.0), ("y".to_owned(), 12.0)]));
    drop((double, sums, x, y));
    client.settles_at(baseline).await;
}

fn download<T: Element>(session: &Session, tensor: &RemoteTensor) -> Result<Vec<T>> {
    session.copy_from_remote(tensor).lane(Lane::CONCURRENT).wait().map(|bytes| dlpack::from_bytes(&bytes))
}

/// A closure calls a function that it is given, and returns a function.
pub async fn a_closure_calls_and_returns_functions(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let make_adder = client.function("make_adder").clone();
    let adder_of = client.session.callback(move |f: RemoteFunction, x: i64| -> Result<RemoteFunction> {
        let by: i64 = f.call((x, 1)).concurrent().wait()?;
        make_adder.call((by,)).concurrent().wait()
    });
    let adder_of = client.get(adder_of).await;
    let plus_five: RemoteFunction = client.run("apply", (&adder_of, client.function("add"), 4)).await;
    assert_eq!(client.get(plus_five.call::<i64>((37,))).await, 42);
    drop((adder_of, plus_five));
    client.settles_at(baseline).await;
}

/// An error that a closure returns reaches its caller with all its facts, through the function
/// that called it.
pub async fn errors_of_a_closure_keep_their_facts(harness: &Harness) {
    let client = harness.client().await;
    let fail = client.get(client.session.callback(|| -> Result<i64, OutOfPaper> { Err(OutOfPaper) })).await;
    let error = client.try_run::<i64>("apply", (&fail,)).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "the printer is out of paper"));
    assert!(error.application_kind().unwrap().ends_with("OutOfPaper") && error.request_may_have_run());
    assert_eq!(error.hop(), harness.hops());
    let fail = client.session.callback(|| -> Result<i64> {
        let error = RpcError::new(ErrorKind::Unknown(999), "from the future").with_backtrace("frame 0");
        Err(error.with_application_kind("Calendar").with_peer("the moon"))
    });
    let fail = client.get(fail).await;
    let error = client.try_run::<i64>("apply", (&fail,)).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Unknown(999), "from the future"));
    assert_eq!((error.backtrace(), error.application_kind()), (Some("frame 0"), Some("Calendar")));
    assert_eq!(error.peer(), Some("the moon"));
}

/// A panic in a closure is an error to its caller, with its message and place, and the closure can
/// be called again.
pub async fn a_panic_in_a_closure_harms_nobody_else(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let fragile = client.session.callback(|x: i64, _held: RemoteFunction| {
        assert!(x >= 0, "{x} is negative");
        x
    });
    let fragile = client.get(fragile).await;
    for _ in 0..3 {
        let error = client.try_run::<i64>("apply", (&fragile, -1, client.function("add"))).await.unwrap_err();
        assert_eq!((error.kind(), error.message()), (ErrorKind::Panic, "-1 is negative"));
        assert!(error.backtrace().unwrap().contains("callbacks.rs") && error.request_may_have_run());
        assert_eq!(client.run::<i64>("apply", (&fragile, 1, client.function("add"))).await, 1);
    }
    drop(fragile);
    client.settles_at(baseline).await;
    client.works().await;
}

/// A closure may call functions that call it again: each level is a call of its own.
pub async fn closures_nest(harness: &Harness) {
    let client = harness.client().await;
    let apply = client.function("apply").clone();
    // The closure gets its own function as an argument: it cannot hold what it is part of.
    let factorial = client.session.callback(move |this: RemoteFunction, n: i64| -> Result<i64> {
        if n == 0 {
            return Ok(1);
        }
        Ok(n * apply.call::<i64>((&this, &this, n - 1)).concurrent().wait()?)
    });
    let factorial = client.get(factorial).await;
    assert_eq!(client.run::<i64>("apply", (&factorial, factorial.function(), 10)).await, 3_628_800);
}

/// Two callbacks call each other.
pub async fn two_callbacks_call_each_other(harness: &Harness) {
    let client = harness.client().await;
    let turns = |steps: i64| {
        let apply = client.function("apply").clone();
        client.session.callback(move |this: RemoteFunction, other: RemoteFunction, x: i64| -> Result<Vec<i64>> {
            if x <= 0 {
                return Ok(Vec::new());
            }
            let mut seen = vec![x];
            seen.extend(apply.call::<Vec<i64>>((&other, &other, &this, x - steps)).concurrent().wait()?);
            Ok(seen)
        })
    };
    let (one, two) = (client.get(turns(1)).await, client.get(turns(2)).await);
    let seen: Vec<i64> = client.run("apply", (&one, one.function(), two.function(), 9)).await;
    assert_eq!(seen, [9, 8, 6, 5, 3, 2]);
}

/// Calls of a closure from several lanes run beside each other.
pub async fn a_closure_runs_for_several_lanes_at_once(harness: &Harness) {
    let client = harness.client().await;
    let together = Arc::new(Barrier::new(4));
    let meet = client.session.callback(move |x: i64| {
        together.wait();
        x
    });
    let meet = client.get(meet).await;
    for round in 0..10_i64 {
        let calls = [0_u32, 1, 2, 3].map(|lane| client.call::<i64>("apply", (&meet, round)).lane(Lane(lane)).start());
        for call in calls {
            assert_eq!(client.get(call).await, round);
        }
    }
}

/// A request on the lane that waits for the closure is an error, where it would wait for ever.
pub async fn a_request_on_the_waiting_lane_is_misuse(harness: &Harness) {
    let client = harness.client().await;
    let add = client.function("add").clone();
    let sum = client.session.callback(move |x: i64| match add.call::<i64>((x, 1)).wait() {
        Err(error) if error.kind() == ErrorKind::ApiMisuse => add.call((x, 1)).lane(Lane(9)).wait(),
        outcome => outcome.and(Ok(-1)),
    });
    let sum = client.get(sum).await;
    assert_eq!(client.run::<i64>("apply", (&sum, 1)).await, 2);
    // Its caller waits on another lane here.
    assert_eq!(client.get(client.call::<i64>("apply", (&sum, 1)).lane(Lane(4))).await, -1);
}

fn is_let_go(error: &RpcError) {
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    assert!(error.message().contains("let go") && !error.ends_session(), "{error}");
}

/// When the callback is dropped whoever waits for the closure is told, and whoever calls it later.
pub async fn a_callback_that_is_dropped_fails_its_calls(harness: &Harness) {
    let client = harness.client().await;
    let baseline = client.usage().await;
    let held = Held::new(&client).await;
    // The origin's copy outlives the client's.
    let later: RemoteFunction = client.run("compose", (held.callback.function(), client.function("echo"))).await;
    let call = client.call::<i64>("apply", (held.callback.function(), 5)).lane(Lane(3)).start();
    held.starts().await;
    let Held { callback, go, .. } = held;
    drop(callback);
    is_let_go(&harness.get(call).await.unwrap_err());
    is_let_go(&harness.get(later.call::<i64>((1,))).await.unwrap_err());
    drop(go);
    drop(later);
    client.settles_at(baseline).await;
    client.works().await;
}

/// A call that was given the callback keeps it until the reply.
pub async fn a_call_keeps_the_callback_that_it_was_given(harness: &Harness) {
    let client = harness.client().await;
    let held = Held::new(&client).await;
    let call = held.apply(&client);
    held.starts().await;
    let Held { callback, go, .. } = held;
    drop(callback);
    go.send(()).unwrap();
    assert_eq!(client.get(call).await, 5);
}

/// The deadline of a call passes while the closure runs: the caller is told at once, and the
/// closure's return goes nowhere.
pub async fn a_deadline_passes_while_the_closure_runs(harness: &Harness) {
    let client = harness.client().await;
    let held = Held::new(&client).await;
    let call = client.call::<i64>("apply", (&held.callback, 5)).lane(Lane(3));
    let call = call.timeout(std::time::Duration::from_millis(200)).start();
    let error = harness.get(call).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    held.go.send(()).unwrap();
    let next = held.apply(&client);
    held.go.send(()).unwrap();
    assert_eq!(client.get(next).await, 5);
}

/// A shutdown does not wait for callbacks: what waits for a closure fails, and the session ends in
/// good order.
pub async fn a_shutdown_lets_go_of_callbacks(harness: &Harness) {
    let client = harness.client().await;
    let (held, idle) = (Held::new(&client).await, Held::new(&client).await);
    let call = held.apply(&client);
    held.starts().await;
    client.get(client.session.shutdown()).await;
    is_let_go(&call.await.unwrap_err());
    let error = harness.get(client.session.callback(|| ())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    drop(idle);
}
