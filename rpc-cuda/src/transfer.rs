//! Copies between host and device, and between devices.
//!
//! Copies of devices' memory are submitted, and nothing waits for them: whatever uses the memory
//! later comes behind, on the default stream.
//!
//! Host memory that is not pinned is copied through two pinned buffers of 1 MiB: while the device
//! copies one, the processor fills or empties the other. All copies are on the default stream. A
//! device has a bounded number of such buffers: while its stream is busy, writes are accepted until
//! all buffers wait for the device, and the next write waits for the oldest.
//!
//! Reads, which wait for the device anyway, use a buffer in parts, so that a session's reads of a
//! buffer's size overlap with themselves. Writes overlap with the following ones.

use std::collections::VecDeque;
use std::ptr;

use crate::driver::Outcome;
use crate::event::Event;
use crate::memory_pool::{Block, Space};
use crate::opened_gpu::OpenedGpu;
use crate::{peer_access, pinned_ranges};
use rpc_core::error::Result;

/// Copies `data` to the device at `to`, and returns when `data` has been read.
///
/// # Safety
///
/// The destination is memory of the GPU, which nothing else accesses until the default stream has
/// executed the copy.
pub(super) unsafe fn upload(opened: &'static OpenedGpu, to: u64, data: &[u8]) -> Result<()> {
    let (gpu, stream) = (opened.context.gpu, opened.context.default_stream.0);
    if data.is_empty() {
        return gpu.check_not_lost();
    }
    opened.enter()?;
    if pinned_ranges::contains(data.as_ptr(), data.len()) {
        // SAFETY: the caller's promise; and `data` lives until the copy is done, which is waited
        // for.
        let outcome = unsafe { gpu.driver.memcpy_to_device_async(to, data.as_ptr().cast(), data.len(), stream) };
        gpu.check(outcome)?;
        return opened.synchronize();
    }
    let mut buffers = Buffers::new(opened, data.len())?;
    for (index, part) in data.chunks(BUFFER_BYTES).enumerate() {
        let buffer = buffers.idle(index)?;
        // SAFETY: the buffer is large enough, and the device no longer uses it.
        unsafe { ptr::copy_nonoverlapping(part.as_ptr(), buffer.start(), part.len()) };
        let at = to + (index * BUFFER_BYTES) as u64;
        // SAFETY: the caller's promise; and the pool reuses the buffer only after the copy.
        buffer.lend(|start| unsafe { gpu.driver.memcpy_to_device_async(at, start.cast(), part.len(), stream) })?;
    }
    Ok(())
}

/// Fills `out` from the device's memory at `from`, behind the default stream's work.
///
/// # Safety
///
/// The source is memory of the GPU, to which nothing writes until this returns.
pub(super) unsafe fn download(opened: &'static OpenedGpu, from: u64, out: &mut [u8]) -> Result<()> {
    let (gpu, stream) = (opened.context.gpu, opened.context.default_stream.0);
    if out.is_empty() {
        return gpu.check_not_lost();
    }
    opened.enter()?;
    if pinned_ranges::contains(out.as_ptr(), out.len()) {
        // SAFETY: the caller's promise; and `out` lives until the copy is done, which is waited
        // for.
        gpu.check(unsafe { gpu.driver.memcpy_to_host_async(out.as_mut_ptr().cast(), from, out.len(), stream) })?;
        return opened.synchronize();
    }
    let total = out.len();
    let mut buffers = Buffers::new(opened, total)?;
    let parts = buffers.lend_parts();
    let mut under_way = VecDeque::with_capacity(parts.len());
    let request = |index: usize| -> Result<Option<Event>> {
        let offset = index * PART_BYTES;
        let len = total.saturating_sub(offset).min(PART_BYTES);
        if len == 0 {
            return Ok(None);
        }
        let start = parts[index % parts.len()];
        // SAFETY: the caller's promise; the part of a buffer has room for it, and its former
        // content has been copied out.
        let outcome = unsafe { gpu.driver.memcpy_to_host_async(start.cast(), from + offset as u64, len, stream) };
        gpu.check(outcome)?;
        Event::record(opened.context, opened.context.default_stream).map(Some)
    };
    for index in 0..parts.len() {
        under_way.extend(request(index)?);
    }
    for (index, piece) in out.chunks_mut(PART_BYTES).enumerate() {
        if let Some(end) = under_way.pop_front() {
            end.wait()?;
        }
        // SAFETY: the device has filled this part of a buffer.
        unsafe { ptr::copy_nonoverlapping(parts[index % parts.len()], piece.as_mut_ptr(), piece.len()) };
        under_way.extend(request(index + parts.len())?);
    }
    buffers.returned();
    Ok(())
}

