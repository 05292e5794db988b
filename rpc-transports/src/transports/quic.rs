//! `quic://` addresses: many channels, each a bidirectional stream, on one QUIC connection.
//!
//! A client keeps its connection to a server while channels use it and for a moment longer, and
//! opens further channels on it. Each connection of a client has a socket of its own. It outlives a
//! change of the client's address. On Linux a client learns that the server's port is closed, where
//! the server's system says so: most often within a second while it waits for an answer, and
//! otherwise by the next ping. A server finds clients that are gone by their silence: one that
//! changes its address leaves a closed port behind as well, and its session goes on.

#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux tells of closed ports"))]
mod closed_port;
#[cfg(target_os = "linux")]
mod watched_socket;

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Endpoint, EndpointConfig, IdleTimeout, Incoming, RecvStream, SendStream, ServerConfig};
use quinn::{TokioRuntime, TransportConfig, VarInt};
use rustls::pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, Semaphore, mpsc};

use self::closed_port::{PeerPort, Wait};
use crate::address::{Address, AddressError};
use crate::channel::{Channel, Machine, Peer};
use crate::error::TransportError;
use crate::handshake::certificates::{BINDING_LABEL, ClientTls, Holder, ServerTls, host_in_certificate};
use crate::handshake::handshake_slots::{ClosedFlag, HandshakeLimit, HandshakePermit};
use crate::handshake::identity_proofs::{self, Security, Standing, Tokens};
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, ConnectionLimits, Dial, Properties, Transport};
use crate::transports::tcp;
use crate::transports::tls::{NO_SERVER_TLS, insecure};

/// Number of bytes that one channel may have in flight. It is enough for a copy at 1 GB/s with a
/// round trip of 8 ms, or at 100 MB/s with 80 ms.
const STREAM_WINDOW: u32 = 8 << 20;

/// Number of bytes that all channels of a connection together may have in flight.
const CONNECTION_WINDOW: u32 = 32 << 20;

/// Number of channels that a client may have before it has proven its identity, beside those of
/// sessions that need no proof.
const PROBATION_STREAMS: u32 = 4;
/// Number of bytes that a client may have in flight on all channels before it has proven its
/// identity, unless it has a session that needs no proof.
const PROBATION_WINDOW: u32 = 256 << 10;

/// Time for which a server keeps a connection without channels after the client has proven its
/// identity. The client itself closes an unused connection much earlier.
const UNUSED: Duration = Duration::from_secs(30);

/// Time for which a client keeps a connection that no channel uses, so that the last bytes still
/// arrive.
const LINGER: Duration = Duration::from_secs(1);

/// Time for which a client waits for a connection to have room for one more channel.
const ROOM: Duration = Duration::from_secs(1);

/// Code of a connection that was closed in good order.
const DONE: VarInt = VarInt::from_u32(0);

/// Code of a connection whose peer has a closed port, and so does not learn it.
const PORT_CLOSED: VarInt = VarInt::from_u32(3);

/// Code of a connection that was closed because no session used it.
const IDLE: VarInt = VarInt::from_u32(1);

/// Code of a connection that was evicted in favour of others.
const CROWDED: VarInt = VarInt::from_u32(2);

/// Returns the idle timeout of a connection whose sessions test their channels at the interval
/// `keep_alive`. It is twice as long as the sessions wait, so that the sessions notice silence
/// first and report it. By default it is 30 s.
fn idle_for(keep_alive: Duration) -> Duration {
    keep_alive.saturating_mul(6)
}

/// Returns the settings of a server's connections until their clients have proven their identity.
fn transport_on_probation(idle: Duration) -> Arc<TransportConfig> {
    let mut config = transport(idle);
    config.max_concurrent_bidi_streams(PROBATION_STREAMS.into());
    config.receive_window(PROBATION_WINDOW.into());
    Arc::new(config)
}

