//! The pool of a device's memory, because allocating from a driver takes long.
//!
//! * Memory is handed out again at once: its next user works on the default stream, behind
//!   everything that was submitted there before. The default stream first waits for work on the
//!   memory that other streams had when it came back.
//! * Memory that the driver gets back stays until the commands that use it are done, as OpenCL
//!   promises of released buffers. Until then it counts as used, and an allocation that finds no
//!   room waits for it.
//! * Drivers may promise more memory than there is, so the pool refuses what exceeds the device's
//!   memory, idle blocks included, after returning those.
//! * The lock of the pool's state is not held during a call of the driver.

use std::collections::{BTreeMap, VecDeque};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use opencl3::memory::{CL_MEM_READ_WRITE, create_buffer};
use opencl3::types::cl_mem;
use parking_lot::Mutex;

use crate::event::Event;
use crate::handle::BufferHandle;
use crate::opened_device::OpenedDevice;
use crate::release_thread;
use rpc_core::error::{ErrorKind, Result, RpcError};

/// Statistics of one device's memory pool. Bytes are those of whole blocks, which are up to an
/// eighth larger than the request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStatistics {
    /// Bytes in use now.
    pub allocated_bytes: u64,
    /// Bytes that lie idle now.
    pub cached_bytes: u64,
    /// Largest number of bytes in use at one time.
    pub peak_allocated_bytes: u64,
    /// Allocations that were served from idle memory.
    pub hits: u64,
    /// Allocations that had to ask the driver.
    pub misses: u64,
    /// Number of times that all idle memory was returned to the driver, on request or because the
    /// device had no more.
    pub trims: u64,
}

pub(super) struct Pool {
    state: Mutex<PoolState>,
    /// Memory that the driver has got back behind unfinished work, the oldest first. Locked before
    /// `state`.
    released: Mutex<VecDeque<Released>>,
    /// Size of the device's memory in bytes.
    total: u64,
    /// True while the release thread knows that there is idle memory.
    is_watched: AtomicBool,
}

struct PoolState {
    /// Idle blocks by size; the last one that came back is at the end.
    idle: BTreeMap<u64, Vec<Idle>>,
    statistics: PoolStatistics,
    /// Largest number of idle bytes.
    limit: u64,
}

/// An idle block, and the ends of the work that other streams than the default one have with it.
struct Idle {
    buffer: BufferHandle,
    other_streams: Vec<Arc<Event>>,
    since: Instant,
}

/// Blocks that the driver frees when the work with them is done.
struct Released {
    bytes: u64,
    ends: Vec<Arc<Event>>,
}

/// A block of a pool. On drop it returns to the pool.
pub(super) struct PoolBlock {
    device: &'static OpenedDevice,
    /// `None` once it has been returned.
    buffer: Option<BufferHandle>,
    /// One of the pool's sizes in bytes.
    pub(super) size: u64,
    /// Ends of the work that other streams than the default one have with the block.
    pub(super) other_streams: Vec<Arc<Event>>,
}

impl Pool {
    /// Creates a pool for a device with `total` bytes, of which `limit` may lie idle.
    pub(super) fn new(total: u64, limit: u64) -> Self {
        let state = PoolState { idle: BTreeMap::new(), statistics: PoolStatistics::default(), limit };
        Self { state: Mutex::new(state), released: Mutex::default(), total, is_watched: AtomicBool::new(false) }
    }

