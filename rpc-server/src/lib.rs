//! Programs and library for servers: the daemon `rpc-server`, the tool `rpc-cli`, and the library
//! to embed a server.
//!
//! [`server`] is the daemon as a library; begin there. [`isolate`] gives each session a process of
//! its own. [`builtins`] are the functions of every server, [`workspace`] has the files of
//! sessions, [`modules`] the native code of clients and [`run`] their programs. [`tracker`] gives
//! servers to clients, [`config`] has all settings, [`pki`] certificates and tokens, [`policy`] the
//! rights of clients, and [`cli`] and [`daemon`] the two programs.

#![deny(unsafe_code)]

pub mod builtins;
pub mod cli;
pub mod config;
pub mod daemon;
mod file_cache;
mod file_limit;
mod file_lock;
mod function_table;
mod handed_down;
mod http_listener;
pub mod isolate;
mod leases;
pub mod logging;
pub mod modules;
mod monitor;
mod offers;
#[cfg(feature = "otel")]
mod otel;
#[cfg(not(feature = "otel"))]
#[path = "otel/absent.rs"]
mod otel;
pub mod pki;
pub mod policy;
mod recent_logs;
pub mod run;
pub mod server;
mod socket_guard;
mod sparse;
mod suggestion;
pub mod tracker;
mod transports;
#[cfg(feature = "tvm")]
mod tvm;
mod versioned_json;
pub mod workspace;

pub use config::{ServeConfig, ServeSettings, TrackerConfig, TrackerSettings};
pub use file_limit::raise_file_limit;
pub use server::child_server::{ServerProcess, run_as_child_if_asked};
pub use server::{RpcServer, Running};
pub use transports::transports;
#[cfg(feature = "tvm")]
pub use tvm::client::finish_requests as finish_tvm_requests;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExamples;
