//! Copies between host and device, and on a device, all on its default stream.
//!
//! Writes go through [buffers](copy_buffers) of 1 MiB, and nothing waits for the device: the next
//! chunk comes from the network while the device takes this one. Reads wait for the device anyway:
//! where the device works in host memory they go straight to their destination, and elsewhere
//! through the buffers, in parts, so that the processor empties one part while the device fills the
//! next.

use std::collections::VecDeque;
use std::ptr;

use opencl3::command_queue::{enqueue_copy_buffer, enqueue_read_buffer, enqueue_write_buffer, finish};
use opencl3::error_codes::CL_INVALID_VALUE;
use opencl3::types::{CL_FALSE, CL_TRUE, cl_int, cl_mem};

use crate::copy_buffers::{self, CopyBuffer};
use crate::event::Event;
use crate::opened_device::OpenedDevice;
use rpc_core::error::Result;

/// Copies `data` to the buffer at `offset`, and returns when `data` has been read.
///
/// # Safety
///
/// The destination is memory of the device, which nothing else accesses until the default stream
/// has executed the copy.
pub(super) unsafe fn upload(device: &'static OpenedDevice, to: cl_mem, offset: u64, data: &[u8]) -> Result<()> {
    device.listed.check_not_lost()?;
    for (index, part) in data.chunks(copy_buffers::LEN).enumerate() {
        let buffer = device.copy_buffers.take(device)?;
        // SAFETY: the buffer is large enough, and nothing else uses it.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), buffer.start().cast(), part.len()) };
        let at = offset as usize + index * copy_buffers::LEN;
        let (queue, start) = (device.default_stream.raw(), buffer.start());
        // SAFETY: the caller's promise; and the buffer is reused only after the copy.
        let written = unsafe { enqueue_write_buffer(queue, to, CL_FALSE, at, part.len(), start, 0, ptr::null()) };
        let written = Event::of(device.listed, "clEnqueueWriteBuffer", written)?;
        buffer.submitted(device.default_stream.note(written));
    }
    device.default_stream.flush()
}

/// Fills `out` from the buffer at `offset`, behind the default stream's work.
///
/// # Safety
///
/// The source is memory of the device, to which nothing writes until this returns.
pub(super) unsafe fn download(device: &'static OpenedDevice, from: cl_mem, offset: u64, out: &mut [u8]) -> Result<()> {
    device.listed.check_not_lost()?;
    if out.is_empty() {
        return Ok(());
    }
    if device.has_host_memory {
        let (queue, start) = (device.default_stream.raw(), out.as_mut_ptr().cast());
        // Blocking, so that nothing writes to `out` when this returns.
        // SAFETY: the range is the buffer's, and `out` has as many bytes.
        let read =
            unsafe { enqueue_read_buffer(queue, from, CL_TRUE, offset as usize, out.len(), start, 0, ptr::null()) };
        if let Err(code) = read {
            end_failed_read(device, code);
        }
        let read = Event::of(device.listed, "clEnqueueReadBuffer", read);
        return device.default_stream.take_failure().and(read.map(drop));
    }
    let mut under_way: VecDeque<(CopyBuffer, Event)> = VecDeque::new();
    let result = download_in_parts(device, from, offset as usize, out, &mut under_way);
    for (buffer, end) in under_way {
        _ = end.wait();
        buffer.returned_unless_used(&end);
    }
    device.default_stream.take_failure().and(result)
}

/// Makes sure that a read that has failed with this code no longer writes to the caller's memory.
/// Ends the process if the driver cannot: the memory is about to be used for something else.
fn end_failed_read(device: &OpenedDevice, code: cl_int) {
    // With errors of this class nothing has been submitted, or the driver has given up the queue.
    let is_idle = |code| code <= CL_INVALID_VALUE;
    if is_idle(code) {
        return;
    }
    if let Err(finished) = finish(device.default_stream.raw())
        && !is_idle(finished)
    {
        let device = device.listed.as_device();
        tracing::error!(%device, code, finished, "a read cannot be ended, so this process ends");
        std::process::abort();
    }
}

