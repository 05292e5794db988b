//! The settings of a server: `rpc-server serve`.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rpc_core::proto::KEEP_ALIVE;
use rpc_transports::{Address, Transports};
use serde::{Deserialize, Serialize};

use super::listen_address::{RELAY_PORT, SERVER_PORT, check_addresses, check_metrics, fill_ports, loopback};
use super::units::seconds;
use super::{
    ByteSize, ConfigError, Label, ListenAddress, OtlpEndpoint, PortRange, Span, TrackerAddress, TvmProxyAddress,
    TvmTrackerAddress, machine_memory,
};
use crate::file_limit;
use crate::isolate::FILES_OF_SESSION;
use crate::leases::LeaseRule;
use crate::pki::trust::{ClientTrust, ServerTrust};
use crate::server::session_workspace::FILES_OF_WORKSPACE;

listener_settings! {
    ServeSettings => ServeConfig, "RPC_SERVER", "a server";
    settings {
        /// Address to listen on, such as tcp://127.0.0.1:9090, quic://board.lan:9090,
        /// tls://0.0.0.0:0 or unix:/run/rpc.sock; may be repeated, or given as a list with commas.
        /// Default: tcp://127.0.0.1:9090, or none with --stdio, --relay or --tvm-proxy
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        listen: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_LISTEN";
        /// Folder for the files of sessions, also of named workspaces
        #[arg(value_name = "FOLDER")]
        workdir: PathBuf = default_workdir(), "RPC_SERVER_WORKDIR";
        /// Maximum number of sessions; more are refused. Default: 4096, or less if this process may
        /// open fewer than 11000 files
        max_sessions: usize = file_limit::share(3, 4096) as usize, "RPC_SERVER_MAX_SESSIONS";
        /// Maximum number of sessions of one client, known by its proven identity or else by the
        /// address of its machine; more are refused. Default: 1024, or less if this process may
        /// open fewer than 8300 files
        max_sessions_per_peer: usize = file_limit::share(1, 1024) as usize, "RPC_SERVER_MAX_SESSIONS_PER_PEER";
        /// Maximum device memory of one session
        #[arg(value_name = "SIZE")]
        max_memory: ByteSize = ByteSize::UNLIMITED, "RPC_SERVER_MAX_MEMORY";
        /// Maximum number of objects of one session
        max_handles: usize = 1 << 20, "RPC_SERVER_MAX_HANDLES";
        /// Maximum number of objects of all sessions together. Not with --isolate process
        max_total_handles: usize = 16 << 20, "RPC_SERVER_MAX_TOTAL_HANDLES";
        /// Maximum number of requests in progress in one session; more wait
        max_requests: u32 = 1024, "RPC_SERVER_MAX_REQUESTS";
        /// Maximum number of files and connections that are open for one session beside its own
        /// connection: files of its workspace, servers to which it is forwarded, what functions
        /// count, what a controller of Disco makes its node open; with --isolate process also the
        /// session's process, which has as many again. Default: 1,024, or fewer if that is more
        /// than an eighth of what this process may open (ulimit -n), but 256 at least
        max_open_files: u64 = file_limit::share(1, 1024).max(256), "RPC_SERVER_MAX_OPEN_FILES";
        /// Maximum number of those for all sessions together. Default: half of what this process
        /// may open (ulimit -n)
        max_total_open_files: u64 = file_limit::share(4, u64::MAX), "RPC_SERVER_MAX_TOTAL_OPEN_FILES";
        /// Maximum bytes of waiting arguments of one session; more wait at the client. At least
        /// --max-message
        #[arg(value_name = "SIZE")]
        max_queued: ByteSize = ByteSize(65 << 20), "RPC_SERVER_MAX_QUEUED";
        /// Maximum bytes of waiting requests and replies of all sessions together, beside eight
        /// frames for each; requests beyond it fail. Default: a quarter of the memory
        #[arg(value_name = "SIZE")]
        max_total_queued: ByteSize = machine_memory::quarter_of_memory(), "RPC_SERVER_MAX_TOTAL_QUEUED";
        /// Maximum number of threads for functions of one session; more calls wait
        max_threads: usize = 64, "RPC_SERVER_MAX_THREADS";
        /// Maximum number of threads for functions of all sessions together, beside one for each
        /// session. Not with --isolate process
        max_total_threads: usize = 1024, "RPC_SERVER_MAX_TOTAL_THREADS";
        /// Maximum payload of a frame; copies are split into frames
        #[arg(value_name = "SIZE")]
        max_frame: ByteSize = ByteSize(1 << 20), "RPC_SERVER_MAX_FRAME";
        /// Maximum size of a request and of a reply; tensors and files travel in pieces and may be
        /// larger
        #[arg(value_name = "SIZE")]
        max_message: ByteSize = ByteSize(64 << 20), "RPC_SERVER_MAX_MESSAGE";
        /// Silence after which a connection is tested; after three times as long it is dead
        #[arg(value_name = "TIME")]
        keep_alive: Span = Span(KEEP_ALIVE), "RPC_SERVER_KEEP_ALIVE";
        /// Look for requests for some 50 µs before a thread sleeps, where that saves the time of
        /// waking it. Calls take less time, and the server takes more of its cores
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        spin: bool = false, "RPC_SERVER_SPIN";
        /// Time after which the connection of a client that reads nothing is closed
        #[arg(value_name = "TIME")]
        write_timeout: Span = seconds(60), "RPC_SERVER_WRITE_TIMEOUT";
        /// Minimum rate, per second and over each --write-timeout, at which a client must send a
        /// message that it has begun, and read what it is sent; 0 for no limit
        #[arg(value_name = "SIZE")]
        min_rate: ByteSize = ByteSize(64), "RPC_SERVER_MIN_RATE";
        /// Maximum time of one lease on a device. A session that keeps one for longer is ended; one
        /// that has released it may ask again
        #[arg(value_name = "TIME")]
        max_lease: Span = seconds(3600), "RPC_SERVER_MAX_LEASE";
        /// Treatment of sessions that use a device while another one holds a lease on it, such as
        /// cuda=wait or cuda:1=refuse: share (they use it beside the holder), wait, or refuse; may
        /// be repeated, or given as a list with commas. Default: share
        #[arg(value_name = "DEVICE=RULE", value_delimiter = ',')]
        lease_policy: Vec<LeaseRule> = Vec::new(), "RPC_SERVER_LEASE_POLICY";
        /// Maximum size of one workspace
        #[arg(value_name = "SIZE")]
        workspace_quota: ByteSize = ByteSize(4 << 30), "RPC_SERVER_WORKSPACE_QUOTA";
        /// Maximum size of the cache of files, by which a client sends the same file once to its
        /// programs (rpc-cli run); 0 for none. It is for all clients together: the one whose files
        /// take most makes room, by those that it has not used for longest
        #[arg(value_name = "SIZE")]
        file_cache: ByteSize = ByteSize(1 << 30), "RPC_SERVER_FILE_CACHE";
        /// Time after the last use at which a named workspace or a file of the cache is removed
        #[arg(value_name = "TIME")]
        workspace_expiry: Span = seconds(30 * 24 * 3600), "RPC_SERVER_WORKSPACE_EXPIRY";
        /// Time that sessions have to end after the first signal
        #[arg(value_name = "TIME")]
        drain_timeout: Span = seconds(30), "RPC_SERVER_DRAIN_TIMEOUT";
        /// Servers to which clients may be forwarded, such as tcp://10.0.0.5:9090 or
        /// tls://*.lab:9090, where * is any text within the host, the port or the scheme; programs
        /// (exec:, ssh:) and paths (unix:) must be named without *; may be repeated, or given as a
        /// list with commas. Default: none
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_forward: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_FORWARD";
        /// Services that clients may reach through this server with 'rpc-cli forward', such as
        /// tcp://127.0.0.1:8080 or unix:/run/x.sock, by the rules of --allow-forward; may be
        /// repeated, or given as a list with commas. Default: none
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_port: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_PORT";
        /// Addresses at which clients may have this server listen for them with 'rpc-cli forward
        /// -R', tcp:// or unix:, such as tcp://127.0.0.1:8080, tcp://127.0.0.1:* or
        /// unix:/run/x.sock, by the rules of --allow-forward; may be repeated, or given as a list
        /// with commas. Default: none
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_listen: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_LISTEN";
        /// Servers to which this one may connect to send tensors for its clients directly, such as
        /// tls://10.0.0.*:9090, by the rules of --allow-forward; it shows them nothing but what
        /// they have given the client for that. May be repeated, or given as a list with commas.
        /// Default: none, and such tensors go through the client
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        allow_peer: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_PEER";
        /// Addresses of this server for other servers that send tensors to its clients; may be
        /// repeated, or given as a list with commas. Default: those that it listens on, but those
        /// for all interfaces, and those of the loopback interface for clients elsewhere. Without
        /// effect where sessions have processes of their own (--isolate), which are not sent to
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        peer_address: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_PEER_ADDRESS";
        /// Functions that forwarded clients may use, with * for any text, such as rpc.* or
        /// model.run; may be repeated, or given as a list with commas. Default: all. rpc.functions
        /// and rpc.signature, which describe all functions, must be named without *. Requests in a
        /// tunnel are not seen and not limited
        #[arg(value_name = "PATTERN", value_delimiter = ',')]
        forward_functions: Vec<String> = Vec::new(), "RPC_SERVER_FORWARD_FUNCTIONS";
        /// Servers that may state the identity of the clients that they forward, such as
        /// token:gateway or cert:gateway, or the name alone for both; may be repeated, or given as
        /// a list with commas
        #[arg(value_name = "NAME", value_delimiter = ',')]
        trust_proxy: Vec<String> = Vec::new(), "RPC_SERVER_TRUST_PROXY";
        /// Folders of model weights that Disco workers may read here for their controllers, which
        /// may be any clients; may be repeated, or given as a list with commas. Default: none
        #[arg(value_name = "FOLDER", value_delimiter = ',')]
        weights: Vec<PathBuf> = Vec::new(), "RPC_SERVER_WEIGHTS";
        /// Accept native modules from clients and run them: shared libraries that follow the ABI of
        /// TVM-FFI, and OpenCL's kernels for processors. Admitted clients can then do everything
        /// that the user of the server can do
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_modules: bool = false, "RPC_SERVER_ALLOW_MODULES";
        /// Serve clients of TVM (tvm.rpc.connect), too, at the same addresses. Their protocol knows
        /// no identity and no encryption: the addresses must be local to this machine, unless
        /// --insecure is given, and the server must demand no proof of identity
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        tvm: bool = false, "RPC_SERVER_TVM";
        /// Offer the functions by which TVM's own programs check a server, such as rpc.test.addone
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        tvm_self_test: bool = false, "RPC_SERVER_TVM_SELF_TEST";
        /// Programs that clients may run in their sessions, by the name or path that the client
        /// gives (a name is looked up in the PATH of the server), or any for all; may be repeated,
        /// or given as a list with commas. Needs --isolate process or auto, and clients that prove
        /// who they are. It is no sandbox: a program can do everything that the user of the server
        /// can do
        #[arg(value_name = "PROGRAM", value_delimiter = ',')]
        allow_run: Vec<String> = Vec::new(), "RPC_SERVER_ALLOW_RUN";
        /// With --allow-run: variables of the server's environment that programs get, beside PATH
        /// and LD_*; may be repeated, or given as a list with commas
        #[arg(value_name = "NAME", value_delimiter = ',')]
        run_env: Vec<String> = Vec::new(), "RPC_SERVER_RUN_ENV";
        /// With --allow-run: variables that clients may set for the programs of the list; may be
        /// repeated, or given as a list with commas. Some make a program run code of the client,
        /// such as PYTHONPATH. With --allow-run any, clients may set all but the operator's.
        /// Default: none
        #[arg(value_name = "NAME", value_delimiter = ',')]
        run_client_env: Vec<String> = Vec::new(), "RPC_SERVER_RUN_CLIENT_ENV";
        /// With --allow-run: maximum number of processes that a program may have at a time. A
        /// session of the kernel beside the program's own (setsid) counts as a 32nd of it, and 32
        /// at most
        #[arg(value_name = "NUMBER")]
        max_run_processes: u32 = 1024, "RPC_SERVER_MAX_RUN_PROCESSES";
        /// Maximum size of all stored modules; modules unused for --module-expiry make room for
        /// others
        #[arg(value_name = "SIZE")]
        module_store_size: ByteSize = ByteSize(4 << 30), "RPC_SERVER_MODULE_STORE_SIZE";
        /// Maximum size of a module
        #[arg(value_name = "SIZE")]
        max_module: ByteSize = ByteSize(512 << 20), "RPC_SERVER_MAX_MODULE";
        /// Time without use after which a module makes room for another
        #[arg(value_name = "TIME")]
        module_expiry: Span = seconds(30 * 24 * 3600), "RPC_SERVER_MODULE_EXPIRY";
        /// Shared libraries that are loaded for each session. Their global TVM-FFI functions are
        /// offered by name, except for the names of TVM itself, such as rpc.*; may be repeated, or
        /// given as a list with commas. Works without --allow-modules
        #[arg(value_name = "FILE", value_delimiter = ',')]
        library: Vec<PathBuf> = Vec::new(), "RPC_SERVER_LIBRARY";
        /// Shared libraries that modules and --library depend on, such as libtvm_runtime.so of TVM:
        /// loaded for each session before them, with global symbols; may be repeated, or given as a
        /// list with commas. Their functions are not offered
        #[arg(value_name = "FILE", value_delimiter = ',')]
        runtime_library: Vec<PathBuf> = Vec::new(), "RPC_SERVER_RUNTIME_LIBRARY";
        /// Modules of Python whose functions are served: those that are declared with
        /// @tensor_rpc.function; may be repeated, or given as a list with commas. They are imported
        /// at the start, and in each process of a session. Needs the rpc-server that the Python
        /// package brings (pip install tensor-rpc)
        #[arg(value_name = "MODULE", value_delimiter = ',')]
        python: Vec<String> = Vec::new(), "RPC_SERVER_PYTHON";
        /// Process of a session: none runs all sessions in the server's process; process starts a
        /// process for each, so that a crash in a function is an error to one client; auto chooses
        /// process if there are GPUs or OpenCL devices, whose faults affect a whole process, and
        /// with --allow-modules, --library or --allow-run
        #[arg(value_name = "WHERE")]
        isolate: Isolate = Isolate::Auto, "RPC_SERVER_ISOLATE";
        /// With --isolate process: maximum memory for the data of a session process; a larger
        /// allocation fails, which ends most programs
        #[arg(value_name = "SIZE")]
        isolate_memory: ByteSize = ByteSize::UNLIMITED, "RPC_SERVER_ISOLATE_MEMORY";
        /// With --isolate process: maximum number of open files and sockets of a session process
        #[arg(value_name = "NUMBER")]
        isolate_files: u64 = 4096, "RPC_SERVER_ISOLATE_FILES";
        /// Trackers to register with, such as tcp://pool.lan:9190 or tls://pool.lan:9190; may be
        /// repeated, or given as a list with commas. Clients then need a ticket from one of them.
        /// They are trusted by --forward-ca and --forward-token-file
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        tracker: Vec<TrackerAddress> = Vec::new(), "RPC_SERVER_TRACKER";
        /// Relays to wait at, such as tls://gateway.lan:9290/NAME, for a server that clients cannot
        /// dial; may be repeated, or given as a list with commas. Clients connect to the same
        /// address with the NAME. Default NAME: --key, made unique with --tracker. Relays are
        /// trusted by --forward-ca and --forward-token-file
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        relay: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_RELAY";
        /// With --tracker: label that clients can ask for, such as arch=arm64; may be repeated, or
        /// given as a list with commas
        #[arg(value_name = "NAME=VALUE", value_delimiter = ',')]
        label: Vec<Label> = Vec::new(), "RPC_SERVER_LABEL";
        /// With --tracker: address that the tracker gives to clients, after the hops on the way,
        /// separated by commas. Default: the first address that is listened on, or else the first
        /// relay
        #[arg(value_name = "ADDRESS", value_delimiter = ',')]
        advertise: Vec<ListenAddress> = Vec::new(), "RPC_SERVER_ADVERTISE";
        /// With --tracker, --relay or --tvm-proxy: maximum number of clients that the server is
        /// given to at a time
        #[arg(value_name = "NUMBER")]
        capacity: u32 = 1, "RPC_SERVER_CAPACITY";
        /// With --tracker: serve clients without a ticket, too. They occupy slots that the tracker
        /// then does not give out
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_direct: bool = false, "RPC_SERVER_ALLOW_DIRECT";
        /// Serve one session on standard input and output, and stop when it ends
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        stdio: bool = false, "RPC_SERVER_STDIO";
    }
    optional {
        /// Name that clients may ask for, so that they do not reach another server by mistake
        key: String, "RPC_SERVER_KEY";
        /// Serve controllers of Disco, which start workers here that call functions, use memory and
        /// threads, and connect to workers elsewhere. Default: true where clients must prove who
        /// they are (with --relay, by a token) or, without --relay, all addresses are of this
        /// machine
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_disco: bool, "RPC_SERVER_ALLOW_DISCO";
        /// Show recent log lines of the server to clients (rpc-cli logs), which name other clients.
        /// Default: with --policy, to those for whom a rule has 'logs'; else to none
        #[arg(value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
        allow_logs: bool, "RPC_SERVER_ALLOW_LOGS";
        /// File with the rights of clients, in TOML, which is read again at SIGHUP. A client may
        /// then do what a rule for its identity says, within what the other settings allow, and
        /// nothing else. Default: everything that the other settings allow
        #[arg(value_name = "FILE")]
        policy: PathBuf, "RPC_SERVER_POLICY";
        /// IP address on which Disco workers here listen for tensors of other workers. Default: the
        /// choice of the controller, which may relay the tensors
        #[arg(value_name = "IP")]
        data_address: IpAddr, "RPC_SERVER_DATA_ADDRESS";
        /// With --tracker or --tvm-tracker: key that clients ask the tracker for. Default: --key
        tracker_key: String, "RPC_SERVER_TRACKER_KEY";
        /// With --tvm: tracker of TVM to register with, such as pool.lan:9190. Clients of TVM then
        /// need a match key from it, unless --allow-direct is given
        #[arg(value_name = "ADDRESS")]
        tvm_tracker: TvmTrackerAddress, "RPC_SERVER_TVM_TRACKER";
        /// With --tvm: proxy of TVM to wait at for clients, such as gateway.lan:9090, for a server
        /// that clients cannot dial: a relay with --tvm, or tvm.exec.rpc_proxy. Clients connect to
        /// it with the key of this server (--key)
        #[arg(value_name = "ADDRESS")]
        tvm_proxy: TvmProxyAddress, "RPC_SERVER_TVM_PROXY";
        /// With --allow-modules: file with the SHA-256 digests of the only modules that are
        /// accepted, one a line, as sha256sum prints them. It is read at the start, and again by
        /// Disco workers with processes of their own
        #[arg(value_name = "FILE")]
        module_digests: PathBuf, "RPC_SERVER_MODULE_DIGESTS";
        /// Folder for modules, which no other user may write to. Default: a folder in --workdir
        #[arg(value_name = "FOLDER")]
        module_store: PathBuf, "RPC_SERVER_MODULE_STORE";
        /// With --allow-modules or --library: libtvm_ffi.so, or its folder. Default: searched for
        /// in Python environments and system folders
        #[arg(value_name = "FILE")]
        tvm_ffi: PathBuf, "RPC_SERVER_TVM_FFI";
        /// Ports to try if an address has port 0 or its port is in use, such as 9090-9199
        #[arg(value_name = "FIRST-LAST")]
        port_range: PortRange, "RPC_SERVER_PORT_RANGE";
        /// Maximum device memory of all sessions together. Default: nine tenths of the memory of
        /// the machine or of the control group; no limit with --isolate process
        #[arg(value_name = "SIZE")]
        max_total_memory: ByteSize, "RPC_SERVER_MAX_TOTAL_MEMORY";
        /// Time after which a session is ended. Default: no limit
        #[arg(value_name = "TIME")]
        session_duration: Span, "RPC_SERVER_SESSION_DURATION";
        /// Time without a request after which a session is ended. Default: no limit
        #[arg(value_name = "TIME")]
        idle_timeout: Span, "RPC_SERVER_IDLE_TIMEOUT";
        /// With --isolate process: processor time after which a session process is killed, in whole
        /// seconds, rounded up. Default: no limit
        #[arg(value_name = "TIME")]
        isolate_cpu_time: Span, "RPC_SERVER_ISOLATE_CPU_TIME";
        /// Certificates of the authorities of servers to which clients are forwarded, as a PEM file
        #[arg(value_name = "FILE")]
        forward_ca: PathBuf, "RPC_SERVER_FORWARD_CA";
        /// Certificate for servers to which clients are forwarded, as a PEM file
        #[arg(value_name = "FILE", requires = "forward_cert_key")]
        forward_cert: PathBuf, "RPC_SERVER_FORWARD_CERT";
        /// Private key of --forward-cert, as a PEM file
        #[arg(value_name = "FILE", requires = "forward_cert")]
        forward_cert_key: PathBuf, "RPC_SERVER_FORWARD_CERT_KEY";
        /// File of tokens that prove this server to those to which clients are forwarded
        #[arg(value_name = "FILE")]
        forward_token_file: PathBuf, "RPC_SERVER_FORWARD_TOKEN_FILE";
        /// Export a span of each call to the OpenTelemetry collector at this URL, such as
        /// http://127.0.0.1:4318, to which /v1/traces is added. Default: off. Needs a server built
        /// with the feature otel
        #[arg(value_name = "URL")]
        otlp_endpoint: OtlpEndpoint, "RPC_SERVER_OTLP_ENDPOINT";
    }
}

