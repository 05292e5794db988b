//! Device of a rank: a stream, and some memory.

use std::ffi::c_void;

use rpc_core::{Device, RpcError};

/// A stream of the device that a rank works on: CUDA's, HIP's, or one for tests. The code that
/// makes the rank implements it.
///
/// The stream outlives every communicator that it was given to. No method blocks; each may be
/// called from any thread, and more than one at a time.
///
/// # Safety
///
/// [`raw`](Self::raw) is a stream of [`device`](Self::device) in the library's sense until `self`
/// is dropped; [`is_done`](Self::is_done) and the marks never say that something is done before it
/// is; and [`scratch`](Self::scratch) stays as it promises. Buffers are given back to their owners
/// by that.
pub unsafe trait DeviceStream: Send + Sync {
    /// Returns the device. Buffers have to be on it.
    fn device(&self) -> Device;

    /// Returns the stream, as the library takes it: a `cudaStream_t`.
    fn raw(&self) -> *mut c_void;

    /// Makes the device the current one of the calling thread. Comes before the library is called.
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

    /// Returns the point behind all that has been enqueued so far.
    ///
    /// # Errors
    ///
    /// The error of the driver.
    fn mark(&self) -> Result<Box<dyn Mark>, RpcError>;

    /// Returns the major and minor number of the device's compute capability, as NVIDIA counts
    /// that; `None`, the default, if it is not known.
    fn compute_capability(&self) -> Option<(u32, u32)> {
        None
    }

    /// Returns memory of the device, at least so many bytes, aligned to 8, for the work that is
    /// enqueued next on this stream and until that is done. Its content does not matter, and it
    /// remains the stream's own. A barrier takes 8 bytes; an in-place `all_to_all` as many as its
    /// buffer has.
    ///
    /// # Errors
    ///
    /// The device has no more memory.
    fn scratch(&self, bytes: usize) -> Result<*mut c_void, RpcError>;
}

/// A point in the order of a stream. It may be asked from any thread, and does not block.
///
/// # Safety
///
/// It is not said to be reached before the stream has done the work that was enqueued in front of
/// it.
pub unsafe trait Mark: Send {
    /// Returns true if the stream has come there.
    ///
    /// # Errors
    ///
    /// Something that was enqueued has failed.
    fn is_reached(&self) -> Result<bool, RpcError>;
}
