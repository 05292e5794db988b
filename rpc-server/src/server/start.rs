//! The start of a server, in stages: [`Checked`] settings and credentials, [`Prepared`] parts, and
//! the [`Running`] server with its addresses bound.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rpc_core::{Devices, Registry};
use rpc_transports::program::Program;
use rpc_transports::{
    AllowedOrigins, Authorizer, Bind, CapabilitySessions, Channel, Connector, Dial, Dialects, ParkOptions,
    ServeObserver, ServeOptions, Server, SessionFactory, Transports, exec,
};

use super::advertisement::{Advertisement, named_relays, offered_devices};
use super::certificate_expiry::CertificateExpiry;
use super::details::DetailsCollector;
use super::functions_used::NotingFactory;
use super::local_sessions::LocalSessions;
use super::options::serve_options;
use super::ready_file::ReadyFile;
use super::recent_errors::{RecentErrors, RefusalRecorder};
use super::registrar::Registrar;
use super::running::{OnReload, ReadOrigins, Running};
use super::server_state::ServerState;
use super::session_workspace::Cleaner;
use super::ticket_gate::TicketGate;
use crate::config::{ConfigError, Isolate, ListenAddress, ServeConfig, ServeError, TrackerAddress};
#[cfg(feature = "tvm")]
use crate::config::{TvmProxyAddress, TvmTrackerAddress};
use crate::file_cache::FileCache;
use crate::isolate::Isolation;
use crate::leases::{LeaseLimits, LeasePolicy, LeaseTable, MAX_REQUESTS, MAX_REQUESTS_PER_SESSION};
use crate::modules::{DigestList, ModuleService, Native, Sharing};
use crate::monitor::{DeviceGauges, Gauges, LeaseGauges, Monitoring, Phase};
use crate::offers::OfferTable;
use crate::otel::Spans;
use crate::pki::trust::ServerCredentials;
use crate::policy::{Ceiling, PolicySource};
#[cfg(feature = "tvm")]
use crate::tvm::proxy::parking::{TvmParking, TvmParkingTerms};
#[cfg(feature = "tvm")]
use crate::tvm::proxy::{TvmProxy, TvmProxyTerms};
#[cfg(feature = "tvm")]
use crate::tvm::tracker::{MatchKeys, TvmAdvertisement, TvmRegistrar};
use crate::workspace::{WorkspaceLimits, WorkspaceRoot};
use crate::{builtins, file_limit, isolate, modules};

/// Interval at which named workspaces that have expired are looked for.
const EXPIRY_INTERVAL: Duration = Duration::from_secs(3600);

/// Interval at which the memory of ended sessions is given back.
const MEMORY_INTERVAL: Duration = Duration::from_secs(20);

/// Number of ended sessions whose memory is worth giving back: about 5 MiB.
const MANY_SESSIONS: u64 = 256;

/// Functions, devices and settings of a server that has not been started.
pub(super) struct ServerParts {
    pub(super) registry: Registry,
    pub(super) devices: Devices,
    pub(super) config: ServeConfig,
    pub(super) transports: Transports,
    pub(super) dialects: Dialects,
    pub(super) is_relay: bool,
    /// Proxy for peers of TVM, with which a relay serves them.
    #[cfg(feature = "tvm")]
    pub(super) tvm_proxy: Option<TvmProxyTerms>,
    pub(super) on_reload: Option<OnReload>,
    pub(super) read_origins: Option<ReadOrigins>,
    pub(super) gauges: Option<Arc<dyn Gauges>>,
    /// Program of session processes; `None` for the running one.
    pub(super) program: Option<Program>,
}

/// Starts a server of these parts. An early return stops what has been started.
pub(super) async fn start(parts: ServerParts) -> Result<Running, ServeError> {
    builtins::register(&parts.registry);
    let checked = Checked::new(parts).await?;
    let prepared = checked.prepare().await?;
    prepared.serve().await
}

/// A server with consistent settings, whose credentials have been read.
struct Checked {
    parts: ServerParts,
    ready_file: Option<ReadyFile>,
    /// Channel over standard input and output, with `stdio`.
    stdio: Option<Channel>,
    credentials: ServerCredentials,
    policy: Option<Arc<PolicySource>>,
    dial: Dial,
}

