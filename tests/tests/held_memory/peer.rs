//! A client that writes raw frames, and reads nothing once it floods its server.

use std::collections::HashSet;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_conformance::threads::all_others_wait;
use rpc_core::proto::{
    FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, PIPES, Role, SHARED_MEMORY, decode_reply, encode_request,
};
use rpc_core::{Handle, Lane, Operation, Packed, PipeId, Request, Result, TensorRef, Value};
use rpc_tvm::wire;
use rustix::io::Errno;
use rustix::net::RecvFlags;

/// Time limit of everything that a peer waits for.
const LIMIT: Duration = Duration::from_secs(60);

pub(crate) struct Peer {
    stream: UnixStream,
    next: u64,
    /// Bytes of large requests that the server takes before it has answered one.
    window: u64,
    /// Room for what the server has sent, unread.
    unread: Vec<u8>,
    /// Bytes of it that have been parsed.
    parsed: usize,
    /// True once the end of the connection is among them.
    has_ended: bool,
}

/// More bytes than the kernel keeps of what a server has sent.
const MAX_UNREAD: usize = 1 << 20;

/// Replies that a server has sent and its client has not read.
pub(crate) struct Unread {
    /// Requests with a whole reply, since the last look.
    pub(crate) answered: HashSet<u64>,
    /// True if the server has ended the connection.
    pub(crate) has_ended: bool,
}

/// Fate of bytes that a peer has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// The connection took all of them.
    All,
    /// The connection is full, and every thread of the server waits: it takes no more until
    /// something is read.
    Blocked,
    /// The server has ended the connection.
    Ended,
}

impl Peer {
    /// Connects, and opens a session. The peer promises to take replies of any size.
    pub(crate) fn connect(path: &Path) -> Self {
        Self::connect_through(path, Vec::new())
    }