impl ServeConfig {
    fn listen_by_default(&mut self) {
        if self.listen.is_empty() && !self.stdio && self.relay.is_empty() && self.tvm_proxy.is_none() {
            self.listen.push(loopback(SERVER_PORT));
        }
        fill_ports(&mut self.listen, SERVER_PORT);
        fill_ports(&mut self.relay, RELAY_PORT);
    }

    /// Returns the files by which this server and those to which it forwards authenticate each
    /// other.
    pub fn onward(&self) -> ClientTrust {
        ClientTrust {
            ca: self.forward_ca.clone(),
            cert: self.forward_cert.clone(),
            cert_key: self.forward_cert_key.clone(),
            token_file: self.forward_token_file.clone(),
            plain_servers: false,
        }
    }

    /// Returns the key that clients ask trackers for.
    pub(crate) fn pool_key(&self) -> Option<&str> {
        self.tracker_key.as_deref().or(self.key.as_deref())
    }

    /// Returns the maximum device memory of all sessions: the setting, or the default on this
    /// machine.
    pub fn total_memory(&self) -> ByteSize {
        match self.max_total_memory {
            Some(limit) => limit,
            // The kernel kills single processes when memory runs out. With a total, each session
            // would need a share.
            None if self.wants_processes() => ByteSize::UNLIMITED,
            None => machine_memory::most_of_memory(),
        }
    }

