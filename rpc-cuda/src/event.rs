//! Events: points in the order of a stream that others can wait for.

use std::fmt;
use std::hint;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUevent_flags_enum, CUevent_st, cudaError_enum as Code};
use parking_lot::Mutex;

use crate::gpu::{Gpu, Handle, Opened, lock};
use crate::stream::CudaStream;
use rpc_core::error::Result;

/// A point in the order of a [`CudaStream`], behind all that had been submitted to it when this was
/// [recorded](CudaStream::record).
// Goes to the `FreeEvents` when it is dropped; whoever has been made to wait for it still does, because waiting looks at
// what was recorded when it began.
pub struct Event {
    gpu: &'static Gpu,
    opened: &'static Opened,
    raw: Handle<CUevent_st>,
}

impl Event {
    /// Records the point at which `stream` is now. The caller has entered the GPU, which is the stream's.
    pub(super) fn record(gpu: &'static Gpu, opened: &'static Opened, stream: &CudaStream) -> Result<Self> {
        Self::record_raw(gpu, opened, stream.handle())
    }

    /// As [`record`](Self::record), for a stream that is not being destroyed.
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
                // Who waits for long sleeps; without the second one the driver would keep a processor busy.
                let flags = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32
                    | CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32;
                // SAFETY: there is room for the handle, and the GPU's context is current.
                gpu.check(unsafe { gpu.driver.event_create(&raw mut raw, flags) })?;
                Ok(Handle(raw))
            })?,
        };
        let event = Self { gpu, opened, raw };
        // SAFETY: event and stream are of this context and alive.
        gpu.check(unsafe { gpu.driver.event_record(raw.0, stream.0) })?;
        Ok(event)
    }

    /// Whether the point has been reached. Does not block.
    ///
    /// # Errors
    ///
    /// What the work before it failed with, or [`DeviceLost`](rpc_core::ErrorKind::DeviceLost).
    pub fn is_done(&self) -> Result<bool> {
        self.gpu.enter()?;
        // SAFETY: the event is alive.
        let outcome = unsafe { self.gpu.driver.event_query(self.raw.0) };
        if outcome.is(Code::CUDA_ERROR_NOT_READY) { Ok(false) } else { self.gpu.check(outcome).map(|()| true) }
    }

    /// Returns when the point has been reached. The caller has entered the GPU.
    pub(super) fn wait(&self) -> Result<()> {
        // To be woken up takes longer than a small copy does.
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
        // SAFETY: the event is alive, and nobody has it any more. The driver keeps what it still needs of it.
        let outcome = unsafe { self.gpu.driver.event_destroy(self.raw.0) };
        if let Err(error) = self.gpu.check(outcome) {
            tracing::debug!(%error, "an event was not destroyed");
        }
    }
}

/// Events that are not in use, because making one costs more than recording it.
#[derive(Default)]
pub(super) struct FreeEvents(Mutex<Vec<Handle<CUevent_st>>>);

/// For how long a wait asks again and again before it sleeps: some times what the driver takes to wake somebody up.
const AWAKE: Duration = Duration::from_micros(50);

/// Enough for every block of a well-filled pool, and little memory.
const MAX_FREE_EVENTS: usize = 1024;
