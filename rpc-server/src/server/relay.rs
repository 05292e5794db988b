//! A relay as a server: what `rpc-server relay` runs.

use rpc_transports::Transports;

use crate::config::{ConfigError, Origin, RelayConfig, ServeError};
use crate::server::{RpcServer, Running, StopReason};

/// A relay that has not been started.
#[derive(Debug)]
pub struct Relay {
    server: RpcServer,
}

impl Relay {
    /// Returns a relay with these settings.
    ///
    /// # Errors
    ///
    /// Settings contradict each other.
    pub fn new(config: &RelayConfig) -> Result<Self, ServeError> {
        Self::with_transports(config, crate::transports())
    }

    /// As [`new`](Self::new), with these transports.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new).
    pub fn with_transports(config: &RelayConfig, transports: Transports) -> Result<Self, ServeError> {
        config.check_with(&transports)?;
        let server = RpcServer::default().config(config.serve_config()).transports(transports).relay();
        #[cfg(feature = "tvm")]
        let server = server.tvm_proxy(config.tvm_proxy());
        Ok(Self { server })
    }

    /// Sets the reader of the origins that the configuration allows, for each reload.
    #[must_use]
    pub(crate) fn read_origins(
        self,
        read: impl Fn() -> Result<Vec<Origin>, ConfigError> + Send + Sync + 'static,
    ) -> Self {
        Self { server: self.server.read_origins(read) }
    }

    /// Starts the relay. Needs a tokio runtime with I/O and time.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::start`].
    pub async fn start(self) -> Result<Running, ServeError> {
        self.server.start().await
    }

    /// Runs the relay until a signal, as [`RpcServer::run_until_signal`]. Blocks, on a runtime of
    /// its own.
    ///
    /// # Errors
    ///
    /// As [`RpcServer::run_blocking`].
    pub fn run_blocking(self) -> Result<StopReason, ServeError> {
        self.server.run_blocking()
    }
}
