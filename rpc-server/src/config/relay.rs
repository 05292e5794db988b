//! Settings of a relay: `rpc-server relay`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::proto::KEEP_ALIVE;
use rpc_transports::Transports;
use serde::{Deserialize, Serialize};

use super::listen_address::{RELAY_PORT, check_addresses, fill_ports, loopback};
use super::units::seconds;
use super::{ByteSize, ConfigError, ListenAddress, ServeConfig, Span, TvmTrackerAddress};
use crate::file_limit;
use crate::pki::trust::ServerTrust;
#[cfg(feature = "tvm")]
use crate::tvm::proxy::TvmProxyTerms;

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
        /// Connect servers and clients of TVM, too, at the same addresses, as its proxy does
        /// (tvm.exec.rpc_proxy): by TCP, and by WebSocket. Their protocol knows neither identity
        /// nor encryption: other machines may reach the addresses only with --insecure
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        tvm: bool = false, "RPC_RELAY_TVM";
        /// With --tvm: time that a client waits for a server of its key; then it is refused
        #[arg(value_name = "TIME")]
        tvm_client_timeout: Span = seconds(600), "RPC_RELAY_TVM_CLIENT_TIMEOUT";
        /// With --tvm: time that a server waits for a client; then it is refused, and has to come
        /// again
        #[arg(value_name = "TIME")]
        tvm_server_timeout: Span = seconds(600), "RPC_RELAY_TVM_SERVER_TIMEOUT";
        /// With --tvm: maximum number of servers, or of clients, that wait under one key; more are
        /// refused. Not with --tvm-tracker
        max_waiting_per_key: usize = 1, "RPC_RELAY_MAX_WAITING_PER_KEY";
    }
    optional {
        /// With --tvm: tracker of TVM at which waiting servers are registered, such as
        /// pool.lan:9190. Clients of TVM then need a match key from it
        #[arg(value_name = "ADDRESS")]
        tvm_tracker: TvmTrackerAddress, "RPC_RELAY_TVM_TRACKER";
    }
}

listener_config!(RelayConfig);

impl RelayConfig {
    /// Checks that the settings go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::NotListenable`], [`ConfigError::NoCertificate`],
    /// [`ConfigError::InsecureTvm`], [`ConfigError::TvmWithIdentity`], [`ConfigError::TvmTracker`],
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
        self.check_tvm(transports)?;
        self.serve_config().check_with(transports)
    }

    /// Checks that peers of TVM, who can prove nothing, are served only where nobody has to.
    fn check_tvm(&self, transports: &Transports) -> Result<(), ConfigError> {
        if self.tvm {
            ServeConfig { tvm: true, ..self.serve_config() }.check_tvm(transports)?;
        }
        let is_tcp = |listen: &ListenAddress| listen.0.scheme() == "tcp";
        let problem = match &self.tvm_tracker {
            Some(_) if !self.tvm => Some("it needs --tvm"),
            Some(_) if !self.listen.iter().any(is_tcp) => {
                Some("clients of TVM need an address: give tcp://HOST:PORT as --listen")
            }
            _ => None,
        };
        if let Some(problem) = problem {
            return Err(ConfigError::TvmTracker { problem });
        }
        let zero = [
            ("--tvm-client-timeout", self.tvm_client_timeout.0.is_zero()),
            ("--tvm-server-timeout", self.tvm_server_timeout.0.is_zero()),
            ("--max-waiting-per-key", self.max_waiting_per_key == 0),
        ];
        match zero.into_iter().find(|(_, is_zero)| *is_zero) {
            Some((setting, _)) => Err(ConfigError::Zero { setting }),
            None => Ok(()),
        }
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

    /// Returns the settings of the proxy for peers of TVM, if the relay is one.
    #[cfg(feature = "tvm")]
    pub(crate) fn tvm_proxy(&self) -> Option<TvmProxyTerms> {
        self.tvm.then(|| TvmProxyTerms {
            client_timeout: self.tvm_client_timeout.0,
            server_timeout: self.tvm_server_timeout.0,
            max_waiting_per_key: self.max_waiting_per_key,
            tracker: self.tvm_tracker.clone().map(|TvmTrackerAddress(address)| address),
        })
    }
}
