//! A GPU of this process: its primary context, the streams and events of that context, and the
//! GPU's error once it is lost.
//!
//! All of it lives as long as the process. Destroying a context while a thread is still in the
//! driver causes crashes at exit, and other libraries share the primary context anyway.

use std::ffi::c_int;
use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    CUctx_st, CUdevice, CUdevice_attribute_enum, CUevent_st, CUstream_flags_enum, CUstream_st, cudaError_enum as Code,
};
use parking_lot::Mutex;

use crate::driver::{Driver, Outcome};
use crate::failure;
use crate::handle::Handle;
use crate::idle_memory::IdleMemory;
use rpc_core::dlpack::Device;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// A GPU, whose primary context is opened when it is first used.
pub(super) struct Gpu {
    pub(super) driver: &'static Driver,
    pub(super) index: i32,
    pub(super) device: CUdevice,
    context: OnceLock<PrimaryContext>,
    /// Held while the context is being opened.
    opening: Mutex<()>,
    /// Error of every later operation, once the GPU is lost.
    lost: OnceLock<RpcError>,
}

/// Primary context of a GPU that is in use, with its streams and events.
pub(super) struct PrimaryContext {
    pub(super) gpu: &'static Gpu,
    /// Retained, and never released.
    pub(super) raw: Handle<CUctx_st>,
    /// Stream that lives as long as the context.
    pub(super) default_stream: Handle<CUstream_st>,
    /// The live streams besides the default one. A stream is destroyed only after it has been
    /// removed.
    pub(super) other_streams: Mutex<Vec<Handle<CUstream_st>>>,
    /// Unused events, kept because creating one costs more than recording it.
    pub(super) free_events: Mutex<Vec<Handle<CUevent_st>>>,
    /// Memory that can be returned when the driver has no more. Set once the pools exist.
    idle_memory: OnceLock<&'static dyn IdleMemory>,
}

impl Gpu {
    pub(super) fn new(driver: &'static Driver, index: i32, device: CUdevice) -> Self {
        Self { driver, index, device, context: OnceLock::new(), opening: Mutex::new(()), lost: OnceLock::new() }
    }

    pub(super) fn as_device(&self) -> Device {
        Device::cuda(self.index)
    }

    /// Makes the GPU's context the calling thread's current one, which every driver call needs.
    /// Opens the context first if it is not open.
    pub(super) fn enter(&'static self) -> Result<&'static PrimaryContext> {
        self.check_not_lost()?;
        let context = match self.context.get() {
            Some(context) => context,
            None => self.open()?,
        };
        // SAFETY: the context is retained for ever.
        self.check(unsafe { self.driver.ctx_set_current(context.raw.0) })?;
        Ok(context)
    }

    /// Enters like [`enter`](Self::enter), for the lifetime of the returned value; the thread's
    /// former context is restored afterwards. For drops, which may happen on any thread and must
    /// not change its current context.
    pub(super) fn enter_temporarily(&'static self) -> Result<TemporaryEntry> {
        let mut before = ptr::null_mut();
        // SAFETY: there is room for the handle.
        self.check(unsafe { self.driver.ctx_get_current(&raw mut before) })?;
        let entry = TemporaryEntry { driver: self.driver, before: Handle(before) };
        self.enter()?;
        Ok(entry)
    }

    fn open(&'static self) -> Result<&'static PrimaryContext> {
        let _opening = self.opening.lock();
        if let Some(context) = self.context.get() {
            return Ok(context);
        }
        let mut raw = ptr::null_mut();
        // SAFETY: there is room for the handle.
        let retained = unsafe { self.driver.primary_ctx_retain(&raw mut raw, self.device) };
        self.check(retained).map_err(|error| self.explain_refusal(error))?;
        // SAFETY: it has just been retained.
        self.check(unsafe { self.driver.ctx_set_current(raw) })?;
        let context = PrimaryContext {
            gpu: self,
            raw: Handle(raw),
            default_stream: self.create_stream(CUstream_flags_enum::CU_STREAM_DEFAULT)?,
            other_streams: Mutex::default(),
            free_events: Mutex::default(),
            idle_memory: OnceLock::new(),
        };
        Ok(self.context.get_or_init(|| context))
    }

    /// Returns the error of a context that the driver has not opened, with the reason if that is
    /// the compute mode, which the driver's own error does not name.
    fn explain_refusal(&self, error: RpcError) -> RpcError {
        let device = self.as_device();
        let reason = match self.attribute(CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_COMPUTE_MODE) {
            Ok(PROHIBITED) => "its compute mode is 'prohibited'",
            Ok(EXCLUSIVE_PROCESS) => "its compute mode is 'exclusive process', and another process has it",
            _ => return error,
        };
        let text = format!("{device} cannot be used: {reason}; nvidia-smi --compute-mode=0 changes that: {error}");
        let explained = RpcError::new(ErrorKind::DeviceUnavailable, text);
        match error.application_kind() {
            Some(kind) => explained.with_application_kind(kind),
            None => explained,
        }
    }

    /// Creates a stream in the GPU's context, which is current.
    pub(super) fn create_stream(&self, flags: CUstream_flags_enum) -> Result<Handle<CUstream_st>> {
        let mut raw = ptr::null_mut();
        // SAFETY: there is room for the handle, and the GPU's context is current.
        self.check(unsafe { self.driver.stream_create(&raw mut raw, flags as u32) })?;
        Ok(Handle(raw))
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
                rpc_core::log_limited!(ERROR, device = %self.as_device(), %error, "a device is lost");
            }
            return Err(self.lost.get_or_init(|| error).clone());
        }
        Err(failure::error(self.driver, outcome, self.as_device()))
    }

