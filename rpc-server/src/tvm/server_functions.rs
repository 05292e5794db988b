//! The functions that clients of TVM expect at a server beside the registered ones: files, modules,
//! the size of packets, and measurements.

use bytes::Bytes;
use rpc_core::client::Files;
use rpc_core::{ErrorKind, Operation, RpcError};
use rpc_tvm::wire::{CallResult, WireValue};

use super::session::{Held, TvmSession, checked_name};
use super::time_evaluator::TimeEvaluator;

/// A function that this server adds for clients of TVM. Its handle is a small number, which needs
/// no memory and is never freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ServerFunction {
    Upload,
    Download,
    Remove,
    ListDir,
    LoadModule,
    DownloadLinkedModule,
    ModuleGetFunction,
    ImportModule,
    MaxPacketSize,
    TimeEvaluator,
    SystemLibrary,
}

const FUNCTIONS: [(ServerFunction, &str); 11] = [
    (ServerFunction::Upload, "tvm.rpc.server.upload"),
    (ServerFunction::Download, "tvm.rpc.server.download"),
    (ServerFunction::Remove, "tvm.rpc.server.remove"),
    (ServerFunction::ListDir, "tvm.rpc.server.listdir"),
    (ServerFunction::LoadModule, "tvm.rpc.server.load_module"),
    (ServerFunction::DownloadLinkedModule, "tvm.rpc.server.download_linked_module"),
    (ServerFunction::ModuleGetFunction, "tvm.rpc.server.ModuleGetFunction"),
    (ServerFunction::ImportModule, "tvm.rpc.server.ImportModule"),
    (ServerFunction::MaxPacketSize, "tvm.rpc.server.GetCRTMaxPacketSize"),
    (ServerFunction::TimeEvaluator, "runtime.RPCTimeEvaluator"),
    (ServerFunction::SystemLibrary, "ffi.SystemLib"),
];

impl ServerFunction {
    pub(super) fn from_name(name: &str) -> Option<Self> {
        FUNCTIONS.iter().find(|(_, of)| *of == name).map(|(function, _)| *function)
    }

    pub(super) fn from_handle(handle: u64) -> Option<Self> {
        let at = usize::try_from(handle.checked_sub(1)?).ok()?;
        FUNCTIONS.get(at).map(|(function, _)| *function)
    }

    /// Returns the handle: the place in the list, from 1 on.
    pub(super) fn handle(self) -> u64 {
        FUNCTIONS.iter().position(|(function, _)| *function == self).map_or(0, |at| at as u64 + 1)
    }

    fn name(self) -> &'static str {
        FUNCTIONS.iter().find(|(function, _)| *function == self).map_or("", |(_, name)| *name)
    }

    pub(super) async fn call(self, session: &mut TvmSession, args: Vec<WireValue>) -> Result<CallResult, RpcError> {
        let mut args = Args { function: self, at: 0, args };
        let none = CallResult::Plain(WireValue::None);
        match self {
            Self::Upload => {
                let (path, data) = (args.text()?, args.bytes()?);
                args.finish()?;
                Files::new(session.session()).put_bytes(&path, data).await?;
                Ok(none)
            }
            Self::Download => {
                let path = args.text()?;
                args.finish()?;
                download(session, &path).await.map(CallResult::Bytes)
            }
            Self::Remove => {
                let path = args.text()?;
                args.finish()?;
                remove(session, &path).await?;
                Ok(none)
            }
            Self::ListDir => {
                let path = args.text()?;
                args.finish()?;
                list(session, &path).await.map(|names| CallResult::Str(names.into()))
            }
            Self::LoadModule => {
                let path = args.text()?;
                args.finish()?;
                let module = session.submit(Operation::LoadModule { path, loader: None }).await?;
                session.result(module)
            }
            Self::DownloadLinkedModule => {
                let path = args.text()?;
                args.finish()?;
                check_is_library(&path)?;
                download(session, &path).await.map(CallResult::Bytes)
            }
            Self::ModuleGetFunction => {
                let (module, name) = (args.module()?, args.text()?);
                // A module of this server finds the functions of what it imports by itself.
                args.optional();
                args.finish()?;
                match session.find_in_module(module, &name).await {
                    Ok(function) => Ok(CallResult::Object(
                        rpc_tvm::wire::ResultKind::Function,
                        session.hold(Held::Function(function))?,
                    )),
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(none),
                    Err(error) => Err(error),
                }
            }
            Self::ImportModule => Err(RpcError::unsupported(
                "this server imports no modules into each other: link them into one library before the upload",
            )),
            Self::MaxPacketSize => {
                args.finish()?;
                // Copies are received in pieces whatever the size of their frames.
                Ok(CallResult::Plain(WireValue::Int(i64::MAX)))
            }
            Self::TimeEvaluator => {
                let evaluator = TimeEvaluator::new(session, &mut args).await?;
                let handle = session.hold(Held::TimeEvaluator(evaluator.into()))?;
                Ok(CallResult::Object(rpc_tvm::wire::ResultKind::Function, handle))
            }
            Self::SystemLibrary => {
                args.optional();
                args.finish()?;
                Ok(TvmSession::system_library())
            }
        }
    }
}

