//! Order: within a lane, and between lanes.

use bytes::Bytes;
use rpc_core::value::Reference;
use rpc_core::{DataType, Device, Lane, Operation, RemoteObject, Request, Value};

use crate::harness::Harness;

/// A thousand pipelined calls of all kinds happen in the order in which they were started, each
/// after the one before.
pub async fn a_lane_keeps_the_order_of_a_thousand_pipelined_calls(harness: &Harness) {
    let client = harness.client().await;
    for lane in [Lane::DEFAULT, Lane(3)] {
        let journal = client.journal().await;
        let pushes = ["journal.push", "journal.push.blocking", "journal.push.async"];
        let calls: Vec<_> = (0..1000_i64)
            // Runs of one kind, and changes between all of them.
            .map(|entry| (entry, pushes[((entry / 7 + entry) % 3) as usize]))
            .map(|(entry, push)| client.call::<()>(push, (&journal.object, entry)).lane(lane).start())
            .collect();
        for call in calls {
            call.await.unwrap();
        }
        assert_eq!(journal.entries().await, (0..1000).collect::<Vec<_>>());
    }
}

/// Copies have their place among calls: each call sees the write before it, each read the write
/// before it.
pub async fn copies_keep_their_place_among_calls(harness: &Harness) {
    let client = harness.client().await;
    let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let Value::Object(Reference::Tensor(reference)) = client.run::<Value>("echo", (&tensor,)).await else {
        panic!("a tensor comes back as a tensor")
    };
    let submit = |operation| client.session.shared().submit(Request::new(operation).on(Lane(2))).reply();
    let byte = ["tensor.byte", "tensor.byte.blocking"].map(|name| client.function(name).handle());
    let mut rounds = Vec::new();
    for round in 0..=255_u8 {
        let data = Bytes::from(vec![round; 4]);
        let write = submit(Operation::Write { to: reference.clone(), offset: 0, data });
        let args = vec![Value::Object(Reference::Tensor(reference.clone())), Value::Int(3)];
        let call = submit(Operation::Call { function: byte[usize::from(round % 2)], args });
        let read = submit(Operation::Read { from: reference.clone(), offset: 2, len: 2, into: None });
        rounds.push((write, call, read));
        if rounds.len() == 16 {
            for (at, (write, call, read)) in std::mem::take(&mut rounds).into_iter().enumerate() {
                let expected = round - 15 + at as u8;
                assert_eq!(write.await.unwrap(), Value::Null);
                assert_eq!(call.await.unwrap(), Value::Int(expected.into()));
                // Dropped before the next round, because the reply of a local session borrows the
                // tensor.
                let Value::Bytes(bytes) = read.await.unwrap() else { panic!("a read yields bytes") };
                assert_eq!(bytes, [expected; 2][..]);
            }
        }
    }
    client.session.release(&Value::Object(Reference::Tensor(reference)));
}

/// A lane that is held up holds up no other: neither calls nor copies, allocations, frees and
/// look-ups.
pub async fn a_lane_that_is_held_up_holds_up_no_other(harness: &Harness) {
    let client = harness.client().await;
    let (gate, dropped) = (client.gate().await, client.counter().await);
    let held = gate.wait(Lane(1));
    let behind: Vec<_> = (0..20).map(|n| client.call::<i64>("add", (n, n)).lane(Lane(1)).start()).collect();
    gate.reach(1).await;
    for lane in [Lane::DEFAULT, Lane(2), Lane::CONCURRENT, Lane(u32::MAX - 1)] {
        for echo in ["echo", "echo.blocking", "echo.async"] {
            assert_eq!(client.get(client.call::<i64>(echo, (5,)).lane(lane)).await, 5);
        }
        let tensor = client.get(client.session.alloc(Device::cpu(), DataType::U8, &[3]).lane(lane)).await;
        client.get(client.session.copy_to_remote(&tensor, vec![1, 2, 3]).lane(lane)).await;
        assert_eq!(client.get(client.session.copy_from_remote(&tensor).lane(lane)).await[..], [1, 2, 3]);
        client.get(client.session.stream_wait(Device::cpu(), None).lane(lane)).await;
        client.get(client.session.load_module("arithmetic").lane(lane)).await;
        let object: RemoteObject = client.get(client.call("probe.new", (&dropped.object, 0)).lane(lane)).await;
        client.get(object.free().lane(lane)).await;
    }
    dropped.reach(4).await;
    gate.open().await;
    client.get(held).await;
    for (n, call) in behind.into_iter().enumerate() {
        assert_eq!(client.get(call).await, 2 * n as i64);
    }
}

