//! A connection of a client of TVM: the handshake, the requests in their order, and its ends.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, RpcError, printable_line};
use rpc_transports::{ChannelIo, DialectActivity, DialectConnection, DialectRequest, Receiving, ServerNotices};
use rpc_tvm::wire::{
    HelloAnswer, HelloKey, PROTOCOL_VERSION, Request, ServerEvent, ServerWire, Text, WireError, WireLimits, WireValue,
    exception, returned, timeout_text,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::TvmDialect;
use super::copies;
use super::session::{TvmSession, error_text};

/// End of a connection.
pub(super) enum End {
    /// The client has ended it.
    Closed,
    /// The connection cannot be used any more.
    Lost(RpcError),
    /// The client is told this text, if it still reads.
    Told(String, RpcError),
}

impl From<WireError> for End {
    fn from(error: WireError) -> Self {
        let text = error.to_string();
        Self::Told(text.clone(), RpcError::new(ErrorKind::Protocol, text))
    }
}

/// Reply to a request.
pub(super) enum Reply {
    /// A frame.
    Frame(Vec<u8>),
    /// The beginning of a frame, and bytes at its end.
    Bytes(Vec<u8>, Bytes),
}

impl Reply {
    /// Returns the length in bytes.
    fn len(&self) -> u64 {
        match self {
            Self::Frame(frame) => frame.len() as u64,
            Self::Bytes(header, data) => (header.len() + data.len()) as u64,
        }
    }
}

/// Length in bytes up to which a reply is charged to nobody: all that have a handle, and errors. So
/// an object is never made without its handle coming back, whatever other sessions hold.
const SMALL_REPLY: u64 = 64 << 10;

/// What a connection reads and writes, and by what it may end.
pub(super) struct Link<'a> {
    pub(super) io: &'a mut dyn ChannelIo,
    pub(super) wire: ServerWire,
    activity: DialectActivity,
    notices: ServerNotices,
    /// The same notices, for the one wait that looks for both.
    going_away: ServerNotices,
    /// End of the time that the client has asked for, and its length.
    deadline: Option<(Instant, Duration)>,
    /// Mark of a message of which a part has arrived.
    receiving: Option<Receiving>,
}

