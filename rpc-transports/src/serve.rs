//! Serving: sessions of any kind behind channels of any kind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::BytesMut;
use rpc_core::proto::{ANONYMOUS, HandshakeConfig, Hello, LinkConfig, Negotiated, Role, ServerEndpoint, ServerEvent};
use rpc_core::reply::{Canceller, Outcome, ReplySink};
use rpc_core::{ErrorKind, Operation, PendingReply, Request, RpcError, RpcSession, SharedSession, Spawner, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use crate::address::Address;
use crate::channel_io::{Alarm, Flush, ReadAhead, SLICES, accept_hands, poll_write};
use crate::connect::Connector;
use crate::dispatch::bind;
use crate::handshakes::{Handshakes, InProgress};
use crate::identity::{Access, of_acceptor};
use crate::pattern::matches_pattern;
use crate::proxy::ProxySession;
use crate::transport::{Channel, ChannelGuard, ChannelIo, DialOptions, ListenOptions, TransportError};

/// What a client asks for when it connects.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenRequest {
    /// The address that the client comes from.
    pub peer: String,
    /// Whom the client has proven to be; `anonymous` without proof.
    pub identity: String,
    /// The key that the client asks for, if any.
    pub key: Option<String>,
    /// The named workspace that the client wants; `None` for a private one.
    pub workspace: Option<String>,
}

/// Opens the session that a client will have. Closures do, if they need not wait.
#[async_trait]
pub trait SessionFactory: Send + Sync + 'static {
    /// Opens a session. It ends when the server drops it. Part of the handshake: the future is dropped when its time is
    /// up, or the client gone.
    ///
    /// # Errors
    ///
    /// Why this client gets none. It is told so as the answer to its connection attempt.
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError>;
}

#[async_trait]
impl<F: Fn(&OpenRequest) -> Result<SharedSession, RpcError> + Send + Sync + 'static> SessionFactory for F {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        self(request)
    }
}

/// How much one session may have on the wire and in queues.
#[derive(Clone, Debug)]
pub struct WireLimits {
    /// The largest message, in bytes: the arguments of a call, or its return. Copies have no limit. 64 MiB.
    pub max_message: u64,
    /// The largest payload of a frame, in bytes; copies are cut into such pieces. 1 MiB.
    pub chunk: u32,
    /// The requests that a client may have unanswered. 1,024.
    pub max_requests: u32,
    /// The bytes of large requests that a client may have under way. At least `max_message`. 65 MiB.
    pub window: u64,
}

impl Default for WireLimits {
    fn default() -> Self {
        Self { max_message: 64 << 20, chunk: 1 << 20, max_requests: 1024, window: 65 << 20 }
    }
}

impl WireLimits {
    pub(crate) fn apply(&self, hello: &mut Hello) {
        hello.max_message = self.max_message;
        hello.chunk = self.chunk.max(1);
        hello.max_requests = self.max_requests.max(1);
        hello.window = self.window.max(self.max_message);
    }
}

