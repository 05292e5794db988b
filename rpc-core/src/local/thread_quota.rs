//! Thread quota: a limit on the threads of several sessions together.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

/// Limit on the threads of several sessions together.
///
/// The first thread of each session does not count, so that every session can always run one
/// blocking function at a time. While the limit is reached, sessions use the threads that they
/// have, and new ones start as others end. In that state idle threads end at once, and those that
/// were idle before within ten seconds.
#[derive(Debug)]
pub struct ThreadQuota {
    limit: usize,
    state: Mutex<ThreadState>,
}

#[derive(Debug, Default)]
struct ThreadState {
    used: usize,
    /// Sessions that want a thread, each once, in the order in which they asked.
    waiting: VecDeque<Weak<dyn WantsThreads>>,
}

/// A session whose jobs wait for a thread.
pub(super) trait WantsThreads: Send + Sync {
    /// Offers room for a thread. Returns true if the session has taken it.
    fn room_for_thread(self: Arc<Self>) -> bool;
}

impl std::fmt::Debug for dyn WantsThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WantsThreads")
    }
}

impl ThreadQuota {
    /// Creates a quota of `limit` threads, besides one for each session.
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, state: Mutex::default() })
    }

    /// Returns the number of threads that count at present.
    pub fn used(&self) -> usize {
        self.state().used
    }

    pub(super) fn try_reserve(self: &Arc<Self>) -> Option<ThreadLease> {
        self.reserve(&mut self.state())
    }

    /// Reserves a thread, or calls `session` back when there is room for one.
    pub(super) fn reserve_or_wait(
        self: &Arc<Self>,
        session: impl FnOnce() -> Weak<dyn WantsThreads>,
    ) -> Option<ThreadLease> {
        let mut state = self.state();
        let lease = self.reserve(&mut state);
        if lease.is_none() {
            state.waiting.retain(|session| session.strong_count() > 0);
            state.waiting.push_back(session());
        }
        lease
    }

    /// Returns true if sessions wait for threads to end.
    pub(super) fn is_awaited(&self) -> bool {
        !self.state().waiting.is_empty()
    }

    fn reserve(self: &Arc<Self>, state: &mut ThreadState) -> Option<ThreadLease> {
        (state.used < self.limit).then(|| {
            state.used += 1;
            ThreadLease(Some(self.clone()))
        })
    }

    fn state(&self) -> MutexGuard<'_, ThreadState> {
        self.state.lock()
    }
}

/// A counted thread, until dropped. Must not be dropped under a session's lock, because sessions
/// are called.
#[derive(Debug)]
pub(super) struct ThreadLease(Option<Arc<ThreadQuota>>);

impl ThreadLease {
    /// Returns the thread without calling any session: the system has no thread for them either.
    /// They are called for the next one.
    pub(super) fn give_back_quietly(mut self) {
        if let Some(quota) = self.0.take() {
            quota.state().used -= 1;
        }
    }
}

impl Drop for ThreadLease {
    fn drop(&mut self) {
        let Some(quota) = self.0.take() else { return };
        quota.state().used -= 1;
        loop {
            let Some(session) = quota.state().waiting.pop_front() else { return };
            // Outside of the lock. Sessions that are gone or need no thread leave the room to the
            // next.
            if session.upgrade().is_some_and(WantsThreads::room_for_thread) {
                return;
            }
        }
    }
}
