//! Access of a session to further servers, on behalf of its client.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use rpc_core::{ErrorKind, OpenFileQuota, RpcError, Session};
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::authorization::AuthorizedClient;

/// Trait of a server that opens sessions with further servers.
#[async_trait]
pub(super) trait OnwardServer: Send + Sync {
    /// Opens a session with the server at `target`, an address and a key, for a client that has
    /// come by `path`. The connection counts against `open_files`.
    async fn connect_onward(
        &self,
        path: &[String],
        client: &AuthorizedClient,
        target: (&str, &str),
        keep_alive: Duration,
        open_files: &OpenFileQuota,
    ) -> Result<Session, RpcError>;
}

/// Access of a session to further servers: to those that the operator of its server allows
/// ([`ServeOptions::allow_forward`](super::ServeOptions::allow_forward)) to its client, with the
/// server's own identity, and on behalf of the client.
///
/// A factory gives it to the session as an [extension](rpc_core::LocalSessionBuilder::extension),
/// where functions find it.
#[derive(Clone)]
pub struct Onward {
    server: Weak<dyn OnwardServer>,
    path: Arc<[String]>,
    client: Arc<AuthorizedClient>,
    open_files: OpenFileQuota,
    /// Runtime of the server, which drives the sessions.
    runtime: Handle,
}

impl Onward {
    /// Creates the access of a session of the server, inside of the server's runtime.
    pub(super) fn new(
        server: Weak<dyn OnwardServer>,
        path: &[String],
        client: AuthorizedClient,
        open_files: OpenFileQuota,
    ) -> Self {
        Self { server, path: path.into(), client: Arc::new(client), open_files, runtime: Handle::current() }
    }

    /// Returns true if the client has come through a hop that says so. Tunnels and relays do not.
    #[must_use]
    pub fn is_through_hop(&self) -> bool {
        !self.path.is_empty()
    }

    /// Opens a session with the server at `target`. Its keep-alive is that of this session's
    /// server, or `keep_alive` if that is shorter. The server's runtime drives the session. May be
    /// awaited outside of any runtime. Cancel-safe.
    ///
    /// # Errors
    ///
    /// * [`ErrorKind::Refused`]: the operator does not allow it, or the chain comes back to a
    ///   server that it has passed.
    /// * [`ErrorKind::LimitExceeded`]: the session has no more open files, or the server.
    /// * [`ErrorKind::Closed`]: the server is gone.
    /// * Those of [`Connector::connect`](crate::Connector::connect).
    pub async fn connect(&self, target: &str, keep_alive: Duration) -> Result<Session, RpcError> {
        let gone = || RpcError::new(ErrorKind::Closed, "the server of this session is gone");
        let server = self.server.upgrade().ok_or_else(gone)?;
        let (this, target) = (self.clone(), target.to_owned());
        // If this future is dropped, the set aborts the task.
        let mut opening = JoinSet::new();
        let connect = async move {
            server.connect_onward(&this.path, &this.client, (&target, ""), keep_alive, &this.open_files).await
        };
        opening.spawn_on(connect, &self.runtime);
        match opening.join_next().await {
            Some(Ok(opened)) => opened,
            Some(Err(error)) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
            // The runtime has been shut down.
            _ => Err(gone()),
        }
    }
}

impl fmt::Debug for Onward {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Onward").field("identity", &self.client.identity).finish_non_exhaustive()
    }
}
