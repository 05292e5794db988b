//! The start of a program, in the reaper.
//!
//! The program is started by `posix_spawn`, which lends it the memory of the reaper until it is
//! executed: a copy of that memory costs more than the execution.

use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::{env, fs, io};

use nix::errno::Errno;
use nix::spawn::{PosixSpawnAttr, PosixSpawnFileActions, PosixSpawnFlags, posix_spawn};
use nix::sys::signal::{SigSet, Signal};
use rustix::process::{Pid, getpriority_process, setpriority_process};

use super::messages::ProgramSetup;
use super::system_calls::set_priority_of_this_process_alone;

/// Priority that the scheduler gives most of the processor.
const HIGHEST_PRIORITY: i32 = -20;

/// The shell that reads a script without a line that names one.
const SHELL: &str = "/bin/sh";

/// Starts the program of `setup`, in a session of the kernel of its own: the kernel shares the
/// processor between sessions, too, so that a program with many processes leaves the reaper a part
/// of it. The copies of `streams` that the program has are the only ones when this returns.
///
/// This process goes to the folder of the program.
///
/// # Errors
///
/// The folder or the program does not exist or may not be used; an argument or a variable has a
/// zero byte; an error of the system.
pub(super) fn start(setup: &ProgramSetup, streams: Vec<OwnedFd>) -> io::Result<Pid> {
    let mut streams = streams.into_iter();
    let (Some(stdout), Some(stderr)) = (streams.next(), streams.next()) else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let stdin = streams.next().map_or_else(|| File::open("/dev/null").map(OwnedFd::from), Ok)?;
    let mut actions = PosixSpawnFileActions::init()?;
    for (number, stream) in (0..).zip([&stdin, &stdout, &stderr]) {
        actions.add_dup2(stream.as_raw_fd(), number)?;
    }
    let mut attributes = PosixSpawnAttr::init()?;
    attributes.set_flags(
        PosixSpawnFlags::POSIX_SPAWN_SETSIGDEF
            | PosixSpawnFlags::POSIX_SPAWN_SETSIGMASK
            | PosixSpawnFlags::from_bits_retain(libc::POSIX_SPAWN_SETSID.into()),
    )?;
    // Programs written in Rust ignore this signal, and the program would inherit that.
    attributes.set_sigdefault(&Signal::SIGPIPE.into())?;
    attributes.set_sigmask(&SigSet::empty())?;
    env::set_current_dir(&setup.folder)?;

    let path = CString::new(setup.path.as_os_str().as_bytes())?;
    let mut args = setup.args.iter().map(|arg| CString::new(arg.as_str())).collect::<Result<Vec<_>, _>>()?;
    let variable = |(name, value): (&String, &OsString)| {
        CString::new([OsStr::new(name), OsStr::new("="), value].map(OsStr::as_bytes).concat())
    };
    let variables = setup.env.iter().map(variable).collect::<Result<Vec<_>, _>>()?;

    // The reaper goes before the processes of the program, if it may. Not later than here: beside a
    // program that forks without end it may get no turn to say so.
    let has_priority =
        getpriority_process(None) == Ok(0) && set_priority_of_this_process_alone(HIGHEST_PRIORITY).is_ok();
    // The kernel may share the processor between sessions first. Then the priority of a process
    // counts within its session alone, and the program's session has the ordinary one.
    let _ = fs::write("/proc/self/autogroup", HIGHEST_PRIORITY.to_string());
    let started = match posix_spawn(&*path, &actions, &attributes, &args, &variables) {
        // As `execvp` does, and with it the programs that users start others by.
        Err(Errno::ENOEXEC) => {
            let shell = CString::new(SHELL)?;
            args.splice(..args.len().min(1), [shell.clone(), path]);
            posix_spawn(&*shell, &actions, &attributes, &args, &variables)
        }
        started => started,
    };
    let pid = started?;
    if !has_priority {
        // The program would have inherited the priority.
        let _ = setpriority_process(None, HIGHEST_PRIORITY);
    }
    Pid::from_raw(pid.as_raw()).ok_or_else(|| io::ErrorKind::InvalidData.into())
}