/// Serves a connection to its end.
pub(super) async fn serve(dialect: &TvmDialect, connection: &mut DialectConnection) -> Result<(), RpcError> {
    let limits = WireLimits::new(connection.limits().max_message);
    let mut wire = ServerWire::new(limits);
    let key = read_hello(connection, &mut wire).await?;
    let hello = match HelloKey::parse(&key) {
        Ok(hello) if hello.key == dialect.key => hello,
        parsed => {
            let text = match parsed {
                Ok(hello) => {
                    format!(
                        "the client asks for key '{}', and the server has '{}'",
                        printable_line(hello.key),
                        dialect.key
                    )
                }
                Err(error) => error.to_string(),
            };
            write(connection.io(), &HelloAnswer::Mismatch.encode()).await?;
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
    };
    let deadline = hello.timeout.and_then(|length| Some((Instant::now().checked_add(length)?, length)));
    let request = DialectRequest { key: dialect.key.clone(), ..DialectRequest::default() };
    let opened = connection.open(request).await;
    write(connection.io(), &HelloAnswer::Accepted(&format!("server:{}", dialect.key)).encode()).await?;
    let (activity, notices, queued) = (connection.activity(), connection.notices(), connection.queued().clone());
    let going_away = notices.clone();
    let mut link = Link { io: connection.io(), wire, activity, notices, going_away, deadline, receiving: None };
    let ended = match opened {
        Ok(session) => {
            let session = TvmSession::new(session, queued, dialect.max_handles)?;
            link.serve_session(session).await
        }
        Err(reason) => link.refuse_session(reason).await,
    };
    match ended {
        End::Closed => Ok(()),
        End::Lost(reason) => Err(reason),
        End::Told(text, reason) => {
            write(link.io, &exception(&text)).await?;
            Err(reason)
        }
    }
}

/// Reads the hello, and returns the text of its key. The server limits the time.
async fn read_hello(connection: &mut DialectConnection, wire: &mut ServerWire) -> Result<String, RpcError> {
    loop {
        match wire.poll_event() {
            Ok(Some(ServerEvent::Hello(hello))) => return Ok(hello.key),
            Ok(_) => {}
            Err(error) => return Err(RpcError::new(ErrorKind::Protocol, error.to_string())),
        }
        let read = connection.io().read_buf(&mut wire.input()).await;
        if read.map_err(|error| lost(&error))? == 0 {
            return Err(RpcError::new(ErrorKind::PeerLost, "the client left during the handshake"));
        }
    }
}

impl Link<'_> {
    /// Serves the requests of a session. Returns the reason for its end.
    async fn serve_session(&mut self, mut session: TvmSession) -> End {
        let mut body = None;
        loop {
            let served = match self.next_event().await {
                Ok(ServerEvent::Request(Request::Shutdown)) => return End::Closed,
                Ok(event) => self.serve_event(event, &mut session, &mut body).await,
                Err(end) => return end,
            };
            if let Err(end) = served {
                return end;
            }
        }
    }

    async fn serve_event(
        &mut self,
        event: ServerEvent,
        session: &mut TvmSession,
        body: &mut Option<(u64, MemoryLease)>,
    ) -> Result<(), End> {
        let reply = match event {
            ServerEvent::Announced { len } => {
                match session.queued().reserve(len) {
                    Ok(lease) => *body = Some((len, lease)),
                    Err(error) => self.wire.refuse(&error_text(&error)),
                }
                return Ok(());
            }
            ServerEvent::Answer(frame) => Reply::Frame(frame),
            ServerEvent::CopyTo { to, len } => {
                let _working = self.activity.working();
                match copies::copy_to(self, session, &to, len).await? {
                    Some(frame) => Reply::Frame(frame),
                    // The rest was refused, and is answered behind it.
                    None => return Ok(()),
                }
            }
            ServerEvent::Request(Request::CopyFrom { from, len }) => {
                let _working = self.activity.working();
                return copies::copy_from(self, session, &from, len).await;
            }
            ServerEvent::Request(Request::Init { version, constructor }) => {
                Reply::Frame(match check_init(&version, &constructor) {
                    Ok(()) => {
                        self.wire.begin();
                        returned(&[WireValue::None])
                    }
                    Err(text) => exception(&text),
                })
            }
            ServerEvent::Request(request) => {
                let _working = self.activity.working();
                let served = self.until(session.serve(request)).await?;
                let mut reply = served.unwrap_or_else(|error| Reply::Frame(exception(&error_text(&error))));
                // The arguments are gone, unless the result is a part of them, with which all stay.
                if !matches!(reply, Reply::Bytes(..)) {
                    drop(body.take());
                }
                let charged = body.as_ref().map_or(0, |(len, _)| *len);
                let mut _lease = None;
                if reply.len() > SMALL_REPLY.max(charged) {
                    match session.queued().reserve(reply.len() - charged) {
                        Ok(lease) => _lease = Some(lease),
                        Err(error) => reply = Reply::Frame(exception(&error_text(&error))),
                    }
                }
                let replied = self.reply(reply).await;
                drop(body.take());
                return replied;
            }
            // There is one hello, which was read.
            _ => return Ok(()),
        };
        drop(body.take());
        self.reply(reply).await
    }

    /// Answers the first request with the reason why there is no session.
    async fn refuse_session(&mut self, reason: RpcError) -> End {
        loop {
            match self.next_event().await {
                Ok(ServerEvent::Announced { .. }) => self.wire.refuse("no session has been opened"),
                Ok(_) => return End::Told(error_text(&reason), reason),
                Err(end) => return end,
            }
        }
    }

    /// Returns the next event of the client.
    async fn next_event(&mut self) -> Result<ServerEvent, End> {
        loop {
            if let Some(event) = self.wire.poll_event()? {
                self.receiving = None;
                return Ok(event);
            }
            let is_idle = !self.wire.is_inside_message();
            if !is_idle && self.receiving.is_none() {
                self.receiving = Some(self.activity.receiving());
            }
            let mut input = self.wire.input();
            let read = tokio::select! {
                biased;
                end = ended(&mut self.notices, self.deadline) => return Err(end),
                reason = self.going_away.going_away(), if is_idle => return Err(End::Told(error_text(&reason), reason)),
                read = self.io.read_buf(&mut input) => read,
            };
            if read.map_err(|error| End::Lost(lost(&error)))? == 0 {
                return Err(if is_idle { End::Closed } else { End::Lost(cut()) });
            }
        }
    }

    /// Waits for `work`, and meanwhile for the end of the connection.
    pub(super) async fn until<T>(&mut self, work: impl Future<Output = T>) -> Result<T, End> {
        let mut work = std::pin::pin!(work);
        let mut can_read = true;
        loop {
            can_read &= self.wire.can_read_ahead();
            let mut input = self.wire.input();
            let read = tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                end = ended(&mut self.notices, self.deadline) => return Err(end),
                read = self.io.read_buf(&mut input), if can_read => read,
            };
            match read {
                // Nobody waits for the reply.
                Ok(0) => return Err(End::Lost(RpcError::new(ErrorKind::PeerLost, "the client left during a request"))),
                Ok(_) => {}
                Err(error) => return Err(End::Lost(lost(&error))),
            }
        }
    }

    /// Reads a part of a copy's payload into `room`, which is not empty.
    pub(super) async fn read_payload(&mut self, room: &mut [u8]) -> Result<usize, End> {
        let ahead = self.wire.payload();
        if !ahead.is_empty() {
            let count = ahead.len().min(room.len());
            room[..count].copy_from_slice(&ahead[..count]);
            self.wire.advance_payload(count);
            return Ok(count);
        }
        if self.receiving.is_none() {
            self.receiving = Some(self.activity.receiving());
        }
        let count = tokio::select! {
            biased;
            end = ended(&mut self.notices, self.deadline) => return Err(end),
            read = self.io.read(room) => read.map_err(|error| End::Lost(lost(&error)))?,
        };
        if count == 0 {
            return Err(End::Lost(cut()));
        }
        self.wire.payload_was_read(count as u64);
        Ok(count)
    }

    /// Records that the client owes no bytes for a while.
    pub(super) fn stop_receiving(&mut self) {
        self.receiving = None;
    }

    pub(super) async fn reply(&mut self, reply: Reply) -> Result<(), End> {
        match reply {
            Reply::Frame(frame) => self.write(&frame).await?,
            Reply::Bytes(header, data) => {
                self.write(&header).await?;
                self.write(&data).await?;
            }
        }
        self.flush().await
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), End> {
        self.io.write_all(bytes).await.map_err(|error| End::Lost(lost(&error)))
    }

    pub(super) async fn flush(&mut self) -> Result<(), End> {
        self.io.flush().await.map_err(|error| End::Lost(lost(&error)))
    }
}

