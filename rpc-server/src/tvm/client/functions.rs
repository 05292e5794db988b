//! The functions that a session with a server of TVM has beside those of the server: what clients
//! of this project call for files, modules, measurements and information, in terms of the functions
//! that TVM's own clients call.

use std::sync::Arc;

use rpc_core::reply::Outcome;
use rpc_core::{ErrorKind, RpcError, Value};
use rpc_tvm::wire::{CallResult, Expected, Request, ServerReply, WireValue};

use super::execute;
use super::files;
use super::info;
use super::link::Frame;
use super::measure;
use super::session::ClientCore;

/// A function that this side has for its callers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientFunction {
    Echo,
    Info,
    Functions,
    TimeFunction,
    BeginWrite,
    WriteFile,
    CommitFile,
    OpenFile,
    ReadFile,
    ListFiles,
    RemoveFile,
    SetExecutable,
    FindModule,
    BeginUpload,
    WriteModule,
    CommitModule,
}

const FUNCTIONS: [(ClientFunction, &str); 16] = [
    (ClientFunction::Echo, "rpc.echo"),
    (ClientFunction::Info, "rpc.info"),
    (ClientFunction::Functions, "rpc.functions"),
    (ClientFunction::TimeFunction, "rpc.time_function"),
    (ClientFunction::BeginWrite, "rpc.file.begin_write"),
    (ClientFunction::WriteFile, "rpc.file.write"),
    (ClientFunction::CommitFile, "rpc.file.commit"),
    (ClientFunction::OpenFile, "rpc.file.open"),
    (ClientFunction::ReadFile, "rpc.file.read"),
    (ClientFunction::ListFiles, "rpc.file.ls"),
    (ClientFunction::RemoveFile, "rpc.file.rm"),
    (ClientFunction::SetExecutable, "rpc.file.set_executable"),
    (ClientFunction::FindModule, "rpc.module.find"),
    (ClientFunction::BeginUpload, "rpc.module.begin_upload"),
    (ClientFunction::WriteModule, "rpc.module.write"),
    (ClientFunction::CommitModule, "rpc.module.commit"),
];

impl ClientFunction {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        FUNCTIONS.iter().find(|(_, of)| *of == name).map(|(function, _)| *function)
    }

    fn name(self) -> &'static str {
        FUNCTIONS.iter().find(|(function, _)| *function == self).map_or("", |(_, name)| *name)
    }

    /// Calls the function for the request `id`.
    pub(super) async fn call(self, core: &Arc<ClientCore>, id: u64, args: Vec<Value>) -> Outcome {
        let args = &mut Args { function: self, at: 0, args };
        match self {
            Self::Echo => {
                let value = args.optional().unwrap_or_default();
                if value.may_hold_objects() {
                    return Err(RpcError::unsupported("rpc.echo returns no objects at a server of TVM"));
                }
                // One trip to the server and back.
                let asked = Request::Attribute { device: rpc_core::Device::cpu(), kind: 0 };
                core.link.ask(Frame::of(&asked)).await.map(|_| value)
            }
            Self::Info => info::info(core).await,
            Self::Functions => info::functions(core).await,
            Self::TimeFunction => measure::time_function(core, id, args).await,
            Self::BeginWrite => files::begin_write(core, args),
            Self::WriteFile | Self::WriteModule => files::write(core, args),
            Self::CommitFile | Self::CommitModule => files::commit(core, args).await,
            Self::OpenFile => files::open(core, args).await,
            Self::ReadFile => files::read(core, args),
            Self::ListFiles => files::list(core, args).await,
            Self::RemoveFile => files::remove(core, args).await,
            // The protocol has no permissions, and servers of TVM load libraries without.
            Self::SetExecutable => Ok(Value::Null),
            Self::FindModule => files::find_module(core, args),
            Self::BeginUpload => files::begin_module(core, args),
        }
    }
}

/// Arguments of a function, taken one after the other.
pub(super) struct Args {
    function: ClientFunction,
    at: usize,
    args: Vec<Value>,
}

impl Args {
    pub(super) fn optional(&mut self) -> Option<Value> {
        let arg = self.args.get_mut(self.at).map(std::mem::take);
        self.at += 1;
        arg
    }

    fn mismatch(&self, expected: &str, found: &Value) -> RpcError {
        let (name, at, found) = (self.function.name(), self.at - 1, found.type_name());
        RpcError::invalid_argument(format!("{name}: argument {at} is of type {found}, and should be {expected}"))
    }

    pub(super) fn text(&mut self) -> Result<String, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Str(text) => Ok(text),
            other => Err(self.mismatch("str", &other)),
        }
    }

    pub(super) fn bytes(&mut self) -> Result<bytes::Bytes, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(self.mismatch("bytes", &other)),
        }
    }

    pub(super) fn number(&mut self) -> Result<u64, RpcError> {
        self.optional_number()?.ok_or_else(|| self.mismatch("int", &Value::Null))
    }

    /// Takes a number that is not negative, or none.
    pub(super) fn optional_number(&mut self) -> Result<Option<u64>, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Null => Ok(None),
            Value::Int(value) if value >= 0 => Ok(Some(value.unsigned_abs())),
            other => Err(self.mismatch("int from 0 on", &other)),
        }
    }

    pub(super) fn float(&mut self) -> Result<f64, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Float(value) => Ok(value),
            Value::Int(value) => Ok(value as f64),
            other => Err(self.mismatch("float", &other)),
        }
    }

    pub(super) fn object(&mut self) -> Result<rpc_core::Handle, RpcError> {
        match self.optional().unwrap_or_default() {
            Value::Object(reference) => Ok(reference.handle()),
            other => Err(self.mismatch("object", &other)),
        }
    }

    pub(super) fn rest(&mut self) -> Vec<Value> {
        self.args.split_off(self.at.min(self.args.len()))
    }
}

/// Returns the handle of one of the server's own functions, which is kept for the session.
///
/// # Errors
///
/// [`ErrorKind::Unsupported`] if the server does not have it.
pub(super) async fn server_function(core: &ClientCore, name: &'static str) -> Result<u64, RpcError> {
    if let Some(handle) = core.objects.lock().functions.get(name) {
        return Ok(*handle);
    }
    match core.link.ask(Frame::of(&Request::GetFunction { name: name.into() })).await? {
        ServerReply::Value(WireValue::Pointer(handle)) if handle != 0 => {
            core.objects.lock().functions.insert(name, handle);
            Ok(handle)
        }
        ServerReply::Value(WireValue::Pointer(_) | WireValue::None) => {
            Err(RpcError::new(ErrorKind::Unsupported, format!("the server has no function '{name}'")))
        }
        _ => Err(execute::unexpected("the handle of a function")),
    }
}

/// Calls a function of the server by its handle.
pub(super) async fn call(core: &ClientCore, function: u64, args: Vec<WireValue>) -> Result<CallResult, RpcError> {
    let mut frame = Frame::of(&Request::Call { function, args });
    frame.expected = Expected::Call;
    match core.link.ask(frame).await? {
        ServerReply::Call(result) => Ok(result),
        _ => Err(execute::unexpected("the result of a call")),
    }
}
