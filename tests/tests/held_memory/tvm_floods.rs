//! Floods of a client of TVM, for each request of its protocol, and for each function that the
//! server adds for such clients; and floods of servers and clients of TVM at a tracker and at a
//! proxy.

use std::sync::Arc;

use rpc_core::{DataType, Device};
use rpc_tvm::wire::{
    FrameCode, Hello, InfoPort, MAX_KEY, MAX_TRACKER_MESSAGE, PROTOCOL_VERSION, PeerInfo, Request, TensorHeader,
    TrackerMessage, WIRE_MAGIC, WireValue,
};

use super::peer::Peer;
use super::recipes::LARGE;

/// Maker of the frames of a flood, by their number.
pub(crate) type Frames = Box<dyn FnMut(u64) -> Vec<u8>>;

/// Functions that a server has for clients of TVM beside the registered ones.
pub(crate) const FUNCTIONS: [&str; 12] = [
    "tvm.rpc.server.upload",
    "tvm.rpc.server.download",
    "tvm.rpc.server.remove",
    "tvm.rpc.server.listdir",
    "tvm.rpc.server.workpath",
    "tvm.rpc.server.load_module",
    "tvm.rpc.server.download_linked_module",
    "tvm.rpc.server.ModuleGetFunction",
    "tvm.rpc.server.ImportModule",
    "tvm.rpc.server.GetCRTMaxPacketSize",
    "runtime.RPCTimeEvaluator",
    "ffi.SystemLib",
];

/// Returns the flood of requests of one code.
pub(crate) fn of_requests(code: FrameCode, peer: &mut Peer) -> Frames {
    let device = Device::cpu();
    let header = move |data, len| TensorHeader { data, device, dtype: DataType::U8, shape: vec![len], byte_offset: 0 };
    let mut memory = |len: i64| peer.tvm_handle(&Request::Alloc { header: header(0, len), scope: None });
    let len = LARGE as i64;
    match code {
        FrameCode::Shutdown => repeat(Request::Shutdown),
        // The session has begun: each is refused when it has arrived.
        FrameCode::InitServer => {
            let constructor = vec![large()];
            repeat(Request::Init { version: PROTOCOL_VERSION.into(), constructor })
        }
        FrameCode::CallFunc => {
            let echo = peer.tvm_function("rpc.echo");
            repeat(Request::Call { function: echo, args: vec![large()] })
        }
        FrameCode::CopyFromRemote => {
            let data = memory(len);
            repeat(Request::CopyFrom { from: header(data, len), len: LARGE as u64 })
        }
        FrameCode::CopyToRemote => {
            let data = memory(len);
            let frame = Request::encode_copy_to(&header(data, len), &[1; LARGE]);
            Box::new(move |_| frame.clone())
        }
        FrameCode::GetGlobalFunc => Box::new(|number| {
            let name = if number.is_multiple_of(2) { "rpc.echo".into() } else { long_text() };
            Request::GetFunction { name: name.as_str().into() }.encode()
        }),
        FrameCode::FreeHandle => Box::new(|number| Request::Free { handle: number << 20 }.encode()),
        FrameCode::DevSetDevice => repeat(Request::SetDevice { device }),
        FrameCode::DevGetAttr => {
            Box::new(move |number| Request::Attribute { device, kind: (number % 20).cast_signed() }.encode())
        }
        FrameCode::DevAllocData => repeat(Request::AllocBytes { device, len, alignment: 64, hint: DataType::U8 }),
        FrameCode::DevFreeData => Box::new(move |number| Request::FreeData { device, data: number << 20 }.encode()),
        FrameCode::DevStreamSync => repeat(Request::StreamSync { device, stream: 0 }),
        FrameCode::CopyAmongRemote => {
            let (from, to) = (memory(len), memory(len));
            repeat(Request::CopyAmong { from: header(from, len), to: header(to, len), stream: 0 })
        }
        FrameCode::DevAllocDataWithScope => Box::new(move |number| {
            let scope = (!number.is_multiple_of(2)).then(|| long_text().as_str().into());
            Request::Alloc { header: header(0, len), scope }.encode()
        }),
        FrameCode::DevCreateStream => repeat(Request::CreateStream { device }),
        FrameCode::DevFreeStream => {
            Box::new(move |number| Request::FreeStream { device, stream: number << 20 }.encode())
        }
        FrameCode::DevSetStream => {
            let stream = peer.tvm_handle(&Request::CreateStream { device });
            repeat(Request::SetStream { device, stream })
        }
        FrameCode::DevGetCurrentStream => repeat(Request::CurrentStream { device }),
        other => panic!("frames {} have no flood here: add one", other.name()),
    }
}