impl Checked {
    async fn new(mut parts: ServerParts) -> Result<Self, ServeError> {
        let ServerParts { registry, config, devices, transports, .. } = &mut parts;
        if config.isolate == Isolate::Auto {
            config.isolate = choose_isolation(config, devices);
        }
        config.check_with(transports)?;
        config.check_paths()?;
        file_limit::warn_if_exceeded_by(config);
        // Processes of sessions read it, and may know fewer transports.
        config.allow_disco = Some(config.serves_disco(transports));
        config.allow_logs = Some(config.shows_logs());
        builtins::register_disco(registry, config);
        builtins::register_tvm_self_test(registry, config);
        // Done before any step that can fail: the ready file of an earlier server must be gone, or
        // scripts would take it for that of this server.
        let ready_file = config.ready_file.as_deref().map(ReadyFile::claim).transpose()?;
        // Done before any output is printed: standard output belongs to the peer.
        let stdio = if config.stdio { Some(exec::stdio_channel().await?) } else { None };
        let (credentials, dial) = (config.trust().load()?, config.onward().dial_options()?);
        let policy = config.policy.clone().map(|file| PolicySource::open(file, transports.clone())).transpose()?;
        Ok(Self { parts, ready_file, stdio, credentials, policy, dial })
    }

    /// Opens the workspaces and modules, and makes the factory of sessions.
    async fn prepare(self) -> Result<Prepared, ServeError> {
        let Self { parts, ready_file, stdio, credentials, policy, dial } = self;
        let ServerParts {
            registry,
            devices,
            config,
            transports,
            dialects,
            is_relay,
            #[cfg(feature = "tvm")]
            tvm_proxy,
            on_reload,
            read_origins,
            gauges,
            program,
        } = parts;
        let workspaces = open_workspaces(&config).await?;
        let isolated = config.isolate == Isolate::Process;
        let (digests, modules) = prepare_modules(&config, &registry).await?;
        let errors = Arc::<RecentErrors>::default();
        let limits = LeaseLimits {
            max_duration: config.max_lease.0,
            max_requests: MAX_REQUESTS,
            max_requests_per_session: MAX_REQUESTS_PER_SESSION,
        };
        let leases = LeaseTable::start(limits, LeasePolicy::new(&config.lease_policy), errors.clone());
        let total_memory = config.total_memory().0;
        let state = ServerState::new(config.key.clone(), total_memory, isolated, Some(leases.clone()), errors.clone());
        let monitoring = match &config.metrics {
            Some(address) => {
                let own = [Some(Arc::new(LeaseGauges(leases)) as Arc<dyn Gauges>), device_gauges(&devices)];
                let gauges = gauges.into_iter().chain(own.into_iter().flatten()).collect();
                Some(Monitoring::start(address.0, registry.clone(), state.clone(), gauges).await?)
            }
            None => None,
        };
        let gate = (!config.tracker.is_empty())
            .then(|| TicketGate::new(config.allow_direct, config.capacity, config.keep_alive.0));
        let offered = if gate.is_some() { offered_devices(devices.clone()).await } else { Vec::new() };
        let shown_devices = devices.clone();
        let cleaner = Cleaner::start();
        let mut offers = None;
        let (mut factory, isolation): (Arc<dyn SessionFactory>, _) = if isolated {
            let program = program.unwrap_or_else(Program::this);
            let isolation =
                Isolation::new(&config, program, digests, workspaces.clone(), cleaner.clone(), state.clone())?;
            let isolation = Arc::new(isolation);
            (isolation.clone(), Some(isolation))
        } else {
            let (workspaces, cleaner, state) = (workspaces.clone(), cleaner.clone(), state.clone());
            let sessions = LocalSessions::new(&config, registry, devices, modules, workspaces, cleaner, state);
            offers = Some(sessions.offers().clone());
            (Arc::new(sessions.with_ceiling(Ceiling::new(&config, transports.clone()))), None)
        };
        if let Some(monitoring) = &monitoring {
            factory = monitoring.metered(factory);
        }
        let spans = config.otlp_endpoint.as_ref().map(Spans::start).transpose()?;
        if let Some(spans) = &spans {
            factory = spans.traced(factory);
        }
        // Outside of all others, so that sessions in processes are seen as well.
        let ended = Arc::new(AtomicU64::new(0));
        factory = Arc::new(NotingFactory { inner: factory, ended: ended.clone() });
        if let Some(gate) = &gate {
            factory = gate.guard(factory);
        }
        let gauge = credentials.validity.as_ref().and(monitoring.as_ref()).map(Monitoring::certificate_gauge);
        let expiry = CertificateExpiry::new(credentials.validity, gauge);
        let housekeeping = {
            let expiry = expiry.clone();
            let cache = FileCache::to_clean(&config);
            async move {
                let (expired, files) = (remove_expired_workspaces(workspaces), remove_expired_files(cache));
                _ = tokio::join!(expired, files, expiry.warn_daily(), give_back_memory(&ended));
            }
        };
        let observer = RefusalRecorder { errors, inner: monitoring.as_ref().map(Monitoring::observer) };
        let observer = Some(Arc::new(observer) as Arc<dyn ServeObserver>);
        #[cfg(feature = "tvm")]
        let match_keys = config.tvm_tracker.as_ref().zip(config.pool_key());
        #[cfg(feature = "tvm")]
        let match_keys = match_keys.map(|(_, key)| MatchKeys::new(key, config.capacity));
        let dialects = with_tvm(
            dialects,
            &config,
            #[cfg(feature = "tvm")]
            match_keys.clone(),
        );
        let origins = AllowedOrigins::new(config.allow_origin.iter().map(ToString::to_string));
        #[cfg(feature = "tvm")]
        let tvm_proxy = tvm_proxy.map(|terms| TvmProxy::new(terms, origins.clone()));
        #[cfg(feature = "tvm")]
        let dialects = tvm_proxy.iter().fold(dialects, |dialects, proxy| proxy.add_to(dialects));
        let authorizer = policy.clone().map(|policy| policy as Arc<dyn Authorizer>);
        let options =
            serve_options(&config, credentials.access, dial.clone(), transports.clone(), dialects, is_relay, observer);
        let capabilities = offers.clone().map(|offers| offers as Arc<dyn CapabilitySessions>);
        let options = ServeOptions { authorizer, capabilities, ..options };
        let running = Running {
            server: Server::new(factory, options),
            trust: config.trust(),
            policy,
            onward: config.onward(),
            tls: credentials.tls,
            origins,
            read_origins,
            isolation,
            cleaner,
            addresses: Vec::with_capacity(config.listen.len()),
            state,
            drain_timeout: config.drain_timeout.0,
            expiry,
            housekeeping: tokio::spawn(housekeeping),
            ready_file,
            monitoring,
            spans,
            registrar: None,
            #[cfg(feature = "tvm")]
            tvm_registrar: None,
            #[cfg(feature = "tvm")]
            tvm_parking: None,
            on_reload,
        };
        #[cfg(feature = "tvm")]
        let onward = dial.clone();
        let registration = gate.map(|gate| {
            let connector = Connector::new().transports(transports.clone()).dial(dial).keep_alive(config.keep_alive.0);
            Registration { gate, offered, devices: shown_devices, connector }
        });
        Ok(Prepared {
            config,
            transports,
            stdio,
            running,
            registration,
            offers,
            #[cfg(feature = "tvm")]
            match_keys,
            #[cfg(feature = "tvm")]
            tvm_proxy,
            #[cfg(feature = "tvm")]
            onward,
        })
    }
}

