//! The trait of idle memory that can be returned to the driver.
//!
//! The pools implement it. Two files below them use it: `gpu.rs`, when the driver has no more
//! memory, and `release_thread.rs`, when memory has been idle for long.

use std::sync::atomic::AtomicBool;
use std::time::Instant;

use rpc_core::error::Result;

/// Idle memory of one GPU.
pub(super) trait IdleMemory: Sync {
    /// Returns the index of the GPU.
    fn device_index(&self) -> i32;

    /// Returns the flag that is set while the release thread knows that there is idle memory.
    fn is_watched(&self) -> &AtomicBool;

    /// Returns all idle memory to the driver, after waiting for the work that uses it. Returns the
    /// number of bytes. The caller has entered the GPU.
    fn trim(&self) -> Result<u64>;

    /// Returns memory that has been idle for long enough to the driver. Returns the time of the
    /// next check, if any memory is left.
    fn release_idle(&self) -> Option<Instant>;
}
