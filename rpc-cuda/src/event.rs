//! CUDA events: points in the order of a stream that can be waited for.

use std::fmt;
use std::hint;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent_flags_enum, CUevent_st, CUstream_st, cudaError_enum as Code};

use crate::gpu::PrimaryContext;
use crate::handle::Handle;
use rpc_core::device::DeviceEvent;
use rpc_core::error::Result;

/// A point in the order of a [`CudaStream`](crate::CudaStream), behind all work submitted before it
/// was [recorded](crate::CudaStream::record).
// On drop, the event returns to the context's `free_events`. Streams that wait for it already still
// do, because a wait refers to the point that was recorded when it began.
pub struct Event {
    context: &'static PrimaryContext,
    raw: Handle<CUevent_st>,
}

impl Event {
    /// Records the current end of a stream of the context, which is not being destroyed. The caller
    /// has entered the context.
    pub(super) fn record(context: &'static PrimaryContext, stream: Handle<CUstream_st>) -> Result<Self> {
        let gpu = context.gpu;
        let free = context.free_events.lock().pop();
        let raw = match free {
            Some(raw) => raw,
            None => context.with_room(|| {
                let mut raw = ptr::null_mut();
                // Long waits sleep; without `BLOCKING_SYNC` the driver would keep a processor busy.
                let flags = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
                    | CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
                // SAFETY: there is room for the handle, and the GPU's context is current.
                gpu.check(unsafe { gpu.driver.event_create(&raw mut raw, flags) })?;
                Ok(Handle(raw))
            })?,
        };
        let event = Self { context, raw };
        // SAFETY: event and stream belong to this context and are alive.
        gpu.check(unsafe { gpu.driver.event_record(raw.0, stream.0) })?;
        Ok(event)
    }

    /// Returns true once the point has been reached. Does not block.
    ///
    /// # Errors
    ///
    /// The error of the work before it, or [`DeviceLost`](rpc_core::ErrorKind::DeviceLost).
    pub fn is_done(&self) -> Result<bool> {
        let gpu = self.context.gpu;
        gpu.enter()?;
        // SAFETY: the event is alive.
        let outcome = unsafe { gpu.driver.event_query(self.raw.0) };
        if outcome.is(Code::CUDA_ERROR_NOT_READY) { Ok(false) } else { gpu.check(outcome).map(|()| true) }
    }

    /// Waits until the point has been reached. The caller has entered the GPU.
    pub(super) fn wait(&self) -> Result<()> {
        let gpu = self.context.gpu;
        // Waking a sleeping thread takes longer than a small copy.
        let since = Instant::now();
        while since.elapsed() < POLLING_TIME {
            // SAFETY: the event is alive.
            let outcome = unsafe { gpu.driver.event_query(self.raw.0) };
            if !outcome.is(Code::CUDA_ERROR_NOT_READY) {
                return gpu.check(outcome);
            }
            hint::spin_loop();
        }
        // SAFETY: the event is alive.
        gpu.check(unsafe { gpu.driver.event_synchronize(self.raw.0) })
    }

    /// Lets later work of the stream wait for the point. The stream belongs to `waiting`, which the
    /// caller has entered, and which may be another GPU than the event's.
    pub(super) fn precede(&self, waiting: &PrimaryContext, stream: Handle<CUstream_st>) -> Result<()> {
        let gpu = waiting.gpu;
        // SAFETY: both are alive. No flags are defined.
        gpu.check(unsafe { gpu.driver.stream_wait_event(stream.0, self.raw.0, 0) })
    }
}

impl DeviceEvent for Event {
    fn is_done(&self) -> Result<bool> {
        self.is_done()
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEvent")
            .field("device", &format_args!("{}", self.context.gpu.as_device()))
            .finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let gpu = self.context.gpu;
        let mut free = self.context.free_events.lock();
        if free.len() < MAX_FREE_EVENTS {
            return free.push(self.raw);
        }
        drop(free);
        let _entry = gpu.enter_temporarily();
        // SAFETY: the event is alive and no longer in use. The driver keeps what it still needs of
        // it.
        let outcome = unsafe { gpu.driver.event_destroy(self.raw.0) };
        if let Err(error) = gpu.check(outcome) {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}

/// Time for which a wait polls before it sleeps: a few times what the driver takes to wake a
/// thread.
const POLLING_TIME: Duration = Duration::from_micros(50);

/// Largest number of unused events: enough for every block of a well-filled pool, and little
/// memory.
const MAX_FREE_EVENTS: usize = 1024;