    /// Takes a block of at least `len` bytes, with unspecified contents, for work of the default
    /// stream.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::OutOfMemory`], and errors of the device.
    pub(super) fn take(&self, device: &'static OpenedDevice, len: u64) -> Result<PoolBlock> {
        device.listed.check_not_lost()?;
        let too_large = || {
            let text = format!("{} cannot allocate {len} bytes: it has {}", device.listed.as_device(), self.total);
            RpcError::new(ErrorKind::OutOfMemory, text).with_application_kind("CL_MEM_OBJECT_ALLOCATION_FAILURE")
        };
        let size = block_size(len).filter(|size| *size <= self.total).ok_or_else(too_large)?;
        let block = |buffer| PoolBlock { device, buffer: Some(buffer), size, other_streams: Vec::new() };
        if let Some(idle) = self.take_idle(size) {
            let mut block = block(idle.buffer);
            // On an error the block returns to the pool with its ends.
            block.other_streams = idle.other_streams;
            device.default_stream.wait_events(block.other_streams.iter().map(|event| &**event))?;
            block.other_streams.clear();
            return Ok(block);
        }
        if !self.reserve(size) {
            self.trim(device);
            while !self.reserve(size) {
                if !self.wait_for_released() {
                    return Err(too_large());
                }
                device.listed.check_not_lost()?;
            }
        }
        let created = create(device, size).or_else(|error| {
            if error.kind() != ErrorKind::OutOfMemory || self.trim(device) == 0 {
                return Err(error);
            }
            create(device, size)
        });
        match created {
            Ok(buffer) => Ok(block(buffer)),
            Err(error) => {
                self.state.lock().statistics.allocated_bytes -= size;
                Err(error)
            }
        }
    }

    /// Returns the size of the device's memory in bytes.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    pub(super) fn statistics(&self) -> PoolStatistics {
        self.state.lock().statistics
    }

    /// Sets the largest number of idle bytes, and returns what exceeds it.
    pub(super) fn set_limit(&self, device: &OpenedDevice, bytes: u64) {
        let mut state = self.state.lock();
        state.limit = bytes;
        let excess = state.statistics.cached_bytes > bytes;
        drop(state);
        if excess {
            self.trim(device);
        }
    }

    /// Returns all idle blocks to the driver. Returns the number of bytes.
    pub(super) fn trim(&self, device: &OpenedDevice) -> u64 {
        let mut released = self.released.lock();
        let mut state = self.state.lock();
        let idle = std::mem::take(&mut state.idle);
        let bytes = std::mem::take(&mut state.statistics.cached_bytes);
        state.statistics.trims += u64::from(bytes > 0);
        drop(state);
        let blocks = idle.into_iter().flat_map(|(size, blocks)| blocks.into_iter().map(move |idle| (size, idle)));
        release(device, &mut released, blocks);
        bytes
    }

    /// Returns blocks that have been idle for `time` to the driver. Returns the time of the next
    /// check, if any are left.
    pub(super) fn release_idle(&self, device: &OpenedDevice, time: Duration) -> Option<Instant> {
        // Blocks that become idle from here on are reported again.
        self.is_watched.store(false, Ordering::Release);
        let now = Instant::now();
        let is_due = |idle: &Idle| now.duration_since(idle.since) >= time;
        let mut due = Vec::new();
        let mut released = self.released.lock();
        let mut state = self.state.lock();
        let (mut bytes, mut oldest) = (0, None);
        state.idle.retain(|size, blocks| {
            let count = blocks.iter().take_while(|idle| is_due(idle)).count();
            bytes += *size * count as u64;
            due.extend(blocks.drain(..count).map(|idle| (*size, idle)));
            oldest = oldest.into_iter().chain(blocks.first().map(|idle| idle.since)).min();
            !blocks.is_empty()
        });
        state.statistics.cached_bytes -= bytes;
        drop(state);
        release(device, &mut released, due);
        drop(released);
        let at = oldest?.checked_add(time)?;
        self.is_watched.store(true, Ordering::Release);
        Some(at)
    }

    /// Counts a block of this size as in use, if there is room for it.
    fn reserve(&self, size: u64) -> bool {
        let mut released = self.released.lock();
        released.retain(Released::is_in_use);
        let behind: u64 = released.iter().map(|released| released.bytes).sum();
        let mut state = self.state.lock();
        let statistics = &mut state.statistics;
        let used = statistics.allocated_bytes + statistics.cached_bytes + behind;
        if used.checked_add(size).is_none_or(|all| all > self.total) {
            return false;
        }
        statistics.misses += 1;
        statistics.take(size);
        true
    }

    /// Waits until the driver has freed the memory that it got back first. Returns false if it has
    /// freed all.
    fn wait_for_released(&self) -> bool {
        let first = self.released.lock().pop_front();
        // Meanwhile others may take its room, and then the caller waits for the next.
        first.inspect(|first| first.ends.iter().for_each(|end| _ = end.wait())).is_some()
    }

    fn take_idle(&self, size: u64) -> Option<Idle> {
        let mut state = self.state.lock();
        let blocks = state.idle.get_mut(&size)?;
        let idle = blocks.pop()?;
        if blocks.is_empty() {
            state.idle.remove(&size);
        }
        state.statistics.cached_bytes -= size;
        state.statistics.hits += 1;
        state.statistics.take(size);
        Some(idle)
    }

    fn give_back(&self, device: &'static OpenedDevice, size: u64, idle: Idle) {
        let mut released = self.released.lock();
        let mut state = self.state.lock();
        state.statistics.allocated_bytes -= size;
        let is_kept = state.statistics.cached_bytes + size <= state.limit && device.listed.check_not_lost().is_ok();
        if is_kept {
            state.statistics.cached_bytes += size;
            state.idle.entry(size).or_default().push(idle);
            drop(state);
            drop(released);
            if !self.is_watched.swap(true, Ordering::AcqRel) {
                release_thread::watch(device);
            }
        } else {
            drop(state);
            release(device, &mut released, [(size, idle)]);
        }
    }
}

