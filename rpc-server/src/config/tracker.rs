//! Settings of a tracker: `rpc-server tracker`. And the labels and tracker addresses among the
//! settings of a server.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rpc_core::proto::KEEP_ALIVE;
use rpc_transports::{Address, AddressError, Transports};
use serde::{Deserialize, Serialize};

use super::listen_address::{
    TRACKER_PORT, TVM_PROXY_PORT, check_addresses, check_metrics, fill_ports, loopback, with_default_port,
};
use super::units::seconds;
use super::{ByteSize, ConfigError, HttpAddress, ListenAddress, ServeConfig, Span};
use crate::file_limit;
use crate::pki::trust::{ServerTrust, TrustError};
use crate::tracker::TrackerOptions;

listener_settings! {
    TrackerSettings => TrackerConfig, "RPC_TRACKER", "a tracker";
    settings {
        /// Address to listen on, such as tcp://127.0.0.1:9190, quic://pool.lan:9190,
        /// tls://0.0.0.0:0 or unix:/run/pool.sock; may be repeated, or given as a list with commas.
        /// Default: tcp://127.0.0.1:9190
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_TRACKER_LISTEN";
        /// Time after the last report at which a server is dropped
        #[arg(value_name = "TIME")]
        lease: Span = seconds(10), "RPC_TRACKER_LEASE";
        /// Time that a client has to reach the server that it was given
        #[arg(value_name = "TIME")]
        ticket_lifetime: Span = seconds(20), "RPC_TRACKER_TICKET_LIFETIME";
        /// Addresses that servers may advertise beside their own, such as tcp://192.168.0.*:9090,
        /// as with --allow-forward of a server; may be repeated, or given as a list with commas.
        /// Default: none
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_advertise: Vec<String> = Vec::new(), "RPC_TRACKER_ALLOW_ADVERTISE";
        /// Let clients end the sessions of others (rpc-cli kick) and drain servers (rpc-cli drain)
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_kick: bool = false, "RPC_TRACKER_ALLOW_KICK";
        /// Take servers and clients of TVM, too (tvm.exec.rpc_server --tracker,
        /// tvm.rpc.connect_tracker), at the same addresses. Their protocol knows neither identity
        /// nor encryption: other machines may reach the addresses only with --insecure
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        tvm: bool = false, "RPC_TRACKER_TVM";
        /// Maximum number of servers; more are refused
        max_servers: usize = 8192, "RPC_TRACKER_MAX_SERVERS";
        /// Maximum number of servers of one peer, known by its proven identity or else by the
        /// address of its machine; more are refused
        max_servers_per_peer: usize = 4096, "RPC_TRACKER_MAX_SERVERS_PER_PEER";
        /// Maximum number of waiting requests; more are refused
        max_waiting: usize = 16384, "RPC_TRACKER_MAX_WAITING";
        /// Maximum number of waiting requests of one client; more are refused
        max_waiting_per_client: usize = 1024, "RPC_TRACKER_MAX_WAITING_PER_CLIENT";
        /// Maximum number of sessions, of servers and clients; more are refused. Default: 16384,
        /// or less if this process may open fewer than 22000 files
        max_sessions: usize = file_limit::share(6, 16384) as usize, "RPC_TRACKER_MAX_SESSIONS";
        /// Maximum number of sessions of one peer; more are refused. Default: 8192, or less if this
        /// process may open fewer than 22000 files
        max_sessions_per_peer: usize = file_limit::share(3, 8192) as usize, "RPC_TRACKER_MAX_SESSIONS_PER_PEER";
        /// Silence after which a connection is tested; after three times as long it is dead, and
        /// its server is dropped
        #[arg(value_name = "TIME")]
        keep_alive: Span = Span(KEEP_ALIVE), "RPC_TRACKER_KEEP_ALIVE";
    }
    optional {
        /// Certificates of the authorities of servers, as a PEM file, for checking that they can be
        /// reached at their advertised addresses
        #[arg(value_name = "FILE")]
        forward_ca: PathBuf, "RPC_TRACKER_FORWARD_CA";
        /// File of tokens that prove this tracker to the servers that it checks
        #[arg(value_name = "FILE")]
        forward_token_file: PathBuf, "RPC_TRACKER_FORWARD_TOKEN_FILE";
        /// Serve status pages for browsers at this address, such as 127.0.0.1:9191, with keys,
        /// servers, queue, charts and events. Default: off. They show everything to everyone who
        /// connects, so the address must be local to this machine, unless --insecure is given
        #[arg(value_name = "ADDRESS")]
        http: HttpAddress, "RPC_TRACKER_HTTP";
    }
}

listener_config!(TrackerConfig);

/// Memory of a session for the details that its server reports, in bytes. A server with eight
/// devices takes about 2 KiB, and one with 64 about 12 KiB, twice while new details replace old
/// ones.
const DETAILS_BYTES: u64 = 32 << 10;

