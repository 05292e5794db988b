//! Arrays of this process, lent to a collective: their own memory as tensors, without a copy.

use std::ops::Range;
use std::ptr::NonNull;

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rpc_core::device::HostMemory;
use rpc_core::tensor::Storage;
use rpc_core::{DataType, Device, RpcError, Tensor};

use crate::argument::array;
use crate::array::{Array, WritableArray};

/// An array as a tensor. Arrays that are not dense are copied.
pub(crate) struct Lent {
    tensor: Tensor,
    /// Addresses of the elements.
    range: Range<usize>,
}

impl Lent {
    /// Lends an array that is read.
    ///
    /// # Errors
    ///
    /// The object is no array in host memory.
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let Array { dtype, shape, bytes } = array(object)?;
        Self::of(dtype, shape, bytes)
    }

    /// Lends an array that is written to.
    ///
    /// # Errors
    ///
    /// It is no array in host memory, read-only, or not dense.
    pub(crate) fn writable(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let array = WritableArray::new(object)?;
        let (dtype, shape) = (array.dtype, array.shape.clone());
        Self::of(dtype, shape, array.into_bytes())
    }

    fn of(dtype: DataType, shape: Vec<i64>, bytes: Bytes) -> PyResult<Self> {
        let (start, len) = (bytes.as_ptr() as usize, bytes.len());
        // The memory comes from C, so that its provenance is exposed, and it may be written to.
        let address = std::ptr::with_exposed_provenance_mut(start);
        let made = NonNull::new(address).ok_or_else(|| RpcError::internal("an array without an address"));
        let made = made.and_then(|address| {
            // SAFETY: `bytes` keeps the memory. That no other thread uses the array during the call
            // is up to the user, as for numpy's own functions that release the lock. Tensors of the
            // same memory are made one, by `pair`.
            let memory = unsafe { HostMemory::new(address, len, Box::new(bytes)) };
            Tensor::new(Storage::new(Device::cpu(), Box::new(memory), None), 0, shape, None, dtype)
        });
        let tensor = made.map_err(|error| PyValueError::new_err(error.message().to_owned()))?;
        Ok(Self { tensor, range: start..start + len })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

/// Returns the tensors of an array that is read and of one that is written to. Where one is a part
/// of the other, they are tensors of one storage.
///
/// # Errors
///
/// They overlap otherwise.
pub(crate) fn pair(from: &Lent, to: &Lent) -> PyResult<(Tensor, Tensor)> {
    let within = |inner: &Lent, outer: &Lent| -> PyResult<Tensor> {
        let offset = (inner.range.start - outer.range.start) as u64;
        let view = outer.tensor.view(offset, inner.tensor.shape(), None, inner.tensor.dtype());
        view.map_err(|error| PyValueError::new_err(error.message().to_owned()))
    };
    let contains =
        |outer: &Lent, inner: &Lent| outer.range.start <= inner.range.start && inner.range.end <= outer.range.end;
    if from.range.end <= to.range.start || to.range.end <= from.range.start {
        Ok((from.tensor.clone(), to.tensor.clone()))
    } else if contains(from, to) {
        Ok((from.tensor.clone(), within(to, from)?))
    } else if contains(to, from) {
        Ok((within(from, to)?, to.tensor.clone()))
    } else {
        Err(PyValueError::new_err("the array and out overlap in part: they may be the same, or apart"))
    }
}
