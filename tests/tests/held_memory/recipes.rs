//! Floods: for each kind of frame, each operation and each built-in function, the frames of a
//! client that wants its server to hold as much as it can.

use bytes::Bytes;
use rpc_core::proto::{CodecError, FrameHeader, HEADER_LEN, Kind, decode_request};
use rpc_core::{DataType, Device, DeviceAttribute, Handle, Lane, Operation, Reference, Value};
use rpc_tests::accelerator::Accelerator;

use super::peer::{Peer, control};

/// Maker of the frames of a flood, by their number.
pub(crate) type Flood = Box<dyn FnMut(&mut Peer, u64) -> Vec<u8>>;

/// Bytes of a large argument: half of the largest message.
pub(crate) const LARGE: usize = 128 << 10;

/// Returns all kinds of frames that this version of the protocol knows.
pub(crate) fn frame_kinds() -> Vec<Kind> {
    let kind = |code: u8| {
        // The kind's place in the header is where two kinds differ.
        let (a, b) = (FrameHeader::control(Kind::Ping, 0).encode(), FrameHeader::control(Kind::Free, 0).encode());
        let at = (0..HEADER_LEN).find(|at| a[*at] != b[*at])?;
        let mut header = a;
        header[at] = code;
        FrameHeader::decode(&header, usize::MAX, usize::MAX).ok().map(|header| header.kind)
    };
    (0..=u8::MAX).filter_map(kind).collect()
}

/// Returns the number of each operation that is a request of this version of the protocol.
pub(crate) fn operations() -> Vec<u8> {
    let is_known = |number: &u8| {
        // An array of three: the number, nil, and no fields.
        let body = [&[0x93][..], if *number < 128 { &[][..] } else { &[0xcc] }, &[*number, 0xc0, 0x90]].concat();
        let decoded = decode_request(Lane(1), &body, Bytes::new(), std::time::Instant::now());
        !matches!(decoded, Err(CodecError::UnknownOperation(_)))
    };
    (0..=u8::MAX).filter(is_known).collect()
}

