//! Devices in use, opened at their first use: context, default stream, and the pool of the memory.
//!
//! The pool, its copy buffers and the thread that frees memory belong to one device and are given
//! it, so that these files import each other.

use std::ptr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use opencl3::context::context::create_context;
use opencl3::device::{CL_DEVICE_GLOBAL_MEM_SIZE, CL_DEVICE_HOST_UNIFIED_MEMORY, CL_DEVICE_MEM_BASE_ADDR_ALIGN};
use opencl3::types::cl_context;
use parking_lot::Mutex;

use crate::copy_buffers::CopyBuffers;
use crate::device_list::{DeviceList, ListedDevice};
use crate::handle::ContextHandle;
use crate::memory_pool::Pool;
use crate::stream::OpenClStream;
use rpc_core::device::Stream;
use rpc_core::error::Result;

/// A device whose context is open. It lives as long as the process.
pub(super) struct OpenedDevice {
    pub(super) listed: &'static ListedDevice,
    context: ContextHandle,
    pub(super) default_stream: Arc<OpenClStream>,
    /// Queue on which memory is mapped that no kernel uses, so that this waits for no kernel.
    pub(super) copy_stream: OpenClStream,
    pub(super) pool: Pool,
    pub(super) copy_buffers: CopyBuffers,
    /// Alignment of the start of a part of a buffer that a kernel is given, in bytes.
    pub(super) part_alignment: u64,
    /// True if the device works in host memory, as processors and most boards do.
    pub(super) has_host_memory: bool,
    /// Time that memory may lie idle in the pool.
    pub(super) idle_time: Mutex<Duration>,
}

impl OpenedDevice {
    /// Returns a device of the list, opened.
    pub(super) fn get(list: &'static DeviceList, listed: &'static ListedDevice) -> Result<&'static Self> {
        static SLOTS: OnceLock<Box<[Slot]>> = OnceLock::new();
        listed.check_not_lost()?;
        let slots = SLOTS.get_or_init(|| list.all.iter().map(|_| Slot::default()).collect());
        let slot = &slots[listed.index as usize];
        if let Some(opened) = slot.opened.get() {
            return Ok(opened);
        }
        let _opening = slot.opening.lock();
        if let Some(opened) = slot.opened.get() {
            return Ok(opened);
        }
        let opened = Self::new(listed)?;
        Ok(slot.opened.get_or_init(|| opened))
    }

    fn new(listed: &'static ListedDevice) -> Result<Self> {
        let created = create_context(&[listed.id()], ptr::null(), None, ptr::null_mut());
        let context = ContextHandle::new(listed.check("clCreateContext", created)?);
        let default_stream = Arc::new(OpenClStream::new(listed, context.raw(), true)?);
        let copy_stream = OpenClStream::new(listed, context.raw(), false)?;
        let bits = listed.number(CL_DEVICE_MEM_BASE_ADDR_ALIGN).unwrap_or(DEFAULT_ALIGNMENT_BITS);
        let total_memory = listed.number(CL_DEVICE_GLOBAL_MEM_SIZE).unwrap_or(u64::MAX);
        Ok(Self {
            listed,
            context,
            default_stream,
            copy_stream,
            pool: Pool::new(total_memory, total_memory / CACHED_FRACTION),
            copy_buffers: CopyBuffers::default(),
            part_alignment: (bits / 8).max(1).next_power_of_two(),
            has_host_memory: listed.number(CL_DEVICE_HOST_UNIFIED_MEMORY) == Some(1),
            idle_time: Mutex::new(IDLE_TIME),
        })
    }

    pub(super) fn context(&self) -> cl_context {
        self.context.raw()
    }

    /// Creates a stream with an order of its own.
    pub(super) fn create_stream(&self) -> Result<OpenClStream> {
        self.listed.check_not_lost()?;
        OpenClStream::new(self.listed, self.context.raw(), false)
    }

    /// Returns idle memory to the driver, after waiting for the work that uses it. Returns the
    /// number of bytes.
    pub(super) fn trim(&self) -> Result<u64> {
        self.default_stream.synchronize()?;
        Ok(self.pool.trim(self) + self.copy_buffers.trim()?)
    }
}

/// Place of one device of the list.
#[derive(Default)]
struct Slot {
    opening: Mutex<()>,
    opened: OnceLock<OpenedDevice>,
}

/// Fraction of a device's memory that may lie idle: a quarter, so that other users of the device
/// find room.
const CACHED_FRACTION: u64 = 4;

/// Default time that memory lies idle before it is returned to the driver: longer than the steps of
/// a program that reuses the same memory, and short for other processes that wait for it.
const IDLE_TIME: Duration = Duration::from_secs(10);

/// Alignment in bits for drivers that tell none: that of the largest vector, which is the least
/// that OpenCL allows for devices without a profile of their own.
const DEFAULT_ALIGNMENT_BITS: u64 = 1024;
