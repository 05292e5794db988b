//! Progress of the loads of a controller, as its workers report it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;

/// Callback that gets the bytes that have come to all workers together, and those that are to come.
type Callback = Box<dyn FnMut(u64, u64) + Send>;

/// Count of the bytes that the workers have loaded, for the callback of a caller.
pub(crate) struct ProgressReporter(Mutex<Progress>);

struct Progress {
    done: u64,
    total: u64,
    callback: Option<Callback>,
}

impl ProgressReporter {
    pub(crate) fn new(callback: Callback) -> Self {
        Self(Mutex::new(Progress { done: 0, total: 0, callback: Some(callback) }))
    }

    /// Adds bytes that are to come.
    pub(crate) fn expect(&self, bytes: u64) {
        self.update(|state| state.total = state.total.saturating_add(bytes));
    }

    /// Takes back bytes that were expected and will not come.
    pub(crate) fn expect_not(&self, bytes: u64) {
        self.update(|state| state.total = state.total.saturating_sub(bytes).max(state.done));
    }

    /// Ends the reports. When this returns, the callback runs no more.
    pub(crate) fn close(&self) {
        self.0.lock().callback = None;
    }

    /// Adds bytes that have come.
    pub(crate) fn add(&self, bytes: u64) {
        // A node cannot report more than was expected.
        self.update(|state| state.done = state.done.saturating_add(bytes).min(state.total));
    }

    fn update(&self, change: impl FnOnce(&mut Progress)) {
        // Held while the callback runs, which is all that the lock is for: it sees the numbers
        // grow, though links have threads of their own.
        let mut state = self.0.lock();
        change(&mut state);
        let Progress { done, total, callback } = &mut *state;
        let told =
            callback.as_mut().map_or(Ok(()), |callback| catch_unwind(AssertUnwindSafe(|| callback(*done, *total))));
        if told.is_err() {
            // The session does not end because a bar cannot be drawn.
            state.callback = None;
            tracing::error!("what shows the progress of a loader panicked, and is called no more");
        }
    }
}

impl fmt::Debug for ProgressReporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ProgressReporter")
    }
}
