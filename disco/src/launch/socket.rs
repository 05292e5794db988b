//! Workers at nodes: servers that are dialled, that a tracker hands out, or that dial in.

use std::time::Duration;

use rpc_core::{Result as RpcResult, RpcError};
use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};

use super::listener::NodeListener;
use super::{Source, launch};
use crate::completion::Completion;
use crate::options::Options;
use crate::session::DiscoSession;

/// A session whose workers are at nodes: servers of programs that have [registered](crate::register) disco's functions, as every `rpc-server` has.
///
/// ```no_run
/// use disco::{NodeListener, SocketSession};
/// use rpc_transports::tracker::ServerRequest;
///
/// // Two servers with four workers each; four servers of a pool with one each; eight nodes that start "rpc-server worker".
/// let session = SocketSession::new(["tcp://board1:9090", "tcp://board2:9090"], 4, 1).start().wait()?;
/// let session = SocketSession::from_tracker("tcp://pool.lan:9190", ServerRequest::new("h100").count(4), 1, 1).start().wait()?;
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
    options: Options,
}

/// Where the nodes are.
#[derive(Debug)]
enum Nodes {
    At(Vec<String>),
    From(String, ServerRequest),
    DiallingIn(usize, NodeListener),
}

impl SocketSession {
    /// So many workers at each of these addresses, in so many groups of equal size over all. The workers of the first address come first.
    #[must_use]
    pub fn new<S: Into<String>>(
        addresses: impl IntoIterator<Item = S>,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        let addresses = addresses.into_iter().map(Into::into).collect();
        Self::of(Nodes::At(addresses), workers_per_node, num_groups)
    }

    /// So many workers at each of the servers that the tracker at `tracker` hands out: as many as the request says, all at once. They are given back when
    /// the session ends.
    #[must_use]
    pub fn from_tracker(
        tracker: impl Into<String>,
        request: ServerRequest,
        workers_per_node: u32,
        num_groups: u32,
    ) -> Self {
        Self::of(Nodes::From(tracker.into(), request), workers_per_node, num_groups)
    }

    /// So many workers at each of the first `nodes` nodes that dial `listener`, as [`join`](crate::join) and `rpc-server worker` do. Nodes that say which
    /// they are come in that order, and the others in the places that are left, as they come.
    #[must_use]
    pub fn dialled_by(nodes: usize, listener: &NodeListener, workers_per_node: u32, num_groups: u32) -> Self {
        Self::of(Nodes::DiallingIn(nodes, listener.clone()), workers_per_node, num_groups)
    }

    fn of(nodes: Nodes, workers_per_node: u32, num_groups: u32) -> Self {
        Self {
            nodes,
            workers_per_node,
            num_groups,
            connector: Connector::new().keep_alive(Duration::from_millis(200)),
            join_timeout: Duration::from_secs(60),
            options: Options::default(),
        }
    }

    /// How the nodes are connected to, or spoken to when they have dialled in: identity, trust, hops, time limits. The tracker is asked in the same way.
    /// Without this there is none of the first three, and a node that says nothing for 600 ms is lost.
    #[must_use]
    pub fn connector(mut self, connector: Connector) -> Self {
        self.connector = connector;
        self
    }

    /// How long to wait until all nodes have dialled in. 60 s.
    #[must_use]
    pub fn join_timeout(mut self, timeout: Duration) -> Self {
        self.join_timeout = timeout;
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
    /// Its errors are a node that cannot be reached, has not come, or is none; what the tracker refuses; and two nodes that say that they are the same
    /// one, or one that expects another number of nodes.
    pub fn start(self) -> Completion<DiscoSession> {
        let Self { nodes, workers_per_node, num_groups, connector, join_timeout, options } = self;
        let count = match &nodes {
            Nodes::At(addresses) => addresses.len(),
            Nodes::From(_, request) => request.count as usize,
            Nodes::DiallingIn(count, _) => *count,
        };
        launch((count, workers_per_node, num_groups), options, async move {
            match nodes {
                Nodes::At(addresses) => {
                    let at = |address| Source::Address(Box::new(connector.clone()), address);
                    Ok(addresses.into_iter().map(at).collect())
                }
                Nodes::From(tracker, request) => Ok(borrow(connector, &tracker, &request).await?),
                Nodes::DiallingIn(count, listener) => {
                    let sessions = listener.gather(count, &connector, join_timeout).await?;
                    let named = |(session, name)| Source::Ready(session, name);
                    Ok(sessions.into_iter().map(named).collect())
                }
            }
        })
    }
}

/// Sessions with the servers that a tracker gives out. It gets them back when the sessions end.
async fn borrow(connector: Connector, tracker: &str, request: &ServerRequest) -> RpcResult<Vec<Source>> {
    let named = |error: RpcError| error.context(format_args!("the tracker at {tracker}"));
    let client = TrackerClient::connect_with(connector, tracker).await.map_err(named)?;
    let loans = client.request_many(request).await.map_err(named)?;
    Ok(loans
        .into_iter()
        .map(|loan| {
            let name = loan.grant().server.clone();
            Source::Ready(loan.into_session(), name)
        })
        .collect())
}
