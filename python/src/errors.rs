//! Errors of operations as exceptions of Python.

use std::io;
use std::path::Path;

use pyo3::exceptions::{PyOSError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use rpc_core::{ErrorKind, RpcError};

/// Returns the exception for `error`: one of the classes of `tensor_rpc._errors`.
pub(crate) fn exception(py: Python<'_>, error: &RpcError) -> PyErr {
    static FROM_FACTS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let made = FROM_FACTS.import(py, "tensor_rpc._errors", "from_facts");
    match made.and_then(|from_facts| from_facts.call1(facts(error))) {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// Facts of an error, in the order of the parameters of `from_facts`.
type Facts<'a> = (&'static str, String, u16, Option<&'a str>, Option<&'a str>, Option<&'a str>, bool, bool);

fn facts(error: &RpcError) -> Facts<'_> {
    (
        error.kind().name(),
        error.message().to_owned(),
        error.hop(),
        error.peer(),
        error.backtrace(),
        error.application_kind(),
        error.request_may_have_run(),
        error.is_retryable(),
    )
}

/// Returns the error that a peer gets for an exception: its class as the application's kind, and
/// its traceback. An `RpcError` keeps its kind.
pub(crate) fn error_of(py: Python<'_>, exception: &PyErr) -> RpcError {
    // Only what has become a value knows its traceback.
    let value = exception.clone_ref(py).into_value(py);
    let value = value.bind(py);
    if let Some(error) = rpc_error(value) {
        return error;
    }
    let message = value.str().map_or_else(|_| "an exception without words".to_owned(), |text| text.to_string());
    let class = value.get_type().qualname().map_or_else(|_| "Exception".to_owned(), |name| name.to_string());
    let text = py
        .import("traceback")
        .and_then(|module| module.getattr("format_exception")?.call1((value,)))
        .and_then(|lines| pyo3::types::PyString::new(py, "").call_method1("join", (lines,)))
        .and_then(|text| text.extract::<String>());
    let error = RpcError::new(ErrorKind::Application, message).with_application_kind(class);
    match text {
        Ok(text) => error.with_backtrace(text),
        Err(_) => error,
    }
}

/// Returns the error that a peer gets for an exception of this package's own, in whose traceback
/// nothing is of interest.
pub(crate) fn error_without_traceback(py: Python<'_>, exception: &PyErr) -> RpcError {
    let value = exception.value(py);
    rpc_error(value).unwrap_or_else(|| {
        let class = value.get_type().qualname().map_or_else(|_| "Exception".to_owned(), |name| name.to_string());
        let message = value.str().map_or_else(|_| class.clone(), |text| text.to_string());
        RpcError::new(ErrorKind::Application, message).with_application_kind(class)
    })
}

/// Returns the error of a session that `value` stands for, if it is an `RpcError`.
fn rpc_error(value: &Bound<'_, pyo3::exceptions::PyBaseException>) -> Option<RpcError> {
    let class = value.py().import("tensor_rpc._errors").and_then(|module| module.getattr("RpcError")).ok()?;
    if !value.is_instance(&class).ok()? {
        return None;
    }
    let text = |name: &str| value.getattr(name).ok()?.extract::<Option<String>>().ok().flatten();
    let kind = text("kind")?;
    // Codes are given out one after the other.
    let kind = (1..=u8::MAX).map(|code| ErrorKind::from_code(code.into())).find(|known| known.name() == kind);
    let words = || value.getattr("args").ok()?.get_item(0).ok()?.extract::<String>().ok();
    let message = text("message").filter(|message| !message.is_empty()).or_else(words).unwrap_or_default();
    let mut error = RpcError::new(kind.unwrap_or(ErrorKind::Application), message);
    if let Some(traceback) = text("remote_traceback") {
        error = error.with_backtrace(traceback);
    }
    if let Some(class) = text("remote_class") {
        error = error.with_application_kind(class);
    }
    Some(error)
}

/// The error of a session that was made before a fork, in the child.
pub(crate) fn forked() -> PyErr {
    PyRuntimeError::new_err(
        "this session was made before the process forked, and its connection belongs to the parent: start processes \
         that connect themselves with multiprocessing's method \"spawn\"",
    )
}

/// The error of connecting in the child of a fork whose parent had connected before.
pub(crate) fn forked_with_threads() -> PyErr {
    PyRuntimeError::new_err(
        "the parent of this process had connected before it forked, and its threads were not copied: fork first, or \
         start processes with multiprocessing's method \"spawn\"",
    )
}

/// Returns the exception for an error of a local file.
pub(crate) fn os_error(py: Python<'_>, error: &io::Error, path: &Path) -> PyErr {
    match error.raw_os_error() {
        Some(code) => {
            let text = io::Error::from_raw_os_error(code).to_string();
            let text = text.split(" (os error").next().unwrap_or_default().to_owned();
            PyErr::from_value(match py.get_type::<PyOSError>().call1((code, text, path)) {
                Ok(exception) => exception,
                Err(error) => error.into_value(py).into_bound(py).into_any(),
            })
        }
        None => PyOSError::new_err(format!("{}: {error}", path.display())),
    }
}
