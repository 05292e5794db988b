//! [`RetrySession`], a wrapper that repeats requests which failed for a reason that passes.
//!
//! # What is repeated
//!
//! A request is repeated if it failed because its session was lost or is going away, or because
//! what it needs is [busy](ErrorKind::Busy), and if a second run does no harm:
//!
//! * it certainly did not run ([`RpcError::request_may_have_run`] is false), or
//! * it only asks, or only makes objects, which went with the lost session: lookups, attributes,
//!   reads, allocations, new streams; or
//! * it calls a function that the [policy](RetryPolicy::idempotent) declares idempotent.
//!
//! Attempts are bounded, with pauses of random length between them, and a [`RetryBudget`] stops
//! repetition while most requests fail. A request is never repeated behind its deadline.
//!
//! # Lost sessions
//!
//! A wrapper that was made with a way to open sessions opens the next one when the last was lost.
//! Functions that were looked up by their names are looked up again there, so that references to
//! them go on. All other objects (tensors, modules, streams, what functions returned) went with
//! their session: requests that name them fail with [`ErrorKind::InvalidHandle`], and one that was
//! in progress fails with the error of its connection, because it cannot be repeated.
//!
//! # Order
//!
//! A lane keeps its order: a request begins when the one before it in its lane is over, with all
//! its attempts. So requests of one lane are not pipelined; those of several lanes, and
//! [concurrent](Lane::CONCURRENT) ones, are.

mod attempts;
mod held;
mod policy;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::reply::{Outcome, ReplyControl};
use rpc_core::{
    ErrorKind, Handle, HandleTable, Lane, Operation, Request, Responder, RpcError, RpcSession, Session, SharedSession,
    Submission, Value,
};
use tokio::sync::{Notify, mpsc, oneshot};

use self::held::{Held, pins_of};
pub use self::policy::{RetryBudget, RetryPolicy};
use crate::transport::BoxFuture;

/// Function that opens the next session.
type Open = Box<dyn Fn() -> BoxFuture<'static, Result<Session, RpcError>> + Send + Sync>;

/// A session that repeats requests to another one; see the [module documentation](self).
///
/// ```
/// use rpc_core::{LocalSession, Registry, Session};
/// use rpc_transports::retry::{RetryPolicy, RetrySession};
///
/// # let runtime = tokio::runtime::Runtime::new().unwrap();
/// # runtime.block_on(async {
/// let registry = Registry::new();
/// registry.add("add", |a: i64, b: i64| a + b);
/// let open = move || {
///     let session = Session::new(LocalSession::new(registry.clone()));
///     async move { Ok(session) }
/// };
/// let policy = RetryPolicy::default().idempotent(["add"]);
/// let session = Session::new(RetrySession::reopening(open, policy));
/// let add = session.function::<(i64, i64), i64>("add").await?;
/// assert_eq!(add.call((1, 2)).await?, 3);
/// # Ok::<(), rpc_core::RpcError>(())
/// # }).unwrap();
/// ```
pub struct RetrySession(Arc<RetryInner>);

struct RetryInner {
    /// Runtime of the tasks of requests.
    runtime: tokio::runtime::Handle,
    policy: RetryPolicy,
    /// `None` if there is no other session than the first.
    open: Option<Open>,
    /// Held while a session is opened, so that all who need one wait for the same.
    opening: tokio::sync::Mutex<()>,
    next_id: AtomicU64,
    /// Permits of requests that are admitted and wait for their turn.
    waiting: tokio::sync::Semaphore,
    state: Mutex<RetryState>,
}

struct RetryState {
    /// The latest session with its number; `None` before the first one, and once it was lost.
    current: Option<(u64, SharedSession)>,
    /// Number of sessions so far.
    generation: u64,
    /// Objects of the caller by the handles that it knows.
    objects: HandleTable<Arc<Held>>,
    /// The last request of each lane that is not over.
    lanes: HashMap<Lane, (u64, Turn)>,
    /// Requests that are not over, to be told of their cancellation.
    cancellations: HashMap<u64, Arc<Notify>>,
    /// A clone is held by each request; `None` once the session is being shut down.
    in_progress: Option<mpsc::Sender<()>>,
    /// Resolves when no request is in progress. Taken by the shutdown.
    all_over: Option<mpsc::Receiver<()>>,
    /// Those who wait for the end; `None` once it is there.
    awaiting_end: Option<Vec<Responder>>,
    /// Number of openings that have ended, and the error of the last one if it failed.
    openings: (u64, Option<RpcError>),
}

/// Position behind a request of the same lane.
struct Turn {
    /// Resolves when that request has been admitted.
    admitted: oneshot::Receiver<()>,
    /// Resolves when that request is over.
    over: oneshot::Receiver<()>,
}

/// Largest number of requests that are admitted while others of their lanes are in progress.
const MAX_WAITING: usize = 64;

