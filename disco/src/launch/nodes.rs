//! Workers at nodes: servers that are dialled, that a tracker hands out, or that dial in.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{Devices, Registry, RpcError, Session};
use rpc_transports::Connector;
use rpc_transports::tracker::ServerRequest;

use super::node_listener::NodeListener;
use super::threads::this_process;
use super::{Node, launch};
use crate::completion::Completion;
use crate::controller::session::DiscoSession;
use crate::error::DiscoError;
use crate::link::replacement::{Relaunch, Replacement, borrow};
use crate::link::session_source::Source;
use crate::open_files::check_file_limit;
use crate::options::{OnLoss, Options};
use crate::wire::set_up::ChildNode;

/// Most nodes at addresses that a controller opens all by itself, unless it is told to.
const MANY_NODES: usize = 64;

/// Nodes that the controller, and each node, opens where there are more.
const FAN_OUT_OF_MANY: usize = 32;

/// A session whose workers are at nodes: servers of programs that have
/// [registered](crate::register) disco's functions, as every `rpc-server` has.
///
/// ```no_run
/// use disco::{NodeListener, SocketSession};
/// use rpc_transports::tracker::ServerRequest;
///
/// // Two servers with four workers each.
/// let servers = ["tcp://board1:9090", "tcp://board2:9090"];
/// let session = SocketSession::new(servers, 4, 1).start().wait()?;
/// // Four servers of a pool with one worker each.
/// let request = ServerRequest::new("h100").count(4);
/// let session = SocketSession::from_tracker("tcp://pool.lan:9190", request, 1, 1).start().wait()?;
/// // Eight nodes that start `rpc-server worker`.
/// let listener = NodeListener::bind("tcp://0.0.0.0:9700").wait()?;
/// let session = SocketSession::dialled_by(8, &listener, 1, 1).start().wait()?;
/// # Ok::<(), disco::DiscoError>(())
/// ```
#[derive(Debug)]
pub struct SocketSession {
    nodes: Nodes,
    workers_per_node: u32,
    num_groups: u32,
    connector: Connector,
    join_timeout: Duration,
    fan_out: Option<usize>,
    /// Functions and devices of the workers of this process, if it is the first node.
    controller: Option<(Registry, Devices)>,
    /// Address at which the workers of this process listen for data.
    controller_data: Option<IpAddr>,
    options: Options,
}

/// Origin of the nodes.
#[derive(Debug)]
enum Nodes {
    At(Vec<String>),
    From(String, ServerRequest),
    DiallingIn(usize, NodeListener),
    /// The far ends of sessions, with the addresses of the nodes that each of them opens.
    Over(Vec<(Session, Vec<String>)>),
}

impl Nodes {
    /// Returns the way in which another node takes the place of a lost one. The first node has the
    /// workers from this number on, and each node as many.
    fn relaunch(
        &self,
        (first_worker, per_node): (u32, u32),
        connector: &Connector,
        join_timeout: Duration,
    ) -> Option<Relaunch> {
        let connector = connector.clone();
        let number = move |workers: Range<u32>| workers.start.saturating_sub(first_worker) / per_node.max(1);
        match self {
            Self::At(addresses) => {
                let addresses = addresses.clone();
                Some(Arc::new(move |workers| {
                    let address = addresses.get(number(workers) as usize).cloned();
                    let source = address.map(|address| Source::Address(Box::new(connector.clone()), address));
                    let source = source.ok_or_else(|| RpcError::internal("a worker of no node").into());
                    Box::pin(async { source })
                }))
            }
            Self::From(tracker, request) => {
                let (tracker, request) = (tracker.clone(), request.clone());
                Some(Arc::new(move |_| {
                    Replacement::from_tracker(connector.clone(), &tracker, request.clone()).into_found()
                }))
            }
            Self::DiallingIn(count, listener) => {
                let (count, listener) = (*count, listener.clone());
                Some(Arc::new(move |workers| {
                    let (listener, connector, rank) = (listener.clone(), connector.clone(), number(workers));
                    Box::pin(async move {
                        let session = listener.next_node(rank, count, &connector, join_timeout).await?;
                        Ok(Source::Ready(session, format!("node {rank}")))
                    })
                }))
            }
            Self::Over(_) => None,
        }
    }

