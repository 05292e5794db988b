//! Replies that were captured from servers of TVM 0.27, and bytes that no server should send.

use bytes::Bytes;
use rpc_core::{DataType, Device};

use super::tests::{hex, put};
use super::*;

/// Largest body of a reply in these tests.
const MAX_BODY: u64 = 1 << 20;

/// Gives bytes to the state machine, at most `step` at a time, and returns its events. Each reply
/// takes the next of `expected`.
fn feed(
    wire: &mut ClientWire,
    mut bytes: &[u8],
    step: usize,
    expected: &[Expected],
) -> Result<Vec<ClientEvent>, WireError> {
    let (mut events, mut expected) = (Vec::new(), expected.iter().copied());
    let mut next = expected.next();
    loop {
        while let Some(event) = wire.poll_event(next)? {
            if matches!(event, ClientEvent::Reply(_)) {
                next = expected.next();
            }
            events.push(event);
        }
        if bytes.is_empty() {
            return Ok(events);
        }
        put(wire.input(), &mut bytes, step);
    }
}

/// Returns the state of a connection on which the server has accepted the hello.
fn accepted() -> ClientWire {
    let mut wire = ClientWire::new(WireLimits::new(MAX_BODY));
    let events = feed(&mut wire, &HelloAnswer::Accepted("server:x1").encode(), 3, &[]).unwrap();
    assert_eq!(events, [ClientEvent::Answer(ServerAnswer::Accepted { key: "server:x1".to_owned() })]);
    wire
}

fn reply_to(bytes: &[u8], expected: Expected) -> Result<Vec<ClientEvent>, WireError> {
    feed(&mut accepted(), bytes, usize::MAX, &[expected])
}

/// Checks that a captured reply is decoded, however it is cut.
fn check_reply(dump: &str, expected: Expected, reply: ServerReply) {
    let bytes = hex(dump);
    for step in [1, 3, usize::MAX] {
        let mut wire = accepted();
        assert_eq!(feed(&mut wire, &bytes, step, &[expected]).unwrap(), [ClientEvent::Reply(reply.clone())]);
        assert!(!wire.is_inside_message());
    }
}

#[test]
fn answers_to_the_hello_are_told_apart() {
    for (bytes, answer) in [
        ("71 f2 0f 00  00 00 00 00", ServerAnswer::Accepted { key: String::new() }),
        ("72 f2 0f 00", ServerAnswer::Duplicate),
        ("73 f2 0f 00", ServerAnswer::Mismatch),
    ] {
        let mut wire = ClientWire::new(WireLimits::default());
        assert_eq!(feed(&mut wire, &hex(bytes), 1, &[]).unwrap(), [ClientEvent::Answer(answer)]);
    }
    for wrong in ["00 00 00 00", "48 54 54 50", "71 f2 0f 00  ff ff ff ff", "71 f2 0f 00  01 10 00 00"] {
        let mut wire = ClientWire::new(WireLimits::default());
        assert!(feed(&mut wire, &hex(wrong), 1, &[]).is_err(), "{wrong}");
    }
}

#[test]
fn captured_replies_are_decoded() {
    let value = |value| ServerReply::Value(value);
    let none = "0c 00 00 00 00 00 00 00  04 00 00 00  01 00 00 00  00 00 00 00";
    check_reply(none, Expected::Value, value(WireValue::None));
    check_reply(
        "14 00 00 00 00 00 00 00  04 00 00 00  01 00 00 00  04 00 00 00  a0 f9 51 13 01 56 00 00",
        Expected::Value,
        value(WireValue::Pointer(0x5601_1351_f9a0)),
    );
    check_reply(
        "20 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00  01 00 00 00  01 00 00 00 00 00 00 00 \
         01 00 00 00  0b 00 00 00 00 00 00 00",
        Expected::Call,
        ServerReply::Call(CallResult::Plain(WireValue::Int(11))),
    );
    check_reply(
        "26 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00  01 00 00 00  0b 00 00 00 00 00 00 00 \
         08 00 00 00  06 00 00 00 00 00 00 00  61 62 63 3a 31 31",
        Expected::Call,
        ServerReply::Call(CallResult::Str("abc:11".into())),
    );
    let header = TensorHeader {
        data: 0x7f01_d800_f980,
        device: Device::cpu(),
        dtype: DataType::F32,
        shape: vec![10],
        byte_offset: 0,
    };
    check_reply(
        "4c 00 00 00 00 00 00 00  04 00 00 00  03 00 00 00  01 00 00 00  46 00 00 00 00 00 00 00 \
         07 00 00 00  80 f9 00 d8 01 7f 00 00  01 00 00 00  00 00 00 00  01 00 00 00  02 20 01 00 \
         0a 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00  04 00 00 00  40 f7 00 d8 01 7f 00 00",
        Expected::Call,
        ServerReply::Call(CallResult::Tensor(header, 0x7f01_d800_f740)),
    );
    check_reply(
        "20 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00  01 00 00 00  44 00 00 00 00 00 00 00 \
         04 00 00 00  40 f8 00 d8 01 7f 00 00",
        Expected::Call,
        ServerReply::Call(CallResult::Object(ResultKind::Function, 0x7f01_d800_f840)),
    );
    check_reply(
        "0c 00 00 00 00 00 00 00  08 00 00 00  00 00 00 00  00 00 80 3f",
        Expected::Data { len: 8 },
        ServerReply::Data(Bytes::from_static(&[0, 0, 0, 0, 0, 0, 0x80, 0x3f])),
    );
    check_reply(
        "17 00 00 00 00 00 00 00  05 00 00 00  01 00 00 00  08 00 00 00  03 00 00 00 00 00 00 00  61 62 63",
        Expected::Call,
        ServerReply::Exception("abc".to_owned()),
    );
}

