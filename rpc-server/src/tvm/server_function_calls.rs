//! Calls of the functions that clients of TVM expect at a server beside the registered ones: files,
//! modules, the size of packets, and measurements.

use bytes::Bytes;
use rpc_core::client::Files;
use rpc_core::{ErrorKind, Operation, RpcError};
use rpc_tvm::wire::{CallResult, ResultKind, WireValue};

use super::args::Args;
use super::measurements;
use super::server_function::{ServerFunction, UNLIMITED_PACKET};
use super::session::{Held, TvmSession};

/// Calls a function of the server.
pub(super) async fn call(
    function: ServerFunction,
    session: &mut TvmSession,
    args: Vec<WireValue>,
) -> Result<CallResult, RpcError> {
    let mut args = Args::new(function, args);
    let none = CallResult::Plain(WireValue::None);
    match function {
        ServerFunction::Upload => {
            let (path, data) = (args.text()?, args.bytes()?);
            args.finish()?;
            Files::new(session.session()).put_bytes(&path, data).await?;
            Ok(none)
        }
        ServerFunction::Download => {
            let path = args.text()?;
            args.finish()?;
            download(session, &path).await.map(CallResult::Bytes)
        }
        ServerFunction::Remove => {
            let path = args.text()?;
            args.finish()?;
            remove(session, &path).await?;
            Ok(none)
        }
        ServerFunction::ListDir => {
            let path = args.text()?;
            args.finish()?;
            list(session, &path).await.map(|names| CallResult::Str(names.into()))
        }
        ServerFunction::WorkPath => {
            let path = args.text()?;
            args.finish()?;
            session.result(session.call("rpc.file.path", vec![path.into()]).await?)
        }
        ServerFunction::LoadModule => {
            let path = args.text()?;
            args.finish()?;
            let module = session.submit(Operation::LoadModule { path, loader: None }).await?;
            session.result(module)
        }
        ServerFunction::DownloadLinkedModule => {
            let path = args.text()?;
            args.finish()?;
            if path.ends_with(".so") {
                return download(session, &path).await.map(CallResult::Bytes);
            }
            // Under the name that it has at a server of TVM.
            let library = format!("{path}.so");
            session.call("rpc.module.link", vec![path.into(), library.as_str().into()]).await?;
            download(session, &library).await.map(CallResult::Bytes)
        }
        ServerFunction::ModuleGetFunction => {
            let (module, name) = (args.module()?, args.text()?);
            let query_imports = args.flag_or(true)?;
            args.finish()?;
            let found = if query_imports {
                // A module finds the functions of what it imports by itself.
                session.find_in_module(module, &name).await
            } else {
                session.find_own_function(module, &name).await
            };
            match found {
                Ok(function) => Ok(CallResult::Object(ResultKind::Function, session.hold(Held::Function(function))?)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(none),
                Err(error) => Err(error),
            }
        }
        ServerFunction::ImportModule => {
            let (importer, imported) = (args.module()?, args.module()?);
            args.finish()?;
            let args = vec![session.module(importer)?, session.module(imported)?];
            session.call("rpc.module.add_import", args).await?;
            Ok(none)
        }
        ServerFunction::MaxPacketSize => {
            args.finish()?;
            // Copies are received in pieces whatever the size of their frames.
            Ok(CallResult::Plain(WireValue::Int(UNLIMITED_PACKET)))
        }
        ServerFunction::TimeEvaluator => {
            let evaluator = measurements::time_evaluator(session, &mut args).await?;
            let handle = session.hold(Held::TimeEvaluator(evaluator.into()))?;
            Ok(CallResult::Object(ResultKind::Function, handle))
        }
        ServerFunction::SystemLibrary => {
            args.optional();
            args.finish()?;
            Ok(TvmSession::system_library())
        }
    }
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
