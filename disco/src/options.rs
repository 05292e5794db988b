//! Settings of a session.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rpc_core::proto::KEEP_ALIVE;
use serde::{Deserialize, Serialize};
use tracing::Level;

use crate::error::WorkerId;

/// Default of [`Options::direct_timeout`].
pub(crate) const DIRECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Kind of the workers of one node: threads or processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Hosting {
    /// Each in a process of its own where a node has GPUs and several workers and its program can
    /// ([`serve_if_worker`](crate::serve_if_worker)), and as threads otherwise: a collective that
    /// hangs on a GPU is ended by nothing but the end of its process.
    #[default]
    Auto,
    /// Threads of the node's process. One that crashes takes the others with it, and they share one
    /// memory.
    Threads,
    /// Each in a process of its own, which is the node's program started again: it has to call
    /// [`serve_if_worker`](crate::serve_if_worker). `rpc-server` does.
    Processes,
}

/// Effect of the loss of a worker on its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum OnLoss {
    /// The session ends: every operation that waits, and every later one, returns the cause.
    #[default]
    EndSession,
    /// The session pauses: operations that wait, and later ones, return
    /// [`DiscoError::Lost`](crate::DiscoError::Lost), until
    /// [`DiscoSession::replace`](crate::DiscoSession::replace) or
    /// [`recover`](crate::DiscoSession::recover) has replaced the worker.
    ///
    /// Such a session has no tree of nodes
    /// ([`SocketSession::fan_out`](crate::SocketSession::fan_out)). The loss of workers of the
    /// controller's own node ends it, be they threads or processes
    /// ([`SocketSession::controller_as_node`](crate::SocketSession::controller_as_node)).
    AwaitReplacement,
}

