//! An accepted connection in its stages: `Accepted`, `Secured`, `Admitted`, `Serving`.
//!
//! Each stage is a type that the stage before returns, so that facts cannot be used before they are
//! known: the handshake needs a secured channel, and a session needs a client that has been
//! admitted.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Negotiated, Role};
use rpc_core::{ErrorKind, RpcError, SharedSession};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::admission::SessionSlot;
use super::mailbox::{GO_AWAY, Mailbox};
use super::onward::Onward;
use super::options::OpenRequest;
use super::relay::pool::{Handover, ParkedServer};
use super::state::{ConnectionEntry, FAR_OFF, ServerState};
use super::task::{SessionParts, SessionTask};
use crate::channel::{Channel, ChannelIo, Machine};
use crate::handshake::driver::{KeepAliveSwitch, accept_handshake};
use crate::handshake::handshake_limit::HandshakePermit;
use crate::handshake::identity::{Access, of_acceptor};
use crate::tracker::PROBE_ANSWERED;

/// Connection whose channel may still have to be secured.
pub(super) struct Accepted {
    pub(super) connection: Connection,
    pub(super) channel: Channel,
    /// Permit among the handshakes in progress.
    pub(super) permit: HandshakePermit,
}

/// Facts about a connection that all stages share.
pub(super) struct Connection {
    pub(super) server: Arc<ServerState>,
    pub(super) peer: String,
    /// Machine of the client, by which sessions are counted.
    pub(super) machine: Machine,
    /// Key that the server has for the clients of this connection.
    pub(super) key: String,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) entry: Arc<ConnectionEntry>,
}

/// Connection whose channel is secured as far as its transport can.
struct Secured {
    connection: Connection,
    channel: Channel,
    permit: HandshakePermit,
    /// End of the time for the handshake.
    deadline: Instant,
}

/// Connection whose client has proven its identity, and been granted its request.
struct Admitted {
    connection: Connection,
    channel: Channel,
    negotiated: Negotiated,
    /// Input that was read beyond the handshake.
    input: BytesMut,
    grant: Grant,
    slot: SessionSlot,
}

/// Connection with a session.
struct Serving {
    peer: String,
    task: SessionTask,
    _slot: SessionSlot,
}

/// Result of a client's request for a connection.
enum Grant {
    Session(SharedSession),
    /// Channel to the target of the client's tunnel.
    Tunnel(Channel),
    /// Server that was parked at this relay. The client's bytes pass to it.
    ParkedServer(ParkedServer),
    /// Sender for the channel of a server that has parked, because a client has come.
    Handover(Handover),
}

/// Reason why a connection ended without a session. It has been logged.
struct Refusal {
    /// Kind of the error that the observer is told. `None` for the probe of a tracker, which asks
    /// for no session.
    reason: Option<ErrorKind>,
    /// Channel of a client that was sent the reason, and may not have received it yet.
    told: Option<Channel>,
}

impl Accepted {
    /// Takes the connection through its stages. Returns when it has ended.
    pub(super) async fn run(self) {
        // The stages before the session stay on the heap until they are over, because the task of
        // an idle session should be small.
        if let Some(mut serving) = Box::pin(self.run_to_session()).await {
            serving.run().await;
        }
    }

    /// Takes the connection to the stage in which there is a session, if it gets that far.
    async fn run_to_session(self) -> Option<Serving> {
        let (server, peer) = (self.connection.server.clone(), self.connection.peer.clone());
        let eviction = self.permit.eviction();
        let admitted = tokio::select! {
            biased;
            () = eviction.notified() => {
                let limit = server.options.max_handshakes;
                tracing::debug!(peer, limit, "a handshake gave way: too many are in progress, or the server stops");
                Err(Refusal { reason: Some(ErrorKind::LimitExceeded), told: None })
            }
            admitted = async { self.secure().await?.admit().await } => admitted,
        };
        match admitted {
            Ok(admitted) => admitted.serve().await,
            Err(Refusal { reason, told }) => {
                if let Some(reason) = reason {
                    server.refused(reason);
                }
                if let Some(mut channel) = told {
                    drain_and_close(channel.io_mut()).await;
                }
                None
            }
        }
    }

