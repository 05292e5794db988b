//! Memory of a GPU, and pinned host memory for it.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};

use crate::memory_pool::Space;
use crate::opened_gpu::{OpenedGpu, PoolBlock};
use crate::other_stream_work::OtherStreamWork;
use crate::{release_thread, transfer};
use rpc_core::device::{AllocRequest, Memory};
use rpc_core::dlpack::Device;
use rpc_core::error::{Result, RpcError};

/// A piece of a CUDA device's memory, or of pinned host memory for it (scope `host`).
///
/// It belongs to the device's pool, and returns to it when it is dropped, behind all work that was
/// submitted to the device's streams of this crate by then.
pub struct CudaMemory {
    gpu: &'static OpenedGpu,
    space: Space,
    /// Block of the pool; `None` if there are no bytes, or if other code owns them.
    _block: Option<PoolBlock>,
    /// Owner of bytes that do not belong to the pool.
    owner: Option<Box<dyn Any + Send + Sync>>,
    /// Address of the first byte. All `len` bytes lie within the block.
    start: u64,
    len: u64,
    pub(super) other_streams: OtherStreamWork,
}

impl CudaMemory {
    /// Allocates memory that reads as zeros behind the work of the default stream; pinned memory
    /// reads as zeros at once.
    pub(super) fn allocate(gpu: &'static OpenedGpu, request: &AllocRequest<'_>) -> Result<Self> {
        let space = match request.scope {
            None | Some("" | "global") => Space::Device,
            Some(HOST_SCOPE) => Space::Host,
            Some(scope) => {
                let device = gpu.context.gpu.as_device();
                return Err(RpcError::unsupported(format!(
                    "{device} has no memory scope '{scope}'; it has global and {HOST_SCOPE}"
                )));
            }
        };
        let memory = Self::uninitialised(gpu, space, request.size, request.alignment)?;
        match memory.host() {
            // SAFETY: no other code has seen the memory, and the pool has waited for its former
            // users.
            Some(start) => unsafe { ptr::write_bytes(start.as_ptr(), 0, memory.len as usize) },
            None if memory.len > 0 => {
                gpu.enter()?;
                let (gpu, stream) = (gpu.context.gpu, gpu.context.default_stream.0);
                // SAFETY: the range is the memory's own.
                gpu.check(unsafe { gpu.driver.memset_async(memory.start, 0, memory.len as usize, stream) })?;
            }
            None => {}
        }
        Ok(memory)
    }

    /// Allocates like [`allocate`](Self::allocate), with unspecified contents.
    fn uninitialised(gpu: &'static OpenedGpu, space: Space, len: u64, alignment: u64) -> Result<Self> {
        if alignment != 0 && !alignment.is_power_of_two() {
            return Err(RpcError::invalid_argument(format!("an alignment of {alignment} is not a power of two")));
        }
        if alignment > MAX_ALIGNMENT {
            return Err(RpcError::invalid_argument(format!("an alignment of {alignment} is above {MAX_ALIGNMENT}")));
        }
        gpu.enter()?;
        if len == 0 {
            // An address for a pointer to nothing, aligned as requested.
            let start = if space == Space::Host { alignment.max(NATURAL_ALIGNMENT) } else { 0 };
            let other_streams = OtherStreamWork::default();
            return Ok(Self { gpu, space, _block: None, owner: None, start, len, other_streams });
        }
        let spare = if alignment > NATURAL_ALIGNMENT { alignment } else { 0 };
        let block = gpu.take(space, len.saturating_add(spare))?;
        let start = block.address().next_multiple_of(alignment.max(1));
        Ok(Self { gpu, space, _block: Some(block), owner: None, start, len, other_streams: OtherStreamWork::default() })
    }

    /// Wraps bytes in the device's memory that another library owns.
    ///
    /// # Safety
    ///
    /// As [`DeviceApi::adopt`](rpc_core::device::DeviceApi::adopt).
    pub(super) unsafe fn adopt(
        gpu: &'static OpenedGpu,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Self> {
        gpu.enter()?;
        let start = address.as_ptr().expose_provenance() as u64;
        let (space, len, owner) = (Space::Device, len as u64, Some(owner));
        Ok(Self { gpu, space, _block: None, owner, start, len, other_streams: OtherStreamWork::default() })
    }

