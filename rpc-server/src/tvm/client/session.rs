//! The session as its callers hold it, and the task that serves it to its end.

use std::pin::pin;
use std::sync::Arc;

use rpc_core::{Request, RpcError, RpcSession, Submission};
use rpc_transports::ChannelIo;
use rpc_tvm::wire::{ClientWire, shutdown};
use tokio::io::AsyncWriteExt as _;
use tokio::time::timeout_at;

use super::execute::execute;
use super::farewell::{LINGER, discard};
use super::link;
use super::replies::{self, Replies};
use super::state::{ClientCore, closed};

/// A session with a server of TVM. Dropping it ends the session.
pub(super) struct TvmClientSession(Arc<ClientCore>);

impl TvmClientSession {
    /// Starts a session after the handshake, and its task.
    pub(super) fn spawn(
        core: ClientCore,
        io: Box<dyn ChannelIo>,
        wire: ClientWire,
        guard: impl Send + 'static,
    ) -> Self {
        let core = Arc::new(core);
        tokio::spawn(serve(core.clone(), io, wire, guard));
        Self(core)
    }
}

impl RpcSession for TvmClientSession {
    fn submit(&self, request: Request) -> Submission {
        self.0.submit(request)
    }

    fn ended(&self) -> Submission {
        self.0.ended()
    }
}

impl Drop for TvmClientSession {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

/// Performs the requests of a session. Returns the error with which it ends, and the last frame for
/// the server where it ends in spite of unanswered requests.
pub(super) async fn work(core: &Arc<ClientCore>) -> (RpcError, Option<Vec<u8>>) {
    tokio::select! {
        biased;
        error = execute(core) => (error, None),
        () = core.abandoned() => (closed(), Some(shutdown())),
    }
}

/// Serves a session to its end, of which callers are told at once, and ends the connection.
/// `guard` holds what the connection needs.
async fn serve(core: Arc<ClientCore>, io: Box<dyn ChannelIo>, wire: ClientWire, guard: impl Send) {
    let (mut reader, mut writer) = tokio::io::split(io);
    let limit = {
        let mut output = pin!(link::write(&core.link, &mut writer));
        let (error, last) = tokio::select! {
            biased;
            error = replies::read(&core, &mut reader, Replies::new(wire)) => (error, None),
            error = &mut output => (error, None),
            error = core.watch_time() => (error, None),
            ended = work(&core) => ended,
        };
        let error = error.with_peer(&*core.peer);
        tracing::debug!(%error, "a session with a server of TVM has ended");
        core.tell(&error);
        let limit = tokio::time::Instant::now() + LINGER;
        if let Some(last) = last {
            // A request of which the server gets a part only would end the server.
            let written = async {
                tokio::select! {
                    _ = &mut output => {}
                    () = core.link.finish(last) => {}
                    () = discard(&mut reader) => {}
                }
            };
            let _ = timeout_at(limit, written).await;
        }
        core.link.fail(&error);
        limit
    };
    let left = async {
        let _ = writer.shutdown().await;
        discard(&mut reader).await;
    };
    let _ = timeout_at(limit, left).await;
    drop(guard);
}