    /// Returns the IP address that nodes dial, if other machines may reach it.
    fn listening_ip(&self) -> Option<IpAddr> {
        let Self::DiallingIn(_, listener) = self else { return None };
        let address: rpc_transports::Address = listener.address().parse().ok()?;
        let ip: IpAddr = address.host()?.parse().ok()?;
        (!ip.is_unspecified() && !ip.is_loopback()).then_some(ip)
    }
}

impl SocketSession {
    /// Creates a session with `workers_per_node` workers at each of these addresses, in
    /// `num_groups` groups of equal size over all. The workers of the first address come first.
    #[must_use]
    pub fn new<S: Into<String>>(
        addresses: impl IntoIterator<Item = S>,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        let addresses = addresses.into_iter().map(Into::into).collect();
        Self::of(Nodes::At(addresses), workers_per_node, num_groups)
    }

    /// Creates a session with `workers_per_node` workers at each of the servers that the tracker at
    /// `tracker` hands out: as many as the request says, all at once. They are given back when the
    /// session ends.
    #[must_use]
    pub fn from_tracker(
        tracker: impl Into<String>,
        request: ServerRequest,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        Self::of(Nodes::From(tracker.into(), request), workers_per_node, num_groups)
    }

    /// Creates a session with `workers_per_node` workers at each of the first `nodes` nodes that
    /// dial `listener`, as [`join`](crate::join) and `rpc-server worker` do. Nodes that name their
    /// rank come in that order, and the others fill the free ranks as they come.
    #[must_use]
    pub fn dialled_by(nodes: usize, listener: &NodeListener, workers_per_node: u32, num_groups: u32) -> Self {
        Self::of(Nodes::DiallingIn(nodes, listener.clone()), workers_per_node, num_groups)
    }

    /// Creates a session with `workers_per_node` workers at the far end of each of these sessions,
    /// and at the nodes that it opens: those at the addresses beside it, by which it reaches them.
    /// For a controller that does not reach all nodes itself. A node comes before those that it
    /// opens, which have to be allowed as [`fan_out`](Self::fan_out) says. The settings
    /// [`connector`](Self::connector) and [`join_timeout`](Self::join_timeout) do not matter here.
    #[must_use]
    pub fn over(
        sessions: impl IntoIterator<Item = (Session, Vec<String>)>,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        Self::of(Nodes::Over(sessions.into_iter().collect()), workers_per_node, num_groups)
    }

    fn of(nodes: Nodes, workers_per_node: u32, num_groups: u32) -> Self {
        Self {
            nodes,
            workers_per_node,
            num_groups,
            connector: Connector::new(),
            join_timeout: Duration::from_secs(60),
            fan_out: None,
            controller: None,
            controller_data: None,
            options: Options::default(),
        }
    }

    /// Sets the connector by which nodes are dialled, or spoken to when they have dialled in:
    /// identity, trust, hops, time limits. The tracker is asked in the same way. Default: none of
    /// the first three. [`Options::keep_alive`] says how often nodes are tested.
    #[must_use]
    pub fn connector(mut self, connector: Connector) -> Self {
        self.connector = connector;
        self
    }

    /// Makes this process a node, too: the first one, in front of all others, with as many workers,
    /// as the controller of TVM is. Its workers have these functions, those of disco, and these
    /// devices; they are threads of this process where a node would have them as threads
    /// ([`Options::hosting`]), and get commands without encoding. It does not count among nodes
    /// that dial in ([`NodeRank`](crate::NodeRank)). Programs ([`DiscoSession::run_all`]) are run
    /// there only if `registry` has the function for it, as that of `rpc-server` has.
    ///
    /// ```no_run
    /// # use disco::SocketSession;
    /// # use rpc_core::{Devices, Registry};
    /// // Four workers here, and four at each board.
    /// let boards = ["tcp://board1:9090", "tcp://board2:9090"];
    /// let session = SocketSession::new(boards, 4, 1);
    /// let session = session.controller_as_node(Registry::new(), Devices::new()).start().wait()?;
    /// # Ok::<(), disco::DiscoError>(())
    /// ```
    #[must_use]
    pub fn controller_as_node(mut self, registry: Registry, devices: Devices) -> Self {
        self.controller = Some((registry, devices));
        self
    }

