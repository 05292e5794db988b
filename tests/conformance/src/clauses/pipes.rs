//! Results that the session keeps for later requests of their lane.

use bytes::Bytes;
use rpc_core::value::Reference;
use rpc_core::{
    DataType, Device, ErrorKind, Lane, Operation, PendingReply, Pipe, PipeId, RemoteFunction, RemoteModule,
    RemoteObject, RemoteTensor, Request, RpcError, RpcSession, SessionLimits, Value,
};

use crate::harness::{Harness, TestClient};

/// Returns a client whose session keeps results. One that keeps none is asked if it says so.
async fn client_with(harness: &Harness, limits: SessionLimits) -> Option<TestClient<'_>> {
    let client = harness.client_with(limits).await;
    if client.session.keeps_results() {
        return Some(client);
    }
    let pipe = client.call::<i64>("add", (1, 1)).pipe();
    let dependent = client.call::<i64>("add", (&pipe, 1));
    for call in [pipe.fetch(), dependent] {
        let error = harness.get(call).await.unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Unsupported, false), "{error}");
    }
    let raw = harness.get(kept(&client, Lane::DEFAULT, PipeId::unused(), "add", vec![1.into(), 1.into()])).await;
    assert_eq!(raw.unwrap_err().kind(), ErrorKind::Unsupported);
    client.works().await;
    None
}

async fn client(harness: &Harness) -> Option<TestClient<'_>> {
    client_with(harness, SessionLimits::default()).await
}

/// Calls a function as a peer would that keeps to no rule.
fn raw(client: &TestClient<'_>, lane: Lane, pipe: Option<PipeId>, name: &str, args: Vec<Value>) -> PendingReply {
    let call = Operation::Call { function: client.function(name).handle(), args };
    client.session.shared().submit(Request { pipe, ..Request::new(call).on(lane) }).reply()
}

fn kept(client: &TestClient<'_>, lane: Lane, pipe: PipeId, name: &str, args: Vec<Value>) -> PendingReply {
    raw(client, lane, Some(pipe), name, args)
}

fn free(client: &TestClient<'_>, pipe: PipeId) -> PendingReply {
    client.session.shared().submit(Request::new(Operation::Free { handle: pipe.handle() })).reply()
}

/// The result of a request, as an argument.
fn of(pipe: PipeId) -> Value {
    Value::Object(Reference::Pipe(pipe.handle()))
}

fn list(values: impl IntoIterator<Item = i64>) -> Value {
    Value::List(values.into_iter().map(Value::from).collect())
}

/// Each call of a chain takes the result of the one before, whatever the kind of the function, and
/// anywhere in its arguments.
pub async fn calls_take_the_results_of_earlier_ones(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let mut pipe: Pipe<i64> = client.call("add", (0, 1)).pipe();
    for _ in 0..6 {
        pipe = client.call("add", (&pipe, &pipe)).pipe();
    }
    let whole = client.call::<i64>("add", (&pipe, 36)).start();
    assert_eq!(client.get(pipe.fetch()).await, 64);
    assert_eq!(client.get(whole).await, 100);

    for lane in [Lane::DEFAULT, Lane(5)] {
        for echo in ["echo", "echo.blocking", "echo.async"] {
            let first: Pipe<Value> = client.call(echo, (list([1, 2]),)).lane(lane).pipe();
            let second: Pipe<Value> = client.call(echo, (&first,)).lane(lane).pipe();
            let count = client.call::<i64>("count", (&second, &first, 7)).lane(lane).start();
            let mean = client.call::<f64>("mean", (second.clone(),)).lane(lane).start();
            assert_eq!(client.get(second.fetch()).await, list([1, 2]));
            assert_eq!(client.get(mean).await, 1.5);
            assert_eq!(client.get(count).await, 3);
        }
    }
    // Inside of lists and maps.
    let (one, two) = (PipeId::unused(), PipeId::unused());
    let first = kept(&client, Lane::DEFAULT, one, "echo", vec![list([3])]);
    let nested = Value::Map(vec![("key".into(), Value::List(vec![of(one), of(one)])), (of(one), Value::Null)]);
    let second = kept(&client, Lane::DEFAULT, two, "echo", vec![nested]);
    let fetched = Operation::Fetch { handle: two.handle() };
    let fetched = client.session.shared().submit(Request::new(fetched)).reply();
    assert_eq!(client.get(first).await, Value::Null);
    assert_eq!(client.get(second).await, Value::Null);
    let expected = Value::Map(vec![("key".into(), Value::List(vec![list([3]), list([3])])), (list([3]), Value::Null)]);
    assert_eq!(client.get(fetched).await, expected);
}

