//! Tests of the message encoding: golden bytes and round trips.

use super::*;
use crate::dlpack::{DataType, Device};
use crate::handle::{Handle, PipeId};
use crate::proto::codec::{MAX_VALUES, decode_value, encode_value};
use crate::value::{Packed, Reference, TensorRef};
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn tensor() -> TensorRef {
    TensorRef {
        storage: Handle::from_bits(0x0102),
        byte_offset: 8,
        shape: vec![2, 3],
        strides: None,
        dtype: DataType::F32,
        device: Device::cpu(),
    }
}

const TENSOR: &str =
    "c72e09 0201000000000000 0800000000000000 02200100 01000000 00000000 02 00 0200000000000000 0300000000000000";

fn check(operation: Operation, golden: &str, payload_len: usize) {
    let now = Instant::now();
    let request = Request::new(operation);
    let (body, payload) = encode_request(&request, now);
    assert_eq!(hex(&body), golden.replace(' ', ""), "{request:?}");
    let payload = Bytes::from(payload.concat());
    assert_eq!(payload.len(), payload_len);
    let back = decode_request(request.lane, &body, payload, now).unwrap();
    assert_eq!(format!("{back:?}"), format!("{request:?}"));
}

/// Golden bytes of each message: peers written from the specification rely on them.
#[test]
fn golden_requests() {
    let function = Handle::from_bits(0xfeed);
    check(Operation::GetFunction { name: "add".into() }, "93 01 c0 91 a3616464", 0);
    let args = vec![Value::Int(1), Value::Int(-1), Value::Float(1.0), Value::Bytes(Bytes::from_static(b"xyz"))];
    check(
        Operation::Call { function, args },
        "93 02 c0 92 cdfeed 94 01 ff cb3ff0000000000000 d701 0300000000000000",
        3,
    );
    check(
        Operation::Alloc {
            device: Device::cuda(1),
            dtype: DataType::F16,
            shape: vec![4],
            scope: Some("global".into()),
            alignment: 0,
        },
        "93 03 c0 94 d704 02000000 01000000 d603 02100100 d702 0400000000000000 a6676c6f62616c",
        0,
    );
    check(
        Operation::Write { to: tensor().into(), offset: 300, data: Bytes::from_static(b"ab") },
        &format!("93 04 c0 93 {TENSOR} cd012c d701 0200000000000000"),
        2,
    );
    check(
        Operation::Read { from: tensor().into(), offset: 0, len: 24, into: None },
        &format!("93 05 c0 93 {TENSOR} 00 18"),
        0,
    );
    check(Operation::Copy { from: tensor().into(), to: tensor().into() }, &format!("93 06 c0 92 {TENSOR} {TENSOR}"), 0);
    check(Operation::Free { handle: function }, "93 07 c0 91 cdfeed", 0);
    check(
        Operation::Attribute { device: Device::cpu(), attribute: DeviceAttribute::Exists },
        "93 08 c0 92 d704 01000000 00000000 00",
        0,
    );
    check(Operation::CreateStream { device: Device::cpu() }, "93 09 c0 91 d704 01000000 00000000", 0);
    check(
        Operation::SetStream { device: Device::cpu(), stream: Some(function) },
        "93 0a c0 92 d704 01000000 00000000 cdfeed",
        0,
    );
    check(Operation::StreamWait { device: Device::cpu(), stream: None }, "93 0b c0 92 d704 01000000 00000000 c0", 0);
    check(
        Operation::Alloc { device: Device::cpu(), dtype: DataType::U8, shape: vec![4], scope: None, alignment: 4096 },
        "93 0f c0 95 d704 01000000 00000000 d603 01080100 d702 0400000000000000 c0 cd1000",
        0,
    );
    check(
        Operation::StreamWaitFor {
            device: Device::cuda(1),
            stream: None,
            other_device: Device::cpu(),
            other: Some(function),
        },
        "93 0e c0 94 d704 02000000 01000000 c0 d704 01000000 00000000 cdfeed",
        0,
    );
    let pipe = PipeId::new(7).handle();
    check(
        Operation::Call { function, args: vec![Value::Object(Reference::Pipe(pipe))] },
        "93 02 c0 92 cdfeed 91 d70a 070000000000ffff",
        0,
    );
    check(Operation::Fetch { handle: pipe }, "93 10 c0 91 cfffff000000000007", 0);
    check(Operation::LoadModule { path: "m.so".into(), loader: None }, "93 0c c0 92 a46d2e736f c0", 0);
    check(Operation::ModuleFunction { module: function, name: "f".into() }, "93 0d c0 92 cdfeed a166", 0);
}

