//! Serving: sessions of any kind behind channels of any kind.

mod connection;
mod forwarding;
mod mailbox;
mod options;
mod parking;
mod patience;
mod places;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use rpc_core::proto::{Handshake, HandshakeConfig, Hello, Role};
use rpc_core::{ErrorKind, MemoryQuota, RpcError, Session, SharedSession, Spawner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use self::connection::{Connection, Parts};
use self::mailbox::{GO_AWAY, Mailbox, STOP};
use self::parking::{Handover, Parked, Parking};
use self::places::Places;
use crate::address::{Address, machine_of};
use crate::connect::{ConnectError, Connector};
use crate::dispatch::bind;
use crate::hands::shake_hands;
use crate::handshakes::{Handshakes, InProgress};
use crate::identity::{Access, of_acceptor};
use crate::transport::{Channel, ChannelIo, DialOptions, ListenOptions, TransportError};

pub use self::forwarding::Onward;
pub use self::options::{OpenRequest, ServeObserver, ServeOptions, SessionFactory, WireLimits};

/// Serves sessions on any number of addresses. Cheap to clone; clones are the same server.
///
/// Must be used inside a tokio runtime. Dropping it does not stop it: see [`stop`](Self::stop).
#[derive(Clone)]
pub struct Server(Arc<Shared>);

struct Shared {
    this: Weak<Self>,
    /// By which it finds itself in the path of a chain.
    name: String,
    factory: Arc<dyn SessionFactory>,
    options: ServeOptions,
    /// Whom the server serves, and how often that has changed. Number 0 is for the side that dials.
    access: Mutex<(u64, Arc<Access>)>,
    /// How sessions are opened that are forwarded to.
    onward: Mutex<DialOptions>,
    /// Those in their handshake, too.
    connections: Mutex<HashMap<u64, Arc<Mailbox>>>,
    next_connection: AtomicU64,
    handshakes: Arc<Handshakes>,
    places: Arc<Places>,
    parking: Parking,
    /// What all sessions may have queued.
    queued: Arc<MemoryQuota>,
    listeners: Mutex<Vec<JoinHandle<()>>>,
    draining: AtomicBool,
    /// Told when the server stops accepting.
    closing: Notify,
    /// Told whenever a session has ended.
    ended: Notify,
}

impl Server {
    /// A server that opens its sessions with `factory`.
    pub fn new(factory: Arc<dyn SessionFactory>, options: ServeOptions) -> Self {
        crate::runtime::install_probe();
        Self(Arc::new_cyclic(|this| Shared {
            this: this.clone(),
            name: made_up_name(),
            factory,
            access: Mutex::new((1, Arc::new(options.access.clone()))),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(1),
            handshakes: Handshakes::new(options.max_handshakes),
            onward: Mutex::new(options.onward.clone()),
            queued: MemoryQuota::new("max_total_queued", options.max_total_queued, None),
            parking: Parking::default(),
            places: Places::new(options.max_sessions, options.max_sessions_per_peer),
            listeners: Mutex::default(),
            options,
            draining: AtomicBool::new(false),
            closing: Notify::new(),
            ended: Notify::new(),
        }))
    }

    /// Accepts clients at `address` from now on. Returns the actual address, with the port that was chosen.
    ///
    /// # Errors
    ///
    /// If the address cannot be bound.
    pub async fn listen(&self, address: &Address, options: &ListenOptions) -> Result<Address, TransportError> {
        #[cfg(feature = "quic")]
        let options = &ListenOptions { quic: self.0.options.quic(), ..options.clone() };
        let mut listener = bind(address, options).await?;
        let actual = listener.local_address().clone();
        let (server, name) = (self.clone(), actual.clone());
        let task = tokio::spawn(async move {
            let closing = server.0.closing.notified();
            let mut closing = std::pin::pin!(closing);
            // Registered before looking, so that a call in between is not missed.
            closing.as_mut().enable();
            while !server.0.draining.load(Ordering::Acquire) {
                tokio::select! {
                    () = &mut closing => break,
                    accepted = listener.accept() => match accepted {
                        Ok(channel) => server.serve_channel(channel),
                        Err(error) => {
                            tracing::error!(address = %name, %error, "no longer accepting clients");
                            if let Some(observer) = &server.0.options.observer {
                                observer.stopped_listening(&name);
                            }
                            break;
                        }
                    },
                }
            }
        });
        self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        Ok(actual)
    }

    /// Serves those who prove themselves by `access` from now on. Sessions that there are go on.
    pub fn set_access(&self, access: Access) {
        let mut current = self.0.access.lock().unwrap_or_else(PoisonError::into_inner);
        *current = (current.0 + 1, Arc::new(access));
    }

    /// Opens the sessions that it forwards to by `onward` from now on.
    pub fn set_onward(&self, onward: DialOptions) {
        *self.0.onward.lock().unwrap_or_else(PoisonError::into_inner) = onward;
    }

    /// Serves one client at the far end of `channel`, who dialled.
    pub fn serve_channel(&self, channel: Channel) {
        drop(self.start(channel, None));
    }

    /// As [`serve_channel`](Self::serve_channel), by the name of `key` if there is one; the task ends with the session, and says
    /// whether there was one.
    pub(crate) fn start(&self, channel: Channel, key: Option<String>) -> JoinHandle<bool> {
        let handshake = self.0.handshakes.begin(machine_of(channel.peer()), channel.beneath());
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let shared = self.0.clone();
        tokio::spawn(async move {
            let registered = Arc::new(Registered { shared: shared.clone(), id, served: AtomicBool::new(false) });
            let key = key.unwrap_or_else(|| shared.options.key.clone());
            serve_connection(&shared, channel, key, mailbox, handshake, registered.clone()).await;
            registered.served.load(Ordering::Relaxed)
        })
    }

    /// Resolves when the server takes no clients any more.
    pub(crate) async fn closed(&self) {
        let closing = self.0.closing.notified();
        let mut closing = std::pin::pin!(closing);
        // Registered before looking, so that a call in between is not missed.
        closing.as_mut().enable();
        if !self.0.draining.load(Ordering::Acquire) {
            closing.await;
        }
    }

    /// How others are dialled at present.
    pub(crate) fn onward(&self) -> DialOptions {
        self.0.onward()
    }

    /// How many servers wait here for clients, by key: at a [relay](ServeOptions::relay).
    pub fn parked(&self) -> Vec<(String, usize)> {
        self.0.parking.waiting()
    }

    /// Opens a session with a server that waits here, or with the first one to come, whose key is `wanted`: at a
    /// [relay](ServeOptions::relay) that is itself the client. `connector` says how: with which tokens, limits and keep-alive. The
    /// key comes with the session, and the server counts among those that this one has connections with until the session ends.
    ///
    /// # Errors
    ///
    /// [`Draining`](ErrorKind::Draining) once this server is told to stop; those of a handshake with the other, which is gone then.
    /// Cancel-safe: a server that has been taken already comes back by itself if it [parks](Self::park).
    pub async fn meet(
        &self,
        connector: &Connector,
        wanted: impl Fn(&str) -> bool + Send + Sync,
    ) -> Result<(String, Session), ConnectError> {
        let closed = self.closed();
        let (key, parked) = tokio::select! {
            met = self.0.parking.meet(wanted) => met,
            () = closed => return Err(RpcError::new(ErrorKind::Draining, "the server is going away").into()),
        };
        let Parked { channel, input, _place, _registered } = parked;
        crate::connect::spoken_to(&input, channel.peer())?;
        let peer = channel.peer().to_owned();
        let channel = channel.leading_to(peer).holding((_place, _registered));
        let session = connector.clone().key(&key).connect_channel(channel).await?;
        Ok((key, session))
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.0.places.taken()
    }

    /// Stops in good order: no new clients, no new requests from the old ones, and the sessions end as soon as all that
    /// was asked is answered. Returns when they have, or after `limit`; call [`stop`](Self::stop) then.
    pub async fn drain(&self, limit: Duration) {
        self.0.draining.store(true, Ordering::Release);
        self.0.closing.notify_waiters();
        for mailbox in self.0.connections().values() {
            mailbox.command(GO_AWAY);
        }
        let deadline = tokio::time::Instant::now() + limit.min(FAR_OFF);
        // Whoever is in the middle of a handshake may hear why there is no session, and nobody waits for more.
        if tokio::time::timeout(limit.min(LINGER), self.idle()).await.is_err() {
            self.0.handshakes.evict_all();
            let _ = tokio::time::timeout_at(deadline, self.idle()).await;
        }
    }

    /// Ends all sessions now, and accepts no more. Clients are told; [`stopped`](Self::stopped) waits until they have been.
    pub fn stop(&self) {
        self.0.draining.store(true, Ordering::Release);
        self.0.closing.notify_waiters();
        for mailbox in self.0.connections().values() {
            mailbox.command(STOP);
        }
        self.0.handshakes.evict_all();
    }

    /// After [`stop`](Self::stop) or [`drain`](Self::drain): resolves when nothing is listened on any more, every client has
    /// been told, and what their sessions held has been freed, or after `limit`.
    pub async fn stopped(&self, limit: Duration) {
        let listeners = std::mem::take(&mut *self.0.listeners.lock().unwrap_or_else(PoisonError::into_inner));
        let stopped = async {
            for listener in listeners {
                // One that panicked listens no more either.
                let _ = listener.await;
            }
            self.idle().await;
        };
        let _ = tokio::time::timeout(limit, stopped).await;
    }

    /// Resolves when there are no sessions, what they held has been freed, and nobody is in a handshake.
    pub async fn idle(&self) {
        loop {
            let ended = self.0.ended.notified();
            let mut ended = std::pin::pin!(ended);
            ended.as_mut().enable();
            if self.0.connections().is_empty() {
                return;
            }
            ended.await;
        }
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server").field("sessions", &self.sessions()).finish_non_exhaustive()
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mailbox>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, reason: ErrorKind) {
        if let Some(observer) = &self.options.observer {
            observer.refused(reason);
        }
    }
}

/// Counts a connection until its task is over and its session freed, also if they are dropped with their runtime.
pub(crate) struct Registered {
    shared: Arc<Shared>,
    id: u64,
    /// There was a session.
    served: AtomicBool,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

async fn serve_connection(
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
    let patience = OnceLock::new();
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
            let _ = patience.set(options.keep_alive);
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
        hands = Box::pin(shake_hands(&mut channel, hands, &patience, open)) => hands,
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

/// Far enough off to be never, and near enough for all clocks.
const FAR_OFF: Duration = Duration::from_secs(365 * 24 * 3600);

/// How long a client may take to read what was said last.
const LINGER: Duration = Duration::from_secs(1);

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

/// A name that no other server has.
fn made_up_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    match crate::identity::random() {
        Ok(random) => random.iter().take(8).map(|byte| format!("{byte:02x}")).collect(),
        // Tells the servers of one machine apart, at least.
        Err(_) => format!("{}-{number}", std::process::id()),
    }
}

/// Runs asynchronous functions on the tokio runtime that it was made in.
#[derive(Clone, Debug)]
pub struct TokioSpawner(tokio::runtime::Handle);

impl TokioSpawner {
    /// A spawner for the current runtime.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime.
    pub fn current() -> Self {
        Self(tokio::runtime::Handle::current())
    }
}

impl Spawner for TokioSpawner {
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(future);
    }
}
