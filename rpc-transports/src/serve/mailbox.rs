//! Mailbox of a connection's task: replies, the end of the session, and commands of the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Poll, Waker};
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::RpcError;
use rpc_core::reply::{Outcome, ReplySink};

/// Command of the server to a connection's task. The order is that of strength.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Command {
    /// Command to accept no more requests, and to end when all are answered.
    GoAway = 1,
    /// Command to end now.
    Stop = 2,
}

/// Mailbox of a connection's task. Any thread may leave an item; the task takes it when it is
/// polled.
#[derive(Default)]
pub(super) struct Mailbox {
    replies: Mutex<Vec<(u64, Outcome)>>,
    /// Reason why the session has ended on its own.
    ended: Mutex<Option<RpcError>>,
    /// Time when something was last received from the client of the session.
    heard: Mutex<Option<Instant>>,
    /// The strongest [`Command`] so far, as a number; 0 for none.
    command: AtomicU8,
    task: Mutex<Option<Waker>>,
}

impl Mailbox {
    /// Leaves a command. A weaker one that follows does not replace it.
    pub(super) fn command(&self, command: Command) {
        self.command.fetch_max(command as u8, Ordering::AcqRel);
        self.wake();
    }

    fn wake(&self) {
        let task = self.task.lock().take();
        if let Some(task) = task {
            task.wake();
        }
    }

    /// Returns the strongest command that was left.
    pub(super) fn commanded(&self) -> Option<Command> {
        let left = self.command.load(Ordering::Acquire);
        [Command::Stop, Command::GoAway].into_iter().find(|command| *command as u8 == left)
    }

    /// Resolves when this command or a stronger one has been left. Only for tasks that take nothing
    /// else from the mailbox.
    pub(super) async fn wait_for(&self, command: Command) {
        std::future::poll_fn(|cx| {
            self.register(cx.waker());
            if self.commanded() >= Some(command) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Moves the replies that have come since the last call to `taken`, which is empty.
    pub(super) fn take_replies(&self, taken: &mut Vec<(u64, Outcome)>) {
        std::mem::swap(&mut *self.replies.lock(), taken);
    }

    /// Returns true if an item has been left since the task was last
    /// [registered](Self::register).
    pub(super) fn has_items(&self) -> bool {
        self.task.lock().is_none()
    }

    /// Ends the session.
    pub(super) fn end(&self, reason: RpcError) {
        *self.ended.lock() = Some(reason);
        self.wake();
    }

    /// Notes that something was received from the client.
    pub(super) fn note_heard(&self, now: Instant) {
        *self.heard.lock() = Some(now);
    }

    pub(super) fn last_heard(&self) -> Option<Instant> {
        *self.heard.lock()
    }

    /// Returns the reason why the session has ended, if it has since the last call.
    pub(super) fn take_end(&self) -> Option<RpcError> {
        self.ended.lock().take()
    }

    /// Sets the task that is woken for each new item.
    pub(super) fn register(&self, waker: &Waker) {
        let mut task = self.task.lock();
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }
}

/// Sink for the end of a session, which it leaves in the mailbox.
pub(super) struct EndOfSession(pub(super) Arc<Mailbox>);

impl ReplySink for EndOfSession {
    fn deliver(&self, _: u64, outcome: Outcome) {
        if let Err(error) = outcome {
            self.0.end(error);
        }
    }
}

impl ReplySink for Mailbox {
    fn deliver(&self, token: u64, outcome: Outcome) {
        let mut replies = self.replies.lock();
        replies.push((token, outcome));
        let first = replies.len() == 1;
        drop(replies);
        // Earlier replies have woken the task already.
        if first {
            self.wake();
        }
    }
}
