//! Counting memory against limits, per session and in total.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Result, RpcError};

/// A limit on bytes, within another one perhaps. Bytes count from [`reserve`](Self::reserve) until the lease is dropped.
#[derive(Debug)]
pub struct MemoryQuota {
    name: &'static str,
    limit: u64,
    used: AtomicU64,
    within: Option<Arc<Self>>,
}

impl MemoryQuota {
    /// A limit of `limit` bytes; `name` is what errors call it. With `within`, every byte counts against that one too.
    pub fn new(name: &'static str, limit: u64, within: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { name, limit, used: AtomicU64::new(0), within })
    }

    /// Reserves `bytes`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), naming the limit that is in the way.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<MemoryLease> {
        let outer = self.within.as_ref().map(|outer| outer.reserve(bytes)).transpose()?;
        let reserve = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .map_err(|used| RpcError::limit(self.name, self.limit, used.saturating_add(bytes)))?;
        Ok(MemoryLease { quota: self.clone(), bytes, _outer: outer.map(Box::new) })
    }

    /// The bytes that are reserved at present.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// Reserved bytes, until dropped.
#[derive(Debug)]
pub struct MemoryLease {
    quota: Arc<MemoryQuota>,
    bytes: u64,
    _outer: Option<Box<Self>>,
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        self.quota.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_inner_quota_also_counts_against_the_outer_one_and_gives_back() {
        let total = MemoryQuota::new("max_total_memory", 100, None);
        let first = MemoryQuota::new("max_memory", 80, Some(total.clone()));
        let second = MemoryQuota::new("max_memory", 80, Some(total.clone()));
        let lease = first.reserve(70).unwrap();
        assert!(first.reserve(20).unwrap_err().message().contains("max_memory"));
        assert_eq!(total.used(), 70);
        assert!(second.reserve(40).unwrap_err().message().contains("max_total_memory"));
        assert_eq!((first.used(), second.used()), (70, 0));
        drop(lease);
        assert_eq!(total.used(), 0);
        second.reserve(80).unwrap();
        assert!(first.reserve(u64::MAX).is_err());
    }
}
