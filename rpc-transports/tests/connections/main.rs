//! Tests of servers and clients over every transport: one binary, since each one links for seconds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

#[cfg(feature = "quic")]
mod chains;
mod custom_opener;
#[cfg(feature = "tcp")]
mod custom_protocol;
mod custom_transport;
#[cfg(feature = "quic")]
mod dialect;
#[cfg(all(target_os = "linux", feature = "tcp"))]
mod handoff;
mod limits;
mod pipes;
#[cfg(feature = "quic")]
mod relay;
mod retry;
#[cfg(feature = "quic")]
mod security;
#[cfg(feature = "tcp")]
mod service_tunnel;
#[cfg(all(feature = "tcp", feature = "unix"))]
mod session;
#[cfg(target_os = "linux")]
mod shared_memory;
#[cfg(feature = "tcp")]
mod trace;