/// Checks that a file is a library that can be sent as it is.
fn check_is_library(path: &str) -> Result<(), RpcError> {
    if path.ends_with(".so") {
        return Ok(());
    }
    let text = format!("{path:?} is no shared library (.so), and this server sends back none that it links");
    Err(RpcError::unsupported(text))
}

async fn download(session: &TvmSession, path: &str) -> Result<Bytes, RpcError> {
    let file = Files::new(session.session()).open(path).await?;
    let _lease = session.queued().reserve(file.len())?;
    let mut data = Vec::with_capacity(usize::try_from(file.len()).unwrap_or(0));
    file.read_from(0, &mut data).await?;
    Ok(data.into())
}

/// Removes a file. One that does not exist is no error: a tuner removes all names that it may have
/// used.
async fn remove(session: &TvmSession, path: &str) -> Result<(), RpcError> {
    if path.is_empty() {
        return Ok(());
    }
    match Files::new(session.session()).rm(path).await {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Returns the names in a folder, separated by commas.
async fn list(session: &TvmSession, path: &str) -> Result<String, RpcError> {
    let folder = path.trim_matches('/').trim_start_matches("./");
    let folder = if folder == "." { "" } else { folder };
    let mut names: Vec<String> = Vec::new();
    for file in Files::new(session.session()).ls(folder).await? {
        let below = file.name.strip_prefix(folder).unwrap_or(&file.name).trim_start_matches('/');
        let name = below.split('/').next().unwrap_or(below);
        // Sorted by their paths, so that those of one folder follow each other.
        if names.last().is_none_or(|last| last != name) {
            names.push(name.to_owned());
        }
    }
    Ok(names.join(","))
}

/// Arguments of a function of the server, taken one after the other.
pub(super) struct Args {
    function: ServerFunction,
    at: usize,
    args: Vec<WireValue>,
}

impl Args {
    fn next(&mut self) -> Option<WireValue> {
        let arg = self.args.get_mut(self.at).map(|arg| std::mem::replace(arg, WireValue::None));
        self.at += 1;
        arg
    }

    fn mismatch(&self, expected: &str, found: Option<&WireValue>) -> RpcError {
        let (name, at) = (self.function.name(), self.at - 1);
        RpcError::invalid_argument(match found {
            Some(found) => format!("{name}: argument {at} is of type {}, and should be {expected}", found.type_name()),
            None => format!("{name}: argument {at}, of type {expected}, is missing"),
        })
    }

    pub(super) fn text(&mut self) -> Result<String, RpcError> {
        match self.next() {
            Some(WireValue::Str(text)) => checked_name(&text, "a name or path").map(str::to_owned),
            other => Err(self.mismatch("str", other.as_ref())),
        }
    }

    fn bytes(&mut self) -> Result<Bytes, RpcError> {
        match self.next() {
            Some(WireValue::Bytes(bytes)) => Ok(bytes),
            other => Err(self.mismatch("bytes", other.as_ref())),
        }
    }

    fn module(&mut self) -> Result<u64, RpcError> {
        match self.next() {
            Some(WireValue::Module(handle)) => Ok(handle),
            other => Err(self.mismatch("Module", other.as_ref())),
        }
    }

    /// Takes a module, or none.
    pub(super) fn optional_module(&mut self) -> Result<Option<u64>, RpcError> {
        match self.next() {
            Some(WireValue::None) => Ok(None),
            Some(WireValue::Module(handle)) => Ok(Some(handle)),
            other => Err(self.mismatch("Optional[Module]", other.as_ref())),
        }
    }

    pub(super) fn int(&mut self) -> Result<i64, RpcError> {
        match self.next() {
            Some(WireValue::Int(value)) => Ok(value),
            Some(WireValue::Bool(value)) => Ok(value.into()),
            other => Err(self.mismatch("int", other.as_ref())),
        }
    }

    /// Takes an argument that means nothing here.
    fn optional(&mut self) {
        let _ = self.next();
    }

    pub(super) fn finish(&self) -> Result<(), RpcError> {
        if self.args.len() <= self.at {
            return Ok(());
        }
        let (name, expected, found) = (self.function.name(), self.at, self.args.len());
        Err(RpcError::invalid_argument(format!("{name} takes {expected} arguments, and got {found}")))
    }
}