/// Returns the flood of calls of a function that the server adds.
pub(crate) fn of_function(name: &str, peer: &mut Peer) -> Frames {
    let function = peer.tvm_function(name);
    let text = |text: &str| WireValue::Str(text.into());
    let args = match name {
        "tvm.rpc.server.upload" => vec![text("file"), large()],
        "tvm.rpc.server.download" | "tvm.rpc.server.download_linked_module" | "tvm.rpc.server.load_module" => {
            let upload = peer.tvm_function("tvm.rpc.server.upload");
            peer.tvm_ask(&Request::Call { function: upload, args: vec![text("file.so"), large()] });
            vec![text("file.so")]
        }
        "tvm.rpc.server.remove" => vec![text("")],
        "tvm.rpc.server.listdir" | "tvm.rpc.server.workpath" => vec![text(&long_text())],
        "tvm.rpc.server.ModuleGetFunction" => vec![WireValue::Module(0xffff), text(&"x".repeat(LARGE / 4))],
        "tvm.rpc.server.ImportModule" => vec![WireValue::Module(0xffff), WireValue::Module(0xffff)],
        "tvm.rpc.server.GetCRTMaxPacketSize" | "ffi.SystemLib" => Vec::new(),
        "runtime.RPCTimeEvaluator" => {
            let numbers = [1, 0, 1, 1_000_000, 0, 100, 0, 1, 1 << 20].map(WireValue::Int);
            [vec![WireValue::None, text("rpc.echo")], numbers.to_vec(), vec![text("rpc.noop")]].concat()
        }
        other => panic!("{other} has no flood here: add one"),
    };
    repeat(Request::Call { function, args })
}

/// Returns the flood of calls whose results are lists, which stay until they are freed.
pub(crate) fn of_held_lists(peer: &mut Peer) -> Frames {
    let function = peer.tvm_function("rpc.functions");
    repeat(Request::Call { function, args: vec![WireValue::Bool(true)] })
}

/// Returns the flood of calls that name one list again and again.
pub(crate) fn of_named_lists(peer: &mut Peer) -> Frames {
    let (functions, echo) = (peer.tvm_function("rpc.functions"), peer.tvm_function("rpc.echo"));
    let list = peer.tvm_handle(&Request::Call { function: functions, args: Vec::new() });
    repeat(Request::Call { function: echo, args: vec![WireValue::Object(list); 4000] })
}

/// Returns the flood of empty frames.
pub(crate) fn of_empty_frames(_: &mut Peer) -> Frames {
    Box::new(|_| vec![0; 4096])
}

/// Returns the flood of a message that never ends.
pub(crate) fn of_an_endless_frame(_: &mut Peer) -> Frames {
    Box::new(|number| match number {
        // A length, and the code of a call.
        1 => [&u64::MAX.to_le_bytes()[..], &3_i32.to_le_bytes()].concat(),
        _ => vec![0; LARGE],
    })
}

/// Kinds of floods of a server or client of TVM at a tracker.
pub(crate) const AT_A_TRACKER: [&str; 9] = [
    "PING",
    "STOP",
    "PUT of new places",
    "PUT of one place",
    "REQUEST",
    "UPDATE_INFO",
    "SUMMARY",
    "GET_PENDING_MATCHKEYS",
    "a message without an end",
];