impl TrackerConfig {
    /// Checks that the settings go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::InsecurePage`], [`ConfigError::InsecureMetrics`],
    /// [`ConfigError::NotListenable`], [`ConfigError::NoCertificate`], [`ConfigError::Zero`],
    /// [`ConfigError::Pattern`].
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
        if let Some(HttpAddress(address)) = self.http
            && !address.ip().to_canonical().is_loopback()
            && !self.insecure
        {
            return Err(ConfigError::InsecurePage { address });
        }
        check_metrics(self.metrics, self.insecure)?;
        if self.tvm {
            ServeConfig { tvm: true, ..self.serve_config() }.check_tvm(transports)?;
        }
        for pattern in &self.allow_advertise {
            match transports.check_pattern(pattern) {
                // Servers may have transports that the tracker does not have.
                Ok(()) | Err(AddressError::UnknownScheme { .. }) => {}
                Err(source) => return Err(ConfigError::Pattern { setting: "--allow-advertise", source }),
            }
        }
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
            self.listen.push(loopback(TRACKER_PORT));
        }
        fill_ports(&mut self.listen, TRACKER_PORT);
    }

    /// Returns the options of the tracker. Reads files of certificates and tokens.
    ///
    /// # Errors
    ///
    /// A file cannot be read or used.
    pub fn options(&self) -> Result<TrackerOptions, TrustError> {
        Ok(TrackerOptions {
            transports: crate::transports(),
            lease: self.lease.0,
            ticket_lifetime: self.ticket_lifetime.0,
            max_servers: self.max_servers,
            max_servers_per_peer: self.max_servers_per_peer,
            max_waiting: self.max_waiting,
            max_waiting_per_client: self.max_waiting_per_client,
            allow_advertise: self.allow_advertise.clone(),
            allow_kick: self.allow_kick,
            onward: self.serve_config().onward().dial_options()?,
        })
    }

    /// Returns the settings of the server that serves the functions of the tracker.
    pub fn serve_config(&self) -> ServeConfig {
        ServeConfig {
            // The tracker forwards nothing. These credentials are for checking servers, and are
            // reloaded with the others.
            forward_ca: self.forward_ca.clone(),
            forward_token_file: self.forward_token_file.clone(),
            // Limits for clients: registrations and requests need few objects, no devices and no
            // files. A waiting request holds its claim and the functions that were fetched for it.
            max_handles: self.max_waiting_per_client.saturating_mul(4).saturating_add(64),
            max_total_handles: self.max_sessions.saturating_mul(4).saturating_add(self.max_waiting.saturating_mul(4)),
            max_memory: ByteSize(DETAILS_BYTES),
            // Enough for all sessions, so that none takes the memory of another.
            max_total_memory: Some(ByteSize(DETAILS_BYTES.saturating_mul(self.max_sessions as u64))),
            max_message: ByteSize(8 << 20),
            max_queued: ByteSize(9 << 20),
            max_threads: 2,
            max_total_threads: 64,
            workspace_quota: ByteSize(0),
            file_cache: ByteSize(0),
            // No session of a tracker has work that must be finished.
            drain_timeout: seconds(0),
            ..self.listener_config()
        }
    }
}

/// Address of a tracker in the settings of a server: `tcp://host:port`, or `tracker://host:port`
/// for the same.
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
        let address = rpc_transports::tracker::address_of(&address).unwrap_or(address);
        Ok(Self(with_default_port(address, TRACKER_PORT)))
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

/// Declares the type of the address of a peer of TVM in the settings of a server: `host:port`, or
/// `tcp://host:port` for the same.
macro_rules! tvm_address {
    ($(#[doc = $doc:literal])+ $name:ident, $port:expr, $problem:literal;) => {
        $(#[doc = $doc])+
        #[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(pub Address);

        impl FromStr for $name {
            type Err = AddressError;

            fn from_str(text: &str) -> Result<Self, AddressError> {
                let is_complete = text.contains("://");
                let address: Address = if is_complete { text.parse()? } else { format!("tcp://{text}").parse()? };
                if address.scheme() != "tcp" || address.key().is_some() {
                    return Err(AddressError::invalid(&address, $problem));
                }
                Ok(Self(with_default_port(address, $port)))
            }
        }

        impl TryFrom<String> for $name {
            type Error = AddressError;

            fn try_from(text: String) -> Result<Self, AddressError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(address: $name) -> Self {
                address.to_string()
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

tvm_address! {
    /// Address of a tracker of TVM in the settings of a server: `host:port`, or `tcp://host:port`
    /// for the same.
    TvmTrackerAddress, TRACKER_PORT, "a tracker of TVM is written as host:port";
}

tvm_address! {
    /// Address of a proxy of TVM in the settings of a server: `host:port`, or `tcp://host:port` for
    /// the same.
    TvmProxyAddress, TVM_PROXY_PORT, "a proxy of TVM is written as host:port";
}

/// A label that clients can ask a tracker for, written as `arch=arm64`.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Label {
    /// Name, such as `arch`.
    pub name: String,
    /// Value, such as `arm64`.
    pub value: String,
}

/// Error of a text that is not a label.
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