/// How a server serves.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// What the server is, for clients that ask for a key; empty for nothing in particular.
    pub key: String,
    /// A channel on which nothing was heard for this long is tested, and is given up after three times as long. 5 s.
    pub keep_alive: Duration,
    /// How long a handshake may take, that of TLS included. 10 s.
    pub handshake_timeout: Duration,
    /// What one session may have on the wire and in queues.
    pub limits: WireLimits,
    /// How many sessions there may be at one time. 4,096.
    pub max_sessions: usize,
    /// How many sessions one client may have at one time: one that has proven who it is wherever it comes from, and others
    /// by the address of their machine, whatever processes they are. 1,024.
    pub max_sessions_per_peer: usize,
    /// How many connections may be in their handshake at one time. For one more, the oldest one of the machine that has most
    /// of them is closed, so that nobody is kept out by those who never finish. 1,024.
    pub max_handshakes: usize,
    /// How long a session may last, from the end of its handshake. It ends with
    /// [`SessionTimeout`](ErrorKind::SessionTimeout) then, whatever it is doing. No limit.
    pub session_duration: Option<Duration>,
    /// How long a session may go without a request. It ends with [`SessionTimeout`](ErrorKind::SessionTimeout) then. No
    /// limit.
    pub idle_timeout: Option<Duration>,
    /// How long a client may take no byte of what it is being sent. Its connection is closed then: nothing can be said to
    /// it. 60 s.
    pub write_timeout: Duration,
    /// Whom the server serves; [`Server::set_access`] changes it later. Anybody.
    pub access: Access,
    /// The addresses that clients may be forwarded to, as patterns: `tcp://10.0.0.*:9090`, `tls://*.lab`, `unix:/run/*`. `*`
    /// stands for any text within the scheme, the host or the port; without a port it is for all of them. `*` alone is for
    /// all addresses with a host, and not for programs, paths and this process. None.
    pub allow_forward: Vec<String>,
    /// How the server opens the sessions that it forwards to: its own tokens, and whom it trusts. Without either.
    pub onward: DialOptions,
    /// Hears of what the sessions' factory does not see. Nobody.
    pub observer: Option<Arc<dyn ServeObserver>>,
}

/// Hears of what happens at a server. Called on tasks that serve others: it must not block.
pub trait ServeObserver: Send + Sync + fmt::Debug {
    /// A client got no session.
    fn refused(&self, reason: ErrorKind);
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            key: String::new(),
            keep_alive: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(10),
            limits: WireLimits::default(),
            max_sessions: 4096,
            max_sessions_per_peer: 1024,
            max_handshakes: 1024,
            session_duration: None,
            idle_timeout: None,
            write_timeout: Duration::from_secs(60),
            access: Access::default(),
            allow_forward: Vec::new(),
            onward: DialOptions::default(),
            observer: None,
        }
    }
}

/// The longest chain that a client may ask for through one server.
const MAX_HOPS: usize = 16;

/// Serves sessions on any number of addresses. Cheap to clone; clones are the same server.
///
/// Must be used inside a tokio runtime. Dropping it does not stop it: see [`stop`](Self::stop).
#[derive(Clone)]
pub struct Server(Arc<Shared>);

