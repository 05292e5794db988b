//! CUDA streams, and the order among them.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};

use cudarc::driver::sys::{CUstream_flags_enum, CUstream_st, cudaError_enum as Code};

use crate::event::Event;
use crate::gpu::{Gpu, PrimaryContext};
use crate::handle::Handle;
use rpc_core::device::{EventNotifier, Stream, WhenDone};
use rpc_core::dlpack::Device;
use rpc_core::error::Result;

static NOTIFIER: EventNotifier<Event> = EventNotifier::new("rpc-cuda-wait");

/// Callback for the driver, called when a stream has reached an awaited event. It must not call the
/// driver.
unsafe extern "C" fn on_reached(_: *mut c_void) {
    NOTIFIER.wake();
}

/// A stream of a CUDA device.
///
/// The default stream of a device is created by this crate. It is not CUDA's null stream, but
/// ordered with that: work of other libraries on the null stream runs behind work that was
/// submitted here before, and vice versa. Streams from
/// [`create_stream`](rpc_core::device::DeviceApi::create_stream) have an order of their own.
///
/// When a stream is dropped, its submitted work still runs, and the default stream's later work
/// begins behind it, so that memory which is freed afterwards is not reused too early.
pub struct CudaStream {
    context: &'static PrimaryContext,
    raw: Handle<CUstream_st>,
    is_default: bool,
}

impl CudaStream {
    /// Wraps the default stream of a context.
    pub(super) fn default_of(context: &'static PrimaryContext) -> Self {
        Self { context, raw: context.default_stream, is_default: true }
    }

    /// Creates a stream with an order of its own. The caller has entered the context.
    pub(super) fn new(context: &'static PrimaryContext) -> Result<Self> {
        let create = || context.gpu.create_stream(CUstream_flags_enum::CU_STREAM_NON_BLOCKING);
        let raw = context.with_room(create)?;
        context.other_streams.lock().push(raw);
        Ok(Self { context, raw, is_default: false })
    }

    /// Returns the driver's `CUstream`, for other libraries; the runtime's `cudaStream_t` is the
    /// same. It is valid until `self` is dropped, in the primary context of its device. Never null.
    ///
    /// Memory that is passed to the library must stay alive until
    /// [`synchronize`](Stream::synchronize), or until it is dropped: its reuse waits for all work
    /// that was submitted to any stream of this crate before.
    pub fn raw(&self) -> *mut c_void {
        self.raw.0.cast()
    }

    /// Returns true if all work submitted so far is done. Does not block.
    ///
    /// # Errors
    ///
    /// The error of that work, or [`DeviceLost`](rpc_core::ErrorKind::DeviceLost).
    pub fn query(&self) -> Result<bool> {
        self.context.enter()?;
        is_idle(self.gpu(), self.raw)
    }

    /// Records an event behind all work submitted so far.
    ///
    /// # Errors
    ///
    /// The device is lost, or has no more events.
    pub fn record(&self) -> Result<Event> {
        self.context.enter()?;
        Event::record(self.context, self.raw)
    }

    pub(super) fn context(&self) -> &'static PrimaryContext {
        self.context
    }

    pub(super) fn gpu(&self) -> &'static Gpu {
        self.context.gpu
    }

    pub(super) fn is_default(&self) -> bool {
        self.is_default
    }

    pub(super) fn handle(&self) -> Handle<CUstream_st> {
        self.raw
    }

    /// Waits like [`synchronize`](Stream::synchronize). The caller has entered the GPU.
    pub(super) fn synchronize_raw(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        self.gpu().check(unsafe { self.gpu().driver.stream_synchronize(self.raw.0) })
    }

    /// Lets later work wait for the event, which may belong to another GPU. The caller has entered
    /// this stream's GPU.
    pub(super) fn wait_event(&self, event: &Event) -> Result<()> {
        event.precede(self.context, self.raw)
    }

    /// Lets later work begin after all work submitted to `other` so far, without blocking.
    pub(super) fn wait_for_stream(&self, other: &Self) -> Result<()> {
        if ptr::eq(self, other) {
            return Ok(());
        }
        let event = other.record()?;
        self.context.enter()?;
        self.wait_event(&event)
    }
}

