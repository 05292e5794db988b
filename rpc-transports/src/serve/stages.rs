//! An accepted connection in its stages: `Accepted`, `Secured`, `Admitted`, `Serving`. One that
//! speaks a dialect leaves them after `Secured`.
//!
//! Each stage is a type that the stage before returns, so that facts cannot be used before they are
//! known: the handshake needs a secured channel, and a session needs a client that has been
//! admitted.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Negotiated, Role};
use rpc_core::{ErrorKind, MemoryQuota, RpcError, SharedSession, printable_line};
use tokio::io::AsyncWriteExt;

use super::access_record::AccessRecord;
use super::admission::SessionSlot;
use super::authorization::AuthorizedClient;
use super::connection::{Connection, SessionRequest, drain_and_close, log_eviction, log_refusal};
use super::dialect::RegisteredDialect;
use super::dialect::task::{DialectClient, DialectTask};
use super::handoff::HandedOff;
use super::mailbox::Command;
use super::relay::ParkLimit;
use super::relay::pool::{Handover, ParkedServer};
use super::state::UNLIMITED;
use super::task::{SessionParts, SessionTask};
use crate::channel::Channel;
use crate::clock;
use crate::handshake::capability::{CAPABILITY, CapabilityTable};
use crate::handshake::driver::{KeepAliveSwitch, accept_handshake};
use crate::handshake::handshake_slots::HandshakePermit;
use crate::handshake::identity_proofs::{Access, DIALLER, known_by_channel, of_acceptor};
use crate::handshake::peer_identity::{PeerIdentity, ProvenName};
use crate::shared_memory::features;
use crate::tracker::PROBE_ANSWERED;

/// Time for the handshake of a client that is told that the process can open no more files: while
/// it lasts, no other client can be told.
const LAST_DESCRIPTOR_TIMEOUT: Duration = Duration::from_secs(2);

/// Connection whose channel may still have to be secured.
pub(super) struct Accepted {
    pub(super) connection: Connection,
    pub(super) channel: Channel,
    /// True if this server has dialled.
    pub(super) is_dialled: bool,
    /// Dialect that the peer speaks, if this server has dialled it for that.
    pub(super) dialect: Option<RegisteredDialect>,
    /// True if the transport declares that the address is encrypted.
    pub(super) must_be_encrypted: bool,
    /// Permit among the handshakes in progress.
    pub(super) permit: HandshakePermit,
}

