//! Transports: the trait for dialling peers and listening for them, and the terms of each call.

mod allowed_origins;
mod compiled_in;
mod registry;

use std::fmt;
use std::future::Future;
use std::ops::RangeInclusive;
use std::pin::Pin;
use std::time::Duration;

use rpc_core::proto::KEEP_ALIVE;

pub use self::allowed_origins::AllowedOrigins;
pub use self::registry::Transports;
use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel};
use crate::error::TransportError;
#[cfg(feature = "tls")]
use crate::handshake::certificates::{ClientTls, ServerTls};
use crate::handshake::identity_proofs::Tokens;
use crate::listener::Listener;

/// A future on the heap, as the methods of [`Transport`] return it.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A way in which peers reach each other: it dials addresses of its schemes, listens on them, or
/// both.
///
/// A transport is registered with [`Transports::with`]. From then on it works wherever that
/// registry is given: to a [`Connector`](crate::Connector), to a [`Server`](crate::Server), and to
/// code built on them. Each call brings all that it needs in [`Dial`] or [`Bind`]. Settings that no
/// other transport has belong to the value that implements the trait.
///
/// A transport moves bytes. Handshakes, the proof of identity, hops and relays are not its concern.
/// It cannot claim that a channel is encrypted, other than by handing on the
/// [`Security`](crate::Security) that [`ClientTls::connect`](crate::ClientTls::connect) or
/// [`ServerTls::accept`](crate::ServerTls::accept) has given it.
pub trait Transport: fmt::Debug + Send + Sync + 'static {
    /// Returns the schemes of the addresses that this transport serves, in lower case.
    fn schemes(&self) -> &[&str];

    /// Returns the properties of channels to `at`, without dialling. Called for each address before
    /// it is used.
    ///
    /// The default implementation accepts all well-formed addresses, with the cautious default of
    /// [`Properties`].
    ///
    /// # Errors
    ///
    /// [`AddressError`] if the transport does not accept the address: see
    /// [`AddressError::invalid`].
    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let _ = at;
        Ok(Properties::default())
    }

    /// Returns the address in its canonical spelling, with which operators' patterns are compared.
    /// The default implementation returns the same address: only opaque addresses have several
    /// spellings.
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
    /// The transport ignores the key of the address, which is for the handshake. Dropping the
    /// future gives up the attempt.
    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>>;

    /// Opens a channel on this thread, without a runtime. Returns `None` if the transport cannot. A
    /// background runtime of the process then dials, and drives the session.
    fn dial_blocking(&self, to: &Address, with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        let _ = (to, with);
        None
    }

    /// Returns the address that the last hop of a tunnel dials for `to`, if streams of bytes
    /// through a tunnel can lead there. The hop has none of this side's secrets, so encryption is
    /// left to [`dial_over`](Self::dial_over).
    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        let _ = to;
        None
    }

    /// Opens a channel to `to` over a stream of bytes that leads there already. Called only for
    /// addresses that have a [`tunnel_target`](Self::tunnel_target).
    ///
    /// By default the stream is the channel where the target is the address itself, so that this
    /// side has nothing to add. Others are unsupported.
    fn dial_over<'a>(
        &'a self,
        to: &'a Address,
        stream: Channel,
        with: &'a Dial,
    ) -> BoxFuture<'a, Result<Channel, TransportError>> {
        let _ = with;
        if self.tunnel_target(to).as_ref() == Some(to) {
            return Box::pin(async { Ok(stream) });
        }
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
/// The default is the cautious one: other machines can reach the peer, bytes are not encrypted, and
/// dialling may start a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Properties {
    /// Distance from which a peer at the address can be reached.
    pub reach: Reach,
    /// True if bytes can be neither read nor changed on the way, and the ends are bound to each
    /// other by TLS or QUIC.
    pub encrypted: bool,
    /// True if dialling may start a program.
    pub starts_programs: bool,
}

impl Properties {
    /// Returns the properties of channels that are not encrypted and start no program.
    #[must_use]
    pub fn plain(reach: Reach) -> Self {
        Self { reach, encrypted: false, starts_programs: false }
    }

