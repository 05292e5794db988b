//! Tensor allocator for modules that ask the environment for tensors (`TVMFFIEnvTensorAlloc`). It
//! uses the session's memory.

use std::ffi::{CString, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::abi::{DlTensor, ManagedTensor, SetError, slice_of};
use super::lane_stream::LaneStream;
use super::{call_frame, tensor};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{ErrorKind, Result, RpcError};

/// Allocates a densely packed tensor like `prototype` for the current call on this thread.
///
/// # Safety
///
/// As in the documentation of DLPack's `DLPackManagedTensorAllocator`.
pub(super) unsafe extern "C" fn allocate(
    prototype: *mut DlTensor,
    out: *mut *mut ManagedTensor,
    error_context: *mut c_void,
    set_error: Option<SetError>,
) -> c_int {
    // SAFETY: the prototype and its shape are valid.
    let allocated = catch_unwind(AssertUnwindSafe(|| unsafe { allocate_like(&*prototype) }));
    match allocated.unwrap_or_else(|_| Err(RpcError::internal("the allocator panicked"))) {
        Ok(managed) => {
            // SAFETY: there is room for it.
            unsafe { out.write(managed) };
            0
        }
        Err(error) => {
            let kind = if error.kind() == ErrorKind::OutOfMemory { c"MemoryError" } else { c"RuntimeError" };
            let message = CString::new(error.to_string().replace('\0', " ")).unwrap_or_default();
            if let Some(set_error) = set_error {
                // SAFETY: both texts live until the call returns, and the context is the one that
                // came with the function.
                unsafe { set_error(error_context, kind.as_ptr(), message.as_ptr()) };
            }
            -1
        }
    }
}

/// # Safety
///
/// The shape of `prototype` is valid.
unsafe fn allocate_like(prototype: &DlTensor) -> Result<*mut ManagedTensor> {
    let frame = call_frame::current().ok_or_else(|| {
        RpcError::new(ErrorKind::ApiMisuse, "tensors can be allocated only on the thread of a function call")
    })?;
    let rank = usize::try_from(prototype.ndim).unwrap_or_default();
    // SAFETY: the caller's promise.
    let shape = unsafe { slice_of(prototype.shape, rank) };
    let (context, device) = (&frame.context, Device::from(prototype.device));
    let allocated = context.allocate(device, prototype.dtype.into(), shape)?;
    if device.kind != DeviceType::CPU {
        // The memory is still being zeroed.
        LaneStream::of(context, device)?.begin()?;
    }
    Ok(tensor::manage(&allocated)?.as_ptr())
}
