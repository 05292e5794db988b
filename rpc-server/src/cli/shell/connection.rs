//! The one connection of a shell, which its commands and its completion share.

use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{RpcError, Session};
use tokio::time::{Duration, timeout};

/// The session of a shell, once there is one. Clones are the same connection.
#[derive(Clone, Debug, Default)]
pub(in crate::cli) struct SharedConnection(Arc<Mutex<Option<Session>>>);

impl SharedConnection {
    /// Returns the session, or the error that has ended it; `None` before there is one.
    pub(in crate::cli) async fn current(&self) -> Option<Result<Session, RpcError>> {
        let session = self.0.lock().clone()?;
        // The end of a session is known at once.
        match timeout(Duration::ZERO, session.ended()).await {
            Ok(error) => Some(Err(error)),
            Err(_) => Some(Ok(session)),
        }
    }

    /// Replaces the session.
    pub(in crate::cli) fn set(&self, session: Session) {
        *self.0.lock() = Some(session);
    }

    /// Takes the session, to close it.
    pub(super) fn take(&self) -> Option<Session> {
        self.0.lock().take()
    }
}
