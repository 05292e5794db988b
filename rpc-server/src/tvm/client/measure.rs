//! `rpc.time_function` at a server of TVM: its own `runtime.RPCTimeEvaluator`.

use std::sync::Arc;

use rpc_core::reply::Outcome;
use rpc_core::{Device, Reference, RpcError, Value};
use rpc_tvm::wire::{CallResult, Request, ResultKind, ServerReply, WireValue};

use super::arguments::Args;
use super::link::Frame;
use super::objects::{Held, other_kind};
use super::server_calls::{call, server_function, unexpected};
use super::state::ClientCore;
use super::values::checked_device;

/// Maximum number of samples, which are a list of floats in one reply.
const MAX_REPEAT: u64 = 1_000_000;

/// Number of attempts of evaluators whose clocks stand still, as TVM's clients send it.
const ZERO_TIME_ITERATIONS: i64 = 100;

/// Measures a function: `rpc.time_function(function, number, repeat, min_repeat_ms, warmup,
/// cache_flush_bytes, arguments…)`. The evaluator makes one call before the first sample.
pub(super) async fn time_function(core: &Arc<ClientCore>, id: u64, args: &mut Args) -> Outcome {
    let (function, number, repeat) = (args.object()?, args.number()?, args.number()?);
    let (min_repeat_ms, warmup, cache_flush) = (args.float()?, args.number()?, args.number()?);
    let rest = args.rest();
    if number == 0 || !(1..=MAX_REPEAT).contains(&repeat) || !(0.0..=1e9).contains(&min_repeat_ms) {
        let text = format!("number must be at least 1, repeat from 1 to {MAX_REPEAT}, and min_repeat_ms from 0 on");
        return Err(RpcError::invalid_argument(text));
    }
    let (module, name, handle) = {
        let objects = core.objects.lock();
        let Held::Function { origin, handle } = objects.get(function)? else {
            return Err(other_kind(function, "function of the server"));
        };
        let Some(origin) = origin else {
            return Err(RpcError::unsupported(
                "a server of TVM measures functions by their names, and this one has none",
            ));
        };
        // A module that was freed is an address of nothing at the server.
        let module = match origin.module {
            Some(module) => WireValue::Module(objects.module(module)?),
            None => WireValue::None,
        };
        (module, origin.name.to_string(), *handle)
    };
    let device = rest.iter().find_map(|arg| match arg {
        Value::Object(Reference::Tensor(tensor)) => Some(tensor.device),
        _ => None,
    });
    let device = checked_device(device.unwrap_or(Device::cpu()))?;
    for _ in 1..warmup.min(MAX_REPEAT) {
        let frame = core.call_frame(handle, rest.clone())?;
        // No more of them once nobody waits for the measurement.
        core.room(id, frame.len()).await?;
        if let ServerReply::Call(CallResult::Object(_, handle) | CallResult::Tensor(_, handle)) =
            core.link.ask(frame).await?
        {
            core.free(&Held::Object(handle));
        }
    }
    let evaluator = server_function(core, "runtime.RPCTimeEvaluator").await?;
    let int = |value: u64| WireValue::Int(i64::try_from(value).unwrap_or(i64::MAX));
    let terms = vec![
        module,
        WireValue::Str(name.into()),
        WireValue::Int(device.kind.0.into()),
        WireValue::Int(device.index.into()),
        int(number),
        int(repeat),
        WireValue::Int(min_repeat_ms.ceil() as i64),
        WireValue::Int(ZERO_TIME_ITERATIONS),
        WireValue::Int(0),
        WireValue::Int(1),
        int(cache_flush),
        "".into(),
    ];
    let CallResult::Object(ResultKind::Function, timer) = call(core, evaluator, terms).await? else {
        return Err(unexpected("a function that measures"));
    };
    let measured = async {
        let frame = core.call_frame(timer, rest)?;
        core.link.ask(frame).await
    };
    let measured = measured.await;
    core.link.send(Frame::of(&Request::Free { handle: timer }), |_| {});
    let ServerReply::Call(CallResult::Bytes(samples)) = measured? else {
        return Err(unexpected("the samples of a measurement"));
    };
    if samples.len() as u64 != repeat * size_of::<f64>() as u64 {
        return Err(unexpected("as many samples as were asked for"));
    }
    let _lease = core.memory.reserve(repeat * size_of::<Value>() as u64)?;
    let (samples, _) = samples.as_chunks();
    Ok(Value::List(samples.iter().map(|sample| Value::Float(f64::from_le_bytes(*sample))).collect()))
}
