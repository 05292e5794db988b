//! Operations of sessions, and threads that wait for them.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use rpc_core::blocking::{STOP_INTERVAL, block_on_unless};
use rpc_core::{Action, Lane, Result};

use crate::errors;
use crate::form::Form;

/// Makes the object that an operation returns.
pub(crate) type Finish = Box<dyn FnOnce(Python<'_>, Form) -> PyResult<Py<PyAny>> + Send>;

/// An operation in progress.
pub(crate) type Work = Pin<Box<dyn Future<Output = Result<Finish>> + Send>>;

/// Number of forks that lead to this process.
static FORKS: AtomicU64 = AtomicU64::new(0);

/// Records that this process is the child of a fork: nothing that was made before works here.
#[pyfunction]
pub(crate) fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that something was made in.
#[derive(Clone, Copy)]
pub(crate) struct Birth(u64);

impl Birth {
    pub(crate) fn now() -> Self {
        Self(FORKS.load(Ordering::Relaxed))
    }

    /// Fails in the child of a fork.
    pub(crate) fn check(self) -> PyResult<()> {
        if self.0 == FORKS.load(Ordering::Relaxed) { Ok(()) } else { Err(errors::forked()) }
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
        let work = async move {
            let outcome = work.await?;
            let finish: Finish = Box::new(move |py, form| finish(py, form, outcome));
            Ok(finish)
        };
        Self(Mutex::new(Some(Box::pin(work))))
    }

    /// An operation without a return value.
    pub(crate) fn unit(work: impl Future<Output = Result<()>> + Send + 'static) -> Self {
        Self::new(work, |py, _, ()| Ok(py.None()))
    }

    pub(crate) fn take(&self) -> PyResult<Work> {
        let work = self.0.lock().take();
        work.ok_or_else(|| PyRuntimeError::new_err("an operation can be waited for once"))
    }
}

#[pymethods]
impl Operation {
    /// Performs the operation. A signal whose handler raises, such as Ctrl-C, cancels it.
    fn wait(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let work = self.take()?;
        wait(py, work)?(py, Form::Blocking)
    }
}

/// Waits for `work`, detached from the interpreter.
///
/// # Errors
///
/// Its error as an exception, and what handlers of signals raise meanwhile.
pub(crate) fn wait<T: Send>(py: Python<'_>, work: impl Future<Output = Result<T>> + Send) -> PyResult<T> {
    let outcome = py.detach(move || {
        let asked = RefCell::new((Instant::now(), None));
        let stop = || {
            let (last, raised) = &mut *asked.borrow_mut();
            // A signal interrupts the wait, so that this is asked at once. Attaching to the
            // interpreter each time that something arrives would cost more than the call.
            if last.elapsed() < STOP_INTERVAL / 50 {
                return false;
            }
            *last = Instant::now();
            *raised = Python::attach(|py| py.check_signals()).err();
            raised.is_some()
        };
        let outcome = block_on_unless(work, &stop);
        (outcome, asked.into_inner().1)
    });
    match outcome {
        (Ok(Some(outcome)), _) => outcome.map_err(|error| errors::exception(py, &error)),
        (Ok(None), raised) => Err(raised.unwrap_or_else(|| PyRuntimeError::new_err("a wait was stopped"))),
        (Err(error), _) => Err(errors::exception(py, &error)),
    }
}

/// Options that every operation has.
#[derive(Clone, Copy, Default, FromPyObject)]
#[pyo3(from_item_all)]
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
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let timeout = Duration::try_from_secs_f64(self.timeout?).ok()?;
        Instant::now().checked_add(timeout)
    }

    pub(crate) fn apply<T>(&self, action: Action<T>) -> Action<T> {
        let action = match self.lane {
            Some(lane) => action.lane(Lane(lane)),
            None => action,
        };
        match self.deadline() {
            Some(deadline) => action.deadline(deadline),
            None => action,
        }
    }
}
