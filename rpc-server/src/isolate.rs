//! Sessions in processes of their own: `--isolate process`.
//!
//! A function that crashes, exits, never returns or takes all memory affects its whole process.
//! With isolation this is the process of one session: the client gets an error that names the cause
//! of the end, and the server goes on.
//!
//! ```text
//! client ──── process of the session: LocalSession                                  (TCP, Unix)
//! client ──── server: ClientSession ──── socket pair ──── process of the session    (TLS, QUIC)
//! ```
//!
//! Over TCP and Unix sockets the server passes the client's socket to the process after the
//! handshake, and watches over it from there. It passes on the bytes itself over TLS and QUIC, with
//! [`metrics`](ServeConfig::metrics), and with [`otlp_endpoint`](ServeConfig::otlp_endpoint): then
//! a call takes about twice as long. A client of TVM has its socket passed behind its first
//! request, unless that asks for a further server.
//!
//! The process is this program, executed again ([`program`]). A program that embeds a server must
//! therefore begin with [`run_if_isolated`], with all functions that clients use registered:
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
//!     RpcServer::new(registry).config(config).run_blocking()?;
//!     Ok(())
//! }
//! ```
//!
//! # What holds
//!
//! 1. **One session, one process.** The process starts during the client's handshake, or in
//!    advance, and serves no second session.
//! 2. **The end of the process ends the session.** Calls in progress fail with
//!    [`PeerLost`](rpc_core::ErrorKind::PeerLost), may have run, and name the signal or the exit
//!    code, unless a process that serves the client's socket ends in the middle of a message. A
//!    process that closes its connection, or is silent for three times the keep-alive, is killed.
//! 3. **The end of the session ends the process.** After the client has left, died or been cut off,
//!    the process has [`GRACE`] to end in good order. It cannot while a function still runs, and is
//!    killed then. All processes that it has started are killed at once when it ends, unless they
//!    have left its process group. Where clients may run programs (`--allow-run`) it has
//!    [`RUN_GRACE`] more, of which it takes no more than the programs need to end.
//! 4. **Nothing is left behind.** The server reaps its processes and removes their private
//!    workspaces, however they end. If the server itself is killed, the processes learn of it by a
//!    signal of the kernel (Linux) or by the end of the connection, and kill themselves and their
//!    groups.
//! 5. **Limits** on memory, files and processor time are set before anything is served
//!    (`--isolate-memory`, `--isolate-files`, `--isolate-cpu-time`). The limits of every session
//!    (`--max-memory`, `--max-handles` and others) hold in the process as they would in the server.
//!    Each session reserves `--max-memory` of `--max-total-memory` when it begins. A process that a
//!    session process starts has the same limits again, for itself.
//!
//! # What differs for clients
//!
//! Errors come from one hop further away if the server passes on the bytes. `rpc.info` returns
//! the id of the session process, and totals of all sessions that may be [a
//! moment](REPORT_INTERVAL) old. Functions share no memory with other sessions.
//!
//! A signal to the server's process group or service reaches the session processes, too. They
//! ignore SIGTERM and SIGINT: the server drains them with the other sessions.

mod compiler_cache;
mod control_link;
mod exit_cause;
pub mod gpu;
mod handoff;
mod isolated_session;
mod messages;
mod passed_client;
mod process_io;
mod process_leases;
mod process_limits;
mod process_logs;
mod session_main;
mod supervisor;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rpc_core::{Devices, Registry};
use rpc_transports::program;

use crate::config::{ConfigError, Isolate, ServeConfig};
use crate::modules;
use crate::run::{REAPER_ARGUMENT, REAPER_SERVER_ARGUMENT, run_reaper, run_reaper_server};
use crate::socket_guard;

pub(crate) use isolated_session::{FILES_OF_SESSION, Isolation};

/// Time that a session process has to end after its session: enough to free its objects, and short
/// enough that an endless loop is over within a second.
pub const GRACE: Duration = Duration::from_millis(500);

/// Time that a session process has after its session, beyond [`GRACE`], to end the programs of its
/// client that resist their end. Without such a program none of it passes.
pub const RUN_GRACE: Duration = Duration::from_secs(2);

/// Least time between two usage reports of a session process.
pub const REPORT_INTERVAL: Duration = Duration::from_millis(250);

/// First argument of a session process; the process id of the server follows.
const CHILD_ARGUMENT: &str = "--serve-isolated-session";

/// True once `main` has called the hook.
static HOOKED: AtomicBool = AtomicBool::new(false);

/// Serves one session and exits, if this process was started for that; otherwise returns at once.
///
/// Call it first in `main`, before arguments are read, anything is printed, and threads are
/// started. The first argument `--serve-isolated-session` selects this; with `--load-libraries` the
/// process checks the libraries of a server (`--library`) instead, with `--start-reapers` it starts
/// programs (`--allow-run`), with `--reap-run-program` it runs one, and with `--guard-socket-files`
/// it removes the files of `unix:` listeners once the process that made them has been killed.
/// `registry` must have all
/// functions and module loaders that clients of isolated sessions use;
/// [`builtins`](crate::builtins) are added.
pub fn run_if_isolated(registry: &Registry) {
    run_if_isolated_with(registry, Devices::new);
}

/// As [`run_if_isolated`], with devices. `devices` is called only in a session process.
pub fn run_if_isolated_with(registry: &Registry, devices: impl FnOnce() -> Devices) {
    let mut args = program::args().skip(1);
    let first = args.next();
    modules::answer_if_asked(first.as_ref());
    if first.as_deref().is_some_and(|first| first == REAPER_ARGUMENT) {
        run_reaper();
    }
    if first.as_deref().is_some_and(|first| first == REAPER_SERVER_ARGUMENT) {
        run_reaper_server();
    }
    if first.as_deref().is_some_and(|first| first == CHILD_ARGUMENT) {
        rpc_transports::self_start::hook_took_over();
        let server = args.next().and_then(|pid| pid.to_str()?.parse().ok());
        socket_guard::run_if_asked(None, None);
        session_main::run(registry, devices, server);
    }
    socket_guard::run_if_asked(first.as_deref(), args.next().as_deref());
    HOOKED.store(true, Ordering::Relaxed);
}

/// Returns an error with the reason if sessions of a server with these settings cannot have
/// processes. Ignores the setting `isolate` itself.
pub(crate) fn suits(config: &ServeConfig) -> Result<(), String> {
    if !is_possible() {
        return Err(ConfigError::NoIsolationHook.to_string());
    }
    let config = ServeConfig { isolate: Isolate::Process, ..config.clone() };
    config.check().map_err(|error| error.to_string())
}

/// Returns true if this program can be started again as a session process.
pub(crate) fn is_possible() -> bool {
    HOOKED.load(Ordering::Relaxed)
}
