//! Random bytes and random histories, a fixed number from fixed seeds. The targets in `fuzz/`
//! go further.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::kept_inputs;
use crate::pair::{Arrived, Cut, Pair, Rng, Setup, call, call_with, frame, object};
use bytes::{Bytes, BytesMut};
use rpc_core::proto::{
    Admission, Anonymous, ClientEndpoint, EndpointConfig, FrameHeader, HEADER_LEN, Handshake, HandshakeConfig, Hello,
    Kind, Role, ServerEndpoint, ServerEvent, decode_reply, decode_request, decode_value, encode_reply, encode_request,
    encode_value,
};
use rpc_core::session::{Operation, ReadBuffer, Request};
use rpc_core::{
    DataType, Device, ErrorKind, Handle, Lane, Packed, PipeId, Reference, RpcError, TensorRef, TraceContext, Value,
};

/// Seeds of histories that failed in the past.
const SEEDS: &[u64] = &[];

/// Runs the explicit seeds, and `count` others. None is left out, however slow the machine is.
fn for_seeds(explicit: &[u64], count: u64, mut run: impl FnMut(u64)) {
    for seed in explicit.iter().copied().chain(1..=count) {
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(seed)));
        if let Err(panic) = outcome {
            eprintln!("the seed was {seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

fn random_value(rng: &mut Rng, depth: usize) -> Value {
    let handle = Handle::from_bits(rng.next());
    match rng.below(if depth > 3 { 15 } else { 17 }) {
        0 => Value::Null,
        1 => Value::Bool(rng.one_in(2)),
        2 => Value::Int(rng.next() as i64 >> rng.below(64)),
        3 => Value::Float(rng.below(1000) as f64 / 7.0),
        4 => {
            let len = rng.below(1 << rng.clone().below(10));
            Value::Str("é".repeat(len))
        }
        5 | 6 => {
            let len = rng.below(1 << rng.clone().below(12));
            Value::Bytes(rng.bytes(len).into())
        }
        7 => Value::Shape((0..rng.below(40)).map(|_| rng.next() as i64).collect()),
        8 => Value::DataType(DataType::F16),
        9 => Value::Device(Device::cuda(rng.below(4) as i32)),
        10 => Value::Packed(Packed::encode(&rng.next()).unwrap()),
        11 => Value::Object(Reference::Function(handle)),
        12 => Value::Object(Reference::Module(handle)),
        13 => Value::Object(Reference::Tensor(random_tensor(rng).into())),
        14 => Value::Object(Reference::Pipe(handle)),
        15 => Value::List((0..rng.below(20)).map(|_| random_value(rng, depth + 1)).collect()),
        _ => {
            let pairs = 0..rng.below(10);
            Value::Map(pairs.map(|_| (random_value(rng, depth + 1), random_value(rng, depth + 1))).collect())
        }
    }
}

fn random_tensor(rng: &mut Rng) -> TensorRef {
    let dimensions = rng.below(6);
    let strided = rng.one_in(2);
    let mut numbers = || (0..dimensions).map(|_| rng.next() as i64 >> 40).collect::<Vec<_>>();
    let (shape, strides) = (numbers(), numbers());
    TensorRef {
        storage: Handle::from_bits(rng.next()),
        byte_offset: rng.next(),
        shape,
        strides: strided.then_some(strides),
        dtype: DataType::F32,
        device: Device::cpu(),
    }
}

fn random_operation(rng: &mut Rng) -> Operation {
    let handle = Handle::from_bits(rng.next());
    match rng.below(10) {
        0 => Operation::GetFunction { name: "f".repeat(rng.below(300)) },
        1 => Operation::Alloc {
            device: Device::cpu(),
            dtype: DataType::F32,
            shape: vec![1, 2],
            scope: None,
            alignment: rng.next() >> rng.below(65).min(63),
        },
        2 => {
            let len = rng.below(30_000);
            Operation::Write { to: random_tensor(rng).into(), offset: rng.next(), data: rng.bytes(len).into() }
        }
        3 => Operation::Read { from: random_tensor(rng).into(), offset: 0, len: rng.next(), into: None },
        4 => Operation::Copy { from: random_tensor(rng).into(), to: random_tensor(rng).into() },
        5 => Operation::LoadModule { path: "p".into(), loader: Some("l".into()) },
        7 => {
            let (device, other_device) = (Device::cpu(), Device::cuda(1));
            Operation::StreamWaitFor {
                device,
                stream: rng.one_in(2).then_some(handle),
                other_device,
                other: Some(handle),
            }
        }
        6 => Operation::ModuleFunction { module: handle, name: "n".into() },
        8 => Operation::Fetch { handle },
        _ => Operation::Call { function: handle, args: (0..rng.below(5)).map(|_| random_value(rng, 0)).collect() },
    }
}

fn random_trace(rng: &mut Rng) -> Option<TraceContext> {
    let bytes = rng.bytes(TraceContext::LEN);
    TraceContext::from_bytes(bytes[..].try_into().unwrap())
}

/// Changes a few bytes, or drops, repeats or inserts some.
fn mutate(rng: &mut Rng, bytes: &mut Vec<u8>) {
    kept_inputs::mutate(&mut |limit| rng.below(limit), bytes);
}

#[test]
fn values_round_trip_and_mutated_ones_do_not_panic() {
    for_seeds(&[], 3_000, |seed| {
        let mut rng = Rng(seed);
        let value = random_value(&mut rng, 0);
        let (body, payload) = encode_value(&value);
        let payload = Bytes::from(payload.concat());
        assert_eq!(decode_value(&body, payload.clone()), Ok(value));
        for _ in 0..10 {
            let mut body = body.clone();
            mutate(&mut rng, &mut body);
            if let Ok(value) = decode_value(&body, payload.clone()) {
                // A decoded value can be encoded again.
                let (body, payload) = encode_value(&value);
                let again = decode_value(&body, payload.concat().into()).unwrap();
                assert_eq!(format!("{again:?}"), format!("{value:?}"));
            }
        }
    });
}

#[test]
fn requests_round_trip_and_mutated_ones_do_not_panic() {
    for_seeds(&[], 3_000, |seed| {
        let mut rng = Rng(seed);
        let now = Instant::now();
        let mut request = Request::new(random_operation(&mut rng));
        request.deadline = rng.one_in(2).then(|| now + Duration::from_micros(rng.next() >> 20));
        request.pipe = rng.one_in(2).then(|| PipeId::new(rng.next()));
        request.trace = if rng.one_in(2) { random_trace(&mut rng) } else { None };
        let (body, payload) = encode_request(&request, now);
        let payload = Bytes::from(payload.concat());
        let back = decode_request(request.lane, &body, payload.clone(), now).unwrap();
        assert_eq!(format!("{back:?}"), format!("{request:?}"));
        for _ in 0..10 {
            let mut body = body.clone();
            mutate(&mut rng, &mut body);
            let _ = decode_request(Lane(0), &body, payload.clone(), now);
            let _ = decode_reply(rng.one_in(2), &body, payload.clone());
        }
    });
}

/// Returns frames that either side might send, most of them well-formed.
fn random_frames(rng: &mut Rng, now: Instant) -> Vec<u8> {
    let mut bytes = Vec::new();
    for _ in 0..rng.below(12) {
        let id = rng.below(6) as u64;
        let more = rng.one_in(4);
        match rng.below(12) {
            0..4 => {
                let (body, payload) = encode_request(&Request::new(random_operation(rng)), now);
                bytes.extend(frame(Kind::Request, id, rng.below(3) as u32, more, &body, &payload.concat()));
            }
            4..7 => {
                let (body, payload, _) = encode_reply(&Ok(random_value(rng, 0)));
                bytes.extend(frame(Kind::Reply, id, 0, more, &body, &payload.concat()));
            }
            7 => {
                let (body, ..) = encode_reply(&Err(RpcError::not_found("x")));
                bytes.extend(frame(Kind::Error, id, 0, false, &body, &[]));
            }
            8 => bytes.extend(frame([Kind::Ping, Kind::Pong, Kind::Cancel][rng.below(3)], id, 0, false, &[], &[])),
            9 => bytes.extend(frame(Kind::Free, 0, 0, false, &rng.next().to_le_bytes(), &[])),
            10 => bytes.extend(frame(Kind::Credit, 0, 0, false, &rng.bytes(12), &[])),
            _ => bytes.extend(frame([Kind::GoAway, Kind::Close][rng.below(2)], 0, 0, false, &[], &[])),
        }
    }
    match rng.below(4) {
        0 => {}
        1 => {
            let len = rng.below(200);
            bytes = rng.bytes(len);
        }
        _ => mutate(rng, &mut bytes),
    }
    bytes
}

#[test]
fn endpoints_accept_or_refuse_any_bytes() {
    for_seeds(&[], 4_000, |seed| {
        let mut rng = Rng(seed);
        let pair = Setup::default().limits(64 << 10, 128 << 10, 20 << 10, 4).build();
        let (mut client, mut server, now) = (pair.client, pair.server, pair.now);
        for id in 0..3 {
            let into = ReadBuffer::new(BytesMut::zeroed(18_000));
            let read =
                Operation::Read { from: random_tensor(&mut rng).into(), offset: 0, len: 18_000, into: Some(into) };
            client.submit(id, Request::new(read), id, now);
        }
        let bytes = random_frames(&mut rng, now);
        let mut left = &bytes[..];
        let (mut to_client, mut to_server) = (BytesMut::new(), BytesMut::new());
        let (mut client_ok, mut server_ok) = (true, true);
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(1 + rng.below(2_000)));
            left = rest;
            to_client.extend_from_slice(piece);
            to_server.extend_from_slice(piece);
            if client_ok && let Err(error) = client.handle_input(&mut to_client, now) {
                assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                client.fail(error);
                client_ok = false;
            }
            while server_ok {
                match server.handle_input(&mut to_server, now, &mut |_, _, _, _| None) {
                    Ok(true) => {}
                    Ok(false) => break,
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                        server.close(Some(&error));
                        server_ok = false;
                    }
                }
                while let Some(event) = server.poll_event() {
                    if let ServerEvent::Request { id, .. } = event
                        && rng.one_in(2)
                    {
                        server.reply(id, Ok(random_value(&mut rng, 0)));
                    }
                }
                server.stage();
            }
        }
        client.handle_end_of_stream(to_client.len());
        let mut answered = BTreeSet::new();
        while let Some(event) = client.poll_event() {
            if let rpc_core::proto::ClientEvent::Reply(id, _) = event {
                assert!(answered.insert(id), "{id} was answered twice");
            }
        }
        assert_eq!(answered.len(), 3);
    });
}