#[test]
fn golden_deadline_travels_as_time_remaining() {
    let now = Instant::now();
    let mut request = Request::new(Operation::GetFunction { name: "f".into() });
    request.deadline = Some(now + Duration::from_millis(2));
    let (body, _) = encode_request(&request, now);
    assert_eq!(hex(&body), "93 01 81 a164 cd07d0 91 a166".replace(' ', ""));
    let later = now + Duration::from_secs(100);
    let back = decode_request(Lane::DEFAULT, &body, Bytes::new(), later).unwrap();
    assert_eq!(back.deadline, Some(later + Duration::from_millis(2)));
}

#[test]
fn golden_result_that_is_kept_is_an_extra() {
    let now = Instant::now();
    let mut request = Request::new(Operation::GetFunction { name: "f".into() });
    request.pipe = Some(PipeId::new(7));
    let (body, _) = encode_request(&request, now);
    assert_eq!(hex(&body), "93 01 81 a170 cfffff000000000007 91 a166".replace(' ', ""));
    let back = decode_request(Lane::DEFAULT, &body, Bytes::new(), now).unwrap();
    assert_eq!((back.pipe, back.deadline), (request.pipe, None));
    request.deadline = Some(now + Duration::from_millis(2));
    let (body, _) = encode_request(&request, now);
    assert_eq!(hex(&body), "93 01 82 a164 cd07d0 a170 cfffff000000000007 91 a166".replace(' ', ""));
    let back = decode_request(Lane::DEFAULT, &body, Bytes::new(), now).unwrap();
    assert_eq!((back.pipe, back.deadline), (request.pipe, request.deadline));
    // A handle that is not the client's to choose, and no handle.
    for extra in ["cffffe000000000007", "07", "c0"] {
        let body = unhex(&format!("93 01 81 a170 {extra} 91 a166"));
        let error = decode_request(Lane::DEFAULT, &body, Bytes::new(), now).unwrap_err();
        assert_eq!(RpcError::from(error).kind(), ErrorKind::Protocol, "{extra}");
    }
}

#[test]
fn a_write_whose_end_is_awaited_is_not_received_in_place() {
    let now = Instant::now();
    let mut request =
        Request::new(Operation::Write { to: tensor().into(), offset: 0, data: Bytes::from_static(b"ab") });
    assert!(peek_write(&encode_request(&request, now).0, now).is_some());
    request.pipe = Some(PipeId::new(7));
    assert_eq!(peek_write(&encode_request(&request, now).0, now), None);
}

const TRACED: &str = "94 01 c0 91 a166 c419 0af7651916cd43dd8448eb211c80319c b7ad6b7169203331 01";