/// Bytes in a device's memory.
#[derive(Clone, Copy)]
pub(super) struct DeviceRange {
    pub(super) gpu: &'static OpenedGpu,
    /// Address of the first byte.
    pub(super) start: u64,
}

/// Copies `len` bytes between the memories of devices, behind the default streams of both. Returns
/// when the copy has been submitted. Later work of both default streams begins behind it.
///
/// # Safety
///
/// Both ranges lie within memory of their devices. Until their default streams have executed the
/// copy, nothing else writes to the source or accesses the destination, and neither is freed.
pub(super) unsafe fn between(from: DeviceRange, to: DeviceRange, len: u64) -> Result<()> {
    let opened = to.gpu;
    if len == 0 {
        return opened.context.gpu.check_not_lost();
    }
    if !ptr::eq(from.gpu, opened) {
        // SAFETY: the caller's promise.
        return unsafe { to_peer(from, to, len) };
    }
    opened.enter()?;
    if from.start.abs_diff(to.start) >= len {
        // SAFETY: the caller's promise, and the ranges do not overlap.
        unsafe { on_device(opened, from.start, to.start, len)? };
    } else if from.start != to.start {
        // SAFETY: the caller's promise.
        unsafe { shift(opened, from.start, to.start, len)? };
    }
    Ok(())
}

/// Copies on one device, in the order of the default stream.
///
/// # Safety
///
/// Both ranges are the device's memory, stay alive until the default stream has executed the copy,
/// and do not overlap.
unsafe fn on_device(opened: &OpenedGpu, from: u64, to: u64, len: u64) -> Result<()> {
    let (gpu, stream) = (opened.context.gpu, opened.context.default_stream.0);
    // SAFETY: the caller's promise.
    gpu.check(unsafe { gpu.driver.memcpy_on_device_async(to, from, len as usize, stream) })
}

/// Copies on one device where the ranges overlap, which the driver does not support: in parts,
/// beginning with the one whose destination lies outside of the source. Ranges that are too near to
/// each other for that are copied through other memory.
///
/// # Safety
///
/// As [`on_device`], except for the overlap.
unsafe fn shift(opened: &'static OpenedGpu, from: u64, to: u64, len: u64) -> Result<()> {
    let distance = from.abs_diff(to);
    let scratch_len = SCRATCH_BYTES.min(len);
    let scratch = if distance < SCRATCH_BYTES { Some(opened.take(Space::Device, scratch_len)?) } else { None };
    let step = if scratch.is_some() { scratch_len } else { distance };
    let mut done = 0;
    while done < len {
        let part = step.min(len - done);
        let at = if to > from { len - done - part } else { done };
        // SAFETY: the caller's promise; no part is longer than the distance, or it is copied
        // through memory of its own, which the pool reuses behind this.
        unsafe {
            match &scratch {
                Some(scratch) => {
                    on_device(opened, from + at, scratch.address(), part)?;
                    on_device(opened, scratch.address(), to + at, part)?;
                }
                None => on_device(opened, from + at, to + at, part)?,
            }
        }
        done += part;
    }
    Ok(())
}

/// Copies to another device, on the default stream of the source, between work of the destination's
/// default stream. If the devices cannot access each other, the driver copies through the host.
///
/// # Safety
///
/// As [`between`].
unsafe fn to_peer(from: DeviceRange, to: DeviceRange, len: u64) -> Result<()> {
    let (source, target) = (from.gpu.context, to.gpu.context);
    target.enter()?;
    peer_access::enable(source, target)?;
    from.gpu.default_stream.wait_for_stream(&to.gpu.default_stream)?;
    source.enter()?;
    // SAFETY: the caller's promise, and both contexts are retained. The copy is done before later
    // work of the destination's default stream begins, or before this returns.
    let outcome = unsafe {
        let (bytes, stream) = (len as usize, source.default_stream.0);
        source.gpu.driver.memcpy_peer_async(to.start, target.raw.0, from.start, source.raw.0, bytes, stream)
    };
    source.gpu.check(outcome)?;
    let ordered = to.gpu.default_stream.wait_for_stream(&from.gpu.default_stream);
    if ordered.is_err() {
        // The copy is under way, and the destination's stream does not wait for it. An error of
        // this wait means that the device has failed, and no longer copies.
        _ = from.gpu.synchronize();
    }
    ordered
}

