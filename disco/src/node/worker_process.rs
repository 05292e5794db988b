//! A worker process: a program that serves one session over its standard input and output.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{AccessControl, Devices, Registry, Result, RpcError, SessionLimits};
use rpc_transports::{ConnectError, ServeOptions};

use crate::node::functions::register;
use crate::node::self_start::{WORKER, WorkerSettings, serves_workers, settings_of_this_process};
use crate::node::server::server_of;
use crate::weights::folders::WeightFolders;

/// Serves the functions of `registry`, and disco's own, as a worker process and exits, if this
/// process was started as one: with the first argument `--disco-worker`. Otherwise returns at once.
///
/// A program that calls this first thing in `main`, before anything is printed, is its own worker:
/// see [`ProcessSession`](crate::ProcessSession) and
/// [`Hosting::Processes`](crate::Hosting::Processes).
pub fn serve_if_worker(registry: &Registry) {
    serve_if_worker_with(registry, Devices::new);
}

/// As [`serve_if_worker`], with devices, which are made only in the process of a worker.
pub fn serve_if_worker_with(registry: &Registry, devices: impl FnOnce() -> Devices) {
    serve_if_worker_with_access(registry, devices, |_| {
        Err(RpcError::unsupported(
            "this program cannot restore the rights of a session's client in the processes of workers: its main must \
             call disco::serve_if_worker_with_access",
        ))
    });
}

/// As [`serve_if_worker_with`], for a program whose sessions
/// [limit the rights](rpc_core::AccessControl) of their clients: `restore` makes of
/// [their text](rpc_core::AccessControl::to_text) those that the worker has to check.
pub fn serve_if_worker_with_access(
    registry: &Registry,
    devices: impl FnOnce() -> Devices,
    restore: impl FnOnce(&str) -> Result<Arc<dyn AccessControl>>,
) {
    serves_workers();
    if rpc_transports::program::args().nth(1).is_none_or(|first| first != WORKER) {
        return;
    }
    rpc_transports::self_start::hook_took_over();
    register(registry);
    crate::logs::install();
    // A process of the controller's own reads all that the controller may.
    let of_controller = || WorkerSettings::new(SessionLimits::default(), Some(WeightFolders::anywhere()));
    let node = settings_of_this_process().unwrap_or_else(|| Ok(of_controller()));
    let served = node.and_then(|node| {
        let access = node.access.as_deref().map(restore).transpose()?;
        serve_stdio(registry, devices(), node, access)
    });
    let code = match served {
        Ok(()) => 0,
        Err(error) => {
            tracing::error!(%error, "a worker process cannot serve");
            1
        }
    };
    std::process::exit(code);
}

/// Keep-alive that never tests a peer.
const NEVER: Duration = Duration::from_secs(365 * 24 * 3600);

/// Serves one session over standard input and output until that ends.
fn serve_stdio(
    registry: &Registry,
    devices: Devices,
    node: WorkerSettings,
    access: Option<Arc<dyn AccessControl>>,
) -> Result<()> {
    let runtime = crate::runtime::runtime()?;
    runtime.block_on(async {
        let channel = rpc_transports::exec::stdio_channel().await;
        let channel = channel.map_err(|error| ConnectError::from(error).into_rpc_error())?;
        // The pipe tells the end of the parent. A parent that is stopped, by a debugger for
        // example, may go on.
        let options = ServeOptions { keep_alive: NEVER, ..ServeOptions::default() };
        let server = server_of(registry.clone(), devices, node, access, None, options);
        server.serve_channel(channel);
        server.idle().await;
        Ok(())
    })
}
