//! Copies between the client's memory and tensors.

use std::sync::{Arc, LazyLock, Mutex};

use bytes::{Bytes, BytesMut};
use rpc_core::client::{CHUNK, SendRoute};
use rpc_core::{DataType, Device, ErrorKind, Lane, LocalSession, Registry, RemoteTensor, Result, RpcError, Session};

use crate::harness::{Harness, TestClient, on_thread, poll_once};

const SIZES: [usize; 7] = [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 17 * CHUNK];

/// Returns `len` bytes of a sequence, from its element `seed` on. It repeats itself after a prime
/// number of bytes, so that no chunk is like another; a computation for each byte would take most
/// of the suite's time in a debug build.
pub(super) fn pattern(len: usize, seed: usize) -> Bytes {
    const PERIOD: usize = 65_521;
    static SEQUENCE: LazyLock<Vec<u8>> =
        LazyLock::new(|| (0..PERIOD).map(|at| ((at * 2_654_435_761) >> 13) as u8).collect());
    let mut bytes = BytesMut::with_capacity(len);
    let mut from = seed % PERIOD;
    while bytes.len() < len {
        let part = &SEQUENCE[from..];
        bytes.extend_from_slice(&part[..part.len().min(len - bytes.len())]);
        from = 0;
    }
    bytes.freeze()
}

async fn bytes(client: &TestClient<'_>, len: usize) -> RemoteTensor {
    client.get(client.session.alloc(Device::cpu(), DataType::U8, &[len as i64])).await
}

fn refused<T: std::fmt::Debug>(outcome: Result<T>) -> RpcError {
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    error
}

/// Any number of bytes arrives as it was sent, in both directions.
pub async fn every_size_arrives_as_it_was_sent(harness: &Harness) {
    let client = harness.client().await;
    for size in SIZES {
        let (tensor, data) = (bytes(&client, size).await, pattern(size, 1));
        client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
        assert!(client.get(client.session.copy_from_remote(&tensor)).await == data, "{size} bytes came back as others");
    }
}

/// Copies may start and end anywhere in the tensor, and touch nothing else.
pub async fn parts_are_copied_and_nothing_else_is_touched(harness: &Harness) {
    let client = harness.client().await;
    let size = 4 * CHUNK + 11;
    for (offset, len) in [(0, 1), (1, CHUNK), (CHUNK - 1, 2), (7, 3 * CHUNK + 5), (size - 1, 1), (size, 0), (0, 0)] {
        let tensor = bytes(&client, size).await;
        let mut expected = vec![0; size];
        let part = pattern(len, offset);
        expected[offset..offset + len].copy_from_slice(&part);
        client.get(client.session.copy_to_remote_at(&tensor, offset as u64, part.clone())).await;
        assert!(client.get(client.session.copy_from_remote(&tensor)).await == expected, "{len} bytes at {offset}");
        let range = offset as u64..(offset + len) as u64;
        assert!(client.get(client.session.copy_range_from_remote(&tensor, range)).await == part);
    }
}

/// A view is copied from where it starts.
pub async fn views_are_copied_from_where_they_start(harness: &Harness) {
    let client = harness.client().await;
    let tensor = bytes(&client, 100).await;
    client.get(client.session.copy_to_remote(&tensor, pattern(100, 3))).await;
    let view = tensor.view(10, DataType::F32, &[3, 2], None).view(4, DataType::U8, &[8], None);
    assert_eq!((view.byte_offset(), view.size_bytes()), (14, 8));
    assert_eq!(client.get(client.session.copy_from_remote(&view)).await, pattern(100, 3).slice(14..22));
    client.get(client.session.copy_to_remote_at(&view, 6, vec![0xee; 2])).await;
    let all = client.get(client.session.copy_from_remote(&tensor)).await;
    assert_eq!(
        all[18..24],
        [pattern(100, 3)[18], pattern(100, 3)[19], 0xee, 0xee, pattern(100, 3)[22], pattern(100, 3)[23]]
    );
}

