//! TVM's own RPC protocol, spoken by a server beside the native one (`--tvm`): clients of `tvm.rpc`
//! get a session like any other client, with the server's limits, quotas, metrics and isolation.
//!
//! ```text
//! bytes ──► rpc_tvm::wire::ServerWire ──► connection ──► requests, copies ──► session ──► Session
//!           what the client asks for      when           as operations        handles     any kind
//! ```
//!
//! One request is served after the other, on the default lane, and answered in that order, as the
//! protocol demands. Bytes behind a request are read ahead up to a small bound, so that the end of
//! a client is noticed while a function runs.
//!
//! A session that has a process of its own is served by that once its first request has come: the
//! server hands the client's connection to it there.

mod args;
mod chain;
pub(crate) mod client;
mod connection;
mod copies;
mod error_text;
mod handoff;
mod link;
mod magic;
mod measurements;
mod requests;
mod server_function;
mod server_function_calls;
mod session;
mod time_evaluator;

pub(crate) mod proxy;
pub(crate) mod self_test;
pub(crate) mod tracker;

use std::sync::Arc;

use rpc_core::RpcError;
use rpc_transports::{BoxFuture, Dialect, DialectConnection, Recognition};
use rpc_tvm::wire::{HelloAnswer, WIRE_MAGIC, exception};

use self::connection::Terms;
use self::error_text::error_text;
use self::magic::recognize;
use self::tracker::MatchKeys;
use crate::config::ServeConfig;

/// The dialect of TVM's clients.
#[derive(Clone, Debug)]
pub(crate) struct TvmDialect(Terms);

impl TvmDialect {
    pub(crate) fn new(config: &ServeConfig, match_keys: Option<Arc<MatchKeys>>) -> Self {
        Self(Terms {
            key: config.key.clone().unwrap_or_default(),
            takes_tickets: !config.tracker.is_empty(),
            allow_direct: match_keys.is_none() || config.allow_direct,
            match_keys,
            through_proxy: false,
            max_handles: config.max_handles,
        })
    }

    /// Creates the dialect of a session process, which goes on with connections of any kind of
    /// client.
    pub(crate) fn resuming(config: &ServeConfig) -> Self {
        Self::new(config, None)
    }

    /// Creates the dialect of clients that come through a proxy at which the server waits.
    pub(crate) fn through_proxy(config: &ServeConfig) -> Self {
        let Self(terms) = Self::new(config, None);
        Self(Terms { takes_tickets: false, through_proxy: true, ..terms })
    }
}

impl Dialect for TvmDialect {
    fn name(&self) -> &str {
        "tvm"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        recognize(first, WIRE_MAGIC)
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(connection::serve(&self.0, connection))
    }

    fn resume<'a>(
        &'a self,
        connection: &'a mut DialectConnection,
        state: &'a [u8],
    ) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(connection::resume(&self.0, connection, state))
    }

    fn last_message(&self, reason: &RpcError) -> Vec<u8> {
        exception(&error_text(reason))
    }

    fn refusal(&self, _: &RpcError) -> Vec<u8> {
        HelloAnswer::Mismatch.encode()
    }
}
