//! A GPU in use: its default stream, the pools of its memory, and the modules to be unloaded there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::gpu::PrimaryContext;
use crate::idle_memory::IdleMemory;
use crate::memory_pool::{Block, Pool, PoolStatistics, Space};
use crate::retired_modules::RetiredModules;
use crate::stream::{CudaStream, fence_other_streams};
use rpc_core::device::Stream;
use rpc_core::error::Result;

/// A GPU whose primary context is open, with its pools. It lives as long as the process.
pub(super) struct OpenedGpu {
    pub(super) context: &'static PrimaryContext,
    pub(super) default_stream: Arc<CudaStream>,
    pub(super) memory: Pool,
    pub(super) pinned: Pool,
    /// Pinned memory for the buffers of copies, bounded (P-5).
    pub(super) copy_buffers: Pool,
    pub(super) retired_modules: RetiredModules,
    /// Time that memory may lie idle in the pools.
    pub(super) idle_time: Mutex<Duration>,
    /// True while the release thread knows that there is idle memory.
    is_watched: AtomicBool,
}

impl OpenedGpu {
    /// Creates the pools of a GPU with `total_memory` bytes.
    pub(super) fn new(context: &'static PrimaryContext, total_memory: u64) -> Self {
        Self {
            context,
            default_stream: Arc::new(CudaStream::default_of(context)),
            memory: Pool::new(Space::Device, total_memory / CACHED_FRACTION),
            pinned: Pool::new(Space::Host, CACHED_PINNED_BYTES),
            copy_buffers: Pool::new(Space::Host, COPY_BUFFER_BYTES),
            retired_modules: RetiredModules::default(),
            idle_time: Mutex::new(IDLE_TIME),
            is_watched: AtomicBool::new(false),
        }
    }

    /// Makes the GPU's context the calling thread's current one, which every driver call needs.
    pub(super) fn enter(&self) -> Result<()> {
        self.context.enter()
    }

    /// Takes a block of at least `size` bytes from the pool of this space, with unspecified
    /// contents. The caller has entered the GPU.
    pub(super) fn take(&'static self, space: Space, size: u64) -> Result<PoolBlock> {
        let block = self.pool(space).take(self.context, size)?;
        Ok(PoolBlock { gpu: self, space, block: Some(block) })
    }

    fn pool(&self, space: Space) -> &Pool {
        match space {
            Space::Device => &self.memory,
            Space::Host => &self.pinned,
        }
    }

    /// Returns the combined statistics of both pools of pinned memory.
    pub(super) fn pinned_statistics(&self) -> PoolStatistics {
        self.pinned.statistics().and(self.copy_buffers.statistics())
    }

    /// Waits until all work submitted to any stream of this crate so far is done.
    pub(super) fn synchronize_all(&self) -> Result<()> {
        self.enter()?;
        fence_other_streams(self.context)?.into_iter().try_for_each(|event| event.wait())?;
        self.synchronize()
    }

    /// Waits until all work submitted to the default stream so far is done.
    pub(super) fn synchronize(&self) -> Result<()> {
        self.default_stream.synchronize()
    }
}

impl IdleMemory for OpenedGpu {
    fn device_index(&self) -> i32 {
        self.context.gpu.index
    }

    fn is_watched(&self) -> &AtomicBool {
        &self.is_watched
    }

    fn trim(&self) -> Result<u64> {
        let gpu = self.context.gpu;
        Ok(self.memory.trim(gpu)? + self.pinned.trim(gpu)? + self.copy_buffers.trim(gpu)?)
    }

    fn release_idle(&self) -> Option<Instant> {
        // With a lost device the memory is gone, too.
        self.enter().ok()?;
        // Memory that becomes idle from here on is reported again.
        self.is_watched.store(false, Ordering::Release);
        let time = *self.idle_time.lock();
        let pools = [&self.memory, &self.pinned, &self.copy_buffers];
        let oldest = pools.into_iter().filter_map(|pool| pool.release_idle(self.context.gpu, time)).min()?;
        self.is_watched.store(true, Ordering::Release);
        // Memory that is old enough by now is still in use by the device.
        oldest.checked_add(time).map(|at| at.max(Instant::now() + CHECK_INTERVAL))
    }
}

/// A block of a pool. On drop it returns to the pool, behind all work that was submitted to the
/// device's streams by then.
pub(super) struct PoolBlock {
    gpu: &'static OpenedGpu,
    space: Space,
    /// `None` once the block has been returned.
    block: Option<Block>,
}

impl PoolBlock {
    /// Returns the address of the first byte.
    pub(super) fn address(&self) -> u64 {
        self.block.as_ref().map_or(0, |block| block.address)
    }
}

impl Drop for PoolBlock {
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        // If the device is lost, only the statistics change.
        let _entry = self.gpu.context.gpu.enter_temporarily();
        self.gpu.pool(self.space).give_back(self.gpu.context, block);
    }
}

/// Fraction of a device's memory that may lie idle: a quarter, so that other users of the device
/// find room.
const CACHED_FRACTION: u64 = 4;

/// Pinned memory that may lie idle, in bytes. The kernel cannot swap it.
const CACHED_PINNED_BYTES: u64 = 64 << 20;

/// Largest amount of pinned memory for the buffers of copies, in bytes: some milliseconds of the
/// bus, so that writes proceed behind a kernel, and small enough to stay pinned in every session's
/// process of a machine.
const COPY_BUFFER_BYTES: u64 = 64 << 20;

/// Default time that memory lies idle before it is returned to the driver: longer than the steps of
/// a program that reuses the same memory, and short for other processes that wait for it.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Pause between two checks of memory that is in use for longer than it may be idle.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
