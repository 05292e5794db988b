//! The settings of a worker: a node of a Disco session that dials its controller.

use disco::NodePlace;
use rpc_transports::Address;

use super::{ConfigError, Isolate, ServeConfig, ServeSettings, Span, seconds};

/// Settings of a node as the command line and the environment give them. [`resolve`](Self::resolve) makes a [`WorkerConfig`] of them.
#[derive(Clone, Debug, clap::Args)]
#[non_exhaustive]
pub struct WorkerSettings {
    /// Where the controller listens, such as tls://head.lan:9700. It is trusted by --forward-ca and --forward-token-file, and
    /// may have to prove itself in turn by --token-file
    #[arg(long, env = "RPC_SERVER_CONTROLLER", value_name = "ADDRESS")]
    pub controller: Address,
    /// Which node of the session this is, from 0. Without it what the environment of Open MPI, PMI, torchrun or Slurm says; or else
    /// whichever is left
    #[arg(long, env = "RPC_SERVER_RANK", value_name = "NUMBER", requires = "nodes")]
    pub rank: Option<u32>,
    /// How many nodes the session has
    #[arg(long, env = "RPC_SERVER_NODES", value_name = "NUMBER", requires = "rank")]
    pub nodes: Option<u32>,
    /// How long to try to reach a controller that is not there yet. 60s without it
    #[arg(long, env = "RPC_SERVER_JOIN_TIMEOUT", value_name = "TIME")]
    pub join_timeout: Option<Span>,
    /// Whether this is a process of a job of MPI, which the session may choose for its collectives (init_ccl "mpi"): started by mpirun or srun, with every other process of
    /// the job doing the same. For programs built with the feature mpi
    #[arg(long, env = "RPC_SERVER_MPI")]
    pub mpi: bool,
    /// What holds for the session, as for those of a server
    #[command(flatten)]
    pub serve: ServeSettings,
}

/// The settings of a node, complete.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// Where the controller listens.
    pub controller: Address,
    /// Which node it is; `None` for whichever is left.
    pub place: Option<NodePlace>,
    /// How long to try to reach the controller.
    pub join_timeout: Span,
    /// Whether MPI is to be started. If nothing else says which node it is, its number in the job does.
    pub mpi: bool,
    /// What holds for the session. Addresses in it are listened on, too; there need not be any.
    pub serve: ServeConfig,
}

impl WorkerSettings {
    /// Completes the settings with the environment of the launcher, the configuration file and the defaults.
    ///
    /// # Errors
    ///
    /// What is wrong with the file, with the settings as a whole, or with what the launcher says: [`ConfigError::NodePlace`];
    /// [`ConfigError::InsecureController`]; [`ConfigError::MpiIsolated`].
    pub fn resolve(self) -> Result<WorkerConfig, ConfigError> {
        let place = match (self.rank, self.nodes) {
            (Some(rank), Some(nodes)) if rank < nodes => Some(NodePlace { rank, nodes }),
            (Some(rank), Some(nodes)) => {
                let problem = format!("--rank {rank} is none of --nodes {nodes}: ranks begin at 0");
                return Err(ConfigError::NodePlace { problem });
            }
            _ => {
                NodePlace::from_environment().map_err(|error| ConfigError::NodePlace { problem: error.to_string() })?
            }
        };
        let mut serve = self.serve.with_file()?.complete();
        // The session would be in a process that is none of the job.
        if self.mpi {
            if serve.isolate == Isolate::Process {
                return Err(ConfigError::MpiIsolated);
            }
            serve.isolate = Isolate::None;
        }
        serve.check()?;
        // Whoever is found at the address drives this node.
        if !self.controller.is_loopback() && !self.controller.is_encrypted() && !serve.insecure {
            return Err(ConfigError::InsecureController { address: self.controller });
        }
        let join_timeout = self.join_timeout.unwrap_or_else(|| seconds(60));
        Ok(WorkerConfig { controller: self.controller, place, join_timeout, mpi: self.mpi, serve })
    }
}
