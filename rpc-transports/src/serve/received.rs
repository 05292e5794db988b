//! Sessions whose client's socket another process has passed on.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::BytesMut;
use rpc_core::{MemoryQuota, RpcError, SharedSession};
use tokio::task::JoinHandle;

use super::dialect::passed::PassedDialect;
use super::mailbox::{Command, Mailbox};
use super::output_mark::OutputMark;
use super::server::Server;
use super::session_process::{ConnectionState, EndReport, PassedConnection, PassedProtocol};
use super::state::ConnectionEntry;
use super::task::{SessionParts, SessionTask};
use crate::channel::{Channel, Peer};

/// Session over a socket that another process has passed on. It goes on if this is dropped.
pub struct ReceivedSession {
    mailbox: Arc<Mailbox>,
    task: JoinHandle<EndReport>,
}

impl ReceivedSession {
    /// Takes no new requests, and ends the session when all are answered.
    pub fn go_away(&self) {
        self.mailbox.command(Command::GoAway);
    }

    /// Ends the session, and tells the client the reason.
    pub fn close(&self, reason: RpcError) {
        self.mailbox.end(reason);
    }

    /// Resolves to a report when `session` has ended, and takes it away; never without one. The
    /// connection stays open for as long as the process that has passed it keeps its own
    /// descriptor. Cancel-safe.
    pub async fn end_of(session: &mut Option<Self>) -> EndReport {
        let Some(Self { task, .. }) = session else { return std::future::pending().await };
        let ended = task.await;
        *session = None;
        ended.unwrap_or_else(|_| EndReport {
            reason: RpcError::internal("the task of the session has panicked"),
            requests: 0,
            received: 0,
            sent: 0,
            last_message_sent: false,
        })
    }
}

impl fmt::Debug for ReceivedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReceivedSession").field("has_ended", &self.task.is_finished()).finish()
    }
}

impl Server {
    /// Serves `session` over a connection that another process has passed on after the handshake,
    /// by the options of this server, which have the dialect of the connection, if it is one in a
    /// dialect. The other process sees to the session's longest duration. Queued bytes count
    /// against `queued`. Must be called inside a tokio runtime.
    ///
    /// # Errors
    ///
    /// The passed descriptors are of other kinds, this server lacks the dialect, or any error that
    /// the system reports.
    pub fn serve_passed(
        &self,
        connection: PassedConnection,
        session: SharedSession,
        queued: Arc<MemoryQuota>,
    ) -> io::Result<ReceivedSession> {
        let PassedConnection { socket, mark, state } = connection;
        let ConnectionState { protocol, input, peer, process } = state;
        let mark = OutputMark::received(&mark)?;
        let from = process.into_iter().fold(Peer::new(&peer), Peer::with_process);
        let mut channel = Channel::of_socket(socket, from)?;
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let entry = Arc::new(ConnectionEntry::new(self.0.clone(), id));
        let peer = Arc::from(peer);
        let parts = SessionParts { session, mailbox: mailbox.clone(), queued, entry, peer };
        let input = BytesMut::from(&input[..]);
        let negotiated = match protocol {
            PassedProtocol::Native(negotiated) => negotiated,
            PassedProtocol::Dialect { name, identity, state } => {
                let text = || format!("this process does not speak the dialect {name}");
                let dialect = self.0.options.dialects.named(&name).ok_or_else(|| io::Error::other(text()))?;
                let identity = identity.parse().map_err(io::Error::other)?;
                channel.put_back(input);
                let passed = PassedDialect::new(dialect, channel, identity, parts, mark, &self.0.options);
                let task = tokio::spawn(async move { passed.run(state).await });
                return Ok(ReceivedSession { mailbox, task });
            }
        };
        let mut task = SessionTask::new(channel, &negotiated, input, parts, &self.0.options);
        task.mark_output_in(mark);
        let task = tokio::spawn(async move {
            let reason = (&mut task).await;
            let traffic = task.traffic();
            EndReport {
                reason,
                requests: traffic.requests,
                received: traffic.received,
                sent: traffic.sent,
                last_message_sent: task.last_message_sent,
            }
        });
        Ok(ReceivedSession { mailbox, task })
    }
}
