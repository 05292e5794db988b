//! Host: the workers of one node, as a controller opens and drives them.
//!
//! A host ends with the session that it was opened in, or when its controller lets go of it.
//!
//! A host may have others below it: processes of its own, and further nodes, with which it opens
//! sessions itself. It forwards all commands to them in the order of their numbers, and their
//! events to its own opener, to which they are workers of this host. The workers below it have the
//! numbers behind its own.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use rpc_core::{Context, DeviceType, Pack, Result, RpcError};
use rpc_transports::self_start;

use crate::error::WorkerId;
use crate::link::event_queue::EventQueue;
use crate::link::local::{LocalHost, LocalLink};
use crate::link::relayed_data::{Destination, Relays, WorkerDirectory};
use crate::node::host_table::{HostEntry, HostOwner, HostReport, WorkerReport};
use crate::node::self_start::can_serve_workers;
use crate::node::simulated::{SimulatedHost, SimulatedWorkers};
use crate::node::subtree::Subtree;
use crate::open_files::OpenFiles;
use crate::options::Hosting;
use crate::wire::codec::{decode_batch, split_batch};
use crate::wire::command::{MAX_HELD, Queued, Scope};
use crate::wire::event::EventSink;
use crate::wire::mesh::Mesh;
use crate::wire::plan::{Layout, ListenAddresses};
use crate::wire::set_up::{MpiProcess, NodeInfo, SetUp, WorkerProcess};
use crate::worker::command_feed::{Feed, YIELD};
use crate::worker::context::WorkerContext;
use crate::worker::process_state::ProcessState;
use crate::worker::rendezvous::{DataAddress, machine};
use crate::worker::start;

/// The most nodes that one has directly below it.
const MAX_BELOW: usize = 1024;

/// The most workers of one host.
const MAX_WORKERS: u32 = 1024;

/// Size in bytes from which a command is charged by itself. Smaller ones are charged by the batch
/// in which they came, until all of them are executed.
const LARGE: u64 = 16 << 10;

/// Returns the job of MPI that this process belongs to, and its rank there, if it has started MPI.
#[cfg(feature = "mpi")]
fn own_mpi_process() -> Option<MpiProcess> {
    let process = crate::ccl::host::mpi::Process::started()?;
    Some(MpiProcess { job: process.job().to_owned(), rank: process.rank() })
}

#[cfg(not(feature = "mpi"))]
fn own_mpi_process() -> Option<MpiProcess> {
    None
}

/// Some workers of a session, at this node.
pub(crate) struct WorkerHost {
    /// Queue of events for a controller in another process; `None` for one in this process.
    events: Option<Arc<EventQueue>>,
    /// Workers in this process.
    threads: Option<Threads>,
    /// Workers that execute nothing, in place of those in this process.
    simulated: Option<SimulatedHost>,
    /// Workers in other processes, with the numbers behind those.
    subtree: Option<Subtree>,
    relays: Arc<Relays>,
    /// Context of the session that it was opened in.
    context: Context,
    layout: Layout,
    /// Number of the session of Disco.
    session: Option<u64>,
    /// Number of workers in the subtree.
    workers_below: u32,
    /// Entry in the table of the server, if the server has one.
    _entry: Option<HostEntry>,
}

/// Workers as threads of this process.
struct Threads {
    shared: Arc<ProcessState>,
    workers: Vec<WorkerContext>,
    feed: Arc<Feed>,
}

/// Returns true if the node has devices on which something can hang. Loads their drivers, if there
/// are any.
fn has_gpus(context: &Context) -> bool {
    let has = |kind| context.devices().kind(kind).and_then(|api| api.count()).is_ok_and(|count| count > 0);
    [DeviceType::CUDA, DeviceType::OPENCL].into_iter().any(has)
}

/// Returns true if this program can have workers as processes. Logs a warning if it cannot.
fn can_be_processes() -> bool {
    if !can_serve_workers() {
        rpc_core::log_limited!(
            WARN,
            "workers with GPUs are threads, because the program of this node does not call disco::serve_if_worker"
        );
        return false;
    }
    if let Err(error) = self_start::check() {
        rpc_core::log_limited!(
            WARN,
            %error,
            "workers with GPUs are threads, because this node cannot start its program again"
        );
        return false;
    }
    true
}