    /// Returns the address of the first byte, for kernels and libraries on the same device; null if
    /// there are no bytes. Pinned memory has the same address on both sides.
    ///
    /// The caller must hold a borrow of the storage, and keep the order with the default stream:
    /// work on another stream first [waits for it](rpc_core::device::Stream::wait_for), because the
    /// memory is zeroed and copied there, and before the borrow ends the default stream waits for
    /// the other stream. Pinned memory is read by the processor, too, so work on it must be done
    /// when the borrow ends: [synchronize](rpc_core::device::Stream::synchronize) with the stream.
    ///
    /// From this call on, the default stream is behind the pending work of kernels on other streams
    /// that use the memory.
    pub fn device_pointer(&self) -> *mut c_void {
        if let Err(error) = self.let_default_stream_follow() {
            // Every use of the address reports that the device is lost.
            tracing::debug!(%error, "the default stream does not wait for other work on a memory");
        }
        let address = if self.len == 0 { 0 } else { self.start };
        ptr::with_exposed_provenance_mut(address as usize)
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> Device {
        self.gpu.context.gpu.as_device()
    }

    /// Returns true if this is pinned host memory.
    pub fn is_pinned(&self) -> bool {
        self.space == Space::Host
    }

    pub(super) fn gpu(&self) -> &'static OpenedGpu {
        self.gpu
    }

    /// Lets later work of the default stream begin behind all work on this memory.
    pub(super) fn let_default_stream_follow(&self) -> Result<()> {
        if self.other_streams.is_none() {
            return Ok(());
        }
        self.gpu.enter()?;
        self.other_streams.precede(&self.gpu.default_stream)
    }

    /// Returns the address of the byte at `offset`, without any ordering.
    pub(super) fn address(&self, offset: u64) -> u64 {
        self.start + offset
    }
}

// SAFETY: the address of the bytes never changes. Pinned memory is mapped until its block is
// returned, holds zeros from the start, is aligned to 256 bytes at least, and has no other user:
// its pool hands it out when its last owner's work is done.
unsafe impl Memory for CudaMemory {
    fn len(&self) -> u64 {
        self.len
    }

    fn host(&self) -> Option<NonNull<u8>> {
        match self.space {
            Space::Device => None,
            Space::Host => NonNull::new(ptr::with_exposed_provenance_mut(self.start as usize)),
        }
    }

    fn device_address(&self) -> Option<NonNull<u8>> {
        NonNull::new(self.device_pointer().cast())
    }

    /// Returns when `data` has been read. Its last part may still be in pinned buffers on the way
    /// to the device; every later work of the default stream begins behind it. If the device is
    /// lost meanwhile, the next call reports it.
    unsafe fn copy_from_host(&self, offset: u64, data: &[u8]) -> Result<()> {
        match self.host() {
            Some(start) => {
                // SAFETY: the caller has checked the range and has exclusive access to it.
                unsafe { ptr::copy_nonoverlapping(data.as_ptr(), start.as_ptr().add(offset as usize), data.len()) };
                Ok(())
            }
            None => {
                self.let_default_stream_follow()?;
                // SAFETY: as above.
                unsafe { transfer::upload(self.gpu, self.address(offset), data) }
            }
        }
    }

    unsafe fn copy_to_host(&self, offset: u64, out: &mut [u8]) -> Result<()> {
        match self.host() {
            Some(start) => {
                // SAFETY: the caller has checked the range and excludes writers.
                unsafe { ptr::copy_nonoverlapping(start.as_ptr().add(offset as usize), out.as_mut_ptr(), out.len()) };
                Ok(())
            }
            None => {
                self.let_default_stream_follow()?;
                // SAFETY: as above.
                unsafe { transfer::download(self.gpu, self.address(offset), out) }
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaMemory {
    fn drop(&mut self) {
        let Some(owner) = self.owner.take() else { return };
        let gpu = self.gpu;
        // The device's work on the bytes may not be done.
        release_thread::release_later(move || {
            if let Err(error) = gpu.synchronize_all() {
                rpc_core::log_limited!(
                    WARN,
                    %error,
                    "a library's memory is released, but it is unknown if the device still uses it"
                );
            }
            drop(owner);
        });
    }
}

impl fmt::Debug for CudaMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaMemory")
            .field("device", &format_args!("{}", self.device()))
            .field("space", &self.space)
            .field("start", &format_args!("{:#x}", self.start))
            .field("len", &self.len)
            .finish()
    }
}

/// Memory scope of pinned host memory.
pub(super) const HOST_SCOPE: &str = "host";

/// Smallest alignment of the driver's memory.
const NATURAL_ALIGNMENT: u64 = 256;

/// Largest alignment: the driver's granularity.
pub(super) const MAX_ALIGNMENT: u64 = 2 << 20;
