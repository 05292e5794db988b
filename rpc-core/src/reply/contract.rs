//! Traits of the parties of a request: [`ReplyControl`] of the session, [`ReplySink`] of a receiver
//! of replies.

use crate::error::Result;
use crate::value::Value;

/// Content of a reply: the value, or the error.
pub type Outcome = Result<Value>;

/// Callbacks of a session for the requests that it has accepted. One per session; implemented by
/// sessions.
pub trait ReplyControl: Send + Sync {
    /// Cancels request `id`. If it has not begun it must not begin. Must not block.
    ///
    /// The responder must still respond; the response is discarded.
    fn cancel(&self, id: u64);

    /// Cancels like [`cancel`](Self::cancel), for a caller that is gone: not even the end of the
    /// session has to wait for the response.
    fn abandon(&self, id: u64) {
        self.cancel(id);
    }

    /// Frees the objects in a reply that no caller takes. Must not block.
    fn discard(&self, reply: Value);

    /// Returns true if the session has ended, so that the outcome of running requests is not
    /// needed.
    fn has_ended(&self) -> bool {
        false
    }
}

/// Receiver of replies as they complete, on the thread that completes them. See
/// [`PendingReply::deliver_to`](crate::PendingReply::deliver_to).
pub trait ReplySink: Send + Sync {
    /// Delivers the reply to the request that was given `token`. Must not block.
    fn deliver(&self, token: u64, outcome: Outcome);
}
