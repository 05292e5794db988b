//! Operations of a session: [`Action`], which has not been started, and [`Pending`], which is in
//! progress.

use std::any::Any;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::blocking;
use crate::client::lane_deadlock;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::FromReply;
use crate::handle::{Handle, PipeId};
use crate::panics::drop_each;
use crate::reply::{PendingReply, Submission};
use crate::session::{Lane, Operation, Request, SharedSession};
use crate::trace::{self, TraceContext};
use crate::value::{TensorRef, Value};

/// An operation that borrows nothing: the usual kind of [`ScopedAction`].
pub type Action<T> = ScopedAction<'static, T>;

/// A started operation that borrows nothing: the usual kind of [`ScopedPending`].
pub type Pending<T> = ScopedPending<'static, T>;

/// An operation that has not been started: await it, [`wait`](Self::wait) for it, or
/// [`start`](Self::start) it.
///
/// Some operations are one request, others several, such as copies and files. Options and forms are
/// the same. `'a` is the lifetime of the data that the operation reads from or writes to, such as a
/// file of the caller.
#[must_use = "an action does nothing until it is awaited, waited for or started"]
pub struct ScopedAction<'a, T> {
    options: Options<'a>,
    task: Task<'a, T>,
}

/// Options that every operation offers.
pub(crate) struct Options<'a> {
    pub(crate) lane: Lane,
    pub(crate) deadline: Option<Instant>,
    pub(crate) trace: Option<TraceContext>,
    /// Never locked: the mutex lets futures share the options across threads, which the closure
    /// alone would not.
    progress: Mutex<Option<Progress<'a>>>,
}

/// Called with the bytes that have been transferred so far.
type Progress<'a> = Box<dyn FnMut(u64) + Send + 'a>;

/// A future of several requests.
pub(crate) type Steps<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

#[allow(clippy::large_enum_variant, reason = "a call is a single request, and must not cost an allocation more")]
enum Task<'a, T> {
    One(OneRequest<T>),
    Many(StartSteps<'a, T>),
    /// Several requests that yield a reference, and its conversion: `T` may have a shorter lifetime
    /// than the future.
    Reference(StartSteps<'a, PinnedReference>, fn(PinnedReference) -> Result<T>),
    /// Nothing: the operation is known to fail.
    Failed(RpcError),
}

type StartSteps<'a, T> = Box<dyn FnOnce(Options<'a>) -> Steps<'a, T> + Send + 'a>;

/// An operation that is one request, and the conversion of its reply.
pub(crate) struct OneRequest<T> {
    session: SharedSession,
    operation: Result<Operation>,
    pins: RequestPins,
    on_reply: Option<Arc<dyn OnReply>>,
    before: Option<fn(&SharedSession)>,
    convert: fn(Value, &SharedSession) -> Result<T>,
}

/// References that a request names, kept until its reply, because the request may not have reached
/// the session before.
#[derive(Default)]
pub(crate) struct RequestPins {
    /// Reference of a call's function. Nearly every call has this one, and no other.
    pub(crate) function: Option<PinnedReference>,
    pub(crate) others: Vec<PinnedReference>,
}

/// A reference that is kept until the reply.
pub(crate) type PinnedReference = Arc<dyn Any + Send + Sync>;

/// Observer of a request's reply.
pub(crate) trait OnReply: Send + Sync {
    /// Records that the request has succeeded.
    fn succeeded(&self);

    /// Returns the error to report in place of the request's own.
    fn failed(&self, error: RpcError) -> RpcError {
        error
    }
}

/// Result that a request names, and that may not be there yet.
pub(crate) trait NamedResult: Send + Sync {
    /// Checks that the request is on the lane of the result.
    fn check_lane(&self, lane: Lane) -> Result<()>;

    /// Returns the error of the request, if there is no result because its own request has failed.
    fn absence(&self) -> Option<RpcError>;
}

/// Pin of a request that names such a result.
pub(crate) struct ResultPin(pub(crate) Arc<dyn NamedResult>);

