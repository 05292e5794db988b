//! What a server is told: whom it serves, with what, and within which limits.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rpc_core::{ErrorKind, RpcError, SharedSession};

use super::forward::Onward;
use crate::address::Address;
use crate::handshake::identity::Access;
use crate::limits::WireLimits;
use crate::serve::filter::RequestPolicy;
use crate::transport::{ConnectionLimits, Dial, Transports};

/// What a client asks for when it connects.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenRequest {
    /// The address that the client comes from.
    pub peer: String,
    /// Whom the client has proven to be; `anonymous` without proof. Of a client behind a hop that is trusted with it, what the
    /// hop says.
    pub identity: String,
    /// The key that the client asks for, if any.
    pub key: Option<String>,
    /// The named workspace that the client wants; `None` for a private one.
    pub workspace: Option<String>,
    /// What a tracker gave the client for this server, if it did.
    pub ticket: Option<String>,
    /// How functions of the session may reach other servers on the client's behalf.
    pub onward: Onward,
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

/// How a server serves.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// What the server is, for clients that ask for a key; empty for nothing in particular.
    pub key: String,
    /// A channel on which nothing was heard for this long is tested, and is given up after three times as long. 5 s.
    pub keep_alive: Duration,
    /// How long a handshake may take, that of TLS included. 10 s.
    pub handshake_timeout: Duration,
    /// What one session may have on the wire and in queues.
    pub limits: WireLimits,
    /// How many bytes of requests and replies the sessions may have queued together, beside eight chunks for each. What
    /// finds no room fails with [`LimitExceeded`](ErrorKind::LimitExceeded), and the session goes on. No limit.
    pub max_total_queued: u64,
    /// How many sessions there may be at one time. 4,096.
    pub max_sessions: usize,
    /// How many sessions one client may have at one time: one that has proven who it is wherever it comes from, and others
    /// by the address of their machine, whatever processes they are. 1,024.
    pub max_sessions_per_peer: usize,
    /// How many connections may be in their handshake at one time. For one more, the oldest one of the machine that has most
    /// of them is closed, so that nobody is kept out by those who never finish. 1,024.
    pub max_handshakes: usize,
    /// How long a session may last, from the end of its handshake. It ends with
    /// [`SessionTimeout`](ErrorKind::SessionTimeout) then, whatever it is doing. No limit.
    pub session_duration: Option<Duration>,
    /// How long a session may go without a request. It ends with [`SessionTimeout`](ErrorKind::SessionTimeout) then. No
    /// limit.
    pub idle_timeout: Option<Duration>,
    /// How long a client may take no byte of what it is being sent. Its connection is closed then: nothing can be said to
    /// it. 60 s.
    pub write_timeout: Duration,
    /// The slowest that a client may send a message that it has begun, or take what it is being sent, in bytes per second,
    /// over each `write_timeout`. Its connection is closed then. 0 for no limit. 64.
    pub min_rate: u64,
    /// Whom the server serves; [`Server::set_access`](crate::Server::set_access) changes it later. Anybody.
    pub access: Access,
    /// The addresses that clients may be forwarded to, as patterns: `tcp://10.0.0.*:9090`, `tls://*.lab`, `unix:/run/*`. `*`
    /// stands for any text within the scheme, the host or the port; without a port it is for all of them. `*` alone is for
    /// all addresses with a host, and not for programs, paths and this process. None.
    pub allow_forward: Vec<String>,
    /// What may pass through the sessions that it forwards to. Everything.
    pub forward_policy: Option<Arc<dyn RequestPolicy>>,
    /// The names of hops that are believed when they say whom they forward for: what tokens or certificates prove. None.
    pub trust_proxy: Vec<String>,
    /// Whether this is a relay: servers dial in and wait ([`Server::park`](crate::Server::park)), and clients are brought
    /// together with them by key. A relay opens no sessions itself; the factory is not asked. No.
    pub relay: bool,
    /// How the server opens the sessions that it forwards to, and reaches relays: its own tokens, and whom it trusts. Without
    /// either.
    pub onward: Dial,
    /// The transports by which the server listens, forwards and reaches relays. Default: those that this crate was compiled
    /// with.
    pub transports: Transports,
    /// Hears of what the sessions' factory does not see. Nobody.
    pub observer: Option<Arc<dyn ServeObserver>>,
}

/// Hears of what happens at a server. Called on tasks that serve others: it must not block.
pub trait ServeObserver: Send + Sync + fmt::Debug {
    /// A client got no session.
    fn refused(&self, reason: ErrorKind);

    /// An address is not listened on any more, although the server was not told to stop. Nothing.
    fn stopped_listening(&self, address: &Address) {
        let _ = address;
    }
}

impl ServeOptions {
    /// Returns the same limits for connections that carry several sessions.
    pub(super) fn connection_limits(&self) -> ConnectionLimits {
        ConnectionLimits {
            keep_alive: self.keep_alive,
            handshake: self.handshake_timeout,
            max_handshakes: self.max_handshakes,
            // One that is proven has sessions, or had one a moment ago.
            max_connections: self.max_sessions.saturating_add(self.max_handshakes),
            max_channels: u32::try_from(self.max_sessions_per_peer).unwrap_or(u32::MAX),
        }
    }
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            key: String::new(),
            keep_alive: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(10),
            limits: WireLimits::default(),
            max_total_queued: u64::MAX,
            max_sessions: 4096,
            max_sessions_per_peer: 1024,
            max_handshakes: 1024,
            session_duration: None,
            idle_timeout: None,
            write_timeout: Duration::from_secs(60),
            min_rate: 64,
            access: Access::default(),
            allow_forward: Vec::new(),
            forward_policy: None,
            trust_proxy: Vec::new(),
            relay: false,
            onward: Dial::default(),
            transports: Transports::default(),
            observer: None,
        }
    }
}
