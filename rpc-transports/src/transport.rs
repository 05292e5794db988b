//! Dialling and listening on any kind of address, and the options of both.

mod dispatch;

use std::ops::RangeInclusive;
use std::time::Duration;

pub(crate) use self::dispatch::dial_through;
pub use self::dispatch::{bind, dial, dial_blocking};
#[cfg(feature = "tls")]
use crate::handshake::certificates::{ClientTls, ServerTls};
use crate::handshake::identity::Tokens;
#[cfg(feature = "exec")]
use crate::transports::exec::ChildStderr;

/// How to dial.
#[derive(Clone, Debug)]
pub struct DialOptions {
    /// The tokens by which this side proves itself, and by which it makes sure of the other. Default: none.
    pub tokens: Tokens,
    /// How servers are trusted, for `tls://` and `quic://`. Default: none, and those cannot be dialled.
    #[cfg(feature = "tls")]
    pub tls: Option<ClientTls>,
    /// How long a QUIC connection may be silent before it is given up. Default: 30 s. A [`Connector`](crate::Connector) sets it
    /// to twice what its sessions allow.
    #[cfg(feature = "quic")]
    pub quic_idle: Duration,
    /// How long resolving and connecting may take together. Default: 10 s, which leaves room for three
    /// lost packets (the kernel repeats them after 1, 2 and 4 s) on one of the host's addresses. Starting
    /// a child process is not limited.
    pub connect_timeout: Duration,
    /// Who takes what child processes write to standard error. Default: nobody, and it goes to the standard error of this one.
    #[cfg(feature = "exec")]
    pub child_stderr: Option<ChildStderr>,
}

impl DialOptions {
    /// The time limit, cut to what can be added to any clock.
    pub(crate) fn limit(&self) -> Duration {
        self.connect_timeout.min(Duration::from_secs(365 * 24 * 3600))
    }
}

impl Default for DialOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "quic")]
            quic_idle: QUIC_IDLE,
            tokens: Tokens::default(),
            connect_timeout: Duration::from_secs(10),
            #[cfg(feature = "exec")]
            child_stderr: None,
        }
    }
}

/// Sessions notice a silent peer after 15 s, by default; the connection under them lasts longer.
#[cfg(feature = "quic")]
const QUIC_IDLE: Duration = Duration::from_secs(30);

/// How a server treats the QUIC connections that its channels are on.
#[cfg(feature = "quic")]
#[derive(Clone, Debug)]
pub struct QuicOptions {
    /// How long a connection may be silent before it is given up. 30 s.
    pub idle: Duration,
    /// How long a connection may take to come about, and then to have its first channel. 10 s.
    pub handshake: Duration,
    /// How many connections there may be whose clients are not known. For one more, the oldest one of the machine that has
    /// most of them is closed. 1,024.
    pub max_handshakes: usize,
    /// How many connections there may be in all; more are refused. 5,120.
    pub max_connections: usize,
    /// How many channels one connection may have at a time. For one more its client waits a second, and makes another
    /// connection. 1,024.
    pub max_channels: u32,
}

#[cfg(feature = "quic")]
impl Default for QuicOptions {
    fn default() -> Self {
        Self {
            idle: QUIC_IDLE,
            handshake: Duration::from_secs(10),
            max_handshakes: 1024,
            max_connections: 5120,
            max_channels: 1024,
        }
    }
}

/// How to listen.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// What the server shows of itself, for `tls://` and `quic://`. Default: none, and those cannot be listened on.
    #[cfg(feature = "tls")]
    pub tls: Option<ServerTls>,
    /// What holds for QUIC connections, below the channels on them. [`Server::listen`](crate::Server::listen) sets it by what it
    /// allows its sessions and handshakes.
    #[cfg(feature = "quic")]
    pub quic: QuicOptions,
    /// How many connections may wait to be accepted. Default: 1024, so that a burst of workers that
    /// start together gets in; the kernel cuts it to its own limit. Costs nothing while unused.
    pub backlog: u32,
    /// Ports to try in turn when the address says port 0 or its port is in use. Default: none, so
    /// that port 0 is any free port, and a port in use is an error.
    pub port_range: Option<RangeInclusive<u16>>,
    /// Who may connect to a Unix socket, as a file mode. Default: `0o600`, this user alone; with
    /// `0o660` its group too.
    pub unix_mode: u32,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "quic")]
            quic: QuicOptions::default(),
            backlog: 1024,
            port_range: None,
            unix_mode: 0o600,
        }
    }
}
