//! Tests with peers that break the protocol: each gets an error that names the violation, and no
//! side panics. What peers can make a side keep is in `memory_limits.rs`.

use std::time::Instant;

use crate::pair::{Arrived, Pair, Setup, call, frame};
use crate::peak_memory::peak_memory_of;
use bytes::{Bytes, BytesMut};
use rpc_core::proto::{FrameHeader, Kind, ServerEvent, decode_request};
use rpc_core::{ErrorKind, Lane, RpcError, Value};

pub(crate) fn setup() -> Setup {
    Setup::default().limits(256 << 10, 512 << 10, 64 << 10, 8)
}

/// Returns a pair whose client has made one request, with id 1.
pub(crate) fn pair_with_a_request() -> Pair {
    let mut pair = setup().build();
    pair.submit(1, call(0, 10));
    pair.run();
    pair
}

pub(crate) fn header(kind: u8, flags: u8, reserved: u16, body: u32, payload: u32) -> Vec<u8> {
    let mut bytes =
        FrameHeader { body_len: body, payload_len: payload, ..FrameHeader::control(Kind::Ping, 0) }.encode();
    bytes[20] = kind;
    bytes[21] = flags;
    bytes[22..].copy_from_slice(&reserved.to_le_bytes());
    bytes.to_vec()
}

/// Passes bytes to the server as its driver does: it acts on each event before the next message.
pub(crate) fn feed(pair: &mut Pair, bytes: &[u8]) -> Result<Vec<ServerEvent>, RpcError> {
    let (mut input, mut events) = (BytesMut::from(bytes), Vec::new());
    while pair.server.handle_input(&mut input, pair.now, &mut |_, _, _, _| None)? {
        events.extend(std::iter::from_fn(|| pair.server.poll_event()));
    }
    assert!(input.is_empty());
    Ok(events)
}

/// Returns frames that no side may send.
fn bad_frames() -> Vec<(&'static str, Vec<u8>)> {
    let data = frame(Kind::Request, 9, 0, true, &[0x93], &[]);
    vec![
        ("kind 0", header(0, 0, 0, 0, 0)),
        ("kind 19", header(19, 0, 0, 0, 0)),
        ("kind 255", header(255, 0, 0, 0, 0)),
        ("flag 2", header(32, 2, 0, 0, 0)),
        ("all flags", header(16, 255, 0, 0, 0)),
        ("more on a ping", header(32, 1, 0, 0, 0)),
        ("more on a credit", header(36, 1, 0, 12, 0)),
        ("more on a free", header(35, 1, 0, 8, 0)),
        ("more on a close", header(38, 1, 0, 0, 0)),
        ("reserved bits", header(32, 0, 1, 0, 0)),
        ("high reserved bits", header(16, 0, 0x8000, 0, 0)),
        ("a long body", header(16, 0, 0, 65_537, 0)),
        ("a body of 4 GiB", header(17, 1, 0, u32::MAX, 0)),
        ("a long payload", header(16, 0, 0, 0, (64 << 10) + 1)),
        ("a payload of 4 GiB", header(17, 0, 0, 10, u32::MAX)),
        ("a payload on a ping", header(32, 0, 0, 0, 1)),
        ("a payload on a free", header(35, 0, 0, 8, 8)),
        ("a hello", frame(Kind::Hello, 0, 0, false, &[0x80], &[])),
        ("an accept", frame(Kind::Accept, 0, 0, false, &[], &[])),
        ("a reject", frame(Kind::Reject, 0, 0, false, &[], &[])),
        ("a proof", frame(Kind::Proof, 0, 0, false, &[1], &[])),
        ("short credit", frame(Kind::Credit, 0, 0, false, &[0; 11], &[])),
        ("long credit", frame(Kind::Credit, 0, 0, false, &[0; 13], &[])),
        ("empty credit", frame(Kind::Credit, 0, 0, false, &[], &[])),
        ("a message of two kinds", [data, frame(Kind::Error, 9, 0, false, &[], &[])].concat()),
    ]
}

pub(crate) fn request(id: u64, body: &[u8], payload: &[u8]) -> Vec<u8> {
    frame(Kind::Request, id, 0, false, body, payload)
}

