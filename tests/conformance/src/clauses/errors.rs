//! Errors are data.

use rpc_core::{DataType, Device, ErrorKind, Fault, Lane, RemoteObject, Value};

use crate::harness::Harness;

/// An error of the function's own arrives with its message and its name, and says that the function
/// has run.
pub async fn application_errors_keep_their_facts(harness: &Harness) {
    let client = harness.client().await;
    let error = client.try_run::<i64>("fail.application", ()).await.unwrap_err();
    assert_eq!((error.kind(), error.fault()), (ErrorKind::Application, Fault::Callee));
    assert_eq!(error.message(), "the printer is out of paper");
    assert!(
        error.application_kind().is_some_and(|kind| kind.ends_with("OutOfPaper")),
        "{:?}",
        error.application_kind()
    );
    assert!(error.request_may_have_run() && !error.ends_session() && !error.is_retryable());
    assert_eq!(error.hop(), harness.hops());
}

/// An error that a function passes on keeps its kind.
pub async fn errors_that_a_function_passes_on_keep_their_kind(harness: &Harness) {
    let client = harness.client().await;
    let error = client.try_run::<()>("fail.rpc", ()).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Unsupported, "not on a Sunday"));
    assert_eq!(error.application_kind(), Some("Calendar"));
    assert!(error.request_may_have_run());
}

/// A panic is an error to its caller, with the message and where it happened, whatever the kind of
/// the function.
pub async fn a_panic_is_an_error_with_its_message_and_place(harness: &Harness) {
    let client = harness.client().await;
    for name in ["fail.panic", "fail.panic.inline", "fail.panic.async"] {
        for lane in [Lane::DEFAULT, Lane(1), Lane::CONCURRENT] {
            let error = harness.get(client.call::<()>(name, ("on purpose",)).lane(lane)).await.unwrap_err();
            assert_eq!((error.kind(), error.message()), (ErrorKind::Panic, "on purpose"));
            assert!(error.backtrace().is_some_and(|trace| trace.contains("functions.rs")), "{:?}", error.backtrace());
            assert!(error.request_may_have_run());
            assert_eq!((error.fault(), error.hop()), (Fault::Callee, harness.hops()));
        }
    }
}

/// An object whose `drop` panics is gone all the same, and so are those freed with it.
pub async fn an_object_that_panics_when_it_is_freed_harms_nobody(harness: &Harness) {
    let client = harness.client().await;
    let before = client.usage().await;
    for explicitly in [false, true] {
        let objects: [RemoteObject; 2] = [client.run("grenade.new", ()).await, client.run("grenade.new", ()).await];
        let counter = client.counter().await;
        for object in objects {
            if explicitly {
                client.get(object.free()).await;
            } else {
                drop(object);
            }
        }
        drop(counter);
        client.works().await;
    }
    client.settles_at(before).await;
}

/// A panic harms nobody but its caller: its lane goes on, its tensor is free again, and other calls
/// end well.
pub async fn a_panic_harms_nobody_else(harness: &Harness) {
    let client = harness.client().await;
    let (gate, dropped) = (client.gate().await, client.counter().await);
    let object: RemoteObject = client.run("probe.new", (&dropped.object, 8)).await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[16])).await;
    let bystander = gate.wait(Lane(1));
    gate.reach(1).await;
    for round in 0..20_i64 {
        for (name, arg) in [("fail.panic", true), ("fail.panic.inline", true), ("fail.panic.async", true)] {
            let error = client.try_run::<()>(name, (format!("{round} {arg}"),)).await.unwrap_err();
            assert_eq!(error.message(), format!("{round} {arg}"));
        }
        let error = client.try_run::<()>("fail.panic.holding", (&tensor,)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Panic);
        client.run::<()>("tensor.fill", (&tensor, round as f32)).await;
        assert_eq!(client.run::<f64>("tensor.sum", (&tensor,)).await, (16 * round) as f64);
        assert_eq!(client.run::<i64>("probe.payload", (&object,)).await, 8);
    }
    gate.open().await;
    client.get(bystander).await;
    client.works().await;
}

/// Pipelined failures each reach their own caller.
pub async fn each_caller_gets_its_own_error(harness: &Harness) {
    let client = harness.client().await;
    let calls: Vec<_> =
        (0..100_u32).map(|n| client.call::<()>("fail.panic", (n.to_string(),)).lane(Lane(n % 4)).start()).collect();
    for (n, call) in calls.into_iter().enumerate().rev() {
        assert_eq!(call.await.unwrap_err().message(), n.to_string());
    }
}

/// A nested call runs at once, inside of its caller, and is not queued behind it; its errors are
/// its caller's to pass on.
pub async fn nested_calls_are_not_queued(harness: &Harness) {
    let client = harness.client().await;
    assert_eq!(client.run::<i64>("context.call", ("add", 1, 2)).await, 3);
    assert_eq!(client.run::<i64>("context.call", ("context.call", "context.call", "add", 1, 2)).await, 3);
    assert_eq!(client.run::<i64>("context.call_async", ("echo.async", 5)).await, 5);
    assert_eq!(client.run::<i64>("context.call_async", ("add", 5, 6)).await, 11);
    let error = client.try_run::<Value>("context.call", ("fail.application",)).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Application, "the printer is out of paper"));
    let error = client.try_run::<Value>("context.call", ("fail.panic", "inside")).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Panic, "inside"));
    let error = client.try_run::<Value>("context.call_async", ("fail.panic.async", "inside")).await.unwrap_err();
    assert_eq!((error.kind(), error.message()), (ErrorKind::Panic, "inside"));
    assert_eq!(client.try_run::<Value>("context.call", ("missing",)).await.unwrap_err().kind(), ErrorKind::NotFound);
    // A blocking function cannot wait for an asynchronous one.
    assert_eq!(
        client.try_run::<Value>("context.call", ("echo.async", 5)).await.unwrap_err().kind(),
        ErrorKind::ApiMisuse
    );
    client.works().await;
}