/// Ranges that do not fit are refused before anything is touched.
pub async fn ranges_that_do_not_fit_are_refused(harness: &Harness) {
    let client = harness.client().await;
    let tensor = bytes(&client, 10).await;
    let session = &client.session;
    for (offset, len) in [(0, 11), (10, 1), (11, 0), (u64::MAX, 1), (u64::MAX - 3, 4), (1 << 63, 1)] {
        refused(harness.get(session.copy_to_remote_at(&tensor, offset, vec![1; len])).await);
    }
    for range in [0..11, 10..11, 11..11, u64::MAX - 1..u64::MAX, 0..u64::MAX] {
        refused(harness.get(session.copy_range_from_remote(&tensor, range)).await);
    }
    #[expect(clippy::reversed_empty_ranges, reason = "that it is reversed is what must be noticed")]
    refused(harness.get(session.copy_range_from_remote(&tensor, 5..4)).await);
    // Rows with a gap between them are not densely packed.
    let strided = tensor.view(0, DataType::U8, &[2, 2], Some(&[5, 1]));
    refused(harness.get(session.copy_to_remote(&strided, vec![1; 4])).await);
    refused(harness.get(session.copy_from_remote(&strided)).await);
    assert_eq!(client.get(session.copy_from_remote(&tensor)).await[..], [0; 10]);
}

/// Progress grows from chunk to chunk, and ends at the whole.
pub async fn progress_grows_to_the_whole(harness: &Harness) {
    let client = harness.client().await;
    for size in [1, CHUNK, 3 * CHUNK + 5, 20 * CHUNK] {
        let tensor = bytes(&client, size).await;
        let seen = Arc::new(Mutex::new(Vec::new()));
        let note = || {
            let seen = seen.clone();
            move |done| seen.lock().unwrap().push(done)
        };
        let check = || {
            let seen = std::mem::take(&mut *seen.lock().unwrap());
            assert!(seen.is_sorted_by(|a, b| a < b), "{seen:?}");
            assert_eq!((seen.last(), seen.len()), (Some(&(size as u64)), size.div_ceil(CHUNK)));
        };
        client.get(client.session.copy_to_remote(&tensor, pattern(size, 0)).progress(note())).await;
        check();
        client.get(client.session.copy_from_remote(&tensor).progress(note())).await;
        check();
    }
}

/// A buffer that is passed in becomes the result, and is not allocated again.
pub async fn a_buffer_that_is_passed_in_becomes_the_result(harness: &Harness) {
    let client = harness.client().await;
    let size = 2 * CHUNK + 3;
    let (tensor, data) = (bytes(&client, size).await, pattern(size, 5));
    client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
    let mut buffer = BytesMut::with_capacity(size + 10);
    for len in [0, size, size + 10] {
        buffer.resize(len, 0xff);
        let place = buffer.as_ptr();
        buffer = client.get(client.session.copy_from_remote_into(&tensor, None, buffer)).await;
        assert!(buffer == data);
        assert_eq!(buffer.as_ptr(), place, "a buffer of length {len} was replaced");
    }
    // Too small a buffer grows.
    let grown = client.get(client.session.copy_from_remote_into(&tensor, None, BytesMut::with_capacity(5))).await;
    assert!(grown == data);
}

/// The blocking form also reads into a slice, whose length is that of the range.
pub async fn the_blocking_form_reads_into_a_slice(harness: &Harness) {
    let client = harness.client().await;
    let (tensor, data) = (bytes(&client, CHUNK + 100).await, pattern(CHUNK + 100, 8));
    client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
    let session = client.session.clone();
    on_thread(move || {
        let mut out = vec![0; CHUNK + 100];
        session.copy_from_remote_to_slice(&tensor, 0, &mut out).wait().unwrap();
        assert!(out == data);
        let mut out = [0; 20];
        session.copy_from_remote_to_slice(&tensor, 30, &mut out).wait().unwrap();
        assert_eq!(out[..], data[30..50]);
        refused(session.copy_from_remote_to_slice(&tensor, CHUNK as u64 + 90, &mut out).wait());
        session.copy_from_remote_to_slice(&tensor, 0, &mut []).wait().unwrap();
    })
    .await;
}