    /// Secures the channel, if its transport does that, as TLS does.
    async fn secure(self) -> Result<Secured, Refusal> {
        let Self { connection, mut channel, permit } = self;
        let deadline = Instant::now() + connection.server.options.handshake_timeout.min(FAR_OFF);
        let peer = &connection.peer;
        let reason = match tokio::time::timeout_at(deadline.into(), channel.secure()).await {
            Ok(Ok(())) => return Ok(Secured { connection, channel, permit, deadline }),
            Ok(Err(error)) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    tracing::warn!(peer, %error, "refused a client: no secure channel");
                } else {
                    tracing::debug!(peer, %error, "no secure channel");
                }
                match error.kind() {
                    // The error is an objection of TLS.
                    io::ErrorKind::InvalidData => ErrorKind::Unauthenticated,
                    io::ErrorKind::QuotaExceeded => ErrorKind::LimitExceeded,
                    io::ErrorKind::TimedOut => ErrorKind::DeadlineExceeded,
                    _ => ErrorKind::PeerLost,
                }
            }
            Err(_) => {
                tracing::debug!(peer, "agreeing on a secure channel took too long");
                ErrorKind::DeadlineExceeded
            }
        };
        Err(Refusal { reason: Some(reason), told: None })
    }
}

impl Secured {
    /// Performs the handshake, and opens the requested session or channel before the client is
    /// accepted.
    async fn admit(self) -> Result<Admitted, Refusal> {
        let server = self.connection.server.clone();
        let (generation, access) = server.access.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let handshake = self.handshake(generation, &access);
        let Self { connection, mut channel, permit, .. } = self;
        let (keep_alive, mut permit) = (KeepAliveSwitch::default(), Some(permit));
        let security = channel.security().clone();
        let open = async |hello: &Hello, identity: &str| {
            security.may_use(identity, connection.key_to_check(hello))?;
            let identity_served = server.effective_identity(hello, identity);
            let slot = server.slots.take(connection.machine, &identity_served)?;
            if hello.role == Role::Client {
                let grant = connection.open(hello, &identity_served).await?;
                return Ok((grant, slot));
            }
            // Only the end of the handshake is left, for which the server waits without limit until
            // a client comes.
            permit = None;
            if let Some(connection) = &security.connection {
                connection.prove(generation, identity);
            }
            keep_alive.start(server.options.keep_alive);
            tokio::select! {
                handover = server.parked.park(&hello.key) => Ok((Grant::Handover(handover?), slot)),
                () = connection.mailbox.told(GO_AWAY) => {
                    Err(RpcError::new(ErrorKind::Draining, "the relay is going away"))
                }
            }
        };
        let agreed = accept_handshake(&mut channel, handshake, &keep_alive, open).await;
        drop(permit);
        let peer = &connection.peer;
        match agreed {
            Ok((negotiated, input, (grant, slot))) => {
                if let Some(connection) = &channel.security().connection {
                    connection.prove(generation, &negotiated.identity);
                }
                let (identity, agent) = (&negotiated.identity, &negotiated.theirs.agent);
                tracing::debug!(peer, identity, agent, "session opened");
                Ok(Admitted { connection, channel, negotiated, input, grant, slot })
            }
            Err(error) if error.application_kind() == Some(PROBE_ANSWERED) => {
                tracing::debug!(peer, "a tracker has looked for this server, and found it");
                Err(Refusal { reason: None, told: Some(channel) })
            }
            Err(error) => {
                match error.kind() {
                    // Operators search the log for refused clients and the reasons.
                    ErrorKind::Unauthenticated | ErrorKind::Refused | ErrorKind::LimitExceeded => {
                        tracing::warn!(peer, %error, "refused a client");
                    }
                    _ => tracing::debug!(peer, %error, "no session"),
                }
                Err(Refusal { reason: Some(error.kind()), told: Some(channel) })
            }
        }
    }

    /// Returns the server's side of the handshake. `generation` counts the changes of `access`.
    fn handshake(&self, generation: u64, access: &Access) -> Handshake {
        let options = &self.connection.server.options;
        let mut hello = Hello::new(Role::Server);
        hello.key.clone_from(&self.connection.key);
        hello.relay = options.relay;
        hello.keep_alive_ms = options.keep_alive.as_millis() as u64;
        options.limits.apply(&mut hello);
        let identities = of_acceptor(access, generation, self.channel.security());
        let now = Instant::now();
        let timeout = self.deadline.saturating_duration_since(now);
        let handshake = Handshake::accept(HandshakeConfig { hello, identities, hold: true, timeout }, now);
        if options.relay { handshake.take_servers() } else { handshake }
    }
}

