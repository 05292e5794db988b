//! A connection in a dialect: its stream, its session, and its limits and notices.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::reply::Canceller;
use rpc_core::{ErrorKind, MemoryQuota, OpenFileQuota, RpcError, Session, SharedSession};
use tokio::sync::watch;

use super::activity::{DialectActivity, Progress};
use super::relayed::RelayedConnection;
use super::stream::{UnreadStream, WatchedStream};
use crate::channel::{Channel, ChannelIo, Machine};
use crate::handshake::handshake_slots::HandshakePermit;
use crate::handshake::peer_identity::PeerIdentity;
use crate::hang_up::{LOOK_INTERVAL, has_hung_up};
use crate::runtime::free;
use crate::serve::access_record::{AccessRecord, SessionNote};
use crate::serve::mailbox::Command;
use crate::serve::output_mark::OutputMark;
use crate::serve::stall_timeouts::StallTimeouts;
use crate::serve::state::ServerState;
use crate::wire_limits::WireLimits;

/// A client's connection in a [`Dialect`](crate::Dialect), and what the server gives it.
pub struct DialectConnection {
    stream: WatchedStream,
    peer: String,
    identity: String,
    sessions: Arc<dyn SessionSource>,
    /// Permit among the handshakes, until there is a session.
    permit: Option<HandshakePermit>,
    pub(super) progress: Arc<Mutex<Progress>>,
    notices: watch::Receiver<Option<Notice>>,
    pub(super) session: Option<OpenedSession>,
    /// Share in the server of a peer that a relay has admitted.
    pub(super) admission: Option<Admission>,
    /// Session that another process serves, with the socket of this connection.
    pub(super) handed_off: Option<Box<dyn ServedElsewhere>>,
}

/// Server behind a connection in a dialect.
#[async_trait]
pub(super) trait SessionSource: Send + Sync {
    /// Opens the session of the connection.
    async fn open(&self, request: &DialectRequest) -> Result<(OpenedSession, StallTimeouts), RpcError>;

    /// Opens a session with a further server, on behalf of the client.
    async fn connect_onward(&self, target: &str, key: &str) -> Result<Session, RpcError>;

    /// Subscribes the connection's task to the end of a session.
    fn watch_end(&self, session: &SharedSession) -> Canceller;

    /// Gives the peer of a relay its share in the server.
    fn admit(&self) -> Result<(Admission, StallTimeouts), RpcError>;

    /// Passes the channel's socket to the process that has offered to serve the session. Returns
    /// everything if there is none, or the socket cannot be passed.
    async fn hand_off(
        &self,
        channel: Channel,
        opened: OpenedSession,
        handoff: DialectHandoff,
    ) -> Result<Box<dyn ServedElsewhere>, KeptConnection>;

    /// Has the system test by this channel's socket that the machine of the client is there.
    fn probe_silence(&self, channel: &Channel);

    /// Returns the note for the record of the connection in the log.
    fn note(&self) -> &SessionNote;

    /// Returns the quota of the descriptors that the client can have opened.
    fn open_files(&self) -> &OpenFileQuota;

    /// Returns the machine of the client.
    fn machine(&self) -> Machine;

    /// Returns the identity of the client with the kind of its proof.
    fn peer_identity(&self) -> &PeerIdentity;

    /// Returns the limits on messages.
    fn limits(&self) -> &WireLimits;

    /// Returns the quota of the bytes that the connection may have queued.
    fn queued(&self) -> &Arc<MemoryQuota>;
}

/// Session that another process serves over the socket of the connection.
#[async_trait]
pub(super) trait ServedElsewhere: Send {
    /// Watches over the session to its end, at `expires` at the latest, and records that.
    async fn watch(&mut self, record: &AccessRecord, expires: Option<Instant>);
}

/// Connection that cannot be handed to another process.
pub(super) type KeptConnection = Box<(Channel, OpenedSession, DialectHandoff)>;

