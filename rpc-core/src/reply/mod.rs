//! Pending replies: the two stages of a submitted request, and the means to wait for them.
//!
//! A [`Submission`] resolves when the request has been admitted, to a [`PendingReply`], which
//! resolves to the reply. Both are futures that work with any runtime. The session that serves the
//! request holds the other end, a [`Responder`].

mod contract;
mod pending_reply;
mod responder;
mod slot;
mod submission;
#[cfg(test)]
mod tests;

pub use contract::{Outcome, ReplyControl, ReplySink};
pub use pending_reply::{Canceller, PendingReply};
pub use responder::Responder;
pub(crate) use responder::WeakResponder;
pub use submission::Submission;
