//! The attempts of one request of a retrying session, from its turn in the lane to its reply.

use std::future::Future;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rpc_core::reply::Outcome;
use rpc_core::{ErrorKind, Lane, Operation, Request, Responder, RpcError, SharedSession, Submission, Value};
use tokio::sync::{Notify, oneshot};

use super::held::{self, Pins, lost};
use super::policy::is_lost;
use super::{RetryInner, Turn, keep};

/// A request that is in progress.
pub(super) struct Attempts {
    pub(super) inner: Arc<RetryInner>,
    pub(super) pins: Pins,
    pub(super) responder: Responder,
    /// Dropped when the request is admitted.
    pub(super) admit: Mutex<Option<oneshot::Sender<()>>>,
    /// Notified when the caller cancels the request, or is gone.
    pub(super) cancelled: Arc<Notify>,
}

impl Attempts {
    /// Waits for the request's turn, makes its attempts and completes it. Returns its lane, in
    /// which the next request may begin.
    pub(super) async fn run(self, request: Request, previous: Option<Turn>) -> Lane {
        let lane = request.lane;
        if let Some(Turn { admitted, over }) = previous {
            let (mut admitted, mut over) = (Some(admitted), Some(over));
            let turn = async {
                let permit = async {
                    dropped(&mut admitted).await;
                    self.inner.waiting.acquire().await
                };
                let _permit = tokio::select! {
                    biased;
                    () = dropped(&mut over) => return,
                    permit = permit => permit,
                };
                self.admit();
                dropped(&mut over).await;
            };
            if let Err(error) = self.unless_given_up(request.deadline, turn).await {
                self.pins.unpin();
                self.responder.complete(Err(error));
                // The next one must not pass the one before.
                dropped(&mut admitted).await;
                self.admit();
                dropped(&mut over).await;
                return lane;
            }
        }
        let outcome = self.attempts(&request).await;
        self.responder.complete(outcome);
        lane
    }

    /// Admits the request, and lets the next one of its lane be admitted.
    fn admit(&self) {
        self.responder.admit();
        drop(self.admit.lock().take());
    }

    async fn attempts(&self, request: &Request) -> Outcome {
        let policy = &self.inner.policy;
        let (mut backoff, mut attempts, mut may_have_run) = (policy.backoff(), 0, false);
        let mut previous = None;
        let function = match &request.operation {
            Operation::Call { .. } => self.pins.objects.first().and_then(|function| function.name()),
            _ => None,
        };
        loop {
            attempts += 1;
            let error = match self.attempt(request).await {
                Ok(Some(value)) => {
                    policy.succeeded();
                    return Ok(value);
                }
                // It cannot be repeated: its error is the one with which the object's session was
                // lost.
                Ok(None) => return Err(previous.unwrap_or_else(lost)),
                Err(error) => error,
            };
            let permitted = policy.permits(attempts, &request.operation, function, self.inner.open.is_some(), &error);
            // An earlier attempt may have run, whatever became of the last one.
            may_have_run |= error.request_may_have_run();
            let error = error.may_have_run(may_have_run);
            let is_over = self.responder.is_over();
            if is_over || !permitted {
                return Err(error);
            }
            let pause = backoff.pause();
            let in_time = |deadline: Instant| crate::clock::now().checked_add(pause).is_some_and(|at| at < deadline);
            if !request.deadline.is_none_or(in_time) {
                return Err(error);
            }
            tracing::debug!(operation = request.operation.name(), attempts, ?pause, %error, "a request is repeated");
            let paused = self.unless_given_up(request.deadline, tokio::time::sleep(pause)).await;
            if paused.is_err() || !self.pins.pin() {
                return Err(error);
            }
            previous = Some(error);
        }
    }

    /// Makes one attempt. Resolves to `None` if an object that the request names went with an
    /// earlier session.
    async fn attempt(&self, request: &Request) -> Result<Option<Value>, RpcError> {
        let Request { lane, deadline, trace, pipe, ref operation } = *request;
        let with = |operation| Request { lane, deadline, trace, pipe, operation };
        let opened = self.unless_given_up(deadline, self.inner.current()).await?;
        // Neither the opening nor a look-up below is the request.
        let not_begun = |error: RpcError| error.may_have_run(false);
        let (generation, session) = opened.map_err(not_begun)?;
        let outcome = async {
            // One that frees an object of a lost session has nothing to do.
            let mut handles = Vec::with_capacity(self.pins.objects.len());
            for pin in &self.pins.objects {
                let handle = self.unless_given_up(deadline, pin.handle_in(generation, &session, with)).await?;
                let Some(handle) = handle.map_err(not_begun)? else { return Ok(None) };
                handles.push(handle);
            }
            let mut handles = handles.into_iter();
            let operation = held::translated(operation, &mut |_| handles.next().ok_or_else(lost))?;
            let is_free = matches!(operation, Operation::Free { .. });
            let submission = session.submit(with(operation));
            self.pins.unpin();
            let outcome = self.outcome(submission).await;
            if is_free && outcome.is_ok() {
                self.pins.objects.iter().for_each(|pin| pin.mark_freed());
            }
            outcome.map(Some)
        };
        let outcome = outcome.await;
        if let Err(error) = &outcome
            && self.inner.open.is_some()
            && has_ended(&session, error)
        {
            self.inner.lose(generation);
        }
        let name = if let Operation::GetFunction { name } = operation { Some(name.as_str()) } else { None };
        outcome.transpose().map(|outcome| keep(&self.inner, generation, &session, name, outcome)).transpose()
    }

    /// Waits for the reply, and passes a cancellation on.
    async fn outcome(&self, mut submission: Submission) -> Outcome {
        let mut pending = tokio::select! {
            biased;
            pending = &mut submission => pending?,
            () = self.given_up() => {
                submission.cancel();
                submission.await?
            }
        };
        self.admit();
        tokio::select! {
            biased;
            outcome = &mut pending => outcome,
            () = self.given_up() => {
                pending.cancel();
                pending.await
            }
        }
    }

    /// Resolves to the output of `work`, or to the error of a request that has not begun when it is
    /// given up.
    async fn unless_given_up<T>(
        &self,
        deadline: Option<Instant>,
        work: impl Future<Output = T>,
    ) -> Result<T, RpcError> {
        let expired = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.given_up() => Err(RpcError::new(ErrorKind::Cancelled, "the request was cancelled")),
            done = work => Ok(done),
            () = expired => Err(RpcError::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")),
        }
    }

    /// Resolves when the caller has cancelled the request, or is gone.
    async fn given_up(&self) {
        while !self.responder.is_over() {
            self.cancelled.notified().await;
        }
    }
}

/// Returns true if no further request of the session can succeed after an attempt that ended with
/// `error`. Its kind alone does not tell: a function may return such an error of another session,
/// and a session may end for any reason.
fn has_ended(session: &SharedSession, error: &RpcError) -> bool {
    // A server that goes away refuses requests, and answers those that it has.
    let is_refused = error.kind() == ErrorKind::Draining && !error.request_may_have_run();
    let is_own = error.hop() == 0 && !session.is_local();
    is_refused || is_own && is_lost(error) || session.ended().reply().is_done()
}

/// Resolves when the sender has been dropped; at once if that was seen before.
async fn dropped(receiver: &mut Option<oneshot::Receiver<()>>) {
    if let Some(waiting) = receiver {
        _ = waiting.await;
        *receiver = None;
    }
}
