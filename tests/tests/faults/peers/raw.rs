//! Peers that write raw bytes, asynchronously and over any transport, and the answers to them.

use std::time::Duration;

use bytes::Bytes;
use rpc_core::proto::{FrameHeader, HEADER_LEN, Hello, Kind, MAGIC, decode_reply, encode_request};
use rpc_core::{Handle, Lane, Operation, Request, RpcError};
use rpc_tests::forwarder::Random;
use rpc_transports::{Address, Channel, ClientTls, Dial};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::site::{Site, soon};

/// Time limit of steps that may take as long as a handshake: five seconds more than the longest
/// time that servers of these tests have for one. What is drawn out by [`trickle`] takes longer.
pub const OVER: Duration = Duration::from_secs(8);

/// Peer that writes raw bytes.
pub struct Raw {
    pub channel: Channel,
}

impl Raw {
    pub async fn dial(site: &Site) -> Self {
        Self::dial_to(&site.address, site.authority.trust()).await
    }

    pub async fn dial_to(address: &str, tls: ClientTls) -> Self {
        let options = Dial { tls: Some(tls), ..Dial::default() };
        let address: Address = address.parse().unwrap();
        let transports = rpc_transports::Transports::default();
        let dialled = transports.dial(&address, &options);
        Self { channel: soon("a raw peer connects", dialled).await.unwrap() }
    }

    /// Connects, and completes the handshake of a client.
    pub async fn greeted(site: &Site, hello: &Hello) -> Self {
        Self::dial(site).await.greet(hello).await
    }

    pub async fn greet(self, hello: &Hello) -> Self {
        let mut this = self;
        this.write(&super::hello(hello)).await;
        this.write(&FrameHeader::control(Kind::Accept, 0).encode()).await;
        this.magic().await;
        assert_eq!(this.frame().await.map(|(header, _)| header.kind), Some(Kind::Hello));
        assert_eq!(this.frame().await.map(|(header, _)| header.kind), Some(Kind::Accept));
        this
    }

    /// Writes bytes, and ignores a closed connection.
    pub async fn write(&mut self, bytes: &[u8]) {
        let io = self.channel.io_mut();
        let _ = soon("a raw peer writes", async { io.write_all(bytes).await.and(io.flush().await) }).await;
    }

    /// Shuts the writing direction down.
    pub async fn half_close(&mut self) {
        let _ = soon("a raw peer ends", self.channel.io_mut().shutdown()).await;
    }

    pub async fn magic(&mut self) {
        let mut magic = [0; MAGIC.len()];
        soon("a magic", self.channel.io_mut().read_exact(&mut magic)).await.unwrap();
        assert_eq!(magic, MAGIC);
    }

    /// Reads the next frame. Returns `None` at the end of the stream.
    pub async fn frame(&mut self) -> Option<(FrameHeader, Vec<u8>)> {
        soon("a frame", async {
            let mut header = [0; HEADER_LEN];
            self.channel.io_mut().read_exact(&mut header).await.ok()?;
            let header = FrameHeader::decode(&header, usize::MAX, usize::MAX).unwrap();
            let mut body = vec![0; header.body_len as usize + header.payload_len as usize];
            self.channel.io_mut().read_exact(&mut body).await.ok()?;
            Some((header, body))
        })
        .await
    }

    /// Reads until the server has closed the connection.
    pub async fn rest(&mut self) -> Vec<u8> {
        let mut rest = Vec::new();
        // The connection may end with an error.
        let _ = soon("the server cuts it off", self.channel.io_mut().read_to_end(&mut rest)).await;
        rest
    }
}

/// Returns the frames in these bytes, behind the magic if there is one.
pub fn frames(bytes: &[u8]) -> Vec<(FrameHeader, &[u8])> {
    let mut rest = bytes.strip_prefix(&MAGIC).unwrap_or(bytes);
    let mut frames = Vec::new();
    while let Some((header, behind)) = rest.split_first_chunk() {
        let Ok(header) = FrameHeader::decode(header, usize::MAX, usize::MAX) else { break };
        let len = header.body_len as usize + header.payload_len as usize;
        let Some((body, behind)) = behind.split_at_checked(len) else { break };
        frames.push((header, body));
        rest = behind;
    }
    frames
}

pub fn frame(kind: Kind, id: u64, body: &[u8]) -> Vec<u8> {
    [&FrameHeader { id, ..FrameHeader::control(kind, body.len() as u32) }.encode()[..], body].concat()
}

pub fn error_in(body: &[u8]) -> RpcError {
    decode_reply(true, body, Bytes::new()).unwrap().unwrap_err()
}

/// Returns the last error of the server: that of a `Reject` or a `Close`.
pub fn last_word(said: &[u8]) -> Option<RpcError> {
    let last = frames(said).into_iter().rfind(|(header, _)| matches!(header.kind, Kind::Reject | Kind::Close));
    last.filter(|(_, body)| !body.is_empty()).map(|(_, body)| error_in(body))
}

pub fn was_accepted(said: &[u8]) -> bool {
    frames(said).iter().any(|(header, _)| header.kind == Kind::Accept)
}

pub fn request(id: u64, lane: Lane, operation: Operation) -> Vec<u8> {
    let (body, payload) = encode_request(&Request::new(operation).on(lane), std::time::Instant::now());
    assert!(payload.is_empty());
    let header = FrameHeader { id, lane: lane.0, ..FrameHeader::control(Kind::Request, body.len() as u32) };
    [&header.encode()[..], &body].concat()
}

pub fn function_in(body: &[u8]) -> Handle {
    let reply = decode_reply(false, body, Bytes::new()).unwrap().unwrap();
    reply.handles()[0]
}

/// Writes a byte now and then, often enough never to count as dead, until all bytes are written. A
/// silent peer writes nothing, and stays connected.
pub async fn trickle(io: &mut (impl AsyncWrite + Unpin + ?Sized), bytes: &[u8]) {
    for byte in bytes {
        if io.write_all(&[*byte]).await.is_err() || io.flush().await.is_err() {
            return std::future::pending().await;
        }
        // The pause is the slow pace that is tested.
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    if bytes.is_empty() {
        std::future::pending().await
    }
}

/// Checks that the server cuts off a peer that writes these bytes slowly, and does not accept it.
pub async fn cut_off(io: &mut (impl AsyncRead + AsyncWrite + Unpin + ?Sized), slowly: &[u8]) {
    let (mut read, mut write) = tokio::io::split(io);
    let mut said = Vec::new();
    let ends = async {
        tokio::select! {
            _ = read.read_to_end(&mut said) => {}
            () = trickle(&mut write, slowly) => panic!("what was drawn out was heard to the end"),
        }
    };
    tokio::time::timeout(OVER, ends).await.unwrap_or_else(|_| panic!("not cut off after {OVER:?}"));
    assert!(!was_accepted(&said), "{}", said.escape_ascii());
}

/// Returns a valid beginning of a session with random changes.
pub fn mutated(valid: &[u8], random: &mut Random) -> Vec<u8> {
    let mut bytes = valid.to_vec();
    for _ in 0..1 + random.below(3) {
        if bytes.is_empty() {
            break;
        }
        let at = random.below(bytes.len());
        match random.below(6) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.number() as u8,
            2 => bytes.truncate(at),
            3 => {
                let count = 1 + random.below(40);
                let noise = random.bytes(count);
                bytes.splice(at..at, noise);
            }
            4 => {
                let end = at + random.below(bytes.len() - at + 1);
                let twice = bytes[at..end].to_vec();
                bytes.splice(at..at, twice);
            }
            _ => {
                let end = (at + 1 + random.below(24)).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
    bytes
}
