//! Copies between host and device, and on devices.
//!
//! Host memory that is not pinned goes through two pinned buffers of 1 MiB: while the device copies one, the processor
//! fills or empties the other. All of it is on the default stream.

use std::ptr;

use super::event::Event;
use super::gpu::{Gpu, Opened};
use super::memory::CudaMemory;
use super::pinned;
use super::pool::Space;
use crate::device::Memory;
use crate::error::Result;

/// Copies `data` to the device at `to`, and returns when `data` has been read.
///
/// # Safety
///
/// The destination is memory of the GPU, which nobody else touches until the default stream has come so far.
pub(super) unsafe fn upload(gpu: &'static Gpu, to: u64, data: &[u8]) -> Result<()> {
    if data.is_empty() {
        return gpu.check_not_lost();
    }
    let opened = gpu.enter()?;
    let stream = opened.default_stream.handle().0;
    if pinned::contains(data.as_ptr(), data.len()) {
        // SAFETY: the caller's promise; and `data` lives until this is done, which is waited for.
        let outcome = unsafe { gpu.driver.memcpy_to_device_async(to, data.as_ptr().cast(), data.len(), stream) };
        gpu.check(outcome)?;
        return gpu.settle();
    }
    let mut buffers = Buffers::new(gpu, opened, data.len())?;
    for (index, part) in data.chunks(BUFFER_BYTES).enumerate() {
        let buffer = buffers.idle(index)?;
        let start = buffer.start();
        // SAFETY: the buffer holds as much, and the device has done with it.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), start, part.len()) };
        let at = to + (index * BUFFER_BYTES) as u64;
        // SAFETY: the caller's promise; and the pool reuses the buffer when this is done.
        gpu.check(unsafe { gpu.driver.memcpy_to_device_async(at, start.cast(), part.len(), stream) })?;
        buffer.busy = Some(Event::record(gpu, opened, &opened.default_stream)?);
    }
    Ok(())
}

/// Fills `out` from the device's memory at `from`, behind the default stream's work.
///
/// # Safety
///
/// The source is memory of the GPU, to which nobody writes until this returns.
pub(super) unsafe fn download(gpu: &'static Gpu, from: u64, out: &mut [u8]) -> Result<()> {
    if out.is_empty() {
        return gpu.check_not_lost();
    }
    let opened = gpu.enter()?;
    let stream = opened.default_stream.handle().0;
    if pinned::contains(out.as_ptr(), out.len()) {
        // SAFETY: the caller's promise; and `out` lives until this is done, which is waited for.
        gpu.check(unsafe { gpu.driver.memcpy_to_host_async(out.as_mut_ptr().cast(), from, out.len(), stream) })?;
        return gpu.settle();
    }
    let mut buffers = Buffers::new(gpu, opened, out.len())?;
    let total = out.len();
    let count = total.div_ceil(BUFFER_BYTES);
    let len_of = |index: usize| BUFFER_BYTES.min(total - index * BUFFER_BYTES);
    let request = |buffers: &mut Buffers, index: usize| -> Result<()> {
        let buffer = buffers.idle(index)?;
        let at = from + (index * BUFFER_BYTES) as u64;
        // SAFETY: the caller's promise; and the pool reuses the buffer when this is done.
        gpu.check(unsafe { gpu.driver.memcpy_to_host_async(buffer.start().cast(), at, len_of(index), stream) })?;
        buffer.busy = Some(Event::record(gpu, opened, &opened.default_stream)?);
        Ok(())
    };
    request(&mut buffers, 0)?;
    for index in 0..count {
        if index + 1 < count {
            request(&mut buffers, index + 1)?;
        }
        let buffer = buffers.idle(index)?;
        let (start, len) = (buffer.start(), len_of(index));
        // SAFETY: the device has filled as much of the buffer, and has done with it.
        unsafe { ptr::copy_nonoverlapping(start, out.as_mut_ptr().add(index * BUFFER_BYTES), len) };
    }
    Ok(())
}

/// Copies between two memories of devices, behind the default streams of both, and returns when it is done.
///
/// # Safety
///
/// Both ranges lie within their memories, and until this returns nobody else writes to the source or touches the
/// destination.
pub(super) unsafe fn between(
    from: &CudaMemory,
    from_offset: u64,
    to: &CudaMemory,
    to_offset: u64,
    len: u64,
) -> Result<()> {
    let (source, target) = (from.address(from_offset), to.address(to_offset));
    if len == 0 {
        return to.gpu().check_not_lost();
    }
    if !ptr::eq(from.gpu(), to.gpu()) {
        // SAFETY: the caller's promise.
        return unsafe { to_peer(from.gpu(), source, to.gpu(), target, len) };
    }
    let gpu = to.gpu();
    let opened = gpu.enter()?;
    if source.abs_diff(target) >= len {
        // SAFETY: the caller's promise, and the ranges do not overlap.
        unsafe { on_device(gpu, opened, source, target, len)? };
    } else if source != target {
        // SAFETY: the caller's promise.
        unsafe { shift(gpu, opened, source, target, len)? };
    }
    gpu.settle()
}

