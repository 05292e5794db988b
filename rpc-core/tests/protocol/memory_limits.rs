//! Tests with peers that try to make the other side keep too much: bytes are counted before they
//! are kept, and beyond a limit there is an error that names it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::hostile::{feed, header, pair_with_a_request, request, setup};
use crate::pair::{Pair, Setup, call, call_with, frame, object};
use crate::peak_memory::{held_memory, peak_memory_of};
use bytes::{Bytes, BytesMut};
use rpc_core::proto::{Admission, ClientEndpoint, ClientEvent, Kind, ServerEvent, decode_value};
use rpc_core::{DataType, Device, ErrorKind, Handle, MemoryQuota, TensorRef, Value};

#[test]
fn no_memory_is_reserved_for_claimed_lengths() {
    // Lengths within the limits, whose bytes never arrive.
    for (body, payload) in [(65_536, 65_536), (65_536, 10), (10, 65_536), (0, 16 << 10)] {
        let mut pair = setup().build();
        let peak = peak_memory_of(|| {
            for _ in 0..100 {
                pair.inject_to_server(&header(16, 0, 0, body, payload)[..]);
                pair.run();
            }
        });
        assert!(peak < 1 << 20, "{body} {payload}: {peak}");
    }
    for body in [&[0xdd, 255, 255, 255, 255][..], &[0xdb, 255, 255, 255, 255], &[0xc9, 255, 255, 255, 255, 1]] {
        assert!(peak_memory_of(|| assert!(decode_value(body, Bytes::new()).is_err())) < 1024);
    }
}

#[test]
fn the_length_of_a_message_is_limited() {
    let part = |kind, id, len: usize| frame(kind, id, 0, true, &[], &vec![0; len]);
    for len in [60_000, 1_000] {
        let mut pair = setup().build();
        let chunk = part(Kind::Request, 1, len);
        let peak = peak_memory_of(|| {
            while pair.server_error.is_none() {
                pair.inject_to_server(&chunk);
                pair.run();
            }
        });
        assert!(pair.server_error.as_ref().unwrap().message().contains("max_message"));
        assert!(peak < 3 << 20, "{peak}");
        let mut pair = pair_with_a_request();
        let chunk = part(Kind::Reply, 1, len);
        while pair.ended.is_none() {
            pair.inject_to_client(&chunk);
            pair.run();
        }
        assert!(pair.ended.as_ref().unwrap().message().contains("max_message"));
    }
}

/// Regression: messages that never became complete were counted only when another one was
/// completed. A peer could make them take any amount of memory, each up to the largest message.
#[test]
fn messages_that_never_become_complete_are_counted() {
    // Many bytes in few messages: above the window.
    let mut pair = setup().build();
    let mut input = Vec::new();
    for id in 1..=7 {
        for _ in 0..4 {
            input.extend(frame(Kind::Request, id, 0, true, &[], &[0; 60_000]));
        }
    }
    pair.inject_to_server(&input);
    pair.run();
    assert!(
        pair.server_error.as_ref().unwrap().message().contains("in flight, above the credit"),
        "{:?}",
        pair.server_error
    );
    // Few bytes in many messages: above the number.
    let mut pair = setup().build();
    let input: Vec<u8> = (1..=100_000).flat_map(|id| frame(Kind::Request, id, 0, true, &[], &[])).collect();
    let mut input = BytesMut::from(&input[..]);
    let peak = peak_memory_of(|| {
        let error = pair.server.handle_input(&mut input, pair.now, &mut |_, _, _, _| None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol);
    });
    assert!(peak < 64 << 10, "{peak}");
    // The same from a server: replies to more requests than were made are refused, and those to
    // requests are within the window.
    let mut pair = setup().build();
    (1..=8).for_each(|id| drop(pair.submit(id, call(id as u32, 1))));
    pair.run();
    for id in 1..=8 {
        for _ in 0..4 {
            pair.inject_to_client(&frame(Kind::Reply, id, 0, true, &[], &[0; 60_000]));
        }
    }
    pair.run();
    assert!(pair.ended.as_ref().unwrap().message().contains("in flight, above the credit"), "{:?}", pair.ended);
}