impl Connection {
    /// Returns the key that the client has to be allowed to use. Empty for none.
    fn key_to_check<'a>(&'a self, hello: &'a Hello) -> &'a str {
        if hello.tunnel {
            // The key of the server at the end of a tunnel is not known here.
            return "";
        }
        // For another server it is the key that the client asks for. That server checks that it has
        // this key.
        if self.server.options.relay || !hello.forward.is_empty() { &hello.key } else { &self.key }
    }

    /// Opens the session or the channel that a client asks for.
    async fn open(&self, hello: &Hello, identity: &str) -> Result<Grant, RpcError> {
        let server = &self.server;
        if server.draining.load(Ordering::Acquire) {
            return Err(RpcError::new(ErrorKind::Draining, "the server is going away and takes no new sessions"));
        }
        if hello.tunnel {
            return server.open_tunnel(hello).await.map(Grant::Tunnel);
        }
        if !hello.forward.is_empty() {
            return server.open_next(hello, identity).await.map(Grant::Session);
        }
        if server.options.relay {
            return server.parked.claim(&hello.key).await.map(Grant::ParkedServer);
        }
        let named = |name: &String| (!name.is_empty()).then(|| name.clone());
        let request = OpenRequest {
            peer: self.peer.clone(),
            machine: self.machine,
            identity: identity.to_owned(),
            key: named(&hello.key),
            workspace: named(&hello.workspace),
            ticket: named(&hello.ticket),
            onward: Onward::new(server.this.clone(), &hello.path, identity),
        };
        server.factory.open(&request).await.map(Grant::Session)
    }
}

impl Admitted {
    /// Gives the client its grant. Returns `None` after the end of a grant that is not a session.
    async fn serve(self) -> Option<Serving> {
        let Self { connection, mut channel, negotiated, input, grant, slot } = self;
        let Connection { server, peer, mailbox, entry, .. } = connection;
        let session = match grant {
            Grant::Session(session) => session,
            Grant::Tunnel(to) => {
                server.run_tunnel(&mut channel, to, input, &mailbox).await;
                return None;
            }
            Grant::ParkedServer(parked) => {
                let ParkedServer { channel: to, input: early, held: _held } = parked;
                // A parked server that sends before its client does breaks the protocol.
                if early.is_empty() {
                    server.run_tunnel(&mut channel, to, input, &mailbox).await;
                }
                return None;
            }
            Grant::Handover(handover) => {
                // If the client has gone, the server finds out by the end of its channel.
                let parked = ParkedServer { channel, input, held: Box::new((slot, entry)) };
                let _ = handover.send(parked);
                return None;
            }
        };
        entry.served.store(true, Ordering::Relaxed);
        let parts = SessionParts { session, mailbox, queued: server.queued.clone(), entry };
        let task = SessionTask::new(channel, &negotiated, input, parts, &server.options);
        Some(Serving { peer, task, _slot: slot })
    }
}

impl Serving {
    /// Serves the session to its end.
    async fn run(&mut self) {
        let peer = &self.peer;
        let reason = (&mut self.task).await;
        match reason.kind() {
            ErrorKind::Protocol => tracing::warn!(peer, %reason, "a client broke the protocol"),
            ErrorKind::LimitExceeded => tracing::warn!(peer, %reason, "a client went over a limit"),
            _ => tracing::debug!(peer, %reason, "session ended"),
        }
        if self.task.last_message_sent {
            drain_and_close(&mut *self.task.io).await;
        }
    }
}

/// Time that a client may take to read the last message.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// Ends the outgoing direction, and waits for the client to end the other one. A channel that is
/// closed with unread input is reset, which loses all output that the client has not received by
/// then.
async fn drain_and_close(io: &mut dyn ChannelIo) {
    let close = async {
        io.shutdown().await?;
        let mut discarded = [0; 4096];
        while io.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    // A broken channel needs nothing more.
    let _ = tokio::time::timeout(LINGER, close).await;
}
