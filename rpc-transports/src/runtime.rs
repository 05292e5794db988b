//! Detection of async code, so that a blocking call inside it is an error and not a deadlock, and
//! the runtime for blocking sessions over transports that need one.

use std::future::Future;
use std::io;
use std::sync::OnceLock;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{Builder, Runtime};

use crate::connect::ConnectError;
use crate::error::TransportError;

/// Installs [`inside_async_code`] in the core. Called wherever a session is made.
pub(crate) fn install_probe() {
    rpc_core::blocking::set_runtime_probe(inside_async_code);
}

/// Returns true if the calling thread is inside of a task's `poll`, or of `block_on`.
///
/// A thread of the runtime's blocking pool has a current runtime as well, and may block. Only
/// polled code has a cooperative budget, so there alone it can be used up. Afterwards the budget is
/// what it was before.
fn inside_async_code() -> bool {
    if tokio::runtime::Handle::try_current().is_err() {
        return false;
    }
    let mut context = Context::from_waker(Waker::noop());
    // `_restore` puts the whole budget back when dropped, because no progress is reported for it.
    let Poll::Ready(_restore) = tokio::task::coop::poll_proceed(&mut context) else { return true };
    (1..=MAX_BUDGET).any(|_| match tokio::task::coop::poll_proceed(&mut context) {
        Poll::Ready(taken) => {
            taken.made_progress();
            false
        }
        Poll::Pending => true,
    })
}

/// Upper bound of a task's budget, which is 128 units in tokio.
const MAX_BUDGET: usize = 256;

/// Runs `open` on the background runtime of the process, which has one thread, and waits for it on
/// the calling thread. Tasks that `open` spawns continue on that runtime.
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
            // If two threads make a runtime at the same time, one of the two is dropped, which is
            // allowed outside of async code.
            let made = made.map_err(failed)?;
            RUNTIME.get_or_init(|| made)
        }
    };
    let (reply, answer) = std::sync::mpsc::sync_channel(1);
    runtime.spawn(async move {
        // The caller may have given up.
        let _ = reply.send(open.await);
    });
    answer.recv().unwrap_or_else(|_| Err(failed(io::Error::other("it has ended")).into()))
}

/// Frees the remains of a session on a thread that may block: it unmaps memory and removes
/// folders.
pub(crate) fn free(remains: impl Send + 'static) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn_blocking(move || drop(remains))),
        Err(_) => drop(remains),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn the_probe_leaves_the_budget_as_it_was() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let units = runtime.block_on(async {
            assert!(inside_async_code());
            let mut context = Context::from_waker(Waker::noop());
            std::iter::from_fn(|| match tokio::task::coop::poll_proceed(&mut context) {
                Poll::Ready(taken) => {
                    taken.made_progress();
                    Some(())
                }
                Poll::Pending => None,
            })
            .count()
        });
        assert!((100..MAX_BUDGET).contains(&units), "{units} units were left");
    }
}
