//! Pending replies: the two stages of a submitted request, and the means to wait for them.
//!
//! A [`Submission`] resolves when the request has been admitted, to a [`PendingReply`], which
//! resolves to the reply. Both are futures that work with any runtime. The session that serves the
//! request holds the other end, a [`Responder`].

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use parking_lot::{Mutex, MutexGuard};

use crate::blocking::{self, Driver};
use crate::error::{ErrorKind, Result, RpcError};
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
/// [`PendingReply::deliver_to`].
pub trait ReplySink: Send + Sync {
    /// Delivers the reply to the request that was given `token`. Must not block.
    fn deliver(&self, token: u64, outcome: Outcome);
}

/// Function that is shown an outcome. See [`Submission::inspect`].
type Observer = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct SlotState {
    stage: Stage,
    /// True once the caller has asked for cancellation. It may still be waiting.
    cancelled: bool,
    waker: Option<Waker>,
    sink: Option<(Arc<dyn ReplySink>, u64)>,
    observer: Option<Observer>,
}

#[derive(Default)]
enum Stage {
    /// Waiting for admission.
    #[default]
    Queued,
    /// Admitted: the position in the lane is fixed.
    Admitted,
    /// Completed, and being shown to the observer. Further completions are ignored.
    Shown,
    /// Completed, and not yet taken.
    Done(Outcome),
    /// Taken by the caller, or given up by it.
    Over,
}

struct Slot {
    id: u64,
    /// Number of [`Responder`]s. The caller's end is not counted.
    responders: AtomicUsize,
    control: Arc<dyn ReplyControl>,
    /// Input and output of the session, if waiting threads have to do it.
    driver: Option<Arc<dyn Driver>>,
    state: Mutex<SlotState>,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, SlotState> {
        // A panic cannot leave the state half changed: each change is one assignment.
        self.state.lock()
    }

    fn cancel(&self) {
        self.state().cancelled = true;
        self.control.cancel(self.id);
    }

    /// Lets the waiting thread drive the session, if it has to be driven.
    fn wait_driven(&self) {
        if let Some(driver) = &self.driver {
            blocking::waiting_for(driver);
        }
    }
}

/// The serving end of one request: admits and completes it.
///
/// Cheap to clone. The first completion counts and later ones are discarded, so that a deadline and
/// a result may race. Dropping all clones without completing is a bug of the session, and the
/// caller gets an internal error.
pub struct Responder(Arc<Slot>);

impl Clone for Responder {
    fn clone(&self) -> Self {
        self.0.responders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        // `AcqRel`, as for any reference count: the last responder must see everything that the
        // others did.
        if self.0.responders.fetch_sub(1, Ordering::AcqRel) == 1 && !self.is_over() {
            complete(
                &self.0,
                Err(RpcError::internal("the session dropped the request without a reply").may_have_run(true)),
            );
        }
    }
}

