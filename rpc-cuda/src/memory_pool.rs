//! Pools of idle device memory and pinned memory, because allocating from the driver and freeing
//! stop the device.
//!
//! The rules, cited by the tests:
//!
//! * P-1: Ordinary memory is handed out again at once, because its next user works on the default
//!   stream, behind everything that was submitted there before. The default stream waits for work
//!   that other streams of this crate had when the memory came back.
//! * P-2: Pinned memory is handed out again when everything that was submitted before it came back
//!   is done, because its next user is the processor.
//! * P-3: Memory returns to the driver only when everything that was submitted before it came back
//!   is done.
//! * P-4: Allocations first return idle memory above the limit to the driver, except for memory
//!   that P-3 keeps. Releases do not: they often run on a thread that serves connections, and the
//!   driver waits for the whole device. A separate thread returns memory that has been idle for
//!   some seconds.
//! * P-5: A bounded pool never has more than its limit, in use or idle. An allocation beyond it
//!   waits for a block to come back, the oldest first, instead of asking the driver. A thread that
//!   holds a block of the pool never waits, so that blocks in use do come back.
//! * P-6: The pool's lock is not held during a call of the driver, which may wait behind the
//!   driver's own lock for as long as another thread frees memory.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CU_MEMHOSTALLOC_DEVICEMAP, CU_MEMHOSTALLOC_PORTABLE, CUdevice_attribute_enum};
use parking_lot::{Condvar, Mutex};

use crate::event::Event;
use crate::gpu::{Gpu, PrimaryContext};
use crate::{pinned_ranges, release_thread, stream};
use rpc_core::error::{ErrorKind, Result, RpcError};

/// Statistics of one device's memory pool. Bytes are those of whole blocks, which are up to an
/// eighth (or from 16 MiB on 2 MiB) larger than the request.
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

/// Kind of memory of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Space {
    /// The device's own.
    Device,
    /// Pinned host memory, at the same address for both sides.
    Host,
}

/// A piece of memory as it came from the driver.
#[derive(Debug)]
#[must_use]
pub(super) struct Block {
    pub(super) address: u64,
    /// One of the pool's sizes.
    size: u64,
}

pub(super) struct Pool {
    space: Space,
    state: Mutex<PoolState>,
    /// Notified when a block comes back, for the waits of P-5.
    block_returned: Condvar,
}

struct PoolState {
    /// Idle blocks by size; the last one that came back is at the back.
    idle: BTreeMap<u64, VecDeque<Idle>>,
    statistics: PoolStatistics,
    /// Limit in bytes.
    limit: u64,
    /// Idle bytes that are on their way back to the driver.
    leaving: u64,
}

/// An idle block, and the events that must be reached before its last owner's work is done.
struct Idle {
    block: Block,
    since: Instant,
    /// `None` if the block was not used, or its use is known to be done.
    default_stream: Option<Event>,
    other_streams: Vec<Event>,
}

impl PoolStatistics {
    /// Adds the statistics of two pools. The peaks are added, too, although they may have been at
    /// different times.
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            allocated_bytes: self.allocated_bytes + other.allocated_bytes,
            cached_bytes: self.cached_bytes + other.cached_bytes,
            peak_allocated_bytes: self.peak_allocated_bytes + other.peak_allocated_bytes,
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            trims: self.trims + other.trims,
        }
    }
}

impl Pool {
    pub(super) fn new(space: Space, limit: u64) -> Self {
        let state = PoolState { idle: BTreeMap::new(), statistics: PoolStatistics::default(), limit, leaving: 0 };
        Self { space, state: Mutex::new(state), block_returned: Condvar::new() }
    }

