//! Deadlines and cancellation.

use std::time::{Duration, Instant};

use rpc_core::value::Reference;
use rpc_core::{DataType, Device, ErrorKind, Lane, Operation, PendingReply, RemoteObject, Request, RpcError, Value};

use crate::harness::{Harness, TestClient, poll_once};

/// Long enough for a request to begin, on a machine that is busy and does not stand still.
const SHORT: Duration = Duration::from_millis(150);

/// Time limits of attempts to have a request begin before its deadline. Another attempt is made
/// only after a deadline that has passed before its request began, because the machine stood still.
fn longer_and_longer() -> impl Iterator<Item = Duration> {
    (0..7).map(|doubled| SHORT * (1 << doubled))
}

/// That the request was under way at its deadline.
fn exceeded(error: &RpcError) {
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(error.is_timeout() && error.request_may_have_run(), "{error}");
}

/// That the request had not begun at its deadline. A client that has sent it cannot know that, and
/// does not wait for the origin to say so.
fn exceeded_before_it_began(harness: &Harness, error: &RpcError) {
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    assert!(error.is_timeout() && (harness.hops() > 0 || !error.request_may_have_run()), "{error}");
}

/// A call whose reply can be cancelled at any stage.
fn raw(client: &TestClient<'_>, lane: Lane, name: &str, objects: &[&RemoteObject], number: i64) -> PendingReply {
    let mut args: Vec<_> = objects.iter().map(|object| Value::Object(Reference::Object(object.handle()))).collect();
    args.push(number.into());
    let call = Operation::Call { function: client.function(name).handle(), args };
    client.session.shared().submit(Request::new(call).on(lane)).reply()
}

/// The caller of a function that runs too long is told at the deadline, and the function learns
/// that nobody waits.
pub async fn the_deadline_of_a_running_call_fails_the_caller_at_once(harness: &Harness) {
    let client = harness.client().await;
    let (started, ended) = (client.counter().await, client.counter().await);
    for (calls, hold) in [(1, "hold"), (2, "hold.async")] {
        let mut limits = longer_and_longer();
        loop {
            let limit = limits.next().expect("one of the calls begins before its deadline");
            let call = client.call::<i64>(hold, (&started.object, &ended.object)).lane(Lane(1)).timeout(limit);
            let error = harness.get(call).await.unwrap_err();
            // The function ends because its context said so, and lets the lane go on.
            assert_eq!(client.get(client.call::<i64>("add", (1, 1)).lane(Lane(1))).await, 2);
            if started.value().await == calls {
                exceeded(&error);
                break;
            }
            exceeded_before_it_began(harness, &error);
        }
        assert_eq!((started.value().await, ended.value().await), (calls, calls));
    }
}

/// The deadline does not wait for a function that does not look.
pub async fn the_deadline_does_not_wait_for_the_function(harness: &Harness) {
    let client = harness.client().await;
    for wait in ["gate.wait", "gate.wait_async"] {
        let gate = client.gate().await;
        let mut limits = longer_and_longer();
        loop {
            let limit = limits.next().expect("one of the calls is under way at its deadline");
            let call = client.call::<()>(wait, (&gate.object,)).lane(Lane(1)).timeout(limit);
            let error = harness.get(call).await.unwrap_err();
            if error.request_may_have_run() {
                exceeded(&error);
                break;
            }
            exceeded_before_it_began(harness, &error);
        }
        let behind = client.call::<i64>("add", (1, 1)).lane(Lane(1)).start();
        client.works().await;
        gate.open().await;
        assert_eq!(client.get(behind).await, 2);
    }
}

/// A call whose deadline passes while it waits for its lane never runs, and its caller is told so,
/// at the deadline.
pub async fn a_call_that_is_still_queued_at_its_deadline_never_runs(harness: &Harness) {
    let client = harness.client().await;
    let (gate, counter) = (client.gate().await, client.counter().await);
    let held = gate.wait(Lane(1));
    gate.reach(1).await;
    for add in ["counter.add", "counter.add.blocking", "counter.add.async"] {
        let call = client.call::<i64>(add, (&counter.object, 1)).lane(Lane(1)).timeout(SHORT);
        exceeded_before_it_began(harness, &harness.get(call).await.unwrap_err());
    }
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(client.call::<i64>("counter.add", (&counter.object, 100)).lane(Lane(1))).await, 100);
}

