//! Streams, which are OpenCL's queues that run commands in order, and the order among them.

use std::any::Any;
use std::ffi::c_void;
use std::fmt;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use opencl3::command_queue::{
    CL_QUEUE_PROFILING_ENABLE, create_command_queue, enqueue_barrier_with_wait_list, enqueue_marker_with_wait_list,
    finish, flush,
};
use opencl3::event::{CL_COMPLETE, set_event_callback};
use opencl3::types::{cl_command_queue, cl_context, cl_event, cl_int};
use parking_lot::Mutex;

use crate::device_list::ListedDevice;
use crate::event::Event;
use crate::handle::QueueHandle;
use crate::submitted_commands::Commands;
use rpc_core::device::{EventNotifier, Stream, StreamTimer, WhenDone};
use rpc_core::dlpack::Device;
use rpc_core::error::Result;

static NOTIFIER: EventNotifier<Event> = EventNotifier::new("rpc-opencl-wait");

/// Callback for the driver, called when an awaited event has been reached. It is on a thread of the
/// driver, which must not wait, as what is notified may.
extern "C" fn on_reached(_: cl_event, _: cl_int, _: *mut c_void) {
    NOTIFIER.wake();
}

/// A stream of an OpenCL device: a queue that runs its commands in order.
///
/// When a stream is dropped, its submitted work still runs, and memory that it uses is not reused
/// before.
pub struct OpenClStream {
    queue: Arc<Queue>,
    is_default: bool,
}

/// A queue, and the measurement of its kernels.
pub(super) struct Queue {
    device: &'static ListedDevice,
    handle: QueueHandle,
    times: Mutex<Option<KernelTimes>>,
    commands: Commands,
}

/// Times of the kernels of a queue during a measurement.
#[derive(Default)]
struct KernelTimes {
    total: Duration,
    /// Number of kernels that `total` has.
    count: u64,
    /// Kernels that are not in `total` yet.
    pending: Vec<Arc<Event>>,
}

impl OpenClStream {
    /// Creates a stream in the context of its device.
    pub(super) fn new(device: &'static ListedDevice, context: cl_context, is_default: bool) -> Result<Self> {
        // SAFETY: the context is alive, and of this device. The properties are those that every
        // device has.
        let raw = unsafe { create_command_queue(context, device.id(), CL_QUEUE_PROFILING_ENABLE) };
        let handle = QueueHandle::new(device.check("clCreateCommandQueue", raw)?);
        Ok(Self {
            queue: Arc::new(Queue { device, handle, times: Mutex::default(), commands: Commands::default() }),
            is_default,
        })
    }

    /// Records an event behind all work submitted so far, and has the driver begin with that.
    pub(super) fn record(&self) -> Result<Event> {
        self.listed().check_not_lost()?;
        // SAFETY: the queue is alive, and there is no list.
        let marker = unsafe { enqueue_marker_with_wait_list(self.raw(), 0, ptr::null()) };
        let event = Event::of(self.listed(), "clEnqueueMarkerWithWaitList", marker)?;
        self.flush()?;
        Ok(event)
    }

    /// Notes a command that has been submitted to the stream, so that its error is reported, and
    /// waits for earlier ones if there are many.
    pub(super) fn note(&self, command: Event) -> Arc<Event> {
        self.queue.commands.add(command)
    }

    /// Returns the first error of the commands that are done, once.
    pub(super) fn take_failure(&self) -> Result<()> {
        self.queue.commands.take_failure()
    }

    /// Returns the end of all commands; `None` if they are done.
    pub(super) fn last_command(&self) -> Option<Arc<Event>> {
        self.queue.commands.last()
    }

    /// Has the driver begin with the submitted work.
    pub(super) fn flush(&self) -> Result<()> {
        self.listed().check("clFlush", flush(self.raw()))
    }

