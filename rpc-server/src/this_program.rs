//! The running program, for starting it again: as a session process, or to check
//! libraries.

use std::env;
use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rpc_transports::self_start;

/// Returns the command that starts the running program again, with the marks of a child.
///
/// # Errors
///
/// The program might start itself without end ([`self_start::EndlessStart`]), or its path is
/// unknown.
pub(crate) fn this_program_again() -> io::Result<Command> {
    self_start::check().map_err(io::Error::other)?;
    let (program, name) = this_program()?;
    let mut command = Command::new(program);
    command.arg0(name);
    self_start::mark(&mut command);
    Ok(command)
}

/// Returns the path of the running program, valid even if its file has been replaced, and the name
/// that it was called by.
fn this_program() -> io::Result<(PathBuf, OsString)> {
    const RUNNING: &str = "/proc/self/exe";
    let path = if Path::new(RUNNING).exists() { RUNNING.into() } else { env::current_exe()? };
    let name = env::args_os().next().unwrap_or_else(|| path.clone().into_os_string());
    Ok((path, name))
}