impl PoolStatistics {
    fn take(&mut self, size: u64) {
        self.allocated_bytes += size;
        self.peak_allocated_bytes = self.peak_allocated_bytes.max(self.allocated_bytes);
    }
}

impl PoolBlock {
    pub(super) fn raw(&self) -> cl_mem {
        self.buffer.as_ref().map_or(ptr::null_mut(), BufferHandle::raw)
    }
}

impl Drop for PoolBlock {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take() else { return };
        let other_streams = std::mem::take(&mut self.other_streams);
        self.device.pool.give_back(self.device, self.size, Idle { buffer, other_streams, since: Instant::now() });
    }
}

impl Released {
    fn is_in_use(&self) -> bool {
        self.ends.iter().any(|end| !end.has_ended())
    }
}

/// Returns blocks to the driver, and notes those that unfinished work uses.
fn release(device: &OpenedDevice, released: &mut VecDeque<Released>, blocks: impl IntoIterator<Item = (u64, Idle)>) {
    let last = device.default_stream.last_command();
    for (bytes, Idle { buffer, other_streams, .. }) in blocks {
        let noted = Released { bytes, ends: other_streams.into_iter().chain(last.clone()).collect() };
        if noted.is_in_use() {
            released.push_back(noted);
        }
        drop(buffer);
    }
}

/// Returns the size of the blocks for requests of `len` bytes: an eighth larger at most, so that
/// few sizes are reused often, and a multiple of the pattern that zeroes them. `None` for too large
/// ones.
fn block_size(len: u64) -> Option<u64> {
    let step = (len.checked_next_power_of_two()? / 8).max(SMALLEST_BLOCK);
    len.max(1).checked_next_multiple_of(step)
}

fn create(device: &OpenedDevice, size: u64) -> Result<BufferHandle> {
    // SAFETY: the context is alive, and the buffer has no memory of the host.
    let created = unsafe { create_buffer(device.context(), CL_MEM_READ_WRITE, size as usize, ptr::null_mut()) };
    device.listed.check("clCreateBuffer", created).map(BufferHandle::new).map_err(|error| {
        if error.kind() == ErrorKind::OutOfMemory { error.context(format_args!("{size} bytes")) } else { error }
    })
}

/// Smallest block in bytes.
const SMALLEST_BLOCK: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_at_most_an_eighth_larger_than_the_request() {
        assert_eq!([0, 1, 256, 257].map(block_size), [Some(256), Some(256), Some(256), Some(512)]);
        for len in [4097, 100_000, (1 << 20) + 1, (3 << 30) + 5, (1 << 40) - 1] {
            let size = block_size(len).unwrap();
            assert!(size >= len && size - len <= len / 8 * 2 && size.is_multiple_of(SMALLEST_BLOCK), "{len}: {size}");
            assert_eq!(block_size(size), Some(size));
        }
        assert_eq!(block_size(u64::MAX), None);
    }
}
