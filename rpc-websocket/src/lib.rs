//! The transport of `ws://` and `wss://` addresses: sessions in the binary messages of a WebSocket.
//!
//! It reaches servers where only HTTP passes: behind reverse proxies, ingress controllers and
//! corporate proxies (by `CONNECT`). It is built on the public API of `rpc-transports` alone, and
//! is registered like a transport of your own:
//!
//! ```
//! use std::sync::Arc;
//!
//! use rpc_core::Registry;
//! use rpc_transports::{Connector, ServeOptions, Server, Transports};
//! use rpc_websocket::WebSocket;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let transports = Transports::default().with(WebSocket::new());
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! let options = ServeOptions { transports: transports.clone(), ..ServeOptions::default() };
//! let server = Server::new(Arc::new(registry), options);
//! let address = server.listen(&"ws://127.0.0.1:0".parse()?, &Default::default()).await?;
//!
//! let session = Connector::new().transports(transports).connect(&address.to_string()).await?;
//! let sum: i64 = session.get_function("add").await?.call((1, 2)).await?;
//! assert_eq!(sum, 3);
//! # Ok(())
//! # }
//! ```
//!
//! # Addresses
//!
//! `ws://HOST[:PORT][/KEY][?path=/P]` and the same with `wss://`. The port is 80, or 443 for `wss`,
//! unless it is given. `path` is the path of the HTTP request, `/` by default, for reverse proxies
//! that choose a server by it; a server takes any path.
//!
//! # Security
//!
//! `wss://` is TLS 1.3 with the same trust and the same tokens as `tls://`. A proof of identity by
//! a token is bound to the TLS connection. Behind a proxy that ends TLS there are two connections,
//! so the proof could not hold, and dialling fails with an error that says so; it is never made
//! without the binding. Web pages can open WebSockets to the loopback interface of whoever views
//! them: a request with an `Origin` is refused unless [`WebSocket::allow_origins`], or
//! [`Bind::origins`] of the listener, lists it.

#![forbid(unsafe_code)]
// A test that panics has failed, as it should.
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod dial;
mod listen;
mod proxy;
mod stream;

use rpc_transports::{
    Address, AddressError, AllowedOrigins, Bind, BoxFuture, Channel, Dial, Listener, Properties, Reach, Transport,
    TransportError,
};

pub use self::listen::accept_upgrade;
pub use self::proxy::Proxies;

/// The protocol that TLS is asked for (ALPN): WebSockets begin as a request of HTTP/1.1.
const ALPN: &[u8] = b"http/1.1";

/// The transport of `ws://` and `wss://` addresses.
#[derive(Clone, Debug, Default)]
pub struct WebSocket {
    /// Origins of the web pages that all listeners serve.
    origins: AllowedOrigins,
    proxies: Proxies,
}

impl WebSocket {
    /// A transport that serves no web page, and that dials through the proxies that the environment
    /// names.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Serves the web pages of these origins, such as `https://console.example`, besides those of
    /// [`Bind::origins`] and clients that are no browsers and send no origin. Default: none.
    /// Origins are compared without regard to case.
    #[must_use]
    pub fn allow_origins<I>(self, origins: I) -> Self
    where
        I: IntoIterator,
        I::Item: Into<String>,
    {
        Self { origins: AllowedOrigins::new(origins), ..self }
    }

    /// Dials through these proxies. Default: [`Proxies::from_environment`].
    #[must_use]
    pub fn proxies(self, proxies: Proxies) -> Self {
        Self { proxies, ..self }
    }
}

impl Transport for WebSocket {
    fn schemes(&self) -> &[&str] {
        &["ws", "wss"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let problem = match () {
            () if at.host().is_none() => "two slashes and a host are missing",
            () if at.user().is_some() => "there are no users",
            () if at.parameters().any(|name| name != PATH) => "the only parameter is path",
            () if at.parameter(PATH).is_some_and(|path| !is_path(&path)) => {
                "the path begins with a slash and consists of visible ASCII characters"
            }
            () => {
                let reach = if at.has_loopback_host() { Reach::Machine } else { Reach::Network };
                return Ok(if is_encrypted(at) { Properties::encrypted(reach) } else { Properties::plain(reach) });
            }
        };
        let example = format!("write for example {}://board.lan:9090/KEY", at.scheme());
        Err(AddressError::invalid(at, format!("{problem}; {example}")))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial::dial(&self.proxies, to, with))
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        over_tcp(to)
    }

    fn dial_over<'a>(
        &'a self,
        to: &'a Address,
        over: Channel,
        with: &'a Dial,
    ) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial::upgrade(to, over, with, with.limit()))
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(listen::bind(self.origins.clone(), at, with))
    }
}

/// Name of the address parameter that has the path of the HTTP request.
const PATH: &str = "path";

fn is_path(path: &str) -> bool {
    path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'#')
}

fn is_encrypted(address: &Address) -> bool {
    address.scheme() == "wss"
}

/// Returns the port of an address, or the one that its scheme implies.
fn port(address: &Address) -> u16 {
    address.port().unwrap_or(if is_encrypted(address) { 443 } else { 80 })
}

/// Returns the `tcp://` address of the same host and port.
fn over_tcp(address: &Address) -> Option<Address> {
    Address::tcp(address.host()?, port(address)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str) -> Result<Properties, AddressError> {
        WebSocket::new().check(&text.parse().unwrap())
    }

    #[test]
    fn addresses_have_a_host_a_key_and_a_path() {
        for (text, properties) in [
            ("ws://127.0.0.1:9090", Properties::plain(Reach::Machine)),
            ("ws://[::1]:9090/board-7", Properties::plain(Reach::Machine)),
            ("ws://board.lan/board-7?path=/rpc", Properties::plain(Reach::Network)),
            ("wss://board.lan", Properties::encrypted(Reach::Network)),
            ("wss://localhost:443/key", Properties::encrypted(Reach::Machine)),
        ] {
            assert_eq!(check(text).unwrap(), properties, "{text}");
        }
        for text in ["ws:board", "ws://me@board.lan", "ws://board.lan?paht=/x", "ws://board.lan?path=x"] {
            assert!(check(text).is_err(), "{text}");
        }
        assert!(!is_path("/a b") && !is_path("/a\r\nHost: b") && !is_path("/a#b") && is_path("/a/b?c=d"));
    }

    #[test]
    fn the_scheme_implies_the_port() {
        let over = |text: &str| over_tcp(&text.parse().unwrap()).unwrap().to_string();
        assert_eq!(over("ws://board.lan/key"), "tcp://board.lan:80");
        assert_eq!(over("wss://[::1]"), "tcp://[::1]:443");
        assert_eq!(over("wss://board.lan:9090/key"), "tcp://board.lan:9090");
    }
}