    /// Sets the address at which the workers of this process listen for the data of others, if it
    /// is [a node](Self::controller_as_node) and the others are on other machines. The first of
    /// [`Options::data_addresses`] goes before it. Default: the address of the listener that nodes
    /// dial, if that names one of this machine that others reach, and else none.
    #[must_use]
    pub fn controller_data_address(mut self, address: IpAddr) -> Self {
        self.controller_data = Some(address);
        self
    }

    /// Has the controller open all nodes itself, however many there are: see
    /// [`fan_out`](Self::fan_out).
    #[must_use]
    pub fn flat(self) -> Self {
        self.fan_out(usize::MAX)
    }

    /// Sets the longest wait until all nodes have dialled in. Default: 60 s.
    #[must_use]
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout;
        self
    }

    /// Lets the controller open only so many nodes, and each node as many others, so that no one
    /// has to send each command to all of many nodes. For nodes at addresses, also those
    /// [behind sessions](Self::over), which are then those by which the nodes reach each other;
    /// their servers must allow it
    /// ([`ServeOptions::allow_forward`](rpc_transports::ServeOptions::allow_forward),
    /// `rpc-server --allow-forward`) and dial with what identity and trust they have themselves
    /// ([`ServeOptions::onward`](rpc_transports::ServeOptions::onward)).
    ///
    /// Default: for more than 64 nodes at addresses, 32, if they can; where a node does not open
    /// others, the controller opens all nodes itself. For others, and for fewer, none. Nor where a
    /// node would not get to the same servers with the same rights as the controller: if the
    /// [connector](Self::connector) has hops, proofs of identity or other settings
    /// ([`Connector::is_plain`]), or an address has a key or is one of the machine itself.
    /// [`flat`](Self::flat) switches that off. Programs ([`DiscoSession::run_all`]) are run at
    /// nodes that the controller opens itself. A session that
    /// [awaits replacements](OnLoss::AwaitReplacement) has no tree.
    ///
    /// Nodes test those below them as [`Options::keep_alive`] says, or as often as their servers
    /// test their peers if that is more often. A way down has 16 nodes at most, and a server
    /// appears on it once. Servers whose sessions have processes of their own (`--isolate process`)
    /// open no others.
    #[must_use]
    pub fn fan_out(mut self, nodes: usize) -> Self {
        self.fan_out = Some(nodes);
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Connects to the nodes, or waits for them, and starts the workers there.
    ///
    /// Its errors are a node that cannot be reached, has not come, or is none; what the tracker
    /// refuses; and two nodes that say that they are the same one, or one that expects another
    /// number of nodes.
    pub fn start(self) -> Completion<DiscoSession> {
        match &self.nodes {
            Nodes::At(addresses)
                if self.fan_out.is_none()
                    && self.options.on_loss == OnLoss::EndSession
                    && addresses.len() > MANY_NODES
                    && self.connector.is_plain()
                    && addresses.iter().all(|address| means_the_same_everywhere(address)) =>
            {
                self.start_as_tree()
            }
            _ => self.start_as_told(),
        }
    }

    /// Starts a session whose nodes open others, or else one whose controller opens all of them.
    fn start_as_tree(self) -> Completion<DiscoSession> {
        let Self { nodes, workers_per_node, num_groups, connector, join_timeout, controller, options, .. } = self;
        let controller_data = self.controller_data;
        let Nodes::At(addresses) = nodes else {
            return Completion::failed(DiscoError::invalid("only nodes at addresses can open each other"));
        };
        Completion::spawn(async move {
            let with = |fan_out| Self {
                nodes: Nodes::At(addresses.clone()),
                workers_per_node,
                num_groups,
                connector: connector.clone(),
                join_timeout,
                fan_out: Some(fan_out),
                controller: controller.clone(),
                controller_data,
                options: options.clone(),
            };
            match with(FAN_OUT_OF_MANY).start_as_told().await {
                Err(DiscoError::Session(first)) => {
                    tracing::info!(error = %first, "nodes do not open others: the controller opens all of them");
                    with(usize::MAX).start_as_told().await.map_err(|error| match error {
                        DiscoError::Session(error) => {
                            error.context(format!("after a tree of nodes could not start ({first})")).into()
                        }
                        other => other,
                    })
                }
                outcome => outcome,
            }
        })
    }

    fn start_as_told(self) -> Completion<DiscoSession> {
        let data = self.controller_data.or_else(|| self.nodes.listening_ip());
        let Self { nodes, workers_per_node, num_groups, connector, join_timeout, fan_out, controller, options, .. } =
            self;
        let connector = connector.keep_alive(options.keep_alive);
        let count = match &nodes {
            Nodes::At(addresses) => addresses.len(),
            Nodes::From(_, request) => request.count as usize,
            Nodes::DiallingIn(count, _) => *count,
            Nodes::Over(sessions) => sessions.iter().map(|(_, addresses)| 1 + addresses.len()).sum(),
        };
        let size = (count + usize::from(controller.is_some()), workers_per_node, num_groups);
        let first_worker = if controller.is_some() { workers_per_node } else { 0 };
        let relaunch = nodes.relaunch((first_worker, workers_per_node), &connector, join_timeout);
        launch(size, Vec::new(), options, relaunch, async move {
            if fan_out.is_some() && !matches!(nodes, Nodes::At(_) | Nodes::Over(_)) {
                return Err(DiscoError::invalid(
                    "only nodes at addresses can open each other: fan_out is not for these",
                ));
            }
            let first =
                controller.map(|(registry, devices)| this_process(registry, devices, workers_per_node, data).into());
            let others = match nodes {
                Nodes::At(addresses) => {
                    check_file_limit(addresses.len().min(fan_out.unwrap_or(usize::MAX)), "nodes")?;
                    let at = |ChildNode { address, children }| Node {
                        source: Source::Address(Box::new(connector.clone()), address),
                        children,
                    };
                    tree(&addresses, fan_out.unwrap_or(usize::MAX)).into_iter().map(at).collect()
                }
                Nodes::From(tracker, request) => {
                    let servers = borrow(connector, &tracker, &request).await?;
                    servers.into_iter().map(Node::from).collect()
                }
                Nodes::DiallingIn(count, listener) => {
                    let sessions = listener.gather(count, &connector, join_timeout).await?;
                    let named = |(session, name)| Source::Ready(session, name).into();
                    sessions.into_iter().map(named).collect::<Vec<_>>()
                }
                Nodes::Over(sessions) => {
                    let over = |(number, (session, addresses)): (usize, (Session, Vec<String>))| Node {
                        source: Source::Ready(session, format!("session {number}")),
                        children: tree(&addresses, fan_out.unwrap_or(usize::MAX)),
                    };
                    sessions.into_iter().enumerate().map(over).collect()
                }
            };
            Ok(first.into_iter().chain(others).collect())
        })
    }
}

