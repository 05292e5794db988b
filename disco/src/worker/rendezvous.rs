//! Rendezvous of the workers of one process with all others: it turns a plan into communicators.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::limits::OpenFileLease;
use rpc_core::{Context, ErrorKind, Result, RpcError};

use crate::ccl::communicators::{CollectiveTimeouts, Membership};
use crate::ccl::host::{self, Address, Listener, SessionKey, UnprovenHosts};
use crate::ccl::{Ccl, Rank};
use crate::error::WorkerId;
use crate::held_memory::HeldMemory;
use crate::link::relayed_data::Relays;
use crate::open_files::OpenFiles;
use crate::wire::grouping::Grouping;
use crate::wire::mesh::Mesh;
use crate::wire::plan::{JoinPlan, Layout, ListenAddresses, Plan, WorkerLocation};
use crate::wire::relayed_pair::RelayedPair;
use crate::wire::set_up::SetUp;

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
    joins: Mutex<Joins>,
}

/// Joins of the workers, which end before all have come if the session ends or one is lost.
#[derive(Default)]
struct Joins {
    /// Epoch of the last joins.
    epoch: u64,
    /// Flag of these, set when they are to end.
    ends: Arc<AtomicBool>,
    /// True once the session has ended.
    has_ended: bool,
    /// Last epoch for which not all workers are there.
    given_up: Option<u64>,
}

impl Joins {
    /// Returns the flag of the joins of an epoch.
    fn begin(&mut self, epoch: u64) -> Arc<AtomicBool> {
        if self.epoch != epoch {
            self.epoch = epoch;
            self.ends = Arc::new(AtomicBool::new(self.has_ended || self.given_up >= Some(epoch)));
        }
        Arc::clone(&self.ends)
    }
}

/// The communicators of a worker: that of all workers, and those of its groups in the joined
/// groupings.
type Communicators = (Box<dyn Ccl>, Vec<Box<dyn Ccl>>);

/// Charge for the memory of the communicators of threads, which all of them share.
type Charge = Arc<HeldMemory>;

/// The communicators of threads that have not been taken yet.
struct Threads {
    epoch: u64,
    world: Vec<Option<Box<dyn Ccl>>>,
    /// For each of the joined groupings those of all workers, in their order.
    groups: Vec<Vec<Option<Box<dyn Ccl>>>>,
    charge: Charge,
}

struct Listeners {
    world: Listener,
    /// One for each of the joined groupings.
    groups: Vec<Listener>,
    /// Charge for all.
    _open_files: Option<OpenFileLease>,
}

impl Rendezvous {
    /// Makes segments for the whole session, which stay until others are made.
    #[cfg(target_os = "linux")]
    pub(crate) fn offer(
        &self,
        layout: Layout,
        meshes: &[Mesh],
        epoch: u64,
        open_files: &OpenFiles,
    ) -> Result<Vec<host::Ticket>> {
        layout.check(meshes)?;
        let options = host::Options { epoch, open_files: open_files.clone(), ..host::Options::default() };
        // All workers that were to join these have: a controller makes no others before.
        self.offers.lock().clear();
        let world_size = layout.world_size;
        let groups = layout.joined_groupings(meshes).into_iter();
        let groups = groups.flat_map(|grouping| (0..grouping.count(world_size)).map(move |_| grouping.size()));
        let sizes = std::iter::once(world_size).chain(groups);
        let offers = sizes.map(|size| host::Offer::new(size as usize, &options)).collect::<Result<Vec<_>>>()?;
        let tickets = offers.iter().map(host::Offer::ticket).collect();
        *self.offers.lock() = offers;
        Ok(tickets)
    }

    /// Listens for these workers at an address of this machine that the others can reach.
    pub(crate) fn listen(
        &self,
        (layout, meshes): (Layout, &[Mesh]),
        workers: Range<u32>,
        address: IpAddr,
        open_files: &OpenFiles,
    ) -> Result<Vec<ListenAddresses>> {
        layout.check(meshes)?;
        let groupings = layout.joined_groupings(meshes).len();
        let mut all = self.listeners.lock();
        let bind = || Listener::bind(&Address::Tcp(SocketAddr::new(address, 0)));
        let bound = |listener: &Listener| match listener.address() {
            Address::Tcp(address) => Ok(*address),
            other => Err(RpcError::internal(format!("a worker listens at {other}"))),
        };
        workers
            .map(|worker| {
                let charged =
                    open_files.reserve(1 + groupings, format_args!("the data listeners of worker {worker}"))?;
                let groups = (0..groupings).map(|_| bind()).collect::<Result<_>>()?;
                let listeners = Arc::new(Listeners { world: bind()?, groups, _open_files: charged });
                let listening = ListenAddresses {
                    world: bound(&listeners.world)?,
                    groups: listeners.groups.iter().map(bound).collect::<Result<_>>()?,
                };
                all.insert(WorkerId(worker), listeners);
                Ok(listening)
            })
            .collect()
    }