#[test]
fn a_handshake_accepts_or_refuses_any_bytes() {
    for_seeds(&[], 3_000, |seed| {
        let mut rng = Rng(seed);
        let now = Instant::now();
        let config = |role, hold| HandshakeConfig {
            hello: Hello::new(role),
            identities: vec![Box::new(Anonymous)],
            hold,
            timeout: Duration::from_secs(1),
        };
        let mut peer = Handshake::dial(config(Role::Client, false), now);
        let mut bytes = peer.take_output().to_vec();
        bytes.extend(frame([Kind::Accept, Kind::Proof, Kind::Reject][rng.below(3)], 0, 0, false, &[], &[]));
        mutate(&mut rng, &mut bytes);
        let mut input = BytesMut::new();
        let hold = rng.one_in(2);
        let mut side = if rng.one_in(2) {
            Handshake::accept(config(Role::Server, hold), now)
        } else {
            Handshake::dial(config(Role::Server, hold), now)
        };
        let mut left = &bytes[..];
        while !left.is_empty() {
            let (piece, rest) = left.split_at(left.len().min(1 + rng.below(100)));
            left = rest;
            input.extend_from_slice(piece);
            match side.handle_input(&mut input) {
                Ok(None) => {}
                Ok(Some(negotiated)) => {
                    ServerEndpoint::new(&negotiated, EndpointConfig::default(), now);
                    ClientEndpoint::<()>::new(&negotiated, EndpointConfig::default(), now);
                    return;
                }
                Err(error) => {
                    let _ = error.to_string();
                    break;
                }
            }
            if side.awaits_approval().is_some() && rng.one_in(2) && side.approve().is_some() {
                return;
            }
        }
    });
}