struct Shared {
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
    /// Sessions that have been opened and not ended.
    open: AtomicUsize,
    /// The same for each peer that has any.
    open_by_peer: Mutex<HashMap<String, usize>>,
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
        Self(Arc::new(Shared {
            factory,
            access: Mutex::new((1, Arc::new(options.access.clone()))),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(1),
            handshakes: Handshakes::new(options.max_handshakes),
            onward: Mutex::new(options.onward.clone()),
            open: AtomicUsize::new(0),
            open_by_peer: Mutex::default(),
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
        let options = &ListenOptions {
            quic_idle: crate::quic::idle_for(self.0.options.keep_alive),
            quic_handshake: self.0.options.handshake_timeout,
            ..options.clone()
        };
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
        let handshake = self.0.handshakes.begin(machine_of(channel.peer()));
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let shared = self.0.clone();
        tokio::spawn(async move {
            let registered = Arc::new(Registered { shared: shared.clone(), id });
            serve_connection(&shared, channel, mailbox, handshake, registered).await;
        });
    }

    /// How many sessions there are.
    pub fn sessions(&self) -> usize {
        self.0.open.load(Ordering::Acquire)
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

    fn open_by_peer(&self) -> MutexGuard<'_, HashMap<String, usize>> {
        self.open_by_peer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, reason: ErrorKind) {
        if let Some(observer) = &self.options.observer {
            observer.refused(reason);
        }
    }
}

/// Counts a connection until its task is over and its session freed, also if they are dropped with their runtime.
struct Registered {
    shared: Arc<Shared>,
    id: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

const GO_AWAY: u8 = 1;
const STOP: u8 = 2;

/// Where others leave things for a connection's task.
#[derive(Default)]
struct Mailbox {
    replies: Mutex<Vec<(u64, Outcome)>>,
    command: AtomicU8,
    task: Mutex<Option<Waker>>,
}

impl Mailbox {
    fn command(&self, command: u8) {
        self.command.fetch_max(command, Ordering::AcqRel);
        self.wake();
    }

    fn wake(&self) {
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            task.wake();
        }
    }

    fn register(&self, waker: &Waker) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }
}

impl ReplySink for Mailbox {
    fn deliver(&self, token: u64, outcome: Outcome) {
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        replies.push((token, outcome));
        let first = replies.len() == 1;
        drop(replies);
        // The others find the task woken already.
        if first {
            self.wake();
        }
    }
}

async fn serve_connection(
    shared: &Arc<Shared>,
    mut channel: Channel,
    mailbox: Arc<Mailbox>,
    handshake: InProgress,
    registered: Arc<Registered>,
) {
    let options = &shared.options;
    let peer = channel.peer().to_owned();
    let evicted = || {
        let limit = options.max_handshakes;
        tracing::debug!(peer, limit, "a handshake gave way: too many are in progress, or the server stops");
        shared.refused(ErrorKind::LimitExceeded);
    };
    let timeout = options.handshake_timeout.min(FAR_OFF);
    let deadline = Instant::now() + timeout;
    let secured = tokio::select! {
        biased;
        () = handshake.evicted() => return evicted(),
        secured = tokio::time::timeout_at(deadline.into(), channel.secure()) => secured,
    };
    match secured {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(peer, %error, "no secure channel");
            // TLS objected to something, or the client left.
            let objected = error.kind() == io::ErrorKind::InvalidData;
            return shared.refused(if objected { ErrorKind::Unauthenticated } else { ErrorKind::PeerLost });
        }
        Err(_) => {
            tracing::debug!(peer, "agreeing on a secure channel took too long");
            return shared.refused(ErrorKind::DeadlineExceeded);
        }
    }
    let (rules, access) = shared.access.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let identities = of_acceptor(&access, rules, channel.security());
    let mut hello = Hello::new(Role::Server);
    hello.key.clone_from(&options.key);
    hello.keep_alive_ms = options.keep_alive.as_millis() as u64;
    options.limits.apply(&mut hello);
    // What is left of it.
    let timeout = deadline.saturating_duration_since(Instant::now());
    let config = HandshakeConfig { hello, identities, hold: true, timeout };
    let security = channel.security().clone();
    let open = async |hello: &Hello, identity: &str| {
        // Behind a hop it is the key that the client asks for: the server there makes sure that it has it.
        let key = if hello.forward.is_empty() { &options.key } else { &hello.key };
        security.may_use(identity, key)?;
        let place = Place::take(shared, &peer, identity)?;
        open_session(shared, &peer, hello, identity).await.map(|session| (session, place))
    };
    let hands = tokio::select! {
        biased;
        () = handshake.evicted() => return evicted(),
        hands = accept_hands(&mut channel, config, open) => hands,
    };
    match hands {
        Ok((negotiated, input, (session, _place))) => {
            drop(handshake);
            if let Some(connection) = &channel.security().connection {
                connection.prove(rules, &negotiated.identity);
            }
            tracing::debug!(peer, identity = negotiated.identity, agent = negotiated.theirs.agent, "session opened");
            // Both the session and this task have to be over.
            let parts = Parts { session, mailbox, registered: registered.clone() };
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

/// What a peer's name says about its machine: not the port or the process, of which one machine has many.
fn machine_of(peer: &str) -> String {
    let address = peer.parse::<Address>().ok();
    // Whoever is not behind an address with a host is here.
    address
        .as_ref()
        .and_then(Address::host_and_port)
        .map_or_else(|| "this machine".to_owned(), |(host, _)| host.to_owned())
}

/// The place of one session among those that there may be.
struct Place {
    shared: Arc<Shared>,
    peer: String,
}

impl Place {
    fn take(shared: &Arc<Shared>, peer: &str, identity: &str) -> Result<Self, RpcError> {
        let (limit, peer_limit) = (shared.options.max_sessions, shared.options.max_sessions_per_peer);
        let peer = match identity {
            ANONYMOUS => machine_of(peer),
            // Not to be mistaken for an address.
            identity => format!("identity {identity}"),
        };
        let of_peer = *shared.open_by_peer().entry(peer.clone()).and_modify(|count| *count += 1).or_insert(1);
        let wanted = shared.open.fetch_add(1, Ordering::AcqRel) + 1;
        let place = Self { shared: shared.clone(), peer };
        if wanted > limit {
            return Err(RpcError::limit("max_sessions", limit as u64, wanted as u64));
        }
        if of_peer > peer_limit {
            return Err(RpcError::limit("max_sessions_per_peer", peer_limit as u64, of_peer as u64));
        }
        Ok(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.open.fetch_sub(1, Ordering::AcqRel);
        if let Entry::Occupied(mut count) = self.shared.open_by_peer().entry(std::mem::take(&mut self.peer)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

async fn open_session(
    shared: &Arc<Shared>,
    peer: &str,
    hello: &Hello,
    identity: &str,
) -> Result<SharedSession, RpcError> {
    let options = &shared.options;
    if shared.draining.load(Ordering::Acquire) {
        return Err(RpcError::new(ErrorKind::Draining, "the server is going away and takes no new sessions"));
    }
    let named = |name: &String| (!name.is_empty()).then(|| name.clone());
    let Some((next, further)) = hello.forward.split_first() else {
        let request = OpenRequest {
            peer: peer.to_owned(),
            identity: identity.to_owned(),
            key: named(&hello.key),
            workspace: named(&hello.workspace),
        };
        return shared.factory.open(&request).await;
    };
    if further.len() >= MAX_HOPS {
        return Err(RpcError::limit("hops", MAX_HOPS as u64, hello.forward.len() as u64));
    }
    let target: Address = next.parse().map_err(|error: crate::AddressError| {
        RpcError::new(ErrorKind::InvalidArgument, format!("cannot forward to '{next}': {error}"))
    })?;
    if !options.allow_forward.iter().any(|pattern| matches_pattern(pattern, &target)) {
        return Err(RpcError::new(
            ErrorKind::Refused,
            format!("this server may not be used to reach '{next}': its operator has to allow it (--allow-forward)"),
        ));
    }
    let connector = Connector::new()
        .dial_options(shared.onward.lock().unwrap_or_else(PoisonError::into_inner).clone())
        .keep_alive(options.keep_alive)
        .limits(options.limits.clone())
        .key(&hello.key)
        .workspace(&hello.workspace);
    let next = connector.forward(next, further).await.map_err(|error| error.into_rpc_error())?;
    Ok(Arc::new(ProxySession::new(next)))
}

/// One session's task: moves bytes between channel and endpoint, and requests between endpoint and session.
struct Connection {
    endpoint: ServerEndpoint,
    session: Option<SharedSession>,
    mailbox: Arc<Mailbox>,
    io: Box<dyn ChannelIo>,
    read: ReadAhead,
    alarm: Alarm,
    flush: Flush,
    /// The requests that the session is working on.
    working: HashMap<u64, Canceller>,
    /// Resolves when the session ends on its own.
    ended: PendingReply,
    /// For what the client can draw out.
    patience_alarm: Alarm,
    going_away: bool,
    /// The session is over as soon as this has been written.
    closing: Option<RpcError>,
    /// The client was sent a last word, which it may not have received yet.
    said_all: bool,
    patience: Patience,
    registered: Option<Arc<Registered>>,
    _guard: Option<ChannelGuard>,
}

/// What a connection serves.
struct Parts {
    session: SharedSession,
    mailbox: Arc<Mailbox>,
    registered: Arc<Registered>,
}

/// How long things may take that a client can draw out.
struct Patience {
    /// When the session has lasted long enough.
    expires: Option<Instant>,
    idle_timeout: Option<Duration>,
    write_timeout: Duration,
    /// Since when there was nothing to do; `None` while there is.
    idle_since: Option<Instant>,
    /// Since when the client has taken nothing of what there is to be written; `None` if all is written.
    stalled_since: Option<Instant>,
    /// A reply that waits for the client's leave although nothing else is on the way, and since when.
    held_back: Option<(u64, Instant)>,
}

impl Patience {
    fn new(options: &ServeOptions, now: Instant) -> Self {
        Self {
            // A time that cannot be told is never.
            expires: options.session_duration.and_then(|duration| now.checked_add(duration)),
            idle_timeout: options.idle_timeout,
            write_timeout: options.write_timeout,
            idle_since: Some(now),
            stalled_since: None,
            held_back: None,
        }
    }

    /// Since when the client has done nothing that it owes.
    fn stuck_since(&self) -> Option<Instant> {
        self.stalled_since.or(self.held_back.map(|(_, since)| since))
    }

    /// When to look again.
    fn ends(&self) -> Option<Instant> {
        let idle = self.idle_since.zip(self.idle_timeout).and_then(|(since, limit)| since.checked_add(limit));
        let stuck = self.stuck_since().and_then(|since| since.checked_add(self.write_timeout));
        [self.expires, idle, stuck].into_iter().flatten().min()
    }

    /// Whether the client is stuck: nothing can be said to it.
    fn is_stuck(&self, now: Instant) -> Option<RpcError> {
        self.stuck_since().filter(|since| now.saturating_duration_since(*since) >= self.write_timeout).map(|_| {
            let limit = self.write_timeout;
            let text = format!("write_timeout is {limit:?}, and the client has taken nothing for as long");
            RpcError::new(ErrorKind::LimitExceeded, text)
        })
    }

    /// Why the session is over, if it is.
    fn is_over(&self, now: Instant) -> Option<RpcError> {
        let timeout = |text: String| Some(RpcError::new(ErrorKind::SessionTimeout, text).may_have_run(true));
        if self.expires.is_some_and(|expires| now >= expires) {
            return timeout("session_duration is over: the server lets no session last longer".to_owned());
        }
        let limit = self.idle_timeout?;
        if self.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= limit) {
            return timeout(format!("idle_timeout is {limit:?}, and there was no request for as long"));
        }
        None
    }
}

impl Connection {
    fn new(channel: Channel, negotiated: &Negotiated, input: BytesMut, parts: Parts, options: &ServeOptions) -> Self {
        let Parts { session, mailbox, registered } = parts;
        let now = Instant::now();
        let (io, _, guard) = channel.into_parts();
        let config = LinkConfig { keep_alive: options.keep_alive };
        Self {
            endpoint: ServerEndpoint::new(negotiated, config, now),
            ended: session.ended().reply(),
            session: Some(session),
            mailbox,
            io,
            read: ReadAhead::new(input),
            alarm: Alarm::new(),
            flush: Flush::default(),
            patience_alarm: Alarm::new(),
            working: HashMap::new(),
            going_away: false,
            closing: None,
            said_all: false,
            patience: Patience::new(options, now),
            registered: Some(registered),
            _guard: guard,
        }
    }

    /// Ends the session, and tells the client why.
    fn close(&mut self, error: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(Some(&error));
            self.closing = Some(error);
        }
    }

    /// Ends the session in good order, as was agreed with the client.
    fn close_in_order(&mut self, reason: RpcError) {
        if self.closing.is_none() {
            self.endpoint.close(None);
            self.closing = Some(reason);
        }
    }

    /// What others have left for this task.
    fn take_mail(&mut self) {
        let replies = std::mem::take(&mut *self.mailbox.replies.lock().unwrap_or_else(PoisonError::into_inner));
        for (id, outcome) in replies {
            self.working.remove(&id);
            self.reply(id, outcome);
        }
        match self.mailbox.command.load(Ordering::Acquire) {
            STOP => self.close(RpcError::new(ErrorKind::Closed, "the server was stopped").may_have_run(true)),
            GO_AWAY if !self.going_away => {
                self.going_away = true;
                let reason = RpcError::new(ErrorKind::Draining, "the server is going away and takes no new requests");
                self.endpoint.go_away(&reason);
            }
            _ => {}
        }
    }

    fn reply(&mut self, id: u64, outcome: Outcome) {
        if let Some(rejected) = self.endpoint.reply(id, outcome)
            && let Some(session) = &self.session
        {
            rpc_core::session::release(session, &rejected);
        }
    }

    fn act(&mut self, event: ServerEvent) {
        let Some(session) = &self.session else { return };
        self.patience.idle_since = None;
        match event {
            ServerEvent::Request { id, request } => match session.submit(request).try_ready() {
                Ok(outcome) => self.reply(id, outcome),
                Err(submission) => {
                    let sink: Arc<dyn ReplySink> = self.mailbox.clone();
                    let canceller = submission.reply().deliver_to(sink, id);
                    self.working.insert(id, canceller);
                }
            },
            ServerEvent::Written { id, write } => {
                // Lets the lane go on.
                drop(write);
                self.reply(id, Ok(Value::Null));
            }
            ServerEvent::Cancel { id } => {
                if let Some(canceller) = self.working.get(&id) {
                    canceller.cancel();
                }
            }
            ServerEvent::Release { handles } => {
                session.submit(Request::new(Operation::Release { handles })).reply().detach();
            }
            ServerEvent::Close => {
                self.close_in_order(RpcError::new(ErrorKind::Closed, "the client closed the session"));
            }
        }
    }

    fn poll_output(&mut self, cx: &mut Context<'_>) -> io::Result<()> {
        loop {
            self.endpoint.stage();
            let mut slices = [IoSlice::new(&[]); SLICES];
            let count = self.endpoint.slices(&mut slices);
            if count == 0 {
                self.flush.poll(&mut *self.io, cx)?;
                match self.flush.is_done() {
                    true => self.patience.stalled_since = None,
                    false => _ = self.patience.stalled_since.get_or_insert_with(Instant::now),
                }
                return Ok(());
            }
            match poll_write(&mut *self.io, &slices[..count], cx) {
                Poll::Pending => {
                    self.patience.stalled_since.get_or_insert_with(Instant::now);
                    return Ok(());
                }
                Poll::Ready(Ok(written)) => {
                    self.patience.stalled_since = None;
                    self.flush.want();
                    self.endpoint.advance(written, Instant::now());
                }
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
    }

    /// Reads once, and acts on what is complete. `Err` is the end.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        let read = match self.endpoint.bulk_target() {
            Some(target) => match self.read.poll_into(&mut *self.io, target, cx) {
                Poll::Ready(Ok(count)) if count > 0 => {
                    self.patience.idle_since = None;
                    if let Err(error) = self.endpoint.bulk_filled(count, Instant::now()) {
                        return Poll::Ready(Err(error));
                    }
                    self.act_on_events();
                    return Poll::Ready(Ok(()));
                }
                other => other,
            },
            None => self.read.poll_more(&mut *self.io, cx),
        };
        match read {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(0)) => Poll::Ready(Err(self.endpoint.end_of_stream(self.read.buffer.len()))),
            Poll::Ready(Ok(_)) => Poll::Ready(self.handle_input()),
            Poll::Ready(Err(error)) => {
                Poll::Ready(Err(RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))))
            }
        }
    }

    fn handle_input(&mut self) -> Result<(), RpcError> {
        let now = Instant::now();
        loop {
            let session = &self.session;
            let mut place = |lane, to: &rpc_core::TensorRef, offset, len| {
                session.as_ref().and_then(|session| session.write_in_place(lane, to, offset, len))
            };
            // Each message is acted on before the next one is looked at: a write in place needs to know what is before it.
            let more = self.endpoint.handle_input(&mut self.read.buffer, now, &mut place)?;
            self.act_on_events();
            if !more {
                return Ok(());
            }
        }
    }

    /// Whether there was anything to do.
    fn act_on_events(&mut self) -> bool {
        let mut acted = false;
        while let Some(event) = self.endpoint.poll_event() {
            self.act(event);
            acted = true;
        }
        acted
    }

    /// Ends the session if it has lasted or idled for too long. `Err` if nothing can be said to the client.
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Result<(), RpcError> {
        if self.patience.idle_timeout.is_some() {
            match self.endpoint.is_idle() {
                true => _ = self.patience.idle_since.get_or_insert_with(Instant::now),
                false => self.patience.idle_since = None,
            }
        }
        self.patience.held_back = self.endpoint.held_back().map(|id| match self.patience.held_back {
            Some((before, since)) if before == id => (id, since),
            _ => (id, Instant::now()),
        });
        while let Some(now) = self.patience_alarm.poll(self.patience.ends(), cx) {
            if let Some(error) = self.patience.is_stuck(now) {
                return Err(error);
            }
            if let Some(error) = self.patience.is_over(now) {
                // Said once. From here on only the client's reading may take time.
                (self.patience.expires, self.patience.idle_timeout) = (None, None);
                self.close(error);
            }
        }
        Ok(())
    }

    /// Gives everything up. What still runs goes on without anybody waiting for it.
    fn end(&mut self) {
        for (_, canceller) in self.working.drain() {
            canceller.abandon();
        }
        self.ended = rpc_core::Submission::never().reply();
        if let Some(session) = self.session.take() {
            // Freeing may take long: memory is unmapped, folders are removed.
            let remains = (session, self.registered.take());
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || drop(remains))),
                Err(_) => drop(remains),
            }
        }
    }
}

