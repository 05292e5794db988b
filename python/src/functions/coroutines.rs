//! Coroutines: asynchronous functions of Python, all on one event loop of the process, which runs
//! on a thread of its own.
//!
//! A call waits in a queue until the loop takes it. Whoever queues a call writes a byte into a pipe
//! that the loop watches, and needs the interpreter for nothing.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rpc_core::function::{BoxFuture, LocalValue};
use rpc_core::tensor::Borrow;
use rpc_core::{ErrorKind, Result, RpcError};
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::sync::oneshot;

use super::Definition;
use super::frame::Frame;
use crate::errors;
use crate::operation::Birth;

/// Queue of the event loop.
struct Queue {
    calls: Mutex<Vec<Arc<Call>>>,
    /// True while a byte is in the pipe that the loop has not seen.
    is_signalled: AtomicBool,
    reader: OwnedFd,
    writer: OwnedFd,
}

/// The queue of this process. There is one once a registry has a coroutine.
static QUEUE: Mutex<Option<(Birth, Arc<Queue>)>> = Mutex::new(None);

impl Queue {
    /// Returns the queue of this process.
    fn here() -> Option<Arc<Self>> {
        QUEUE.lock().as_ref().filter(|(birth, _)| birth.is_here()).map(|(_, queue)| queue.clone())
    }

    fn push(&self, call: Arc<Call>) {
        self.calls.lock().push(call);
        if !self.is_signalled.swap(true, Ordering::AcqRel) {
            // A pipe that is full has been signalled.
            let _ = rustix::io::write(&self.writer, &[1]);
        }
    }
}

/// A call of a coroutine.
struct Call {
    definition: Arc<Definition>,
    frame: Arc<Frame>,
    values: Mutex<Option<Vec<LocalValue>>>,
    reply: Mutex<Option<oneshot::Sender<Result<LocalValue>>>>,
    is_cancelled: AtomicBool,
}

impl Call {
    fn complete(&self, outcome: Result<LocalValue>) {
        let reply = self.reply.lock().take();
        self.frame.end();
        if let Some(reply) = reply {
            // The caller may have gone.
            let _ = reply.send(outcome);
        }
    }
}

/// Future of a call. Dropping it cancels the coroutine.
struct Pending {
    call: Arc<Call>,
    outcome: oneshot::Receiver<Result<LocalValue>>,
    is_done: bool,
}

impl Future for Pending {
    type Output = Result<LocalValue>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.outcome).poll(cx).map(|outcome| {
            self.is_done = true;
            outcome.unwrap_or_else(|_| Err(RpcError::new(ErrorKind::Closed, "the event loop of coroutines has ended")))
        })
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_done
            && let Some(queue) = Queue::here()
        {
            self.call.is_cancelled.store(true, Ordering::Release);
            queue.push(self.call.clone());
        }
    }
}

/// Queues a call of a coroutine.
pub(super) fn start(
    definition: Arc<Definition>,
    context: &rpc_core::Context,
    values: Vec<LocalValue>,
    borrows: Vec<Borrow>,
) -> BoxFuture {
    let Some(queue) = Queue::here() else {
        return Box::pin(async { Err(RpcError::internal("a coroutine without an event loop")) });
    };
    let (reply, outcome) = oneshot::channel();
    let call = Arc::new(Call {
        definition,
        frame: Frame::new(context, borrows),
        values: Mutex::new(Some(values)),
        reply: Mutex::new(Some(reply)),
        is_cancelled: AtomicBool::new(false),
    });
    queue.push(call.clone());
    Box::pin(Pending { call, outcome, is_done: false })
}

/// A call of a coroutine, as the event loop has it.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct CoroutineCall(Arc<Call>);

#[pymethods]
impl CoroutineCall {
    /// Number by which a call that comes again, to be cancelled, is recognised.
    #[getter]
    fn id(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// True if nobody waits for the outcome any more.
    #[getter]
    fn is_cancelled(&self) -> bool {
        self.0.is_cancelled.load(Ordering::Acquire) || self.0.frame.context.is_cancelled()
    }

    /// Converts the arguments and returns the coroutine; `None` if the call has failed.
    fn begin(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let values = self.0.values.lock().take()?;
        match self.0.definition.call(py, &self.0.frame, values) {
            Ok(coroutine) => Some(coroutine.unbind()),
            Err(error) => {
                self.0.complete(Err(error));
                None
            }
        }
    }

    /// Completes the call.
    fn finish(&self, returned: Bound<'_, PyAny>) {
        let value = self.0.definition.value_of(&self.0.frame, returned);
        self.0.complete(value);
    }

    /// Completes the call with an exception.
    fn fail(&self, py: Python<'_>, error: Bound<'_, PyAny>) {
        self.0.complete(Err(errors::error_of(py, &PyErr::from_value(error)).may_have_run(true)));
    }
}

/// Makes the queue of this process, and returns the descriptor that is readable while calls wait.
#[pyfunction]
pub(crate) fn coroutine_queue() -> PyResult<i32> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(std::io::Error::from)?;
    let queue = Queue { calls: Mutex::default(), is_signalled: AtomicBool::new(false), reader, writer };
    let mut slot = QUEUE.lock();
    let (_, queue) = match &*slot {
        Some(made) if made.0.is_here() => made,
        _ => slot.insert((Birth::now(), Arc::new(queue))),
    };
    Ok(queue.reader.as_raw_fd())
}

/// Takes the calls that wait.
#[pyfunction]
pub(crate) fn take_coroutine_calls() -> PyResult<Vec<CoroutineCall>> {
    let queue = Queue::here().ok_or_else(|| PyRuntimeError::new_err("there is no queue"))?;
    let mut bytes = [0_u8; 16];
    let _ = rustix::io::read(&queue.reader, &mut bytes);
    queue.is_signalled.store(false, Ordering::Release);
    let calls = std::mem::take(&mut *queue.calls.lock());
    Ok(calls.into_iter().map(CoroutineCall).collect())
}