/// Resolves when the server ends the connection, or the client's own time is over.
async fn ended(notices: &mut ServerNotices, deadline: Option<(Instant, Duration)>) -> End {
    let expired = async {
        match deadline {
            Some((at, length)) => {
                tokio::time::sleep_until(at.into()).await;
                length
            }
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        reason = notices.stopped() => End::Told(error_text(&reason), reason),
        length = expired => {
            let reason = format!("the client's session has lasted for {length:?}, as it has asked for");
            End::Told(timeout_text(length), RpcError::new(ErrorKind::SessionTimeout, reason))
        }
    }
}

/// Checks the first request of a session.
fn check_init(version: &Text, constructor: &[WireValue]) -> Result<(), String> {
    if version.as_str() != PROTOCOL_VERSION {
        let found: String = version.as_str().chars().take(64).collect();
        return Err(format!("Client protocol version mismatch with the server: {found:?} vs. {PROTOCOL_VERSION:?}"));
    }
    let Some(name) = constructor.first() else { return Ok(()) };
    match name {
        WireValue::Str(name) if name.as_str() == "rpc.LocalSession" => Ok(()),
        WireValue::Str(name) if matches!(name.as_str(), "rpc.Connect" | "rpc.PopenSession" | "rpc.WasmSession") => {
            let name = name.as_str();
            Err(format!("Cannot construct a session by {name}: this server serves its own sessions to TVM's clients"))
        }
        WireValue::Str(name) => {
            let name: String = name.as_str().chars().take(256).collect();
            Err(format!("Cannot find session constructor {name}"))
        }
        other => Err(format!("Cannot find session constructor: its name is of type {}", other.type_name())),
    }
}

async fn write(io: &mut dyn ChannelIo, bytes: &[u8]) -> Result<(), RpcError> {
    io.write_all(bytes).await.map_err(|error| lost(&error))?;
    io.flush().await.map_err(|error| lost(&error))
}

fn lost(error: &std::io::Error) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))
}

fn cut() -> RpcError {
    RpcError::new(ErrorKind::PeerLost, "the connection ended inside a message")
}
