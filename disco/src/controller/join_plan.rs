//! The data plane, as the controller plans it: how its workers are to join each other for
//! collectives.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Weak};

use rpc_core::{Device, ErrorKind, Pack, Packed, RpcError};

use crate::ccl::backend::Backend;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::SessionKey;
use crate::controller::dispatch::{Controller, Issuer};
use crate::error::{DiscoError, Result, WorkerId};
use crate::link::node_link::Link;
use crate::link::upstream::Upstream;
use crate::wire::command::Command;
use crate::wire::mesh::Mesh;
use crate::wire::plan::{JoinPlan, Plan, WorkerLocation};
use crate::wire::set_up::WorkerProcess;

/// Attempt to make the collectives of a session.
pub(super) struct Attempt {
    pub(super) issuer: Issuer,
    pub(super) backend: Backend,
    /// New default devices of the workers; none where they keep theirs.
    pub(super) devices: Vec<Device>,
    pub(super) meshes: Vec<Mesh>,
}

impl Controller {
    /// Starts the links, and has the workers join each other.
    pub(crate) async fn start(&self) -> Result<()> {
        let this: Weak<dyn Upstream> = self.this.clone();
        let (links, devices) = {
            let state = self.lock();
            (state.links.numbered(), state.devices.to_vec())
        };
        for (number, link) in links {
            link.start(number, &this)?;
        }
        let attempt = Attempt { issuer: Issuer::Caller, backend: Backend::default(), devices, meshes: Vec::new() };
        let sequence = self.meet(0, &attempt, false).await?;
        // The first sync tells its failures.
        let mut state = self.lock();
        state.failures.unwatch(sequence);
        state.has_started = true;
        Ok(())
    }

    /// Lets the workers join each other in this epoch; if that is tentative they stay where they
    /// are. Returns the number of the command; after an error none was issued.
    ///
    /// # Errors
    ///
    /// Those of making the plan; and, after the first epoch, [`ErrorKind::Unsupported`]: the
    /// workers have no way to each other.
    pub(super) async fn meet(&self, epoch: u64, attempt: &Attempt, is_tentative: bool) -> Result<u64> {
        let Attempt { issuer, backend, devices, meshes } = attempt;
        let (backend, meshes) = (*backend, &meshes[..]);
        let join = match backend {
            // NCCL knows nothing of failures: beside it the ranks have the same means as on host
            // memory.
            Backend::Host | Backend::Nccl => self.plan(epoch, meshes).await?,
            Backend::Mpi => self.plan_mpi()?,
        };
        // A session begins without collectives then, and goes on without them when a worker has
        // been replaced. Another attempt would only say that it has made some.
        let has_none = epoch == 0 || *issuer == Issuer::Replacement && self.lock().is_unconnected;
        let is_unconnected = matches!(join, JoinPlan::Unconnected { .. });
        if let JoinPlan::Unconnected { reason } = &join
            && !has_none
        {
            return Err(JoinPlan::unconnected(reason).into());
        }
        let timeouts = CollectiveTimeouts::of(&self.options);
        let nccl = backend == Backend::Nccl;
        let (meshes, devices) = (meshes.to_vec(), devices.clone());
        let plan = Packed::encode(&Plan { epoch, join, nccl, timeouts, devices, is_tentative, meshes })?;
        let (queued, encoded) = self.prepare(Command::InitCcl { plan })?;
        let mut state = self.lock();
        state.check_for(*issuer)?;
        state.is_unconnected = is_unconnected;
        if !is_tentative {
            state.collectives.advance(epoch, backend);
        }
        Ok(self.push_in(&mut state, &queued, encoded.as_ref()))
    }

