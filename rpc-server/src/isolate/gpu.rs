//! GPUs: devices for servers, session processes and workers.
//!
//! A kernel that traps destroys the driver's context for the whole process. A server therefore
//! never loads the driver: a short-lived process [probes](probe) the devices, and only session
//! processes ([`isolate`](crate::isolate)) and workers [use](devices) them. There the driver is
//! loaded when a session first uses a device, so that other sessions pay nothing.
//!
//! A program that embeds a server with GPUs begins like this:
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::config::ServeConfig;
//! use rpc_server::isolate::{self, gpu};
//! use rpc_server::RpcServer;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     gpu::answer_if_asked();
//!     let registry = Registry::new();
//!     isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
//!
//!     let config = ServeConfig::default();
//!     RpcServer::new(registry).devices(gpu::for_server(&config)).config(config).run_blocking()?;
//!     Ok(())
//! }
//! ```
//!
//! Without the Cargo feature `cuda` (a default) there is `cpu` alone.

#[cfg(feature = "cuda")]
mod probe;

#[cfg(feature = "cuda")]
use std::sync::Arc;

use rpc_core::{DeviceType, Devices, Registry};

use crate::config::{Isolate, ServeConfig};

/// Returns the devices of a process that serves one session or one worker, and adds their functions
/// and module loaders to `registry`. Loads nothing yet.
#[cfg(feature = "cuda")]
pub fn devices(registry: &Registry) -> Devices {
    use rpc_cuda::{self as cuda, CudaModulesOnDemand, CudaOnDemand};

    cuda::register(registry);
    registry.add_loader(Arc::new(CudaModulesOnDemand));
    Devices::new().with(Arc::new(CudaOnDemand))
}

/// Probes the devices for a server that does not use them itself: GPUs have attributes and refuse
/// everything else. Starts this program again, which must call [`answer_if_asked`], and waits for
/// it, 20 seconds at most. Without a GPU the devices give the reason.
#[cfg(feature = "cuda")]
pub fn probe() -> Devices {
    probe::probe()
}

/// Prints the devices and exits, if this process was started for that; otherwise returns at once.
/// Call it first in `main`.
#[cfg(feature = "cuda")]
pub fn answer_if_asked() {
    probe::answer_if_asked();
}

/// Returns the devices that a server with these settings offers. If its sessions have no processes
/// of their own, by choice or because of other settings, it offers no GPUs, and clients, trackers
/// and Disco get the reason.
pub fn for_server(config: &ServeConfig) -> Devices {
    if !cfg!(feature = "cuda") {
        return probe();
    }
    if config.isolate == Isolate::None {
        let reason = "all sessions are in the server's own process: serve with --isolate process, or auto";
        return Devices::new().absent(DeviceType::CUDA, reason);
    }
    let devices = probe();
    let has_any = devices.kind(DeviceType::CUDA).is_ok_and(|api| api.count().is_ok_and(|count| count > 0));
    match crate::isolate::suits(config) {
        Err(reason) if has_any && config.isolate == Isolate::Auto && !config.runs_foreign_code() => {
            tracing::warn!(reason, "no GPUs for sessions, because they cannot have processes of their own");
            devices.absent(DeviceType::CUDA, format!("sessions have no processes of their own here: {reason}"))
        }
        // The server logs this when it starts, unless the choice is `auto`.
        _ => devices,
    }
}

/// Returns `cpu` alone.
#[cfg(not(feature = "cuda"))]
pub fn devices(_: &Registry) -> Devices {
    Devices::new()
}

/// Returns `cpu` alone.
#[cfg(not(feature = "cuda"))]
pub fn probe() -> Devices {
    Devices::new()
}

/// Does nothing in builds without GPUs.
#[cfg(not(feature = "cuda"))]
pub fn answer_if_asked() {}
