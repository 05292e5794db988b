//! Thread quota: a limit on the threads of several sessions together.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use super::sync::{Mutex, MutexGuard};

/// Number of waiting sessions up to which those that are gone are not searched for.
pub(super) const FEW_WAITING: usize = 64;

/// Limit on the threads of several sessions together.
///
/// The first thread of each session does not count, so that every session can always run one
/// blocking function at a time. While the limit is reached, sessions use the threads that they
/// have. A counted thread that ends hands its permit to the session that has waited for longest;
/// no session that asks later can take it in between. In that state idle threads end at once, and
/// those that were idle before within ten seconds.
#[derive(Debug)]
pub struct ThreadQuota {
    limit: usize,
    state: Mutex<ThreadState>,
}

#[derive(Debug)]
struct ThreadState {
    /// Permits that exist, including one that is being handed over.
    used: usize,
    /// Sessions that want a thread, each once, in the order in which they asked. Some may be gone.
    /// Empty as long as a permit is left.
    waiting: VecDeque<Weak<dyn WantsThreads>>,
    /// Length of `waiting` at which sessions that are gone are removed from it. It is at least
    /// twice what the last removal left, so that asking takes constant time on average.
    clean_at: usize,
}

/// A session whose jobs wait for a thread.
pub(super) trait WantsThreads: Send + Sync {
    /// Takes a permit for one more thread, or returns it if the session needs none. No lock of the
    /// quota is held.
    fn take_thread(self: Arc<Self>, lease: ThreadLease) -> Option<ThreadLease>;
}

impl std::fmt::Debug for dyn WantsThreads {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WantsThreads")
    }
}

impl ThreadQuota {
    /// Creates a quota of `limit` threads, besides one for each session.
    pub fn new(limit: usize) -> Arc<Self> {
        let state = ThreadState { used: 0, waiting: VecDeque::new(), clean_at: FEW_WAITING };
        Arc::new(Self { limit, state: Mutex::new(state) })
    }

    /// Returns the number of threads that count at present.
    pub fn used(&self) -> usize {
        self.state().used
    }

    pub(super) fn try_reserve(self: &Arc<Self>) -> Option<ThreadLease> {
        self.reserve(&mut self.state())
    }

    /// Reserves a thread. If none is left, `session` is given one later, in its turn.
    pub(super) fn reserve_or_wait(
        self: &Arc<Self>,
        session: impl FnOnce() -> Weak<dyn WantsThreads>,
    ) -> Option<ThreadLease> {
        let mut state = self.state();
        let lease = self.reserve(&mut state);
        if lease.is_none() {
            if state.waiting.len() >= state.clean_at {
                state.waiting.retain(|session| session.strong_count() > 0);
                state.clean_at = FEW_WAITING.max(2 * state.waiting.len());
            }
            state.waiting.push_back(session());
        }
        lease
    }

    /// Returns true if sessions wait for threads to end.
    pub(super) fn is_awaited(&self) -> bool {
        !self.state().waiting.is_empty()
    }

    /// Returns the length of the queue, with the sessions that are gone.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.state().waiting.len()
    }

    fn reserve(self: &Arc<Self>, state: &mut ThreadState) -> Option<ThreadLease> {
        (state.used < self.limit).then(|| {
            state.used += 1;
            ThreadLease(Some(self.clone()))
        })
    }

    /// Removes the session whose turn it is, which the caller's permit now belongs to. If no
    /// session waits, the permit ends.
    fn next_waiting_or_end(&self) -> Option<Arc<dyn WantsThreads>> {
        let mut state = self.state();
        while let Some(session) = state.waiting.pop_front() {
            if let Some(session) = session.upgrade() {
                return Some(session);
            }
        }
        state.used -= 1;
        None
    }

    fn state(&self) -> MutexGuard<'_, ThreadState> {
        self.state.lock()
    }
}

/// A counted thread, until dropped. Must not be dropped under a session's lock, because sessions
/// are called.
#[derive(Debug)]
pub(super) struct ThreadLease(Option<Arc<ThreadQuota>>);

impl Drop for ThreadLease {
    /// Hands the permit to the next session that waits.
    ///
    /// The permit counts until a session has taken it or none waits, so that a session that asks
    /// meanwhile queues behind. Each round removes one session from the queue. A session that
    /// returns the permit does not queue again by itself, so that the loop ends.
    fn drop(&mut self) {
        let Some(quota) = self.0.take() else { return };
        while let Some(session) = quota.next_waiting_or_end() {
            match session.take_thread(Self(Some(quota.clone()))) {
                // The loop hands it on: without nesting, however many sessions need none.
                Some(mut returned) => drop(returned.0.take()),
                None => return,
            }
        }
    }
}