impl RetrySession {
    /// Wraps one session. Requests that find something busy are repeated; the end of the session is
    /// the end of the wrapper.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime with time, which runs the attempts.
    pub fn new(session: SharedSession, policy: RetryPolicy) -> Self {
        Self::with(Some(session), None, policy)
    }

    /// Wraps the sessions that `open` opens: the first one when it is needed, and the next one each
    /// time that the last was lost. Errors of `open` count as failed attempts of the requests that
    /// wait for it.
    ///
    /// # Panics
    ///
    /// As [`new`](Self::new).
    pub fn reopening<F>(open: impl Fn() -> F + Send + Sync + 'static, policy: RetryPolicy) -> Self
    where
        F: Future<Output = Result<Session, RpcError>> + Send + 'static,
    {
        Self::with(None, Some(Box::new(move || Box::pin(open()))), policy)
    }

    /// Starts with a session that is open already.
    #[must_use]
    pub(crate) fn starting_with(self, session: SharedSession) -> Self {
        let mut state = self.0.state.lock();
        state.generation += 1;
        state.current = Some((state.generation, session));
        drop(state);
        self
    }

    fn with(session: Option<SharedSession>, open: Option<Open>, policy: RetryPolicy) -> Self {
        let mut seed = [0; 8];
        // Handles of this table stay in this process: a seed that is not random harms nobody.
        let _ = SystemRandom::new().fill(&mut seed);
        let (in_progress, all_over) = mpsc::channel(1);
        crate::runtime::install_in_core();
        Self(Arc::new(RetryInner {
            runtime: tokio::runtime::Handle::current(),
            policy,
            open,
            opening: tokio::sync::Mutex::default(),
            next_id: AtomicU64::new(1),
            waiting: tokio::sync::Semaphore::new(MAX_WAITING),
            state: Mutex::new(RetryState {
                generation: u64::from(session.is_some()),
                current: session.map(|session| (1, session)),
                objects: HandleTable::new(u64::from_le_bytes(seed), usize::MAX),
                lanes: HashMap::new(),
                cancellations: HashMap::new(),
                in_progress: Some(in_progress),
                all_over: Some(all_over),
                awaiting_end: Some(Vec::new()),
                openings: (0, None),
            }),
        }))
    }
}

impl fmt::Debug for RetrySession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RetrySession").field("policy", &self.0.policy).finish_non_exhaustive()
    }
}

impl RpcSession for RetrySession {
    fn submit(&self, request: Request) -> Submission {
        let inner = &self.0;
        if let Operation::Release { handles } = request.operation {
            inner.forget(&handles);
            return Submission::ready(Ok(Value::Null));
        }
        if request.pipe.is_some() {
            let text = "a retrying session keeps no results for later requests: it could not repeat a part of a chain";
            return Submission::ready(Err(RpcError::unsupported(text)));
        }
        let mut state = inner.state.lock();
        let Some(in_progress) = state.in_progress.clone() else { return Submission::ready(Err(closed())) };
        let id = inner.next_id.fetch_add(1, Ordering::Relaxed);
        let control: Arc<dyn ReplyControl> = inner.clone();
        if matches!(request.operation, Operation::Shutdown) {
            state.in_progress = None;
            let all_over = state.all_over.take();
            drop(state);
            let (submission, responder) = Submission::pending(control, id);
            responder.admit();
            inner.runtime.spawn(inner.clone().shut_down(in_progress, all_over, request, responder));
            return submission;
        }
        let pins = match pins_of(&mut state.objects, &request.operation) {
            Ok(pins) => pins,
            Err(error) => return Submission::ready(Err(error)),
        };
        let ((over, is_over), (admit, admitted)) = (oneshot::channel(), oneshot::channel());
        let previous = match request.lane {
            Lane::CONCURRENT => None,
            lane => state.lanes.insert(lane, (id, Turn { admitted, over: is_over })).map(|(_, previous)| previous),
        };
        let cancelled = Arc::new(Notify::new());
        state.cancellations.insert(id, cancelled.clone());
        drop(state);
        let (submission, responder) = Submission::pending(control, id);
        let attempt =
            attempts::Attempts { inner: inner.clone(), pins, responder, admit: Mutex::new(Some(admit)), cancelled };
        let work = attempt.run(request, previous);
        let inner = inner.clone();
        inner.clone().runtime.spawn(async move {
            let lane = work.await;
            let mut state = inner.state.lock();
            state.cancellations.remove(&id);
            if state.lanes.get(&lane).is_some_and(|(last, _)| *last == id) {
                state.lanes.remove(&lane);
            }
            drop(state);
            drop((over, in_progress));
        });
        submission
    }

    fn is_local(&self) -> bool {
        self.0.state.lock().current.as_ref().is_some_and(|(_, session)| session.is_local())
    }

