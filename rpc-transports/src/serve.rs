//! Serving: sessions of any kind behind channels of any kind.

use std::collections::HashMap;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::BytesMut;
use rpc_core::proto::{HandshakeConfig, Hello, LinkConfig, Negotiated, Role, ServerEndpoint, ServerEvent};
use rpc_core::reply::{Canceller, Outcome, ReplySink};
use rpc_core::{ErrorKind, Operation, PendingReply, Request, RpcError, RpcSession, SharedSession, Spawner, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::address::Address;
use crate::channel_io::{Alarm, ReadAhead, SLICES, accept_hands, poll_write};
use crate::connect::Connector;
use crate::dispatch::bind;
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
    /// How long a handshake may take. 10 s.
    pub handshake_timeout: Duration,
    /// What one session may have on the wire and in queues.
    pub limits: WireLimits,
    /// How many sessions there may be at one time. 4,096.
    pub max_sessions: usize,
    /// How many connections may be in their handshake at one time; one more is closed without a word. 1,024.
    pub max_handshakes: usize,
    /// Whom the server serves; [`Server::set_access`] changes it later. Anybody.
    pub access: Access,
    /// The addresses that clients may be forwarded to, as patterns with `*`. None.
    pub allow_forward: Vec<String>,
    /// How the server opens the sessions that it forwards to: its own tokens, and whom it trusts. Without either.
    pub onward: DialOptions,
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            key: String::new(),
            keep_alive: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(10),
            limits: WireLimits::default(),
            max_sessions: 4096,
            max_handshakes: 1024,
            access: Access::default(),
            allow_forward: Vec::new(),
            onward: DialOptions::default(),
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
    /// Those in their handshake, too.
    connections: Mutex<HashMap<u64, Arc<Mailbox>>>,
    next_connection: AtomicU64,
    handshakes: Arc<Semaphore>,
    /// Sessions that have been opened and not ended.
    open: AtomicUsize,
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
            handshakes: Arc::new(Semaphore::new(options.max_handshakes.clamp(1, Semaphore::MAX_PERMITS))),
            open: AtomicUsize::new(0),
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

    /// Serves one client at the far end of `channel`, who dialled.
    pub fn serve_channel(&self, channel: Channel) {
        let Ok(handshake) = self.0.handshakes.clone().try_acquire_owned() else {
            let limit = self.0.options.max_handshakes;
            tracing::warn!(peer = channel.peer(), limit, "too many connections are in their handshake; one was closed");
            return;
        };
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let shared = self.0.clone();
        tokio::spawn(async move {
            let _registered = Registered { shared: shared.clone(), id };
            serve_connection(&shared, channel, mailbox, handshake).await;
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
        let _ = tokio::time::timeout(limit, self.idle()).await;
    }

    /// Ends all sessions now, and accepts no more. Clients are told; [`stopped`](Self::stopped) waits until they have been.
    pub fn stop(&self) {
        self.0.draining.store(true, Ordering::Release);
        self.0.closing.notify_waiters();
        for mailbox in self.0.connections().values() {
            mailbox.command(STOP);
        }
    }

    /// After [`stop`](Self::stop) or [`drain`](Self::drain): resolves when nothing is listened on any more, and every client
    /// has been told, or after `limit`.
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

    /// Resolves when there are no sessions, and nobody is in a handshake.
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

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server").field("sessions", &self.sessions()).finish_non_exhaustive()
    }
}

impl Shared {
    fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mailbox>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Counts a connection for as long as its task lives, also if the task is dropped with its runtime.
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
    handshake: OwnedSemaphorePermit,
) {
    let options = &shared.options;
    let peer = channel.peer().to_owned();
    match tokio::time::timeout(options.handshake_timeout, channel.secure()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => return tracing::debug!(peer, %error, "no secure channel"),
        Err(_) => return tracing::debug!(peer, "agreeing on a secure channel took too long"),
    }
    let (rules, access) = shared.access.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let identities = of_acceptor(&access, rules, channel.security());
    let mut hello = Hello::new(Role::Server);
    hello.key.clone_from(&options.key);
    hello.keep_alive_ms = options.keep_alive.as_millis() as u64;
    options.limits.apply(&mut hello);
    let config = HandshakeConfig { hello, identities, hold: true, timeout: options.handshake_timeout };
    let open = async |hello: &Hello, identity: &str| {
        let place = Place::take(shared)?;
        open_session(shared, &peer, hello, identity).await.map(|session| (session, place))
    };
    match accept_hands(&mut channel, config, open).await {
        Ok((negotiated, input, (session, _place))) => {
            drop(handshake);
            if let Some(connection) = &channel.security().connection {
                connection.prove(rules, &negotiated.identity);
            }
            tracing::debug!(peer, identity = negotiated.identity, agent = negotiated.theirs.agent, "session opened");
            let mut connection = Connection::new(channel, &negotiated, input, session, mailbox, options);
            let reason = (&mut connection).await;
            tracing::debug!(peer, reason = %reason, "session ended");
            if connection.said_all {
                linger(&mut *connection.io).await;
            }
        }
        Err(error) => {
            tracing::debug!(peer, %error, "no session");
            linger(channel.io_mut()).await;
        }
    }
}

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

/// The place of one session among those that there may be.
struct Place(Arc<Shared>);

impl Place {
    fn take(shared: &Arc<Shared>) -> Result<Self, RpcError> {
        let limit = shared.options.max_sessions;
        let place = Self(shared.clone());
        let wanted = shared.open.fetch_add(1, Ordering::AcqRel) + 1;
        if wanted > limit { Err(RpcError::limit("max_sessions", limit as u64, wanted as u64)) } else { Ok(place) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::AcqRel);
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
    if !options.allow_forward.iter().any(|pattern| matches_pattern(pattern, next)) {
        return Err(RpcError::new(
            ErrorKind::Refused,
            format!("this server may not be used to reach '{next}': its operator has to allow it (--allow-forward)"),
        ));
    }
    let connector = Connector::new()
        .dial_options(options.onward.clone())
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
    /// The requests that the session is working on.
    working: HashMap<u64, Canceller>,
    /// Resolves when the session ends on its own.
    ended: PendingReply,
    going_away: bool,
    /// The session is over as soon as this has been written.
    closing: Option<RpcError>,
    /// The client was sent a last word, which it may not have received yet.
    said_all: bool,
    _guard: Option<ChannelGuard>,
}

impl Connection {
    fn new(
        channel: Channel,
        negotiated: &Negotiated,
        input: BytesMut,
        session: SharedSession,
        mailbox: Arc<Mailbox>,
        options: &ServeOptions,
    ) -> Self {
        let (io, _, guard) = channel.into_parts();
        let config = LinkConfig { keep_alive: options.keep_alive };
        Self {
            endpoint: ServerEndpoint::new(negotiated, config, Instant::now()),
            ended: session.ended().reply(),
            session: Some(session),
            mailbox,
            io,
            read: ReadAhead::new(input),
            alarm: Alarm::new(),
            working: HashMap::new(),
            going_away: false,
            closing: None,
            said_all: false,
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
                return Ok(());
            }
            match poll_write(&mut *self.io, &slices[..count], cx) {
                Poll::Pending => return Ok(()),
                Poll::Ready(Ok(written)) => self.endpoint.advance(written, Instant::now()),
                Poll::Ready(Err(error)) => return Err(error),
            }
        }
    }

    /// Reads once, and acts on what is complete. `Err` is the end.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), RpcError>> {
        let read = match self.endpoint.bulk_target() {
            Some(target) => match self.read.poll_into(&mut *self.io, target, cx) {
                Poll::Ready(Ok(count)) if count > 0 => {
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

    /// Gives everything up. What still runs goes on without anybody waiting for it.
    fn end(&mut self) {
        for (_, canceller) in self.working.drain() {
            canceller.abandon();
        }
        self.ended = rpc_core::Submission::never().reply();
        if let Some(session) = self.session.take() {
            // Freeing may take long: memory is unmapped, folders are removed.
            match tokio::runtime::Handle::try_current() {
                Ok(runtime) => drop(runtime.spawn_blocking(move || drop(session))),
                Err(_) => drop(session),
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
            if this.closing.is_some() && this.endpoint.is_flushed() {
                this.end();
                this.said_all = true;
                let reason = this.closing.take();
                return Poll::Ready(reason.unwrap_or_else(|| RpcError::internal("closed without a reason")));
            }
            match this.poll_input(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) => {}
                Poll::Ready(Err(error)) if error.kind() == ErrorKind::Protocol => {
                    // Nothing more is understood of this peer, but it is told why.
                    tracing::warn!(%error, "a client broke the protocol");
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
