//! Failures of commands: exit codes and error output.

use std::error::Error;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};
use rpc_transports::{ConnectError, TokenError, TransportError};
use serde_json::json;

use super::output::Output;
use crate::cli::npy::NpyError;
use crate::pki::PkiError;
use crate::pki::trust::TrustError;
use crate::server::child_server::SpawnError;

/// A request failed.
const FAILURE: u8 = 1;
/// The command line is wrong.
const USAGE: u8 = 2;
/// `EX_UNAVAILABLE` of `sysexits.h`.
const UNREACHABLE: u8 = 69;
/// `EX_PROTOCOL` of `sysexits.h`.
const PROTOCOL: u8 = 76;
/// `EX_NOPERM` of `sysexits.h`.
const REFUSED: u8 = 77;
/// The code of `timeout(1)`.
const TIMEOUT: u8 = 124;

/// Failure of a command.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The command line is wrong.
    #[error("{0}")]
    Usage(String),
    /// No session could be opened.
    #[error("cannot connect")]
    Connect(#[source] ConnectError),
    /// A request failed.
    #[error("the request failed")]
    Remote(#[from] RpcError),
    /// The time limit passed.
    #[error("{what} took longer than {limit:?}")]
    TimedOut {
        /// The operation.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// A local file cannot be read or written.
    #[error("{what} {}", file.display())]
    File {
        /// The operation, as in "cannot read".
        what: &'static str,
        /// The file.
        file: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// Another local operation failed.
    #[error("{what}")]
    Local {
        /// The operation, as in "cannot start a thread".
        what: String,
        /// The error of the system.
        source: io::Error,
    },
    /// A file is not a usable `.npy` file.
    #[error("cannot use {}", file.display())]
    Npy {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: NpyError,
    },
    /// A value does not fit its purpose.
    #[error("{0}")]
    Unsuitable(String),
    /// A child process cannot be started.
    #[error("cannot start a process of our own")]
    Spawn(#[from] SpawnError),
    /// Certificates or tokens cannot be made.
    #[error(transparent)]
    Pki(#[from] PkiError),
    /// Certificates or tokens cannot be read.
    #[error(transparent)]
    Trust(#[from] TrustError),
    /// Standard output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
    /// The failure has been reported already. The value is the exit code.
    #[error("failed")]
    Reported(u8),
}

impl From<disco::DiscoError> for Failure {
    fn from(error: disco::DiscoError) -> Self {
        Self::Remote(error.into())
    }
}

impl Failure {
    /// Returns the failure of an operation on a local file.
    pub fn file(what: &'static str, file: &Path, source: io::Error) -> Self {
        Self::File { what, file: file.to_owned(), source }
    }

    /// Returns the failure of another local operation.
    pub fn local(what: impl Into<String>, source: io::Error) -> Self {
        Self::Local { what: what.into(), source }
    }

    /// Returns the exit code that stands for the failure.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_)
            | Self::Pki(PkiError::NoHost | PkiError::Token(TokenError::Name | TokenError::Malformed)) => USAGE,
            Self::Connect(error) => connect_code(error),
            Self::Remote(error) => code_of_kind(error.kind()),
            Self::TimedOut { .. } => TIMEOUT,
            Self::Reported(code) => *code,
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => 0,
            Self::File { .. }
            | Self::Local { .. }
            | Self::Npy { .. }
            | Self::Unsuitable(_)
            | Self::Spawn(_)
            | Self::Pki(_)
            | Self::Trust(_)
            | Self::Output(_) => FAILURE,
        }
    }

    /// Prints the failure on standard error.
    pub fn report(&self, output: &Output) {
        match self {
            Self::Reported(_) => return,
            // The reader of the output has closed the pipe.
            Self::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return,
            _ => {}
        }
        if output.is_json() { self.report_json(output) } else { self.report_text(output) }
    }

    fn report_text(&self, output: &Output) {
        let rpc = self.rpc_error();
        if let (Self::Remote(_), Some(error)) = (self, rpc) {
            output.error(error.message());
        } else {
            output.error(&self.to_string());
            let mut cause = self.source();
            while let Some(error) = cause {
                match error.downcast_ref::<RpcError>() {
                    Some(error) => output.detail("because", error.message()),
                    None => output.detail("because", &error.to_string()),
                }
                cause = error.source();
            }
        }
        let Some(error) = rpc else { return };
        output.detail("kind", &error.kind().to_string());
        if let Some(kind) = error.application_kind() {
            output.detail("type", kind);
        }
        output.detail("at", &origin(error));
        if error.request_may_have_run() {
            output.detail("note", "the request may have had an effect");
        }
        if let Some(backtrace) = error.backtrace() {
            output.detail("remote backtrace", "");
            for line in backtrace.lines() {
                output.detail("", line);
            }
        }
    }

    fn report_json(&self, output: &Output) {
        let mut causes = Vec::new();
        let mut cause = self.source();
        while let Some(error) = cause {
            causes.push(error.to_string());
            cause = error.source();
        }
        let mut report = json!({ "message": self.to_string(), "causes": causes, "exit_code": self.exit_code() });
        if let Some(error) = self.rpc_error() {
            report["message"] = error.message().into();
            report["kind"] = error.kind().name().into();
            report["hop"] = error.hop().into();
            report["peer"] = error.peer().into();
            report["application_kind"] = error.application_kind().into();
            report["backtrace"] = error.backtrace().into();
            report["may_have_run"] = error.request_may_have_run().into();
        }
        output.error_json(&json!({ "error": report }));
    }

    fn rpc_error(&self) -> Option<&RpcError> {
        match self {
            Self::Remote(error) | Self::Connect(ConnectError::Session(error)) => Some(error),
            _ => None,
        }
    }
}

/// Describes the origin of an error.
pub(super) fn origin(error: &RpcError) -> String {
    let hop = match error.hop() {
        0 => "this side of the link".to_owned(),
        1 => "the server".to_owned(),
        hop => format!("hop {hop}"),
    };
    match error.peer() {
        Some(peer) => format!("{hop} ({peer})"),
        None => hop,
    }
}

/// Returns the exit code of a failed connection.
pub(super) fn connect_code(error: &ConnectError) -> u8 {
    match error {
        ConnectError::Address(_) => USAGE,
        ConnectError::Transport(error) => transport_code(error),
        // Without a session the limit is one on sessions or clients.
        ConnectError::Session(error) if error.kind() == ErrorKind::LimitExceeded => REFUSED,
        ConnectError::Session(error) => code_of_kind(error.kind()),
        _ => FAILURE,
    }
}

fn transport_code(error: &TransportError) -> u8 {
    match error {
        TransportError::TimedOut { .. } => TIMEOUT,
        TransportError::PermissionDenied { .. } | TransportError::Unauthenticated { .. } => REFUSED,
        TransportError::Unsupported { .. } => USAGE,
        _ => UNREACHABLE,
    }
}

fn code_of_kind(kind: ErrorKind) -> u8 {
    match kind {
        ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout => TIMEOUT,
        ErrorKind::PeerLost | ErrorKind::PeerSilent | ErrorKind::Draining | ErrorKind::Closed => UNREACHABLE,
        ErrorKind::Protocol | ErrorKind::VersionMismatch => PROTOCOL,
        ErrorKind::Refused | ErrorKind::Unauthenticated => REFUSED,
        _ => FAILURE,
    }
}