/// Returns the flood of messages of one kind, whose first one the tracker accepts.
pub(crate) fn at_a_tracker(name: &str, peer: &mut Peer) -> Frames {
    const KEY: usize = 1000;
    let text = |number: u64, len| format!("{number:x}{}", "k".repeat(len));
    let put = move |key: String, number: u64| {
        let match_key = format!("{number:x}:{}", "m".repeat(KEY));
        TrackerMessage::Put { key, port: 9090, match_key, host: None }.encode()
    };
    let info = move |number: u64| {
        let address = Some((Some("h".repeat(KEY)), InfoPort::Text("p".repeat(KEY))));
        TrackerMessage::UpdateInfo(PeerInfo { key: Some(format!("server{}", text(number, KEY))), address })
    };
    let request =
        move |number: u64, len| TrackerMessage::Request { key: text(number, len), user: text(0, len), priority: 1 };
    let accepted = |peer: &mut Peer, message| assert_eq!(peer.tvm_tell(&message), "0");
    match name {
        "PING" => Box::new(|_| TrackerMessage::Ping.encode()),
        "STOP" => {
            let message = TrackerMessage::Stop { stop_key: "s".repeat(MAX_TRACKER_MESSAGE - 8) }.encode();
            Box::new(move |_| message.clone())
        }
        "PUT of new places" => Box::new(move |number| put(text(number, KEY), number)),
        "PUT of one place" => {
            let request = request(1, KEY).encode();
            // Each is given to a request at once, and offered again.
            Box::new(move |number| [request.clone(), put(text(1, KEY), number)].concat())
        }
        "REQUEST" => Box::new(move |number| request(number, KEY).encode()),
        "UPDATE_INFO" => {
            accepted(peer, info(0));
            Box::new(move |number| info(number).encode())
        }
        "SUMMARY" => {
            accepted(peer, info(0));
            Box::new(|_| TrackerMessage::Summary.encode())
        }
        "GET_PENDING_MATCHKEYS" => {
            for number in 0..64 {
                let (key, match_key) = (text(number, 8), text(number, KEY));
                accepted(peer, TrackerMessage::Put { key, port: 9090, match_key, host: None });
            }
            Box::new(|_| TrackerMessage::PendingMatchKeys.encode())
        }
        "a message without an end" => Box::new(|number| match number {
            1 => (MAX_TRACKER_MESSAGE as i32).to_le_bytes().to_vec(),
            _ => b"[5, {\"x\": [[[[[[[[".repeat(1000),
        }),
        other => panic!("{other} has no flood here: add one"),
    }
}

/// Floods at a proxy.
pub(crate) const AT_A_PROXY: [&str; 5] = [
    "a hello without an end",
    "requests before the answer",
    "bytes for a peer that reads nothing",
    "a WebSocket request without an end",
    "a WebSocket message without an end",
];

/// Returns the flood of one kind at a proxy. `other` is a connection that reads nothing.
pub(crate) fn at_a_proxy(name: &str, peer: &mut Peer, other: &mut Peer) -> Frames {
    let bytes = |number: u64| vec![number as u8; LARGE];
    match name {
        "a hello without an end" => Box::new(move |number| match number {
            1 => [WIRE_MAGIC.to_le_bytes(), i32::MAX.to_le_bytes()].concat(),
            _ => bytes(number),
        }),
        "requests before the answer" => Box::new(move |number| match number {
            1 => longest_hello("server:"),
            _ => bytes(number),
        }),
        "bytes for a peer that reads nothing" => {
            other.send(&longest_hello("server:"));
            peer.send(&longest_hello("client:"));
            peer.read_exactly(longest_hello("server:").len());
            Box::new(bytes)
        }
        "a WebSocket request without an end" => Box::new(|number| match number {
            1 => b"GET /ws HTTP/1.1\r\n".to_vec(),
            _ => [b"a: ", &b"b".repeat(LARGE)[..], b"\r\n"].concat(),
        }),
        "a WebSocket message without an end" => {
            let request = b"GET /ws HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
                Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
            peer.send(request);
            peer.read_exactly(b"HTTP/1.1 101".len());
            // The frames of one message, each nearly as large as the message may be.
            const PIECES: u64 = 159;
            Box::new(|number| match (number - 1) % (PIECES + 1) {
                0 => {
                    let header = [if number == 1 { 0x02 } else { 0x00 }, 0x80 | 127];
                    [&header[..], &(PIECES << 16).to_be_bytes(), &[0; 4]].concat()
                }
                _ => vec![0; 1 << 16],
            })
        }
        other => panic!("{other} has no flood here: add one"),
    }
}

/// Returns the hello with the longest key that begins with `role`.
pub(crate) fn longest_hello(role: &str) -> Vec<u8> {
    Hello { key: role.to_owned() + &"k".repeat(MAX_KEY - role.len()) }.encode()
}

/// Text that errors would repeat several times as long.
fn long_text() -> String {
    "\x7f".repeat(LARGE)
}

fn large() -> WireValue {
    WireValue::Bytes(vec![1; LARGE].into())
}

pub(crate) fn repeat(request: Request) -> Frames {
    let frame: Arc<[u8]> = request.encode().into();
    Box::new(move |_| frame.to_vec())
}