/// Connection whose channel is secured as far as its transport can.
struct Secured {
    connection: Connection,
    channel: Channel,
    is_dialled: bool,
    dialect: Option<RegisteredDialect>,
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

/// Connection whose first bytes have told its protocol.
enum Recognized {
    Native(Box<Secured>),
    Dialect(Box<DialectTask>),
}

/// Stage of a connection whose client may be served.
enum Entered {
    Native(Box<Admitted>),
    Dialect(Box<DialectTask>),
}

/// Connection with a session.
struct Serving {
    record: AccessRecord,
    task: Served,
    _slot: SessionSlot,
}

/// The task of a session, or what watches over it while another process serves.
#[expect(clippy::large_enum_variant, reason = "most sessions are served here")]
enum Served {
    Here(SessionTask),
    Elsewhere(Box<HandedOff>),
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
        let entered = async {
            match self.secure().await?.recognize().await? {
                Recognized::Native(secured) => {
                    secured.admit().await.map(|admitted| Entered::Native(Box::new(admitted)))
                }
                Recognized::Dialect(task) => Ok(Entered::Dialect(task)),
            }
        };
        let entered = tokio::select! {
            biased;
            () = eviction.notified() => {
                log_eviction(&peer, server.options.max_handshakes);
                Err(Refusal { reason: Some(ErrorKind::LimitExceeded), told: None })
            }
            entered = entered => entered,
        };
        match entered {
            Ok(Entered::Native(admitted)) => admitted.serve().await,
            Ok(Entered::Dialect(task)) => {
                if let Err(reason) = task.run().await {
                    server.refused(reason);
                }
                None
            }
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
        let Self { connection, mut channel, is_dialled, dialect, must_be_encrypted, permit } = self;
        let most = if connection.has_last_descriptor { LAST_DESCRIPTOR_TIMEOUT } else { UNLIMITED };
        let deadline = clock::now() + connection.server.options.handshake_timeout.min(most);
        let peer = &connection.peer;
        let reason = match tokio::time::timeout_at(deadline.into(), channel.secure()).await {
            Ok(Ok(())) if must_be_encrypted && !channel.security().is_encrypted() => {
                rpc_core::log_limited!(
                    ERROR,
                    peer,
                    "refused a client: its channel came without the security of ServerTls::accept, and the transport \
                     declares that the address is encrypted"
                );
                ErrorKind::Unauthenticated
            }
            Ok(Ok(())) => return Ok(Secured { connection, channel, is_dialled, dialect, permit, deadline }),
            Ok(Err(error)) => {
                if error.kind() == io::ErrorKind::InvalidData {
                    rpc_core::log_limited!(WARN, peer, %error, "refused a client: no secure channel");
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
    /// Determines the protocol by the first bytes, if the server speaks dialects.
    async fn recognize(mut self) -> Result<Recognized, Refusal> {
        if let Some(dialect) = self.dialect.take() {
            return self.enter_dialect(dialect).await;
        }
        let dialects = &self.connection.server.options.dialects;
        if self.is_dialled || dialects.is_empty() {
            return Ok(Recognized::Native(Box::new(self)));
        }
        let recognized = dialects.recognize(&mut self.channel);
        let (peer, reason) = match tokio::time::timeout_at(self.deadline.into(), recognized).await {
            Ok(Ok(None)) => return Ok(Recognized::Native(Box::new(self))),
            Ok(Ok(Some(registered))) => return self.enter_dialect(registered).await,
            Ok(Err(error)) => {
                tracing::debug!(peer = self.connection.peer, %error, "the connection broke before its first bytes");
                (&self.connection.peer, ErrorKind::PeerLost)
            }
            Err(_) => (&self.connection.peer, ErrorKind::DeadlineExceeded),
        };
        tracing::debug!(peer, %reason, "the protocol of a client is not known");
        Err(Refusal { reason: Some(reason), told: None })
    }

    /// Checks that the client of a dialect may be served.
    async fn enter_dialect(mut self, registered: RegisteredDialect) -> Result<Recognized, Refusal> {
        let RegisteredDialect { dialect, unproven } = registered;
        let (rules, access) = self.connection.server.access.lock().clone();
        let user = self.user();
        let (identity, rules) = match known_by_channel(&access, rules, self.channel.security(), user) {
            Some(identity) => (identity, Some(rules)),
            None if unproven => (PeerIdentity::without_proof(user), None),
            None => {
                let name = dialect.name();
                let text = format!("the server wants a proof of identity, which a client of the dialect {name} lacks");
                let error = RpcError::new(ErrorKind::Unauthenticated, text);
                log_refusal(&self.connection.peer, &error);
                let refusal = dialect.refusal(&error);
                // A client that takes no bytes is closed without the message.
                let _ = tokio::time::timeout_at(self.deadline.into(), self.channel.io_mut().write_all(&refusal)).await;
                return Err(Refusal { reason: Some(error.kind()), told: Some(self.channel) });
            }
        };
        let Self { connection, channel, permit, deadline, .. } = self;
        let security = channel.security().duplicate();
        let (limits, total) = (&connection.server.options.limits, connection.server.queued.clone());
        let queued = MemoryQuota::new("window", limits.window.max(limits.max_message), Some(total));
        let served = AuthorizedClient::new(identity, connection.server.options.authorizer.as_ref());
        let client = DialectClient { dialect, connection, security, served, rules, queued };
        Ok(Recognized::Dialect(Box::new(DialectTask::new(client, channel, permit, deadline))))
    }

    /// Performs the handshake, and opens the requested session or channel before the client is
    /// accepted.
    async fn admit(self) -> Result<Admitted, Refusal> {
        let server = self.connection.server.clone();
        let (generation, access) = server.access.lock().clone();
        // Read once: another channel of the connection may prove another identity meanwhile.
        let (earlier, user) = (self.channel.security().proven_earlier(generation), self.user());
        let handshake = self.handshake(&access, earlier.as_ref());
        let Self { connection, mut channel, permit, .. } = self;
        let (keep_alive, mut permit) = (KeepAliveSwitch::default(), Some(permit));
        let security = channel.security().duplicate();
        let open = async |hello: &Hello, proven: &ProvenName| {
            connection.check_descriptors()?;
            if proven.method == CAPABILITY {
                let client = AuthorizedClient::new(PeerIdentity::without_proof(user), None);
                let slot = server.slots.take(connection.machine, &client)?;
                let session = connection.open_capability(hello, &proven.name, security.is_encrypted())?;
                return Ok((Grant::Session(session), slot));
            }
            security.may_use(&proven.name, connection.key_to_check(hello))?;
            let identity = PeerIdentity::of_handshake(proven, earlier.as_ref(), user);
            let effective = server.effective_identity(hello, identity.clone());
            let client = AuthorizedClient::new(effective, server.options.authorizer.as_ref());
            let slot = server.slots.take(connection.machine, &client)?;
            let park = connection.park.as_ref();
            let kept = park.and_then(ParkLimit::take_kept);
            if let (None, Some(park)) = (&kept, park) {
                park.check()?;
            }
            // The place of another channel is taken only by a client that has a session: one that
            // is refused must not make channels leave the relay.
            let placed = |slot: SessionSlot| match (kept, park) {
                (Some(place), _) => Ok(slot.at_relay(place)),
                (None, Some(park)) => Ok(slot.at_relay(park.admit()?)),
                (None, None) => Ok::<_, RpcError>(slot),
            };
            if hello.role == Role::Client {
                let grant = Grant::open(&connection, hello, &client, security.is_protected()).await?;
                return Ok((grant, placed(slot)?));
            }
            let slot = placed(slot)?;
            // Only the end of the handshake is left, for which the server waits without limit until
            // a client comes.
            permit = None;
            if let Some(connection) = &security.connection {
                connection.prove(generation, identity);
            }
            keep_alive.start(server.options.keep_alive);
            tokio::select! {
                handover = server.parked.park(&hello.key) => Ok((Grant::Handover(handover), slot)),
                () = connection.mailbox.wait_for(Command::GoAway) => {
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
                    let proven = ProvenName::of(&negotiated);
                    match &earlier {
                        // A capability is no identity, so that later channels have none by it.
                        None if proven.method == CAPABILITY => connection.prove(DIALLER, PeerIdentity::Anonymous),
                        Some(_) if proven.method == CAPABILITY => {}
                        _ => connection.prove(generation, PeerIdentity::of_handshake(&proven, earlier.as_ref(), user)),
                    }
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
                log_refusal(peer, &error);
                Err(Refusal { reason: Some(error.kind()), told: Some(channel) })
            }
        }
    }

    /// Returns the Unix user that the client runs as, if it has come by itself and the kernel says.
    fn user(&self) -> Option<u32> {
        if self.is_dialled { None } else { self.channel.user() }
    }

    /// Returns the server's side of the handshake. `earlier` is the identity that is known for the
    /// connection.
    fn handshake(&self, access: &Access, earlier: Option<&PeerIdentity>) -> Handshake {
        let options = &self.connection.server.options;
        let mut hello = Hello::new(Role::Server);
        hello.key.clone_from(&self.connection.key);
        if !options.relay {
            hello.features = features(self.channel.process().is_some());
        }
        hello.relay = options.relay;
        hello.keep_alive_ms = options.keep_alive.as_millis() as u64;
        options.limits.apply(&mut hello);
        let capabilities = options.capabilities.clone().map(|keeper| keeper as Arc<dyn CapabilityTable>);
        let identities = of_acceptor(access, capabilities, earlier, self.channel.security());
        let now = clock::now();
        let timeout = self.deadline.saturating_duration_since(now);
        let handshake = Handshake::accept(HandshakeConfig { hello, identities, hold: true, timeout }, now);
        if options.relay { handshake.take_servers() } else { handshake }
    }
}

impl Grant {
    /// Opens the session or the channel that a client asks for.
    async fn open(
        connection: &Connection,
        hello: &Hello,
        client: &AuthorizedClient,
        is_encrypted: bool,
    ) -> Result<Self, RpcError> {
        let server = &connection.server;
        connection.takes_sessions()?;
        if let Some(next) = hello.forward.first() {
            let how = if hello.tunnel { "a tunnel to" } else { "forwarded to" };
            connection.note.set(Arc::new(format!("{how} {}", printable_line(next))));
        }
        if hello.tunnel && !connection.leads_to_parked(hello) {
            return server.open_tunnel(hello, client, &connection.open_files).await.map(Self::Tunnel);
        }
        if !hello.forward.is_empty() && !hello.tunnel {
            return server.open_next(hello, client, &connection.open_files).await.map(Self::Session);
        }
        if server.options.relay {
            connection.note.set(Arc::new(format!("the server '{}'", printable_line(&hello.key))));
            return server.parked.claim(&hello.key).await.map(Self::ParkedServer);
        }
        let Hello { key, workspace, ticket, path, .. } = hello;
        let request = SessionRequest { key, workspace, ticket, path, is_encrypted };
        connection.open_session(request, client).await.map(Self::Session)
    }
}

impl Admitted {
    /// Gives the client its grant. Returns `None` after the end of a grant that is not a session.
    async fn serve(self) -> Option<Serving> {
        let Self { connection, mut channel, negotiated, input, grant, slot } = self;
        let handoff = connection.handoff.clone();
        let Connection { server, peer, mailbox, entry, note, .. } = connection;
        let record = AccessRecord::new(&peer, &negotiated.identity, note);
        let session = match grant {
            Grant::Session(session) => session,
            Grant::Tunnel(to) => {
                let end = server.run_tunnel(&mut channel, to, input, &mailbox).await;
                record.log_end(&end, None);
                return None;
            }
            Grant::ParkedServer(parked) => {
                let ParkedServer { channel: to, input: early, held: _held } = parked;
                // A parked server that sends before its client does breaks the protocol.
                if early.is_empty() {
                    let end = server.run_tunnel(&mut channel, to, input, &mailbox).await;
                    record.log_end(&end, None);
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
        let parts = SessionParts { session, mailbox, queued: server.queued.clone(), entry, peer: record.peer() };
        let (channel, parts) = if let Some(process) = handoff.get() {
            match HandedOff::begin(process, channel, &negotiated, &input, parts, &server.options).await {
                Ok(handed_off) => {
                    return Some(Serving { record, task: Served::Elsewhere(Box::new(handed_off)), _slot: slot });
                }
                Err(kept) => kept,
            }
        } else {
            (channel, parts)
        };
        let task = SessionTask::new(channel, &negotiated, input, parts, &server.options);
        Some(Serving { record, task: Served::Here(task), _slot: slot })
    }
}

impl Serving {
    /// Serves the session to its end.
    async fn run(&mut self) {
        match &mut self.task {
            Served::Here(task) => {
                let reason = (&mut *task).await;
                self.record.log_end_of_session(&reason, Some(&task.traffic()));
                if task.last_message_sent {
                    drain_and_close(&mut task.io).await;
                }
            }
            Served::Elsewhere(handed_off) => handed_off.run(&self.record).await,
        }
    }
}
