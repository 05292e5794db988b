//! The connection of a client, for code that watches over the client's session.

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use rpc_core::RpcError;

use super::mailbox::Mailbox;

/// Connection of a client, for code that watches over the client's session. Does not keep it open.
#[derive(Clone)]
pub struct ClientConnection(Weak<Mailbox>);

impl ClientConnection {
    pub(super) fn new(mailbox: &Arc<Mailbox>) -> Self {
        Self(Arc::downgrade(mailbox))
    }

    /// Returns the time since anything was received from the client. Zero before its session begins
    /// and after it has ended. A client that lives answers pings, and so is silent for no longer
    /// than [`ServeOptions::keep_alive`](crate::ServeOptions::keep_alive) and a round trip.
    #[must_use]
    pub fn silent_for(&self) -> Duration {
        self.0.upgrade().map_or(Duration::ZERO, |mailbox| mailbox.silent_for())
    }

    /// Ends the session, and tells the client the reason.
    pub fn end(&self, reason: RpcError) {
        if let Some(mailbox) = self.0.upgrade() {
            mailbox.end(reason);
        }
    }
}

impl fmt::Debug for ClientConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientConnection").field("silent_for", &self.silent_for()).finish()
    }
}
