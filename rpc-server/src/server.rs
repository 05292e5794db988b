//! A server as a library: what `rpc-server serve` runs, for programs that bring functions of their own.
//!
//! ```
//! use rpc_core::Registry;
//! use rpc_server::config::ServeConfig;
//! use rpc_server::server::RpcServer;
//! use rpc_transports::Connector;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! # let folder = tempfile::tempdir()?;
//! let config = ServeConfig {
//!     listen: vec!["tcp://127.0.0.1:0".parse()?],
//! #   workdir: folder.path().to_owned(),
//!     ..ServeConfig::default()
//! };
//! let running = RpcServer::builder().registry(registry).config(config).build().start().await?;
//!
//! let session = Connector::new().connect(&running.addresses()[0].to_string()).await?;
//! let add = session.function::<(i64, i64), i64>("add").await?;
//! assert_eq!(add.call((1, 2)).await?, 3);
//! drop((add, session));
//! running.drain().await;
//! # Ok(())
//! # }
//! ```

mod ready;
mod signals;

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use disco::{DataAddress, NodeSettings, WeightFolders};
use rpc_core::{
    DeviceType, Devices, HandleQuota, LocalSession, Registry, RpcError, SessionLimits, SharedSession, ThreadQuota,
};
use rpc_transports::tracker::DeviceOffer;
use rpc_transports::{
    Access, Address, Connector, DialOptions, FunctionPatterns, ListenOptions, OpenRequest, ParkOptions, RequestPolicy,
    ServeOptions, Server, ServerTls, SessionFactory, TokioSpawner, WireLimits, exec,
};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use self::ready::ReadyFile;
use self::signals::Signals;
use crate::config::{ConfigError, Isolate, ListenAddress, ServeConfig, ServeError, TrackerAddress};
use crate::isolate::Isolation;
use crate::modules::{DigestList, ModuleService, Native};
use crate::monitor::{Gauges, Monitoring, Phase};
use crate::node::Join;
use crate::otel::Spans;
use crate::session::{Cleaner, Client, ServerState, SessionWorkspace, Source};
use crate::tracker::{Gate, Registrar, Told};
use crate::trust::{ClientTrust, ServerTrust, TrustError};
use crate::workspace::{WorkspaceLimits, WorkspaceRoot};
use crate::{builtins, isolate, modules};

/// How long clients are waited for that are being told why their sessions end.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How long files of sessions may take to be removed at the end. Functions that still run keep theirs.
const CLEANING: Duration = Duration::from_secs(5);

/// How often named workspaces that nobody uses are looked for.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(3600);

/// Makes an [`RpcServer`].
pub struct ServerBuilder {
    registry: Registry,
    devices: Devices,
    config: ServeConfig,
    relay: bool,
    reloaded: Option<Reloaded>,
    gauges: Option<Arc<dyn Gauges>>,
}

/// Is told how others are dialled from now on.
type Reloaded = Box<dyn Fn(DialOptions) + Send + Sync>;

impl ServerBuilder {
    /// The functions and module loaders. Those of [`builtins`] are added to it. Without this there are only those.
    #[must_use]
    pub fn registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
    }

    /// The devices; `cpu` alone without this.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// The settings; the defaults without this.
    #[must_use]
    pub fn config(mut self, config: ServeConfig) -> Self {
        self.config = config;
        self
    }

    /// Makes it a relay, which opens no sessions: see [`ServeOptions::relay`].
    #[must_use]
    pub(crate) fn relay(mut self) -> Self {
        self.relay = true;
        self
    }

    /// Has `tell` know of the credentials for dialling others whenever they have been read again.
    #[must_use]
    pub(crate) fn on_reload(mut self, tell: impl Fn(DialOptions) + Send + Sync + 'static) -> Self {
        self.reloaded = Some(Box::new(tell));
        self
    }

    /// Shows these among the metrics, if there are any.
    #[must_use]
    pub(crate) fn gauges(mut self, gauges: Arc<dyn Gauges>) -> Self {
        self.gauges = Some(gauges);
        self
    }

    /// Makes the server, which does nothing until it is started.
    pub fn build(self) -> RpcServer {
        builtins::register(&self.registry);
        disco::register(&self.registry);
        RpcServer {
            registry: self.registry,
            devices: self.devices,
            config: self.config,
            relay: self.relay,
            reloaded: self.reloaded,
            gauges: self.gauges,
            also: Vec::new(),
            join: None,
        }
    }
}

