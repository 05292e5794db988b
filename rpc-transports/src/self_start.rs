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
//! 2. Children carry [`STARTED_BY`] and [`STARTED_DEPTH`] in their environment. A process in which
//!    no hook has taken over ([`hook_took_over`]) launches nothing ([`check`]) if its own program
//!    has started it, or if it is the child of a child. The second holds for programs with several
//!    paths, too.
//!
//! A plain [`Connector`](crate::Connector) that dials an `exec:` address has the second defence
//! alone ([`guard`]), because nothing says that such a program is meant to be its own child. The
//! child of the own program is refused only if the command names that program, as the program to
//! start or in any argument (`env PROGRAM`, `sh -c "PROGRAM …"`). Of the command of an `ssh://`
//! address only `ssh` itself counts for that: the program that it names is on another machine,
//! where it may have the same path.
//!
//! A program that [another one runs](crate::program::embed), such as a script of an interpreter,
//! cannot be told from others by the path of its executable. It has the count of launches alone,
//! and refuses launches itself in a process that has not become what it was started as.

use std::env;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::program::{self, Program};

/// Environment variable of a child process: the path of the executable of its parent.
pub const STARTED_BY: &str = "RPC_STARTED_BY";

/// Environment variable of a child process: the number of such launches that lead to it, counted
/// from the last process in which a hook has taken over.
pub const STARTED_DEPTH: &str = "RPC_STARTED_DEPTH";

/// The least depth at which a process without a hook launches nothing. At depth 1 it may be another
/// program, which launches its own workers.
const TOO_DEEP: u32 = 2;

/// True once a hook has recognised this process as a child and serves in it.
static TAKEN_OVER: AtomicBool = AtomicBool::new(false);

/// Error of a launch in a process that was itself started by such a launch and has not become what
/// it was started as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EndlessStart {
    /// The parent is a process of the same program.
    #[error(
        "this process was started by its own program (the environment variable {STARTED_BY} says so), and no hook in \
         its `main` has taken over, so that it would start the program again without end; call the hook before \
         anything else in `main`, or remove the variable if this start was intended"
    )]
    OwnProgram,
    /// The parent was itself started by such a launch.
    #[error(
        "this process was started by a process that was itself started as a child (the environment variable \
         {STARTED_DEPTH} is {depth}), and no hook in its `main` has taken over, so that programs might start each \
         other without end; call the hook before anything else in `main`, or remove the variable if this start was \
         intended"
    )]
    TooDeep {
        /// Value of the variable.
        depth: u32,
    },
}

/// Puts the marks of a child into the environment of `command`. Leaves [`STARTED_BY`] out if the
/// executable of this process is unknown.
pub fn mark(command: &mut Command) {
    if let Ok(program) = env::current_exe() {
        command.env(STARTED_BY, program);
    }
    // A process in which a hook has taken over serves, and begins a chain of its own.
    let own = if TAKEN_OVER.load(Ordering::Relaxed) { 0 } else { depth(env::var_os(STARTED_DEPTH).as_deref()) };
    command.env(STARTED_DEPTH, own.saturating_add(1).to_string());
}

/// Records that a hook has taken over in this process: it may start its own program again.
pub fn hook_took_over() {
    TAKEN_OVER.store(true, Ordering::Relaxed);
}

/// Checks that this process may start its own program.
///
/// # Errors
///
/// [`EndlessStart`] if no hook has taken over, and the process was started by its own program or by
/// the child of another one.
pub fn check() -> Result<(), EndlessStart> {
    if TAKEN_OVER.load(Ordering::Relaxed) {
        return Ok(());
    }
    if own_program_has_started_this().is_some() {
        return Err(EndlessStart::OwnProgram);
    }
    check_depth()
}

/// Returns the command that starts `program`, which is this one or has the same hooks, with the
/// marks of a child.
///
/// # Errors
///
/// The program might start itself without end ([`EndlessStart`]), or its path is unknown.
pub fn command(program: &Program) -> io::Result<Command> {
    check().map_err(io::Error::other)?;
    let mut command = program.bare_command()?;
    mark(&mut command);
    Ok(command)
}

/// Checks that this process may start `command`, and puts the marks of a child into it. The first
/// `local_words` words of the command, the program included, name programs of this machine.
///
/// # Errors
///
/// An [`io::Error`] around [`EndlessStart`], if no hook has taken over in this process, and it is
/// the child of a child, or a child of its own program that would start that program again.
pub fn guard(command: &mut Command, local_words: usize) -> io::Result<()> {
    if !TAKEN_OVER.load(Ordering::Relaxed) {
        if own_program_has_started_this().is_some_and(|own| names_program(command, local_words, &own)) {
            return Err(io::Error::other(EndlessStart::OwnProgram));
        }
        check_depth().map_err(io::Error::other)?;
    }
    mark(command);
    Ok(())
}

/// Returns the path of this program, if a process of the same program has started this one.
fn own_program_has_started_this() -> Option<PathBuf> {
    if program::is_embedded() {
        return None;
    }
    let own = env::current_exe().ok()?;
    (env::var_os(STARTED_BY)? == own.as_os_str()).then_some(own)
}

/// Returns true if one of the first `local_words` words of the command is a path or a name on
/// `PATH` of the program `own`, or has that path in it, as the argument of a shell does.
fn names_program(command: &Command, local_words: usize, own: &Path) -> bool {
    let folders = env::var_os("PATH").unwrap_or_default();
    let own_text = own.as_os_str().as_encoded_bytes();
    let is_own = |path: &Path| path.canonicalize().is_ok_and(|path| path == own);
    let names_own = |word: &OsStr| {
        let mut parts = word.as_encoded_bytes().windows(own_text.len().max(1));
        let is_name = !word.is_empty() && Path::new(word).components().count() == 1;
        parts.any(|part| part == own_text)
            || is_own(Path::new(word))
            || is_name && env::split_paths(&folders).any(|folder| is_own(&folder.join(word)))
    };
    [command.get_program()].into_iter().chain(command.get_args()).take(local_words).any(names_own)
}

/// Checks that this process is not the child of a child, as far as the marks say.
fn check_depth() -> Result<(), EndlessStart> {
    match depth(env::var_os(STARTED_DEPTH).as_deref()) {
        depth if depth >= TOO_DEEP => Err(EndlessStart::TooDeep { depth }),
        _ => Ok(()),
    }
}

/// Returns the depth that a variable names; 0 if it is missing or no number.
fn depth(variable: Option<&OsStr>) -> u32 {
    variable.and_then(OsStr::to_str).and_then(|text| text.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_started_again_with_the_marks_of_a_child() {
        let script = Program::of_command(["python3", "-m", "module"]).unwrap();
        for program in [Program::this(), script] {
            let command = command(&program).unwrap();
            let depth = command.get_envs().find(|(name, _)| *name == STARTED_DEPTH);
            assert_eq!(depth.and_then(|(_, depth)| depth).and_then(|depth| depth.to_str()), Some("1"));
        }
    }
}