    /// Returns true if controllers of Disco are served: as the setting says, or else if clients
    /// must prove who they are, or can only be on this machine.
    pub(crate) fn serves_disco(&self, transports: &Transports) -> bool {
        self.allow_disco.unwrap_or_else(|| self.knows_clients(transports))
    }

    /// Returns true if clients may read log lines, those whom the policy lets if there is one.
    pub(crate) fn shows_logs(&self) -> bool {
        self.allow_logs.unwrap_or(self.policy.is_some())
    }

    /// Returns true if clients must prove who they are, or can only be on this machine.
    fn knows_clients(&self, transports: &Transports) -> bool {
        let is_local = |address: &ListenAddress| transports.check(&address.0).is_ok_and(|found| found.is_local());
        let knows_direct = self.trust().demands() || self.listen.iter().all(is_local);
        // Clients of a relay can be anywhere, even if the relay is here, and only a token proves
        // anything from end to end. Those of a proxy of TVM prove nothing.
        knows_direct && (self.relay.is_empty() || self.token_file.is_some()) && self.tvm_proxy.is_none()
    }

    /// Returns true if native code is loaded that is not part of this program. Kernels of clients
    /// for an OpenCL device that is a processor are such code, and are taken with modules only.
    pub(crate) fn runs_native_code(&self) -> bool {
        self.allow_modules || !self.library.is_empty() || !self.runtime_library.is_empty()
    }

