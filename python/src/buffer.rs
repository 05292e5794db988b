//! Bytes of objects that have a buffer.

use bytes::Bytes;
use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyMemoryView};

/// Reads an object with a buffer as bytes: without a copy if it is an object of `bytes`.
pub(crate) fn bytes(object: &Bound<'_, PyAny>) -> PyResult<Bytes> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(shared_bytes(bytes));
    }
    let Ok(view) = PyMemoryView::from(object) else {
        let class = object.get_type().qualname()?;
        return Err(PyTypeError::new_err(format!("an object of {class} has no bytes: one like bytes is wanted")));
    };
    let copied = view.call_method0(intern!(object.py(), "tobytes"))?;
    Ok(shared_bytes(copied.cast::<PyBytes>()?))
}

/// Returns the content of an immutable object: small content as a copy, because its owner is
/// dropped on a thread that would have to attach to the interpreter for it.
pub(crate) fn shared_bytes(bytes: &Bound<'_, PyBytes>) -> Bytes {
    const COPIED: usize = 4096;
    match bytes.as_bytes() {
        small if small.len() <= COPIED => Bytes::copy_from_slice(small),
        _ => Bytes::from_owner(PyBackedBytes::from(bytes.clone())),
    }
}
