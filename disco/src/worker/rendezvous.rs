//! Rendezvous of the workers of one process with all others: it turns a plan into communicators.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::limits::OpenFileLease;
use rpc_core::{ErrorKind, Result, RpcError};

use crate::ccl::communicators::{CollectiveTimeouts, Membership};
use crate::ccl::host::{self, Address, Listener, SessionKey, UnprovenHosts};
use crate::ccl::{Ccl, Rank};
use crate::error::WorkerId;
use crate::link::relayed_data::Relays;
use crate::open_files::OpenFiles;
use crate::wire::plan::{JoinPlan, Layout, ListenAddresses, Plan, WorkerLocation};
use crate::wire::relayed_pair::RelayedPair;

/// Address at which the workers of a node listen for the data of others, as its operator says: an
/// [extension](rpc_core::Context::extension) of the sessions that a node serves.
/// [`Options::data_addresses`](crate::Options::data_addresses) goes before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataAddress(pub IpAddr);

/// Rendezvous of the workers of one process.
#[derive(Default)]
pub(crate) struct Rendezvous {
    threads: Mutex<Option<Threads>>,
    #[cfg(target_os = "linux")]
    offers: Mutex<Vec<host::Offer>>,
    listeners: Mutex<HashMap<WorkerId, Arc<Listeners>>>,
    has_ended: Arc<AtomicBool>,
}

/// The communicators of threads that have not been taken yet.
struct Threads {
    epoch: u64,
    world: Vec<Option<Box<dyn Ccl>>>,
    groups: Vec<Option<Box<dyn Ccl>>>,
}

struct Listeners {
    world: Listener,
    group: Option<Listener>,
    /// Charge for both.
    _open_files: Option<OpenFileLease>,
}

impl Rendezvous {
    /// Makes segments for the whole session, which stay until others are made.
    #[cfg(target_os = "linux")]
    pub(crate) fn offer(&self, layout: Layout, epoch: u64, open_files: &OpenFiles) -> Result<Vec<host::Ticket>> {
        let options = host::Options { epoch, open_files: open_files.clone(), ..host::Options::default() };
        // All workers that were to join these have: a controller makes no others before.
        self.offers.lock().clear();
        let groups = if layout.has_groups() { layout.num_groups as usize } else { 0 };
        let sizes = [layout.world_size].into_iter().chain(std::iter::repeat_n(layout.group_size(), groups));
        let offers = sizes.map(|size| host::Offer::new(size as usize, &options)).collect::<Result<Vec<_>>>()?;
        let tickets = offers.iter().map(host::Offer::ticket).collect();
        *self.offers.lock() = offers;
        Ok(tickets)
    }

    /// Listens for these workers at an address of this machine that the others can reach.
    pub(crate) fn listen(
        &self,
        layout: Layout,
        workers: Range<u32>,
        address: IpAddr,
        open_files: &OpenFiles,
    ) -> Result<Vec<ListenAddresses>> {
        let mut all = self.listeners.lock();
        let bind = || Listener::bind(&Address::Tcp(SocketAddr::new(address, 0)));
        let bound = |listener: &Listener| match listener.address() {
            Address::Tcp(address) => Ok(*address),
            other => Err(RpcError::internal(format!("a worker listens at {other}"))),
        };
        let count = if layout.has_groups() { 2 } else { 1 };
        workers
            .map(|worker| {
                let charged = open_files.reserve(count, format_args!("the data listeners of worker {worker}"))?;
                let group = layout.has_groups().then(bind).transpose()?;
                let listeners = Arc::new(Listeners { world: bind()?, group, _open_files: charged });
                let listening = ListenAddresses {
                    world: bound(&listeners.world)?,
                    group: listeners.group.as_ref().map(bound).transpose()?,
                };
                all.insert(WorkerId(worker), listeners);
                Ok(listening)
            })
            .collect()
    }

    /// Returns the address at which a worker of this process listens.
    pub(crate) fn address(&self, worker: WorkerId, is_world: bool) -> Option<Address> {
        let all = self.listeners.lock();
        let listeners = all.get(&worker)?;
        let listener = if is_world { Some(&listeners.world) } else { listeners.group.as_ref() };
        listener.map(|listener| listener.address().clone())
    }

    /// Ends all joins, also later ones: the session has ended.
    pub(crate) fn close(&self) {
        self.has_ended.store(true, Ordering::Relaxed);
    }

