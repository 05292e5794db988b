//! A table of the functions of a session by handle, for wrappers of sessions.

use std::collections::HashMap;
use std::fmt;
use std::slice;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::reply::Outcome;
use rpc_core::{Handle, Operation, PipeId, Reference, Value};

/// Maximum number of functions in the table. Further functions are treated as unknown ones.
pub(crate) const MAX_TRACKED: usize = 4096;

/// Table of values for the functions of one session, by handle. The value is `None` while the
/// look-up is in progress of a function that the client has named already.
pub(crate) struct Functions<T>(Mutex<HashMap<Handle, Option<T>>>);

impl<T: Clone> Functions<T> {
    pub(crate) fn get(&self, handle: Handle) -> Option<T> {
        self.lock().get(&handle).cloned().flatten()
    }
}

impl<T> Functions<T> {
    /// Notes that a function is looked up under a handle of the client, which may free it before
    /// the outcome is there.
    pub(crate) fn expect(&self, pipe: Option<PipeId>) {
        let Some(pipe) = pipe else { return };
        let mut functions = self.lock();
        if functions.len() < MAX_TRACKED {
            functions.entry(pipe.handle()).or_insert(None);
        }
    }

    /// Stores the value of `function` if `outcome` is that of a look-up that has found it. `pipe`
    /// is the handle of the client's that was [expected](Self::expect), if it has chosen one.
    pub(crate) fn learn(&self, pipe: Option<PipeId>, outcome: &Outcome, function: impl FnOnce() -> T) {
        match (pipe, outcome) {
            (Some(pipe), Ok(_)) => {
                let function = function();
                if let Some(expected) = self.lock().get_mut(&pipe.handle()) {
                    *expected = Some(function);
                }
            }
            (Some(pipe), Err(_)) => _ = self.lock().remove(&pipe.handle()),
            (None, Ok(Value::Object(Reference::Function(handle)))) => {
                let function = function();
                let mut functions = self.lock();
                if functions.len() < MAX_TRACKED {
                    functions.insert(*handle, Some(function));
                }
            }
            (None, _) => {}
        }
    }

    /// Removes the handles that `operation` frees.
    pub(crate) fn forget(&self, operation: &Operation) {
        let handles = match operation {
            Operation::Free { handle } => slice::from_ref(handle),
            Operation::Release { handles } => handles,
            _ => return,
        };
        let mut functions = self.lock();
        for handle in handles {
            functions.remove(handle);
        }
    }

    /// Returns the number of handles in the table.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Handle, Option<T>>> {
        self.0.lock()
    }
}

impl<T> Default for Functions<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<T> fmt::Debug for Functions<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}
