//! A tracker as a server: what `rpc-server tracker` runs.

use std::sync::Arc;

use rpc_core::Registry;

use super::service::Tracker;
use crate::config::{ServeError, TrackerConfig};
use crate::server::{RpcServer, Running, StopReason};

/// A tracker that serves. Dropping it stops it now.
#[derive(Debug)]
pub struct RunningTracker {
    /// What serves it: addresses, sessions, and the end.
    pub server: Running,
    /// What it knows.
    pub tracker: Arc<Tracker>,
}

impl Tracker {
    /// Starts a tracker and serves it. Needs a tokio runtime with I/O and time.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::start`].
    pub async fn start(config: &TrackerConfig) -> Result<RunningTracker, ServeError> {
        let (tracker, server) = build(config)?;
        Ok(RunningTracker { server: server.start().await?, tracker })
    }

    /// As [`start`](Self::start), until a signal says to stop, as [`RpcServer::run_until_signal`]. Blocks, on a runtime of its own.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::run_blocking`].
    pub fn run_blocking(config: &TrackerConfig) -> Result<StopReason, ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rpc-tracker").build();
        let runtime = runtime.map_err(ServeError::Runtime)?;
        let reason = runtime.block_on(async {
            let (_tracker, server) = build(config)?;
            server.run_until_signal().await
        });
        runtime.shutdown_background();
        reason
    }
}

fn build(config: &TrackerConfig) -> Result<(Arc<Tracker>, RpcServer), ServeError> {
    config.check()?;
    let tracker = Tracker::new(config.options()?);
    let registry = Registry::new();
    tracker.register(&registry);
    Ok((tracker, RpcServer::builder().registry(registry).config(config.serve_config()).build()))
}
