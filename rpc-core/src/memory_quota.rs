//! Memory quotas: limits on bytes, for one session or for all.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{FairMutex, FairMutexGuard, Mutex};

use crate::error::{Result, RpcError};

/// Limit on bytes, possibly inside an outer one. Bytes count from [`reserve`](Self::reserve) until
/// the lease is dropped.
#[derive(Debug)]
pub struct MemoryQuota {
    name: &'static str,
    limit: u64,
    used: AtomicU64,
    within: Option<Arc<Self>>,
    /// Turn of the stagings for which this quota has no room left. One at a time goes beyond the
    /// limit, and the lock hands itself to the oldest waiter.
    turn: FairMutex<()>,
    /// Bytes that another process has granted, for a quota that is part of one there.
    granted: Option<Granted>,
}

/// Another process's quota, which a quota of this process is a part of.
pub trait GrantingQuota: Send + Sync + std::fmt::Debug {
    /// Replaces the bytes that this process has been granted by `bytes`. More are requested from
    /// the other process, and waited for; fewer are given back. With `lasting`, they are needed
    /// for as long as a session, and the other process keeps half of its quota free of such bytes.
    ///
    /// # Errors
    ///
    /// The other quota has no room for more; the grant stays as it was. Giving back does not fail.
    fn resize(&self, bytes: u64, lasting: bool) -> Result<()>;
}

#[derive(Debug)]
struct Granted {
    by: Box<dyn GrantingQuota>,
    bytes: Mutex<u64>,
}

/// Unit of grants in bytes: each change of a grant is a message to the other process.
const GRANT_STEP: u64 = 4 << 20;

impl Granted {
    fn count(&self, used: &AtomicU64, bytes: u64, lasting: bool) -> Result<()> {
        let mut granted = self.bytes.lock();
        let all = used.load(Ordering::Relaxed).saturating_add(bytes);
        if all > *granted {
            let whole = all.checked_next_multiple_of(GRANT_STEP).unwrap_or(all);
            *granted = match self.by.resize(whole, lasting) {
                Ok(()) => whole,
                // There may be room for a part of a step.
                Err(_) => self.by.resize(all, lasting).map(|()| all)?,
            };
        }
        used.store(all, Ordering::Relaxed);
        Ok(())
    }

    fn give_back(&self, used: &AtomicU64, bytes: u64) {
        let mut granted = self.bytes.lock();
        let all = used.load(Ordering::Relaxed).saturating_sub(bytes);
        used.store(all, Ordering::Relaxed);
        let needed = all.checked_next_multiple_of(GRANT_STEP).unwrap_or(all);
        // Not at each step, so that memory which is needed now and then stays granted.
        if needed.saturating_add(GRANT_STEP) < *granted || all == 0 && *granted > 0 {
            *granted = needed;
            let _ = self.by.resize(needed, false);
        }
    }
}

impl MemoryQuota {
    /// Creates a quota of `limit` bytes. Errors call it `name`. With `within`, every byte counts
    /// against that outer quota, too.
    pub fn new(name: &'static str, limit: u64, within: Option<Arc<Self>>) -> Arc<Self> {
        Arc::new(Self { name, limit, used: AtomicU64::new(0), within, turn: FairMutex::new(()), granted: None })
    }

    /// Creates a quota of bytes that another process grants, a few MiB at a time.
    /// [`reserve`](Self::reserve) may wait for the other process then.
    pub fn granted_by(name: &'static str, other: impl GrantingQuota + 'static) -> Arc<Self> {
        let granted = Some(Granted { by: Box::new(other), bytes: Mutex::new(0) });
        let (used, turn) = (AtomicU64::new(0), FairMutex::new(()));
        Arc::new(Self { name, limit: u64::MAX, used, within: None, turn, granted })
    }

