//! The settings of a server, and where they come from.
//!
//! Each setting is declared once, in `settings!` below. From that come the command line flag, the environment variable
//! (`--max-message` is `RPC_SERVER_MAX_MESSAGE`), the key in the configuration file (`max-message`), and the default. A
//! flag counts before the environment, that before the file, and that before the default.

mod memory;
mod units;

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::{fmt, fs, io};

use rpc_core::RpcError;
use rpc_transports::{Address, AddressError, TransportError};
use serde::{Deserialize, Serialize};

use crate::logging::{LogFilter, LogFormat};
use crate::modules::ModuleError;
use crate::trust::{ClientTrust, ServerTrust, TrustError};

pub use pool::{Label, LabelError, TrackerAddress, TrackerConfig, TrackerSettings};
pub use relay::{RelayConfig, RelaySettings};
pub use units::{ByteSize, HttpAddress, OtlpEndpoint, PortRange, Span, UnitError};
pub use worker::{WorkerConfig, WorkerSettings};

macro_rules! settings {
    (
        $settings:ident => $config:ident, $config_env:literal, $what:literal;
        settings {
            $($(#[doc = $doc:literal])+ $(#[arg($($arg:tt)*)])? $name:ident: $type:ty = $default:expr, $env:literal;)+
        }
        optional {
            $($(#[doc = $odoc:literal])+ $(#[arg($($oarg:tt)*)])? $oname:ident: $otype:ty, $oenv:literal;)+
        }
    ) => {
        #[doc = concat!("Settings of ", $what, " as one source gives them: the command line with the environment, or a file.")]
        /// Each may be absent.
        ///
        #[doc = concat!("[`resolve`](Self::resolve) makes a [`", stringify!($config), "`] of them.")]
        #[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
        #[non_exhaustive]
        pub struct $settings {
            /// A file with settings, in TOML. Flags and environment variables count before it
            #[arg(long, env = $config_env, value_name = "FILE")]
            #[serde(skip)]
            pub config: Option<PathBuf>,
            $(
                $(#[doc = $doc])+
                #[arg(long, env = $env, $($($arg)*)?)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $name: Option<$type>,
            )+
            $(
                $(#[doc = $odoc])+
                #[arg(long, env = $oenv, $($($oarg)*)?)]
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $oname: Option<$otype>,
            )+
        }

        #[doc = concat!("The settings of ", $what, ", complete. Make one from [`Default`], with `..`: there will be more fields.")]
        #[derive(Clone, Debug, PartialEq, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub struct $config {
            $($(#[doc = $doc])+ pub $name: $type,)+
            $(
                $(#[doc = $odoc])+
                #[serde(skip_serializing_if = "Option::is_none")]
                pub $oname: Option<$otype>,
            )+
        }

        impl $settings {
            /// Reads settings from the text of a configuration file.
            ///
            /// # Errors
            ///
            /// [`ConfigError::Syntax`], which shows the place: not TOML, a key that is not a setting, or a value out of form.
            pub fn from_toml(text: &str, file: &Path) -> Result<Self, ConfigError> {
                toml::from_str(text)
                    .map_err(|error| ConfigError::Syntax { file: file.to_owned(), source: Box::new(error) })
            }

            /// These settings, and where they are silent those of the configuration file that they name, if they do.
            fn with_file(self) -> Result<Self, ConfigError> {
                let Some(file) = &self.config else { return Ok(self) };
                let text = fs::read_to_string(file)
                    .map_err(|source| ConfigError::Read { file: file.clone(), source: Arc::new(source) })?;
                let lower = Self::from_toml(&text, file)?;
                Ok(self.or(lower))
            }

            /// These settings, and where they are silent those of `lower`.
            #[must_use]
            pub fn or(self, lower: Self) -> Self {
                Self {
                    config: self.config.or(lower.config),
                    $($name: self.$name.or(lower.$name),)+
                    $($oname: self.$oname.or(lower.$oname),)+
                }
            }

            /// Reads the configuration file that these settings name, if they do, and completes them with it and the defaults.
            ///
            /// # Errors
            ///
            /// What is wrong with the file, or with the settings as a whole.
            pub fn resolve(self) -> Result<$config, ConfigError> {
                let mut config = self.with_file()?.complete();
                config.listen_by_default();
                config.check()?;
                Ok(config)
            }

            fn complete(self) -> $config {
                $config {
                    $($name: self.$name.unwrap_or_else(|| $default),)+
                    $($oname: self.$oname,)+
                }
            }
        }

        impl $config {
            /// The configuration as a TOML file that gives the same one when it is read.
            ///
            /// # Errors
            ///
            /// [`ConfigError::NotText`]: a path is none that text could show.
            pub fn to_toml(&self) -> Result<String, ConfigError> {
                toml::to_string(self).map_err(|source| ConfigError::NotText { source: Box::new(source) })
            }

            /// The files by which clients are known, and this program is known to them.
            pub fn trust(&self) -> ServerTrust {
                ServerTrust {
                    cert: self.cert.clone(),
                    cert_key: self.cert_key.clone(),
                    client_ca: self.client_ca.clone(),
                    token_file: self.token_file.clone(),
                }
            }
        }

        impl Default for $config {
            fn default() -> Self {
                let mut config = $settings::default().complete();
                config.listen_by_default();
                config
            }
        }
    };
}

// Behind the macro, which it uses.
mod pool;
mod relay;
mod worker;

settings! {
    ServeSettings => ServeConfig, "RPC_SERVER_CONFIG", "a server";
    settings {
        /// An address to listen on, such as tcp://127.0.0.1:9090, quic://board.lan:9090, tls://0.0.0.0:0 or unix:/run/rpc.sock; may be
        /// repeated, or given as a list with commas. Without it: tcp://127.0.0.1:9090, or nothing with --stdio or --relay
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_LISTEN";
        /// The folder for the files of sessions. Named workspaces are kept in it
        #[arg(value_name = "FOLDER")]
        workdir: PathBuf = default_workdir(), "RPC_SERVER_WORKDIR";
        /// Sessions at a time; more are refused
        max_sessions: usize = 4096, "RPC_SERVER_MAX_SESSIONS";
        /// Sessions at a time of one client, who is known by what it has proven, or else by the address of its machine; more
        /// are refused
        max_sessions_per_peer: usize = 1024, "RPC_SERVER_MAX_SESSIONS_PER_PEER";
        /// Connections at a time whose clients have not introduced themselves; for one more, the oldest of the machine that
        /// has most of them is closed
        max_handshakes: usize = 1024, "RPC_SERVER_MAX_HANDSHAKES";
        /// Device memory that one session may hold
        #[arg(value_name = "SIZE")]
        max_memory: ByteSize = ByteSize::UNLIMITED, "RPC_SERVER_MAX_MEMORY";
        /// Objects that one session may hold
        max_handles: usize = 1 << 20, "RPC_SERVER_MAX_HANDLES";
        /// Objects that all sessions together may hold. Not with --isolate process
        max_total_handles: usize = 16 << 20, "RPC_SERVER_MAX_TOTAL_HANDLES";
        /// Requests that one session may have in progress; more wait
        max_requests: u32 = 1024, "RPC_SERVER_MAX_REQUESTS";
        /// Bytes of arguments that one session may have waiting; more wait at the client. At least --max-message
        #[arg(value_name = "SIZE")]
        max_queued: ByteSize = ByteSize(65 << 20), "RPC_SERVER_MAX_QUEUED";
        /// Bytes of requests and replies that all sessions together may have waiting, beside eight frames for each; what finds no room
        /// fails. Without it a quarter of the memory that there is
        #[arg(value_name = "SIZE")]
        max_total_queued: ByteSize = memory::quarter_of_memory(), "RPC_SERVER_MAX_TOTAL_QUEUED";
        /// Threads that the functions of one session may have; calls that find none wait
        max_threads: usize = 64, "RPC_SERVER_MAX_THREADS";
        /// Threads that the functions of all sessions together may have, beside one for each session. Not with --isolate
        /// process
        max_total_threads: usize = 1024, "RPC_SERVER_MAX_TOTAL_THREADS";
        /// The largest payload of a frame; copies are cut into such pieces
        #[arg(value_name = "SIZE")]
        max_frame: ByteSize = ByteSize(1 << 20), "RPC_SERVER_MAX_FRAME";
        /// The largest request and the largest reply; tensors and files travel in pieces and may be larger
        #[arg(value_name = "SIZE")]
        max_message: ByteSize = ByteSize(64 << 20), "RPC_SERVER_MAX_MESSAGE";
        /// How long a client may take to introduce itself
        #[arg(value_name = "TIME")]
        handshake_timeout: Span = seconds(10), "RPC_SERVER_HANDSHAKE_TIMEOUT";
        /// How long a connection may be silent before it is tested; after three times as long it is dead
        #[arg(value_name = "TIME")]
        keep_alive: Span = seconds(5), "RPC_SERVER_KEEP_ALIVE";
        /// How long a client may take nothing of what it is being sent; its connection is closed then
        #[arg(value_name = "TIME")]
        write_timeout: Span = seconds(60), "RPC_SERVER_WRITE_TIMEOUT";
        /// The slowest that a client may send what it has begun to send, or take what it is sent, per second, over each
        /// --write-timeout; 0 for no limit
        #[arg(value_name = "SIZE")]
        min_rate: ByteSize = ByteSize(64), "RPC_SERVER_MIN_RATE";
        /// Bytes that one workspace may hold
        #[arg(value_name = "SIZE")]
        workspace_quota: ByteSize = ByteSize(4 << 30), "RPC_SERVER_WORKSPACE_QUOTA";
        /// How long a named workspace is kept after its last use
        #[arg(value_name = "TIME")]
        workspace_expiry: Span = seconds(30 * 24 * 3600), "RPC_SERVER_WORKSPACE_EXPIRY";
        /// How long sessions may go on once the server has been told to stop
        #[arg(value_name = "TIME")]
        drain_timeout: Span = seconds(30), "RPC_SERVER_DRAIN_TIMEOUT";
        /// Which events are logged: error, warn, info, debug, trace, or directives such as info,rpc_server=debug
        #[arg(value_name = "FILTER")]
        log_level: LogFilter = LogFilter::default(), "RPC_SERVER_LOG_LEVEL";
        /// How events are logged, on standard error
        log_format: LogFormat = LogFormat::Text, "RPC_SERVER_LOG_FORMAT";
        /// Listen where other machines can connect, though nobody has to prove who they are
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        insecure: bool = false, "RPC_SERVER_INSECURE";
        /// Servers to which clients may be forwarded, such as tcp://10.0.0.5:9090 or tls://*.lab:9090, where * is any text within
        /// the host, the port or the scheme; programs (exec:) and paths (unix:) have to be named; may be repeated, or
        /// given as a list with commas. None without it
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_forward: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_FORWARD";
        /// Functions that clients which are forwarded may use, with * for any text, such as rpc.* or model.run; may be repeated,
        /// or given as a list with commas. All without it. What passes through a tunnel is not seen, and not limited
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        forward_functions: Vec<String> = Vec::new(), "RPC_SERVER_FORWARD_FUNCTIONS";
        /// The names of servers that are believed when they forward and say for whom: those that their tokens or
        /// certificates prove; may be repeated, or given as a list with commas
        #[arg(value_name = "NAME", value_delimiter = ',')]
        trust_proxy: Vec<String> = Vec::new(), "RPC_SERVER_TRUST_PROXY";
        /// Folders of model weights that workers of Disco may read here for their controllers, which may be any clients; may be repeated, or given as a list with
        /// commas. None without it
        #[arg(value_name = "FOLDER", value_delimiter = ',')]
        weights: Vec<PathBuf> = Vec::new(), "RPC_SERVER_WEIGHTS";
        /// Take native modules from clients and run them: shared libraries that follow the ABI of TVM-FFI. Whoever is let in may then
        /// do whatever the server's user may
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_modules: bool = false, "RPC_SERVER_ALLOW_MODULES";
        /// Bytes of all modules that are kept; those unused for --module-expiry make room for others
        #[arg(value_name = "SIZE")]
        module_store_size: ByteSize = ByteSize(4 << 30), "RPC_SERVER_MODULE_STORE_SIZE";
        /// The largest module
        #[arg(value_name = "SIZE")]
        max_module: ByteSize = ByteSize(512 << 20), "RPC_SERVER_MAX_MODULE";
        /// How long a module has to be unused before it makes room for another
        #[arg(value_name = "TIME")]
        module_expiry: Span = seconds(30 * 24 * 3600), "RPC_SERVER_MODULE_EXPIRY";
        /// Shared libraries that are loaded for each session, and whose global TVM-FFI functions are offered by their names, but for
        /// names of TVM's own, such as rpc.*; may be repeated, or given as a list with commas. Without --allow-modules, too
        #[arg(value_name = "FILE", value_delimiter = ',')]
        library: Vec<PathBuf> = Vec::new(), "RPC_SERVER_LIBRARY";
        /// Shared libraries that modules and --library need, such as TVM's libtvm_runtime.so: loaded for each session before them,
        /// with their symbols for all; may be repeated, or given as a list with commas. Their functions are not offered
        #[arg(value_name = "FILE", value_delimiter = ',')]
        runtime_library: Vec<PathBuf> = Vec::new(), "RPC_SERVER_RUNTIME_LIBRARY";
        /// Where sessions run: all in the server's own process, or each in a process of its own, so that a crash in a
        /// function is an error to one client alone; auto has processes where there are GPUs, whose drivers share one fate in a
        /// process, and with --allow-modules or --library
        #[arg(value_name = "WHERE")]
        isolate: Isolate = Isolate::Auto, "RPC_SERVER_ISOLATE";
        /// With --isolate process: memory that the process of one session may have for its data; a function that asks for
        /// more gets none, which ends most programs
        #[arg(value_name = "SIZE")]
        isolate_memory: ByteSize = ByteSize::UNLIMITED, "RPC_SERVER_ISOLATE_MEMORY";
        /// With --isolate process: files and sockets that the process of one session may have open
        #[arg(value_name = "NUMBER")]
        isolate_files: u64 = 4096, "RPC_SERVER_ISOLATE_FILES";
        /// Trackers to register with, such as tcp://pool.lan:9190 or tls://pool.lan:9190; may be repeated, or given as a list with
        /// commas. Clients then need a ticket from one of them. They are trusted by --forward-ca and --forward-token-file
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        tracker: Vec<TrackerAddress> = Vec::new(), "RPC_SERVER_TRACKER";
        /// Relays to wait at for clients, for a server that clients cannot dial, such as tls://gateway.lan:9290/NAME; may be repeated, or
        /// given as a list with commas. Clients connect to the same address. NAME is what they ask for; without it --key, which
        /// --tracker makes unique. Relays are trusted by --forward-ca and --forward-token-file
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        relay: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_RELAY";
        /// With --tracker: something that clients can ask for, such as arch=arm64; may be repeated, or given as a list with commas
        #[arg(value_name = "NAME=VALUE", value_delimiter = ',')]
        label: Vec<Label> = Vec::new(), "RPC_SERVER_LABEL";
        /// With --tracker: the address that clients are sent to; hops to go through in front of it, with commas. Without it: the
        /// first address that is listened on, or else the first relay
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        advertise: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_ADVERTISE";
        /// With --tracker or --relay: how many clients the server is given to at a time
        #[arg(value_name = "NUMBER")]
        capacity: u32 = 1, "RPC_SERVER_CAPACITY";
        /// With --tracker: serve clients without a ticket, too. They take places that the tracker then does not give out
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_direct: bool = false, "RPC_SERVER_ALLOW_DIRECT";
        /// Serve one session on standard input and output, and stop when it ends
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        stdio: bool = false, "RPC_SERVER_STDIO";
        /// Stop when standard input ends: for a server that is to end with the program that started it
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        exit_with_stdin: bool = false, "RPC_SERVER_EXIT_WITH_STDIN";
    }
    optional {
        /// The name that clients may ask for, so that they do not reach another server by mistake
        key: String, "RPC_SERVER_KEY";
        /// The IP address at which workers of Disco here listen for the data of workers elsewhere. Without it the controller says, or
        /// may relay the data
        #[arg(value_name = "IP")]
        data_address: IpAddr, "RPC_SERVER_DATA_ADDRESS";
        /// With --tracker: what clients ask the tracker for. Without it: the same as --key
        tracker_key: String, "RPC_SERVER_TRACKER_KEY";
        /// With --allow-modules: a file of the SHA-256 digests of the modules that are taken, and no others, one a line, as sha256sum
        /// prints them. It is read at the start, and again by workers of Disco that have processes of their own
        #[arg(value_name = "FILE")]
        module_digests: PathBuf, "RPC_SERVER_MODULE_DIGESTS";
        /// The folder for modules, which nobody else may write to. Without it: a folder in --workdir
        #[arg(value_name = "FOLDER")]
        module_store: PathBuf, "RPC_SERVER_MODULE_STORE";
        /// With --allow-modules or --library: libtvm_ffi.so, or the folder that it lies in. Without it, it is looked for in Python
        /// environments and folders of the system
        #[arg(value_name = "FILE")]
        tvm_ffi: PathBuf, "RPC_SERVER_TVM_FFI";
        /// Ports to try when an address says port 0 or its port is in use, such as 9090-9199
        #[arg(value_name = "FIRST-LAST")]
        port_range: PortRange, "RPC_SERVER_PORT_RANGE";
        /// Device memory that all sessions together may hold. Without it: nine tenths of what the machine has, or this program
        /// may use; with --isolate process no limit
        #[arg(value_name = "SIZE")]
        max_total_memory: ByteSize, "RPC_SERVER_MAX_TOTAL_MEMORY";
        /// How long a session may last; it is ended then, whatever it is doing. No limit without it
        #[arg(value_name = "TIME")]
        session_duration: Span, "RPC_SERVER_SESSION_DURATION";
        /// How long a session may go without a request; it is ended then. No limit without it
        #[arg(value_name = "TIME")]
        idle_timeout: Span, "RPC_SERVER_IDLE_TIMEOUT";
        /// With --isolate process: processor time that the process of one session may use, in whole seconds, rounded up; it is
        /// killed then. No limit without it
        #[arg(value_name = "TIME")]
        isolate_cpu_time: Span, "RPC_SERVER_ISOLATE_CPU_TIME";
        /// The server's certificate for tls:// and quic:// addresses, and those between it and its authority, as a PEM file;
        /// made by rpc-cli cert, for example. With --token-file alone the server makes one for itself
        #[arg(value_name = "FILE")]
        cert: PathBuf, "RPC_SERVER_CERT";
        /// The private key of --cert, as a PEM file
        #[arg(value_name = "FILE")]
        cert_key: PathBuf, "RPC_SERVER_CERT_KEY";
        /// Serve clients with a certificate by one of the authorities in this PEM file
        #[arg(value_name = "FILE")]
        client_ca: PathBuf, "RPC_SERVER_CLIENT_CA";
        /// Serve clients that know one of the tokens in this file, one a line; a name in front of it says whom its holder is
        /// known as. Made by rpc-cli token, for example
        #[arg(value_name = "FILE")]
        token_file: PathBuf, "RPC_SERVER_TOKEN_FILE";
        /// Certificates of the authorities that the servers to which clients are forwarded must have theirs from, as a PEM
        /// file
        #[arg(value_name = "FILE")]
        forward_ca: PathBuf, "RPC_SERVER_FORWARD_CA";
        /// A certificate to show to the servers to which clients are forwarded, as a PEM file
        #[arg(value_name = "FILE", requires = "forward_cert_key")]
        forward_cert: PathBuf, "RPC_SERVER_FORWARD_CERT";
        /// The private key of --forward-cert, as a PEM file
        #[arg(value_name = "FILE", requires = "forward_cert")]
        forward_cert_key: PathBuf, "RPC_SERVER_FORWARD_CERT_KEY";
        /// A file of tokens by which this server proves itself to those to which clients are forwarded
        #[arg(value_name = "FILE")]
        forward_token_file: PathBuf, "RPC_SERVER_FORWARD_TOKEN_FILE";
        /// A file that is written when the server is ready, with one address a line, and removed when it stops
        #[arg(value_name = "FILE")]
        ready_file: PathBuf, "RPC_SERVER_READY_FILE";
        /// Serve /metrics for Prometheus, /healthz and /readyz over HTTP at this address, such as 127.0.0.1:9464. Off without
        /// it
        #[arg(value_name = "ADDRESS")]
        metrics: HttpAddress, "RPC_SERVER_METRICS";
        /// Export a span of each call to the OpenTelemetry collector at this URL, such as http://127.0.0.1:4318, to which
        /// /v1/traces is added. Off without it; needs a server that is built with the feature otel
        #[arg(value_name = "URL")]
        otlp_endpoint: OtlpEndpoint, "RPC_SERVER_OTLP_ENDPOINT";
    }
}

impl ServeConfig {
    fn listen_by_default(&mut self) {
        if self.listen.is_empty() && !self.stdio && self.relay.is_empty() {
            self.listen.push(loopback(DEFAULT_PORT));
        }
    }

    /// The files by which this server and those to which it forwards know each other.
    pub fn onward(&self) -> ClientTrust {
        ClientTrust {
            ca: self.forward_ca.clone(),
            cert: self.forward_cert.clone(),
            cert_key: self.forward_cert_key.clone(),
            token_file: self.forward_token_file.clone(),
        }
    }

    /// What clients ask trackers for to get this server.
    pub(crate) fn pool_key(&self) -> Option<&str> {
        self.tracker_key.as_deref().or(self.key.as_deref())
    }

    /// Device memory that all sessions together may hold: as it is set, or what the default comes to on this machine.
    pub fn total_memory(&self) -> ByteSize {
        match self.max_total_memory {
            Some(limit) => limit,
            // The kernel ends the process of one session then, and each session would need its share.
            None if self.wants_processes() => ByteSize::UNLIMITED,
            None => memory::most_of_memory(),
        }
    }

    /// Whether native code that this program does not bring is to be run.
    pub(crate) fn runs_native_code(&self) -> bool {
        self.allow_modules || !self.library.is_empty() || !self.runtime_library.is_empty()
    }

    /// Whether each session is to have a process of its own, whatever devices there are.
    fn wants_processes(&self) -> bool {
        match self.isolate {
            Isolate::Process => true,
            Isolate::Auto => self.runs_native_code(),
            Isolate::None => false,
        }
    }

    /// Looks for settings that do not go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::InsecureMetrics`], [`ConfigError::NotListenable`], [`ConfigError::Key`],
    /// [`ConfigError::StdinTaken`], [`ConfigError::NoShare`], [`ConfigError::TooFewFiles`], [`ConfigError::NoCertificate`],
    /// [`ConfigError::NoOtel`], [`ConfigError::NoTrackerKey`], [`ConfigError::NothingToAdvertise`],
    /// [`ConfigError::InsecureRelay`], [`ConfigError::NoRelayName`], [`ConfigError::NoTvmFfi`], [`ConfigError::Zero`].
    pub fn check(&self) -> Result<(), ConfigError> {
        check_addresses(&self.listen, &self.trust(), self.insecure)?;
        if let Some(address) = self.data_address.filter(|address| address.is_unspecified() || address.is_multicast()) {
            return Err(ConfigError::DataAddress { address });
        }
        if !self.tracker.is_empty() {
            if self.pool_key().is_none() {
                return Err(ConfigError::NoTrackerKey);
            }
            if self.advertise.is_empty() && self.listen.is_empty() && self.relay.is_empty() {
                return Err(ConfigError::NothingToAdvertise);
            }
        }
        for ListenAddress(address) in &self.relay {
            // Whoever reaches the relay reaches this server, and only a token proves anything from end to end.
            let secure = address.is_loopback() || (address.is_encrypted() && self.token_file.is_some());
            if !secure && !self.insecure {
                return Err(ConfigError::InsecureRelay { address: address.clone() });
            }
            if address.key().is_none() && self.pool_key().is_none() {
                return Err(ConfigError::NoRelayName { address: address.clone() });
            }
        }
        let zero = [
            ("--max-sessions", self.max_sessions as u64),
            ("--max-sessions-per-peer", self.max_sessions_per_peer as u64),
            ("--max-threads", self.max_threads as u64),
            ("--capacity", self.capacity.into()),
            ("--max-frame", self.max_frame.0),
            ("--max-handshakes", self.max_handshakes as u64),
            ("--max-requests", self.max_requests.into()),
            ("--max-handles", self.max_handles as u64),
            ("--max-message", self.max_message.0),
            ("--max-module", self.max_module.0),
            ("--module-store-size", self.module_store_size.0),
            ("--keep-alive", u64::from(!self.keep_alive.0.is_zero())),
            ("--handshake-timeout", u64::from(!self.handshake_timeout.0.is_zero())),
            ("--write-timeout", u64::from(!self.write_timeout.0.is_zero())),
            ("--session-duration", u64::from(self.session_duration.is_none_or(|limit| !limit.0.is_zero()))),
            ("--idle-timeout", u64::from(self.idle_timeout.is_none_or(|limit| !limit.0.is_zero()))),
        ];
        if let Some((setting, _)) = zero.into_iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Zero { setting });
        }
        check_metrics(self.metrics, self.insecure)?;
        for key in [&self.key, &self.tracker_key].into_iter().flatten() {
            Address::from(std::net::SocketAddr::from(([127, 0, 0, 1], 1)))
                .with_key(key)
                .map_err(|source| ConfigError::Key { source })?;
        }
        if self.stdio && self.exit_with_stdin {
            return Err(ConfigError::StdinTaken);
        }
        if self.otlp_endpoint.is_some() && !cfg!(feature = "otel") {
            return Err(ConfigError::NoOtel);
        }
        if (self.runs_native_code() || self.tvm_ffi.is_some()) && !crate::modules::CAN_LOAD {
            return Err(ConfigError::NoTvmFfi);
        }
        if self.wants_processes() {
            if self.max_memory > self.total_memory() {
                return Err(ConfigError::NoShare { max_total_memory: self.total_memory() });
            }
            if self.isolate_files < MIN_FILES {
                return Err(ConfigError::TooFewFiles { isolate_files: self.isolate_files });
            }
        }
        Ok(())
    }
}

/// An address as a setting: to listen on, or where a relay is, with the name under which the server waits there as its key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ListenAddress(pub Address);

impl std::str::FromStr for ListenAddress {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        text.parse().map(Self)
    }
}

impl TryFrom<String> for ListenAddress {
    type Error = AddressError;

    fn try_from(text: String) -> Result<Self, AddressError> {
        text.parse()
    }
}

impl From<ListenAddress> for String {
    fn from(address: ListenAddress) -> Self {
        address.to_string()
    }
}

impl From<Address> for ListenAddress {
    fn from(address: Address) -> Self {
        Self(address)
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Looks whether a server may listen at these addresses.
fn check_addresses(listen: &[ListenAddress], trust: &ServerTrust, insecure: bool) -> Result<(), ConfigError> {
    for ListenAddress(address) in listen {
        if matches!(address.scheme(), "exec" | "local" | "tracker") || address.key().is_some() {
            return Err(ConfigError::NotListenable { address: address.clone() });
        }
        // A token that crosses a network in the clear proves who begins to speak, and not who goes on.
        let secure = address.is_loopback() || (address.is_encrypted() && trust.demands());
        if !secure && !insecure {
            return Err(ConfigError::Insecure { address: address.clone() });
        }
        if address.is_encrypted() && !trust.shows() {
            return Err(ConfigError::NoCertificate { address: address.clone() });
        }
    }
    Ok(())
}

/// Looks whether metrics may be served at this address.
fn check_metrics(metrics: Option<HttpAddress>, insecure: bool) -> Result<(), ConfigError> {
    match metrics {
        Some(HttpAddress(address)) if !address.ip().to_canonical().is_loopback() && !insecure => {
            Err(ConfigError::InsecureMetrics { address })
        }
        _ => Ok(()),
    }
}

/// Where the sessions of a server run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Isolate {
    /// In processes of their own where the server has devices of kind `cuda` and can start such processes, or runs native modules
    /// and libraries; else in the server's.
    #[default]
    Auto,
    /// All in the process of the server: what ends one ends all. GPUs are not used.
    None,
    /// Each in a process of its own: see [`isolate`](crate::isolate).
    Process,
}

/// What is wrong with a configuration.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A controller that other machines could stand in for.
    #[error(
        "whoever answers at {address} drives this node: use tls:// or quic:// with --forward-ca or --forward-token-file, or say --insecure"
    )]
    InsecureController {
        /// Where the controller is said to be.
        address: Address,
    },
    /// A process of a job of MPI whose sessions are to be in other processes.
    #[error("with --mpi the session is in this process, which is one of the job: leave out --isolate")]
    MpiIsolated,
    /// An address for data that stands for any or for several.
    #[error("{address} is no address at which other machines find this one: give --data-address one of its own")]
    DataAddress {
        /// What was given.
        address: IpAddr,
    },
    /// Which node of a session this is cannot be told.
    #[error("{problem}")]
    NodePlace {
        /// What is wrong.
        problem: String,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The configuration file is not TOML, has an unknown key, or a value of the wrong form.
    #[error("the configuration file {} is not right", file.display())]
    Syntax {
        /// The file.
        file: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// Other machines could connect, and nobody would have to prove who they are.
    #[error(
        "{address} can be reached from other machines, and whoever connects may run code here; serve quic:// or tls:// with \
         --token-file or --client-ca, listen on tcp://127.0.0.1:PORT or on unix:PATH, or say --insecure if the network is \
         trusted"
    )]
    Insecure {
        /// The address to be listened on.
        address: Address,
    },
    /// Other machines could read the metrics, which nobody has to prove anything for.
    #[error(
        "metrics on {address} could be read from other machines; serve them on 127.0.0.1:PORT, or say --insecure if the \
         network is trusted"
    )]
    InsecureMetrics {
        /// Where they should be served.
        address: SocketAddr,
    },
    /// Other machines could see the tracker's page, which nobody has to prove anything for.
    #[error(
        "the status page on {address} could be seen from other machines; serve it on 127.0.0.1:PORT, or say --insecure if \
         the network is trusted"
    )]
    InsecurePage {
        /// Where it should be served.
        address: SocketAddr,
    },
    /// There is no certificate to show.
    #[error("{address} needs a certificate: give --cert and --cert-key (rpc-cli cert makes them), or --token-file")]
    NoCertificate {
        /// The address to be listened on.
        address: Address,
    },
    /// A limit that would let nothing pass.
    #[error("{setting} is zero, with which nothing could be served")]
    Zero {
        /// The setting.
        setting: &'static str,
    },
    /// One cannot listen there.
    #[error(
        "cannot listen on {address}: write tcp://HOST:PORT, tls://HOST:PORT, quic://HOST:PORT or unix:PATH; a key is given \
         with --key"
    )]
    NotListenable {
        /// The address to be listened on.
        address: Address,
    },
    /// Clients could not ask for the server.
    #[error("a server with --tracker needs a key that clients ask for: give --tracker-key, or --key")]
    NoTrackerKey,
    /// Clients could not be sent to the server.
    #[error("a server with --tracker needs an address that clients are sent to: give --listen, or --advertise")]
    NothingToAdvertise,
    /// Others could use the server by way of a relay.
    #[error(
        "{address} is a relay that other machines may reach, and they would not have to prove who they are: use tls:// or quic:// and \
         --token-file, or --insecure"
    )]
    InsecureRelay {
        /// The relay.
        address: Address,
    },
    /// Nobody could ask the relay for the server.
    #[error(
        "{address} is a relay, where clients ask for a name: write it behind the address, as in {address}/NAME, or give --key"
    )]
    NoRelayName {
        /// The relay.
        address: Address,
    },
    /// The key does not have the form of one.
    #[error("the key cannot be used")]
    Key {
        /// Why.
        source: AddressError,
    },
    /// Two settings want the standard input.
    #[error("--stdio ends with standard input by itself, so --exit-with-stdin cannot be had with it; leave that out")]
    StdinTaken,
    /// This program cannot export spans.
    #[error(
        "--otlp-endpoint needs a server that can export spans, and this one is built without; build it with \
         cargo build -p rpc-server --features otel"
    )]
    NoOtel,
    /// This program has no loader of native modules.
    #[error(
        "--allow-modules, --library, --runtime-library and --tvm-ffi need a server that can load native modules, and this one is built without; \
         build it with cargo build -p rpc-server --features tvm-ffi, for a machine of 64 bits"
    )]
    NoTvmFfi,
    /// Sessions in processes of their own get their share of the total at the beginning, and it is not known how much.
    #[error(
        "with --isolate process (or auto, with --allow-modules or --library) each session has its --max-memory set aside from --max-total-memory ({max_total_memory}), \
         so --max-memory has to be given, and be no larger"
    )]
    NoShare {
        /// The memory of all sessions.
        max_total_memory: ByteSize,
    },
    /// The process of a session could not serve it.
    #[error("--isolate-files {isolate_files} is too few: a session without any files of its own has about {MIN_FILES}")]
    TooFewFiles {
        /// How many files it may have open.
        isolate_files: u64,
    },
    /// A path has bytes that no text has.
    #[error("the configuration cannot be written as text; name files with characters of UTF-8 alone")]
    NotText {
        /// What it is about.
        source: Box<toml::ser::Error>,
    },
    /// The program cannot be started again as the process of a session.
    #[error(
        "with --isolate process (or auto, with --allow-modules or --library) the program is started again for each session, so \
         its main has to begin with a call of rpc_server::isolate::run_if_isolated"
    )]
    NoIsolationHook,
}

