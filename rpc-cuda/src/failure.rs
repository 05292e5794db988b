//! Failures: the meaning of the driver's result codes for a session.

use cudarc::driver::sys::cudaError_enum as Code;

use crate::driver::{Driver, Outcome};
use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, RpcError};

/// Returns true if the context is unusable for good after this code, as CUDA's documentation says
/// of each: "the process must be terminated and relaunched".
pub(super) fn is_final(code: u32) -> bool {
    FINAL.iter().any(|known| *known as u32 == code) || LATER_FINAL.contains(&code)
}

/// Returns true if the context may be unusable after this code. It is if the device continues to
/// return the code.
pub(super) fn may_be_final(code: u32) -> bool {
    [Code::CUDA_ERROR_UNKNOWN, Code::CUDA_ERROR_MPS_RPC_FAILURE].iter().any(|known| *known as u32 == code)
}

/// Returns the error for everything on a device after `outcome` has made it unusable.
pub(super) fn lost(driver: &Driver, outcome: Outcome, device: Device) -> RpcError {
    let text = describe(driver, outcome);
    let message = format!("{device} is lost: {text}; its context is gone, and this process can no longer use it");
    RpcError::new(ErrorKind::DeviceLost, message).with_application_kind(driver.name_of(outcome.code)).may_have_run(true)
}

/// Returns the error for a failure after which the device stays usable.
pub(super) fn error(driver: &Driver, outcome: Outcome, device: Device) -> RpcError {
    let message = format!("{device}: {}", describe(driver, outcome));
    RpcError::new(kind_of(outcome.code), message).with_application_kind(driver.name_of(outcome.code))
}

/// Describes a failure by CUDA's text, its name, and the function that reported it. That function
/// need not be at fault: work fails after the function that submitted it has returned.
pub(super) fn describe(driver: &Driver, outcome: Outcome) -> String {
    let (text, name) = (driver.text_of(outcome.code), driver.name_of(outcome.code));
    format!("{text} ({name}, reported by {})", outcome.function)
}

fn kind_of(code: u32) -> ErrorKind {
    let is = |codes: &[Code]| codes.iter().any(|known| *known as u32 == code);
    if is(&[Code::CUDA_ERROR_OUT_OF_MEMORY]) {
        ErrorKind::OutOfMemory
    } else if code == DEVICE_UNAVAILABLE
        || is(&[
            Code::CUDA_ERROR_NO_DEVICE,
            Code::CUDA_ERROR_INVALID_DEVICE,
            Code::CUDA_ERROR_DEVICE_NOT_LICENSED,
            Code::CUDA_ERROR_SYSTEM_NOT_READY,
            Code::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH,
            Code::CUDA_ERROR_MPS_CONNECTION_FAILED,
            Code::CUDA_ERROR_MPS_SERVER_NOT_READY,
            Code::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED,
        ])
    {
        ErrorKind::DeviceUnavailable
    } else if is(&[Code::CUDA_ERROR_NOT_SUPPORTED, Code::CUDA_ERROR_STUB_LIBRARY, Code::CUDA_ERROR_NOT_PERMITTED]) {
        ErrorKind::Unsupported
    } else if is(&[
        Code::CUDA_ERROR_INVALID_VALUE,
        Code::CUDA_ERROR_INVALID_IMAGE,
        Code::CUDA_ERROR_NO_BINARY_FOR_GPU,
        Code::CUDA_ERROR_INVALID_PTX,
        Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION,
        Code::CUDA_ERROR_INVALID_SOURCE,
        Code::CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
    ]) {
        ErrorKind::InvalidArgument
    } else if is(&[Code::CUDA_ERROR_NOT_FOUND]) {
        ErrorKind::NotFound
    } else {
        // An error of the device itself, reported like a function's own error.
        ErrorKind::Application
    }
}

const FINAL: [Code; 14] = [
    // The driver is shutting down, with the process.
    Code::CUDA_ERROR_DEINITIALIZED,
    Code::CUDA_ERROR_ECC_UNCORRECTABLE,
    Code::CUDA_ERROR_NVLINK_UNCORRECTABLE,
    Code::CUDA_ERROR_ILLEGAL_ADDRESS,
    Code::CUDA_ERROR_LAUNCH_TIMEOUT,
    Code::CUDA_ERROR_CONTEXT_IS_DESTROYED,
    Code::CUDA_ERROR_ASSERT,
    Code::CUDA_ERROR_HARDWARE_STACK_ERROR,
    Code::CUDA_ERROR_ILLEGAL_INSTRUCTION,
    Code::CUDA_ERROR_MISALIGNED_ADDRESS,
    Code::CUDA_ERROR_INVALID_ADDRESS_SPACE,
    Code::CUDA_ERROR_INVALID_PC,
    Code::CUDA_ERROR_LAUNCH_FAILED,
    Code::CUDA_ERROR_EXTERNAL_DEVICE,
];

/// Final codes that were added after CUDA 11.4: `CUDA_ERROR_CONTAINED`, `TENSOR_MEMORY_LEAK` and
/// `MPS_CLIENT_TERMINATED`.
const LATER_FINAL: [u32; 3] = [226, 721, 810];

/// `CUDA_ERROR_DEVICE_UNAVAILABLE`, added after CUDA 11.4: another process uses the device
/// exclusively.
const DEVICE_UNAVAILABLE: u32 = 46;