    /// Plans the data plane of workers that are processes of one job of MPI.
    fn plan_mpi(&self) -> Result<JoinPlan> {
        let unfit = |why: String| DiscoError::from(RpcError::unsupported(format!("no collectives over MPI: {why}")));
        let mut ranks: Vec<u32> = Vec::new();
        let mut job: Option<&str> = None;
        let links = self.links();
        let processes = links.iter().flat_map(|link| &link.info.processes);
        for (worker, process) in processes.enumerate() {
            let Some(seat) = process.mpi.as_ref().filter(|_| process.count == 1) else {
                return Err(unfit(format!(
                    "the process of worker {worker} has {}; start each worker as a process of its own, as in: \
                     mpirun -n 4 rpc-server worker --mpi --controller ADDRESS",
                    if process.mpi.is_some() { "several workers" } else { "not started MPI" }
                )));
            };
            if *job.get_or_insert(&seat.job) != seat.job || ranks.contains(&seat.rank) {
                return Err(unfit(format!("worker {worker} is of another job than worker 0")));
            }
            ranks.push(seat.rank);
        }
        Ok(JoinPlan::Mpi { key: SessionKey::generate()?, encrypt: self.is_encrypted(), ranks })
    }

    /// Returns true if data is to be encrypted: if any control link is. Otherwise commands could be
    /// read and changed as well.
    fn is_encrypted(&self) -> bool {
        self.lock().links.iter().any(|link| link.is_encrypted)
    }

    async fn plan(&self, epoch: u64, meshes: &[Mesh]) -> Result<JoinPlan> {
        let numbered = self.lock().links.numbered();
        let links: Vec<_> = numbered.iter().map(|(_, link)| Arc::clone(link)).collect();
        let processes: Vec<&WorkerProcess> = links.iter().flat_map(|link| &link.info.processes).collect();
        if let [_] = processes[..] {
            return Ok(JoinPlan::Threads);
        }
        let machine = processes.first().map_or("", |process| &process.machine);
        let together = !machine.is_empty() && processes.iter().all(|process| process.machine == machine);
        #[cfg(target_os = "linux")]
        if together
            && self.options.data_addresses.is_empty()
            && self.layout.world_size as usize <= crate::ccl::host::MAX_SHARED_RANKS
        {
            let first = links.first().and_then(|link| link.far_end());
            let (session, host) = first.ok_or_else(|| DiscoError::Session(self.end_error()))?;
            let offer = session.get_function("disco.offer").await?;
            let tickets: Pack<Vec<crate::ccl::host::Ticket>> =
                offer.call((&host, epoch, Pack(meshes.to_vec()))).await?;
            return Ok(JoinPlan::Segments(tickets.0));
        }
        let nodes = links.iter().map(|link| link.nodes).sum();
        let addresses = self.data_addresses(&links);
        let known = addresses.iter().flatten().count();
        // Without an address a node or the controller may still relay.
        let may_relay = self.options.allow_controller_relay || links.iter().any(|link| link.nodes > 1);
        if addresses.len() != nodes || known < nodes && !together && !may_relay {
            let reason = format!(
                "the data addresses of {known} of {nodes} nodes are known, and not all are on one machine; give \
                 them all (Options::data_addresses, or --data-address there), or have the controller relay the \
                 data (Options::allow_controller_relay)"
            );
            return Ok(JoinPlan::Unconnected { reason });
        }
        if let Some(reason) = too_many_connections(&processes) {
            return Ok(JoinPlan::Unconnected { reason });
        }
        let this: Weak<dyn Upstream> = self.this.clone();
        let (mut world, mut locations) = (Vec::new(), Vec::new());
        let mut groups = vec![Vec::new(); self.layout.joined_groupings(meshes).len()];
        let machines = machines(&processes);
        let mut addresses = addresses.into_iter();
        let mut asked = Vec::new();
        for (number, link) in &numbered {
            link.take_relays(*number, &this).await?;
            let these: Vec<_> = addresses.by_ref().take(link.nodes).collect();
            // If no address is known, workers beside each other can still use this one, and so can
            // a relay of their node.
            let listening = these.iter().map(|address| address.unwrap_or(Ipv4Addr::LOCALHOST.into())).collect();
            // All nodes at once.
            asked.push((link, these, tokio::spawn(link.listen(listening, meshes.to_vec()))));
        }
        for (link, these, listening) in asked {
            let listening = listening.await.unwrap_or_else(|_| Err(RpcError::internal("asking a node panicked")))?;
            // All nodes have as many workers.
            let per_node = link.workers().len() / link.nodes.max(1);
            for (at, (worker, one)) in link.workers().zip(listening).enumerate() {
                world.push(self.advertised(worker, one.world));
                if one.groups.len() != groups.len() {
                    let text = format!("worker {worker} listens for {} groups of {}", one.groups.len(), groups.len());
                    return Err(RpcError::new(ErrorKind::Protocol, text).into());
                }
                for (group, address) in groups.iter_mut().zip(one.groups) {
                    group.push(self.advertised(worker, address));
                }
                let is_local = these.get(at / per_node.max(1)).is_none_or(Option::is_none);
                locations.push(WorkerLocation { machine: machines[worker as usize], is_local });
            }
        }
        Ok(JoinPlan::Sockets { key: SessionKey::generate()?, encrypt: self.is_encrypted(), world, groups, locations })
    }

