//! `rpc.time_function`: the run time of a function, measured at the server.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_core::client::LeaseOptions;
use rpc_core::device::{Stream, StreamTimer};
use rpc_core::function::{ArgScope, IntoArg, IntoArgs, Object, Rest};
use rpc_core::{
    Context, Device, DeviceType, ErrorKind, Function, FunctionKind, LocalValue, Registry, RemoteFunction, Result,
    RpcError, Session, Value,
};

use super::{cancellable, cancelled};
use crate::server::server_state::ServerState;

/// Options of a measurement, named as in TVM's time evaluator (`python/tvm/runtime/module.py`,
/// `time_evaluator`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TimeOptions {
    /// Initial number of calls in a sample. Default 1.
    pub number: u64,
    /// Number of samples. Default 10, enough to show the spread.
    pub repeat: u64,
    /// Minimum time of a sample: `number` grows until it is reached. Default 0. A few milliseconds
    /// hide the resolution of the clock from functions that take microseconds.
    pub min_repeat: Duration,
    /// Number of calls before the first sample, to fill caches. Default 1.
    pub warmup: u64,
    /// Bytes of host memory that are written before each sample, so that the host's caches hold
    /// nothing else. Default 0. They count against the memory of the session.
    pub cache_flush_bytes: u64,
    /// Device on which the measurement has a [lease](Session::lease). Default: none.
    pub lease: Option<Device>,
}

impl Default for TimeOptions {
    fn default() -> Self {
        Self { number: 1, repeat: 10, min_repeat: Duration::ZERO, warmup: 1, cache_flush_bytes: 0, lease: None }
    }
}

/// Measures calls of `function` with `args` at the server. Returns all samples, in seconds per
/// call.
///
/// If one of the tensors is on a device, a sample has the time for which the device ran the kernels
/// that the calls have started, where it tells that, and otherwise the time until their work is
/// done.
///
/// A function that returns objects has them freed at once. The session must offer
/// `rpc.time_function`. The blocking form is this one under
/// [`block_on`](rpc_core::blocking::block_on).
///
/// # Errors
///
/// The first error of the function, and those of any call.
pub async fn time_function(
    session: &Session,
    function: &RemoteFunction,
    options: &TimeOptions,
    args: impl IntoArgs,
) -> Result<Vec<f64>> {
    let timer = session.get_function("rpc.time_function").await?;
    let call = timer.call(Timed { function, options, args });
    let Some(device) = options.lease else { return call.await };
    let lease = session.lease(device, &LeaseOptions::default()).await?;
    let samples = call.await;
    // Dropped last, so that it lasts as long as the measurement.
    drop(lease);
    samples
}

/// The arguments of `rpc.time_function`.
struct Timed<'a, A> {
    function: &'a RemoteFunction,
    options: &'a TimeOptions,
    args: A,
}

impl<A: IntoArgs> IntoArgs for Timed<'_, A> {
    fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        let TimeOptions { number, repeat, min_repeat, warmup, cache_flush_bytes, lease: _ } = self.options;
        let mut args = vec![
            self.function.into_arg(scope)?,
            number.into_arg(scope)?,
            repeat.into_arg(scope)?,
            (min_repeat.as_secs_f64() * 1e3).into_arg(scope)?,
            warmup.into_arg(scope)?,
            cache_flush_bytes.into_arg(scope)?,
        ];
        args.extend(self.args.into_args(scope)?);
        Ok(args)
    }
}

pub(super) fn register(registry: &Registry) {
    let serve = |context: Context,
                 function: Function,
                 number: u64,
                 repeat: u64,
                 min_repeat_ms: f64,
                 warmup: u64,
                 cache_flush_bytes: u64,
                 Rest(args): Rest| {
        let min_repeat = Duration::try_from_secs_f64(min_repeat_ms / 1e3).map_err(|_| {
            RpcError::invalid_argument(format!("min_repeat_ms must be positive, and was {min_repeat_ms}"))
        })?;
        let options = TimeOptions { number, repeat, min_repeat, warmup, cache_flush_bytes, lease: None };
        measure(&context, &function, &options, &args)
    };
    registry.add("rpc.time_function", serve);
}

/// Maximum number of samples, which are a list of floats in one reply.
const MAX_REPEAT: u64 = 1_000_000;

/// Time between two checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(1);

/// Returns the samples, in seconds per call.
fn measure(context: &Context, function: &Function, options: &TimeOptions, args: &[LocalValue]) -> Result<Vec<f64>> {
    let TimeOptions { number, repeat, min_repeat, warmup, cache_flush_bytes, lease: _ } = *options;
    if number == 0 || repeat == 0 || repeat > MAX_REPEAT {
        let message = format!("number must be at least 1, and repeat from 1 to {MAX_REPEAT}");
        return Err(RpcError::invalid_argument(message));
    }
    let _flush_memory = context.reserve_memory(cache_flush_bytes)?;
    let mut flush_buffer = flush_buffer(cache_flush_bytes)?;
    let mut timer = Timer { context, function, args, stream: device_stream(context, args), per_call: CANCEL_CHECK };
    timer.calls(warmup)?;
    // Once as numbers, and once as the values of the reply.
    let _samples = context.reserve_memory(repeat * (size_of::<f64>() + size_of::<LocalValue>()) as u64)?;
    let mut number = number;
    let mut samples = Vec::new();
    while (samples.len() as u64) < repeat {
        flush_caches(&mut flush_buffer);
        let elapsed = timer.calls(number)?;
        if elapsed < min_repeat && number < u64::MAX / 2 {
            number = larger(number, elapsed, min_repeat);
        } else {
            samples.push(elapsed.as_secs_f64() / number as f64);
        }
    }
    Ok(samples)
}

