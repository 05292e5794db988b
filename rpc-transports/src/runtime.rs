//! Telling async code from plain threads, so that a blocking form inside async code is an error and not a deadlock.

use std::task::{Context, Poll, Waker};

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
