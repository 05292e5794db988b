//! Replies that are on their way: the two stages of a submitted request, and how to wait for them.
//!
//! A [`Submission`] resolves when the request has been admitted, to a [`PendingReply`], which resolves to the reply.
//! Both are futures, bound to no runtime. Whoever serves the request holds the other end, a [`Responder`].

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use crate::blocking;
use crate::error::{ErrorKind, Result, RpcError};
use crate::value::Value;

/// What a reply carries: the value, or why there is none.
pub type Outcome = Result<Value>;

/// What a session does for the requests that it has accepted. One per session; implemented by sessions.
pub trait ReplyControl: Send + Sync {
    /// Request `id` is not wanted any more. If it has not begun it must not begin. Must not block.
    ///
    /// The responder is still expected to respond; what it responds is discarded.
    fn cancel(&self, id: u64);

    /// As [`cancel`](Self::cancel), and the caller is gone: not even the end of the session has to wait for the response.
    fn abandon(&self, id: u64) {
        self.cancel(id);
    }

    /// Frees the objects in a reply that nobody will take. Must not block.
    fn discard(&self, reply: Value);

    /// Somebody waits for a reply asynchronously. A session whose callers do its input and output themselves
    /// (see [`drive`](Self::drive)) must see to it that somebody else does it from now on.
    fn attend(&self) {}

    /// Whether the session has ended, so that nobody needs the outcome of what still runs.
    fn has_ended(&self) -> bool {
        false
    }

    /// Whether a waiting thread has to do the session's input and output itself, by calling [`drive`](Self::drive).
    fn must_be_driven(&self) -> bool {
        false
    }

    /// Does the session's input and output on the calling thread until `done` says so.
    fn drive(&self, done: &dyn Fn() -> bool) {
        let _ = done;
    }
}

/// Takes replies as they complete, on the thread that completes them. See [`PendingReply::deliver_to`].
pub trait ReplySink: Send + Sync {
    /// The reply to the request that was given `token`. Must not block.
    fn deliver(&self, token: u64, outcome: Outcome);
}

/// Is shown an outcome. See [`Submission::inspect`].
type Observer = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
struct State {
    stage: Stage,
    /// The caller has asked for cancellation, and may still be waiting.
    cancelled: bool,
    waker: Option<Waker>,
    sink: Option<(Arc<dyn ReplySink>, u64)>,
    observer: Option<Observer>,
}

#[derive(Default)]
enum Stage {
    /// Waiting for room.
    #[default]
    Queued,
    /// Its place in the order is fixed.
    Admitted,
    /// Completed, and being shown to the observer. Other completions come too late.
    Shown,
    /// Completed, and not yet taken.
    Done(Outcome),
    /// Taken by the caller, or given up by it.
    Over,
}

struct Slot {
    id: u64,
    /// How many [`Responder`]s there are, apart from the one who waits.
    responders: AtomicUsize,
    control: Arc<dyn ReplyControl>,
    state: Mutex<State>,
}

impl Slot {
    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half changed: each change is one assignment.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cancel(&self) {
        self.state().cancelled = true;
        self.control.cancel(self.id);
    }
}

/// The serving end of one request: says when it is admitted, and completes it.
///
/// Cheap to clone; the first completion counts and later ones are discarded, which is what lets a deadline and a result
/// race. Dropping all clones without completing is a bug of the session, and the caller gets an internal error.
pub struct Responder(Arc<Slot>);

