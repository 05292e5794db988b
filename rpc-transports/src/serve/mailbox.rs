//! Mailbox of a connection's task: replies, the end of the session, and commands of the server.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_core::proto::ServerEndpoint;
use rpc_core::reply::{Outcome, ReplySink};
use rpc_core::{Handle, RpcError, Value};

use crate::clock;

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
    waiting: Mutex<WaitingReplies>,
    /// Largest memory of the replies that wait, in bytes, once there is a session.
    max_waiting_bytes: OnceLock<u64>,
    /// Reason why the session has ended on its own.
    ended: Mutex<Option<RpcError>>,
    /// Time when something was last received from the client of the session.
    heard: Mutex<Option<Instant>>,
    /// Source of the time since anything was received, where another process receives it.
    silence: OnceLock<SilenceSource>,
    /// The strongest [`Command`] so far, as a number; 0 for none.
    command: AtomicU8,
    task: Mutex<Option<Waker>>,
}

/// Function that returns the time for which a client has been silent; `None` if that is not known.
type SilenceSource = Box<dyn Fn() -> Option<Duration> + Send + Sync>;

/// Replies that the task has not taken yet.
#[derive(Default)]
struct WaitingReplies {
    replies: Vec<(u64, Outcome)>,
    /// Memory of their values in bytes, without that of small ones.
    bytes: u64,
    /// Objects of values that found no room. No caller gets them.
    refused: Vec<Handle>,
}

impl Mailbox {
    /// Sets the largest memory in bytes of the replies that wait, which are those of one session.
    /// Functions may run on while the task gets no processor, and a reply that finds no room
    /// becomes an error.
    pub(super) fn limit_replies(&self, bytes: u64) {
        let _ = self.max_waiting_bytes.set(bytes);
    }

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

    /// Moves the replies that have come since the last call to `taken`, which is empty. Returns the
    /// objects of values that found no room, which have to be released.
    pub(super) fn take_replies(&self, taken: &mut Vec<(u64, Outcome)>) -> Vec<Handle> {
        let mut waiting = self.waiting.lock();
        std::mem::swap(&mut waiting.replies, taken);
        waiting.bytes = 0;
        std::mem::take(&mut waiting.refused)
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

    /// Asks `silence` from now on for the time since anything was received.
    pub(super) fn set_silence_source(&self, silence: SilenceSource) {
        let _ = self.silence.set(silence);
    }

    /// Returns the time since anything was received from the client. Zero if that is not known.
    pub(super) fn silent_for(&self) -> Duration {
        let silence = match self.silence.get() {
            Some(silence) => silence(),
            None => self.heard.lock().map(|heard| clock::now().saturating_duration_since(heard)),
        };
        silence.unwrap_or_default()
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
        let cost = outcome.as_ref().map_or(0, |value| ServerEndpoint::reply_cost(value.size_hint()));
        let max = self.max_waiting_bytes.get().copied().unwrap_or(u64::MAX);
        let mut waiting = self.waiting.lock();
        let bytes = waiting.bytes.saturating_add(cost);
        // The first one is let in, as the endpoint does, which refuses what is too large by itself.
        let fits = cost == 0 || waiting.bytes == 0 || bytes <= max;
        let refused = if fits { None } else { outcome.as_ref().ok().map(Value::handles) };
        let dropped = match refused {
            None => {
                waiting.bytes = bytes;
                waiting.replies.push((token, outcome));
                None
            }
            Some(handles) => {
                waiting.refused.extend(handles);
                let error = RpcError::limit("max_backlog", max, bytes);
                let error = error.context("the client takes its replies too slowly, or asks for too much at a time");
                waiting.replies.push((token, Err(error.may_have_run(true))));
                Some(outcome)
            }
        };
        let first = waiting.replies.len() == 1;
        drop(waiting);
        drop(dropped);
        // Earlier replies have woken the task already.
        if first {
            self.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use rpc_core::{ErrorKind, Reference};

    use super::*;

    #[test]
    fn large_replies_that_find_no_room_become_errors_and_their_objects_are_told() {
        let mailbox = Mailbox::default();
        let value = |len: usize| Value::from(Bytes::from(vec![0; len]));
        let mut taken = Vec::new();
        mailbox.limit_replies(10_000);
        // The first one is let in whatever it takes, and small ones always are.
        mailbox.deliver(1, Ok(value(20_000)));
        let object = Value::Object(Reference::Function(Handle::from_bits(7)));
        mailbox.deliver(2, Ok(Value::List(vec![value(5000), object])));
        mailbox.deliver(3, Ok(value(100)));
        mailbox.deliver(4, Err(RpcError::invalid_argument("no")));
        assert_eq!(mailbox.take_replies(&mut taken), [Handle::from_bits(7)]);
        let kinds: Vec<_> =
            taken.drain(..).map(|(id, outcome)| (id, outcome.err().map(|error| error.kind()))).collect();
        let refused = Some(ErrorKind::LimitExceeded);
        assert_eq!(kinds, [(1, None), (2, refused), (3, None), (4, Some(ErrorKind::InvalidArgument))]);

        // There is room again.
        for (id, len) in [(5, 4500), (6, 4500), (7, 4500)] {
            mailbox.deliver(id, Ok(value(len)));
        }
        assert!(mailbox.take_replies(&mut taken).is_empty());
        let admitted: Vec<_> = taken.iter().map(|(id, outcome)| (*id, outcome.is_ok())).collect();
        assert_eq!(admitted, [(5, true), (6, true), (7, false)]);
    }
}
