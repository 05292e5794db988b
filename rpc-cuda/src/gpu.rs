//! A GPU of this process: its primary context, streams, pools and modules, and its error once it is
//! lost.
//!
//! All of it lives as long as the process. Destroying a context while a thread is still in the
//! driver causes crashes at exit, and other libraries share the primary context anyway.

use std::ffi::c_int;
use std::ptr;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cudarc::driver::sys::{CUctx_st, CUdevice, CUdevice_attribute_enum, cudaError_enum as Code};
use parking_lot::{Mutex, MutexGuard};

use crate::driver::{Driver, Outcome};
use crate::event::FreeEvents;
use crate::failure;
use crate::module_loader::Retired;
use crate::pool::{Pool, PoolStatistics, Space};
use crate::release_thread;
use crate::stream::{CudaStream, Streams};
use rpc_core::device::Stream;
use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// A handle of the driver.
pub(super) struct Handle<T>(pub(super) *mut T);

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}

// SAFETY: the driver's handles may be used from any thread, and are never dereferenced here.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

/// A GPU, opened when it is first used.
pub(super) struct Gpu {
    pub(super) driver: &'static Driver,
    pub(super) index: i32,
    pub(super) device: CUdevice,
    opened: OnceLock<Opened>,
    /// Held while the GPU is being opened.
    opening: Mutex<()>,
    /// Error of every later operation, once the GPU is lost.
    lost: OnceLock<RpcError>,
}

/// Resources of a GPU that is in use.
pub(super) struct Opened {
    /// Retained, and never released.
    pub(super) context: Handle<CUctx_st>,
    pub(super) default_stream: Arc<CudaStream>,
    pub(super) streams: Streams,
    pub(super) events: FreeEvents,
    pub(super) memory: Pool,
    pub(super) pinned: Pool,
    /// Pinned memory for the buffers of copies, bounded (P-5).
    pub(super) copy_buffers: Pool,
    pub(super) retired: Retired,
    /// Time that memory may lie idle in the pools.
    pub(super) idle_time: Mutex<Duration>,
    /// True while [`release_thread`] knows that there is idle memory.
    pub(super) is_watched: AtomicBool,
}

impl Gpu {
    pub(super) fn new(driver: &'static Driver, index: i32, device: CUdevice) -> Self {
        Self { driver, index, device, opened: OnceLock::new(), opening: Mutex::new(()), lost: OnceLock::new() }
    }

    pub(super) fn as_device(&self) -> Device {
        Device::cuda(self.index)
    }

