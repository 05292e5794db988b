//! Bytes of objects that have a buffer.

use std::ptr::NonNull;

use bytes::Bytes;
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyMemoryView};

use crate::array_memory::want_huge_pages;
use pyo3::{ffi, intern};

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

/// An object of `bytes` that is being made, and that nobody else has yet.
pub(crate) struct NewBytes {
    object: Py<PyBytes>,
    content: NonNull<u8>,
    len: usize,
}

// SAFETY: the content belongs to the object, which this owns alone.
unsafe impl Send for NewBytes {}

impl NewBytes {
    /// Makes an object of `len` bytes, which are to be written.
    ///
    /// # Errors
    ///
    /// `MemoryError` if there is not as much memory.
    pub(crate) fn new(py: Python<'_>, len: u64) -> PyResult<Self> {
        let none = || PyMemoryError::new_err(format!("no memory for {len} bytes"));
        let len = ffi::Py_ssize_t::try_from(len).map_err(|_| none())?;
        // SAFETY: a new reference, or null with an exception set.
        let object =
            unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyBytes_FromStringAndSize(std::ptr::null(), len)) }?;
        let object = object.cast_into::<PyBytes>()?;
        // SAFETY: an object of bytes.
        let content = NonNull::new(unsafe { ffi::PyBytes_AsString(object.as_ptr()) }.cast::<u8>()).ok_or_else(none)?;
        let mut made = Self { object: object.unbind(), content, len: len.unsigned_abs() };
        want_huge_pages(made.content());
        Ok(made)
    }

    /// Returns the content, to be written and not to be read.
    pub(crate) fn content(&mut self) -> &mut [u8] {
        // SAFETY: the object has `len` bytes there, and as long as nobody else has it they may be
        // written. Nothing reads them before.
        unsafe { std::slice::from_raw_parts_mut(self.content.as_ptr(), self.len) }
    }

    /// Returns the object, all of which has been written.
    pub(crate) fn into_object(self) -> Py<PyAny> {
        self.object.into_any()
    }
}