/// Regression: requests of a client that never reads were answered and then not counted any more,
/// and the unsent replies took more and more memory.
#[test]
fn a_client_that_does_not_read_its_replies_is_limited() {
    let mut pair = Setup { capacity: 4 << 10, ..setup() }.build();
    pair.client_reads = false;
    let text = "x".repeat(3_000);
    let mut asked = 0;
    let peak = peak_memory_of(|| {
        for id in 1..=100_000 {
            pair.setup.capacity = usize::MAX;
            pair.inject_to_server(&request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]));
            pair.setup.capacity = 4 << 10;
            pair.run();
            if pair.server_error.is_some() {
                break;
            }
            asked += 1;
            pair.reply(id, Ok(Value::Str(text.clone())));
        }
    });
    assert_eq!(pair.server_error.as_ref().unwrap().kind(), ErrorKind::Protocol);
    assert!((100..400).contains(&asked), "{asked}");
    assert!(peak < 4 << 20, "{peak}");
}

/// Regression: large replies were counted by their number alone.
#[test]
fn unread_large_replies_hold_back_further_requests() {
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    pair.client_reads = false;
    pair.setup.capacity = 4 << 10;
    let answer = |pair: &mut Pair| {
        let asked: Vec<_> = pair.requests.keys().copied().collect();
        for id in asked {
            pair.reply(id, Ok(Value::Bytes(vec![0; 200 << 10].into())));
        }
    };
    let peak = peak_memory_of(|| {
        for id in 1..=900 {
            pair.setup.capacity = usize::MAX;
            pair.inject_to_server(&request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]));
            pair.setup.capacity = 4 << 10;
            pair.run();
            answer(&mut pair);
        }
    });
    assert!(pair.server_error.is_none() && pair.arrived.len() < 8, "{:?}", pair.arrived);
    assert!(peak < 4 << 20, "{peak}");
    // A request that is held back can still be cancelled.
    pair.setup.capacity = usize::MAX;
    pair.inject_to_server(&frame(Kind::Cancel, 899, 0, false, &[], &[]));
    pair.run();
    assert_eq!(pair.server.in_flight(), 900 - pair.arrived.len() - 1);
}

/// Regression: requests that ran while the client did not read were all answered, at any cost in
/// memory.
#[test]
fn a_backlog_of_replies_is_bounded() {
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    pair.client_reads = false;
    for id in 1..=900 {
        pair.inject_to_server(&request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]));
    }
    pair.run();
    assert_eq!(pair.requests.len(), 900);
    pair.setup.capacity = 4 << 10;
    let peak = peak_memory_of(|| {
        for id in 1..=900 {
            pair.reply(id, Ok(Value::Bytes(vec![0; 200 << 10].into())));
            pair.rejected.clear();
            pair.run();
        }
    });
    assert!(peak < 6 << 20, "{peak}");
    assert!(pair.server_error.is_none());
}

/// Returns a server that begins no further requests, because its client does not read, and holds
/// back one request.
fn server_that_holds_requests_back() -> Pair {
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    pair.client_reads = false;
    pair.setup.capacity = 4 << 10;
    for id in 1..=8 {
        pair.inject_to_server(&request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]));
    }
    pair.run();
    for id in 1..=8 {
        pair.reply(id, Ok(Value::Bytes(vec![0; 200 << 10].into())));
    }
    pair.inject_to_server(&request(9, &[0x93, 7, 0xc0, 0x91, 1], &[]));
    pair.run();
    assert_eq!((pair.server.in_flight(), pair.requests.len()), (1, 0), "request 9 waits");
    pair
}

/// Regression: frees behind requests that were held back were kept without limit.
#[test]
fn frees_that_wait_behind_requests_are_bounded() {
    let mut pair = server_that_holds_requests_back();
    let many = frame(Kind::Free, 0, 0, false, &[7; 8 * 1000], &[]);
    let one = frame(Kind::Free, 0, 0, false, &[7; 8], &[]);
    let mut ended = None;
    let peak = peak_memory_of(|| {
        ended = (0..2_000).find_map(|_| feed(&mut pair, &many).and_then(|_| feed(&mut pair, &one)).err());
    });
    assert!(peak < 2 << 20, "{peak}");
    let error = ended.expect("the session has ended");
    assert_eq!(error.kind(), ErrorKind::LimitExceeded);
    assert!(error.to_string().contains("window"), "{error}");
}