impl Future for Connection {
    type Output = RpcError;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<RpcError> {
        let this = &mut *self;
        loop {
            this.mailbox.register(cx.waker());
            this.take_mail();
            if this.closing.is_none()
                && let Poll::Ready(Err(error)) = Pin::new(&mut this.ended).poll(cx)
            {
                this.close(error);
            }
            // Until the alarm is set to the next time: nothing else may wake this task.
            while let Some(now) = this.alarm.poll(Some(this.endpoint.poll_timeout()), cx) {
                if let Err(error) = this.endpoint.handle_timeout(now) {
                    this.end();
                    return Poll::Ready(error);
                }
            }
            if let Err(error) = this.poll_output(cx) {
                this.end();
                let reason = this.closing.take();
                return Poll::Ready(
                    reason.unwrap_or_else(|| {
                        RpcError::new(ErrorKind::PeerLost, format!("the connection broke: {error}"))
                    }),
                );
            }
            // Requests that waited for replies to leave.
            if this.act_on_events() {
                continue;
            }
            if this.going_away && this.closing.is_none() && this.endpoint.is_drained() {
                this.close_in_order(RpcError::new(ErrorKind::Closed, "the server has gone away"));
                continue;
            }
            if this.closing.is_some() && this.endpoint.is_flushed() && this.flush.is_done() {
                this.end();
                this.said_all = true;
                let reason = this.closing.take();
                return Poll::Ready(reason.unwrap_or_else(|| RpcError::internal("closed without a reason")));
            }
            let was_open = this.closing.is_none();
            if let Err(error) = this.poll_patience(cx) {
                this.end();
                return Poll::Ready(this.closing.take().unwrap_or(error));
            }
            if was_open && this.closing.is_some() {
                continue;
            }
            match this.poll_input(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) if error.kind() == ErrorKind::Protocol => {
                    // Nothing more is understood of this peer, but it is told why.
                    this.close(error.clone());
                    let _ = this.poll_output(cx);
                    this.end();
                    this.said_all = true;
                    return Poll::Ready(error);
                }
                Poll::Ready(Err(error)) => {
                    this.end();
                    return Poll::Ready(this.closing.take().unwrap_or(error));
                }
            }
        }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.end();
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
