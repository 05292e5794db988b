//! Connections that a server accepts, their limits until clients have proven their identity, and
//! the channels on them.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use quinn::crypto::rustls::QuicServerConfig;
use quinn::{Endpoint, EndpointConfig, Incoming, ServerConfig, TokioRuntime, TransportConfig, VarInt};
use rustls::pki_types::CertificateDer;
use tokio::sync::{Semaphore, mpsc};

use super::settings::{CONNECTION_WINDOW, binding, idle_for, transport, udp};
use super::stream::QuicIo;
use crate::address::Address;
use crate::channel::{Channel, Machine, Peer};
use crate::error::TransportError;
use crate::handshake::certificates::{Holder, ServerTls};
use crate::handshake::handshake_slots::{ClosedFlag, HandshakeLimit, HandshakePermit};
use crate::handshake::identity_proofs::{self, Security, Standing};
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, ConnectionLimits};
use crate::transports::tcp;
use crate::transports::tls::NO_SERVER_TLS;

/// Number of channels that a client may have before it has proven its identity, beside those of
/// sessions that need no proof.
const PROBATION_STREAMS: u32 = 4;
/// Number of bytes that a client may have in flight on all channels before it has proven its
/// identity, unless it has a session that needs no proof.
const PROBATION_WINDOW: u32 = 256 << 10;

/// Time for which a server keeps a connection without channels after the client has proven its
/// identity. The client itself closes an unused connection much earlier.
const UNUSED: Duration = Duration::from_secs(30);

/// Code of a connection that was closed because no session used it.
const IDLE: VarInt = VarInt::from_u32(1);

/// Code of a connection that was evicted in favour of others.
const CROWDED: VarInt = VarInt::from_u32(2);

/// Returns the settings of a server's connections until their clients have proven their identity.
fn transport_on_probation(idle: Duration) -> Arc<TransportConfig> {
    let mut config = transport(idle);
    config.max_concurrent_bidi_streams(PROBATION_STREAMS.into());
    config.receive_window(PROBATION_WINDOW.into());
    Arc::new(config)
}

pub(super) async fn bind(address: &Address, options: &Bind) -> Result<Listener, TransportError> {
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
