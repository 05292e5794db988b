//! A connection in a dialect that another process has passed to this one with its socket, and the
//! task that serves it here.

use std::sync::Arc;

use async_trait::async_trait;
use rpc_core::reply::Canceller;
use rpc_core::{ErrorKind, MemoryQuota, OpenFileQuota, RpcError, Session, SharedSession};
use tokio::sync::watch;

use super::Dialect;
use super::connection::{
    Admission, DialectConnection, DialectHandoff, DialectRequest, KeptConnection, Notice, OpenedSession,
    ServedElsewhere, SessionSource,
};
use super::task::{DialectEnd, end_text, serve_session};
use crate::channel::{Channel, Machine};
use crate::clock;
use crate::handshake::peer_identity::PeerIdentity;
use crate::serve::access_record::SessionNote;
use crate::serve::mailbox::{EndOfSession, Mailbox};
use crate::serve::options::ServeOptions;
use crate::serve::output_mark::OutputMark;
use crate::serve::session_process::EndReport;
use crate::serve::stall_timeouts::StallTimeouts;
use crate::serve::task::SessionParts;
use crate::wire_limits::WireLimits;

/// Connection that has been passed, with its session.
pub(in crate::serve) struct PassedDialect {
    dialect: Arc<dyn Dialect>,
    connection: DialectConnection,
    notices: watch::Sender<Option<Notice>>,
    mailbox: Arc<Mailbox>,
}

/// Server behind such a connection: the process that has passed it has opened all there is.
struct PassedSource {
    mailbox: Arc<Mailbox>,
    note: SessionNote,
    open_files: OpenFileQuota,
    identity: PeerIdentity,
    limits: WireLimits,
    queued: Arc<MemoryQuota>,
}

impl PassedDialect {
    /// Creates the task of a connection, whose channel has the bytes that were read already.
    pub(in crate::serve) fn new(
        dialect: Arc<dyn Dialect>,
        channel: Channel,
        identity: PeerIdentity,
        parts: SessionParts,
        mark: OutputMark,
        options: &ServeOptions,
    ) -> Self {
        let SessionParts { session, mailbox, queued, entry, .. } = parts;
        let limits = options.limits.clone();
        let source = PassedSource {
            mailbox: mailbox.clone(),
            note: SessionNote::default(),
            open_files: OpenFileQuota::new("max_open_files", options.max_open_files, None),
            queued: MemoryQuota::new("window", limits.window.max(limits.max_message), Some(queued)),
            limits,
            identity,
        };
        let end_watch = source.watch_end(&session);
        let name = source.identity.name().to_owned();
        let (mut connection, notices) = DialectConnection::new(channel, name, Arc::new(source), None);
        connection.mark_output_in(mark);
        let opened = OpenedSession { session, end_watch, share: Box::new(entry) };
        connection.begin_session(opened, StallTimeouts::new(&options.stall_limits(), clock::now()));
        Self { dialect, connection, notices, mailbox }
    }

    /// Serves the connection to its end.
    pub(in crate::serve) async fn run(mut self, state: Vec<u8>) -> EndReport {
        let progress = self.connection.progress.clone();
        let mut serving = self.dialect.resume(&mut self.connection, &state);
        let end = serve_session(&mut serving, &self.mailbox, &progress, &self.notices).await;
        drop(serving);
        let closed = || RpcError::new(ErrorKind::Closed, end_text(&*self.dialect));
        let (reason, last_message_sent) = match end {
            DialectEnd::Returned(outcome) => (outcome.err().unwrap_or_else(closed), true),
            DialectEnd::Cut(reason) => (reason, false),
            DialectEnd::Evicted => (RpcError::internal("a handshake that is over gave way"), false),
        };
        // The session is freed before the report, as is one of the native protocol.
        drop(self.connection);
        EndReport { reason, requests: 0, received: 0, sent: 0, last_message_sent }
    }
}

#[async_trait]
impl SessionSource for PassedSource {
    async fn open(&self, _: &DialectRequest) -> Result<(OpenedSession, StallTimeouts), RpcError> {
        Err(RpcError::new(ErrorKind::ApiMisuse, "the session of this connection is open"))
    }

    async fn connect_onward(&self, _: &str, _: &str) -> Result<Session, RpcError> {
        let text = "the process of a session dials no further servers in the place of its server";
        Err(RpcError::new(ErrorKind::ApiMisuse, text))
    }

    fn watch_end(&self, session: &SharedSession) -> Canceller {
        session.ended().reply().deliver_to(Arc::new(EndOfSession(self.mailbox.clone())), 0)
    }

    fn admit(&self) -> Result<(Admission, StallTimeouts), RpcError> {
        Err(RpcError::new(ErrorKind::ApiMisuse, "the process of a session is no relay"))
    }

    async fn hand_off(
        &self,
        channel: Channel,
        opened: OpenedSession,
        handoff: DialectHandoff,
    ) -> Result<Box<dyn ServedElsewhere>, KeptConnection> {
        Err(Box::new((channel, opened, handoff)))
    }

    /// Does nothing: the socket has the probes that the other process has asked for.
    fn probe_silence(&self, _: &Channel) {}

    fn note(&self) -> &SessionNote {
        &self.note
    }

    fn open_files(&self) -> &OpenFileQuota {
        &self.open_files
    }

    fn machine(&self) -> Machine {
        Machine::Unknown
    }

    fn peer_identity(&self) -> &PeerIdentity {
        &self.identity
    }

    fn limits(&self) -> &WireLimits {
        &self.limits
    }

    fn queued(&self) -> &Arc<MemoryQuota> {
        &self.queued
    }
}
