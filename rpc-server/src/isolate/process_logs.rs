//! Log lines that the server shows to an isolated session: reads of its process, and their answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use rpc_core::{ErrorKind, RpcError};
use tokio::runtime::Handle;

use super::messages::{LogAnswer, LogCommand};
use crate::recent_logs::{LogRing, LogService as _};

/// Maximum number of reads of one process that wait at a time.
pub(super) const MAX_READS: usize = 16;

/// Sender of answers to the process. Must not block.
type AnswerSender = Arc<dyn Fn(LogAnswer) + Send + Sync>;

/// Access of one session to the log lines of the server.
pub(super) struct ProcessLogs {
    ring: Arc<LogRing>,
    runtime: Handle,
    reads: Arc<AtomicUsize>,
    answer: AnswerSender,
}

impl ProcessLogs {
    /// Returns the access of a session whose client may read the log. Needs a tokio runtime.
    pub(super) fn new(ring: Arc<LogRing>, answer: impl Fn(LogAnswer) + Send + Sync + 'static) -> Self {
        Self { ring, runtime: Handle::current(), reads: Arc::default(), answer: Arc::new(answer) }
    }

    /// Answers a read: at once, or when there is a line.
    pub(super) fn act(&self, LogCommand { question, from, wait_ms }: LogCommand) {
        if self.reads.fetch_add(1, Ordering::AcqRel) >= MAX_READS {
            self.reads.fetch_sub(1, Ordering::AcqRel);
            let error = RpcError::limit("max_log_reads", MAX_READS as u64, MAX_READS as u64 + 1);
            return (self.answer)(LogAnswer { question, outcome: Err(error) });
        }
        let (ring, reads, answer) = (self.ring.clone(), self.reads.clone(), self.answer.clone());
        self.runtime.spawn(async move {
            let outcome = ring.read(from, Duration::from_millis(wait_ms)).await;
            answer(LogAnswer { question, outcome });
            reads.fetch_sub(1, Ordering::AcqRel);
        });
    }
}

/// Returns the answer to a session whose client may not read the log.
pub(super) fn refusal(question: u64) -> LogAnswer {
    let error = RpcError::new(ErrorKind::Refused, "this session may not read the log of the server");
    LogAnswer { question, outcome: Err(error) }
}
