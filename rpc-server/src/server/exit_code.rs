//! Exit codes and error output of the programs.

use std::error::Error;
use std::io::{self, Write};

use crate::config::ServeError;
use crate::server::StopReason;

/// Done.
pub const SUCCESS: u8 = 0;
/// Any other failure.
pub const FAILURE: u8 = 1;
/// The command line is wrong.
pub const USAGE: u8 = 2;
/// An address or a folder is not available: `EX_UNAVAILABLE` of `sysexits.h`.
pub const UNAVAILABLE: u8 = 69;
/// The configuration cannot be used: `EX_CONFIG` of `sysexits.h`.
pub const CONFIG: u8 = 78;

/// Returns the exit code for the outcome of a server, after [reporting](report) an error.
pub fn of_server(outcome: &Result<StopReason, ServeError>) -> u8 {
    match outcome {
        Ok(reason) => reason.exit_code(),
        Err(error) => {
            report(error);
            match error {
                ServeError::Trust(_)
                | ServeError::Policy(_)
                | ServeError::Config(_)
                | ServeError::Modules(_)
                | ServeError::Library(_) => CONFIG,
                ServeError::Listen(_)
                | ServeError::Workdir { .. }
                | ServeError::Metrics { .. }
                | ServeError::Page { .. }
                | ServeError::Mpi { .. }
                | ServeError::Controller { .. } => UNAVAILABLE,
                ServeError::ReadyFile { .. }
                | ServeError::Otlp { .. }
                | ServeError::Signals(_)
                | ServeError::Runtime(_) => FAILURE,
            }
        }
    }
}

/// Writes an error and its causes to standard error, one a line, in one write, because other
/// threads may be writing, too.
pub fn report(error: &dyn Error) {
    let mut text = format!("error: {error}\n");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!("  because: {error}\n");
        cause = error.source();
    }
    let _ = io::stderr().lock().write_all(rpc_core::printable(&text).as_bytes());
}
