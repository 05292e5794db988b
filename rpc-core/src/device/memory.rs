//! The trait of a device's memory, and its mapping for the processor.

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::error::{ErrorKind, Result, RpcError};

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

    /// Lets the processor access `len` bytes from `offset`, until the mapping ends. Waits for the
    /// work that was submitted with the memory before; later work comes behind the end of the
    /// mapping.
    ///
    /// By default the bytes are host memory itself, or else a copy, which goes back to the device
    /// when a mapping for writing ends.
    ///
    /// # Errors
    ///
    /// The device failed, or there is no memory for the copy.
    ///
    /// # Safety
    ///
    /// The range lies within the memory. Until the mapping ends, nothing else writes to it, and,
    /// if it is mapped for writing, nothing else accesses it.
    unsafe fn map(&self, offset: u64, len: usize, access: HostAccess) -> Result<Mapping<'_>> {
        if let Some(start) = self.host() {
            // SAFETY: `host` is valid for the whole memory, and the caller keeps others from the
            // range.
            return Ok(unsafe { Mapping::new(start.add(offset as usize), len, access, || Ok(())) });
        }
        let mut copy = Vec::new();
        let no_room = |_| RpcError::new(ErrorKind::OutOfMemory, format!("no {len} bytes to map memory of a device"));
        copy.try_reserve_exact(len).map_err(no_room)?;
        copy.resize(len, 0);
        // SAFETY: the caller's promises are the same.
        unsafe { self.copy_to_host(offset, &mut copy)? };
        let start = NonNull::new(copy.as_mut_ptr()).unwrap_or(NonNull::dangling());
        let end = move || match access {
            HostAccess::Read => Ok(()),
            // SAFETY: as above.
            HostAccess::Write => unsafe { self.copy_from_host(offset, &copy) },
        };
        // SAFETY: the bytes are the vector's, which `end` owns and nothing else accesses.
        Ok(unsafe { Mapping::new(start, len, access, end) })
    }

    /// Returns the concrete type, for the device's own functions.
    fn as_any(&self) -> &dyn Any;
}

/// Use that the processor makes of [mapped](Memory::map) memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAccess {
    /// It only reads.
    Read,
    /// It reads and writes.
    Write,
}

/// Bytes of a device that the processor may access. Dropped, it ends, and an error of that is only
/// logged.
pub struct Mapping<'m> {
    start: NonNull<u8>,
    len: usize,
    access: HostAccess,
    /// `None` once the mapping has ended.
    end: Option<Box<dyn FnOnce() -> Result<()> + Send + 'm>>,
    memory: PhantomData<&'m mut [u8]>,
}

impl<'m> Mapping<'m> {
    /// Creates a mapping of the `len` bytes at `start`. `end` is called once, when it has ended.
    ///
    /// # Safety
    ///
    /// Until `end` is called the bytes are initialised and valid for reads, and, if they were
    /// mapped for writing, for writes, from any thread; nothing else accesses them in the ways that
    /// [`Memory::map`] excludes.
    pub unsafe fn new(
        start: NonNull<u8>,
        len: usize,
        access: HostAccess,
        end: impl FnOnce() -> Result<()> + Send + 'm,
    ) -> Self {
        Self { start, len, access, end: Some(Box::new(end)), memory: PhantomData }
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: callers of `new` promise it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the bytes, to write to them, if they were mapped for that.
    pub fn bytes_mut(&mut self) -> Option<&mut [u8]> {
        // SAFETY: callers of `new` promise it, and nothing else accesses bytes that are mapped for
        // writing.
        (self.access == HostAccess::Write)
            .then(|| unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) })
    }

    /// Ends the mapping: the device sees what was written.
    ///
    /// # Errors
    ///
    /// The device failed. What was written may be lost then.
    pub fn end(mut self) -> Result<()> {
        self.end.take().map_or(Ok(()), |end| end())
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take()
            && let Err(error) = end()
        {
            crate::log_limited!(WARN, %error, "what was written to mapped memory may be lost");
        }
    }
}

// SAFETY: callers of `new` promise that the bytes may be used from any thread, and `end` is `Send`.
unsafe impl Send for Mapping<'_> {}

impl fmt::Debug for Mapping<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mapping").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}
