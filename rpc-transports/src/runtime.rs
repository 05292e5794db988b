//! Telling async code from plain threads, so that a blocking form inside async code is an error and not a deadlock; and the
//! runtime for plain threads whose sessions need one.

use std::future::Future;
use std::io;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{Builder, Runtime};

use crate::connect::ConnectError;
use crate::error::TransportError;

/// Installs the probe. Done wherever a session is made.
pub(crate) fn install_probe() {
    rpc_core::blocking::set_runtime_probe(inside_async_code);
}

/// Whether the calling thread is inside of a task's `poll`, or of `block_on`.
///
/// A thread of the runtime's blocking pool also has a current runtime, and may block. What it has not is a budget: only
/// polled code has one, and taking from it comes to an end.
fn inside_async_code() -> bool {
    if tokio::runtime::Handle::try_current().is_err() {
        return false;
    }
    let mut context = Context::from_waker(Waker::noop());
    // A budget is at most 128. It stays used up: the caller is about to fail, and will yield a little sooner.
    for _ in 0..256 {
        match tokio::task::coop::poll_proceed(&mut context) {
            Poll::Ready(taken) => taken.made_progress(),
            Poll::Pending => return true,
        }
    }
    false
}

/// Waits on this thread for what `open` does on a runtime that the process keeps for such sessions, with one thread. The tasks
/// that `open` spawns go on there.
pub(crate) fn run_in_background<T: Send + 'static>(
    open: impl Future<Output = Result<T, ConnectError>> + Send + 'static,
) -> Result<T, ConnectError> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let failed = |error: io::Error| TransportError::from_io("the background thread of this process", error);
    if inside_async_code() {
        return Err(rpc_core::RpcError::new(
            rpc_core::ErrorKind::ApiMisuse,
            "a blocking form was called from async code; use the async form",
        )
        .into());
    }
    let runtime = match RUNTIME.get() {
        Some(runtime) => runtime,
        None => {
            let made = Builder::new_multi_thread().worker_threads(1).thread_name("rpc-io").enable_all().build();
            // Of two that are made at the same time one is dropped, which outside of async code is allowed.
            let made = made.map_err(failed)?;
            RUNTIME.get_or_init(|| made)
        }
    };
    let (reply, answer) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move {
        // Whoever asked may have given up.
        let _ = reply.send(open.await);
    });
    answer.recv().unwrap_or_else(|_| Err(failed(io::Error::other("it has ended")).into()))
}

#[cfg(test)]
mod tests {
    use super::inside_async_code;

    #[test]
    fn async_code_is_told_from_threads_that_may_block() {
        assert!(!inside_async_code());
        for mut builder in [tokio::runtime::Builder::new_current_thread(), tokio::runtime::Builder::new_multi_thread()]
        {
            let runtime = builder.enable_all().build().unwrap();
            assert!(runtime.block_on(async { inside_async_code() }));
            assert!(runtime.block_on(async { tokio::spawn(async { inside_async_code() }).await.unwrap() }));
            assert!(!runtime.block_on(async { tokio::task::spawn_blocking(inside_async_code).await.unwrap() }));
            let _guard = runtime.enter();
            assert!(!inside_async_code());
        }
    }
}
