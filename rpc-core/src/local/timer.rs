//! Deadlines of local requests: one thread for the whole process, started by the first deadline.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

type Action = Box<dyn FnOnce() + Send>;

struct Entry {
    at: Instant,
    /// Keeps entries of one instant in order, and the heap's order total.
    sequence: u64,
    action: Action,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.sequence) == (other.at, other.sequence)
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
        (self.at, self.sequence).cmp(&(other.at, other.sequence))
    }
}

#[derive(Default)]
struct Timer {
    entries: Mutex<(BinaryHeap<Reverse<Entry>>, u64)>,
    changed: Condvar,
}

impl Timer {
    fn entries(&self) -> MutexGuard<'_, (BinaryHeap<Reverse<Entry>>, u64)> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut entries = self.entries();
        loop {
            let now = Instant::now();
            match entries.0.peek() {
                Some(Reverse(entry)) if entry.at <= now => {
                    let Some(Reverse(entry)) = entries.0.pop() else { continue };
                    drop(entries);
                    (entry.action)();
                    entries = self.entries();
                }
                Some(Reverse(entry)) => {
                    let wait = entry.at - now;
                    entries = self.changed.wait_timeout(entries, wait).unwrap_or_else(PoisonError::into_inner).0;
                }
                None => entries = self.changed.wait(entries).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// Calls `action` at `at`, on the timer's thread. It must not block. There is no cancelling: an action finds out for
/// itself that it is no longer needed, and holds nothing heavy.
pub(super) fn call_at(at: Instant, action: impl FnOnce() + Send + 'static) {
    static TIMER: OnceLock<&'static Timer> = OnceLock::new();
    let timer = *TIMER.get_or_init(|| {
        let timer: &'static Timer = Box::leak(Box::default());
        let spawned = std::thread::Builder::new().name("rpc-deadlines".into()).spawn(|| timer.run());
        if let Err(error) = spawned {
            tracing::error!(%error, "cannot start the thread that watches deadlines: local deadlines will not fire");
        }
        timer
    });
    let mut entries = timer.entries();
    entries.1 += 1;
    let sequence = entries.1;
    entries.0.push(Reverse(Entry { at, sequence, action: Box::new(action) }));
    drop(entries);
    timer.changed.notify_one();
}