/// Session of a connection.
pub(super) struct OpenedSession {
    pub(super) session: SharedSession,
    /// Subscription to the end of the session, which is delivered to the task's mailbox.
    pub(super) end_watch: Canceller,
    /// Share of the session in the server, which ends after the session.
    pub(super) share: Box<dyn Send + Sync>,
}

/// Access of a connection in a dialect to further servers, on behalf of its client.
#[derive(Clone)]
pub struct FurtherServers(Arc<dyn SessionSource>);

/// Share in the server of a peer that a relay has admitted, until it is dropped.
pub(super) struct Admission {
    pub(super) server: Arc<ServerState>,
    /// The peer's place among the sessions.
    pub(super) share: Box<dyn Send + Sync>,
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

/// A dialect's connection as it is handed to the process of its session.
pub struct DialectHandoff {
    /// State of the connection for [`Dialect::resume`](crate::Dialect::resume), in the dialect's
    /// own form, of at most some KiB.
    pub state: Vec<u8>,
    /// Input that the dialect has read and not used.
    pub input: Vec<u8>,
    /// Time by which the dialect ends the session by itself, and the reason that it has then. A
    /// process that is late is killed.
    pub deadline: Option<(Instant, RpcError)>,
    /// Resources that are held until the connection has ended.
    pub held: Box<dyn Send + Sync>,
}

/// Notices of the server to a connection in a dialect.
#[derive(Clone, Debug)]
pub struct ServerNotices(watch::Receiver<Option<Notice>>);

/// Strongest command of the server to a connection so far, and the reason for it.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    pub(super) command: Command,
    pub(super) reason: RpcError,
}

impl DialectConnection {
    /// Creates the connection, and the sender of the server's notices to it.
    pub(super) fn new(
        channel: Channel,
        identity: String,
        sessions: Arc<dyn SessionSource>,
        permit: Option<HandshakePermit>,
    ) -> (Self, watch::Sender<Option<Notice>>) {
        let progress = Arc::new(Mutex::new(Progress::default()));
        let (sender, notices) = watch::channel(None);
        let peer = channel.peer().to_owned();
        let this = Self {
            stream: WatchedStream::new(channel, progress.clone()),
            peer,
            identity,
            sessions,
            permit,
            progress,
            notices,
            session: None,
            admission: None,
            handed_off: None,
        };
        (this, sender)
    }

    /// Replaces the channel by the one that `upgrade` makes of it, such as a WebSocket over its
    /// bytes. Part of the handshake. A connection whose upgrade fails is at its end.
    ///
    /// # Errors
    ///
    /// Those of `upgrade`.
    pub async fn upgrade<F>(&mut self, upgrade: impl FnOnce(Channel) -> F) -> io::Result<()>
    where
        F: Future<Output = io::Result<Channel>>,
    {
        let mut channel = self.stream.take_channel();
        let unread = channel.take_unread();
        let channel = upgrade(channel.map_io(|io| UnreadStream::new(unread, io))).await?;
        self.stream = WatchedStream::new(channel, self.progress.clone());
        Ok(())
    }

    /// Has the operating system test that the peer's machine is there, at the server's
    /// [`keep_alive`](crate::ServeOptions::keep_alive): a connection whose peer does not answer for
    /// some intervals breaks. A peer that is there may be silent for as long as it likes. Does
    /// nothing if the channel is no bare socket.
    pub fn probe_silence(&self) {
        self.sessions.probe_silence(self.stream.channel());
    }

    /// Resolves when the peer has hung up, although input of it is left that nobody reads: its
    /// connection is broken, or its sending half is closed. A dialect that has read as far ahead as
    /// it wants waits for this in the place of input. The socket is looked at now and then. Never
    /// resolves if the channel is no bare socket. Cancel-safe.
    pub async fn hung_up(&mut self) {
        loop {
            tokio::time::sleep(LOOK_INTERVAL).await;
            match self.stream.channel().plain_socket().map(|socket| has_hung_up(socket.as_fd())) {
                Some(true) => return,
                Some(false) => {}
                None => std::future::pending().await,
            }
        }
    }