/// A request whose deadline has passed already never runs.
pub async fn a_deadline_that_has_passed_already_runs_nothing(harness: &Harness) {
    let client = harness.client().await;
    let counter = client.counter().await;
    let past = Instant::now();
    for add in ["counter.add", "counter.add.blocking", "counter.add.async"] {
        let call = client.call::<i64>(add, (&counter.object, 1)).deadline(past);
        exceeded_before_it_began(harness, &harness.get(call).await.unwrap_err());
    }
    exceeded_before_it_began(
        harness,
        &harness.get(client.session.get_function("add").deadline(past)).await.unwrap_err(),
    );
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let copy = client.session.copy_to_remote(&tensor, vec![1; 4]).deadline(past);
    exceeded_before_it_began(harness, &harness.get(copy).await.unwrap_err());
    assert_eq!(client.get(client.session.copy_from_remote(&tensor)).await[..], [0; 4]);
    assert_eq!(client.run::<i64>("counter.value", (&counter.object,)).await, 0);
}

/// The function learns how much time is left, over every hop.
pub async fn the_deadline_reaches_the_function_as_time_remaining(harness: &Harness) {
    let client = harness.client().await;
    assert_eq!(client.run::<Option<i64>>("context.remaining_ms", ()).await, None);
    let call = client.call::<Option<i64>>("context.remaining_ms", ()).timeout(Duration::from_secs(30));
    let left = client.get(call).await.expect("a deadline");
    assert!((15_000..=30_000).contains(&left), "{left} ms are left of 30 s");
    let call = client.call::<Option<i64>>("context.remaining_ms", ()).timeout(Duration::from_secs(365 * 86_400));
    assert!(client.get(call).await.expect("a deadline") > 300 * 86_400_000);
    // Beyond what a clock can say is no deadline.
    assert_eq!(client.get(client.call::<i64>("add", (1, 1)).timeout(Duration::MAX)).await, 2);
}

/// A deadline that has not passed when the reply comes does no harm later.
pub async fn a_deadline_that_is_kept_does_nothing(harness: &Harness) {
    let client = harness.client().await;
    let mut limits = longer_and_longer();
    let (object, deadline) = loop {
        let deadline = Instant::now() + limits.next().expect("one of the deadlines is kept");
        match harness.get(client.call::<RemoteObject>("counter.new", ()).deadline(deadline)).await {
            Ok(object) => break (object, deadline),
            Err(error) => assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}"),
        }
    };
    tokio::time::sleep_until((deadline + Duration::from_millis(5)).into()).await;
    assert_eq!(client.run::<i64>("counter.add", (&object, 1)).await, 1);
}

/// A copy fails at its deadline, wherever it has got to.
pub async fn a_copy_fails_at_its_deadline(harness: &Harness) {
    let client = harness.client().await;
    let gate = client.gate().await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[20 << 20])).await;
    let held = gate.wait(Lane(1));
    gate.reach(1).await;
    let copy = client.session.copy_to_remote(&tensor, vec![1; 20 << 20]).lane(Lane(1)).deadline(Instant::now() + SHORT);
    exceeded_before_it_began(harness, &harness.get(copy).await.unwrap_err());
    let copy = client.session.copy_from_remote(&tensor).lane(Lane(1)).deadline(Instant::now() + SHORT);
    exceeded_before_it_began(harness, &harness.get(copy).await.unwrap_err());
    gate.open().await;
    client.get(held).await;
    client.get(client.session.copy_to_remote(&tensor, vec![2; 20 << 20]).lane(Lane(1))).await;
    client.works().await;
}

/// A call whose deadline passes while it waits for a tensor does not run when it gets it.
pub async fn a_deadline_passes_while_a_call_waits_for_a_tensor(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[4])).await;
    let reader =
        client.call::<f64>("tensor.read_gated", (&tensor, &gate.object, &journal.object)).lane(Lane(1)).start();
    gate.reach(1).await;
    let writer = client.call::<()>("tensor.fill_noted", (&tensor, 1.0, &journal.object)).lane(Lane(2)).timeout(SHORT);
    let error = harness.get(writer).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
    gate.open().await;
    assert_eq!(client.get(reader).await, 0.0);
    assert_eq!(client.get(client.call::<i64>("add", (1, 1)).lane(Lane(2))).await, 2);
    assert_eq!(journal.entries().await, [1]);
    client.run::<()>("tensor.fill", (&tensor, 2.0)).await;
}

/// Dropping a call that waits for its lane cancels it: it never runs.
pub async fn a_call_that_is_dropped_before_it_begins_never_runs(harness: &Harness) {
    let client = harness.client().await;
    let (gate, counter) = (client.gate().await, client.counter().await);
    let held = gate.wait(Lane(1));
    gate.reach(1).await;
    for add in ["counter.add", "counter.add.blocking", "counter.add.async"] {
        let mut call = client.call::<i64>(add, (&counter.object, 1)).lane(Lane(1)).start();
        call.admitted().await.unwrap();
        assert!(poll_once(&mut call).is_none());
        drop(call);
        drop(client.call::<i64>(add, (&counter.object, 1)).lane(Lane(1)).start());
    }
    // A round trip behind the cancellations.
    client.works().await;
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(client.call::<i64>("counter.add", (&counter.object, 100)).lane(Lane(1))).await, 100);
}

