//! Errors of configurations, and of servers that cannot start.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use rpc_core::RpcError;
use rpc_transports::{Address, AddressError, TransportError};

use super::serve::MIN_FILES;
use super::{ByteSize, OtlpEndpoint};
use crate::modules::ModuleError;
use crate::pki::trust::TrustError;
use crate::policy::PolicyError;
use crate::suggestion::likely_key;

/// Error of a configuration.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// An address is not one of its transport, or has no transport.
    #[error(transparent)]
    Address {
        /// Error of the transport.
        source: TransportError,
    },
    /// The identity of the controller is not proven, so another machine could take its place.
    #[error(
        "the controller at {address} would drive this node without proof of identity: use tls:// or quic:// with \
         --forward-ca or --forward-token-file, or --insecure"
    )]
    InsecureController {
        /// Address of the controller.
        address: Address,
    },
    /// The sessions of an MPI process would be in other processes.
    #[error("with --mpi the session runs in this process, which is part of the job: leave out --isolate")]
    MpiIsolated,
    /// A node that refuses controllers has nothing to do.
    #[error("a worker serves the controller that it dials: leave out --allow-disco=false")]
    NodeWithoutDisco,
    /// The address for data is unspecified or multicast.
    #[error("{address} is no address at which other machines find this one: give --data-address one of its own")]
    DataAddress {
        /// The text as it was given.
        address: IpAddr,
    },
    /// The number of the node in its session cannot be determined.
    #[error("{problem}")]
    NodeRank {
        /// The problem.
        problem: String,
    },
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// The configuration file is not TOML, has an unknown key, or a value of the wrong form.
    #[error(
        "the configuration file {} is not right{}", file.display(),
        likely_key(source).map(|key| format!("; did you mean '{key}'?")).unwrap_or_default()
    )]
    Syntax {
        /// The file.
        file: PathBuf,
        /// The position and the reason.
        source: Box<toml::de::Error>,
    },
    /// Other machines could connect without proof of identity.
    #[error(
        "{address} can be reached from other machines, which could run code here: serve quic:// or tls:// with \
         --token-file or --client-ca, listen on tcp://127.0.0.1:PORT or unix:PATH, or give --insecure on a trusted \
         network"
    )]
    Insecure {
        /// The address to be listened on.
        address: Address,
    },
    /// Clients of TVM on other machines could connect.
    #[error(
        "with --tvm, {address} can be reached from other machines by TVM's protocol, which has neither identity nor \
         encryption: listen on tcp://127.0.0.1:PORT or unix:PATH, or give --insecure on a trusted network"
    )]
    InsecureTvm {
        /// The address to be listened on.
        address: Address,
    },
    /// Clients of TVM cannot prove who they are, and the server demands it.
    #[error(
        "--tvm serves clients that cannot prove who they are, and --token-file or --client-ca demands it: give one or \
         the other, or run two servers, of which that with --tvm listens on tcp://127.0.0.1:PORT or unix:PATH"
    )]
    TvmWithIdentity,
    /// A tracker of TVM could not give the server out.
    #[error("--tvm-tracker: {problem}")]
    TvmTracker {
        /// Reason.
        problem: &'static str,
    },
    /// A server cannot wait at a proxy of TVM.
    #[error("--tvm-proxy: {problem}")]
    TvmProxy {
        /// Reason.
        problem: &'static str,
    },
    /// Clients of TVM that reach a proxy on another machine could connect.
    #[error(
        "clients of the proxy {address} could reach this server by TVM's protocol, which has neither identity nor \
         encryption: wait at a proxy on 127.0.0.1, or give --insecure on a trusted network"
    )]
    InsecureTvmProxy {
        /// The address of the proxy.
        address: Address,
    },
    /// TVM's protocol is not in this build.
    #[error("--tvm and --tvm-self-test need a build with the feature tvm: cargo build -p rpc-server --features tvm")]
    NoTvm,
    /// Other machines could read the metrics, which need no authentication.
    #[error(
        "metrics on {address} could be read from other machines: serve them on 127.0.0.1:PORT, or give --insecure on a \
         trusted network"
    )]
    InsecureMetrics {
        /// The address of the metrics.
        address: SocketAddr,
    },
    /// Other machines could read the status page, which needs no authentication.
    #[error(
        "the status page on {address} could be read from other machines: serve it on 127.0.0.1:PORT, or give \
         --insecure on a trusted network"
    )]
    InsecurePage {
        /// The address of the page.
        address: SocketAddr,
    },
    /// An encrypted address lacks a certificate.
    #[error("{address} needs a certificate: give --cert and --cert-key (rpc-cli cert makes them), or --token-file")]
    NoCertificate {
        /// The address to be listened on.
        address: Address,
    },
    /// A limit of zero would let nothing pass.
    #[error("{setting} is zero, so nothing could be served")]
    Zero {
        /// The setting.
        setting: &'static str,
    },
    /// An address to listen on is not an address.
    #[error("cannot listen on '{text}'")]
    ListenAddress {
        /// The address as it was given.
        text: String,
        /// The reason.
        source: AddressError,
    },
    /// A pattern of addresses stands for no address.
    #[error("{setting} allows nothing")]
    Pattern {
        /// The setting.
        setting: &'static str,
        /// The reason.
        source: AddressError,
    },
    /// A file or folder of a setting is not there, or is of the wrong kind.
    #[error("cannot use {} ({setting})", path.display())]
    Path {
        /// The setting.
        setting: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// A setting describes the server to trackers, and there is none.
    #[error("{setting} is for trackers, and there is none: give --tracker, or leave {setting} out")]
    NeedsTracker {
        /// The setting.
        setting: &'static str,
    },
    /// The address is not one to listen on.
    #[error(
        "cannot listen on {address}: write tcp://HOST:PORT, tls://HOST:PORT, quic://HOST:PORT or unix:PATH; give a key \
         with --key"
    )]
    NotListenable {
        /// The address to be listened on.
        address: Address,
    },
    /// The server has no key that clients could ask the tracker for.
    #[error("a server with --tracker needs a key that clients ask for: give --tracker-key, or --key")]
    NoTrackerKey,
    /// The server has no address to which the tracker could send clients.
    #[error("a server with --tracker needs an address that clients are sent to: give --listen, or --advertise")]
    NothingToAdvertise,
    /// Other machines could use the server through the relay without proof of identity.
    #[error(
        "{address} is a relay through which other machines could use this server without proof of identity: use tls:// \
         or quic:// and --token-file, or --insecure"
    )]
    InsecureRelay {
        /// The relay.
        address: Address,
    },
    /// The server has no name at the relay.
    #[error("{address} is a relay, where clients ask for a server by name: write {address}/NAME, or give --key")]
    NoRelayName {
        /// The relay.
        address: Address,
    },
    /// The key is malformed.
    #[error("the key cannot be used")]
    Key {
        /// The reason.
        source: AddressError,
    },
    /// Two settings use standard input.
    #[error("--stdio stops at the end of standard input anyway: leave out --exit-with-stdin")]
    StdinTaken,
    /// This build cannot export spans.
    #[error("--otlp-endpoint needs a build with the feature otel: cargo build -p rpc-server --features otel")]
    NoOtel,
    /// This program imports no modules of Python.
    #[error(
        "--python needs the rpc-server of the Python package: pip install tensor-rpc (pip install ./python in a \
         checkout of the sources), and start the rpc-server that this brings"
    )]
    NoPython,
    /// Modules of Python cannot be imported, or have no functions for sessions.
    #[error("--python: {problem}")]
    Import {
        /// The problem.
        problem: String,
    },
    /// This build has no loader of native modules.
    #[error(
        "--allow-modules, --library, --runtime-library and --tvm-ffi need a build with the feature tvm-ffi, for a \
         machine of 64 bits: cargo build -p rpc-server --features tvm-ffi"
    )]
    NoTvmFfi,
    /// Session processes reserve a share of the total memory, and the share is not known.
    #[error(
        "with --isolate process (or auto, with --allow-modules, --library or --allow-run) each session reserves \
         --max-memory of --max-total-memory ({max_total_memory}): give --max-memory, and no more than that"
    )]
    NoShare {
        /// The memory of all sessions.
        max_total_memory: ByteSize,
    },
    /// No session could begin with so few open files.
    #[error("--max-open-files {max_open_files} is too few: a session takes {needed} of them itself")]
    TooFewOpenFiles {
        /// Maximum number of open files of one session.
        max_open_files: u64,
        /// Number of them that a session needs.
        needed: u64,
    },
    /// A session process could not open enough files.
    #[error("--isolate-files {isolate_files} is too few: a session process needs about {MIN_FILES} for itself")]
    TooFewFiles {
        /// Maximum number of open files.
        isolate_files: u64,
    },
    /// A path is not UTF-8.
    #[error("the configuration cannot be written as text: use UTF-8 names for files")]
    NotText {
        /// Error of the serializer.
        source: Box<toml::ser::Error>,
    },
    /// A program that clients may run is given by a path that depends on the folder.
    #[error("--allow-run '{program}' is no program: give a name, an absolute path, or any for all programs")]
    RunProgram {
        /// The program, as it was given.
        program: String,
    },
    /// A program that clients may run is given by a pattern, or with spaces around it.
    #[error(
        "--allow-run '{program}' names no program: patterns and spaces stand for themselves, so give each name or path \
         letter by letter, or any for all programs"
    )]
    RunPattern {
        /// The program, as it was given.
        program: String,
    },
    /// A device, or a kind of devices, has two rules for sessions without a lease.
    #[error("--lease-policy gives {devices} more than one rule")]
    LeaseRules {
        /// The device or the kind.
        devices: String,
    },
    /// Programs would be run for anyone who can connect.
    #[error(
        "--allow-run lets clients run programs as the user of this server, and other machines can connect without \
         proof of identity: give --token-file (needed with --relay) or --client-ca, or listen on \
         tcp://127.0.0.1:PORT or unix:PATH"
    )]
    RunWithoutIdentity,
    /// Programs would run in the process of the server.
    #[error("--allow-run needs sessions with processes of their own, on Linux: give --isolate process or auto")]
    RunWithoutIsolation,
    /// The program cannot be started again as the process of a session.
    #[error(
        "with --isolate process (or auto, with --allow-modules, --library or --allow-run) this program is started \
         again for each session: its main must begin with a call of rpc_server::isolate::run_if_isolated"
    )]
    NoIsolationHook,
}