impl std::fmt::Debug for ServerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ServerBuilder").field("config", &self.config).finish_non_exhaustive()
    }
}

/// A server that has not been started.
pub struct RpcServer {
    registry: Registry,
    devices: Devices,
    config: ServeConfig,
    relay: bool,
    reloaded: Option<Reloaded>,
    gauges: Option<Arc<dyn Gauges>>,
    /// Lines to be announced after the addresses.
    also: Vec<String>,
    /// Whom to join.
    join: Option<Join>,
}

impl RpcServer {
    /// A server to be configured.
    pub fn builder() -> ServerBuilder {
        ServerBuilder {
            registry: Registry::new(),
            devices: Devices::new(),
            config: ServeConfig::default(),
            relay: false,
            reloaded: None,
            gauges: None,
        }
    }

    /// Joins a controller when it serves, and stops when that one's session ends.
    pub(crate) fn join(&mut self, join: Join) {
        self.join = Some(join);
    }

    /// Prints this, too, when it serves.
    pub(crate) fn announce_also(&mut self, line: String) {
        self.also.push(line);
    }

    /// Starts to serve. Needs a tokio runtime with I/O and time, on which asynchronous functions run too.
    ///
    /// When this returns all addresses are bound, and the ready file is written.
    ///
    /// # Errors
    ///
    /// The configuration, an address that cannot be listened on, the folder for workspaces, the address for metrics, the ready
    /// file.
    pub async fn start(self) -> Result<Running, ServeError> {
        let Self { registry, devices, mut config, relay, reloaded, gauges, also: _, join: _ } = self;
        if config.isolate == Isolate::Auto {
            config.isolate = choose_isolation(&config, &devices);
        }
        config.check()?;
        // First of all: it must be gone before anything goes wrong, so that nobody takes an old one for ours.
        let ready = config.ready_file.as_deref().map(ReadyFile::claim).transpose()?;
        // Before anything is printed, which would go to the peer.
        let channel = if config.stdio { Some(exec::stdio_channel().await?) } else { None };
        let (trust, onward) = (config.trust(), config.onward());
        let (credentials, dial) = (trust.load()?, onward.dial_options()?);
        let workspaces = open_workspaces(&config).await?;
        let isolated = config.isolate == Isolate::Process;
        let (digests, modules) = prepare_modules(&config, &registry).await?;
        let state = ServerState::new(config.key.clone(), config.total_memory().0, isolated);
        let monitoring = match &config.metrics {
            Some(address) => Some(Monitoring::start(address.0, registry.clone(), state.clone(), gauges).await?),
            None => None,
        };
        let gate = (!config.tracker.is_empty()).then(|| Gate::new(config.allow_direct));
        let offered = if gate.is_some() { offered_devices(devices.clone()).await } else { Vec::new() };
        let cleaner = Cleaner::start();
        let (factory, isolation) = if isolated {
            let isolation =
                Arc::new(Isolation::new(&config, digests, workspaces.clone(), cleaner.clone(), state.clone())?);
            (Factory::Isolated(isolation.clone()), Some(isolation))
        } else {
            let factory = LocalFactory {
                registry,
                devices,
                limits: session_limits(&config),
                threads: ThreadQuota::new(config.max_total_threads),
                handles: HandleQuota::new(config.max_total_handles),
                workspaces: workspaces.clone(),
                cleaner: cleaner.clone(),
                spawner: Arc::new(TokioSpawner::current()),
                state: state.clone(),
                data_address: config.data_address,
                weights: config.weights.clone(),
                modules,
                worker_settings: modules::worker::handed_down(&config),
            };
            (Factory::Local(factory), None)
        };
        let mut options = serve_options(&config, credentials.access, dial.clone());
        options.relay = relay;
        let factory: Arc<dyn SessionFactory> = match &monitoring {
            Some(monitoring) => {
                options.observer = Some(monitoring.observer());
                monitoring.metered(factory)
            }
            None => Arc::new(factory),
        };
        let spans = config.otlp_endpoint.as_ref().map(Spans::start).transpose()?;
        let factory = match &spans {
            Some(spans) => spans.traced(factory),
            None => factory,
        };
        let factory = match &gate {
            Some(gate) => gate.guard(factory),
            None => factory,
        };
        let connector = Connector::new().dial_options(dial.clone()).keep_alive(config.keep_alive.0);
        // From here on an early return stops what was begun.
        let mut running = Running {
            server: Server::new(factory, options),
            trust,
            onward,
            tls: credentials.tls,
            isolation,
            cleaner,
            addresses: Vec::with_capacity(config.listen.len()),
            state,
            drain_timeout: config.drain_timeout.0,
            housekeeping: tokio::spawn(expire(workspaces)),
            ready,
            monitoring,
            spans,
            registrar: None,
            reloaded,
        };
        let port_range = config.port_range.as_ref().map(|range| range.0.clone());
        let options = ListenOptions { port_range, tls: running.tls.clone(), ..ListenOptions::default() };
        for ListenAddress(address) in &config.listen {
            if !(address.is_loopback() || address.is_encrypted() && running.trust.demands()) {
                tracing::warn!(%address, "other machines can connect, and nobody makes sure of who they are (--insecure)");
            }
            let address = running.server.listen(address, &options).await?;
            tracing::info!(%address, "listening");
            running.addresses.push(address);
        }
        if let Some(channel) = channel {
            running.server.serve_channel(channel);
        }
        if let Some(ready) = &running.ready {
            ready.write(&running.addresses)?;
        }
        let relays = relays(&config);
        for relay in &relays {
            let options = ParkOptions {
                key: relay.key().unwrap_or_default().to_owned(),
                capacity: config.capacity as usize,
                handshake_timeout: config.handshake_timeout.0,
            };
            tracing::info!(%relay, "clients may come by way of the relay");
            running.server.park(relay, &options);
        }
        if let Some(gate) = &gate {
            let trackers: Vec<_> = config.tracker.iter().map(|TrackerAddress(address)| address.clone()).collect();
            let told = told(&config, &running.addresses, &relays, offered);
            running.registrar = Some(Registrar::start(&trackers, &connector, gate, &told));
        }
        running.enter(Phase::Ready);
        Ok(running)
    }