fn transport(idle: Duration) -> TransportConfig {
    let mut config = TransportConfig::default();
    // QUIC sends no pings of its own. The pings of sessions keep a connection alive as long as the
    // sessions last.
    let longest = IdleTimeout::from(VarInt::MAX);
    config.max_idle_timeout(Some(IdleTimeout::try_from(idle).unwrap_or(longest)));
    config.stream_receive_window(STREAM_WINDOW.into());
    config.receive_window(CONNECTION_WINDOW.into());
    config.send_window(CONNECTION_WINDOW.into());
    // Only clients open channels. A server raises this limit for its connections.
    config.max_concurrent_bidi_streams(VarInt::from_u32(0));
    config.max_concurrent_uni_streams(VarInt::from_u32(0));
    config.datagram_receive_buffer_size(None);
    config
}

/// Size of the socket's buffers, in bytes. With the system's default, packets are lost as soon as
/// the receiver is late.
const SOCKET_BUFFER: usize = 2 << 20;

fn udp(target: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(target), Type::DGRAM, Some(Protocol::UDP))?;
    if target.is_ipv6() && target.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    // The system may allow less than this size.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.bind(&target.into())?;
    Ok(socket.into())
}

/// Client's connection, shared by the channels on it.
struct Pooled {
    connection: quinn::Connection,
    /// Certificates and tokens of the connection. They are kept so that no others get the memory
    /// addresses by which [`PoolKey`] names them.
    _trust: (ClientTls, Tokens),
    security: Security,
    /// Port of the server, if it is watched.
    port: Option<Arc<PeerPort>>,
    /// Notified whenever a channel is dropped.
    released: Arc<Notify>,
}

/// Guard of a channel, which keeps the connection for as long as the channel.
struct Guard {
    pooled: Option<Arc<Pooled>>,
    released: Arc<Notify>,
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.pooled = None;
        self.released.notify_one();
    }
}

/// Key under which a connection is pooled.
#[derive(PartialEq, Eq, Hash)]
struct PoolKey {
    address: String,
    /// Memory addresses of the certificates and tokens that the connection was made with.
    trust: (usize, Option<usize>),
    idle: Duration,
    /// Runtime that drives the connection. A task of another runtime would wait in vain while this
    /// one does not run.
    runtime: tokio::runtime::Id,
}

/// Returns the pool of client connections. Its entries are weak: a connection ends with its `keep`
/// task, which ends with its runtime.
fn pool() -> &'static Mutex<HashMap<PoolKey, Weak<Pooled>>> {
    static POOL: OnceLock<Mutex<HashMap<PoolKey, Weak<Pooled>>>> = OnceLock::new();
    POOL.get_or_init(Mutex::default)
}

/// Returns the usable connection under `key`, if there is one. The `keep` task does not close it,
/// because it looks for users under the same lock.
fn pooled(key: &PoolKey) -> Option<Arc<Pooled>> {
    let found = pool().lock().get(key).and_then(Weak::upgrade);
    let is_suspect = |pooled: &Pooled| pooled.security.connection.as_ref().is_some_and(|shared| shared.is_suspect());
    found.filter(|pooled| pooled.connection.close_reason().is_none() && !is_suspect(pooled))
}

/// The transport of `quic://` addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quic;

impl Transport for Quic {
    fn schemes(&self) -> &[&str] {
        &["quic"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        Ok(Properties::encrypted(tcp::check_host_and_port(at)?))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, with))
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(bind(at, with))
    }
}

async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
    let tls = options.client_tls(address)?;
    let open = async {
        let key = PoolKey {
            address: address.to_string(),
            trust: (Arc::as_ptr(tls.config()).addr(), options.tokens.address()),
            idle: idle_for(options.keep_alive),
            runtime: tokio::runtime::Handle::current().id(),
        };
        // A connection that has as many channels as the server allows goes on, and a new one takes
        // its place in the pool.
        if let Some(pooled) = pooled(&key)
            && let Ok(Ok(channel)) = tokio::time::timeout(ROOM, open(address, &pooled)).await
        {
            return Ok(channel);
        }
        let pooled = connect(address, options, tls, key).await?;
        open(address, &pooled).await.map_err(|error| unconnected(address, options, error))
    };
    let limit = options.limit();
    let outcome = tokio::time::timeout(limit, open).await;
    outcome.unwrap_or_else(|_| Err(TransportError::TimedOut { address: address.to_string(), limit }))
}

