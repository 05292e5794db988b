//! Objects and their handles.

use std::pin::Pin;

use rpc_core::value::{Reference, TensorRef};
use rpc_core::{
    DataType, Device, DeviceAttribute, ErrorKind, Handle, Lane, Operation, RemoteObject, RemoteTensor, Request, Result,
    Value,
};

use crate::harness::{BothForms, Harness, TestClient, poll_once};

/// Performs a request as a peer would that keeps to no rule.
async fn raw(client: &TestClient<'_>, operation: Operation) -> Result<Value> {
    client.harness.get(client.session.shared().submit(Request::new(operation)).reply()).await
}

fn is_invalid(outcome: Result<impl Sized>) {
    match outcome {
        Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidHandle, "{error}"),
        Ok(_) => panic!("an invalid handle was taken"),
    }
}

/// An object stays the same object, whichever way it is passed.
pub async fn objects_keep_their_identity(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let one: RemoteObject = client.run("probe.new", (&dropped.object, 1)).await;
    let other: RemoteObject = client.run("probe.new", (&dropped.object, 1)).await;
    let shared: RemoteObject = client.run("probe.share", (&one,)).await;
    let echoed: RemoteObject = client.run("echo.blocking", (&one,)).await;
    for (a, b, same) in [(&one, &one, true), (&one, &shared, true), (&shared, &echoed, true), (&one, &other, false)] {
        assert_eq!(client.run::<bool>("probe.same", (a, b)).await, same);
    }
    assert_eq!(client.run::<i64>("probe.payload", (&echoed,)).await, 1);
}

/// Dropping the last clone of the last reference frees the object, and not before.
pub async fn dropping_the_last_reference_frees_the_object(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 9)).await;
    let clone = object.clone();
    let shared: RemoteObject = client.run("probe.share", (&object,)).await;
    drop(object);
    assert_eq!(client.run::<i64>("probe.payload", (&clone,)).await, 9);
    drop(clone);
    assert_eq!(client.run::<i64>("probe.payload", (&shared,)).await, 9);
    assert_eq!(dropped.value().await, 0);
    drop(shared);
    assert_eq!(dropped.reach(1).await, 1);
    client.settles_at(baseline).await;
}

/// Thousands of objects come and go, and each is freed once.
pub async fn thousands_of_objects_come_and_go(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let objects: Vec<RemoteObject> = client.run("probe.many", (&dropped.object, 5000)).await;
    assert_eq!(client.usage().await.handles, baseline.handles + 5000);
    assert_eq!(client.run::<i64>("probe.payload", (&objects[4321],)).await, 4321);
    drop(objects);
    assert_eq!(dropped.reach(5000).await, 5000);
    client.settles_at(baseline).await;
    assert_eq!(dropped.value().await, 5000);
}

/// An object that a call uses outlives its handle, and goes with the call.
pub async fn an_object_in_use_outlives_its_handle(harness: &Harness) {
    let client = harness.client().await;
    let (gate, dropped) = (client.gate().await, client.counter().await);
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 17)).await;
    let running = client.call::<i64>("gate.hold_object", (&gate.object, &object)).lane(Lane(1)).start();
    gate.reach(1).await;
    let handle = object.handle();
    client.get(object.free()).await;
    is_invalid(harness.get(client.session.free_handle(handle)).await);
    assert_eq!(dropped.value().await, 0);
    gate.open().await;
    assert_eq!(client.get(running).await, 17);
    assert_eq!(dropped.reach(1).await, 1);
}

/// A reference may be dropped right behind the start of a call that uses it.
pub async fn a_reference_may_be_dropped_right_behind_a_call(harness: &Harness) {
    let client = harness.client_with(harness.narrow(8)).await;
    let dropped = client.counter().await;
    let mut calls = Vec::new();
    for payload in 0..200_i64 {
        let object: RemoteObject = client.run("probe.new", (&dropped.object, payload)).await;
        calls.push(client.call::<Value>("echo.blocking", (&object,)).start());
    }
    for call in calls {
        let value = client.get(call).await;
        client.session.release(&value);
    }
    assert_eq!(dropped.reach(200).await, 200);
}

/// The second free of a handle is told that there is nothing, and so is the drop of a reference
/// whose object is gone.
pub async fn freeing_twice_is_an_invalid_handle(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 0)).await;
    let (clone, handle) = (object.clone(), object.handle());
    client.get(object.free()).await;
    is_invalid(harness.get(client.session.free_handle(handle)).await);
    is_invalid(harness.get(clone.clone().free()).await);
    is_invalid(client.try_run::<i64>("probe.payload", (&clone,)).await);
    drop(clone);
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 0)).await;
    client.get(client.session.free_handle(object.handle())).await;
    // Its slot is used again, and must not be freed by the reference that is left over.
    let next: RemoteObject = client.run("probe.new", (&dropped.object, 5)).await;
    drop(object);
    assert_eq!(client.run::<i64>("probe.payload", (&next,)).await, 5);
    drop(next);
    assert_eq!(dropped.reach(3).await, 3);
    client.settles_at(baseline).await;
}

