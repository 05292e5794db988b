//! The traits of devices and of their streams: [`DeviceApi`] and [`Stream`].

use std::any::Any;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use super::attribute::DeviceAttribute;
use super::copy::copy_by_host;
use super::memory::Memory;
use super::state::DeviceState;
use crate::dlpack::{Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::value::Value;

/// Properties of an allocation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AllocRequest<'a> {
    /// Size in bytes; zero is allowed.
    pub size: u64,
    /// Alignment in bytes, a power of two; zero leaves it to the device. The device may align more
    /// strictly.
    pub alignment: u64,
    /// Memory scope of the device; `None` and `"global"` are its ordinary memory.
    pub scope: Option<&'a str>,
}

impl AllocRequest<'_> {
    /// Returns a request for `size` bytes of ordinary memory with the device's default alignment.
    pub const fn new(size: u64) -> Self {
        Self { size, alignment: 0, scope: None }
    }
}

/// Interface to all devices of one kind.
///
/// A session calls it from any thread, and from several at once. Every call may block for as long
/// as the device takes, so it is never made on a thread that reads frames. An index out of range is
/// [`ErrorKind::DeviceUnavailable`], except for [`DeviceAttribute::Exists`]. A failure after which
/// the device cannot be used is [`ErrorKind::DeviceLost`].
///
/// There is no `free`: memory is freed when its [`Memory`] is dropped, after all work of streams
/// that uses it.
pub trait DeviceApi: Send + Sync {
    /// Returns the device kind; always the same.
    fn kind(&self) -> DeviceType;

    /// Returns the number of devices; their indices are `0..count`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`] if the kind cannot be used here; the message gives the
    /// reason.
    fn count(&self) -> Result<i32>;

    /// Returns the value of `attribute`, of its documented type, or null if the device does not
    /// have it. The value contains no objects. [`DeviceAttribute::Exists`] of an index out of range
    /// is false, not an error.
    ///
    /// # Errors
    ///
    /// The index is out of range, for any other attribute.
    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value>;

    /// Returns the present state of the device, without using it. May take a second. By default
    /// nothing is known.
    fn state(&self, index: i32) -> DeviceState {
        let _ = index;
        DeviceState::default()
    }

    /// Allocates memory that reads as zeros.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], for every size that is too large; [`ErrorKind::InvalidArgument`]
    /// for an alignment that is not a power of two or too large; [`ErrorKind::Unsupported`] for a
    /// scope that the device lacks.
    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>>;

    /// Creates a stream, whose work has an order of its own.
    ///
    /// # Errors
    ///
    /// The device has no more streams, or is lost.
    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>>;

    /// Returns the stream for work that names none; the same one at each call.
    ///
    /// # Errors
    ///
    /// The device is lost.
    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>>;

    /// Wraps memory of the device `index` that other code has allocated: the `len` bytes at
    /// `address`, which live until `owner` is dropped. `owner` is dropped after the returned
    /// memory, behind all work that was submitted to the device by then.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unsupported`], which is the default.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped the bytes can be read and written by the device, and, if they are
    /// host memory, from any thread. They are initialised, at most `isize::MAX`, and accessed only
    /// under a borrow.
    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        let _ = (address, len, owner);
        let device = Device::new(self.kind(), index);
        Err(RpcError::unsupported(format!("{device} cannot use memory that it has not allocated")))
    }

    /// Copies `len` bytes between two memories of this kind, or between one of this kind and host
    /// memory, behind all work that was submitted to the default stream. Returns when the bytes are
    /// there, or when every later use of either memory, and its release, comes behind the copy.
    /// Within one memory the ranges may overlap; the destination then holds the source's former
    /// content.
    ///
    /// [`Borrow::copy_from`](crate::tensor::Borrow::copy_from) is the safe way to call it.
    ///
    /// # Errors
    ///
    /// The device failed. The destination is unspecified then.
    ///
    /// # Safety
    ///
    /// Both ranges lie within their memories. Until this returns, nothing else writes to the source
    /// or accesses the destination.
    unsafe fn copy(
        &self,
        from: &dyn Memory,
        from_offset: u64,
        to: &dyn Memory,
        to_offset: u64,
        len: u64,
    ) -> Result<()> {
        // SAFETY: the caller's promises are the same.
        unsafe { copy_by_host(from, from_offset, to, to_offset, len) }
    }
}

/// Callback that is called once with the result of a [stream's](Stream::when_done) work. It must
/// not block or panic.
pub type WhenDone = Box<dyn FnOnce(Result<()>) + Send>;

/// Queue of work on one device: submitted work runs in order, at some later time.
pub trait Stream: Send + Sync {
    /// Returns the device of the stream.
    fn device(&self) -> Device;

    /// Waits until all work submitted so far is done.
    ///
    /// # Errors
    ///
    /// The error of that work, or [`ErrorKind::DeviceLost`].
    fn synchronize(&self) -> Result<()>;

    /// Calls `done` when all work submitted so far is done, with the result that
    /// [`synchronize`](Self::synchronize) would return, without occupying a thread until then.
    /// `done` may be called before this returns, and otherwise on a thread that the device needs
    /// for other callbacks, too.
    ///
    /// # Errors
    ///
    /// `done` itself, uncalled, if the device does not support this, which is the default. Use
    /// `synchronize` then.
    fn when_done(&self, done: WhenDone) -> Result<(), WhenDone> {
        Err(done)
    }

    /// Lets work submitted to this stream from now on begin after the work submitted to `other` so
    /// far. It may block until then, if the device has no better way. `other` may belong to another
    /// device.
    ///
    /// # Errors
    ///
    /// Either device is lost.
    fn wait_for(&self, other: &dyn Stream) -> Result<()>;

    /// Returns the stream's handle for the device's libraries, such as a `CUstream`, and makes its
    /// device the calling thread's current one, if there is such a notion. The handle is valid
    /// until the stream is dropped. `None`, the default, if work on the device needs no stream.
    ///
    /// # Errors
    ///
    /// The device is lost.
    fn library_handle(&self) -> Result<Option<NonNull<c_void>>> {
        Ok(None)
    }

    /// Begins to measure the time for which the device runs kernels that are submitted to this
    /// stream. `None`, the default, if the device cannot tell, or if it measures already.
    ///
    /// # Errors
    ///
    /// The device is lost.
    fn start_timer(&self) -> Result<Option<Box<dyn StreamTimer>>> {
        Ok(None)
    }

    /// Returns the concrete type, for the device's own functions.
    fn as_any(&self) -> &dyn Any;
}

/// Measurement of the kernels of a [stream](Stream::start_timer). It ends on drop.
pub trait StreamTimer: Send {
    /// Waits for the kernels that were submitted to the stream since the measurement began, and
    /// returns the time for which the device ran them, by its own clock. `None` if there were none.
    ///
    /// # Errors
    ///
    /// The error of one of them, or [`ErrorKind::DeviceLost`].
    fn stop(self: Box<Self>) -> Result<Option<Duration>>;
}

/// Returns the error for a device index that is out of range, for implementations of [`DeviceApi`].
pub fn out_of_range(device: Device, count: i32) -> RpcError {
    RpcError::new(ErrorKind::DeviceUnavailable, format!("no {device}: there are {count} devices of that kind"))
}
