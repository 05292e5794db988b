//! Traits for the stream of a device on which a rank works, and for marks on it.

use std::ffi::c_void;

use rpc_core::{Device, RpcError};

/// A stream of the device that a rank works on: of CUDA, of HIP, or for tests. Implemented by the
/// code that creates the rank.
///
/// The stream outlives every communicator that uses it. No method but
/// [`make_room`](Self::make_room) waits for work on the device. Each may be called from any thread,
/// and from several at a time.
///
/// # Safety
///
/// [`raw`](Self::raw) is a stream of [`device`](Self::device) as the library defines it, until
/// `self` is dropped. [`is_done`](Self::is_done) and the marks never report work as done before it
/// is. Memory from [`scratch`](Self::scratch) is valid for as long as its documentation says.
/// Buffers are returned to their owners by these rules.
pub unsafe trait DeviceStream: Send + Sync {
    /// Returns the device. Buffers have to be on it.
    fn device(&self) -> Device;

    /// Returns the stream, as the library takes it: a `cudaStream_t`.
    fn raw(&self) -> *mut c_void;

    /// Makes the device the current one of the calling thread. Called before each call of the
    /// library.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    fn make_current(&self) -> Result<(), RpcError>;

    /// Returns true if all enqueued work is done: `cudaStreamQuery` or `hipStreamQuery`.
    ///
    /// # Errors
    ///
    /// Something that was enqueued has failed.
    fn is_done(&self) -> Result<bool, RpcError>;

    /// Records a mark after everything that has been enqueued so far.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    fn mark(&self) -> Result<Box<dyn Mark>, RpcError>;

    /// Returns the major and minor number of the device's CUDA compute capability; `None`, the
    /// default, if it is unknown.
    fn compute_capability(&self) -> Option<(u32, u32)> {
        None
    }

    /// Returns idle memory to the driver if the device has little left, since the library allocates
    /// memory of its own from the driver. It may wait for work on the device: it is not called
    /// while a communicator of this process has collectives in progress there. The default has
    /// none.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    fn make_room(&self) -> Result<(), RpcError> {
        Ok(())
    }

    /// Returns at least `bytes` bytes of device memory, aligned to 8, for the work that is enqueued
    /// next on this stream, until that is done. Its content is undefined, and the stream keeps
    /// owning it. A barrier takes 8 bytes, and an in-place `all_to_all` as many as its buffer has.
    ///
    /// # Errors
    ///
    /// The device has no more memory.
    fn scratch(&self, bytes: usize) -> Result<*mut c_void, RpcError>;
}

/// A point in the order of a stream, such as a CUDA event. It may be polled from any thread, and
/// does not block.
///
/// # Safety
///
/// [`is_reached`](Self::is_reached) does not return true before the stream has done the work that
/// was enqueued before the mark.
pub unsafe trait Mark: Send {
    /// Returns true if the stream has reached the mark.
    ///
    /// # Errors
    ///
    /// Something that was enqueued has failed.
    fn is_reached(&self) -> Result<bool, RpcError>;
}
