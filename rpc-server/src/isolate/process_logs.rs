//! Log lines that the server shows to an isolated session: reads of its process, and their answers.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::messages::{LogAnswer, LogCommand};
use crate::recent_logs::{LogRing, LogService as _};

/// Maximum number of reads of one process whose answers it has not been sent. The process keeps to
/// it, so that its reads wait for their turn there. It also bounds the memory of their pages.
pub(super) const MAX_READS: usize = 4;

/// Longest time for which one read waits for a line. A process whose client waits for longer asks
/// again, so that reads that nobody waits for any more do not keep their places.
pub(super) const MAX_READ_WAIT: Duration = Duration::from_secs(2);

/// Sender of answers to the process, each with the place of its read, which is free once the answer
/// has been sent. Must not block.
type AnswerSender = Arc<dyn Fn(LogAnswer, OwnedSemaphorePermit) + Send + Sync>;

/// Access of one session to the log lines of the server.
pub(super) struct ProcessLogs {
    ring: Arc<LogRing>,
    runtime: Handle,
    places: Arc<Semaphore>,
    answer: AnswerSender,
}

impl ProcessLogs {
    /// Returns the access of a session whose client may read the log. Needs a tokio runtime.
    pub(super) fn new(
        ring: Arc<LogRing>,
        answer: impl Fn(LogAnswer, OwnedSemaphorePermit) + Send + Sync + 'static,
    ) -> Self {
        let places = Arc::new(Semaphore::new(MAX_READS));
        Self { ring, runtime: Handle::current(), places, answer: Arc::new(answer) }
    }

    /// Takes a read, which is answered when there is a line.
    ///
    /// # Errors
    ///
    /// The answer to a process that has more reads than it may have. Ours has not.
    pub(super) fn act(&self, LogCommand { question, from, wait_ms }: LogCommand) -> Result<(), LogAnswer> {
        let Ok(place) = self.places.clone().try_acquire_owned() else {
            return Err(refusal(question, "this session reads the log too often at a time"));
        };
        let (ring, answer) = (self.ring.clone(), self.answer.clone());
        self.runtime.spawn(async move {
            let outcome = ring.read(from, Duration::from_millis(wait_ms).min(MAX_READ_WAIT)).await;
            answer(LogAnswer { question, outcome }, place);
        });
        Ok(())
    }
}

/// Returns the answer to a session whose client may not read the log.
pub(super) fn not_allowed(question: u64) -> LogAnswer {
    refusal(question, "this session may not read the log of the server")
}

fn refusal(question: u64, why: &'static str) -> LogAnswer {
    LogAnswer { question, outcome: Err(RpcError::new(ErrorKind::Refused, why)) }
}