    /// Returns the address at which a worker of this process listens for a
    /// [communicator](RelayedPair::communicator).
    pub(crate) fn address(&self, worker: WorkerId, communicator: u32) -> Option<Address> {
        let all = self.listeners.lock();
        let listeners = all.get(&worker)?;
        let listener = match communicator.checked_sub(1) {
            None => Some(&listeners.world),
            Some(grouping) => listeners.groups.get(grouping as usize),
        };
        listener.map(|listener| listener.address().clone())
    }

    /// Ends all joins, also later ones: the session has ended.
    pub(crate) fn close(&self) {
        let mut joins = self.joins.lock();
        joins.has_ended = true;
        joins.ends.store(true, Ordering::Relaxed);
    }

    /// Ends the joins of an epoch, also later ones, and those of earlier epochs: a worker is lost.
    pub(crate) fn give_up(&self, epoch: u64) {
        let mut joins = self.joins.lock();
        joins.given_up = joins.given_up.max(Some(epoch));
        if joins.epoch <= epoch {
            joins.ends.store(true, Ordering::Relaxed);
        }
    }

    /// Joins the session's communicators as `worker`, and waits until all workers have. Where
    /// others cannot be dialled their data is relayed. What the communicators take is charged to
    /// the session of `context`.
    pub(crate) fn join(
        &self,
        plan: &Plan,
        set_up: &SetUp,
        worker: WorkerId,
        relays: &Relays,
        context: &Context,
    ) -> Result<Membership> {
        let (layout, open_files) = (set_up.layout, OpenFiles::of(context));
        let CollectiveTimeouts { entry, stall, join, direct } = plan.timeouts;
        let has_ended = self.joins.lock().begin(plan.epoch);
        let mut options = host::Options { epoch: plan.epoch, has_ended, open_files, ..host::Options::default() };
        (options.entry_timeout, options.stall_timeout, options.join_timeout) = (entry, stall, join);
        options.direct_timeout = direct;
        let rank = Rank(worker.0);
        let groupings = layout.joined_groupings(&plan.meshes);
        let mut charge = None;
        let (world, groups) = match &plan.join {
            JoinPlan::Threads => {
                let (communicators, shared) = self.take_thread(set_up, &groupings, worker, &options, context)?;
                charge = Some(shared);
                communicators
            }
            #[cfg(target_os = "linux")]
            JoinPlan::Segments(tickets) => {
                options.ranks_on_machine = Some(layout.world_size as usize);
                let missing = || RpcError::internal("a plan without all tickets");
                let (world, mut others) = tickets.split_first().ok_or_else(missing)?;
                let world = join_segment(world, rank, &options)?;
                let mut groups = Vec::with_capacity(groupings.len());
                for grouping in &groupings {
                    let count = grouping.count(layout.world_size) as usize;
                    let (these, rest) = others.split_at_checked(count).ok_or_else(missing)?;
                    let ticket = these.get(grouping.group(worker) as usize).ok_or_else(missing)?;
                    groups.push(join_segment(ticket, grouping.rank(worker), &options)?);
                    others = rest;
                }
                (world, groups)
            }
            JoinPlan::Sockets { key, encrypt, world, groups: addresses, locations } => {
                let own = locations.get(worker.index()).map(|location| location.machine);
                let is_beside = |location: &WorkerLocation| Some(location.machine) == own;
                options.ranks_on_machine = Some(locations.iter().filter(|location| is_beside(location)).count());
                options.encrypt = *encrypt;
                let reachable = |(address, location): (&SocketAddr, &WorkerLocation)| {
                    (!location.is_local || is_beside(location)).then_some(Address::Tcp(*address))
                };
                let world: Vec<_> = world.iter().zip(locations).map(reachable).collect();
                let listeners = self.listeners.lock().get(&worker).cloned();
                let listeners = listeners.ok_or_else(|| RpcError::internal("a worker that does not listen"))?;
                let fallback = |peer: Rank, until: Instant| {
                    relays.connect(RelayedPair { from: worker.0, to: peer.0, communicator: 0 }, until)
                };
                let unproven = UnprovenHosts::default();
                let world = listeners.world.join_by(rank, &world, key, &options, Some((&fallback, &unproven)))?;
                if listeners.groups.len() != groupings.len() || addresses.len() != groupings.len() {
                    return Err(RpcError::internal("a worker that does not listen for each of its groups"));
                }
                let mut groups = Vec::with_capacity(groupings.len());
                let each = groupings.iter().zip(addresses).zip(&listeners.groups);
                for (communicator, ((grouping, addresses), listener)) in (1..).zip(each) {
                    let members = grouping.members(worker).map(|member| {
                        let at = member.index();
                        Some(reachable((addresses.get(at)?, locations.get(at)?)))
                    });
                    let members: Option<Vec<_>> = members.collect();
                    let members = members.ok_or_else(|| RpcError::internal("a plan without all addresses"))?;
                    let fallback = |peer: Rank, until: Instant| {
                        let to = grouping.member(worker, peer).0;
                        relays.connect(RelayedPair { from: worker.0, to, communicator }, until)
                    };
                    let fallback = Some((&fallback as _, &unproven));
                    groups.push(listener.join_by(grouping.rank(worker), &members, key, &options, fallback)?);
                }
                (world, groups)
            }
            JoinPlan::Mpi { key, encrypt, ranks } => {
                options.encrypt = *encrypt;
                join_mpi(ranks, &groupings, worker, key, &options)?
            }
            JoinPlan::Unconnected { reason } => return Err(JoinPlan::unconnected(reason)),
        };
        let mut groups: Vec<_> = groupings.into_iter().zip(groups).collect();
        // A group of one worker is the worker's own affair.
        if let Some(alone) = layout.groupings(&plan.meshes).into_iter().find(|grouping| grouping.size() == 1) {
            groups.extend(host::threads(1, &options)?.pop().map(|ccl| (alone, ccl)));
        }
        Ok(Membership { epoch: plan.epoch, world, groups, charge })
    }

