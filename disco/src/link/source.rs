//! Sources of sessions: where a link to a node comes from, and how many of them are opened at once.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{RpcError, Session};
use rpc_transports::{Connector, Onward};

use crate::link::local::Inbox;
use crate::link::node_link::Link;
use crate::wire::set_up::SetUp;

/// Origin of the session to a node.
pub(crate) enum Source {
    /// A session that exists already; and the name of the node.
    Ready(Session, String),
    Address(Box<Connector>, String),
    /// A node that the server of a session makes way to.
    Onward(Arc<Onward>, String),
}

impl Source {
    /// Opens a session with it, which is tested as often as `keep_alive` says.
    async fn open(self, keep_alive: Duration) -> rpc_core::Result<(Session, String)> {
        match self {
            Self::Ready(session, name) => Ok((session, name)),
            Self::Address(connector, address) => {
                let session = connector.keep_alive(keep_alive).connect(&address).await;
                Ok((session.map_err(|error| error.into_rpc_error())?, address))
            }
            Self::Onward(onward, address) => Ok((onward.connect(&address, keep_alive).await?, address)),
        }
    }
}

/// Opens the hosts of all nodes at once, or none.
pub(crate) async fn open_links(nodes: Vec<(SetUp, Source)>, inbox: &Arc<Inbox>) -> rpc_core::Result<Vec<Link>> {
    let opening: Vec<_> = nodes
        .into_iter()
        .map(|(set_up, source)| {
            let inbox = Arc::clone(inbox);
            tokio::spawn(async move {
                let (session, name) = source.open(set_up.keep_alive()).await?;
                Link::open(session, name, set_up, &inbox).await
            })
        })
        .collect();
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