    /// Joins the session's communicators as `worker`, and waits until all workers have. Where
    /// others cannot be dialled their data is relayed.
    pub(crate) fn join(
        &self,
        plan: &Plan,
        layout: Layout,
        worker: WorkerId,
        relays: &Relays,
        open_files: OpenFiles,
    ) -> Result<Membership> {
        let CollectiveTimeouts { entry, stall, join, direct } = plan.timeouts;
        let has_ended = Arc::clone(&self.has_ended);
        let mut options = host::Options { epoch: plan.epoch, has_ended, open_files, ..host::Options::default() };
        (options.entry_timeout, options.stall_timeout, options.join_timeout) = (entry, stall, join);
        options.direct_timeout = direct;
        let (rank, rank_in_group) = (Rank(worker.0), layout.rank_in_group(worker));
        match &plan.join {
            JoinPlan::Threads => self.take_thread(layout, worker, &options),
            #[cfg(target_os = "linux")]
            JoinPlan::Segments(tickets) => {
                options.ranks_on_machine = Some(layout.world_size as usize);
                let (world, groups) =
                    tickets.split_first().ok_or_else(|| RpcError::internal("a plan without tickets"))?;
                let world = join_segment(world, rank, &options)?;
                let group = groups.get(layout.group(worker) as usize);
                let group = group.map(|group| join_segment(group, rank_in_group, &options)).transpose()?;
                Ok(Membership { epoch: plan.epoch, world, group })
            }
            JoinPlan::Sockets { key, encrypt, world, groups, locations } => {
                let own = locations.get(worker.index()).map(|location| location.machine);
                let is_beside = |location: &WorkerLocation| Some(location.machine) == own;
                options.ranks_on_machine = Some(locations.iter().filter(|location| is_beside(location)).count());
                options.encrypt = *encrypt;
                let reachable = |(address, location): (&SocketAddr, &WorkerLocation)| {
                    (!location.is_local || is_beside(location)).then_some(Address::Tcp(*address))
                };
                let world: Vec<_> = world.iter().zip(locations).map(reachable).collect();
                let groups: Vec<_> = groups.iter().zip(locations).map(reachable).collect();
                let listeners = self.listeners.lock().get(&worker).cloned();
                let listeners = listeners.ok_or_else(|| RpcError::internal("a worker that does not listen"))?;
                let fallback = |peer: Rank, until: Instant| {
                    relays.connect(RelayedPair { from: worker.0, to: peer.0, is_world: true }, until)
                };
                let unproven = UnprovenHosts::default();
                let joined = listeners.world.join_by(rank, &world, key, &options, Some((&fallback, &unproven)))?;
                let group = match &listeners.group {
                    Some(listener) => {
                        let size = layout.group_size() as usize;
                        let first = layout.group(worker) as usize * size;
                        let members = groups.get(first..first + size);
                        let members = members.ok_or_else(|| RpcError::internal("a plan without all addresses"))?;
                        let fallback = |peer: Rank, until: Instant| {
                            let to = first as u32 + peer.0;
                            relays.connect(RelayedPair { from: worker.0, to, is_world: false }, until)
                        };
                        let fallback = Some((&fallback as _, &unproven));
                        Some(listener.join_by(rank_in_group, members, key, &options, fallback)?)
                    }
                    None => None,
                };
                Ok(Membership { epoch: plan.epoch, world: joined, group })
            }
            JoinPlan::Mpi { key, encrypt, ranks } => {
                options.encrypt = *encrypt;
                join_mpi(ranks, layout, worker, key, &options)
            }
            JoinPlan::Unconnected { reason } => Err(RpcError::new(
                ErrorKind::Unsupported,
                format!("the workers of this session have no way to each other: {reason}"),
            )),
        }
    }

    fn take_thread(&self, layout: Layout, worker: WorkerId, options: &host::Options) -> Result<Membership> {
        let mut threads = self.threads.lock();
        if threads.as_ref().is_none_or(|threads| threads.epoch != options.epoch) {
            let mut options = options.clone();
            options.ranks_on_machine = Some(layout.world_size as usize);
            let world = host::threads(layout.world_size as usize, &options)?.into_iter().map(Some).collect();
            let mut groups = Vec::new();
            if layout.has_groups() {
                for _ in 0..layout.num_groups {
                    groups.extend(host::threads(layout.group_size() as usize, &options)?.into_iter().map(Some));
                }
            }
            *threads = Some(Threads { epoch: options.epoch, world, groups });
        }
        let taken = threads.as_mut().and_then(|threads| {
            let world = threads.world.get_mut(worker.index())?.take()?;
            let group = threads.groups.get_mut(worker.index()).and_then(Option::take);
            Some(Membership { epoch: threads.epoch, world, group })
        });
        taken.ok_or_else(|| RpcError::internal(format!("worker {worker} has joined already")))
    }
}

/// Joins the group of a ticket, which a controller has named.
///
/// # Errors
///
/// The same one for everything that is no segment of this session, so that a controller learns
/// nothing about other files.
#[cfg(target_os = "linux")]
fn join_segment(ticket: &host::Ticket, rank: Rank, options: &host::Options) -> Result<Box<dyn Ccl>> {
    ticket.join(rank, options).map_err(|error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::Refused => {
            tracing::debug!(target: host::OPERATOR_LOG, %error, ?ticket, "a segment is not joined");
            let text = "the session's shared memory cannot be joined: what the plan names is not open, is no such \
                        memory, or belongs to another session or user; the node's log has more, at level debug";
            RpcError::new(ErrorKind::Refused, text)
        }
        _ => error,
    })
}

#[cfg(feature = "mpi")]
fn join_mpi(
    ranks: &[u32],
    layout: Layout,
    worker: WorkerId,
    key: &SessionKey,
    options: &host::Options,
) -> Result<Membership> {
    use host::mpi::{MpiScope, Process};

    let process = Process::started().ok_or_else(|| RpcError::internal("MPI has not been started here"))?;
    let world = process.join(MpiScope::World, ranks, key, options)?;
    let mut group = None;
    if layout.has_groups() {
        let mut groups = ranks.chunks(layout.group_size() as usize);
        let members =
            groups.nth(layout.group(worker) as usize).ok_or_else(|| RpcError::internal("a plan without all ranks"))?;
        group = Some(process.join(MpiScope::Group, members, key, options)?);
    }
    Ok(Membership { epoch: options.epoch, world, group })
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(_: &[u32], _: Layout, _: WorkerId, _: &SessionKey, _: &host::Options) -> Result<Membership> {
    Err(RpcError::unsupported("this program was built without MPI"))
}

/// Returns a text that only processes that can share memory have in common: the machine since it
/// was booted, the view of its processes, the user. Empty where that is not known.
pub(crate) fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let processes = std::fs::read_link("/proc/self/ns/pid").map(|path| path.display().to_string());
    match processes {
        Ok(processes) if !boot.is_empty() => {
            format!("{} {processes} {}", boot.trim(), rustix::process::geteuid().as_raw())
        }
        _ => String::new(),
    }
}