    /// Connects, and opens a session with the last of the servers behind the first one.
    pub(crate) fn connect_through(path: &Path, forward: Vec<String>) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        let mut peer = Self { stream, next: 1, window: 0, unread: vec![0; MAX_UNREAD], parsed: 0, has_ended: false };
        let mut hello = Hello::new(Role::Client);
        hello.identities = vec!["none".into()];
        hello.forward = forward;
        hello.features = vec![SHARED_MEMORY.into(), PIPES.into()];
        (hello.window, hello.max_message, hello.chunk) = (1 << 40, 1 << 40, 1 << 20);
        let body = Packed::encode(&hello).unwrap();
        let accept = FrameHeader::control(Kind::Accept, 0).encode();
        let greeting = [&MAGIC[..], &control(Kind::Hello, 0, body.as_bytes()), &accept].concat();
        peer.stream.write_all(&greeting).unwrap();
        let mut magic = [0; MAGIC.len()];
        peer.stream.read_exact(&mut magic).unwrap();
        let (header, body, _) = peer.read_frame();
        assert_eq!(header.kind, Kind::Hello);
        peer.window = Packed::from_bytes(body.into()).decode::<Hello>().unwrap().window;
        assert_eq!(peer.read_frame().0.kind, Kind::Accept);
        peer
    }

    /// Connects as a client of TVM, and begins its session.
    pub(crate) fn connect_by_tvm(path: &Path, constructor: Vec<wire::WireValue>) -> Self {
        let mut peer = Self::dial(path);
        peer.send(&wire::Hello { key: "client:".to_owned() }.encode());
        let accepted = wire::HelloAnswer::Accepted("server:").encode();
        let mut answer = vec![0; accepted.len()];
        peer.stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, accepted);
        peer.tvm_ask(&wire::Request::Init { version: wire::PROTOCOL_VERSION.into(), constructor });
        peer
    }

    /// Connects, and says nothing.
    pub(crate) fn dial(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_write_timeout(Some(LIMIT)).unwrap();
        Self { stream, next: 1, window: 0, unread: Vec::new(), parsed: 0, has_ended: false }
    }

    /// Reads this number of bytes, and drops them.
    pub(crate) fn read_exactly(&mut self, len: usize) {
        self.stream.read_exact(&mut vec![0; len]).unwrap();
    }

    /// Connects as a server or client of TVM to a tracker.
    pub(crate) fn connect_by_tvm_tracker(path: &Path) -> Self {
        let mut peer = Self::dial(path);
        let magic = wire::TRACKER_MAGIC.to_le_bytes();
        peer.send(&magic);
        let mut answer = [0; 4];
        peer.stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer, magic);
        peer
    }

    /// Sends a message to a tracker of TVM. Returns the text of its reply.
    pub(crate) fn tvm_tell(&mut self, message: &wire::TrackerMessage) -> String {
        self.send(&message.encode());
        let mut len = [0; 4];
        self.stream.read_exact(&mut len).unwrap();
        let mut reply = vec![0; i32::from_le_bytes(len) as usize];
        self.stream.read_exact(&mut reply).unwrap();
        String::from_utf8(reply).unwrap()
    }

    /// Makes a request of TVM's protocol. Returns the body of its result.
    pub(crate) fn tvm_ask(&mut self, request: &wire::Request) -> Vec<u8> {
        self.send(&request.encode());
        let mut header = [0; 12];
        self.stream.read_exact(&mut header).unwrap();
        let len = u64::from_le_bytes(header[..8].try_into().unwrap());
        let mut body = vec![0; len as usize - 4];
        self.stream.read_exact(&mut body).unwrap();
        let is_result = header[8..] == wire::FrameCode::Return.number().to_le_bytes();
        assert!(is_result, "{request:?}: {}", String::from_utf8_lossy(&body));
        body
    }

    /// Makes a request of TVM's protocol whose result is, or ends with, a handle.
    pub(crate) fn tvm_handle(&mut self, request: &wire::Request) -> u64 {
        let body = self.tvm_ask(request);
        u64::from_le_bytes(*body.last_chunk().unwrap())
    }

    pub(crate) fn tvm_function(&mut self, name: &str) -> u64 {
        self.tvm_handle(&wire::Request::GetFunction { name: name.into() })
    }

    /// Returns the bytes of large requests that the server takes before it has answered one.
    pub(crate) fn window(&self) -> u64 {
        self.window
    }

    /// Reads nothing from now on.
    pub(crate) fn begin_flood(&mut self) {
        self.stream.set_nonblocking(true).unwrap();
    }

    /// Returns what the server has sent since the last look, as it lies in the connection, unread.
    pub(crate) fn unread(&mut self) -> Unread {
        let peeked = rustix::net::recv(&self.stream, &mut self.unread[..], RecvFlags::PEEK);
        let len = match peeked {
            Ok((len, _)) => len,
            Err(Errno::WOULDBLOCK | Errno::CONNRESET) => 0,
            Err(error) => panic!("{error}"),
        };
        let mut answered = HashSet::new();
        while let Some(header) = self.unread[..len].get(self.parsed..self.parsed + HEADER_LEN) {
            let header = header_of(header);
            let end = self.parsed + HEADER_LEN + header.body_len as usize + header.payload_len as usize;
            if end > len {
                break;
            }
            if matches!(header.kind, Kind::Reply | Kind::Error) && !header.more {
                answered.insert(header.id);
            }
            self.has_ended |= header.kind == Kind::Close;
            self.parsed = end;
        }
        Unread { answered, has_ended: self.has_ended }
    }

    /// Writes bytes of a flood, as far as the server takes them.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Written {
        let start = Instant::now();
        let mut is_last_try = false;
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => {
                    bytes = &bytes[count..];
                    is_last_try = false;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // Full after a moment at which every thread waited: nothing will be read.
                    if is_last_try {
                        return Written::Blocked;
                    }
                    assert!(start.elapsed() < LIMIT, "the server reads nothing, and its threads are at work");
                    std::thread::yield_now();
                    is_last_try = all_others_wait();
                }
                Err(error) => {
                    let ended = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset].contains(&error.kind());
                    assert!(ended, "{error}");
                    return Written::Ended;
                }
            }
        }
        Written::All
    }

    /// Returns the frame of a request with a new id.
    pub(crate) fn request(&mut self, lane: u32, operation: Operation) -> Vec<u8> {
        self.request_of(Request::new(operation).on(Lane(lane)))
    }

    /// Returns the frame of a request whose result the server keeps.
    pub(crate) fn kept(&mut self, pipe: PipeId, operation: Operation) -> Vec<u8> {
        self.request_of(Request { pipe: Some(pipe), ..Request::new(operation).on(Lane(1)) })
    }

    fn request_of(&mut self, request: Request) -> Vec<u8> {
        let (id, Lane(lane)) = (self.next, request.lane);
        self.next += 1;
        let (body, payload) = encode_request(&request, Instant::now());
        let payload = payload.concat();
        let (body_len, payload_len) = (body.len() as u32, payload.len() as u32);
        let header = FrameHeader { body_len, payload_len, id, lane, ..FrameHeader::control(Kind::Request, 0) };
        [&header.encode()[..], &body, &payload].concat()
    }

    /// Makes a request, and reads its reply.
    pub(crate) fn ask(&mut self, operation: Operation) -> Value {
        let frame = self.request(1, operation);
        self.reply_to(&frame).unwrap()
    }

    /// Sends a frame before the flood.
    pub(crate) fn send(&mut self, frame: &[u8]) {
        self.stream.write_all(frame).unwrap();
    }

    /// Sends the frame of the last request, and reads its reply.
    pub(crate) fn reply_to(&mut self, frame: &[u8]) -> Result<Value> {
        let id = self.next - 1;
        self.send(frame);
        let mut pieces = Vec::new();
        loop {
            let (header, body, payload) = self.read_frame();
            let is_answer = header.id == id && matches!(header.kind, Kind::Reply | Kind::Error);
            if !is_answer {
                assert!(!header.more, "only replies have several frames: {:?}", header.kind);
                continue;
            }
            pieces.push((body, payload));
            if !header.more {
                let (bodies, payloads): (Vec<_>, Vec<_>) = pieces.into_iter().unzip();
                return decode_reply(header.kind == Kind::Error, &bodies.concat(), payloads.concat().into()).unwrap();
            }
        }
    }

    pub(crate) fn function(&mut self, name: &str) -> Handle {
        self.ask(Operation::GetFunction { name: name.into() }).handles()[0]
    }

    pub(crate) fn call(&mut self, name: &str, args: Vec<Value>) -> Value {
        let function = self.function(name);
        self.ask(Operation::Call { function, args })
    }

    /// Allocates a tensor of bytes.
    pub(crate) fn tensor(&mut self, len: i64) -> TensorRef {
        let (device, dtype) = (rpc_core::Device::cpu(), rpc_core::DataType::U8);
        match self.ask(Operation::Alloc { device, dtype, shape: vec![len], scope: None, alignment: 0 }) {
            Value::Object(rpc_core::Reference::Tensor(tensor)) => *tensor,
            other => panic!("{other:?}"),
        }
    }

    fn read_frame(&mut self) -> (FrameHeader, Vec<u8>, Bytes) {
        let mut header = [0; HEADER_LEN];
        self.stream.read_exact(&mut header).unwrap();
        let header = header_of(&header);
        let (mut body, mut payload) = (vec![0; header.body_len as usize], vec![0; header.payload_len as usize]);
        self.stream.read_exact(&mut body).unwrap();
        self.stream.read_exact(&mut payload).unwrap();
        (header, body, payload.into())
    }
}

/// Returns the header at the beginning of a frame.
pub(crate) fn header_of(frame: &[u8]) -> FrameHeader {
    let header = frame[..HEADER_LEN].try_into().unwrap();
    FrameHeader::decode(header, usize::MAX, usize::MAX).unwrap()
}

/// Returns a frame that is no part of a message.
pub(crate) fn control(kind: Kind, id: u64, body: &[u8]) -> Vec<u8> {
    [&FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) }.encode()[..], body].concat()
}