/// Functions, modules, tensors and objects are results like others: they are called, read and freed
/// before their references have arrived.
pub async fn results_may_be_objects(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    {
        let probe: Pipe<RemoteObject> = client.call("probe.new", (&dropped.object, 9)).pipe();
        let payload = client.call::<i64>("probe.payload", (&probe,)).start();
        let same = client.call::<bool>("probe.same", (&probe, &probe)).start();
        let add: Pipe<RemoteFunction> = client.session.get_function("add").pipe();
        let adder: Pipe<RemoteFunction> = client.call("make_adder", (40,)).pipe();
        let module: Pipe<RemoteModule> = client.session.load_module("arithmetic").pipe();
        let square: Pipe<RemoteFunction> = module.module().unwrap().function("square").pipe();
        let sums = [
            client.session.call_func::<i64>(&add.function().unwrap(), (40, 2)).start(),
            adder.function().unwrap().call((2,)).start(),
            square.function().unwrap().call((7,)).start(),
        ];
        assert_eq!(client.get(payload).await, 9);
        assert!(client.get(same).await);
        let mut expected = [42, 42, 49].into_iter();
        for sum in sums {
            assert_eq!(client.get(sum).await, expected.next().unwrap());
        }
        // A reference of its own, which outlives the pipe.
        let fetched = client.get(probe.fetch()).await;
        drop(probe);
        assert_eq!(client.run::<i64>("probe.payload", (&fetched,)).await, 9);
        assert_eq!(dropped.value().await, 0);
    }
    assert_eq!(dropped.reach(1).await, 1);
    client.settles_at(baseline).await;

    // A tensor that is allocated, written, used and read in one go.
    let x: Pipe<RemoteTensor> = client.session.alloc(Device::cpu(), DataType::F32, &[2]).pipe();
    let made: Pipe<RemoteTensor> = client.call("tensor.new", (2,)).pipe();
    let (tensor, out) = (x.tensor().unwrap(), made.tensor_of(Device::cpu(), DataType::F32, &[2]).unwrap());
    let write = client.session.copy_to_remote(&tensor, [1.5_f32, 2.5].map(f32::to_le_bytes).concat()).start();
    let add = client.call::<()>("tensor.add", (&x, &tensor, &out)).start();
    let copy = client.session.copy_among_remote(&out, &tensor).start();
    let read = client.session.copy_from_remote(&tensor).start();
    client.get(write).await;
    client.get(add).await;
    client.get(copy).await;
    assert_eq!(&client.get(read).await[..], [3.0_f32, 5.0].map(f32::to_le_bytes).concat());
    assert_eq!(made.tensor().unwrap_err().kind(), ErrorKind::ApiMisuse);
    let wrong = made.tensor_of(Device::cpu(), DataType::F32, &[3]).unwrap();
    let error = harness.get(client.session.copy_from_remote(&wrong)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    client.get(tensor.free()).await;
    drop((x, made, out, wrong));
    client.settles_at(baseline).await;
}

fn depends_on(error: &RpcError, kind: ErrorKind, name: &str) {
    assert_eq!((error.kind(), error.request_may_have_run()), (kind, false), "{error}");
    assert!(error.message().contains(&format!("the earlier '{name}' failed")), "{error}");
}

/// A request that names the result of one that has failed fails before it begins, with the kind of
/// error and the name of that one, and so on along the chain.
pub async fn an_error_is_carried_along_the_chain(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let journal = client.journal().await;
    let failed: Pipe<i64> = client.call("fail.application", ()).pipe();
    let pushed: Pipe<()> = client.call("journal.push", (&journal.object, &failed)).pipe();
    let last = client.call::<Value>("echo", (&pushed,)).start();
    depends_on(&harness.get(last).await.unwrap_err(), ErrorKind::Application, "journal.push");
    let error = harness.get(pushed.fetch()).await.unwrap_err();
    depends_on(&error, ErrorKind::Application, "fail.application");
    assert!(error.message().contains("out of paper"), "{error}");
    // Its own error is whole.
    let error = harness.get(failed.fetch()).await.unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Application, true));
    assert!(error.application_kind().is_some_and(|kind| kind.ends_with("OutOfPaper")), "{error:?}");
    assert_eq!(error.message(), "the printer is out of paper");

    let panicked: Pipe<i64> = client.call("fail.panic", ("ouch",)).pipe();
    let dependent = harness.get(client.call::<i64>("add", (&panicked, 1))).await.unwrap_err();
    depends_on(&dependent, ErrorKind::Panic, "fail.panic");
    let missing: Pipe<RemoteFunction> = client.session.get_function("no such").pipe();
    let error = harness.get(missing.function().unwrap().call::<i64>(())).await.unwrap_err();
    depends_on(&error, ErrorKind::NotFound, "get_function");
    // A result that does not fit, and one that is no object.
    let text: Pipe<String> = client.call("echo", ("text",)).pipe();
    let error = harness.get(client.call::<i64>("add", (&text, 1))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    let function: Pipe<RemoteFunction> = client.call("echo", ("text",)).pipe();
    let error = harness.get(function.function().unwrap().call::<i64>(())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(journal.entries().await, []);
    client.works().await;
}

/// A request that is cancelled before it begins fails those that name its result.
pub async fn a_cancelled_request_has_no_result(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let (gate, lane) = (client.gate().await, Lane(1));
    let held = gate.wait(lane);
    gate.reach(1).await;
    let (id, other) = (PipeId::unused(), PipeId::unused());
    let cancelled = kept(&client, lane, id, "add", vec![1.into(), 1.into()]);
    let dependent = raw(&client, lane, None, "add", vec![of(id), 1.into()]);
    let beside = kept(&client, lane, other, "add", vec![1.into(), 1.into()]);
    cancelled.cancel();
    assert_eq!(harness.get(cancelled).await.unwrap_err().kind(), ErrorKind::Cancelled);
    gate.open().await;
    client.get(held).await;
    depends_on(&harness.get(dependent).await.unwrap_err(), ErrorKind::Cancelled, "add");
    assert_eq!(client.get(beside).await, Value::Null);
    client.session.release(&Value::List(vec![of(id), of(other)]));
    client.works().await;
}

/// A result belongs to the lane and the session of its request: a request of others is refused
/// before it is sent, and at the origin if it is sent all the same.
pub async fn a_result_belongs_to_its_lane_and_session(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let other = harness.client().await;
    let baseline = client.usage().await;
    let pipe: Pipe<i64> = client.call("add", (1, 2)).lane(Lane(3)).pipe();
    let misused = [
        client.call::<i64>("add", (&pipe, 1)),
        client.call::<i64>("add", (&pipe, 1)).concurrent(),
        client.call::<i64>("add", (&pipe, 1)).lane(Lane(4)),
        other.call::<i64>("add", (&pipe, 1)).lane(Lane(3)),
        pipe.fetch().lane(Lane(2)),
        client.call::<i64>("add", (1, 1)).concurrent().pipe().fetch(),
    ];
    for call in misused {
        let error = harness.get(call).await.unwrap_err();
        assert_eq!((error.kind(), error.hop()), (ErrorKind::ApiMisuse, 0), "{error}");
    }
    let upload: Pipe<RemoteTensor> = client.session.upload(&[1], &[1.0_f32]).pipe();
    assert_eq!(harness.get(upload.fetch()).await.unwrap_err().kind(), ErrorKind::ApiMisuse);
    assert_eq!(client.get(pipe.fetch()).await, 3);

    let id = PipeId::unused();
    assert_eq!(client.get(kept(&client, Lane(3), id, "add", vec![1.into(), 1.into()])).await, Value::Null);
    for lane in [Lane(4), Lane::DEFAULT, Lane::CONCURRENT] {
        let error = harness.get(raw(&client, lane, None, "echo", vec![of(id)])).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    }
    let error = harness.get(raw(&other, Lane(3), None, "echo", vec![of(id)])).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}");
    let concurrent = kept(&client, Lane::CONCURRENT, PipeId::unused(), "add", vec![1.into(), 1.into()]);
    assert_eq!(harness.get(concurrent).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    client.session.release(&of(id));
    drop(pipe);
    client.settles_at(baseline).await;
}

/// A result is freed with the last pipe, used or not, and not before those that name it have begun.
pub async fn a_dropped_pipe_frees_its_result(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let unused: Pipe<Value> = client.call("probe.many", (&dropped.object, 50)).pipe();
    let clone = unused.clone();
    client.works().await;
    assert_eq!(client.usage().await.handles, baseline.handles + 51);
    drop(unused);
    client.works().await;
    assert_eq!(dropped.value().await, 0);
    drop(clone);
    assert_eq!(dropped.reach(50).await, 50);
    client.settles_at(baseline).await;

    // A loop that keeps the last pipe keeps one result.
    let mut last: Pipe<i64> = client.call("add", (0, 1)).pipe();
    for n in 2..=100 {
        last = client.call("add", (&last, 1)).pipe();
        if n % 20 == 0 {
            assert_eq!(client.get(last.fetch()).await, n);
        }
    }
    let mut one_more = baseline;
    one_more.handles += 1;
    client.settles_at(one_more).await;
    drop(last);
    client.settles_at(baseline).await;

    // Dropped right behind a call that uses it, which waits in its lane.
    let (gate, lane) = (client.gate().await, Lane(1));
    let held = gate.wait(lane);
    gate.reach(1).await;
    let probe: Pipe<RemoteObject> = client.call("probe.new", (&dropped.object, 8)).lane(lane).pipe();
    let payload = client.call::<i64>("probe.payload", (probe,)).lane(lane).start();
    let never: Pipe<RemoteObject> = client.call("probe.new", (&dropped.object, 9)).lane(lane).pipe();
    drop(never);
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(payload).await, 8);
    drop(gate);
    assert!(dropped.reach(51).await <= 52);
    client.settles_at(baseline).await;

    // One that is released at once by a peer, while a request that names it waits.
    let (gate, id) = (client.gate().await, PipeId::unused());
    let held = gate.wait(lane);
    gate.reach(1).await;
    let before = dropped.value().await;
    let object = Value::Object(Reference::Object(dropped.object.handle()));
    let made = kept(&client, lane, id, "probe.new", vec![object, 7.into()]);
    let payload = raw(&client, lane, None, "probe.payload", vec![of(id)]);
    client.session.release(&of(id));
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(made).await, Value::Null);
    let outcome = harness.get(payload).await;
    // The result of a request that begins after the release is kept for nobody.
    assert!(outcome.is_ok_and(|payload| payload == 7.into()));
    assert_eq!(dropped.reach(before + 1).await, before + 1);
    drop(gate);
    client.settles_at(baseline).await;
}