impl WorkerHost {
    pub(super) fn open(context: &Context, set_up: &SetUp) -> Result<(Arc<Self>, NodeInfo)> {
        let Layout { world_size, num_groups } = set_up.layout;
        let fits = num_groups > 0
            && world_size > 0
            && world_size % num_groups == 0
            && (1..=MAX_WORKERS).contains(&set_up.count)
            && set_up.children.len() <= MAX_BELOW
            && set_up.position().is_valid()
            && set_up.first.checked_add(set_up.workers()).is_some_and(|end| end <= world_size);
        if !fits {
            return Err(RpcError::invalid_argument(format!("no workers can be made of {set_up:?}")));
        }
        // A link serves the first host of its session alone.
        let local = context.extension::<LocalLink>().filter(|local| !local.has_host());
        let (events, sink) = match &local {
            Some(local) => (None, Arc::clone(local) as Arc<dyn EventSink>),
            None => {
                let events = Arc::new(EventQueue::new(context.detached()));
                (Some(Arc::clone(&events)), events as Arc<dyn EventSink>)
            }
        };
        let relays = Relays::new(context);
        let own = context.extension::<DataAddress>().map(|address| address.0);
        let mut info = NodeInfo { processes: Vec::new(), is_encrypted_below: false, data_addresses: vec![own] };
        let (mut threads, mut simulated) = (None, None);
        let is_simulated = context.extension::<SimulatedWorkers>().is_some();
        let in_processes = match set_up.hosting {
            _ if is_simulated => false,
            Hosting::Processes => true,
            Hosting::Threads => false,
            // The process of a session that has it to itself is as good as another one.
            Hosting::Auto => set_up.count > 1 && has_gpus(context) && can_be_processes(),
        };
        if is_simulated {
            simulated = Some(SimulatedHost::new(set_up, Arc::clone(&sink)));
            info.processes.push(WorkerProcess { count: set_up.count, machine: String::new(), mpi: None });
        } else if !in_processes {
            threads = Some(Threads::start(context, set_up, &sink, &relays, events.is_none())?);
            info.processes.push(WorkerProcess { count: set_up.count, machine: machine(), mpi: own_mpi_process() });
        }
        let mut subtree = None;
        if in_processes || !set_up.children.is_empty() {
            let opened = Subtree::open(context, set_up, in_processes, sink, &relays)?;
            info.processes.extend(opened.processes_below());
            info.is_encrypted_below = opened.is_encrypted();
            info.data_addresses.extend(opened.data_addresses());
            subtree = Some(opened);
        }
        let own = if threads.is_some() || is_simulated { set_up.count } else { 0 };
        let owner = context.extension::<HostOwner>();
        let host = Arc::new_cyclic(|host| Self {
            events,
            threads,
            simulated,
            subtree,
            relays,
            context: context.detached(),
            layout: set_up.layout,
            session: set_up.session,
            workers_below: set_up.workers() - own,
            _entry: owner.map(|owner| owner.list(host)),
        });
        let directory: Weak<dyn WorkerDirectory> = Arc::downgrade(&host) as Weak<dyn WorkerDirectory>;
        host.relays.set_directory(directory);
        if let Some(local) = local {
            local.set_host(Arc::downgrade(&host) as Weak<dyn LocalHost>)?;
        }
        Ok((host, info))
    }

    /// Appends a batch of commands to the queues of all workers.
    pub(super) fn submit_batch(&self, first: u64, heads: Bytes, bulk: Vec<Bytes>) -> Result<()> {
        let mut commands = decode_batch(heads.clone(), bulk)?;
        self.charge(&mut commands)?;
        if let Some(subtree) = &self.subtree {
            let commands = commands.iter().cloned().zip(split_batch(heads).map(Some));
            subtree.forward(first, commands.collect(), MAX_HELD)?;
        }
        if let Some(simulated) = &self.simulated {
            simulated.submit(first, &commands)?;
        }
        match &self.threads {
            Some(threads) => threads.feed.push(first, commands, MAX_HELD),
            None => Ok(()),
        }
    }

    /// Charges commands to the session, until the last of their holders has let go of them.
    fn charge(&self, commands: &mut [Queued]) -> Result<()> {
        let small = commands.iter().map(|queued| queued.command.cost()).filter(|cost| *cost < LARGE).sum();
        let of_batch = Arc::new(self.context.reserve_memory(small)?);
        for queued in commands {
            let cost = queued.command.cost();
            let large = (cost >= LARGE).then(|| self.context.reserve_memory(cost).map(Arc::new)).transpose()?;
            queued.charge = Some(large.unwrap_or_else(|| Arc::clone(&of_batch)));
        }
        Ok(())
    }

    /// Returns the number of workers in this process.
    pub(super) fn num_workers(&self) -> usize {
        self.threads.as_ref().map_or(0, |threads| threads.workers.len())
    }

    /// Describes the host and its first `max_workers` workers in this process.
    pub(super) fn report(&self, client: &str, max_workers: usize) -> HostReport {
        let mut report = HostReport::new(self.session, client, self.layout);
        report.workers_below = self.workers_below;
        if let Some(Threads { workers, feed, .. }) = &self.threads {
            let issued = feed.last();
            let own = self.layout.grouping(Scope::Group);
            let describe = |worker: &WorkerContext| {
                WorkerReport::new(worker.worker_id().0, worker.activity(), issued, worker.calls(), own)
            };
            report.workers = workers.iter().take(max_workers).map(describe).collect();
        }
        report
    }

    /// Returns the queue of events for a controller in another process.
    pub(super) fn events(&self) -> Option<Arc<EventQueue>> {
        self.events.clone()
    }

    pub(super) fn relays(&self) -> &Arc<Relays> {
        &self.relays
    }