    fn is_encrypted(&self) -> bool {
        self.0.state.lock().current.as_ref().is_some_and(|(_, session)| session.is_encrypted())
    }

    fn ended(&self) -> Submission {
        let mut state = self.0.state.lock();
        if self.0.open.is_none()
            && let Some((_, session)) = &state.current
        {
            return session.ended();
        }
        let Some(waiting) = &mut state.awaiting_end else { return Submission::ready(Err(closed())) };
        let control: Arc<dyn ReplyControl> = self.0.clone();
        let (submission, responder) = Submission::pending(control, 0);
        responder.admit();
        waiting.retain(|responder| !responder.is_over());
        waiting.push(responder);
        submission
    }
}

/// Those who wait for the end are told, and hold the inner part no longer; requests in progress go
/// on.
impl Drop for RetrySession {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.in_progress = None;
        let waiting = state.awaiting_end.take();
        drop(state);
        for waiting in waiting.into_iter().flatten() {
            waiting.complete(Err(RpcError::new(ErrorKind::Closed, "the session was dropped")));
        }
    }
}

impl RetryInner {
    /// Removes objects that no reference names any more. They are freed behind the requests that
    /// name them.
    fn forget(&self, handles: &[Handle]) {
        let mut state = self.state.lock();
        let freed: Vec<_> = handles.iter().filter_map(|handle| state.objects.remove(*handle).ok()).collect();
        drop(state);
        freed.iter().for_each(|object| object.release());
    }

    /// Returns the session for the next attempt, and opens one if there is none. All who need one
    /// at a time share an opening, and its error.
    async fn current(&self) -> Result<(u64, SharedSession), RpcError> {
        let begun = {
            let state = self.state.lock();
            if let Some(current) = state.current.clone() {
                return Ok(current);
            }
            state.openings.0
        };
        let Some(open) = &self.open else { return Err(closed()) };
        let _turn = self.opening.lock().await;
        {
            let state = self.state.lock();
            if let Some(current) = state.current.clone() {
                return Ok(current);
            }
            if let (ended, Some(error)) = &state.openings
                && *ended > begun
            {
                return Err(error.clone());
            }
        }
        let opened = open().await;
        let mut state = self.state.lock();
        state.openings = (state.openings.0 + 1, opened.as_ref().err().cloned());
        let session = opened?;
        state.generation += 1;
        let current = (state.generation, session.shared().clone());
        state.current = Some(current.clone());
        Ok(current)
    }

    /// Lets the next attempt open another session, unless that has happened already.
    fn lose(&self, generation: u64) {
        let mut state = self.state.lock();
        let lost = if state.current.as_ref().is_some_and(|(current, _)| *current == generation) {
            state.current.take()
        } else {
            None
        };
        drop(state);
        drop(lost);
    }

    async fn shut_down(
        self: Arc<Self>,
        in_progress: mpsc::Sender<()>,
        all_over: Option<mpsc::Receiver<()>>,
        request: Request,
        responder: Responder,
    ) {
        drop(in_progress);
        if let Some(mut all_over) = all_over {
            // Nothing is ever sent: it returns when the last request has dropped its sender.
            let all_over = all_over.recv();
            match request.deadline {
                Some(deadline) => _ = tokio::time::timeout_at(deadline.into(), all_over).await,
                None => _ = all_over.await,
            }
        }
        let current = self.state.lock().current.clone();
        let outcome = match current {
            Some((_, session)) => session.submit(request).reply().await,
            None => Ok(Value::Null),
        };
        let mut state = self.state.lock();
        let (objects, waiting) = (state.objects.drain(), state.awaiting_end.take());
        drop(state);
        drop(objects);
        responder.complete(outcome);
        for waiting in waiting.into_iter().flatten() {
            waiting.complete(Err(closed()));
        }
    }
}

impl ReplyControl for RetryInner {
    fn cancel(&self, id: u64) {
        let cancelled = self.state.lock().cancellations.get(&id).cloned();
        if let Some(cancelled) = cancelled {
            cancelled.notify_one();
        }
    }

    fn discard(&self, reply: Value) {
        self.forget(&reply.handles());
    }
}

fn closed() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session was shut down")
}

/// Returns the outcome of an attempt with the objects in it under handles of the caller.
fn keep(inner: &RetryInner, generation: u64, session: &SharedSession, name: Option<&str>, outcome: Outcome) -> Outcome {
    let value = outcome?;
    if !value.may_hold_objects() {
        return Ok(value);
    }
    let count = value.handles().len();
    let mut state = inner.state.lock();
    if let Err(error) = state.objects.check_room(count) {
        drop(state);
        rpc_core::session::release(session, &value);
        return Err(error.may_have_run(true));
    }
    value.try_map(&mut |reference| {
        let held = Held::new(generation, session.clone(), reference.handle(), name);
        let handle = state.objects.insert(Arc::new(held))?;
        Ok(held::with_handle(reference, handle))
    })
}
