//! Workers in processes of their own at one node: it starts them, passes commands on to all of them, and what they say to the controller.

use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use rpc_core::{Pack, Result, RpcError, SessionLimits, ThreadPlace, blocking};
use rpc_transports::{Address, Connector};

use crate::command::{Encoded, Queued};
use crate::error::WorkerId;
use crate::event::{Event, EventSink};
use crate::feed::out_of_order;
use crate::host::{Leaf, SetUp};
use crate::launch::{Source, WORKER, open_links};
use crate::link::{Inbox, Link, Upstream};
use crate::options::Hosting;
use crate::plane::{Layout, Listening};

/// Whether this program has said that it serves workers when it is started as one.
static SERVES_WORKERS: AtomicBool = AtomicBool::new(false);

/// This program can be started as a worker from now on.
pub(crate) fn serves_workers() {
    SERVES_WORKERS.store(true, Ordering::Relaxed);
}

/// The processes of one node, and the links to them.
pub(crate) struct Branch {
    layout: Layout,
    above: Arc<Above>,
    /// The number of the next command.
    next: Mutex<u64>,
}

/// What is above the processes: their node's events, which the controller fetches.
struct Above {
    links: Vec<Link>,
    sink: Arc<dyn EventSink>,
    /// Each process counts as a thread of the node's session.
    _places: Vec<ThreadPlace>,
}

impl Drop for Above {
    fn drop(&mut self) {
        self.links.iter().for_each(Link::close);
    }
}

impl Branch {
    /// Starts a process for each worker.
    pub(crate) fn open(
        context: &rpc_core::Context,
        set_up: &SetUp,
        sink: Arc<dyn EventSink>,
    ) -> Result<(Self, Vec<Leaf>)> {
        if !SERVES_WORKERS.load(Ordering::Relaxed) {
            return Err(RpcError::unsupported(
                "the program of this node cannot have its workers as processes: it does not call disco::serve_if_worker",
            ));
        }
        let address = this_program_as_worker(Some(context.limits()))?;
        let places = (0..set_up.count).map(|_| context.reserve_thread()).collect::<Result<_>>()?;
        let children = (set_up.first..set_up.first + set_up.count).map(|first| {
            let set_up = SetUp { first, count: 1, hosting: Hosting::Threads, local: 0, ..set_up.clone() };
            (set_up, Source::Address(Box::new(to_child()), address.clone()))
        });
        let children = children.collect();
        let opening = crate::runtime::runtime()?.spawn(async move {
            // No child is in this process.
            let links = open_links(children, &Arc::default() as &Arc<Inbox>).await?;
            let above = Arc::new(Above { links, sink, _places: places });
            let weak: Weak<dyn Upstream> = Arc::downgrade(&above) as Weak<dyn Upstream>;
            for (number, link) in above.links.iter().enumerate() {
                link.start(number, &weak).await?;
            }
            Ok(above)
        });
        let opened = blocking::block_on(opening)?;
        let above = opened.unwrap_or_else(|_| Err(RpcError::internal("starting the workers of a node panicked")))?;
        let leaves = above.links.iter().flat_map(|link| link.info.leaves.clone()).collect();
        Ok((Self { layout: set_up.layout, above, next: Mutex::new(1) }, leaves))
    }

    /// Passes commands with consecutive numbers on, with the bytes that they came in, if they came so.
    pub(crate) fn pass_on(
        &self,
        first: u64,
        commands: impl IntoIterator<Item = (Queued, Option<Bytes>)>,
    ) -> Result<()> {
        // Held to the end, so that every process gets them in order.
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if *next != first {
            return Err(out_of_order(first, *next));
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

    /// Where the workers listen for each other, in their order.
    pub(crate) fn listen(&self, address: IpAddr) -> Result<Vec<Listening>> {
        let mut all = Vec::new();
        for link in &self.above.links {
            let (session, host) = far_end(link)?;
            let listening: Pack<Vec<Listening>> = blocking::block_on(async {
                session.get_function("disco.listen").await?.call((&host, address.to_string())).await
            })??;
            all.extend(listening.0);
        }
        Ok(all)
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
        self.sink.send(Event::Lost { worker, error });
    }

    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.sink.poll_room(cx)
    }
}

fn far_end(link: &Link) -> Result<(rpc_core::Session, rpc_core::RemoteObject)> {
    link.far_end().ok_or_else(|| RpcError::internal("the session has ended"))
}

/// This program as the address of a worker, whose session may hold so much.
///
/// # Errors
///
/// Where it lies is not known.
pub(crate) fn this_program_as_worker(limits: Option<&SessionLimits>) -> Result<String> {
    let program = std::env::current_exe().ok();
    let program = program.as_ref().and_then(|path| path.to_str());
    let program = program.ok_or_else(|| RpcError::unsupported("where this program lies is not known"))?;
    let limits = limits.map(serde_json::to_string).transpose();
    let limits = limits.map_err(|error| RpcError::internal(format!("limits cannot be written: {error}")))?;
    let words = [Some(program), Some(WORKER), limits.as_deref()];
    let address =
        Address::exec(words.into_iter().flatten()).map_err(|error| RpcError::invalid_argument(error.to_string()))?;
    Ok(address.to_string())
}

/// How child processes are connected to: the kernel tells of a child's death at once; what is stopped shows by its silence alone.
pub(crate) fn to_child() -> Connector {
    Connector::new().keep_alive(Duration::from_millis(200))
}
