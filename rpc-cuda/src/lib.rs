//! The device kind `cuda`: NVIDIA GPUs, through the driver that is loaded at run time.
//!
#![doc = include_str!("../README.md")]
//!
//! # Order
//!
//! Each device has one default stream in the process. Zeroing, copies, kernels of [`CudaModules`]
//! and [`matmul`] are submitted to it, and so run in the order of the calls. A call that only
//! starts work may return at once: the borrow of a tensor ends then, and the next user's work runs
//! behind it. Memory comes from a pool and returns to it in the same order.
//!
//! A lane that has set another stream has its kernels and products there. They begin behind the
//! default stream's work at that time, and later work on one of their tensors runs behind them, on
//! any stream; other work of the default stream, such as the copies of the next tensors, runs
//! beside them. The duties of functions that use streams of their own are documented at
//! [`CudaMemory::device_pointer`].
//!
//! No thread waits for a stream on behalf of a session, or of another CUDA stream:
//! [`Stream::when_done`] and [`Stream::wait_for`] do not block. One thread of the process notifies
//! all sessions of completed work.
//!
//! # Errors
//!
//! Errors carry CUDA's description, and CUDA's name as
//! [`application_kind`](rpc_core::RpcError::application_kind). Work that runs later fails later,
//! and its error is reported by some later call; [`Stream::synchronize`] reports it for certain.
//! After a trap (a bad address, an assertion, a hardware fault) the context is gone: that call and
//! every later one on the device is [`ErrorKind::DeviceLost`](rpc_core::ErrorKind::DeviceLost),
//! with the cause, for as long as the process lives.
//!
//! # State of the tests
//!
//! All of this has been tested only against a simulated driver, which keeps CUDA's rules of order
//! and addresses on the processor, because no GPU was available. `tests/gpu.rs` holds the tests
//! that need one.

mod arguments;
mod attributes;
mod cublas;
mod driver;
mod event;
mod failure;
mod functions;
mod gpu;
mod image;
mod kernel;
mod libraries;
mod matmul;
mod memory;
mod module;
mod notify;
mod on_demand;
mod order;
mod pinned;
mod pool;
mod release;
mod stream;
mod transfer;

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use self::gpu::{Gpu, Gpus};
use rpc_core::device::{AllocRequest, DeviceApi, DeviceAttribute, Memory, Stream, copy_by_host, out_of_range};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::Result;
use rpc_core::value::Value;

pub use event::Event as CudaEvent;
pub use functions::register;
pub use matmul::matmul;
pub use memory::CudaMemory;
pub use module::CudaModules;
pub use on_demand::{CudaModulesOnDemand, CudaOnDemand};
pub use pool::PoolStatistics;
pub use stream::CudaStream;

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
        Ok(self.gpu(index)?.enter()?.default_stream.clone())
    }

    /// Returns the primary context of a device, a `CUcontext`, for other libraries. It is made
    /// current for the calling thread, and is never released.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn context(&self, index: i32) -> Result<*mut c_void> {
        Ok(self.gpu(index)?.enter()?.context.0.cast())
    }

    /// Returns the statistics of a device's memory pool.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn statistics(&self, index: i32) -> Result<PoolStatistics> {
        Ok(self.gpu(index)?.enter()?.memory.statistics())
    }

    /// Returns the combined statistics of the two pools of pinned host memory for a device: that of
    /// tensors in the scope `host`, and that of the buffers of copies. The buffers take at most 64
    /// MiB, in use or idle. `peak_allocated_bytes` is the sum of both pools' peaks.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn pinned_statistics(&self, index: i32) -> Result<PoolStatistics> {
        Ok(self.gpu(index)?.enter()?.pinned_statistics())
    }

    /// Returns the idle memory of a device's pools, pinned memory included, to the driver, after
    /// waiting for the work that uses it. Returns the number of bytes.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream), and the error of that work.
    pub fn trim(&self, index: i32) -> Result<u64> {
        let gpu = self.gpu(index)?;
        let opened = gpu.enter()?;
        opened.trim(gpu)
    }

    /// Sets the number of bytes of a device's memory that the pool may keep idle; by default a
    /// quarter of the memory.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn set_cache_limit(&self, index: i32, bytes: u64) -> Result<()> {
        let gpu = self.gpu(index)?;
        gpu.enter()?.memory.set_limit(gpu, bytes);
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
        let gpu = self.gpu(index)?;
        *gpu::lock(&gpu.enter()?.idle_time) = time;
        release::check_soon(gpu);
        Ok(())
    }

    fn gpu(&self, index: i32) -> Result<&'static Gpu> {
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
        match self.gpu(index) {
            Ok(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(true)),
            Err(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(false)),
            found => attributes::answer(found?, attribute),
        }
    }

    /// Allocates with alignments up to 2 MiB. The scope `host` is pinned host memory.
    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Ok(Box::new(CudaMemory::allocate(self.gpu(index)?, request)?))
    }

    unsafe fn adopt(
        &self,
        index: i32,
        address: NonNull<u8>,
        len: usize,
        owner: Box<dyn Any + Send + Sync>,
    ) -> Result<Box<dyn Memory>> {
        // SAFETY: the caller promises the same.
        Ok(Box::new(unsafe { CudaMemory::adopt(self.gpu(index)?, address, len, owner)? }))
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self.gpu(index)?)?))
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
            source.join()?;
            target.join()?;
            // SAFETY: the caller's promises are the same.
            return unsafe { transfer::between(source, from_offset, target, to_offset, len) };
        }
        let mut gpus = [source, target].into_iter().flatten().map(CudaMemory::gpu).collect::<Vec<_>>();
        gpus.dedup_by_key(|gpu| gpu.index);
        // Pinned memory is read and written by the processor here, and a stream does not wait for
        // that.
        if [source, target].into_iter().flatten().any(CudaMemory::is_pinned) {
            gpus.iter().try_for_each(|gpu| gpu.settle())?;
        }
        // SAFETY: the caller's promises are the same.
        unsafe { copy_by_host(from, from_offset, to, to_offset, len)? };
        gpus.iter().try_for_each(|gpu| gpu.settle())
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaDevice").field("count", &self.gpus.all.len()).finish()
    }
}
