//! Locks and threads of a local session's scheduling. Tests that try out the orders in which
//! threads can run put their own in place of them.

#[cfg(not(test))]
pub(super) use self::system::spawn;
#[cfg(test)]
pub(super) use super::tests::models::{Condvar, Mutex, MutexGuard, spawn};
#[cfg(not(test))]
pub(super) use parking_lot::{Condvar, Mutex, MutexGuard};

/// The system's threads.
pub(super) mod system {
    use std::io;
    use std::thread::Builder;

    /// Stack size of a thread: that of a program's main thread on most systems, which native code
    /// expects. It is only reserved.
    const STACK_BYTES: usize = 8 << 20;

    /// Starts a thread.
    pub(in crate::local) fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
        Builder::new().name("rpc-lane".into()).stack_size(STACK_BYTES).spawn(run).map(drop)
    }
}
