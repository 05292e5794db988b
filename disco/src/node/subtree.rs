//! What a node has below it: workers in processes of its own, which it starts, and further nodes, with which it opens sessions. It passes commands on to
//! all of them, and what they say to the controller.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use bytes::Bytes;
use rpc_core::{Pack, Result, RpcError, SessionLimits, ThreadPlace, blocking};
use rpc_transports::{Address, Connector, Onward, self_start};
use serde::{Deserialize, Serialize};

use crate::error::WorkerId;
use crate::launch::{Source, WORKER, open_links};
use crate::link::node_link::{Inbox, Link, QUEUED, Upstream};
use crate::link::relay::{Destination, Relays, Wanted};
use crate::logs;
use crate::node::host::{Below, Leaf, SetUp};
use crate::node::settings::NodeSettings;
use crate::options::Hosting;
use crate::weights::folders::WeightFolders;
use crate::wire::codec::Encoded;
use crate::wire::command::Queued;
use crate::wire::event::{Event, EventSink};
use crate::worker::feed::out_of_order;
use crate::worker::rendezvous::{Layout, Listening};

/// Whether this program has said that it serves workers when it is started as one.
static SERVES_WORKERS: AtomicBool = AtomicBool::new(false);

/// This program can be started as a worker from now on.
pub(crate) fn serves_workers() {
    SERVES_WORKERS.store(true, Ordering::Relaxed);
}

/// Whether it can.
pub(crate) fn can_serve_workers() -> bool {
    SERVES_WORKERS.load(Ordering::Relaxed)
}

/// The processes of one node and the nodes below it, and the links to them.
pub(crate) struct Branch {
    layout: Layout,
    above: Arc<Above>,
    /// The number of the next command.
    next: Mutex<u64>,
}

/// What is above them: their node's events, which the controller fetches.
struct Above {
    links: Vec<Link>,
    /// How many nodes are at each link: none where that is a process of this one.
    nodes: Vec<usize>,
    sink: Arc<dyn EventSink>,
    relays: Arc<Relays>,
    /// Each process and each node counts as a thread of the node's session.
    _places: Vec<ThreadPlace>,
}

impl Drop for Above {
    fn drop(&mut self) {
        self.links.iter().for_each(Link::close);
    }
}

impl Branch {
    /// Starts a process for each worker of the node, if that is how it has them, and opens the nodes below.
    pub(crate) fn open(
        context: &rpc_core::Context,
        set_up: &SetUp,
        in_processes: bool,
        sink: Arc<dyn EventSink>,
        relays: &Arc<Relays>,
    ) -> Result<Self> {
        let relays = Arc::clone(relays);
        let (mut children, mut places, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
        if in_processes {
            (children, places) = processes(context, set_up, &sink)?;
            nodes = vec![0; children.len()];
        }
        if !set_up.below.is_empty() {
            // A connection and its tasks are no less than a thread.
            for below in &set_up.below {
                places.push(context.reserve_thread()?);
                nodes.push(below.nodes());
            }
            children.extend(further(context, set_up)?);
        }
        let opening = crate::runtime::runtime()?.spawn(async move {
            // None of them is in this process.
            let links = open_links(children, &Arc::default() as &Arc<Inbox>).await?;
            let above = Arc::new(Above { links, nodes, sink, relays, _places: places });
            let weak: Weak<dyn Upstream> = Arc::downgrade(&above) as Weak<dyn Upstream>;
            for (number, link) in above.links.iter().enumerate() {
                link.start(number, &weak).await?;
                link.take_relays(number, &weak).await?;
            }
            Ok(above)
        });
        let opened = blocking::block_on(opening)?;
        let above = opened.unwrap_or_else(|_| Err(RpcError::internal("opening what is below a node panicked")))?;
        Ok(Self { layout: set_up.layout, above, next: Mutex::new(1) })
    }

    /// The processes there, in the order of their workers.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = Leaf> + '_ {
        self.above.links.iter().flat_map(|link| link.info.leaves.iter().cloned())
    }