/// Dropping a call that runs discards its result: the objects in it are freed.
pub async fn the_result_of_a_call_that_is_dropped_while_it_runs_is_freed(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let baseline = client.usage().await;
    for (round, name) in ["gate.probes", "gate.probes_async"].into_iter().enumerate() {
        let gate = client.gate().await;
        let mut call = client.call::<Value>(name, (&gate.object, &dropped.object, 10)).lane(Lane(1)).start();
        assert!(poll_once(&mut call).is_none());
        gate.reach(1).await;
        drop(call);
        client.works().await;
        gate.open().await;
        dropped.reach(10 * (round as i64 + 1)).await;
    }
    client.settles_at(baseline).await;
}

/// A function whose caller has gone learns of it.
pub async fn a_function_learns_that_its_caller_has_gone(harness: &Harness) {
    let client = harness.client().await;
    let (started, ended) = (client.counter().await, client.counter().await);
    for (calls, hold) in [(1, "hold"), (2, "hold.async")] {
        let call = client.call::<i64>(hold, (&started.object, &ended.object)).lane(Lane(1)).start();
        started.reach(calls).await;
        drop(call);
        ended.reach(calls).await;
    }
    client.works().await;
}

/// A caller that cancels a request that has not begun, and keeps waiting, is told that it never
/// ran.
pub async fn a_cancelled_request_that_had_not_begun_is_answered_as_cancelled(harness: &Harness) {
    let client = harness.client().await;
    let (gate, counter) = (client.gate().await, client.counter().await);
    let held = gate.wait(Lane(1));
    gate.reach(1).await;
    for add in ["counter.add", "counter.add.blocking", "counter.add.async"] {
        let call = raw(&client, Lane(1), add, &[&counter.object], 1);
        call.cancel();
        let error = harness.get(call).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Cancelled, "{error}");
        assert!(!error.request_may_have_run());
    }
    let mut call = client.call::<i64>("counter.add", (&counter.object, 1)).lane(Lane(1)).start();
    call.admitted().await.unwrap();
    call.cancel();
    assert_eq!(harness.get(call).await.unwrap_err().kind(), ErrorKind::Cancelled);
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(client.call::<i64>("counter.add", (&counter.object, 100)).lane(Lane(1))).await, 100);
}

/// A caller that cancels a request that runs, and keeps waiting, gets its result; the function
/// learns of it.
pub async fn a_cancelled_request_that_runs_is_answered_with_its_own_reply(harness: &Harness) {
    let client = harness.client().await;
    let (started, ended, dropped) = (client.counter().await, client.counter().await, client.counter().await);
    for hold in ["hold", "hold.async"] {
        let mut call = client.call::<i64>(hold, (&started.object, &ended.object)).lane(Lane(1)).start();
        call.admitted().await.unwrap();
        let calls = started.reach(ended.value().await + 1).await;
        call.cancel();
        assert_eq!(client.get(call).await, calls);
    }
    let gate = client.gate().await;
    let call = raw(&client, Lane(1), "gate.probes", &[&gate.object, &dropped.object], 3);
    gate.reach(1).await;
    call.cancel();
    client.works().await;
    gate.open().await;
    let value = client.get(call).await;
    assert_eq!(value.handles().len(), 3);
    client.session.release(&value);
    dropped.reach(3).await;
}

/// Cancelling a request that waits for a tensor frees its lane, and the function does not run.
pub async fn a_request_that_is_cancelled_while_it_waits_for_a_tensor_never_runs(harness: &Harness) {
    let client = harness.client().await;
    let (gate, journal) = (client.gate().await, client.journal().await);
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::F32, &[4])).await;
    let reader =
        client.call::<f64>("tensor.read_gated", (&tensor, &gate.object, &journal.object)).lane(Lane(1)).start();
    gate.reach(1).await;
    let mut dropped = client.call::<()>("tensor.fill_noted", (&tensor, 1.0, &journal.object)).lane(Lane(2)).start();
    dropped.admitted().await.unwrap();
    assert!(poll_once(&mut dropped).is_none());
    drop(dropped);
    let mut cancelled = client.call::<()>("tensor.fill_noted", (&tensor, 1.0, &journal.object)).lane(Lane(3)).start();
    cancelled.admitted().await.unwrap();
    cancelled.cancel();
    client.works().await;
    gate.open().await;
    assert_eq!(harness.get(cancelled).await.unwrap_err().kind(), ErrorKind::Cancelled);
    client.get(reader).await;
    for lane in [2, 3] {
        assert_eq!(client.get(client.call::<i64>("add", (1, 1)).lane(Lane(lane))).await, 2);
    }
    assert_eq!(journal.entries().await, [1]);
}