fn unhex(text: &str) -> Vec<u8> {
    let text = text.replace(' ', "");
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn golden_trace_context_is_a_fourth_element() {
    let now = Instant::now();
    let mut request = Request::new(Operation::GetFunction { name: "f".into() });
    request.trace = Some("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01".parse().unwrap());
    let (body, _) = encode_request(&request, now);
    assert_eq!(hex(&body), TRACED.replace(' ', ""));
    let back = decode_request(Lane::DEFAULT, &body, Bytes::new(), now).unwrap();
    assert_eq!((back.trace, back.deadline), (request.trace, None));
    let longer_form = TRACED.replace("c419", "c50019");
    let back = decode_request(Lane::DEFAULT, &unhex(&longer_form), Bytes::new(), now).unwrap();
    assert_eq!(back.trace, request.trace);
}

#[test]
fn a_malformed_trace_context_is_a_malformed_body() {
    let now = Instant::now();
    let zero = |hex: &str| TRACED.replace(hex, &"0".repeat(hex.len()));
    for (body, expected) in [
        (TRACED.replacen("94", "93", 1), CodecError::Trailing(27)),
        (TRACED.replacen("94", "95", 1) + "c0", CodecError::OutOfRange),
        (TRACED.replace("c419", "c418"), CodecError::OutOfRange),
        (TRACED.replace("c419", "c419 00"), CodecError::Trailing(1)),
        (TRACED.replace("c419", "c6ffffffff"), CodecError::OutOfRange),
        (TRACED.replace("c419", "b9"), CodecError::Unexpected(0xb9)),
        (zero("0af7651916cd43dd8448eb211c80319c"), CodecError::OutOfRange),
        (zero("b7ad6b7169203331"), CodecError::OutOfRange),
        (TRACED.trim_end_matches(" 01").to_owned(), CodecError::Truncated),
        ("94 01 c0 91 a166".to_owned(), CodecError::Truncated),
        ("94 01 c0 91 a166 c0".to_owned(), CodecError::Unexpected(0xc0)),
    ] {
        let error = decode_request(Lane::DEFAULT, &unhex(&body), Bytes::new(), now).unwrap_err();
        assert_eq!(error, expected, "{body}");
        assert_eq!(RpcError::from(error).kind(), ErrorKind::Protocol);
    }
}

#[test]
fn a_write_can_be_received_in_place_with_a_trace_context_too() {
    let now = Instant::now();
    let mut request =
        Request::new(Operation::Write { to: tensor().into(), offset: 300, data: Bytes::from_static(b"ab") });
    let plain = peek_write(&encode_request(&request, now).0, now);
    assert_eq!(plain, Some((tensor(), 300, 2)));
    request.trace = crate::TraceContext::new([1; 16], [2; 8], 0);
    let (mut body, _) = encode_request(&request, now);
    assert_eq!(peek_write(&body, now), plain);
    body.pop();
    assert_eq!(peek_write(&body, now), None);
}

#[test]
fn golden_replies() {
    let cases = [
        (Value::Null, "c0"),
        (Value::Bool(true), "c3"),
        (Value::Str("hé\0".into()), "a4 68c3a900"),
        (Value::List(vec![Value::Int(1000), Value::Null]), "92 cd03e8 c0"),
        (Value::Map(vec![]), "80"),
        (
            Value::Map(vec![
                ("a".into(), 1.into()),
                (Value::Null, Value::Object(Reference::Object(Handle::from_bits(1)))),
            ]),
            "82 a161 01 c0 d708 0100000000000000",
        ),
        (Value::Shape(vec![]), "c70002"),
        (Value::Packed(Packed::encode(&7).unwrap()), "d405 07"),
        (Value::Object(Reference::Function(Handle::from_bits(1))), "d706 0100000000000000"),
        (Value::Object(Reference::Module(Handle::from_bits(1))), "d707 0100000000000000"),
        (Value::Object(Reference::Object(Handle::from_bits(1))), "d708 0100000000000000"),
        (tensor().into(), TENSOR),
    ];
    for (value, golden) in cases {
        let (body, payload, is_error) = encode_reply(&Ok(value.clone()));
        assert_eq!(hex(&body), golden.replace(' ', ""), "{value:?}");
        assert_eq!(decode_reply(is_error, &body, payload.concat().into()).unwrap(), Ok(value));
    }
}

#[test]
fn an_unknown_operation_is_told_apart_from_garbage() {
    let now = Instant::now();
    let error = decode_request(Lane::DEFAULT, &[0x93, 99, 0xc0, 0x90], Bytes::new(), now).unwrap_err();
    assert_eq!(error, CodecError::UnknownOperation(99));
    assert_eq!(RpcError::from(error).kind(), ErrorKind::Unsupported);
    let error = decode_request(Lane::DEFAULT, &[0x93, 0xc1], Bytes::new(), now).unwrap_err();
    assert_eq!(RpcError::from(error).kind(), ErrorKind::Protocol);
}

#[test]
fn extras_that_are_not_known_are_skipped() {
    let body = [0x93, 1, 0x82, 0xa1, b'z', 0x91, 0x05, 0xa1, b'd', 0x05, 0x91, 0xa1, b'f'];
    let now = Instant::now();
    let request = decode_request(Lane::DEFAULT, &body, Bytes::new(), now).unwrap();
    assert_eq!(request.deadline, Some(now + Duration::from_micros(5)));
}

#[test]
fn nesting_beyond_the_limit_is_refused() {
    let mut body = vec![0x91; crate::value::MAX_DEPTH + 1];
    body.push(0xc0);
    assert_eq!(decode_value(&body, Bytes::new()), Err(CodecError::TooDeep));
    assert!(decode_value(&body[1..], Bytes::new()).is_ok());
    assert!(decode_value(&vec![0x91; 10_000_000], Bytes::new()).is_err());
    // Keys count towards the nesting depth, as values do.
    for (deeper, behind) in [(&[0x81, 0xc0][..], 0), (&[0x81], crate::value::MAX_DEPTH + 1)] {
        let mut body = deeper.repeat(crate::value::MAX_DEPTH + 1);
        body.extend(vec![0xc0; 1 + behind]);
        assert_eq!(decode_value(&body, Bytes::new()), Err(CodecError::TooDeep));
        body.truncate(body.len() - behind.min(1));
        assert!(decode_value(&body[deeper.len()..], Bytes::new()).is_ok());
    }
}

#[test]
fn values_nested_too_deeply_are_not_sent() {
    let nest = |depth, wrap: fn(Value) -> Value| (0..depth).fold(Value::Null, |inner, _| wrap(inner));
    let wraps: [fn(Value) -> Value; 3] = [
        |inner| Value::List(vec![inner]),
        |inner| Value::Map(vec![(inner, Value::Null)]),
        |inner| Value::Map(vec![(Value::Null, inner)]),
    ];
    for wrap in wraps {
        for (depth, invalid) in [(crate::value::MAX_DEPTH, false), (crate::value::MAX_DEPTH + 1, true)] {
            let mut writer = Writer::default();
            writer.value(&nest(depth, wrap));
            assert_eq!(writer.invalid.is_some(), invalid);
            assert_eq!(decode_value(&writer.body, Bytes::new()).is_err(), invalid);
        }
    }
}

#[test]
fn maps_of_any_length_round_trip_and_a_length_beyond_the_body_is_refused() {
    for (len, marker) in [(15, 0x8f), (16, 0xde), (0xffff, 0xde), (0x1_0000, 0xdf)] {
        let map = Value::Map((0..len).map(|n| (Value::Int(n), Value::Bool(n % 2 == 0))).collect());
        let (body, _) = encode_value(&map);
        assert_eq!(body[0], marker);
        assert_eq!(decode_value(&body, Bytes::new()), Ok(map));
    }
    for cut in ["81", "81c0", "82c0c0c0", "de0001c0", "dfffffffff", "df00000002c0c0c0"] {
        assert_eq!(decode_value(&unhex(cut), Bytes::new()), Err(CodecError::Truncated), "{cut}");
    }
    // Keys and values both count.
    let half = MAX_VALUES / 2;
    let mut body = vec![0xdf];
    body.extend((half as u32).to_be_bytes());
    body.extend(vec![0xc0; 2 * half]);
    assert_eq!(decode_value(&body, Bytes::new()), Err(CodecError::TooMany));
}

fn reference() -> impl Strategy<Value = Reference> {
    let handle = any::<u64>().prop_map(Handle::from_bits);
    let shape = prop::collection::vec(any::<i64>(), 0..5);
    prop_oneof![
        handle.clone().prop_map(Reference::Function),
        handle.clone().prop_map(Reference::Module),
        handle.clone().prop_map(Reference::Object),
        handle.clone().prop_map(Reference::Pipe),
        (handle, any::<u64>(), shape, any::<bool>()).prop_map(|(storage, byte_offset, shape, strided)| {
            let strides = strided.then(|| shape.clone());
            let (dtype, device) = (DataType::BF16, Device::cuda(3));
            Reference::Tensor(Box::new(TensorRef { storage, byte_offset, shape, strides, dtype, device }))
        }),
    ]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        (-1e300..1e300_f64).prop_map(Value::Float),
        ".*".prop_map(Value::Str),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| Value::Bytes(bytes.into())),
        prop::collection::vec(any::<i64>(), 0..40).prop_map(Value::Shape),
        prop::collection::vec(any::<u8>(), 0..300).prop_map(|bytes| Value::Packed(Packed::from_bytes(bytes.into()))),
        reference().prop_map(Value::Object),
    ];
    leaf.prop_recursive(4, 40, 20, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..20).prop_map(Value::List),
            prop::collection::vec((inner.clone(), inner), 0..10).prop_map(Value::Map),
        ]
    })
}

