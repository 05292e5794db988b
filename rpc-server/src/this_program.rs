//! The running program, for starting it again as a session process or to check libraries.

use std::env;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the path of the running program, valid even if its file has been replaced, and the name
/// that it was called by.
pub(crate) fn this_program() -> io::Result<(PathBuf, OsString)> {
    const RUNNING: &str = "/proc/self/exe";
    let path = if Path::new(RUNNING).exists() { RUNNING.into() } else { env::current_exe()? };
    let name = env::args_os().next().unwrap_or_else(|| path.clone().into_os_string());
    Ok((path, name))
}
