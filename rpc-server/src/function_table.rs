//! A table of the functions of a session by handle, for wrappers of sessions.

use std::collections::HashMap;
use std::fmt;
use std::slice;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::reply::Outcome;
use rpc_core::{Handle, Operation, Reference, Value};

/// Maximum number of functions in the table. Further functions are treated as unknown ones.
pub(crate) const MAX_TRACKED: usize = 4096;

/// Table of values for the functions of one session, by handle.
pub(crate) struct Functions<T>(Mutex<HashMap<Handle, T>>);

impl<T: Clone> Functions<T> {
    pub(crate) fn get(&self, handle: Handle) -> Option<T> {
        self.lock().get(&handle).cloned()
    }
}

impl<T> Functions<T> {
    /// Stores the value of `function` if `outcome` is a function.
    pub(crate) fn learn(&self, outcome: &Outcome, function: impl FnOnce() -> T) {
        if let Ok(Value::Object(Reference::Function(handle))) = outcome {
            let function = function();
            let mut functions = self.lock();
            if functions.len() < MAX_TRACKED {
                functions.insert(*handle, function);
            }
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

    fn lock(&self) -> MutexGuard<'_, HashMap<Handle, T>> {
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