/// A copy that is dropped on its way leaves the session in order, whichever step it had come to.
pub async fn a_cancelled_copy_leaves_the_session_in_order(harness: &Harness) {
    let client = harness.client_with(harness.narrow(4)).await;
    let size = 6 * CHUNK;
    let (tensor, data) = (bytes(&client, size).await, pattern(size, 2));
    let baseline = client.usage().await;
    for polls in 0..10 {
        let mut to = client.session.copy_to_remote(&tensor, pattern(size, 3)).into_future();
        let mut from = client.session.copy_from_remote(&tensor).into_future();
        for _ in 0..polls {
            if poll_once(&mut to).is_some() || poll_once(&mut from).is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
        drop((to, from));
        client.works().await;
    }
    client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
    assert!(client.get(client.session.copy_from_remote(&tensor)).await == data);
    client.settles_at(baseline).await;
}

/// Copies on several lanes run beside each other, and calls between them.
pub async fn copies_on_several_lanes_run_beside_each_other(harness: &Harness) {
    let client = harness.client().await;
    let size = 5 * CHUNK + 1;
    let mut copies = Vec::new();
    for lane in 0..6_u32 {
        let (tensor, session) = (bytes(&client, size).await, client.session.clone());
        let data = pattern(size, lane as usize * 1000);
        copies.push(tokio::spawn(async move {
            session.copy_to_remote(&tensor, data.clone()).lane(Lane(lane)).await.unwrap();
            assert!(session.copy_from_remote(&tensor).lane(Lane(lane)).await.unwrap() == data);
        }));
    }
    for n in 0..100 {
        assert_eq!(client.aside::<i64>("add", (n, n)).await, 2 * n);
    }
    for copy in copies {
        copy.await.unwrap();
    }
}

/// A tensor may be dropped while a copy of it is under way: the copy completes.
pub async fn a_copy_keeps_its_tensor(harness: &Harness) {
    let client = harness.client().await;
    let (tensor, data) = (bytes(&client, 9 * CHUNK).await, pattern(9 * CHUNK, 4));
    client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
    let copy = client.session.copy_from_remote(&tensor);
    drop(tensor);
    assert!(client.get(copy).await == data);
}

/// Any number of bytes arrives at another session, of the same kind or of this process, at its
/// place and nowhere else, and the route is told.
pub async fn a_tensor_is_sent_to_another_session(harness: &Harness) {
    let (client, other) = (harness.client().await, harness.session().await);
    let here = Session::new(LocalSession::new(Registry::new()));
    for (at, size) in [0, 1, 9 * CHUNK + 1].into_iter().enumerate() {
        let (tensor, data) = (bytes(&client, size).await, pattern(size, at));
        client.get(client.session.copy_to_remote(&tensor, data.clone())).await;
        for far in [&other, &here] {
            let to = harness.get(far.alloc(Device::cpu(), DataType::U8, &[size as i64 + 9])).await.unwrap();
            let seen = Arc::new(Mutex::new(Vec::new()));
            let seen_too = seen.clone();
            let send = client.session.send_range(&tensor, None, far, &to, 5);
            let route = client.get(send.progress(move |sent| seen_too.lock().unwrap().push(sent))).await;
            assert!(matches!(route, SendRoute::ThroughClient { .. }), "{route}");
            let arrived = harness.get(far.copy_from_remote(&to)).await.unwrap();
            assert!(arrived[5..5 + size] == data, "{size} bytes came as others");
            assert_eq!((&arrived[..5], &arrived[5 + size..]), (&[0; 5][..], &[0; 4][..]));
            assert_eq!(seen.lock().unwrap().last(), Some(&(size as u64)));
            // And back, from the other side.
            let back = bytes(&client, size).await;
            client.get(far.send_range(&to, 5..5 + size as u64, &client.session, &back, 0)).await;
            assert!(
                client.get(client.session.copy_from_remote(&back)).await == data,
                "{size} bytes came back as others"
            );
            let error = refused(harness.get(client.session.send_range(&tensor, None, far, &to, 10)).await);
            assert!(error.message().contains("the destination"), "{error}");
        }
    }
    let (tensor, foreign) = (bytes(&client, 4).await, bytes(&client, 4).await);
    let error = harness.get(client.session.send(&tensor, &other, &foreign)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidHandle);
    client.works().await;
}

/// A send within a session is a copy at its origin, in its place among the requests of the lane.
pub async fn a_send_within_a_session_is_a_copy_there(harness: &Harness) {
    let client = harness.client().await;
    let (from, to) = (bytes(&client, 100).await, bytes(&client, 100).await);
    client.get(client.session.copy_to_remote(&from, pattern(100, 3))).await;
    let send = client.session.send_range(&from, 10..30, &client.session, &to, 70);
    assert_eq!(client.get(send).await, SendRoute::SameSession);
    let arrived = client.get(client.session.copy_from_remote(&to)).await;
    assert_eq!(
        (&arrived[..70], &arrived[70..90], &arrived[90..]),
        (&[0; 70][..], &pattern(100, 3)[10..30], &[0; 10][..])
    );
    let overlapping = harness.get(client.session.send_range(&from, 0..20, &client.session, &from, 10)).await;
    refused(overlapping);
}
