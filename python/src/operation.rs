//! Operations of sessions, and threads that wait for them.

use std::cell::Cell;
use std::future::{Future, IntoFuture as _, poll_fn};
use std::mem::ManuallyDrop;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use rpc_core::blocking::block_on_unless;
use rpc_core::{Action, ErrorKind, FromReply, Lane, Pending, Pipe, Result, RpcError, ScopedAction};

use crate::attach::attached;
use crate::errors;
use crate::form::Form;

/// Makes the object that an operation returns.
pub(crate) type Finish = Box<dyn FnOnce(Python<'_>, Form) -> PyResult<Py<PyAny>> + Send>;

/// Future of an operation.
type Steps = Pin<Box<dyn Future<Output = Result<Finish>> + Send>>;

/// Number of forks that lead to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Records that this process is the child of a fork: nothing that was made before works here.
#[pyfunction]
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// Time that requests to servers of TVM have at the end of the interpreter to be written.
const LAST_REQUESTS: Duration = Duration::from_secs(5);

/// Waits at the end of the interpreter until no request to a server of TVM is written in part.
#[pyfunction]
pub(crate) fn finish_requests(py: Python<'_>) {
    // The threads that write were not copied by a fork.
    if FORKS.load(Ordering::Relaxed) == 0 {
        py.detach(|| rpc_server::finish_tvm_requests(LAST_REQUESTS));
    }
}

/// The process that something was made in.
#[derive(Clone, Copy)]
pub(crate) struct Birth(u64);

impl Birth {
    pub(crate) fn now() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Returns true in the process that something was made in.
    pub(crate) fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }

    /// Fails in the child of a fork.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.is_here() { Ok(()) } else { Err(errors::forked()) }
    }
}

/// Records that this process uses threads of the package, which the child of a fork does not have.
///
/// # Errors
///
/// The parent of this process has used them before it forked.
pub(crate) fn use_threads() -> PyResult<()> {
    /// Number of forks when the threads were first used, from 1 on.
    static USED: AtomicU64 = AtomicU64::new(0);
    let now = FORKS.load(Ordering::Relaxed) + 1;
    match USED.compare_exchange(0, now, Ordering::Relaxed, Ordering::Relaxed) {
        Err(used) if used != now => Err(errors::forked_with_threads()),
        _ => Ok(()),
    }
}

/// A part of a session. In the child of a fork it does not work, and is not dropped: a lock in it
/// may have been held by a thread that the child does not have.
pub(crate) struct Born<T> {
    part: ManuallyDrop<T>,
    birth: Birth,
}

impl<T> Born<T> {
    pub(crate) fn new(part: T) -> Self {
        Self { part: ManuallyDrop::new(part), birth: Birth::now() }
    }

    /// Returns the part.
    ///
    /// # Errors
    ///
    /// In the child of a fork.
    pub(crate) fn get(&self) -> PyResult<&T> {
        self.birth.check()?;
        Ok(&self.part)
    }

    /// Returns the part, of which no lock may be taken.
    pub(crate) fn facts(&self) -> &T {
        &self.part
    }
}

impl<T: Clone> Clone for Born<T> {
    fn clone(&self) -> Self {
        Self { part: self.part.clone(), birth: self.birth }
    }
}

impl<T> Drop for Born<T> {
    fn drop(&mut self) {
        if self.birth.is_here() {
            // SAFETY: nothing uses the part after this.
            unsafe { ManuallyDrop::drop(&mut self.part) }
        }
    }
}

/// An operation in progress.
pub(crate) struct Work {
    steps: Born<Steps>,
    /// True if a poll may copy much or read files: the thread is detached from the interpreter
    /// meanwhile.
    is_heavy: bool,
}

impl Work {
    /// Lets the operation go on, on a thread that is attached to the interpreter.
    pub(crate) fn poll(&mut self, py: Python<'_>, waker: &std::task::Waker) -> Poll<Result<Finish>> {
        let steps = self.steps.part.as_mut();
        if self.is_heavy {
            py.detach(|| steps.poll(&mut Context::from_waker(waker)))
        } else {
            steps.poll(&mut Context::from_waker(waker))
        }
    }
}

impl Future for Work {
    type Output = Result<Finish>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.steps.part.as_mut().poll(cx)
    }
}

/// An operation that has not begun: it does nothing until it is waited for, once.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct Operation(Mutex<Option<Work>>);

