//! The connection of a client of TVM: reading, writing, and its ends.

use std::time::{Duration, Instant};

use bytes::Bytes;
use rpc_core::{ErrorKind, RpcError};
use rpc_transports::{ChannelIo, DialectActivity, DialectConnection, Receiving, ServerNotices};
use rpc_tvm::wire::{ServerEvent, ServerWire, WireError, exception, timeout_text};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::error_text::error_text;

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

/// Length in bytes up to which a reply is charged to nobody: all that have a handle, and errors. So
/// an object is never made without its handle coming back, whatever other sessions hold.
pub(super) const SMALL_REPLY: u64 = 64 << 10;

/// Reply to a request.
pub(super) enum Reply {
    /// A frame.
    Frame(Vec<u8>),
    /// The beginning of a frame, and bytes at its end.
    Bytes(Vec<u8>, Bytes),
}

impl Reply {
    /// Returns the length in bytes.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Frame(frame) => frame.len() as u64,
            Self::Bytes(header, data) => (header.len() + data.len()) as u64,
        }
    }
}

/// Connection of a client, with all that may end it.
pub(super) struct Link<'a> {
    pub(super) connection: &'a mut DialectConnection,
    pub(super) wire: ServerWire,
    pub(super) activity: DialectActivity,
    pub(super) notices: ServerNotices,
    /// The same notices, for the one wait that looks for both.
    pub(super) going_away: ServerNotices,
    /// End of the time that the client has asked for, and its length.
    pub(super) deadline: Option<(Instant, Duration)>,
    /// Mark of a message of which a part has arrived.
    pub(super) receiving: Option<Receiving>,
}

impl<'a> Link<'a> {
    pub(super) fn new(
        connection: &'a mut DialectConnection,
        wire: ServerWire,
        deadline: Option<(Instant, Duration)>,
    ) -> Self {
        let (activity, notices) = (connection.activity(), connection.notices());
        let going_away = notices.clone();
        Self { connection, wire, activity, notices, going_away, deadline, receiving: None }
    }

    /// Ends the connection: tells the client what it is to be told.
    pub(super) async fn finish(self, end: End) -> Result<(), RpcError> {
        match end {
            End::Closed => Ok(()),
            End::Lost(reason) => Err(reason),
            End::Told(text, reason) => {
                write(self.connection.io(), &exception(&text)).await?;
                Err(reason)
            }
        }
    }
}

impl Link<'_> {
    /// Returns the next event of the client.
    pub(super) async fn next_event(&mut self) -> Result<ServerEvent, End> {
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
                read = self.connection.io().read_buf(&mut input) => read,
            };
            if read.map_err(|error| End::Lost(lost(&error)))? == 0 {
                return Err(if is_idle { End::Closed } else { End::Lost(cut()) });
            }
        }
    }

    /// Waits for `work`, and meanwhile for the end of the connection.
    pub(super) async fn until<T>(&mut self, work: impl Future<Output = T>) -> Result<T, End> {
        let mut work = std::pin::pin!(work);
        let Self { connection, wire, notices, deadline, .. } = self;
        loop {
            let input = async {
                if wire.can_read_ahead() {
                    return connection.io().read_buf(&mut wire.input()).await;
                }
                // The rest stays with the client. Its end is seen nevertheless.
                connection.hung_up().await;
                Ok(0)
            };
            let read = tokio::select! {
                biased;
                done = &mut work => return Ok(done),
                end = ended(notices, *deadline) => return Err(end),
                read = input => read,
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
            read = self.connection.io().read(room) => read.map_err(|error| End::Lost(lost(&error)))?,
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
                self.connection.begin_message();
                self.write(&header).await?;
                self.write(&data).await?;
                self.connection.end_message();
            }
        }
        self.flush().await
    }

    pub(super) async fn write(&mut self, bytes: &[u8]) -> Result<(), End> {
        let Self { connection, deadline, .. } = self;
        written(connection.io().write_all(bytes), *deadline).await
    }

    pub(super) async fn flush(&mut self) -> Result<(), End> {
        let Self { connection, deadline, .. } = self;
        written(connection.io().flush(), *deadline).await
    }
}

/// Resolves when the server ends the connection, or the client's own time is over.
async fn ended(notices: &mut ServerNotices, deadline: Option<(Instant, Duration)>) -> End {
    tokio::select! {
        reason = notices.stopped() => End::Told(error_text(&reason), reason),
        (length, reason) = expired(deadline) => End::Told(timeout_text(length), reason),
    }
}

/// Resolves when the client's own time is over, to its length and the error that says so.
async fn expired(deadline: Option<(Instant, Duration)>) -> (Duration, RpcError) {
    let Some((at, length)) = deadline else { return std::future::pending().await };
    tokio::time::sleep_until(at.into()).await;
    (length, lasted_as_asked(length))
}

/// Returns the reason for the end of a session whose client has asked for this time.
pub(super) fn lasted_as_asked(length: Duration) -> RpcError {
    let reason = format!("the client's session has lasted for {length:?}, as it has asked for");
    RpcError::new(ErrorKind::SessionTimeout, reason)
}

/// Waits until output is written, or until the client's own time is over. The client is not told
/// then: a part of an answer may be out.
async fn written(
    output: impl Future<Output = std::io::Result<()>>,
    deadline: Option<(Instant, Duration)>,
) -> Result<(), End> {
    tokio::select! {
        biased;
        written = output => written.map_err(|error| End::Lost(lost(&error))),
        (_, reason) = expired(deadline) => Err(End::Lost(reason)),
    }
}

pub(super) async fn write(io: &mut dyn ChannelIo, bytes: &[u8]) -> Result<(), RpcError> {
    io.write_all(bytes).await.map_err(|error| lost(&error))?;
    io.flush().await.map_err(|error| lost(&error))
}

pub(super) fn lost(error: &std::io::Error) -> RpcError {
    RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))
}

fn cut() -> RpcError {
    RpcError::new(ErrorKind::PeerLost, "the connection ended inside a message")
}