    /// Acknowledges at once what was read, for protocols whose peers wait for that before they send
    /// the rest of a message: those that write it in pieces and leave Nagle's algorithm on. The
    /// kernel would wait for 40 ms for an answer that the acknowledgement could travel with. It
    /// holds until the next write. Does nothing if the channel is no bare TCP socket, and outside
    /// of Linux.
    pub fn acknowledge(&self) {
        #[cfg(feature = "tcp")]
        if let Some(socket) = self.stream.channel().plain_socket() {
            crate::transports::tcp::acknowledge(socket.as_fd());
        }
    }

    /// Gives the peer of a [relay](crate::ServeOptions::relay), which opens no sessions, a place
    /// among the relay's sessions, until the connection ends. The handshake is over then.
    ///
    /// # Errors
    ///
    /// The reason why this peer gets no place, which the dialect tells it:
    /// [`ErrorKind::LimitExceeded`], [`ErrorKind::Draining`]. [`ErrorKind::ApiMisuse`] for a second
    /// place.
    pub fn admit(&mut self) -> Result<(), RpcError> {
        if self.session.is_some() || self.admission.is_some() {
            return Err(RpcError::new(ErrorKind::ApiMisuse, "a connection in a dialect is admitted once"));
        }
        let (admission, timeouts) = self.sessions.admit()?;
        self.permit = None;
        self.admission = Some(admission);
        self.progress.lock().start(timeouts);
        Ok(())
    }

    /// Takes the channel out of an [admitted](Self::admit) connection, with its place. The dialect
    /// returns then. `None` if the connection was not admitted.
    pub fn detach(&mut self) -> Option<RelayedConnection> {
        let admission = self.admission.take()?;
        Some(RelayedConnection { channel: self.stream.take_channel(), _share: admission.share })
    }

    /// Copies bytes between the peer and that of another connection of this relay, both ways, until
    /// both directions have ended or one has broken. A peer that takes no bytes for 120 intervals
    /// of [`keep_alive`](crate::ServeOptions::keep_alive) while some wait for it breaks the
    /// connection; otherwise both may be silent. The server's limits on time do not count
    /// meanwhile, if the dialect has [said](Self::activity) that it works. Not cancel-safe.
    ///
    /// # Errors
    ///
    /// The error of the connection that broke. [`NotConnected`](io::ErrorKind::NotConnected) if
    /// this one was not [admitted](Self::admit).
    pub async fn splice(&mut self, other: &mut RelayedConnection) -> io::Result<()> {
        let Some(Admission { server, .. }) = &self.admission else {
            return Err(io::ErrorKind::NotConnected.into());
        };
        other.splice(self.stream.channel_mut(), server).await
    }

    /// Sets the note on what the connection is for, for its record in the log.
    pub fn set_note(&self, note: Arc<dyn fmt::Display + Send + Sync>) {
        self.sessions.note().set(note);
    }

    /// Returns the stream of bytes, from the first one on. A client that takes no output is cut off
    /// by the server's limits. So a write that the channel has no room for counts from then on,
    /// even if it is cancelled and the stream is flushed, until the channel has room again.
    pub fn io(&mut self) -> &mut dyn ChannelIo {
        &mut self.stream
    }

