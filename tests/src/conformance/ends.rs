//! The end of a session.

use rpc_core::{DataType, Device, ErrorKind, Lane, RemoteObject, Value};

use crate::scene::{Scene, eventually, poll_once};

/// A shutdown waits for what was admitted before; what comes later is refused, without running.
pub async fn a_shutdown_completes_what_was_admitted_and_refuses_the_rest(scene: &Scene) {
    let kit = scene.kit().await;
    let journal = kit.journal().await;
    let mut calls: Vec<_> = (0..60_i64)
        .map(|entry| {
            kit.call::<()>("journal.push.slowly", (&journal.object, entry)).lane(Lane(entry as u32 % 3)).start()
        })
        .collect();
    let entries = kit.call::<Vec<i64>>("journal.entries", (&journal.object,)).start();
    for call in &mut calls {
        call.admitted().await.unwrap();
    }
    kit.get(kit.session.shutdown()).await;
    // Their replies are there already.
    for mut call in calls {
        poll_once(&mut call).expect("a reply before that of the shutdown").unwrap();
    }
    assert!(entries.await.unwrap().len() >= 20);
    let error = kit.try_run::<i64>("add", (1, 2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    assert!(!error.request_may_have_run() && error.ends_session());
}

/// A shutdown also waits for requests that waited for room.
pub async fn a_shutdown_waits_for_requests_that_waited_for_room(scene: &Scene) {
    let kit = scene.kit_with(scene.narrow(4)).await;
    let journal = kit.journal().await;
    let mut calls: Vec<_> =
        (0..60_i64).map(|entry| kit.call::<()>("journal.push.slowly", (&journal.object, entry)).start()).collect();
    // With the last of them the shutdown comes behind all.
    calls.last_mut().unwrap().admitted().await.unwrap();
    kit.get(kit.session.shutdown()).await;
    for call in calls {
        call.await.unwrap();
    }
}

/// After the end everything that is asked fails with the error that ended the session.
pub async fn after_the_end_everything_fails_with_the_reason(scene: &Scene) {
    let kit = scene.kit().await;
    let session = &kit.session;
    let tensor = kit.get(session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    let object: RemoteObject = kit.run("counter.new", ()).await;
    kit.get(session.shutdown()).await;
    assert_eq!(session.ended().await.kind(), ErrorKind::Closed);
    let outcomes = [
        scene.get(session.get_function("add")).await.map(drop),
        kit.try_run::<i64>("add", (1, 2)).await.map(drop),
        scene.get(session.alloc(Device::cpu(), DataType::U8, &[4])).await.map(drop),
        scene.get(session.copy_to_remote(&tensor, vec![1])).await,
        scene.get(session.copy_from_remote(&tensor)).await.map(drop),
        scene.get(session.copy_among_remote(&tensor, &tensor)).await,
        scene.get(session.free_handle(object.handle())).await,
        scene.get(session.create_stream(Device::cpu())).await.map(drop),
        scene.get(session.stream_wait(Device::cpu(), None)).await,
        scene.get(session.load_module("arithmetic")).await.map(drop),
        scene.get(kit.call::<i64>("add", (1, 2)).concurrent()).await.map(drop),
    ];
    for outcome in outcomes {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        assert!(!error.request_may_have_run());
    }
    // Whoever asks again is told that it has been done, one way or the other.
    if let Err(error) = scene.get(session.shutdown()).await {
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
    // References that are left over are counted as freed.
    drop((tensor, object));
}

/// All who wait for the end hear of it, and nobody before.
pub async fn all_who_wait_for_the_end_hear_of_it(scene: &Scene) {
    let kit = scene.kit().await;
    let mut waiting: Vec<_> = (0..5).map(|_| Box::pin(kit.session.ended())).collect();
    for ended in &mut waiting {
        assert!(poll_once(ended).is_none());
    }
    kit.works().await;
    for ended in &mut waiting {
        assert!(poll_once(ended).is_none());
    }
    drop(waiting.pop());
    let (first, second) = (kit.session.shutdown().start(), kit.session.shutdown().start());
    kit.get(first).await;
    if let Err(error) = scene.get(second).await {
        assert_eq!(error.kind(), ErrorKind::Closed);
    }
    for ended in waiting {
        assert_eq!(ended.await.kind(), ErrorKind::Closed);
    }
}

/// A shutdown frees all that the session held.
pub async fn a_shutdown_frees_all_that_the_session_held(scene: &Scene) {
    let (kit, observer, tag) = (scene.kit().await, scene.kit().await, scene.tag());
    let mut objects = Vec::new();
    for _ in 0..100 {
        objects.push(kit.run::<Value>("tagged.new", (tag.as_str(),)).await);
    }
    assert_eq!(kit.run::<i64>("tagged.alive", (tag.as_str(),)).await, 100);
    kit.get(kit.session.shutdown()).await;
    eventually("the end of all objects", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
    observer.works().await;
}

/// Dropping the last reference to a session ends it, and frees all that it held.
pub async fn dropping_a_session_frees_all_that_it_held(scene: &Scene) {
    let (kit, observer, tag) = (scene.kit().await, scene.kit().await, scene.tag());
    for _ in 0..100 {
        kit.run::<Value>("tagged.new", (tag.as_str(),)).await;
    }
    drop(kit);
    eventually("the end of all objects", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
    observer.works().await;
}

/// A function that runs when its session is dropped learns that nobody waits, and what it holds goes when it returns.
pub async fn a_function_that_runs_learns_that_its_session_is_gone(scene: &Scene) {
    let (observer, tag) = (scene.kit().await, scene.tag());
    // A session whose origin is a process of its own takes everything with it.
    let kit = scene.kit().await;
    let mut call = kit.call::<()>("hold.tagged", (tag.as_str(),)).start();
    assert!(poll_once(&mut call).is_none());
    eventually("the start of the function", || async { kit.aside::<i64>("tagged.alive", (tag.as_str(),)).await == 1 })
        .await;
    drop(kit);
    drop(call);
    eventually("the end of the function", || async { observer.run::<i64>("tagged.alive", (tag.as_str(),)).await == 0 })
        .await;
}

/// One session's end does not touch another's objects.
pub async fn the_end_of_one_session_does_not_touch_another(scene: &Scene) {
    let (kit, other) = (scene.kit().await, scene.kit().await);
    let counter = other.counter().await;
    let tensor = other.get(other.session.alloc(Device::cpu(), DataType::U8, &[4])).await;
    kit.get(kit.session.shutdown()).await;
    drop(kit);
    assert_eq!(other.run::<i64>("counter.add", (&counter.object, 1)).await, 1);
    other.get(other.session.copy_to_remote(&tensor, vec![1, 2, 3, 4])).await;
    other.works().await;
}
