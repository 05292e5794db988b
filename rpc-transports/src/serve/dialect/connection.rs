//! A connection in a dialect: its stream, its session, and its limits and notices.

use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use async_trait::async_trait;
use bytes::BytesMut;
use rpc_core::{ErrorKind, RpcError, Session, SharedSession};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::watch;

use crate::channel::{Channel, ChannelIo};
use crate::handshake::handshake_limit::HandshakePermit;
use crate::limits::WireLimits;
use crate::runtime::free;
use crate::serve::mailbox::Command;
use crate::serve::stall_timeouts::StallTimeouts;

/// A client's connection in a [`Dialect`](crate::Dialect), and what the server gives it.
pub struct DialectConnection {
    stream: WatchedStream,
    peer: String,
    identity: String,
    sessions: Arc<dyn SessionSource>,
    /// Permit among the handshakes, until there is a session.
    permit: Option<HandshakePermit>,
    pub(super) progress: Arc<Mutex<Progress>>,
    notices: watch::Receiver<Option<Command>>,
    pub(super) session: Option<OpenedSession>,
}

/// Server behind a connection in a dialect.
#[async_trait]
pub(super) trait SessionSource: Send + Sync {
    /// Opens the session of the connection.
    async fn open(&self, request: &DialectRequest) -> Result<(OpenedSession, StallTimeouts), RpcError>;

    /// Returns the limits on messages.
    fn limits(&self) -> &WireLimits;
}

/// Session of a connection.
pub(super) struct OpenedSession {
    pub(super) session: SharedSession,
    /// Share of the session in the server, which ends after the session.
    pub(super) share: Box<dyn Send + Sync>,
}

/// State that a connection shares with the server's task for it.
#[derive(Default)]
pub(super) struct Progress {
    /// Timeouts of the session. `None` until there is one.
    pub(super) timeouts: Option<StallTimeouts>,
    /// Number of requests that the dialect says it is working on.
    working: usize,
}

/// A dialect's request for a session. The default asks for nothing. Empty texts stand for none.
#[derive(Clone, Debug, Default)]
pub struct DialectRequest {
    /// Key that the client asks for. It must be the server's.
    pub key: String,
    /// Named workspace that the client wants, instead of a private one.
    pub workspace: String,
    /// Ticket that a tracker gave the client for this server.
    pub ticket: String,
}

/// Notices of the server to a connection in a dialect.
#[derive(Clone, Debug)]
pub struct ServerNotices(watch::Receiver<Option<Command>>);

/// Mark of a request in progress. While one exists, the server's limit on idle sessions does not
/// count.
pub struct Working(Arc<Mutex<Progress>>);

impl DialectConnection {
    /// Creates the connection, and the sender of the server's commands to it.
    pub(super) fn new(
        mut channel: Channel,
        identity: String,
        sessions: Arc<dyn SessionSource>,
        permit: HandshakePermit,
    ) -> (Self, watch::Sender<Option<Command>>) {
        let progress = Arc::new(Mutex::new(Progress::default()));
        let (commands, notices) = watch::channel(None);
        let (peer, unread) = (channel.peer().to_owned(), channel.take_unread());
        let this = Self {
            stream: WatchedStream { unread, channel, progress: progress.clone() },
            peer,
            identity,
            sessions,
            permit: Some(permit),
            progress,
            notices,
            session: None,
        };
        (this, commands)
    }

    /// Returns the stream of bytes, from the first one on. Reading from it and writing to it counts
    /// for the server's limits on idle and on stalled clients.
    pub fn io(&mut self) -> &mut dyn ChannelIo {
        &mut self.stream
    }

    /// Opens the session, by the server's [`SessionFactory`](crate::SessionFactory). It counts
    /// among the server's sessions until the connection ends. Part of the handshake: the server's
    /// time limit for that holds until it returns.
    ///
    /// # Errors
    ///
    /// The reason why this client gets no session, which the dialect tells it:
    /// [`ErrorKind::Refused`] for another key, [`ErrorKind::LimitExceeded`],
    /// [`ErrorKind::Draining`], and those of the factory. [`ErrorKind::ApiMisuse`] for a second
    /// session.
    pub async fn open(&mut self, request: DialectRequest) -> Result<Session, RpcError> {
        if self.session.is_some() {
            return Err(RpcError::new(ErrorKind::ApiMisuse, "a connection in a dialect has one session"));
        }
        let (opened, timeouts) = self.sessions.open(&request).await?;
        self.permit = None;
        let session = opened.session.clone();
        self.session = Some(opened);
        lock(&self.progress).timeouts = Some(timeouts);
        Ok(session.into())
    }

