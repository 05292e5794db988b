//! The server's task for a connection in a dialect, which runs the dialect within the server's
//! limits.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::reply::Canceller;
use rpc_core::{ErrorKind, MemoryQuota, OpenFileQuota, RpcError, Session, SharedSession};
use tokio::sync::{Notify, watch};

use super::Dialect;
use super::activity::Progress;
use super::connection::{
    Admission, DialectConnection, DialectHandoff, DialectRequest, KeptConnection, Notice, OpenedSession,
    ServedElsewhere, SessionSource,
};
use crate::channel::{Channel, Machine};
use crate::channel_io::Alarm;
use crate::clock;
use crate::handshake::handshake_slots::HandshakePermit;
use crate::handshake::identity_proofs::Security;
use crate::handshake::peer_identity::PeerIdentity;
use crate::serve::access_record::{AccessRecord, SessionNote, log_fault};
use crate::serve::authorization::AuthorizedClient;
use crate::serve::connection::{Connection, LINGER, SessionRequest, drain_and_close, log_eviction, log_refusal};
use crate::serve::further_servers::OnwardServer as _;
use crate::serve::handoff::{BESIDE, HandedDialect, HandedOff, PassedSocket, SessionShare};
use crate::serve::mailbox::{Command, EndOfSession, Mailbox};
use crate::serve::session_process::PassedProtocol;
use crate::serve::stall_timeouts::StallTimeouts;
use crate::transport::BoxFuture;
#[cfg(feature = "tcp")]
use crate::transports::tcp::probe;
use crate::wire_limits::WireLimits;

/// Connection whose client speaks a dialect, and may be served.
pub(in crate::serve) struct DialectTask {
    client: Arc<DialectClient>,
    connection: DialectConnection,
    notices: watch::Sender<Option<Notice>>,
    eviction: Arc<Notify>,
    /// End of the time for the handshake.
    deadline: Instant,
}

/// Client of a dialect, which opens a session of the server's factory.
pub(in crate::serve) struct DialectClient {
    pub(in crate::serve) dialect: Arc<dyn Dialect>,
    pub(in crate::serve) connection: Connection,
    pub(in crate::serve) security: Security,
    pub(in crate::serve) served: AuthorizedClient,
    /// Number of the rules by which the server would serve the client natively, too, so that other
    /// channels of the same connection inherit the identity. `None` if it would not.
    pub(in crate::serve) rules: Option<u64>,
    /// Quota of the bytes that the dialect says it has queued.
    pub(in crate::serve) queued: Arc<MemoryQuota>,
}

/// End of a connection in a dialect.
pub(super) enum DialectEnd {
    /// The dialect has returned.
    Returned(Result<(), RpcError>),
    /// The server has cut the connection.
    Cut(RpcError),
    /// The handshake was evicted: too many were in progress, or the server stops.
    Evicted,
}

