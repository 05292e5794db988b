//! Limits of a session, and the quotas that several sessions share.

use serde::{Deserialize, Serialize};

pub use crate::memory_quota::{GrantingQuota, MemoryLease, MemoryQuota, StagingLease};
pub use crate::open_file_quota::{OpenFileLease, OpenFileQuota};

/// Limits on the objects, requests, bytes and threads of a session. The defaults suit one of
/// several clients of a server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionLimits {
    /// Requests that are admitted and not complete; more wait for admission. 1,024 by default.
    pub max_requests: usize,
    /// Bytes of arguments in those requests, as they lie in memory
    /// ([`Value::size_hint`](crate::Value::size_hint)); more wait for admission, and a single
    /// request that is larger is admitted alone. 128 MiB by default.
    ///
    /// A read from a device whose memory the host cannot access counts with its length, because it
    /// is copied to the host; a single one that is larger is an error. So does what functions
    /// [stage](crate::Context::stage).
    ///
    /// Requests that wait for admission are in memory, too. Their submitter must bound them: a
    /// program by waiting for admission, a server by the credit that it grants its clients.
    /// [`LocalSession::backlog`](crate::LocalSession::backlog) returns their size.
    pub max_queued_bytes: usize,
    /// Objects that the session holds; more are an error. 1,048,576 by default.
    pub max_handles: usize,
    /// Bytes of device memory that the session holds; more are an error. No limit by default.
    pub max_memory: u64,
    /// Threads of the session, at least one: the number of blocking functions that run at one time,
    /// and of asynchronous ones without a [spawner](crate::LocalSessionBuilder::spawner). Jobs for
    /// which there is no thread wait in the order in which they came to need one, and their lanes
    /// with them. 64 by default.
    ///
    /// Waiting for a lane, a tensor or admission needs no thread. Inline functions and copies of
    /// ordinary size need none either, so that they continue while all threads are busy. A nested
    /// call runs on its caller's thread. So the limit blocks no job for ever, unless functions wait
    /// for each other, as at a barrier: if more functions meet there than there are threads, the
    /// running ones wait for those that cannot start.
    pub max_threads: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_requests: 1024,
            max_queued_bytes: 128 << 20,
            max_handles: 1 << 20,
            max_memory: u64::MAX,
            max_threads: 64,
        }
    }
}
