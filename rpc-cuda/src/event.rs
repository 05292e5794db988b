//! CUDA events: points in the order of a stream that can be waited for.

use std::fmt;
use std::hint;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent_flags_enum, CUevent_st, cudaError_enum as Code};
use parking_lot::Mutex;

use crate::gpu::{Gpu, Handle, Opened, lock};
use crate::stream::CudaStream;
use rpc_core::error::Result;

/// A point in the order of a [`CudaStream`], behind all work submitted before it was
/// [recorded](CudaStream::record).
// On drop, the event returns to `FreeEvents`. Streams that wait for it already still do, because a
// wait refers to the point that was recorded when it began.
pub struct Event {
    gpu: &'static Gpu,
    opened: &'static Opened,
    raw: Handle<CUevent_st>,
}

impl Event {
    /// Records the current end of `stream`. The caller has entered the stream's GPU.
    pub(super) fn record(gpu: &'static Gpu, opened: &'static Opened, stream: &CudaStream) -> Result<Self> {
        Self::record_raw(gpu, opened, stream.handle())
    }

    /// Records like [`record`](Self::record), for a stream that is not being destroyed.
    pub(super) fn record_raw(
        gpu: &'static Gpu,
        opened: &'static Opened,
        stream: Handle<cudarc::driver::sys::CUstream_st>,
    ) -> Result<Self> {
        let free = lock(&opened.events.0).pop();
        let raw = match free {
            Some(raw) => raw,
            None => opened.with_room(gpu, || {
                let mut raw = ptr::null_mut();
                // Long waits sleep; without `BLOCKING_SYNC` the driver would keep a processor busy.
                let flags = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
                    | CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
                // SAFETY: there is room for the handle, and the GPU's context is current.
                gpu.check(unsafe { gpu.driver.event_create(&raw mut raw, flags) })?;
                Ok(Handle(raw))
            })?,
        };
        let event = Self { gpu, opened, raw };
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
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        let outcome = unsafe { self.gpu.driver.event_query(self.raw.0) };
        if outcome.is(Code::CUDA_ERROR_NOT_READY) { Ok(false) } else { self.gpu.check(outcome).map(|()| true) }
    }

    /// Waits until the point has been reached. The caller has entered the GPU.
    pub(super) fn wait(&self) -> Result<()> {
        // Waking a sleeping thread takes longer than a small copy.
        let since = Instant::now();
        while since.elapsed() < AWAKE {
            // SAFETY: the event is alive.
            let outcome = unsafe { self.gpu.driver.event_query(self.raw.0) };
            if !outcome.is(Code::CUDA_ERROR_NOT_READY) {
                return self.gpu.check(outcome);
            }
            hint::spin_loop();
        }
        // SAFETY: the event is alive.
        self.gpu.check(unsafe { self.gpu.driver.event_synchronize(self.raw.0) })
    }

    pub(super) fn handle(&self) -> Handle<CUevent_st> {
        self.raw
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaEvent").field("device", &format_args!("{}", self.gpu.as_device())).finish_non_exhaustive()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let mut free = lock(&self.opened.events.0);
        if free.len() < MAX_FREE_EVENTS {
            return free.push(self.raw);
        }
        drop(free);
        let _visit = self.gpu.visit();
        // SAFETY: the event is alive and no longer in use. The driver keeps what it still needs of
        // it.
        let outcome = unsafe { self.gpu.driver.event_destroy(self.raw.0) };
        if let Err(error) = self.gpu.check(outcome) {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}

/// Unused events, kept because creating one costs more than recording it.
#[derive(Default)]
pub(super) struct FreeEvents(Mutex<Vec<Handle<CUevent_st>>>);

/// Time for which a wait polls before it sleeps: a few times what the driver takes to wake a
/// thread.
const AWAKE: Duration = Duration::from_micros(50);

/// Largest number of unused events: enough for every block of a well-filled pool, and little
/// memory.
const MAX_FREE_EVENTS: usize = 1024;
