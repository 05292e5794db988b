//! What people run: the daemon `rpc-server`, the tool `rpc-cli`, and the library to embed a server.
//!
//! [`server`] is the daemon as a library, [`spawn`] runs it as a child process, [`isolate`] gives each session a process of
//! its own, [`builtins`] are the functions that every server has. [`tracker`] hands out
//! servers, [`node`] is a node of a Disco session. [`config`] says what can be set, [`workspace`] keeps the files of sessions, [`modules`] the native code of clients.

#![forbid(unsafe_code)]

pub mod builtins;
pub mod cli;
pub mod config;
pub mod exit;
mod file_lock;
mod functions;
pub mod gpu;
mod http;
pub mod isolate;
pub mod logging;
pub mod modules;
mod monitor;
pub mod node;
pub mod npy;
#[cfg(feature = "otel")]
mod otel;
#[cfg(not(feature = "otel"))]
#[path = "otel/absent.rs"]
mod otel;
pub mod pki;
pub mod relay;
pub mod server;
pub mod session;
pub mod spawn;
pub mod tracker;
pub mod trust;
pub mod workspace;

pub use config::{ServeConfig, ServeSettings, TrackerConfig, TrackerSettings};
pub use server::{RpcServer, Running, ServerBuilder};
pub use spawn::{ServerProcess, run_as_child_if_asked};