fn check_server(name: &str, bytes: &[u8]) {
    let mut pair = setup().build();
    let peak = peak_memory_of(|| {
        pair.inject_to_server(bytes);
        pair.run();
    });
    let error = pair.server_error.as_ref().unwrap_or_else(|| panic!("{name} was taken"));
    assert_eq!(error.kind(), ErrorKind::Protocol, "{name}: {error}");
    assert!(peak < 4 << 20, "{name} took {peak} bytes");
    // The client is told the reason, in the last frame.
    let told = pair.ended.as_ref().unwrap();
    assert_eq!((told.kind(), told.hop()), (ErrorKind::Protocol, 1), "{name}: {told}");
    assert_eq!(told.message(), error.message());
    assert_eq!(pair.server_frames().last().unwrap().kind(), Kind::Close);
}

fn check_client(name: &str, bytes: &[u8]) {
    let mut pair = pair_with_a_request();
    let peak = peak_memory_of(|| {
        pair.inject_to_client(bytes);
        pair.run();
    });
    let error = pair.ended.as_ref().unwrap_or_else(|| panic!("{name} was taken"));
    assert_eq!((error.kind(), error.hop()), (ErrorKind::Protocol, 0), "{name}: {error}");
    assert!(peak < 4 << 20, "{name} took {peak} bytes");
    assert_eq!(pair.error(1).kind(), ErrorKind::Protocol, "{name}");
    assert!(pair.error(1).request_may_have_run(), "{name}");
    let told = pair.client_frames().pop().unwrap();
    assert_eq!(told.kind(), Kind::Close, "{name}");
    assert!(!told.body.is_empty());
    assert_eq!(pair.arrived.last(), Some(&Arrived::Close), "{name}");
}

#[test]
fn frames_that_no_side_may_send_end_the_session() {
    for (name, bytes) in bad_frames() {
        check_server(name, &bytes);
        check_client(name, &bytes);
    }
}

#[test]
fn frames_that_a_client_may_not_send_end_the_session() {
    let good = |id| request(id, &[0x93, 7, 0xc0, 0x91, 1], &[]);
    let reply = frame(Kind::Reply, 1, 0, false, &[0xc0], &[]);
    let deep = [&[0x93, 2, 0xc0, 0x92, 1][..], &[0x91; 200]].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a reply", reply),
        ("an error", frame(Kind::Error, 1, 0, false, &[0x80], &[])),
        ("a go-away", frame(Kind::GoAway, 0, 0, false, &[], &[])),
        ("a number used twice", [good(5), good(5)].concat()),
        ("an empty request", request(1, &[], &[])),
        ("no array", request(1, &[0xc0], &[])),
        ("an array of four", request(1, &[0x94, 1, 0xc0, 0x91, 0xa0, 0xc0], &[])),
        ("too few fields", request(1, &[0x93, 1, 0xc0, 0x90], &[])),
        ("too many fields", request(1, &[0x93, 1, 0xc0, 0x92, 0xa0, 0xa0], &[])),
        ("an end inside of a string", request(1, &[0x93, 1, 0xc0, 0x91, 0xa5, b'a'], &[])),
        ("a string of 4 GiB", request(1, &[0x93, 1, 0xc0, 0x91, 0xdb, 255, 255, 255, 255], &[])),
        ("text that is not UTF-8", request(1, &[0x93, 1, 0xc0, 0x91, 0xa2, 0xff, 0xfe], &[])),
        ("bytes left over", request(1, &[0x93, 1, 0xc0, 0x91, 0xa0, 0xa0], &[])),
        ("payload left over", request(1, &[0x93, 1, 0xc0, 0x91, 0xa0], &[0])),
        ("payload missing", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xd7, 1, 9, 0, 0, 0, 0, 0, 0, 0], &[0; 8])),
        (
            "an endless payload",
            request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xd7, 1, 255, 255, 255, 255, 255, 255, 255, 255], &[0; 8]),
        ),
        ("nesting", request(1, &deep, &[])),
        ("4 billion arguments", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0xdd, 255, 255, 255, 255, 0xc0], &[])),
        ("4 billion extras", request(1, &[0x93, 2, 0xdf, 255, 255, 255, 255, 0xa1], &[])),
        ("nested extras", request(1, &[&[0x93, 2, 0x81, 0xa1, b'x'][..], &[0x91; 200]].concat(), &[])),
        ("a list of 4 billion", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xdd, 255, 255, 255, 255], &[])),
        ("the marker that means nothing", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xc1], &[])),
        ("a map of 4 billion", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xdf, 255, 255, 255, 255], &[])),
        ("a key without a value", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0x81, 0xc0], &[])),
        ("keys within keys", request(1, &[&[0x93, 2, 0xc0, 0x92, 1, 0x91][..], &[0x81; 60_000]].concat(), &[])),
        ("bin among the values", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xc4, 1, 0], &[])),
        ("an unknown extension", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xd4, 99, 0], &[])),
        ("a shape of 9 bytes", request(1, &[0x93, 2, 0xc0, 0x92, 1, 0x91, 0xc7, 9, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[])),
        ("a tensor of 255 dimensions", {
            let mut body = vec![0x93, 2, 0xc0, 0x92, 1, 0x91, 0xc7, 30, 9];
            body.extend_from_slice(&[0; 28]);
            body.extend_from_slice(&[255, 0]);
            request(1, &body, &[])
        }),
        ("half a handle to free", frame(Kind::Free, 0, 0, false, &[0; 12], &[])),
    ];
    for (name, bytes) in cases {
        check_server(name, &bytes);
    }
}