    /// Lets later work wait for the events, which are of this device.
    pub(super) fn wait_events<'e>(&self, events: impl IntoIterator<Item = &'e Event>) -> Result<()> {
        let raw: Vec<_> = events.into_iter().map(Event::raw).collect();
        if raw.is_empty() {
            return Ok(());
        }
        // SAFETY: the queue and the events are alive, and of one context.
        let barrier = unsafe { enqueue_barrier_with_wait_list(self.raw(), raw.len() as u32, raw.as_ptr()) };
        self.note(Event::of(self.listed(), "clEnqueueBarrierWithWaitList", barrier)?);
        Ok(())
    }

    /// Lets later work begin after all work submitted to `other`, a stream of this device, so far.
    pub(super) fn wait_for_stream(&self, other: &Self) -> Result<()> {
        if Arc::ptr_eq(&self.queue, &other.queue) { Ok(()) } else { self.wait_events([&other.record()?]) }
    }

    /// Notes a kernel that has been submitted to the stream, for a measurement.
    pub(super) fn note_kernel(&self, kernel: &Arc<Event>) {
        if let Some(times) = &mut *self.queue.times.lock() {
            times.pending.push(kernel.clone());
            if times.pending.len() >= PENDING_KERNELS {
                times.take_finished();
            }
        }
    }

    pub(super) fn listed(&self) -> &'static ListedDevice {
        self.queue.device
    }

    pub(super) fn is_default(&self) -> bool {
        self.is_default
    }

    /// Returns true if both are the same stream.
    pub(super) fn is(&self, other: &Queue) -> bool {
        ptr::eq(&*self.queue, other)
    }

    pub(super) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    pub(super) fn raw(&self) -> cl_command_queue {
        self.queue.handle.raw()
    }
}

impl KernelTimes {
    /// Adds the kernels that are done, up to the first that is not.
    fn take_finished(&mut self) {
        let done = self.pending.iter().take_while(|kernel| !matches!(kernel.is_done(), Ok(false))).count();
        for kernel in self.pending.drain(..done) {
            if let Some(duration) = kernel.duration() {
                self.total += duration;
                self.count += 1;
            }
        }
    }
}

impl Stream for OpenClStream {
    fn device(&self) -> Device {
        self.listed().as_device()
    }

    fn synchronize(&self) -> Result<()> {
        match self.record() {
            Ok(event) => {
                let waited = event.wait();
                // The first error says more than that of what came behind.
                self.take_failure().and(waited)
            }
            // Nothing ends any more, and the driver might wait for ever.
            Err(error) if self.listed().check_not_lost().is_err() => Err(error),
            // The submitted work may still use memory that the caller is about to release.
            Err(error) => self.listed().check("clFinish", finish(self.raw())).and(Err(error)),
        }
    }

    fn when_done(&self, done: WhenDone) -> Result<(), WhenDone> {
        match self.record() {
            Ok(event) => {
                // Without the callback the notifier looks from time to time.
                if let Err(code) = set_event_callback(event.raw(), CL_COMPLETE, on_reached, ptr::null_mut()) {
                    tracing::debug!(code, "the driver does not call back");
                }
                let queue = self.queue.clone();
                // The first error says more than that of what came behind.
                NOTIFIER.when_reached(event, Box::new(move |reached| done(queue.commands.take_failure().and(reached))))
            }
            Err(error) => {
                done(Err(error));
                Ok(())
            }
        }
    }

    /// Does not block if `other` is a stream of the same device, unless this one has some hundreds
    /// of commands that are not done.
    fn wait_for(&self, other: &dyn Stream) -> Result<()> {
        self.listed().check_not_lost()?;
        match other.as_any().downcast_ref::<Self>() {
            Some(other) if ptr::eq(other.listed(), self.listed()) => self.wait_for_stream(other),
            // Events are of one context, and each device has one of its own.
            _ => other.synchronize(),
        }
    }

    fn start_timer(&self) -> Result<Option<Box<dyn StreamTimer>>> {
        let mut times = self.queue.times.lock();
        if times.is_some() {
            // Another lane measures on the same stream.
            return Ok(None);
        }
        *times = Some(KernelTimes::default());
        Ok(Some(Box::new(Timer(Some(self.queue.clone())))))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A measurement of the kernels of a queue; without the queue once it has ended.
struct Timer(Option<Arc<Queue>>);

impl StreamTimer for Timer {
    fn stop(mut self: Box<Self>) -> Result<Option<Duration>> {
        let times = self.0.take().and_then(|queue| queue.times.lock().take());
        let Some(mut times) = times else { return Ok(None) };
        times.pending.iter().try_for_each(|kernel| kernel.wait())?;
        times.take_finished();
        Ok((times.count > 0).then_some(times.total))
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        if let Some(queue) = self.0.take() {
            queue.times.lock().take();
        }
    }
}

impl fmt::Debug for OpenClStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenClStream")
            .field("device", &format_args!("{}", self.listed().as_device()))
            .field("raw", &self.raw())
            .field("is_default", &self.is_default)
            .finish()
    }
}

/// Number of kernels of a measurement whose events are kept before those that are done are added
/// up.
const PENDING_KERNELS: usize = 1024;
