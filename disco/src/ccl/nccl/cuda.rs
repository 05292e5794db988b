//! Streams of CUDA devices for NCCL.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::device::{AllocRequest, DeviceApi, Memory};
use rpc_core::{Device, DeviceAttribute, ErrorKind, RpcError, Value};
use rpc_cuda::{CudaDevice, CudaEvent, CudaStream};

use super::{DeviceStream, Mark, busy_devices};

/// Memory in bytes that a device should have left for NCCL: about as much as a communicator takes
/// for its connections within a machine.
const ROOM: u64 = 1 << 30;

/// Returns the default stream of a CUDA device, on which all other work of this process runs too.
/// So collectives run after work that was submitted before them, and zeroing, copying and freeing
/// of memory are ordered with them.
///
/// # Errors
///
/// There is no such device, or no driver.
pub fn stream(device: Device) -> Result<Arc<dyn DeviceStream>, RpcError> {
    let cuda = CudaDevice::open()?;
    if device != Device::cuda(device.index) {
        return Err(RpcError::unsupported(format!(
            "NCCL works on CUDA devices, and the worker's default device is {device}"
        )));
    }
    let stream = cuda.stream(device.index)?;
    // NCCL allocates memory from the driver, which does not reclaim what the pool holds.
    if !busy_devices::has_collectives(device) {
        cuda.trim(device.index)?;
    }
    let capability = match cuda.attribute(device.index, DeviceAttribute::ComputeVersion)? {
        Value::Str(version) => {
            version.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)))
        }
        _ => None,
    };
    Ok(Arc::new(DefaultStream { cuda, index: device.index, stream, capability, scratch: Mutex::new(None) }))
}

struct DefaultStream {
    cuda: CudaDevice,
    index: i32,
    stream: Arc<CudaStream>,
    capability: Option<(u32, u32)>,
    /// Scratch memory of the last call, which is replaced by a larger one as needed.
    scratch: Mutex<Option<Box<dyn Memory>>>,
}

// SAFETY: `stream` keeps the stream alive, and the driver answers the polls. The pool reuses
// scratch memory only after the stream's work before the release.
unsafe impl DeviceStream for DefaultStream {
    fn device(&self) -> Device {
        Device::cuda(self.index)
    }

    fn raw(&self) -> *mut c_void {
        self.stream.raw()
    }

    fn make_current(&self) -> Result<(), RpcError> {
        self.cuda.context(self.index).map(drop)
    }

    fn is_done(&self) -> Result<bool, RpcError> {
        self.stream.query()
    }

    fn mark(&self) -> Result<Box<dyn Mark>, RpcError> {
        Ok(Box::new(self.stream.record()?))
    }

    fn compute_capability(&self) -> Option<(u32, u32)> {
        self.capability
    }

    fn make_room(&self) -> Result<(), RpcError> {
        let idle = self.cuda.statistics(self.index)?.cached_bytes;
        let Value::Int(available) = self.cuda.attribute(self.index, DeviceAttribute::AvailableMemory)? else {
            return Ok(());
        };
        // The rest of it is the driver's.
        if idle > 0 && (available as u64).saturating_sub(idle) < ROOM {
            self.cuda.trim(self.index)?;
        }
        Ok(())
    }

    fn scratch(&self, bytes: usize) -> Result<*mut c_void, RpcError> {
        let mut scratch = self.scratch.lock();
        let has_room = scratch.as_ref().is_some_and(|memory| memory.len() >= bytes as u64);
        if !has_room {
            // The pool gets the old memory back after the work that was submitted with it.
            *scratch = Some(self.cuda.allocate(self.index, &AllocRequest::new(bytes.max(1) as u64))?);
        }
        let address = scratch.as_ref().and_then(|memory| memory.device_address()).map(NonNull::as_ptr);
        address
            .map(<*mut u8>::cast)
            .ok_or_else(|| RpcError::new(ErrorKind::Internal, "memory of a device without an address"))
    }
}

// SAFETY: the driver reports the event as done only after the work before it.
unsafe impl Mark for CudaEvent {
    fn is_reached(&self) -> Result<bool, RpcError> {
        self.is_done()
    }
}