    /// Opens the session, by the server's [`SessionFactory`](crate::SessionFactory). It counts
    /// among the server's sessions until the connection ends. Part of the handshake: the server's
    /// time limit for that holds until it returns. If the session ends on its own, such as by the
    /// death of its process, the connection is stopped: see [`ServerNotices::stopped`].
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
        let session = opened.session.clone();
        self.begin_session(opened, timeouts);
        Ok(session.into())
    }

    /// Puts a session that was opened into the connection.
    pub(super) fn begin_session(&mut self, opened: OpenedSession, timeouts: StallTimeouts) {
        self.permit = None;
        self.session = Some(opened);
        self.progress.lock().start(timeouts);
    }

    /// Returns the session that was opened.
    #[must_use]
    pub fn session(&self) -> Option<Session> {
        self.session.as_ref().map(|opened| opened.session.clone().into())
    }

    /// Hands the connection to the process that has offered to serve its session, which
    /// [goes on](crate::Dialect::resume) with it: the session itself, and not one with a further
    /// server. That process has to have the dialect among its
    /// [dialects](crate::ServeOptions::dialects). All that the dialect has written was flushed. The
    /// dialect holds nothing of the session any more then, and returns: the result of its future
    /// counts for nothing.
    ///
    /// # Errors
    ///
    /// The handoff as it was, if no process has offered that, or the channel is no bare socket, or
    /// the socket cannot be passed. The dialect goes on here.
    pub async fn hand_off(&mut self, mut handoff: DialectHandoff) -> Result<(), DialectHandoff> {
        let Some(opened) = self.session.take() else { return Err(handoff) };
        let (mut channel, read) = (self.stream.take_channel(), handoff.input.len());
        let unread = channel.take_unread();
        handoff.input.extend_from_slice(&unread);
        match self.sessions.hand_off(channel, opened, handoff).await {
            Ok(handed_off) => {
                self.handed_off = Some(handed_off);
                Ok(())
            }
            Err(kept) => {
                let (mut channel, opened, mut handoff) = *kept;
                handoff.input.truncate(read);
                channel.put_back(unread);
                self.stream = WatchedStream::new(channel, self.progress.clone());
                self.session = Some(opened);
                Err(handoff)
            }
        }
    }

    /// Notes in `mark` from now on whether the output stands inside of a message.
    pub(super) fn mark_output_in(&mut self, mark: OutputMark) {
        self.stream.mark_output_in(mark);
    }

    /// Says that what is written from here on is a part of one message, until
    /// [`end_message`](Self::end_message). A message of one write needs neither. If the process
    /// that a connection was [handed](Self::hand_off) to ends inside of a message, its client gets
    /// no [last message](crate::Dialect::last_message).
    pub fn begin_message(&mut self) {
        self.stream.set_inside_message(true);
    }

    /// Says that the last part of a message was written.
    pub fn end_message(&mut self) {
        self.stream.set_inside_message(false);
    }

    /// Returns the access to further servers. It does not keep the connection.
    #[must_use]
    pub fn further_servers(&self) -> FurtherServers {
        FurtherServers(self.sessions.clone())
    }

    /// Puts a session with a further server in the place of the connection's own, which is freed.
    /// From then on the connection is stopped by the end of the new one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::ApiMisuse`] if no session has been opened.
    pub fn forward_to(&mut self, session: &Session) -> Result<(), RpcError> {
        let Some(opened) = &mut self.session else {
            return Err(RpcError::new(
                ErrorKind::ApiMisuse,
                "a connection in a dialect is forwarded after it is opened",
            ));
        };
        let next = session.shared().clone();
        let end_watch = std::mem::replace(&mut opened.end_watch, self.sessions.watch_end(&next));
        end_watch.abandon();
        free(std::mem::replace(&mut opened.session, next));
        Ok(())
    }

    /// Returns the address that the client comes from.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the identity of the client: the one that a native session has proven on the same
    /// QUIC connection, else the name in its certificate if the server accepts
    /// [certificates](crate::Access::certificates), else `anonymous`.
    #[must_use]
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns the same identity with the kind of its proof.
    #[must_use]
    pub fn peer_identity(&self) -> &PeerIdentity {
        self.sessions.peer_identity()
    }

    /// Returns the machine that the client is on, as the transport knows it: that of the last hop,
    /// if the client has come through one.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.sessions.machine()
    }

    /// Returns the server's limits on messages, which a dialect keeps by itself.
    #[must_use]
    pub fn limits(&self) -> &WireLimits {
        self.sessions.limits()
    }

    /// Returns the quota of the bytes that the connection may have queued, such as messages that
    /// are read and answers that are written. It is that of the session within that of all sessions
    /// ([`max_total_queued`](crate::ServeOptions::max_total_queued)), and reserves nothing by
    /// itself: a dialect [reserves](MemoryQuota::reserve) bytes before it holds them, and refuses a
    /// message for which there is no room. The limit of the session is
    /// [`window`](WireLimits::window), and an error names it so. Every byte counts: a dialect has
    /// none of the eight chunks that a native session may queue outside of the limit of all
    /// sessions.
    #[must_use]
    pub fn queued(&self) -> &Arc<MemoryQuota> {
        self.sessions.queued()
    }

    /// Returns the quota of the descriptors that may be open for this connection beside its own,
    /// which a dialect [reserves](OpenFileQuota::reserve) before it opens them.
    #[must_use]
    pub fn open_files(&self) -> &OpenFileQuota {
        self.sessions.open_files()
    }

    /// Returns the handle by which the dialect tells what the connection is doing.
    #[must_use]
    pub fn activity(&self) -> DialectActivity {
        DialectActivity::new(self.progress.clone())
    }

    /// Returns the server's notices for this connection.
    #[must_use]
    pub fn notices(&self) -> ServerNotices {
        ServerNotices(self.notices.clone())
    }
}