/// Returns true if an address leads to the same server from wherever it is dialled, and says all
/// that a client asks for there.
fn means_the_same_everywhere(address: &str) -> bool {
    address.parse::<rpc_transports::Address>().is_ok_and(|address| {
        let is_near = address.has_loopback_host() || address.scheme() == "unix";
        address.key().is_none() && !is_near && address.scheme() != "tracker"
    })
}

/// Returns a tree of these nodes in which none has more than `fan_out` below it, as flat as that
/// goes. A walk from the root on and from left to right meets them in their order.
fn tree(addresses: &[String], fan_out: usize) -> Vec<ChildNode> {
    let children = addresses.len().min(fan_out.max(1));
    let mut rest = addresses;
    let child = |number| {
        // The nodes are shared out evenly; the first ones get one more.
        let (these, others) = rest.split_at(rest.len().div_ceil(children - number));
        rest = others;
        let (address, children) = these.split_first()?;
        Some(ChildNode { address: address.clone(), children: tree(children, fan_out) })
    };
    (0..children).filter_map(child).collect()
}

#[cfg(test)]
mod tests {
    use rpc_core::{LocalSession, Registry, Result as RpcResult, SharedSession};
    use rpc_transports::{Address, Bind, OpenRequest, ServeOptions, Server, TokioSpawner};

