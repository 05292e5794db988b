//! Objects of a session as its own functions see them: functions that they can call, modules, and
//! objects of other languages.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::Function;
use rpc_core::function::{Module, Opaque};

use super::frame::{self, Frame};
use super::values;
use crate::errors;

/// A function of the session: one that a client has given, one of a module, or a registered one.
///
/// Calling it blocks until it has returned. It may be kept, and works until the session ends.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct LocalFunction {
    function: Function,
    /// The call that has brought it.
    frame: Arc<Frame>,
}

impl LocalFunction {
    pub(super) fn of(function: Function, frame: Arc<Frame>) -> Self {
        Self { function, frame }
    }

    pub(super) fn function(&self) -> &Function {
        &self.function
    }
}

#[pymethods]
impl LocalFunction {
    /// Name that the function is registered by, or `None`.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.function.name()
    }

    /// Types of the parameters and of the result.
    #[getter]
    fn signature(&self) -> String {
        self.function.signature().to_string()
    }

    #[pyo3(signature = (*args))]
    fn __call__(&self, py: Python<'_>, args: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
        let frame = frame::current().unwrap_or_else(|| self.frame.or_detached());
        call(py, &frame, &self.function, args)
    }

    fn __repr__(&self) -> String {
        format!("<function {} of the session>", self.function.name().unwrap_or("without a name"))
    }
}

/// Calls a function from inside of the call `frame`.
pub(super) fn call(
    py: Python<'_>,
    frame: &Arc<Frame>,
    function: &Function,
    args: &Bound<'_, PyTuple>,
) -> PyResult<Py<PyAny>> {
    let args: PyResult<Vec<_>> = args.iter().map(|arg| values::outgoing(frame, &arg, 0)).collect();
    let args = args?;
    let outcome = py.detach(|| frame.call(function, args));
    frame::returned(py, frame, outcome)
}

/// A module of the session.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct LocalModule {
    module: Arc<dyn Module>,
    frame: Arc<Frame>,
}

impl LocalModule {
    pub(super) fn of(module: Arc<dyn Module>, frame: Arc<Frame>) -> Self {
        Self { module, frame }
    }

    pub(super) fn module(&self) -> &Arc<dyn Module> {
        &self.module
    }
}

#[pymethods]
impl LocalModule {
    /// Name of the module.
    #[getter]
    fn name(&self) -> &str {
        self.module.name()
    }

    /// Returns the function `name`.
    fn get_function(&self, py: Python<'_>, name: &str) -> PyResult<LocalFunction> {
        let function = py.detach(|| self.module.function(name)).map_err(|error| errors::exception(py, &error))?;
        Ok(LocalFunction::of(function, self.frame.clone()))
    }

    fn __getitem__(&self, py: Python<'_>, name: &str) -> PyResult<LocalFunction> {
        self.get_function(py, name)
    }

    fn __repr__(&self) -> String {
        format!("<module {} of the session>", self.module.name())
    }
}

/// An object of a session that is none of Python: it can be passed on, and returned.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct LocalObject(pub(super) Opaque);

#[pymethods]
impl LocalObject {
    fn __repr__(&self) -> String {
        format!("<object of {}>", self.0.type_name())
    }
}
