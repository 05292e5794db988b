//! The client whose socket the process of its session serves, as the supervisor of the processes
//! keeps it.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rpc_core::limits::MemoryLease;
use rpc_core::{MemoryQuota, Result};
use rpc_transports::PassedConnection;
use tokio::sync::oneshot;

/// A connection for a process, and what else the supervisor needs.
pub(super) struct PassJob {
    pub(super) id: u64,
    pub(super) connection: Box<PassedConnection>,
    /// Quota of the session's queued bytes, within that of all sessions.
    pub(super) queued: Arc<MemoryQuota>,
    pub(super) reply: oneshot::Sender<io::Result<()>>,
}

/// Client of a process that serves its socket.
pub(super) struct PassedClient {
    /// Socket, watched for the client's end until that comes.
    pub(super) socket: Option<OwnedFd>,
    /// Quota of the session's queued bytes, within that of all sessions, and what is in use.
    queued: Arc<MemoryQuota>,
    share: Option<MemoryLease>,
}

impl PassedClient {
    pub(super) fn new(socket: OwnedFd, queued: Arc<MemoryQuota>) -> Self {
        Self { socket: Some(socket), queued, share: None }
    }

    /// Closes the socket, on another thread: code of the client may have made it wait for that.
    pub(super) fn close(&mut self) {
        let Some(socket) = self.socket.take() else { return };
        let _ = rustix::net::sockopt::set_socket_linger(&socket, None);
        // Without a thread it is closed here.
        let _ = std::thread::Builder::new().name("rpc-close".into()).spawn(move || drop(socket));
    }

    /// Replaces the share of the session in what all have queued by `bytes`.
    ///
    /// # Errors
    ///
    /// The quota has no room for more.
    pub(super) fn queue(&mut self, bytes: u64, lasting: bool) -> Result<()> {
        let before = self.share.as_ref().map_or(0, MemoryLease::bytes);
        if lasting && bytes > before {
            self.queued.check_half(bytes - before)?;
        }
        match &mut self.share {
            Some(share) => share.resize(bytes)?,
            None => self.share = Some(self.queued.reserve(bytes)?),
        }
        Ok(())
    }
}

impl Drop for PassedClient {
    fn drop(&mut self) {
        self.close();
    }
}
