//! The settings of a tracker; and what a server tells one.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rpc_transports::{Address, AddressError};
use serde::{Deserialize, Serialize};

use super::{
    ByteSize, ConfigError, HttpAddress, ListenAddress, ServeConfig, Span, check_addresses, check_metrics, loopback,
    seconds,
};
use crate::logging::{LogFilter, LogFormat};
use crate::tracker::TrackerOptions;
use crate::trust::{ServerTrust, TrustError};

settings! {
    TrackerSettings => TrackerConfig, "RPC_TRACKER_CONFIG", "a tracker";
    settings {
        /// An address to listen on, such as tcp://127.0.0.1:9190, quic://pool.lan:9190, tls://0.0.0.0:0 or unix:/run/pool.sock; may be
        /// repeated, or given as a list with commas. Without it: tcp://127.0.0.1:9190
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_TRACKER_LISTEN";
        /// How long a server stays registered that is not heard of
        #[arg(value_name = "TIME")]
        lease: Span = seconds(10), "RPC_TRACKER_LEASE";
        /// How long a client has to reach the server that it was given
        #[arg(value_name = "TIME")]
        ticket_lifetime: Span = seconds(20), "RPC_TRACKER_TICKET_LIFETIME";
        /// Addresses that servers may tell beside their own, such as tcp://192.168.0.*:9090, as with --allow-forward of a server;
        /// may be repeated, or given as a list with commas. None without it
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_advertise: Vec<String> = Vec::new(), "RPC_TRACKER_ALLOW_ADVERTISE";
        /// Servers at a time; more are refused
        max_servers: usize = 8192, "RPC_TRACKER_MAX_SERVERS";
        /// Servers at a time of one peer, who is known by what it has proven, or else by the address of its machine; more are
        /// refused
        max_servers_per_peer: usize = 4096, "RPC_TRACKER_MAX_SERVERS_PER_PEER";
        /// Requests that wait at a time; more are refused
        max_waiting: usize = 16384, "RPC_TRACKER_MAX_WAITING";
        /// Requests of one client that wait at a time; more are refused
        max_waiting_per_client: usize = 1024, "RPC_TRACKER_MAX_WAITING_PER_CLIENT";
        /// Sessions at a time, of servers and clients; more are refused
        max_sessions: usize = 16384, "RPC_TRACKER_MAX_SESSIONS";
        /// Sessions at a time of one peer; more are refused
        max_sessions_per_peer: usize = 8192, "RPC_TRACKER_MAX_SESSIONS_PER_PEER";
        /// How long a peer may take to introduce itself
        #[arg(value_name = "TIME")]
        handshake_timeout: Span = seconds(10), "RPC_TRACKER_HANDSHAKE_TIMEOUT";
        /// How long a connection may be silent before it is tested; after three times as long it is dead, and a server gone
        #[arg(value_name = "TIME")]
        keep_alive: Span = seconds(5), "RPC_TRACKER_KEEP_ALIVE";
        /// Which events are logged: error, warn, info, debug, trace, or directives such as info,rpc_server=debug
        #[arg(value_name = "FILTER")]
        log_level: LogFilter = LogFilter::default(), "RPC_TRACKER_LOG_LEVEL";
        /// How events are logged, on standard error
        log_format: LogFormat = LogFormat::Text, "RPC_TRACKER_LOG_FORMAT";
        /// Listen where other machines can connect, though nobody has to prove who they are
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        insecure: bool = false, "RPC_TRACKER_INSECURE";
        /// Stop when standard input ends: for a tracker that is to end with the program that started it
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        exit_with_stdin: bool = false, "RPC_TRACKER_EXIT_WITH_STDIN";
    }
    optional {
        /// The tracker's certificate for tls:// and quic:// addresses, and those between it and its authority, as a PEM file. With
        /// --token-file alone the tracker makes one for itself
        #[arg(value_name = "FILE")]
        cert: PathBuf, "RPC_TRACKER_CERT";
        /// The private key of --cert, as a PEM file
        #[arg(value_name = "FILE")]
        cert_key: PathBuf, "RPC_TRACKER_CERT_KEY";
        /// Serve peers with a certificate by one of the authorities in this PEM file
        #[arg(value_name = "FILE")]
        client_ca: PathBuf, "RPC_TRACKER_CLIENT_CA";
        /// Serve peers that know one of the tokens in this file, one a line
        #[arg(value_name = "FILE")]
        token_file: PathBuf, "RPC_TRACKER_TOKEN_FILE";
        /// Certificates of the authorities that servers must have theirs from, for looking whether they are at the addresses that
        /// they tell, as a PEM file
        #[arg(value_name = "FILE")]
        forward_ca: PathBuf, "RPC_TRACKER_FORWARD_CA";
        /// A file of tokens by which this tracker proves itself to servers that it looks for
        #[arg(value_name = "FILE")]
        forward_token_file: PathBuf, "RPC_TRACKER_FORWARD_TOKEN_FILE";
        /// A file that is written when the tracker is ready, with one address a line, and removed when it stops
        #[arg(value_name = "FILE")]
        ready_file: PathBuf, "RPC_TRACKER_READY_FILE";
        /// Serve a page for browsers at this address, such as 127.0.0.1:9191: servers, queue and the last hour, as they are now.
        /// Off without it. Whoever connects may see it, so it must be an address of this machine alone, or --insecure be given
        #[arg(value_name = "ADDRESS")]
        http: HttpAddress, "RPC_TRACKER_HTTP";
        /// Serve /metrics for Prometheus, /healthz and /readyz over HTTP at this address, such as 127.0.0.1:9192. Off without
        /// it
        #[arg(value_name = "ADDRESS")]
        metrics: HttpAddress, "RPC_TRACKER_METRICS";
    }
}