#[async_trait]
impl SessionSource for DialectClient {
    async fn open(&self, request: &DialectRequest) -> Result<(OpenedSession, StallTimeouts), RpcError> {
        let (server, own_key) = (&self.connection.server, &self.connection.key);
        if server.options.relay {
            return Err(RpcError::new(ErrorKind::ApiMisuse, "a relay opens no sessions"));
        }
        if !request.key.is_empty() && request.key != *own_key {
            let text = format!("the client asks for key '{}', and the server has '{own_key}'", request.key);
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        self.security.may_use(self.served.identity.name(), own_key)?;
        let slot = server.slots.take(self.connection.machine, &self.served)?;
        let DialectRequest { key, workspace, ticket } = request;
        let request = SessionRequest { key, workspace, ticket, path: &[], is_encrypted: self.security.is_protected() };
        let session = self.connection.open_session(request, &self.served).await?;
        let unproven = self.end_handshake();
        let entry = self.connection.entry.clone();
        let timeouts = StallTimeouts::new(&server.options.stall_limits(), clock::now());
        let end_watch = self.watch_end(&session);
        Ok((OpenedSession { session, end_watch, share: Box::new((unproven, slot, entry)) }, timeouts))
    }

    async fn connect_onward(&self, target: &str, key: &str) -> Result<Session, RpcError> {
        let Connection { server, open_files, .. } = &self.connection;
        self.connection.check_descriptors()?;
        self.connection.takes_sessions()?;
        self.security.may_use(self.served.identity.name(), key)?;
        let session = server.connect_onward(&[], &self.served, (target, key), server.options.keep_alive, open_files);
        let session = session.await?;
        tracing::debug!(peer = self.connection.peer, target, "forwarded");
        Ok(session)
    }

    fn watch_end(&self, session: &SharedSession) -> Canceller {
        let end = Arc::new(EndOfSession(self.connection.mailbox.clone()));
        session.ended().reply().deliver_to(end, 0)
    }

    fn admit(&self) -> Result<(Admission, StallTimeouts), RpcError> {
        let server = &self.connection.server;
        self.connection.check_descriptors()?;
        self.connection.takes_sessions()?;
        let slot = server.slots.take(self.connection.machine, &self.served)?;
        let unproven = self.end_handshake();
        let share = Box::new((unproven, slot, self.connection.entry.clone()));
        let timeouts = StallTimeouts::new(&server.options.stall_limits(), clock::now());
        Ok((Admission { server: server.clone(), share }, timeouts))
    }

    async fn hand_off(
        &self,
        mut channel: Channel,
        opened: OpenedSession,
        handoff: DialectHandoff,
    ) -> Result<Box<dyn ServedElsewhere>, KeptConnection> {
        let Connection { server, mailbox, handoff: offer, .. } = &self.connection;
        let Some(process) = offer.get() else { return Err(Box::new((channel, opened, handoff))) };
        let (name, identity) = (self.dialect.name().to_owned(), self.served.identity.to_string());
        let protocol = PassedProtocol::Dialect { name, identity, state: handoff.state.clone() };
        let limit = self.queued.limit().saturating_add(BESIDE);
        let queued = MemoryQuota::new("max_queued", limit, Some(server.queued.clone()));
        let passed = PassedSocket::pass(process, &mut channel, protocol, handoff.input.clone(), queued).await;
        let Some(passed) = passed else { return Err(Box::new((channel, opened, handoff))) };
        let OpenedSession { session, end_watch, share } = opened;
        // The handoff subscribes to the end of the session by itself.
        end_watch.abandon();
        let dialect = self.dialect.clone();
        let handed = HandedDialect {
            last_message: Box::new(move |reason| dialect.last_message(reason)),
            mailbox: mailbox.clone(),
            deadline: handoff.deadline,
        };
        let owned = (session, Box::new((share, handoff.held)) as SessionShare);
        Ok(Box::new(HandedOff::of_dialect(passed, channel, owned, handed)))
    }

    fn probe_silence(&self, channel: &Channel) {
        #[cfg(feature = "tcp")]
        if let Some(socket) = channel.plain_socket() {
            // Sockets of other kinds refuse it, and tell of a peer's end by themselves.
            let _ = crate::transports::tcp::probe_silence(&socket, self.connection.server.options.keep_alive);
        }
        #[cfg(not(feature = "tcp"))]
        let _ = channel;
    }

    fn note(&self) -> &SessionNote {
        &self.connection.note
    }

    fn open_files(&self) -> &OpenFileQuota {
        &self.connection.open_files
    }

    fn machine(&self) -> Machine {
        self.connection.machine
    }

    fn peer_identity(&self) -> &PeerIdentity {
        &self.served.identity
    }

    fn limits(&self) -> &WireLimits {
        &self.connection.server.options.limits
    }

    fn queued(&self) -> &Arc<MemoryQuota> {
        &self.queued
    }
}

#[async_trait]
impl ServedElsewhere for HandedOff {
    async fn watch(&mut self, record: &AccessRecord, expires: Option<Instant>) {
        self.expire_at(expires);
        self.run(record).await;
    }
}

impl DialectClient {
    /// Records that the client is served. The result is part of its share in the server.
    fn end_handshake(&self) -> Option<Box<dyn Send + Sync>> {
        self.connection.entry.served.store(true, Ordering::Relaxed);
        let parent = self.security.connection.as_ref()?;
        match self.rules {
            Some(rules) => {
                parent.prove(rules, self.served.identity.clone());
                None
            }
            // The client is served, and so is no longer in its handshake, although it has proven
            // nothing that native clients could inherit.
            None => Some(Box::new(parent.serve_unproven())),
        }
    }
}

impl DialectTask {
    pub(in crate::serve) fn new(
        client: DialectClient,
        channel: Channel,
        permit: HandshakePermit,
        deadline: Instant,
    ) -> Self {
        #[cfg(feature = "tcp")]
        if let Some(socket) = channel.plain_socket() {
            probe(socket.as_fd(), client.connection.server.options.keep_alive);
        }
        let (client, eviction) = (Arc::new(client), permit.eviction());
        let identity = client.served.identity.name().to_owned();
        let (connection, notices) = DialectConnection::new(channel, identity, client.clone(), Some(permit));
        Self { client, connection, notices, eviction, deadline }
    }