/// The memory of frees that wait is counted against the limit of all sessions.
#[test]
fn frees_that_wait_count_against_the_limit_of_all_sessions() {
    let mut pair = server_that_holds_requests_back();
    let quota = MemoryQuota::new("max_total_queued", 256 << 10, None);
    pair.server = pair.server.with_quota(quota.clone());
    let many = frame(Kind::Free, 0, 0, false, &[7; 8 * 1000], &[]);
    let error = (0..100).find_map(|_| feed(&mut pair, &many).err()).expect("the session has ended");
    assert!(error.to_string().contains("max_total_queued"), "{error}");
    drop(pair);
    assert_eq!(quota.used(), 0);
}

/// A quota that others have filled does not hold up a client that frees objects and reads its
/// replies.
#[test]
fn frees_that_need_not_wait_need_no_room() {
    let quota = MemoryQuota::new("max_total_queued", 256 << 10, None);
    let mut pair = setup().build();
    pair.server = pair.server.with_quota(quota.clone());
    let _others = quota.reserve(256 << 10).unwrap();
    let many = frame(Kind::Free, 0, 0, false, &[7; 8 * 4000], &[]);
    for _ in 0..100 {
        assert!(matches!(feed(&mut pair, &many).unwrap()[..], [ServerEvent::Release { .. }]));
    }
}

/// Regression: each `Close` of a client was queued, and so was what followed.
#[test]
fn messages_after_a_close_are_dropped() {
    let mut pair = server_that_holds_requests_back();
    let close = frame(Kind::Close, 0, 0, false, &[], &[]);
    let free = frame(Kind::Free, 0, 0, false, &[7; 8], &[]);
    let unknown = frame(Kind::Hello, 0, 0, false, &[], &[]);
    let flood = [close.as_slice(), &free, &unknown].concat().repeat(1_000);
    let peak = peak_memory_of(|| {
        for _ in 0..20 {
            assert!(feed(&mut pair, &flood).unwrap().is_empty());
        }
    });
    assert!(peak < 256 << 10, "{peak}");
}

#[test]
fn an_orderly_close_is_one_event() {
    let mut pair = setup().build();
    let close = frame(Kind::Close, 0, 0, false, &[], &[]);
    let events = feed(&mut pair, &[close.as_slice(), &close].concat()).unwrap();
    assert!(matches!(events[..], [ServerEvent::Close]), "{events:?}");
}

/// A client that reads, and returns no credit.
#[test]
fn the_server_knows_the_reply_that_waits_only_for_credit() {
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    for id in 1..=4 {
        pair.inject_to_server(&request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]));
    }
    pair.run();
    assert_eq!(pair.server.held_back(), None);
    let reply = || Ok(Value::Bytes(vec![0; 200 << 10].into()));
    for id in 1..=4 {
        assert!(pair.server.reply(id, reply()).is_none());
    }
    // Two replies fit into the client's window.
    assert_eq!(pair.server.held_back(), None, "the first have not left");
    let now = pair.now;
    let drain = |server: &mut rpc_core::proto::ServerEndpoint| loop {
        server.stage();
        let mut slices = [std::io::IoSlice::new(&[]); 8];
        let count = server.slices(&mut slices);
        let len = slices[..count].iter().map(|slice| slice.len()).sum();
        if len == 0 {
            break;
        }
        server.advance(len, now);
    };
    drain(&mut pair.server);
    assert_eq!(pair.server.held_back(), Some(3));
    let credit = [&0_u32.to_le_bytes()[..], &(100_u64 << 10).to_le_bytes()].concat();
    pair.client_reads = false;
    pair.inject_to_server(&frame(Kind::Credit, 0, 0, false, &credit, &[]));
    pair.run();
    drain(&mut pair.server);
    assert_eq!(pair.server.held_back(), Some(4));
}

