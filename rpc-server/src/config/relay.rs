//! Settings of a relay: `rpc-server relay`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::proto::KEEP_ALIVE;
use rpc_transports::Transports;
use serde::{Deserialize, Serialize};

use super::listen_address::{RELAY_PORT, check_addresses, fill_ports, loopback};
use super::units::seconds;
use super::{ByteSize, ConfigError, ListenAddress, ServeConfig, Span};
use crate::file_limit;
use crate::pki::trust::ServerTrust;

listener_settings! {
    RelaySettings => RelayConfig, "RPC_RELAY", "a relay";
    settings {
        /// Address to listen on, for servers and clients, such as tls://0.0.0.0:9290,
        /// quic://gateway.lan:9290 or tcp://127.0.0.1:9290; may be repeated, or given as a list
        /// with commas. Default: tcp://127.0.0.1:9290
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_RELAY_LISTEN";
        /// Maximum number of waiting servers and served clients together; more are refused.
        /// Default: 16384, or less if this process may open fewer than 22000 files
        max_sessions: usize = file_limit::share(6, 16384) as usize, "RPC_RELAY_MAX_SESSIONS";
        /// Maximum number of them for one peer, known by its proven identity or else by the address
        /// of its machine; more are refused. Default: 1024, or less if this process may open fewer
        /// than 2800 files
        max_sessions_per_peer: usize = file_limit::share(3, 1024) as usize, "RPC_RELAY_MAX_SESSIONS_PER_PEER";
        /// Interval at which waiting servers are tested; after three times as long without an
        /// answer they are dropped
        #[arg(value_name = "TIME")]
        keep_alive: Span = Span(KEEP_ALIVE), "RPC_RELAY_KEEP_ALIVE";
        /// Time that clients have to end after the first signal
        #[arg(value_name = "TIME")]
        drain_timeout: Span = seconds(30), "RPC_RELAY_DRAIN_TIMEOUT";
    }
    optional {}
}

listener_config!(RelayConfig);

impl RelayConfig {
    /// Checks that the settings go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::NotListenable`], [`ConfigError::NoCertificate`],
    /// and those of [`ServeConfig::check`] for the settings that a relay shares with a server.
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_with(&crate::transports())
    }

    /// As [`check`](Self::check), for a program that uses these transports.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn check_with(&self, transports: &Transports) -> Result<(), ConfigError> {
        check_addresses(&self.listen, &self.trust(), self.insecure, transports)?;
        self.serve_config().check_with(transports)
    }

    fn listen_by_default(&mut self) {
        if self.listen.is_empty() {
            self.listen.push(loopback(RELAY_PORT));
        }
        fill_ports(&mut self.listen, RELAY_PORT);
    }

    /// Returns the settings of the server that a relay is.
    pub(crate) fn serve_config(&self) -> ServeConfig {
        ServeConfig {
            drain_timeout: self.drain_timeout,
            // A relay has no sessions, and so no files.
            workspace_quota: ByteSize(0),
            file_cache: ByteSize(0),
            ..self.listener_config()
        }
    }
}