    /// Serves the connection to its end.
    ///
    /// # Errors
    ///
    /// The reason why there was no session.
    pub(in crate::serve) async fn run(mut self) -> Result<(), ErrorKind> {
        let peer = self.connection.peer().to_owned();
        let record = AccessRecord::new(&peer, self.client.served.identity.name(), self.client.connection.note.clone());
        let (outcome, was_cut) = match self.serve().await {
            DialectEnd::Returned(outcome) => (outcome, false),
            DialectEnd::Cut(reason) => (Err(reason), true),
            DialectEnd::Evicted => {
                log_eviction(&peer, self.client.connection.server.options.max_handshakes);
                return Err(ErrorKind::LimitExceeded);
            }
        };
        if let Some(mut handed_off) = self.connection.handed_off.take() {
            // An end that came while the socket was passed has been taken for the dialect.
            if let Err(reason) = outcome {
                self.client.connection.mailbox.end(reason);
            }
            let expires = self.connection.progress.lock().timeouts.as_ref().and_then(|timeouts| timeouts.expires);
            handed_off.watch(&record, expires).await;
            return Ok(());
        }
        let had_session = self.connection.session.is_some() || self.connection.admission.is_some();
        match outcome {
            Ok(()) if had_session => record.log_end(&end_text(&*self.client.dialect), None),
            Ok(()) => tracing::debug!(peer, dialect = self.client.dialect.name(), "connection ended"),
            Err(reason) if had_session => {
                log_fault(&peer, &reason);
                record.log_end(&reason.message(), None);
            }
            Err(reason) => {
                log_refusal(&peer, &reason);
                return Err(reason.kind());
            }
        }
        if !was_cut {
            drain_and_close(self.connection.io()).await;
        }
        Ok(())
    }

