//! Shapes, lists and maps as arguments: TVM's protocol has no form for them, so that they are built
//! at the server, by functions of TVM-FFI, and passed as objects of it.

use std::pin::Pin;

use rpc_core::{ErrorKind, Handle, Reference, RpcError, Value};
use rpc_tvm::wire::ServerReply;

use super::server_calls::{optional_function, unexpected};
use super::state::ClientCore;

/// Maximum number of containers in the arguments of one call. Each takes a trip to the server.
const MAX_CONTAINERS: usize = 256;

/// Arguments of a call, and the objects that are to be released after it.
#[derive(Default)]
pub(super) struct Arguments {
    pub(super) values: Vec<Value>,
    pub(super) built: Vec<Handle>,
}

/// Returns the arguments with objects of the server in the place of containers.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`] if the server has no function for a container. Objects that were
/// built are released.
pub(super) async fn build(core: &ClientCore, id: u64, args: Vec<Value>) -> Result<Arguments, RpcError> {
    if !args.iter().any(|arg| matches!(arg, Value::Shape(_) | Value::List(_) | Value::Map(_))) {
        return Ok(Arguments { values: args, built: Vec::new() });
    }
    let mut arguments = Arguments::default();
    for (at, arg) in args.into_iter().enumerate() {
        match built(core, id, arg, &mut arguments.built).await {
            Ok(value) => arguments.values.push(value),
            Err(error) => {
                core.release(arguments.built);
                return Err(error.context(format_args!("argument {at}")));
            }
        }
    }
    Ok(arguments)
}

/// Builds a value, if it is a container, and those in it.
fn built<'a>(
    core: &'a ClientCore,
    id: u64,
    value: Value,
    objects: &'a mut Vec<Handle>,
) -> Pin<Box<dyn Future<Output = Result<Value, RpcError>> + Send + 'a>> {
    Box::pin(async move {
        let (name, items) = match value {
            Value::Shape(shape) => ("ffi.Shape", shape.into_iter().map(Value::Int).collect()),
            Value::List(items) => ("ffi.Array", items),
            Value::Map(entries) => ("ffi.Map", entries.into_iter().flat_map(<[Value; 2]>::from).collect()),
            plain => return Ok(plain),
        };
        let mut args = Vec::with_capacity(items.len());
        for item in items {
            args.push(built(core, id, item, objects).await?);
        }
        if objects.len() >= MAX_CONTAINERS {
            let limit = MAX_CONTAINERS as u64;
            return Err(RpcError::limit("lists, maps and shapes in the arguments of a call", limit, limit + 1));
        }
        core.room(id, 0).await?;
        let Some(function) = optional_function(core, name).await? else {
            let text = format!("TVM's protocol has no form for the value, and the server has no {name} to build it");
            return Err(RpcError::new(ErrorKind::Unsupported, text));
        };
        let frame = core.call_frame(function, args)?;
        core.room(id, frame.len()).await?;
        let ServerReply::Call(result) = core.link.ask(frame).await? else {
            return Err(unexpected("the result of a call"));
        };
        let object = core.receive(result)?;
        if let Value::Object(Reference::Object(handle)) = object {
            objects.push(handle);
            return Ok(object);
        }
        core.release(object.handles());
        Err(unexpected("an object"))
    })
}