impl Clone for Responder {
    fn clone(&self) -> Self {
        self.0.responders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        // `AcqRel`, as for any reference count: what the others did comes before what the last one finds.
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
    // Another observer may come while one is being shown the outcome.
    while let Some(observer) = state.observer.take() {
        if let Stage::Queued | Stage::Admitted = state.stage {
            state.stage = Stage::Shown;
        }
        drop(state);
        if first {
            observer(&outcome);
        } else {
            observer(&Err(
                RpcError::new(ErrorKind::Cancelled, "nobody waits for the reply any more").may_have_run(true)
            ));
        }
        state = slot.state();
    }
    match state.stage {
        // Its caller may have gone while the outcome was shown.
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
    /// Fixes the request's place in the order: resolves the first stage.
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

    /// Completes the request. Returns whether this was the first completion; if not, or if the caller is gone, the
    /// objects in `outcome` are freed.
    pub fn complete(&self, outcome: Outcome) -> bool {
        complete(&self.0, outcome)
    }

    /// Whether the request has been completed, or its caller is gone.
    pub fn is_complete(&self) -> bool {
        matches!(self.0.state().stage, Stage::Shown | Stage::Done(_) | Stage::Over)
    }

    /// Whether there is no point in going on: the request is complete, its caller is gone or has asked for cancellation,
    /// or the session has ended.
    pub fn is_over(&self) -> bool {
        let cancelled = self.0.state().cancelled;
        cancelled || self.is_complete() || self.0.control.has_ended()
    }

    /// The request's number in its session.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// For those who may complete the request, and are not the ones that have to.
    pub(crate) fn downgrade(&self) -> WeakResponder {
        WeakResponder(Arc::downgrade(&self.0))
    }
}

/// Finds a request's [`Responder`] again for as long as somebody has it. Keeps nothing of a reply alive.
pub(crate) struct WeakResponder(Weak<Slot>);

impl WeakResponder {
    /// The responder, unless the request is complete.
    pub(crate) fn upgrade(&self) -> Option<Responder> {
        let slot = self.0.upgrade()?;
        slot.responders.fetch_add(1, Ordering::Relaxed);
        let responder = Responder(slot);
        (!responder.is_complete()).then_some(responder)
    }

    /// Whether the request is not complete yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.upgrade().is_some_and(|slot| matches!(slot.state().stage, Stage::Queued | Stage::Admitted))
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({})", self.0.id)
    }
}

/// A request that has been submitted. As a future it resolves when the request is admitted, or refused.
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
    /// A request that was served while it was submitted. The outcome names no objects, or it is fine to leave them to
    /// the end of the session if nobody takes it; else see [`ready_with`](Self::ready_with).
    pub fn ready(outcome: Outcome) -> Self {
        Self(Some(Inner::Ready(outcome, None)))
    }

    /// A request that was served while it was submitted; `control` frees the objects if nobody takes the outcome.
    pub fn ready_with(control: Arc<dyn ReplyControl>, outcome: Outcome) -> Self {
        Self(Some(Inner::Ready(outcome, Some(control))))
    }

    /// A request that is admitted and never answered.
    pub fn never() -> Self {
        Self(Some(Inner::Pending(PendingReply { source: Source::Never })))
    }

    /// A request to be served later: the two ends of it. `id` is what [`ReplyControl::cancel`] will be given.
    pub fn pending(control: Arc<dyn ReplyControl>, id: u64) -> (Self, Responder) {
        let slot = Arc::new(Slot { id, responders: AtomicUsize::new(1), control, state: Mutex::default() });
        let responder = Responder(slot.clone());
        (Self(Some(Inner::Pending(PendingReply { source: Source::Slot(slot) }))), responder)
    }

    /// Shows the outcome to `observer` as it completes, before the caller gets it, and changes nothing else: for wrappers
    /// that count and measure.
    ///
    /// `observer` is called on the thread that completes the request, and must not block or panic. If the caller has given
    /// the request up by then it is shown a [cancellation](ErrorKind::Cancelled). It is dropped without having been called
    /// if nobody completes the request: when the session has ended, or for [`never`](Self::never).
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

    /// Both stages in one: resolves to the reply.
    pub fn reply(mut self) -> PendingReply {
        self.take_reply()
    }

    /// The outcome, if it was there at once; else the submission again.
    pub fn try_ready(mut self) -> Result<Outcome, Self> {
        match self.0.take() {
            Some(Inner::Ready(outcome, _)) => Ok(outcome),
            other => Err(Self(other)),
        }
    }

    /// Whether the request has been admitted, or is over.
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

    /// Asks for cancellation and keeps waiting, as [`PendingReply::cancel`].
    pub fn cancel(&self) {
        if let Some(Inner::Pending(pending)) = &self.0 {
            pending.cancel();
        }
    }

    /// Waits for admission on the calling thread.
    ///
    /// # Errors
    ///
    /// As the future; and [`ErrorKind::ApiMisuse`] inside an async runtime.
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
                blocking::waiting_for(&slot.control);
                return Poll::Pending;
            }
        }
        Poll::Ready(Ok(self.take_reply()))
    }
}

/// A request that has been admitted. As a future it resolves to the reply.
///
/// Dropping it cancels the request; objects in a reply that nobody takes are freed.
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
    /// Whether polling would resolve at once.
    pub fn is_done(&self) -> bool {
        match &self.source {
            Source::Slot(slot) => matches!(slot.state().stage, Stage::Done(_)),
            Source::Never => false,
            _ => true,
        }
    }

    /// Asks for cancellation and keeps waiting: the terminal reply is [`ErrorKind::Cancelled`] if the request had not
    /// begun, and otherwise whatever it ends with.
    pub fn cancel(&self) {
        if let Source::Slot(slot) = &self.source {
            slot.cancel();
        }
    }

    /// Hands the reply to `sink` as soon as it is there, on the thread that completes it, instead of to a future. If it
    /// is there already, `sink` is called before this returns.
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
                        slot.control.attend();
                        Canceller(Some(slot))
                    }
                }
            }
        }
    }

    /// Gives up the reply without cancelling the request: it runs, and what it returns is freed.
    pub fn detach(mut self) {
        match std::mem::replace(&mut self.source, Source::Taken) {
            Source::Slot(slot) => abandon(&slot, false),
            // What is there already is freed by the drop.
            other => self.source = other,
        }
    }

    /// Waits for the reply on the calling thread.
    ///
    /// # Errors
    ///
    /// The request's own; and [`ErrorKind::ApiMisuse`] inside an async runtime.
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
                    blocking::waiting_for(&slot.control);
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