    /// Returns the address that the client comes from.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the identity of the client: the name in its certificate, or `anonymous`.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns the server's limits on messages, which a dialect keeps by itself.
    #[must_use]
    pub fn limits(&self) -> &WireLimits {
        self.sessions.limits()
    }

    /// Returns the server's notices for this connection.
    #[must_use]
    pub fn notices(&self) -> ServerNotices {
        ServerNotices(self.notices.clone())
    }

    /// Marks the beginning of a request. The request ends when the mark is dropped.
    #[must_use]
    pub fn working(&self) -> Working {
        let mut progress = lock(&self.progress);
        progress.working += 1;
        if let Some(timeouts) = &mut progress.timeouts {
            timeouts.idle_since = None;
        }
        drop(progress);
        Working(self.progress.clone())
    }
}

impl ServerNotices {
    /// Resolves when the server takes no new requests: the dialect answers those in progress, and
    /// returns. Never resolves before there is a session. Cancel-safe.
    pub async fn going_away(&mut self) {
        self.wait_for(Command::GoAway).await;
    }

    /// Resolves when the server is stopped: the connection is cut a second later. Never resolves
    /// before there is a session. Cancel-safe.
    pub async fn stopped(&mut self) {
        self.wait_for(Command::Stop).await;
    }

    async fn wait_for(&mut self, command: Command) {
        if self.0.wait_for(|told| *told >= Some(command)).await.is_err() {
            // The server's task for the connection is over, and drops this future.
            std::future::pending().await
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let mut progress = lock(&self.0);
        progress.working -= 1;
        let is_idle = progress.working == 0;
        if let Some(timeouts) = progress.timeouts.as_mut().filter(|_| is_idle) {
            timeouts.idle_since = Some(Instant::now());
        }
    }
}

impl Drop for DialectConnection {
    fn drop(&mut self) {
        if let Some(OpenedSession { session, share }) = self.session.take() {
            free((session, share));
        }
    }
}

impl fmt::Debug for DialectConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialectConnection").field("peer", &self.peer()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Working {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Working")
    }
}

/// Stream of a connection. It gives the bytes that were read already first, and keeps the timeouts
/// of the session.
struct WatchedStream {
    unread: BytesMut,
    channel: Channel,
    progress: Arc<Mutex<Progress>>,
}

impl WatchedStream {
    /// Records the outcome of a poll of the outgoing direction. `is_done` tells from the value
    /// whether all output has been taken, and by how many bytes.
    fn watch_output<T>(
        &self,
        outcome: Poll<io::Result<T>>,
        is_done: impl FnOnce(&T) -> (bool, usize),
    ) -> Poll<io::Result<T>> {
        if let Some(timeouts) = &mut lock(&self.progress).timeouts {
            match &outcome {
                Poll::Pending => timeouts.set_writing(true),
                Poll::Ready(Ok(value)) => {
                    let (is_done, written) = is_done(value);
                    timeouts.wrote(written);
                    timeouts.set_writing(!is_done);
                }
                Poll::Ready(Err(_)) => {}
            }
        }
        outcome
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        if this.unread.is_empty() {
            ready!(pin!(this.channel.io_mut()).poll_read(cx, buffer))?;
        } else {
            let count = this.unread.len().min(buffer.remaining());
            buffer.put_slice(&this.unread.split_to(count));
        }
        let (count, mut progress) = (buffer.filled().len() - before, lock(&this.progress));
        let is_working = progress.working > 0;
        if let Some(timeouts) = progress.timeouts.as_mut().filter(|_| count > 0) {
            timeouts.idle_since = (!is_working).then(Instant::now);
            timeouts.received(count);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = pin!(self.channel.io_mut()).poll_write(cx, bytes);
        self.watch_output(written, |written| (*written == bytes.len(), *written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = pin!(self.channel.io_mut()).poll_flush(cx);
        self.watch_output(flushed, |()| (true, 0))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut_down = pin!(self.channel.io_mut()).poll_shutdown(cx);
        self.watch_output(shut_down, |()| (true, 0))
    }
}

pub(super) fn lock(progress: &Mutex<Progress>) -> MutexGuard<'_, Progress> {
    progress.lock().unwrap_or_else(PoisonError::into_inner)
}
