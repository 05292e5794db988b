//! The trait of a device's memory.

use std::any::Any;
use std::ptr::NonNull;

use crate::error::Result;

/// A piece of a device's memory, freed on drop.
///
/// It does not track its users; [`Storage`](crate::tensor::Storage) does. So reading and writing
/// are unsafe here and safe there.
///
/// # Safety
///
/// `len` and `host` never change. If `host` is a pointer, then `len` is at most `isize::MAX`, and
/// until the memory is dropped the pointer is valid for reads and writes of `len` bytes, all
/// initialised and aligned as requested, and only its users (through this trait, or that pointer)
/// access them. It may be used from any thread.
pub unsafe trait Memory: Send + Sync {
    /// Returns the size in bytes.
    fn len(&self) -> u64;

    /// Returns true if the memory has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the address of the bytes, if the processor can access them.
    fn host(&self) -> Option<NonNull<u8>>;

    /// Returns the address of the bytes on the device, for its own functions and libraries; for
    /// host memory that is [`host`](Self::host). It is valid until the memory is dropped, and never
    /// changes.
    fn device_address(&self) -> Option<NonNull<u8>> {
        self.host()
    }

    /// Writes `data` at `offset`. Returns when `data` is no longer needed and readers will see it.
    ///
    /// # Errors
    ///
    /// The device failed. The range is unspecified then.
    ///
    /// # Safety
    ///
    /// The range lies within the memory, and nothing else accesses it until this returns.
    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()>;

    /// Fills `out` from `offset`.
    ///
    /// # Errors
    ///
    /// The device failed. `out` is unspecified then.
    ///
    /// # Safety
    ///
    /// The range lies within the memory, and nothing writes to it until this returns.
    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()>;

    /// Returns the concrete type, for the device's own functions.
    fn as_any(&self) -> &dyn Any;
}
