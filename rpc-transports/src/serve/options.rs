//! Options of a server, the request for a session, and the factory that opens sessions.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rpc_core::proto::KEEP_ALIVE;
use rpc_core::{AccessControl, ErrorKind, OpenFileQuota, RpcError, SharedSession};

use super::access_record::SessionNote;
use super::authorization::Authorizer;
use super::capabilities::CapabilitySessions;
use super::client_connection::ClientConnection;
use super::dialect::Dialects;
use super::further_servers::Onward;
use super::session_process::HandoffOffer;
use super::stall_timeouts::StallLimits;
use crate::address::Address;
use crate::channel::Machine;
use crate::handshake::identity_proofs::Access;
use crate::handshake::peer_identity::PeerIdentity;
use crate::serve::filter::RequestPolicy;
use crate::transport::{ConnectionLimits, Dial, Transports};
use crate::wire_limits::WireLimits;

/// Request of a client for a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct OpenRequest {
    /// Address that the client comes from, as text for people.
    pub peer: String,
    /// Machine that the client is on, as the transport knows it.
    pub machine: Machine,
    /// True if the client's connection can neither be read nor changed on its route, at least as
    /// far as a relay in front of this server.
    pub is_encrypted: bool,
    /// Identity of the client: the one that it has proven, `anonymous` without proof, or the one
    /// that a trusted hop asserts.
    pub identity: String,
    /// The same identity, with the kind of its proof.
    pub peer_identity: PeerIdentity,
    /// Rights of the client, by the server's [`Authorizer`]; `None` for all. A factory gives them
    /// to the session ([`access_control`](rpc_core::LocalSessionBuilder::access_control)).
    pub access: Option<Arc<dyn AccessControl>>,
    /// Key that the client asks for, if any.
    pub key: Option<String>,
    /// Named workspace that the client wants. `None` for a private one.
    pub workspace: Option<String>,
    /// Ticket that a tracker gave the client for this server, if any.
    pub ticket: Option<String>,
    /// Quota of the descriptors that the session may have opened for it, its connections to other
    /// servers included. A factory gives it to the session
    /// ([`open_files`](rpc_core::LocalSessionBuilder::open_files)).
    pub open_files: OpenFileQuota,
    /// Access to other servers on the client's behalf, for functions of the session.
    pub onward: Onward,
    /// Note for the record of the session in the log, which the factory may set.
    pub note: SessionNote,
    /// Connection of the client.
    pub connection: ClientConnection,
    /// Offer of another process that can serve the session over the client's socket.
    pub handoff: HandoffOffer,
}

/// Factory of clients' sessions. Implemented by closures that need not wait, and by a
/// [`Registry`](rpc_core::Registry), which gives each client a session of its own with these
/// functions.
#[async_trait]
pub trait SessionFactory: Send + Sync + 'static {
    /// Opens a session, which ends when the server drops it. This is part of the handshake: the
    /// future is dropped when the time for that is over, or when the client is gone.
    ///
    /// # Errors
    ///
    /// The reason why this client gets no session. It is the answer to its connection attempt.
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError>;
}

#[async_trait]
impl<F: Fn(&OpenRequest) -> Result<SharedSession, RpcError> + Send + Sync + 'static> SessionFactory for F {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        self(request)
    }
}

