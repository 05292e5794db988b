//! A tensor of a file, as functions of Python that load their worker's part see it.

use std::sync::Arc;

use ::disco::WeightReader;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::Tensor;

use crate::array::DenseArray;
use crate::{errors, types};

/// A tensor of a file, from which a function reads the part that its worker gets.
///
/// The worker has read nothing yet if it can read the file. Otherwise the whole tensor is in its
/// memory, until this and all arrays that were read are gone. Reading blocks, and releases the
/// interpreter meanwhile; what is read may be returned without a copy.
#[pyclass(frozen, name = "WeightReader", module = "tensor_rpc.disco")]
pub(crate) struct DiscoWeightReader(Arc<WeightReader>);

impl DiscoWeightReader {
    pub(crate) fn of(reader: Arc<WeightReader>) -> Self {
        Self(reader)
    }

    fn array(
        &self,
        py: Python<'_>,
        read: impl FnOnce(&WeightReader) -> rpc_core::Result<Tensor> + Send,
    ) -> PyResult<DenseArray> {
        let array = py.detach(|| read(&self.0).and_then(DenseArray::of_own));
        array.map_err(|error| errors::exception(py, &error))
    }
}

#[pymethods]
impl DiscoWeightReader {
    /// Name of the tensor.
    #[getter]
    fn name(&self) -> &str {
        self.0.name()
    }

    /// Type of the elements.
    #[getter]
    fn dtype(&self) -> types::DataType {
        types::DataType(self.0.dtype())
    }

    /// Dimensions of the whole tensor.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.0.shape())
    }

    /// Device on which the loader wants the part, and where it is read to.
    #[getter]
    fn device(&self) -> types::Device {
        types::Device(self.0.device())
    }

    /// Read the whole tensor.
    fn read(&self, py: Python<'_>) -> PyResult<DenseArray> {
        self.array(py, WeightReader::read)
    }

    /// Read the elements from `start` to before `stop` of one dimension, and all of the others.
    fn read_range(&self, py: Python<'_>, dim: usize, start: i64, stop: i64) -> PyResult<DenseArray> {
        self.array(py, |reader| reader.read_range(dim, start..stop))
    }

    /// Read a box: a pair of start and stop for each of the first dimensions, all of the others.
    fn read_box(&self, py: Python<'_>, ranges: Vec<(i64, i64)>) -> PyResult<DenseArray> {
        let ranges: Vec<_> = ranges.into_iter().map(|(start, stop)| start..stop).collect();
        self.array(py, |reader| reader.read_box(&ranges))
    }

    fn __repr__(&self) -> String {
        format!("<weight {:?} of {} {:?}>", self.0.name(), self.0.dtype(), self.0.shape())
    }
}
