//! Programs that clients run at the server (`--allow-run`), for the functions `rpc.run.*`.
//!
//! ```text
//! server ── session process: RunningProgram ── reaper process ── the program, all that it starts
//!                            │    │                                  │
//!                            │    └ reaper server, of which each reaper is a copy
//!                            └──── pipes of the standard streams ────┘
//! ```
//!
//! # What holds
//!
//! 1. **Off by default, and no sandbox.** A program can do everything that the user of the server
//!    can do. A server runs programs only for clients that prove who they are or are on its
//!    machine, and only in sessions with processes of their own, whose [limits](crate::isolate) the
//!    program inherits. The operator lists the programs.
//! 2. **The environment is the operator's.** It has `PATH`, `LD_*` and what `--run-env` names from
//!    the server, `HOME` and `TMPDIR` in the workspace, and the variables of the client: those that
//!    `--run-client-env` names, and the ranks of Disco's workers; or all but the operator's if
//!    clients may run any program.
//! 3. **A program leaves no process.** Where the server may make one, it has a
//!    namespace of process ids whose first process is the reaper: the kernel kills all in it when
//!    the reaper ends, and the program cannot send the reaper a signal. Elsewhere the reaper is the
//!    subreaper of all descendants, so that none escapes by a new session or process group, and
//!    searches for them. It kills them when the program exits, when it is ended, and when the
//!    session process closes the connection or dies. A reaper that the program stops is continued
//!    by the session process; one that stays stopped or is killed leaves the descendants to the
//!    session process, which kills them, and looks again until none is left. At its end it has
//!    [`RUN_GRACE`](crate::isolate::RUN_GRACE) for that.
//! 4. **Output is not buffered.** A client requests each piece; the program waits in its pipe.

mod messages;
mod namespace;
mod policy;
mod process_tree;
mod program;
mod reaper;
mod reaper_guard;
mod reaper_server;
mod start;
#[allow(unsafe_code)]
mod system_calls;

pub use policy::ANY_PROGRAM;
pub(crate) use policy::RunPolicy;
pub(crate) use program::RunningProgram;
pub(crate) use reaper::{REAPER_ARGUMENT, adopt_orphans, kill_orphans_of, run_executed as run_reaper};
pub(crate) use reaper_guard::{end_programs, end_reapers};
pub(crate) use reaper_server::{REAPER_SERVER_ARGUMENT, run as run_reaper_server};
