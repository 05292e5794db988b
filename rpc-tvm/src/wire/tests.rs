//! Bytes that were captured between peers of TVM 0.27, round trips, and bytes that no peer sends.

use bytes::buf::Limit;
use bytes::{BufMut, Bytes, BytesMut};
use rpc_core::{DataType, DataTypeCode, Device};

use super::frame::READ_AHEAD;
use super::*;

/// Converts a dump of bytes to bytes. What follows `|` in a line is a comment.
pub(super) fn hex(dump: &str) -> Vec<u8> {
    let digits: String = dump.lines().flat_map(|line| line.split('|').next()).collect();
    let digits: Vec<u8> = digits.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let text = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(text).collect()
}

/// Moves the first bytes into the input of a state machine: at most `step`, and what it has room
/// for.
pub(super) fn put(mut input: Limit<&mut BytesMut>, bytes: &mut &[u8], step: usize) {
    let count = bytes.len().min(step).min(input.remaining_mut());
    assert!(count > 0, "the buffer has room");
    let (first, rest) = bytes.split_at(count);
    input.put_slice(first);
    *bytes = rest;
}

/// Gives bytes to the state machine, at most `step` at a time, and returns its events. Takes the
/// data of copies.
fn feed(wire: &mut ServerWire, mut bytes: &[u8], step: usize) -> Result<Vec<ServerEvent>, WireError> {
    let mut events = Vec::new();
    loop {
        while let Some(event) = wire.poll_event()? {
            events.push(event);
            let mut data = wire.payload().len();
            while data > 0 {
                wire.advance_payload(data);
                data = wire.payload().len();
            }
        }
        let data = wire.payload().len();
        wire.advance_payload(data);
        if data > 0 {
            continue;
        }
        if bytes.is_empty() {
            return Ok(events);
        }
        put(wire.input(), &mut bytes, step);
    }
}

/// Returns the state of a connection whose session has begun.
fn begun() -> ServerWire {
    begun_within(WireLimits::default())
}

fn begun_within(limits: WireLimits) -> ServerWire {
    let mut wire = ServerWire::new(limits);
    let hello = Hello { key: "client:".to_owned() };
    assert_eq!(feed(&mut wire, &hello.encode(), usize::MAX).unwrap(), [ServerEvent::Hello(hello)]);
    wire.begin();
    wire
}

/// Checks that a captured request is decoded, however it is cut, and that it is encoded so.
fn check_request(dump: &str, expected: &Request) {
    let bytes = hex(dump);
    for step in [1, 3, usize::MAX] {
        let events = feed(&mut begun(), &bytes, step).unwrap();
        assert_eq!(events, [ServerEvent::Request(expected.clone())]);
    }
    let encoded = expected.encode();
    assert_eq!(feed(&mut begun(), &encoded, usize::MAX).unwrap(), [ServerEvent::Request(expected.clone())]);
}

fn tensor(data: u64, shape: &[i64]) -> TensorHeader {
    TensorHeader { data, device: Device::cpu(), dtype: DataType::F32, shape: shape.to_vec(), byte_offset: 0 }
}

#[test]
fn the_hello_and_its_answer_are_those_of_tvm() {
    let bytes = hex("71 f2 0f 00  09 00 00 00  63 6c 69 65 6e 74 3a 78 31");
    let hello = Hello { key: "client:x1".to_owned() };
    assert_eq!(hello.encode(), bytes);
    let mut wire = ServerWire::new(WireLimits::default());
    assert_eq!(feed(&mut wire, &bytes, 1).unwrap(), [ServerEvent::Hello(hello)]);
    assert!(!wire.is_inside_message());
    let answer = hex("71 f2 0f 00  09 00 00 00  73 65 72 76 65 72 3a 78 31");
    assert_eq!(HelloAnswer::Accepted("server:x1").encode(), answer);
    assert_eq!(HelloAnswer::Duplicate.encode(), hex("72 f2 0f 00"));
    assert_eq!(HelloAnswer::Mismatch.encode(), hex("73 f2 0f 00"));
}