async fn open(address: &Address, pooled: &Arc<Pooled>) -> Result<Channel, quinn::ConnectionError> {
    let (send, recv) = pooled.connection.open_bi().await?;
    let guard = Guard { pooled: Some(pooled.clone()), released: pooled.released.clone() };
    let machine = Machine::At(pooled.connection.remote_address().ip().to_canonical());
    let io = QuicIo { send, recv, port: pooled.port.clone(), wait: None };
    let channel = Channel::new(io, Peer::new(address.to_string()).on(machine));
    Ok(channel.with_security(pooled.security.duplicate()).with_guard(Box::new(guard)))
}

async fn connect(
    address: &Address,
    options: &Dial,
    tls: &ClientTls,
    key: PoolKey,
) -> Result<Arc<Pooled>, TransportError> {
    let other = |error: &dyn std::fmt::Display| insecure(address, io::Error::other(error.to_string()));
    let (host, port) = address.host_and_port().unwrap_or_default();
    let resolved = tokio::net::lookup_host((host, port)).await;
    let resolved: Vec<_> = resolved
        .map_err(|source| TransportError::Resolve { address: address.to_string(), source: Arc::new(source) })?
        .collect();
    let crypto = QuicClientConfig::try_from(tls.config().clone()).map_err(|error| other(&error))?;
    let mut config = ClientConfig::new(Arc::new(crypto));
    config.transport_config(Arc::new(transport(idle_for(options.keep_alive))));
    let name = host_in_certificate(address);
    let deadline = Instant::now() + options.limit();
    let mut failure = TransportError::TimedOut { address: address.to_string(), limit: options.limit() };
    for (tried, target) in resolved.iter().enumerate() {
        let local =
            if target.is_ipv6() { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
        let io_error = |error| TransportError::from_io(address.to_string(), error);
        let socket = udp(SocketAddr::new(local, 0)).map_err(io_error)?;
        let client = ClientEndpoint::new(socket, *target).map_err(io_error)?;
        let connecting = client.endpoint.connect_with(config.clone(), *target, name).map_err(|error| other(&error))?;
        // An address that does not answer must leave time for the others.
        let sharers = u32::try_from(resolved.len() - tried).unwrap_or(u32::MAX);
        let share = deadline.saturating_duration_since(Instant::now()) / sharers;
        let connected = tokio::select! {
            connected = tokio::time::timeout(share, connecting) => connected,
            () = client.port_closed() => {
                failure = io_error(io::Error::new(io::ErrorKind::ConnectionRefused, "no program uses the UDP port"));
                continue;
            }
        };
        match connected {
            Ok(Ok(connection)) => {
                return pool_connection(connection, client, (tls.clone(), options.tokens.clone()), key)
                    .map_err(|error| insecure(address, error));
            }
            Ok(Err(error)) => failure = unconnected(address, options, error),
            Err(_) => {}
        }
    }
    Err(failure)
}

fn unconnected(address: &Address, options: &Dial, error: quinn::ConnectionError) -> TransportError {
    match error {
        // A time-out says nothing about the encryption.
        quinn::ConnectionError::TimedOut => {
            TransportError::TimedOut { address: address.to_string(), limit: idle_for(options.keep_alive) }
        }
        error => insecure(address, error.into()),
    }
}

fn pool_connection(
    connection: quinn::Connection,
    client: ClientEndpoint,
    trust: (ClientTls, Tokens),
    key: PoolKey,
) -> io::Result<Arc<Pooled>> {
    let known = connection.clone();
    let pulse = move || (known.stats().udp_rx.datagrams, known.rtt());
    let security = Security {
        binding: Some(binding(&connection)?),
        server_verified: trust.0.verifies(),
        showed_certificate: trust.0.shows_certificate(),
        connection: Some(Arc::new(identity_proofs::Connection::with_pulse(pulse))),
        ..Security::default()
    };
    let released = Arc::new(Notify::new());
    let (endpoint, port) = (client.endpoint.clone(), client.port.clone());
    let pooled = Arc::new(Pooled { connection, _trust: trust, security, port, released });
    let mut pool = pool().lock();
    pool.retain(|_, pooled| pooled.strong_count() > 0);
    pool.insert(key, Arc::downgrade(&pooled));
    drop(pool);
    tokio::spawn(client.watch(pooled.connection.clone()));
    tokio::spawn(keep(pooled.clone(), endpoint));
    Ok(pooled)
}

/// Endpoint of a client, for one connection.
struct ClientEndpoint {
    endpoint: Endpoint,
    /// Port of the server, where the system tells that one is closed.
    port: Option<Arc<PeerPort>>,
    /// Socket of the endpoint, if the port is watched.
    #[cfg(target_os = "linux")]
    socket: Option<Arc<watched_socket::WatchedSocket>>,
}

impl ClientEndpoint {
    #[cfg(target_os = "linux")]
    fn new(socket: UdpSocket, server: SocketAddr) -> io::Result<Self> {
        let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        if let Err(error) = watched_socket::report_errors(&socket, server) {
            // A server that is gone is found by its silence.
            tracing::debug!(%error, %server, "the system does not tell of closed ports");
            let endpoint = Endpoint::new(config, None, socket, runtime)?;
            return Ok(Self { endpoint, port: None, socket: None });
        }
        let port = Arc::new(PeerPort::new(Instant::now()));
        let socket = watched_socket::WatchedSocket::new(socket, server, port.clone())?;
        let endpoint = Endpoint::new_with_abstract_socket(config, None, socket.clone(), runtime)?;
        Ok(Self { endpoint, port: Some(port), socket: Some(socket) })
    }

    #[cfg(not(target_os = "linux"))]
    fn new(socket: UdpSocket, _: SocketAddr) -> io::Result<Self> {
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))?;
        Ok(Self { endpoint, port: None })
    }

    /// Closes the connection once its server's port is closed. Returns when it has ended. While
    /// channels wait for a server that is silent, it is sent packets that it drops.
    async fn watch(self, connection: quinn::Connection) {
        tokio::select! {
            _ = connection.closed() => {}
            () = self.port_closed() => connection.close(PORT_CLOSED, b""),
        }
    }

    /// Resolves once the server's port is closed.
    async fn port_closed(&self) {
        #[cfg(target_os = "linux")]
        if let Some(socket) = &self.socket {
            return socket.closed().await;
        }
        std::future::pending().await
    }
}