/// Least length of a line of the host's caches in bytes.
const CACHE_LINE: usize = 64;

/// Maximum number of bytes that are written before each sample: more than caches have.
const MAX_CACHE_FLUSH: u64 = 4 << 30;

fn flush_buffer(len: u64) -> Result<Vec<u8>> {
    if len > MAX_CACHE_FLUSH {
        let message = format!("cache_flush_bytes must be at most {MAX_CACHE_FLUSH}, and was {len}");
        return Err(RpcError::invalid_argument(message));
    }
    let len = len as usize;
    let mut buffer = Vec::new();
    let reserved = buffer.try_reserve_exact(len);
    reserved.map_err(|error| RpcError::new(ErrorKind::LimitExceeded, format!("no memory to flush caches: {error}")))?;
    buffer.resize(len, 0);
    Ok(buffer)
}

/// Writes to each cache line of `buffer`, which then takes the place of other memory in the caches.
fn flush_caches(buffer: &mut [u8]) {
    for byte in buffer.iter_mut().step_by(CACHE_LINE) {
        *byte = byte.wrapping_add(1);
    }
    // The bytes are never read, and without this the compiler could leave the writes out.
    std::hint::black_box(buffer);
}

/// Returns the number of calls to try after `number` of them took less than `wanted`: slightly more
/// than the last attempt suggests, and at most ten times as many, since the first calls may have
/// been atypical.
fn larger(number: u64, elapsed: Duration, wanted: Duration) -> u64 {
    let factor = wanted.as_secs_f64() / elapsed.as_secs_f64().max(1e-9) * 1.1;
    let suggested = number as f64 * factor.clamp(1.0, 10.0);
    (suggested as u64).max(number + number / 2 + 1)
}

/// Returns the stream of the lane on the device of the first tensor that is not on the processor.
fn device_stream(context: &Context, args: &[LocalValue]) -> Option<Arc<dyn Stream>> {
    let devices = args.iter().filter_map(|arg| match arg {
        Value::Object(Object::Tensor(tensor)) => Some(tensor.device()),
        _ => None,
    });
    let device = devices.into_iter().find(|device| device.kind != DeviceType::CPU)?;
    // Without a stream, the call itself reports the error of the device.
    context.stream(device).ok()
}

struct Timer<'a> {
    context: &'a Context,
    function: &'a Function,
    args: &'a [LocalValue],
    /// Stream of the lane on the device of the first tensor, if that is not the processor: calls
    /// may only start its work.
    stream: Option<Arc<dyn Stream>>,
    /// Time between the beginnings of the last calls, whatever the device says of its part. It
    /// decides how many calls are made between two checks for cancellation: a check would show in
    /// functions that take less than a microsecond.
    per_call: Duration,
}

impl Timer<'_> {
    /// Makes `count` calls, and returns their total time.
    fn calls(&mut self, count: u64) -> Result<Duration> {
        let mut done = 0;
        let mut elapsed = Duration::ZERO;
        while done < count {
            if self.context.is_cancelled() {
                return Err(cancelled());
            }
            let batch = (CANCEL_CHECK.as_nanos() / self.per_call.as_nanos().max(1)).clamp(1, 1 << 16) as u64;
            let batch = batch.min(count - done);
            let start = Instant::now();
            elapsed += self.batch(batch)?;
            // Fits: a batch has at most 2^16 calls.
            self.per_call = start.elapsed() / batch as u32;
            done += batch;
        }
        Ok(elapsed)
    }

    /// Makes `count` calls, and returns their time: that of the kernels that they have started, by
    /// the clock of the device, or else the time until all of their work is done.
    fn batch(&self, count: u64) -> Result<Duration> {
        let Some(stream) = &self.stream else { return self.host_batch(count) };
        // Work from before does not count.
        stream.synchronize()?;
        let timer = stream.start_timer()?;
        let start = Instant::now();
        self.host_batch(count)?;
        let on_device = timer.map(StreamTimer::stop).transpose()?.flatten();
        stream.synchronize()?;
        Ok(on_device.unwrap_or_else(|| start.elapsed()))
    }

    fn host_batch(&self, count: u64) -> Result<Duration> {
        if self.function.kind() == FunctionKind::Async {
            return self.async_batch(count);
        }
        let start = Instant::now();
        for _ in 0..count {
            self.context.call(self.function, self.args.to_vec())?;
        }
        Ok(start.elapsed())
    }

    fn async_batch(&self, count: u64) -> Result<Duration> {
        let calls = async {
            let start = Instant::now();
            for _ in 0..count {
                self.context.call_async(self.function, self.args.to_vec()).await?;
            }
            Ok(start.elapsed())
        };
        wait_for_async(self.context, calls)
    }
}

/// Waits for calls of asynchronous functions, on a lane's thread, which may block. Futures that
/// need the server's runtime find it there.
pub(super) fn wait_for_async<T>(context: &Context, calls: impl Future<Output = Result<T>>) -> Result<T> {
    match context.extension::<ServerState>().and_then(|state| state.runtime().cloned()) {
        Some(runtime) => runtime.block_on(cancellable(context, super::CANCEL_CHECK, calls)),
        None => rpc_core::blocking::block_on(calls)?,
    }
}
