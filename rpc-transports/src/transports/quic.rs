//! `quic://` addresses: many channels, each a bidirectional stream, on one QUIC connection.
//!
//! A client keeps its connection to a server while channels use it and for a moment longer, and
//! opens further channels on it. Each connection of a client has a socket of its own. It outlives a
//! change of the client's address. On Linux a client learns that the server's port is closed, where
//! the server's system says so: most often within a second while it waits for an answer, and
//! otherwise by the next ping. A server finds clients that are gone by their silence: one that
//! changes its address leaves a closed port behind as well, and its session goes on.

mod client;
mod client_endpoint;
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only Linux tells of closed ports"))]
mod closed_port;
mod server;
mod settings;
mod stream;
#[cfg(target_os = "linux")]
mod watched_socket;

use crate::address::{Address, AddressError};
use crate::channel::Channel;
use crate::error::TransportError;
use crate::listener::Listener;
use crate::transport::{Bind, BoxFuture, Dial, Properties, Transport};
use crate::transports::tcp;

/// The transport of `quic://` addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quic;

impl Transport for Quic {
    fn schemes(&self) -> &[&str] {
        &["quic"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        Ok(Properties::encrypted(tcp::check_host_and_port(at)?))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(client::dial(to, with))
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(server::bind(at, with))
    }
}