    /// Returns the address at which the workers of each node are to listen for data: the one in the
    /// settings, or else the node's own.
    fn data_addresses(&self, links: &[Arc<Link>]) -> Vec<Option<IpAddr>> {
        let told = links.iter().flat_map(|link| link.info.data_addresses.iter().copied());
        let set = &self.options.data_addresses;
        if set.is_empty() { told.collect() } else { set.iter().copied().map(Some).collect() }
    }

    /// Returns the address at which others reach a worker's listener.
    fn advertised(&self, worker: u32, bound: SocketAddr) -> SocketAddr {
        self.options.advertise.as_ref().map_or(bound, |advertise| advertise.address(WorkerId(worker), bound))
    }
}

/// Most connections of one process for collectives over sockets, in which each worker has one with
/// every other.
const MAX_CONNECTIONS: u64 = 1 << 16;

/// Returns why these processes cannot connect each of their workers with all others, if so.
fn too_many_connections(processes: &[&WorkerProcess]) -> Option<String> {
    let world: u64 = processes.iter().map(|process| u64::from(process.count)).sum();
    let largest = processes.iter().map(|process| u64::from(process.count)).max().unwrap_or(0);
    let connections = largest.saturating_mul(world.saturating_sub(1));
    (connections > MAX_CONNECTIONS).then(|| {
        format!(
            "over sockets each worker is connected with every other, which is {connections} connections of a process \
             with {largest} of {world} workers, and {MAX_CONNECTIONS} are allowed: have fewer workers in a process, \
             or in the session"
        )
    })
}

/// Returns the machine of each worker, as a number.
fn machines(processes: &[&WorkerProcess]) -> Vec<u32> {
    let mut known = HashMap::new();
    let number = |(at, process): (usize, &&WorkerProcess)| {
        // If the machine is unknown, each process has its own.
        let first = if process.machine.is_empty() { at } else { *known.entry(process.machine.clone()).or_insert(at) };
        std::iter::repeat_n(first as u32, process.count as usize)
    };
    processes.iter().enumerate().flat_map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_known_by_its_name_and_too_many_connections_are_refused_in_words() {
        let process = |count, machine: &str| WorkerProcess { count, machine: machine.to_owned(), mpi: None };
        let processes = [process(2, "a"), process(1, ""), process(1, "b"), process(1, ""), process(1, "a")];
        assert_eq!(machines(&processes.each_ref()), [0, 0, 1, 2, 3, 0]);
        assert_eq!(too_many_connections(&processes.each_ref()), None);
        let large = [process(128, "a"), process(896, "b")];
        let reason = too_many_connections(&large.each_ref()).unwrap();
        assert!(reason.contains("916608 connections of a process with 896 of 1024 workers"), "{reason}");
    }
}
