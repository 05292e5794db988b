//! Code of clients that would be machine code in this process.

use crate::device_list::ListedDevice;
use crate::loaded_program::ProgramCode;
use rpc_core::error::{ErrorKind, Result, RpcError};
use rpc_core::function::Context;

/// Tells if the client of a context may bring machine code, which can do in this process whatever
/// its user can: kernels for a device that is a processor, whose driver makes machine code of them,
/// and programs that a driver loads as they are (`*.clbin`).
pub type NativeCodeRule = fn(&Context) -> bool;

/// Checks that a program may be built for a device, if no machine code is allowed.
///
/// # Errors
///
/// [`ErrorKind::Refused`](rpc_core::ErrorKind::Refused), for a binary and for a device that is a
/// processor.
pub(super) fn check_is_not_native(device: &ListedDevice, code: &ProgramCode) -> Result<()> {
    let of = device.as_device();
    let text = match code {
        ProgramCode::Binary(_) => format!("a binary is loaded into the driver of {of} unseen"),
        ProgramCode::Source(_) if device.is_processor => {
            format!("{of} is a processor, on which a kernel is machine code in the process of the server's user")
        }
        ProgramCode::Source(_) => return Ok(()),
    };
    let text = format!("{text}: clients may bring such code to a server with --allow-modules only");
    Err(RpcError::new(ErrorKind::Refused, text))
}