#[test]
fn frames_that_a_server_may_not_send_end_the_session() {
    let reply = |id, body: &[u8]| frame(Kind::Reply, id, 0, false, body, &[]);
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("a request", frame(Kind::Request, 1, 0, false, &[0x93, 7, 0xc0, 0x91, 1], &[])),
        ("a cancellation", frame(Kind::Cancel, 1, 0, false, &[], &[])),
        ("a free", frame(Kind::Free, 0, 0, false, &[0; 8], &[])),
        ("a reply to no request", reply(2, &[0xc0])),
        ("an error for no request", frame(Kind::Error, 0, 0, false, &[0x80], &[])),
        ("the beginning of such a reply", frame(Kind::Reply, 2, 0, true, &[0xc0], &[])),
        (
            "a large reply to no request",
            frame(Kind::Reply, 2, 0, false, &[0xd7, 1, 0, 0, 1, 0, 0, 0, 0, 0], &[0; 65_536]),
        ),
        ("an empty reply", reply(1, &[])),
        ("two values", reply(1, &[0xc0, 0xc0])),
        ("text that is not UTF-8", reply(1, &[0xa1, 0xff])),
        ("nesting", reply(1, &[0x91; 1000])),
        ("a number out of range", reply(1, &[0xcf, 255, 255, 255, 255, 255, 255, 255, 255])),
        ("an empty error", frame(Kind::Error, 1, 0, false, &[], &[])),
        ("an error without a kind", frame(Kind::Error, 1, 0, false, &[0x80], &[])),
        ("a nested error", frame(Kind::Error, 1, 0, false, &[&[0x81, 0xa1, b'x'][..], &[0x91; 60_000]].concat(), &[])),
        ("text that is no error", frame(Kind::Error, 1, 0, false, b"\xa5error", &[])),
    ];
    for (name, bytes) in cases {
        check_client(name, &bytes);
    }
    // The second of two replies to one request.
    let mut pair = pair_with_a_request();
    pair.inject_to_client(&[reply(1, &[5]), reply(1, &[6])].concat());
    pair.run();
    assert_eq!(pair.outcomes[&1], Ok(Value::Int(5)));
    assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::Protocol);
}

