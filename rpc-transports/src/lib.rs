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
mod blocking;
#[cfg(feature = "tls")]
pub mod certificates;
mod channel_io;
#[cfg(feature = "exec")]
// Telling the kernel, between fork and exec, that a child must die with its parent.
#[allow(unsafe_code)]
pub mod child;
mod client;
mod connect;
mod dispatch;
mod filter;
mod hands;
mod handshakes;
pub mod identity;
pub mod memory;
mod park;
mod pattern;
mod proxy;
#[cfg(feature = "quic")]
mod quic;
mod runtime;
mod serve;
mod splice;
#[cfg(feature = "tcp")]
mod tcp;
#[cfg(feature = "tls")]
mod tls;
pub mod tracker;
pub mod transport;
#[cfg(feature = "unix")]
mod unix;

pub use address::{Address, AddressError, AddressKind};
pub use backoff::Backoff;
pub use blocking::BlockingClientSession;
#[cfg(feature = "tls")]
pub use certificates::{Certificate, CertificateError, ClientCertificates, ClientTls, KEY_URI, ServerTls};
pub use client::ClientSession;
pub use connect::{ConnectError, Connector};
pub use dispatch::{bind, dial, dial_blocking};
pub use filter::{FilteredSession, FunctionPatterns, RequestPolicy};
pub use identity::{Access, Security, Token, TokenError, Tokens};
pub use park::ParkOptions;
pub use pattern::matches_pattern;
pub use proxy::ProxySession;
pub use serve::{Onward, OpenRequest, ServeObserver, ServeOptions, Server, SessionFactory, TokioSpawner, WireLimits};
pub use transport::{
    BlockingChannel, BlockingIo, Channel, ChannelGuard, ChannelIo, DialOptions, ListenOptions, Listener, TransportError,
};
