//! Many requests in flight, and queues that are full.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use rpc_core::reply::{Outcome, ReplySink};
use rpc_core::value::Reference;
use rpc_core::{DataType, Device, Lane, Operation, Pending, Request, Value};

use super::copies::pattern;
use crate::harness::{Counter, Harness, TestClient, poll_once};

/// Calls that fill places of the queue until they are dropped, each on a lane of its own. All of
/// them are running.
async fn fill(client: &TestClient<'_>, places: i64, started: &Counter<'_>, ended: &Counter<'_>) -> Vec<Pending<i64>> {
    let mut held = Vec::new();
    for place in 0..places {
        held.push(client.call("hold", (&started.object, &ended.object)).lane(Lane(100 + place as u32)).start());
        // There must be room for one that asks.
        started.reach(place + 1).await;
    }
    held
}

/// Ten thousand calls through a queue of sixteen: each completes exactly once, and in order.
pub async fn ten_thousand_calls_pass_a_small_queue_once_each(harness: &Harness) {
    let client = harness.client_with(harness.narrow(16)).await;
    let journal = client.journal().await;
    let pushes = ["journal.push", "journal.push.blocking", "journal.push.async"];
    let calls: Vec<_> = (0..10_000_i64)
        .map(|entry| client.call::<()>(pushes[(entry / 500 % 3) as usize], (&journal.object, entry)).start())
        .collect();
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(journal.entries().await, (0..10_000).collect::<Vec<_>>());
}

/// Each reply goes to the request that it answers, whatever the order in which they complete.
pub async fn each_reply_goes_to_its_request(harness: &Harness) {
    let client = harness.client().await;
    let echoes = ["echo", "echo.blocking", "echo.async"];
    let calls: Vec<_> = (0..600_i64)
        .map(|n| {
            let call = client
                .call::<(i64, String)>(echoes[(n % 3) as usize], (Value::List(vec![n.into(), n.to_string().into()]),));
            call.lane(if n % 4 == 0 { Lane::CONCURRENT } else { Lane(n as u32 % 5) }).start()
        })
        .collect();
    for (n, call) in calls.into_iter().enumerate().rev() {
        assert_eq!(call.await.unwrap(), (n as i64, n.to_string()));
    }
}

/// A full queue delays admission; it loses nothing, and admits again as soon as there is room.
pub async fn a_full_queue_delays_admission_and_resumes(harness: &Harness) {
    let client = harness.client_with(harness.narrow(8)).await;
    let (started, ended, count) = (client.counter().await, client.counter().await, client.counter().await);
    let held = fill(&client, 7, &started, &ended).await;
    let last = client.call::<i64>("hold", (&started.object, &ended.object)).start();
    let mut calls: Vec<_> =
        (0..2000).map(|_| client.call::<i64>("counter.add.blocking", (&count.object, 1)).start()).collect();
    // Hops have room of their own, but not for so many.
    let late = calls.last_mut().unwrap();
    assert!(
        poll_once(&mut Box::pin(late.admitted())).is_none(),
        "the two thousandth request was admitted to a queue of eight"
    );
    drop((held, last));
    for call in &mut calls {
        call.admitted().await.unwrap();
    }
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(count.value().await, 2000);
    ended.reach(started.value().await).await;
}

/// A long queue of calls on lanes of their own, all of which find room one after the other.
///
/// The local session once admitted each from within the completion of the one before, and ran out
/// of stack.
pub async fn a_long_queue_of_concurrent_calls_is_admitted(harness: &Harness) {
    let client = harness.client_with(harness.narrow(8)).await;
    let (started, ended, count) = (client.counter().await, client.counter().await, client.counter().await);
    let held = fill(&client, 7, &started, &ended).await;
    let last = client.call::<i64>("hold", (&started.object, &ended.object)).start();
    let calls: Vec<_> =
        (0..10_000).map(|_| client.call::<i64>("counter.add", (&count.object, 1)).concurrent().start()).collect();
    drop((held, last));
    for call in calls {
        call.await.unwrap();
    }
    assert_eq!(count.value().await, 10_000);
}

/// The queue is bounded in bytes, too.
pub async fn a_queue_that_is_full_of_bytes_delays_admission(harness: &Harness) {
    let mut limits = harness.narrow(10_000);
    limits.max_queued_bytes = 1 << 20;
    let client = harness.client_with(limits).await;
    let gate = client.gate().await;
    let held = gate.wait(Lane::DEFAULT);
    gate.reach(1).await;
    let large = Bytes::from(vec![7; 256 << 10]);
    let mut calls: Vec<_> = (0..256).map(|_| client.call::<Bytes>("echo", (large.clone(),)).start()).collect();
    let late = calls.last_mut().unwrap();
    assert!(poll_once(&mut Box::pin(late.admitted())).is_none(), "64 MiB were admitted to a queue of one");
    // A request that needs no room among the bytes still gets through, unless it waits behind those
    // that do.
    drop(calls.split_off(2));
    gate.open().await;
    client.get(held).await;
    for call in calls {
        assert_eq!(call.await.unwrap(), large);
    }
    client.works().await;
}

