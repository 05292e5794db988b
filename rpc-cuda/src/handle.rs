//! Handles of the driver.

/// A handle of the driver: a pointer that only the driver dereferences.
pub(super) struct Handle<T>(pub(super) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: the driver's handles may be used from any thread, and are never dereferenced here.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}
