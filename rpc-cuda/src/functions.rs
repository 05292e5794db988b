//! Functions that sessions with CUDA devices register.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::device_api::CudaDevice;
use crate::matmul::matmul;
use crate::memory_pool::PoolStatistics;
use crate::stream::CudaStream;
use rpc_core::Context;
use rpc_core::device::Stream;
use rpc_core::dlpack::Device;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::Registry;
use rpc_core::tensor::{TensorView, TensorViewMut};

/// Registers this crate's functions, for sessions that offer a CUDA device:
///
/// * `cuda.matmul(a, b, out)` is [`matmul`], on the stream of the lane.
/// * `cuda.memory_statistics(index)` returns the statistics of a device's memory pools in the
///   process that serves the session: a map from the scopes `global`, the device's memory, and
///   `host`, pinned memory, to the fields of [`PoolStatistics`] by name. See
///   [`CudaDevice::statistics`](crate::CudaDevice::statistics) and
///   [`pinned_statistics`](crate::CudaDevice::pinned_statistics). The call opens a device that was
///   not in use, which takes some of its memory.
/// * `cuda.trim_memory(index)` is [`CudaDevice::trim`](crate::CudaDevice::trim): returns idle
///   memory to the driver, for other processes, after waiting for the work that uses it. Returns
///   the bytes.
pub fn register(registry: &Registry) {
    registry.add("cuda.matmul", |context: Context, a: TensorView, b: TensorView, mut out: TensorViewMut| {
        // Without a stream, the error of the device is reported below.
        let lane = context.stream(a.tensor().device()).ok();
        matmul(&a, &b, &mut out, lane.as_ref().and_then(|stream| stream.as_any().downcast_ref()))
    });
    registry.add("cuda.memory_statistics", |context: Context, index: i32| -> Result<_> {
        let (cuda, index) = offered_device(&context, index)?;
        let scopes = [("global", cuda.statistics(index)?), ("host", cuda.pinned_statistics(index)?)];
        Ok(BTreeMap::from(scopes.map(|(scope, statistics)| (scope.to_owned(), fields(&statistics)))))
    });
    registry.add("cuda.trim_memory", |context: Context, index: i32| -> Result<_> {
        let (cuda, index) = offered_device(&context, index)?;
        cuda.trim(index)
    });
}

/// Returns the CUDA devices, and the index among them of the one that the session offers under
/// `index`. Loads nothing for a session that offers none.
fn offered_device(context: &Context, index: i32) -> Result<(CudaDevice, i32)> {
    let device = Device::cuda(index);
    let stream: Arc<dyn Stream> = context.devices().get(device)?.default_stream(index)?;
    let Some(stream) = stream.as_any().downcast_ref::<CudaStream>() else {
        return Err(RpcError::unsupported(format!("{device} of this session is not served by rpc-cuda")));
    };
    Ok((CudaDevice::open()?, stream.device().index))
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
