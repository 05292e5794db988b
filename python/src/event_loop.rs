//! Operations that an event loop of asyncio drives.
//!
//! The loop itself polls the futures. A future that can go on is put into a queue by whatever
//! thread woke it, and that thread writes a byte into a pipe that the loop watches: it needs the
//! interpreter for nothing, so that no Python code can hold up the input and output of sessions.
//! One byte serves all futures that become ready until the loop has looked.
//!
//! Requests of one turn of the loop are written together, at its end: a write for each would cost
//! several times as much as the rest of a call. An operation that is alone is written at once. If
//! the loop is held up, the session writes them itself after a millisecond.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Poll, Wake, Waker};

use parking_lot::Mutex;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::blocking::{Driver, collect_drivers};
use rustix::pipe::{PipeFlags, pipe_with};

use crate::errors;
use crate::form::Form;
use crate::operation::{Birth, Operation, Work};
use crate::references::Function;

/// The queue of one event loop.
struct Queue {
    ready: Mutex<Vec<Arc<Running>>>,
    started: Mutex<Started>,
    /// Sessions that have requests to write at the end of the loop's turn.
    unwritten: Mutex<Unwritten>,
    /// Number of operations in progress.
    in_progress: AtomicUsize,
    /// True if the loop has last taken several outcomes at once: their receivers will begin several
    /// operations.
    has_several: AtomicBool,
    /// True while a byte is in the pipe that the loop has not seen.
    is_signalled: AtomicBool,
    /// True once the loop runs nothing any more.
    is_closed: AtomicBool,
    reader: OwnedFd,
    writer: OwnedFd,
    birth: Birth,
}

/// Sessions whose requests wait for the end of the loop's turn.
#[derive(Default)]
struct Unwritten {
    drivers: Vec<Arc<dyn Driver>>,
    /// True while the loop is going to call `write`.
    is_scheduled: bool,
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
    ///
    /// Adds the sessions that it waits for to `drivers`.
    fn poll(self: &Arc<Self>, py: Python<'_>, drivers: &mut Vec<Arc<dyn Driver>>) -> PyResult<()> {
        self.is_queued.store(false, Ordering::Release);
        let waker = Waker::from(self.clone());
        let Some(mut state) = self.state.try_lock() else { return Ok(()) };
        let Some((work, _)) = state.as_mut() else { return Ok(()) };
        let polled = collect_drivers(drivers, || work.poll(py, &waker));
        let over = if polled.is_ready() { self.take(&mut state) } else { None };
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
        let dropped = self.state.try_lock().and_then(|mut state| self.take(&mut state));
        drop(dropped);
    }

    /// Takes the operation, which is over.
    fn take(&self, state: &mut Option<(Work, Py<PyAny>)>) -> Option<(Work, Py<PyAny>)> {
        let taken = state.take();
        if taken.is_some() {
            self.queue.in_progress.fetch_sub(1, Ordering::Relaxed);
        }
        taken
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
            unwritten: Mutex::default(),
            in_progress: AtomicUsize::new(0),
            has_several: AtomicBool::new(false),
            is_signalled: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            reader,
            writer,
            birth: Birth::now(),
        })))
    }

    /// The descriptor that is readable while operations can go on.
    fn fileno(&self) -> i32 {
        self.0.reader.as_raw_fd()
    }

    /// Begins an operation, whose outcome `future` gets.
    fn start(slf: &Bound<'_, Self>, operation: &Operation, future: &Bound<'_, PyAny>) -> PyResult<Task> {
        let queue = &slf.get().0;
        let running = Arc::new(Running {
            state: Mutex::new(Some((operation.take()?, future.clone().unbind()))),
            queue: queue.clone(),
            is_queued: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
        });
        queue.started.lock().push(&running);
        let others = queue.in_progress.fetch_add(1, Ordering::Relaxed);
        let mut drivers = Vec::new();
        let polled = running.poll(slf.py(), &mut drivers);
        if others == 0 && !queue.has_several.load(Ordering::Relaxed) {
            drivers.iter().for_each(|driver| driver.attend());
        } else if queue.defer(&drivers) {
            let scheduled = future.call_method0(intern!(slf.py(), "get_loop")).and_then(|event_loop| {
                event_loop.call_method1(intern!(slf.py(), "call_soon"), (slf.getattr(intern!(slf.py(), "write"))?,))
            });
            if let Err(error) = scheduled {
                // The session writes by itself.
                queue.write();
                return Err(error);
            }
        }
        polled?;
        Ok(Task(running))
    }

    /// Begins a call, the most frequent operation, whose outcome `future` gets.
    fn call(
        slf: &Bound<'_, Self>,
        function: &Bound<'_, Function>,
        args: &Bound<'_, PyTuple>,
        timeout: Option<f64>,
        lane: Option<u32>,
        future: &Bound<'_, PyAny>,
    ) -> PyResult<Task> {
        let operation = function.get().call_op(args, timeout, lane, true)?;
        Self::start(slf, &operation, future)
    }

    /// Writes the requests of the loop's last turn.
    fn write(&self) {
        self.0.write();
    }

    /// Lets all operations go on that can.
    fn run_ready(&self, py: Python<'_>) {
        // The child of a fork would take the parent's bytes out of the pipe.
        if !self.0.birth.is_here() {
            return;
        }
        let mut bytes = [0_u8; 16];
        let _ = rustix::io::read(&self.0.reader, &mut bytes);
        self.0.is_signalled.store(false, Ordering::Release);
        let ready = std::mem::take(&mut *self.0.ready.lock());
        self.0.has_several.store(ready.len() > 1, Ordering::Relaxed);
        let mut drivers = Vec::new();
        let mut ready = ready.into_iter();
        while let Some(running) = ready.next() {
            let mut asked = Vec::new();
            if let Err(error) = running.poll(py, &mut asked) {
                // The others go on all the same.
                error.write_unraisable(py, None);
            }
            if !ready.as_slice().is_empty() {
                // The others may call code of the user, which takes as long as it likes.
                asked.iter().for_each(|driver| driver.attend_soon());
            }
            add_new(&mut drivers, &asked);
        }
        drivers.iter().for_each(|driver| driver.attend());
    }

    /// Gives up all operations: the loop is closed.
    fn close(&self) {
        self.0.close();
    }
}

/// Adds the sessions that are not there yet.
fn add_new(drivers: &mut Vec<Arc<dyn Driver>>, others: &[Arc<dyn Driver>]) {
    for driver in others {
        if !drivers.iter().any(|known| Arc::ptr_eq(known, driver)) {
            drivers.push(driver.clone());
        }
    }
}

impl Queue {
    /// Keeps sessions that have requests to write until [`write`](Self::write). Returns true if the
    /// loop has to be asked to call that.
    fn defer(&self, drivers: &[Arc<dyn Driver>]) -> bool {
        let mut unwritten = self.unwritten.lock();
        add_new(&mut unwritten.drivers, drivers);
        let is_new = !unwritten.drivers.is_empty() && !std::mem::replace(&mut unwritten.is_scheduled, true);
        drop(unwritten);
        // Each time, because a session looks for announced requests for a short while only.
        drivers.iter().for_each(|driver| driver.attend_soon());
        is_new
    }

    fn write(&self) {
        // In the child of a fork the requests are the parent's, and so is the socket.
        if !self.birth.is_here() {
            return;
        }
        let Unwritten { drivers, .. } = std::mem::take(&mut *self.unwritten.lock());
        drivers.iter().for_each(|driver| driver.attend());
    }

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
