//! Listener for nodes that dial in.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{ErrorKind, Result as RpcResult, RpcError, Session, SharedSession};
use rpc_transports::{Address, Bind, ConnectError, Connector, OpenRequest, ServeOptions, Server};
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::completion::Completion;
use crate::error::DiscoError;
use crate::node::join::NodeRank;
use crate::number_list::NumberList;
use crate::open_files::check_file_limit;

/// Most handshakes at a time with nodes that have dialled in.
const MAX_MEETINGS: usize = 64;

/// An address at which nodes dial in and wait for a session that wants them: see
/// [`SocketSession::dialled_by`](crate::SocketSession::dialled_by). Cheap to clone; when the last
/// clone is gone no node can dial in any more, and those that are in a session stay.
#[derive(Clone, Debug)]
pub struct NodeListener(Arc<Listening>);

#[derive(Debug)]
struct Listening {
    server: Server,
    address: Address,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.server.stop();
    }
}

impl NodeListener {
    /// Listens at `address`, for any node that can reach it. Its error is an address that cannot be
    /// listened on.
    pub fn bind(address: &str) -> Completion<Self> {
        Self::bind_with(address, Bind::default(), ServeOptions::default())
    }

    /// Listens at `address`. `listen` has the certificate for `tls://` and `quic://`; `serve` sets
    /// which nodes may dial in ([`ServeOptions::access`]), how many at a time, and the interval at
    /// which those that wait are tested. Its error is an address that cannot be listened on.
    pub fn bind_with(address: &str, listen: Bind, serve: ServeOptions) -> Completion<Self> {
        let address = address.to_owned();
        // Nodes that dial in find what they would find at a relay, and the session takes them from
        // there.
        let serve = ServeOptions { relay: true, ..serve };
        Completion::spawn(async move {
            let address: Address =
                address.parse().map_err(|error| DiscoError::invalid(format!("'{address}': {error}")))?;
            let server = Server::new(Arc::new(no_session), serve);
            let bound = server.listen(&address, &listen).await;
            let address = bound.map_err(|error| ConnectError::from(error).into_rpc_error())?;
            Ok(Self(Arc::new(Listening { server, address })))
        })
    }

    /// Returns the address of the listener, with the port that was chosen.
    pub fn address(&self) -> String {
        self.0.address.to_string()
    }

    /// Returns the number of nodes that have dialled in and wait for a session.
    pub fn waiting(&self) -> usize {
        self.0.server.parked().iter().filter(|(key, _)| NodeRank::of_key(key).is_some()).map(|(_, count)| count).sum()
    }

    /// Sessions with so many nodes, in their order, and what to call them.
    pub(crate) async fn gather(
        &self,
        count: usize,
        connector: &Connector,
        timeout: Duration,
    ) -> RpcResult<Vec<(Session, String)>> {
        check_file_limit(count, "nodes that dial in")?;
        let deadline = Instant::now() + timeout;
        let (mut ranked, mut others): (HashMap<usize, Session>, Vec<Session>) = Default::default();
        // Handshakes with several nodes at once, and with no more than are missing.
        let mut meetings = JoinSet::new();
        loop {
            if ranked.len() + others.len() >= count {
                // Those that have come and gone while others were waited for.
                ranked.retain(|_, session| !has_ended(session));
                others.retain(|session| !has_ended(session));
            }
            let missing = count.saturating_sub(ranked.len() + others.len());
            if missing == 0 {
                break;
            }
            while meetings.len() < missing.min(MAX_MEETINGS) {
                let (server, connector) = (self.0.server.clone(), connector.clone());
                meetings.spawn(async move {
                    server.connect_parked(&connector, |key| NodeRank::of_key(key).is_some()).await
                });
            }
            let (key, session) = match tokio::time::timeout_at(deadline, meetings.join_next()).await {
                Ok(Some(Ok(Ok(met)))) => met,
                Ok(None | Some(Err(_))) => return Err(RpcError::internal("a handshake with a node panicked")),
                Ok(Some(Ok(Err(error)))) => {
                    let error = error.into_rpc_error();
                    if error.kind() == ErrorKind::Draining {
                        return Err(error.context(format_args!("waiting for nodes at {}", self.0.address)));
                    }
                    rpc_core::log_limited!(WARN, %error, "a node that has dialled in is of no use");
                    continue;
                }
                Err(_) => return Err(self.missing(count, &ranked, others.len(), timeout)),
            };
            let Some(node_rank) = NodeRank::of_key(&key).flatten() else {
                others.push(session);
                continue;
            };
            let rank = node_rank.rank as usize;
            if node_rank.nodes as usize != count || rank >= count {
                return Err(RpcError::invalid_argument(format!(
                    "a node that has dialled in says that it is number {rank} of {}, and the session is to have \
                     {count} nodes",
                    node_rank.nodes
                )));
            }
            if let Some(earlier) = ranked.insert(rank, session)
                && !has_ended(&earlier)
            {
                return Err(RpcError::invalid_argument(format!(
                    "two nodes have dialled in and say that they are number {rank} of {count}"
                )));
            }
        }
        let mut others = others.into_iter();
        let sessions = (0..count).filter_map(|rank| {
            let session = ranked.remove(&rank).or_else(|| others.next())?;
            Some((session, format!("node {rank}")))
        });
        Ok(sessions.collect())
    }

    /// Returns a session with the next node that dials in as number `rank` of `count`, or without a
    /// number, in the place of one that is lost.
    pub(crate) async fn next_node(
        &self,
        rank: u32,
        count: usize,
        connector: &Connector,
        timeout: Duration,
    ) -> RpcResult<Session> {
        let is_wanted = |key: &str| match NodeRank::of_key(key) {
            Some(Some(node)) => node.rank == rank && node.nodes as usize == count,
            Some(None) => true,
            None => false,
        };
        let (address, server) = (&self.0.address, &self.0.server);
        let deadline = Instant::now() + timeout;
        loop {
            let error = match tokio::time::timeout_at(deadline, server.connect_parked(connector, is_wanted)).await {
                Ok(Ok((_, session))) => return Ok(session),
                Ok(Err(error)) => error.into_rpc_error(),
                Err(_) => {
                    let text =
                        format!("no node has dialled in at {address} within {timeout:?}, in place of node {rank}");
                    return Err(RpcError::new(ErrorKind::DeadlineExceeded, text));
                }
            };
            if error.kind() == ErrorKind::Draining {
                return Err(error.context(format_args!("waiting at {address} for a node in place of node {rank}")));
            }
            rpc_core::log_limited!(WARN, %error, "a node that has dialled in is of no use");
        }
    }

    fn missing(&self, count: usize, ranked: &HashMap<usize, Session>, others: usize, timeout: Duration) -> RpcError {
        let who = if others > 0 {
            format!("{} of {count} nodes", count - ranked.len() - others)
        } else {
            let ranks = NumberList::of((0..count).filter(|rank| !ranked.contains_key(rank)));
            format!("nodes {ranks} of {count}")
        };
        let address = &self.0.address;
        RpcError::new(ErrorKind::DeadlineExceeded, format!("{who} have not dialled in at {address} within {timeout:?}"))
    }
}

fn has_ended(session: &Session) -> bool {
    session.shared().ended().reply().is_done()
}

fn no_session(_: &OpenRequest) -> RpcResult<SharedSession> {
    Err(RpcError::unsupported("a controller waits here for its nodes"))
}