    /// Reserves `bytes`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded), naming the limit that was
    /// reached.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> Result<MemoryLease> {
        let outer = self.within.as_ref().map(|outer| outer.reserve(bytes)).transpose()?;
        self.count(bytes)?;
        Ok(MemoryLease { quota: self.clone(), bytes, outer: outer.map(Box::new) })
    }

    /// Reserves `bytes` for as long as a session. They find room only while half of the quota is
    /// free afterwards: what comes and goes needs the rest.
    ///
    /// # Errors
    ///
    /// As [`reserve`](Self::reserve).
    pub fn reserve_lasting(self: &Arc<Self>, bytes: u64) -> Result<MemoryLease> {
        if let Some(granted) = &self.granted {
            granted.count(&self.used, bytes, true)?;
            return Ok(MemoryLease { quota: self.clone(), bytes, outer: None });
        }
        self.check_half(bytes)?;
        self.reserve(bytes)
    }

    /// Checks that half of the quota is free with `more` bytes; that of the outer one, if there is
    /// one.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded).
    pub fn check_half(&self, more: u64) -> Result<()> {
        if let Some(outer) = &self.within {
            return outer.check_half(more);
        }
        let all = self.used().saturating_add(more);
        if all > self.limit / 2 {
            let error = RpcError::limit(self.name, self.limit / 2, all);
            return Err(error.context("what lasts as long as a session has half of the limit"));
        }
        Ok(())
    }

    /// Reserves `bytes` that are needed for a moment only, such as for data on their way to a
    /// client.
    ///
    /// They count against this quota and the outer one. A staging for which one of these has no
    /// room waits for its turn there: one at a time goes beyond the limit, the oldest first. So
    /// what others hold makes nobody's data unreadable. A thread may have one such lease, since it
    /// could wait for itself with two.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](crate::ErrorKind::LimitExceeded): `bytes` alone are more than
    /// this quota.
    pub fn stage(&self, bytes: u64) -> Result<StagingLease<'_>> {
        if bytes > self.limit {
            return Err(RpcError::limit(self.name, self.limit, bytes));
        }
        let outer = self.within.as_deref().map(|outer| StagedShare::Within(outer, 0));
        let mut lease = StagingLease { quota: self, bytes, own: StagedShare::Within(self, 0), queued: None, outer };
        lease.resize(bytes);
        Ok(lease)
    }

    /// Counts `bytes` of this quota alone.
    fn count(&self, bytes: u64) -> Result<()> {
        if let Some(granted) = &self.granted {
            return granted.count(&self.used, bytes, false);
        }
        let reserve = |used: u64| used.checked_add(bytes).filter(|used| *used <= self.limit);
        match self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve) {
            Ok(_) => Ok(()),
            Err(used) => Err(RpcError::limit(self.name, self.limit, used.saturating_add(bytes))),
        }
    }

    /// Returns counted bytes of this quota alone.
    fn give_back(&self, bytes: u64) {
        match &self.granted {
            Some(granted) => granted.give_back(&self.used, bytes),
            None => _ = self.used.fetch_sub(bytes, Ordering::Relaxed),
        }
    }

    /// Returns the limit in bytes, without that of an outer quota.
    pub fn limit(&self) -> u64 {
        self.limit
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
    /// Returns the number of bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

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
        self.quota.give_back(self.bytes - bytes);
        self.bytes = bytes;
        if let Some(outer) = &mut self.outer {
            outer.shrink(bytes);
        }
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        self.quota.give_back(self.bytes);
    }
}

/// Reserved bytes of data on their way, returned when dropped. See [`MemoryQuota::stage`].
#[derive(Debug)]
pub struct StagingLease<'a> {
    quota: &'a MemoryQuota,
    bytes: u64,
    own: StagedShare<'a>,
    /// Turn of the inner quota, where that has room and the outer quota has none: of the stagings
    /// of one inner quota, one at a time waits for the outer one.
    #[allow(dead_code, reason = "held for its drop")]
    queued: Option<FairMutexGuard<'a, ()>>,
    outer: Option<StagedShare<'a>>,
}

/// Share of a staging in one quota.
#[derive(Debug)]
enum StagedShare<'a> {
    /// So many bytes, which the quota has counted.
    Within(&'a MemoryQuota, u64),
    /// The quota has no room, and it is this staging's turn to go beyond it.
    #[allow(dead_code, reason = "held for its drop")]
    Beyond(FairMutexGuard<'a, ()>),
}

impl StagedShare<'_> {
    /// Counts `all` bytes in place of the fewer ones before. Returns false if there is no room.
    fn try_grow(&mut self, all: u64) -> bool {
        match self {
            Self::Within(quota, bytes) => {
                let fits = quota.count(all - *bytes).is_ok();
                if fits {
                    *bytes = all;
                }
                fits
            }
            Self::Beyond(_) => true,
        }
    }
}

impl Drop for StagedShare<'_> {
    fn drop(&mut self) {
        if let Self::Within(quota, bytes) = self {
            quota.give_back(*bytes);
        }
    }
}