    /// Returns true if code is run that is not part of this program: native code that it loads, or
    /// programs of clients.
    pub(crate) fn runs_foreign_code(&self) -> bool {
        self.runs_native_code() || !self.allow_run.is_empty()
    }

    /// Returns true if the settings ask for a process for each session, regardless of devices.
    fn wants_processes(&self) -> bool {
        match self.isolate {
            Isolate::Process => true,
            Isolate::Auto => self.runs_foreign_code(),
            Isolate::None => false,
        }
    }

    /// Checks that the settings go together.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Insecure`], [`ConfigError::InsecureMetrics`], [`ConfigError::NotListenable`],
    /// [`ConfigError::Key`], [`ConfigError::StdinTaken`], [`ConfigError::NoShare`],
    /// [`ConfigError::TooFewFiles`], [`ConfigError::NoCertificate`], [`ConfigError::NoOtel`],
    /// [`ConfigError::NoTrackerKey`], [`ConfigError::NothingToAdvertise`],
    /// [`ConfigError::InsecureRelay`], [`ConfigError::NoRelayName`], [`ConfigError::NoTvmFfi`],
    /// [`ConfigError::Zero`], [`ConfigError::NeedsTracker`], [`ConfigError::Pattern`],
    /// [`ConfigError::RunProgram`], [`ConfigError::RunWithoutIdentity`],
    /// [`ConfigError::RunWithoutIsolation`].
    pub fn check(&self) -> Result<(), ConfigError> {
        self.check_with(&crate::transports())
    }

