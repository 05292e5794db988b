//! Sessions with other processes: dialling, listening, forwarding, and the transports below them.
//!
//! A *channel* is one ordered, reliable byte pipe between two peers. An [`Address`] says where a
//! peer is; a [`Transport`] dials addresses of its schemes and listens on them; [`Transports`] is
//! the registry of those that a program uses. A [`Connector`] makes sessions, and a [`Server`]
//! serves them.
//!
//! Read [`address`] first, then [`Transport`]; each transport is a file of its own. The Cargo
//! features `tcp`, `tls`, `quic`, `unix` and `exec` switch them. An address still parses without
//! its feature, and dialling it names the missing feature. This crate is for Unix systems.

#![deny(unsafe_code)]
// Tests may unwrap, because a panic is how a test fails.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod address;
mod backoff;
mod channel;
mod channel_io;
mod client;
mod clock;
mod connect;
mod error;
mod handshake;
mod hang_up;
mod listener;
// Unsafe code maps and unmaps memory files.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod memory_file;
mod message_family;
pub mod program;
pub mod retry;
mod runtime;
pub mod self_start;
mod serve;
mod session_io;
mod shared_memory;
// Unsafe code reads and writes a mapping that another process may change.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
mod shared_window;
mod spin;
mod splice;
// Unsafe code asks the kernel about a socket.
#[allow(unsafe_code)]
mod tcp_silence;
pub mod tracker;
mod transport;
pub mod transports;
mod wire_limits;

pub use address::{Address, AddressError, ToAddress, glob};
pub use backoff::Backoff;
pub use channel::{BlockingChannel, BlockingIo, Channel, ChannelGuard, ChannelIo, ExplainEnd, Machine, Peer};
pub use client::{BlockingClientSession, BlockingSession, Bulk, ClientProtocol, ClientSession};
pub use connect::{ConnectError, Connector, OpenedBy, SessionOpener, Tunnel};
pub use error::TransportError;
pub use handshake::capability::{Capability, CapabilityId, CapabilityTable};
#[cfg(feature = "tls")]
pub use handshake::certificates;
#[cfg(feature = "tls")]
pub use handshake::certificates::{Certificate, CertificateError, ClientCertificates, ClientTls, KEY_URI, ServerTls};
pub use handshake::files::CredentialFileError;
pub use handshake::identity_proofs as identity;
pub use handshake::identity_proofs::{Access, Security, Token, TokenError, Tokens};
pub use handshake::peer_identity::{IdentityError, PeerIdentity};
pub use listener::{Accept, Listener};
#[cfg(target_os = "linux")]
pub use memory_file::MemoryFile;
pub use message_family::MessageFamily;
pub use retry::{RetryBudget, RetryPolicy, RetrySession};
// For transports of other crates, which log what peers do.
pub use rpc_core::log_limited;
pub use serve::filter::{FilteredSession, FunctionPatterns, RequestPolicy};
pub use serve::received::ReceivedSession;
pub use serve::session_process::{
    ConnectionState, EndReport, HandoffOffer, PassedConnection, PassedProtocol, SessionProcess,
};
pub use serve::{
    Authorization, Authorizer, CapabilityClient, CapabilitySessions, ClientConnection, Onward, OpenRequest,
    ParkOptions, ServeObserver, ServeOptions, Server, SessionFactory, SessionNote, TokioSpawner,
};
pub use serve::{
    Dialect, DialectActivity, DialectConnection, DialectHandoff, DialectRequest, Dialects, FurtherServers,
    MAX_FIRST_BYTES, Receiving, Recognition, RelayedConnection, ServerNotices, Working,
};
pub use spin::SPIN;
pub use splice::TUNNEL_LINGER;
pub use transport::{
    AllowedOrigins, Bind, BoxFuture, ConnectionLimits, Dial, Properties, Reach, Transport, Transports,
};
#[cfg(feature = "exec")]
pub use transports::exec;
pub use transports::memory;
#[cfg(feature = "exec")]
pub use transports::ssh;
#[cfg(feature = "unix")]
pub use transports::unix;
pub use wire_limits::WireLimits;
