//! Programs at a session's server.

use std::io::{self, Cursor, Read};
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use rpc_core::client::{OutputStream, RemoteCommand, RemoteProcess, RunStatus};

use crate::buffer;
use crate::files::PyFile;
use crate::operation::{Born, Operation, Options, UserCalls, seconds};
use crate::session::Session;

/// Function that takes a program's output, piece by piece.
type WriteOutput = Box<dyn FnMut(&[u8]) -> io::Result<()> + Send>;

/// Bytes of output that are collected by default, as in the Rust client.
const COLLECTED_LIMIT: u64 = 16 << 20;

/// Runs a program to its end. The outcome is a tuple of exit code, signal, cause of the end, and
/// the output of both streams, as far as no function takes it.
#[pyfunction]
#[pyo3(signature = (session, program, args, options, timeout = None, lane = None))]
pub(crate) fn run_op(
    session: &Bound<'_, Session>,
    program: &str,
    args: Vec<String>,
    options: &Bound<'_, PyDict>,
    timeout: Option<f64>,
    lane: Option<u32>,
) -> PyResult<Operation> {
    let limits = Options::new(timeout, lane)?;
    let calls = UserCalls::default();
    let (mut command, has_limit) = command(session, program, args, options, &calls)?;
    let mut collected = [None, None];
    for (index, name) in ["on_stdout", "on_stderr"].into_iter().enumerate() {
        let write: WriteOutput = match given(options, name)? {
            Some(function) => {
                let (function, calls) = (function.unbind(), calls.clone());
                Box::new(move |piece| {
                    let call = |py: Python<'_>| function.call1(py, (PyBytes::new(py, piece),)).map(drop);
                    calls.call(call).ok_or_else(|| io::Error::other("a function for output has raised an exception"))
                })
            }
            None => {
                let bytes = Arc::new(Mutex::new(Vec::new()));
                collected[index] = Some(bytes.clone());
                Box::new(move |piece| {
                    bytes.lock().extend_from_slice(piece);
                    Ok(())
                })
            }
        };
        command = if index == 0 { command.on_stdout(write) } else { command.on_stderr(write) };
    }
    if !has_limit && collected.iter().any(Option::is_some) {
        command = command.output_limit(COLLECTED_LIMIT);
    }
    let work = async move { limits.apply(command.status()).await };
    Ok(Operation::with_calls(&calls, work, move |py, _, status: RunStatus| {
        let [stdout, stderr] = collected.map(|bytes| bytes.map(|bytes| PyBytes::new(py, &bytes.lock())));
        let (code, signal, ended_by) = facts(&status);
        Ok((code, signal, ended_by, stdout, stderr).into_pyobject(py)?.into_any().unbind())
    }))
}

/// Starts a program.
#[pyfunction]
#[pyo3(signature = (session, program, args, options, timeout = None))]
pub(crate) fn start_op(
    session: &Bound<'_, Session>,
    program: &str,
    args: Vec<String>,
    options: &Bound<'_, PyDict>,
    timeout: Option<f64>,
) -> PyResult<Operation> {
    let limits = Options::new(timeout, None)?;
    let calls = UserCalls::default();
    let (mut command, _) = command(session, program, args, options, &calls)?;
    if given(options, "piped_input")?.is_some_and(|piped| piped.is_truthy().unwrap_or(false)) {
        command = command.piped_input();
    }
    let work = async move { limits.apply(command.start()).await };
    Ok(Operation::with_calls(&calls, work, |py, form, process| {
        let native = Bound::new(py, Process(Born::new(process)))?;
        form.wrap(py, "Process", native.into_any()).map(Bound::unbind)
    }))
}

fn given<'py>(options: &Bound<'py, PyDict>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    Ok(options.get_item(name)?.filter(|value| !value.is_none()))
}

/// Returns the command, and true if its output is limited.
fn command(
    session: &Bound<'_, Session>,
    program: &str,
    args: Vec<String>,
    options: &Bound<'_, PyDict>,
    calls: &UserCalls,
) -> PyResult<(RemoteCommand<'static>, bool)> {
    let mut command = session.get().session(session.py())?.run(program).args(args);
    if let Some(env) = given(options, "env")? {
        let env = env.cast_into::<PyDict>().map_err(|_| PyTypeError::new_err("env is a dictionary of strings"))?;
        for (name, value) in env {
            command = command.env(name.extract::<String>()?, value.extract::<String>()?);
        }
    }
    if let Some(stdin) = given(options, "stdin")? {
        let source: Box<dyn Read + Send> = match stdin.hasattr("read")? {
            true => Box::new(PyFile::new(&stdin, calls)),
            false => Box::new(Cursor::new(buffer::bytes(&stdin)?)),
        };
        command = command.stdin(source);
    }
    if let Some(limit) = given(options, "time_limit")? {
        command = command.time_limit(seconds(limit.extract()?)?);
    }
    let output_limit = given(options, "output_limit")?;
    if let Some(limit) = &output_limit {
        command = command.output_limit(limit.extract()?);
    }
    Ok((command, output_limit.is_some()))
}

/// Returns exit code, signal and cause of the end of a program.
pub(crate) fn facts(status: &RunStatus) -> (Option<i32>, Option<i32>, Option<String>) {
    (status.code, status.signal, status.ended_by.map(|cause| cause.to_string()))
}

/// A program that runs at a session's server.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Process(Born<RemoteProcess>);

#[pymethods]
impl Process {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Waits for output: a pair of the stream's name and bytes, or `None` at the end.
    #[pyo3(signature = (timeout = None))]
    fn read_output_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let (process, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let work = async move { options.apply(process.read_output()).await };
        Ok(Operation::new(work, |py, _, piece| {
            let piece = piece.map(|(stream, piece)| {
                let name = if stream == OutputStream::Stdout { "stdout" } else { "stderr" };
                (name, PyBytes::new(py, &piece))
            });
            Ok(piece.into_pyobject(py)?.unbind())
        }))
    }

    #[pyo3(signature = (data, timeout = None))]
    fn write_input_op(&self, data: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<Operation> {
        let (process, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let data = buffer::bytes(data)?;
        Ok(Operation::unit(async move { options.apply(process.write_input(data)).await }))
    }

    fn close_input_op(&self) -> PyResult<Operation> {
        let process = self.0.get()?.clone();
        Ok(Operation::unit(async move { process.close_input().await }))
    }

    fn terminate_op(&self) -> PyResult<Operation> {
        let process = self.0.get()?.clone();
        Ok(Operation::unit(async move { process.terminate().await }))
    }

    /// Waits for the end: exit code, signal, and cause of the end.
    #[pyo3(signature = (timeout = None))]
    fn status_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let (process, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let work = async move { options.apply(process.status()).await };
        Ok(Operation::new(work, |py, _, status| Ok(facts(&status).into_pyobject(py)?.into_any().unbind())))
    }
}
