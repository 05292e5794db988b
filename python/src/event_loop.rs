//! Operations that an event loop of asyncio drives.
//!
//! The loop itself polls the futures. A future that can go on is put into a queue by whatever
//! thread woke it, and that thread writes a byte into a pipe that the loop watches: it needs the
//! interpreter for nothing, so that no Python code can hold up the input and output of sessions.
//! One byte serves all futures that become ready until the loop has looked.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Wake, Waker};

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use rustix::pipe::{PipeFlags, pipe_with};

use crate::errors;
use crate::form::Form;
use crate::operation::{Operation, Work};

/// The queue of one event loop.
struct Queue {
    ready: Mutex<Vec<Arc<Running>>>,
    started: Mutex<Started>,
    /// True while a byte is in the pipe that the loop has not seen.
    is_signalled: AtomicBool,
    /// True once the loop runs nothing any more.
    is_closed: AtomicBool,
    reader: OwnedFd,
    writer: OwnedFd,
}

/// Operations that a loop has started, and some that are over.
#[derive(Default)]
struct Started {
    operations: Vec<Weak<Running>>,
    /// Number of operations at which those that are over are removed.
    limit: usize,
}

impl Started {
    fn push(&mut self, running: &Arc<Running>) {
        if self.operations.len() >= self.limit {
            self.operations.retain(|running| running.strong_count() > 0);
            self.limit = (2 * self.operations.len()).max(64);
        }
        self.operations.push(Arc::downgrade(running));
    }
}

/// An operation that a loop drives.
struct Running {
    /// The operation, and the future of asyncio that gets its outcome. `None` once it is over, so
    /// that the future, which refers to this, can be freed.
    state: Mutex<Option<(Work, Py<PyAny>)>>,
    queue: Arc<Queue>,
    is_queued: AtomicBool,
    is_cancelled: AtomicBool,
}

impl Wake for Running {
    fn wake(self: Arc<Self>) {
        if self.is_queued.swap(true, Ordering::AcqRel) {
            return;
        }
        let queue = self.queue.clone();
        if queue.is_closed.load(Ordering::Acquire) {
            self.cancel();
            return;
        }
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
        let Some(mut state) = self.state.try_lock() else { return Ok(()) };
        let Some((work, _)) = state.as_mut() else { return Ok(()) };
        let polled = work.poll(py, &waker);
        let over = if polled.is_ready() { state.take() } else { None };
        drop(state);
        if self.is_cancelled.load(Ordering::Acquire) {
            // The operation was cancelled by code that it has called.
            self.cancel();
        }
        let (Poll::Ready(outcome), Some((work, future))) = (polled, over) else { return Ok(()) };
        drop(work);
        let outcome = match outcome {
            Ok(finish) => finish(py, Form::Asyncio),
            Err(error) => Err(errors::exception(py, &error)),
        };
        let future = future.bind(py);
        let is_set = match outcome {
            Ok(object) => future.call_method1(intern!(py, "set_result"), (object,)),
            Err(error) => future.call_method1(intern!(py, "set_exception"), (error,)),
        };
        match is_set {
            Ok(_) => Ok(()),
            // It was cancelled by code that the conversion has called.
            Err(_) if future.call_method0(intern!(py, "done"))?.is_truthy()? => Ok(()),
            // Some exceptions, such as StopIteration, cannot be an outcome.
            Err(error) => future.call_method1(intern!(py, "set_exception"), (error,)).map(drop),
        }
    }

    /// Drops the operation, unless it is being polled: then the thread that polls does.
    fn cancel(&self) {
        self.is_cancelled.store(true, Ordering::Release);
        let dropped = self.state.try_lock().and_then(|mut state| state.take());
        drop(dropped);
    }
}

/// Driver of the operations of one event loop of asyncio.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct EventLoop(Arc<Queue>);

#[pymethods]
impl EventLoop {
    #[new]
    fn new() -> PyResult<Self> {
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Self(Arc::new(Queue {
            ready: Mutex::default(),
            started: Mutex::default(),
            is_signalled: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            reader,
            writer,
        })))
    }

    /// The descriptor that is readable while operations can go on.
    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// Begins an operation, whose outcome `future` gets.
    fn start(&self, py: Python<'_>, operation: &Operation, future: Py<PyAny>) -> PyResult<Task> {
        let running = Arc::new(Running {
            state: Mutex::new(Some((operation.take()?, future))),
            queue: self.0.clone(),
            is_queued: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
        });
        self.0.started.lock().push(&running);
        running.poll(py)?;
        Ok(Task(running))
    }

    /// Lets all operations go on that can.
    fn run_ready(&self, py: Python<'_>) {
        let mut bytes = [0_u8; 16];
        let _ = rustix::io::read(&self.0.reader, &mut bytes);
        self.0.is_signalled.store(false, Ordering::Release);
        let ready = std::mem::take(&mut *self.0.ready.lock());
        for running in ready {
            if let Err(error) = running.poll(py) {
                // The others go on all the same.
                error.write_unraisable(py, None);
            }
        }
    }

    /// Gives up all operations: the loop is closed.
    fn close(&self) {
        self.0.close();
    }
}

impl Queue {
    fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        let ready = std::mem::take(&mut *self.ready.lock());
        let started = std::mem::take(&mut *self.started.lock());
        for running in started.operations.iter().filter_map(Weak::upgrade) {
            running.cancel();
        }
        drop(ready);
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// An operation that a loop drives.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct Task(Arc<Running>);

#[pymethods]
impl Task {
    /// Cancels the operation, unless it is over.
    fn cancel(&self) {
        self.0.cancel();
    }
}