#[test]
fn keys_have_options_that_are_checked() {
    let key = |text| HelloKey::parse(text).map(|parsed| (parsed.key, parsed.timeout.map(|time| time.as_millis())));
    for (text, expected) in [
        ("client:", ("", None)),
        ("client:127.0.0.1:5555", ("127.0.0.1:5555", None)),
        ("client:rasp:0.9491713694349051 -timeout=1", ("rasp:0.9491713694349051", Some(1000))),
        ("client:k -unknown=3 -timeout=0.01", ("k", Some(10))),
        ("client:k -timeout=30.0", ("k", Some(30_000))),
        ("client:k -timeout=0", ("k", None)),
        ("client:k -timeout=1e-10", ("k", Some(0))),
    ] {
        assert_eq!(key(text).unwrap(), expected, "{text}");
    }
    // Each of the last four stops a server of TVM for good.
    for text in ["server:k", "k", " ", "", "client:k -timeout=abc", "client:k -timeout=nan", "client:k -timeout=-1"] {
        assert!(key(text).is_err(), "{text}");
    }
}

#[test]
fn the_first_request_is_that_of_tvm() {
    let local = Request::Init { version: PROTOCOL_VERSION.into(), constructor: Vec::new() };
    let bytes = hex("15 00 00 00 00 00 00 00  02 00 00 00  05 00 00 00 00 00 00 00  30 2e 38 2e 30  00 00 00 00");
    assert_eq!(local.encode(), bytes);
    let mut wire = ServerWire::new(WireLimits::default());
    let both = [Hello { key: "client:".to_owned() }.encode(), bytes].concat();
    assert_eq!(feed(&mut wire, &both, usize::MAX).unwrap()[1..], [ServerEvent::Request(local)]);
    assert_eq!(returned(&[WireValue::None]), hex("0c 00 00 00 00 00 00 00  04 00 00 00  01 00 00 00  00 00 00 00"));
    // A chain, with each form of a text that is boxed.
    let chain = feed(
        &mut {
            let mut wire = ServerWire::new(WireLimits::default());
            feed(&mut wire, &Hello { key: "client:".to_owned() }.encode(), usize::MAX).unwrap();
            wire
        },
        &hex("73 00 00 00 00 00 00 00  02 00 00 00
              05 00 00 00 00 00 00 00  30 2e 38 2e 30
              05 00 00 00
              41 00 00 00  41 00 00 00  0b 00 00 00 00 00 00 00  72 70 63 2e 43 6f 6e 6e 65 63 74
              41 00 00 00  41 00 00 00  09 00 00 00 00 00 00 00  31 32 37 2e 30 2e 30 2e 31
              01 00 00 00  b3 94 00 00 00 00 00 00
              0b 00 00 00  41 00 00 00  02 00 00 00 00 00 00 00  78 31
              02 00 00 00  00 00 00 00 00 00 00 00"),
        7,
    );
    let text = |text: &str| WireValue::Str(text.into());
    let constructor =
        vec![text("rpc.Connect"), text("127.0.0.1"), WireValue::Int(38067), text("x1"), WireValue::Bool(false)];
    let expected = Request::Init { version: PROTOCOL_VERSION.into(), constructor };
    assert_eq!(chain.unwrap(), [ServerEvent::Request(expected)]);
}

#[test]
fn functions_are_found_and_called_as_tvm_does() {
    check_request(
        "23 00 00 00 00 00 00 00  09 00 00 00
         01 00 00 00  08 00 00 00  0f 00 00 00 00 00 00 00
         72 70 63 2e 74 65 73 74 2e 61 64 64 6f 6e 65",
        &Request::GetFunction { name: "rpc.test.addone".into() },
    );
    let found = hex("14 00 00 00 00 00 00 00  04 00 00 00  01 00 00 00  04 00 00 00  a0 f9 51 13 01 56 00 00");
    assert_eq!(returned(&[WireValue::Pointer(0x5601_1351_f9a0)]), found);
    check_request(
        "1c 00 00 00 00 00 00 00  03 00 00 00  a0 f9 51 13 01 56 00 00
         01 00 00 00  01 00 00 00  0a 00 00 00 00 00 00 00",
        &Request::Call { function: 0x5601_1351_f9a0, args: vec![WireValue::Int(10)] },
    );
    let eleven = hex("20 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00
         01 00 00 00  01 00 00 00 00 00 00 00
         01 00 00 00  0b 00 00 00 00 00 00 00");
    assert_eq!(returned_call(CallResult::Plain(WireValue::Int(11))), eleven);
    let args = vec![
        WireValue::Int(1),
        WireValue::Float(1.0),
        WireValue::Bool(true),
        WireValue::None,
        WireValue::Str("s".into()),
        WireValue::Bytes(Bytes::from_static(b"b")),
        WireValue::Bytes(Bytes::from_static(b"ba")),
        WireValue::Device(Device::cpu()),
        WireValue::DataType(DataType::I32),
        WireValue::Tensor(tensor(0x7fe2_8000_fbc0, &[3])),
    ];
    check_request(
        "ac 00 00 00 00 00 00 00  03 00 00 00  10 78 21 7d 21 56 00 00
         0a 00 00 00
         01 00 00 00  01 00 00 00 00 00 00 00
         03 00 00 00  00 00 00 00 00 00 f0 3f
         02 00 00 00  01 00 00 00 00 00 00 00
         00 00 00 00
         08 00 00 00  01 00 00 00 00 00 00 00  73
         0c 00 00 00  42 00 00 00  01 00 00 00 00 00 00 00  62
         0c 00 00 00  42 00 00 00  02 00 00 00 00 00 00 00  62 61
         06 00 00 00  01 00 00 00  00 00 00 00
         05 00 00 00  00 20 01 00  00 00 00 00
         07 00 00 00
         c0 fb 00 80 e2 7f 00 00  01 00 00 00  00 00 00 00  01 00 00 00  02 20 01 00
         03 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00",
        &Request::Call { function: 0x5621_7d21_7810, args },
    );
    check_request(
        "2c 00 00 00 00 00 00 00  03 00 00 00  d0 ab 0c 13 01 56 00 00  02 00 00 00
         73 00 00 00  73 00 00 00  00 f8 00 d8 01 7f 00 00
         01 00 00 00  01 00 00 00 00 00 00 00",
        &Request::Call {
            function: 0x5601_130c_abd0,
            args: vec![WireValue::Object(0x7f01_d800_f800), WireValue::Int(1)],
        },
    );
}

#[test]
fn results_tell_their_types_as_those_of_tvm() {
    // The first value says 65 here and 11 in the capture: clients take both.
    let text = hex("26 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00
         01 00 00 00  41 00 00 00 00 00 00 00
         08 00 00 00  06 00 00 00 00 00 00 00  61 62 63 3a 31 31");
    assert_eq!(returned_call(CallResult::Str("abc:11".into())), text);
    let bytes = returned_call(CallResult::Bytes(Bytes::from_static(b"abc")));
    assert_eq!([returned_bytes_header(3), b"abc".to_vec()].concat(), bytes);
    let array = hex("4c 00 00 00 00 00 00 00  04 00 00 00  03 00 00 00
         01 00 00 00  46 00 00 00 00 00 00 00
         07 00 00 00  80 f9 00 d8 01 7f 00 00  01 00 00 00  00 00 00 00  01 00 00 00  02 20 01 00
         0a 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00
         04 00 00 00  40 f7 00 d8 01 7f 00 00");
    assert_eq!(returned_call(CallResult::Tensor(tensor(0x7f01_d800_f980, &[10]), 0x7f01_d800_f740)), array);
    let function = hex("20 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00
         01 00 00 00  44 00 00 00 00 00 00 00
         04 00 00 00  40 f8 00 d8 01 7f 00 00");
    assert_eq!(returned_call(CallResult::Object(ResultKind::Function, 0x7f01_d800_f840)), function);
    // One value alone would break the client.
    let none =
        hex("18 00 00 00 00 00 00 00  04 00 00 00  02 00 00 00  01 00 00 00  00 00 00 00 00 00 00 00  00 00 00 00");
    assert_eq!(returned_call(CallResult::Plain(WireValue::None)), none);
    for (kind, index) in
        [(ResultKind::Module, 73), (ResultKind::Shape, 69), (ResultKind::Array, 71), (ResultKind::Map, 72)]
    {
        assert_eq!(returned_call(CallResult::Object(kind, 1))[20], index, "{kind:?}");
    }
}

#[test]
fn memory_is_allocated_copied_and_freed_as_tvm_does() {
    let header = "00 00 00 00 00 00 00 00  01 00 00 00  00 00 00 00  02 00 00 00  02 20 01 00
                  03 00 00 00 00 00 00 00  04 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00";
    check_request(
        &format!("40 00 00 00 00 00 00 00  11 00 00 00  02 00 00 00  07 00 00 00 {header} 00 00 00 00"),
        &Request::Alloc { header: tensor(0, &[3, 4]), scope: None },
    );
    let data = tensor(0x7f40_4000_f700, &[3, 4]);
    let floats: Vec<u8> = (0..12_u8).flat_map(|value| f32::from(value).to_le_bytes()).collect();
    let mut copy = hex("6c 00 00 00 00 00 00 00  07 00 00 00
         00 f7 00 40 40 7f 00 00  01 00 00 00  00 00 00 00  02 00 00 00  02 20 01 00
         03 00 00 00 00 00 00 00  04 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00
         30 00 00 00 00 00 00 00");
    copy.extend_from_slice(&floats);
    assert_eq!(Request::encode_copy_to(&data, &floats), copy);
    let mut wire = begun();
    wire.input().put_slice(&copy);
    assert_eq!(wire.poll_event().unwrap(), Some(ServerEvent::CopyTo { to: data.clone(), len: 48 }));
    assert_eq!(wire.payload(), floats);
    wire.advance_payload(48);
    assert_eq!(wire.poll_event().unwrap(), None);
    assert!(!wire.is_inside_message());
    let shape = "03 00 00 00 00 00 00 00  04 00 00 00 00 00 00 00  00 00 00 00 00 00 00 00";
    check_request(
        &format!(
            "3c 00 00 00 00 00 00 00  06 00 00 00
             00 f7 00 40 40 7f 00 00  01 00 00 00  00 00 00 00  02 00 00 00  02 20 01 00 {shape}
             30 00 00 00 00 00 00 00"
        ),
        &Request::CopyFrom { from: data, len: 48 },
    );
    assert_eq!(copy_ack_header(48).to_vec(), hex("34 00 00 00 00 00 00 00  08 00 00 00"));
    check_request(
        "20 00 00 00 00 00 00 00  0f 00 00 00  02 00 00 00
         06 00 00 00  01 00 00 00  00 00 00 00  04 00 00 00  00 00 00 00 00 00 00 00",
        &Request::StreamSync { device: Device::cpu(), stream: 0 },
    );
    check_request(
        "14 00 00 00 00 00 00 00  0a 00 00 00  01 00 00 00  04 00 00 00  40 f7 00 d8 01 7f 00 00",
        &Request::Free { handle: 0x7f01_d800_f740 },
    );
    check_request(
        "20 00 00 00 00 00 00 00  0e 00 00 00  02 00 00 00
         06 00 00 00  01 00 00 00  00 00 00 00  04 00 00 00  00 f7 00 d8 01 7f 00 00",
        &Request::FreeData { device: Device::cpu(), data: 0x7f01_d800_f700 },
    );
}

#[test]
fn every_request_survives_a_round_trip() {
    let device = Device::new(rpc_core::DeviceType(2), 3);
    let dtype = DataType { code: DataTypeCode(7), bits: 8, lanes: 4 };
    let header = TensorHeader { data: u64::MAX, device, dtype, shape: vec![i64::MAX, 0, -1], byte_offset: 7 };
    let requests = [
        Request::Shutdown,
        Request::SetDevice { device },
        Request::Attribute { device, kind: 8 },
        Request::AllocBytes { device, len: 9, alignment: 64, hint: dtype },
        Request::Alloc { header: header.clone(), scope: Some("global".into()) },
        Request::CopyAmong { from: header.clone(), to: tensor(1, &[]), stream: 5 },
        Request::CreateStream { device },
        Request::FreeStream { device, stream: 1 },
        Request::SetStream { device, stream: 0 },
        Request::CurrentStream { device },
        Request::CopyFrom { from: header, len: u64::MAX },
        Request::Call {
            function: 1,
            args: vec![WireValue::Function(2), WireValue::Module(3), WireValue::Str("a\0b".into())],
        },
    ];
    let all = requests.iter().flat_map(Request::encode).collect::<Vec<_>>();
    for step in [1, 11, usize::MAX] {
        let events = feed(&mut begun(), &all, step).unwrap();
        assert_eq!(events, requests.clone().map(ServerEvent::Request));
    }
}

#[test]
fn errors_have_the_form_that_clients_print() {
    let abc = hex("17 00 00 00 00 00 00 00  05 00 00 00  01 00 00 00  08 00 00 00  03 00 00 00 00 00 00 00  61 62 63");
    assert_eq!(exception("abc"), abc);
    assert!(exception("a\0b").ends_with(b"a\\0b"), "a client would end the text there");
    let timeout = timeout_text(std::time::Duration::from_millis(1000));
    assert!(timeout.starts_with("RPCSessionTimeoutError: Your 1.0s session has expired"), "{timeout}");
    assert_eq!(timeout.len(), 0x63);
    assert_eq!(shutdown(), hex("04 00 00 00 00 00 00 00  01 00 00 00"));
    assert_eq!(
        returned_text("8.0")[12..],
        hex("01 00 00 00  41 00 00 00  41 00 00 00  03 00 00 00 00 00 00 00 38 2e 30")
    );
}

#[test]
fn empty_frames_mean_nothing() {
    let request = Request::Free { handle: 1 };
    let bytes = [vec![0; 8], request.encode(), vec![0; 24], request.encode(), vec![0; 8]].concat();
    for step in [1, 5, usize::MAX] {
        let mut wire = begun();
        let events = feed(&mut wire, &bytes, step).unwrap();
        assert_eq!(events, [1, 1].map(|handle| ServerEvent::Request(Request::Free { handle })));
        assert!(!wire.is_inside_message());
    }
}

#[test]
fn requests_before_the_first_and_a_second_first_are_answered() {
    let mut wire = ServerWire::new(WireLimits::default());
    let init = Request::Init { version: PROTOCOL_VERSION.into(), constructor: Vec::new() };
    let copy = Request::encode_copy_to(&tensor(1, &[5]), &[0; 20]);
    let early = [Hello { key: "client:".to_owned() }.encode(), Request::Free { handle: 1 }.encode(), copy].concat();
    let events = feed(&mut wire, &early, 9).unwrap();
    let early = exception("Need to call InitRemoteSession first before any further actions");
    assert_eq!(events[1..], [ServerEvent::Answer(early.clone()), ServerEvent::Answer(early)]);
    assert_eq!(feed(&mut wire, &init.encode(), 9).unwrap(), [ServerEvent::Request(init.clone())]);
    wire.begin();
    let second = exception("Server has already been initialized");
    assert_eq!(feed(&mut wire, &init.encode(), 9).unwrap(), [ServerEvent::Answer(second)]);
    assert_eq!(feed(&mut wire, &shutdown(), 9).unwrap(), [ServerEvent::Request(Request::Shutdown)]);
}

#[test]
fn values_of_the_wrong_type_are_an_error_of_the_request_alone() {
    let call = |code: FrameCode, values: &[WireValue]| {
        let mut body = Vec::new();
        encode_values(values, &mut body);
        let mut frame = (body.len() as u64 + 4).to_le_bytes().to_vec();
        frame.put_i32_le(code.number());
        frame.extend(body);
        frame
    };
    let device = WireValue::Device(Device::cpu());
    for (code, values, expected) in [
        (FrameCode::GetGlobalFunc, vec![WireValue::Int(1)], "Cannot convert from type `int` to `str`"),
        (FrameCode::GetGlobalFunc, vec![], "has no value 1"),
        (FrameCode::DevGetAttr, vec![device.clone(), WireValue::None], "Cannot convert from type `None` to `int`"),
        (FrameCode::DevStreamSync, vec![device.clone()], "has no value 2"),
        (FrameCode::DevSetDevice, vec![device.clone(), device], "takes 1 values, and got 2"),
    ] {
        let mut wire = begun();
        let events = feed(&mut wire, &call(code, &values), 5).unwrap();
        let [ServerEvent::Answer(answer)] = events.as_slice() else { panic!("{events:?}") };
        assert!(String::from_utf8_lossy(answer).contains(expected), "{}", String::from_utf8_lossy(answer));
        let next = Request::Free { handle: 0 };
        assert_eq!(feed(&mut wire, &next.encode(), 5).unwrap(), [ServerEvent::Request(next)]);
    }
    // No pointer is as good as 0.
    let none = call(FrameCode::FreeHandle, &[WireValue::None]);
    assert_eq!(feed(&mut begun(), &none, 5).unwrap(), [ServerEvent::Request(Request::Free { handle: 0 })]);
}

#[test]
fn a_client_before_tvm_0_21_is_told_in_its_own_form() {
    let mut body = Vec::new();
    body.put_i32_le(1);
    body.put_i32_le(11);
    body.put_u64_le(15);
    body.put_slice(b"rpc.test.addone");
    let frame = [(body.len() as u64 + 4).to_le_bytes().as_slice(), &9_i32.to_le_bytes(), &body].concat();
    let events = feed(&mut begun(), &frame, 4).unwrap();
    let [ServerEvent::Answer(answer)] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(answer[8..20], hex("05 00 00 00  01 00 00 00  0b 00 00 00"));
    assert_eq!(u64::from_le_bytes(answer[20..28].try_into().unwrap()) as usize, answer.len() - 28);
    assert!(String::from_utf8_lossy(&answer[28..]).contains("TVM 0.20"));
}

#[test]
fn frames_beyond_a_limit_pass_by_and_are_answered() {
    let mut wire = ServerWire::new(WireLimits::new(100_000));
    feed(&mut wire, &Hello { key: "client:".to_owned() }.encode(), usize::MAX).unwrap();
    wire.begin();
    let call = |len| {
        let args = vec![WireValue::Bytes(vec![7; len].into())];
        Request::Call { function: 1, args }.encode()
    };
    let events = feed(&mut wire, &call(100_000), 4096).unwrap();
    let [ServerEvent::Answer(answer)] = events.as_slice() else { panic!("{events:?}") };
    assert!(String::from_utf8_lossy(answer).contains("max_message"));
    assert!(wire.input.capacity() <= 2 * READ_AHEAD, "nothing of it was kept: {}", wire.input.capacity());
    // One that fits is announced, and can be refused as well.
    let fitting = call(50_000);
    wire.input().put_slice(&fitting[..12]);
    let announced = wire.poll_event().unwrap();
    assert_eq!(announced, Some(ServerEvent::Announced { len: fitting.len() as u64 - 12 }));
    wire.refuse("no room");
    assert_eq!(feed(&mut wire, &fitting[12..], 4096).unwrap(), [ServerEvent::Answer(exception("no room"))]);
    let events = feed(&mut wire, &fitting, 4096).unwrap();
    assert!(matches!(&events[1], ServerEvent::Request(Request::Call { args, .. }) if args.len() == 1), "{events:?}");
    assert!(wire.input.capacity() <= 2 * READ_AHEAD, "the memory of a large frame goes with it");
}

#[test]
fn the_rest_of_a_copy_can_be_refused() {
    let copy = Request::encode_copy_to(&tensor(1, &[10]), &[1; 40]);
    let next = Request::Free { handle: 3 };
    let mut wire = begun();
    wire.input().put_slice(&copy[..copy.len() - 30]);
    assert!(matches!(wire.poll_event().unwrap(), Some(ServerEvent::CopyTo { len: 40, .. })));
    assert_eq!((wire.payload().len(), wire.payload_left()), (10, 40));
    wire.advance_payload(4);
    wire.payload_was_read(0);
    wire.refuse("no such tensor");
    let rest = [&copy[copy.len() - 30..], &next.encode()].concat();
    let events = feed(&mut wire, &rest, 8).unwrap();
    assert_eq!(events, [ServerEvent::Answer(exception("no such tensor")), ServerEvent::Request(next)]);
}

#[test]
fn what_breaks_the_protocol_is_an_error() {
    let frame =
        |code: i32, body: &[u8]| [(body.len() as u64 + 4).to_le_bytes().as_slice(), &code.to_le_bytes(), body].concat();
    let sequence = |count: i32, rest: &[u8]| [count.to_le_bytes().as_slice(), rest].concat();
    let mut long_copy = Request::encode_copy_to(&tensor(1, &[2]), &[0; 8]);
    // The number of bytes, behind the header of the tensor.
    long_copy[52] = 9;
    for (bytes, expected) in [
        (vec![1, 0, 0, 0, 0, 0, 0, 0], "has no room for its code"),
        (frame(0, &[]), "frames of code 0"),
        (frame(-1, &[]), "frames of code -1"),
        (frame(22, &[]), "frames of code 22"),
        (frame(4, &[]), "frames of code 4"),
        (frame(8, &[0; 8]), "frames of code 8"),
        (frame(1, &[0]), "1 bytes behind its end"),
        (frame(3, &[0; 7]), "ends before"),
        (frame(10, &sequence(-1, &[])), "-1 values"),
        (frame(10, &sequence(i32::MAX, &[0; 64])), "values, of at most 4096"),
        (frame(10, &sequence(1000, &[0; 64])), "1000 values in 64 bytes"),
        (frame(10, &sequence(1, &[4, 0, 0, 0, 1])), "ends before"),
        (frame(10, &sequence(1, &[0, 0, 0, 0, 9])), "1 bytes behind its end"),
        (frame(9, &sequence(1, &[8, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255])), "ends before"),
        (frame(9, &sequence(1, &[8, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 200])), "not UTF-8"),
        (frame(9, &sequence(1, &[10, 0, 0, 0])), "type index 10"),
        (frame(9, &sequence(1, &[70, 0, 0, 0])), "type index 70"),
        (frame(9, &sequence(1, &[65, 0, 0, 0, 9, 0, 0, 0])), "boxed as 9"),
        (long_copy, "has not the length"),
        (frame(7, &[0; 19]), "has not the length"),
        (frame(7, &[255; 60]), "-1 dimensions"),
        (frame(7, &[1; 60]), "16843009 dimensions"),
        (frame(6, &[1; 60]), "16843009 dimensions"),
    ] {
        for step in [1, usize::MAX] {
            let error = feed(&mut begun(), &bytes, step).expect_err(expected);
            assert!(error.to_string().contains(expected), "{expected}: {error}");
        }
    }
    for (bytes, expected) in [
        (b"GET / HT".to_vec(), "magic number"),
        (hex("71 f2 0f 00  ff ff ff ff"), "-1 bytes"),
        (hex("71 f2 0f 00  00 00 00 7f"), "4096 at most"),
        (hex("71 f2 0f 00  02 00 00 00  c3 28"), "not UTF-8"),
    ] {
        let error = feed(&mut ServerWire::new(WireLimits::default()), &bytes, 1).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Source of numbers that are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

/// Frames with a few changed bytes, in pieces of any length: each gives events or an error, and
/// never more memory than the largest body.
#[test]
fn changed_frames_neither_panic_nor_allocate() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let args = vec![
        WireValue::Str("text".into()),
        WireValue::Bytes(Bytes::from_static(b"bytes")),
        WireValue::Tensor(tensor(5, &[2, 3])),
        WireValue::Object(4),
        WireValue::DataType(DataType::F16),
    ];
    let requests = [
        Request::Call { function: 7, args }.encode(),
        Request::Init { version: PROTOCOL_VERSION.into(), constructor: vec![WireValue::Str("x".into())] }.encode(),
        Request::encode_copy_to(&tensor(5, &[2]), &[3; 8]),
        Request::CopyFrom { from: tensor(5, &[2]), len: 8 }.encode(),
        Request::GetFunction { name: "f".into() }.encode(),
        Request::Alloc { header: tensor(0, &[1]), scope: Some("global".into()) }.encode(),
    ];
    let (mut decoded, mut refused) = (0, 0);
    for _ in 0..20_000 {
        let mut wire = begun_within(WireLimits::new(1 << 16));
        let mut bytes = Vec::new();
        for _ in 0..3 {
            bytes.extend_from_slice(&requests[numbers.next(requests.len())]);
        }
        for _ in 0..numbers.next(4) {
            let at = numbers.next(bytes.len());
            bytes[at] = [0, 1, 0x7f, 0x80, 0xff, numbers.next(256) as u8][numbers.next(6)];
        }
        let step = 1 + numbers.next(bytes.len());
        match feed(&mut wire, &bytes, step) {
            Ok(_) => decoded += 1,
            Err(_) => refused += 1,
        }
        assert!(wire.input.capacity() <= 1 << 18, "{}", wire.input.capacity());
    }
    assert!(decoded > 1000 && refused > 1000, "{decoded} {refused}");
}
