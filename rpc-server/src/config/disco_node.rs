//! Settings of a Disco node that dials its controller: `rpc-server worker`.

use disco::NodeRank;
use rpc_transports::{Address, Transports};

use super::units::seconds;
use super::{ConfigError, Isolate, ServeConfig, ServeSettings, Span};

/// Settings of a node from the command line and the environment. [`resolve`](Self::resolve) makes a
/// [`WorkerConfig`] of them.
#[derive(Clone, Debug, clap::Args)]
#[non_exhaustive]
pub struct WorkerSettings {
    /// Address of the controller, such as tls://head.lan:9700. The controller is trusted by
    /// --forward-ca and --forward-token-file, and may have to prove itself by --token-file
    #[arg(long, env = "RPC_SERVER_CONTROLLER", value_name = "ADDRESS")]
    pub controller: Address,
    /// Number of this node in the session, from 0. Default: from the environment of Open MPI, PMI,
    /// torchrun or Slurm, or else any number that is free
    #[arg(long, env = "RPC_SERVER_RANK", value_name = "NUMBER", requires = "nodes")]
    pub rank: Option<u32>,
    /// Number of nodes of the session
    #[arg(long, env = "RPC_SERVER_NODES", value_name = "NUMBER", requires = "rank")]
    pub nodes: Option<u32>,
    /// Time limit for reaching the controller, which may not be there yet. Default: 60s
    #[arg(long, env = "RPC_SERVER_JOIN_TIMEOUT", value_name = "TIME")]
    pub join_timeout: Option<Span>,
    /// Take part in an MPI job, which the session may use for its collectives (init_ccl "mpi"): for
    /// processes started by mpirun or srun, all of which must give this flag. Needs a program built
    /// with the feature mpi
    #[arg(long, env = "RPC_SERVER_MPI")]
    pub mpi: bool,
    /// Settings of the session, as those of a server
    #[command(flatten)]
    pub serve: ServeSettings,
}

/// Complete settings of a node.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct WorkerConfig {
    /// Address of the controller.
    pub controller: Address,
    /// Number of the node; `None` for any that is free.
    pub rank: Option<NodeRank>,
    /// Time limit for reaching the controller.
    pub join_timeout: Span,
    /// True to start MPI. Without another source the rank in the job is the number of the node.
    pub mpi: bool,
    /// Settings of the session. Its addresses are listened on, too; there may be none.
    pub serve: ServeConfig,
}

impl WorkerSettings {
    /// Completes the settings with the environment of the launcher, the configuration file and the
    /// defaults.
    ///
    /// # Errors
    ///
    /// The file or the settings are wrong; [`ConfigError::NodeRank`] for the environment of the
    /// launcher; [`ConfigError::InsecureController`]; [`ConfigError::MpiIsolated`];
    /// [`ConfigError::NodeWithoutDisco`].
    pub fn resolve(self) -> Result<WorkerConfig, ConfigError> {
        self.resolve_with(&crate::transports())
    }

    /// As [`resolve`](Self::resolve), for a node with these transports.
    ///
    /// # Errors
    ///
    /// As [`resolve`](Self::resolve).
    pub fn resolve_with(self, transports: &Transports) -> Result<WorkerConfig, ConfigError> {
        let rank = match (self.rank, self.nodes) {
            (Some(rank), Some(nodes)) if rank < nodes => Some(NodeRank { rank, nodes }),
            (Some(rank), Some(nodes)) => {
                let problem = format!("--rank {rank} is none of --nodes {nodes}: ranks begin at 0");
                return Err(ConfigError::NodeRank { problem });
            }
            _ => NodeRank::from_environment().map_err(|error| ConfigError::NodeRank { problem: error.to_string() })?,
        };
        let mut serve = self.serve.with_file()?.complete();
        // The session process would not be part of the job.
        if self.mpi {
            if serve.isolate == Isolate::Process {
                return Err(ConfigError::MpiIsolated);
            }
            serve.isolate = Isolate::None;
        }
        // Without it the controller that is dialled would be refused.
        if serve.allow_disco == Some(false) {
            return Err(ConfigError::NodeWithoutDisco);
        }
        serve.allow_disco = Some(true);
        serve.check_with(transports)?;
        // The controller drives this node, so its identity must be proven.
        let properties = transports.check(&self.controller);
        let properties = properties.map_err(|source| ConfigError::Address { source })?;
        if !properties.is_local() && !properties.encrypted && !serve.insecure {
            return Err(ConfigError::InsecureController { address: self.controller });
        }
        // It is a client as well, which the check of the addresses has not seen.
        let is_known = properties.is_local() || properties.encrypted || serve.token_file.is_some();
        if !serve.allow_run.is_empty() && !is_known {
            return Err(ConfigError::RunWithoutIdentity);
        }
        let join_timeout = self.join_timeout.unwrap_or_else(|| seconds(60));
        Ok(WorkerConfig { controller: self.controller, rank, join_timeout, mpi: self.mpi, serve })
    }
}