    use super::*;
    use crate::node::simulated::SimulatedWorkers;

    /// Serves nodes whose workers execute nothing, and returns their addresses.
    fn serve(name: &'static str, count: usize, open_others: bool) -> Vec<String> {
        let registry = Registry::new();
        crate::register(&registry);
        let served = async move {
            let mut addresses = Vec::new();
            for number in 0..count {
                let registry = registry.clone();
                let open = move |request: &OpenRequest| -> RpcResult<SharedSession> {
                    let session = LocalSession::builder(registry.clone()).extension(Arc::new(SimulatedWorkers));
                    let session = session.spawner(Arc::new(TokioSpawner::current()));
                    Ok(Arc::new(session.extension(Arc::new(request.onward.clone())).build()))
                };
                let allow_forward = if open_others { vec!["memory:*".to_owned()] } else { Vec::new() };
                let options = ServeOptions { allow_forward, ..ServeOptions::default() };
                let address: Address = format!("memory:{name}-{number}").parse().unwrap();
                let server = Server::new(Arc::new(open), options);
                addresses.push(server.listen(&address, &Bind::default()).await.unwrap().to_string());
            }
            addresses
        };
        let served = crate::runtime::runtime().unwrap().spawn(served);
        rpc_core::blocking::block_on(served).unwrap().unwrap()
    }

    /// Many nodes are a tree, unless they cannot be or are not to be. Commands reach all workers
    /// and come back either way.
    #[test]
    fn many_nodes_open_others_where_they_can() {
        const MANY: usize = MANY_NODES + 6;
        for (name, count, open_others, is_flat, links) in [
            ("tree", MANY, true, false, FAN_OUT_OF_MANY),
            ("told", MANY, true, true, MANY),
            ("shut", MANY, false, false, MANY),
            ("few", MANY_NODES, true, false, MANY_NODES),
        ] {
            let session = SocketSession::new(serve(name, count, open_others), 3, 1);
            let session = if is_flat { session.flat() } else { session };
            let session = session.start().wait().unwrap();
            assert_eq!(session.controller().links().len(), links, "{name}");
            assert_eq!(session.num_workers() as usize, 3 * count);
            session.sync_all().wait().unwrap();
            session.shutdown().wait().unwrap();
        }
    }

    fn names(trees: &[ChildNode], into: &mut Vec<String>) {
        for one in trees {
            into.push(one.address.clone());
            names(&one.children, into);
        }
    }

    fn widest(trees: &[ChildNode]) -> usize {
        trees.iter().map(|one| widest(&one.children)).fold(trees.len(), usize::max)
    }

    fn deepest(trees: &[ChildNode]) -> usize {
        trees.iter().map(|one| 1 + deepest(&one.children)).max().unwrap_or(0)
    }

    #[test]
    fn a_tree_has_all_nodes_in_order_and_none_with_too_many_below() {
        for count in 0..40 {
            let addresses: Vec<String> = (0..count).map(|number: usize| number.to_string()).collect();
            for fan_out in [0, 1, 2, 3, 7, 39, usize::MAX] {
                let trees = tree(&addresses, fan_out);
                let mut found = Vec::new();
                names(&trees, &mut found);
                assert_eq!(found, addresses);
                assert!(widest(&trees) <= fan_out.max(1));
                assert_eq!(trees.iter().map(ChildNode::nodes).sum::<usize>(), count);
            }
            assert_eq!(deepest(&tree(&addresses, 1)), count);
            // 2 + 4 + 8 + 16 are enough for 30.
            assert!(count > 30 || deepest(&tree(&addresses, 2)) <= 4, "{count}");
        }
    }
}
