//! Time limits of the steps of a session, for any driver: it tells the time that has passed.

use std::collections::BTreeSet;
use std::future;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Waits for times to come.
#[derive(Default)]
pub(super) struct Timer {
    state: Mutex<TimerState>,
    /// Wakes the driver: there may be an earlier time to wait for.
    earlier: Notify,
    /// Wakes the waits: time has passed.
    passed: Notify,
}

#[derive(Default)]
struct TimerState {
    /// Times that are waited for, each with a number of its own.
    waits: BTreeSet<(Instant, u64)>,
    next_number: u64,
}

impl Timer {
    /// Waits for this long.
    pub(super) async fn sleep(&self, limit: Duration) {
        let Some(until) = Instant::now().checked_add(limit) else { return future::pending().await };
        let wait = self.begin(until);
        self.earlier.notify_one();
        loop {
            let passed = self.passed.notified();
            if wait.is_over() {
                return;
            }
            passed.await;
        }
    }

    /// Returns the earliest time that is waited for.
    pub(super) fn next(&self) -> Option<Instant> {
        self.state.lock().waits.first().map(|(until, _)| *until)
    }

    /// Ends the waits for times up to `now`.
    pub(super) fn pass(&self, now: Instant) {
        let mut state = self.state.lock();
        while state.waits.first().is_some_and(|(until, _)| *until <= now) {
            state.waits.pop_first();
        }
        drop(state);
        self.passed.notify_waiters();
    }

    /// Wakes the driver, which has an earlier time to wait for.
    pub(super) fn notify(&self) {
        self.earlier.notify_one();
    }

    /// Resolves when there may be an earlier time to wait for.
    pub(super) fn earlier(&self) -> Notified<'_> {
        self.earlier.notified()
    }

    fn begin(&self, until: Instant) -> Wait<'_> {
        let mut state = self.state.lock();
        let number = state.next_number;
        state.next_number += 1;
        state.waits.insert((until, number));
        drop(state);
        Wait { timer: self, entry: (until, number) }
    }
}

/// A wait that ends with its drop.
struct Wait<'a> {
    timer: &'a Timer,
    entry: (Instant, u64),
}

impl Wait<'_> {
    fn is_over(&self) -> bool {
        !self.timer.state.lock().waits.contains(&self.entry)
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.timer.state.lock().waits.remove(&self.entry);
    }
}
