//! How the programs say that they failed: on standard error, and by their exit code.

use std::error::Error;
use std::io::{self, Write};

use crate::config::ServeError;
use crate::server::StopReason;

/// Something failed.
pub const FAILURE: u8 = 1;
/// The command line is not right.
pub const USAGE: u8 = 2;
/// An address or folder cannot be had: `EX_UNAVAILABLE` of `sysexits.h`.
pub const UNAVAILABLE: u8 = 69;
/// The configuration cannot be used: `EX_CONFIG` of `sysexits.h`.
pub const CONFIG: u8 = 78;

/// The exit code of a server that ended so; a failure is [reported](report).
pub fn of_server(outcome: &Result<StopReason, ServeError>) -> u8 {
    match outcome {
        Ok(reason) => reason.exit_code(),
        Err(error) => {
            report(error);
            match error {
                ServeError::Trust(_) | ServeError::Config(_) => CONFIG,
                ServeError::Listen(_)
                | ServeError::Workdir { .. }
                | ServeError::Metrics { .. }
                | ServeError::Page { .. }
                | ServeError::Controller { .. } => UNAVAILABLE,
                ServeError::ReadyFile { .. }
                | ServeError::Otlp { .. }
                | ServeError::Signals(_)
                | ServeError::Runtime(_) => FAILURE,
            }
        }
    }
}

/// Writes an error and its causes to standard error, one a line.
pub fn report(error: &dyn Error) {
    let mut stderr = io::stderr().lock();
    let _ = writeln!(stderr, "error: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        let _ = writeln!(stderr, "  because: {error}");
        cause = error.source();
    }
}
