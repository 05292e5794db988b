//! Detection of async code, so that a blocking call inside it is an error and not a deadlock, and
//! the runtime for blocking sessions over transports that need one.

use std::future::Future;
use std::io;
use std::sync::OnceLock;

use tokio::runtime::{Builder, Runtime};

use crate::connect::ConnectError;
use crate::error::TransportError;

/// Tells the core about the runtime: [`inside_async_code`], and the clock of its timers. Called
/// wherever a session is made.
pub(crate) fn install_in_core() {
    rpc_core::blocking::set_runtime_probe(inside_async_code);
    rpc_core::clock::install(crate::clock::now);
}

/// Returns true if the calling thread is inside of a task's `poll`, or of `block_on`.
///
/// Three questions to tokio answer this. A thread without a current runtime runs none of its code.
/// A thread that is a worker polls tasks; so does the thread of a runtime with one thread. The
/// other threads with a current runtime belong to the blocking pool, are in `block_in_place`, or
/// are in `block_on` of a runtime with several threads: only the last of these has no task.
///
/// Two kinds of thread without a task may block all the same, and are taken for `block_on`: one
/// that has only entered a runtime, and one in `block_in_place` inside of `block_on`. They call
/// [`allow_blocking`](rpc_core::blocking::allow_blocking). Not found is async code below `block_on`
/// that has a task after all: of a `LocalSet` of a runtime with several threads, or on a thread of
/// the blocking pool.
fn inside_async_code() -> bool {
    tokio::runtime::Handle::try_current().is_ok()
        && (tokio::runtime::worker_index().is_some() || tokio::task::try_id().is_none())
}

/// Runs `open` on the background runtime of the process, which has one thread, and waits for it on
/// the calling thread. Tasks that `open` spawns continue on that runtime.
pub(crate) fn run_in_background<T: Send + 'static>(
    open: impl Future<Output = Result<T, ConnectError>> + Send + 'static,
) -> Result<T, ConnectError> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let failed = |error: io::Error| TransportError::from_io("the background thread of this process", error);
    rpc_core::blocking::check_may_block()?;
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
    use rpc_core::ErrorKind;
    use rpc_core::blocking::{allow_blocking, check_may_block};

    use super::*;

    #[test]
    fn async_code_is_told_from_threads_that_may_block() {
        assert!(!inside_async_code());
        for mut builder in [tokio::runtime::Builder::new_current_thread(), tokio::runtime::Builder::new_multi_thread()]
        {
            let runtime = builder.enable_all().build().unwrap();
            assert!(runtime.block_on(async { inside_async_code() }));
            assert!(runtime.block_on(async { tokio::spawn(async { inside_async_code() }).await.unwrap() }));
            assert!(runtime.block_on(tokio::task::unconstrained(async { inside_async_code() })));
            assert!(!runtime.block_on(async { tokio::task::spawn_blocking(inside_async_code).await.unwrap() }));
            assert!(!inside_async_code());
        }
    }

    #[test]
    fn a_task_may_block_in_place() {
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let probed = async { tokio::spawn(async { tokio::task::block_in_place(inside_async_code) }).await.unwrap() };
        assert!(!runtime.block_on(probed));
    }

    #[test]
    fn a_thread_that_has_only_entered_a_runtime_may_say_that_it_blocks() {
        install_in_core();
        let runtime = tokio::runtime::Builder::new_multi_thread().build().unwrap();
        let _guard = runtime.enter();
        assert_eq!(check_may_block().unwrap_err().kind(), ErrorKind::ApiMisuse);
        allow_blocking(check_may_block).unwrap();
        let refused = run_in_background(async { Ok(1) }).unwrap_err().into_rpc_error();
        assert_eq!(refused.kind(), ErrorKind::ApiMisuse);
        assert_eq!(allow_blocking(|| run_in_background(async { Ok(1) })).unwrap(), 1);
    }
}
