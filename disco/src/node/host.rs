//! The workers of one node: what a controller opens over a session, and what it tells them.
//!
//! These functions are registered under names that begin with `disco.`:
//!
//! | name | parameters | result |
//! | --- | --- | --- |
//! | `disco.open` | set-up, packed | the host of some workers, and what is known of it, packed |
//! | `disco.submit` | host, number of the first command, commands, list of bulk | null; inline |
//! | `disco.events` | host | what has happened, once that is anything; an empty list after the end |
//! | `disco.offer` | host, epoch | tickets to segments for the whole session, packed |
//! | `disco.listen` | host, IP addresses of its node and those below it | where their workers listen for each other, packed |
//! | `disco.break_ccl` | host, epoch, reason | null; inline: ends the collectives of that epoch, also those that workers are in |
//! | `disco.abort` | host | null; inline: passes everything that is queued |
//!
//! Those for data between workers that cannot reach each other are at [`crate::link::relay`].
//!
//! A host ends with the session that it was opened in, or when its controller lets go of it.
//!
//! A host may have others below it: processes of its own, and further nodes, with which it opens sessions itself. It passes them all commands
//! in the order of their numbers, and what they say to whoever opened it, for whom they are workers of this host. The workers below it have the numbers
//! behind its own.

use std::collections::HashMap;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use bytes::Bytes;
use rpc_core::{Context, DeviceType, ErrorKind, Module, Pack, Registry, Result, RpcError, Shared as SharedObject};
use serde::{Deserialize, Serialize};

use crate::error::WorkerId;
use crate::link::relay::{self, Destination, Relays};
use crate::node::subtree::{Branch, can_serve_workers};
use crate::options::Hosting;
use crate::weights;
use crate::wire::codec::{decode_batch, split_batch};
use crate::wire::command::{MAX_HELD, Queued};
use crate::wire::event::{EventQueue, EventSink};
use crate::worker::context::WorkerContext;
use crate::worker::executor;
use crate::worker::feed::{Feed, YIELD};
use crate::worker::rendezvous::{DataAddress, Layout, Listening, MeetingPlace, machine};

/// The most nodes that one has directly below it.
const MAX_BELOW: usize = 1024;

/// The most workers of one host.
const MAX_WORKERS: u32 = 1024;

/// Adds what workers are created and driven by to `registry`, whose functions they call.
///
/// A program that registers this and serves its registry can be a node of any Disco session: as a child process, over a network, behind a chain of
/// hops.
pub fn register(registry: &Registry) {
    registry
        .add("disco.open", |context: Context, set_up: Pack<SetUp>| -> Result<_> {
            let (host, info) = WorkerHost::open(&context, &set_up.0)?;
            Ok((SharedObject(host), Pack(info)))
        })
        .add_inline("disco.submit", |host: SharedObject<WorkerHost>, first: u64, heads: Bytes, bulk: Vec<Bytes>| {
            host.0.submit_batch(first, heads, bulk)
        })
        .add_async("disco.events", |host: SharedObject<WorkerHost>| {
            let events = host.0.events.clone();
            // The host itself may go while somebody waits.
            drop(host);
            async move {
                match events {
                    Some(events) => events.next().await,
                    None => Err(RpcError::new(ErrorKind::ApiMisuse, "the controller of this host is in its process")),
                }
            }
        })
        .add("disco.offer", |host: SharedObject<WorkerHost>, epoch: u64| -> Result<_> { host.0.offer(epoch) })
        .add("disco.listen", |host: SharedObject<WorkerHost>, addresses: Pack<Vec<IpAddr>>| -> Result<_> {
            host.0.listen(&addresses.0).map(Pack)
        })
        .add_inline("disco.break_ccl", |host: SharedObject<WorkerHost>, epoch: u64, reason: String| {
            host.0.break_collectives(epoch, &reason);
        })
        .add_inline("disco.abort", |host: SharedObject<WorkerHost>| host.0.abort());
    relay::register(registry);
    weights::register(registry);
}

/// What a host is to be.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct SetUp {
    pub(crate) layout: Layout,
    /// The first of its workers.
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) hosting: Hosting,
    pub(crate) pin: bool,
    /// Up to which level the controller wants to see logs, if at all.
    pub(crate) logs: Option<u8>,
    /// How much executed credit is worth a report, in bytes.
    pub(crate) report_every: u64,
    /// How often those below it are tested.
    pub(crate) keep_alive_ms: u64,
    /// Set by controllers that hope to be in the same process.
    pub(crate) local: u64,
    /// The nodes below it.
    pub(crate) below: Vec<Below>,
}