/// Names of results that are not there, or not yet, are errors of the request alone.
pub async fn names_of_no_result_are_refused(harness: &Harness) {
    let Some(client) = client(harness).await else { return };
    let baseline = client.usage().await;
    let (own, later, freed) = (PipeId::unused(), PipeId::unused(), PipeId::unused());
    let made = kept(&client, Lane::DEFAULT, freed, "add", vec![1.into(), 1.into()]);
    assert_eq!(client.get(made).await, Value::Null);
    assert_eq!(client.get(free(&client, freed)).await, Value::Null);
    let object = |bits| Value::Object(Reference::Pipe(rpc_core::Handle::from_bits(bits)));
    let cases = [
        raw(&client, Lane::DEFAULT, None, "echo", vec![of(PipeId::unused())]),
        kept(&client, Lane::DEFAULT, own, "echo", vec![of(own)]),
        raw(&client, Lane::DEFAULT, None, "echo", vec![of(later)]),
        raw(&client, Lane::DEFAULT, None, "echo", vec![of(freed)]),
        raw(&client, Lane::DEFAULT, None, "echo", vec![object(u64::MAX)]),
        raw(&client, Lane::DEFAULT, None, "echo", vec![object(0)]),
        raw(&client, Lane::DEFAULT, None, "echo", vec![object(client.function("add").handle().to_bits())]),
    ];
    let made_later = kept(&client, Lane::DEFAULT, later, "add", vec![1.into(), 1.into()]);
    for (at, case) in cases.into_iter().enumerate() {
        let error = harness.get(case).await.unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::InvalidHandle, false), "{at}: {error}");
    }
    assert_eq!(client.get(made_later).await, Value::Null);
    for operation in [
        Operation::Fetch { handle: freed.handle() },
        Operation::Fetch { handle: client.function("add").handle() },
        Operation::Free { handle: freed.handle() },
        Operation::Call { function: freed.handle(), args: Vec::new() },
    ] {
        let outcome = harness.get(client.session.shared().submit(Request::new(operation)).reply()).await;
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::InvalidHandle);
    }
    // A handle serves one result at a time, and another one when that is freed.
    let twice = kept(&client, Lane::DEFAULT, later, "add", vec![1.into(), 1.into()]);
    assert_eq!(harness.get(twice).await.unwrap_err().kind(), ErrorKind::InvalidArgument);
    assert_eq!(client.get(free(&client, later)).await, Value::Null);
    let again = kept(&client, Lane::DEFAULT, later, "add", vec![2.into(), 1.into()]);
    assert_eq!(client.get(again).await, Value::Null);
    let sum = raw(&client, Lane::DEFAULT, None, "add", vec![of(later), 1.into()]);
    assert_eq!(client.get(sum).await, 4.into());
    client.session.release(&Value::List(vec![of(later), of(own)]));
    client.settles_at(baseline).await;
}

