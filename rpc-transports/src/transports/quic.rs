//! `quic://` addresses: many channels, each a bidirectional stream, on one QUIC connection.
//!
//! A client keeps its connection to a server while channels use it and for a moment longer, and
//! opens further channels on it. A connection outlives a change of the client's address. One has a
//! socket of its own.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{ClientConfig, Endpoint, EndpointConfig, IdleTimeout, Incoming, RecvStream, SendStream, ServerConfig};
use quinn::{TokioRuntime, TransportConfig, VarInt};
use rustls::pki_types::CertificateDer;
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::{Notify, Semaphore, mpsc};

use crate::address::{Address, AddressError};
use crate::channel::{Channel, Machine, Peer};
use crate::error::TransportError;
use crate::handshake::certificates::{BINDING_LABEL, ClientTls, ServerTls, keys_of, name_of};
use crate::handshake::handshake_limit::{ClosedFlag, HandshakeLimit, HandshakePermit};
use crate::handshake::identity::{self, Security, Tokens};
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, ConnectionLimits, Dial, Properties, Transport};
use crate::transports::tcp;
use crate::transports::tls::{NO_SERVER_TLS, insecure};

/// How much one channel may have under way: enough for a copy at 1 GB/s over 8 ms, or 100 MB/s over
/// 80.
const STREAM_WINDOW: u32 = 8 << 20;

/// How much all channels of a connection may have under way.
const CONNECTION_WINDOW: u32 = 32 << 20;

/// How many channels a client may open, and how much it may have under way on all of them, before
/// it has proven who it is.
const PROBATION_STREAMS: u32 = 4;
const PROBATION_WINDOW: u32 = 256 << 10;

/// How long a server keeps the connection of a client that it knows without channels. A client's
/// own keeper closes it much earlier.
const UNUSED: Duration = Duration::from_secs(30);

/// How long a client keeps a connection that no channel uses: what was said last must still arrive.
const LINGER: Duration = Duration::from_secs(1);

/// How long a client waits for a connection to have room for one more channel.
const ROOM: Duration = Duration::from_secs(1);

/// The connection was closed in good order.
const DONE: VarInt = VarInt::from_u32(0);

/// The connection was closed because nobody used it.
const IDLE: VarInt = VarInt::from_u32(1);

/// The connection gave way to others.
const CROWDED: VarInt = VarInt::from_u32(2);

/// Returns the silence after which a connection is given up whose sessions are tested at this
/// interval: twice as long as the sessions wait, so that they notice first, and say so. By default
/// that is 30 s.
fn idle_for(keep_alive: Duration) -> Duration {
    keep_alive.saturating_mul(6)
}

/// What holds for a server's connections until their clients are known.
fn transport_on_probation(idle: Duration) -> Arc<TransportConfig> {
    let mut config = transport(idle);
    config.max_concurrent_bidi_streams(PROBATION_STREAMS.into());
    config.receive_window(PROBATION_WINDOW.into());
    Arc::new(config)
}

fn transport(idle: Duration) -> TransportConfig {
    let mut config = TransportConfig::default();
    // Sessions have pings of their own, which keep a connection alive as long as they do.
    let longest = IdleTimeout::from(VarInt::MAX);
    config.max_idle_timeout(Some(IdleTimeout::try_from(idle).unwrap_or(longest)));
    config.stream_receive_window(STREAM_WINDOW.into());
    config.receive_window(CONNECTION_WINDOW.into());
    config.send_window(CONNECTION_WINDOW.into());
    // It is clients who open channels.
    config.max_concurrent_bidi_streams(VarInt::from_u32(0));
    config.max_concurrent_uni_streams(VarInt::from_u32(0));
    config.datagram_receive_buffer_size(None);
    config
}

/// Buffers of the socket: the default loses packets as soon as the receiver is late.
const SOCKET_BUFFER: usize = 2 << 20;

fn udp(target: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(target), Type::DGRAM, Some(Protocol::UDP))?;
    if target.is_ipv6() && target.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    // As much of it as the system allows.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.bind(&target.into())?;
    Ok(socket.into())
}

/// A client's connection, shared by the channels on it.
struct Pooled {
    connection: quinn::Connection,
    /// Kept, so that what the key says of them stays theirs.
    _trust: (ClientTls, Tokens),
    security: Security,
    /// Told whenever a channel is gone.
    released: Arc<Notify>,
}

/// Keeps a connection for as long as a channel on it.
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

