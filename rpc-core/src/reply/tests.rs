//! Tests of observers, sinks and callers that give up.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::*;
use crate::error::{ErrorKind, RpcError};
use crate::value::Value;

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
