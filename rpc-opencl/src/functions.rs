//! Functions that sessions with OpenCL devices register.

use std::collections::BTreeMap;

use bytes::Bytes;

use crate::device_api::offered_device;
use crate::memory_pool::PoolStatistics;
use crate::module_loader;
use crate::native_code::NativeCodeRule;
use rpc_core::dlpack::DeviceType;
use rpc_core::error::Result;
use rpc_core::function::{LoadRequest, Registry};
use rpc_core::{Context, Permission};

/// Registers this crate's functions, for sessions that offer an OpenCL device:
///
/// * `opencl.compile(path)` returns what the driver makes of a file `*.cl` of the workspace, as
///   bytes: a file `*.clbin` with them is a module that needs no compiler, for the same device and
///   driver. It needs the permission to load modules, and follows `native_code` as a loader does.
/// * `opencl.memory_statistics(index)` returns the statistics of a device's memory pool in the
///   process that serves the session: a map from the fields of [`PoolStatistics`]. The call opens a
///   device that was not in use.
/// * `opencl.trim_memory(index)` is [`OpenClDevice::trim`](crate::OpenClDevice::trim): returns idle
///   memory to the driver, for other processes, after waiting for the work that uses it. Returns
///   the bytes.
pub fn register(registry: &Registry, native_code: NativeCodeRule) {
    registry.add("opencl.compile", move |context: Context, path: String| -> Result<Bytes> {
        context.authorize(&Permission::Modules)?;
        let chosen = context.chosen_device().filter(|device| device.kind == DeviceType::OPENCL);
        let (opencl, index) = offered_device(&context, chosen.map_or(0, |device| device.index))?;
        let request = LoadRequest { path: &path, context: &context };
        module_loader::compile(opencl, index, native_code, &request).map(Bytes::from)
    });
    registry.add("opencl.memory_statistics", |context: Context, index: i32| -> Result<_> {
        let (opencl, index) = offered_device(&context, index)?;
        Ok(fields(&opencl.statistics(index)?))
    });
    registry.add("opencl.trim_memory", |context: Context, index: i32| -> Result<_> {
        let (opencl, index) = offered_device(&context, index)?;
        opencl.trim(index)
    });
}

fn fields(statistics: &PoolStatistics) -> BTreeMap<String, u64> {
    let PoolStatistics { allocated_bytes, cached_bytes, peak_allocated_bytes, hits, misses, trims } = *statistics;
    let fields = [
        ("allocated_bytes", allocated_bytes),
        ("cached_bytes", cached_bytes),
        ("peak_allocated_bytes", peak_allocated_bytes),
        ("hits", hits),
        ("misses", misses),
        ("trims", trims),
    ];
    BTreeMap::from(fields.map(|(name, value)| (name.to_owned(), value)))
}