/// The buffers of one copy: one, or two in turn. They return to the pool behind the device's use of
/// them.
struct Buffers {
    first: Buffer,
    second: Option<Buffer>,
}

/// A pinned buffer for copies. It returns to its device's pool behind the device's use.
struct Buffer {
    gpu: &'static OpenedGpu,
    /// `None` once the block has been returned.
    block: Option<Block>,
    /// Length in bytes.
    len: usize,
    lent: BufferUse,
}

/// Use of a buffer by the device.
enum BufferUse {
    None,
    /// In use until the event.
    Until(Event),
    /// Possibly in use, for an unknown time.
    Unknown,
}

impl Buffers {
    /// Takes as many buffers as are useful for `len` bytes; one if a second one is not available at
    /// once. May wait for the first one.
    fn new(gpu: &'static OpenedGpu, len: usize) -> Result<Self> {
        // Few sizes, so that buffers are reused.
        let size = |len: usize| len.min(BUFFER_BYTES).next_power_of_two().max(SMALLEST_BUFFER_BYTES);
        let buffer = |block, len| Buffer { gpu, block: Some(block), len, lent: BufferUse::None };
        let len_of_first = size(len);
        let first = gpu.copy_buffers.take_bounded(gpu.context, len_of_first as u64)?;
        let first = buffer(first, len_of_first);
        let second = if len > BUFFER_BYTES {
            let len = size(len - BUFFER_BYTES);
            gpu.copy_buffers.try_take_bounded(gpu.context, len as u64)?.map(|block| buffer(block, len))
        } else {
            None
        };
        Ok(Self { first, second })
    }

    /// Returns the start of each part of the buffers. A part has [`PART_BYTES`]; only the last one
    /// may be smaller, and is large enough for the rest. The device may use them until
    /// [`returned`](Self::returned) is called.
    fn lend_parts(&mut self) -> Vec<*mut u8> {
        let mut parts = Vec::new();
        for buffer in std::iter::once(&mut self.first).chain(&mut self.second) {
            buffer.lent = BufferUse::Unknown;
            let start = buffer.start();
            parts.extend((0..buffer.len).step_by(PART_BYTES).map(|offset| start.wrapping_add(offset)));
        }
        parts
    }

    /// Records that the device no longer uses any part.
    fn returned(&mut self) {
        std::iter::once(&mut self.first).chain(&mut self.second).for_each(|buffer| buffer.lent = BufferUse::None);
    }

    /// Returns the buffer for the part `index`, after waiting until the device no longer uses it.
    fn idle(&mut self, index: usize) -> Result<&mut Buffer> {
        let buffer = match &mut self.second {
            Some(second) if !index.is_multiple_of(2) => second,
            _ => &mut self.first,
        };
        if let BufferUse::Until(end) = &buffer.lent {
            end.wait()?;
            buffer.lent = BufferUse::None;
        }
        Ok(buffer)
    }
}

impl Buffer {
    fn start(&self) -> *mut u8 {
        // Pinned memory has the same address on both sides.
        ptr::with_exposed_provenance_mut(self.block.as_ref().map_or(0, |block| block.address) as usize)
    }

    /// Calls `copy`, which submits work with the buffer to the default stream.
    fn lend(&mut self, copy: impl FnOnce(*mut u8) -> Outcome) -> Result<()> {
        self.lent = BufferUse::Unknown;
        let context = self.gpu.context;
        context.gpu.check(copy(self.start()))?;
        self.lent = BufferUse::Until(Event::record(context, context.default_stream)?);
        Ok(())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        let (pool, context) = (&self.gpu.copy_buffers, self.gpu.context);
        match std::mem::replace(&mut self.lent, BufferUse::None) {
            BufferUse::None => pool.give_back_behind(context, block, None),
            BufferUse::Until(end) => pool.give_back_behind(context, block, Some(end)),
            // Behind all work that the device has been given so far.
            BufferUse::Unknown => pool.give_back(context, block),
        }
    }
}

/// Size of a buffer in bytes: that of the chunks in which sessions copy.
const BUFFER_BYTES: usize = 1 << 20;

/// Size of a part in bytes: large enough to keep the bus busy, and small beside a buffer.
const PART_BYTES: usize = 256 << 10;

/// Smallest buffer in bytes: a page, the smallest unit that the driver pins.
const SMALLEST_BUFFER_BYTES: usize = 4 << 10;

/// Distance in bytes below which overlapping ranges are copied through other memory of this size.
const SCRATCH_BYTES: u64 = 16 << 20;