    /// Returns the properties of channels that are encrypted and start no program.
    #[must_use]
    pub fn encrypted(reach: Reach) -> Self {
        Self { encrypted: true, ..Self::plain(reach) }
    }

    /// Returns the properties of channels to programs that are started when dialled.
    #[must_use]
    pub fn program(reach: Reach) -> Self {
        Self { starts_programs: true, ..Self::plain(reach) }
    }

    /// Returns true if no other machine can reach the peer.
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
    /// Reach from this process alone.
    Process,
    /// Reach from this machine alone.
    Machine,
    /// Reach from other machines, too.
    Network,
}

/// Terms of one attempt to dial: time, keep-alive, and the credentials of this side.
#[derive(Clone, Debug)]
pub struct Dial {
    /// The tokens by which this side proves its identity and checks that of the other. Default:
    /// none.
    pub tokens: Tokens,
    /// The trust in servers, for transports that encrypt. Default: none, and those transports can
    /// dial only with tokens.
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
    /// The silence of the peer's machine after which the operating system gives a connection up,
    /// for peers whose protocol cannot test it. Transports without sockets of their own take no
    /// notice. Default: none, and the system's own limits hold, which are hours.
    pub socket_silence: Option<Duration>,
    /// True if the transport may ask the user at the terminal of this process, as `ssh` does for a
    /// password. A server that dials for its clients sets it to false: their questions are not for
    /// its operator. Default: true.
    pub may_prompt: bool,
    /// True if a server that a tracker grants may be reached without encryption although the
    /// tracker itself is reached with it. Otherwise such a grant is refused, unless the server is
    /// on this machine: whoever trusts the tracker's channel would not expect it. Default: false.
    pub plain_grants: bool,
}

impl Dial {
    /// Returns the time limit, cut to 365 days so that it can be added to any clock.
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
            socket_silence: None,
            may_prompt: true,
            plain_grants: false,
        }
    }
}

/// Terms of one listener: ports, credentials, limits, and web pages.
#[derive(Clone, Debug)]
pub struct Bind {
    /// The certificates of the server, for transports that encrypt. Default: none, and those
    /// transports cannot listen.
    #[cfg(feature = "tls")]
    pub tls: Option<ServerTls>,
    /// The limits of connections that carry several channels each.
    /// [`Server::listen`](crate::Server::listen) sets them by the limits of its sessions and
    /// handshakes.
    pub connections: ConnectionLimits,
    /// The number of connections that may wait to be accepted. Default: 1024, so that a burst of
    /// workers that start together gets in. The kernel cuts it to its own limit. A larger number
    /// costs nothing while unused.
    pub backlog: u32,
    /// The ports to try in turn when the address says port 0 or its port is in use. Default: none,
    /// so that port 0 is any free port, and a port in use is an error.
    pub port_range: Option<RangeInclusive<u16>>,
    /// The web pages that transports over HTTP serve. Default: none.
    pub origins: AllowedOrigins,
}

impl Default for Bind {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            connections: ConnectionLimits::default(),
            backlog: 1024,
            port_range: None,
            origins: AllowedOrigins::default(),
        }
    }
}

/// The limits of a server's connections, for transports in which one connection carries several
/// channels.
#[derive(Clone, Debug)]
pub struct ConnectionLimits {
    /// The silence after which the sessions test their channels. Default: 5 s.
    pub keep_alive: Duration,
    /// The time that a connection may take to be established, and then to have its first channel.
    /// Default: 10 s.
    pub handshake: Duration,
    /// The number of connections whose clients have not proven their identity. For one more, the
    /// oldest such connection of the machine that has most of them is closed. Default: 1,024.
    pub max_handshakes: usize,
    /// The number of connections in all; more are refused. Default: 5,120.
    pub max_connections: usize,
    /// The number of channels that one connection may have at a time. For one more, its client
    /// waits a second and then makes another connection. Default: 1,024.
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