    /// Where the nodes below listen for data, in their order.
    pub(crate) fn data_addresses(&self) -> impl Iterator<Item = Option<IpAddr>> + '_ {
        let links = self.above.links.iter().zip(&self.above.nodes);
        links.filter(|(_, nodes)| **nodes > 0).flat_map(|(link, _)| link.info.data_addresses.iter().copied())
    }

    /// Whether any of the links is encrypted, here or further below.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.above.links.iter().any(|link| link.is_encrypted)
    }

    /// Passes commands with consecutive numbers on, with the bytes that they came in, if they came so; all of them, or none if more than so many bytes would wait
    /// here for whoever is slow to take them.
    pub(crate) fn pass_on(&self, first: u64, commands: Vec<(Queued, Option<Bytes>)>, limit: u64) -> Result<()> {
        // Held to the end, so that every process gets them in order.
        let mut next = self.next.lock();
        if *next != first {
            return Err(out_of_order(first, *next));
        }
        if limit < u64::MAX {
            let batch: usize = commands.iter().map(|(queued, head)| waiting_size(queued, head.as_ref())).sum();
            let held: usize = self.above.links.iter().map(Link::held).sum();
            let held = held.saturating_add(batch.saturating_mul(self.above.links.len())) as u64;
            if held > limit {
                return Err(RpcError::limit("the bytes of commands that wait below a node", limit, held));
            }
        }
        for (queued, head) in commands {
            let encoded = match head {
                Some(head) => Encoded { head, bulk: queued.command.bulk() },
                None => queued.command.encode()?,
            };
            for link in &self.above.links {
                let bulk = self.layout.concerns(queued.command.on(), link.workers());
                link.push(*next, &queued, Some(&encoded), bulk);
            }
            *next += 1;
        }
        Ok(())
    }

    /// Tickets to segments of the first process.
    #[cfg(target_os = "linux")]
    pub(crate) fn offer(&self, epoch: u64) -> Result<Pack<Vec<crate::ccl::host::Ticket>>> {
        let first = self.above.links.first().ok_or_else(|| RpcError::internal("a node without processes"))?;
        let (session, host) = far_end(first)?;
        blocking::block_on(async { session.get_function("disco.offer").await?.call((&host, epoch)).await })?
    }

    /// Where the workers listen for each other, in their order. The first address is that of this node, and the others of those below, in their order.
    pub(crate) fn listen(&self, addresses: &[IpAddr]) -> Result<Vec<Listening>> {
        let (own, mut below) = addresses.split_at(addresses.len().min(1));
        let mut all = Vec::new();
        for (link, nodes) in self.above.links.iter().zip(&self.above.nodes) {
            let addresses = if *nodes == 0 {
                own
            } else {
                let (these, others) = below
                    .split_at_checked(*nodes)
                    .ok_or_else(|| RpcError::invalid_argument("an address to listen at for each node"))?;
                below = others;
                these
            };
            all.extend(blocking::block_on(link.listen(addresses.to_vec()))??);
        }
        Ok(all)
    }

    /// Where data for a worker goes, if that is below.
    pub(crate) fn destination(&self, worker: u32, is_world: bool) -> Option<Result<Destination>> {
        let link = self.above.links.iter().find(|link| link.workers().contains(&worker))?;
        Some(link.destination(worker, is_world))
    }

    /// Ends the collectives of an epoch, also those that workers are in. Never waits.
    pub(crate) fn break_collectives(&self, epoch: u64, reason: &str) {
        self.above.links.iter().for_each(|link| link.break_collectives(epoch, reason));
    }

    /// Lets go of the processes: they end.
    pub(crate) fn close(&self) {
        self.above.links.iter().for_each(Link::close);
    }
}

impl Upstream for Above {
    fn handle(&self, event: Event) {
        self.sink.send(event);
    }

    fn lose(&self, link: usize, error: RpcError) {
        let worker = WorkerId(self.links[link].first);
        let error = if self.nodes[link] == 0 { error } else { error.context(&self.links[link].name) };
        self.sink.send(Event::Lost { worker, error });
    }

    fn relay(&self, wanted: Wanted) {
        self.relays.want(wanted);
    }

    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.sink.poll_room(cx)
    }
}