impl StagingLease<'_> {
    /// Adds `bytes`. May wait as [`MemoryQuota::stage`] does.
    ///
    /// # Errors
    ///
    /// As [`MemoryQuota::stage`]; the lease keeps its size then.
    pub fn grow(&mut self, bytes: u64) -> Result<()> {
        let all = self.bytes.saturating_add(bytes);
        if all > self.quota.limit {
            return Err(RpcError::limit(self.quota.name, self.quota.limit, all));
        }
        self.resize(all);
        Ok(())
    }

    /// Counts `all` bytes, or waits for the turn to go beyond the quotas. A turn of the inner quota
    /// comes before one of the outer quota, so that no two leases wait for each other.
    fn resize(&mut self, all: u64) {
        self.bytes = all;
        let MemoryQuota { turn, within, .. } = self.quota;
        if !self.own.try_grow(all) {
            if let Some(outer @ StagedShare::Beyond(_)) = &mut self.outer {
                // Nothing is counted in its place before the turn of the inner quota has come.
                *outer = StagedShare::Within(within.as_deref().expect("it has a share there"), 0);
            }
            self.own = StagedShare::Beyond(self.queued.take().unwrap_or_else(|| turn.lock()));
        }
        let (Some(outer), Some(quota)) = (&mut self.outer, within) else { return };
        if outer.try_grow(all) {
            return;
        }
        if matches!(self.own, StagedShare::Within(..)) {
            self.queued.get_or_insert_with(|| turn.lock());
        }
        if !outer.try_grow(all) {
            *outer = StagedShare::Beyond(quota.turn.lock());
        }
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

    /// Quota of another process, which stands in this one, and the changes of the grant.
    #[derive(Debug, Default)]
    struct Other {
        changes: Mutex<Vec<(u64, bool)>>,
        refusal: Mutex<Option<RpcError>>,
    }

    impl GrantingQuota for Arc<Other> {
        fn resize(&self, bytes: u64, lasting: bool) -> Result<()> {
            self.refusal.lock().clone().map_or(Ok(()), Err)?;
            self.changes.lock().push((bytes, lasting));
            Ok(())
        }
    }

    #[test]
    fn a_granted_quota_asks_for_more_in_steps_and_gives_back() {
        let other = Arc::<Other>::default();
        let changes = || std::mem::take(&mut *other.changes.lock());
        let quota = MemoryQuota::granted_by("max_total_queued", other.clone());
        let mut lease = quota.reserve(10).unwrap();
        lease.resize(GRANT_STEP).unwrap();
        assert_eq!(changes(), [(GRANT_STEP, false)], "one message for all of a step");
        let window = quota.reserve_lasting(5).unwrap();
        assert_eq!(changes(), [(2 * GRANT_STEP, true)]);
        *other.refusal.lock() = Some(RpcError::limit("max_total_queued", 7, 8));
        assert!(lease.resize(3 * GRANT_STEP).is_err());
        assert_eq!(quota.used(), GRANT_STEP + 5, "what was not granted is not counted");
        *other.refusal.lock() = None;
        lease.resize(3 * GRANT_STEP).unwrap();
        lease.resize(2 * GRANT_STEP).unwrap();
        assert_eq!(changes(), [(4 * GRANT_STEP, false)], "a step less is kept for the next time");
        drop(lease);
        drop(window);
        assert_eq!(changes(), [(GRANT_STEP, false), (0, false)]);
        assert_eq!(quota.used(), 0);
    }

    #[test]
    fn lasting_bytes_leave_half_of_a_quota_free() {
        let quota = MemoryQuota::new("max_total_queued", 100, None);
        let _window = quota.reserve_lasting(50).unwrap();
        let error = quota.reserve_lasting(1).unwrap_err();
        assert!(error.to_string().contains("half of the limit"), "{error}");
        quota.reserve(50).unwrap();
    }

    #[test]
    fn stagings_go_beyond_a_full_quota_one_at_a_time() {
        let total = MemoryQuota::new("max_total_memory", 100, None);
        let first = MemoryQuota::new("max_queued", 50, Some(total.clone()));
        let second = MemoryQuota::new("max_queued", 50, Some(total.clone()));
        let mut within = first.stage(30).unwrap();
        let held = total.reserve(70).unwrap();
        let beyond = second.stage(40).unwrap();
        assert_eq!((second.used(), total.used()), (40, 100));
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| second.stage(10).map(drop));
            // It counts before it waits, and cannot be done: the turn is taken.
            while second.used() != 50 {
                std::thread::yield_now();
            }
            assert!(total.turn.try_lock().is_none() && !waiter.is_finished());
            drop(beyond);
            waiter.join().unwrap().unwrap();
        });
        assert!(total.turn.try_lock().is_some());
        within.grow(10).unwrap();
        assert!(total.turn.try_lock().is_none(), "70 bytes are held, and 40 do not fit in");
        assert_eq!((first.used(), second.used(), total.used()), (40, 0, 70));
        assert!(within.grow(20).unwrap_err().message().contains("max_queued"));
        assert!(first.turn.try_lock().is_none(), "of each session one at a time waits there");
        // Beyond its own session's limit, too.
        drop((held, within));
        let within = first.stage(40).unwrap();
        let mut other = first.stage(10).unwrap();
        assert!(first.turn.try_lock().is_some());
        other.grow(10).unwrap();
        assert!(first.turn.try_lock().is_none() && first.used() == 40);
        assert_eq!(total.used(), 60, "what is held counts in the outer quota all the time");
        drop((within, other));
        assert_eq!((first.used(), total.used()), (0, 0));
        assert!(first.turn.try_lock().is_some() && total.turn.try_lock().is_some());
    }
}