/// Under which name a connection is found again.
#[derive(PartialEq, Eq, Hash)]
struct PoolKey {
    address: String,
    /// By the addresses of the certificates and tokens that it was made with.
    trust: (usize, Option<usize>),
    idle: Duration,
    /// Which drives it: another one would wait for it in vain while that one rests.
    runtime: tokio::runtime::Id,
}

/// Weak: a connection ends with its keeper, which ends with its runtime.
fn pool() -> &'static Mutex<HashMap<PoolKey, Weak<Pooled>>> {
    static POOL: OnceLock<Mutex<HashMap<PoolKey, Weak<Pooled>>>> = OnceLock::new();
    POOL.get_or_init(Mutex::default)
}

/// One that is found is not closed by its keeper, which looks under the same lock.
fn pooled(key: &PoolKey) -> Option<Arc<Pooled>> {
    let found = pool().lock().unwrap_or_else(PoisonError::into_inner).get(key).and_then(Weak::upgrade);
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
        // One that has as many channels as the server allows goes on, and another takes its place
        // in the pool.
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
    let channel = Channel::new(QuicIo { send, recv }, Peer::new(address.to_string()).on(machine));
    Ok(channel.with_security(pooled.security.clone()).with_guard(Box::new(guard)))
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
    let name = host.split('%').next().unwrap_or(host);
    let deadline = Instant::now() + options.limit();
    let mut failure = TransportError::TimedOut { address: address.to_string(), limit: options.limit() };
    for (tried, target) in resolved.iter().enumerate() {
        let local =
            if target.is_ipv6() { IpAddr::V6(Ipv6Addr::UNSPECIFIED) } else { IpAddr::V4(Ipv4Addr::UNSPECIFIED) };
        let io_error = |error| TransportError::from_io(address.to_string(), error);
        let socket = udp(SocketAddr::new(local, 0)).map_err(io_error)?;
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime));
        let endpoint = endpoint.map_err(io_error)?;
        let connecting = endpoint.connect_with(config.clone(), *target, name).map_err(|error| other(&error))?;
        // One address that does not answer leaves time for the others.
        let sharers = u32::try_from(resolved.len() - tried).unwrap_or(u32::MAX);
        let share = deadline.saturating_duration_since(Instant::now()) / sharers;
        match tokio::time::timeout(share, connecting).await {
            Ok(Ok(connection)) => {
                return pool_connection(connection, endpoint, (tls.clone(), options.tokens.clone()), key)
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
        // Nobody has said anything about the encryption.
        quinn::ConnectionError::TimedOut => {
            TransportError::TimedOut { address: address.to_string(), limit: idle_for(options.keep_alive) }
        }
        error => insecure(address, error.into()),
    }
}

fn pool_connection(
    connection: quinn::Connection,
    endpoint: Endpoint,
    trust: (ClientTls, Tokens),
    key: PoolKey,
) -> io::Result<Arc<Pooled>> {
    let known = connection.clone();
    let pulse = move || (known.stats().udp_rx.datagrams, known.rtt());
    let security = Security {
        binding: Some(binding(&connection)?),
        server_verified: trust.0.verifies(),
        showed_certificate: trust.0.shows_certificate(),
        connection: Some(Arc::new(identity::Connection::with_pulse(pulse))),
        ..Security::default()
    };
    let pooled = Arc::new(Pooled { connection, _trust: trust, security, released: Arc::new(Notify::new()) });
    let mut pool = pool().lock().unwrap_or_else(PoisonError::into_inner);
    pool.retain(|_, pooled| pooled.strong_count() > 0);
    pool.insert(key, Arc::downgrade(&pooled));
    drop(pool);
    tokio::spawn(keep(pooled.clone(), endpoint));
    Ok(pooled)
}

/// Holds a connection until no channel has used it for a while.
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
        let pool = pool().lock().unwrap_or_else(PoisonError::into_inner);
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
    // One channel waits to be taken; the others wait in their connections.
    let (channels, accepted) = mpsc::channel(1);
    tokio::spawn(accept_connections(endpoint.clone(), tls, transport, options.connections.clone(), channels));
    Ok(Listener::new(tcp::named(address, bound), QuicSource { endpoint, accepted }))
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
        // Connections that there are go on.
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
            // Costs the server no state.
            let _ = incoming.retry();
            continue;
        }
        let peer = peer_at(incoming.remote_address());
        let Ok(place) = connections.clone().try_acquire_owned() else {
            tracing::debug!(?peer, limit = options.max_connections, "too many connections");
            incoming.refuse();
            // Not waited for: whoever floods the server is not to hold up others.
            if let Ok(place) = channels.try_reserve() {
                place.send(failed(peer, io::ErrorKind::QuotaExceeded.into()));
            }
            continue;
        };
        // What is shown and demanded may have changed since the last one.
        let config = match server_config(&tls, &transport) {
            Ok(config) => config,
            Err(error) => {
                tracing::error!(%error, "the certificates do not suit QUIC");
                incoming.refuse();
                continue;
            }
        };
        let handshake = handshakes.begin(machine_of(incoming.remote_address()).to_string(), ClosedFlag::default());
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

