//! The two forms of the package's classes.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

/// Form of the objects that an operation returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// Operations block: the classes of `tensor_rpc`.
    Blocking,
    /// Operations are awaited: the classes of `tensor_rpc.aio`.
    Asyncio,
}

impl Form {
    /// Returns an instance of this form's subclass of the native `object`.
    pub(crate) fn wrap<'py>(
        self,
        py: Python<'py>,
        name: &str,
        object: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        static MODULES: [PyOnceLock<Py<PyModule>>; 2] = [PyOnceLock::new(), PyOnceLock::new()];
        let (slot, module) = match self {
            Self::Blocking => (&MODULES[0], "tensor_rpc._blocking"),
            Self::Asyncio => (&MODULES[1], "tensor_rpc.aio"),
        };
        let module = slot.get_or_try_init(py, || py.import(module).map(Bound::unbind))?;
        module.bind(py).getattr(name)?.call1((object,))
    }
}

/// Returns the class `tensor_rpc.Shape`.
pub(crate) fn shape_class<'py>(py: Python<'py>) -> PyResult<&'py Bound<'py, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    CLASS.import(py, "tensor_rpc._types", "Shape")
}