#[test]
fn malformed_close_and_go_away_frames_still_count() {
    for body in [&[0xc1][..], &[0x80], &[&[0x81, 0xa1, b'x'][..], &[0x91; 60_000]].concat()] {
        let mut pair = pair_with_a_request();
        pair.inject_to_client(&frame(Kind::GoAway, 0, 0, false, body, &[]));
        pair.run();
        assert_eq!(pair.going_away.as_ref().unwrap().kind(), ErrorKind::Draining);
        assert!(pair.ended.is_none());
        pair.inject_to_client(&frame(Kind::Close, 0, 0, false, body, &[]));
        pair.run();
        assert_eq!(pair.ended.as_ref().unwrap().kind(), ErrorKind::Closed);
        let mut pair = pair_with_a_request();
        pair.inject_to_server(&frame(Kind::Close, 0, 0, false, body, &[]));
        pair.run();
        assert_eq!(pair.arrived.last(), Some(&Arrived::Close));
    }
}

#[test]
fn an_unknown_operation_fails_only_its_request() {
    let mut pair = pair_with_a_request();
    pair.inject_to_server(&request(5, &[0x93, 99, 0xc0, 0x90], &[]));
    pair.inject_to_server(&request(6, &[0x93, 8, 0xc0, 0x92, 0xd7, 4, 1, 0, 0, 0, 0, 0, 0, 0, 0xcd, 255, 255], &[]));
    pair.inject_to_server(&request(7, &[0x93, 99, 0xc0, 0x91, 0xd4, 99, 0], &[1, 2, 3]));
    pair.client_reads = false;
    pair.run();
    assert!(pair.server_error.is_none());
    let errors: Vec<_> = pair.server_frames().iter().map(|frame| (frame.kind(), frame.id())).collect();
    assert_eq!(errors, [(Kind::Error, 5), (Kind::Error, 6), (Kind::Error, 7)]);
    assert_eq!(pair.server.in_flight(), 1);
    // Unknown extras are skipped.
    let mut pair = pair_with_a_request();
    pair.inject_to_server(&request(5, &[0x93, 7, 0x82, 0xa1, b'x', 0x92, 1, 2, 0xa1, b'd', 9, 0x91, 1], &[]));
    pair.run();
    assert!(pair.requests[&5].deadline.is_some());
}

#[test]
fn extreme_deadlines_do_no_harm() {
    for left in [[0; 8], [255; 8]] {
        let mut body = vec![0x93, 7, 0x81, 0xa1, b'd', 0xcf];
        body.extend_from_slice(&left);
        body.extend_from_slice(&[0x91, 1]);
        let request = decode_request(Lane(0), &body, Bytes::new(), Instant::now()).unwrap();
        assert!(left[0] == 255 || request.deadline.is_some());
    }
}

#[test]
fn more_requests_than_there_is_credit_for_end_the_session() {
    let mut input = Vec::new();
    (1..=9).for_each(|id| input.extend(request(id, &[0x93, 7, 0xc0, 0x91, 1], &[])));
    check_server("nine requests", &input);
    let big = |id| {
        let mut body = vec![0x93, 2, 0xc0, 0x92, 1, 0x91, 0xd7, 1];
        body.extend_from_slice(&50_000_u64.to_le_bytes());
        request(id, &body, &[0; 50_000])
    };
    let mut setup = setup();
    setup.server.max_requests = 100;
    let mut pair = setup.build();
    (1..=20).for_each(|id| pair.inject_to_server(&big(id)));
    pair.run();
    assert!(pair.server_error.as_ref().unwrap().message().contains("in flight, above the credit"));
    assert!(pair.requests.len() < 13);
}

/// Regression: a ping between the frames of a message with the ping's number was taken for one of
/// them.
#[test]
fn control_frames_may_have_the_number_of_a_partial_message() {
    let mut pair = setup().build();
    let (body, payload) = rpc_core::proto::encode_request(&call(0, 100), pair.now);
    let payload = payload.concat();
    let (first, second) = payload.split_at(40);
    let mut bytes = frame(Kind::Request, 7, 0, true, &body, first);
    for kind in [Kind::Ping, Kind::Pong, Kind::Cancel] {
        bytes.extend_from_slice(&frame(kind, 7, 0, false, &[], &[]));
    }
    bytes.extend_from_slice(&frame(Kind::Request, 7, 0, false, &[], second));
    pair.inject_to_server(&bytes);
    pair.run();
    assert!(pair.server_error.is_none(), "{:?}", pair.server_error);
    assert_eq!(pair.arrived, [Arrived::Cancel(7), Arrived::Request(7)]);
}

