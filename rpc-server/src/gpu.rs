//! GPUs in the programs of this crate.
//!
//! A kernel that traps takes the driver's context with it, for everybody in the process. So a server never loads the driver: a process
//! of its own [tells](probe) what devices there are, and [uses](devices) them only in the processes of sessions ([`isolate`](crate::isolate)) and of workers.
//! There the driver is loaded when a session first asks for a device, so that the others pay nothing.
//!
//! A program that embeds a server and wants the same begins like this:
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::config::ServeConfig;
//! use rpc_server::{RpcServer, gpu, isolate};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     gpu::answer_if_asked();
//!     let registry = Registry::new();
//!     isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
//!
//!     let config = ServeConfig::default();
//!     RpcServer::builder().registry(registry).devices(gpu::for_server(&config)).config(config).build().run_blocking()?;
//!     Ok(())
//! }
//! ```
//!
//! Without the Cargo feature `cuda`, which is on by default, there is `cpu` alone.

#[cfg(feature = "cuda")]
mod probe;

#[cfg(feature = "cuda")]
use std::sync::Arc;

use rpc_core::{DeviceType, Devices, Registry};

use crate::config::{Isolate, ServeConfig};

/// The devices for a process that serves one session, or one worker; their functions and module loaders are added to `registry`. Loads nothing yet.
#[cfg(feature = "cuda")]
pub fn devices(registry: &Registry) -> Devices {
    use rpc_cuda::{self as cuda, CudaModulesOnDemand, CudaOnDemand};

    cuda::register(registry);
    registry.add_loader(Arc::new(CudaModulesOnDemand));
    Devices::new().with(Arc::new(CudaOnDemand))
}

/// What devices there are, for a server that leaves their use to others: of GPUs it has attributes, and refuses all else. Starts this program
/// again to find out, which has to call [`answer_if_asked`], and waits for that process, which takes what the driver takes, 20 seconds at most. Where there is no GPU the devices say why.
#[cfg(feature = "cuda")]
pub fn probe() -> Devices {
    probe::probe()
}

/// Tells what devices there are and exits, if this process was started to do that; otherwise returns at once. Call it first thing in `main`.
#[cfg(feature = "cuda")]
pub fn answer_if_asked() {
    probe::answer_if_asked();
}

/// What a server with these settings offers. Where sessions have no processes of their own, because that was asked for or does not go with the rest, there
/// are no GPUs, and clients, trackers and Disco are told why.
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
        Err(reason) if has_any && config.isolate == Isolate::Auto && !config.runs_native_code() => {
            tracing::warn!(reason, "no GPUs for sessions, because they cannot have processes of their own");
            devices.absent(DeviceType::CUDA, format!("sessions have no processes of their own here: {reason}"))
        }
        // Said when it starts, if nobody has left the choice to it.
        _ => devices,
    }
}

/// `cpu` alone.
#[cfg(not(feature = "cuda"))]
pub fn devices(_: &Registry) -> Devices {
    Devices::new()
}

/// `cpu` alone.
#[cfg(not(feature = "cuda"))]
pub fn probe() -> Devices {
    Devices::new()
}

/// Returns at once.
#[cfg(not(feature = "cuda"))]
pub fn answer_if_asked() {}
