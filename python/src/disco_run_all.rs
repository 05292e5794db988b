//! Programs at the servers of all workers.

use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use rpc_core::client::OutputStream;
use rpc_core::{ErrorKind, RpcError};
use tokio::sync::Notify;

use crate::disco::{DiscoSession, exception};
use crate::operation::{Operation, UserCalls, seconds};

/// Flag that is set once this is dropped.
struct EndOnDrop(Arc<AtomicBool>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs a program for each worker, to the end of all. `on_line` is called with the worker, the name
/// of the stream and the line. The outcome is a list with exit code, signal and cause of the end,
/// by worker.
#[pyfunction]
#[pyo3(signature = (session, program, args, env, on_line, time_limit = None, output_limit = None))]
pub(crate) fn run_all_op(
    session: &DiscoSession,
    program: &str,
    args: Vec<String>,
    env: Vec<(String, String)>,
    on_line: Py<PyAny>,
    time_limit: Option<f64>,
    output_limit: Option<u64>,
) -> PyResult<Operation> {
    let mut command = session.session()?.run_all(program).args(args);
    for (name, value) in env {
        command = command.env(name, value);
    }
    if let Some(limit) = time_limit {
        command = command.time_limit(seconds(limit)?);
    }
    if let Some(limit) = output_limit {
        command = command.output_limit(limit);
    }
    let (calls, has_raised) = (UserCalls::default(), Arc::new(Notify::new()));
    let (lines, raised) = (calls.clone(), has_raised.clone());
    let end = EndOnDrop(Arc::default());
    let is_over = end.0.clone();
    let command = command.on_line(move |worker, stream, line| {
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        let stream = if stream == OutputStream::Stdout { "stdout" } else { "stderr" };
        let call = |py: Python<'_>| {
            // The caller may have gone on while this thread waited for the interpreter.
            if is_over.load(Ordering::Relaxed) {
                return Ok(());
            }
            on_line.call1(py, (worker.0, stream, PyBytes::new(py, line))).map(drop)
        };
        if lines.call(call).is_none() {
            is_over.store(true, Ordering::Relaxed);
            raised.notify_one();
        }
    });
    let work = async move {
        let _end = end;
        let (mut statuses, mut raised) = (pin!(command.status()), pin!(has_raised.notified()));
        // The lines come on another thread. Dropping the completion ends the programs.
        poll_fn(|cx| match raised.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Err(RpcError::new(ErrorKind::Cancelled, "the function for lines failed"))),
            Poll::Pending => statuses.as_mut().poll(cx).map(Ok),
        })
        .await
    };
    Ok(Operation::with_calls(&calls, work, |py, _, statuses: ::disco::Result<Vec<_>>| {
        let statuses = statuses.map_err(|error| exception(py, &error))?;
        let facts = statuses.iter().map(crate::programs::facts);
        Ok(PyList::new(py, facts.collect::<Vec<_>>())?.into_any().unbind())
    }))
}