    /// Starts to serve, prints `listening on ADDRESS` for each address on standard output, then `metrics on URL` if there
    /// are any, and serves until SIGTERM or SIGINT. Then clients are told to go, and their sessions may end within the
    /// drain time-out; a second signal stops at once. SIGHUP has certificates and tokens read again.
    ///
    /// With `stdio`, or for a controller that it has joined, it also stops when that session ends; with `exit_with_stdin`, when standard input ends.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub async fn run_until_signal(mut self) -> Result<StopReason, ServeError> {
        let mut signals = Signals::install().map_err(ServeError::Signals)?;
        let (stdio, watch_stdin) = (self.config.stdio, self.config.exit_with_stdin);
        let (also, join) = (std::mem::take(&mut self.also), self.join.take());
        let running = self.start().await?;
        announce(&running, &also);
        let session_of_controller = async {
            match &join {
                Some(join) => join.run(&running.server).await,
                None => std::future::pending().await,
            }
        };
        let stdin_end = async { if watch_stdin { stdin_end().await } else { std::future::pending().await } };
        let only_session_ended = async { if stdio { running.idle().await } else { std::future::pending().await } };
        tokio::select! {
            signal = signals.next_but_hangup(|| running.reload_and_log()) => tracing::info!(signal, "draining: no new sessions; a second signal stops at once"),
            () = stdin_end => {
                running.end().await;
                return Ok(StopReason::StdinEnded);
            }
            joined = session_of_controller => {
                running.end().await;
                return joined.map(|()| StopReason::SessionEnded);
            }
            () = only_session_ended => {
                running.end().await;
                return Ok(StopReason::SessionEnded);
            }
        }
        tokio::select! {
            () = running.drain() => {}
            signal = signals.next() => {
                running.end_now().await;
                return Ok(StopReason::SecondSignal(signal));
            }
        }
        Ok(StopReason::Drained)
    }

    /// As [`run_until_signal`](Self::run_until_signal), on a runtime of its own. Blocks.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start); and if the runtime cannot be started.
    pub fn run_blocking(self) -> Result<StopReason, ServeError> {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rpc-server").build();
        let runtime = runtime.map_err(ServeError::Runtime)?;
        let reason = runtime.block_on(self.run_until_signal());
        // What still runs cannot be waited for: it may take hours.
        runtime.shutdown_background();
        reason
    }
}

