//! Operations that an event loop of asyncio drives.
//!
//! The loop itself polls the futures. A future that can go on is put into a queue by whatever
//! thread woke it, and that thread writes a byte into a pipe that the loop watches: it needs the
//! interpreter for nothing, so that no Python code can hold up the input and output of sessions.
//! One byte serves all futures that become ready until the loop has looked.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::errors;
use crate::form::Form;
use crate::operation::{Operation, Work};

/// The queue of one event loop.
struct Queue {
    ready: Mutex<Vec<Arc<Running>>>,
    /// True while a byte is in the pipe that the loop has not seen.
    is_signalled: AtomicBool,
    reader: OwnedFd,
    writer: OwnedFd,
}

/// An operation that a loop drives.
struct Running {
    work: Mutex<Option<Work>>,
    /// The future of asyncio that gets the outcome.
    future: Py<PyAny>,
    queue: Arc<Queue>,
    is_queued: AtomicBool,
}

impl Wake for Running {
    fn wake(self: Arc<Self>) {
        if self.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let queue = self.queue.clone();
        queue.ready.lock().push(self);
        if !queue.is_signalled.swap(true, Ordering::AcqRel) {
            // A pipe that is full has been signalled.
            let _ = rustix::io::write(&queue.writer, &[1]);
        }
    }
}

impl Running {
    /// Lets the operation go on, and hands its outcome over once it is there.
    fn poll(self: &Arc<Self>, py: Python<'_>) -> PyResult<()> {
        self.is_queued.store(false, Ordering::Release);
        let waker = Waker::from(self.clone());
        let mut slot = self.work.lock();
        let Some(work) = slot.as_mut() else { return Ok(()) };
        let Poll::Ready(outcome) = work.as_mut().poll(&mut Context::from_waker(&waker)) else { return Ok(()) };
        let done = slot.take();
        drop(slot);
        drop(done);
        let outcome = match outcome {
            Ok(finish) => finish(py, Form::Asyncio),
            Err(error) => Err(errors::exception(py, &error)),
        };
        let future = self.future.bind(py);
        if future.call_method0("done")?.is_truthy()? {
            return Ok(());
        }
        match outcome {
            Ok(object) => future.call_method1("set_result", (object,))?,
            Err(error) => future.call_method1("set_exception", (error,))?,
        };
        Ok(())
    }
}

/// What drives the operations of one event loop of asyncio.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct EventLoop(Arc<Queue>);

#[pymethods]
impl EventLoop {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(std::io::Error::from)?;
        let (ready, is_signalled) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self(Arc::new(Queue { ready, is_signalled, reader, writer })))
    }

    /// The descriptor that is readable while operations can go on.
    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// Begins an operation, whose outcome `future` gets.
    fn start(&self, py: Python<'_>, operation: &Operation, future: Py<PyAny>) -> PyResult<Task> {
        let work = Mutex::new(Some(operation.take()?));
        let running = Arc::new(Running { work, future, queue: self.0.clone(), is_queued: AtomicBool::new(false) });
        running.poll(py)?;
        Ok(Task(running))
    }

    /// Lets all operations go on that can.
    fn run_ready(&self, py: Python<'_>) -> PyResult<()> {
        let mut bytes = [0_u8; 16];
        let _ = rustix::io::read(&self.0.reader, &mut bytes);
        self.0.is_signalled.store(false, Ordering::Release);
        let ready = std::mem::take(&mut *self.0.ready.lock());
        for running in ready {
            running.poll(py)?;
        }
        Ok(())
    }
}

/// An operation that a loop drives.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct Task(Arc<Running>);

#[pymethods]
impl Task {
    /// Cancels the operation, unless it is over.
    fn cancel(&self) {
        let work = self.0.work.lock().take();
        drop(work);
    }
}