impl Operation {
    /// An operation whose outcome `finish` makes an object of.
    pub(crate) fn new<T: Send + 'static>(
        work: impl Future<Output = Result<T>> + Send + 'static,
        finish: impl FnOnce(Python<'_>, Form, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        let steps = async move {
            let outcome = work.await?;
            let finish: Finish = Box::new(move |py, form| finish(py, form, outcome));
            Ok(finish)
        };
        Self(Mutex::new(Some(Work { steps: Born::new(Box::pin(steps)), is_heavy: false })))
    }

    /// An operation of one action, such as a call: it costs less than a future around it.
    pub(crate) fn action<T: Send + 'static>(
        options: Options,
        action: Action<T>,
        finish: impl FnOnce(Python<'_>, Form, T) -> PyResult<Py<PyAny>> + Send + Unpin + 'static,
    ) -> Self {
        let steps = OneAction { stage: ActionStage::New(options, action), finish: Some(finish) };
        Self(Mutex::new(Some(Work { steps: Born::new(Box::pin(steps)), is_heavy: false })))
    }

    /// An operation without a return value.
    pub(crate) fn unit(work: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        Self::new(work, |py, _, ()| Ok(py.None()))
    }

    /// An operation like [`new`](Self::new) that calls code of the user on its way, and ends with
    /// what that raises.
    pub(crate) fn with_calls<T: Send + 'static>(
        calls: &UserCalls,
        work: impl Future<Output = Result<T>> + Send + 'static,
        finish: impl FnOnce(Python<'_>, Form, T) -> PyResult<Py<PyAny>> + Send + 'static,
    ) -> Self {
        let calls = calls.clone();
        let mut work = Box::pin(work);
        let work = poll_fn(move |cx| {
            let polled = work.as_mut().poll(cx);
            match calls.raised() {
                Some(exception) => Poll::Ready(Ok(Err(exception))),
                None => polled.map(|outcome| outcome.map(Ok)),
            }
        });
        Self::new(work, |py, form, outcome| finish(py, form, outcome?)).heavy()
    }

    /// Marks an operation that may copy much or read files while it is polled.
    pub(crate) fn heavy(mut self) -> Self {
        if let Some(work) = self.0.get_mut() {
            work.is_heavy = true;
        }
        self
    }

    pub(crate) fn take(&self) -> PyResult<Work> {
        let work = self.0.lock().take();
        let work = work.ok_or_else(|| PyRuntimeError::new_err("an operation can be waited for once"))?;
        work.steps.birth.check()?;
        Ok(work)
    }
}

#[pymethods]
impl Operation {
    /// Performs the operation. A signal whose handler raises, such as Ctrl-C, cancels it.
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let work = self.take()?;
        wait(py, work)?(py, Form::Blocking)
    }

    /// Returns the operation whose outcome is what `function` makes of this one's.
    fn then(&self, function: Py<PyAny>) -> PyResult<Self> {
        let work = self.take()?;
        let is_heavy = work.is_heavy;
        let made = Self::new(work, move |py, form, finish: Finish| function.call1(py, (finish(py, form)?,)));
        Ok(if is_heavy { made.heavy() } else { made })
    }
}

/// An operation of one action.
struct OneAction<T, F> {
    stage: ActionStage<T>,
    finish: Option<F>,
}

/// An action that is submitted by its first poll, and not before: a thread that may not wait
/// submits nothing, and its request is encoded while it is detached from the interpreter.
enum ActionStage<T> {
    New(Options, Action<T>),
    Begun(Pending<T>),
    Over,
}

impl<T: Send + 'static> ActionStage<T> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if let Self::New(..) = self
            && let Self::New(options, action) = std::mem::replace(self, Self::Over)
        {
            *self = Self::Begun(options.apply(action).into_future());
        }
        let Self::Begun(pending) = self else { return Poll::Pending };
        let polled = Pin::new(pending).poll(cx);
        if polled.is_ready() {
            *self = Self::Over;
        }
        polled
    }
}

impl<T, F> Future for OneAction<T, F>
where
    T: Send + 'static,
    F: FnOnce(Python<'_>, Form, T) -> PyResult<Py<PyAny>> + Send + Unpin + 'static,
    Self: Unpin,
{
    type Output = Result<Finish>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Poll::Ready(outcome) = this.stage.poll(cx) else { return Poll::Pending };
        let Some(finish) = this.finish.take() else { return Poll::Pending };
        Poll::Ready(outcome.map(|outcome| {
            let finish: Finish = Box::new(move |py, form| finish(py, form, outcome));
            finish
        }))
    }
}

/// Waits for `work`, detached from the interpreter.
///
/// # Errors
///
/// Its error as an exception, and what handlers of signals raise meanwhile.
pub(crate) fn wait<T: Send>(py: Python<'_>, work: impl Future<Output = Result<T>> + Send) -> PyResult<T> {
    let mut work = pin!(work);
    loop {
        let work = work.as_mut();
        let outcome = py.detach(move || {
            let asked = Cell::new(0);
            // Asked by the session, with its lock held: so it may not wait for the interpreter,
            // which a thread may have that waits for the lock. A signal interrupts a wait, so that
            // this is asked at once.
            let stop = || {
                asked.set(asked.get() + 1);
                asked.get() > ASKED_BEFORE_A_WAIT && is_main_thread()
            };
            block_on_unless(work, &stop)
        });
        match outcome {
            Ok(Some(outcome)) => return outcome.map_err(|error| errors::exception(py, &error)),
            Ok(None) => py.check_signals()?,
            Err(error) => return Err(errors::exception(py, &error)),
        }
    }
}

