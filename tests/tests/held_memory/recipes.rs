//! Floods: for each kind of frame, each operation and each built-in function, the frames of a
//! client that wants its server to hold as much as it can.

use std::net::{TcpListener, TcpStream};
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::client::RunRequest;
use rpc_core::proto::{CodecError, FrameHeader, HEADER_LEN, Kind, decode_request};
use rpc_core::{
    DataType, Device, DeviceAttribute, ErrorKind, FunctionModule, Handle, Lane, LoadRequest, Module, ModuleLoader,
    Operation, Packed, PipeId, Reference, Result, Value,
};
use rpc_tests::accelerator::Accelerator;

use super::disco_recipes;
use super::peer::{Peer, control};

/// Maker of the frames of a flood, by their number.
pub(crate) type Flood = Box<dyn FnMut(&mut Peer, u64) -> Vec<u8>>;

/// A flood, and what the server is to say to its first frame.
pub(crate) struct Recipe {
    pub(crate) frames: Flood,
    pub(crate) answer: Answer,
}

/// Answer of the server to the first frame of a flood. It shows that the flood reaches what it is
/// meant for, and is not refused at the door.
pub(crate) enum Answer {
    /// A value.
    Value,
    /// An error of this kind.
    Error(ErrorKind),
    /// The request is answered later than the flood ends, if at all.
    Later,
    /// The frame is no request, and has no answer.
    NoRequest,
    /// The server ends the connection.
    EndsConnection,
}

impl Answer {
    /// Sends the first frame of the flood `name`, and checks the server's answer.
    pub(crate) fn check(&self, name: &str, peer: &mut Peer, frame: &[u8]) {
        match self {
            Self::Value => _ = peer.reply_to(frame).unwrap_or_else(|error| panic!("{name}: {error}")),
            Self::Error(kind) => match peer.reply_to(frame) {
                Err(error) => assert_eq!(error.kind(), *kind, "{name}: {error}"),
                Ok(value) => panic!("{name}: not an error, but {value:?}"),
            },
            Self::Later => peer.send(frame),
            Self::NoRequest | Self::EndsConnection => {}
        }
    }
}

/// Bytes of a large argument: half of the largest message.
pub(crate) const LARGE: usize = 128 << 10;

