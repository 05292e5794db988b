//! The beginning of a session: hello, first request, and the largest frame that the server takes.

use std::io::{self, Read as _, Write as _};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rpc_core::blocking::block_on;
use rpc_core::limits::MemoryQuota;
use rpc_core::{ErrorKind, RpcError};
use rpc_transports::{BlockingChannel, BlockingIo, Channel, ChannelGuard, ChannelIo};
use rpc_tvm::wire::{
    CallResult, ClientEvent, ClientWire, Expected, Hello, PROTOCOL_VERSION, Request, ServerAnswer, ServerReply,
    WireLimits, WireValue,
};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::runtime;

use super::super::server_function::UNLIMITED_PACKET;
use super::farewell::leave;
use super::link::{Link, lost};
use super::objects::Objects;
use super::outcomes::Outcomes;
use super::protocol::TvmProtocol;
use super::session::TvmClientSession;
use super::state::{ClientCore, ServerFacts};

/// Function that tells the largest frame that a server takes. Servers for computers have none.
const MAX_PACKET: &str = "tvm.rpc.server.GetCRTMaxPacketSize";

/// Terms of a session.
pub(super) struct Terms<'a> {
    /// Address of the server, for errors.
    pub(super) peer: String,
    /// Key of the server; may be empty.
    pub(super) key: &'a str,
    /// Time for the whole session, of which the server is told.
    pub(super) timeout: Option<f64>,
    /// Constructor of the session at the server: the servers behind it. Empty for a session there.
    pub(super) constructor: Vec<WireValue>,
    pub(super) max_message: u64,
    pub(super) memory: Arc<MemoryQuota>,
    /// Time limit for all steps here.
    pub(super) limit: Duration,
}

/// Begins a session over a channel that a task serves.
pub(super) async fn begin(channel: Channel, terms: Terms<'_>) -> Result<TvmClientSession, RpcError> {
    let limit = terms.limit;
    let (io, _, guard) = channel.into_parts();
    let mut connection = Connection { io, guard, runtime: Some(runtime::Handle::current()) };
    let wire = ClientWire::new(WireLimits::new(terms.max_message));
    let begun = tokio::time::timeout(limit, Handshake { io: &mut *connection.io, wire }.perform(&terms)).await;
    let begun = begun.map_err(|_| unanswered(limit))??;
    let (core, wire) = session(begun, terms, Outcomes::AtOnce)?;
    let (io, guard) = connection.into_parts();
    Ok(TvmClientSession::spawn(core, io, wire, guard))
}

/// Begins a session over a channel that the threads serve that wait for replies.
pub(super) fn begin_blocking(channel: &BlockingChannel, terms: Terms<'_>) -> Result<TvmProtocol, RpcError> {
    let limit = terms.limit;
    let mut io = BlockingStream { io: channel.io(), until: Instant::now() + limit };
    let wire = ClientWire::new(WireLimits::new(terms.max_message));
    let begun = block_on(Handshake { io: &mut io, wire }.perform(&terms))?;
    let begun = begun.map_err(|error| if Instant::now() >= io.until { unanswered(limit) } else { error })?;
    let (core, wire) = session(begun, terms, Outcomes::queued())?;
    Ok(TvmProtocol::new(core, wire))
}

/// Outcome of a handshake: the state of the connection, and facts about the server.
type Begun = (ClientWire, ServerFacts);

fn session(begun: Begun, terms: Terms<'_>, outcomes: Outcomes) -> Result<(ClientCore, ClientWire), RpcError> {
    let (wire, server) = begun;
    let objects = Objects::new(terms.memory.clone())?;
    // The one behind the first server of a chain says nothing of that.
    let survives_clients = terms.constructor.is_empty() && server.max_packet == UNLIMITED_PACKET.unsigned_abs();
    let link = Link::new(terms.memory.clone(), survives_clients)?;
    let core = ClientCore::new(terms.peer, server, terms.max_message, terms.memory, link, objects, outcomes);
    Ok((core, wire))
}

fn unanswered(limit: Duration) -> RpcError {
    let text = format!(
        "the server has not answered within {limit:?}: a server of TVM serves one client, and the next one waits"
    );
    RpcError::new(ErrorKind::PeerSilent, text)
}

/// A socket whose reads and writes block, up to a time.
struct BlockingStream<'a> {
    io: &'a BlockingIo,
    until: Instant,
}

impl AsyncRead for BlockingStream<'_> {
    fn poll_read(self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            // Also if bytes keep coming.
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let left = left.max(Duration::from_millis(1));
        let mut io = self.io;
        io.set_read_timeout(Some(left))?;
        loop {
            match io.read(buffer.initialize_unfilled()) {
                Ok(count) => buffer.advance(count),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Poll::Ready(Err(error)),
            }
            return Poll::Ready(Ok(()));
        }
    }
}

impl AsyncWrite for BlockingStream<'_> {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut io = self.io;
        loop {
            match io.write(bytes) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                written => return Poll::Ready(written),
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.io.shutdown(Shutdown::Write))
    }
}

