//! Plan of the data plane: the shape of a session, and how its workers join each other for
//! collectives.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::ops::Range;

use rpc_core::{Device, Packed, Result, RpcError};
use serde::{Deserialize, Serialize};

use crate::ccl::Rank;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::{self, SessionKey};
use crate::error::WorkerId;
use crate::wire::command::{On, Scope};
use crate::wire::grouping::Grouping;
use crate::wire::mesh::Mesh;

/// The most meshes of a session.
pub(crate) const MAX_MESHES: usize = 16;

/// The most groupings of a session's workers: each has communicators.
pub(crate) const MAX_GROUPINGS: usize = 15;

/// The shape of a session: how many workers, in how many groups of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Layout {
    pub(crate) world_size: u32,
    pub(crate) num_groups: u32,
}

impl Layout {
    pub(crate) fn group_size(self) -> u32 {
        self.world_size / self.num_groups
    }

    pub(crate) fn group(self, worker: WorkerId) -> u32 {
        self.grouping(Scope::Group).group(worker)
    }

    pub(crate) fn rank_in_group(self, worker: WorkerId) -> Rank {
        self.grouping(Scope::Group).rank(worker)
    }

    /// Returns the grouping of a scope: all workers are one group.
    pub(crate) fn grouping(self, scope: Scope) -> Grouping {
        match scope {
            Scope::World => Grouping::of_blocks(self.world_size),
            Scope::Group => Grouping::of_blocks(self.group_size()),
            Scope::Groups(grouping) => grouping,
        }
    }

    /// Returns the groupings that have communicators beside that of all workers: the session's own,
    /// if it has several groups, and those along the axes of its meshes, each once.
    pub(crate) fn groupings(self, meshes: &[Mesh]) -> Vec<Grouping> {
        let own = self.has_groups().then(|| self.grouping(Scope::Group));
        let along_axes = meshes.iter().flat_map(Mesh::groupings).map(|(_, grouping)| grouping);
        let mut groupings = Vec::new();
        for grouping in own.into_iter().chain(along_axes) {
            if grouping.size() != self.world_size && !groupings.contains(&grouping) {
                groupings.push(grouping);
            }
        }
        groupings
    }

    /// As [`groupings`](Self::groupings), without groups of one worker, which has nobody to meet.
    pub(crate) fn joined_groupings(self, meshes: &[Mesh]) -> Vec<Grouping> {
        let mut groupings = self.groupings(meshes);
        groupings.retain(|grouping| grouping.size() > 1);
        groupings
    }

    /// Checks that meshes are of this session.
    ///
    /// # Errors
    ///
    /// One of them has another number of workers; an axis means one division of the workers in one
    /// mesh, and another in the next; they are too many, or have too many groupings.
    pub(crate) fn check(self, meshes: &[Mesh]) -> Result<()> {
        if meshes.len() > MAX_MESHES {
            return Err(RpcError::limit("meshes of a session", MAX_MESHES as u64, meshes.len() as u64));
        }
        let mut known: HashMap<&str, Grouping> = HashMap::new();
        for mesh in meshes {
            let (count, world_size) = (mesh.num_workers(), self.world_size);
            if count != world_size {
                let text = format!("the mesh {mesh} has {count} workers, and the session {world_size}");
                return Err(RpcError::invalid_argument(text));
            }
            for (name, grouping) in mesh.groupings() {
                let known = *known.entry(name).or_insert(grouping);
                if known != grouping {
                    return Err(RpcError::invalid_argument(format!(
                        "the axis {name:?} of the mesh {mesh} is one of {grouping}, and that of another mesh of the \
                         session one of {known}: give it another name"
                    )));
                }
            }
        }
        let groupings = self.groupings(meshes).len();
        if groupings > MAX_GROUPINGS {
            return Err(RpcError::limit("groupings of a session's workers", MAX_GROUPINGS as u64, groupings as u64));
        }
        Ok(())
    }

    /// Returns true if a command that is `on` some workers is for any of these.
    pub(crate) fn concerns(self, on: On, workers: Range<u32>) -> bool {
        match on {
            On::All => true,
            On::Worker0 => workers.contains(&0),
            On::Worker(worker) => workers.contains(&worker),
            On::FirstOfGroups => self.grouping(Scope::Group).has_first(workers),
            On::FirstOf(grouping) => grouping.has_first(workers),
        }
    }