/// Copies on one device, in the order of the default stream.
///
/// # Safety
///
/// Both ranges are the device's memory, stay alive until the default stream has come so far, and do not overlap.
unsafe fn on_device(gpu: &Gpu, opened: &Opened, from: u64, to: u64, len: u64) -> Result<()> {
    let stream = opened.default_stream.handle().0;
    // SAFETY: the caller's promise.
    gpu.check(unsafe { gpu.driver.memcpy_on_device_async(to, from, len as usize, stream) })
}

/// Copies on one device where the ranges overlap, of which the driver knows nothing: in parts, the one first whose
/// destination lies outside of the source, and by way of other memory if they are nearer to each other than that is
/// worth.
///
/// # Safety
///
/// As [`on_device`], but for the overlap.
unsafe fn shift(gpu: &'static Gpu, opened: &'static Opened, from: u64, to: u64, len: u64) -> Result<()> {
    let distance = from.abs_diff(to);
    let scratch = if distance < SCRATCH_BYTES {
        Some(CudaMemory::uninitialised(gpu, Space::Device, SCRATCH_BYTES.min(len), 0)?)
    } else {
        None
    };
    let step = scratch.as_ref().map_or(distance, Memory::len);
    let mut done = 0;
    while done < len {
        let part = step.min(len - done);
        let at = if to > from { len - done - part } else { done };
        // SAFETY: the caller's promise; no part is longer than the distance, or it goes by way of memory of its own,
        // which the pool reuses behind this.
        unsafe {
            match &scratch {
                Some(scratch) => {
                    on_device(gpu, opened, from + at, scratch.address(0), part)?;
                    on_device(gpu, opened, scratch.address(0), to + at, part)?;
                }
                None => on_device(gpu, opened, from + at, to + at, part)?,
            }
        }
        done += part;
    }
    Ok(())
}

/// Copies to another device, on the default stream of the source, while that of the destination waits. The driver goes
/// by way of the host where the devices cannot reach each other.
///
/// # Safety
///
/// As [`between`].
unsafe fn to_peer(from_gpu: &'static Gpu, from: u64, to_gpu: &'static Gpu, to: u64, len: u64) -> Result<()> {
    let target = to_gpu.enter()?;
    let source = from_gpu.enter()?;
    source.default_stream.wait_for_stream(&target.default_stream)?;
    from_gpu.enter()?;
    let stream = source.default_stream.handle().0;
    // SAFETY: the caller's promise, and both contexts are retained.
    let outcome = unsafe {
        let (to_context, from_context) = (target.context.0, source.context.0);
        from_gpu.driver.memcpy_peer_async(to, to_context, from, from_context, len as usize, stream)
    };
    from_gpu.check(outcome)?;
    from_gpu.settle()?;
    // Nothing to wait for any more: the bytes are there.
    to_gpu.check_not_lost()
}

/// The two buffers of one copy. They go back to the pool of pinned memory, which reuses them when the device has done.
struct Buffers {
    buffers: [Option<Buffer>; 2],
}

struct Buffer {
    memory: CudaMemory,
    /// The end of the device's use.
    busy: Option<Event>,
}

impl Buffers {
    /// As many as `len` bytes need.
    fn new(gpu: &'static Gpu, opened: &'static Opened, len: usize) -> Result<Self> {
        let new = |len: usize| -> Result<Buffer> {
            let len = len.min(BUFFER_BYTES) as u64;
            Ok(Buffer { memory: CudaMemory::uninitialised(gpu, Space::Host, len, 0)?, busy: None })
        };
        let first = new(len)?;
        let second = if len > BUFFER_BYTES { Some(new(len - BUFFER_BYTES)?) } else { None };
        // The allocation may have been the first thing that this thread does on the device.
        debug_assert!(ptr::eq(opened, gpu.enter()?));
        Ok(Self { buffers: [Some(first), second] })
    }

    /// The buffer for the part `index`, with which the device has done.
    fn idle(&mut self, index: usize) -> Result<&mut Buffer> {
        let [first, second] = &mut self.buffers;
        let buffer = if index.is_multiple_of(2) { first } else { second };
        let buffer = buffer.as_mut().ok_or_else(|| crate::error::RpcError::internal("a copy has one buffer only"))?;
        if let Some(busy) = buffer.busy.take() {
            busy.wait()?;
        }
        Ok(buffer)
    }
}

impl Buffer {
    fn start(&self) -> *mut u8 {
        // The pinned memory's own address on both sides.
        ptr::with_exposed_provenance_mut(self.memory.address(0) as usize)
    }
}

/// Large enough to keep the bus busy, and as large as the parts in which sessions copy.
pub(super) const BUFFER_BYTES: usize = 1 << 20;

/// Nearer ranges than this are copied by way of other memory of this size, in bytes.
const SCRATCH_BYTES: u64 = 16 << 20;