/// Reason for which a request has failed that names a result: the failure of an earlier one, which
/// the session did not know.
#[derive(Default)]
struct AbsentResult(OnceLock<RpcError>);

impl OnReply for AbsentResult {
    fn succeeded(&self) {}

    fn failed(&self, error: RpcError) -> RpcError {
        self.0.get().cloned().unwrap_or(error)
    }
}

/// A submitted request whose result the session keeps.
pub(crate) struct KeptRequest {
    pub(crate) session: SharedSession,
    pub(crate) handle: Handle,
    pub(crate) lane: Lane,
    pub(crate) pending: Pending<()>,
    /// Name of the operation.
    pub(crate) name: &'static str,
    /// Layout of the result, if the request is an allocation.
    pub(crate) tensor: Option<TensorRef>,
}

impl RequestPins {
    /// Drops the references. A panic in one of them affects neither the others nor the caller.
    fn discard(self) {
        drop_each(self.function.into_iter().chain(self.others));
    }

    /// Returns the error of the first named result that is not there because its request has
    /// failed.
    fn absence(&self) -> Option<RpcError> {
        self.named_results().find_map(NamedResult::absence)
    }

    /// Returns true if the request names results that may not be there yet.
    fn names_results(&self) -> bool {
        self.named_results().next().is_some()
    }

    /// Checks that the request is on the lane of the results that it names.
    fn check_lane(&self, lane: Lane) -> Result<()> {
        self.named_results().try_for_each(|result| result.check_lane(lane))
    }

    fn named_results(&self) -> impl Iterator<Item = &dyn NamedResult> {
        let pins = self.others.iter().filter_map(|pin| (**pin).downcast_ref());
        pins.map(|ResultPin(result)| &**result)
    }
}

impl<T: FromReply> OneRequest<T> {
    pub(crate) fn new(session: &SharedSession, operation: Result<Operation>) -> Self {
        Self {
            session: session.clone(),
            operation,
            pins: RequestPins::default(),
            on_reply: None,
            before: None,
            convert: T::from_reply,
        }
    }

    /// Calls `before` with the session right before the request is submitted.
    pub(crate) fn before(mut self, before: fn(&SharedSession)) -> Self {
        self.before = Some(before);
        self
    }

    /// Keeps the references that the request names.
    pub(crate) fn pinned(mut self, pins: RequestPins) -> Self {
        self.pins = pins;
        self
    }

    /// Shows the reply to an observer.
    pub(crate) fn on_reply(mut self, observer: Arc<dyn OnReply>) -> Self {
        self.on_reply = Some(observer);
        self
    }
}

impl<T> From<OneRequest<T>> for Action<T> {
    fn from(request: OneRequest<T>) -> Self {
        Self { options: Options::new(Lane::DEFAULT), task: Task::One(request) }
    }
}

impl<'a> Options<'a> {
    fn new(lane: Lane) -> Self {
        Self { lane, deadline: None, trace: None, progress: Mutex::new(None) }
    }

    /// Returns the request for one of the operation's steps.
    pub(crate) fn request(&self, operation: Operation) -> Request {
        Request { lane: self.lane, deadline: self.deadline, trace: self.trace, pipe: None, operation }
    }

    /// Applies the lane, the deadline and the trace of the whole operation to a step.
    pub(crate) fn apply<'b, T>(&self, step: ScopedAction<'b, T>) -> ScopedAction<'b, T> {
        self.limit(step.lane(self.lane))
    }

    /// Applies the deadline and the trace of the whole operation to a step, and leaves its lane.
    pub(crate) fn limit<'b, T>(&self, mut step: ScopedAction<'b, T>) -> ScopedAction<'b, T> {
        step.options.deadline = self.deadline;
        step.options.trace = self.trace;
        step
    }

    /// Returns the same options for steps that report no progress.
    pub(crate) fn without_progress(&self) -> Options<'static> {
        Options { lane: self.lane, deadline: self.deadline, trace: self.trace, progress: Mutex::new(None) }
    }

    /// Reports the number of bytes transferred.
    pub(crate) fn report(&mut self, bytes: u64) {
        if let Some(progress) = self.progress.get_mut() {
            progress(bytes);
        }
    }
}

