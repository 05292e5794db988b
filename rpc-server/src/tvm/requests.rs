//! Requests of clients of TVM other than copies from and to them, as operations of the session.

use rpc_core::{DataType, Device, DeviceAttribute, ErrorKind, Operation, Reference, RpcError, Value};
use rpc_tvm::wire::{
    CallResult, Request, TensorHeader, WireValue, returned, returned_bytes_header, returned_call, returned_text,
};

use super::args::checked_name;
use super::link::Reply;
use super::measurements;
use super::server_function_calls;
use super::session::{Held, TvmSession, unknown};

/// Alignment in bytes that all memory has, and that clients ask for by default.
const DEFAULT_ALIGNMENT: u64 = 64;

/// Serves a request other than a copy from or to the client.
pub(super) async fn serve(session: &mut TvmSession, request: Request) -> Result<Reply, RpcError> {
    let frame = match request {
        Request::Call { function, args } => return call(session, function, args).await,
        Request::GetFunction { name } => {
            let name = checked_name(&name, "the name of a function")?;
            returned(&[WireValue::Pointer(get_function(session, name).await?)])
        }
        Request::Free { handle } => {
            session.free(handle).await?;
            returned(&[WireValue::None])
        }
        Request::FreeData { device: _, data } => {
            if !matches!(session.held(data)?, Held::Memory { .. }) {
                return Err(unknown(data, "memory"));
            }
            session.free(data).await?;
            returned(&[WireValue::None])
        }
        Request::SetDevice { device } => {
            check_device(session, device).await?;
            returned(&[WireValue::None])
        }
        Request::Attribute { device, kind } => attribute(session, device, kind).await?,
        Request::AllocBytes { device, len, alignment, hint: _ } => {
            let alignment = u64::try_from(alignment).unwrap_or(0);
            let alignment = if alignment > DEFAULT_ALIGNMENT { alignment } else { 0 };
            let tensor = Operation::Alloc { device, dtype: DataType::U8, shape: vec![len], scope: None, alignment };
            let data = alloc(session, tensor).await?;
            returned(&[WireValue::Pointer(data)])
        }
        Request::Alloc { header, scope } => {
            // Both names are those of ordinary memory.
            let scope = scope.filter(|scope| !matches!(scope.as_str(), "" | "global"));
            let scope = scope.map(|scope| checked_name(&scope, "a memory scope").map(str::to_owned)).transpose()?;
            let TensorHeader { device, dtype, shape, .. } = header;
            let data = alloc(session, Operation::Alloc { device, dtype, shape, scope, alignment: 0 }).await?;
            returned(&[WireValue::Pointer(data)])
        }
        Request::CopyAmong { from, to, stream } => {
            copy(session, &from, &to, stream).await?;
            returned(&[WireValue::None])
        }
        Request::CreateStream { device } => {
            let stream = session.submit(Operation::CreateStream { device }).await?;
            let Value::Object(Reference::Object(stream)) = stream else {
                return Err(RpcError::internal("a stream is an object"));
            };
            returned(&[WireValue::Pointer(session.hold(Held::Stream { stream, device })?)])
        }
        Request::FreeStream { device, stream } => {
            if stream != 0 {
                session.stream(device, stream)?;
                session.free(stream).await?;
            }
            returned(&[WireValue::None])
        }
        Request::SetStream { device, stream } => {
            session.select_stream(device, stream).await?;
            returned(&[WireValue::None])
        }
        Request::StreamSync { device, stream } => {
            session.wait_for_stream(device, stream).await?;
            returned(&[WireValue::None])
        }
        Request::CurrentStream { device } => {
            let current = session.current_stream(device);
            returned(&[WireValue::Pointer(current)])
        }
        _ => return Err(RpcError::internal("a request that is served elsewhere")),
    };
    Ok(Reply::Frame(frame))
}

/// Calls a function, or one that this server adds for clients of TVM.
async fn call(session: &mut TvmSession, function: u64, args: Vec<WireValue>) -> Result<Reply, RpcError> {
    if let Some(function) = session.server_function(function) {
        let result = server_function_calls::call(function, session, args).await?;
        return Ok(call_reply(result));
    }
    let held = match session.held(function) {
        Ok(Held::Function(handle)) => Ok(*handle),
        Ok(Held::TimeEvaluator(evaluator)) => Err(evaluator.clone()),
        _ => return Err(unknown(function, "function")),
    };
    let (args, _held) = session.arguments(args)?;
    match held {
        Ok(function) => {
            let result = session.submit(Operation::Call { function, args }).await?;
            Ok(call_reply(session.result(result)?))
        }
        Err(evaluator) => {
            let samples = measurements::measure(&evaluator, session, args).await?;
            Ok(call_reply(CallResult::Bytes(samples)))
        }
    }
}

