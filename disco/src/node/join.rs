//! Joining a session: a program dials the controller and serves it as a node.

use std::net::IpAddr;
use std::time::Duration;

use rpc_core::proto::KEEP_ALIVE;
use rpc_core::{Devices, ErrorKind, Registry, Result as RpcResult, RpcError, SessionLimits};
use rpc_transports::{
    Access, Address, Backoff, ConnectError, Dial, ParkOptions, SPIN, ServeOptions, Server, Transports,
};
use tokio::time::Instant;

use crate::completion::Completion;
use crate::error::{DiscoError, Result};
use crate::node::functions::register;
use crate::node::self_start::WorkerSettings;
use crate::node::server::server_of;
use crate::weights::folders::WeightFolders;

/// Rank of a node among the nodes of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NodeRank {
    /// Number of the node, from 0.
    pub rank: u32,
    /// Number of nodes.
    pub nodes: u32,
}

/// Variables in which launchers tell their processes their rank, and the launchers' names. One that
/// may run inside of another comes first.
const LAUNCHERS: [(&str, &str, &str); 4] = [
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "Open MPI"),
    ("PMI_RANK", "PMI_SIZE", "PMI"),
    ("RANK", "WORLD_SIZE", "torchrun"),
    ("SLURM_PROCID", "SLURM_NTASKS", "Slurm"),
];

/// Key of a node that dials in; its rank is behind it if it names one.
const KEY: &str = "disco";

impl NodeRank {
    /// Returns the rank that the launcher of this process gives: Open MPI, one that speaks PMI,
    /// torchrun, or Slurm. `None` without a launcher.
    ///
    /// # Errors
    ///
    /// Variables that are not numbers, or do not fit each other.
    pub fn from_environment() -> Result<Option<Self>> {
        Self::from_variables(|name| std::env::var(name).ok())
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        for (rank_name, nodes_name, launcher) in LAUNCHERS {
            let (Some(rank), Some(nodes)) = (variable(rank_name), variable(nodes_name)) else { continue };
            let node_rank = (rank.parse().ok()).zip(nodes.parse().ok()).map(|(rank, nodes)| Self { rank, nodes });
            return match node_rank {
                Some(node_rank) if node_rank.rank < node_rank.nodes => Ok(Some(node_rank)),
                _ => Err(DiscoError::invalid(format!(
                    "the environment of {launcher} says {rank_name}={rank} and {nodes_name}={nodes}, which is no \
                     rank among nodes"
                ))),
            };
        }
        Ok(None)
    }

    fn key(node_rank: Option<Self>) -> String {
        node_rank.map_or_else(|| KEY.to_owned(), |Self { rank, nodes }| format!("{KEY}.{rank}.{nodes}"))
    }

    /// Returns the rank in a key, which a node may leave open; `None` if the key is none of a
    /// node.
    pub(crate) fn of_key(key: &str) -> Option<Option<Self>> {
        let node_rank = key.strip_prefix(KEY)?;
        if node_rank.is_empty() {
            return Some(None);
        }
        let (rank, nodes) = node_rank.strip_prefix('.')?.split_once('.')?;
        Some(Some(Self { rank: rank.parse().ok()?, nodes: nodes.parse().ok()? }))
    }
}

/// Options of a node that joins a session by dialling its controller.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct JoinOptions {
    /// Rank of the node. Default: one that is free.
    pub rank: Option<NodeRank>,
    /// Tokens and trust with which the controller is dialled. Default: neither.
    pub dial: Dial,
    /// Transports by which the controller is dialled. Default: those that this program was compiled
    /// with.
    pub transports: Transports,
    /// Access policy for a controller that the node has dialled: the controller proves itself by
    /// this. Default: any controller, so that the dialling alone counts.
    pub access: Access,
    /// Longest time for attempts to reach a controller that is not there. Default: 60 s.
    pub connect_timeout: Duration,
    /// Address at which the node's workers listen for the data of others. Default: as the
    /// controller says, or else none that other machines reach.
    pub data_address: Option<IpAddr>,
    /// The devices of its workers. Default: `cpu` alone.
    pub devices: Devices,
    /// Folders from which its workers read weights. Default: none, so that they get the tensors
    /// that they load from others.
    pub weights: Option<WeightFolders>,
    /// A controller that says nothing for this long is tested, and is lost after three times as
    /// long. Default: 5 s.
    pub keep_alive: Duration,
}