impl<'a, T> ScopedAction<'a, T> {
    /// Creates an operation that fails without a request.
    pub(crate) fn failed(error: RpcError) -> Self {
        Self { options: Options::new(Lane::DEFAULT), task: Task::Failed(error) }
    }

    /// Creates an operation of several requests. `steps` receives the caller's options.
    pub(crate) fn steps<F>(steps: impl FnOnce(Options<'a>) -> F + Send + 'a) -> Self
    where
        F: Future<Output = Result<T>> + Send + 'a,
    {
        let task = Task::Many(Box::new(move |options| Box::pin(steps(options))));
        Self { options: Options::new(Lane::DEFAULT), task }
    }

    /// Creates an operation like [`steps`](Self::steps), for steps that yield a reference, which
    /// `convert` turns into the result.
    pub(crate) fn steps_to_reference<F>(
        steps: impl FnOnce(Options<'a>) -> F + Send + 'a,
        convert: fn(PinnedReference) -> Result<T>,
    ) -> Self
    where
        F: Future<Output = Result<PinnedReference>> + Send + 'a,
    {
        let task = Task::Reference(Box::new(move |options| Box::pin(steps(options))), convert);
        Self { options: Options::new(Lane::DEFAULT), task }
    }

    /// Moves the operation to `lane`. The default is [`Lane::DEFAULT`], except for
    /// [`Session::callback`](crate::Session::callback), which is concurrent.
    pub fn lane(mut self, lane: Lane) -> Self {
        self.options.lane = lane;
        self
    }

    /// Lets the operation run concurrently with all others. Of an operation with several requests,
    /// each does.
    pub fn concurrent(self) -> Self {
        self.lane(Lane::CONCURRENT)
    }

    /// Fails the operation at `deadline` with [`ErrorKind::DeadlineExceeded`].
    pub fn deadline(mut self, deadline: Instant) -> Self {
        self.options.deadline = Some(deadline);
        self
    }

    /// Sets the [`deadline`](Self::deadline) to `timeout` from now.
    pub fn timeout(self, timeout: Duration) -> Self {
        match crate::clock::now().checked_add(timeout) {
            Some(deadline) => self.deadline(deadline),
            None => self,
        }
    }

    /// Sets the span that the operation belongs to. The default is the [current](trace::current)
    /// one when it starts.
    pub fn trace(mut self, trace: TraceContext) -> Self {
        self.options.trace = Some(trace);
        self
    }

    /// Calls `progress` with the bytes that have been transferred so far, after each piece of a
    /// copy, a file or a module. Operations that transfer nothing never call it.
    pub fn progress(mut self, progress: impl FnMut(u64) + Send + 'a) -> Self {
        *self.options.progress.get_mut() = Some(Box::new(progress));
        self
    }

    /// Submits the operation without waiting for it. Of an operation with several requests this
    /// submits the first ones, and the others follow as the [pending operation](ScopedPending) is
    /// awaited.
    pub fn start(self) -> ScopedPending<'a, T> {
        let mut pending = self.prepare();
        // The caller that awaits it provides the waker that counts. A future that this is polled in
        // does not wait for the operation yet.
        if matches!(pending.0, Stage::Steps(_) | Stage::Reference(..))
            && let Poll::Ready(outcome) =
                blocking::apart(|| Pin::new(&mut pending).poll(&mut Context::from_waker(Waker::noop())))
        {
            pending.0 = Stage::Done(outcome);
        }
        pending
    }

    /// Submits a request whose result the session keeps.
    ///
    /// # Errors
    ///
    /// The operation was not submitted: [`ErrorKind::ApiMisuse`] if it cannot be such a request,
    /// [`ErrorKind::Unsupported`] if the session keeps no results.
    pub(crate) fn submit_kept(mut self) -> Result<KeptRequest> {
        let misuse = |text: &'static str| RpcError::new(ErrorKind::ApiMisuse, text);
        self.options.trace = self.options.trace.or_else(trace::current);
        let request = match self.task {
            Task::One(request) => request,
            Task::Failed(error) => return Err(error),
            Task::Many(_) | Task::Reference(..) => {
                return Err(misuse("an operation of several requests has no result that a session could keep"));
            }
        };
        let OneRequest { session, operation, pins, on_reply, before, .. } = request;
        let lane = self.options.lane;
        let operation = operation?;
        if on_reply.is_some() || before.is_some() {
            return Err(misuse("this operation has no result that a session could keep"));
        }
        if lane == Lane::CONCURRENT {
            return Err(misuse("a concurrent operation has no lane on which a later one could name its result"));
        }
        if !session.keeps_results() {
            let text = "this session keeps no results for later requests: await each one, and pass it on";
            return Err(RpcError::unsupported(text));
        }
        lane_deadlock::check(&session, lane)?;
        pins.check_lane(lane)?;
        let pipe = PipeId::unused();
        let tensor = match &operation {
            Operation::Alloc { device, dtype, shape, .. } => Some(TensorRef {
                storage: pipe.handle(),
                byte_offset: 0,
                shape: shape.clone(),
                strides: None,
                dtype: *dtype,
                device: *device,
            }),
            _ => None,
        };
        let name = operation.name();
        let absent = pins.names_results().then(Arc::<AbsentResult>::default);
        let on_reply = absent.clone().map(|absent| absent as Arc<dyn OnReply>);
        let submission = session.submit(Request { pipe: Some(pipe), ..self.options.request(operation) });
        // The references go with the reply, however long the result lives: each result of a loop
        // would keep the one before it otherwise.
        let submission = submission.inspect(move |outcome| {
            if let (Some(absent), Err(error)) = (absent, outcome)
                && error.kind() == ErrorKind::InvalidHandle
                && let Some(error) = pins.absence()
            {
                _ = absent.0.set(error);
            }
            pins.discard();
        });
        let pins = RequestPins::default();
        let reply = Reply { session: session.clone(), convert: <()>::from_reply, pins, on_reply };
        let pending = ScopedPending(Stage::Submitted(submission, reply));
        Ok(KeptRequest { session, handle: pipe.handle(), lane, pending, name, tensor })
    }

    /// Performs the operation on the calling thread.
    ///
    /// # Errors
    ///
    /// Those of the operation, and [`ErrorKind::ApiMisuse`] inside an async runtime.
    pub fn wait(self) -> Result<T> {
        // Nothing is submitted before it is known that waiting is possible.
        blocking::block_on(async { self.prepare().await })?
    }

    /// Submits a single request, or creates the future of several, which begin when it is polled.
    fn prepare(mut self) -> ScopedPending<'a, T> {
        self.options.trace = self.options.trace.or_else(trace::current);
        ScopedPending(match self.task {
            Task::One(OneRequest { session, operation, pins, on_reply, before, convert }) => {
                let allowed = operation.and_then(|operation| {
                    lane_deadlock::check(&session, self.options.lane)?;
                    pins.check_lane(self.options.lane)?;
                    Ok(operation)
                });
                match allowed {
                    Ok(operation) => {
                        if let Some(before) = before {
                            before(&session);
                        }
                        let submission = session.submit(self.options.request(operation));
                        let reply = Reply { session, convert, pins, on_reply };
                        Stage::Submitted(submission, reply)
                    }
                    Err(error) => Stage::Done(Err(error)),
                }
            }
            Task::Many(steps) => Stage::Steps(steps(self.options)),
            Task::Reference(steps, convert) => Stage::Reference(steps(self.options), convert),
            Task::Failed(error) => Stage::Done(Err(error)),
        })
    }
}

