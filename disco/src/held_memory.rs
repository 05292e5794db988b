//! Memory that a node holds for its controller beside tensors (registers, their values, recorded
//! programs, events), charged to the session that it belongs to.

use rpc_core::limits::MemoryLease;
use rpc_core::{Context, Result};

/// Bytes by which the charge grows and shrinks. What is held below one step is not charged, so that
/// small sessions cost nothing; it is the most that each holder keeps beyond its session's limit.
pub(crate) const STEP: u64 = 64 << 10;

/// Bytes that one holder keeps. Dropping this ends the charge.
pub(crate) struct HeldMemory {
    context: Context,
    bytes: u64,
    charged: u64,
    lease: Option<MemoryLease>,
}

impl HeldMemory {
    pub(crate) fn new(context: Context) -> Self {
        Self { context, bytes: 0, charged: 0, lease: None }
    }

    /// Counts this many bytes, in place of those that were counted before.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded); then the count stays.
    pub(crate) fn resize(&mut self, bytes: u64) -> Result<()> {
        let least = bytes / STEP * STEP;
        // While something is held a step more is kept, so that a holder at the edge of one does not
        // charge all the time.
        let most = if bytes == 0 { 0 } else { least + STEP };
        if self.charged < least {
            match &mut self.lease {
                Some(lease) => lease.resize(least)?,
                None => self.lease = Some(self.context.reserve_memory(least)?),
            }
            self.charged = least;
        } else if self.charged > most
            && let Some(lease) = &mut self.lease
            && lease.resize(most).is_ok()
        {
            self.charged = most;
        }
        self.bytes = bytes;
        Ok(())
    }

    /// Counts bytes before they are held.
    ///
    /// # Errors
    ///
    /// As [`resize`](Self::resize).
    pub(crate) fn add(&mut self, bytes: usize) -> Result<()> {
        self.resize(self.bytes.saturating_add(bytes as u64))
    }

    /// Counts bytes that are held no more.
    pub(crate) fn remove(&mut self, bytes: usize) {
        let left = self.bytes.saturating_sub(bytes as u64);
        // Fewer bytes never need a larger charge.
        _ = self.resize(left);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use rpc_core::{ErrorKind, LocalSession, LocalSessionBuilder, Registry, Session, SessionLimits};

    use super::*;

    /// Returns a context of a session that may hold so many bytes.
    pub(crate) fn context(max_memory: u64) -> Context {
        limited(SessionLimits { max_memory, ..SessionLimits::default() })
    }

    /// Returns a context of a session with these limits.
    pub(crate) fn limited(limits: SessionLimits) -> Context {
        context_of(|session| session.limits(limits))
    }

    /// Returns a context of a session that is built so.
    pub(crate) fn context_of(build: impl FnOnce(LocalSessionBuilder) -> LocalSessionBuilder) -> Context {
        let (registry, taken) = (Registry::new(), Arc::new(Mutex::new(None)));
        let context = Arc::clone(&taken);
        registry.add("context", move |call: Context| *context.lock().unwrap() = Some(call.detached()));
        let session = Session::new(build(LocalSession::builder(registry)).build());
        session.get_function("context").wait().unwrap().call::<()>(()).wait().unwrap();
        taken.lock().unwrap().take().unwrap()
    }

    #[test]
    fn held_bytes_are_charged_in_steps_and_never_beyond_the_limit() {
        let context = context(3 * STEP);
        let charged = || context.usage().memory_bytes;
        let mut held = HeldMemory::new(context.clone());
        held.add(STEP as usize - 1).unwrap();
        assert_eq!(charged(), 0);
        held.add(2 * STEP as usize).unwrap();
        assert_eq!(charged(), 2 * STEP);
        held.add(STEP as usize).unwrap();
        assert_eq!(held.add(2).unwrap_err().kind(), ErrorKind::LimitExceeded);
        held.add(0).unwrap();
        held.remove(4 * STEP as usize - 2);
        assert_eq!(charged(), STEP, "a step more is kept while a byte is held");
        held.remove(1);
        assert_eq!(charged(), 0);
        held.resize(2 * STEP).unwrap();
        drop(held);
        assert_eq!(charged(), 0);
    }
}
