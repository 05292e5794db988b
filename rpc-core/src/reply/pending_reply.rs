//! An admitted request: the caller's end until the reply.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use super::contract::{Outcome, ReplyControl, ReplySink};
use super::slot::{Slot, Stage, set_waker};
use crate::blocking;
use crate::error::{ErrorKind, RpcError};

/// An admitted request. As a future it resolves to the reply.
///
/// Dropping it cancels the request; objects in a reply that is not taken are freed.
#[must_use = "dropping a pending reply cancels the request"]
pub struct PendingReply {
    pub(super) source: Source,
}

pub(super) enum Source {
    Ready(Outcome, Option<Arc<dyn ReplyControl>>),
    Slot(Arc<Slot>),
    Never,
    Taken,
}

impl PendingReply {
    /// Returns true if polling would resolve at once.
    pub fn is_done(&self) -> bool {
        match &self.source {
            Source::Slot(slot) => matches!(slot.state().stage, Stage::Done(_)),
            Source::Never => false,
            _ => true,
        }
    }

    /// Asks for cancellation and keeps waiting. The terminal reply is [`ErrorKind::Cancelled`] if
    /// the request had not begun, and otherwise the request's own outcome.
    pub fn cancel(&self) {
        if let Source::Slot(slot) = &self.source {
            slot.cancel();
        }
    }

    /// Delivers the reply to `sink` as soon as it is complete, on the thread that completes it,
    /// instead of to a future. If it is complete already, `sink` is called before this returns.
    pub fn deliver_to(mut self, sink: Arc<dyn ReplySink>, token: u64) -> Canceller {
        match std::mem::replace(&mut self.source, Source::Taken) {
            Source::Ready(outcome, _) => {
                sink.deliver(token, outcome);
                Canceller(None)
            }
            Source::Never | Source::Taken => Canceller(None),
            Source::Slot(slot) => {
                let mut state = slot.state();
                match std::mem::replace(&mut state.stage, Stage::Over) {
                    Stage::Done(outcome) => {
                        drop(state);
                        sink.deliver(token, outcome);
                        Canceller(None)
                    }
                    stage => {
                        state.stage = stage;
                        state.sink = Some((sink, token));
                        drop(state);
                        if let Some(driver) = &slot.driver {
                            driver.attend();
                        }
                        Canceller(Some(slot))
                    }
                }
            }
        }
    }

    /// Gives up the reply without cancelling the request: it runs, and its result is freed.
    pub fn detach(mut self) {
        match std::mem::replace(&mut self.source, Source::Taken) {
            Source::Slot(slot) => slot.abandon(false),
            // A reply that is there already is freed by the drop.
            other => self.source = other,
        }
    }

    /// Waits for the reply on the calling thread.
    ///
    /// # Errors
    ///
    /// Those of the request, and [`ErrorKind::ApiMisuse`] inside an async runtime.
    pub fn wait(self) -> Outcome {
        blocking::block_on(self)?
    }
}

impl Future for PendingReply {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Source::Slot(slot) = &self.source {
            let mut state = slot.state();
            let outcome = match std::mem::replace(&mut state.stage, Stage::Over) {
                Stage::Done(outcome) => outcome,
                stage => {
                    state.stage = stage;
                    set_waker(&mut state.waker, cx.waker());
                    drop(state);
                    slot.wait_driven();
                    return Poll::Pending;
                }
            };
            drop(state);
            self.source = Source::Taken;
            return Poll::Ready(outcome);
        }
        if let Source::Never = self.source {
            return Poll::Pending;
        }
        Poll::Ready(match std::mem::replace(&mut self.source, Source::Taken) {
            Source::Ready(outcome, _) => outcome,
            _ => Err(RpcError::new(ErrorKind::ApiMisuse, "a reply was polled after it had been taken")),
        })
    }
}

impl Drop for PendingReply {
    fn drop(&mut self) {
        match std::mem::replace(&mut self.source, Source::Taken) {
            Source::Slot(slot) => slot.abandon(true),
            Source::Ready(Ok(value), Some(control)) => control.discard(value),
            _ => {}
        }
    }
}

impl fmt::Debug for PendingReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.source {
            Source::Ready(outcome, _) => f.debug_tuple("PendingReply").field(outcome).finish(),
            Source::Slot(slot) => write!(f, "PendingReply({})", slot.id),
            Source::Never => f.write_str("PendingReply(never)"),
            Source::Taken => f.write_str("PendingReply(taken)"),
        }
    }
}

/// Handle to cancel a request whose reply goes to a [`ReplySink`].
#[derive(Clone)]
pub struct Canceller(Option<Arc<Slot>>);

impl Canceller {
    /// Asks for cancellation. The sink still gets the one reply.
    pub fn cancel(&self) {
        if let Some(slot) = &self.0 {
            slot.cancel();
        }
    }

    /// Gives up the request: it is cancelled, the sink gets no reply, and the result is freed.
    pub fn abandon(self) {
        if let Some(slot) = self.0 {
            slot.abandon(true);
        }
    }
}

impl fmt::Debug for Canceller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Canceller")
    }
}