/// Cancels a request whose reply goes to a [`ReplySink`].
#[derive(Clone)]
pub struct Canceller(Option<Arc<Slot>>);

impl Canceller {
    /// Asks for cancellation; the sink still gets the one reply.
    pub fn cancel(&self) {
        if let Some(slot) = &self.0 {
            slot.cancel();
        }
    }

    /// Gives the request up: it is cancelled, the sink hears no more of it, and what it returns is freed.
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

    /// Notes what it is asked to do.
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
            move |outcome| seen.0.lock().unwrap().push(outcome.clone())
        }

        fn kinds(&self) -> Vec<Option<ErrorKind>> {
            self.0.lock().unwrap().iter().map(|outcome| outcome.as_ref().err().map(RpcError::kind)).collect()
        }
    }

    fn pending() -> (Arc<Control>, Arc<Seen>, Submission, Responder) {
        let (control, seen) = (Arc::new(Control::default()), Arc::new(Seen::default()));
        let (submission, responder) = Submission::pending(control.clone(), 7);
        let submission = submission.inspect(seen.observer());
        (control, seen, submission, responder)
    }

    #[test]
    fn an_outcome_is_shown_once_whenever_it_comes_and_arrives_all_the_same() {
        let (_, seen, submission, responder) = pending();
        responder.admit();
        assert!(submission.is_admitted() && seen.kinds().is_empty());
        assert!(responder.complete(Ok(Value::Int(1))) && !responder.complete(Ok(Value::Int(2))));
        // One that comes later sees it, too.
        let submission = submission.inspect(seen.observer());
        assert_eq!(seen.kinds(), [None, None]);
        assert_eq!(submission.reply().wait().unwrap(), Value::Int(1));

        let seen = Arc::new(Seen::default());
        let submission = Submission::ready(Ok(Value::Int(3))).inspect(seen.observer()).inspect(seen.observer());
        assert_eq!(seen.kinds(), [None, None]);
        assert_eq!(submission.try_ready().unwrap().unwrap(), Value::Int(3));
    }

    #[test]
    fn a_sink_gets_what_the_observer_was_shown() {
        struct Sink(Mutex<Option<Outcome>>);
        impl ReplySink for Sink {
            fn deliver(&self, _: u64, outcome: Outcome) {
                *self.0.lock().unwrap() = Some(outcome);
            }
        }
        let (_, seen, submission, responder) = pending();
        let sink = Arc::new(Sink(Mutex::default()));
        let _canceller = submission.reply().deliver_to(sink.clone(), 1);
        responder.complete(Err(RpcError::internal("broken")));
        assert_eq!(seen.kinds(), [Some(ErrorKind::Internal)]);
        assert_eq!(sink.0.lock().unwrap().take().unwrap().unwrap_err().kind(), ErrorKind::Internal);
    }

    #[test]
    fn a_reply_that_nobody_takes_is_shown_as_a_cancellation() {
        let (control, seen, submission, responder) = pending();
        drop(submission);
        assert_eq!(control.cancelled.load(Ordering::Relaxed), 1);
        assert!(!responder.complete(Ok(Value::Int(1))));
        assert_eq!((seen.kinds(), control.discarded.load(Ordering::Relaxed)), (vec![Some(ErrorKind::Cancelled)], 1));
    }

    #[test]
    fn a_caller_may_go_while_the_outcome_is_shown() {
        let control = Arc::new(Control::default());
        let (submission, responder) = Submission::pending(control.clone(), 7);
        let reply = Arc::new(Mutex::new(None::<PendingReply>));
        let taken = reply.clone();
        let submission = submission.inspect(move |_| drop(taken.lock().unwrap().take()));
        *reply.lock().unwrap() = Some(submission.reply());
        assert!(!responder.complete(Ok(Value::Int(1))));
        assert!(responder.is_complete());
        assert_eq!(control.discarded.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn an_observer_of_what_is_never_completed_is_dropped() {
        let held = Arc::new(());
        let observed = held.clone();
        drop(Submission::never().inspect(move |_| drop(observed)));
        assert_eq!(Arc::strong_count(&held), 1);
    }
}