/// Parts of a server that registers with trackers.
struct Registration {
    gate: Arc<TicketGate>,
    offered: Vec<rpc_transports::tracker::DeviceOffer>,
    devices: Devices,
    connector: Connector,
}

/// A server whose parts exist, and which does not listen yet.
struct Prepared {
    config: ServeConfig,
    transports: Transports,
    stdio: Option<Channel>,
    running: Running,
    registration: Option<Registration>,
    /// Offers of the sessions to other servers, if the sessions are in this process.
    offers: Option<Arc<OfferTable>>,
    /// Match keys for a tracker of TVM.
    #[cfg(feature = "tvm")]
    match_keys: Option<Arc<MatchKeys>>,
    /// Proxy for peers of TVM.
    #[cfg(feature = "tvm")]
    tvm_proxy: Option<TvmProxy>,
    /// Settings by which a proxy of TVM is dialled.
    #[cfg(feature = "tvm")]
    onward: Dial,
}

impl Prepared {
    /// Listens, then waits at the relays and registers with the trackers.
    async fn serve(self) -> Result<Running, ServeError> {
        let Self { config, transports, stdio, mut running, registration, offers, .. } = self;
        #[cfg(feature = "tvm")]
        let (match_keys, tvm_proxy, onward) = (self.match_keys, self.tvm_proxy, self.onward);
        let port_range = config.port_range.as_ref().map(|range| range.0.clone());
        let options =
            Bind { port_range, tls: running.tls.clone(), origins: running.origins.clone(), ..Bind::default() };
        for ListenAddress(address) in &config.listen {
            let properties = transports.check(address)?;
            if !(properties.is_local() || properties.encrypted && running.trust.demands()) {
                tracing::warn!(%address, "other machines can connect without proof of identity (--insecure)");
            }
            let address = running.server.listen(address, &options).await?;
            tracing::info!(%address, "listening");
            running.addresses.push(address);
        }
        if let Some(offers) = offers {
            offers.set_addresses(&config, &running.addresses, &transports);
        }
        if let Some(channel) = stdio {
            running.server.serve_channel(channel);
        }
        if let Some(ready_file) = &running.ready_file {
            ready_file.write(&running.addresses)?;
        }
        let relays = named_relays(&config);
        for relay in &relays {
            let options = ParkOptions {
                key: relay.key().unwrap_or_default().to_owned(),
                capacity: config.capacity as usize,
                handshake_timeout: config.handshake_timeout.0,
            };
            tracing::info!(%relay, "waiting at the relay for clients");
            running.server.park(relay, &options);
        }
        if let Some(Registration { gate, offered, devices, connector }) = registration {
            let trackers: Vec<_> = config.tracker.iter().map(|TrackerAddress(address)| address.clone()).collect();
            let advertisement = Advertisement::new(&config, &running.addresses, &relays, offered);
            let details = DetailsCollector::start(running.state.clone(), devices);
            running.registrar = Some(Registrar::start(&trackers, &connector, &gate, &advertisement, details));
        }
        #[cfg(feature = "tvm")]
        if let (Some(keys), Some(TvmTrackerAddress(tracker))) = (match_keys, &config.tvm_tracker) {
            let advertised = config.advertise.iter().map(|ListenAddress(address)| address).chain(&running.addresses);
            let advertised = advertised.take(1.max(config.advertise.len())).find_map(TvmAdvertisement::of);
            if let Some(advertised) = advertised {
                running.tvm_registrar = Some(TvmRegistrar::start(tracker, keys, advertised));
            }
        }
        #[cfg(feature = "tvm")]
        if let (Some(proxy), Some(advertised)) = (tvm_proxy, running.addresses.iter().find_map(TvmAdvertisement::of)) {
            proxy.advertise(advertised);
        }
        #[cfg(feature = "tvm")]
        if let Some(TvmProxyAddress(proxy)) = &config.tvm_proxy {
            tracing::info!(%proxy, "waiting at the proxy of TVM for clients");
            let terms = TvmParkingTerms {
                proxy: proxy.clone(),
                key: config.pool_key().unwrap_or_default().to_owned(),
                capacity: config.capacity,
                transports,
                dial: onward_to_proxy(onward, &config),
            };
            let dialect = Arc::new(crate::tvm::TvmDialect::through_proxy(&config));
            running.tvm_parking = Some(TvmParking::start(&running.server, dialect, terms));
        }
        running.enter(Phase::Ready);
        Ok(running)
    }
}

