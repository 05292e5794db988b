//! The devices of the kind `cuda`: allocation, streams, copies and attributes.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::gpu_list::{Gpus, ListedGpu};
use crate::idle_memory::IdleMemory;
use crate::memory::CudaMemory;
use crate::memory_pool::PoolStatistics;
use crate::opened_gpu::OpenedGpu;
use crate::stream::CudaStream;
use crate::transfer::{self, DeviceRange};
use crate::{attributes, nvml, release_thread};
use rpc_core::device::{
    AllocRequest, DeviceApi, DeviceAttribute, DeviceState, Memory, Stream, copy_by_host, out_of_range,
};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::Result;
use rpc_core::value::Value;

/// The GPUs of this process, from `cuda:0`, in CUDA's order (chosen by `CUDA_VISIBLE_DEVICES`).
///
/// All copies are the same: streams, pools and lost devices belong to the process. A device is
/// opened, which takes memory and some tenths of a second, when it is first used.
///
/// Each call makes the device's primary context the calling thread's current one, and leaves it so.
/// Drops do not change it.
#[derive(Clone, Copy)]
pub struct CudaDevice {
    gpus: &'static Gpus,
}

impl CudaDevice {
    /// Loads and initialises the driver, unless that has been done. It may take a second. The
    /// outcome of the first call is kept for the process.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`](rpc_core::ErrorKind::DeviceUnavailable), if there is no
    /// driver, if it is too old or does not work, or if it finds no device; the message gives the
    /// reason.
    pub fn open() -> Result<Self> {
        Ok(Self { gpus: Gpus::get()? })
    }

    /// Returns the default stream of a device, as its own type; the same one at each call.
    ///
    /// # Errors
    ///
    /// An index out of range; a device that is lost or cannot be opened.
    pub fn stream(&self, index: i32) -> Result<Arc<CudaStream>> {
        Ok(self.opened(index)?.default_stream.clone())
    }

    /// Returns the primary context of a device, a `CUcontext`, for other libraries. It is made
    /// current for the calling thread, and is never released.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn context(&self, index: i32) -> Result<*mut c_void> {
        Ok(self.opened(index)?.context.raw.0.cast())
    }

    /// Returns the place of a device on the PCI bus, such as `00000000:3b:00.0`, by which other
    /// libraries know it. Does not open the device.
    ///
    /// # Errors
    ///
    /// An index out of range; the driver does not tell.
    pub fn pci_bus_id(&self, index: i32) -> Result<String> {
        attributes::pci_bus_id(&self.listed(index)?.gpu)
    }

    /// Returns the statistics of a device's memory pool.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn statistics(&self, index: i32) -> Result<PoolStatistics> {
        Ok(self.opened(index)?.memory.statistics())
    }

    /// Returns the combined statistics of the two pools of pinned host memory for a device: that of
    /// tensors in the scope `host`, and that of the buffers of copies. The buffers take at most 64
    /// MiB, in use or idle. `peak_allocated_bytes` is the sum of both pools' peaks.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn pinned_statistics(&self, index: i32) -> Result<PoolStatistics> {
        Ok(self.opened(index)?.pinned_statistics())
    }

    /// Returns the idle memory of a device's pools, pinned memory included, to the driver, after
    /// waiting for the work that uses it. Returns the number of bytes.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream), and the error of that work.
    pub fn trim(&self, index: i32) -> Result<u64> {
        self.opened(index)?.trim()
    }

    /// Sets the number of bytes of a device's memory that the pool may keep idle; by default a
    /// quarter of the memory.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn set_cache_limit(&self, index: i32, bytes: u64) -> Result<()> {
        let opened = self.opened(index)?;
        opened.memory.set_limit(opened.context.gpu, bytes);
        Ok(())
    }

    /// Sets the time that memory may lie idle in a device's pools, pinned memory included, before
    /// it is returned to the driver for other processes; 10 seconds by default. Returning memory,
    /// like allocating it, may stop the device for a moment.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn set_idle_time(&self, index: i32, time: Duration) -> Result<()> {
        let opened = self.opened(index)?;
        *opened.idle_time.lock() = time;
        release_thread::check_soon(opened);
        Ok(())
    }

    /// Returns a GPU after entering it.
    pub(super) fn opened(&self, index: i32) -> Result<&'static OpenedGpu> {
        self.listed(index)?.enter()
    }

    fn listed(&self, index: i32) -> Result<&'static ListedGpu> {
        let found = usize::try_from(index).ok().and_then(|index| self.gpus.all.get(index));
        found.ok_or_else(|| out_of_range(Device::cuda(index), self.gpus.all.len() as i32))
    }
}

impl DeviceApi for CudaDevice {
    fn kind(&self) -> DeviceType {
        DeviceType::CUDA
    }

    fn count(&self) -> Result<i32> {
        // It was an `i32` of the driver.
        Ok(self.gpus.all.len() as i32)
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        match self.listed(index) {
            Ok(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(true)),
            Err(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(false)),
            listed => attributes::attribute_value(listed?, attribute),
        }
    }

    /// Asks NVIDIA's management library ([`nvml`]).
    fn state(&self, index: i32) -> DeviceState {
        match self.pci_bus_id(index) {
            Ok(pci_bus_id) => nvml::gpu_state(&pci_bus_id),
            Err(error) => DeviceState::unknown(error.message()),
        }
    }

    /// Allocates with alignments up to 2 MiB. The scope `host` is pinned host memory.
    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Ok(Box::new(CudaMemory::allocate(self.opened(index)?, request)?))
    }

    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        // SAFETY: the caller promises the same.
        Ok(Box::new(unsafe { CudaMemory::adopt(self.opened(index)?, address, len, owner)? }))
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self.opened(index)?.context)?))
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(self.stream(index)?)
    }

    unsafe fn copy(
        &self,
        from: &dyn Memory,
        from_offset: u64,
        to: &dyn Memory,
        to_offset: u64,
        len: u64,
    ) -> Result<()> {
        let (source, target) = (from.as_any().downcast_ref(), to.as_any().downcast_ref());
        if let (Some(source), Some(target)) = (source, target)
            && !CudaMemory::is_pinned(source)
            && !CudaMemory::is_pinned(target)
        {
            source.let_default_stream_follow()?;
            target.let_default_stream_follow()?;
            let from = DeviceRange { gpu: source.gpu(), start: source.address(from_offset) };
            let to = DeviceRange { gpu: target.gpu(), start: target.address(to_offset) };
            // SAFETY: the caller's promises are the same; later uses of the memory, and its
            // release, come behind the copy on the default streams.
            return unsafe { transfer::between(from, to, len) };
        }
        let mut gpus = [source, target].into_iter().flatten().map(CudaMemory::gpu).collect::<Vec<_>>();
        gpus.dedup_by_key(|gpu| gpu.context.gpu.index);
        // Pinned memory is read and written by the processor here, and a stream does not wait for
        // that.
        if [source, target].into_iter().flatten().any(CudaMemory::is_pinned) {
            gpus.iter().try_for_each(|gpu| gpu.synchronize())?;
        }
        // Copies to and from pinned memory wait for the device themselves.
        // SAFETY: the caller's promises are the same.
        unsafe { copy_by_host(from, from_offset, to, to_offset, len) }
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("count", &self.gpus.all.len()).finish()
    }
}
