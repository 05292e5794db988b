//! A node of a Disco session as a program: what `rpc-server worker` runs.

use disco::NodeRank;
use rpc_core::{Devices, Registry};
use rpc_transports::{Address, Dialects, Server, Transports};

use crate::config::{ConfigError, Origin, ServeError, WorkerConfig};
use crate::isolate::gpu;
use crate::modules;
use crate::policy;
use crate::server::{RpcServer, StopReason};

/// Controller to join, and the options for it.
#[derive(Debug)]
pub(crate) struct Join {
    controller: Address,
    rank: Option<NodeRank>,
    timeout: std::time::Duration,
}

impl Join {
    /// Joins the controller with sessions of `server`, until its session ends.
    pub(crate) async fn run(&self, server: &Server) -> Result<(), ServeError> {
        // It may wait for long. The record of the session comes at its end.
        tracing::info!(controller = %self.controller, within = ?self.timeout, "joining the controller");
        let joined = disco::join_with(server, &self.controller, self.rank, self.timeout).await;
        joined.map_err(|source| ServeError::Controller { address: self.controller.clone(), source })
    }
}

/// Joins a controller, and serves until the controller's session has ended or a signal arrives.
/// Blocks, on a runtime of its own.
///
/// # Errors
///
/// As [`RpcServer::run_blocking`]; [`ServeError::Controller`]; and [`ServeError::Mpi`].
pub fn run_blocking(config: WorkerConfig) -> Result<StopReason, ServeError> {
    run_blocking_with(config, crate::transports())
}

/// As [`run_blocking`], with these transports.
///
/// # Errors
///
/// As [`run_blocking`].
pub fn run_blocking_with(config: WorkerConfig, transports: Transports) -> Result<StopReason, ServeError> {
    let origins = config.serve.allow_origin.clone();
    run_blocking_reading(config, Registry::new(), transports, Dialects::default(), move || Ok(origins.clone()))
}

/// As [`run_blocking_with`], with functions, with dialects for clients that dial the node, and a
/// reader of the origins that the configuration allows, for each reload.
pub(crate) fn run_blocking_reading(
    config: WorkerConfig,
    registry: Registry,
    transports: Transports,
    dialects: Dialects,
    read_origins: impl Fn() -> Result<Vec<Origin>, ConfigError> + Send + Sync + 'static,
) -> Result<StopReason, ServeError> {
    let WorkerConfig { controller, rank, join_timeout, mpi, serve } = config;
    let job = if mpi { Some(mpi::Job::start().map_err(|source| ServeError::Mpi { source })?) } else { None };
    let rank = rank.or(job.as_ref().map(mpi::Job::rank));
    let server = RpcServer::new(registry).devices(gpu::for_server(&serve)).config(serve).transports(transports);
    let mut server = server.dialects(dialects).read_origins(read_origins);
    server.join(Join { controller, rank, timeout: join_timeout.0 });
    let reason = server.run_blocking();
    // After a signal this process does not wait for the others: the launcher ends them.
    if let Some(job) = job.filter(|_| matches!(reason, Ok(StopReason::SessionEnded) | Err(_))) {
        job.finish();
    }
    reason
}

/// Serves the functions of `registry` as a worker of Disco and exits, if this process was started
/// as one by a server of this program; otherwise returns at once. It is
/// [`disco::serve_if_worker`] with [`worker_devices`] and with the rights that a
/// [policy] gives.
pub fn serve_if_worker(registry: &Registry) {
    disco::serve_if_worker_with_access(registry, || worker_devices(registry), policy::restore);
}

/// Returns the devices of a worker process, with all that its node has handed down: functions of
/// the operator's libraries are added to `registry`, and those of [`gpu::devices`]. For
/// [`serve_if_worker_with`](disco::serve_if_worker_with).
pub fn worker_devices(registry: &Registry) -> Devices {
    modules::worker_modules::offer_libraries(registry);
    gpu::devices(registry)
}

/// Membership of this process in an MPI job.
#[cfg(feature = "mpi")]
mod mpi {
    use disco::NodeRank;
    use disco::ccl::host::mpi::Process;
    use rpc_core::RpcError;

    pub(super) struct Job(&'static Process);

    impl Job {
        pub(super) fn start() -> Result<Self, RpcError> {
            Process::start().map(Self)
        }

        pub(super) fn rank(&self) -> NodeRank {
            NodeRank { rank: self.0.rank(), nodes: self.0.size() }
        }

        /// Ends the membership. Must run on the thread that has started it.
        pub(super) fn finish(self) {
            if let Err(error) = self.0.finish() {
                // The launcher notices the missing part and ends the others.
                tracing::warn!(%error, "this process leaves its MPI job without finishing it");
            }
        }
    }
}

#[cfg(not(feature = "mpi"))]
mod mpi {
    use disco::NodeRank;
    use rpc_core::RpcError;

    pub(super) enum Job {}

    impl Job {
        pub(super) fn start() -> Result<Self, RpcError> {
            let text = "it was built without MPI; build it with: cargo build --release -p rpc-server --features mpi";
            Err(RpcError::unsupported(text))
        }

        pub(super) fn rank(&self) -> NodeRank {
            match *self {}
        }

        pub(super) fn finish(self) {
            match self {}
        }
    }
}
