//! Errors of a Disco session: of commands on workers, or of the session.

use std::collections::HashMap;
use std::fmt;
use std::sync::LazyLock;

use rpc_core::RpcError;
use serde::{Deserialize, Serialize};

use crate::number_list::NumberList;

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
    /// Workers are lost, and the session waits until they have been
    /// [replaced](crate::DiscoSession::replace). What was issued before may have run or not, on
    /// each worker.
    #[error("{cause}")]
    Lost {
        /// The workers that are to be replaced.
        workers: Vec<WorkerId>,
        /// Cause of the first loss.
        cause: RpcError,
    },
    /// The session has ended, or refuses what it was asked for.
    #[error(transparent)]
    Session(#[from] RpcError),
}

impl DiscoError {
    /// Returns the failures of workers; none if the session has failed.
    pub fn failures(&self) -> &[Failure] {
        match self {
            Self::Workers(failures) => failures,
            Self::Lost { .. } | Self::Session(_) => &[],
        }
    }

    /// Returns the workers that are to be replaced before the session goes on; none if it has ended
    /// or goes on.
    pub fn lost_workers(&self) -> &[WorkerId] {
        if let Self::Lost { workers, .. } = self { workers } else { &[] }
    }

    /// Returns the error of the session, or the cause of the first failure.
    pub fn cause(&self) -> &RpcError {
        match self {
            Self::Session(error) | Self::Lost { cause: error, .. } => error,
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
            DiscoError::Session(error) | DiscoError::Lost { cause: error, .. } => error,
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

/// Most failures that are told one by one.
const FEW: usize = 8;

/// Most different failures in a text.
const MAX_TOLD: usize = 32;

/// Describes failures. Of many, those that differ in their workers alone are told once, and of many
/// different ones the first.
fn join(failures: &[Failure]) -> String {
    if failures.len() <= FEW {
        return failures.iter().map(Failure::to_string).collect::<Vec<_>>().join("; ");
    }
    let mut told: Vec<(&Failure, Vec<usize>)> = Vec::new();
    let mut known = HashMap::new();
    let mut left_out = 0_usize;
    for failure in failures {
        let key = (failure.sequence, failure.command.as_str(), failure.cause.message());
        match known.get(&key) {
            Some(at) => {
                let (_, workers): &mut (_, Vec<usize>) = &mut told[*at];
                workers.push(failure.worker.index());
            }
            None if told.len() == MAX_TOLD => left_out += 1,
            None => {
                known.insert(key, told.len());
                told.push((failure, vec![failure.worker.index()]));
            }
        }
    }
    let mut texts: Vec<String> = Vec::with_capacity(told.len() + 1);
    for (failure, mut workers) in told {
        workers.sort_unstable();
        workers.dedup();
        texts.push(match &workers[..] {
            [_] => failure.to_string(),
            _ => {
                let Failure { sequence, command, cause, .. } = failure;
                format!("workers {}: {command} (#{sequence}): {}", NumberList::of(workers), cause.message())
            }
        });
    }
    if left_out > 0 {
        texts.push(format!("and {left_out} more failures"));
    }
    texts.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_of_many_workers_is_told_once_and_the_text_stays_short() {
        let failure = |worker: u32, text: String| Failure {
            worker: WorkerId(worker),
            sequence: 5,
            command: "f".to_owned(),
            cause: RpcError::invalid_argument(text),
        };
        let alike = (0..1024).map(|worker| failure(worker, "no".to_owned())).collect();
        assert_eq!(DiscoError::Workers(alike).to_string(), "workers 0 to 1023: f (#5): no");
        let few = DiscoError::Workers([3, 4].map(|worker| failure(worker, "no".to_owned())).to_vec());
        assert_eq!(few.to_string(), "worker 3: f (#5): no; worker 4: f (#5): no");
        let all_different: Vec<_> = (0..1024).map(|worker| failure(worker, format!("no {worker}"))).collect();
        let text = RpcError::from(DiscoError::Workers(all_different)).message().to_owned();
        assert!(text.starts_with("worker 0: f (#5): no 0; worker 1: f (#5): no 1; "), "{text}");
        assert!(text.ends_with("; and 992 more failures") && text.len() < 1200, "{text}");
    }
}
