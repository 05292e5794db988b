//! Progress of loading: the count of bytes that workers report, and the caller's callback for it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parking_lot::Mutex;

/// Callback of the caller, with the bytes that all workers together have loaded, and the bytes that
/// are expected.
type Callback = Box<dyn FnMut(u64, u64) + Send>;

/// Count of the bytes that the workers have loaded and are expected to load, and the callback for
/// it.
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

    /// Adds bytes that are expected.
    pub(crate) fn expect(&self, bytes: u64) {
        self.update(|state| state.total = state.total.saturating_add(bytes));
    }

    /// Subtracts bytes that were expected and will not be loaded.
    pub(crate) fn expect_not(&self, bytes: u64) {
        self.update(|state| state.total = state.total.saturating_sub(bytes).max(state.done));
    }

    /// Removes the callback. It does not run any more when this returns.
    pub(crate) fn close(&self) {
        self.0.lock().callback = None;
    }

    /// Adds bytes that have been loaded.
    pub(crate) fn add(&self, bytes: u64) {
        // A node cannot report more than was expected.
        self.update(|state| state.done = state.done.saturating_add(bytes).min(state.total));
    }

    fn update(&self, change: impl FnOnce(&mut Progress)) {
        // The lock is held while the callback runs, so that it never sees the numbers fall: reports
        // of several links arrive on several threads.
        let mut state = self.0.lock();
        change(&mut state);
        let Progress { done, total, callback } = &mut *state;
        let told =
            callback.as_mut().map_or(Ok(()), |callback| catch_unwind(AssertUnwindSafe(|| callback(*done, *total))));
        if told.is_err() {
            // A panic of the callback must not end the session.
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
