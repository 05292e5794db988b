//! Sources of sessions with nodes, and opening several links at once.

use std::sync::Arc;

use rpc_core::{RpcError, Session};
use rpc_transports::{Connector, Onward, SPIN};

use crate::link::local::LocalLink;
use crate::link::node_link::Link;
use crate::wire::set_up::SetUp;

/// Origin of the session to a node.
pub(crate) enum Source {
    /// A session that exists already; and the name of the node.
    Ready(Session, String),
    /// A session of this process that has the link as an extension.
    Local(Session, Arc<LocalLink>),
    Address(Box<Connector>, String),
    /// A node that the server of a session makes way to.
    Onward(Arc<Onward>, String),
}

impl Source {
    /// Opens a host in a session with it. The session is tested as often as the set-up says.
    pub(crate) async fn open(self, set_up: SetUp) -> rpc_core::Result<Link> {
        let keep_alive = set_up.keep_alive();
        let mut has_hops = false;
        let (session, name, local) = match self {
            Self::Ready(session, name) => (session, name, None),
            Self::Local(session, local) => (session, "this process".to_owned(), Some(local)),
            Self::Address(connector, address) => {
                has_hops = connector.has_hops();
                let session = connector.keep_alive(keep_alive).spin(SPIN).connect(&address).await;
                (session.map_err(|error| error.into_rpc_error())?, address, None)
            }
            Self::Onward(onward, address) => (onward.connect(&address, keep_alive).await?, address, None),
        };
        let mut link = Link::open(session, name, set_up, local).await?;
        link.has_hops = has_hops;
        Ok(link)
    }
}

/// Opens the hosts of all nodes at once, or none.
pub(crate) async fn open_links(nodes: Vec<(SetUp, Source)>) -> rpc_core::Result<Vec<Link>> {
    let opening: Vec<_> = nodes.into_iter().map(|(set_up, source)| tokio::spawn(source.open(set_up))).collect();
    let mut links = Vec::new();
    let mut failed = None;
    for link in opening {
        // All are awaited, so that none is left behind half open.
        match link.await {
            Ok(Ok(link)) => links.push(link),
            Ok(Err(error)) => failed = failed.or(Some(error)),
            Err(error) => failed = failed.or(Some(RpcError::internal(format!("a launch panicked: {error}")))),
        }
    }
    match failed {
        None => Ok(links),
        Some(error) => {
            links.iter().for_each(Link::close);
            Err(error)
        }
    }
}
