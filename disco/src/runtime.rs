//! Runtime on which links do their input and output.

use std::io;
use std::sync::OnceLock;

use rpc_core::{Result, RpcError};
use tokio::runtime::{Builder, Runtime};

/// Returns the one runtime of the process, with two threads, made at the first use: controllers
/// work the same inside of async programs and outside.
pub(crate) fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let made = Builder::new_multi_thread().worker_threads(2).thread_name("disco-io").enable_all().build();
    let made = made.map_err(|error: io::Error| RpcError::from(error).context("the threads of links"))?;
    let mut made = Some(made);
    let runtime = RUNTIME.get_or_init(|| made.take().expect("taken at most once"));
    if let Some(superfluous) = made {
        superfluous.shutdown_background();
    }
    Ok(runtime)
}