proptest! {
    #[test]
    fn values_round_trip(value in value()) {
        let (body, payload) = encode_value(&value);
        prop_assert_eq!(decode_value(&body, payload.concat().into()).unwrap(), value);
    }

    #[test]
    fn requests_round_trip(
        args in prop::collection::vec(value(), 0..5),
        left in proptest::option::of(any::<u32>()),
        pipe in proptest::option::of(any::<u64>()),
        trace in proptest::option::of((any::<[u8; 16]>(), any::<[u8; 8]>(), any::<u8>())),
    ) {
        let now = Instant::now();
        let mut request = Request::new(Operation::Call { function: Handle::from_bits(7), args });
        request.deadline = left.map(|micros| now + Duration::from_micros(micros.into()));
        request.pipe = pipe.map(PipeId::new);
        request.trace = trace.and_then(|(trace_id, span_id, flags)| TraceContext::new(trace_id, span_id, flags));
        let (body, payload) = encode_request(&request, now);
        let back = decode_request(request.lane, &body, payload.concat().into(), now).unwrap();
        prop_assert_eq!(format!("{back:?}"), format!("{request:?}"));
    }

    #[test]
    fn cut_or_changed_bodies_never_panic(value in value(), at: prop::sample::Index, change: u8) {
        let (mut body, payload) = encode_value(&value);
        let payload = Bytes::from(payload.concat());
        let at = at.index(body.len());
        prop_assert!(decode_value(&body[..at], payload.clone()).is_err());
        body[at] = change;
        let _ = decode_value(&body, payload);
    }

    #[test]
    fn any_bytes_are_a_request_or_an_error(bytes: Vec<u8>, payload: Vec<u8>) {
        let now = Instant::now();
        let _ = decode_request(Lane::DEFAULT, &bytes, payload.clone().into(), now);
        let _ = decode_reply(true, &bytes, Bytes::new());
        let _ = peek_write(&bytes, now);
    }
}