/// Length of a long text in bytes: half of what the body of one frame may have.
pub(crate) const LONG: usize = 32 << 10;

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
pub(crate) fn of_frames(kind: Kind) -> Recipe {
    let mut answer = Answer::NoRequest;
    let frames: Flood = match kind {
        // After the handshake those of the handshake break the protocol, and so do those of
        // servers. What is sent before the server has noticed is not kept.
        Kind::Hello | Kind::Accept | Kind::Reject | Kind::Proof | Kind::Reply | Kind::Error | Kind::GoAway => {
            answer = Answer::EndsConnection;
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
        Kind::Free => {
            let mut handles: Vec<u8> = (0..4000_u64).flat_map(u64::to_le_bytes).collect();
            Box::new(move |_, number| {
                handles[..8].copy_from_slice(&(number << 32).to_le_bytes());
                control(Kind::Free, 0, &handles)
            })
        }
        // One request and one byte, time and again.
        Kind::Credit => Box::new(|_, _| {
            let body = [&1_u32.to_le_bytes()[..], &1_u64.to_le_bytes()].concat();
            control(Kind::Credit, 0, &body)
        }),
        // The first one is refused, and a second one breaks the protocol.
        Kind::Window => {
            answer = Answer::EndsConnection;
            Box::new(|_, _| control(Kind::Window, 0, &[0xc0; 4096]))
        }
        Kind::Close => {
            answer = Answer::EndsConnection;
            Box::new(|_, _| control(Kind::Close, 0, &[]))
        }
        other => panic!("frames of the kind {other:?} have no recipe here: add one"),
    };
    Recipe { frames, answer }
}

/// Returns the flood of requests for one operation.
pub(crate) fn of_operation(number: u8, peer: &mut Peer) -> Recipe {
    let cpu = Device::cpu();
    let mut answer = Answer::Value;
    let mut operation: Box<dyn FnMut(u64) -> (u32, Operation)> = match number {
        1 => Box::new(|_| (1, Operation::GetFunction { name: "rpc.echo".into() })),
        2 => {
            let function = peer.function("rpc.echo");
            Box::new(move |_| (1, Operation::Call { function, args: vec![Value::Bytes(vec![1; LARGE].into())] }))
        }
        3 => Box::new(move |_| {
            let shape = vec![LARGE as i64];
            (1, Operation::Alloc { device: cpu, dtype: DataType::U8, shape, scope: None, alignment: 0 })
        }),
        4 => {
            let to = peer.tensor(LARGE as i64);
            Box::new(move |_| (1, Operation::Write { to: to.clone().into(), offset: 0, data: vec![1; LARGE].into() }))
        }
        5 => {
            let from = peer.tensor(1 << 20);
            Box::new(move |_| (1, Operation::Read { from: from.clone().into(), offset: 0, len: 1 << 20, into: None }))
        }
        6 => {
            let (from, to) = (peer.tensor(1 << 20), peer.tensor(1 << 19));
            let from = rpc_core::TensorRef { shape: vec![1 << 19], ..from };
            Box::new(move |_| (1, Operation::Copy { from: from.clone().into(), to: to.clone().into() }))
        }
        7 => {
            answer = Answer::Error(ErrorKind::InvalidHandle);
            Box::new(|number| (1, Operation::Free { handle: Handle::from_bits(number) }))
        }
        8 => Box::new(move |_| (1, Operation::Attribute { device: cpu, attribute: DeviceAttribute::Target })),
        9 => Box::new(move |_| (1, Operation::CreateStream { device: cpu })),
        // A lane of its own for each, which has its own stream.
        10 => {
            let stream = peer.ask(Operation::CreateStream { device: cpu }).handles()[0];
            Box::new(move |number| (number as u32, Operation::SetStream { device: cpu, stream: Some(stream) }))
        }
        11 => Box::new(move |number| (number as u32, Operation::StreamWait { device: cpu, stream: None })),
        12 => Box::new(|number| (1, Operation::LoadModule { path: format!("test:{number}"), loader: None })),
        13 => {
            let module = module(peer);
            Box::new(move |_| (1, Operation::ModuleFunction { module, name: "function".into() }))
        }
        14 => {
            let other = Some(peer.ask(Operation::CreateStream { device: cpu }).handles()[0]);
            let wait = move || Operation::StreamWaitFor { device: cpu, stream: None, other_device: cpu, other };
            Box::new(move |number| (number as u32, wait()))
        }
        // Little memory, with an alignment that is much larger.
        15 => Box::new(move |_| {
            let (dtype, alignment) = (DataType::U8, LARGE.next_power_of_two() as u64);
            (1, Operation::Alloc { device: cpu, dtype, shape: vec![1], scope: None, alignment })
        }),
        16 => {
            let pipe = kept_text(peer);
            Box::new(move |_| (1, Operation::Fetch { handle: pipe.handle() }))
        }
        other => panic!("operation {other} has no recipe here: add one"),
    };
    let frames = Box::new(move |peer: &mut Peer, number| {
        let (lane, operation) = operation(number);
        peer.request(lane, operation)
    });
    Recipe { frames, answer }
}

/// Has the server keep a large text as a result of lane 1.
fn kept_text(peer: &mut Peer) -> PipeId {
    let (function, pipe) = (peer.function("rpc.echo"), PipeId::unused());
    let frame = peer.kept(pipe, Operation::Call { function, args: vec![text(&"x".repeat(LONG))] });
    peer.reply_to(&frame).unwrap();
    pipe
}

/// Returns the flood of calls whose results are kept and never freed.
pub(crate) fn of_kept_results(peer: &mut Peer, arg: Value) -> Recipe {
    let function = peer.function("rpc.echo");
    let frames = Box::new(move |peer: &mut Peer, _| {
        peer.kept(PipeId::unused(), Operation::Call { function, args: vec![arg.clone()] })
    });
    Recipe { frames, answer: Answer::Value }
}

/// Returns the flood of calls that each take one large result several times.
pub(crate) fn of_named_results(peer: &mut Peer) -> Recipe {
    let (function, pipe) = (peer.function("rpc.echo"), kept_text(peer));
    let frames = Box::new(move |peer: &mut Peer, _| {
        let result = Value::Object(Reference::Pipe(pipe.handle()));
        peer.request(1, Operation::Call { function, args: vec![Value::List(vec![result; 16])] })
    });
    Recipe { frames, answer: Answer::Value }
}

/// Returns the flood of calls that wait in their lane, and name results and other objects.
pub(crate) fn of_waiting_names(peer: &mut Peer) -> Recipe {
    let (function, pipe) = (peer.function("rpc.echo"), kept_text(peer));
    let sleep = peer.function("rpc.sleep");
    // As many as make a message without cost.
    let objects = (0..30).map(|_| Value::Object(Reference::Function(peer.function("rpc.echo"))));
    let result = Value::Object(Reference::Pipe(pipe.handle()));
    let args = Value::List(objects.chain(vec![result; 30]).collect());
    let mut has_begun = false;
    let frames = Box::new(move |peer: &mut Peer, _| {
        let (function, arg) = match std::mem::replace(&mut has_begun, true) {
            false => (sleep, Value::Float(3600.0)),
            true => (function, args.clone()),
        };
        peer.request(1, Operation::Call { function, args: vec![arg] })
    });
    Recipe { frames, answer: Answer::Later }
}

/// Returns the flood of requests for modules that are not there, each by another path.
pub(crate) fn of_failing_loads(_: &mut Peer) -> Recipe {
    let frames = Box::new(|peer: &mut Peer, number| {
        let path = format!("{number:0length$}.so", length = LONG);
        peer.request(1, Operation::LoadModule { path, loader: None })
    });
    Recipe { frames, answer: Answer::Error(ErrorKind::InvalidArgument) }
}

/// Returns the flood of reads of a whole tensor on a device whose memory the host cannot access.
pub(crate) fn of_device_reads(peer: &mut Peer) -> Recipe {
    let (dtype, device) = (DataType::U8, Device::new(rpc_core::DeviceApi::kind(&Accelerator::default()), 0));
    let len = super::MAX_QUEUED;
    let alloc = Operation::Alloc { device, dtype, shape: vec![len as i64], scope: None, alignment: 0 };
    let Value::Object(Reference::Tensor(from)) = peer.ask(alloc) else { panic!("no tensor") };
    let frames = Box::new(move |peer: &mut Peer, number| {
        let from = from.clone();
        // Each on a lane of its own.
        peer.request(number as u32, Operation::Read { from, offset: 0, len, into: None })
    });
    Recipe { frames, answer: Answer::Value }
}

/// Returns the flood of reads of a connection whose far end sends without end.
pub(crate) fn of_listened_bytes(peer: &mut Peer) -> Recipe {
    let (connection, mut far) = accepted(peer);
    // Until the server closes the connection.
    std::thread::spawn(move || while std::io::Write::write_all(&mut far, &[1; 4096]).is_ok() {});
    let function = peer.function("rpc.listen.read");
    let frames = Box::new(move |peer: &mut Peer, number| {
        let args = vec![connection.clone()];
        // Each on a lane of its own.
        peer.request(number as u32, Operation::Call { function, args })
    });
    Recipe { frames, answer: Answer::Value }
}

/// Calls of one function in a flood.
pub(crate) struct Calls {
    args: Box<dyn FnMut(u64) -> Vec<Value>>,
    answer: Answer,
    lane: fn(u64) -> u32,
}

impl Calls {
    /// Returns calls with these arguments, by the number of the call, which are answered by values.
    /// Each has a lane of its own, so that none waits for another.
    pub(crate) fn new(args: impl FnMut(u64) -> Vec<Value> + 'static) -> Self {
        Self { args: Box::new(args), answer: Answer::Value, lane: |number| number as u32 }
    }

    /// Returns the calls, of which the first one is answered so.
    pub(crate) fn answered(self, answer: Answer) -> Self {
        Self { answer, ..self }
    }

    /// Returns the calls on these lanes.
    pub(crate) fn on_lane(self, lane: fn(u64) -> u32) -> Self {
        Self { lane, ..self }
    }
}

/// Returns the flood of calls of one built-in function.
pub(crate) fn of_function(name: &str, peer: &mut Peer) -> Recipe {
    let is_of_disco = name.starts_with("disco.");
    let Calls { mut args, answer, lane } =
        if is_of_disco { disco_recipes::calls(name, peer) } else { calls(name, peer) };
    let function = peer.function(name);
    let frames = Box::new(move |peer: &mut Peer, number| {
        let args = args(number);
        peer.request(lane(number), Operation::Call { function, args })
    });
    Recipe { frames, answer }
}

fn text(text: &str) -> Value {
    Value::Str(text.into())
}

/// Returns a large argument.
pub(crate) fn large() -> Value {
    Value::Bytes(vec![1; LARGE].into())
}

/// Returns the calls of one function of `rpc_server::builtins`.
fn calls(name: &str, peer: &mut Peer) -> Calls {
    match name {
        "rpc.echo" | "rpc.noop" => Calls::new(|_| vec![large()]),
        "rpc.new_object"
        | "rpc.functions"
        | "rpc.info"
        | "rpc.file.cache_limit"
        | "rpc.lease.status"
        | "rpc.trace.clock"
        | "rpc.disco.sessions"
        | "rpc.callback.create" => Calls::new(|_| Vec::new()),
        // This server keeps no log lines.
        "rpc.logs.read" => Calls::new(|_| Vec::new()).answered(Answer::Error(ErrorKind::Refused)),
        "rpc.signature" => Calls::new(|_| vec![text("rpc.echo")]),
        "rpc.can" => Calls::new(|_| vec![text("call:rpc.echo")]),
        "rpc.sleep" => Calls::new(|_| vec![Value::Float(3600.0)]).answered(Answer::Later),
        "rpc.time_function" => {
            let echo = peer.ask(Operation::GetFunction { name: "rpc.echo".into() });
            let (number, samples, warmup) = (Value::Int(1), Value::Int(5_000), Value::Int(0));
            let args = vec![echo, number, samples, Value::Float(0.0), warmup, Value::Int(1 << 12)];
            Calls::new(move |_| args.clone())
        }
        "rpc.trace.call" => {
            let echo = peer.ask(Operation::GetFunction { name: "rpc.echo".into() });
            Calls::new(move |_| vec![echo.clone(), large()])
        }
        "rpc.callback.next" => {
            let (_, source) = callback(peer);
            Calls::new(move |_| vec![source.clone()]).answered(Answer::Later)
        }
        "rpc.callback.done" => {
            let call = taken_call(peer);
            Calls::new(move |_| vec![call.clone(), large(), Value::Null])
        }
        "rpc.file.begin_write" => {
            Calls::new(|number| vec![text(&format!("{number}/{}", "x".repeat(200))), Value::Null])
        }
        "rpc.file.resume_write" => {
            Calls::new(|number| vec![text(&format!("{number}/{}", "x".repeat(200))), Value::Int(1)])
        }
        "rpc.file.write" => {
            let writer = writer(peer, "written");
            Calls::new(move |number| vec![writer.clone(), Value::Int((number as i64 % 16) << 17), large()])
        }
        "rpc.file.commit" | "rpc.file.abort" => {
            let writer = writer(peer, "ended");
            Calls::new(move |_| vec![writer.clone()])
        }
        "rpc.file.open" => {
            file(peer, 1);
            Calls::new(|_| vec![text("file")])
        }
        "rpc.file.read" => {
            file(peer, 8);
            let Value::List(opened) = peer.call("rpc.file.open", vec![text("file")]) else { panic!("no reader") };
            Calls::new(move |_| vec![opened[0].clone(), Value::Int(0), Value::Int(1 << 20)])
        }
        "rpc.file.ls" => {
            // Each with a name of its own, which takes more memory than the file.
            for number in 0..LISTED {
                let writer = writer(peer, &format!("{number}{}", "x".repeat(200)));
                peer.call("rpc.file.commit", vec![writer]);
            }
            Calls::new(|_| vec![text("")])
        }
        "rpc.file.folders" => {
            for number in 0..LISTED {
                peer.call("rpc.file.create_folder", vec![text(&format!("{number}{}", "x".repeat(200)))]);
            }
            Calls::new(|_| vec![])
        }
        "rpc.file.digest" => {
            file(peer, 1);
            Calls::new(|_| vec![text("file")])
        }
        "rpc.file.prefix_digest" => {
            file(peer, 1);
            let Value::List(opened) = peer.call("rpc.file.open", vec![text("file")]) else { panic!("no reader") };
            Calls::new(move |_| vec![opened[0].clone(), Value::Int(LARGE as i64)])
        }
        "rpc.file.to_cache" => {
            file(peer, 1);
            Calls::new(|_| vec![text("file")])
        }
        "rpc.file.from_cache" => {
            file(peer, 1);
            let Value::Str(digest) = peer.call("rpc.file.to_cache", vec![text("file")]) else { panic!("not cached") };
            let (digest, len) = (Value::Str(digest), Value::Int(LARGE as i64));
            Calls::new(move |number| {
                let path = text(&format!("{number}/{}", "x".repeat(200)));
                vec![digest.clone(), len.clone(), path, Value::Bool(true)]
            })
        }
        "rpc.file.tensor_to_cache" => {
            let tensor = Value::Object(Reference::Tensor(peer.tensor(LARGE as i64).into()));
            Calls::new(move |_| vec![tensor.clone()])
        }
        "rpc.file.tensor_from_cache" => {
            let tensor = Value::Object(Reference::Tensor(peer.tensor(LARGE as i64).into()));
            let digest = peer.call("rpc.file.tensor_to_cache", vec![tensor.clone()]);
            Calls::new(move |_| vec![digest.clone(), tensor.clone()])
        }
        "rpc.file.rm" | "rpc.file.create_folder" => {
            Calls::new(|_| vec![text(&"x".repeat(LONG))]).answered(Answer::Error(ErrorKind::InvalidArgument))
        }
        "rpc.file.set_executable" => {
            Calls::new(|_| vec![text("no file"), Value::Bool(true)]).answered(Answer::Error(ErrorKind::NotFound))
        }
        // Programs run in sessions with processes of their own alone.
        "rpc.run.start" => Calls::new(|_| vec![run_request()]).answered(Answer::Error(ErrorKind::Refused)),
        "rpc.run.read" | "rpc.run.wait" | "rpc.run.close_input" | "rpc.run.terminate" => {
            Calls::new(|_| vec![large()]).answered(Answer::Error(ErrorKind::InvalidArgument))
        }
        "rpc.run.write" => {
            Calls::new(|_| vec![Value::Null, large()]).answered(Answer::Error(ErrorKind::InvalidArgument))
        }
        "rpc.listen.open" => Calls::new(|_| vec![text("tcp://127.0.0.1:0")]),
        // No one connects.
        "rpc.listen.accept" => {
            let listener = listener(peer).0;
            Calls::new(move |_| vec![listener.clone()]).answered(Answer::Later)
        }
        // The far end neither sends nor reads.
        "rpc.listen.read" => {
            let connection = accepted(peer);
            Calls::new(move |_| vec![handle_of(&connection)]).answered(Answer::Later)
        }
        "rpc.listen.write" => {
            let connection = accepted(peer);
            Calls::new(move |_| vec![handle_of(&connection), large()])
        }
        "rpc.listen.finish" => {
            let connection = accepted(peer);
            Calls::new(move |_| vec![handle_of(&connection)])
        }
        "rpc.peer.offer" => {
            let args = offer_args(peer);
            Calls::new(move |_| args.clone())
        }
        "rpc.peer.withdraw" => {
            let args = offer_args(peer);
            let Value::List(offered) = peer.call("rpc.peer.offer", args) else { panic!("no offer") };
            Calls::new(move |_| vec![offered[0].clone()])
        }
        // The destination accepts connections, and says nothing.
        "rpc.peer.send" => {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = text(&format!("tcp://{}", listener.local_addr().unwrap()));
            let tensor = Value::Object(Reference::Tensor(peer.tensor(LARGE as i64).into()));
            let capability = text(&rpc_transports::Capability::generate().unwrap().to_text());
            let (offset, len, encrypted) = (Value::Int(0), Value::Int(LARGE as i64), Value::Bool(false));
            let args = vec![tensor, offset, len, Value::List(vec![address; 8]), capability, encrypted];
            Calls::new(move |_| {
                let _listening = &listener;
                args.clone()
            })
            .answered(Answer::Later)
        }
        "rpc.lease.request" => Calls::new(|_| lease_args()),
        "rpc.lease.wait" => {
            // The first one holds the device.
            let [_held, waiting] = [(); 2].map(|()| peer.call("rpc.lease.request", lease_args()));
            Calls::new(move |_| vec![waiting.clone()]).answered(Answer::Later)
        }
        "rpc.lease.ahead" | "rpc.lease.release" => {
            let lease = peer.call("rpc.lease.request", lease_args());
            Calls::new(move |_| vec![lease.clone()])
        }
        "rpc.module.find" => {
            let upload = upload(peer);
            peer.call("rpc.module.commit", vec![upload]);
            Calls::new(|_| vec![text(&digest_of(&MODULE))])
        }
        "rpc.file.path" => {
            Calls::new(|_| vec![text(&"x".repeat(LONG))]).answered(Answer::Error(ErrorKind::InvalidArgument))
        }
        // Linking holds what copying a file does; what is no object file is refused before.
        "rpc.module.link" => {
            file(peer, 1);
            let (path, library) = (text("file"), text(&"x".repeat(LONG)));
            let answer = Answer::Error(ErrorKind::InvalidArgument);
            Calls::new(move |_| vec![path.clone(), library.clone()]).answered(answer)
        }
        "rpc.module.import" => {
            file(peer, 1);
            Calls::new(|_| vec![text("file")])
        }
        "rpc.module.begin_upload" => Calls::new(|number| vec![text(&format!("{number:064x}")), Value::Int(1 << 20)]),
        // In order, and so on one lane.
        "rpc.module.write" => {
            let upload = peer.call("rpc.module.begin_upload", vec![text(&"0".repeat(64)), Value::Int(256 << 20)]);
            Calls::new(move |number| vec![upload.clone(), Value::Int((number as i64 - 1) << 17), large()])
                .on_lane(|_| 1)
        }
        "rpc.module.commit" => {
            let upload = upload(peer);
            Calls::new(move |_| vec![upload.clone()])
        }
        "rpc.module.import_tensor" => {
            let tensor = Value::Object(Reference::Tensor(peer.tensor(LARGE as i64).into()));
            Calls::new(move |_| vec![text(&digest_of(&[0; LARGE])), tensor.clone()])
        }
        // Sessions of the server share their modules.
        "rpc.module.add_import" => {
            let module = Value::Object(Reference::Module(module(peer)));
            let answer = Answer::Error(ErrorKind::Unsupported);
            Calls::new(move |_| vec![module.clone(), module.clone()]).answered(answer)
        }
        "rpc.module.own_function" => {
            let module = Value::Object(Reference::Module(module(peer)));
            Calls::new(move |_| vec![module.clone(), text("function")])
        }
        "rpc.module.functions" => {
            let module = Value::Object(Reference::Module(module(peer)));
            Calls::new(move |_| vec![module.clone()])
        }
        other => panic!("the built-in function {other} has no recipe here: add one"),
    }
}

/// Returns a request for a program with long arguments.
fn run_request() -> Value {
    let request = RunRequest { args: vec!["a".repeat(LONG)], ..RunRequest::default() };
    Value::Packed(Packed::encode(&request).unwrap())
}

/// Returns the arguments of a request for a lease on the host.
fn lease_args() -> Vec<Value> {
    vec![Value::Device(Device::cpu()), Value::Int(0), Value::Null]
}

/// Returns the arguments of an offer of a tensor.
fn offer_args(peer: &mut Peer) -> Vec<Value> {
    let tensor = Value::Object(Reference::Tensor(peer.tensor(LARGE as i64).into()));
    vec![tensor, Value::Int(0), Value::Int(LARGE as i64), Value::Int(60_000), Value::Bool(false)]
}

/// Returns a listener of the server, and its address.
fn listener(peer: &mut Peer) -> (Value, String) {
    match peer.call("rpc.listen.open", vec![text("tcp://127.0.0.1:0")]) {
        Value::List(opened) => match <[Value; 2]>::try_from(opened) {
            Ok([listener, Value::Str(address)]) => (listener, address.to_string()),
            other => panic!("no listener: {other:?}"),
        },
        other => panic!("no listener: {other:?}"),
    }
}

/// Returns a connection that the server has accepted, and its far end.
fn accepted(peer: &mut Peer) -> (Value, TcpStream) {
    let (listener, address) = listener(peer);
    let far = TcpStream::connect(address.trim_start_matches("tcp://")).unwrap();
    match peer.call("rpc.listen.accept", vec![listener]) {
        Value::List(accepted) => (accepted.into_iter().next().unwrap(), far),
        other => panic!("no connection: {other:?}"),
    }
}

/// Returns the server's end of a connection, which the flood keeps whole.
fn handle_of(connection: &(Value, TcpStream)) -> Value {
    connection.0.clone()
}

/// Number of files in the folder that a flood lists: each has taken three handles.
const LISTED: usize = 300;

/// Creates a callback. Returns the function, and the source of its calls.
fn callback(peer: &mut Peer) -> (Handle, Value) {
    match peer.call("rpc.callback.create", Vec::new()) {
        Value::List(mut ends) => {
            let source = ends.remove(1);
            (ends[0].handles()[0], source)
        }
        other => panic!("{other:?}"),
    }
}

/// Calls a callback, and takes the call, so that it can be answered.
fn taken_call(peer: &mut Peer) -> Value {
    let (function, source) = callback(peer);
    // On a lane of its own: it runs until it has been answered.
    let call = peer.request(u32::MAX, Operation::Call { function, args: Vec::new() });
    peer.send(&call);
    match peer.call("rpc.callback.next", vec![source]) {
        Value::List(mut taken) => taken.remove(0),
        other => panic!("{other:?}"),
    }
}

/// Bytes of a stored module. The server looks at their digest alone.
const MODULE: [u8; 4096] = [7; 4096];

fn digest_of(module: &[u8]) -> String {
    rpc_server::modules::hash(module).unwrap().0.to_string()
}

/// Uploads [`MODULE`], without the commit.
fn upload(peer: &mut Peer) -> Value {
    let digest = Value::Str(digest_of(&MODULE));
    let upload = peer.call("rpc.module.begin_upload", vec![digest, Value::Int(MODULE.len() as i64)]);
    peer.call("rpc.module.write", vec![upload.clone(), Value::Int(0), Value::Bytes(MODULE.to_vec().into())]);
    upload
}

/// Loader of modules `test:…`, each time a new one.
pub(crate) struct TestLoader;

impl ModuleLoader for TestLoader {
    fn name(&self) -> &str {
        "test"
    }

    fn accepts(&self, path: &str) -> bool {
        path.starts_with("test:")
    }

    fn load(&self, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        Ok(Arc::new(FunctionModule::new(request.path).add("function", || 1_i64)))
    }
}

fn module(peer: &mut Peer) -> Handle {
    peer.ask(Operation::LoadModule { path: "test:module".into(), loader: None }).handles()[0]
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