/// Stale handles name nothing, wherever they are used, also when their slot is in use again.
pub async fn stale_handles_name_nothing(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let tensor: RemoteTensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let function = client.get(client.session.get_function("add")).await;
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 0)).await;
    let module = client.get(client.session.load_module("arithmetic")).await;
    let (view, add, probe, arithmetic) = (tensor.clone(), function.clone(), object.clone(), module.clone());
    client.get(tensor.free()).await;
    client.get(function.free()).await;
    client.get(object.free()).await;
    client.get(module.free()).await;
    let _again: Vec<RemoteObject> = client.run("probe.many", (&dropped.object, 8)).await;
    is_invalid(harness.get(client.session.copy_from_remote(&view)).await);
    is_invalid(harness.get(client.session.copy_to_remote(&view, vec![1, 2, 3, 4])).await);
    is_invalid(client.try_run::<f64>("tensor.sum", (&view,)).await);
    is_invalid(harness.get(add.call::<i64>((1, 2))).await);
    is_invalid(client.try_run::<i64>("apply", (&add, 1)).await);
    is_invalid(client.try_run::<i64>("probe.payload", (&probe,)).await);
    is_invalid(harness.get(arithmetic.function("square")).await);
    client.works().await;
}

/// Handles that were invented, by the thousand and near real ones, name nothing and harm nobody.
pub async fn forged_handles_name_nothing(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let objects: Vec<RemoteObject> = client.run("probe.many", (&dropped.object, 100)).await;
    let baseline = client.usage().await;
    let real: Vec<u64> = objects.iter().map(|object| object.handle().to_bits()).collect();
    let mut forged: Vec<u64> = vec![0, 1, u64::MAX, u64::MAX - 1, 1 << 63];
    // The generation and the tag of a real handle, changed bit by bit. (Its slot would lead to
    // another real one.)
    forged.extend((24..64).map(|bit| real[7] ^ (1 << bit)));
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    while forged.len() < 2000 {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        if !real.contains(&seed) {
            forged.push(seed);
        }
    }
    let mut pending = Vec::new();
    for bits in forged {
        let handle = Handle::from_bits(bits);
        let args = vec![Value::Object(Reference::Object(handle))];
        let echo = client.function("echo").handle();
        for operation in [
            Operation::Free { handle },
            Operation::Call { function: handle, args: Vec::new() },
            Operation::Call { function: echo, args },
        ] {
            pending.push(client.session.shared().submit(Request::new(operation)).reply());
        }
        client.session.release(&Value::Object(Reference::Object(handle)));
    }
    for reply in pending {
        is_invalid(reply.await);
    }
    client.settles_at(baseline).await;
    assert_eq!(dropped.value().await, 0);
    for (payload, object) in objects.iter().enumerate() {
        let is: i64 = client.session.call_func(client.function("probe.payload"), (object,)).await.unwrap();
        assert_eq!(is, payload as i64);
    }
}

/// An object of another session is refused, by the client and, if the client lies, by the
/// origin.
pub async fn handles_of_another_session_are_refused(harness: &Harness) {
    let (client, other) = (harness.client().await, harness.client().await);
    let dropped = other.counter().await;
    let foreign: RemoteObject = other.run("probe.new", (&dropped.object, 3)).await;
    let tensor = other.get(other.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    is_invalid(client.try_run::<i64>("probe.payload", (&foreign,)).await);
    is_invalid(client.try_run::<f64>("tensor.sum", (&tensor,)).await);
    is_invalid(harness.get(client.session.copy_from_remote(&tensor)).await);
    is_invalid(harness.get(client.session.copy_to_remote(&tensor, vec![0; 4])).await);
    is_invalid(harness.get(client.session.call_func::<i64>(other.function("add"), (1, 2))).await);
    // Sessions of one origin mint handles by the same rule, and differ in their tag.
    is_invalid(harness.get(client.session.free_handle(foreign.handle())).await);
    is_invalid(raw(&client, Operation::Call { function: other.function("add").handle(), args: Vec::new() }).await);
    assert_eq!(other.run::<i64>("probe.payload", (&foreign,)).await, 3);
    assert_eq!(dropped.value().await, 0);
    client.works().await;
}

/// A handle of one kind is not taken for another.
pub async fn a_handle_of_the_wrong_kind_is_refused(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 3)).await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let (echo, object_handle) = (client.function("echo").handle(), object.handle());
    let as_tensor = |storage| {
        let (shape, device) = (vec![4], Device::cpu());
        TensorRef { storage, byte_offset: 0, shape, strides: None, dtype: DataType::U8, device }
    };
    is_invalid(raw(&client, Operation::Call { function: object_handle, args: Vec::new() }).await);
    is_invalid(raw(&client, Operation::Call { function: tensor.handle(), args: Vec::new() }).await);
    is_invalid(raw(&client, Operation::ModuleFunction { module: object_handle, name: "square".to_owned() }).await);
    let read = Operation::Read { from: as_tensor(object_handle).into(), offset: 0, len: 4, into: None };
    is_invalid(raw(&client, read).await);
    is_invalid(
        raw(&client, Operation::Copy { from: as_tensor(echo).into(), to: as_tensor(tensor.handle()).into() }).await,
    );
    is_invalid(raw(&client, Operation::SetStream { device: Device::cpu(), stream: Some(object_handle) }).await);
    is_invalid(raw(&client, Operation::StreamWait { device: Device::cpu(), stream: Some(tensor.handle()) }).await);
    for wrong in [
        Reference::Function(object_handle),
        Reference::Module(object_handle),
        Reference::Object(echo),
        Reference::Object(tensor.handle()),
        Reference::Tensor(as_tensor(object_handle).into()),
    ] {
        let args = vec![Value::List(vec![Value::Object(wrong)])];
        is_invalid(raw(&client, Operation::Call { function: echo, args }).await);
    }
    // The right kind of handle, and another type of object behind it.
    let error = client.try_run::<i64>("probe.payload", (&dropped.object,)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    client.works().await;
}

