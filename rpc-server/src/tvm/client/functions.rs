//! The functions that a session with a server of TVM has beside those of the server: what clients
//! of this project call for files, modules, measurements and information, in terms of the functions
//! that TVM's own clients call.

use std::sync::Arc;

use rpc_core::reply::Outcome;
use rpc_core::{Device, RpcError, Value};
use rpc_tvm::wire::{Request, ServerReply};

use super::arguments::Args;
use super::client_function::ClientFunction;
use super::link::Frame;
use super::server_calls::{optional_function, unexpected};
use super::state::ClientCore;
use super::{files, info, measure};

/// Calls the function for the request `id`.
pub(super) async fn call(function: ClientFunction, core: &Arc<ClientCore>, id: u64, args: Vec<Value>) -> Outcome {
    let args = &mut Args::of(function, args);
    match function {
        ClientFunction::Echo => {
            let value = args.optional().unwrap_or_default();
            if value.may_hold_objects() {
                return echo_objects(core, value).await;
            }
            // One trip to the server and back.
            let asked = Request::Attribute { device: Device::cpu(), kind: 0 };
            core.link.ask(Frame::of(&asked)).await.map(|_| value)
        }
        ClientFunction::Info => info::info(core).await,
        ClientFunction::Functions => info::functions(core).await,
        // A server of this project would tell it as a list, which stays there.
        ClientFunction::Signature => Ok(Value::Null),
        ClientFunction::TimeFunction => measure::time_function(core, id, args).await,
        ClientFunction::BeginWrite => files::begin_write(core, args),
        ClientFunction::WriteFile | ClientFunction::WriteModule => files::write(core, args),
        ClientFunction::CommitFile | ClientFunction::CommitModule => files::commit(core, args).await,
        ClientFunction::OpenFile => files::open(core, args).await,
        ClientFunction::ReadFile => files::read(core, args),
        ClientFunction::ListFiles => files::list(core, args).await,
        ClientFunction::ListFolders => files::list_folders(core).await,
        ClientFunction::RemoveFile => files::remove(core, args).await,
        // The protocol has no permissions, and servers of TVM load libraries without.
        ClientFunction::SetExecutable => Ok(Value::Null),
        ClientFunction::FindModule => files::find_module(core, args),
        ClientFunction::BeginUpload => files::begin_module(core, args),
    }
}

/// Returns a value with objects by the server's own `rpc.echo`, which gives them new handles.
/// Servers of this project have it.
async fn echo_objects(core: &Arc<ClientCore>, value: Value) -> Outcome {
    let Some(echo) = optional_function(core, "rpc.echo").await? else {
        let text = "rpc.echo returns no objects at a server of TVM, which cannot send arguments back";
        return Err(RpcError::unsupported(text));
    };
    let frame = core.call_frame(echo, vec![value])?;
    match core.link.ask(frame).await? {
        ServerReply::Call(result) => core.receive(result),
        _ => Err(unexpected("the result of a call")),
    }
}