/// What keeps a server from starting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The configuration.
    #[error("the configuration cannot be used")]
    Config(#[from] ConfigError),
    /// An address cannot be listened on, or standard input and output not be used.
    #[error("cannot listen")]
    Listen(#[from] TransportError),
    /// The folder for workspaces cannot be used.
    #[error("cannot use the folder {} for the files of sessions", workdir.display())]
    Workdir {
        /// The folder.
        workdir: PathBuf,
        /// Why.
        source: crate::workspace::WorkspaceError,
    },
    /// The ready file cannot be written.
    #[error("cannot write the ready file {}", file.display())]
    ReadyFile {
        /// The file.
        file: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The store of modules, or the list of those that are taken.
    #[error("modules cannot be taken")]
    Modules(#[from] ModuleError),
    /// A library of the operator cannot be loaded.
    #[error("a library cannot be loaded (--library)")]
    Library(#[source] RpcError),
    /// Metrics cannot be served at their address.
    #[error("cannot serve metrics on {address}")]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The tracker's page cannot be served at its address.
    #[error("cannot serve the status page on {address}")]
    Page {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The controller of a Disco session cannot be joined.
    #[error("no session with the controller at {address}")]
    Controller {
        /// The controller.
        address: Address,
        /// Why.
        source: RpcError,
    },
    /// MPI cannot be started.
    #[error("this process cannot take part in a job of MPI")]
    Mpi {
        /// Why.
        source: RpcError,
    },
    /// The export of spans cannot be set up.
    #[error("cannot export spans to {endpoint}")]
    Otlp {
        /// The collector.
        endpoint: OtlpEndpoint,
        /// Why.
        source: io::Error,
    },
    /// Certificates or tokens.
    #[error("certificates or tokens cannot be used")]
    Trust(#[from] TrustError),
    /// The async runtime cannot be started.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// Signals cannot be received.
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
}

/// Standard input, output and error, what the runtime needs, the connection, the workspace, and a few to spare.
const MIN_FILES: u64 = 32;

/// Where other servers of this kind usually are.
const DEFAULT_PORT: u16 = 9090;

/// A TCP port that only this machine can reach.
fn loopback(port: u16) -> ListenAddress {
    ListenAddress(Address::from(SocketAddr::from(([127, 0, 0, 1], port))))
}

fn seconds(seconds: u64) -> Span {
    Span(std::time::Duration::from_secs(seconds))
}

/// Where programs keep state of the user's: `$XDG_STATE_HOME` or `~/.local/state`; without a home, the folder for temporary
/// files.
fn default_workdir() -> PathBuf {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|folder: &PathBuf| folder.is_absolute());
    folder("XDG_STATE_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(std::env::temp_dir)
        .join("rpc-server")
}

#[cfg(test)]
mod tests;
