//! A node of a Disco session as a program: what `rpc-server worker` runs.

use disco::NodePlace;
use rpc_transports::{Address, Server};

use crate::config::{ServeError, WorkerConfig};
use crate::server::{RpcServer, StopReason};

/// A controller to be joined.
#[derive(Debug)]
pub(crate) struct Join {
    controller: Address,
    place: Option<NodePlace>,
    timeout: std::time::Duration,
}

impl Join {
    /// Joins the controller with sessions of `server`, until its session ends.
    pub(crate) async fn run(&self, server: &Server) -> Result<(), ServeError> {
        let joined = disco::join_with(server, &self.controller, self.place, self.timeout).await;
        joined.map_err(|source| ServeError::Controller { address: self.controller.clone(), source })
    }
}

/// Joins a controller as its settings say, and serves until the controller's session has ended, or a signal says to stop. Blocks, on a
/// runtime of its own.
///
/// # Errors
///
/// As [`RpcServer::run_blocking`]; and [`ServeError::Controller`].
pub fn run_blocking(config: WorkerConfig) -> Result<StopReason, ServeError> {
    let WorkerConfig { controller, place, join_timeout, serve } = config;
    let mut server = RpcServer::builder().config(serve).build();
    server.join(Join { controller, place, timeout: join_timeout.0 });
    server.run_blocking()
}
