//! A server: its listeners and connections, and its end.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use rpc_core::{ErrorKind, LocalSession, OpenFileQuota, Registry, RpcError, Session, SharedSession, Spawner};
use tokio::task::JoinHandle;

use super::access_record::SessionNote;
use super::connection::{Connection, LINGER};
use super::dialect::{Dialect, RegisteredDialect};
use super::mailbox::{Command, Mailbox};
use super::options::{OpenRequest, ServeOptions, SessionFactory};
use super::relay::ParkLimit;
use super::relay::pool::ParkedServer;
use super::session_process::HandoffOffer;
use super::stages::Accepted;
use super::state::{ConnectionEntry, ServerState, UNLIMITED};
use crate::address::Address;
use crate::channel::Channel;
use crate::connect::{ConnectError, Connector};
use crate::error::TransportError;
use crate::handshake::identity_proofs::Access;
use crate::transport::{Bind, Dial, Transports};

/// Terms on which the client at the far end of a channel is served.
#[derive(Default)]
struct ChannelTerms {
    /// Key that the server has for a client behind a relay that this server has dialled.
    key: Option<String>,
    /// True if a channel that is not encrypted is refused.
    must_be_encrypted: bool,
    /// True if the client is refused because no further descriptor is left.
    has_last_descriptor: bool,
    /// Limit on the clients that come through a relay.
    park: Option<ParkLimit>,
    /// Dialect of the client at the far end of a channel that this server has dialled.
    dialect: Option<RegisteredDialect>,
}

/// A server of sessions on any number of addresses. Cheap to clone; clones are the same server.
///
/// Must be used inside a tokio runtime. Dropping it does not stop it: see [`stop`](Self::stop).
#[derive(Clone)]
pub struct Server(pub(super) Arc<ServerState>);

impl Server {
    /// Creates a server that opens its sessions with `factory`.
    pub fn new(factory: Arc<dyn SessionFactory>, options: ServeOptions) -> Self {
        crate::runtime::install_in_core();
        Self(ServerState::new(factory, options))
    }

    /// Creates a server of the functions in `registry`, with the default options. Other options,
    /// and sessions with devices or limits, are for [`new`](Self::new).
    ///
    /// ```
    /// use rpc_core::Registry;
    /// use rpc_transports::{Bind, Connector, Server};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let registry = Registry::new();
    /// registry.add("add", |a: i64, b: i64| a + b);
    /// let server = Server::serving(registry);
    /// let address = server.listen(&"memory:calculator".parse()?, &Bind::default()).await?;
    ///
    /// let session = Connector::new().connect(&address).await?;
    /// assert_eq!(session.function::<(i64, i64), i64>("add").await?.call((1, 2)).await?, 3);
    /// # Ok(())
    /// # }
    /// ```
    pub fn serving(registry: Registry) -> Self {
        Self::new(Arc::new(registry), ServeOptions::default())
    }

