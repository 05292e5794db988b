//! The functions that come with the device.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::gpu::{Gpu, Opened};
use crate::matmul::matmul;
use crate::pool::PoolStatistics;
use crate::stream::CudaStream;
use rpc_core::Context;
use rpc_core::device::Stream;
use rpc_core::dlpack::Device;
use rpc_core::error::{Result, RpcError};
use rpc_core::function::Registry;
use rpc_core::tensor::{TensorView, TensorViewMut};

/// Registers the functions that come with the device, for sessions that offer it:
///
/// * `cuda.matmul(a, b, out)` is [`matmul`], on the stream of the lane.
/// * `cuda.memory_statistics(index)` tells what the pools of a device have done in the process that serves the session: a map
///   of the scopes `global`, the device's memory, and `host`, pinned memory, to the fields of [`PoolStatistics`] by their
///   names. See [`CudaDevice::statistics`](crate::CudaDevice::statistics) and
///   [`pinned_statistics`](crate::CudaDevice::pinned_statistics). A device that was not in use is opened by that, which takes
///   some of its memory.
/// * `cuda.trim_memory(index)` is [`CudaDevice::trim`](crate::CudaDevice::trim): gives idle memory back to the driver,
///   for others, waits for the work that uses it, and returns the bytes.
pub fn register(registry: &Registry) {
    registry.add("cuda.matmul", |context: Context, a: TensorView, b: TensorView, mut out: TensorViewMut| {
        // If there is none, what is wrong with the device is told below.
        let lane = context.stream(a.tensor().device()).ok();
        matmul(&a, &b, &mut out, lane.as_ref().and_then(|stream| stream.as_any().downcast_ref()))
    });
    registry.add("cuda.memory_statistics", |context: Context, index: i32| {
        on_device(&context, index, |_, opened| {
            let scopes = [("global", opened.memory.statistics()), ("host", opened.pinned_statistics())];
            Ok(BTreeMap::from(scopes.map(|(scope, statistics)| (scope.to_owned(), fields(&statistics)))))
        })
    });
    registry.add("cuda.trim_memory", |context: Context, index: i32| {
        on_device(&context, index, |gpu, opened| opened.trim(gpu))
    });
}

/// Calls `act` with a device of CUDA's that the session offers, entered. Nothing is loaded for a session that offers none.
fn on_device<R>(
    context: &Context,
    index: i32,
    act: impl FnOnce(&'static Gpu, &'static Opened) -> Result<R>,
) -> Result<R> {
    let device = Device::cuda(index);
    let stream: Arc<dyn Stream> = context.devices().get(device)?.default_stream(index)?;
    let Some(stream) = stream.as_any().downcast_ref::<CudaStream>() else {
        return Err(RpcError::unsupported(format!("{device} of this session is not CUDA's")));
    };
    let gpu = stream.gpu();
    act(gpu, gpu.enter()?)
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
