//! Transports: the trait by which peers are dialled and listened for, and what each call is given.

mod registry;

use std::fmt;
use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::time::Duration;

pub use self::registry::Transports;
use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel};
use crate::error::TransportError;
#[cfg(feature = "tls")]
use crate::handshake::certificates::{ClientTls, ServerTls};
use crate::handshake::identity::Tokens;
use crate::listener::Listener;

/// A future on the heap, as the methods of [`Transport`] return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A way in which peers reach each other: it dials addresses of its schemes, listens on them, or
/// both.
///
/// A transport is registered with [`Transports::with`], and works from then on wherever that
/// registry is given: to a [`Connector`](crate::Connector), to a [`Server`](crate::Server), and to
/// what is built on them. Everything that a call needs comes with it, in [`Dial`] or [`Bind`];
/// knobs that no other transport has belong to the value that implements the trait.
///
/// A transport moves bytes. Handshakes, the proof of identity, hops and relays are no concern of
/// it; it cannot claim that a channel is encrypted, other than by handing on the
/// [`Security`](crate::Security) that [`ClientTls::connect`](crate::ClientTls::connect) or
/// [`ServerTls::accept`](crate::ServerTls::accept) has given it.
pub trait Transport: fmt::Debug + Send + Sync + 'static {
    /// The schemes of the addresses that this transport serves, in lower case.
    fn schemes(&self) -> &[&str];

    /// Returns what is known of channels to `at`, without dialling. Called for each address before
    /// it is used.
    ///
    /// Unless it is implemented, all well-formed addresses are taken, with the cautious default of
    /// [`Properties`].
    ///
    /// # Errors
    ///
    /// The address is none of this transport: see [`AddressError::invalid`].
    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let _ = at;
        Ok(Properties::default())
    }

    /// Returns the address in the one spelling by which operators' patterns are compared with it.
    /// The same address, unless it is implemented: only opaque addresses have several spellings.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        Ok(at.clone())
    }

    /// Opens a channel to the peer at `to`, which [`check`](Self::check) has accepted. Called in a
    /// tokio runtime with I/O and time.
    ///
    /// The key of the address plays no part: it is for the handshake. Dropping the future gives up
    /// the attempt.
    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>>;

    /// Opens a channel on this thread, without a runtime. Returns `None` if the transport cannot:
    /// then a background runtime of the process dials, and drives the session.
    fn dial_blocking(&self, to: &Address, with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        let _ = (to, with);
        None
    }

    /// Returns the address that the last hop of a tunnel dials for `to`, if streams of bytes
    /// through a tunnel can lead there. The hop has none of this side's secrets, so that encryption
    /// is left to [`dial_over`](Self::dial_over).
    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        let _ = to;
        None
    }

    /// Opens a channel to `to` over a stream of bytes that leads there already. Called only for
    /// addresses that have a [`tunnel_target`](Self::tunnel_target).
    fn dial_over<'a>(
        &'a self,
        to: &'a Address,
        over: Channel,
        with: &'a Dial,
    ) -> BoxFuture<'a, Result<Channel, TransportError>> {
        let _ = (over, with);
        unsupported(to, "cannot be reached through a tunnel, which passes a stream of bytes")
    }

    /// Listens on `at`, which [`check`](Self::check) has accepted. Called in a tokio runtime with
    /// I/O and time.
    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        let _ = with;
        unsupported(at, "can only be dialled; listen on a tcp:// or unix: address")
    }
}

fn unsupported<'a, T: Send + 'a>(at: &Address, why: &'static str) -> BoxFuture<'a, Result<T, TransportError>> {
    let error = TransportError::unsupported(at, why);
    Box::pin(async { Err(error) })
}

/// The properties of channels to an address, as far as they follow from the address.
///
/// The default is the cautious one: the network can reach it, nothing is encrypted, and programs
/// are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// The peers that can reach a listener there, or be reached there.
    pub reach: Reach,
    /// True if bytes can be neither read nor changed on the way, and the ends are bound to each
    /// other by TLS or QUIC.
    pub encrypted: bool,
    /// True if dialling may start a program.
    pub starts_programs: bool,
}

impl Properties {
    /// Properties of channels that are not encrypted and start no program.
    #[must_use]
    pub fn plain(reach: Reach) -> Self {
        Self { reach, encrypted: false, starts_programs: false }
    }

