//! The trait of executors for asynchronous functions.

use std::future::Future;
use std::pin::Pin;

/// Executor for the futures of asynchronous functions, implemented by crates that use a runtime.
pub trait Spawner: Send + Sync {
    /// Runs `future` to completion. Must not block.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>);
}
