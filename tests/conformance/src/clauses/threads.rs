//! Blocking forms, and many threads on one session.

use std::sync::Arc;

use rpc_core::{DataType, Device, ErrorKind, Lane, Result};

use crate::harness::{Harness, on_thread};

fn misuse<T: std::fmt::Debug>(outcome: Result<T>) {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ApiMisuse, "{error}");
}

/// A blocking form inside of an async runtime is an error, and not a deadlock.
pub async fn a_blocking_form_inside_a_runtime_is_misuse(harness: &Harness) {
    let client = harness.client().await;
    let session = &client.session;
    let tensor = client.get(session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let baseline = client.usage().await;
    misuse(session.get_function("add").wait());
    misuse(client.call::<i64>("add", (1, 2)).wait());
    misuse(client.call::<i64>("add", (1, 2)).start().wait());
    misuse(session.alloc(Device::cpu(), DataType::U8, &[4]).wait());
    misuse(session.copy_to_remote(&tensor, vec![1; 4]).wait());
    misuse(session.copy_from_remote(&tensor).wait());
    misuse(session.copy_from_remote_to_slice(&tensor, 0, &mut [0; 4]).wait());
    client.settles_at(baseline).await;
    client.works().await;
}

/// Several threads call one session at once, each with the blocking forms.
pub async fn several_threads_share_one_session(harness: &Harness) {
    let client = harness.client().await;
    let counter = client.counter().await;
    let threads: Vec<_> = (0..8_u32)
        .map(|thread| {
            let (session, add) = (client.session.clone(), client.function("counter.add").clone());
            let (object, echo) = (counter.object.clone(), client.function("echo.blocking").clone());
            on_thread(move || {
                let tensor = session.alloc(Device::cpu(), DataType::U8, &[1000]).wait().unwrap();
                for round in 0..100_i64 {
                    let lane = [Lane::DEFAULT, Lane(thread), Lane::CONCURRENT][round as usize % 3];
                    add.call::<i64>((&object, 1)).lane(lane).wait().unwrap();
                    let sent = i64::from(thread) * 1000 + round;
                    assert_eq!(echo.call::<i64>((sent,)).lane(lane).wait().unwrap(), sent);
                    session.copy_to_remote(&tensor, vec![round as u8; 1000]).lane(lane).wait().unwrap();
                    assert!(
                        session
                            .copy_from_remote(&tensor)
                            .lane(lane)
                            .wait()
                            .unwrap()
                            .iter()
                            .all(|is| *is == round as u8)
                    );
                }
            })
        })
        .collect();
    for thread in threads {
        thread.await;
    }
    assert_eq!(counter.value().await, 800);
}

/// Threads and tasks share one session.
pub async fn threads_and_tasks_share_one_session(harness: &Harness) {
    let client = harness.client().await;
    let counter = client.counter().await;
    let tasks: Vec<_> = (0..4)
        .map(|_| {
            let (add, object) = (client.function("counter.add.blocking").clone(), counter.object.clone());
            tokio::spawn(async move {
                for _ in 0..100 {
                    add.call::<i64>((&object, 1)).concurrent().await.unwrap();
                }
            })
        })
        .collect();
    let (add, object) = (client.function("counter.add.async").clone(), Arc::new(counter.object.clone()));
    on_thread(move || {
        for _ in 0..100 {
            add.call::<i64>((&*object, 1)).wait().unwrap();
        }
    })
    .await;
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(counter.value().await, 500);
}

/// A reply that one thread waits for may be that of a call which another has started.
pub async fn a_call_may_be_started_here_and_waited_for_there(harness: &Harness) {
    let client = harness.client().await;
    let gate = client.gate().await;
    let held = gate.wait(Lane(1));
    gate.reach(1).await;
    let waiting = tokio::task::spawn_blocking(move || std::thread::spawn(move || held.wait()).join());
    gate.open().await;
    waiting.await.unwrap().unwrap().unwrap();
    let waiting = client.call::<i64>("add", (1, 2)).start();
    assert_eq!(on_thread(move || waiting.wait()).await.unwrap(), 3);
}