/// An asynchronous function holds its lane until it is done, as any other.
pub async fn an_asynchronous_function_holds_its_lane(harness: &Harness) {
    let client = harness.client().await;
    let (gate, counter) = (client.gate().await, client.counter().await);
    let held = client.call::<()>("gate.wait_async", (&gate.object,)).lane(Lane(1)).start();
    let behind = client.call::<i64>("counter.add", (&counter.object, 1)).lane(Lane(1)).start();
    gate.reach(1).await;
    client.works().await;
    assert_eq!(counter.value().await, 0);
    gate.open().await;
    client.get(held).await;
    assert_eq!(client.get(behind).await, 1);
}

/// Concurrent calls run beside each other, as many as there are.
pub async fn concurrent_calls_run_beside_each_other(harness: &Harness) {
    let client = harness.client().await;
    let gate = client.gate().await;
    let waiting: Vec<_> = (0..24).map(|_| gate.wait(Lane::CONCURRENT)).collect();
    let more: Vec<_> =
        (0..24).map(|_| client.call::<()>("gate.wait_async", (&gate.object,)).concurrent().start()).collect();
    gate.reach(48).await;
    gate.open().await;
    for call in waiting.into_iter().chain(more) {
        client.get(call).await;
    }
}

/// Every lane keeps its own order while all of them are busy.
pub async fn every_lane_keeps_its_own_order(harness: &Harness) {
    let client = harness.client().await;
    let mut lanes = Vec::new();
    for lane in 0..8 {
        lanes.push((Lane(lane * lane), client.journal().await));
    }
    let pushes = ["journal.push", "journal.push.blocking", "journal.push.async"];
    let mut calls = Vec::new();
    for entry in 0..100_i64 {
        for (at, (lane, journal)) in lanes.iter().enumerate() {
            let push = pushes[(entry as usize + at) % 3];
            calls.push(client.call::<()>(push, (&journal.object, entry)).lane(*lane).start());
        }
    }
    for call in calls {
        call.await.unwrap();
    }
    for (_, journal) in &lanes {
        assert_eq!(journal.entries().await, (0..100).collect::<Vec<_>>());
    }
}

/// Requests that fail keep their place and hold up nobody.
pub async fn requests_that_fail_keep_their_place(harness: &Harness) {
    let client = harness.client().await;
    let journal = client.journal().await;
    let mut calls = Vec::new();
    for entry in 0..100_i64 {
        calls.push((true, client.call::<()>("journal.push.blocking", (&journal.object, entry)).start()));
        calls.push((
            false,
            match entry % 4 {
                0 => client.call::<()>("fail.application", ()).start(),
                1 => client.call::<()>("add", ("no", "numbers")).start(),
                2 => client.call::<()>("fail.rpc", ()).start(),
                _ => client.session.free_handle(rpc_core::Handle::from_bits(1)).start(),
            },
        ));
    }
    for (succeeds, call) in calls {
        assert_eq!(call.await.is_ok(), succeeds);
    }
    assert_eq!(journal.entries().await, (0..100).collect::<Vec<_>>());
}

/// A function learns which lane it runs in.
pub async fn a_function_learns_its_lane(harness: &Harness) {
    let client = harness.client().await;
    for lane in [Lane::DEFAULT, Lane(7), Lane(u32::MAX - 1), Lane::CONCURRENT] {
        assert_eq!(client.get(client.call::<u32>("context.lane", ()).lane(lane)).await, lane.0);
    }
}

/// All lanes share the session's objects.
pub async fn lanes_share_the_objects(harness: &Harness) {
    let client = harness.client().await;
    let dropped = client.counter().await;
    let object: RemoteObject = client.get(client.call("probe.new", (&dropped.object, 6)).lane(Lane(1))).await;
    assert_eq!(client.get(client.call::<i64>("probe.payload", (&object,)).lane(Lane(2))).await, 6);
    client.get(object.free().lane(Lane(3))).await;
    assert_eq!(dropped.reach(1).await, 1);
}
