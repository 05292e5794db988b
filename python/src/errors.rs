//! Errors of operations as exceptions of Python.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rpc_core::{ErrorKind, RpcError};

/// Returns the exception for `error`: one of the classes of `tensor_rpc._errors`.
pub(crate) fn exception(py: Python<'_>, error: &RpcError) -> PyErr {
    let made = py.import("tensor_rpc._errors").and_then(|module| module.getattr("from_facts")?.call1(facts(error)));
    match made {
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
/// its traceback.
pub(crate) fn error_of(py: Python<'_>, exception: &PyErr) -> RpcError {
    let value = exception.value(py);
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

/// The error of a session that was made before a fork, in the child.
pub(crate) fn forked() -> PyErr {
    PyRuntimeError::new_err(
        "this session was made before the process forked, and its connection belongs to the parent: connect in the \
         child, or start children with multiprocessing's method \"spawn\"",
    )
}