/// A list of nils takes one byte each on the wire, and eighty in memory.
#[test]
fn small_values_count_by_their_size_in_memory() {
    let nils = || call_with(u32::MAX, vec![Value::List(vec![Value::Null; 2_000])]);
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    for id in 1..=4 {
        assert!(matches!(pair.submit(id, nils()), Admission::Now));
    }
    assert!(matches!(pair.submit(5, nils()), Admission::Later));
    pair.submit(6, call_with(u32::MAX, vec![Value::List(vec![Value::Null; 5_000])]));
    assert_eq!(pair.error(6).kind(), ErrorKind::LimitExceeded);
    pair.run();
    pair.reply(1, Ok(Value::List(vec![Value::Null; 2_000])));
    pair.run();
    assert_eq!(pair.requests.len(), 4);
    assert!(pair.requests.contains_key(&5) && pair.outcomes[&1].is_ok());
    // A client that ignores its credit is cut off.
    let mut pair = Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 1000).build();
    let (body, _) = rpc_core::proto::encode_request(&nils(), pair.now);
    for id in 1..=6 {
        pair.inject_to_server(&request(id, &body, &[]));
    }
    pair.run();
    assert_eq!(pair.server_error.as_ref().unwrap().kind(), ErrorKind::Protocol);
}

/// Regression: each ping was answered, even if the answers were never read.
#[test]
fn not_all_pings_of_a_peer_that_does_not_read_are_answered() {
    let ping = frame(Kind::Ping, 0, 0, false, &[], &[]);
    let flood: Vec<u8> = (0..40_000).flat_map(|_| ping.clone()).collect();
    let mut server = setup().build().server;
    let mut client = setup().build().client;
    let now = Instant::now();
    let mut input = BytesMut::new();
    let peak = peak_memory_of(|| {
        for _ in 0..8 {
            input.extend_from_slice(&flood);
            while server.handle_input(&mut input, now, &mut |_, _, _, _| None).unwrap() {}
            server.stage();
            input.extend_from_slice(&flood);
            client.handle_input(&mut input, now).unwrap();
            client.stage();
        }
    });
    assert!(peak < 12 << 20, "{peak}");
    // Numbered pings are answered by one pong with the last number.
    let mut client = setup().build().client;
    let numbered: Vec<u8> = (1..=1_000).flat_map(|id| frame(Kind::Ping, id, 0, false, &[], &[])).collect();
    client.handle_input(&mut BytesMut::from(&numbered[..]), now).unwrap();
    client.stage();
    let mut slices = [std::io::IoSlice::new(&[])];
    assert_eq!(client.slices(&mut slices), 1);
    assert_eq!(slices[0][..], frame(Kind::Pong, 1_000, 0, false, &[], &[]));
}

/// Client whose peer reads nothing, such as that of a gateway towards the next server. It has a
/// window of 4 MiB, and its peer one of 1 GiB.
fn unread_client() -> (ClientEndpoint<u64>, Instant) {
    let mut setup = setup().limits(4 << 20, 4 << 20, 1 << 20, 1024);
    setup.server.window = 1 << 30;
    let pair = setup.build();
    (pair.client, pair.now)
}

/// Regression: a client of a gateway could pile up frees there, for a server that reads nothing.
#[test]
fn frees_for_a_peer_that_does_not_read_are_bounded() {
    let (mut client, _) = unread_client();
    let peak = peak_memory_of(|| {
        for number in 0..1_000_000 {
            client.release([Handle::from_bits(number)]);
            client.stage();
        }
    });
    assert_eq!(client.ended().unwrap().kind(), ErrorKind::LimitExceeded);
    assert!(peak < 7 << 20, "{peak}");
}

/// Regression: a request that a caller gave up was kept until the peer had read it, and counted for
/// nobody.
#[test]
fn requests_that_no_caller_waits_for_are_not_kept() {
    let (mut client, mut now) = unread_client();
    let peak = peak_memory_of(|| {
        for id in 1..=200 {
            let mut request = call(id as u32, 2 << 20);
            request.deadline = Some(now + Duration::from_millis(1));
            client.submit(id, request, id, now);
            client.stage();
            now += Duration::from_millis(2);
            client.handle_timeout(now).unwrap();
            while client.poll_event().is_some() {}
        }
    });
    assert!(client.ended().is_none());
    assert!(peak < 10 << 20, "{peak}");
}

