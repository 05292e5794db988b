//! Buffers of host memory that the driver can copy from and to at full speed, for copies that do
//! not wait for the device.
//!
//! A buffer is memory that the driver has allocated for both sides, and that stays mapped. A device
//! has at most [`COUNT`] of them. A copy that finds none waits for the device to be done with the
//! oldest.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use opencl3::command_queue::{enqueue_map_buffer, enqueue_unmap_mem_object};
use opencl3::memory::{CL_MAP_READ, CL_MAP_WRITE, CL_MEM_ALLOC_HOST_PTR, CL_MEM_READ_WRITE, create_buffer};
use opencl3::types::{CL_TRUE, cl_mem};
use parking_lot::{Condvar, Mutex};

use crate::event::Event;
use crate::handle::BufferHandle;
use crate::opened_device::OpenedDevice;
use rpc_core::error::Result;

/// The buffers of a device.
#[derive(Default)]
pub(super) struct CopyBuffers {
    state: Mutex<State>,
    /// Notified when a buffer comes back.
    returned: Condvar,
}

#[derive(Default)]
struct State {
    /// Buffers that nothing uses.
    idle: Vec<Mapped>,
    /// Buffers that the device uses until an event, the oldest first.
    submitted: VecDeque<(Mapped, Arc<Event>)>,
    /// Number of all buffers.
    count: usize,
}

/// A buffer that is mapped for as long as it lives.
struct Mapped {
    device: &'static OpenedDevice,
    buffer: BufferHandle,
    start: NonNull<c_void>,
}

// SAFETY: the memory may be used from any thread, and has one user at a time.
unsafe impl Send for Mapped {}

/// A buffer in use by one copy. On drop it returns.
pub(super) struct CopyBuffer {
    device: &'static OpenedDevice,
    /// `None` once it has been returned.
    mapped: Option<Mapped>,
}

impl CopyBuffers {
    /// Takes a buffer of [`LEN`] bytes, after waiting for one if all are in use.
    pub(super) fn take(&self, device: &'static OpenedDevice) -> Result<CopyBuffer> {
        let in_use = |mapped| CopyBuffer { device, mapped: Some(mapped) };
        let mut state = self.state.lock();
        loop {
            if let Some(mapped) = state.idle.pop() {
                return Ok(in_use(mapped));
            }
            let is_done = state.submitted.front().is_some_and(|(_, end)| !matches!(end.is_done(), Ok(false)));
            if is_done && let Some((mapped, _)) = state.submitted.pop_front() {
                return Ok(in_use(mapped));
            }
            if state.count < COUNT {
                state.count += 1;
                drop(state);
                return Mapped::new(device).map(in_use).inspect_err(|_| {
                    self.state.lock().count -= 1;
                    self.returned.notify_one();
                });
            }
            if let Some((mapped, end)) = state.submitted.pop_front() {
                drop(state);
                let buffer = in_use(mapped);
                return match end.wait() {
                    Ok(()) => Ok(buffer),
                    // The stream reports the error of the command, which is not the caller's.
                    Err(_) if end.has_ended() => Ok(buffer),
                    Err(error) => {
                        buffer.returned_unless_used(&end);
                        Err(error)
                    }
                };
            }
            device.listed.check_not_lost()?;
            // A device that is lost notifies nobody.
            self.returned.wait_for(&mut state, LOSS_CHECK);
        }
    }

    /// Returns the buffers that nothing uses to the driver. Returns the number of bytes.
    pub(super) fn trim(&self) -> Result<u64> {
        let mut state = self.state.lock();
        while let Some((_, end)) = state.submitted.front() {
            if !end.is_done()? {
                break;
            }
            let done = state.submitted.pop_front();
            state.idle.extend(done.map(|(mapped, _)| mapped));
        }
        let idle = std::mem::take(&mut state.idle);
        state.count -= idle.len();
        drop(state);
        Ok((idle.len() * LEN) as u64)
    }
}

impl CopyBuffer {
    /// Returns the start of the buffer's [`LEN`] bytes, which nothing else uses.
    pub(super) fn start(&self) -> *mut c_void {
        self.mapped.as_ref().map_or(ptr::null_mut(), |mapped| mapped.start.as_ptr())
    }

    /// Returns the buffer when the device has done the work that ends with the event.
    pub(super) fn submitted(mut self, end: Arc<Event>) {
        if let Some(mapped) = self.mapped.take() {
            let buffers = &self.device.copy_buffers;
            buffers.state.lock().submitted.push_back((mapped, end));
            buffers.returned.notify_one();
        }
    }

    /// Returns the buffer if the command with it has ended. Otherwise leaves it to the device for
    /// ever, which may still use it; another may take its place.
    pub(super) fn returned_unless_used(mut self, end: &Event) {
        if end.has_ended() {
            return;
        }
        std::mem::forget(self.mapped.take());
        let buffers = &self.device.copy_buffers;
        buffers.state.lock().count -= 1;
        buffers.returned.notify_all();
    }
}

impl Drop for CopyBuffer {
    fn drop(&mut self) {
        if let Some(mapped) = self.mapped.take() {
            let buffers = &self.device.copy_buffers;
            buffers.state.lock().idle.push(mapped);
            buffers.returned.notify_one();
        }
    }
}

impl Mapped {
    fn new(device: &'static OpenedDevice) -> Result<Self> {
        let (listed, queue) = (device.listed, device.copy_stream.raw());
        let flags = CL_MEM_READ_WRITE | CL_MEM_ALLOC_HOST_PTR;
        // SAFETY: the context is alive, and the driver allocates the memory.
        let created = unsafe { create_buffer(device.context(), flags, LEN, ptr::null_mut()) };
        let buffer = BufferHandle::new(listed.check("clCreateBuffer", created)?);
        let mut start: cl_mem = ptr::null_mut();
        // SAFETY: the queue and the buffer are alive, and the range is the buffer's.
        let mapped = unsafe {
            let access = CL_MAP_READ | CL_MAP_WRITE;
            enqueue_map_buffer(queue, buffer.raw(), CL_TRUE, access, 0, LEN, &mut start, 0, ptr::null())
        };
        Event::of(listed, "clEnqueueMapBuffer", mapped)?;
        let start = NonNull::new(start)
            .ok_or_else(|| rpc_core::RpcError::internal("the driver has mapped a buffer nowhere"))?;
        Ok(Self { device, buffer, start })
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let queue = self.device.copy_stream.raw();
        // SAFETY: it is mapped there, and nothing uses it any more.
        let unmapped =
            unsafe { enqueue_unmap_mem_object(queue, self.buffer.raw(), self.start.as_ptr(), 0, ptr::null()) };
        if let Err(error) = Event::of(self.device.listed, "clEnqueueUnmapMemObject", unmapped) {
            tracing::debug!(%error, "a buffer for copies was not unmapped");
        }
    }
}

/// Size of a buffer in bytes: that of the chunks in which sessions copy.
pub(super) const LEN: usize = 1 << 20;

/// Time between two checks that the device is not lost.
const LOSS_CHECK: Duration = Duration::from_millis(100);

/// Largest number of buffers of a device.
const COUNT: usize = 64;