impl SetUp {
    pub(crate) fn keep_alive(&self) -> Duration {
        Duration::from_millis(self.keep_alive_ms)
    }

    /// How many workers there are, those below included.
    pub(crate) fn workers(&self) -> u32 {
        // Saturating: it may come from anybody.
        u32::try_from(self.nodes()).unwrap_or(u32::MAX).saturating_mul(self.count)
    }

    /// How many nodes there are, with this one.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.below.iter().map(Below::nodes).sum::<usize>()
    }
}

/// A node that another one opens, with as many workers as that has itself.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Below {
    pub(crate) address: String,
    pub(crate) below: Vec<Self>,
}

impl Below {
    /// How many nodes this is.
    pub(crate) fn nodes(&self) -> usize {
        1 + self.below.iter().map(Self::nodes).sum::<usize>()
    }
}

/// What a controller learns of a host.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct HostInfo {
    /// Its processes and those below it, in the order of their workers.
    pub(crate) leaves: Vec<Leaf>,
    /// Whether any of the links below it is encrypted.
    pub(crate) is_encrypted_below: bool,
    /// Where the workers of its node and of those below listen for data, as far as their operators say, in the order of nodes.
    pub(crate) data_addresses: Vec<Option<IpAddr>>,
}

/// One process, and how many workers it has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Leaf {
    pub(crate) count: u32,
    /// Equal where processes can share memory; empty where that is not known.
    pub(crate) machine: String,
    /// Which process of which job of MPI it is, if it is one.
    pub(crate) mpi: Option<MpiSeat>,
}

/// A process of a job of MPI.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct MpiSeat {
    /// What the processes of one job, and no others, have in common.
    pub(crate) job: String,
    pub(crate) rank: u32,
}

impl MpiSeat {
    /// That of this process.
    #[cfg(feature = "mpi")]
    fn own() -> Option<Self> {
        let process = crate::ccl::host::mpi::Process::started()?;
        Some(Self { job: process.job().to_owned(), rank: process.rank() })
    }

    #[cfg(not(feature = "mpi"))]
    fn own() -> Option<Self> {
        None
    }
}

/// What the workers of one process share.
pub(crate) struct Shared {
    sink: Arc<dyn EventSink>,
    set_up: SetUp,
    place: MeetingPlace,
    relays: Arc<Relays>,
    modules: Mutex<HashMap<String, Arc<Place>>>,
}

/// A module, once it is loaded.
type Place = Mutex<Option<Arc<dyn Module>>>;

impl Shared {
    pub(crate) fn sink(&self) -> Arc<dyn EventSink> {
        Arc::clone(&self.sink)
    }

    pub(crate) fn set_up(&self) -> &SetUp {
        &self.set_up
    }

    pub(crate) fn place(&self) -> &MeetingPlace {
        &self.place
    }

    pub(crate) fn relays(&self) -> &Arc<Relays> {
        &self.relays
    }

    /// Loads a module, or finds it where another worker of this process has.
    pub(crate) fn load_module(&self, context: &Context, path: &str) -> Result<Arc<dyn Module>> {
        let place = {
            let mut modules = self.modules.lock();
            Arc::clone(modules.entry(path.to_owned()).or_default())
        };
        // Held while it loads, so that it is loaded once. Others may load others meanwhile.
        let mut place = place.lock();
        if let Some(module) = &*place {
            return Ok(Arc::clone(module));
        }
        let module = context.load_module(path, None)?;
        *place = Some(Arc::clone(&module));
        Ok(module)
    }
}

/// Some workers of a session, at this node.
pub(crate) struct WorkerHost {
    /// For a controller in another process.
    events: Option<Arc<EventQueue>>,
    /// Workers in this process.
    threads: Option<Threads>,
    /// Workers in others, with numbers behind those.
    branch: Option<Branch>,
    relays: Arc<Relays>,
}

/// Workers as threads of this process.
struct Threads {
    shared: Arc<Shared>,
    workers: Vec<WorkerContext>,
    feed: Arc<Feed>,
}