    /// Takes a block of at least `size` bytes, with unspecified contents. The caller has entered
    /// the GPU.
    pub(super) fn take(&self, context: &'static PrimaryContext, size: u64) -> Result<Block> {
        let gpu = context.gpu;
        let size = block_size(size).ok_or_else(|| too_large(gpu, self.space, size))?;
        let found = self.take_idle(context, size)?;
        self.evict(gpu);
        if let Some(block) = found {
            return Ok(block);
        }
        let block = context.with_room(|| self.allocate_from_driver(gpu, size)).map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => error.context(format_args!("cannot allocate {size} bytes")),
            _ => error,
        })?;
        let mut state = self.state.lock();
        state.statistics.misses += 1;
        state.took(size);
        Ok(block)
    }

    /// Takes a block like [`take`](Self::take), by rule P-5.
    pub(super) fn take_bounded(&self, context: &'static PrimaryContext, size: u64) -> Result<Block> {
        loop {
            if let Some(block) = self.try_take_bounded(context, size)? {
                return Ok(block);
            }
            let is_stuck = |state: &mut PoolState| state.idle.is_empty() && !state.has_room(size);
            let mut state = self.state.lock();
            self.block_returned.wait_while(&mut state, is_stuck);
            if state.has_room(size) {
                continue;
            }
            let Some(oldest) = state.pop_oldest(size) else { continue };
            drop(state);
            // The block counts as idle until then, and belongs to this thread.
            let waited = oldest.wait();
            let mut state = self.state.lock();
            if let Err(error) = waited {
                state.idle.entry(oldest.block.size).or_default().push_front(oldest);
                drop(state);
                // Other waiters have to see the error, too.
                self.block_returned.notify_all();
                return Err(error);
            }
            let block = oldest.block;
            if block.size >= size {
                state.statistics.cached_bytes -= block.size;
                state.statistics.hits += 1;
                state.took(block.size);
                return Ok(block);
            }
            drop(state);
            let freed = block.size;
            let given = self.return_to_driver(context.gpu, block);
            self.state.lock().statistics.cached_bytes -= freed;
            self.block_returned.notify_all();
            given?;
        }
    }

    /// Takes a block like [`take_bounded`](Self::take_bounded); returns `None` if it would have to
    /// wait for one.
    pub(super) fn try_take_bounded(&self, context: &'static PrimaryContext, size: u64) -> Result<Option<Block>> {
        if let Some(block) = self.take_idle(context, size)? {
            return Ok(Some(block));
        }
        let mut state = self.state.lock();
        if !state.has_room(size) {
            return Ok(None);
        }
        // Counted at once, so that concurrent allocations keep to the bound.
        state.statistics.misses += 1;
        state.took(size);
        drop(state);
        let asked = context.with_room(|| self.allocate_from_driver(context.gpu, size));
        if asked.is_err() {
            self.state.lock().statistics.allocated_bytes -= size;
            self.block_returned.notify_all();
        }
        asked.map(Some)
    }

    fn take_idle(&self, context: &'static PrimaryContext, size: u64) -> Result<Option<Block>> {
        let mut state = self.state.lock();
        let blocks = state.idle.get_mut(&size);
        let idle = match self.space {
            Space::Device => blocks.and_then(VecDeque::pop_back),
            // P-2: the first block that came back is done first.
            Space::Host => blocks.and_then(VecDeque::pop_front),
        };
        let Some(idle) = idle else { return Ok(None) };
        state.forget_empty(size);
        drop(state);
        // P-6. The block counts as idle until then, and belongs to this thread.
        let may_be_taken = match self.space {
            // P-1.
            Space::Device => {
                let mut others = idle.other_streams.iter();
                others.try_for_each(|event| event.precede(context, context.default_stream)).map(|()| true)
            }
            Space::Host => idle.is_done(),
        };
        let mut state = self.state.lock();
        if !matches!(may_be_taken, Ok(true)) {
            let blocks = state.idle.entry(size).or_default();
            match self.space {
                Space::Device => blocks.push_back(idle),
                Space::Host => blocks.push_front(idle),
            }
            drop(state);
            self.block_returned.notify_all();
            return may_be_taken.map(|_| None);
        }
        state.statistics.cached_bytes -= size;
        state.statistics.hits += 1;
        state.took(size);
        Ok(Some(idle.block))
    }

    /// Returns a block to the pool. Never blocks.
    pub(super) fn give_back(&self, context: &'static PrimaryContext, block: Block) {
        let size = block.size;
        self.state.lock().statistics.allocated_bytes -= size;
        // With a lost device the memory is gone, too.
        if context.enter().is_err() {
            self.block_returned.notify_all();
            return;
        }
        let fences = stream::fence_other_streams(context)
            .and_then(|others| Ok((Event::record(context, context.default_stream)?, others)));
        match fences {
            Ok((default_stream, other_streams)) => {
                self.keep(context, block, Some(default_stream), other_streams);
            }
            // The block must not be reused, since the end of its use is unknown.
            Err(error) => rpc_core::log_limited!(WARN, %error, bytes = size, "memory is leaked"),
        }
        self.block_returned.notify_all();
    }

    /// Returns a block whose use by the device ends with `last`, an event of the default stream;
    /// with `None` it has ended.
    pub(super) fn give_back_behind(&self, context: &PrimaryContext, block: Block, last: Option<Event>) {
        self.state.lock().statistics.allocated_bytes -= block.size;
        self.keep(context, block, last, Vec::new());
        self.block_returned.notify_all();
    }

    fn keep(&self, context: &PrimaryContext, block: Block, default_stream: Option<Event>, other_streams: Vec<Event>) {
        let mut state = self.state.lock();
        state.statistics.cached_bytes += block.size;
        let blocks = state.idle.entry(block.size).or_default();
        blocks.push_back(Idle { block, since: Instant::now(), default_stream, other_streams });
        drop(state);
        if let Some(memory) = context.idle_memory() {
            release_thread::watch(memory);
        }
    }

    /// Returns idle memory above the limit to the driver (P-4), large blocks first.
    fn evict(&self, gpu: &Gpu) {
        self.return_blocks(gpu, |state, _| state.statistics.cached_bytes - state.leaving > state.limit);
    }

    /// Returns memory that has been idle for `time` to the driver, except for memory that P-3
    /// keeps. Returns the time at which the oldest of the rest became idle. It may wait for the
    /// device. The caller has entered the GPU.
    pub(super) fn release_idle(&self, gpu: &Gpu, time: Duration) -> Option<Instant> {
        self.return_blocks(gpu, |_, idle| idle.since.elapsed() >= time);
        self.state.lock().idle.values().filter_map(VecDeque::front).map(|idle| idle.since).min()
    }

    /// Returns blocks to the driver one by one, large ones first, and of each size those that came
    /// back first, for as long as they are `due`, and done (P-3).
    fn return_blocks(&self, gpu: &Gpu, due: impl Fn(&PoolState, &Idle) -> bool) {
        let sizes: Vec<u64> = self.state.lock().idle.keys().rev().copied().collect();
        for size in sizes {
            let mut is_done = true;
            while is_done {
                let mut state = self.state.lock();
                if !state.idle.get(&size).and_then(VecDeque::front).is_some_and(|idle| due(&state, idle)) {
                    break;
                }
                let Some(idle) = state.idle.get_mut(&size).and_then(VecDeque::pop_front) else { break };
                state.forget_empty(size);
                state.leaving += size;
                drop(state);
                // P-6. The block counts until it has been freed (P-5).
                is_done = idle.is_done_now();
                let kept = if is_done {
                    if let Err(error) = self.return_to_driver(gpu, idle.block) {
                        rpc_core::log_limited!(WARN, %error, bytes = size, "memory is leaked");
                    }
                    None
                } else {
                    Some(idle)
                };
                let mut state = self.state.lock();
                state.leaving -= size;
                match kept {
                    Some(idle) => state.idle.entry(size).or_default().push_front(idle),
                    None => state.statistics.cached_bytes -= size,
                }
                drop(state);
                self.block_returned.notify_all();
            }
        }
    }

    /// Returns all idle memory to the driver, after waiting for the work that used it (P-3).
    /// Returns the bytes. The caller has entered the GPU.
    pub(super) fn trim(&self, gpu: &Gpu) -> Result<u64> {
        let mut state = self.state.lock();
        let idle: Vec<_> = std::mem::take(&mut state.idle).into_values().flatten().collect();
        state.statistics.trims += 1;
        state.leaving += idle.iter().map(|idle| idle.block.size).sum::<u64>();
        drop(state);
        let mut outcome = Ok(0);
        for idle in idle {
            let size = idle.block.size;
            // The error of one block is no reason to keep the others.
            let given = idle.wait().and_then(|()| self.return_to_driver(gpu, idle.block));
            outcome = outcome.and_then(|bytes| given.map(|()| bytes + size));
            // The block counts until it has been freed, so that no thread asks the driver for more
            // in its place (P-5).
            let mut state = self.state.lock();
            state.statistics.cached_bytes -= size;
            state.leaving -= size;
            drop(state);
            self.block_returned.notify_all();
        }
        outcome
    }

    pub(super) fn set_limit(&self, gpu: &Gpu, bytes: u64) {
        self.state.lock().limit = bytes;
        self.evict(gpu);
    }

    pub(super) fn statistics(&self) -> PoolStatistics {
        self.state.lock().statistics
    }

    fn allocate_from_driver(&self, gpu: &Gpu, size: u64) -> Result<Block> {
        let bytes = usize::try_from(size).map_err(|_| too_large(gpu, self.space, size))?;
        let address = match self.space {
            Space::Device => {
                let mut address = 0;
                // SAFETY: there is room for the address, and the GPU's context is current.
                gpu.check(unsafe { gpu.driver.mem_alloc(&raw mut address, bytes) })?;
                address
            }
            Space::Host => {
                if gpu.attribute(CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)? == 0 {
                    let device = gpu.as_device();
                    return Err(RpcError::unsupported(format!("{device} does not share addresses with the host")));
                }
                let mut address: *mut c_void = ptr::null_mut();
                let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: as above.
                gpu.check(unsafe { gpu.driver.mem_host_alloc(&raw mut address, bytes, flags) })?;
                pinned_ranges::insert(address.expose_provenance(), bytes);
                address.addr() as u64
            }
        };
        Ok(Block { address, size })
    }

    fn return_to_driver(&self, gpu: &Gpu, block: Block) -> Result<()> {
        let outcome = match self.space {
            // SAFETY: it came from `mem_alloc`, and is no longer in use.
            Space::Device => unsafe { gpu.driver.mem_free(block.address) },
            Space::Host => {
                pinned_ranges::remove(block.address as usize);
                // SAFETY: it came from `mem_host_alloc`, and is no longer in use.
                unsafe { gpu.driver.mem_free_host(ptr::with_exposed_provenance_mut(block.address as usize)) }
            }
        };
        gpu.check(outcome)
    }
}