    /// Properties of channels that are encrypted and start no program.
    #[must_use]
    pub fn encrypted(reach: Reach) -> Self {
        Self { encrypted: true, ..Self::plain(reach) }
    }

    /// Properties of channels to programs that are started when dialled.
    #[must_use]
    pub fn program(reach: Reach) -> Self {
        Self { starts_programs: true, ..Self::plain(reach) }
    }

    /// Returns true if no other machine can reach it.
    #[must_use]
    pub fn is_local(&self) -> bool {
        self.reach <= Reach::Machine
    }
}

impl Default for Properties {
    fn default() -> Self {
        Self { reach: Reach::Network, encrypted: false, starts_programs: true }
    }
}

/// The distance from which a peer can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reach {
    /// From this process alone.
    Process,
    /// From this machine alone.
    Machine,
    /// From other machines, too.
    Network,
}

/// The terms of one dialling: time, keep-alive, and the credentials of this side.
#[derive(Clone, Debug)]
pub struct Dial {
    /// The tokens by which this side proves itself, and by which it makes sure of the other.
    /// Default: none.
    pub tokens: Tokens,
    /// The trust in servers, for transports that encrypt. Default: none, and those cannot be
    /// dialled.
    #[cfg(feature = "tls")]
    pub tls: Option<ClientTls>,
    /// The time that resolving and connecting may take together. Default: 10 s, which leaves room
    /// for three lost packets (the kernel repeats them after 1, 2 and 4 s) on one of the host's
    /// addresses. Starting a child process is not limited.
    pub connect_timeout: Duration,
    /// The silence after which the session tests the channel; it gives the channel up after three
    /// times as long. A transport that notices silence itself has to wait longer than that. A
    /// [`Connector`](crate::Connector) sets it to what its sessions use. Default: 5 s.
    pub keep_alive: Duration,
}

impl Dial {
    /// Returns the time limit, cut to what can be added to any clock.
    #[must_use]
    pub fn limit(&self) -> Duration {
        self.connect_timeout.min(Duration::from_secs(365 * 24 * 3600))
    }
}

impl Default for Dial {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            tokens: Tokens::default(),
            connect_timeout: Duration::from_secs(10),
            keep_alive: KEEP_ALIVE,
        }
    }
}

/// The silence after which sessions test their channel, unless they are told otherwise.
pub(crate) const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// The terms of one listening: ports, credentials and limits.
#[derive(Clone, Debug)]
pub struct Bind {
    /// The certificates of the server, for transports that encrypt. Default: none, and those cannot
    /// be listened on.
    #[cfg(feature = "tls")]
    pub tls: Option<ServerTls>,
    /// The limits of connections that carry several channels each.
    /// [`Server::listen`](crate::Server::listen) sets them by the limits of its sessions and
    /// handshakes.
    pub connections: ConnectionLimits,
    /// The number of connections that may wait to be accepted. Default: 1024, so that a burst of
    /// workers that start together gets in; the kernel cuts it to its own limit. Costs nothing
    /// while unused.
    pub backlog: u32,
    /// The ports to try in turn when the address says port 0 or its port is in use. Default: none,
    /// so that port 0 is any free port, and a port in use is an error.
    pub port_range: Option<RangeInclusive<u16>>,
}

impl Default for Bind {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            connections: ConnectionLimits::default(),
            backlog: 1024,
            port_range: None,
        }
    }
}

/// The limits of a server's connections, for transports in which one connection carries several
/// channels.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// The silence after which the sessions test their channels. Default: 5 s.
    pub keep_alive: Duration,
    /// The time that a connection may take to come about, and then to have its first channel. 10 s.
    pub handshake: Duration,
    /// The number of connections whose clients are not known. For one more, the oldest connection
    /// of the machine that has most of them is closed. 1,024.
    pub max_handshakes: usize,
    /// The number of connections in all; more are refused. 5,120.
    pub max_connections: usize,
    /// The number of channels that one connection may have at a time. For one more its client waits
    /// a second, and makes another connection. 1,024.
    pub max_channels: u32,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            keep_alive: KEEP_ALIVE,
            handshake: Duration::from_secs(10),
            max_handshakes: 1024,
            max_connections: 5120,
            max_channels: 1024,
        }
    }
}
