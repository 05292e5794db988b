//! Tests of the server as a library and of the programs `rpc-server` and `rpc-cli`: one binary,
//! since each one links for seconds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod builtins;
#[cfg(target_os = "linux")]
mod cached_weights;
mod cli;
mod credentials;
#[cfg(all(feature = "cuda", target_os = "linux"))]
mod cuda;
mod daemon;
mod disco_top;
mod doctor;
#[cfg(target_os = "linux")]
mod file_cache;
mod forward;
mod leases;
mod library;
mod logs;
mod metrics;
#[cfg(feature = "tvm-ffi")]
mod modules;
mod named_servers;
#[cfg(feature = "tvm-ffi")]
mod native_modules;
mod node;
mod open_files;
#[cfg(all(feature = "opencl", target_os = "linux"))]
mod opencl;
mod package;
mod page;
mod peer;
mod place;
mod relay_cli;
#[cfg(target_os = "linux")]
mod rights;
#[cfg(target_os = "linux")]
mod run;
#[cfg(target_os = "linux")]
mod shell;
#[cfg(target_os = "linux")]
mod socket_guard;
mod ssh;
mod tracker;
mod tracker_cli;
mod trust;
#[cfg(all(feature = "tvm", feature = "tvm-ffi"))]
mod tvm;
#[cfg(all(feature = "tvm", feature = "tvm-ffi"))]
mod tvm_client;
#[cfg(all(feature = "tvm", feature = "tvm-ffi"))]
mod tvm_minimal;
#[cfg(all(feature = "tvm", feature = "tvm-ffi"))]
mod tvm_models;
#[cfg(feature = "tvm")]
mod tvm_proxy;
#[cfg(feature = "tvm")]
mod tvm_tracker;
mod up;

/// Hides OpenCL's devices from a server. A device would give each session a process, which is
/// tested elsewhere.
const NO_OPENCL: (&str, &str) = ("OCL_ICD_VENDORS", "/nowhere");

/// Returns the program `rpc-server`, which finds no OpenCL.
fn server_program() -> std::process::Command {
    let mut program = std::process::Command::new(env!("CARGO_BIN_EXE_rpc-server"));
    program.env(NO_OPENCL.0, NO_OPENCL.1);
    program
}