/// Holds a connection until no channel has used it for the time `LINGER`, and then closes it.
async fn keep(pooled: Arc<Pooled>, endpoint: Endpoint) {
    loop {
        tokio::select! {
            _ = pooled.connection.closed() => return,
            () = pooled.released.notified() => {}
        }
        if Arc::strong_count(&pooled) > 1 {
            continue;
        }
        tokio::select! {
            _ = pooled.connection.closed() => return,
            () = tokio::time::sleep(LINGER) => {}
        }
        let pool = pool().lock();
        let unused = Arc::strong_count(&pooled) == 1;
        if unused {
            pooled.connection.close(DONE, b"");
        }
        drop(pool);
        if unused {
            endpoint.wait_idle().await;
            return;
        }
    }
}

fn binding(connection: &quinn::Connection) -> io::Result<[u8; 32]> {
    let mut binding = [0; 32];
    connection
        .export_keying_material(&mut binding, BINDING_LABEL, b"")
        .map_err(|_| io::Error::other("the connection yields no keying material"))?;
    Ok(binding)
}

async fn bind(address: &Address, options: &Bind) -> Result<Listener, TransportError> {
    let Some(tls) = options.tls.clone() else { return Err(TransportError::unsupported(address, NO_SERVER_TLS)) };
    let socket = tcp::bind_socket(address, options, udp).await?;
    let io_error = |error| TransportError::from_io(address.to_string(), error);
    let bound = socket.local_addr().map_err(io_error)?;
    let transport = transport_on_probation(idle_for(options.connections.keep_alive));
    let config = server_config(&tls, &transport).map_err(io_error)?;
    let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(TokioRuntime));
    let endpoint = endpoint.map_err(io_error)?;
    // One channel waits here to be accepted. The others wait in their connections.
    let (channels, accepted) = mpsc::channel(1);
    tokio::spawn(accept_connections(endpoint.clone(), tls, transport, options.connections.clone(), channels));
    Ok(Listener::new(tcp::named_as_asked(address, bound), QuicSource { endpoint, accepted }))
}

