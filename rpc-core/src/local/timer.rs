//! Deadlines of local requests. Each session keeps its own; one thread for the whole process, started by the first
//! deadline, knows of each session when to look at them next.
//!
//! A deadline costs a push into the session's heap. Nobody is told when a request completes in time: the entry is dropped
//! when it comes to the top, or when the entries have become twice as many as the requests that they are for.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use crate::reply::{Responder, WeakResponder};

/// A session with deadlines.
pub(super) trait Expire: Send + Sync {
    /// Looks at the deadlines, on the timer's thread. Must not block.
    fn expire(self: Arc<Self>);
}

/// The deadlines of one session.
pub(super) struct Deadlines {
    /// The earliest on top. Entries of requests that are complete are dropped some time.
    entries: BinaryHeap<Reverse<Entry>>,
    /// How many entries are worth looking through for requests that are complete.
    compact_at: usize,
    /// What tells the session from others at the timer.
    session: u64,
    /// When the timer will call. Never later than the first entry.
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

    /// Watches the deadline of a request. `session` is asked for only if it has to be called earlier than it knows.
    pub(super) fn watch(&mut self, at: Instant, responder: &Responder, session: impl FnOnce() -> Weak<dyn Expire>) {
        if self.entries.len() >= self.compact_at {
            self.compact();
        }
        self.entries.push(Reverse(Entry { at, responder: responder.downgrade() }));
        if self.alarm.is_none_or(|alarm| at < alarm) {
            TIMER.set(self.session, self.alarm.replace(at), Some((at, session())));
        }
    }

    /// Takes the requests whose deadline has passed, and sees to it that the timer calls for the next one.
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

    /// Drops the entries of requests that are complete.
    pub(super) fn compact(&mut self) {
        self.entries.retain(|Reverse(entry)| entry.responder.is_pending());
        self.compact_at = SPARE_ENTRIES + 2 * self.entries.len();
        self.entries.shrink_to(self.compact_at);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What finds the session's calls at the timer.
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

/// So few entries are not worth looking through.
const SPARE_ENTRIES: usize = 64;

static TIMER: Timer =
    Timer { state: Mutex::new(State { calls: BTreeMap::new(), running: false }), changed: Condvar::new() };

struct Timer {
    /// Taken inside of sessions' locks, and holds none while it calls them.
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// One entry for each session that has deadlines: when to call it, and which it is.
    calls: BTreeMap<(Instant, u64), Weak<dyn Expire>>,
    /// Whether there is a thread.
    running: bool,
}

impl Timer {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls a session at `next` instead of at `old`.
    fn set(&'static self, session: u64, old: Option<Instant>, next: Option<(Instant, Weak<dyn Expire>)>) {
        let mut state = self.state();
        let removed = old.and_then(|old| state.calls.remove(&(old, session)));
        let mut earlier = false;
        if let Some((at, called)) = next {
            state.calls.insert((at, session), called);
            // The thread sleeps until the first call that it knows of. To sleep too short does no harm.
            earlier = state.calls.first_key_value().is_some_and(|(first, _)| *first == (at, session));
            if !state.running {
                let spawned = std::thread::Builder::new().name("rpc-deadlines".into()).spawn(|| self.run());
                match spawned {
                    Ok(_) => state.running = true,
                    Err(error) => {
                        tracing::error!(%error, "no thread to watch deadlines: they do not fire until a later call with one gets it")
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
            let now = Instant::now();
            match state.calls.first_entry() {
                Some(first) if first.key().0 <= now => {
                    let session = first.remove();
                    drop(state);
                    // Whoever waits for a reply is told right here, and one that panics must not stop the clock.
                    if catch_unwind(AssertUnwindSafe(|| session.upgrade().map(Expire::expire))).is_err() {
                        tracing::error!("somebody panicked when told that a deadline has passed");
                    }
                    state = self.state();
                }
                Some(first) => {
                    let wait = first.key().0 - now;
                    state = self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0;
                }
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// How many calls the timer has noted for a session.
#[cfg(test)]
pub(super) fn calls(session: u64) -> usize {
    TIMER.state().calls.keys().filter(|(_, of)| *of == session).count()
}