impl TrackerConfig {
    /// Looks for settings that do not go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::InsecurePage`], [`ConfigError::InsecureMetrics`],
    /// [`ConfigError::NotListenable`], [`ConfigError::NoCertificate`], [`ConfigError::Zero`].
    pub fn check(&self) -> Result<(), ConfigError> {
        check_addresses(&self.listen, &self.trust(), self.insecure)?;
        if let Some(HttpAddress(address)) = self.http
            && !address.ip().to_canonical().is_loopback()
            && !self.insecure
        {
            return Err(ConfigError::InsecurePage { address });
        }
        check_metrics(self.metrics, self.insecure)?;
        let zero = [
            ("--lease", u64::from(!self.lease.0.is_zero())),
            ("--ticket-lifetime", u64::from(!self.ticket_lifetime.0.is_zero())),
            ("--max-servers", self.max_servers as u64),
            ("--max-servers-per-peer", self.max_servers_per_peer as u64),
            ("--max-waiting", self.max_waiting as u64),
            ("--max-waiting-per-client", self.max_waiting_per_client as u64),
        ];
        match zero.into_iter().find(|(_, value)| *value == 0) {
            Some((setting, _)) => Err(ConfigError::Zero { setting }),
            None => Ok(()),
        }
    }

    fn listen_by_default(&mut self) {
        if self.listen.is_empty() {
            self.listen.push(loopback(DEFAULT_PORT));
        }
    }

    /// How the tracker works. Reads files of certificates and tokens.
    ///
    /// # Errors
    ///
    /// The file that cannot be read or used.
    pub fn options(&self) -> Result<TrackerOptions, TrustError> {
        Ok(TrackerOptions {
            lease: self.lease.0,
            ticket_lifetime: self.ticket_lifetime.0,
            max_servers: self.max_servers,
            max_servers_per_peer: self.max_servers_per_peer,
            max_waiting: self.max_waiting,
            max_waiting_per_client: self.max_waiting_per_client,
            allow_advertise: self.allow_advertise.clone(),
            onward: self.serve_config().onward().dial_options()?,
        })
    }

    /// The server that the tracker's functions are served by.
    pub fn serve_config(&self) -> ServeConfig {
        ServeConfig {
            listen: self.listen.clone(),
            insecure: self.insecure,
            max_sessions: self.max_sessions,
            max_sessions_per_peer: self.max_sessions_per_peer,
            handshake_timeout: self.handshake_timeout,
            keep_alive: self.keep_alive,
            log_level: self.log_level.clone(),
            log_format: self.log_format,
            exit_with_stdin: self.exit_with_stdin,
            cert: self.cert.clone(),
            cert_key: self.cert_key.clone(),
            client_ca: self.client_ca.clone(),
            token_file: self.token_file.clone(),
            // Nothing is forwarded. These are how servers are looked for, and are read again with the others.
            forward_ca: self.forward_ca.clone(),
            forward_token_file: self.forward_token_file.clone(),
            metrics: self.metrics,
            ready_file: self.ready_file.clone(),
            // What follows is about what clients could do beside asking: a registration and a queue need few objects, no
            // device and no files. A request that waits has its place, and the functions that were asked for it.
            max_handles: self.max_waiting_per_client.saturating_mul(4).saturating_add(64),
            max_total_handles: self.max_sessions.saturating_mul(4).saturating_add(self.max_waiting.saturating_mul(4)),
            max_memory: ByteSize(0),
            max_message: ByteSize(8 << 20),
            max_queued: ByteSize(9 << 20),
            max_threads: 2,
            max_total_threads: 64,
            workspace_quota: ByteSize(0),
            // Nobody has a session that would have to come to its end.
            drain_timeout: seconds(0),
            ..ServeConfig::default()
        }
    }
}

/// Where other trackers of this kind usually are.
const DEFAULT_PORT: u16 = 9190;

/// Where a tracker is, as a server that registers writes it: `tcp://host:port`, or `tracker://host:port`, which is the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TrackerAddress(pub Address);

impl FromStr for TrackerAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let address: Address = text.parse()?;
        if let Some(key) = address.key() {
            let problem = "a server says which key it has by --tracker-key, and not in the tracker's address";
            return Err(AddressError::Key { text: key.to_owned(), problem });
        }
        Ok(Self(address.tracker_address().unwrap_or(&address).clone()))
    }
}

impl TryFrom<String> for TrackerAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<TrackerAddress> for String {
    fn from(address: TrackerAddress) -> Self {
        address.to_string()
    }
}

impl fmt::Display for TrackerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Something that clients can ask a tracker for, written as `arch=arm64`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label {
    /// What is said, such as `arch`.
    pub name: String,
    /// What it is, such as `arm64`.
    pub value: String,
}

/// Why a text is no label.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not a label; write for example arch=arm64")]
pub struct LabelError(String);

impl FromStr for Label {
    type Err = LabelError;

    fn from_str(text: &str) -> Result<Self, LabelError> {
        match text.trim().split_once('=') {
            Some((name, value)) if !name.is_empty() => Ok(Self { name: name.to_owned(), value: value.to_owned() }),
            _ => Err(LabelError(text.to_owned())),
        }
    }
}

impl TryFrom<String> for Label {
    type Error = LabelError;

    fn try_from(text: String) -> Result<Self, LabelError> {
        text.parse()
    }
}

impl From<Label> for String {
    fn from(label: Label) -> Self {
        label.to_string()
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.name, self.value)
    }
}