/// Objects in replies that nobody takes are freed.
pub async fn unclaimed_replies_are_freed(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    for name in ["probe.many", "probe.new"] {
        // The reply is there when the pending call is dropped, or on its way.
        drop(client.call::<Value>(name, (&dropped.object, 4)).start());
        let pending = client.call::<Value>(name, (&dropped.object, 4)).start();
        client.run::<()>("nothing", ()).await;
        drop(pending);
    }
    let call = || Operation::Call {
        function: client.function("probe.many").handle(),
        args: vec![Value::Object(Reference::Object(dropped.object.handle())), Value::Int(10)],
    };
    client.session.shared().submit(Request::new(call())).reply().detach();
    drop(client.session.shared().submit(Request::new(call())));
    drop(client.session.shared().submit(Request::new(call()).on(Lane::CONCURRENT)).reply());
    client.run::<()>("nothing", ()).await;
    client.settles_at(baseline).await;
    client.works().await;
}

type Unit = Pin<Box<dyn Future<Output = ()> + Send>>;

/// The operation as a future that drops what it yields.
fn ignore<O: BothForms>(operation: O) -> Unit
where
    O::IntoFuture: Send,
{
    Box::pin(async move { drop(operation.await) })
}

/// One operation of each sort. Their replies name objects wherever that is possible.
fn every_operation(client: &TestClient<'_>, dropped: &RemoteObject, tensor: &RemoteTensor) -> Vec<Unit> {
    let (session, cpu) = (&client.session, Device::cpu());
    vec![
        ignore(client.call::<()>("nothing", ())),
        ignore(client.call::<RemoteObject>("probe.new", (dropped, 1))),
        ignore(client.call::<RemoteObject>("echo.blocking", (dropped,))),
        ignore(client.call::<RemoteObject>("echo.async", (dropped,)).concurrent()),
        ignore(client.call::<Vec<RemoteObject>>("probe.many", (dropped, 5)).lane(Lane(9))),
        ignore(session.create_stream(cpu)),
        ignore(session.get_function("add")),
        ignore(session.alloc(cpu, DataType::F32, &[1000])),
        ignore(session.load_module("arithmetic")),
        ignore(session.copy_to_remote(tensor, vec![1; 64])),
        ignore(session.copy_from_remote(tensor)),
        ignore(session.copy_among_remote(tensor, tensor)),
        ignore(session.stream_wait(cpu, None)),
        ignore(session.attribute(cpu, DeviceAttribute::Exists)),
    ]
}

/// A future that is dropped after any number of polls leaks nothing, loses no reply, and leaves the
/// session in order.
pub async fn futures_dropped_at_every_await_point_leak_nothing(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[64])).await;
    let baseline = client.usage().await;
    for polls in 0..12 {
        for mut future in every_operation(&client, &dropped.object, &tensor) {
            for _ in 0..polls {
                if poll_once(&mut future).is_some() {
                    break;
                }
                // Lets whoever serves the request get ahead, so that later polls find it in other
                // states.
                std::thread::yield_now();
                tokio::task::yield_now().await;
            }
            drop(future);
        }
        assert_eq!(client.run::<i64>("add", (polls, 1)).await, polls + 1);
    }
    client.settles_at(baseline).await;
    client.works().await;
}

/// The limit on handles is an error that names it; what was there stays, and there is room again
/// after a free.
pub async fn the_limit_on_handles_is_an_error_and_leaks_nothing(harness: &Harness) {
    let limits = rpc_core::SessionLimits { max_handles: 200, ..rpc_core::SessionLimits::default() };
    let client = harness.client_with(limits).await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    let error = client.try_run::<Vec<RemoteObject>>("probe.many", (&dropped.object, 300)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LimitExceeded, "{error}");
    assert!(error.message().contains("max_handles") && error.request_may_have_run(), "{error}");
    assert_eq!(dropped.reach(300).await, 300);
    client.settles_at(baseline).await;
    let some: Vec<RemoteObject> = client.run("probe.many", (&dropped.object, 50)).await;
    drop(some);
    client.settles_at(baseline).await;
    client.works().await;
}