#[test]
fn headers_are_decoded_or_refused() {
    let mut rng = Rng(1);
    for _ in 0..100_000 {
        let mut bytes = [0; HEADER_LEN];
        bytes.copy_from_slice(&rng.bytes(HEADER_LEN));
        if rng.one_in(2) {
            bytes[20] = [16, 17, 18, 32, 36][rng.below(5)];
            bytes[21] &= 1;
            bytes[22..].fill(0);
        }
        if let Ok(header) = FrameHeader::decode(&bytes, usize::MAX, usize::MAX) {
            assert_eq!(header.encode(), bytes);
        }
    }
}

/// Expected state of one history.
#[derive(Default)]
struct Model {
    next_id: u64,
    submitted: BTreeMap<u64, u32>,
    /// Objects that a request names: they must be alive when the request arrives.
    names: BTreeMap<u64, u64>,
    /// Objects that are alive at the server.
    live: BTreeSet<u64>,
    minted: u64,
    /// Objects that the client holds, from the replies that it has examined.
    held: Vec<u64>,
    looked_at: BTreeSet<u64>,
    /// Number of frames from the client that the server has acted on.
    acted: usize,
}

/// Returns the server's outcome of one request: sometimes with objects, sometimes too large,
/// sometimes an error.
fn answer(pair: &mut Pair, model: &mut Model, rng: &mut Rng, id: u64) {
    let outcome = match rng.below(8) {
        0 => Err(RpcError::new(ErrorKind::Application, "no")),
        1 => Ok(Value::Bytes(vec![1; 18_000 + rng.below(20_000)].into())),
        2 => Ok(Value::Bytes(vec![1; rng.below(8_000)].into())),
        3..6 => {
            let limit = if rng.one_in(4) { 40_000 } else { 10 };
            let fill = rng.below(limit);
            let mut values = vec![Value::Bytes(vec![2; fill].into())];
            for _ in 0..rng.below(4) {
                model.minted += 1;
                model.live.insert(model.minted);
                values.push(object(model.minted));
            }
            Ok(match values.len() % 2 {
                0 => Value::Map(values.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()),
                _ => Value::List(values),
            })
        }
        _ => Ok(Value::Null),
    };
    pair.reply(id, outcome);
    for value in std::mem::take(&mut pair.rejected) {
        for handle in value.handles() {
            assert!(model.live.remove(&handle.to_bits()), "{handle} came back twice");
        }
    }
}

