//! The socket of a client on its way to the process of its session.
//!
//! The session is open by then, as one that this server would pass on. Where the client is
//! connected by TCP or a Unix socket, the process gets the socket after the handshake, and serves
//! it by itself. The connection between server and process stays: its end is that of the process,
//! and its pings find a process that hangs.

use std::io;
use std::sync::Arc;

use async_trait::async_trait;
use rpc_core::{MemoryQuota, RpcError};
use rpc_transports::{EndReport, PassedConnection, SessionProcess};
use tokio::sync::oneshot;

use super::messages::{ControlAnswer, SessionOrder};
use super::passed_client::PassJob;
use super::supervisor::{Job, Process, submit};

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

impl Process {
    fn order(&self, order: SessionOrder) {
        submit(Job::Answer { id: self.id(), answer: ControlAnswer::Order(order), place: None });
    }
}