impl<'a, T> IntoFuture for ScopedAction<'a, T> {
    type Output = Result<T>;
    type IntoFuture = ScopedPending<'a, T>;

    fn into_future(self) -> ScopedPending<'a, T> {
        self.prepare()
    }
}

impl<T> fmt::Debug for ScopedAction<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let operation = match &self.task {
            Task::One(OneRequest { operation: Ok(operation), .. }) => operation.name(),
            Task::One(OneRequest { operation: Err(_), .. }) | Task::Failed(_) => "invalid",
            Task::Many(_) | Task::Reference(..) => "several requests",
        };
        write!(f, "Action({operation})")
    }
}

/// A started operation. Dropping it cancels the operation if it has not begun.
#[must_use = "dropping a pending operation cancels it"]
pub struct ScopedPending<'a, T>(Stage<'a, T>);

enum Stage<'a, T> {
    Submitted(Submission, Reply<T>),
    Admitted(PendingReply, Reply<T>),
    Steps(Steps<'a, T>),
    Reference(Steps<'a, PinnedReference>, fn(PinnedReference) -> Result<T>),
    Done(Result<T>),
    /// The outcome has been taken.
    Taken,
}

/// Handling of a reply that has not arrived yet.
struct Reply<T> {
    session: SharedSession,
    convert: fn(Value, &SharedSession) -> Result<T>,
    pins: RequestPins,
    on_reply: Option<Arc<dyn OnReply>>,
}

impl<T> Reply<T> {
    fn take(&self, outcome: Result<Value>) -> Result<T> {
        let value = outcome.map_err(|error| {
            let error = match error.kind() {
                ErrorKind::InvalidHandle => self.pins.absence().unwrap_or(error),
                _ => error,
            };
            match &self.on_reply {
                Some(observer) => observer.failed(error),
                None => error,
            }
        })?;
        if let Some(observer) = &self.on_reply {
            observer.succeeded();
        }
        (self.convert)(value, &self.session)
    }
}

impl<T> ScopedPending<'_, T> {
    /// Resolves when the operation is admitted, that is, when its position in its lane is fixed;
    /// this is where a full queue is felt. The requests of an operation of several are admitted one
    /// after the other, and this resolves at once.
    ///
    /// # Errors
    ///
    /// The reason for the refusal. The operation itself then fails with the same error.
    pub async fn admitted(&mut self) -> Result<()> {
        if let Stage::Submitted(submission, _) = &mut self.0 {
            let admitted = submission.await;
            self.0 = match (admitted, std::mem::replace(&mut self.0, Stage::Taken)) {
                (Ok(pending), Stage::Submitted(_, reply)) => Stage::Admitted(pending, reply),
                (Err(error), _) => Stage::Done(Err(error)),
                (Ok(_), other) => other,
            };
        }
        match &self.0 {
            Stage::Done(Err(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Asks for cancellation and keeps waiting for the terminal reply. An operation of several
    /// requests ends at once with [`ErrorKind::Cancelled`]: requests that have not begun are
    /// cancelled, and the others may have run. One that is running is not waited for: it may go on
    /// after this answer, and read or write the tensors and files of the operation until it ends.
    pub fn cancel(&mut self) {
        match &mut self.0 {
            Stage::Submitted(submission, _) => submission.cancel(),
            Stage::Admitted(pending, _) => pending.cancel(),
            steps @ (Stage::Steps(_) | Stage::Reference(..)) => {
                let error = RpcError::new(ErrorKind::Cancelled, "the operation was cancelled on its way");
                *steps = Stage::Done(Err(error.may_have_run(true)));
            }
            Stage::Done(_) | Stage::Taken => {}
        }
    }

    /// Waits on the calling thread.
    ///
    /// # Errors
    ///
    /// As [`ScopedAction::wait`].
    pub fn wait(self) -> Result<T> {
        blocking::block_on(self)?
    }
}

/// Nothing in a pending operation is pinned in place: the futures of steps are boxed.
impl<T> Unpin for ScopedPending<'_, T> {}

impl<T> Future for ScopedPending<'_, T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        loop {
            let stage = &mut self.0;
            match stage {
                Stage::Submitted(submission, _) => {
                    let Poll::Ready(admitted) = Pin::new(submission).poll(cx) else { return Poll::Pending };
                    let Stage::Submitted(_, reply) = std::mem::replace(stage, Stage::Taken) else { continue };
                    *stage = match admitted {
                        Ok(pending) => Stage::Admitted(pending, reply),
                        Err(error) => Stage::Done(Err(error)),
                    };
                }
                Stage::Admitted(pending, reply) => {
                    let Poll::Ready(outcome) = Pin::new(pending).poll(cx) else { return Poll::Pending };
                    let outcome = reply.take(outcome);
                    *stage = Stage::Taken;
                    return Poll::Ready(outcome);
                }
                Stage::Steps(steps) => {
                    let Poll::Ready(outcome) = steps.as_mut().poll(cx) else { return Poll::Pending };
                    *stage = Stage::Taken;
                    return Poll::Ready(outcome);
                }
                Stage::Reference(steps, convert) => {
                    let Poll::Ready(outcome) = steps.as_mut().poll(cx) else { return Poll::Pending };
                    let outcome = outcome.and_then(*convert);
                    *stage = Stage::Taken;
                    return Poll::Ready(outcome);
                }
                Stage::Done(_) => {
                    if let Stage::Done(outcome) = std::mem::replace(stage, Stage::Taken) {
                        return Poll::Ready(outcome);
                    }
                }
                Stage::Taken => {
                    return Poll::Ready(Err(RpcError::new(
                        ErrorKind::ApiMisuse,
                        "an operation was polled after its end",
                    )));
                }
            }
        }
    }
}

impl<T> fmt::Debug for ScopedPending<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{LocalSession, Registry, Session};

    #[test]
    fn operations_of_several_requests_have_the_options_of_single_ones() {
        let session = Session::new(LocalSession::new(Registry::new()));
        let tensor = session.upload(&[3], &[1.0_f32, 2.0, 3.0]).lane(Lane(7)).wait().unwrap();
        let mut seen = Vec::new();
        let mut out = [0; 8];
        let copy = session.copy_from_remote_to_slice(&tensor, 4, &mut out);
        copy.progress(|bytes| seen.push(bytes)).timeout(Duration::from_secs(20)).wait().unwrap();
        assert_eq!((seen, out), (vec![8], [0, 0, 0, 64, 0, 0, 64, 64]));
        assert_eq!(session.download::<f32>(&tensor).concurrent().wait().unwrap(), [1.0, 2.0, 3.0]);

        let late = session.upload(&[1], &[1_u8]).deadline(Instant::now()).wait();
        assert_eq!(late.err().map(|error| error.kind()), Some(ErrorKind::DeadlineExceeded));
        let wrong = session.upload(&[2], &[1_u8]).wait();
        assert_eq!(wrong.err().map(|error| error.kind()), Some(ErrorKind::InvalidArgument));
    }

    #[test]
    fn an_operation_of_several_requests_starts_without_being_awaited_and_can_be_cancelled() {
        let registry = Registry::new();
        let (sender, started) = std::sync::mpsc::channel();
        let (release, wait) = std::sync::mpsc::channel::<()>();
        let wait = std::sync::Mutex::new(wait);
        registry.add("hold", move || sender.send(()).is_ok() && wait.lock().is_ok_and(|wait| wait.recv().is_ok()));
        let session = Session::new(LocalSession::new(registry));
        let tensor = session.upload(&[1], &[1_u8]).start().wait().unwrap();
        let held = session.get_function("hold").wait().unwrap().call::<bool>(()).start();
        started.recv().unwrap();
        // Behind the function that holds the lane.
        let mut copy = session.copy_to_remote(&tensor, vec![2]).start();
        copy.cancel();
        let error = copy.wait().unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::Cancelled, true));
        release.send(()).unwrap();
        assert!(held.wait().unwrap());
        assert_eq!(session.download::<u8>(&tensor).wait().unwrap(), [1]);
    }
}
