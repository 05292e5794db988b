//! The server: where it listens, which connections it has, and how it stops.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rpc_core::{ErrorKind, MemoryQuota, RpcError, Session, Spawner};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::admission::Places;
use super::connection::{Accepted, Connection, LINGER};
use super::mailbox::{GO_AWAY, Mailbox, STOP};
use super::options::{ServeOptions, SessionFactory};
use super::relay::{Parked, Parking};
use crate::address::Address;
use crate::channel::Channel;
use crate::connect::{ConnectError, Connector};
use crate::error::TransportError;
use crate::handshake::half_open::HandshakeLimit;
use crate::handshake::identity::Access;
use crate::transport::{Bind, Dial, Transports};

/// Serves sessions on any number of addresses. Cheap to clone; clones are the same server.
///
/// Must be used inside a tokio runtime. Dropping it does not stop it: see [`stop`](Self::stop).
#[derive(Clone)]
pub struct Server(pub(super) Arc<Shared>);

pub(super) struct Shared {
    pub(super) this: Weak<Self>,
    /// By which it finds itself in the path of a chain.
    pub(super) name: String,
    pub(super) factory: Arc<dyn SessionFactory>,
    pub(super) options: ServeOptions,
    /// Whom the server serves, and how often that has changed. Number 0 is for the side that dials.
    pub(super) access: Mutex<(u64, Arc<Access>)>,
    /// How sessions are opened that are forwarded to.
    pub(super) onward: Mutex<Dial>,
    /// Those in their handshake, too.
    pub(super) connections: Mutex<HashMap<u64, Arc<Mailbox>>>,
    pub(super) next_connection: AtomicU64,
    pub(super) handshakes: Arc<HandshakeLimit>,
    pub(super) places: Arc<Places>,
    pub(super) parking: Parking,
    /// What all sessions may have queued.
    pub(super) queued: Arc<MemoryQuota>,
    pub(super) listeners: Mutex<Vec<JoinHandle<()>>>,
    pub(super) draining: AtomicBool,
    /// Told when the server stops accepting.
    pub(super) closing: Notify,
    /// Told whenever a session has ended.
    pub(super) ended: Notify,
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
            handshakes: HandshakeLimit::new(options.max_handshakes),
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
    pub async fn listen(&self, address: &Address, options: &Bind) -> Result<Address, TransportError> {
        let options = &Bind { connections: self.0.options.connection_limits(), ..options.clone() };
        let mut listener = self.0.options.transports.bind(address, options).await?;
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
    pub fn set_onward(&self, onward: Dial) {
        *self.0.onward.lock().unwrap_or_else(PoisonError::into_inner) = onward;
    }

    /// Serves one client at the far end of `channel`, who dialled.
    pub fn serve_channel(&self, channel: Channel) {
        drop(self.start(channel, None));
    }

    /// As [`serve_channel`](Self::serve_channel), by the name of `key` if there is one; the task ends with the session, and says
    /// whether there was one.
    pub(crate) fn start(&self, channel: Channel, key: Option<String>) -> JoinHandle<bool> {
        let permit = self.0.handshakes.begin(channel.machine().to_string(), channel.parent_connection());
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let server = self.0.clone();
        tokio::spawn(async move {
            let registered = Arc::new(Registered { shared: server.clone(), id, served: AtomicBool::new(false) });
            let key = key.unwrap_or_else(|| server.options.key.clone());
            let (peer, machine) = (channel.peer().to_owned(), channel.machine());
            let connection = Connection { server, peer, machine, key, mailbox, registered: registered.clone() };
            Accepted { connection, channel, permit }.run().await;
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

    /// The transports by which others are dialled.
    pub(crate) fn transports(&self) -> &Transports {
        &self.0.options.transports
    }

    /// How others are dialled at present.
    pub(crate) fn onward(&self) -> Dial {
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
    pub(super) fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mailbox>>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn refused(&self, reason: ErrorKind) {
        if let Some(observer) = &self.options.observer {
            observer.refused(reason);
        }
    }
}

/// Counts a connection until its task is over and its session freed, also if they are dropped with their runtime.
pub(super) struct Registered {
    shared: Arc<Shared>,
    id: u64,
    /// There was a session.
    pub(super) served: AtomicBool,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.shared.connections().remove(&self.id);
        self.shared.ended.notify_waiters();
    }
}

/// Far enough off to be never, and near enough for all clocks.
pub(super) const FAR_OFF: Duration = Duration::from_secs(365 * 24 * 3600);

/// A name that no other server has.
fn made_up_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    match crate::handshake::identity::random() {
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
