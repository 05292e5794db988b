//! The devices of the kind `opencl`: allocation, streams, copies and attributes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device_list::{DeviceList, ListedDevice};
use crate::memory::OpenClMemory;
use crate::memory_pool::PoolStatistics;
use crate::opened_device::OpenedDevice;
use crate::stream::OpenClStream;
use crate::transfer::{self, DevicePlace};
use crate::{attributes, release_thread};
use rpc_core::device::{AllocRequest, DeviceApi, DeviceAttribute, Memory, Stream, copy_by_host, out_of_range};
use rpc_core::dlpack::{Device, DeviceType};
use rpc_core::error::{Result, RpcError};
use rpc_core::function::Context;
use rpc_core::value::Value;

/// The OpenCL devices of this process, from `opencl:0`: GPUs and accelerators of all platforms, in
/// the order of OpenCL's loader, and behind them processors.
///
/// All copies are the same: streams, pools and lost devices belong to the process. A device is
/// opened when it is first used.
#[derive(Clone, Copy)]
pub struct OpenClDevice {
    list: &'static DeviceList,
}

impl OpenClDevice {
    /// Loads OpenCL and finds its devices, unless that has been done. The outcome of the first call
    /// is kept for the process.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`](rpc_core::ErrorKind::DeviceUnavailable), if there is no
    /// library, no platform, or no device that can be used; the message gives the reason.
    pub fn open() -> Result<Self> {
        Ok(Self { list: DeviceList::get()? })
    }

    /// Returns the default stream of a device, as its own type; the same one at each call.
    ///
    /// # Errors
    ///
    /// An index out of range; a device that is lost or cannot be opened.
    pub fn stream(&self, index: i32) -> Result<Arc<OpenClStream>> {
        Ok(self.opened(index)?.default_stream.clone())
    }

    /// Returns the statistics of a device's memory pool.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn statistics(&self, index: i32) -> Result<PoolStatistics> {
        Ok(self.opened(index)?.pool.statistics())
    }

    /// Returns the idle memory of a device's pool to the driver, after waiting for the work that
    /// uses it. Returns the number of bytes.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream), and the error of that work.
    pub fn trim(&self, index: i32) -> Result<u64> {
        self.opened(index)?.trim()
    }

    /// Sets the number of bytes of a device's memory that the pool may keep idle; by default a
    /// quarter of the memory.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn set_cache_limit(&self, index: i32, bytes: u64) -> Result<()> {
        let opened = self.opened(index)?;
        opened.pool.set_limit(opened, bytes);
        Ok(())
    }

    /// Sets the time that memory may lie idle in a device's pool before it is returned to the
    /// driver for other processes; 10 seconds by default.
    ///
    /// # Errors
    ///
    /// As [`stream`](Self::stream).
    pub fn set_idle_time(&self, index: i32, time: Duration) -> Result<()> {
        let opened = self.opened(index)?;
        *opened.idle_time.lock() = time;
        release_thread::watch(opened);
        Ok(())
    }

    /// Returns a device, opened.
    pub(super) fn opened(&self, index: i32) -> Result<&'static OpenedDevice> {
        OpenedDevice::get(self.list, self.listed(index)?)
    }

    fn listed(&self, index: i32) -> Result<&'static ListedDevice> {
        let found = usize::try_from(index).ok().and_then(|index| self.list.all.get(index));
        found.ok_or_else(|| out_of_range(Device::opencl(index), self.list.all.len() as i32))
    }
}

impl DeviceApi for OpenClDevice {
    fn kind(&self) -> DeviceType {
        DeviceType::OPENCL
    }

    fn count(&self) -> Result<i32> {
        // Nobody has so many devices.
        Ok(self.list.all.len() as i32)
    }

    fn attribute(&self, index: i32, attribute: DeviceAttribute) -> Result<Value> {
        match self.listed(index) {
            Ok(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(true)),
            Err(_) if attribute == DeviceAttribute::Exists => Ok(Value::Bool(false)),
            listed => attributes::attribute_value(listed?, attribute),
        }
    }

    /// Allocates with alignments up to what the device promises of every buffer. The scope `host`
    /// is host memory that the device uses, too, in place where it can.
    fn allocate(&self, index: i32, request: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Ok(Box::new(OpenClMemory::allocate(self.opened(index)?, request)?))
    }

    fn create_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(self.opened(index)?.create_stream()?))
    }

    fn default_stream(&self, index: i32) -> Result<Arc<dyn Stream>> {
        Ok(self.stream(index)?)
    }

    unsafe fn copy(
        &self,
        from: &dyn Memory,
        from_offset: u64,
        to: &dyn Memory,
        to_offset: u64,
        len: u64,
    ) -> Result<()> {
        let (source, target) =
            (from.as_any().downcast_ref::<OpenClMemory>(), to.as_any().downcast_ref::<OpenClMemory>());
        if let (Some(source), Some(target)) = (source, target)
            && std::ptr::eq(source.opened(), target.opened())
            && let (Some(from), Some(to)) = (source.on_device(), target.on_device())
        {
            source.let_default_stream_follow()?;
            target.let_default_stream_follow()?;
            let from = DevicePlace { buffer: from, offset: from_offset };
            let to = DevicePlace { buffer: to, offset: to_offset };
            // SAFETY: the caller's promises are the same; later uses of the memory, and its
            // release, come behind the copy on the default stream.
            return unsafe { transfer::on_device(source.opened(), from, to, len) };
        }
        // Host memory is the processor's whenever no kernel runs on it, and copies between it and a
        // device wait for the device themselves.
        // SAFETY: the caller's promises are the same.
        unsafe { copy_by_host(from, from_offset, to, to_offset, len) }
    }
}

impl fmt::Debug for OpenClDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenClDevice").field("count", &self.list.all.len()).finish()
    }
}

/// Returns the OpenCL devices, and the index among them of the one that the session offers under
/// `index`. Loads nothing for a session that offers none.
pub(super) fn offered_device(context: &Context, index: i32) -> Result<(OpenClDevice, i32)> {
    let device = Device::opencl(index);
    let stream = context.devices().get(device)?.default_stream(index)?;
    let Some(stream) = stream.as_any().downcast_ref::<OpenClStream>() else {
        return Err(RpcError::unsupported(format!("{device} of this session is not served by rpc-opencl")));
    };
    Ok((OpenClDevice::open()?, stream.device().index))
}