/// Returns a handle of a function, 0 if there is none of that name.
pub(super) async fn get_function(session: &mut TvmSession, name: &str) -> Result<u64, RpcError> {
    if let Some(function) = session.server_function_named(name) {
        return Ok(function.handle());
    }
    match session.find_function(name).await {
        Ok(handle) => session.hold(Held::Function(handle)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

async fn alloc(session: &mut TvmSession, operation: Operation) -> Result<u64, RpcError> {
    let tensor = session.submit(operation).await?;
    let Value::Object(Reference::Tensor(tensor)) = tensor else {
        return Err(RpcError::internal("an allocation is a tensor"));
    };
    session.hold(Held::Memory { storage: tensor.storage, offset: tensor.byte_offset })
}

async fn copy(session: &mut TvmSession, from: &TensorHeader, to: &TensorHeader, stream: u64) -> Result<(), RpcError> {
    let (len, room) = (size_bytes(from)?, size_bytes(to)?);
    if len != room {
        return Err(RpcError::invalid_argument(format!("cannot copy {len} bytes to a tensor of {room} bytes")));
    }
    let (from, to) = (session.flat(from, len)?, session.flat(to, len)?);
    let device = if from.device == Device::cpu() { to.device } else { from.device };
    if stream != 0 {
        session.set_stream(device, stream).await?;
    }
    let copied = session.submit(Operation::Copy { from: from.into(), to: to.into() }).await;
    if stream != 0 {
        let current = session.current_stream(device);
        session.set_stream(device, current).await?;
    }
    copied.map(drop)
}

async fn attribute(session: &TvmSession, device: Device, kind: i64) -> Result<Vec<u8>, RpcError> {
    let attribute = u16::try_from(kind).ok().and_then(DeviceAttribute::from_code);
    // Those from 1000 on are this project's own, and unknown to TVM.
    let Some(attribute) = attribute.filter(|attribute| attribute.code() < 1000) else {
        check_device(session, device).await?;
        return Ok(returned(&[WireValue::None]));
    };
    if attribute == DeviceAttribute::Exists {
        return Ok(returned(&[WireValue::Int(exists(session, device).await?.into())]));
    }
    check_device(session, device).await?;
    Ok(match session.submit(Operation::Attribute { device, attribute }).await? {
        Value::Bool(value) => returned(&[WireValue::Int(value.into())]),
        Value::Int(value) => returned(&[WireValue::Int(value)]),
        Value::Float(value) => returned(&[WireValue::Float(value)]),
        Value::Str(text) => returned_text(&text),
        Value::Shape(dimensions) => returned_text(&format!("{dimensions:?}")),
        _ => returned(&[WireValue::None]),
    })
}

async fn exists(session: &TvmSession, device: Device) -> Result<bool, RpcError> {
    let exists = Operation::Attribute { device, attribute: DeviceAttribute::Exists };
    match session.submit(exists).await {
        Ok(value) => Ok(value == Value::Bool(true)),
        Err(error) if error.kind() == ErrorKind::DeviceUnavailable => Ok(false),
        Err(error) => Err(error),
    }
}

async fn check_device(session: &TvmSession, device: Device) -> Result<(), RpcError> {
    if exists(session, device).await? {
        return Ok(());
    }
    Err(RpcError::new(ErrorKind::DeviceUnavailable, format!("the server has no device {device}")))
}

/// Returns the reply to a call, without a copy of its bytes.
fn call_reply(result: CallResult) -> Reply {
    match result {
        CallResult::Bytes(bytes) => Reply::Bytes(returned_bytes_header(bytes.len() as u64), bytes),
        other => Reply::Frame(returned_call(other)),
    }
}

fn size_bytes(header: &TensorHeader) -> Result<u64, RpcError> {
    header.size_bytes().ok_or_else(|| RpcError::invalid_argument(format!("no tensor has the shape {:?}", header.shape)))
}
