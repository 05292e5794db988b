//! A client that writes raw frames, and reads nothing once it floods its server.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::proto::{FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, Role, decode_reply, encode_request};
use rpc_core::{Handle, Lane, Operation, Packed, Request, TensorRef, Value};

/// Time without progress after which the server counts as one that takes no more.
const STUCK: Duration = Duration::from_millis(100);

pub(crate) struct Peer {
    stream: UnixStream,
    next: u64,
}

impl Peer {
    /// Connects, and opens a session. The peer promises to take replies of any size.
    pub(crate) fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut peer = Self { stream, next: 1 };
        let mut hello = Hello::new(Role::Client);
        hello.identities = vec!["none".into()];
        (hello.window, hello.max_message, hello.chunk) = (1 << 40, 1 << 40, 1 << 20);
        let body = Packed::encode(&hello).unwrap();
        let accept = FrameHeader::control(Kind::Accept, 0).encode();
        let greeting = [&MAGIC[..], &control(Kind::Hello, 0, body.as_bytes()), &accept].concat();
        assert!(peer.write(&greeting));
        let mut magic = [0; MAGIC.len()];
        peer.stream.read_exact(&mut magic).unwrap();
        assert_eq!(peer.read_frame().0.kind, Kind::Hello);
        assert_eq!(peer.read_frame().0.kind, Kind::Accept);
        peer
    }

    /// Reads nothing from now on, and gives up writing when the server takes no more.
    pub(crate) fn begin_flood(&mut self) {
        self.stream.set_write_timeout(Some(STUCK)).unwrap();
    }

    /// Writes bytes. Returns false if the server takes no more.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> bool {
        match self.stream.write_all(bytes) {
            Ok(()) => true,
            Err(error) => {
                let expected =
                    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
                assert!(expected.contains(&error.kind()), "{error}");
                false
            }
        }
    }

    /// Returns the frame of a request with a new id.
    pub(crate) fn request(&mut self, lane: u32, operation: Operation) -> Vec<u8> {
        let id = self.next;
        self.next += 1;
        let (body, payload) = encode_request(&Request::new(operation).on(Lane(lane)), Instant::now());
        let payload = payload.concat();
        let (body_len, payload_len) = (body.len() as u32, payload.len() as u32);
        let header = FrameHeader { body_len, payload_len, id, lane, ..FrameHeader::control(Kind::Request, 0) };
        [&header.encode()[..], &body, &payload].concat()
    }

    /// Makes a request, and reads its reply.
    pub(crate) fn ask(&mut self, operation: Operation) -> Value {
        let id = self.next;
        let frame = self.request(1, operation);
        assert!(self.write(&frame));
        loop {
            let (header, body, payload) = self.read_frame();
            if header.id == id && matches!(header.kind, Kind::Reply | Kind::Error) {
                return decode_reply(header.kind == Kind::Error, &body, payload).unwrap().unwrap();
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
        match self.ask(Operation::Alloc { device, dtype, shape: vec![len], scope: None }) {
            Value::Object(rpc_core::Reference::Tensor(tensor)) => tensor,
            other => panic!("{other:?}"),
        }
    }

    fn read_frame(&mut self) -> (FrameHeader, Vec<u8>, Bytes) {
        let mut header = [0; HEADER_LEN];
        self.stream.read_exact(&mut header).unwrap();
        let header = FrameHeader::decode(&header, usize::MAX, usize::MAX).unwrap();
        assert!(!header.more, "replies of several frames are not read");
        let (mut body, mut payload) = (vec![0; header.body_len as usize], vec![0; header.payload_len as usize]);
        self.stream.read_exact(&mut body).unwrap();
        self.stream.read_exact(&mut payload).unwrap();
        (header, body, payload.into())
    }
}

/// Returns a frame that is no part of a message.
pub(crate) fn control(kind: Kind, id: u64, body: &[u8]) -> Vec<u8> {
    [&FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) }.encode()[..], body].concat()
}