/// A request that is larger than the whole queue is admitted by itself.
pub async fn a_request_larger_than_the_queue_is_admitted_alone(harness: &Harness) {
    let mut limits = harness.narrow(100);
    limits.max_queued_bytes = 64 << 10;
    let client = harness.client_with(limits).await;
    let large = Bytes::from(vec![9; 3 << 20]);
    let calls: Vec<_> = (0..4).map(|_| client.call::<Bytes>("echo.blocking", (large.clone(),)).start()).collect();
    for call in calls {
        assert_eq!(call.await.unwrap(), large);
    }
    client.works().await;
}

/// Requests that are dropped while they wait for room never run, and those behind them move up.
pub async fn requests_dropped_while_they_wait_for_room_never_run(harness: &Harness) {
    let client = harness.client_with(harness.narrow(8)).await;
    let (started, ended, journal) = (client.counter().await, client.counter().await, client.journal().await);
    let held = fill(&client, 7, &started, &ended).await;
    let last = client.call::<i64>("hold", (&started.object, &ended.object)).start();
    let mut calls: Vec<_> = (0..1000_i64)
        .map(|entry| (entry, client.call::<()>("journal.push", (&journal.object, entry)).start()))
        .collect();
    calls.retain(|(entry, _)| entry % 10 == 3);
    drop((held, last));
    let mut kept = Vec::new();
    for (entry, call) in calls {
        call.await.unwrap();
        kept.push(entry);
    }
    let entries = journal.entries().await;
    // A request that was on its way to a remote origin may have begun there.
    match harness.hops() {
        0 => assert_eq!(entries, kept),
        _ => assert!(kept.iter().all(|entry| entries.contains(entry)) && entries.len() < 500, "{} ran", entries.len()),
    }
}

#[derive(Default)]
struct Replies {
    by_token: Mutex<BTreeMap<u64, Vec<Outcome>>>,
}

impl ReplySink for Replies {
    fn deliver(&self, token: u64, outcome: Outcome) {
        self.by_token.lock().unwrap().entry(token).or_default().push(outcome);
    }
}

/// Every request gets exactly one terminal reply: those that succeed, those that fail, and those
/// that are cancelled before they begin, while they run, and after they are done.
pub async fn every_request_gets_exactly_one_reply(harness: &Harness) {
    let client = harness.client().await;
    let (gate, replies) = (client.gate().await, Arc::<Replies>::default());
    let submit = |name: &str, args: Vec<Value>, lane| {
        let call = Operation::Call { function: client.function(name).handle(), args };
        client.session.shared().submit(Request::new(call).on(lane)).reply()
    };
    let gate_arg = vec![Value::Object(Reference::Object(gate.object.handle()))];
    let mut cancellers = Vec::new();
    for round in 0..300_u64 {
        let lane = Lane(round as u32 % 3);
        let reply = match round {
            0 => submit("gate.wait", gate_arg.clone(), lane),
            _ if round % 7 == 0 => submit("fail.panic.inline", vec!["".into()], lane),
            _ if round % 5 == 0 => submit("echo.async", vec![Value::Int(round as i64)], lane),
            _ if round % 2 == 0 => submit("echo.blocking", vec![Value::Int(round as i64)], lane),
            _ => submit("echo", vec![Value::Int(round as i64)], lane),
        };
        let canceller = reply.deliver_to(replies.clone(), round);
        if round % 4 == 0 {
            canceller.cancel();
            canceller.cancel();
        }
        cancellers.push(canceller);
    }
    gate.open().await;
    let complete = || async { replies.by_token.lock().unwrap().len() == 300 };
    crate::harness::eventually("a reply to each request", complete).await;
    client.works().await;
    cancellers.iter().for_each(rpc_core::reply::Canceller::cancel);
    client.works().await;
    for (token, outcomes) in &*replies.by_token.lock().unwrap() {
        assert_eq!(outcomes.len(), 1, "request {token} got {outcomes:?}");
    }
}

/// Reads and writes count as requests like any other: many tensors can be filled at once through a
/// small queue.
pub async fn copies_pass_a_small_queue(harness: &Harness) {
    let mut limits = harness.narrow(4);
    limits.max_queued_bytes = 1 << 20;
    let client = harness.client_with(limits).await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[12 << 20])).await;
    let data = pattern(12 << 20, 0);
    client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
    assert!(client.get(client.session.copy_from_remote(&tensor)).await == data);
}