fn server_config(tls: &ServerTls, transport: &Arc<TransportConfig>) -> io::Result<ServerConfig> {
    let crypto = QuicServerConfig::try_from(tls.config()).map_err(io::Error::other)?;
    let mut config = ServerConfig::with_crypto(Arc::new(crypto));
    config.transport_config(transport.clone());
    Ok(config)
}

struct QuicSource {
    endpoint: Endpoint,
    accepted: mpsc::Receiver<Channel>,
}

impl Accept for QuicSource {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        match ready!(self.accepted.poll_recv(cx)) {
            Some(channel) => Poll::Ready(Ok(channel)),
            None => Poll::Ready(Err(io::Error::other("the endpoint has ended"))),
        }
    }
}

impl Drop for QuicSource {
    fn drop(&mut self) {
        // The endpoint takes no new connections. Existing ones go on.
        self.endpoint.set_server_config(None);
    }
}

async fn accept_connections(
    endpoint: Endpoint,
    tls: ServerTls,
    transport: Arc<TransportConfig>,
    options: ConnectionLimits,
    channels: mpsc::Sender<Channel>,
) {
    let handshakes = HandshakeLimit::new(options.max_handshakes);
    let connections = Arc::new(Semaphore::new(options.max_connections.min(Semaphore::MAX_PERMITS)));
    let options = Arc::new(options);
    loop {
        let incoming = tokio::select! {
            incoming = endpoint.accept() => incoming,
            () = channels.closed() => return,
        };
        let Some(incoming) = incoming else { return };
        if handshakes.is_busy() && incoming.may_retry() && !incoming.remote_address_validated() {
            // A retry costs the server no state.
            let _ = incoming.retry();
            continue;
        }
        let peer = peer_at(incoming.remote_address());
        let Ok(place) = connections.clone().try_acquire_owned() else {
            tracing::debug!(?peer, limit = options.max_connections, "too many connections");
            incoming.refuse();
            // The error is sent only if there is room: a client that floods the server must not
            // hold up others.
            if let Ok(place) = channels.try_reserve() {
                place.send(failed(peer, io::ErrorKind::QuotaExceeded.into()));
            }
            continue;
        };
        // The certificates to show and to demand may have changed since the last connection.
        let config = match server_config(&tls, &transport) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!(%error, "the certificates do not suit QUIC");
                incoming.refuse();
                continue;
            }
        };
        let handshake = handshakes.begin(machine_of(incoming.remote_address()).limit_key(), ClosedFlag::default());
        let (tls, channels, options) = (tls.clone(), channels.clone(), options.clone());
        tokio::spawn(async move {
            let _place = place;
            let eviction = handshake.eviction();
            let established = establish(incoming, config, handshake, options.max_channels);
            let established = tokio::select! {
                biased;
                () = eviction.notified() => Err(io::ErrorKind::QuotaExceeded.into()),
                established = tokio::time::timeout(options.handshake, established) => {
                    established.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
                }
            };
            match established {
                Ok(established) => tokio::select! {
                    biased;
                    () = eviction.notified() => {
                        established.connection.close(CROWDED, b"too many clients have not said who they are");
                        report(peer, io::ErrorKind::QuotaExceeded.into(), &channels).await;
                    }
                    () = accept_channels(&established, &tls, options.handshake, &channels) => {}
                },
                Err(error) => report(peer, error, &channels).await,
            }
        });
    }
}

