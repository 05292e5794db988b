//! Authorization: the rights of a server's clients.

use std::fmt;
use std::sync::Arc;

use rpc_core::{AccessControl, Permission, RpcError};

use crate::handshake::peer_identity::PeerIdentity;

/// Source of the rights of a server's clients.
pub trait Authorizer: Send + Sync + fmt::Debug {
    /// Returns the rights of a client with this identity, for one session or tunnel. Called on a
    /// task that serves clients, and must not block.
    fn authorize(&self, identity: &PeerIdentity) -> Authorization;
}

/// Rights of one client, for one session or tunnel.
#[derive(Clone, Debug)]
pub struct Authorization {
    /// Checks of what the client does. The server checks forwarding and tunnels; the session that
    /// its factory opens checks the rest.
    pub access: Arc<dyn AccessControl>,
    /// Number of sessions and tunnels that clients with this identity may have at one time, beside
    /// [`max_sessions_per_peer`](crate::ServeOptions::max_sessions_per_peer); `None` for no limit
    /// of their own.
    pub max_sessions: Option<usize>,
}

/// A client as it is served: with its effective identity and its rights.
#[derive(Clone, Debug)]
pub(super) struct AuthorizedClient {
    pub(super) identity: PeerIdentity,
    /// Rights of the client; `None` where the server has no [`Authorizer`].
    pub(super) authorization: Option<Authorization>,
}

impl AuthorizedClient {
    /// Returns the client with the rights that `authorizer` gives it.
    pub(super) fn new(identity: PeerIdentity, authorizer: Option<&Arc<dyn Authorizer>>) -> Self {
        let authorization = authorizer.map(|authorizer| authorizer.authorize(&identity));
        Self { identity, authorization }
    }

    /// Returns the rights of the client; `None` if it has all.
    pub(super) fn access(&self) -> Option<&Arc<dyn AccessControl>> {
        self.authorization.as_ref().map(|authorization| &authorization.access)
    }

    /// Checks that the client has a permission.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`](rpc_core::ErrorKind::Refused), with the reason.
    pub(super) fn check(&self, permission: &Permission<'_>) -> Result<(), RpcError> {
        self.access().map_or(Ok(()), |access| access.check(permission))
    }
}
