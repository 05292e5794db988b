//! Open file quotas: limits on descriptors, for one session or for all.

use std::sync::Arc;

use crate::error::Result;
use crate::memory_quota::{MemoryLease, MemoryQuota};

/// Limit on the descriptors that a peer can make a process open, possibly inside an outer limit.
/// Each counts from [`reserve`](Self::reserve) until the lease is dropped. A clone is the same
/// quota.
///
/// A process may open only so many; without a quota one peer can use up all of them, and then no
/// other can connect.
#[derive(Clone, Debug)]
pub struct OpenFileQuota(Arc<MemoryQuota>);

/// Reserved descriptors, returned to the quota when dropped.
#[derive(Debug)]
pub struct OpenFileLease {
    _counted: MemoryLease,
}

impl OpenFileQuota {
    /// Creates a quota of `limit` descriptors. Errors call it `name`. With `within`, every
    /// descriptor counts against that outer quota, too.
    #[must_use]
    pub fn new(name: &'static str, limit: u64, within: Option<&Self>) -> Self {
        // One descriptor counts as one byte does there.
        Self(MemoryQuota::new(name, limit, within.map(|outer| outer.0.clone())))
    }

    /// Reserves `count` descriptors, before they are opened.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), naming the limit that was
    /// reached.
    pub fn reserve(&self, count: u64) -> Result<OpenFileLease> {
        Ok(OpenFileLease { _counted: self.0.reserve(count)? })
    }

    /// Returns the limit of this quota, without that of an outer one.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.0.limit()
    }

    /// Returns the number of descriptors that are reserved at present.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.0.used()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_at_its_limit_leaves_the_rest_to_others() {
        let total = OpenFileQuota::new("max_total_open_files", 5, None);
        let first = OpenFileQuota::new("max_open_files", 3, Some(&total));
        let second = OpenFileQuota::new("max_open_files", 3, Some(&total));
        let held = first.reserve(3).unwrap();
        assert!(first.reserve(1).unwrap_err().message().starts_with("max_open_files is 3"));
        let other = second.reserve(2).unwrap();
        assert!(second.reserve(1).unwrap_err().message().starts_with("max_total_open_files is 5"));
        drop(held);
        assert_eq!((first.used(), second.used(), total.used()), (0, 2, 2));
        drop(other);
        assert_eq!(total.used(), 0);
    }
}
