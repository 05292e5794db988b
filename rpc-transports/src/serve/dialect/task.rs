//! The server's task for a connection in a dialect, which runs the dialect within the server's
//! limits.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::Instant;

use async_trait::async_trait;
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::{Notify, watch};
use tokio::time::Sleep;

use super::Dialect;
use super::connection::{DialectConnection, DialectRequest, OpenedSession, SessionSource, lock};
use crate::channel::Channel;
use crate::channel_io::Alarm;
use crate::handshake::handshake_limit::HandshakePermit;
use crate::handshake::identity::Security;
use crate::limits::WireLimits;
use crate::serve::connection::{Connection, LINGER, SessionRequest, drain_and_close, log_refusal};
use crate::serve::mailbox::Command;
use crate::serve::stall_timeouts::StallTimeouts;

/// Connection whose client speaks a dialect, and may be served.
pub(in crate::serve) struct DialectTask {
    dialect: Arc<dyn Dialect>,
    client: Arc<DialectClient>,
    connection: DialectConnection,
    commands: watch::Sender<Option<Command>>,
    eviction: Arc<Notify>,
    /// End of the time for the handshake.
    deadline: Instant,
}

/// Client of a dialect, which opens a session of the server's factory.
pub(in crate::serve) struct DialectClient {
    pub(in crate::serve) connection: Connection,
    pub(in crate::serve) security: Security,
    pub(in crate::serve) identity: String,
    /// Number of the rules by which the server would serve the client natively, too, so that other
    /// channels of the same connection inherit the identity. `None` if it would not.
    pub(in crate::serve) rules: Option<u64>,
}

#[async_trait]
impl SessionSource for DialectClient {
    async fn open(&self, request: &DialectRequest) -> Result<(OpenedSession, StallTimeouts), RpcError> {
        let (server, own_key) = (&self.connection.server, &self.connection.key);
        if !request.key.is_empty() && request.key != *own_key {
            let text = format!("the client asks for key '{}', and the server has '{own_key}'", request.key);
            return Err(RpcError::new(ErrorKind::Refused, text));
        }
        self.security.may_use(&self.identity, own_key)?;
        let slot = server.slots.take(self.connection.machine, &self.identity)?;
        let DialectRequest { key, workspace, ticket } = request;
        let request = SessionRequest { key, workspace, ticket, path: &[] };
        let session = self.connection.open_session(request, &self.identity).await?;
        if let (Some(parent), Some(rules)) = (&self.security.connection, self.rules) {
            parent.prove(rules, &self.identity);
        }
        let entry = self.connection.entry.clone();
        entry.served.store(true, Ordering::Relaxed);
        let timeouts = StallTimeouts::new(&server.options.stall_limits(), Instant::now());
        Ok((OpenedSession { session, share: Box::new((slot, entry)) }, timeouts))
    }

    fn limits(&self) -> &WireLimits {
        &self.connection.server.options.limits
    }
}

impl DialectTask {
    pub(in crate::serve) fn new(
        dialect: Arc<dyn Dialect>,
        client: DialectClient,
        channel: Channel,
        permit: HandshakePermit,
        deadline: Instant,
    ) -> Self {
        let (client, eviction) = (Arc::new(client), permit.eviction());
        let (connection, commands) = DialectConnection::new(channel, client.identity.clone(), client.clone(), permit);
        Self { dialect, client, connection, commands, eviction, deadline }
    }

    /// Serves the connection to its end.
    ///
    /// # Errors
    ///
    /// The reason why there was no session.
    pub(in crate::serve) async fn run(mut self) -> Result<(), ErrorKind> {
        let peer = self.connection.peer().to_owned();
        let dialect = self.dialect.name().to_owned();
        let (outcome, was_cut) = self.serve().await;
        let had_session = self.connection.session.is_some();
        match outcome {
            Ok(()) => tracing::debug!(peer, dialect, "connection ended"),
            Err(reason) if had_session => tracing::debug!(peer, dialect, %reason, "session ended"),
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

    /// Runs the dialect. Returns its outcome, or the reason for which it was cut, and true in that
    /// case.
    async fn serve(&mut self) -> (Result<(), RpcError>, bool) {
        let Self { dialect, client, connection, commands, eviction, deadline } = self;
        let (options, mailbox) = (&client.connection.server.options, &client.connection.mailbox);
        let (progress, peer) = (connection.progress.clone(), connection.peer().to_owned());
        let mut serving = dialect.serve(connection);
        let opened = std::future::poll_fn(|_| match lock(&progress).timeouts {
            Some(_) => Poll::Ready(()),
            None => Poll::Pending,
        });
        tokio::select! {
            // The dialect comes before the check for a session, which it opens in the same poll.
            biased;
            () = eviction.notified() => {
                let text = "too many handshakes are in progress, or the server stops";
                return (Err(RpcError::new(ErrorKind::LimitExceeded, text)), true);
            }
            outcome = &mut serving => return (outcome, false),
            () = opened => {}
            () = tokio::time::sleep_until((*deadline).into()) => {
                let limit = options.handshake_timeout;
                let text = format!("handshake_timeout is {limit:?}, and there was no session by then");
                return (Err(RpcError::new(ErrorKind::DeadlineExceeded, text)), true);
            }
        }
        tracing::debug!(peer, dialect = dialect.name(), "session opened");
        let mut alarm = Alarm::new();
        // Reason for which the connection will be cut, and the time until then.
        let mut ending: Option<(RpcError, Pin<Box<Sleep>>)> = None;
        std::future::poll_fn(|cx| {
            mailbox.register(cx.waker());
            let told = mailbox.commanded();
            if told == Some(Command::Stop) && ending.is_none() {
                ending = Some((RpcError::new(ErrorKind::Closed, "the server was stopped"), last_words()));
            }
            commands.send_if_modified(|before| {
                let is_stronger = told > *before;
                *before = told.max(*before);
                is_stronger
            });
            if let Poll::Ready(outcome) = serving.as_mut().poll(cx) {
                return Poll::Ready((outcome, false));
            }
            if let Some((reason, last_words)) = &mut ending
                && last_words.as_mut().poll(cx).is_ready()
            {
                return Poll::Ready((Err(reason.clone()), true));
            }
            let mut progress = lock(&progress);
            let Some(timeouts) = &mut progress.timeouts else { return Poll::Pending };
            while let Some(now) = alarm.poll(timeouts.next(), cx) {
                if let Some(error) = timeouts.check_stall(now) {
                    return Poll::Ready((Err(error), true));
                }
                if let Some(error) = timeouts.check_session(now) {
                    // These timeouts have expired.
                    (timeouts.expires, timeouts.idle_timeout) = (None, None);
                    if ending.is_none() {
                        ending = Some((error, last_words()));
                        commands.send_replace(Some(Command::Stop));
                        // The time for the last words has to be polled.
                        cx.waker().wake_by_ref();
                    }
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// Returns the time that a dialect has for its last message.
fn last_words() -> Pin<Box<Sleep>> {
    Box::pin(tokio::time::sleep(LINGER))
}
