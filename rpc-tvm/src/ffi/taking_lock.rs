//! Lock under which tensors are taken over from foreign code, so that none is taken over twice. No
//! foreign code runs under it.

use std::cell::Cell;

use parking_lot::{Mutex, MutexGuard};

/// Lock under which tensors are taken over from foreign code.
pub(super) struct TakingGuard(#[expect(dead_code, reason = "held")] MutexGuard<'static, ()>);

thread_local! {
    /// True while this thread has the lock.
    static TAKING: Cell<bool> = const { Cell::new(false) };
}

impl TakingGuard {
    /// Waits for the lock.
    pub(super) fn lock() -> Self {
        static LOCK: Mutex<()> = Mutex::new(());
        let guard = LOCK.lock();
        TAKING.set(true);
        Self(guard)
    }

    /// Returns true if this thread has the lock, and so must not free what is foreign.
    pub(super) fn is_held() -> bool {
        TAKING.get()
    }
}

impl Drop for TakingGuard {
    fn drop(&mut self) {
        TAKING.set(false);
    }
}