    /// Returns true if groups need communicators of their own.
    pub(crate) fn has_groups(self) -> bool {
        self.num_groups > 1
    }
}

/// Plan by which all workers of a session join each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Plan {
    pub(crate) epoch: u64,
    pub(crate) join: JoinPlan,
    /// True if the data of tensors on GPUs moves by NCCL. Without it, tensors are in host memory.
    pub(crate) nccl: bool,
    pub(crate) timeouts: CollectiveTimeouts,
    /// The default device of each worker; empty where those stay as they are.
    pub(crate) devices: Vec<Device>,
    /// True if the workers stay in their present communicators, which run, until
    /// [`FinishInitCcl`](super::command::Command::FinishInitCcl).
    pub(crate) is_tentative: bool,
    /// The meshes of the session, whose groups have communicators, too.
    pub(crate) meshes: Vec<Mesh>,
}

impl Plan {
    /// Decodes the plan of a controller, with its time limits
    /// [bounded](CollectiveTimeouts::bounded).
    ///
    /// # Errors
    ///
    /// It is no plan.
    pub(crate) fn decode(packed: &Packed) -> Result<Self> {
        let plan: Self = packed.decode()?;
        Ok(Self { timeouts: plan.timeouts.bounded(), ..plan })
    }
}

/// Means by which the workers of a session reach each other.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum JoinPlan {
    /// All are threads of one process.
    Threads,
    /// All are on one machine. First the world's, then those of the groups of each of the
    /// [joined groupings](Layout::joined_groupings).
    #[cfg(target_os = "linux")]
    Segments(Vec<host::Ticket>),
    /// Each worker's address for the world, and for its group in each of the
    /// [joined groupings](Layout::joined_groupings).
    Sockets {
        key: SessionKey,
        encrypt: bool,
        world: Vec<SocketAddr>,
        groups: Vec<Vec<SocketAddr>>,
        /// Location of each worker.
        locations: Vec<WorkerLocation>,
    },
    /// All are processes of one job of MPI, with these numbers there.
    Mpi { key: SessionKey, encrypt: bool, ranks: Vec<u32> },
    /// The workers cannot reach each other, for this reason.
    Unconnected { reason: String },
}

impl JoinPlan {
    /// Returns the error of a plan without connections, which has this reason.
    pub(crate) fn unconnected(reason: &str) -> RpcError {
        RpcError::unsupported(format!("the workers of this session have no way to each other: {reason}"))
    }
}

/// Location of a worker, seen from the others.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct WorkerLocation {
    /// Number of the machine.
    pub(crate) machine: u32,
    /// True if its address is of use on that machine only.
    pub(crate) is_local: bool,
}

/// Addresses at which one worker listens: the reply of `disco.listen`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ListenAddresses {
    pub(crate) world: SocketAddr,
    /// One for each of the [joined groupings](Layout::joined_groupings).
    pub(crate) groups: Vec<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_command_for_the_first_of_groups_concerns_their_nodes_alone() {
        let layout = Layout { world_size: 12, num_groups: 3 };
        let concerned = |workers: Range<u32>| layout.concerns(On::FirstOfGroups, workers);
        for (start, end) in (0..=12).flat_map(|start| (start..=12).map(move |end| (start, end))) {
            assert_eq!(concerned(start..end), (start..end).any(|worker| worker % 4 == 0), "{start}..{end}");
        }
        assert!(!concerned(u32::MAX - 1..u32::MAX));
    }

    /// Regression: NCCL got the limits as they came, and a time computed from them overflowed.
    #[test]
    fn the_time_limits_of_a_plan_are_bounded_where_it_is_decoded() {
        let longest = Duration::MAX;
        let timeouts = CollectiveTimeouts { entry: Some(longest), stall: longest, join: longest, direct: longest };
        let join = JoinPlan::Threads;
        let plan =
            Plan { epoch: 0, join, nccl: true, timeouts, devices: Vec::new(), is_tentative: false, meshes: Vec::new() };
        let timeouts = Plan::decode(&Packed::encode(&plan).unwrap()).unwrap().timeouts;
        let CollectiveTimeouts { entry, stall, join, direct } = timeouts;
        assert!(Instant::now().checked_add(entry.unwrap() + 2 * stall).is_some());
        assert_eq!([join, direct], [Duration::from_secs(3600); 2]);
    }
}
