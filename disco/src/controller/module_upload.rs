//! Upload of a module: a file of the controller, brought to all workers.

use std::fs;
use std::path::{Path, PathBuf};

use ring::digest::{SHA256, digest};
use rpc_core::client::Digest;
use rpc_core::{ErrorKind, RpcError, Tensor, Value};

use crate::completion::Completion;
use crate::controller::dref::DRef;
use crate::controller::session::{Content, DiscoSession};
use crate::error::{Result, WorkerId};
use crate::wire::command::Scope;

impl DiscoSession {
    /// Brings the module in `file`, a file of the controller, to all workers, and gives the path
    /// for [`load_module`](Self::load_module): `sha256:` and its digest. If any of them lacks it,
    /// its bytes go to worker 0 once, which passes them on as a [broadcast](Self::broadcast) does.
    ///
    /// The workers must be on servers that allow modules (`rpc-server serve --allow-modules`), and
    /// these keep it in their stores. Worker 0's memory, and that of the others, must hold it for a
    /// moment.
    ///
    /// # Errors
    ///
    /// The file cannot be read; a worker's server refuses the module, for example because it allows
    /// none, its digest is not on the list, or its store is full; the session has ended.
    pub fn upload_module(&self, file: impl Into<PathBuf>) -> Completion<String> {
        let (session, file) = (self.clone(), file.into());
        Completion::spawn(async move {
            // Files are read, and commands issued, on a thread that may block.
            let upload = tokio::task::spawn_blocking(move || upload(&session, &file)).await;
            upload.map_err(|error| RpcError::internal(format!("sending a module panicked: {error}")))?
        })
    }
}

/// Sends the module in `file` to the workers, unless they all have it. Returns the path for
/// `load_module`.
fn upload(session: &DiscoSession, file: &Path) -> Result<String> {
    let unreadable = |error| RpcError::new(ErrorKind::Io, format!("cannot read {}: {error}", file.display()));
    let module = fs::read(file).map_err(unreadable)?;
    let mut hash = [0; Digest::LEN];
    hash.copy_from_slice(digest(&SHA256, &module).as_ref());
    let name = Digest::from_bytes(hash).module_path();
    let found = session.get_global_func("rpc.module.find")?.call((name.as_str(),))?;
    if of_all(session, &found)?.iter().all(|found| *found == Value::Bool(true)) {
        return Ok(name);
    }
    let len =
        i64::try_from(module.len()).map_err(|_| RpcError::invalid_argument("a module of more than 2^63 bytes"))?;
    let module = session.broadcast(&Tensor::from_slice([len], &module)?, None, Scope::World)?;
    let import = session.get_global_func("rpc.module.import_tensor")?;
    let imported = import.call((name.as_str(), &module))?;
    of_all(session, &imported)?;
    Ok(name)
}

/// Returns the content of a register on every worker.
fn of_all(session: &DiscoSession, register: &DRef) -> Result<Vec<Value>> {
    let workers = (0..session.num_workers()).map(WorkerId);
    // All are asked before the first answer is waited for.
    let asked: Vec<_> = workers.map(|worker| session.debug_get_from_remote(register, worker)).collect();
    let values = asked.into_iter().map(|answer| match answer.wait()? {
        Content::Value(value) => Ok(value),
        Content::Tensor(_) => Err(RpcError::internal("a tensor, where a value was expected").into()),
    });
    values.collect()
}