impl Default for JoinOptions {
    fn default() -> Self {
        Self {
            rank: None,
            dial: Dial::default(),
            transports: Transports::default(),
            access: Access::default(),
            connect_timeout: Duration::from_secs(60),
            data_address: None,
            devices: Devices::new(),
            weights: None,
            keep_alive: KEEP_ALIVE,
        }
    }
}

/// The pauses between attempts to reach a controller.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Makes this program a node of the session whose controller listens at `controller` (a
/// [`NodeListener`](crate::NodeListener)): its workers call the functions of `registry`. Resolves
/// when the session has ended.
///
/// Its errors are a controller that cannot be reached in time, refuses, or goes before it has taken
/// the node into a session.
pub fn join(registry: &Registry, controller: &str, options: JoinOptions) -> Completion<()> {
    register(registry);
    let (registry, controller) = (registry.clone(), controller.to_owned());
    Completion::spawn(async move {
        let controller: Address =
            controller.parse().map_err(|error| DiscoError::invalid(format!("'{controller}': {error}")))?;
        let serve = ServeOptions {
            access: options.access.clone(),
            onward: options.dial.clone(),
            transports: options.transports.clone(),
            keep_alive: options.keep_alive,
            spin: SPIN,
            ..ServeOptions::default()
        };
        let node = WorkerSettings::new(SessionLimits::default(), options.weights.clone());
        let server = server_of(registry, options.devices, node, None, options.data_address, serve);
        Ok(join_with(&server, &controller, options.rank, options.connect_timeout).await?)
    })
}

/// As [`join`], with sessions of `server`, whose registry has disco's functions: it is dialled by
/// [`ServeOptions::onward`]. Inside of a tokio runtime. Dropping the future gives up the waiting; a
/// session that there is already goes on.
///
/// # Errors
///
/// As there.
pub async fn join_with(
    server: &Server,
    controller: &Address,
    node_rank: Option<NodeRank>,
    connect_timeout: Duration,
) -> RpcResult<()> {
    let park = ParkOptions { key: NodeRank::key(node_rank), capacity: 1, ..ParkOptions::default() };
    let deadline = Instant::now() + connect_timeout;
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let mut is_told = false;
    loop {
        let error = match server.park_once(controller, &park).await {
            Ok(true) => return Ok(()),
            Ok(false) => {
                let text = format!(
                    "the controller at {controller} took this node and there was no session: one does not trust the \
                     other, or it was given up"
                );
                return Err(RpcError::new(ErrorKind::PeerLost, text));
            }
            Err(error) => error,
        };
        let pause = backoff.pause();
        // The controller may not be there yet. A peer that has refused once will refuse again.
        if !matches!(error, ConnectError::Transport(_)) || Instant::now() + pause >= deadline {
            return Err(error.into_rpc_error().context(format_args!("joining the controller at {controller}")));
        }
        if !std::mem::replace(&mut is_told, true) {
            tracing::warn!(%controller, %error, "the controller is not there; trying again for {connect_timeout:?}");
        }
        tokio::time::sleep(pause).await;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn rank_in(variables: &[(&str, &str)]) -> Result<Option<NodeRank>> {
        let variables: HashMap<_, _> = variables.iter().copied().collect();
        NodeRank::from_variables(|name| variables.get(name).map(|value| (*value).to_owned()))
    }

    #[test]
    fn launchers_say_which_node_this_is() {
        let third = Some(NodeRank { rank: 3, nodes: 8 });
        for (rank, nodes, _) in LAUNCHERS {
            assert_eq!(rank_in(&[(rank, "3"), (nodes, "8")]), Ok(third));
            assert_eq!(rank_in(&[(rank, "3")]), Ok(None));
            let error = rank_in(&[(rank, "8"), (nodes, "8")]).unwrap_err().to_string();
            assert!(error.contains(&format!("{rank}=8")), "{error}");
            rank_in(&[(rank, "one"), (nodes, "8")]).unwrap_err();
        }
        // mpirun inside of an allocation, whose own numbers are those of the batch script.
        let [(rank, nodes, _), ..] = LAUNCHERS;
        let nested = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1"), (rank, "3"), (nodes, "8")];
        assert_eq!(rank_in(&nested), Ok(third));
        assert_eq!(rank_in(&[]), Ok(None));
    }

    #[test]
    fn ranks_survive_the_key() {
        for node_rank in [None, Some(NodeRank { rank: 3, nodes: 8 })] {
            assert_eq!(NodeRank::of_key(&NodeRank::key(node_rank)), Some(node_rank));
        }
        for key in ["", "board", "disco.", "disco.1", "disco.x.2", "disco1", "disco.1.2.3"] {
            assert_eq!(NodeRank::of_key(key), None, "{key}");
        }
    }
}
