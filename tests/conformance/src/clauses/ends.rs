//! The end of a session.

use rpc_core::{DataType, Device, ErrorKind, Lane, RemoteObject, Value};

use crate::harness::{Harness, eventually, poll_once};

/// A shutdown waits for what was admitted before; what comes later is refused, without running.
pub async fn a_shutdown_completes_what_was_admitted_and_refuses_the_rest(harness: &Harness) {
    let client = harness.client().await;
    let journal = client.journal().await;
    let mut calls: Vec<_> = (0..60_i64)
        .map(|entry| {
            client.call::<()>("journal.push.slowly", (&journal.object, entry)).lane(Lane(entry as u32 % 3)).start()
        })
        .collect();
    let entries = client.call::<Vec<i64>>("journal.entries", (&journal.object,)).start();
    for call in &mut calls {
        call.admitted().await.unwrap();
    }
    client.get(client.session.shutdown()).await;
    // Their replies are there already.
    for mut call in calls {
        poll_once(&mut call).expect("a reply before that of the shutdown").unwrap();
    }
    assert!(entries.await.unwrap().len() >= 20);
    let error = client.try_run::<i64>("add", (1, 2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(!error.request_may_have_run() && error.ends_session());
}

/// A shutdown also waits for requests that waited for room.
pub async fn a_shutdown_waits_for_requests_that_waited_for_room(harness: &Harness) {
    let client = harness.client_with(harness.narrow(4)).await;
    let journal = client.journal().await;
    let mut calls: Vec<_> =
        (0..60_i64).map(|entry| client.call::<()>("journal.push.slowly", (&journal.object, entry)).start()).collect();
    // With the last of them the shutdown comes behind all.
    calls.last_mut().unwrap().admitted().await.unwrap();
    client.get(client.session.shutdown()).await;
    for call in calls {
        call.await.unwrap();
    }
}

/// After the end everything that is asked fails with the error that ended the session.
pub async fn after_the_end_everything_fails_with_the_reason(harness: &Harness) {
    let client = harness.client().await;
    let session = &client.session;
    let tensor = client.get(session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let object: RemoteObject = client.run("counter.new", ()).await;
    client.get(session.shutdown()).await;
    assert_eq!(session.ended().await.kind(), ErrorKind::Closed);
    let outcomes = [
        harness.get(session.get_function("add")).await.map(drop),
        client.try_run::<i64>("add", (1, 2)).await.map(drop),
        harness.get(session.alloc(Device::cpu(), DataType::U8, &[4])).await.map(drop),
        harness.get(session.copy_to_remote(&tensor, vec![1])).await,
        harness.get(session.copy_from_remote(&tensor)).await.map(drop),
        harness.get(session.copy_among_remote(&tensor, &tensor)).await,
        harness.get(session.free_handle(object.handle())).await,
        harness.get(session.create_stream(Device::cpu())).await.map(drop),
        harness.get(session.stream_wait(Device::cpu(), None)).await,
        harness.get(session.load_module("arithmetic")).await.map(drop),
        harness.get(client.call::<i64>("add", (1, 2)).concurrent()).await.map(drop),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(!error.request_may_have_run());
    }
    // A second request is told that the session has ended, one way or the other.
    if let Err(error) = harness.get(session.shutdown()).await {
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
    // References that are left over are counted as freed.
    drop((tensor, object));
}

/// All who wait for the end hear of it, and nobody before.
pub async fn all_who_wait_for_the_end_hear_of_it(harness: &Harness) {
    let client = harness.client().await;
    let mut waiting: Vec<_> = (0..5).map(|_| Box::pin(client.session.ended())).collect();
    for ended in &mut waiting {
        assert!(poll_once(ended).is_none());
    }
    client.works().await;
    for ended in &mut waiting {
        assert!(poll_once(ended).is_none());
    }
    drop(waiting.pop());
    let (first, second) = (client.session.shutdown().start(), client.session.shutdown().start());
    client.get(first).await;
    if let Err(error) = harness.get(second).await {
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
    for ended in waiting {
        assert_eq!(ended.await.kind(), ErrorKind::Closed);
    }
}

/// A shutdown frees all that the session held.
pub async fn a_shutdown_frees_all_that_the_session_held(harness: &Harness) {
    let (client, observer, tag) = (harness.client().await, harness.client().await, harness.tag());
    let mut objects = Vec::new();
    for _ in 0..100 {
        objects.push(client.run::<Value>("tagged.new", (tag.as_str(),)).await);
    }
    assert_eq!(client.run::<i64>("tagged.alive", (tag.as_str(),)).await, 100);
    client.get(client.session.shutdown()).await;
    eventually("the end of all objects", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
    observer.works().await;
}

/// Dropping the last reference to a session ends it, and frees all that it held.
pub async fn dropping_a_session_frees_all_that_it_held(harness: &Harness) {
    let (client, observer, tag) = (harness.client().await, harness.client().await, harness.tag());
    for _ in 0..100 {
        client.run::<Value>("tagged.new", (tag.as_str(),)).await;
    }
    drop(client);
    eventually("the end of all objects", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
    observer.works().await;
}

/// A function that runs when its session is dropped learns that nobody waits, and what it holds
/// goes when it returns.
pub async fn a_function_that_runs_learns_that_its_session_is_gone(harness: &Harness) {
    let (observer, tag) = (harness.client().await, harness.tag());
    // A session whose origin is a process of its own takes everything with it.
    let client = harness.client().await;
    let mut call = client.call::<()>("hold.tagged", (tag.as_str(),)).start();
    assert!(poll_once(&mut call).is_none());
    eventually("the start of the function", || async {
        client.aside::<i64>("tagged.alive", (tag.as_str(),)).await == 1
    })
    .await;
    drop(client);
    drop(call);
    eventually("the end of the function", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
}

/// One session's end does not touch another's objects.
pub async fn the_end_of_one_session_does_not_touch_another(harness: &Harness) {
    let (client, other) = (harness.client().await, harness.client().await);
    let counter = other.counter().await;
    let tensor = other.get(other.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    client.get(client.session.shutdown()).await;
    drop(client);
    assert_eq!(other.run::<i64>("counter.add", (&counter.object, 1)).await, 1);
    other.get(other.session.copy_to_remote(&tensor, vec![1, 2, 3, 4])).await;
    other.works().await;
}
