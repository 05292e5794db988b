//! Connections of clients: dialling, the pool of connections, and the channels on them.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use quinn::crypto::rustls::QuicClientConfig;
use quinn::{ClientConfig, Endpoint, VarInt};
use tokio::sync::Notify;

use super::client_endpoint::ClientEndpoint;
use super::closed_port::PeerPort;
use super::settings::{binding, idle_for, transport, udp};
use super::stream::QuicIo;
use crate::address::Address;
use crate::channel::{Channel, Machine, Peer};
use crate::error::TransportError;
use crate::handshake::certificates::{ClientTls, host_in_certificate};
use crate::handshake::identity_proofs::{self, Security, Tokens};
use crate::transport::Dial;
use crate::transports::tls::insecure;

/// Time for which a client keeps a connection that no channel uses, so that the last bytes still
/// arrive. One that was made by a capability has no further channel, and its client waits for the
/// last answers: it is closed at once.
const LINGER: Duration = Duration::from_secs(1);

/// Time for which a client waits for a connection to have room for one more channel.
const ROOM: Duration = Duration::from_secs(1);

/// Code of a connection that was closed in good order.
const DONE: VarInt = VarInt::from_u32(0);

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

pub(super) async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
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
            && let Ok(Ok(mut channel)) = tokio::time::timeout(ROOM, open(address, pooled)).await
        {
            let security = Security { reuses_connection: true, ..channel.take_security() };
            return Ok(channel.with_security(security));
        }
        let pooled = connect(address, options, tls, key).await?;
        open(address, pooled).await.map_err(|error| unconnected(address, options, error))
    };
    let limit = options.limit();
    let outcome = tokio::time::timeout(limit, open).await;
    outcome.unwrap_or_else(|_| Err(TransportError::TimedOut { address: address.to_string(), limit }))
}

async fn open(address: &Address, pooled: Arc<Pooled>) -> Result<Channel, quinn::ConnectionError> {
    // An attempt that is given up releases the connection as well.
    let guard = Guard { released: pooled.released.clone(), pooled: Some(pooled) };
    let Some(pooled) = &guard.pooled else { return Err(quinn::ConnectionError::LocallyClosed) };
    let (send, recv) = pooled.connection.open_bi().await?;
    let machine = Machine::At(pooled.connection.remote_address().ip().to_canonical());
    let io = QuicIo { send, recv, port: pooled.port.clone(), wait: None };
    let channel = Channel::new(io, Peer::new(address.to_string()).on(machine));
    let channel = channel.with_security(pooled.security.duplicate());
    Ok(channel.with_guard(Box::new(guard)))
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
    let linger = if trust.1.is_capability() { Duration::ZERO } else { LINGER };
    let pooled = Arc::new(Pooled { connection, _trust: trust, security, port, released });
    let mut pool = pool().lock();
    pool.retain(|_, pooled| pooled.strong_count() > 0);
    pool.insert(key, Arc::downgrade(&pooled));
    drop(pool);
    tokio::spawn(client.watch(pooled.connection.clone()));
    tokio::spawn(keep(pooled.clone(), endpoint, linger));
    Ok(pooled)
}

/// Holds a connection until no channel has used it for the time `linger`, and then closes it.
async fn keep(pooled: Arc<Pooled>, endpoint: Endpoint, linger: Duration) {
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
            () = tokio::time::sleep(linger) => {}
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