/// Returns the settings by which a proxy of TVM is dialled. The operating system gives up one that
/// is gone, though not one whose client reads slowly.
#[cfg(feature = "tvm")]
fn onward_to_proxy(dial: Dial, config: &ServeConfig) -> Dial {
    let silence = config.keep_alive.0.saturating_mul(3).max(config.write_timeout.0);
    Dial { socket_silence: Some(silence), may_prompt: false, ..dial }
}

/// Adds the dialect of TVM's clients, if the operator has asked for it.
fn with_tvm(
    dialects: Dialects,
    config: &ServeConfig,
    #[cfg(feature = "tvm")] match_keys: Option<Arc<MatchKeys>>,
) -> Dialects {
    #[cfg(feature = "tvm")]
    if config.tvm {
        return dialects.with(crate::tvm::TvmDialect::new(config, match_keys));
    }
    // A build without the protocol refuses the setting.
    #[cfg(not(feature = "tvm"))]
    let _ = config;
    dialects
}

/// Returns the gauges of the devices that tell their state.
fn device_gauges(devices: &Devices) -> Option<Arc<dyn Gauges>> {
    DeviceGauges::start(devices).map(|gauges| Arc::new(gauges) as Arc<dyn Gauges>)
}

/// Returns the isolation that `auto` stands for with these settings and devices.
fn choose_isolation(config: &ServeConfig, devices: &Devices) -> Isolate {
    // Foreign code always needs a process of its own, unless the operator has asked for a shared
    // one.
    if config.runs_foreign_code() {
        return Isolate::Process;
    }
    let has_gpu = isolate::gpu::has_any(devices);
    match isolate::suits(config) {
        Ok(()) if has_gpu => Isolate::Process,
        Err(reason) if has_gpu => {
            // The settings may be meant for sessions in one process, and the operator has not asked
            // for processes.
            tracing::warn!(reason, "sessions share this process, so a fault of a GPU in one session ends all of them");
            Isolate::None
        }
        _ => Isolate::None,
    }
}

