//! Failures: the meaning of OpenCL's error codes for a session.

use opencl3::error_codes::{
    CL_BUILD_PROGRAM_FAILURE, CL_COMPILE_PROGRAM_FAILURE, CL_COMPILER_NOT_AVAILABLE, CL_DEVICE_NOT_AVAILABLE,
    CL_DEVICE_NOT_FOUND, CL_INVALID_ARG_INDEX, CL_INVALID_ARG_SIZE, CL_INVALID_ARG_VALUE, CL_INVALID_BINARY,
    CL_INVALID_BUFFER_SIZE, CL_INVALID_BUILD_OPTIONS, CL_INVALID_COMMAND_QUEUE, CL_INVALID_CONTEXT, CL_INVALID_DEVICE,
    CL_INVALID_GLOBAL_OFFSET, CL_INVALID_GLOBAL_WORK_SIZE, CL_INVALID_KERNEL_ARGS, CL_INVALID_KERNEL_NAME,
    CL_INVALID_OPERATION, CL_INVALID_VALUE, CL_INVALID_WORK_DIMENSION, CL_INVALID_WORK_GROUP_SIZE,
    CL_INVALID_WORK_ITEM_SIZE, CL_LINK_PROGRAM_FAILURE, CL_MEM_OBJECT_ALLOCATION_FAILURE,
    CL_MISALIGNED_SUB_BUFFER_OFFSET, CL_OUT_OF_HOST_MEMORY, CL_OUT_OF_RESOURCES, DLOPEN_FUNCTION_NOT_AVAILABLE,
    error_text,
};
use opencl3::types::cl_int;

use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, RpcError};

/// Returns true if a device is unusable for good after this code: its driver no longer knows the
/// device, or a queue or context that this crate holds, as it happens after a fault of a kernel.
pub(super) fn is_final(code: cl_int) -> bool {
    [CL_DEVICE_NOT_AVAILABLE, CL_INVALID_DEVICE, CL_INVALID_CONTEXT, CL_INVALID_COMMAND_QUEUE].contains(&code)
}

/// Returns the error for everything on a device after `function` has failed with a
/// [final](is_final) code.
pub(super) fn lost(device: Device, function: &str, code: cl_int) -> RpcError {
    let text = describe(function, code);
    let message = format!("{device} is lost: {text}; this process can no longer use it");
    RpcError::new(ErrorKind::DeviceLost, message).with_application_kind(error_text(code)).may_have_run(true)
}

/// Returns the error for a failure after which the device stays usable.
pub(super) fn error(device: Device, function: &str, code: cl_int) -> RpcError {
    let message = format!("{device}: {}", describe(function, code));
    RpcError::new(kind_of(code), message).with_application_kind(error_text(code))
}

/// Describes a failure by OpenCL's name, and the function that reported it. That function need not
/// be at fault: work fails after the function that submitted it has returned.
pub(super) fn describe(function: &str, code: cl_int) -> String {
    format!("{} ({code}, reported by {function})", error_text(code))
}

fn kind_of(code: cl_int) -> ErrorKind {
    match code {
        CL_MEM_OBJECT_ALLOCATION_FAILURE | CL_OUT_OF_HOST_MEMORY | CL_OUT_OF_RESOURCES | CL_INVALID_BUFFER_SIZE => {
            ErrorKind::OutOfMemory
        }
        CL_DEVICE_NOT_FOUND => ErrorKind::DeviceUnavailable,
        CL_COMPILER_NOT_AVAILABLE | CL_INVALID_OPERATION | DLOPEN_FUNCTION_NOT_AVAILABLE => ErrorKind::Unsupported,
        CL_BUILD_PROGRAM_FAILURE
        | CL_COMPILE_PROGRAM_FAILURE
        | CL_LINK_PROGRAM_FAILURE
        | CL_INVALID_BINARY
        | CL_INVALID_BUILD_OPTIONS
        | CL_INVALID_VALUE
        | CL_INVALID_ARG_INDEX
        | CL_INVALID_ARG_SIZE
        | CL_INVALID_ARG_VALUE
        | CL_INVALID_KERNEL_ARGS
        | CL_INVALID_WORK_DIMENSION
        | CL_INVALID_WORK_GROUP_SIZE
        | CL_INVALID_WORK_ITEM_SIZE
        | CL_INVALID_GLOBAL_OFFSET
        | CL_INVALID_GLOBAL_WORK_SIZE
        | CL_MISALIGNED_SUB_BUFFER_OFFSET => ErrorKind::InvalidArgument,
        CL_INVALID_KERNEL_NAME => ErrorKind::NotFound,
        // An error of the device itself, reported like a function's own error.
        _ => ErrorKind::Application,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_who_reported_them_and_if_the_device_can_still_be_used() {
        let device = Device::opencl(1);
        let full = error(device, "clCreateBuffer", CL_MEM_OBJECT_ALLOCATION_FAILURE);
        assert_eq!(full.kind(), ErrorKind::OutOfMemory);
        assert_eq!(full.application_kind(), Some("CL_MEM_OBJECT_ALLOCATION_FAILURE"));
        assert_eq!(full.message(), "opencl:1: CL_MEM_OBJECT_ALLOCATION_FAILURE (-4, reported by clCreateBuffer)");
        assert!(!is_final(CL_MEM_OBJECT_ALLOCATION_FAILURE));
        assert!(is_final(CL_DEVICE_NOT_AVAILABLE) && is_final(CL_INVALID_COMMAND_QUEUE));
        let gone = lost(device, "clFinish", CL_DEVICE_NOT_AVAILABLE);
        assert_eq!(gone.kind(), ErrorKind::DeviceLost);
        assert!(gone.request_may_have_run() && gone.message().starts_with("opencl:1 is lost: "), "{gone}");
    }
}