impl PoolState {
    fn took(&mut self, size: u64) {
        let statistics = &mut self.statistics;
        statistics.allocated_bytes += size;
        statistics.peak_allocated_bytes = statistics.peak_allocated_bytes.max(statistics.allocated_bytes);
    }

    /// Returns true if P-5 allows `size` more bytes.
    fn has_room(&self, size: u64) -> bool {
        self.statistics.allocated_bytes + self.statistics.cached_bytes + size <= self.limit
    }

    /// Removes the oldest block of this size, or else of the next larger size, or of the largest
    /// smaller one.
    fn pop_oldest(&mut self, size: u64) -> Option<Idle> {
        let found = self.idle.range(size..).next().or_else(|| self.idle.last_key_value()).map(|(size, _)| *size)?;
        let oldest = self.idle.get_mut(&found)?.pop_front();
        self.forget_empty(found);
        oldest
    }

    fn forget_empty(&mut self, size: u64) {
        if self.idle.get(&size).is_some_and(VecDeque::is_empty) {
            self.idle.remove(&size);
        }
    }
}

impl Idle {
    fn is_done(&self) -> Result<bool> {
        for event in self.other_streams.iter().chain(&self.default_stream) {
            if !event.is_done()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns true like [`is_done`](Self::is_done), and false on an error.
    fn is_done_now(&self) -> bool {
        matches!(self.is_done(), Ok(true))
    }

    fn wait(&self) -> Result<()> {
        self.other_streams.iter().chain(&self.default_stream).try_for_each(Event::wait)
    }
}

fn too_large(gpu: &Gpu, space: Space, size: u64) -> RpcError {
    let memory = if space == Space::Host { "pinned memory for " } else { "" };
    RpcError::new(ErrorKind::OutOfMemory, format!("{memory}{} cannot have {size} bytes", gpu.as_device()))
}

/// Returns the block size for a request: one of few different sizes, so that blocks are reused.
fn block_size(size: u64) -> Option<u64> {
    if size > isize::MAX as u64 {
        return None;
    }
    let step = if size >= LARGE_BYTES { LARGE_STEP } else { (size.next_power_of_two() / 16).max(SMALL_STEP) };
    Some(size.max(1).next_multiple_of(step))
}

/// CUDA aligns everything to at least 256 bytes.
const SMALL_STEP: u64 = 512;

/// Size in bytes from which blocks are rounded to `LARGE_STEP`, since an eighth would be much.
const LARGE_BYTES: u64 = 16 << 20;

/// Granularity of the driver's own memory.
const LARGE_STEP: u64 = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_sizes_are_few_and_waste_little() {
        assert_eq!(block_size(0), Some(512));
        assert_eq!(block_size(513), Some(1024));
        assert_eq!(block_size((1 << 20) + 1), Some((1 << 20) + (1 << 17)));
        assert_eq!(block_size((16 << 20) + 1), Some(18 << 20));
        assert_eq!(block_size(u64::MAX), None);
        let mut sizes = std::collections::BTreeSet::new();
        for size in (4096..1 << 20).step_by(61) {
            let block = block_size(size).unwrap();
            assert!(block >= size && block - size <= size / 8, "{size} {block}");
            sizes.insert(block);
        }
        assert!(sizes.len() <= 8 * 9, "{}", sizes.len());
    }
}