/// Settings of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Most bytes of commands that the workers may be behind before the caller who issues more has
    /// to wait; a small command counts 128. Default: 16 MiB.
    pub window: u64,
    /// Hosting of workers at their nodes. Default: each node decides.
    pub hosting: Hosting,
    /// True if each worker's thread stays on one processor: among those that its process may use,
    /// in turn by the number of the worker. On Linux. Default: false.
    pub pin_workers: bool,
    /// Effect of the loss of a worker. A session that awaits replacements keeps the commands that
    /// have looked up functions, loaded modules and recorded programs for as long as those live.
    /// Default: the session ends.
    pub on_loss: OnLoss,
    /// Level up to which the logs of workers in other processes (by `tracing`, on their own
    /// threads) are logged here, with the number of the worker in front: by this program's
    /// subscriber under the target `disco::worker`, or on standard error if it has none. The
    /// programs of nodes need a [`WorkerLogLayer`](crate::WorkerLogLayer) for that; `rpc-server`
    /// has one. Lines that a worker's own process writes to standard output and standard error,
    /// such as the message of a panic, count as `INFO`. Default: up to `INFO`.
    pub worker_logs: Option<Level>,
    /// The address of each node at which its workers listen for the data of others, in the order of
    /// nodes. Needed where they are not all on one machine, unless the nodes say it themselves
    /// ([`DataAddress`](crate::DataAddress), `rpc-server --data-address`) or data is to be relayed;
    /// without this, workers of one machine share memory. Default: none.
    ///
    /// Workers that cannot reach each other there have their data relayed by a node that has opened
    /// both ([`SocketSession::fan_out`]), or by the controller if [that
    /// may](Self::allow_controller_relay).
    ///
    /// A node that replaces a lost one gets the address of its position, whatever it says itself.
    /// Leave this empty where it may be on another machine, and have each node say its own.
    ///
    /// [`SocketSession::fan_out`]: crate::SocketSession::fan_out
    pub data_addresses: Vec<IpAddr>,
    /// True if the controller relays data between workers that cannot reach each other and have no
    /// node above both. The data goes over the sessions to their nodes and through all hops
    /// between, beside commands, and the slowest link bounds all collectives. Data that the workers
    /// would encrypt stays encrypted between them. A node relays 128 connections at most. Default:
    /// false; if some workers then cannot reach others, making the collectives fails and names the
    /// pairs, and if no addresses are known there are no collectives.
    pub allow_controller_relay: bool,
    /// Function that gives the address at which others reach a worker's data listener, where that
    /// is not the one that it is bound to: nodes behind NAT or forwarded ports. Default: none.
    pub advertise: Option<Advertise>,
    /// A node or a process of a worker that has said nothing for this long is tested, and after
    /// three times as long it is lost, which has the effect that [`on_loss`](Self::on_loss) says.
    /// The end of a process is known at once, because the kernel tells of it; this is for one that
    /// is stopped or cut off, and has to be longer than a busy machine keeps a program waiting. Not
    /// for [sessions that the caller opens](crate::DiscoSession::over). Default: 5 seconds.
    ///
    /// Servers test those at the other end, too, as their operators find right (`--keep-alive`), so
    /// that a longer time than theirs does not hold everywhere: the server of a node tests its
    /// controller, one that forwards the next one on the way, and one that opens nodes below it
    /// these, if it does that more often. A connection of QUIC ends after six times the shorter
    /// keep-alive of both sides.
    pub keep_alive: Duration,
    /// Longest wait of a worker in a collective for others that are alive and do not enter it;
    /// `None` for ever. After it the collectives are broken, and the session goes on. A worker may
    /// therefore compute for as long between two collectives. On GPUs a worker does not see the
    /// work of the others' devices: a collective that its own device has begun may take as long as
    /// this and [`stall_timeout`](Self::stall_timeout), or a minute if that is longer, together;
    /// with `None` a collective that NCCL never ends is not found. Default: 5 minutes.
    pub collective_timeout: Option<Duration>,
    /// Longest wait of a worker, within a collective that all have entered, for one that makes no
    /// progress. After it the collectives are broken. Twice as long for a worker that says that it
    /// waits for another in turn, which has time to name that one. Default: 15 seconds.
    pub stall_timeout: Duration,
    /// Longest time for making the collectives: to finish what was issued before, and then until
    /// all workers have met, for which a worker waits an hour at most. NCCL then has two minutes
    /// for each of its groups, or this time if that is longer. If a GPU has too little memory for
    /// NCCL, all of that is done once more, and may take twice as long. Default: 30 seconds.
    pub init_timeout: Duration,
    /// Time in which a worker has to reach another one at its data address, before their data is
    /// relayed; at most a quarter of [`init_timeout`](Self::init_timeout). Workers without another
    /// way wait for all of it, because a node does not tell its controller what answers at an
    /// address, nor how soon. Default: 2 seconds.
    pub direct_timeout: Duration,
    /// Longest time that workers may take at a shutdown to finish what was issued. Later ones are
    /// left behind. Default: 5 seconds.
    pub shutdown_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            window: 16 << 20,
            hosting: Hosting::default(),
            pin_workers: false,
            on_loss: OnLoss::default(),
            worker_logs: Some(Level::INFO),
            data_addresses: Vec::new(),
            allow_controller_relay: false,
            advertise: None,
            keep_alive: KEEP_ALIVE,
            collective_timeout: Some(Duration::from_secs(300)),
            stall_timeout: Duration::from_secs(15),
            init_timeout: Duration::from_secs(30),
            direct_timeout: DIRECT_TIMEOUT,
            shutdown_timeout: Duration::from_secs(5),
        }
    }
}

/// Tells under which address the others reach what a worker listens at.
///
/// ```
/// use std::net::SocketAddr;
///
/// // Every node is behind a gateway that forwards the same ports.
/// let gateways: [std::net::IpAddr; 2] = [[192, 0, 2, 1].into(), [192, 0, 2, 2].into()];
/// let mut options = disco::Options::default();
/// options.advertise = Some(disco::Advertise::new(move |worker, bound| {
///     SocketAddr::new(gateways[worker.0 as usize], bound.port())
/// }));
/// ```
#[derive(Clone)]
pub struct Advertise(Arc<dyn Fn(WorkerId, SocketAddr) -> SocketAddr + Send + Sync>);

impl Advertise {
    /// Creates it from a function that is called for each listener, when collectives are made, with
    /// the worker and the address that the listener is bound to. The function must not block.
    pub fn new(address: impl Fn(WorkerId, SocketAddr) -> SocketAddr + Send + Sync + 'static) -> Self {
        Self(Arc::new(address))
    }

    pub(crate) fn address(&self, worker: WorkerId, bound: SocketAddr) -> SocketAddr {
        (self.0)(worker, bound)
    }
}

impl fmt::Debug for Advertise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Advertise")
    }
}
