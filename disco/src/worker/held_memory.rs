//! Memory that a worker holds for its controller beside tensors (registers, their values, recorded
//! programs), charged to the session that it belongs to.

use rpc_core::limits::MemoryLease;
use rpc_core::{Context, Result};

/// Bytes by which the charge grows and shrinks. What is held below one step is not charged, so that
/// small sessions cost nothing; it is the most that a worker holds beyond its session's limit.
const STEP: u64 = 64 << 10;

/// Bytes that one worker holds. Dropping this ends the charge.
pub(super) struct HeldMemory {
    context: Context,
    bytes: u64,
    charged: u64,
    lease: Option<MemoryLease>,
}

impl HeldMemory {
    pub(super) fn new(context: Context) -> Self {
        Self { context, bytes: 0, charged: 0, lease: None }
    }

    /// Counts bytes before they are held.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`](rpc_core::ErrorKind::LimitExceeded); then they are not counted.
    pub(super) fn add(&mut self, bytes: usize) -> Result<()> {
        let held = self.bytes.saturating_add(bytes as u64);
        let wanted = held / STEP * STEP;
        if wanted > self.charged {
            match &mut self.lease {
                Some(lease) => lease.resize(wanted)?,
                None => self.lease = Some(self.context.reserve_memory(wanted)?),
            }
            self.charged = wanted;
        }
        self.bytes = held;
        Ok(())
    }

    /// Counts bytes that are held no more.
    pub(super) fn remove(&mut self, bytes: usize) {
        self.bytes = self.bytes.saturating_sub(bytes as u64);
        // A step more is kept, so that a worker at the edge of one does not charge all the time.
        let wanted = (self.bytes / STEP + 1) * STEP;
        if wanted < self.charged
            && let Some(lease) = &mut self.lease
            && lease.resize(wanted).is_ok()
        {
            self.charged = wanted;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use rpc_core::{ErrorKind, LocalSession, Registry, Session, SessionLimits};

    use super::*;

    /// Returns a context of a session that may hold so many bytes.
    pub(crate) fn context(max_memory: u64) -> Context {
        let (registry, taken) = (Registry::new(), Arc::new(Mutex::new(None)));
        let context = Arc::clone(&taken);
        registry.add("context", move |call: Context| *context.lock().unwrap() = Some(call.detached()));
        let limits = SessionLimits { max_memory, ..SessionLimits::default() };
        let session = Session::new(LocalSession::builder(registry).limits(limits).build());
        session.get_function("context").wait().unwrap().call::<()>(()).wait().unwrap();
        taken.lock().unwrap().take().unwrap()
    }

    #[test]
    fn what_is_held_is_charged_in_steps_and_never_beyond_the_limit() {
        let context = context(3 * STEP);
        let mut held = HeldMemory::new(context.clone());
        held.add(STEP as usize - 1).unwrap();
        assert_eq!(context.usage().memory_bytes, 0);
        held.add(2 * STEP as usize).unwrap();
        assert_eq!(context.usage().memory_bytes, 2 * STEP);
        held.add(STEP as usize).unwrap();
        assert_eq!(held.add(2).unwrap_err().kind(), ErrorKind::LimitExceeded);
        held.add(0).unwrap();
        held.remove(4 * STEP as usize - 1);
        assert_eq!(context.usage().memory_bytes, STEP);
        drop(held);
        assert_eq!(context.usage().memory_bytes, 0);
    }
}