    /// As [`check`](Self::check), for a server that uses these transports.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    pub fn check_with(&self, transports: &Transports) -> Result<(), ConfigError> {
        // Before the addresses: what is said of those would not help here.
        self.check_tvm(transports)?;
        check_addresses(&self.listen, &self.trust(), self.insecure, transports)?;
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
        if self.tracker.is_empty() && self.tvm_tracker.is_none() {
            let of_trackers = [
                ("--label", !self.label.is_empty()),
                ("--advertise", !self.advertise.is_empty()),
                // Without a tracker it is the name at relays.
                ("--tracker-key", self.tracker_key.is_some() && self.relay.is_empty()),
            ];
            if let Some((setting, _)) = of_trackers.into_iter().find(|(_, given)| *given) {
                return Err(ConfigError::NeedsTracker { setting });
            }
        }
        let patterns = [
            ("--allow-forward", &self.allow_forward),
            ("--allow-port", &self.allow_port),
            ("--allow-listen", &self.allow_listen),
            ("--allow-peer", &self.allow_peer),
        ];
        for (setting, patterns) in patterns {
            for pattern in patterns {
                let checked = transports.check_pattern(pattern);
                checked.map_err(|source| ConfigError::Pattern { setting, source })?;
            }
        }
        for (at, rule) in self.lease_policy.iter().enumerate() {
            if self.lease_policy[..at].iter().any(|other| other.devices() == rule.devices()) {
                return Err(ConfigError::LeaseRules { devices: rule.devices() });
            }
        }
        for ListenAddress(address) in &self.relay {
            // Clients of the relay reach this server, and only a token proves anything from end to
            // end.
            let properties = transports.check(address).map_err(|source| ConfigError::Address { source })?;
            let secure = properties.is_local() || (properties.encrypted && self.token_file.is_some());
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
            ("--max-open-files", self.max_open_files),
            ("--max-total-open-files", self.max_total_open_files),
            ("--max-threads", self.max_threads as u64),
            ("--capacity", self.capacity.into()),
            ("--max-frame", self.max_frame.0),
            ("--max-handshakes", self.max_handshakes as u64),
            ("--max-requests", self.max_requests.into()),
            ("--max-handles", self.max_handles as u64),
            ("--max-message", self.max_message.0),
            ("--max-module", self.max_module.0),
            ("--module-store-size", self.module_store_size.0),
            ("--max-run-processes", self.max_run_processes.into()),
            ("--keep-alive", u64::from(!self.keep_alive.0.is_zero())),
            ("--handshake-timeout", u64::from(!self.handshake_timeout.0.is_zero())),
            ("--max-lease", u64::from(!self.max_lease.0.is_zero())),
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
        self.check_run(transports)?;
        let needed = if self.wants_processes() { FILES_OF_SESSION } else { FILES_OF_WORKSPACE };
        if self.max_open_files < needed {
            return Err(ConfigError::TooFewOpenFiles { max_open_files: self.max_open_files, needed });
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

    /// Checks that clients of TVM, who can prove nothing, are served only where nobody has to.
    pub(super) fn check_tvm(&self, transports: &Transports) -> Result<(), ConfigError> {
        if (self.tvm || self.tvm_self_test) && !cfg!(feature = "tvm") {
            return Err(ConfigError::NoTvm);
        }
        if !self.tvm {
            let problem = "it needs --tvm";
            return match () {
                () if self.tvm_tracker.is_some() => Err(ConfigError::TvmTracker { problem }),
                () if self.tvm_proxy.is_some() => Err(ConfigError::TvmProxy { problem }),
                () => Ok(()),
            };
        }
        if self.trust().demands() {
            return Err(ConfigError::TvmWithIdentity);
        }
        self.check_tvm_tracker()?;
        self.check_tvm_proxy(transports)?;
        for ListenAddress(address) in &self.listen {
            let properties = transports.check(address).map_err(|source| ConfigError::Address { source })?;
            if !properties.is_local() && !self.insecure {
                return Err(ConfigError::InsecureTvm { address: address.clone() });
            }
        }
        Ok(())
    }

    /// Checks that a tracker of TVM can give the server out.
    fn check_tvm_tracker(&self) -> Result<(), ConfigError> {
        if self.tvm_tracker.is_none() {
            return Ok(());
        }
        let first = self.advertise.first().or(self.listen.first());
        let problem = if !self.tracker.is_empty() {
            "it is instead of --tracker: places that one tracker gives out, the other cannot take back"
        } else if self.pool_key().is_none_or(str::is_empty) {
            "it needs a key that clients ask for: give --tracker-key, or --key"
        } else if first.is_none_or(|ListenAddress(address)| address.scheme() != "tcp") {
            "clients of TVM need an address: give tcp://HOST:PORT as the first --listen, or as --advertise"
        } else {
            return Ok(());
        };
        Err(ConfigError::TvmTracker { problem })
    }

    /// Checks that a proxy of TVM can bring clients, and may.
    fn check_tvm_proxy(&self, transports: &Transports) -> Result<(), ConfigError> {
        let Some(TvmProxyAddress(address)) = &self.tvm_proxy else { return Ok(()) };
        if !self.tracker.is_empty() || self.tvm_tracker.is_some() {
            let problem =
                "it is instead of --tracker and --tvm-tracker: the proxy registers the servers that wait there";
            return Err(ConfigError::TvmProxy { problem });
        }
        let properties = transports.check(address).map_err(|source| ConfigError::Address { source })?;
        if !properties.is_local() && !self.insecure {
            return Err(ConfigError::InsecureTvmProxy { address: address.clone() });
        }
        Ok(())
    }

    /// Checks that programs are run only for known clients, and outside of the server's process.
    fn check_run(&self, transports: &Transports) -> Result<(), ConfigError> {
        if self.allow_run.is_empty() {
            return Ok(());
        }
        let is_program = |name: &&String| !name.is_empty() && (!name.contains('/') || name.starts_with('/'));
        if let Some(program) = self.allow_run.iter().find(|name| !is_program(name)) {
            return Err(ConfigError::RunProgram { program: program.clone() });
        }
        if let Some(program) = self.allow_run.iter().find(|name| is_ambiguous_program(name)) {
            return Err(ConfigError::RunPattern { program: program.clone() });
        }
        if !self.wants_processes() || !cfg!(target_os = "linux") {
            return Err(ConfigError::RunWithoutIsolation);
        }
        if self.knows_clients(transports) { Ok(()) } else { Err(ConfigError::RunWithoutIdentity) }
    }
}

/// Returns true if a text in a list of programs looks like one that names several: a pattern, or
/// several names in one. Such a text would silently allow nothing.
pub(crate) fn is_ambiguous_program(program: &str) -> bool {
    program.contains(['*', '?', ',']) || program.trim() != program
}

impl ServeConfig {
    /// Checks that the files and folders exist that are opened only when a client needs them.
    /// Blocks shortly.
    ///
    /// # Errors
    ///
    /// [`ConfigError::Path`].
    pub(crate) fn check_paths(&self) -> Result<(), ConfigError> {
        let weights = self.weights.iter().map(|folder| ("--weights", folder, true));
        let tvm_ffi = self.tvm_ffi.iter().map(|file| ("--tvm-ffi", file, false));
        for (setting, path, must_be_folder) in weights.chain(tvm_ffi) {
            let checked = fs::metadata(path).and_then(|facts| match facts.is_dir() || !must_be_folder {
                true => Ok(()),
                false => Err(io::ErrorKind::NotADirectory.into()),
            });
            checked.map_err(|source| ConfigError::Path { setting, path: path.clone(), source: Arc::new(source) })?;
        }
        Ok(())
    }
}

/// Process in which sessions run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Isolate {
    /// `Process` if the server has devices of kind `cuda` or `opencl` and can start such processes,
    /// or runs native modules or libraries; else `None`.
    #[default]
    Auto,
    /// All sessions are in the process of the server: a crash ends all of them. GPUs and OpenCL
    /// devices are not used.
    None,
    /// Each session has a process of its own: see [`isolate`](crate::isolate).
    #[value(help = "Each session has a process of its own")]
    Process,
}

/// Least number of files of a session process: standard input, output and error, the runtime, the
/// connection, the workspace, and a few to spare.
pub(super) const MIN_FILES: u64 = 32;

/// Returns the folder for state of the user's programs: `$XDG_STATE_HOME` or `~/.local/state`;
/// without a home, the folder for temporary files.
fn default_workdir() -> PathBuf {
    let folder = |name| std::env::var_os(name).map(PathBuf::from).filter(|folder: &PathBuf| folder.is_absolute());
    folder("XDG_STATE_HOME")
        .or_else(|| folder("HOME").map(|home| home.join(".local/state")))
        .unwrap_or_else(std::env::temp_dir)
        .join("rpc-server")
}