/// Options of a server.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Key of the server, for clients that ask for one. Empty for none.
    pub key: String,
    /// Interval of silence after which a channel is tested by a ping. The channel is given up after
    /// three such intervals. [Dialects](crate::Dialect) have no such pings. Default 5 s.
    pub keep_alive: Duration,
    /// Longest time for which the task of a session over a bare socket looks for input before its
    /// thread sleeps, such as [`SPIN`](crate::SPIN). It saves the time of waking the thread, and
    /// takes time of a core, also from other tasks of the thread. It adapts: where it does not help
    /// or others want the core it stops. Default: zero, which switches it off.
    pub spin: Duration,
    /// Longest time for a handshake, that of TLS included. Default 10 s.
    pub handshake_timeout: Duration,
    /// Limits on the bytes that one session may have on the wire and in queues.
    pub limits: WireLimits,
    /// Bytes of requests and replies that all sessions may have queued together, beside eight
    /// chunks for each. A request or reply over the limit fails with
    /// [`LimitExceeded`](ErrorKind::LimitExceeded), and its session goes on. Dialects charge what
    /// they hold [by themselves](crate::DialectConnection::queued). Default: no limit.
    pub max_total_queued: u64,
    /// Number of descriptors that may be open for one session at one time, beside its connection:
    /// its files and its connections to other servers. More are an error of that session.
    /// Default 256.
    pub max_open_files: u64,
    /// Number of those for all sessions together. Default: no limit.
    pub max_total_open_files: u64,
    /// Number of sessions that there may be at one time. Default 4,096.
    pub max_sessions: usize,
    /// Number of sessions that one client may have at one time. Clients with a proven identity are
    /// counted by that, from all addresses; others are counted by the address of their machine, for
    /// all its processes. Default 1,024.
    pub max_sessions_per_peer: usize,
    /// Number of connections that may be in their handshake at one time. For one more, the oldest
    /// one of the machine with most of them is closed, so that clients that never finish keep no
    /// others out. Default 1,024.
    pub max_handshakes: usize,
    /// Longest duration of a session, from the end of its handshake. The session then ends with
    /// [`SessionTimeout`](ErrorKind::SessionTimeout), even while requests run. Default: no limit.
    pub session_duration: Option<Duration>,
    /// Longest time that a session may go without a request. The session then ends with
    /// [`SessionTimeout`](ErrorKind::SessionTimeout). Default: no limit.
    pub idle_timeout: Option<Duration>,
    /// Longest time that a client may take no byte of pending output. Its connection is then closed
    /// without a message, which the client would not take either. Default 60 s.
    pub write_timeout: Duration,
    /// Lowest rate, in bytes per second over each `write_timeout`, at which a client may send a
    /// message that it has begun, or take pending output. Below it the connection is closed. In a
    /// [dialect](crate::Dialect) a message has begun if the dialect
    /// [says so](crate::DialectActivity::receiving). 0 for no limit. Default 64.
    pub min_rate: u64,
    /// Clients that the server serves. [`Server::set_access`](crate::Server::set_access) changes it
    /// later. Default: all clients.
    pub access: Access,
    /// Addresses that clients may be forwarded to, as patterns: `tcp://10.0.0.*:9090`,
    /// `tls://*.lab`, `unix:/run/*`. `*` stands for any text within the scheme, the host or the
    /// port. A pattern without a port allows all ports. `*` alone allows all addresses with a host,
    /// and no programs, paths or sessions in this process. Default: none.
    pub allow_forward: Vec<String>,
    /// Patterns, as those of [`allow_forward`](Self::allow_forward), of addresses to which clients
    /// get [tunnels](crate::Connector::open_tunnel) but no sessions: services that speak protocols
    /// of their own. Default: none.
    pub allow_port: Vec<String>,
    /// Policy on requests that are forwarded to other servers. Default: all are allowed.
    pub forward_policy: Option<Arc<dyn RequestPolicy>>,
    /// Hops whose assertion of their client's identity is trusted, by the text of their
    /// [identity](PeerIdentity), such as `token:gateway`, or by the name that they prove by a token
    /// or a certificate. Default: none.
    pub trust_proxy: Vec<String>,
    /// Source of the clients' rights, within those that the other options give. Default: none, and
    /// clients have all rights.
    pub authorizer: Option<Arc<dyn Authorizer>>,
    /// Keeper of the capabilities that sessions of the server make for other peers. A client that
    /// proves one gets the session that the keeper opens, whatever [`access`](Self::access) says,
    /// and nothing else. Default: none, and the method is not offered.
    pub capabilities: Option<Arc<dyn CapabilitySessions>>,
    /// True for a relay: servers dial in and wait ([`Server::park`](crate::Server::park)), and
    /// clients are connected to them by key. A relay opens no sessions itself, and does not call
    /// the factory. Default: false.
    pub relay: bool,
    /// Settings by which the server dials further servers and relays: its own tokens, and the
    /// servers that it trusts. [`may_prompt`](Dial::may_prompt) counts as false. Default: none.
    pub onward: Dial,
    /// Transports by which the server listens, forwards and reaches relays. Default: those that
    /// this crate was compiled with.
    pub transports: Transports,
    /// Other protocols in which clients may speak to the server. Default: none.
    pub dialects: Dialects,
    /// Observer of events that the factory of sessions does not see. Default: none.
    pub observer: Option<Arc<dyn ServeObserver>>,
}

/// Observer of a server. Called on tasks that serve clients, and must not block.
pub trait ServeObserver: Send + Sync + fmt::Debug {
    /// Called when a client got no session.
    fn refused(&self, reason: ErrorKind);

    /// Called when the server has stopped listening on an address without being told to. Does
    /// nothing by default.
    fn stopped_listening(&self, address: &Address) {
        let _ = address;
    }
}

impl ServeOptions {
    /// Returns the limits on the time that a session may take.
    pub(super) fn stall_limits(&self) -> StallLimits {
        StallLimits {
            session_duration: self.session_duration,
            idle_timeout: self.idle_timeout,
            write_timeout: self.write_timeout,
            min_rate: self.min_rate,
        }
    }

    /// Returns the same limits for connections that carry several sessions.
    pub(super) fn connection_limits(&self) -> ConnectionLimits {
        ConnectionLimits {
            keep_alive: self.keep_alive,
            handshake: self.handshake_timeout,
            max_handshakes: self.max_handshakes,
            // A proven connection has sessions, or had one a moment ago.
            max_connections: self.max_sessions.saturating_add(self.max_handshakes),
            max_channels: u32::try_from(self.max_sessions_per_peer).unwrap_or(u32::MAX),
        }
    }
}

impl Default for ServeOptions {
    fn default() -> Self {
        Self {
            key: String::new(),
            keep_alive: KEEP_ALIVE,
            spin: Duration::ZERO,
            handshake_timeout: Duration::from_secs(10),
            limits: WireLimits::default(),
            max_total_queued: u64::MAX,
            max_open_files: 256,
            max_total_open_files: u64::MAX,
            max_sessions: 4096,
            max_sessions_per_peer: 1024,
            max_handshakes: 1024,
            session_duration: None,
            idle_timeout: None,
            write_timeout: Duration::from_secs(60),
            min_rate: 64,
            access: Access::default(),
            allow_forward: Vec::new(),
            allow_port: Vec::new(),
            forward_policy: None,
            trust_proxy: Vec::new(),
            authorizer: None,
            capabilities: None,
            relay: false,
            onward: Dial::default(),
            transports: Transports::default(),
            dialects: Dialects::default(),
            observer: None,
        }
    }
}
