//! Sessions in the server's own process: one [`LocalSession`] for each client.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use disco::{DataAddress, HostTable, WeightFolders};
use rpc_core::{
    DeviceGate, Devices, HandleQuota, LocalSession, Registry, RpcError, SessionLimits, SharedSession, ThreadQuota,
};
use rpc_transports::{OpenRequest, SessionFactory, TokioSpawner};

use super::options::session_limits;
use super::server_state::{Client, ServerState};
use super::session_workspace::{Cleaner, FILES_OF_WORKSPACE, SessionWorkspace, WorkspaceSource};
use crate::builtins::ListenQuota;
use crate::config::ServeConfig;
use crate::file_cache::FileCache;
use crate::handed_down::SettingsForWorkers;
use crate::leases::{LeaseGate, LeasePolicy, LeaseService, Leases};
use crate::modules::ModuleService;
use crate::offers::{OfferTable, PeerQuota};
use crate::policy::{Ceiling, ClientIdentity, rights_of, session_limits_within};
use crate::recent_logs::{self, Logs};
use crate::workspace::WorkspaceRoot;

/// Factory of local sessions.
pub(super) struct LocalSessions {
    registry: Registry,
    devices: Devices,
    limits: SessionLimits,
    total_threads: Arc<ThreadQuota>,
    total_handles: Arc<HandleQuota>,
    workspaces: WorkspaceRoot,
    cleaner: Arc<Cleaner>,
    spawner: Arc<TokioSpawner>,
    state: Arc<ServerState>,
    data_address: Option<IpAddr>,
    weights: Vec<PathBuf>,
    modules: Option<Arc<ModuleService>>,
    worker_settings: Option<SettingsForWorkers>,
    lease_policy: LeasePolicy,
    /// Log lines of the server, if clients may read them.
    logs: Option<Arc<Logs>>,
    ceiling: Option<Arc<Ceiling>>,
    offers: Arc<OfferTable>,
    keep_alive: Duration,
    file_cache: Option<Arc<FileCache>>,
    /// Workers of Disco in this process.
    disco_hosts: Arc<HostTable>,
}

impl LocalSessions {
    /// Returns a factory for a server with these settings. Needs a tokio runtime, on which
    /// asynchronous functions will run.
    pub(super) fn new(
        config: &ServeConfig,
        registry: Registry,
        devices: Devices,
        modules: Option<Arc<ModuleService>>,
        workspaces: WorkspaceRoot,
        cleaner: Arc<Cleaner>,
        state: Arc<ServerState>,
    ) -> Self {
        let total_threads = ThreadQuota::new(config.max_total_threads);
        Self {
            registry,
            devices,
            limits: session_limits(config),
            offers: OfferTable::new(total_threads.clone(), state.memory().clone()),
            keep_alive: config.keep_alive.0,
            total_threads,
            total_handles: HandleQuota::new(config.max_total_handles),
            workspaces,
            cleaner,
            spawner: Arc::new(TokioSpawner::current()),
            state,
            data_address: config.data_address,
            weights: config.weights.clone(),
            modules,
            worker_settings: SettingsForWorkers::of(config),
            lease_policy: LeasePolicy::new(&config.lease_policy),
            logs: recent_logs::ring().filter(|_| config.allow_logs == Some(true)).map(|ring| Arc::new(Logs(ring))),
            ceiling: None,
            file_cache: FileCache::of(config),
            disco_hosts: Arc::default(),
        }
    }

    /// Returns the offers of the sessions, for the handshakes of other servers.
    pub(super) fn offers(&self) -> &Arc<OfferTable> {
        &self.offers
    }

    /// Sets the ceiling of the policy, by which functions answer questions about rights.
    pub(super) fn with_ceiling(mut self, ceiling: Ceiling) -> Self {
        self.ceiling = Some(Arc::new(ceiling));
        self
    }
}

#[async_trait]
impl SessionFactory for LocalSessions {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let rights = rights_of(request)?;
        let source = match &request.workspace {
            // Opened here and not at its first use, so that an unavailable name is an error of the
            // handshake.
            Some(name) => {
                let open = request.open_files.reserve(FILES_OF_WORKSPACE)?;
                let (root, identity, name) = (self.workspaces.clone(), request.identity.clone(), name.clone());
                let opened = tokio::task::spawn_blocking(move || root.named(&identity, &name)).await;
                let opened = opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
                WorkspaceSource::Opened(opened, open)
            }
            None => WorkspaceSource::Private(self.workspaces.clone()),
        };
        let limits = session_limits_within(rights.as_deref(), self.limits.clone());
        let client = Arc::new(ClientIdentity(request.peer_identity.to_string()));
        let mut session = LocalSession::builder(self.registry.clone())
            .devices(self.devices.clone())
            .limits(limits.clone())
            .total_threads(self.total_threads.clone())
            .total_handles(self.total_handles.clone())
            .total_memory(self.state.memory().clone())
            .workspace(Arc::new(SessionWorkspace::new(source, self.cleaner.clone(), request.open_files.clone())))
            .open_files(request.open_files.clone())
            .extension(self.state.clone())
            .extension(Arc::new(Client {
                peer: request.peer.clone(),
                machine: request.machine,
                identity: request.identity.clone(),
                peer_identity: request.peer_identity.to_string(),
                through_hop: request.onward.is_through_hop(),
            }))
            .extension(Arc::new(request.onward.clone()))
            .extension(Arc::new(self.disco_hosts.entry(request.peer_identity.to_string())))
            .extension(Arc::new(ListenQuota::new(&limits)))
            .extension(client.clone())
            .spawner(self.spawner.clone());
        if let Some(ceiling) = &self.ceiling {
            session = session.extension(ceiling.clone());
        }
        if let Some(cache) = &self.file_cache {
            session = session.extension(cache.clone());
        }
        if let Some(rights) = rights {
            session = session.access_control(rights);
        }
        if let Some(logs) = &self.logs {
            session = session.extension(logs.clone());
        }
        if let Some(address) = self.data_address {
            session = session.extension(Arc::new(DataAddress(address)));
        }
        if !self.weights.is_empty() {
            session = session.extension(Arc::new(WeightFolders::new(&self.weights)));
        }
        if let Some(modules) = &self.modules {
            session = session.extension(modules.clone());
        }
        if let Some(settings) = self.worker_settings.as_ref().and_then(|settings| settings.in_session(&client)) {
            session = session.extension(settings);
        }
        let leases = self
            .state
            .leases()
            .map(|leases| Arc::new(leases.open_session(&request.peer_identity, request.connection.clone())));
        let mut gate = None;
        if let Some(leases) = &leases {
            let service: Arc<dyn LeaseService> = Arc::new(Arc::downgrade(leases));
            gate = LeaseGate::new(&self.lease_policy, service.clone()).map(|gate| gate as Arc<dyn DeviceGate>);
            if let Some(gate) = &gate {
                session = session.device_gate(gate.clone());
            }
            session = session.extension(Arc::new(Leases(service)));
        }
        session = session.extension(Arc::new(PeerQuota::new(
            Some(self.offers.clone()),
            gate,
            self.keep_alive,
            request.is_encrypted,
        )));
        Ok(self.state.count_local(session.build(), leases))
    }
}