/// Reports a connection that failed or was evicted, in the form of a channel that fails.
async fn report(peer: Peer, error: io::Error, channels: &mpsc::Sender<Channel>) {
    let by_tls = |error: &quinn::ConnectionError| match error {
        // According to RFC 9001, the alerts of TLS are the codes from 0x100 on.
        quinn::ConnectionError::TransportError(error) => (0x100..0x200).contains(&u64::from(error.code)),
        _ => false,
    };
    let objection = error.get_ref().and_then(|error| error.downcast_ref()).is_some_and(by_tls);
    let error = if objection { io::Error::new(io::ErrorKind::InvalidData, error) } else { error };
    let _ = channels.send(failed(peer, error)).await;
}

/// Makes a channel whose use fails with `error`.
fn failed(peer: Peer, error: io::Error) -> Channel {
    Channel::upgrading(async { Err(error) }, peer).with_parent_connection(ClosedFlag::closed())
}

fn peer_at(socket: SocketAddr) -> Peer {
    tcp::peer_at("quic", SocketAddr::new(socket.ip().to_canonical(), socket.port()))
}

fn machine_of(socket: SocketAddr) -> Machine {
    Machine::At(socket.ip().to_canonical())
}

/// Connection that a client has made.
struct Established {
    connection: quinn::Connection,
    /// Certificates that the client has shown; empty if it has shown none.
    chain: Vec<CertificateDer<'static>>,
    security: Security,
    /// Flag that is set once the connection has been evicted in favour of others.
    over: ClosedFlag,
}

/// Establishes a connection. The client holds the permit `handshake` until it has proven its
/// identity.
async fn establish(
    incoming: Incoming,
    config: ServerConfig,
    handshake: HandshakePermit,
    max_channels: u32,
) -> io::Result<Established> {
    let over = handshake.closed_flag();
    let connection = incoming.accept_with(Arc::new(config))?.await?;
    let shown = connection.peer_identity().and_then(|shown| shown.downcast::<Vec<CertificateDer<'static>>>().ok());
    let chain = shown.map_or_else(Vec::new, |chain| *chain);
    let Holder { name, keys } = Holder::of(chain.first())?;
    let (known, mut handshake) = (connection.clone(), Some(handshake));
    let set_limits = move |standing| {
        // Once the client has been served, its connection is no longer a handshake.
        drop(handshake.take());
        let (streams, window) = match standing {
            Standing::Proven => (max_channels, CONNECTION_WINDOW),
            Standing::Unproven { sessions: 0 } => (PROBATION_STREAMS, PROBATION_WINDOW),
            // A stream for each session, and no more: QUIC cannot take back streams that a client
            // was once allowed to open.
            Standing::Unproven { sessions } => {
                (PROBATION_STREAMS.saturating_add(sessions).min(max_channels), CONNECTION_WINDOW)
            }
        };
        known.set_max_concurrent_bi_streams(streams.into());
        known.set_receive_window(window.into());
    };
    let security = Security {
        binding: Some(binding(&connection)?),
        certificate: name,
        keys,
        connection: Some(Arc::new(identity_proofs::Connection::on_probation(set_limits))),
        ..Security::default()
    };
    Ok(Established { connection, chain, security, over })
}

async fn accept_channels(
    established: &Established,
    tls: &ServerTls,
    first_channel_timeout: Duration,
    channels: &mpsc::Sender<Channel>,
) {
    let Established { connection, chain, security, over } = established;
    // Held by each channel, so that the number of references shows if there are channels.
    let used = Arc::new(());
    loop {
        let known = security.connection.as_ref().is_some_and(|connection| !connection.is_on_probation());
        let timeout = if known { UNUSED } else { first_channel_timeout };
        let (send, recv) = match tokio::time::timeout(timeout, connection.accept_bi()).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) => return,
            Err(_) if Arc::strong_count(&used) > 1 => continue,
            Err(_) => return connection.close(IDLE, b"no session uses this connection"),
        };
        let mut security = security.duplicate();
        if !chain.is_empty() && !tls.accepts(chain) {
            // The certificate is no longer accepted, and the proofs on this connection no longer
            // count.
            (security.certificate, security.connection) = (None, None);
        }
        // The client's address may have changed since the last channel.
        let channel = Channel::new(QuicIo { send, recv, port: None, wait: None }, peer_at(connection.remote_address()));
        let channel =
            channel.with_security(security).with_parent_connection(over.clone()).with_guard(Box::new(used.clone()));
        // Once the listener is gone, the stream is dropped, which refuses it.
        let _ = channels.send(channel).await;
    }
}

