//! The settings of a relay.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::{ByteSize, ConfigError, HttpAddress, ListenAddress, ServeConfig, Span, check_addresses, loopback, seconds};
use crate::logging::{LogFilter, LogFormat};
use crate::trust::ServerTrust;

settings! {
    RelaySettings => RelayConfig, "RPC_RELAY_CONFIG", "a relay";
    settings {
        /// An address to listen on, for servers and clients, such as tls://0.0.0.0:9290, quic://gateway.lan:9290 or
        /// tcp://127.0.0.1:9290; may be repeated, or given as a list with commas. Without it: tcp://127.0.0.1:9290
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_RELAY_LISTEN";
        /// Servers that wait and clients that are served, at a time; more are refused
        max_sessions: usize = 16384, "RPC_RELAY_MAX_SESSIONS";
        /// The same of one peer, who is known by what it has proven, or else by the address of its machine; more are refused
        max_sessions_per_peer: usize = 1024, "RPC_RELAY_MAX_SESSIONS_PER_PEER";
        /// Connections at a time of those who have not introduced themselves; for one more, the oldest of the machine that has most
        /// of them is closed
        max_handshakes: usize = 1024, "RPC_RELAY_MAX_HANDSHAKES";
        /// How long a peer may take to introduce itself
        #[arg(value_name = "TIME")]
        handshake_timeout: Span = seconds(10), "RPC_RELAY_HANDSHAKE_TIMEOUT";
        /// How often servers that wait are asked whether they are there; after three times as long they are not
        #[arg(value_name = "TIME")]
        keep_alive: Span = seconds(5), "RPC_RELAY_KEEP_ALIVE";
        /// How long clients that are served may go on once the relay has been told to stop
        #[arg(value_name = "TIME")]
        drain_timeout: Span = seconds(30), "RPC_RELAY_DRAIN_TIMEOUT";
        /// Which events are logged: error, warn, info, debug, trace, or directives such as info,rpc_server=debug
        #[arg(value_name = "FILTER")]
        log_level: LogFilter = LogFilter::default(), "RPC_RELAY_LOG_LEVEL";
        /// How events are logged, on standard error
        log_format: LogFormat = LogFormat::Text, "RPC_RELAY_LOG_FORMAT";
        /// Listen where other machines can connect, though nobody has to prove who they are
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        insecure: bool = false, "RPC_RELAY_INSECURE";
        /// Stop when standard input ends: for a relay that is to end with the program that started it
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        exit_with_stdin: bool = false, "RPC_RELAY_EXIT_WITH_STDIN";
    }
    optional {
        /// The relay's certificate for tls:// and quic:// addresses, and those between it and its authority, as a PEM file. With
        /// --token-file alone the relay makes one for itself
        #[arg(value_name = "FILE")]
        cert: PathBuf, "RPC_RELAY_CERT";
        /// The private key of --cert, as a PEM file
        #[arg(value_name = "FILE")]
        cert_key: PathBuf, "RPC_RELAY_CERT_KEY";
        /// Take servers and clients with a certificate by one of the authorities in this PEM file
        #[arg(value_name = "FILE")]
        client_ca: PathBuf, "RPC_RELAY_CLIENT_CA";
        /// Take servers and clients that know one of the tokens in this file, one a line
        #[arg(value_name = "FILE")]
        token_file: PathBuf, "RPC_RELAY_TOKEN_FILE";
        /// Serve metrics and health over HTTP at this address, such as 127.0.0.1:9291
        #[arg(value_name = "HOST:PORT")]
        metrics: HttpAddress, "RPC_RELAY_METRICS";
        /// A file that is written when the relay is ready, with one address a line, and removed when it stops
        #[arg(value_name = "FILE")]
        ready_file: PathBuf, "RPC_RELAY_READY_FILE";
    }
}

impl RelayConfig {
    /// Looks for settings that do not go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::NotListenable`], [`ConfigError::NoCertificate`], and those of
    /// [`ServeConfig::check`] for the settings that a relay shares with a server.
    pub fn check(&self) -> Result<(), ConfigError> {
        check_addresses(&self.listen, &self.trust(), self.insecure)?;
        self.serve_config().check()
    }

    fn listen_by_default(&mut self) {
        if self.listen.is_empty() {
            self.listen.push(loopback(DEFAULT_PORT));
        }
    }

    /// What a relay has in common with a server.
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
            // There are no sessions that could have files.
            workspace_quota: ByteSize(0),
            ..ServeConfig::default()
        }
    }
}

/// Where other relays of this kind usually are.
const DEFAULT_PORT: u16 = 9290;