/// Whether a node has devices on which something can hang. Loads their driver, if there is one.
fn has_gpus(context: &Context) -> bool {
    let has = |kind| context.devices().kind(kind).and_then(|api| api.count()).is_ok_and(|count| count > 0);
    [DeviceType::CUDA, DeviceType::ROCM].into_iter().any(has)
}

/// Whether this program can have workers as processes, which it is told of if it cannot.
fn can_be_processes() -> bool {
    let can = can_serve_workers();
    if !can {
        tracing::warn!(
            "workers with GPUs are threads, because the program of this node does not call disco::serve_if_worker"
        );
    }
    can
}

impl WorkerHost {
    fn open(context: &Context, set_up: &SetUp) -> Result<(Arc<Self>, HostInfo)> {
        let Layout { world_size, num_groups } = set_up.layout;
        let fits = num_groups > 0
            && world_size > 0
            && world_size % num_groups == 0
            && (1..=MAX_WORKERS).contains(&set_up.count)
            && set_up.below.len() <= MAX_BELOW
            && set_up.first.checked_add(set_up.workers()).is_some_and(|end| end <= world_size);
        if !fits {
            return Err(RpcError::invalid_argument(format!("no workers can be made of {set_up:?}")));
        }
        let local = take_sink(set_up.local);
        let events = local.is_none().then(|| Arc::new(EventQueue::default()));
        let sink = local.or_else(|| events.clone().map(|events| events as Arc<dyn EventSink>));
        let sink = sink.ok_or_else(|| RpcError::internal("a host without events"))?;
        let relays = Relays::new(context.limits());
        let own = context.extension::<DataAddress>().map(|address| address.0);
        let mut info = HostInfo { leaves: Vec::new(), is_encrypted_below: false, data_addresses: vec![own] };
        let mut threads = None;
        let in_processes = match set_up.hosting {
            Hosting::Processes => true,
            Hosting::Threads => false,
            // The process of a session that has it to itself is as good as another one.
            Hosting::Auto => set_up.count > 1 && has_gpus(context) && can_be_processes(),
        };
        if !in_processes {
            let patience = if events.is_none() { YIELD } else { Duration::ZERO };
            threads = Some(Threads::start(context, set_up, &sink, &relays, patience)?);
            info.leaves.push(Leaf { count: set_up.count, machine: machine(), mpi: MpiSeat::own() });
        }
        let mut branch = None;
        if in_processes || !set_up.below.is_empty() {
            let opened = Branch::open(context, set_up, in_processes, sink, &relays)?;
            info.leaves.extend(opened.leaves());
            info.is_encrypted_below = opened.is_encrypted();
            info.data_addresses.extend(opened.data_addresses());
            branch = Some(opened);
        }
        let host = Arc::new(Self { events, threads, branch, relays });
        host.relays.belong_to(&host);
        put_host(set_up.local, &host);
        Ok((host, info))
    }

    /// Passes a command to all workers.
    pub(crate) fn submit(&self, sequence: u64, queued: Queued) -> Result<()> {
        if let Some(branch) = &self.branch {
            branch.pass_on(sequence, vec![(queued.clone(), None)], u64::MAX)?;
        }
        match &self.threads {
            Some(threads) => threads.feed.push(sequence, [queued], u64::MAX),
            None => Ok(()),
        }
    }

    /// Passes a batch of them to all workers.
    fn submit_batch(&self, first: u64, heads: Bytes, bulk: Vec<Bytes>) -> Result<()> {
        let commands = decode_batch(heads.clone(), bulk)?;
        if let Some(branch) = &self.branch {
            let commands = commands.iter().cloned().zip(split_batch(heads).map(Some));
            branch.pass_on(first, commands.collect(), MAX_HELD)?;
        }
        match &self.threads {
            Some(threads) => threads.feed.push(first, commands, MAX_HELD),
            None => Ok(()),
        }
    }

    /// Ends all workers after what they are doing, and their collectives now.
    pub(crate) fn abort(&self) {
        self.relays.close();
        self.threads.iter().for_each(Threads::abort);
        self.branch.iter().for_each(Branch::close);
        if let Some(events) = &self.events {
            events.close();
        }
    }