impl std::fmt::Debug for RpcServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RpcServer").field("config", &self.config).finish_non_exhaustive()
    }
}

/// Why a server has stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// After a signal, all sessions ended, or were ended after the drain time-out.
    Drained,
    /// A second signal, by its number, stopped it at once.
    SecondSignal(i32),
    /// The session on standard input and output ended, or that of the controller.
    SessionEnded,
    /// Standard input ended.
    StdinEnded,
}

impl StopReason {
    /// The exit code that says so: 128 and the signal's number after a second signal, as shells have it, else 0.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::SecondSignal(signal) => u8::try_from(128 + signal).unwrap_or(u8::MAX),
            Self::Drained | Self::SessionEnded | Self::StdinEnded => 0,
        }
    }
}

/// A server that serves. Dropping it stops it now.
pub struct Running {
    server: Server,
    trust: ServerTrust,
    onward: ClientTrust,
    tls: Option<ServerTls>,
    isolation: Option<Arc<Isolation>>,
    cleaner: Arc<Cleaner>,
    addresses: Vec<Address>,
    state: Arc<ServerState>,
    drain_timeout: Duration,
    housekeeping: JoinHandle<()>,
    /// Removed with this.
    ready: Option<ReadyFile>,
    monitoring: Option<Monitoring>,
    spans: Option<Spans>,
    registrar: Option<Registrar>,
    reloaded: Option<Reloaded>,
}

impl Running {
    /// What is listened on, with the ports that were chosen, in the order of the configuration.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Where metrics and health are served, with the port that was chosen, if they are.
    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.monitoring.as_ref().map(Monitoring::address)
    }

    /// Reads certificates and tokens again, and uses them for all connections from now on. If one cannot be used, nothing
    /// changes. Blocks, shortly.
    ///
    /// # Errors
    ///
    /// The file that cannot be read or used.
    pub fn reload(&self) -> Result<(), TrustError> {
        let onward = self.onward.dial_options()?;
        self.server.set_access(self.trust.reload(self.tls.as_ref())?);
        if let Some(registrar) = &self.registrar {
            registrar.set_dial_options(onward.clone());
        }
        if let Some(reloaded) = &self.reloaded {
            reloaded(onward.clone());
        }
        self.server.set_onward(onward);
        Ok(())
    }

    /// Live sessions.
    pub fn sessions(&self) -> usize {
        self.server.sessions()
    }

    /// What the server's functions can find out about it.
    pub fn state(&self) -> &Arc<ServerState> {
        &self.state
    }

    /// Stops in good order: clients are told to go, no session begins, and those that there are may end within the drain
    /// time-out. What is left then is stopped. Returns when the processes of isolated sessions have ended, too.
    pub async fn drain(&self) {
        // First of all: whoever sends clients here should send them elsewhere.
        self.enter(Phase::Draining);
        self.server.drain(self.drain_timeout).await;
        let left = self.server.sessions();
        if left > 0 {
            tracing::warn!(sessions = left, limit = ?self.drain_timeout, "not all sessions ended in time; stopping them");
        }
        self.end().await;
    }

    /// Stops now: sessions end, and what was in progress fails. Does not wait for clients to be told. The processes of
    /// isolated sessions end [soon](isolate::GRACE).
    pub fn stop(&self) {
        self.enter(Phase::Draining);
        self.server.stop();
    }

    /// Stops, and waits until clients have been told, and for the processes of isolated sessions.
    async fn end(&self) {
        // They are killed after the grace, which begins when their session has ended, which takes a moment.
        self.end_within(LAST_WORDS, 2 * isolate::GRACE).await;
    }

    /// Stops, and kills the processes of isolated sessions.
    async fn end_now(&self) {
        self.end_within(LAST_WORDS / 2, Duration::ZERO).await;
    }

    async fn end_within(&self, words: Duration, grace: Duration) {
        self.stop();
        self.server.stopped(words).await;
        if let Some(isolation) = &self.isolation {
            isolation.end(grace).await;
        }
        if let Some(spans) = &self.spans {
            spans.end().await;
        }
        let cleaner = self.cleaner.clone();
        let cleaned = tokio::task::spawn_blocking(move || cleaner.flush(CLEANING)).await;
        if !cleaned.unwrap_or(false) {
            tracing::warn!("files of sessions are left; the next server with this folder removes them");
        }
    }

    /// Resolves when there is no session.
    pub async fn idle(&self) {
        self.server.idle().await;
    }

    fn reload_and_log(&self) {
        match self.reload() {
            Ok(()) => tracing::info!("certificates and tokens have been read again"),
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                tracing::error!(%error, cause, "certificates and tokens stay as they were");
            }
        }
    }

    fn enter(&self, phase: Phase) {
        if let (Phase::Draining, Some(registrar)) = (phase, &self.registrar) {
            registrar.leave();
        }
        if let Some(monitoring) = &self.monitoring {
            monitoring.enter(phase);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.housekeeping.abort();
        self.server.stop();
    }
}