/// Results count against the limits of the session, and those that have been freed do not.
pub async fn results_that_are_kept_are_bounded(harness: &Harness) {
    let handles = client(harness).await.map_or(0, |_| crate::functions::names().len() + 20);
    let limits = SessionLimits { max_handles: handles, max_queued_bytes: 4 << 20, ..SessionLimits::default() };
    if handles == 0 {
        return;
    }
    let Some(client) = client_with(harness, limits).await else { return };
    let baseline = client.usage().await;
    let mut pipes: Vec<Pipe<i64>> = (0..20).map(|n| client.call("add", (n, 1)).pipe()).collect();
    let one_more: Pipe<i64> = client.call("add", (0, 1)).pipe();
    let error = harness.get(one_more.fetch()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert!(error.message().contains("max_handles"), "{error}");
    assert_eq!(client.usage().await.handles, baseline.handles + 20);
    pipes.truncate(10);
    let sums: Vec<_> = pipes.iter().map(|pipe| client.call::<i64>("add", (pipe, 1)).start()).collect();
    for (n, sum) in sums.into_iter().enumerate() {
        assert_eq!(client.get(sum).await, n as i64 + 2);
    }
    pipes.clear();
    client.settles_at(baseline).await;

    // Three of these have room, and no call that takes two of them.
    let large: Vec<Pipe<Bytes>> =
        (0..4).map(|_| client.call("echo", (Bytes::from(vec![7; 5 << 18]),)).pipe()).collect();
    let error = harness.get(large[3].fetch()).await.unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::LimitExceeded, true), "{error}");
    let error = harness.get(client.call::<i64>("count", (&large[0], &large[1]))).await.unwrap_err();
    assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::LimitExceeded, false), "{error}");
    drop(large);
    client.settles_at(baseline).await;
    let small: Pipe<Bytes> = client.call("echo", (Bytes::from(vec![7; 1 << 20]),)).pipe();
    assert_eq!(client.get(client.call::<i64>("count", (&small, &small))).await, 2);
}
