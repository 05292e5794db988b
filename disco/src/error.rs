//! Errors of a Disco session: of commands on workers, or of the session.

use std::fmt;
use std::sync::LazyLock;

use rpc_core::RpcError;
use serde::{Deserialize, Serialize};

/// The result of an operation of a Disco session.
pub type Result<T, E = DiscoError> = std::result::Result<T, E>;

/// The number of a worker in its session, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WorkerId(pub u32);

impl WorkerId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A command that failed on a worker. The registers that it should have set are poisoned with this.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// The worker.
    pub worker: WorkerId,
    /// The number of the command in its session, from 1.
    pub sequence: u64,
    /// Name of the command: that of the function, or of the operation.
    pub command: String,
    /// Cause of the failure.
    pub cause: RpcError,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worker {}: {} (#{}): {}", self.worker, self.command, self.sequence, self.cause.message())
    }
}

/// Error of an operation of a Disco session.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum DiscoError {
    /// Commands failed on workers. The session lives; what they should have made is poisoned.
    #[error("{}", join(.0))]
    Workers(Vec<Failure>),
    /// The session has ended, or refuses what it was asked for.
    #[error(transparent)]
    Session(#[from] RpcError),
}

impl DiscoError {
    /// Returns the failures of workers; none if the session has failed.
    pub fn failures(&self) -> &[Failure] {
        match self {
            Self::Workers(failures) => failures,
            Self::Session(_) => &[],
        }
    }

    /// Returns the error of the session, or the cause of the first failure.
    pub fn cause(&self) -> &RpcError {
        match self {
            Self::Session(error) => error,
            Self::Workers(failures) => failures.first().map_or(&NO_FAILURE, |failure| &failure.cause),
        }
    }

    pub(crate) fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Self {
        Self::Session(RpcError::invalid_argument(message))
    }
}

/// Cause of an error of workers without a failure, which this crate never makes.
static NO_FAILURE: LazyLock<RpcError> = LazyLock::new(|| RpcError::internal("a failure of no worker"));

impl From<DiscoError> for RpcError {
    /// Takes the kind of the first failure, and the text of all.
    fn from(error: DiscoError) -> Self {
        match error {
            DiscoError::Session(error) => error,
            DiscoError::Workers(failures) => {
                let text = join(&failures);
                failures
                    .into_iter()
                    .next()
                    .map_or_else(|| NO_FAILURE.clone(), |first| Self::new(first.cause.kind(), text).may_have_run(true))
            }
        }
    }
}

fn join(failures: &[Failure]) -> String {
    failures.iter().map(Failure::to_string).collect::<Vec<_>>().join("; ")
}