    /// Makes the GPU's context the calling thread's current one, which every driver call needs.
    /// Opens the GPU first if it is not open.
    pub(super) fn enter(&'static self) -> Result<&'static Opened> {
        self.check_not_lost()?;
        let opened = match self.opened.get() {
            Some(opened) => opened,
            None => self.open()?,
        };
        // SAFETY: the context is retained for ever.
        self.check(unsafe { self.driver.ctx_set_current(opened.context.0) })?;
        Ok(opened)
    }

    /// Enters like [`enter`](Self::enter), for the lifetime of the returned value; the thread's
    /// former context is restored afterwards. For drops, which may happen on any thread and must
    /// not change its current context.
    pub(super) fn visit(&'static self) -> Result<Visit> {
        let mut before = ptr::null_mut();
        // SAFETY: there is room for the handle.
        self.check(unsafe { self.driver.ctx_get_current(&raw mut before) })?;
        Ok(Visit { driver: self.driver, before: Handle(before), opened: self.enter()? })
    }

    fn open(&'static self) -> Result<&'static Opened> {
        let _opening = lock(&self.opening);
        if let Some(opened) = self.opened.get() {
            return Ok(opened);
        }
        let total = self.total_memory()?;
        let mut context = ptr::null_mut();
        // SAFETY: there is room for the handle.
        self.check(unsafe { self.driver.primary_ctx_retain(&raw mut context, self.device) })?;
        // SAFETY: it has just been retained.
        self.check(unsafe { self.driver.ctx_set_current(context) })?;
        // The last step that can fail: dropping a stream would open the GPU.
        let default_stream = Arc::new(CudaStream::new_default(self)?);
        let opened = Opened {
            context: Handle(context),
            default_stream,
            streams: Streams::default(),
            events: FreeEvents::default(),
            memory: Pool::new(Space::Device, total / CACHED_FRACTION),
            pinned: Pool::new(Space::Host, CACHED_PINNED_BYTES),
            copy_buffers: Pool::new(Space::Host, COPY_BUFFER_BYTES),
            retired: Retired::default(),
            idle_time: Mutex::new(release_thread::IDLE_TIME),
            is_watched: AtomicBool::new(false),
        };
        Ok(self.opened.get_or_init(|| opened))
    }

    /// Returns the resources of the GPU, if it is open. It may be lost.
    pub(super) fn opened(&self) -> Option<&Opened> {
        self.opened.get()
    }

    /// Converts an outcome to a result, and records the loss of the GPU if it means that.
    pub(super) fn check(&self, outcome: Outcome) -> Result<()> {
        if outcome.is(Code::CUDA_SUCCESS) {
            return Ok(());
        }
        let is_final = failure::is_final(outcome.code)
            || failure::may_be_final(outcome.code) && self.default_stream_answers(outcome.code);
        if is_final {
            let error = failure::lost(self.driver, outcome, self.as_device());
            if outcome.is(Code::CUDA_ERROR_DEINITIALIZED) {
                // Drops during process exit cause this, when the device is no longer needed.
                tracing::debug!(device = %self.as_device(), %error, "the driver has ended");
            } else {
                tracing::error!(device = %self.as_device(), %error, "a device is lost");
            }
            return Err(self.lost.get_or_init(|| error).clone());
        }
        Err(failure::error(self.driver, outcome, self.as_device()))
    }

    /// Returns true if a query of the default stream returns this code. Preserves the thread's
    /// context.
    fn default_stream_answers(&self, code: u32) -> bool {
        let Some(opened) = self.opened.get() else { return false };
        let mut before = ptr::null_mut();
        // SAFETY: there is room for the handle; the context and its default stream live for ever;
        // and the thread's own context was current before.
        let answer = unsafe {
            _ = self.driver.ctx_get_current(&raw mut before);
            _ = self.driver.ctx_set_current(opened.context.0);
            let answer = self.driver.stream_query(opened.default_stream.handle().0);
            _ = self.driver.ctx_set_current(before);
            answer
        };
        answer.code == code
    }

    pub(super) fn check_not_lost(&self) -> Result<()> {
        self.lost.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    pub(super) fn attribute(&self, attribute: CUdevice_attribute_enum) -> Result<c_int> {
        let mut value = 0;
        // SAFETY: there is room for the value, and an attribute that the driver does not know is an
        // error.
        self.check(unsafe { self.driver.device_get_attribute(&raw mut value, attribute as u32, self.device) })?;
        Ok(value)
    }

    /// Returns the size of the device's memory in bytes.
    pub(super) fn total_memory(&self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: there is room for the value.
        self.check(unsafe { self.driver.device_total_mem(&raw mut bytes, self.device) })?;
        Ok(bytes as u64)
    }

    /// Returns the bytes of ordinary memory that the driver reports as free. The caller has entered
    /// the GPU.
    pub(super) fn free_memory(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: there is room for both values.
        self.check(unsafe { self.driver.mem_get_info(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    /// Waits until all work submitted to any stream of this crate so far is done.
    pub(super) fn settle_all(&'static self) -> Result<()> {
        let opened = self.enter()?;
        opened.streams.fences(self, opened)?.into_iter().try_for_each(|event| event.wait())?;
        self.settle()
    }

    /// Waits until all work submitted to the default stream so far is done.
    pub(super) fn settle(&'static self) -> Result<()> {
        self.enter()?.default_stream.synchronize()
    }
}

/// A temporary change of the current context; see [`Gpu::visit`].
pub(super) struct Visit {
    driver: &'static Driver,
    /// Null if the thread had none.
    before: Handle<CUctx_st>,
    pub(super) opened: &'static Opened,
}

impl Drop for Visit {
    fn drop(&mut self) {
        // SAFETY: it was current before, and a context is not destroyed while it is current.
        let outcome = unsafe { self.driver.ctx_set_current(self.before.0) };
        if !outcome.is(Code::CUDA_SUCCESS) {
            tracing::debug!(?outcome, "the former context of a thread was not restored");
        }
    }
}

impl Opened {
    /// Returns the idle memory of all pools to the driver, like [`Pool::trim`]. The caller has
    /// entered the GPU.
    pub(super) fn trim(&self, gpu: &'static Gpu) -> Result<u64> {
        Ok(self.memory.trim(gpu)? + self.pinned.trim(gpu)? + self.copy_buffers.trim(gpu)?)
    }

    /// Returns the combined statistics of both pools of pinned memory.
    pub(super) fn pinned_statistics(&self) -> PoolStatistics {
        self.pinned.statistics().and(self.copy_buffers.statistics())
    }

    /// Calls `attempt`, and a second time if the driver had no memory for it and the pools had idle
    /// memory to return. The caller has entered the GPU, and holds no lock of a pool.
    pub(super) fn with_room<T>(&self, gpu: &'static Gpu, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfMemory && self.trim(gpu)? > 0 => attempt(),
            other => other,
        }
    }
}

/// The GPUs of this process, by CUDA's numbers.
pub(super) struct Gpus {
    pub(super) all: Vec<Gpu>,
}

impl Gpus {
    /// Returns the GPUs, initialising the driver at the first call. The outcome of the first call
    /// is kept.
    pub(super) fn get() -> Result<&'static Self> {
        static GPUS: OnceLock<Result<Gpus>> = OnceLock::new();
        GPUS.get_or_init(Self::find).as_ref().map_err(RpcError::clone)
    }

    fn find() -> Result<Self> {
        let unavailable = |reason: String| RpcError::new(ErrorKind::DeviceUnavailable, reason);
        let driver = Driver::get().map_err(|reason| unavailable(reason.to_owned()))?;
        let check = |outcome: Outcome| {
            let text = || failure::describe(driver, outcome);
            if outcome.is(Code::CUDA_SUCCESS) { Ok(()) } else { Err(unavailable(text())) }
        };
        // SAFETY: no flags are defined.
        check(unsafe { driver.init(0) })?;
        let mut count = 0;
        // SAFETY: there is room for the number.
        check(unsafe { driver.device_get_count(&raw mut count) })?;
        if count <= 0 {
            return Err(unavailable("the driver is installed but finds no device".to_owned()));
        }
        let find = |index| {
            let mut device = 0;
            // SAFETY: there is room for the handle.
            check(unsafe { driver.device_get(&raw mut device, index) }).map(|()| Gpu::new(driver, index, device))
        };
        Ok(Self { all: (0..count).map(find).collect::<Result<_>>()? })
    }
}

/// Locks a mutex, ignoring poison: no foreign code runs under these locks, and a panic here leaves
/// their data consistent.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// Fraction of a device's memory that may lie idle: a quarter, so that other users of the device
/// find room.
const CACHED_FRACTION: u64 = 4;

/// Pinned memory that may lie idle, in bytes. The kernel cannot swap it.
const CACHED_PINNED_BYTES: u64 = 64 << 20;

/// Largest amount of pinned memory for the buffers of copies, in bytes: some milliseconds of the
/// bus, so that writes proceed behind a kernel, and small enough to stay pinned in every session's
/// process of a machine.
const COPY_BUFFER_BYTES: u64 = 64 << 20;
