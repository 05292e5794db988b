//! How sessions meet: the transports that yield channels, and dialling and listening on them.
//!
//! A *channel* is one ordered, reliable byte pipe between two peers. An [`Address`] says where a peer
//! is, [`dial`] opens a channel to it, [`bind`] gives a [`Listener`] on which channels arrive.
//! [`dial_blocking`] does without an async runtime.
//!
//! ```
//! use rpc_transports::{Address, DialOptions, ListenOptions, bind, dial};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let address: Address = "memory:example".parse()?;
//! let mut listener = bind(&address, &ListenOptions::default()).await?;
//! let mut near = dial(&address, &DialOptions::default()).await?;
//! let mut far = listener.accept().await?;
//!
//! near.io_mut().write_all(b"hello").await?;
//! let mut greeting = [0; 5];
//! far.io_mut().read_exact(&mut greeting).await?;
//! assert_eq!(&greeting, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! Read first [`address`], then [`transport`]; each transport is a file of its own. Cargo features
//! `tcp`, `tls`, `quic`, `unix` and `exec` switch them; without its feature an address still parses, and dialling it
//! says what is missing. This crate is for Unix systems.

#![deny(unsafe_code)]
// A test that panics has failed, which is what is wanted of it.
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod address;
mod backoff;
pub mod channel;
mod channel_io;
mod client;
mod connect;
mod error;
mod handshake;
mod limits;
mod listener;
mod runtime;
pub mod self_start;
mod serve;
pub mod tracker;
pub mod transport;
mod transports;

pub use address::{Address, AddressError, AddressKind, matches_pattern};
pub use backoff::Backoff;
pub use channel::{BlockingChannel, BlockingIo, Channel, ChannelGuard, ChannelIo};
pub use client::{BlockingClientSession, ClientSession};
pub use connect::{ConnectError, Connector};
pub use error::TransportError;
#[cfg(feature = "tls")]
pub use handshake::certificates;
#[cfg(feature = "tls")]
pub use handshake::certificates::{Certificate, CertificateError, ClientCertificates, ClientTls, KEY_URI, ServerTls};
pub use handshake::identity;
pub use handshake::identity::{Access, Security, Token, TokenError, Tokens};
pub use limits::WireLimits;
pub use listener::Listener;
pub use serve::filter::{FilteredSession, FunctionPatterns, RequestPolicy};
pub use serve::{Onward, OpenRequest, ParkOptions, ServeObserver, ServeOptions, Server, SessionFactory, TokioSpawner};
pub use transport::{DialOptions, ListenOptions, bind, dial, dial_blocking};
#[cfg(feature = "exec")]
pub use transports::exec;
pub use transports::memory;
