//! Guard against a program that starts itself without end.
//!
//! Some launches start the running program again: workers of Disco as child processes, a server of
//! one's own. The child is told by its first argument what to be, and a *hook* at the top of its
//! `main` takes over there. In a program without the hook, or with a hook that comes too late, the
//! child would go on into `main` and launch again.
//!
//! Each launch therefore has two defences:
//!
//! 1. It fails unless this process has called the hook (the crate with the hook remembers that).
//! 2. Children carry [`STARTED_BY`] in their environment. A process that its own program has
//!    started, and in which no hook has taken over ([`hook_took_over`]), launches nothing
//!    ([`check`]).

use std::env;
use std::ffi::OsString;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

/// Environment variable of a child process: the path of the executable of its parent.
pub const STARTED_BY: &str = "RPC_STARTED_BY";

/// True once a hook has recognised this process as a child and serves in it.
static TAKEN_OVER: AtomicBool = AtomicBool::new(false);

/// Error of a launch in a process that was itself started by such a launch and has not become what
/// it was started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "this process was started by its own program (the environment variable {STARTED_BY} says so), and no hook in its \
     `main` has taken over, so that it would start the program again without end; call the hook before anything else \
     in `main`, or remove the variable if this start was intended"
)]
#[non_exhaustive]
pub struct EndlessStart;

/// Puts the mark of a child into the environment of `command`. Does nothing if the executable of
/// this process is unknown.
pub fn mark(command: &mut Command) {
    if let Ok(program) = env::current_exe() {
        command.env(STARTED_BY, program);
    }
}

/// Records that a hook has taken over in this process: it may start its own program again.
pub fn hook_took_over() {
    TAKEN_OVER.store(true, Ordering::Relaxed);
}

/// Checks that this process may start its own program.
///
/// # Errors
///
/// [`EndlessStart`] if the process was started by its own program and no hook has taken over.
pub fn check() -> Result<(), EndlessStart> {
    if TAKEN_OVER.load(Ordering::Relaxed) {
        return Ok(());
    }
    let own = env::current_exe().ok().map(OsString::from);
    match env::var_os(STARTED_BY) {
        Some(parent) if Some(&parent) == own.as_ref() => Err(EndlessStart),
        _ => Ok(()),
    }
}