impl Stream for CudaStream {
    fn device(&self) -> Device {
        self.gpu().as_device()
    }

    fn synchronize(&self) -> Result<()> {
        // A wait for an event can sleep; a wait for a stream behaves as the context was configured,
        // which other libraries share.
        match self.record() {
            Ok(event) => event.wait(),
            // The submitted work may still use memory that the caller is about to release.
            Err(error) => self.context.enter().and_then(|()| self.synchronize_raw()).and(Err(error)),
        }
    }

    /// Later work of the stream begins after the driver's callback, which takes some microseconds.
    fn when_done(&self, done: WhenDone) -> Result<(), WhenDone> {
        let event = match self.record() {
            Ok(event) => event,
            Err(error) => {
                done(Err(error));
                return Ok(());
            }
        };
        NOTIFIER.when_reached(event, done)?;
        // SAFETY: the stream is alive, and the function accepts any argument.
        let outcome = unsafe { self.gpu().driver.launch_host_func(self.raw.0, on_reached, ptr::null_mut()) };
        if let Err(error) = self.gpu().check(outcome) {
            tracing::debug!(%error, "a stream is polled, because it cannot call back");
        }
        Ok(())
    }

    /// Does not block if `other` is a CUDA stream, too, of any device.
    fn wait_for(&self, other: &dyn Stream) -> Result<()> {
        match other.as_any().downcast_ref() {
            Some(other) => self.wait_for_stream(other),
            None => {
                self.gpu().check_not_lost()?;
                other.synchronize()
            }
        }
    }

    fn library_handle(&self) -> Result<Option<NonNull<c_void>>> {
        self.context.enter()?;
        Ok(NonNull::new(self.raw()))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // The default stream lives as long as its context.
        if self.is_default {
            return;
        }
        let (context, gpu) = (self.context, self.gpu());
        let Ok(_entry) = gpu.enter_temporarily() else { return };
        // The stream stays in the list that memory is fenced by until the default stream waits for
        // it.
        let ordered = self.record().and_then(|event| event.precede(context, context.default_stream));
        if let Err(error) = ordered {
            rpc_core::log_limited!(
                WARN,
                %error,
                "a stream is not destroyed, because the default stream cannot wait for it"
            );
            return;
        }
        context.other_streams.lock().retain(|raw| raw.0 != self.raw.0);
        // SAFETY: the stream is no longer in use; the driver lets its work finish.
        if let Err(error) = gpu.check(unsafe { gpu.driver.stream_destroy(self.raw.0) }) {
            rpc_core::log_limited!(WARN, %error, "a stream was not destroyed");
        }
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CudaStream")
            .field("device", &format_args!("{}", self.gpu().as_device()))
            .field("raw", &self.raw.0)
            .field("is_default", &self.is_default)
            .finish()
    }
}

/// Records an event on each stream of the context that has work to do, except for the default one.
/// The caller has entered the context.
pub(super) fn fence_other_streams(context: &'static PrimaryContext) -> Result<Vec<Event>> {
    // Under the lock, so that none of them is destroyed meanwhile.
    let streams = context.other_streams.lock();
    let mut fences = Vec::new();
    for raw in streams.iter() {
        if !is_idle(context.gpu, *raw)? {
            fences.push(Event::record(context, *raw)?);
        }
    }
    Ok(fences)
}

fn is_idle(gpu: &Gpu, raw: Handle<CUstream_st>) -> Result<bool> {
    // SAFETY: the stream is alive.
    let outcome = unsafe { gpu.driver.stream_query(raw.0) };
    if outcome.is(Code::CUDA_ERROR_NOT_READY) { Ok(false) } else { gpu.check(outcome).map(|()| true) }
}
