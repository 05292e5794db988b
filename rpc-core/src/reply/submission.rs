//! A submitted request: the caller's end until the request has been admitted.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::{Context, Poll};

use parking_lot::Mutex;

use super::contract::{Outcome, ReplyControl};
use super::pending_reply::{PendingReply, Source};
use super::responder::Responder;
use super::slot::{Slot, Stage, set_waker};
use crate::blocking::{self, Driver};
use crate::error::Result;

/// A submitted request. As a future it resolves when the request is admitted, or refused.
///
/// Dropping it cancels the request.
#[must_use = "dropping a submission cancels the request"]
pub struct Submission(Option<SubmissionState>);

impl fmt::Debug for Submission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_admitted() { "Submission(admitted)" } else { "Submission(queued)" })
    }
}

impl Drop for Submission {
    fn drop(&mut self) {
        drop(self.take_reply());
    }
}

enum SubmissionState {
    Ready(Outcome, Option<Arc<dyn ReplyControl>>),
    Pending(PendingReply),
}

impl Submission {
    /// Returns the submission of a request that was served while it was submitted. Use it for
    /// outcomes without objects, or whose objects may live until the end of the session if no
    /// caller takes them; otherwise see [`ready_with`](Self::ready_with).
    pub fn ready(outcome: Outcome) -> Self {
        Self(Some(SubmissionState::Ready(outcome, None)))
    }

    /// Returns the submission of a request that was served while it was submitted. `control` frees
    /// the objects if no caller takes the outcome.
    pub fn ready_with(control: Arc<dyn ReplyControl>, outcome: Outcome) -> Self {
        Self(Some(SubmissionState::Ready(outcome, Some(control))))
    }

    /// Returns the submission of a request that is admitted and never answered.
    pub fn never() -> Self {
        Self(Some(SubmissionState::Pending(PendingReply { source: Source::Never })))
    }

    /// Returns both ends of a request to be served later. `id` is passed to
    /// [`ReplyControl::cancel`].
    pub fn pending(control: Arc<dyn ReplyControl>, id: u64) -> (Self, Responder) {
        Self::with_slot(control, None, id)
    }

    /// As [`pending`](Self::pending), for a session whose input and output are done by the threads
    /// that wait for its replies.
    pub fn driven(control: Arc<dyn ReplyControl>, driver: Arc<dyn Driver>, id: u64) -> (Self, Responder) {
        Self::with_slot(control, Some(driver), id)
    }

    fn with_slot(control: Arc<dyn ReplyControl>, driver: Option<Arc<dyn Driver>>, id: u64) -> (Self, Responder) {
        let slot = Arc::new(Slot { id, responders: AtomicUsize::new(1), control, driver, state: Mutex::default() });
        let responder = Responder(slot.clone());
        (Self(Some(SubmissionState::Pending(PendingReply { source: Source::Slot(slot) }))), responder)
    }

    /// Shows the outcome to `observer` as it completes, before the caller gets it, and changes
    /// nothing else. For wrappers that count and measure.
    ///
    /// `observer` is called on the thread that completes the request, and must not block or panic.
    /// If the caller has given up the request by then, it is shown a
    /// [cancellation](crate::ErrorKind::Cancelled). It is dropped without having been called if the
    /// request is never completed: when the session has ended, or for [`never`](Self::never).
    pub fn inspect(self, observer: impl FnOnce(&Outcome) + Send + 'static) -> Self {
        match &self.0 {
            Some(SubmissionState::Ready(outcome, _)) => observer(outcome),
            Some(SubmissionState::Pending(PendingReply { source: Source::Slot(slot) })) => {
                let mut state = slot.state();
                match std::mem::replace(&mut state.stage, Stage::Shown) {
                    Stage::Done(outcome) => {
                        drop(state);
                        observer(&outcome);
                        slot.state().stage = Stage::Done(outcome);
                    }
                    stage => {
                        state.stage = stage;
                        state.observer = Some(match state.observer.take() {
                            None => Box::new(observer),
                            Some(earlier) => Box::new(move |outcome| {
                                earlier(outcome);
                                observer(outcome);
                            }),
                        });
                    }
                }
            }
            _ => {}
        }
        self
    }

    /// Returns a future for the reply, without waiting for admission first.
    pub fn reply(mut self) -> PendingReply {
        self.take_reply()
    }

    /// Returns the outcome if it was there at once, or else the submission.
    pub fn try_ready(mut self) -> Result<Outcome, Self> {
        match self.0.take() {
            Some(SubmissionState::Ready(outcome, _)) => Ok(outcome),
            other => Err(Self(other)),
        }
    }

    /// Returns true if the request has been admitted, or has ended.
    pub fn is_admitted(&self) -> bool {
        match &self.0 {
            Some(SubmissionState::Pending(PendingReply { source: Source::Slot(slot) })) => {
                !matches!(slot.state().stage, Stage::Queued)
            }
            _ => true,
        }
    }

    fn take_reply(&mut self) -> PendingReply {
        match self.0.take() {
            Some(SubmissionState::Pending(pending)) => pending,
            Some(SubmissionState::Ready(outcome, control)) => PendingReply { source: Source::Ready(outcome, control) },
            None => PendingReply { source: Source::Taken },
        }
    }

    /// Asks for cancellation and keeps waiting, like [`PendingReply::cancel`].
    pub fn cancel(&self) {
        if let Some(SubmissionState::Pending(pending)) = &self.0 {
            pending.cancel();
        }
    }

    /// Waits for admission on the calling thread.
    ///
    /// # Errors
    ///
    /// Those of the future, and [`ErrorKind::ApiMisuse`](crate::ErrorKind::ApiMisuse) inside an
    /// async runtime.
    pub fn wait(self) -> Result<PendingReply> {
        blocking::block_on(self)?
    }
}

impl Future for Submission {
    type Output = Result<PendingReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(SubmissionState::Pending(PendingReply { source: Source::Slot(slot) })) = &self.0 {
            let mut state = slot.state();
            if let Stage::Queued = state.stage {
                set_waker(&mut state.waker, cx.waker());
                drop(state);
                slot.wait_driven();
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(self.take_reply()))
    }
}