    /// Runs the dialect.
    async fn serve(&mut self) -> DialectEnd {
        let Self { client, connection, notices, eviction, deadline } = self;
        let (options, mailbox) = (&client.connection.server.options, &client.connection.mailbox);
        let (progress, peer) = (connection.progress.clone(), connection.peer().to_owned());
        let mut serving = client.dialect.serve(connection);
        let opened = std::future::poll_fn(|_| match progress.lock().timeouts {
            Some(_) => Poll::Ready(()),
            None => Poll::Pending,
        });
        tokio::select! {
            // The dialect comes before the check for a session, which it opens in the same poll,
            // and after the time limit, which could not expire once a busy client's bytes have used
            // up the task's budget.
            biased;
            () = eviction.notified() => return DialectEnd::Evicted,
            () = tokio::time::sleep_until((*deadline).into()) => {
                let limit = options.handshake_timeout;
                let text = format!("handshake_timeout is {limit:?}, and there was no session by then");
                return DialectEnd::Cut(RpcError::new(ErrorKind::DeadlineExceeded, text));
            }
            outcome = &mut serving => return DialectEnd::Returned(outcome),
            () = opened => {}
        }
        tracing::debug!(peer, dialect = client.dialect.name(), "session opened");
        serve_session(&mut serving, mailbox, &progress, notices).await
    }
}

/// Runs a dialect whose session is open, within the limits of the server.
pub(super) async fn serve_session(
    serving: &mut BoxFuture<'_, Result<(), RpcError>>,
    mailbox: &Mailbox,
    progress: &Mutex<Progress>,
    notices: &watch::Sender<Option<Notice>>,
) -> DialectEnd {
    let (mut alarm, mut final_message_alarm) = (Alarm::new(), Alarm::new());
    let mut ending = None;
    std::future::poll_fn(|cx| {
        mailbox.register(cx.waker());
        let reason = mailbox.take_end().or_else(|| {
            let is_stopped = mailbox.commanded() == Some(Command::Stop);
            is_stopped.then(|| RpcError::new(ErrorKind::Closed, "the server was stopped").may_have_run(true))
        });
        if let Some(reason) = reason {
            stop(&mut ending, notices, reason);
        } else if mailbox.commanded() == Some(Command::GoAway) {
            let text = "the server is going away and takes no new requests";
            notify(notices, Command::GoAway, || RpcError::new(ErrorKind::Draining, text));
        }
        progress.lock().begin_poll();
        let returned = serving.as_mut().poll(cx);
        if let Some(Ending { reason, cut_at }) = &ending {
            if returned.is_ready() {
                return Poll::Ready(DialectEnd::Returned(Err(reason.clone())));
            }
            if final_message_alarm.poll(Some(*cut_at), cx).is_some() {
                return Poll::Ready(DialectEnd::Cut(reason.clone()));
            }
        }
        if let Poll::Ready(outcome) = returned {
            return Poll::Ready(DialectEnd::Returned(outcome));
        }
        let mut progress = progress.lock();
        progress.end_poll(cx.waker());
        let Some(timeouts) = &mut progress.timeouts else { return Poll::Pending };
        while let Some(now) = alarm.poll(timeouts.next(), cx) {
            if let Some(error) = timeouts.check_stall(now) {
                return Poll::Ready(DialectEnd::Cut(error));
            }
            if let Some(error) = timeouts.check_session(now) {
                // These timeouts have expired.
                (timeouts.expires, timeouts.idle_timeout) = (None, None);
                stop(&mut ending, notices, error);
                // The alarm for the dialect's final message has to be polled, too.
                cx.waker().wake_by_ref();
            }
        }
        Poll::Pending
    })
    .await
}

/// Returns the reason of the end of a session that the dialect has ended in good order.
pub(super) fn end_text(dialect: &dyn Dialect) -> String {
    format!("the dialect {} has ended", dialect.name())
}

/// Announced end of a connection.
struct Ending {
    reason: RpcError,
    /// End of the time that the dialect has for its last message.
    cut_at: Instant,
}

/// Tells the dialect that its connection will be cut, and starts the time for its last message. Of
/// several reasons the first one stays.
fn stop(ending: &mut Option<Ending>, notices: &watch::Sender<Option<Notice>>, reason: RpcError) {
    let Ending { reason, .. } = ending.get_or_insert_with(|| Ending { reason, cut_at: clock::now() + LINGER });
    notify(notices, Command::Stop, || reason.clone());
}

/// Passes a command on, unless the dialect knows of it or of a stronger one.
fn notify(notices: &watch::Sender<Option<Notice>>, command: Command, reason: impl FnOnce() -> RpcError) {
    notices.send_if_modified(|before| {
        let is_news = before.as_ref().is_none_or(|before| before.command < command);
        if is_news {
            *before = Some(Notice { command, reason: reason() });
        }
        is_news
    });
}