    /// Takes the communicators of a worker, which are made for all workers if there are none of
    /// this epoch yet.
    fn take_thread(
        &self,
        set_up: &SetUp,
        groupings: &[Grouping],
        worker: WorkerId,
        options: &host::Options,
        context: &Context,
    ) -> Result<(Communicators, Charge)> {
        let SetUp { first, count, layout: Layout { world_size, .. }, .. } = *set_up;
        if first != 0 || count != world_size {
            return Err(RpcError::invalid_argument(format!(
                "a plan by which all {world_size} workers are threads of one process, which has {count} of them"
            )));
        }
        let mut threads = self.threads.lock();
        if threads.as_ref().is_none_or(|threads| threads.epoch != options.epoch) {
            // Those of an earlier epoch that no worker has taken, with their charge.
            *threads = None;
            let mut held = HeldMemory::new(context.detached());
            held.add(cost_of_threads(world_size, groupings))?;
            let mut options = options.clone();
            options.ranks_on_machine = Some(world_size as usize);
            let world = host::threads(world_size as usize, &options)?.into_iter().map(Some).collect();
            let mut groups = Vec::with_capacity(groupings.len());
            for grouping in groupings {
                let mut of_workers: Vec<_> = (0..world_size).map(|_| None).collect();
                for first in (0..world_size).map(WorkerId).filter(|worker| grouping.rank(*worker) == Rank(0)) {
                    let ranks = host::threads(grouping.size() as usize, &options)?;
                    for (member, rank) in grouping.members(first).zip(ranks) {
                        of_workers[member.index()] = Some(rank);
                    }
                }
                groups.push(of_workers);
            }
            *threads = Some(Threads { epoch: options.epoch, world, groups, charge: Arc::new(held) });
        }
        let taken = threads.as_mut().and_then(|threads| {
            let world = threads.world.get_mut(worker.index())?.take()?;
            let groups = threads.groups.iter_mut().map(|group| group.get_mut(worker.index())?.take());
            Some(((world, groups.collect::<Option<_>>()?), Arc::clone(&threads.charge)))
        });
        taken.ok_or_else(|| RpcError::internal(format!("worker {worker} has joined already")))
    }
}

/// Returns the bytes that the communicators of so many threads take: those of all, and those of
/// the groups of each grouping.
fn cost_of_threads(world_size: u32, groupings: &[Grouping]) -> usize {
    let of_groups = |grouping: &Grouping| {
        let one = host::cost_of_threads(grouping.size() as usize);
        one.saturating_mul(grouping.count(world_size) as usize)
    };
    let all = groupings.iter().map(of_groups);
    all.fold(host::cost_of_threads(world_size as usize), usize::saturating_add)
}

/// Joins the group of a ticket, which a controller has named.
///
/// # Errors
///
/// The same one for everything that is no segment of this session, so that a controller learns
/// nothing about other files.
#[cfg(target_os = "linux")]
pub(crate) fn join_segment(ticket: &host::Ticket, rank: Rank, options: &host::Options) -> Result<Box<dyn Ccl>> {
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
    groupings: &[Grouping],
    worker: WorkerId,
    key: &SessionKey,
    options: &host::Options,
) -> Result<Communicators> {
    use host::mpi::{MpiScope, Process};

    let process = Process::started().ok_or_else(|| RpcError::internal("MPI has not been started here"))?;
    let world = process.join(MpiScope::World, ranks, key, options)?;
    let mut groups = Vec::with_capacity(groupings.len());
    for (number, grouping) in (0..).zip(groupings) {
        let members: Option<Vec<u32>> =
            grouping.members(worker).map(|member| ranks.get(member.index()).copied()).collect();
        let members = members.ok_or_else(|| RpcError::internal("a plan without all ranks"))?;
        groups.push(process.join(MpiScope::Group(number), &members, key, options)?);
    }
    Ok((world, groups))
}

#[cfg(not(feature = "mpi"))]
fn join_mpi(_: &[u32], _: &[Grouping], _: WorkerId, _: &SessionKey, _: &host::Options) -> Result<Communicators> {
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