/// A message of which the peer has read a part has to be sent whole, or the session has to end.
#[test]
fn requests_that_no_caller_waits_for_and_that_have_begun_are_bounded() {
    let (mut client, now) = unread_client();
    for id in 1..=8 {
        let mut request = call(id as u32, 3 << 20);
        request.deadline = Some(now + Duration::from_millis(1));
        client.submit(id, request, id, now);
    }
    // The peer reads a frame of each.
    for _ in 0..8 {
        client.stage();
        let mut slices = [std::io::IoSlice::new(&[]); 4];
        let count = client.slices(&mut slices);
        let len = slices[..count].iter().map(|slice| slice.len()).sum();
        client.advance(len, now);
    }
    assert!(client.ended().is_none());
    client.handle_timeout(now + Duration::from_millis(2)).unwrap();
    assert_eq!(client.ended().unwrap().kind(), ErrorKind::LimitExceeded);
    // Each has one end nevertheless.
    let ends = std::iter::from_fn(|| client.poll_event()).filter(|event| matches!(event, ClientEvent::Reply(..)));
    assert_eq!(ends.count(), 8);
}

/// Regression: with a reply to each request before it read any, a peer made the client forget what
/// it still held for it.
#[test]
fn a_reply_to_a_request_that_was_not_sent_breaks_the_protocol() {
    let (mut client, now) = unread_client();
    for id in 1..=3 {
        client.submit(id, call(id as u32, 2 << 20), id, now);
    }
    client.stage();
    let mut reply = BytesMut::from(&frame(Kind::Reply, 3, 0, false, &[0xc0], &[])[..]);
    let error = client.handle_input(&mut reply, now).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
}

/// Regression: the deadlines of completed requests were kept until they had passed: an hour's worth
/// of them, for calls that may take an hour.
#[test]
fn deadlines_do_not_outlive_their_requests() {
    let mut pair = Pair::new(setup());
    let held = held_memory();
    for id in 1..=20_000 {
        let mut request = call(0, 0);
        request.deadline = Some(pair.now + Duration::from_secs(3600));
        assert!(matches!(pair.client.submit(id, request, id, pair.now), Admission::Now));
        let mut reply = BytesMut::from(&frame(Kind::Reply, id, 0, false, &[0xc0], &[])[..]);
        pair.client.handle_input(&mut reply, pair.now).unwrap();
        while pair.client.poll_event().is_some() {}
        pair.client.stage();
        let mut slices = [std::io::IoSlice::new(&[])];
        pair.client.slices(&mut slices);
        let len = slices[0].len();
        pair.client.advance(len, pair.now);
    }
    let held = held_memory() - held;
    assert!(held < 64 << 10, "{held}");
}

/// Regression: a body of small values took a hundred times its size in memory.
#[test]
fn the_number_of_small_values_is_limited() {
    let body = |len: u32| [&[0xdd][..], &len.to_be_bytes(), &vec![0xc0; len as usize]].concat();
    assert!(decode_value(&body((1 << 20) - 1), Bytes::new()).is_ok());
    let body = body(20 << 20);
    assert!(peak_memory_of(|| assert!(decode_value(&body, Bytes::new()).is_err())) < 256 << 20);
    // The sender gets an error; the rest of the session is not affected.
    let mut pair = Setup::default().build();
    let many = Value::List(vec![Value::Null; 1 << 20]);
    assert!(matches!(pair.submit(1, call_with(0, vec![many.clone()])), Admission::Refused(..)));
    pair.submit(2, call(0, 0));
    pair.run();
    pair.reply(2, Ok(many));
    pair.run();
    assert_eq!((pair.error(1).kind(), pair.error(2).kind()), (ErrorKind::InvalidArgument, ErrorKind::InvalidArgument));
}

/// Returns a pair whose server has room for eight chunks of 16 KiB, and for the shared quota
/// besides.
fn crowded(quota: &Arc<MemoryQuota>, chunk: u32) -> Pair {
    Setup::default().limits(1 << 20, 2 << 20, chunk, 8).build().within(quota)
}