impl FurtherServers {
    /// Opens a session with the server at `target` that has this key; empty for none. The
    /// connection counts among the open files of the client. Cancel-safe.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::Refused`]: the operator does not allow it
    ///   ([`ServeOptions::allow_forward`](crate::ServeOptions::allow_forward)), or the client has
    ///   no right to it.
    /// * [`ErrorKind::LimitExceeded`]: the client has no more open files, or the server.
    /// * [`ErrorKind::Draining`].
    /// * Those of [`Connector::connect`](crate::Connector::connect).
    pub async fn connect(&self, target: &str, key: &str) -> Result<Session, RpcError> {
        self.0.connect_onward(target, key).await
    }
}

impl fmt::Debug for DialectHandoff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialectHandoff").field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

impl fmt::Debug for FurtherServers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FurtherServers").finish_non_exhaustive()
    }
}

impl ServerNotices {
    /// Resolves when the server takes no new requests, to the reason: the dialect answers those in
    /// progress, and returns. Never resolves before there is a session. Cancel-safe.
    pub async fn going_away(&mut self) -> RpcError {
        self.wait_for(Command::GoAway).await
    }

    /// Resolves when the connection is about to be cut, to the reason, which the dialect has a
    /// second to tell the client: the server is stopped, the session has ended or has lasted or
    /// idled for too long. Never resolves before there is a session. Cancel-safe.
    pub async fn stopped(&mut self) -> RpcError {
        self.wait_for(Command::Stop).await
    }

    async fn wait_for(&mut self, command: Command) -> RpcError {
        let has_notice = |notice: &Option<Notice>| notice.as_ref().is_some_and(|notice| notice.command >= command);
        let reason = match self.0.wait_for(has_notice).await {
            Ok(notice) => notice.as_ref().map(|notice| notice.reason.clone()),
            Err(_) => None,
        };
        match reason {
            Some(reason) => reason,
            // The server's task for the connection is over, and drops this future.
            None => std::future::pending().await,
        }
    }
}

impl Drop for DialectConnection {
    fn drop(&mut self) {
        if let Some(OpenedSession { session, end_watch, share }) = self.session.take() {
            end_watch.abandon();
            free((session, share));
        }
        // Before the share, for the peer sees the end of the connection then.
        if self.admission.is_some() {
            drop(self.stream.take_channel());
        }
    }
}

impl fmt::Debug for DialectConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DialectConnection").field("peer", &self.peer()).finish_non_exhaustive()
    }
}
