//! Settings of a session.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tracing::Level;

use crate::error::WorkerId;

/// How the workers of one node run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum Hosting {
    /// Each in a process of its own where a node has GPUs and several workers and its program can ([`serve_if_worker`](crate::serve_if_worker)), and as threads otherwise: a collective that hangs on a GPU is ended by nothing but the end of its
    /// process.
    #[default]
    Auto,
    /// As threads of the node's process. One that crashes takes the others with it, and they share one memory.
    Threads,
    /// Each in a process of its own, which is the node's program started again: it has to call [`serve_if_worker`](crate::serve_if_worker).
    /// `rpc-server` does.
    Processes,
}

/// Settings of a session.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// How many bytes of commands the workers may be behind before whoever issues more has to wait; a small command counts 128. Default: 16 MiB.
    pub window: u64,
    /// How nodes run their workers. Default: as each node finds right.
    pub hosting: Hosting,
    /// Whether each worker's thread stays on one processor: among those that its process may use, in turn by the number of the worker. On
    /// Linux. Default: no.
    pub pin_workers: bool,
    /// What workers in other processes log (by `tracing`, on their own threads) up to this level is logged here, with the number of the worker in front: by
    /// this program's subscriber under the target `disco::worker`, or on standard error if it has none. The programs of nodes need a
    /// [`WorkerLogLayer`](crate::WorkerLogLayer) for that; `rpc-server` has one. What a worker's own process writes to standard output and standard error, such as the
    /// message of a panic, counts as `INFO`. Default: up to `INFO`.
    pub worker_logs: Option<Level>,
    /// The address of each node at which its workers listen for the data of others, in the order of nodes. Needed where they are not all on one
    /// machine, unless the nodes say it themselves ([`DataAddress`](crate::DataAddress), `rpc-server --data-address`) or data is to be relayed; without this, workers of
    /// one machine share memory. Default: none.
    ///
    /// Workers that cannot reach each other there have their data relayed by a node that has opened both ([`SocketSession::fan_out`]), or by the controller
    /// if [that may](Self::allow_controller_relay).
    ///
    /// [`SocketSession::fan_out`]: crate::SocketSession::fan_out
    pub data_addresses: Vec<IpAddr>,
    /// Whether the controller relays data between workers that cannot reach each other and have no node above both: it goes over the sessions to their nodes
    /// and through all hops on the way, beside commands. The slowest link bounds all collectives then. What the workers would encrypt stays encrypted
    /// between them. A node relays 128 connections at most. Default: no; where some workers then cannot reach others, making the collectives fails and names the
    /// pairs, and where no addresses are known there are none.
    pub allow_controller_relay: bool,
    /// Where workers reach each other's data listeners, if that is not where those listen: nodes behind NAT or forwarded ports. Default: none.
    pub advertise: Option<Advertise>,
    /// A node or a process of a worker that has said nothing for this long is tested, and after three times as long it is lost, which ends the session.
    /// What the kernel tells of, such as the end of a process, is known at once; this is for what is stopped or cut off, and has to be longer than a busy machine
    /// keeps a program waiting. Not for [sessions from elsewhere](crate::DiscoSession::over). Default: 5 seconds.
    ///
    /// Servers test those at the other end, too, as their operators find right (`--keep-alive`), so that a longer time than theirs does not hold everywhere: the
    /// server of a node tests its controller, one that forwards the next one on the way, and one that opens nodes below it these, if it does that more often.
    /// A connection of QUIC ends at the shorter of both sides' patience, six times their keep-alive.
    pub keep_alive: Duration,
    /// How long a worker waits in a collective for others that are there and do not enter it; `None` for ever. When it passes, collectives are
    /// broken, and the session goes on. A worker may so compute for as long between two collectives. On GPUs, where a worker does not see what the others' devices are at work on, a collective that
    /// its own device has begun may take as long as this and [`stall_timeout`](Self::stall_timeout), or a minute if that is longer, together; with `None` nothing finds one that NCCL never ends. Default: 5 minutes.
    pub collective_timeout: Option<Duration>,
    /// How long a worker waits, within a collective that all have entered, for one that makes no progress. When it passes, collectives are broken.
    /// Twice that for one that says that it waits for another in turn, and so has time to tell whom. Default: 15 seconds.
    pub stall_timeout: Duration,
    /// How long making the collectives may take: to come to the end of what was issued before, and then until all workers have met. Default:
    /// 30 seconds.
    pub init_timeout: Duration,
    /// How long workers may take at a shutdown to come to the end of what was issued. Those that take longer are left behind. Default: 5 seconds.
    pub shutdown_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            window: 16 << 20,
            hosting: Hosting::default(),
            pin_workers: false,
            worker_logs: Some(Level::INFO),
            data_addresses: Vec::new(),
            allow_controller_relay: false,
            advertise: None,
            keep_alive: Duration::from_secs(5),
            collective_timeout: Some(Duration::from_secs(300)),
            stall_timeout: Duration::from_secs(15),
            init_timeout: Duration::from_secs(30),
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
    /// With a function that is called for each listener, when collectives are made, with its worker and where it is bound. It must not block.
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