/// Has whoever accepts channels know of a connection that did not come about.
async fn report(peer: Peer, error: io::Error, channels: &mpsc::Sender<Channel>) {
    let by_tls = |error: &quinn::ConnectionError| match error {
        // RFC 9001: the alerts of TLS are the codes from 0x100 on.
        quinn::ConnectionError::TransportError(error) => (0x100..0x200).contains(&u64::from(error.code)),
        _ => false,
    };
    let objection = error.get_ref().and_then(|error| error.downcast_ref()).is_some_and(by_tls);
    let error = if objection { io::Error::new(io::ErrorKind::InvalidData, error) } else { error };
    let _ = channels.send(failed(peer, error)).await;
}

/// A channel that there is not: whoever wants to use it gets the error.
fn failed(peer: Peer, error: io::Error) -> Channel {
    Channel::upgrading(async { Err(error) }, peer).with_parent_connection(ClosedFlag::closed())
}

fn peer_at(socket: SocketAddr) -> Peer {
    tcp::peer_at("quic", SocketAddr::new(socket.ip().to_canonical(), socket.port()))
}

fn machine_of(socket: SocketAddr) -> Machine {
    Machine::At(socket.ip().to_canonical())
}

/// A connection that a client has made.
struct Established {
    connection: quinn::Connection,
    /// The certificates that the client has shown; empty without one.
    chain: Vec<CertificateDer<'static>>,
    security: Security,
    /// Whether it has given way to others.
    over: ClosedFlag,
}

/// The client is in its `handshake` until it has proven who it is.
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
    let known = connection.clone();
    let admit = move || {
        drop(handshake);
        known.set_max_concurrent_bi_streams(max_channels.into());
        known.set_receive_window(CONNECTION_WINDOW.into());
    };
    let security = Security {
        binding: Some(binding(&connection)?),
        certificate: chain.first().and_then(name_of),
        keys: chain.first().map(keys_of).unwrap_or_default(),
        connection: Some(Arc::new(identity::Connection::on_probation(admit))),
        ..Security::default()
    };
    Ok(Established { connection, chain, security, over })
}

async fn accept_channels(
    established: &Established,
    tls: &ServerTls,
    patience: Duration,
    channels: &mpsc::Sender<Channel>,
) {
    let Established { connection, chain, security, over } = established;
    // Held by each channel.
    let used = Arc::new(());
    loop {
        let known = security.connection.as_ref().is_some_and(|connection| !connection.is_on_probation());
        let patience = if known { UNUSED } else { patience };
        let (send, recv) = match tokio::time::timeout(patience, connection.accept_bi()).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) => return,
            Err(_) if Arc::strong_count(&used) > 1 => continue,
            Err(_) => return connection.close(IDLE, b"no session uses this connection"),
        };
        let mut security = security.clone();
        if !chain.is_empty() && !tls.accepts(chain) {
            // What was proven by it is not proven any more.
            (security.certificate, security.connection) = (None, None);
        }
        // Asked each time: it may have changed.
        let channel = Channel::new(QuicIo { send, recv }, peer_at(connection.remote_address()));
        let channel =
            channel.with_security(security).with_parent_connection(over.clone()).with_guard(Box::new(used.clone()));
        // Once nobody listens, the stream is dropped, and so refused.
        let _ = channels.send(channel).await;
    }
}

/// The two directions of a stream.
struct QuicIo {
    send: SendStream,
    recv: RecvStream,
}

impl AsyncRead for QuicIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        AsyncRead::poll_read(Pin::new(&mut self.recv), cx, buffer)
    }
}

impl AsyncWrite for QuicIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(Pin::new(&mut self.send), cx, bytes)
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
                // What was taken is reported first; the error comes again.
                _ if written > 0 => break,
                other => return other,
            }
        }
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
