//! What others leave for the task of a connection.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use rpc_core::RpcError;
use rpc_core::reply::{Outcome, ReplySink};

/// Take no more requests, and end when all is answered.
pub(super) const GO_AWAY: u8 = 1;
/// End now.
pub(super) const STOP: u8 = 2;

/// Where others leave things for a connection's task.
#[derive(Default)]
pub(super) struct Mailbox {
    replies: Mutex<Vec<(u64, Outcome)>>,
    /// Why the session has ended on its own.
    ended: Mutex<Option<RpcError>>,
    command: AtomicU8,
    task: Mutex<Option<Waker>>,
}

impl Mailbox {
    /// Leaves a command. A later one does not weaken it.
    pub(super) fn command(&self, command: u8) {
        self.command.fetch_max(command, Ordering::AcqRel);
        self.wake();
    }

    fn wake(&self) {
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            task.wake();
        }
    }

    /// The command that was left, or 0.
    pub(super) fn commanded(&self) -> u8 {
        self.command.load(Ordering::Acquire)
    }

    /// Resolves when this command has been left, or a stronger one. For a task that takes nothing else from here.
    pub(super) async fn told(&self, command: u8) {
        std::future::poll_fn(|cx| {
            self.register(cx.waker());
            if self.commanded() >= command { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Moves the replies that have been left since the last time to `taken`, which is empty.
    pub(super) fn take_replies(&self, taken: &mut Vec<(u64, Outcome)>) {
        std::mem::swap(&mut *self.replies.lock().unwrap_or_else(PoisonError::into_inner), taken);
    }

    /// Why the session has ended, if it has since the last time.
    pub(super) fn take_end(&self) -> Option<RpcError> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Has the task woken by whatever comes.
    pub(super) fn register(&self, waker: &Waker) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }
}

/// Leaves word when the session ends.
pub(super) struct EndOfSession(pub(super) Arc<Mailbox>);

impl ReplySink for EndOfSession {
    fn deliver(&self, _: u64, outcome: Outcome) {
        if let Err(error) = outcome {
            *self.0.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            self.0.wake();
        }
    }
}

impl ReplySink for Mailbox {
    fn deliver(&self, token: u64, outcome: Outcome) {
        let mut replies = self.replies.lock().unwrap_or_else(PoisonError::into_inner);
        replies.push((token, outcome));
        let first = replies.len() == 1;
        drop(replies);
        // The others find the task woken already.
        if first {
            self.wake();
        }
    }
}
