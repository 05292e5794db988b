//! `rpc.info` and `rpc.functions` at a server of TVM.

use std::sync::Arc;

use rpc_core::reply::Outcome;
use rpc_core::{Device, DeviceAttribute, DeviceType, ErrorKind, Packed, RpcError, Value};
use rpc_tvm::wire::{CallResult, Expected, PROTOCOL_VERSION, Request, ResultKind, ServerReply, WireValue};
use tokio::sync::oneshot;

use super::link::Frame;
use super::server_calls::{call, server_function, unexpected};
use super::state::ClientCore;
use crate::builtins::{DeviceInfo, ModulesInfo, ServerInfo};

/// Kinds of devices that are looked for, of each the first device.
const KINDS: [DeviceType; 7] = [
    DeviceType::CPU,
    DeviceType::CUDA,
    DeviceType::OPENCL,
    DeviceType::VULKAN,
    DeviceType::METAL,
    DeviceType::ROCM,
    DeviceType::HEXAGON,
];

/// Maximum number of functions that are listed.
const MAX_FUNCTIONS: i64 = 1 << 16;

/// Number of functions whose names are asked for at once.
const BATCH: i64 = 256;

/// Function of TVM-FFI that returns a function that tells the names of all.
const LISTER: &str = "ffi.FunctionListGlobalNamesFunctor";

/// Describes the server, as far as the protocol tells.
pub(super) async fn info(core: &Arc<ClientCore>) -> Outcome {
    let mut devices = Vec::new();
    for kind in KINDS {
        let device = Device::new(kind, 0);
        if !matches!(attribute(core, device, DeviceAttribute::Exists).await?, WireValue::Int(1) | WireValue::Bool(true))
        {
            continue;
        }
        let name = match attribute(core, device, DeviceAttribute::Name).await {
            Ok(WireValue::Str(name)) => Some(name.as_str().to_owned()),
            _ => None,
        };
        let total_memory = match attribute(core, device, DeviceAttribute::TotalMemory).await {
            Ok(WireValue::Int(bytes)) => u64::try_from(bytes).ok(),
            _ => None,
        };
        devices.push(DeviceInfo {
            device: device.to_string(),
            name,
            total_memory,
            absent: None,
            clock_mhz: None,
            used_memory: None,
            utilization_percent: None,
            state_unknown_because: None,
        });
    }
    let unknown = || "unknown".to_owned();
    let info = ServerInfo {
        version: format!("TVM RPC {PROTOCOL_VERSION}"),
        protocol_version: 0,
        uptime_seconds: 0.0,
        sessions: 1,
        handles: core.objects.lock().len() as u64,
        memory_bytes: 0,
        devices,
        key: Some(core.key.strip_prefix("server:").unwrap_or(&core.key).to_owned()).filter(|key| !key.is_empty()),
        pid: 0,
        host: core.peer.clone(),
        arch: unknown(),
        os: unknown(),
        modules: Some(ModulesInfo { max_bytes: core.max_message, listed_only: false, unavailable: None }),
        leases: Vec::new(),
        identity: None,
        rules: None,
        disco_workers: None,
        sends: None,
    };
    Packed::encode(&info).map(Value::Packed)
}

async fn attribute(core: &ClientCore, device: Device, attribute: DeviceAttribute) -> Result<WireValue, RpcError> {
    let request = Request::Attribute { device, kind: attribute.code().into() };
    match core.link.ask(Frame::of(&request)).await? {
        ServerReply::Value(value) => Ok(value),
        _ => Err(unexpected("an attribute of a device")),
    }
}

/// Lists the functions of the server, if it can tell them.
pub(super) async fn functions(core: &Arc<ClientCore>) -> Outcome {
    let lister = server_function(core, LISTER).await.map_err(|error| match error.kind() {
        ErrorKind::Unsupported => error.context("the server cannot list its functions"),
        _ => error,
    })?;
    let CallResult::Object(ResultKind::Function, names) = call(core, lister, Vec::new()).await? else {
        return Err(unexpected("a function that tells names"));
    };
    let listed = all_names(core, names).await;
    core.link.send(Frame::of(&Request::Free { handle: names }), |_| {});
    listed
}

async fn all_names(core: &Arc<ClientCore>, names: u64) -> Outcome {
    let CallResult::Plain(WireValue::Int(count)) = call(core, names, vec![WireValue::Int(-1)]).await? else {
        return Err(unexpected("the number of its functions"));
    };
    if !(0..=MAX_FUNCTIONS).contains(&count) {
        return Err(RpcError::limit("functions of a server", MAX_FUNCTIONS as u64, count.unsigned_abs()));
    }
    let mut lease = core.memory.reserve(0)?;
    let (mut listed, mut size) = (Vec::new(), 0);
    for first in (0..count).step_by(BATCH as usize) {
        let mut asked = Vec::new();
        for at in first..count.min(first + BATCH) {
            let mut frame = Frame::of(&Request::Call { function: names, args: vec![WireValue::Int(at)] });
            frame.expected = Expected::Call;
            core.link.room(frame.len()).await;
            let (sender, reply) = oneshot::channel();
            core.link.send(frame, |reply| drop(sender.send(reply)));
            asked.push(reply);
        }
        for reply in asked {
            let reply = reply.await.map_err(|_| RpcError::internal("a request was forgotten"))??;
            let ServerReply::Call(CallResult::Str(name)) = reply else {
                return Err(unexpected("the name of a function"));
            };
            size += (name.len() + 4 * size_of::<Value>()) as u64;
            lease.resize(size)?;
            let empty = || Value::Str(String::new());
            listed.push(Value::List(vec![Value::Str(name.as_str().to_owned()), empty(), empty()]));
        }
        if size > core.max_message {
            return Err(RpcError::limit("max_message", core.max_message, size));
        }
    }
    Ok(Value::List(listed))
}