    /// Accepts clients at `address` from now on. Returns the actual address, with the chosen port.
    ///
    /// # Errors
    ///
    /// The address cannot be bound.
    pub async fn listen(&self, address: &Address, options: &Bind) -> Result<Address, TransportError> {
        let options = &Bind { connections: self.0.options.connection_limits(), ..options.clone() };
        let must_be_encrypted = self.0.options.transports.check(address)?.encrypted;
        let mut listener = self.0.options.transports.bind(address, options).await?;
        let actual = listener.local_address().clone();
        let (server, name) = (self.clone(), actual.clone());
        let task = tokio::spawn(async move {
            let closing = server.0.closing.notified();
            let mut closing = std::pin::pin!(closing);
            // Enabled before the flag is read, so that a call in between is not missed.
            closing.as_mut().enable();
            while !server.0.draining.load(Ordering::Acquire) {
                tokio::select! {
                    () = &mut closing => break,
                    accepted = listener.accept() => match accepted {
                        Ok(channel) => {
                            let has_last_descriptor = !listener.has_reserve();
                            let terms = ChannelTerms { must_be_encrypted, has_last_descriptor, ..Default::default() };
                            drop(server.start_on(channel, terms));
                        }
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
        self.0.listeners.lock().push(task);
        Ok(actual)
    }

    /// Serves clients that prove themselves by `access` from now on. Existing sessions go on.
    pub fn set_access(&self, access: Access) {
        let mut current = self.0.access.lock();
        *current = (current.0 + 1, Arc::new(access));
    }

    /// Dials further servers by `onward` from now on.
    pub fn set_onward(&self, onward: Dial) {
        *self.0.onward.lock() = onward;
    }

    /// Serves the client at the far end of `channel`, which has dialled.
    pub fn serve_channel(&self, channel: Channel) {
        drop(self.start(channel, None));
    }

    /// Serves the client at the far end of a channel that this server has dialled, such as a
    /// connection to a proxy of another protocol. The client speaks `dialect`, whatever its first
    /// bytes are: those in `unread`, which were read from the channel already, and those that
    /// follow. For limits on peers, the client counts as the machine that was dialled. The task
    /// ends with the connection, and returns true if there was a session.
    pub fn serve_dialect(&self, channel: Channel, unread: &[u8], dialect: Arc<dyn Dialect>) -> JoinHandle<bool> {
        let peer = channel.peer().to_owned();
        let channel = channel.with_further_peer(peer).after_reading(BytesMut::from(unread));
        let dialect = Some(RegisteredDialect { dialect, unproven: false });
        self.start_on(channel, ChannelTerms { dialect, ..ChannelTerms::default() })
    }

    /// As [`serve_channel`](Self::serve_channel), or under another key for the client behind a
    /// relay that this server has dialled. The task ends
    /// with the session, and returns true if there was one.
    pub(crate) fn start(&self, channel: Channel, key: Option<String>) -> JoinHandle<bool> {
        self.start_on(channel, ChannelTerms { key, ..ChannelTerms::default() })
    }

    /// As [`start`](Self::start), for a client that comes through a relay, within `limit`.
    pub(super) fn start_parked(&self, channel: Channel, key: String, limit: ParkLimit) -> JoinHandle<bool> {
        self.start_on(channel, ChannelTerms { key: Some(key), park: Some(limit), ..ChannelTerms::default() })
    }

    /// As [`start`](Self::start), on these terms.
    fn start_on(&self, channel: Channel, terms: ChannelTerms) -> JoinHandle<bool> {
        let ChannelTerms { key, must_be_encrypted, has_last_descriptor, park, dialect } = terms;
        let permit = self.0.handshakes.begin(channel.machine().limit_key(), channel.parent_connection());
        let id = self.0.next_connection.fetch_add(1, Ordering::Relaxed);
        let mailbox = Arc::new(Mailbox::default());
        self.0.connections().insert(id, mailbox.clone());
        let server = self.0.clone();
        tokio::spawn(async move {
            let entry = Arc::new(ConnectionEntry::new(server.clone(), id));
            let is_dialled = key.is_some() || dialect.is_some();
            let key = key.unwrap_or_else(|| server.options.key.clone());
            let (peer, machine) = (channel.peer().to_owned(), channel.machine());
            let limit = server.options.max_open_files;
            let open_files = OpenFileQuota::new("max_open_files", limit, Some(&server.open_files));
            let connection = Connection {
                server,
                peer,
                machine,
                key,
                open_files,
                has_last_descriptor,
                mailbox,
                entry: entry.clone(),
                park,
                note: SessionNote::default(),
                handoff: HandoffOffer::default(),
            };
            Accepted { connection, channel, is_dialled, dialect, must_be_encrypted, permit }.run().await;
            entry.served.load(Ordering::Relaxed)
        })
    }

    /// Resolves when the server accepts no more clients.
    pub(crate) async fn closed(&self) {
        let closing = self.0.closing.notified();
        let mut closing = std::pin::pin!(closing);
        // Enabled before the flag is read, so that a call in between is not missed.
        closing.as_mut().enable();
        if !self.0.draining.load(Ordering::Acquire) {
            closing.await;
        }
    }

    /// Returns the transports by which other servers are dialled.
    pub(crate) fn transports(&self) -> &Transports {
        &self.0.options.transports
    }

    /// Returns the settings by which further servers are dialled.
    pub(crate) fn onward(&self) -> Dial {
        self.0.onward()
    }

    /// Returns the number of servers that wait at this [relay](ServeOptions::relay), by key.
    pub fn parked(&self) -> Vec<(String, usize)> {
        self.0.parked.waiting()
    }

    /// Opens a session with a waiting server of this [relay](ServeOptions::relay) whose key is
    /// `wanted`, or with the first such server to come. The relay itself is the client, with the
    /// tokens, limits and keep-alive of `connector`. Returns the key with the session. The server
    /// counts among the relay's connections until the session ends.
    ///
    /// # Errors
    ///
    /// [`Draining`](ErrorKind::Draining) once this server is told to stop; and the errors of a
    /// handshake with the other server, which is gone then. Cancel-safe: a server that has been
    /// taken already comes back by itself if it [parks](Self::park).
    pub async fn connect_parked(
        &self,
        connector: &Connector,
        wanted: impl Fn(&str) -> bool + Send + Sync,
    ) -> Result<(String, Session), ConnectError> {
        let closed = self.closed();
        let (key, parked) = tokio::select! {
            found = self.0.parked.wait_for(wanted) => found,
            () = closed => return Err(RpcError::new(ErrorKind::Draining, "the server is going away").into()),
        };
        let ParkedServer { channel, input, held } = parked;
        crate::connect::expect_no_input(&input, channel.peer())?;
        let peer = channel.peer().to_owned();
        let channel = channel.with_further_peer(peer).with_additional_guard(held);
        let session = connector.clone().key(&key).connect_channel(channel).await?;
        Ok((key, session))
    }

    /// Returns the number of sessions.
    pub fn sessions(&self) -> usize {
        self.0.slots.taken()
    }

    /// Stops in good order: accepts no new clients and no new requests, and ends each session as
    /// soon as its requests are answered. Returns when all have ended, or after `limit`. The caller
    /// then calls [`stop`](Self::stop).
    pub async fn drain(&self, limit: Duration) {
        self.0.draining.store(true, Ordering::Release);
        self.0.closing.notify_waiters();
        for mailbox in self.0.connections().values() {
            mailbox.command(Command::GoAway);
        }
        let deadline = tokio::time::Instant::now() + limit.min(UNLIMITED);
        // Clients in the middle of a handshake may still get the reason why they get no session.
        // Then they are evicted.
        if tokio::time::timeout(limit.min(LINGER), self.idle()).await.is_err() {
            self.0.handshakes.evict_all();
            let _ = tokio::time::timeout_at(deadline, self.idle()).await;
        }
    }

    /// Ends all sessions now, and accepts no more. Clients are sent the reason;
    /// [`stopped`](Self::stopped) waits until it has been sent.
    pub fn stop(&self) {
        self.0.draining.store(true, Ordering::Release);
        self.0.closing.notify_waiters();
        for mailbox in self.0.connections().values() {
            mailbox.command(Command::Stop);
        }
        self.0.handshakes.evict_all();
    }

    /// Resolves after [`stop`](Self::stop) or [`drain`](Self::drain), when all listeners have
    /// ended, every client has been told, and the objects of their sessions have been freed, or
    /// after `limit`.
    pub async fn stopped(&self, limit: Duration) {
        let listeners = std::mem::take(&mut *self.0.listeners.lock());
        let stopped = async {
            for listener in listeners {
                // A task that panicked has ended as well.
                let _ = listener.await;
            }
            self.idle().await;
        };
        let _ = tokio::time::timeout(limit, stopped).await;
    }

    /// Resolves when there are no sessions and no handshakes, and the objects of former sessions
    /// have been freed.
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

#[async_trait]
impl SessionFactory for Registry {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let session = LocalSession::builder(self.clone()).spawner(Arc::new(TokioSpawner::current()));
        Ok(Arc::new(session.open_files(request.open_files.clone()).build()))
    }
}

/// Spawner of asynchronous functions on the tokio runtime in which it was made.
#[derive(Clone, Debug)]
pub struct TokioSpawner(tokio::runtime::Handle);

impl TokioSpawner {
    /// Returns a spawner for the current runtime.
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub fn current() -> Self {
        Self(tokio::runtime::Handle::current())
    }
}

impl Spawner for TokioSpawner {
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        self.0.spawn(future);
    }
}
