//! The way of one accepted channel: secured, through its handshake, and served.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Role};
use rpc_core::{ErrorKind, RpcError, SharedSession};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::connection::{Connection, Parts};
use super::forward::Onward;
use super::mailbox::{GO_AWAY, Mailbox};
use super::options::OpenRequest;
use super::relay::{Handover, Parked};
use super::server::{FAR_OFF, Registered, Shared};
use crate::channel::{Channel, ChannelIo};
use crate::handshake::driver::{KeepAliveSwitch, accept_handshake};
use crate::handshake::half_open::InProgress;
use crate::handshake::identity::of_acceptor;

pub(super) async fn serve_connection(
    shared: &Arc<Shared>,
    mut channel: Channel,
    key: String,
    mailbox: Arc<Mailbox>,
    handshake: InProgress,
    registered: Arc<Registered>,
) {
    let options = &shared.options;
    let peer = channel.peer().to_owned();
    let (eviction, handshake) = (handshake.eviction(), Mutex::new(Some(handshake)));
    let evicted = || {
        let limit = options.max_handshakes;
        tracing::debug!(peer, limit, "a handshake gave way: too many are in progress, or the server stops");
        shared.refused(ErrorKind::LimitExceeded);
    };
    let timeout = options.handshake_timeout.min(FAR_OFF);
    let deadline = Instant::now() + timeout;
    let secured = tokio::select! {
        biased;
        () = eviction.notified() => return evicted(),
        // What is over when the session begins is on the heap until then: the task of an idle session should be small.
        secured = tokio::time::timeout_at(deadline.into(), Box::pin(channel.secure())) => secured,
    };
    match secured {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(peer, %error, "no secure channel");
            return shared.refused(match error.kind() {
                // TLS objected to something.
                io::ErrorKind::InvalidData => ErrorKind::Unauthenticated,
                io::ErrorKind::QuotaExceeded => ErrorKind::LimitExceeded,
                io::ErrorKind::TimedOut => ErrorKind::DeadlineExceeded,
                _ => ErrorKind::PeerLost,
            });
        }
        Err(_) => {
            tracing::debug!(peer, "agreeing on a secure channel took too long");
            return shared.refused(ErrorKind::DeadlineExceeded);
        }
    }
    let (rules, access) = shared.access.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let identities = of_acceptor(&access, rules, channel.security());
    let mut hello = Hello::new(Role::Server);
    hello.key.clone_from(&key);
    hello.relay = options.relay;
    hello.keep_alive_ms = options.keep_alive.as_millis() as u64;
    options.limits.apply(&mut hello);
    // What is left of it.
    let timeout = deadline.saturating_duration_since(Instant::now());
    let config = HandshakeConfig { hello, identities, hold: true, timeout };
    let security = channel.security().clone();
    // Set where a server waits for a client: as long as it takes.
    let keep_alive = KeepAliveSwitch::default();
    let known = || {
        drop(handshake.lock().unwrap_or_else(PoisonError::into_inner).take());
    };
    let open = async |hello: &Hello, identity: &str| {
        let key = match () {
            // Nobody says what is at the end of it.
            () if hello.tunnel => "",
            // Elsewhere it is the key that the client asks for: the server there makes sure that it has it.
            () if options.relay || !hello.forward.is_empty() => &hello.key,
            () => &key,
        };
        security.may_use(identity, key)?;
        let known_as = &shared.on_whose_behalf(hello, identity);
        let place = shared.places.take(&peer, known_as)?;
        if hello.role == Role::Server {
            // Its handshake is over, but for the end of it.
            known();
            if let Some(connection) = &security.connection {
                connection.prove(rules, identity);
            }
            keep_alive.start(options.keep_alive);
            let handover = tokio::select! {
                handover = shared.parking.park(&hello.key) => handover?,
                () = mailbox.told(GO_AWAY) => {
                    return Err(RpcError::new(ErrorKind::Draining, "the relay is going away"));
                }
            };
            return Ok((Opened::Parked(handover), place));
        }
        shared.open(&peer, hello, known_as).await.map(|opened| (opened, place))
    };
    let hands = Handshake::accept(config, Instant::now());
    let hands = if options.relay { hands.take_servers() } else { hands };
    let hands = tokio::select! {
        biased;
        () = eviction.notified() => return evicted(),
        hands = Box::pin(accept_handshake(&mut channel, hands, &keep_alive, open)) => hands,
    };
    match hands {
        Ok((negotiated, input, (opened, _place))) => {
            known();
            if let Some(connection) = &channel.security().connection {
                connection.prove(rules, &negotiated.identity);
            }
            tracing::debug!(peer, identity = negotiated.identity, agent = negotiated.theirs.agent, "session opened");
            let session = match opened {
                Opened::Session(session) => session,
                Opened::Way(to) => return Box::pin(shared.run_tunnel(&mut channel, to, input, &mailbox)).await,
                Opened::Met(parked) if parked.input.is_empty() => {
                    let Parked { channel: to, _place, _registered, .. } = parked;
                    return Box::pin(shared.run_tunnel(&mut channel, to, input, &mailbox)).await;
                }
                // It spoke before it was spoken to.
                Opened::Met(_) => return,
                Opened::Parked(handover) => {
                    // If the client has gone, the server hears of it by the end of its channel.
                    let _ = handover.send(Parked { channel, input, _place, _registered: registered });
                    return;
                }
            };
            registered.served.store(true, Ordering::Relaxed);
            // Both the session and this task have to be over.
            let parts = Parts { session, mailbox, queued: shared.queued.clone(), registered: registered.clone() };
            let mut connection = Connection::new(channel, &negotiated, input, parts, options);
            let reason = (&mut connection).await;
            match reason.kind() {
                ErrorKind::Protocol => tracing::warn!(peer, %reason, "a client broke the protocol"),
                ErrorKind::LimitExceeded => tracing::warn!(peer, %reason, "a client went over a limit"),
                _ => tracing::debug!(peer, %reason, "session ended"),
            }
            if connection.said_all {
                linger(&mut *connection.io).await;
            }
        }
        Err(error) => {
            tracing::debug!(peer, %error, "no session");
            shared.refused(error.kind());
            linger(channel.io_mut()).await;
        }
    }
}