#[test]
fn requests_without_room_are_refused_without_being_kept_and_the_session_continues() {
    // In frames that are received in place, and in frames that pass through the buffer.
    for chunk in [64 << 10, 4 << 10] {
        let free = 8 * chunk as usize;
        let quota = MemoryQuota::new("max_total_queued", 0, None);
        let mut pair = crowded(&quota, chunk);
        pair.submit(1, call(0, free - 2000));
        pair.run();
        assert_eq!(pair.requests.len(), 1, "a session always has room for one copy");
        let held_by = |pair: &mut Pair| {
            let (large, before) = (call(1, 900 << 10), held_memory());
            pair.submit(2, large);
            pair.run();
            held_memory() - before
        };
        let kept = held_by(&mut Setup::default().limits(1 << 20, 2 << 20, chunk, 8).build());
        let dropped = held_by(&mut pair);
        // Besides the request itself, this test's channel has buffers, and some are kept for later
        // use.
        assert!(kept - dropped > 500 << 10, "{kept} and {dropped}");
        let error = pair.error(2);
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::LimitExceeded, false), "{error}");
        assert!(error.message().contains("max_total_queued"), "{error}");
        pair.submit(3, call(2, 100));
        pair.run();
        pair.reply(1, Ok(Value::Null));
        pair.run();
        pair.submit(4, call(0, free - 2000));
        pair.run();
        assert_eq!(pair.requests.keys().copied().collect::<Vec<_>>(), [3, 4]);
        assert!(pair.ended.is_none() && pair.server_error.is_none());
    }
}

/// A tensor takes twice the memory that the client's credit counts for it.
#[test]
fn a_request_counts_for_the_memory_of_its_values() {
    let (device, dtype) = (Device::cpu(), DataType::F32);
    let (shape, strides) = (vec![1; 2], Some(vec![1; 2]));
    let tensor = TensorRef { storage: Handle::from_bits(1), byte_offset: 0, shape, strides, dtype, device };
    let quota = MemoryQuota::new("max_total_queued", 1 << 20, None);
    let mut pair = crowded(&quota, 16 << 10);
    for (id, count) in [(1, 14_000), (2, 6_000)] {
        pair.submit(id, call_with(0, vec![Value::List(vec![tensor.clone().into(); count])]));
        pair.run();
    }
    assert_eq!(pair.error(1).kind(), ErrorKind::LimitExceeded);
    assert_eq!(pair.requests.keys().copied().collect::<Vec<_>>(), [2]);
    pair.reply(2, Ok(Value::Null));
    pair.run();
    assert_eq!(quota.used(), 0);
}

#[test]
fn sessions_share_the_queue_quota_and_return_it() {
    let quota = MemoryQuota::new("max_total_queued", 1 << 20, None);
    let (mut first, mut second) = (crowded(&quota, 16 << 10), crowded(&quota, 16 << 10));
    first.submit(1, call(0, 900 << 10));
    first.run();
    assert_eq!((first.requests.len(), quota.used()), (1, 1 << 20));
    second.submit(1, call(0, 900 << 10));
    second.run();
    assert_eq!(second.error(1).kind(), ErrorKind::LimitExceeded);
    first.reply(1, Ok(Value::Null));
    first.run();
    assert_eq!(quota.used(), 0);
    second.submit(2, call(0, 900 << 10));
    second.run();
    assert_eq!(second.requests.len(), 1);
    // Replies count until they have been sent. One without room becomes an error, and its value is
    // returned.
    let large = || Value::List(vec![Value::Bytes(vec![1; 900 << 10].into()), object(7)]);
    second.client_reads = false;
    second.setup.capacity = 1000;
    second.reply(2, Ok(large()));
    second.run();
    assert!(second.rejected.is_empty() && quota.used() > 0);
    first.submit(2, call(0, 1));
    first.run();
    first.reply(2, Ok(large()));
    first.run();
    assert_eq!((first.error(2).kind(), first.rejected.len()), (ErrorKind::LimitExceeded, 1));
    second.client_reads = true;
    second.setup.capacity = usize::MAX;
    second.run();
    assert!(second.outcomes[&2].is_ok());
    assert_eq!(quota.used(), 0);
    drop((first, second));
}

#[test]
fn a_session_that_ends_returns_its_queue_quota() {
    let quota = MemoryQuota::new("max_total_queued", 1 << 20, None);
    let mut pair = crowded(&quota, 16 << 10);
    pair.submit(1, call(0, 900 << 10));
    pair.run();
    assert!(quota.used() > 0);
    drop(pair);
    assert_eq!(quota.used(), 0);
}