/// Both directions of a stream.
struct QuicIo {
    send: SendStream,
    recv: RecvStream,
    /// Port of the server, if it is watched.
    port: Option<Arc<PeerPort>>,
    /// Mark that bytes were written and none were read since. A session has then most often sent a
    /// request, and waits for the answer.
    wait: Option<Wait>,
}

impl QuicIo {
    /// Notes that `written` bytes were written.
    fn wait_after(&mut self, written: usize) {
        if written > 0 && self.wait.is_none() {
            self.wait = self.port.as_ref().map(PeerPort::wait);
        }
    }

    /// Returns the cause of an error, if it is known better than by QUIC.
    fn explain(&self, error: io::Error) -> io::Error {
        match &self.port {
            Some(port) if port.is_closed() => io::Error::new(io::ErrorKind::ConnectionReset, PORT_CLOSED_TEXT),
            _ => error,
        }
    }
}

/// Error of a channel whose peer's port is closed.
const PORT_CLOSED_TEXT: &str = "the peer's port is closed: its system says that no program uses it any more";

impl AsyncRead for QuicIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = AsyncRead::poll_read(Pin::new(&mut self.recv), cx, buffer);
        if buffer.filled().len() > before {
            self.wait = None;
        }
        outcome.map_err(|error| self.explain(error))
    }
}

impl AsyncWrite for QuicIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = AsyncWrite::poll_write(Pin::new(&mut self.send), cx, bytes);
        if let Poll::Ready(Ok(count)) = outcome {
            self.wait_after(count);
        }
        outcome.map_err(|error| self.explain(error))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut written = 0;
        for slice in slices.iter().filter(|slice| !slice.is_empty()) {
            match AsyncWrite::poll_write(Pin::new(&mut self.send), cx, slice) {
                Poll::Ready(Ok(count)) => {
                    written += count;
                    if count < slice.len() {
                        break;
                    }
                }
                // The bytes already taken are reported first. An error comes again at the next
                // write.
                _ if written > 0 => break,
                other => return other.map_err(|error| self.explain(error)),
            }
        }
        self.wait_after(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(Pin::new(&mut self.send), cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.send), cx)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// A regression: where the system could not report closed ports, no connection could be made.
    #[tokio::test]
    async fn a_system_that_does_not_tell_of_closed_ports_is_enough() {
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let watched = ClientEndpoint::new(udp(any).unwrap(), any).unwrap();
        assert!(watched.port.is_some() && watched.socket.is_some());
        // The option for IPv6 is refused for a socket of IPv4.
        let server = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 1);
        let plain = ClientEndpoint::new(udp(any).unwrap(), server).unwrap();
        assert!(plain.port.is_none() && plain.socket.is_none());
    }
}