/// Returns the flood of frames of one kind.
pub(crate) fn of_frames(kind: Kind) -> Flood {
    match kind {
        // After the handshake those of the handshake break the protocol, and so do those of
        // servers. What is sent before the server has noticed is not kept.
        Kind::Hello | Kind::Accept | Kind::Reject | Kind::Proof | Kind::Reply | Kind::Error | Kind::GoAway => {
            Box::new(move |_, number| control(kind, number, &[0xc0; 4096]))
        }
        // A first frame that no other follows.
        Kind::Request => Box::new(|_, number| {
            let header = FrameHeader {
                id: 1 << 32 | number,
                lane: number as u32,
                more: true,
                payload_len: LARGE as u32,
                ..FrameHeader::control(Kind::Request, 0)
            };
            [&header.encode()[..], &[0; LARGE]].concat()
        }),
        // Numbered and unnumbered.
        Kind::Ping | Kind::Pong => Box::new(move |_, number| control(kind, number % 2 * number, &[])),
        Kind::Cancel => Box::new(|_, number| control(Kind::Cancel, number, &[])),
        Kind::Free => Box::new(|_, number| {
            let handles = (0..4000).flat_map(|handle| (number << 32 | handle).to_le_bytes());
            control(Kind::Free, 0, &handles.collect::<Vec<u8>>())
        }),
        // One request and one byte, time and again.
        Kind::Credit => Box::new(|_, _| {
            let body = [&1_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
            control(Kind::Credit, 0, &body)
        }),
        Kind::Close => Box::new(|_, _| control(Kind::Close, 0, &[])),
        other => panic!("frames of the kind {other:?} have no recipe here: add one"),
    }
}

/// Returns the flood of requests for one operation.
pub(crate) fn of_operation(number: u8, peer: &mut Peer) -> Flood {
    let cpu = Device::cpu();
    let mut operation: Box<dyn FnMut(u64) -> (u32, Operation)> = match number {
        1 => Box::new(|_| (1, Operation::GetFunction { name: "rpc.echo".into() })),
        2 => {
            let function = peer.function("rpc.echo");
            Box::new(move |_| (1, Operation::Call { function, args: vec![Value::Bytes(vec![1; LARGE].into())] }))
        }
        3 => Box::new(move |_| {
            let shape = vec![LARGE as i64];
            (1, Operation::Alloc { device: cpu, dtype: DataType::U8, shape, scope: None })
        }),
        4 => {
            let to = peer.tensor(LARGE as i64);
            Box::new(move |_| (1, Operation::Write { to: to.clone(), offset: 0, data: vec![1; LARGE].into() }))
        }
        5 => {
            let from = peer.tensor(1 << 20);
            Box::new(move |_| (1, Operation::Read { from: from.clone(), offset: 0, len: 1 << 20, into: None }))
        }
        6 => {
            let (from, to) = (peer.tensor(1 << 20), peer.tensor(1 << 19));
            let from = rpc_core::TensorRef { shape: vec![1 << 19], ..from };
            Box::new(move |_| (1, Operation::Copy { from: from.clone(), to: to.clone() }))
        }
        7 => Box::new(|number| (1, Operation::Free { handle: Handle::from_bits(number) })),
        8 => Box::new(move |_| (1, Operation::Attribute { device: cpu, attribute: DeviceAttribute::Target })),
        9 => Box::new(move |_| (1, Operation::CreateStream { device: cpu })),
        // A lane of its own for each, which has its own stream.
        10 => {
            let stream = peer.ask(Operation::CreateStream { device: cpu }).handles()[0];
            Box::new(move |number| (number as u32, Operation::SetStream { device: cpu, stream: Some(stream) }))
        }
        11 => Box::new(move |number| (number as u32, Operation::StreamWait { device: cpu, stream: None })),
        12 => Box::new(|_| (1, Operation::LoadModule { path: "x".repeat(LARGE / 2), loader: None })),
        13 => Box::new(|_| {
            let (module, name) = (Handle::from_bits(1), "x".repeat(LARGE / 2));
            (1, Operation::ModuleFunction { module, name })
        }),
        other => panic!("operation {other} has no recipe here: add one"),
    };
    Box::new(move |peer, number| {
        let (lane, operation) = operation(number);
        peer.request(lane, operation)
    })
}

/// Returns the flood of reads of a whole tensor on a device whose memory the host cannot access.
pub(crate) fn of_device_reads(peer: &mut Peer) -> Flood {
    let (dtype, device) = (DataType::U8, Device::new(rpc_core::DeviceApi::kind(&Accelerator::default()), 0));
    let alloc = Operation::Alloc { device, dtype, shape: vec![super::MAX_MEMORY as i64], scope: None };
    let Value::Object(Reference::Tensor(from)) = peer.ask(alloc) else { panic!("no tensor") };
    Box::new(move |peer, number| {
        let from = from.clone();
        // Each on a lane of its own.
        peer.request(number as u32, Operation::Read { from, offset: 0, len: super::MAX_MEMORY, into: None })
    })
}

/// Returns the flood of calls of one built-in function. `None` for those of Disco, whose commands
/// have a test of their own.
pub(crate) fn of_function(name: &str, peer: &mut Peer) -> Option<Flood> {
    if name.starts_with("disco.") {
        return None;
    }
    let function = peer.function(name);
    let text = |text: &str| Value::Str(text.into());
    let large = || Value::Bytes(vec![1; LARGE].into());
    let mut args: Box<dyn FnMut(u64) -> Vec<Value>> = match name {
        "rpc.echo" | "rpc.noop" => Box::new(move |_| vec![large()]),
        "rpc.new_object" | "rpc.functions" | "rpc.info" | "rpc.callback.create" => Box::new(|_| Vec::new()),
        "rpc.signature" => Box::new(move |_| vec![text("rpc.echo")]),
        "rpc.sleep" => Box::new(|_| vec![Value::Float(3600.0)]),
        "rpc.time_function" => {
            let noop = function_value(peer, "rpc.echo");
            let (samples, warmup) = (Value::Int(1_000_000), Value::Int(0));
            Box::new(move |_| vec![noop.clone(), Value::Int(1), samples.clone(), Value::Float(0.0), warmup.clone()])
        }
        "rpc.callback.next" => {
            let source = callback_source(peer);
            Box::new(move |_| vec![source.clone()])
        }
        "rpc.callback.done" => Box::new(move |_| vec![Value::Null, large(), Value::Null]),
        "rpc.file.begin_write" => {
            Box::new(move |number| vec![text(&format!("{number}/{}", "x".repeat(200))), Value::Null])
        }
        "rpc.file.write" => {
            let writer = writer(peer, "written");
            Box::new(move |number| vec![writer.clone(), Value::Int((number as i64 % 16) << 17), large()])
        }
        "rpc.file.commit" | "rpc.file.abort" => {
            let writer = writer(peer, "ended");
            Box::new(move |_| vec![writer.clone()])
        }
        "rpc.file.open" => {
            file(peer, 1);
            Box::new(move |_| vec![text("file")])
        }
        "rpc.file.read" => {
            file(peer, 32);
            let Value::List(opened) = peer.call("rpc.file.open", vec![text("file")]) else { panic!("no reader") };
            Box::new(move |_| vec![opened[0].clone(), Value::Int(0), Value::Int(4 << 20)])
        }
        "rpc.file.ls" => {
            file(peer, 1);
            Box::new(move |_| vec![text("")])
        }
        "rpc.file.rm" => Box::new(move |_| vec![text(&"x".repeat(LARGE / 2))]),
        // Without --allow-modules all of them refuse.
        "rpc.module.find" | "rpc.module.import" => Box::new(move |_| vec![text(&"x".repeat(LARGE / 2))]),
        "rpc.module.begin_upload" => Box::new(move |_| vec![text(&"0".repeat(64)), Value::Int(1 << 20)]),
        "rpc.module.write" => Box::new(move |_| vec![Value::Null, Value::Int(0), large()]),
        "rpc.module.commit" | "rpc.module.functions" => Box::new(move |_| vec![large()]),
        "rpc.module.import_tensor" => Box::new(move |_| vec![text(&"0".repeat(64)), large()]),
        other => panic!("the built-in function {other} has no recipe here: add one"),
    };
    // Lanes of their own, so that calls need not wait for each other.
    Some(Box::new(move |peer, number| {
        let args = args(number);
        peer.request(number as u32, Operation::Call { function, args })
    }))
}

fn function_value(peer: &mut Peer, name: &str) -> Value {
    peer.ask(Operation::GetFunction { name: name.into() })
}

fn callback_source(peer: &mut Peer) -> Value {
    match peer.call("rpc.callback.create", Vec::new()) {
        Value::List(mut ends) => ends.remove(1),
        other => panic!("{other:?}"),
    }
}

fn writer(peer: &mut Peer, path: &str) -> Value {
    peer.call("rpc.file.begin_write", vec![Value::Str(path.into()), Value::Null])
}

/// Writes the file `file` of this many large pieces.
fn file(peer: &mut Peer, pieces: i64) {
    let writer = writer(peer, "file");
    for piece in 0..pieces {
        let offset = Value::Int(piece * LARGE as i64);
        peer.call("rpc.file.write", vec![writer.clone(), offset, Value::Bytes(vec![1; LARGE].into())]);
    }
    peer.call("rpc.file.commit", vec![writer]);
}