/// Regression: a message took the lane of its last frame.
#[test]
fn the_frames_of_a_message_name_one_lane() {
    let mut pair = setup().build();
    let (body, payload) = rpc_core::proto::encode_request(&call(0, 100), pair.now);
    let first = frame(Kind::Request, 7, 1, true, &body, &[]);
    let second = frame(Kind::Request, 7, 2, false, &[], &payload.concat());
    let error = feed(&mut pair, &[first, second].concat()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(error.message().contains("lanes"), "{error}");
}

#[test]
fn endless_credit_does_not_overflow() {
    let mut pair = pair_with_a_request();
    let credit = frame(Kind::Credit, 0, 0, false, &[255; 12], &[]);
    for _ in 0..3 {
        pair.inject_to_client(&credit);
        pair.inject_to_server(&credit);
    }
    pair.run();
    pair.reply(1, Ok(Value::Null));
    pair.submit(2, call(0, 100_000));
    pair.run();
    pair.reply(2, Ok(Value::Bytes(vec![0; 100_000].into())));
    pair.run();
    assert!(pair.outcomes[&2].is_ok());
    assert!(pair.ended.is_none() && pair.server_error.is_none());
}

#[test]
fn unexpected_pongs_and_cancels_are_ignored() {
    let mut pair = pair_with_a_request();
    for id in [0, 1, u64::MAX] {
        pair.inject_to_client(&frame(Kind::Pong, id, 0, false, &[], &[]));
        pair.inject_to_server(&frame(Kind::Pong, id, 0, false, &[], &[]));
    }
    pair.inject_to_server(&frame(Kind::Cancel, 77, 0, false, &[], &[]));
    pair.inject_to_server(&frame(Kind::Free, 0, 0, false, &[], &[]));
    pair.run();
    assert_eq!(pair.arrived[1..], [Arrived::Cancel(77), Arrived::Release(vec![])]);
    assert!(pair.ended.is_none() && pair.server_error.is_none());
}

#[test]
fn a_reply_to_a_request_that_is_still_being_sent_does_no_harm() {
    let mut pair = Setup { capacity: 4 << 10, ..setup() }.build();
    pair.server_reads = false;
    pair.submit(1, call(0, 200 << 10));
    pair.run();
    pair.inject_to_client(&frame(Kind::Reply, 1, 0, false, &[7], &[]));
    pair.run();
    assert_eq!(pair.outcomes[&1], Ok(Value::Int(7)));
    pair.client.cancel(1);
    pair.server_reads = true;
    pair.run();
    assert_eq!(pair.requests_in_order(), [1]);
}

#[test]
fn errors_of_a_peer_keep_their_facts_and_unknown_kinds() {
    let mut pair = pair_with_a_request();
    pair.inject_to_client(&frame(
        Kind::Error,
        1,
        0,
        false,
        b"\x83\xa4kind\xcd\x03\xe7\xa7message\xa3new\xa6colour\xa4blue",
        &[],
    ));
    pair.run();
    assert_eq!(pair.error(1).kind(), ErrorKind::Unknown(999));
    assert_eq!((pair.error(1).message(), pair.error(1).hop()), ("new", 1));
    assert!(pair.ended.is_none());
}

#[test]
fn a_protocol_error_overtakes_queued_data() {
    let mut pair = Setup::default().limits(8 << 20, 16 << 20, 64 << 10, 8).build();
    pair.submit(1, call(0, 1));
    pair.run();
    pair.client_reads = false;
    pair.setup.capacity = 1_000;
    pair.reply(1, Ok(Value::Bytes(vec![0; 6 << 20].into())));
    pair.run();
    pair.server.close(Some(&RpcError::new(ErrorKind::Protocol, "broken")));
    pair.setup.capacity = usize::MAX;
    pair.client_reads = true;
    pair.run();
    assert_eq!(pair.ended.as_ref().unwrap().message(), "broken");
    assert_eq!(pair.error(1).message(), "broken");
}