    /// Ends the collectives of an epoch, and no command.
    pub(crate) fn break_collectives(&self, epoch: u64, reason: &str) {
        let workers = self.threads.iter().flat_map(|threads| &threads.workers);
        workers.for_each(|worker| worker.break_collectives(epoch, reason));
        self.branch.iter().for_each(|branch| branch.break_collectives(epoch, reason));
    }

    pub(crate) fn relays(&self) -> &Arc<Relays> {
        &self.relays
    }

    /// Where data for a worker goes, if that is here or below.
    pub(crate) fn destination(&self, worker: u32, is_world: bool) -> Option<Result<Destination>> {
        let listening = |threads: &Threads| threads.shared.place.address(WorkerId(worker), is_world);
        match self.threads.as_ref().and_then(listening) {
            Some(address) => Some(Ok(Destination::Here(address))),
            None => self.branch.as_ref()?.destination(worker, is_world),
        }
    }

    #[cfg(target_os = "linux")]
    fn offer(&self, epoch: u64) -> Result<Pack<Vec<crate::ccl::host::Ticket>>> {
        match (&self.threads, &self.branch) {
            (Some(Threads { shared, .. }), _) => shared.place.offer(shared.set_up.layout, epoch).map(Pack),
            (None, Some(branch)) => branch.offer(epoch),
            (None, None) => Err(RpcError::internal("a host without workers")),
        }
    }

    #[cfg(not(target_os = "linux"))]
    fn offer(&self, _: u64) -> Result<()> {
        Err(RpcError::unsupported("processes share no memory on this system"))
    }

    fn listen(&self, addresses: &[IpAddr]) -> Result<Vec<Listening>> {
        let Some(own) = addresses.first() else {
            return Err(RpcError::invalid_argument("no address to listen at"));
        };
        let mut all = Vec::new();
        if let Some(Threads { shared, .. }) = &self.threads {
            let SetUp { layout, first, count, .. } = shared.set_up;
            all = shared.place.listen(layout, first, count, *own)?;
        }
        if let Some(branch) = &self.branch {
            all.extend(branch.listen(addresses)?);
        }
        Ok(all)
    }
}

impl Threads {
    /// `patience` is how long a worker that has nothing to do looks for more before it sleeps.
    fn start(
        context: &Context,
        set_up: &SetUp,
        sink: &Arc<dyn EventSink>,
        relays: &Arc<Relays>,
        patience: Duration,
    ) -> Result<Self> {
        let (feed, readers) = Feed::new(set_up.count as usize, patience);
        let shared = Arc::new(Shared {
            sink: Arc::clone(sink),
            set_up: set_up.clone(),
            place: MeetingPlace::default(),
            relays: Arc::clone(relays),
            modules: Mutex::default(),
        });
        let mut threads = Self { shared, workers: Vec::new(), feed };
        for (id, reader) in (set_up.first..).zip(readers) {
            let (shared, feed) = (Arc::clone(&threads.shared), Arc::clone(&threads.feed));
            // If there is no thread for one, dropping this ends the others.
            let worker = executor::start(WorkerId(id), context.detached(), shared, feed, reader)?;
            threads.workers.push(worker);
        }
        Ok(threads)
    }

    fn abort(&self) {
        self.feed.abort();
        for worker in &self.workers {
            worker.abort_collectives("the session has ended");
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

/// How a controller and a host of one process find each other, though there is a session between them: by a number that nobody else
/// knows.
static HERE: LazyLock<Mutex<HashMap<u64, Meeting>>> = LazyLock::new(Mutex::default);

struct Meeting {
    sink: Arc<dyn EventSink>,
    host: Weak<WorkerHost>,
}

/// Offers to take the events of a host that may be in this process.
pub(crate) fn expect_host(number: u64, sink: Arc<dyn EventSink>) {
    HERE.lock().insert(number, Meeting { sink, host: Weak::new() });
}

/// The host that has come, if it is in this process.
pub(crate) fn meet_host(number: u64) -> Option<Arc<WorkerHost>> {
    HERE.lock().remove(&number)?.host.upgrade()
}

fn take_sink(number: u64) -> Option<Arc<dyn EventSink>> {
    HERE.lock().get(&number).map(|meeting| Arc::clone(&meeting.sink))
}

fn put_host(number: u64, host: &Arc<WorkerHost>) {
    if let Some(meeting) = HERE.lock().get_mut(&number) {
        meeting.host = Arc::downgrade(host);
    }
}
