//! Origin of the node that takes the place of a lost one.

use std::fmt;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use rpc_core::{RpcError, Session};
use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};

use crate::error::Result;
use crate::link::session_source::Source;

/// Node that takes the place of a lost one: see
/// [`DiscoSession::replace`](crate::DiscoSession::replace). It gets as many workers as that had.
pub struct Replacement(pub(crate) Origin);

/// Origin of the node.
pub(crate) enum Origin {
    /// The way in which the session was launched.
    Relaunched,
    Found(Found),
}

/// Future of a node that is being found.
pub(crate) type Found = Pin<Box<dyn Future<Output = Result<Source>> + Send>>;

/// The way in which the nodes of a session were launched, for another one in the place of the node
/// that had these workers.
pub(crate) type Relaunch = Arc<dyn Fn(Range<u32>) -> Found + Send + Sync>;

impl Replacement {
    /// Launches a node in the way in which the lost one was: a process
    /// ([`ProcessSession`](crate::ProcessSession)); the server at the same address
    /// ([`SocketSession::new`](crate::SocketSession::new)), which may have been started again or be
    /// reached again; another server of the tracker
    /// ([`SocketSession::from_tracker`](crate::SocketSession::from_tracker)); the next node that
    /// dials in ([`SocketSession::dialled_by`](crate::SocketSession::dialled_by)).
    ///
    /// A session over sessions of the caller ([`DiscoSession::over`](crate::DiscoSession::over))
    /// has no such way.
    #[must_use]
    pub fn relaunched() -> Self {
        Self(Origin::Relaunched)
    }

    /// Takes the server at an address.
    #[must_use]
    pub fn at(address: impl Into<String>) -> Self {
        Self::at_by(Connector::new(), address)
    }

    /// Takes the server at an address, which this connector dials.
    #[must_use]
    pub fn at_by(connector: Connector, address: impl Into<String>) -> Self {
        let source = Source::Address(Box::new(connector), address.into());
        Self::found(async { Ok(source) })
    }

    /// Takes the far end of a session.
    #[must_use]
    pub fn over(session: Session) -> Self {
        Self::found(async { Ok(Source::Ready(session, "the session of a replacement".to_owned())) })
    }

    /// Takes a server that the tracker at an address hands out. This connector dials both. The
    /// number of servers in the request does not count.
    #[must_use]
    pub fn from_tracker(connector: Connector, tracker: impl Into<String>, request: ServerRequest) -> Self {
        let tracker = tracker.into();
        Self::found(async move {
            let mut servers = borrow(connector, &tracker, &request.count(1)).await?;
            let server = servers.pop();
            Ok(server.ok_or_else(|| RpcError::internal("a tracker that hands out no server"))?)
        })
    }

    /// Returns the future of the node, which for one that is launched again its session has.
    pub(crate) fn into_found(self) -> Found {
        match self.0 {
            Origin::Found(found) => found,
            Origin::Relaunched => {
                Box::pin(async { Err(RpcError::internal("a launch that is its own replacement").into()) })
            }
        }
    }

    fn found(source: impl Future<Output = Result<Source>> + Send + 'static) -> Self {
        Self(Origin::Found(Box::pin(source)))
    }
}

impl fmt::Debug for Replacement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Origin::Relaunched => "Replacement(relaunched)",
            Origin::Found(_) => "Replacement",
        })
    }
}

/// Takes servers that a tracker hands out. It gets them back when their sessions end.
pub(crate) async fn borrow(
    connector: Connector,
    tracker: &str,
    request: &ServerRequest,
) -> rpc_core::Result<Vec<Source>> {
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