    #[cfg(target_os = "linux")]
    pub(super) fn offer(&self, epoch: u64, meshes: &[Mesh]) -> Result<Pack<Vec<crate::ccl::host::Ticket>>> {
        match (&self.threads, &self.subtree) {
            (Some(Threads { shared, .. }), _) => {
                let open_files = OpenFiles::of(&self.context);
                shared.rendezvous().offer(shared.set_up().layout, meshes, epoch, &open_files).map(Pack)
            }
            (None, Some(subtree)) => subtree.offer(epoch, meshes),
            (None, None) => Err(RpcError::internal("a host without workers")),
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn offer(&self, _: u64, _: &[Mesh]) -> Result<()> {
        Err(RpcError::unsupported("processes share no memory on this system"))
    }

    pub(super) fn listen(&self, addresses: &[IpAddr], meshes: &[Mesh]) -> Result<Vec<ListenAddresses>> {
        let Some(own) = addresses.first() else {
            return Err(RpcError::invalid_argument("no address to listen at"));
        };
        let mut all = Vec::new();
        if let Some(Threads { shared, .. }) = &self.threads {
            let SetUp { layout, first, count, .. } = *shared.set_up();
            let open_files = OpenFiles::of(&self.context);
            all = shared.rendezvous().listen((layout, meshes), first..first + count, *own, &open_files)?;
        }
        // No worker listens there, and none will dial it.
        let nowhere = SocketAddr::new(*own, 0);
        self.layout.check(meshes)?;
        let groups = vec![nowhere; self.layout.joined_groupings(meshes).len()];
        let none = ListenAddresses { world: nowhere, groups };
        let simulated = self.simulated.as_ref().map_or(0, SimulatedHost::count);
        all.extend(std::iter::repeat_n(none, simulated as usize));
        if let Some(subtree) = &self.subtree {
            all.extend(subtree.listen(addresses, meshes)?);
        }
        Ok(all)
    }
}

impl LocalHost for WorkerHost {
    fn submit(&self, sequence: u64, queued: Queued) -> Result<()> {
        if let Some(subtree) = &self.subtree {
            subtree.forward(sequence, vec![(queued.clone(), None)], u64::MAX)?;
        }
        if let Some(simulated) = &self.simulated {
            simulated.submit(sequence, std::slice::from_ref(&queued))?;
        }
        match &self.threads {
            Some(threads) => threads.feed.push(sequence, [queued], u64::MAX),
            None => Ok(()),
        }
    }

    fn break_collectives(&self, epoch: u64, cause: &RpcError, and_joins: bool) {
        if let Some(Threads { workers, shared, .. }) = &self.threads {
            workers.iter().for_each(|worker| worker.break_collectives(epoch, cause));
            if and_joins {
                shared.rendezvous().give_up(epoch);
            }
        }
        self.subtree.iter().for_each(|subtree| subtree.break_collectives(epoch, cause, and_joins));
    }

    /// Ends all workers after the command that each executes, and their collectives now.
    fn abort(&self) {
        self.relays.close();
        self.threads.iter().for_each(Threads::abort);
        self.subtree.iter().for_each(Subtree::close);
        if let Some(events) = &self.events {
            events.close();
        }
    }
}

impl WorkerDirectory for WorkerHost {
    fn destination(&self, worker: u32, communicator: u32) -> Option<Result<Destination>> {
        let listening = |threads: &Threads| threads.shared.rendezvous().address(WorkerId(worker), communicator);
        match self.threads.as_ref().and_then(listening) {
            Some(address) => Some(Ok(Destination::LocalEnd(address, OpenFiles::of(&self.context)))),
            None => self.subtree.as_ref()?.destination(worker, communicator),
        }
    }
}

impl Threads {
    /// Starts the threads. Beside their controller, idle workers look for commands for a while
    /// before they sleep.
    fn start(
        context: &Context,
        set_up: &SetUp,
        sink: &Arc<dyn EventSink>,
        relays: &Arc<Relays>,
        are_beside_controller: bool,
    ) -> Result<Self> {
        let yield_time = if are_beside_controller { YIELD } else { Duration::ZERO };
        let (feed, readers) = Feed::new(set_up.count as usize, set_up.position().sequence, yield_time);
        let shared =
            Arc::new(ProcessState::new(Arc::clone(sink), set_up.clone(), Arc::clone(relays), are_beside_controller));
        let mut threads = Self { shared, workers: Vec::new(), feed };
        for (id, reader) in (set_up.first..).zip(readers) {
            let (shared, feed) = (Arc::clone(&threads.shared), Arc::clone(&threads.feed));
            // If there is no thread for one, dropping this ends the others.
            let worker = start::start(WorkerId(id), context.detached(), shared, feed, reader)?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    fn abort(&self) {
        self.feed.abort();
        self.shared.rendezvous().close();
        for worker in &self.workers {
            worker.end_collectives();
        }
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.abort();
    }
}

impl Drop for WorkerHost {
    fn drop(&mut self) {
        self.abort();
    }
}

impl fmt::Debug for WorkerHost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerHost")
    }
}