/// Error of the start of a server.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The configuration is wrong.
    #[error("the configuration cannot be used")]
    Config(#[from] ConfigError),
    /// An address cannot be listened on, or standard input and output cannot be used.
    #[error("cannot listen")]
    Listen(#[from] TransportError),
    /// The folder for workspaces cannot be used.
    #[error("cannot use the folder {} for the files of sessions", workdir.display())]
    Workdir {
        /// The folder.
        workdir: PathBuf,
        /// The reason.
        source: crate::workspace::WorkspaceError,
    },
    /// The ready file cannot be written.
    #[error("cannot write the ready file {}", file.display())]
    ReadyFile {
        /// The file.
        file: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// The store of modules or the list of digests cannot be used.
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
        /// Error of the system.
        source: io::Error,
    },
    /// The tracker's page cannot be served at its address.
    #[error("cannot serve the status page on {address}")]
    Page {
        /// The address.
        address: SocketAddr,
        /// Error of the system.
        source: io::Error,
    },
    /// The controller of a Disco session cannot be joined.
    #[error("cannot join the controller at {address}")]
    Controller {
        /// The controller.
        address: Address,
        /// The reason.
        source: RpcError,
    },
    /// MPI cannot be started.
    #[error("cannot start MPI")]
    Mpi {
        /// The reason.
        source: RpcError,
    },
    /// The export of spans cannot be started.
    #[error("cannot export spans to {endpoint}")]
    Otlp {
        /// The collector.
        endpoint: OtlpEndpoint,
        /// The reason.
        source: io::Error,
    },
    /// Certificates or tokens cannot be used.
    #[error("certificates or tokens cannot be used")]
    Trust(#[from] TrustError),
    /// The rights of clients cannot be used.
    #[error("the rights of clients cannot be used (--policy)")]
    Policy(#[from] PolicyError),
    /// The async runtime cannot be started.
    #[error("cannot start the runtime")]
    Runtime(#[source] io::Error),
    /// Signals cannot be received.
    #[error("cannot receive signals")]
    Signals(#[source] io::Error),
}
