//! Subtree of a node: workers in processes of its own, which it starts, and further nodes, with
//! which it opens sessions. The node forwards commands to all of them, and their events to the
//! controller.

use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use parking_lot::Mutex;
use rpc_core::limits::OpenFileLease;
use rpc_core::{Pack, Result, RpcError, ThreadPermit, blocking};
use rpc_transports::{Connector, Onward};

use crate::error::WorkerId;
use crate::link::loss::{self, LostNode};
use crate::link::node_link::Link;
use crate::link::outbox::QUEUED;
use crate::link::relayed_data::{Destination, RelayRequest, Relays};
use crate::link::session_source::{Source, open_links};
use crate::link::upstream::Upstream;
use crate::logs;
use crate::node::self_start::{WorkerSettings, this_program_as_worker};
use crate::open_files::OpenFiles;
use crate::options::Hosting;
use crate::wire::codec::Encoded;
use crate::wire::command::Queued;
use crate::wire::event::{Event, EventSink};
use crate::wire::mesh::Mesh;
use crate::wire::plan::{Layout, ListenAddresses};
use crate::wire::set_up::{ChildNode, SetUp, WorkerProcess};
use crate::worker::command_feed::out_of_order;

/// Descriptors of a worker's process here: two owners of the socket that is its standard input and
/// output, and its standard error.
const FILES_OF_PROCESS: usize = 3;

/// The processes of one node and the nodes below it, and the links to them.
pub(crate) struct Subtree {
    layout: Layout,
    above: Arc<ParentLink>,
    /// The number of the next command.
    next: Mutex<u64>,
}

/// Link to the parent: the queue of the node's events, which the controller fetches.
struct ParentLink {
    links: Vec<Link>,
    /// Number of nodes at each link; 0 where that is a process of this node.
    nodes: Vec<usize>,
    sink: Arc<dyn EventSink>,
    relays: Arc<Relays>,
    /// Each process and each node counts as a thread of the node's session.
    _permits: Vec<ThreadPermit>,
    /// Charge for the descriptors of its processes.
    _open_files: Option<OpenFileLease>,
}

impl Drop for ParentLink {
    fn drop(&mut self) {
        self.links.iter().for_each(Link::close);
    }
}

impl Subtree {
    /// Opens the nodes below, and starts a process for each worker of the node if `in_processes` is
    /// set.
    pub(crate) fn open(
        context: &rpc_core::Context,
        set_up: &SetUp,
        in_processes: bool,
        sink: Arc<dyn EventSink>,
        relays: &Arc<Relays>,
    ) -> Result<Self> {
        let relays = Arc::clone(relays);
        let (mut children, mut permits, mut nodes) = (Vec::new(), Vec::new(), Vec::new());
        let mut charged = None;
        if in_processes {
            let files = (set_up.count as usize).saturating_mul(FILES_OF_PROCESS);
            let purpose = format_args!("{} processes of workers", set_up.count);
            charged = OpenFiles::of(context).reserve(files, purpose)?;
            (children, permits) = processes(context, set_up, &sink)?;
            nodes = vec![0; children.len()];
        }
        if !set_up.children.is_empty() {
            // A connection and its tasks are no less than a thread.
            for child in &set_up.children {
                permits.push(context.reserve_thread()?);
                nodes.push(child.nodes());
            }
            children.extend(further(context, set_up)?);
        }
        let opening = crate::runtime::runtime()?.spawn(async move {
            let links = open_links(children).await?;
            let above = Arc::new(ParentLink { links, nodes, sink, relays, _permits: permits, _open_files: charged });
            let weak: Weak<dyn Upstream> = Arc::downgrade(&above) as Weak<dyn Upstream>;
            for (number, link) in above.links.iter().enumerate() {
                link.start(number, &weak)?;
                link.take_relays(number, &weak).await?;
            }
            Ok(above)
        });
        let opened = blocking::block_on(opening)?;
        let above = opened.unwrap_or_else(|_| Err(RpcError::internal("opening what is below a node panicked")))?;
        Ok(Self { layout: set_up.layout, above, next: Mutex::new(set_up.position().sequence + 1) })
    }

