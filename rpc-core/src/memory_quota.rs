//! Memory quotas: limits on bytes, for one session or for all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Result, RpcError};

/// Limit on bytes, possibly inside an outer one. Bytes count from [`reserve`](Self::reserve) until
/// the lease is dropped.
#[derive(Debug)]
pub struct MemoryQuota {
    name: &'static str,
    limit: u64,
    used: AtomicU64,
    within: Option<Arc<Self>>,
}

impl MemoryQuota {
    /// Creates a quota of `limit` bytes. Errors call it `name`. With `within`, every byte counts
    /// against that outer quota, too.
    pub fn new(name: &'static str, limit: u64, within: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { name, limit, used: AtomicU64::new(0), within })
    }

    /// Reserves `bytes`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), naming the limit that was
    /// reached.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<MemoryLease> {
        let outer = self.within.as_ref().map(|outer| outer.reserve(bytes)).transpose()?;
        let reserve = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        self.used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve)
            .map_err(|used| RpcError::limit(self.name, self.limit, used.saturating_add(bytes)))?;
        Ok(MemoryLease { quota: self.clone(), bytes, outer: outer.map(Box::new) })
    }

    /// Returns the bytes that are reserved at present.
    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }
}

/// Reserved bytes, returned to the quota when dropped.
#[derive(Debug)]
pub struct MemoryLease {
    quota: Arc<MemoryQuota>,
    bytes: u64,
    outer: Option<Box<Self>>,
}

impl MemoryLease {
    /// Resizes the lease to `bytes`.
    ///
    /// # Errors
    ///
    /// As [`MemoryQuota::reserve`]; the lease keeps its size then.
    pub fn resize(&mut self, bytes: u64) -> Result<()> {
        match bytes.checked_sub(self.bytes) {
            // Reserves only the additional bytes, and merges them into this lease.
            Some(more) => {
                let mut further = self.quota.reserve(more)?;
                if let (Some(outer), Some(more)) = (&mut self.outer, &mut further.outer) {
                    outer.bytes += std::mem::take(&mut more.bytes);
                }
                self.bytes += std::mem::take(&mut further.bytes);
            }
            None => self.shrink(bytes),
        }
        Ok(())
    }

    fn shrink(&mut self, bytes: u64) {
        self.quota.used.fetch_sub(self.bytes - bytes, Ordering::Relaxed);
        self.bytes = bytes;
        if let Some(outer) = &mut self.outer {
            outer.shrink(bytes);
        }
    }
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
    fn bytes_of_an_inner_quota_also_count_against_the_outer_one_until_they_are_returned() {
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

    #[test]
    fn a_lease_grows_as_far_as_both_quotas_allow_and_shrinks() {
        let total = MemoryQuota::new("max_total_memory", 100, None);
        let quota = MemoryQuota::new("max_memory", 80, Some(total.clone()));
        let other = total.reserve(30).unwrap();
        let mut lease = quota.reserve(10).unwrap();
        lease.resize(70).unwrap();
        assert_eq!((quota.used(), total.used()), (70, 100));
        assert!(lease.resize(71).unwrap_err().message().contains("max_total_memory"));
        drop(other);
        assert!(lease.resize(81).unwrap_err().message().contains("max_memory"));
        assert_eq!((quota.used(), total.used()), (70, 70));
        lease.resize(5).unwrap();
        assert_eq!((quota.used(), total.used()), (5, 5));
        drop(lease);
        assert_eq!((quota.used(), total.used()), (0, 0));
    }
}
