//! Devices that have drivers of their own (`cuda`, `opencl`), for servers, session processes and
//! workers.
//!
//! A kernel that traps destroys CUDA's context for the whole process, and one of OpenCL may never
//! end, or end the process. A server therefore never loads a driver: a short-lived process
//! [probes](probe) the devices, and only session processes ([`isolate`](crate::isolate)) and
//! workers [use](devices) them. There a driver is loaded when a session first uses a device, so
//! that other sessions pay nothing.
//!
//! A program that embeds a server with such devices begins like this:
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
//! The Cargo features `cuda` and `opencl` (defaults) have these kinds. Without them there is `cpu`
//! alone.

#[cfg(any(feature = "cuda", feature = "opencl"))]
mod probe;

use rpc_core::{DeviceType, Devices, Registry};

use crate::config::{Isolate, ServeConfig};

/// Kinds of devices of this build whose faults concern a whole process.
pub(crate) const KINDS: &[DeviceType] = &[
    #[cfg(feature = "cuda")]
    DeviceType::CUDA,
    #[cfg(feature = "opencl")]
    DeviceType::OPENCL,
];

/// Returns the devices of a process that serves one session or one worker, and adds their functions
/// and module loaders to `registry`. Loads nothing yet.
pub fn devices(registry: &Registry) -> Devices {
    let devices = Devices::new();
    #[cfg(feature = "cuda")]
    let devices = {
        rpc_cuda::register(registry);
        registry.add_loader(std::sync::Arc::new(rpc_cuda::CudaModulesOnDemand));
        devices.with(std::sync::Arc::new(rpc_cuda::on_demand()))
    };
    #[cfg(feature = "opencl")]
    let devices = {
        let rule = crate::modules::takes_any_native_code;
        rpc_opencl::register(registry, rule);
        registry.add_loader(std::sync::Arc::new(rpc_opencl::OpenClModulesOnDemand::new(rule)));
        devices.with(std::sync::Arc::new(rpc_opencl::on_demand()))
    };
    _ = registry;
    devices
}

/// Probes the devices for a server that does not use them itself: they have attributes and refuse
/// everything else. Starts this program again, which must call [`answer_if_asked`], and waits for
/// it, 20 seconds at most. A kind without devices gives the reason.
pub fn probe() -> Devices {
    #[cfg(any(feature = "cuda", feature = "opencl"))]
    return probe::probe(KINDS);
    #[cfg(not(any(feature = "cuda", feature = "opencl")))]
    return Devices::new();
}

/// Prints the devices and exits, if this process was started for that; otherwise returns at once.
/// Call it first in `main`.
pub fn answer_if_asked() {
    #[cfg(any(feature = "cuda", feature = "opencl"))]
    probe::answer_if_asked();
}

/// Returns the devices that a server with these settings offers. If its sessions have no processes
/// of their own, by choice or because of other settings, it offers `cpu` alone, and clients,
/// trackers and Disco get the reason.
pub fn for_server(config: &ServeConfig) -> Devices {
    if config.isolate == Isolate::None {
        let reason = "all sessions are in the server's own process: serve with --isolate process, or auto";
        return KINDS.iter().fold(Devices::new(), |devices, kind| devices.absent(*kind, reason));
    }
    let devices = probe();
    match crate::isolate::suits(config) {
        Err(reason) if has_any(&devices) && config.isolate == Isolate::Auto && !config.runs_foreign_code() => {
            tracing::warn!(reason, "no GPUs for sessions, because they cannot have processes of their own");
            let reason = format!("sessions have no processes of their own here: {reason}");
            let found = KINDS.iter().copied().filter(|kind| devices.kind(*kind).is_ok()).collect::<Vec<_>>();
            found.into_iter().fold(devices, |devices, kind| devices.absent(kind, reason.as_str()))
        }
        // The server logs this when it starts, unless the choice is `auto`.
        _ => devices,
    }
}

/// Returns true if there is a device of a kind whose faults concern a whole process.
pub(crate) fn has_any(devices: &Devices) -> bool {
    KINDS.iter().any(|kind| devices.kind(*kind).is_ok_and(|api| api.count().is_ok_and(|count| count > 0)))
}
