//! Settings of a relay: `rpc-server relay`.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_transports::Transports;
use serde::{Deserialize, Serialize};

use super::listen_address::{check_addresses, loopback};
use super::units::seconds;
use super::{ByteSize, ConfigError, HttpAddress, ListenAddress, ServeConfig, Span};
use crate::logging::{LogFilter, LogFormat};
use crate::pki::trust::ServerTrust;

settings! {
    RelaySettings => RelayConfig, "RPC_RELAY_CONFIG", "a relay";
    settings {
        /// Address to listen on, for servers and clients, such as tls://0.0.0.0:9290,
        /// quic://gateway.lan:9290 or tcp://127.0.0.1:9290; may be repeated, or given as a list
        /// with commas. Default: tcp://127.0.0.1:9290
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_RELAY_LISTEN";
        /// Maximum number of waiting servers and served clients together; more are refused
        max_sessions: usize = 16384, "RPC_RELAY_MAX_SESSIONS";
        /// Maximum number of them for one peer, known by its proven identity or else by the address
        /// of its machine; more are refused
        max_sessions_per_peer: usize = 1024, "RPC_RELAY_MAX_SESSIONS_PER_PEER";
        /// Maximum number of connections in the handshake; for one more, the oldest of the machine
        /// that has most of them is closed
        max_handshakes: usize = 1024, "RPC_RELAY_MAX_HANDSHAKES";
        /// Time limit of a handshake
        #[arg(value_name = "TIME")]
        handshake_timeout: Span = seconds(10), "RPC_RELAY_HANDSHAKE_TIMEOUT";
        /// Interval at which waiting servers are tested; after three times as long without an
        /// answer they are dropped
        #[arg(value_name = "TIME")]
        keep_alive: Span = seconds(5), "RPC_RELAY_KEEP_ALIVE";
        /// Time that clients have to end after the first signal
        #[arg(value_name = "TIME")]
        drain_timeout: Span = seconds(30), "RPC_RELAY_DRAIN_TIMEOUT";
        /// Filter of logged events: error, warn, info, debug, trace, off, or directives such as
        /// info,rpc_server=debug
        #[arg(value_name = "FILTER")]
        log_level: LogFilter = LogFilter::default(), "RPC_RELAY_LOG_LEVEL";
        /// Format of log events on standard error
        log_format: LogFormat = LogFormat::Text, "RPC_RELAY_LOG_FORMAT";
        /// Listen where other machines can connect without proof of identity
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        insecure: bool = false, "RPC_RELAY_INSECURE";
        /// Stop when standard input ends: for a relay that must end with the program that started
        /// it
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        exit_with_stdin: bool = false, "RPC_RELAY_EXIT_WITH_STDIN";
    }
    optional {
        /// Certificate of the relay for tls:// and quic:// addresses, followed by those up to its
        /// authority, as a PEM file. With --token-file alone the relay makes one for itself
        #[arg(value_name = "FILE")]
        cert: PathBuf, "RPC_RELAY_CERT";
        /// Private key of --cert, as a PEM file
        #[arg(value_name = "FILE")]
        cert_key: PathBuf, "RPC_RELAY_CERT_KEY";
        /// Serve servers and clients with a certificate by one of the authorities in this PEM file
        #[arg(value_name = "FILE")]
        client_ca: PathBuf, "RPC_RELAY_CLIENT_CA";
        /// Serve servers and clients that know one of the tokens in this file, one a line
        #[arg(value_name = "FILE")]
        token_file: PathBuf, "RPC_RELAY_TOKEN_FILE";
        /// Serve metrics and health over HTTP at this address, such as 127.0.0.1:9291
        #[arg(value_name = "HOST:PORT")]
        metrics: HttpAddress, "RPC_RELAY_METRICS";
        /// File that is written when the relay is ready, with one address a line, and removed when
        /// it stops
        #[arg(value_name = "FILE")]
        ready_file: PathBuf, "RPC_RELAY_READY_FILE";
    }
}

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
            self.listen.push(loopback(DEFAULT_PORT));
        }
    }

    /// Returns the settings of the server that a relay is.
    pub(crate) fn serve_config(&self) -> ServeConfig {
        ServeConfig {
            listen: self.listen.clone(),
            insecure: self.insecure,
            max_sessions: self.max_sessions,
            max_sessions_per_peer: self.max_sessions_per_peer,
            max_handshakes: self.max_handshakes,
            handshake_timeout: self.handshake_timeout,
            keep_alive: self.keep_alive,
            drain_timeout: self.drain_timeout,
            log_level: self.log_level.clone(),
            log_format: self.log_format,
            exit_with_stdin: self.exit_with_stdin,
            cert: self.cert.clone(),
            cert_key: self.cert_key.clone(),
            client_ca: self.client_ca.clone(),
            token_file: self.token_file.clone(),
            metrics: self.metrics,
            ready_file: self.ready_file.clone(),
            // A relay has no sessions, and so no files.
            workspace_quota: ByteSize(0),
            ..ServeConfig::default()
        }
    }
}

/// Default port of a relay.
const DEFAULT_PORT: u16 = 9290;