/// How long a client may take to read what was said last.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// Says that nothing follows, and waits for the client to close, too. A channel that is closed while input waits to be read
/// is reset, and what the client has not received by then is lost.
async fn linger(io: &mut dyn ChannelIo) {
    let close = async {
        io.shutdown().await?;
        let mut scrap = [0; 4096];
        while io.read(&mut scrap).await? > 0 {}
        io::Result::Ok(())
    };
    // A channel that broke has nothing to wait for.
    let _ = tokio::time::timeout(LINGER, close).await;
}

/// What a client gets.
enum Opened {
    Session(SharedSession),
    /// Where its tunnel leads.
    Way(Channel),
    /// A server behind a relay, on its way to a client.
    Met(Parked),
    /// For a server: where to hand its channel over.
    Parked(Handover),
}

impl Shared {
    async fn open(&self, peer: &str, hello: &Hello, identity: &str) -> Result<Opened, RpcError> {
        if self.draining.load(Ordering::Acquire) {
            return Err(RpcError::new(ErrorKind::Draining, "the server is going away and takes no new sessions"));
        }
        if hello.tunnel {
            return self.open_way(hello).await.map(Opened::Way);
        }
        if hello.forward.is_empty() && self.options.relay {
            return self.parking.claim(&hello.key).await.map(Opened::Met);
        }
        if !hello.forward.is_empty() {
            return self.open_next(hello, identity).await.map(Opened::Session);
        }
        let named = |name: &String| (!name.is_empty()).then(|| name.clone());
        let request = OpenRequest {
            peer: peer.to_owned(),
            identity: identity.to_owned(),
            key: named(&hello.key),
            workspace: named(&hello.workspace),
            ticket: named(&hello.ticket),
            onward: Onward::new(self.this.clone(), &hello.path, identity),
        };
        self.factory.open(&request).await.map(Opened::Session)
    }
}