/// A connection that has no session yet. If it gets none, because the handshake fails, lasts too
/// long or is given up, a task reads what the server still answers.
struct Connection {
    io: Box<dyn ChannelIo>,
    guard: Option<ChannelGuard>,
    /// Runtime of that task, since the drop may come from outside of it. None once a session has
    /// the connection.
    runtime: Option<runtime::Handle>,
}

impl Connection {
    fn into_parts(mut self) -> (Box<dyn ChannelIo>, Option<ChannelGuard>) {
        self.runtime = None;
        self.take()
    }

    fn take(&mut self) -> (Box<dyn ChannelIo>, Option<ChannelGuard>) {
        (std::mem::replace(&mut self.io, Box::new(tokio::io::empty())), self.guard.take())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            let (io, guard) = self.take();
            runtime.spawn(leave(io, guard));
        }
    }
}

struct Handshake<'a> {
    io: &'a mut dyn ChannelIo,
    wire: ClientWire,
}

impl Handshake<'_> {
    async fn perform(mut self, terms: &Terms<'_>) -> Result<Begun, RpcError> {
        let mut key = format!("client:{}", terms.key);
        if let Some(timeout) = terms.timeout {
            key += &format!(" -timeout={timeout:?}");
        }
        self.write(&Hello { key }.encode()).await?;
        let key = match self.event(None).await? {
            ClientEvent::Answer(ServerAnswer::Accepted { key }) => key,
            ClientEvent::Answer(ServerAnswer::Duplicate) => {
                let text = format!("another client waits for a server with key '{}' at that proxy", terms.key);
                return Err(RpcError::new(ErrorKind::Refused, text));
            }
            ClientEvent::Answer(_) => {
                let text = format!("the server has not the key '{}', or none is there under it", terms.key);
                return Err(RpcError::new(ErrorKind::Refused, text));
            }
            _ => return Err(RpcError::new(ErrorKind::Protocol, "the server has not answered the hello")),
        };
        let init = Request::Init { version: PROTOCOL_VERSION.into(), constructor: terms.constructor.clone() };
        self.write(&init.encode()).await?;
        match self.reply(Expected::Value).await? {
            ServerReply::Value(WireValue::None) => {}
            ServerReply::Exception(text) if terms.constructor.is_empty() => {
                return Err(RpcError::new(ErrorKind::VersionMismatch, text));
            }
            ServerReply::Exception(text) => {
                let text = format!("the server has not opened the session with the one behind it: {}", text.trim_end());
                return Err(RpcError::new(ErrorKind::Refused, text));
            }
            _ => return Err(RpcError::new(ErrorKind::Protocol, "the server has not begun the session")),
        }
        // Not before the answer: a server of TVM stops for good if two of its answers find nobody.
        self.write(&Request::GetFunction { name: MAX_PACKET.into() }.encode()).await?;
        let max_packet = match self.reply(Expected::Value).await? {
            ServerReply::Value(WireValue::Pointer(function)) if function != 0 => self.max_packet(function).await?,
            _ => u64::MAX,
        };
        Ok((self.wire, ServerFacts { key, max_packet }))
    }

    async fn max_packet(&mut self, function: u64) -> Result<u64, RpcError> {
        self.write(&Request::Call { function, args: Vec::new() }.encode()).await?;
        let size = match self.reply(Expected::Call).await? {
            ServerReply::Call(CallResult::Plain(WireValue::Int(size))) => u64::try_from(size).ok(),
            _ => None,
        };
        self.write(&Request::Free { handle: function }.encode()).await?;
        self.reply(Expected::Value).await?;
        size.ok_or_else(|| RpcError::new(ErrorKind::Protocol, format!("{MAX_PACKET} returned no size")))
    }

    async fn reply(&mut self, expected: Expected) -> Result<ServerReply, RpcError> {
        loop {
            match self.event(Some(expected)).await? {
                ClientEvent::Reply(reply) => return Ok(reply),
                // None of these replies is large.
                ClientEvent::Announced { .. } => self.wire.refuse(),
                ClientEvent::Shutdown => {
                    return Err(RpcError::new(ErrorKind::PeerLost, "the server ended the session as it began"));
                }
                _ => return Err(RpcError::new(ErrorKind::Protocol, "the server answers what was not asked")),
            }
        }
    }

    async fn event(&mut self, expected: Option<Expected>) -> Result<ClientEvent, RpcError> {
        loop {
            let event = self.wire.poll_event(expected);
            if let Some(event) = event.map_err(|error| RpcError::new(ErrorKind::Protocol, error.to_string()))? {
                return Ok(event);
            }
            let read = self.io.read_buf(&mut self.wire.input()).await;
            if read.map_err(|error| lost(&error))? == 0 {
                let text = "the server closed the connection during the handshake";
                return Err(RpcError::new(ErrorKind::PeerLost, text));
            }
        }
    }

    async fn write(&mut self, bytes: &[u8]) -> Result<(), RpcError> {
        self.io.write_all(bytes).await.map_err(|error| lost(&error))?;
        self.io.flush().await.map_err(|error| lost(&error))
    }
}