    /// Returns true if a query of the default stream returns this code. Preserves the thread's
    /// context.
    fn default_stream_answers(&self, code: u32) -> bool {
        let Some(context) = self.context.get() else { return false };
        let mut before = ptr::null_mut();
        // SAFETY: there is room for the handle; the context and its default stream live for ever;
        // and the thread's own context was current before.
        let answer = unsafe {
            _ = self.driver.ctx_get_current(&raw mut before);
            _ = self.driver.ctx_set_current(context.raw.0);
            let answer = self.driver.stream_query(context.default_stream.0);
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
}

/// A temporary change of the current context; see [`Gpu::enter_temporarily`].
pub(super) struct TemporaryEntry {
    driver: &'static Driver,
    /// Null if the thread had none.
    before: Handle<CUctx_st>,
}

impl Drop for TemporaryEntry {
    fn drop(&mut self) {
        // SAFETY: it was current before, and a context is not destroyed while it is current.
        let outcome = unsafe { self.driver.ctx_set_current(self.before.0) };
        if !outcome.is(Code::CUDA_SUCCESS) {
            tracing::debug!(?outcome, "the former context of a thread was not restored");
        }
    }
}

impl PrimaryContext {
    /// Makes the context the calling thread's current one, like [`Gpu::enter`].
    pub(super) fn enter(&self) -> Result<()> {
        self.gpu.enter().map(drop)
    }

    /// Sets the memory that can be returned when the driver has no more. Only the first call has an
    /// effect.
    pub(super) fn set_idle_memory(&self, memory: &'static dyn IdleMemory) {
        _ = self.idle_memory.set(memory);
    }

    /// Returns the pools' idle memory, once there are pools.
    pub(super) fn idle_memory(&self) -> Option<&'static dyn IdleMemory> {
        self.idle_memory.get().copied()
    }

    /// Calls `attempt`, and a second time if the driver had no memory for it and the pools had idle
    /// memory to return. The caller has entered the GPU, and holds no lock of a pool.
    pub(super) fn with_room<T>(&self, mut attempt: impl FnMut() -> Result<T>) -> Result<T> {
        match attempt() {
            Err(error) if error.kind() == ErrorKind::OutOfMemory => {
                let freed = self.idle_memory().map_or(Ok(0), |memory| memory.trim())?;
                if freed > 0 { attempt() } else { Err(error) }
            }
            other => other,
        }
    }
}

/// Compute mode in which a GPU has no contexts: `CU_COMPUTEMODE_PROHIBITED`.
const PROHIBITED: c_int = 2;

/// Compute mode in which a GPU has the contexts of one process at a time:
/// `CU_COMPUTEMODE_EXCLUSIVE_PROCESS`.
const EXCLUSIVE_PROCESS: c_int = 3;
