//! Deadlines of local requests. Each session keeps its own. One thread for the whole process,
//! started by the first deadline, knows the time at which each session must check its deadlines
//! next.
//!
//! A deadline costs a push into the session's heap. A request that completes in time does nothing:
//! its entry is dropped when it comes to the top, or when there are twice as many entries as
//! pending requests.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::reply::{Responder, WeakResponder};

/// A session with deadlines.
pub(super) trait Expire: Send + Sync {
    /// Checks the deadlines, on the timer's thread. Must not block.
    fn expire(self: Arc<Self>);
}

/// The deadlines of one session.
pub(super) struct Deadlines {
    /// Entries, the earliest on top. Entries of completed requests are dropped later.
    entries: BinaryHeap<Reverse<Entry>>,
    /// Number of entries from which it is worth removing those of completed requests.
    compact_at: usize,
    /// Id of the session in the timer.
    session: u64,
    /// Time at which the timer will call. Never later than the first entry.
    alarm: Option<Instant>,
}

struct Entry {
    at: Instant,
    responder: WeakResponder,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

impl Deadlines {
    pub(super) fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self {
            entries: BinaryHeap::new(),
            compact_at: SPARE_ENTRIES,
            session: NEXT.fetch_add(1, Ordering::Relaxed),
            alarm: None,
        }
    }

    /// Watches the deadline of a request. `session` is called only if the timer must call earlier
    /// than it knows.
    pub(super) fn watch(&mut self, at: Instant, responder: &Responder, session: impl FnOnce() -> Weak<dyn Expire>) {
        if self.entries.len() >= self.compact_at {
            self.compact();
        }
        self.entries.push(Reverse(Entry { at, responder: responder.downgrade() }));
        if self.alarm.is_none_or(|alarm| at < alarm) {
            TIMER.set(self.session, self.alarm.replace(at), Some((at, session())));
        }
    }

    /// Takes the requests whose deadline has passed, and sets the timer for the next one.
    pub(super) fn take_due(&mut self, now: Instant, session: impl FnOnce() -> Weak<dyn Expire>) -> Vec<Responder> {
        let mut due = Vec::new();
        while let Some(Reverse(entry)) = self.entries.peek() {
            if entry.at <= now {
                due.extend(entry.responder.upgrade());
            } else if entry.responder.is_pending() {
                break;
            }
            self.entries.pop();
        }
        let next = self.entries.peek().map(|Reverse(entry)| entry.at);
        TIMER.set(self.session, self.alarm, next.map(|at| (at, session())));
        self.alarm = next;
        due
    }

    /// Drops the entries of completed requests.
    pub(super) fn compact(&mut self) {
        self.entries.retain(|Reverse(entry)| entry.responder.is_pending());
        self.compact_at = SPARE_ENTRIES + 2 * self.entries.len();
        self.entries.shrink_to(self.compact_at);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns the id of the session in the timer.
    #[cfg(test)]
    pub(super) fn session(&self) -> u64 {
        self.session
    }
}

impl Drop for Deadlines {
    fn drop(&mut self) {
        if self.alarm.is_some() {
            TIMER.set(self.session, self.alarm, None);
        }
    }
}

/// Number of entries below which none are removed early.
const SPARE_ENTRIES: usize = 64;

static TIMER: Timer =
    Timer { state: Mutex::new(TimerState { calls: BTreeMap::new(), running: false }), changed: Condvar::new() };

struct Timer {
    /// Locked inside of sessions' locks; released while sessions are called.
    state: Mutex<TimerState>,
    changed: Condvar,
}

struct TimerState {
    /// Next call of each session with deadlines, by time and session id.
    calls: BTreeMap<(Instant, u64), Weak<dyn Expire>>,
    /// True while the timer's thread runs.
    running: bool,
}

impl Timer {
    fn state(&self) -> MutexGuard<'_, TimerState> {
        self.state.lock()
    }

    /// Calls a session at `next` instead of at `old`.
    fn set(&'static self, session: u64, old: Option<Instant>, next: Option<(Instant, Weak<dyn Expire>)>) {
        let mut state = self.state();
        let removed = old.and_then(|old| state.calls.remove(&(old, session)));
        let mut earlier = false;
        if let Some((at, called)) = next {
            state.calls.insert((at, session), called);
            // The thread sleeps until the first call that it knows of. Waking too early does no
            // harm.
            earlier = state.calls.first_key_value().is_some_and(|(first, _)| *first == (at, session));
            if !state.running {
                let spawned = std::thread::Builder::new().name("rpc-deadlines".into()).spawn(|| self.run());
                match spawned {
                    Ok(_) => state.running = true,
                    Err(error) => {
                        crate::log_limited!(
                            ERROR,
                            %error,
                            "cannot start the deadline thread: deadlines do not fire until a later call starts it"
                        )
                    }
                }
            }
        }
        drop(state);
        drop(removed);
        if earlier {
            self.changed.notify_one();
        }
    }

    fn run(&self) {
        let mut state = self.state();
        loop {
            let now = crate::clock::now();
            match state.calls.first_entry() {
                Some(first) if first.key().0 <= now => {
                    let session = first.remove();
                    drop(state);
                    // Callers are woken on this thread, and a panic in one of them must not stop
                    // the timer.
                    if catch_unwind(AssertUnwindSafe(|| session.upgrade().map(Expire::expire))).is_err() {
                        crate::log_limited!(ERROR, "a session panicked while it handled a deadline");
                    }
                    state = self.state();
                }
                Some(first) => {
                    let wait = first.key().0 - now;
                    self.changed.wait_for(&mut state, wait);
                }
                None => self.changed.wait(&mut state),
            }
        }
    }
}

/// Returns the number of calls that the timer has recorded for a session.
#[cfg(test)]
pub(super) fn calls(session: u64) -> usize {
    TIMER.state().calls.keys().filter(|(_, of)| *of == session).count()
}