/// What a command takes of a link's queue, with the bytes that it came in.
fn waiting_size(queued: &Queued, head: Option<&Bytes>) -> usize {
    QUEUED + head.map_or(0, Bytes::len) + queued.command.bulk().map_or(0, |bulk| bulk.len())
}

/// What is to be opened below a node.
type Children = Vec<(SetUp, Source)>;

/// A process for each worker of a node, and what they count as.
fn processes(
    context: &rpc_core::Context,
    set_up: &SetUp,
    sink: &Arc<dyn EventSink>,
) -> Result<(Children, Vec<ThreadPlace>)> {
    let address = this_program_as_worker(Some(&OfNode::of(context)))?;
    let places = (0..set_up.count).map(|_| context.reserve_thread()).collect::<Result<_>>()?;
    let child = |first| {
        let set_up =
            SetUp { first, count: 1, hosting: Hosting::Threads, local: 0, below: Vec::new(), ..set_up.clone() };
        let sink = Arc::clone(sink);
        let log = move |line| sink.send(Event::Logged { worker: WorkerId(first), line });
        let connector = Connector::new().dial_options(logs::of_stderr(set_up.logs, log));
        (set_up, Source::Address(Box::new(connector), address.clone()))
    };
    Ok(((set_up.first..set_up.first + set_up.count).map(child).collect(), places))
}

/// The nodes below, to which the server of this session makes way.
fn further(context: &rpc_core::Context, set_up: &SetUp) -> Result<Children> {
    let onward = context.extension::<Onward>().ok_or_else(|| {
        RpcError::unsupported(
            "this node opens no sessions with others: its server offers functions no way to do that, as where sessions have processes of their own (--isolate process)",
        )
    })?;
    let mut first = set_up.first + set_up.count;
    let child = |below: &Below| {
        let this = SetUp { first, local: 0, below: below.below.clone(), ..set_up.clone() };
        first = this.first.saturating_add(this.workers());
        (this, Source::Onward(Arc::clone(&onward), below.address.clone()))
    };
    Ok(set_up.below.iter().map(child).collect())
}

fn far_end(link: &Link) -> Result<(rpc_core::Session, rpc_core::RemoteObject)> {
    link.far_end().ok_or_else(|| RpcError::internal("the session has ended"))
}

/// What the session of a worker's process takes over from that of its node.
#[derive(Serialize, Deserialize)]
pub(crate) struct OfNode {
    pub(crate) limits: SessionLimits,
    pub(crate) weights: Option<WeightFolders>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) settings: Option<NodeSettings>,
}

impl OfNode {
    fn of(context: &rpc_core::Context) -> Self {
        let weights = context.extension::<WeightFolders>();
        let settings = context.extension::<NodeSettings>();
        Self {
            limits: context.limits().clone(),
            weights: weights.map(|folders| WeightFolders::clone(&folders)),
            settings: settings.map(|settings| NodeSettings::clone(&settings)),
        }
    }
}

/// This program as the address of a worker, in a session like that of a node or of no node.
///
/// # Errors
///
/// `main` has not called [`serve_if_worker`](crate::serve_if_worker), so that the child would be this program from its
/// beginning; this process is itself such a child; or the path of the program is unknown.
pub(crate) fn this_program_as_worker(node: Option<&OfNode>) -> Result<String> {
    if !can_serve_workers() {
        return Err(RpcError::unsupported(
            "workers as processes are this program, started again, and its `main` has not called the hook for them: \
             add the line `disco::serve_if_worker(&registry);` before everything else in `main`",
        ));
    }
    self_start::check().map_err(|error| RpcError::unsupported(error.to_string()))?;
    let program = std::env::current_exe().ok();
    let program = program.as_ref().and_then(|path| path.to_str());
    let program = program.ok_or_else(|| RpcError::unsupported("where this program lies is not known"))?;
    let node = node.map(serde_json::to_string).transpose();
    let node = node.map_err(|error| RpcError::internal(format!("its settings cannot be written: {error}")))?;
    let words = [Some(program), Some(WORKER), node.as_deref()];
    let address =
        Address::exec(words.into_iter().flatten()).map_err(|error| RpcError::invalid_argument(error.to_string()))?;
    Ok(address.to_string())
}
