//! The server as a library: what `rpc-server serve` runs, for programs with functions of their own.
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::RpcServer;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let registry = Registry::new();
//!     registry.add("add", |a: i64, b: i64| a + b);
//!     RpcServer::new(registry).listen("tcp://127.0.0.1:9090").run_blocking()?;
//!     Ok(())
//! }
//! ```
//!
//! [`start`](RpcServer::start) serves beside other tasks of a program, and
//! [`ServeConfig`](crate::ServeConfig) has all settings:
//!
//! ```
//! use rpc_core::Registry;
//! use rpc_server::{RpcServer, ServeConfig};
//! use rpc_transports::Connector;
//!
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! # let folder = tempfile::tempdir()?;
//! let config = ServeConfig {
//!     max_sessions: 16,
//! #   workdir: folder.path().to_owned(),
//!     ..ServeConfig::default()
//! };
//! let server = RpcServer::new(registry).config(config).listen("tcp://127.0.0.1:0");
//! let running = server.start().await?;
//!
//! let session = Connector::new().connect(&running.addresses()[0].to_string()).await?;
//! let add = session.function::<(i64, i64), i64>("add").await?;
//! assert_eq!(add.call((1, 2)).await?, 3);
//! drop((add, session));
//! running.drain().await;
//! # Ok(())
//! # }
//! ```
//!
//! `rpc_server` has the server before it runs, `start` puts its parts together, `running` is the
//! server while it runs and ends. `local_sessions` opens sessions in this process; those in other
//! processes are in [`isolate`](crate::isolate). `ticket_gate` and `registrar` are the part of a
//! server that a tracker gives out.

mod advertisement;
mod certificate_expiry;
pub mod child_server;
mod details;
pub mod disco_node;
pub mod exit_code;
pub(crate) mod functions_used;
mod local_sessions;
mod options;
mod ready_file;
pub(crate) mod recent_errors;
mod registrar;
mod relay;
mod rpc_server;
mod running;
pub(crate) mod server_state;
pub(crate) mod session_workspace;
mod signals;
mod standard_streams;
mod start;
mod ticket_gate;

pub use self::child_server::{ServerProcess, SpawnError, run_as_child_if_asked};
pub use self::relay::Relay;
pub use self::rpc_server::RpcServer;
pub use self::running::{Running, StopReason};
pub use self::server_state::{Client, ServerState, ServerTotals};
pub use self::session_workspace::SessionWorkspace;

pub(crate) use self::options::{session_limits, spin_time, wire_limits};