#[test]
fn all_results_of_calls_survive_both_halves() {
    let results = [
        CallResult::Plain(WireValue::None),
        CallResult::Plain(WireValue::Bool(true)),
        CallResult::Plain(WireValue::Float(0.5)),
        CallResult::Plain(WireValue::DataType(DataType::F32)),
        CallResult::Plain(WireValue::Device(Device::cpu())),
        CallResult::Str("a\0b".into()),
        CallResult::Bytes(Bytes::from_static(b"\0\xff")),
        CallResult::Object(ResultKind::Module, 7),
        CallResult::Object(ResultKind::Shape, 8),
        CallResult::Object(ResultKind::Array, 9),
        CallResult::Object(ResultKind::Map, u64::MAX),
        CallResult::Object(ResultKind::Object, 10),
    ];
    for result in results {
        let events = reply_to(&returned_call(result.clone()), Expected::Call).unwrap();
        assert_eq!(events, [ClientEvent::Reply(ServerReply::Call(result))]);
    }
}

#[test]
fn empty_frames_mean_nothing_and_the_servers_end_needs_no_request() {
    let mut bytes = vec![0; 24];
    bytes.extend(exception("RPCSessionTimeoutError: over"));
    bytes.extend(shutdown());
    let events = feed(&mut accepted(), &bytes, 5, &[]).unwrap();
    assert_eq!(events, [ClientEvent::Unasked("RPCSessionTimeoutError: over".to_owned()), ClientEvent::Shutdown]);
}

#[test]
fn what_is_not_the_asked_reply_ends_the_connection() {
    let none = returned(&[WireValue::None]);
    let data = [&copy_ack_header(4)[..], &[0; 4]].concat();
    assert!(feed(&mut accepted(), &none, usize::MAX, &[]).is_err(), "nothing was asked");
    assert!(reply_to(&none, Expected::Data { len: 4 }).is_err());
    assert!(reply_to(&data, Expected::Value).is_err());
    assert!(reply_to(&data, Expected::Data { len: 5 }).is_err());
    assert!(reply_to(&hex("03 00 00 00 00 00 00 00  04 00 00"), Expected::Value).is_err());
    assert!(reply_to(&hex("04 00 00 00 00 00 00 00  03 00 00 00"), Expected::Value).is_err());
    assert!(reply_to(&hex("05 00 00 00 00 00 00 00  01 00 00 00  00"), Expected::Value).is_err());
    assert!(feed(&mut accepted(), &exception(&"x".repeat(100_000)), usize::MAX, &[]).is_err());
}

/// A reply of wrong values is the matter of its request: the frame says where it ends. A stock
/// client reads wild memory for the first of these.
#[test]
fn a_malformed_result_is_an_error_of_its_own_call() {
    let after = ClientEvent::Reply(ServerReply::Value(WireValue::None));
    for values in [
        vec![],
        vec![WireValue::None],
        vec![WireValue::Int(68), WireValue::None],
        vec![WireValue::Int(1), WireValue::Pointer(3)],
        vec![WireValue::Int(73), WireValue::Pointer(3), WireValue::Pointer(4)],
        vec![WireValue::Int(0), WireValue::None, WireValue::None, WireValue::None],
    ] {
        let bytes = [returned(&values), returned(&[WireValue::None])].concat();
        let events = feed(&mut accepted(), &bytes, 7, &[Expected::Call, Expected::Value]).unwrap();
        assert!(matches!(events[0], ClientEvent::Reply(ServerReply::Unusable(_))), "{values:?}: {events:?}");
        assert_eq!(events[1], after);
    }
}

