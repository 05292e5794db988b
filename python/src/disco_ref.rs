//! Values of Disco's workers, as a class of Python.

use disco::DRef;
use pyo3::prelude::*;

use crate::operation::Birth;

/// A value that each worker has, each its own. Dropping the last reference frees the values, behind
/// all commands that use them.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct DiscoRef {
    reference: DRef,
    birth: Birth,
}

impl DiscoRef {
    pub(crate) fn of(reference: DRef) -> Self {
        Self { reference, birth: Birth::now() }
    }

    /// Returns the reference.
    ///
    /// # Errors
    ///
    /// In the child of a fork.
    pub(crate) fn reference(&self) -> PyResult<DRef> {
        self.birth.check()?;
        Ok(self.reference.clone())
    }
}

#[pymethods]
impl DiscoRef {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { reference: other.reference.clone(), birth: other.birth }
    }

    /// Number of the value among those of the session, the same on every worker.
    #[getter]
    fn reg_id(&self) -> u32 {
        self.reference.register()
    }
}
