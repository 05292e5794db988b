//! `runtime.RPCTimeEvaluator`: a function that measures another one, at the server.

use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use rpc_core::{Handle, Operation, Reference, RpcError, Value};

use super::args::Args;
use super::session::TvmSession;
use super::time_evaluator::{Attempts, TimeEvaluator};

/// Maximum number of measurements of one call.
const MAX_REPEAT: i64 = 1_000_000;

/// Creates a measurement by the arguments of `runtime.RPCTimeEvaluator`.
pub(super) async fn time_evaluator(session: &TvmSession, args: &mut Args) -> Result<TimeEvaluator, RpcError> {
    let (module, name) = (args.optional_module()?, args.text()?);
    // The device is that of the function's tensors.
    let _device = (args.int()?, args.int()?);
    let (number, repeat, min_repeat_ms) = (args.int()?, args.int()?, args.int()?);
    let limit_zero_time_iterations = args.int()?;
    let (cooldown_ms, repeats_to_cooldown) = (args.int()?, args.int()?);
    let (cache_flush_bytes, before) = (args.int()?, args.text()?);
    args.finish()?;
    if number < 1 || !(1..=MAX_REPEAT).contains(&repeat) {
        let text = format!("number must be at least 1, and repeat from 1 to {MAX_REPEAT}");
        return Err(RpcError::invalid_argument(text));
    }
    let times = [min_repeat_ms, cooldown_ms, cache_flush_bytes];
    if let Some(negative) = times.into_iter().find(|value| *value < 0) {
        return Err(RpcError::invalid_argument(format!("times and sizes must not be negative, as {negative} is")));
    }
    let mut found = Found { session, handles: Vec::new() };
    let function = found.take(match module {
        Some(module) => session.find_in_module(module, &name).await,
        None => session.find_function(&name).await,
    })?;
    let before = match before.as_str() {
        "" => None,
        before => Some(found.take(session.find_function(before).await)?),
    };
    let timer = found.take(session.find_function("rpc.time_function").await)?;
    found.handles.clear();
    Ok(TimeEvaluator {
        function,
        before,
        timer,
        number,
        repeat,
        min_repeat_ms,
        limit_zero_time_iterations,
        cooldown: Duration::from_millis(cooldown_ms.unsigned_abs()),
        repeats_to_cooldown: repeats_to_cooldown.max(1),
        cache_flush_bytes,
    })
}

/// Measures calls with these arguments. Returns the seconds for one call of each measurement.
pub(super) async fn measure(
    evaluator: &TimeEvaluator,
    session: &TvmSession,
    args: Vec<Value>,
) -> Result<Bytes, RpcError> {
    // Each measurement copies the arguments.
    let size: u64 = args.iter().map(|arg| arg.size_hint() as u64).sum();
    let _copies = session.queued().reserve(size)?;
    // Once as numbers, and once as bytes.
    let _lease = session.queued().reserve(evaluator.repeat.unsigned_abs() * 2 * size_of::<f64>() as u64)?;
    let mut samples = BytesMut::with_capacity(evaluator.repeat.unsigned_abs() as usize * size_of::<f64>());
    let TimeEvaluator { mut number, repeat, min_repeat_ms, .. } = *evaluator;
    if evaluator.before.is_none() && evaluator.cooldown.is_zero() && min_repeat_ms == 0 {
        for second in sample(evaluator, session, number, repeat, 1, &args).await? {
            samples.put_f64_le(second);
        }
        return Ok(samples.freeze());
    }
    // As at a server of TVM, the number of calls of one measurement is where the next one begins.
    let mut warmup = 1;
    for at in 1..=repeat {
        if let Some(function) = evaluator.before {
            let result = session.submit(Operation::Call { function, args: args.clone() }).await?;
            session.session().release(&result);
        }
        let mut attempts = Attempts::new(evaluator, number);
        let second = loop {
            let taken = sample(evaluator, session, attempts.number, 1, std::mem::take(&mut warmup), &args).await?;
            let second = taken.first().copied().ok_or_else(|| RpcError::internal("a measurement has one sample"))?;
            if attempts.ends_with(second * 1e3 * attempts.number as f64) {
                break second;
            }
        };
        number = attempts.number;
        samples.put_f64_le(second);
        if !evaluator.cooldown.is_zero() && at % evaluator.repeats_to_cooldown == 0 && at < repeat {
            tokio::time::sleep(evaluator.cooldown).await;
        }
    }
    Ok(samples.freeze())
}

/// Makes `repeat` measurements of `number` calls after `warmup` calls. Returns the seconds for one
/// call of each.
async fn sample(
    evaluator: &TimeEvaluator,
    session: &TvmSession,
    number: i64,
    repeat: i64,
    warmup: i64,
    args: &[Value],
) -> Result<Vec<f64>, RpcError> {
    let mut all = vec![
        Reference::Function(evaluator.function).into(),
        Value::Int(number),
        Value::Int(repeat),
        Value::Float(0.0),
        Value::Int(warmup),
        Value::Int(evaluator.cache_flush_bytes),
    ];
    all.extend_from_slice(args);
    let Value::List(seconds) = session.submit(Operation::Call { function: evaluator.timer, args: all }).await? else {
        return Err(RpcError::internal("a measurement is a list of seconds"));
    };
    let seconds = seconds.into_iter().map(|second| match second {
        Value::Float(second) => Ok(second),
        _ => Err(RpcError::internal("a measurement is a number of seconds")),
    });
    seconds.collect()
}

/// Functions that were looked up for a measurement, freed if there is none in the end.
struct Found<'a> {
    session: &'a TvmSession,
    handles: Vec<Handle>,
}

impl Found<'_> {
    fn take(&mut self, found: Result<Handle, RpcError>) -> Result<Handle, RpcError> {
        let handle = found?;
        self.handles.push(handle);
        Ok(handle)
    }
}

impl Drop for Found<'_> {
    fn drop(&mut self) {
        let handles = self.handles.iter().map(|handle| Reference::Function(*handle).into());
        self.session.session().release(&Value::List(handles.collect()));
    }
}