#[test]
fn large_replies_are_announced_refused_and_passed_over() {
    let large = returned_call(CallResult::Bytes(vec![7; 100_000].into()));
    let len = large.len() as u64 - 12;
    let events = reply_to(&large, Expected::Call).unwrap();
    assert_eq!(events[0], ClientEvent::Announced { len });
    assert!(
        matches!(&events[1], ClientEvent::Reply(ServerReply::Call(CallResult::Bytes(data))) if data.len() == 100_000)
    );
    // Refused: nothing of it is kept, and the next reply is read.
    let mut wire = accepted();
    assert_eq!(feed(&mut wire, &large[..20], 1, &[Expected::Call]).unwrap(), [ClientEvent::Announced { len }]);
    wire.refuse();
    let rest = [&large[20..], &returned(&[WireValue::None])].concat();
    let events = feed(&mut wire, &rest, usize::MAX, &[Expected::Call, Expected::Value]).unwrap();
    let too_large = ClientEvent::Reply(ServerReply::TooLarge { len });
    assert_eq!(events, [too_large, ClientEvent::Reply(ServerReply::Value(WireValue::None))]);
    // Beyond the limits, without an announcement. No memory is reserved for a length alone.
    for expected in [Expected::Call, Expected::Value] {
        let mut header = (u64::MAX / 2).to_le_bytes().to_vec();
        header.extend(FrameCode::Return.number().to_le_bytes());
        let mut wire = accepted();
        assert_eq!(feed(&mut wire, &header, usize::MAX, &[expected]).unwrap(), []);
        assert!(wire.input().get_ref().capacity() < 1 << 16);
    }
}

#[test]
fn frames_in_two_parts_are_those_in_one() {
    let to = TensorHeader { data: 5, device: Device::cpu(), dtype: DataType::U8, shape: vec![3], byte_offset: 8 };
    let parts = [Request::encode_copy_to_header(&to, 3), b"abc".to_vec()].concat();
    assert_eq!(parts, Request::encode_copy_to(&to, b"abc"));
    let parts = [Request::encode_call_of_bytes(9, vec!["x".into()], 3), b"abc".to_vec()].concat();
    let args = vec!["x".into(), WireValue::Bytes(Bytes::from_static(b"abc"))];
    assert_eq!(parts, Request::Call { function: 9, args }.encode());
}

/// Changes single bytes of replies in all places, and cuts them. Only errors may come of it.
#[test]
fn changed_bytes_never_panic() {
    let tensor =
        TensorHeader { data: 5, device: Device::cpu(), dtype: DataType::U8, shape: vec![3, 4], byte_offset: 8 };
    let replies = [
        returned_call(CallResult::Tensor(tensor, 7)),
        returned_call(CallResult::Str("text".into())),
        exception("text"),
        [&copy_ack_header(4)[..], &[0; 4]].concat(),
    ];
    for reply in replies {
        for at in 0..reply.len() {
            for byte in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = reply.clone();
                changed[at] = byte;
                for expected in [Expected::Call, Expected::Value, Expected::Data { len: 4 }] {
                    let mut wire = accepted();
                    let _ = feed(&mut wire, &changed, usize::MAX, &[expected, expected]);
                    assert!(wire.input().get_ref().capacity() <= 2 * MAX_BODY as usize);
                }
            }
        }
    }
}

#[test]
fn a_large_body_is_filled_without_the_state_machine() {
    let data: Vec<u8> = (0..100_000_u32).map(|at| at as u8).collect();
    let len = data.len() as u64;
    let reply = [&copy_ack_header(len)[..], &data].concat();
    // What follows is a reply of its own.
    let next = returned(&[WireValue::Int(7)]);
    for read_before in [12, 5000] {
        let mut wire = accepted();
        let expected = Some(Expected::Data { len });
        let mut rest = &reply[..read_before];
        while !rest.is_empty() {
            put(wire.input(), &mut rest, usize::MAX);
        }
        assert!(wire.take_large().is_none(), "nothing is known of the body");
        assert_eq!(wire.poll_event(expected).unwrap(), Some(ClientEvent::Announced { len }));
        for piece in reply[read_before..].chunks(30_000) {
            assert!(wire.poll_event(expected).unwrap().is_none() && wire.is_inside_message());
            let mut body = wire.take_large().unwrap();
            body.unfilled()[..piece.len()].copy_from_slice(piece);
            body.advance(piece.len());
            wire.put_large(body);
        }
        assert!(wire.take_large().is_none(), "it is complete");
        let answered = ClientEvent::Reply(ServerReply::Data(data.clone().into()));
        assert_eq!(wire.poll_event(expected).unwrap(), Some(answered));
        let answered = [ClientEvent::Reply(ServerReply::Value(WireValue::Int(7)))];
        assert_eq!(feed(&mut wire, &next, usize::MAX, &[Expected::Value]).unwrap(), answered);
    }
    // A reply that is refused has no place.
    let mut wire = accepted();
    put(wire.input(), &mut &reply[..12], usize::MAX);
    assert!(wire.poll_event(Some(Expected::Data { len })).unwrap().is_some());
    wire.refuse();
    assert!(wire.take_large().is_none());
}
