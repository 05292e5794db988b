//! TVM's proxy, as a dialect of a relay (`relay --tvm`): servers and clients of TVM dial it, and
//! are paired by their keys.
//!
//! ```text
//! bytes ──► rpc_tvm::wire::ProxyWire ──► connection ──► pairing ──► splice
//!           what the peer says           when           with whom   bytes pass unread
//! ```
//!
//! The same addresses speak WebSocket, for servers in browsers and their like. With a tracker of
//! TVM each server that waits is registered there, with a match key of its own.
//!
//! `parking` is the other side: a server of this project that waits at a proxy
//! (`serve --tvm-proxy`).

mod connection;
mod pairing;
pub(crate) mod parking;

use std::sync::Arc;
use std::time::Duration;

use rpc_core::RpcError;
use rpc_transports::{Address, AllowedOrigins, BoxFuture, Dialect, DialectConnection, Recognition};
use rpc_tvm::wire::{HelloAnswer, WIRE_MAGIC};

use self::pairing::Pairing;
use super::magic::recognize;
use super::tracker::TvmAdvertisement;

/// Settings of a proxy.
#[derive(Clone, Debug)]
pub(crate) struct TvmProxyTerms {
    /// Time that a client waits for a server.
    pub(crate) client_timeout: Duration,
    /// Time that a server waits for a client.
    pub(crate) server_timeout: Duration,
    /// Number of peers of one role that may wait under one key.
    pub(crate) max_waiting_per_key: usize,
    /// Tracker of TVM at which servers that wait are registered. Clients get a match key there.
    pub(crate) tracker: Option<Address>,
}

/// A proxy, as all of its connections see it. Cheap to clone; clones are the same proxy.
#[derive(Clone, Debug)]
pub(crate) struct TvmProxy(Arc<ProxyState>);

#[derive(Debug)]
struct ProxyState {
    terms: TvmProxyTerms,
    /// Web pages that are served by WebSocket.
    #[cfg_attr(not(feature = "websocket"), allow(dead_code, reason = "pages come by WebSocket alone"))]
    origins: AllowedOrigins,
    pairing: Pairing,
}

/// Protocol under that of TVM by which a peer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carrier {
    /// The bytes of the connection are those of TVM's protocol.
    Bare,
    /// The connection begins with an HTTP request for a WebSocket.
    #[cfg(feature = "websocket")]
    WebSocket,
}

/// The dialect of TVM's servers and clients at a proxy.
#[derive(Debug)]
struct TvmProxyDialect {
    proxy: TvmProxy,
    carrier: Carrier,
}

impl TvmProxy {
    /// Creates a proxy that serves the web pages of `origins`.
    pub(crate) fn new(terms: TvmProxyTerms, origins: AllowedOrigins) -> Self {
        let pairing = Pairing::new(terms.max_waiting_per_key, terms.tracker.clone());
        Self(Arc::new(ProxyState { terms, origins, pairing }))
    }

    /// Sets the address that the tracker gives to clients. Servers that came before are registered
    /// then.
    pub(crate) fn advertise(&self, advertised: TvmAdvertisement) {
        self.0.pairing.advertise(advertised);
    }

    /// Returns `dialects` with those of the proxy.
    pub(crate) fn add_to(&self, dialects: rpc_transports::Dialects) -> rpc_transports::Dialects {
        let dialects = dialects.with(TvmProxyDialect { proxy: self.clone(), carrier: Carrier::Bare });
        #[cfg(feature = "websocket")]
        let dialects = dialects.with(TvmProxyDialect { proxy: self.clone(), carrier: Carrier::WebSocket });
        dialects
    }
}

impl Dialect for TvmProxyDialect {
    fn name(&self) -> &str {
        match self.carrier {
            Carrier::Bare => "tvm",
            #[cfg(feature = "websocket")]
            Carrier::WebSocket => "tvm over websocket",
        }
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        match self.carrier {
            Carrier::Bare => recognize(first, WIRE_MAGIC),
            #[cfg(feature = "websocket")]
            Carrier::WebSocket => super::magic::recognize_bytes(first, b"GET "),
        }
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(connection::serve(&self.proxy.0, self.carrier, connection))
    }

    fn refusal(&self, _: &RpcError) -> Vec<u8> {
        match self.carrier {
            Carrier::Bare => HelloAnswer::Mismatch.encode(),
            #[cfg(feature = "websocket")]
            Carrier::WebSocket => Vec::new(),
        }
    }
}