fn complete(slot: &Slot, outcome: Outcome) -> bool {
    let mut state = slot.state();
    let first = matches!(state.stage, Stage::Queued | Stage::Admitted);
    // A further observer may be added while one is being shown the outcome.
    while let Some(observer) = state.observer.take() {
        if let Stage::Queued | Stage::Admitted = state.stage {
            state.stage = Stage::Shown;
        }
        drop(state);
        if first {
            observer(&outcome);
        } else {
            observer(&Err(
                RpcError::new(ErrorKind::Cancelled, "the caller no longer waits for the reply").may_have_run(true)
            ));
        }
        state = slot.state();
    }
    match state.stage {
        // The caller may have given up while the outcome was shown.
        Stage::Queued | Stage::Admitted | Stage::Shown if first => {
            if let Some((sink, token)) = state.sink.take() {
                state.stage = Stage::Over;
                drop(state);
                sink.deliver(token, outcome);
            } else {
                state.stage = Stage::Done(outcome);
                let waker = state.waker.take();
                drop(state);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            true
        }
        _ => {
            drop(state);
            if let Ok(value) = outcome {
                slot.control.discard(value);
            }
            false
        }
    }
}

impl Responder {
    /// Admits the request: fixes its position in its lane and resolves the first stage.
    pub fn admit(&self) {
        let mut state = self.0.state();
        if let Stage::Queued = state.stage {
            state.stage = Stage::Admitted;
            let waker = state.waker.take();
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Completes the request. Returns true if this was the first completion. Otherwise, and also if
    /// the caller is gone, the objects in `outcome` are freed.
    pub fn complete(&self, outcome: Outcome) -> bool {
        complete(&self.0, outcome)
    }

    /// Returns true if the request has been completed, or its caller is gone.
    pub fn is_complete(&self) -> bool {
        matches!(self.0.state().stage, Stage::Shown | Stage::Done(_) | Stage::Over)
    }

    /// Returns true if further work on the request is pointless: it is complete, its caller is gone
    /// or has asked for cancellation, or the session has ended.
    pub fn is_over(&self) -> bool {
        let cancelled = self.0.state().cancelled;
        cancelled || self.is_complete() || self.0.control.has_ended()
    }

    /// Returns the request's id in its session.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns a weak responder, for code that may complete the request but does not have to.
    pub(crate) fn downgrade(&self) -> WeakResponder {
        WeakResponder(Arc::downgrade(&self.0))
    }
}

/// Weak reference to a [`Responder`]. Keeps neither the reply nor its objects alive.
pub(crate) struct WeakResponder(Weak<Slot>);

impl WeakResponder {
    /// Returns the responder, unless the request is complete.
    pub(crate) fn upgrade(&self) -> Option<Responder> {
        let slot = self.0.upgrade()?;
        slot.responders.fetch_add(1, Ordering::Relaxed);
        let responder = Responder(slot);
        (!responder.is_complete()).then_some(responder)
    }

    /// Returns true if the request is not complete yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.upgrade().is_some_and(|slot| matches!(slot.state().stage, Stage::Queued | Stage::Admitted))
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({})", self.0.id)
    }
}

/// A submitted request. As a future it resolves when the request is admitted, or refused.
///
/// Dropping it cancels the request.
#[must_use = "dropping a submission cancels the request"]
pub struct Submission(Option<Inner>);

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

enum Inner {
    Ready(Outcome, Option<Arc<dyn ReplyControl>>),
    Pending(PendingReply),
}

impl Submission {
    /// Returns the submission of a request that was served while it was submitted. Use it for
    /// outcomes without objects, or whose objects may live until the end of the session if no
    /// caller takes them; otherwise see [`ready_with`](Self::ready_with).
    pub fn ready(outcome: Outcome) -> Self {
        Self(Some(Inner::Ready(outcome, None)))
    }

    /// Returns the submission of a request that was served while it was submitted. `control` frees
    /// the objects if no caller takes the outcome.
    pub fn ready_with(control: Arc<dyn ReplyControl>, outcome: Outcome) -> Self {
        Self(Some(Inner::Ready(outcome, Some(control))))
    }

    /// Returns the submission of a request that is admitted and never answered.
    pub fn never() -> Self {
        Self(Some(Inner::Pending(PendingReply { source: Source::Never })))
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
        (Self(Some(Inner::Pending(PendingReply { source: Source::Slot(slot) }))), responder)
    }

    /// Shows the outcome to `observer` as it completes, before the caller gets it, and changes
    /// nothing else. For wrappers that count and measure.
    ///
    /// `observer` is called on the thread that completes the request, and must not block or panic.
    /// If the caller has given up the request by then, it is shown a
    /// [cancellation](ErrorKind::Cancelled). It is dropped without having been called if the
    /// request is never completed: when the session has ended, or for [`never`](Self::never).
    pub fn inspect(self, observer: impl FnOnce(&Outcome) + Send + 'static) -> Self {
        match &self.0 {
            Some(Inner::Ready(outcome, _)) => observer(outcome),
            Some(Inner::Pending(PendingReply { source: Source::Slot(slot) })) => {
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
            Some(Inner::Ready(outcome, _)) => Ok(outcome),
            other => Err(Self(other)),
        }
    }

    /// Returns true if the request has been admitted, or has ended.
    pub fn is_admitted(&self) -> bool {
        match &self.0 {
            Some(Inner::Pending(PendingReply { source: Source::Slot(slot) })) => {
                !matches!(slot.state().stage, Stage::Queued)
            }
            _ => true,
        }
    }

    fn take_reply(&mut self) -> PendingReply {
        match self.0.take() {
            Some(Inner::Pending(pending)) => pending,
            Some(Inner::Ready(outcome, control)) => PendingReply { source: Source::Ready(outcome, control) },
            None => PendingReply { source: Source::Taken },
        }
    }

    /// Asks for cancellation and keeps waiting, like [`PendingReply::cancel`].
    pub fn cancel(&self) {
        if let Some(Inner::Pending(pending)) = &self.0 {
            pending.cancel();
        }
    }

    /// Waits for admission on the calling thread.
    ///
    /// # Errors
    ///
    /// Those of the future, and [`ErrorKind::ApiMisuse`] inside an async runtime.
    pub fn wait(self) -> Result<PendingReply> {
        blocking::block_on(self)?
    }
}

impl Future for Submission {
    type Output = Result<PendingReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(Inner::Pending(PendingReply { source: Source::Slot(slot) })) = &self.0 {
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

/// An admitted request. As a future it resolves to the reply.
///
/// Dropping it cancels the request; objects in a reply that is not taken are freed.
#[must_use = "dropping a pending reply cancels the request"]
pub struct PendingReply {
    source: Source,
}

enum Source {
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
            Source::Slot(slot) => abandon(&slot, false),
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
            Source::Slot(slot) => abandon(&slot, true),
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
            abandon(&slot, true);
        }
    }
}

impl fmt::Debug for Canceller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Canceller")
    }
}

fn abandon(slot: &Slot, cancel: bool) {
    let mut state = slot.state();
    let stage = std::mem::replace(&mut state.stage, Stage::Over);
    let waker = state.waker.take();
    let sink = state.sink.take();
    drop(state);
    drop((waker, sink));
    match stage {
        Stage::Done(Ok(value)) => slot.control.discard(value),
        Stage::Queued | Stage::Admitted if cancel => slot.control.abandon(slot.id),
        _ => {}
    }
}

fn set_waker(current: &mut Option<Waker>, waker: &Waker) {
    match current {
        Some(current) if current.will_wake(waker) => {}
        current => *current = Some(waker.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts cancellations and discarded replies.
    #[derive(Default)]
    struct Control {
        cancelled: AtomicUsize,
        discarded: AtomicUsize,
    }

    impl ReplyControl for Control {
        fn cancel(&self, _: u64) {
            self.cancelled.fetch_add(1, Ordering::Relaxed);
        }

        fn discard(&self, _: Value) {
            self.discarded.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[derive(Default)]
    struct Seen(Mutex<Vec<Outcome>>);

    impl Seen {
        fn observer(self: &Arc<Self>) -> impl FnOnce(&Outcome) + Send + 'static {
            let seen = self.clone();
            move |outcome| seen.0.lock().push(outcome.clone())
        }

        fn kinds(&self) -> Vec<Option<ErrorKind>> {
            self.0.lock().iter().map(|outcome| outcome.as_ref().err().map(RpcError::kind)).collect()
        }
    }

    fn pending() -> (Arc<Control>, Arc<Seen>, Submission, Responder) {
        let (control, seen) = (Arc::new(Control::default()), Arc::new(Seen::default()));
        let (submission, responder) = Submission::pending(control.clone(), 7);
        let submission = submission.inspect(seen.observer());
        (control, seen, submission, responder)
    }

    #[test]
    fn an_observer_sees_the_outcome_once_and_the_caller_still_gets_it() {
        let (_, seen, submission, responder) = pending();
        responder.admit();
        assert!(submission.is_admitted() && seen.kinds().is_empty());
        assert!(responder.complete(Ok(Value::Int(1))) && !responder.complete(Ok(Value::Int(2))));
        // An observer added later sees the outcome, too.
        let submission = submission.inspect(seen.observer());
        assert_eq!(seen.kinds(), [None, None]);
        assert_eq!(submission.reply().wait().unwrap(), Value::Int(1));

        let seen = Arc::new(Seen::default());
        let submission = Submission::ready(Ok(Value::Int(3))).inspect(seen.observer()).inspect(seen.observer());
        assert_eq!(seen.kinds(), [None, None]);
        assert_eq!(submission.try_ready().unwrap().unwrap(), Value::Int(3));
    }

    #[test]
    fn sink_and_observer_get_the_same_outcome() {
        struct Sink(Mutex<Option<Outcome>>);
        impl ReplySink for Sink {
            fn deliver(&self, _: u64, outcome: Outcome) {
                *self.0.lock() = Some(outcome);
            }
        }
        let (_, seen, submission, responder) = pending();
        let sink = Arc::new(Sink(Mutex::default()));
        let _canceller = submission.reply().deliver_to(sink.clone(), 1);
        responder.complete(Err(RpcError::internal("broken")));
        assert_eq!(seen.kinds(), [Some(ErrorKind::Internal)]);
        assert_eq!(sink.0.lock().take().unwrap().unwrap_err().kind(), ErrorKind::Internal);
    }

    #[test]
    fn an_observer_sees_a_cancellation_when_the_caller_has_given_up() {
        let (control, seen, submission, responder) = pending();
        drop(submission);
        assert_eq!(control.cancelled.load(Ordering::Relaxed), 1);
        assert!(!responder.complete(Ok(Value::Int(1))));
        assert_eq!((seen.kinds(), control.discarded.load(Ordering::Relaxed)), (vec![Some(ErrorKind::Cancelled)], 1));
    }

    #[test]
    fn a_caller_may_give_up_while_the_observer_runs() {
        let control = Arc::new(Control::default());
        let (submission, responder) = Submission::pending(control.clone(), 7);
        let reply = Arc::new(Mutex::new(None::<PendingReply>));
        let taken = reply.clone();
        let submission = submission.inspect(move |_| drop(taken.lock().take()));
        *reply.lock() = Some(submission.reply());
        assert!(!responder.complete(Ok(Value::Int(1))));
        assert!(responder.is_complete());
        assert_eq!(control.discarded.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn the_observer_of_a_request_that_never_completes_is_dropped() {
        let held = Arc::new(());
        let observed = held.clone();
        drop(Submission::never().inspect(move |_| drop(observed)));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
