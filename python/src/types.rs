//! Data types and devices as classes of Python.

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyString;
use rpc_core::DeviceType;

/// Type of a tensor's elements, as DLPack has them: ``float32``, ``int8``, ``bfloat16``.
///
/// Made of such a name, of a numpy or torch data type, or of another `DataType`.
#[pyclass(frozen, module = "tensor_rpc", from_py_object)]
#[derive(Clone, Copy)]
pub(crate) struct DataType(pub(crate) rpc_core::DataType);

#[pymethods]
impl DataType {
    #[new]
    fn new(dtype: &Bound<'_, PyAny>) -> PyResult<Self> {
        data_type(dtype).map(Self)
    }

    /// Bits of one element.
    #[getter]
    fn bits(&self) -> u64 {
        self.0.bits_per_element()
    }

    /// Equal to what names the same type, such as ``"float32"`` and ``numpy.float32``.
    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        data_type(other).is_ok_and(|other| other == self.0)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyString::new(py, &self.0.to_string()).hash()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("DataType('{}')", self.0)
    }
}

/// A device of a session: ``cpu:0``, ``cuda:1``; ``cuda`` is ``cuda:0``.
#[pyclass(frozen, module = "tensor_rpc", from_py_object)]
#[derive(Clone, Copy)]
pub(crate) struct Device(pub(crate) rpc_core::Device);

#[pymethods]
impl Device {
    #[new]
    #[pyo3(signature = (device, index = None))]
    fn new(device: &Bound<'_, PyAny>, index: Option<i32>) -> PyResult<Self> {
        let mut device = self::device(device)?;
        if let Some(index) = index {
            device.index = index;
        }
        Ok(Self(device))
    }

    /// Kind of the device, such as ``cpu``.
    #[getter]
    fn kind(&self) -> String {
        self.0.kind.to_string()
    }

    /// Index among the devices of that kind, from 0.
    #[getter]
    fn index(&self) -> i32 {
        self.0.index
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        device(other).is_ok_and(|other| other == self.0)
    }

    fn __hash__(&self, py: Python<'_>) -> PyResult<isize> {
        PyString::new(py, &self.0.to_string()).hash()
    }

    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn __repr__(&self) -> String {
        format!("Device('{}')", self.0)
    }
}

/// Reads a data type: of ours, a name, or an object that numpy or torch take for one.
pub(crate) fn data_type(object: &Bound<'_, PyAny>) -> PyResult<rpc_core::DataType> {
    if let Ok(own) = object.cast::<DataType>() {
        return Ok(own.get().0);
    }
    let name = match object.cast::<PyString>() {
        Ok(name) => name.to_string(),
        // numpy.float32 and numpy.dtype("float32") have a name; torch.float32 is written so.
        Err(_) => match object.getattr("name").or_else(|_| object.getattr("__name__")) {
            Ok(name) => name.to_string(),
            Err(_) => object.str()?.to_string().trim_start_matches("torch.").to_owned(),
        },
    };
    let own = match name.as_str() {
        "int" => "int64",
        "float" => "float64",
        name => name,
    };
    own.parse().map_err(|_| PyValueError::new_err(format!("{name:?} is no data type: one like 'float32' is wanted")))
}

/// Reads a device: of ours, a name, a pair of DLPack's numbers, or an object with a type and an
/// index, as torch's and TVM's are.
pub(crate) fn device(object: &Bound<'_, PyAny>) -> PyResult<rpc_core::Device> {
    if let Ok(own) = object.cast::<Device>() {
        return Ok(own.get().0);
    }
    if let Ok(name) = object.cast::<PyString>() {
        let name = name.to_string();
        return name.parse().map_err(|error: rpc_core::RpcError| PyValueError::new_err(error.message().to_owned()));
    }
    if let Ok((kind, index)) = object.extract::<(i32, i32)>() {
        return Ok(rpc_core::Device::new(DeviceType(kind), index));
    }
    if let (Ok(kind), Ok(index)) = (object.getattr("type"), object.getattr("index"))
        && let Ok(kind) = kind.extract::<String>()
    {
        let kind =
            kind.parse().map_err(|error: rpc_core::RpcError| PyValueError::new_err(error.message().to_owned()))?;
        return Ok(rpc_core::Device::new(kind, index.extract::<Option<i32>>()?.unwrap_or(0)));
    }
    if let (Ok(kind), Ok(index)) = (object.getattr("device_type"), object.getattr("device_id"))
        && let (Ok(kind), Ok(index)) = (kind.extract::<i32>(), index.extract::<i32>())
    {
        return Ok(rpc_core::Device::new(DeviceType(kind), index));
    }
    Err(PyTypeError::new_err(format!("{} is no device: one like 'cpu:0' is wanted", object.get_type().name()?)))
}