/// Checks the modules and libraries, so that errors are found at the start and not by the first
/// client. Returns the list of modules for the processes of sessions, and the module service for
/// sessions in this process. Libraries are loaded here only if sessions are in this process.
async fn prepare_modules(
    config: &ServeConfig,
    registry: &Registry,
) -> Result<(Option<DigestList>, Option<Arc<ModuleService>>), ServeError> {
    let (config, registry) = (config.clone(), registry.clone());
    let prepare = move || {
        let digests = config.module_digests.as_deref().map(DigestList::read).transpose()?;
        let native = Native::new(&config);
        let service = ModuleService::open(&config, digests.clone(), &native, Sharing::Sessions)?;
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

async fn open_workspaces(config: &ServeConfig) -> Result<WorkspaceRoot, ServeError> {
    let mut limits = WorkspaceLimits::with_quota(config.workspace_quota.0);
    limits.named_expiry = config.workspace_expiry.0;
    let workdir = config.workdir.clone();
    let folder = workdir.clone();
    let opened = tokio::task::spawn_blocking(move || WorkspaceRoot::open(&folder, limits)).await;
    let opened = opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    opened.map_err(|source| ServeError::Workdir { workdir, source })
}

/// Gives the memory of ended sessions back to the system, once in each interval in which many have
/// ended.
async fn give_back_memory(ended: &AtomicU64) {
    let (mut ticks, mut before) = (tokio::time::interval(MEMORY_INTERVAL), 0);
    loop {
        ticks.tick().await;
        let now = ended.load(Ordering::Relaxed);
        if now - before >= MANY_SESSIONS {
            before = now;
            if let Err(error) = tokio::task::spawn_blocking(rpc_core::give_back_free_memory).await {
                tracing::error!(%error, "giving back memory failed");
            }
        }
    }
}

/// Removes expired named workspaces once in each interval.
async fn remove_expired_workspaces(workspaces: WorkspaceRoot) {
    at_intervals(move || match workspaces.expire(SystemTime::now()) {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "removed named workspaces that had expired"),
        Err(error) => tracing::warn!(%error, "cannot remove expired workspaces"),
    })
    .await
}

/// Removes files of the cache that have expired, or exceed its size, once in each interval.
async fn remove_expired_files(cache: Option<Arc<FileCache>>) {
    let Some(cache) = cache else { return };
    at_intervals(move || match cache.expire(SystemTime::now()) {
        Ok(0) => {}
        Ok(count) => tracing::info!(count, "removed files of the cache that had expired or exceeded its size"),
        Err(error) => tracing::warn!(%error, "cannot remove expired files of the cache"),
    })
    .await
}

/// Calls a function that blocks now, and once in each interval.
async fn at_intervals(work: impl Fn() + Clone + Send + 'static) {
    let mut ticks = tokio::time::interval(EXPIRY_INTERVAL);
    loop {
        ticks.tick().await;
        if let Err(error) = tokio::task::spawn_blocking(work.clone()).await {
            tracing::error!(%error, "removing what has expired failed");
        }
    }
}
