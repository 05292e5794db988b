//! The socket of a client on its way to the process of its session.
//!
//! The session is open by then, as one that this server would pass on. Where the client is
//! connected by TCP or a Unix socket, the process gets the socket after the handshake, and serves
//! it by itself. The connection between server and process stays: its end is that of the process,
//! and its pings find a process that hangs.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use async_trait::async_trait;
use rpc_core::limits::MemoryLease;
use rpc_core::{MemoryQuota, Result, RpcError};
use rpc_transports::{EndReport, PassedConnection, SessionProcess};
use tokio::sync::oneshot;

use super::messages::{ControlAnswer, SessionOrder};
use super::supervisor::{Job, Process, submit};

/// A connection for a process, and what else the supervisor needs.
pub(super) struct PassJob {
    pub(super) id: u64,
    pub(super) connection: Box<PassedConnection>,
    /// Quota of the session's queued bytes, within that of all sessions.
    pub(super) queued: Arc<MemoryQuota>,
    pub(super) reply: oneshot::Sender<io::Result<()>>,
}

#[async_trait]
impl SessionProcess for Process {
    async fn take(&self, connection: PassedConnection, queued: Arc<MemoryQuota>) -> io::Result<()> {
        let (reply, answer) = oneshot::channel();
        submit(Job::Pass(PassJob { id: self.id(), connection: Box::new(connection), queued, reply }));
        answer.await.unwrap_or_else(|_| Err(io::Error::other("the thread of the session processes is gone")))
    }

    fn go_away(&self) {
        self.order(SessionOrder::GoAway);
    }

    fn close(&self, reason: &RpcError) {
        self.order(SessionOrder::Close(reason.clone()));
    }

    fn end_soon(&self) {
        self.kill_after_grace();
    }

    async fn exited(&self) {
        self.kill_after_grace();
        std::future::poll_fn(|cx| self.poll_exit_cause(cx)).await;
    }

    fn client_is_gone(&self) -> bool {
        self.has_no_client()
    }

    async fn ended(&self) -> EndReport {
        let mut reported = self.end_report().subscribe();
        // The sender lives as long as this process.
        let report = match reported.wait_for(Option::is_some).await {
            Ok(report) => report.clone(),
            Err(_) => None,
        };
        match report {
            Some(report) => report,
            None => std::future::pending().await,
        }
    }
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

impl Process {
    fn order(&self, order: SessionOrder) {
        submit(Job::Answer { id: self.id(), answer: ControlAnswer::Order(order), place: None });
    }
}