/// Performs an operation of one action, such as a call, and returns its outcome.
///
/// # Errors
///
/// As [`wait`].
pub(crate) fn wait_for<T: Send + 'static>(py: Python<'_>, options: Options, action: Action<T>) -> PyResult<T> {
    // A handler of a signal may fork, and the child then raise here: it must not cancel the
    // parent's operation.
    let mut stage = Born::new(ActionStage::New(options, action));
    wait(py, poll_fn(|cx| stage.part.poll(cx)))
}

/// Number of times that a session asks if a wait should stop before it waits for the first time. To
/// look for signals each time would cost more than the call.
const ASKED_BEFORE_A_WAIT: u32 = 2;

/// Returns true on the thread that handles signals.
fn is_main_thread() -> bool {
    rustix::thread::gettid() == rustix::process::getpid()
}

/// Options that every operation has.
#[derive(Clone, Copy, Default)]
pub(crate) struct Options {
    /// Seconds until the operation fails.
    timeout: Option<f64>,
    /// Number of the lane; `u32::MAX` for one of its own.
    lane: Option<u32>,
}

impl Options {
    /// Reads the options of an operation.
    pub(crate) fn new(timeout: Option<f64>, lane: Option<u32>) -> PyResult<Self> {
        match timeout {
            Some(seconds) if seconds.is_nan() || seconds < 0.0 => {
                Err(PyValueError::new_err(format!("a timeout is a number of seconds from 0 on, and {seconds} is none")))
            }
            _ => Ok(Self { timeout, lane }),
        }
    }

    /// Returns the time at which the operation fails, counted from now.
    fn deadline(&self) -> Option<Instant> {
        let timeout = Duration::try_from_secs_f64(self.timeout?).ok()?;
        Instant::now().checked_add(timeout)
    }

    /// Returns the options of an operation that begins now.
    pub(crate) fn begin(&self) -> Limits {
        Limits { deadline: self.deadline(), lane: self.lane }
    }

    /// Applies the options to an operation of one step, which begins now.
    pub(crate) fn apply<'a, T>(&self, action: ScopedAction<'a, T>) -> ScopedAction<'a, T> {
        self.begin().apply(action)
    }

    /// Starts an operation whose result stays in the session. It is sent although the caller may
    /// wait for nothing.
    pub(crate) fn pipe<T: FromReply>(&self, action: Action<T>) -> Pipe<T> {
        let pipe = self.apply(action).pipe();
        pipe.send_soon();
        pipe
    }
}

/// Options of an operation that has begun: all steps have the same deadline.
#[derive(Clone, Copy)]
pub(crate) struct Limits {
    deadline: Option<Instant>,
    lane: Option<u32>,
}

impl Limits {
    pub(crate) fn apply<'a, T>(&self, action: ScopedAction<'a, T>) -> ScopedAction<'a, T> {
        let action = match self.lane {
            Some(lane) => action.lane(Lane(lane)),
            None => action,
        };
        self.limit(action)
    }

    /// Applies the deadline, and leaves the lane.
    pub(crate) fn limit<'a, T>(&self, action: ScopedAction<'a, T>) -> ScopedAction<'a, T> {
        match self.deadline {
            Some(deadline) => action.deadline(deadline),
            None => action,
        }
    }
}

/// Reads a number of seconds.
pub(crate) fn seconds(seconds: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(seconds)
        .map_err(|_| PyValueError::new_err(format!("{seconds} is no number of seconds from 0 on")))
}

/// Calls of the user's code during an operation, and the first exception that one has raised.
#[derive(Clone, Default)]
pub(crate) struct UserCalls(Arc<Mutex<Option<PyErr>>>);

impl UserCalls {
    /// Makes `action` report its progress to `progress`.
    pub(crate) fn report<'a, T>(
        &self,
        action: ScopedAction<'a, T>,
        progress: Option<Arc<Py<PyAny>>>,
    ) -> ScopedAction<'a, T> {
        let Some(progress) = progress else { return action };
        let calls = self.clone();
        action.progress(move |bytes| {
            calls.call(|py| progress.call1(py, (bytes,)).map(drop));
        })
    }

    /// Calls code of the user. The result is `None` if that, or an earlier call, has raised an
    /// exception.
    pub(crate) fn call<T>(&self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Option<T> {
        if self.0.lock().is_some() {
            return None;
        }
        match attached(call)? {
            Ok(outcome) => Some(outcome),
            Err(exception) => {
                *self.0.lock() = Some(exception);
                None
            }
        }
    }

    /// Fails if a call has raised an exception, which is then the outcome of the operation.
    pub(crate) fn check(&self) -> Result<()> {
        match &*self.0.lock() {
            Some(_) => Err(RpcError::new(ErrorKind::Cancelled, "code that the operation has called has failed")),
            None => Ok(()),
        }
    }

    fn raised(&self) -> Option<PyErr> {
        self.0.lock().take()
    }
}