impl std::fmt::Debug for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Running")
            .field("addresses", &self.addresses)
            .field("state", &self.state)
            .finish_non_exhaustive()
    }
}

/// Where the sessions of the server come from.
enum Factory {
    Local(LocalFactory),
    /// Each from a process of its own.
    Isolated(Arc<Isolation>),
}

#[async_trait]
impl SessionFactory for Factory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        match self {
            Self::Local(factory) => factory.open(request).await,
            Self::Isolated(isolation) => isolation.open(request).await,
        }
    }
}

/// Gives each client a local session of its own.
struct LocalFactory {
    registry: Registry,
    devices: Devices,
    limits: SessionLimits,
    threads: Arc<ThreadQuota>,
    handles: Arc<HandleQuota>,
    workspaces: WorkspaceRoot,
    cleaner: Arc<Cleaner>,
    spawner: Arc<TokioSpawner>,
    state: Arc<ServerState>,
    data_address: Option<IpAddr>,
    weights: Vec<PathBuf>,
    modules: Option<Arc<ModuleService>>,
    worker_settings: Option<Arc<NodeSettings>>,
}

impl LocalFactory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let source = match &request.workspace {
            // Opened now, so that a name that cannot be had is an error of the handshake.
            Some(name) => {
                let (root, identity, name) = (self.workspaces.clone(), request.identity.clone(), name.clone());
                let opened = tokio::task::spawn_blocking(move || root.named(&identity, &name)).await;
                Source::Opened(opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?)
            }
            None => Source::Private(self.workspaces.clone()),
        };
        let mut session = LocalSession::builder(self.registry.clone())
            .devices(self.devices.clone())
            .limits(self.limits.clone())
            .total_threads(self.threads.clone())
            .total_handles(self.handles.clone())
            .total_memory(self.state.memory().clone())
            .workspace(Arc::new(SessionWorkspace::new(source, self.cleaner.clone())))
            .extension(self.state.clone())
            .extension(Arc::new(Client { peer: request.peer.clone(), identity: request.identity.clone() }))
            .extension(Arc::new(request.onward.clone()))
            .spawner(self.spawner.clone());
        if let Some(address) = self.data_address {
            session = session.extension(Arc::new(DataAddress(address)));
        }
        if !self.weights.is_empty() {
            session = session.extension(Arc::new(WeightFolders::new(&self.weights)));
        }
        if let Some(modules) = &self.modules {
            session = session.extension(modules.clone());
        }
        if let Some(settings) = &self.worker_settings {
            session = session.extension(settings.clone());
        }
        Ok(self.state.count_local(session.build()))
    }
}

