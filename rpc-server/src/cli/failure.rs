//! Failures of commands, and their exit codes.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};
use rpc_transports::{ConnectError, TokenError, TransportError};

use super::named_servers::NamedServerError;
use crate::cli::npy::NpyError;
use crate::pki::PkiError;
use crate::pki::trust::TrustError;
use crate::server::child_server::SpawnError;

/// A request failed.
pub(super) const FAILURE: u8 = 1;
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

/// With the number of a signal added: the signal asked to end.
const SIGNALLED: u8 = 128;

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
    #[error("{what} took longer than {limit:?}{}", why.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    TimedOut {
        /// The operation.
        what: String,
        /// The limit.
        limit: Duration,
        /// The reason of the wait, if it is known.
        why: Option<String>,
    },
    /// A tracker has had no server that suits for some time.
    #[error("there has been no such server for {limit:?}: {detail}; {advice}; --timeout waits longer")]
    NoServer {
        /// The request, and the servers that are there.
        detail: String,
        /// Advice to the user.
        advice: String,
        /// The time.
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
    /// `ssh` does not lead to a machine.
    #[error("cannot reach {destination} by ssh: {detail}")]
    Ssh {
        /// The machine, as `ssh` was given it.
        destination: String,
        /// What `ssh` says.
        detail: String,
    },
    /// A file is not a usable `.npy` file.
    #[error("cannot use {}", file.display())]
    Npy {
        /// The file.
        file: PathBuf,
        /// The reason.
        source: NpyError,
    },
    /// An examination has found a fault, and has shown it to people already.
    #[error("{step}: {detail}")]
    Examined {
        /// The step that failed.
        step: String,
        /// The fault.
        detail: String,
        /// The exit code.
        code: u8,
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
    /// A server is unknown, or the file that names servers cannot be used.
    #[error(transparent)]
    NamedServer(#[from] NamedServerError),
    /// Standard output cannot be written.
    #[error("cannot write the output")]
    Output(#[source] io::Error),
    /// A signal, whose number this is, asked to end.
    #[error("interrupted")]
    Interrupted(i32),
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
            | Self::NamedServer(_)
            | Self::Pki(PkiError::NoHost | PkiError::Token(TokenError::Name | TokenError::Malformed)) => USAGE,
            Self::Connect(error) => connect_code(error),
            // Every server would refuse it.
            Self::Trust(TrustError::Expired { .. }) => REFUSED,
            Self::Remote(error) => code_of_kind(error.kind()),
            Self::TimedOut { .. } => TIMEOUT,
            Self::NoServer { .. } | Self::Ssh { .. } => UNREACHABLE,
            // As a shell reports a program that the signal has killed.
            Self::Interrupted(signal) => {
                u8::try_from(*signal).map_or(FAILURE, |signal| SIGNALLED.saturating_add(signal))
            }
            Self::Reported(code) | Self::Examined { code, .. } => *code,
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

    /// Returns the failure of a command that only reads, so that nothing can have had an effect.
    pub(super) fn without_effect(self) -> Self {
        match self {
            Self::Remote(error) => Self::Remote(error.may_have_run(false)),
            other => other,
        }
    }

    /// Returns true if a request was sent that may have had an effect. What fails before there is a
    /// session has none.
    pub(super) fn may_have_run(&self) -> bool {
        matches!(self, Self::Remote(error) if error.request_may_have_run())
    }

    /// Returns the name of the kind of a failure that is no error of a session.
    pub(super) fn local_kind(&self) -> &'static str {
        match self.exit_code() {
            USAGE => "usage",
            UNREACHABLE => "unreachable",
            REFUSED => "refused",
            TIMEOUT => "deadline_exceeded",
            PROTOCOL => "protocol",
            _ if matches!(self, Self::Interrupted(_)) => "interrupted",
            _ => "local",
        }
    }

    /// Returns the error of the request or of the session, with its kind and origin.
    pub(super) fn rpc_error(&self) -> Option<&RpcError> {
        match self {
            Self::Remote(error) | Self::Connect(ConnectError::Session(error)) => Some(error),
            _ => None,
        }
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
        ErrorKind::DeadlineExceeded | ErrorKind::SessionTimeout | ErrorKind::PeerSilent => TIMEOUT,
        ErrorKind::PeerLost | ErrorKind::Draining | ErrorKind::Closed => UNREACHABLE,
        ErrorKind::Protocol | ErrorKind::VersionMismatch => PROTOCOL,
        ErrorKind::Refused | ErrorKind::Unauthenticated => REFUSED,
        _ => FAILURE,
    }
}
