//! Sessions in processes of their own: `--isolate process`.
//!
//! A function that crashes, exits, never returns or eats all memory takes its process with it. In isolation that is the
//! process of one session: its client gets an error that says how the process ended, and the server serves on.
//!
//! ```text
//! client ──── server: ClientSession ──── socket pair ──── process of the session: LocalSession
//! ```
//!
//! The process is this program, executed again, so a program that embeds a server has to begin with
//! [`run_if_isolated`]; what is registered there is what the clients find:
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::config::{Isolate, ServeConfig};
//! use rpc_server::{RpcServer, isolate};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let registry = Registry::new();
//!     registry.add("add", |a: i64, b: i64| a + b);
//!     isolate::run_if_isolated(&registry);
//!
//!     let config = ServeConfig { isolate: Isolate::Process, ..ServeConfig::default() };
//!     RpcServer::builder().registry(registry).config(config).build().run_blocking()?;
//!     Ok(())
//! }
//! ```
//!
//! # What holds
//!
//! 1. **One session, one process.** It is started while the client's handshake waits, and is never used again.
//! 2. **Its end is the session's end.** Calls that were under way fail with
//!    [`PeerLost`](rpc_core::ErrorKind::PeerLost), may have run, and name the signal or the exit code. A process that
//!    lets go of its connection, or answers nothing for three times the keep-alive, is killed.
//! 3. **The session's end is its end.** Whether the client left, died or was cut off: the process has [`GRACE`] to end in
//!    good order, which it cannot while a function runs that nobody waits for; then it is killed. So are all processes
//!    that it has started, at once when it ends, unless they have left its process group.
//! 4. **Nothing is left behind.** The server reaps its processes and removes their private workspaces, however they ended.
//!    If the server itself is killed, they see it by the signal that the kernel sends (Linux), or by the end of the
//!    connection, and end themselves and their groups.
//! 5. **Limits** on memory, files and processor time are set before anything is served (`--isolate-memory`,
//!    `--isolate-files`, `--isolate-cpu-time`); those of every session (`--max-memory`, `--max-handles` and the like) hold
//!    in the process as they would in the server. Of `--max-total-memory` each session gets `--max-memory` set aside when
//!    it begins. What a process starts in turn has the same limits again, for itself.
//!
//! # What differs for clients
//!
//! Errors come from one hop further away. `rpc.info` gives the id of the session's process, and what all sessions hold as
//! they last reported it, which may be [a moment](REPORT_INTERVAL) ago. Functions share no memory with other sessions.
//!
//! A signal to the server's process group or service reaches the processes, too; they leave SIGTERM and SIGINT to the server,
//! which drains them with the other sessions.

mod child;
mod fate;
mod io;
mod keeper;
mod messages;
mod session;

use std::env;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc_core::{Devices, Registry};

use crate::config::{ConfigError, Isolate, ServeConfig};
use crate::modules;

pub(crate) use keeper::this_program;
pub(crate) use session::Isolation;

/// How long the process of a session may take to end once the session has. Enough to free what it held, and little enough
/// that an endless loop is over within the second.
pub const GRACE: Duration = Duration::from_millis(500);

/// How often the process of a session tells the server what it holds, if that changes.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// The first argument of a program that is started as the process of a session; the process id of the server follows.
const CHILD_ARGUMENT: &str = "--serve-isolated-session";

/// Whether `main` has called the hook.
static HOOKED: AtomicBool = AtomicBool::new(false);

/// Serves one session and exits, if this process was started to do that; otherwise returns at once.
///
/// Call it first thing in `main`, before arguments are looked at, anything is printed, and threads are started. The first
/// argument `--serve-isolated-session` is what tells; with `--load-libraries` the process tries the libraries of a server
/// (`--library`) instead. `registry` is to hold all functions and module loaders that clients
/// of isolated sessions are to find; those of [`builtins`](crate::builtins) are added.
pub fn run_if_isolated(registry: &Registry) {
    run_if_isolated_with(registry, Devices::new);
}

/// As [`run_if_isolated`], with devices, which are made only in the process of a session.
pub fn run_if_isolated_with(registry: &Registry, devices: impl FnOnce() -> Devices) {
    let mut args = env::args_os().skip(1);
    let first = args.next();
    modules::answer_if_asked(first.as_ref());
    if first.is_some_and(|first| first == CHILD_ARGUMENT) {
        rpc_transports::self_start::hook_took_over();
        let server = args.next().and_then(|pid| pid.to_str()?.parse().ok());
        child::run(registry, devices, server);
    }
    HOOKED.store(true, Ordering::Relaxed);
}

/// Whether sessions of a server with these settings can have processes, whatever they say of that themselves; or else why not.
pub(crate) fn suits(config: &ServeConfig) -> Result<(), String> {
    if !is_possible() {
        return Err(ConfigError::NoIsolationHook.to_string());
    }
    let config = ServeConfig { isolate: Isolate::Process, ..config.clone() };
    config.check().map_err(|error| error.to_string())
}

/// Whether this program can be started again as the process of a session.
pub(crate) fn is_possible() -> bool {
    HOOKED.load(Ordering::Relaxed)
}