/// What `auto` means with these settings and devices.
fn choose_isolation(config: &ServeConfig, devices: &Devices) -> Isolate {
    // Not weighed against other settings: native code in a process with others' sessions is for the operator to choose.
    if config.runs_native_code() {
        return Isolate::Process;
    }
    let has_gpu = devices.kind(DeviceType::CUDA).is_ok_and(|api| api.count().is_ok_and(|count| count > 0));
    match isolate::suits(config) {
        Ok(()) if has_gpu => Isolate::Process,
        Err(reason) if has_gpu => {
            // What is set may be for sessions in one process, and nobody has asked for others.
            tracing::warn!(reason, "sessions share this process, and what one of them does to a GPU befalls all");
            Isolate::None
        }
        _ => Isolate::None,
    }
}

/// Looks whether modules and libraries can be had, so that the operator hears of it and not the first client. The result is for the
/// processes of sessions the list of modules, and for sessions in this process all that they need: there the libraries are loaded.
async fn prepare_modules(
    config: &ServeConfig,
    registry: &Registry,
) -> Result<(Option<DigestList>, Option<Arc<ModuleService>>), ServeError> {
    let (config, registry) = (config.clone(), registry.clone());
    let prepare = move || {
        let digests = config.module_digests.as_deref().map(DigestList::read).transpose()?;
        let native = Native::new(&config);
        let service = ModuleService::open(&config, digests.clone(), &native)?;
        let loaded = match config.isolate {
            Isolate::Process if !isolate::is_possible() => return Err(ConfigError::NoIsolationHook.into()),
            Isolate::Process => modules::check_libraries(&native),
            Isolate::None | Isolate::Auto => native.offer_libraries(&registry),
        };
        loaded.map_err(ServeError::Library)?;
        Ok((digests, service))
    };
    let prepared = tokio::task::spawn_blocking(prepare).await;
    prepared.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// What trackers are told of the devices. Drivers may take their time to say.
async fn offered_devices(devices: Devices) -> Vec<DeviceOffer> {
    let described = tokio::task::spawn_blocking(move || DeviceOffer::of(devices.describe())).await;
    described.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

/// The relays, each with the name that clients ask it for. A tracker gives out one server and no other with the same key, so
/// that the name says which one it is.
fn relays(config: &ServeConfig) -> Vec<Address> {
    // Without random numbers, what tells the servers of one machine apart has to do.
    let random = getrandom::u32().unwrap_or_else(|_| std::process::id());
    let key = config.pool_key().unwrap_or_default();
    let unique = format!("{key}-{random:08x}");
    let name = if config.tracker.is_empty() { key } else { &unique };
    let named = |ListenAddress(address): &ListenAddress| match address.key() {
        Some(_) => address.clone(),
        // The configuration was checked.
        None => address.clone().with_key(name).unwrap_or_else(|_| address.clone()),
    };
    config.relay.iter().map(named).collect()
}

/// What trackers are told of a server that listens on `addresses`.
fn told(config: &ServeConfig, addresses: &[Address], relays: &[Address], devices: Vec<DeviceOffer>) -> Told {
    let advertised = config.advertise.iter().map(|ListenAddress(address)| address.to_string());
    let mut address: Vec<String> = advertised.collect();
    if let ([], Some(first)) = (&address[..], addresses.first()) {
        // With its key, so that clients cannot take another server for it.
        let with_key = config.key.as_deref().and_then(|key| first.clone().with_key(key).ok());
        address.push(with_key.unwrap_or_else(|| first.clone()).to_string());
    }
    if let ([], Some(relay)) = (&address[..], relays.first()) {
        address.push(relay.to_string());
    }
    Told {
        name: rustix::system::uname().nodename().to_string_lossy().into_owned(),
        key: config.pool_key().unwrap_or_default().to_owned(),
        labels: config.label.iter().map(|label| (label.name.clone(), label.value.clone())).collect(),
        devices,
        capacity: config.capacity,
        address,
    }
}

// All fields are written out, so that a limit that is added there is not forgotten here.

pub(crate) fn session_limits(config: &ServeConfig) -> SessionLimits {
    SessionLimits {
        max_requests: config.max_requests as usize,
        max_queued_bytes: usize::try_from(config.max_queued.0).unwrap_or(usize::MAX),
        max_handles: config.max_handles,
        max_memory: config.max_memory.0,
        max_threads: config.max_threads,
    }
}

fn serve_options(config: &ServeConfig, access: Access, onward: DialOptions) -> ServeOptions {
    ServeOptions {
        key: config.key.clone().unwrap_or_default(),
        keep_alive: config.keep_alive.0,
        handshake_timeout: config.handshake_timeout.0,
        limits: wire_limits(config),
        max_total_queued: config.max_total_queued.0,
        max_sessions: config.max_sessions,
        max_sessions_per_peer: config.max_sessions_per_peer,
        max_handshakes: config.max_handshakes,
        session_duration: config.session_duration.map(|limit| limit.0),
        idle_timeout: config.idle_timeout.map(|limit| limit.0),
        write_timeout: config.write_timeout.0,
        min_rate: config.min_rate.0,
        access,
        allow_forward: config.allow_forward.clone(),
        forward_policy: forward_policy(config),
        trust_proxy: config.trust_proxy.clone(),
        onward,
        relay: false,
        observer: None,
    }
}

fn forward_policy(config: &ServeConfig) -> Option<Arc<dyn RequestPolicy>> {
    let patterns = (!config.forward_functions.is_empty()).then(|| config.forward_functions.clone())?;
    Some(Arc::new(FunctionPatterns::new(patterns)))
}

pub(crate) fn wire_limits(config: &ServeConfig) -> WireLimits {
    WireLimits {
        max_message: config.max_message.0,
        chunk: u32::try_from(config.max_frame.0).unwrap_or(u32::MAX),
        max_requests: config.max_requests,
        window: config.max_queued.0,
    }
}

async fn open_workspaces(config: &ServeConfig) -> Result<WorkspaceRoot, ServeError> {
    let mut limits = WorkspaceLimits::with_quota(config.workspace_quota.0);
    limits.named_expiry = config.workspace_expiry.0;
    let workdir = config.workdir.clone();
    let folder = workdir.clone();
    let opened = tokio::task::spawn_blocking(move || WorkspaceRoot::open(&folder, limits)).await;
    let opened = opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    opened.map_err(|source| ServeError::Workdir { workdir, source })
}

async fn expire(workspaces: WorkspaceRoot) {
    let mut ticks = tokio::time::interval(EXPIRY_INTERVAL);
    loop {
        ticks.tick().await;
        let workspaces = workspaces.clone();
        match tokio::task::spawn_blocking(move || workspaces.expire(SystemTime::now())).await {
            Ok(Ok(0)) => {}
            Ok(Ok(count)) => tracing::info!(count, "removed named workspaces that were not used for long"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot remove old workspaces"),
            Err(error) => tracing::error!(%error, "removing old workspaces failed"),
        }
    }
}

fn announce(running: &Running, also: &[String]) {
    let mut stdout = io::stdout().lock();
    for address in &running.addresses {
        // Nobody may be reading, and that is no reason to stop.
        let _ = writeln!(stdout, "listening on {address}");
    }
    if let Some(address) = running.metrics_address() {
        let _ = writeln!(stdout, "metrics on http://{address}");
    }
    for line in also {
        let _ = writeln!(stdout, "{line}");
    }
    let _ = stdout.flush();
}

/// Resolves when standard input ends. It is read on a thread of its own, which the runtime would otherwise wait for.
async fn stdin_end() {
    let (ended, end) = oneshot::channel::<()>();
    let watch = move || {
        let _ended = ended;
        let mut buffer = [0; 1024];
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return,
                _ => {}
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("rpc-stdin".into()).spawn(watch) {
        tracing::error!(%error, "cannot watch standard input");
        return std::future::pending().await;
    }
    // The sender is dropped, not used.
    let _ = end.await;
}