    /// Returns the processes there, in the order of their workers.
    pub(crate) fn processes_below(&self) -> impl Iterator<Item = WorkerProcess> + '_ {
        self.above.links.iter().flat_map(|link| link.info.processes.iter().cloned())
    }

    /// Returns the data addresses of the nodes below, in their order.
    pub(crate) fn data_addresses(&self) -> impl Iterator<Item = Option<IpAddr>> + '_ {
        let links = self.above.links.iter().zip(&self.above.nodes);
        links.filter(|(_, nodes)| **nodes > 0).flat_map(|(link, _)| link.info.data_addresses.iter().copied())
    }

    /// Returns true if any of the links is encrypted, here or further below.
    pub(crate) fn is_encrypted(&self) -> bool {
        self.above.links.iter().any(|link| link.is_encrypted)
    }

    /// Forwards a batch to every child, all or nothing, with the bytes in which each command came,
    /// if it came encoded.
    ///
    /// # Errors
    ///
    /// `first` is not the next number; the children's queues would exceed `limit` bytes.
    pub(crate) fn forward(&self, first: u64, commands: Vec<(Queued, Option<Bytes>)>, limit: u64) -> Result<()> {
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
    pub(crate) fn offer(&self, epoch: u64, meshes: &[Mesh]) -> Result<Pack<Vec<crate::ccl::host::Ticket>>> {
        let first = self.above.links.first().ok_or_else(|| RpcError::internal("a node without processes"))?;
        let (session, host) = far_end(first)?;
        let meshes = Pack(meshes.to_vec());
        blocking::block_on(async { session.get_function("disco.offer").await?.call((&host, epoch, meshes)).await })?
    }

    /// Lets the workers listen for each other, and returns the addresses of their listeners, in
    /// their order. The first of `addresses` is that of this node, and the others of those below,
    /// in order.
    pub(crate) fn listen(&self, addresses: &[IpAddr], meshes: &[Mesh]) -> Result<Vec<ListenAddresses>> {
        let (own, mut below) = addresses.split_at(addresses.len().min(1));
        let runtime = crate::runtime::runtime()?;
        let mut listening = Vec::new();
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
            // All at once.
            listening.push(runtime.spawn(link.listen(addresses.to_vec(), meshes.to_vec())));
        }
        let mut all = Vec::new();
        for one in listening {
            let listening = blocking::block_on(one)?;
            all.extend(listening.unwrap_or_else(|_| Err(RpcError::internal("asking a node panicked")))?);
        }
        Ok(all)
    }

    /// Returns the destination of data for a worker, if it is below.
    pub(crate) fn destination(&self, worker: u32, communicator: u32) -> Option<Result<Destination>> {
        let link = self.above.links.iter().find(|link| link.workers().contains(&worker))?;
        Some(link.destination(worker, communicator))
    }

    /// Ends the collectives of an epoch, also those that workers are in, and if `and_joins` is set
    /// those by which they join each other. Never waits.
    pub(crate) fn break_collectives(&self, epoch: u64, cause: &RpcError, and_joins: bool) {
        self.above.links.iter().for_each(|link| link.break_collectives(epoch, cause, and_joins));
    }

    /// Closes the links to the processes, which then end.
    pub(crate) fn close(&self) {
        self.above.links.iter().for_each(Link::close);
    }
}

impl Upstream for ParentLink {
    fn handle(&self, _: usize, event: Event) {
        self.sink.send(event);
    }

    fn lose(&self, link: usize, error: RpcError) {
        let node = LostNode { nodes: self.nodes[link], ..self.links[link].lost_node() };
        self.sink.send(loss::below_node(&node, error));
    }

    fn relay(&self, wanted: RelayRequest) {
        self.relays.request(wanted);
    }

    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.sink.poll_room(cx)
    }
}

/// Returns the size of a command in a link's queue, with the bytes that it came in.
fn waiting_size(queued: &Queued, head: Option<&Bytes>) -> usize {
    QUEUED + head.map_or(0, Bytes::len) + queued.command.bulk().map_or(0, |bulk| bulk.len())
}

/// Set-ups and origins of the nodes to open below a node.
type Children = Vec<(SetUp, Source)>;

/// Returns a process for each worker of a node, and the permits by which they count.
fn processes(
    context: &rpc_core::Context,
    set_up: &SetUp,
    sink: &Arc<dyn EventSink>,
) -> Result<(Children, Vec<ThreadPermit>)> {
    let address = this_program_as_worker(Some(&WorkerSettings::of(context)?))?;
    let permits = (0..set_up.count).map(|_| context.reserve_thread()).collect::<Result<_>>()?;
    let child = |first| {
        let set_up = SetUp { first, count: 1, hosting: Hosting::Threads, children: Vec::new(), ..set_up.clone() };
        let sink = Arc::clone(sink);
        let log = move |line| sink.send(Event::Logged { worker: WorkerId(first), line });
        let connector = Connector::new().transports(logs::of_stderr(set_up.logs, log));
        (set_up, Source::Address(Box::new(connector), address.clone()))
    };
    Ok(((set_up.first..set_up.first + set_up.count).map(child).collect(), permits))
}

/// Returns the nodes below, which are reached through the server of this session.
fn further(context: &rpc_core::Context, set_up: &SetUp) -> Result<Children> {
    let onward = context.extension::<Onward>().ok_or_else(|| {
        RpcError::unsupported(
            "this node opens no sessions with others: its server offers functions no way to do that, as where \
             sessions have processes of their own (--isolate process)",
        )
    })?;
    let mut first = set_up.first + set_up.count;
    let open = |child: &ChildNode| {
        let this = SetUp { first, children: child.children.clone(), ..set_up.clone() };
        first = this.first.saturating_add(this.workers());
        (this, Source::Onward(Arc::clone(&onward), child.address.clone()))
    };
    Ok(set_up.children.iter().map(open).collect())
}

fn far_end(link: &Link) -> Result<(rpc_core::Session, rpc_core::RemoteObject)> {
    link.far_end().ok_or_else(|| RpcError::internal("the session has ended"))
}