fn download_in_parts(
    device: &'static OpenedDevice,
    from: cl_mem,
    offset: usize,
    out: &mut [u8],
    under_way: &mut VecDeque<(CopyBuffer, Event)>,
) -> Result<()> {
    let len = out.len();
    let mut requested = 0;
    for piece in out.chunks_mut(PART) {
        // Two parts are under way at a time.
        while under_way.len() < 2 && requested < len {
            let part = PART.min(len - requested);
            let buffer = device.copy_buffers.take(device)?;
            let end = read(device, from, offset + requested, buffer.start(), part)?;
            under_way.push_back((buffer, end));
            device.default_stream.flush()?;
            requested += part;
        }
        if let Some((_, end)) = under_way.front() {
            // On an error the caller sees to the buffer.
            end.wait()?;
        }
        if let Some((buffer, _)) = under_way.pop_front() {
            // SAFETY: the device has filled the buffer, and is done with it.
            unsafe { ptr::copy_nonoverlapping(buffer.start().cast(), piece.as_mut_ptr(), piece.len()) };
        }
    }
    Ok(())
}

fn read(
    device: &'static OpenedDevice,
    from: cl_mem,
    at: usize,
    to: *mut std::ffi::c_void,
    len: usize,
) -> Result<Event> {
    let queue = device.default_stream.raw();
    // SAFETY: the callers pass ranges of the buffer, and a destination that they keep until the end
    // of the copy.
    let read = unsafe { enqueue_read_buffer(queue, from, CL_FALSE, at, len, to, 0, ptr::null()) };
    Event::of(device.listed, "clEnqueueReadBuffer", read)
}

/// A place in a buffer of a device.
#[derive(Clone, Copy)]
pub(super) struct DevicePlace {
    pub(super) buffer: cl_mem,
    pub(super) offset: u64,
}

/// Copies `len` bytes on a device. Returns when the copy has been submitted to the default stream.
///
/// # Safety
///
/// Both ranges lie within their buffers. Until the default stream has executed the copy, nothing
/// else writes to the source or accesses the destination.
pub(super) unsafe fn on_device(
    device: &'static OpenedDevice,
    from: DevicePlace,
    to: DevicePlace,
    len: u64,
) -> Result<()> {
    device.listed.check_not_lost()?;
    if from.buffer != to.buffer || from.offset.abs_diff(to.offset) >= len {
        // SAFETY: the caller's promise, and the ranges do not overlap.
        unsafe { copy(device, from, to, len)? };
    } else if from.offset != to.offset {
        // SAFETY: the caller's promise.
        unsafe { shift(device, from, to, len)? };
    }
    device.default_stream.flush()
}

/// Copies within one buffer where the ranges overlap, which OpenCL does not do: in parts through
/// other memory, beginning with the one whose destination lies outside of the source.
///
/// # Safety
///
/// As [`on_device`].
unsafe fn shift(device: &'static OpenedDevice, from: DevicePlace, to: DevicePlace, len: u64) -> Result<()> {
    let scratch = device.pool.take(device, len.min(SCRATCH))?;
    let through = DevicePlace { buffer: scratch.raw(), offset: 0 };
    let at = |place: DevicePlace, more: u64| DevicePlace { offset: place.offset + more, ..place };
    let mut done = 0;
    while done < len {
        let part = SCRATCH.min(len - done);
        let start = if to.offset > from.offset { len - done - part } else { done };
        // SAFETY: the caller's promise; the pool reuses the scratch memory behind this.
        unsafe {
            copy(device, at(from, start), through, part)?;
            copy(device, through, at(to, start), part)?;
        }
        done += part;
    }
    Ok(())
}

/// Copies between ranges that do not overlap.
///
/// # Safety
///
/// As [`on_device`].
unsafe fn copy(device: &'static OpenedDevice, from: DevicePlace, to: DevicePlace, len: u64) -> Result<()> {
    if len == 0 {
        return Ok(());
    }
    let (queue, source, target) = (device.default_stream.raw(), from.offset as usize, to.offset as usize);
    // SAFETY: the caller's promise.
    let copied =
        unsafe { enqueue_copy_buffer(queue, from.buffer, to.buffer, source, target, len as usize, 0, ptr::null()) };
    device.default_stream.note(Event::of(device.listed, "clEnqueueCopyBuffer", copied)?);
    Ok(())
}

/// Size of a part of a read in bytes: large enough to keep a bus busy, and small beside a chunk.
const PART: usize = 256 << 10;

/// Largest amount of other memory through which overlapping ranges are copied, in bytes.
const SCRATCH: u64 = 16 << 20;
