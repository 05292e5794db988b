//! The data plane, as the controller plans it: how its workers are to join each other for collectives.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Weak;

use rpc_core::{Device, Pack, Packed, RpcError};

use crate::ccl::backend::Backend;
use crate::ccl::host::{Address, SessionKey};
use crate::ccl::membership::Limits;
use crate::controller::dispatch::Controller;
use crate::error::{DiscoError, Result, WorkerId};
use crate::link::upstream::Upstream;
use crate::wire::command::Command;
use crate::wire::plan::{Place, Plan, Way};
use crate::wire::set_up::Leaf;

impl Controller {
    /// Begins to talk to the hosts, and tells the workers how they meet.
    pub(crate) async fn start(&self) -> Result<()> {
        let this: Weak<dyn Upstream> = self.this.clone();
        for (number, link) in self.links.iter().enumerate() {
            link.start(number, &this).await?;
        }
        self.meet(0, Backend::default(), Vec::new()).await.map(drop)
    }

    /// Tells the workers how they meet in this epoch; gives the number of that command. Where there is an error they have not been told.
    pub(crate) async fn meet(&self, epoch: u64, backend: Backend, devices: Vec<Device>) -> Result<u64> {
        let way = match backend {
            // NCCL knows nothing of failures: beside it the ranks have what host memory has.
            Backend::Host | Backend::Nccl | Backend::Rccl => self.plan(epoch).await?,
            Backend::Mpi => self.plan_mpi()?,
        };
        let limits = Limits::of(&self.options);
        let plan = Packed::encode(&Plan { epoch, way, accelerated: backend.flavour(), limits, devices })?;
        self.lock().collectives.advance(epoch, backend);
        self.push(Command::InitCcl { plan })
    }

    /// How workers meet that are processes of one job of MPI.
    fn plan_mpi(&self) -> Result<Way> {
        let unfit = |why: String| DiscoError::from(RpcError::unsupported(format!("no collectives over MPI: {why}")));
        let mut ranks: Vec<u32> = Vec::new();
        let mut job: Option<&str> = None;
        let leaves = self.links.iter().flat_map(|link| &link.info.leaves);
        for (worker, leaf) in leaves.enumerate() {
            let Some(seat) = leaf.mpi.as_ref().filter(|_| leaf.count == 1) else {
                return Err(unfit(format!(
                    "the process of worker {worker} has {}; start each worker as a process of its own, as in: \
                     mpirun -n 4 rpc-server worker --mpi --controller ADDRESS",
                    if leaf.mpi.is_some() { "several workers" } else { "not started MPI" }
                )));
            };
            if *job.get_or_insert(&seat.job) != seat.job || ranks.contains(&seat.rank) {
                return Err(unfit(format!("worker {worker} is of another job than worker 0")));
            }
            ranks.push(seat.rank);
        }
        Ok(Way::Mpi { key: SessionKey::generate()?, encrypt: self.is_encrypted(), ranks })
    }

    /// Whoever could read or change the data could as well read or change the commands, where those are not encrypted.
    fn is_encrypted(&self) -> bool {
        self.links.iter().any(|link| link.is_encrypted)
    }

    async fn plan(&self, epoch: u64) -> Result<Way> {
        let leaves: Vec<&Leaf> = self.links.iter().flat_map(|link| &link.info.leaves).collect();
        if let [_] = leaves[..] {
            return Ok(Way::Threads);
        }
        let machine = leaves.first().map_or("", |leaf| &leaf.machine);
        let together = !machine.is_empty() && leaves.iter().all(|leaf| leaf.machine == machine);
        #[cfg(target_os = "linux")]
        if together
            && self.options.data_addresses.is_empty()
            && self.layout.world_size as usize <= crate::ccl::host::MAX_SHARED_RANKS
        {
            let (session, host) = self.far_end(0)?;
            let offer = session.get_function("disco.offer").await?;
            let tickets: Pack<Vec<crate::ccl::host::Ticket>> = offer.call((&host, epoch)).await?;
            return Ok(Way::Segments(tickets.0));
        }
        let nodes = self.links.iter().map(|link| link.nodes).sum();
        let addresses = self.data_addresses();
        let known = addresses.iter().flatten().count();
        // Without an address there may still be somebody who relays.
        let may_relay = self.options.allow_controller_relay || self.links.iter().any(|link| link.nodes > 1);
        if addresses.len() != nodes || known < nodes && !together && !may_relay {
            let why = format!(
                "the data addresses of {known} of {nodes} nodes are known, and not all are on one machine; give them all \
                 (Options::data_addresses, or --data-address there), or have the controller relay the data \
                 (Options::allow_controller_relay)"
            );
            return Ok(Way::Apart { why });
        }
        let this: Weak<dyn Upstream> = self.this.clone();
        let (mut world, mut groups, mut places) = (Vec::new(), Vec::new(), Vec::new());
        let machines = machines(&leaves);
        let mut addresses = addresses.into_iter();
        for (number, link) in self.links.iter().enumerate() {
            link.take_relays(number, &this).await?;
            let these: Vec<_> = addresses.by_ref().take(link.nodes).collect();
            // Where no address is known those beside the workers can still use this one, and a relay of their node.
            let listening = these.iter().map(|address| address.unwrap_or(Ipv4Addr::LOCALHOST.into())).collect();
            let listening = link.listen(listening).await?;
            // All nodes have as many workers.
            let per_node = link.workers().len() / link.nodes.max(1);
            for (at, (worker, one)) in link.workers().zip(listening).enumerate() {
                world.push(self.advertised(worker, one.world));
                groups.extend(one.group.map(|group| self.advertised(worker, group)));
                let is_local = these.get(at / per_node.max(1)).is_none_or(Option::is_none);
                places.push(Place { machine: machines[worker as usize], is_local });
            }
        }
        Ok(Way::Sockets { key: SessionKey::generate()?, encrypt: self.is_encrypted(), world, groups, places })
    }

    /// Where the workers of each node are to listen for data: as the settings say, or else the nodes themselves.
    fn data_addresses(&self) -> Vec<Option<IpAddr>> {
        let told = self.links.iter().flat_map(|link| link.info.data_addresses.iter().copied());
        let set = &self.options.data_addresses;
        if set.is_empty() { told.collect() } else { set.iter().copied().map(Some).collect() }
    }

    /// Where others reach what a worker listens at.
    fn advertised(&self, worker: u32, bound: Address) -> Address {
        match (bound, &self.options.advertise) {
            (Address::Tcp(bound), Some(advertise)) => Address::Tcp(advertise.address(WorkerId(worker), bound)),
            (bound, _) => bound,
        }
    }

    fn far_end(&self, link: usize) -> Result<(rpc_core::Session, rpc_core::RemoteObject)> {
        self.links[link].far_end().ok_or_else(|| DiscoError::Session(self.end_error()))
    }
}

/// Which machine each worker is on, by a number.
fn machines(leaves: &[&Leaf]) -> Vec<u32> {
    let number = |(at, leaf): (usize, &&Leaf)| {
        let is_same = |other: &&Leaf| !leaf.machine.is_empty() && other.machine == leaf.machine;
        // Where that is not known each process has its own.
        let first = leaves.iter().position(is_same).unwrap_or(at);
        std::iter::repeat_n(first as u32, leaf.count as usize)
    };
    leaves.iter().enumerate().flat_map(number).collect()
}