/// Frees the released objects, and examines the replies as a caller would.
fn act_on_replies(pair: &mut Pair, model: &mut Model) {
    for arrived in &pair.arrived[model.acted..] {
        match arrived {
            Arrived::Release(handles) => {
                for handle in handles {
                    assert!(model.live.remove(handle), "object {handle} was freed twice");
                }
            }
            Arrived::Request(id) => {
                if let Some(handle) = model.names.get(id) {
                    assert!(
                        model.live.contains(handle),
                        "object {handle} was freed before request {id}, which uses it"
                    );
                }
            }
            _ => {}
        }
    }
    model.acted = pair.arrived.len();
    for (id, outcome) in &pair.outcomes {
        if model.looked_at.insert(*id)
            && let Ok(value) = outcome
        {
            model.held.extend(value.handles().iter().map(|handle| handle.to_bits()));
        }
    }
}

fn history(seed: u64) {
    let mut rng = Rng(seed);
    let max_message = 20_000 + rng.below(15_000) as u64;
    let room = if rng.one_in(2) { 5_000 } else { 60_000 };
    let window = max_message + rng.below(room) as u64;
    let cut = match rng.below(3) {
        0 => Cut::Whole,
        1 => Cut::Every(500 + rng.below(5_000)),
        _ => Cut::Random(Rng(rng.next())),
    };
    let mut setup = Setup {
        delay: Duration::from_millis(rng.below(30) as u64),
        capacity: 1 << (10 + rng.below(8)),
        ..Setup::default()
    };
    let chunk = 1 << (8 + rng.below(9));
    setup = setup.limits(max_message, window, chunk, 1 + rng.below(6) as u32).cut(cut);
    let mut pair = setup.build();
    let mut model = Model::default();
    for _ in 0..rng.below(120) {
        match rng.below(24) {
            0..8 => {
                model.next_id += 1;
                let id = model.next_id;
                let len = if rng.one_in(3) { rng.below(max_message as usize) } else { rng.below(5_000) };
                let lane = if rng.one_in(5) { Lane::CONCURRENT } else { Lane(rng.below(3) as u32) };
                // Some requests name an object that must be alive until they are served.
                let mut request = match model.held.last() {
                    Some(held) if rng.one_in(2) => {
                        model.names.insert(id, *held);
                        call_with(lane.0, vec![object(*held), Value::Bytes(vec![1; len / 2].into())])
                    }
                    _ => call(lane.0, len),
                };
                request.deadline = rng.one_in(5).then(|| pair.now + Duration::from_millis(rng.below(200) as u64));
                if !matches!(pair.submit(id, request), Admission::Refused(..)) {
                    model.submitted.insert(id, lane.0);
                }
            }
            8..10 => pair.client.cancel(1 + rng.below(model.next_id as usize + 1) as u64),
            10 => {
                if let Some(held) = model.held.pop() {
                    pair.client.release([Handle::from_bits(held)]);
                }
            }
            11..16 => {
                let waiting: Vec<_> = pair.requests.keys().copied().collect();
                if !waiting.is_empty() {
                    let id = waiting[rng.below(waiting.len())];
                    answer(&mut pair, &mut model, &mut rng, id);
                }
            }
            16 => pair.client_reads = !pair.client_reads,
            17 => pair.server_reads = !pair.server_reads,
            18 => pair.setup.capacity = 1 << (10 + rng.below(8)),
            19 if rng.one_in(10) => pair.server.go_away(&RpcError::new(ErrorKind::Draining, "going")),
            _ => {
                // Less than a keep-alive interval in which no side reads.
                let time = if pair.client_reads && pair.server_reads { 10_000 } else { 500 };
                pair.advance(Duration::from_millis(rng.below(time) as u64));
            }
        }
        if rng.one_in(3) {
            pair.run();
        }
        act_on_replies(&mut pair, &mut model);
        if pair.ended.is_some() {
            break;
        }
    }
    (pair.client_reads, pair.server_reads) = (true, true);
    let end = rng.below(4);
    if end == 0 {
        pair.cut_off();
    } else {
        if end == 1 {
            pair.client.shutdown(Some(u64::MAX));
        }
        loop {
            pair.run();
            act_on_replies(&mut pair, &mut model);
            let Some(id) = pair.requests.keys().next().copied() else { break };
            answer(&mut pair, &mut model, &mut rng, id);
        }
    }
    pair.run();
    act_on_replies(&mut pair, &mut model);
    if let Some(error) = &pair.server_error {
        assert_ne!(error.kind(), ErrorKind::Protocol, "{error}");
    }
    if end > 1 && pair.ended.is_none() {
        assert!(pair.client.is_flushed() && pair.server.is_flushed());
        assert!(pair.client.is_quiet() && pair.server.in_flight() == 0);
        // The live objects are those that the client holds, and all of them can be released.
        let held: BTreeSet<_> = model.held.iter().copied().collect();
        assert_eq!(held.len(), model.held.len(), "an object was handed out twice");
        assert_eq!(held, model.live, "objects were lost");
        pair.client.release(model.held.drain(..).map(Handle::from_bits));
        pair.run();
        act_on_replies(&mut pair, &mut model);
        assert!(model.live.is_empty());
        // An idle session only sends pings.
        let turns = pair.turns;
        pair.advance(Duration::from_secs(60));
        assert!(pair.ended.is_none() && pair.turns - turns < 3_000, "{}", pair.turns - turns);
    }
    for id in 1..=model.next_id {
        assert!(pair.outcomes.contains_key(&id), "{id} has no outcome");
    }
    assert_eq!(pair.answered.len(), model.next_id as usize + usize::from(end == 1));
    check_order(&pair, &model);
}

fn check_order(pair: &Pair, model: &Model) {
    let mut last = BTreeMap::new();
    for id in pair.requests_in_order() {
        let lane = model.submitted[&id];
        if lane != u32::MAX
            && let Some(before) = last.insert(lane, id)
        {
            assert!(before < id, "{id} came behind {before} in lane {lane}");
        }
    }
    // A request reaches the server before its cancellation, and before the frees of the objects
    // that it uses.
    let mut seen = BTreeSet::new();
    for arrived in &pair.arrived {
        match arrived {
            Arrived::Request(id) => assert!(seen.insert(*id), "{id} arrived twice"),
            Arrived::Cancel(id) => assert!(seen.contains(id), "{id} was cancelled before it came"),
            _ => {}
        }
    }
}

#[test]
fn any_history_ends_with_one_outcome_per_request() {
    for_seeds(SEEDS, 1_500, history);
}
