//! Values of a session as objects of Python, and back, where the session's functions run.

use std::sync::Arc;

use ::disco::WeightReader;
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use rpc_core::function::{LocalValue, Object, Opaque};
use rpc_core::value::MAX_DEPTH;
use rpc_core::{Device, Result, RpcError, Tensor, Value};

use super::frame::{Frame, View};
use super::objects::{LocalFunction, LocalModule, LocalObject};
use super::{Held, Origin, plain_function};
use crate::argument::Arg;
use crate::array::{Array, DenseArray};
use crate::disco_weight_reader::DiscoWeightReader;
use crate::{errors, packed, reply};

/// Makes an object of a value that a function gets.
pub(super) fn incoming(py: Python<'_>, frame: &Arc<Frame>, value: LocalValue) -> PyResult<Py<PyAny>> {
    reply::plain(py, value, &mut |object| match object {
        Object::Tensor(tensor) => {
            let array = frame.view(py, tensor).map_err(|error| errors::exception(py, &error))?;
            array.into_py_any(py)
        }
        Object::Function(function) => match function.origin::<Origin>() {
            Some(origin) => Ok(origin.function(py)),
            None => LocalFunction::of(function, frame.clone()).into_py_any(py),
        },
        Object::Module(module) => LocalModule::of(module, frame.clone()).into_py_any(py),
        Object::Opaque(opaque) => match opaque.downcast::<Held>() {
            Some(held) => Ok(held.get(py)),
            None => match opaque.downcast::<WeightReader>() {
                Some(reader) => DiscoWeightReader::of(reader).into_py_any(py),
                None => LocalObject(opaque).into_py_any(py),
            },
        },
        _ => Err(PyTypeError::new_err("an object of the session of a kind that this version does not know")),
    })
}

/// Makes a value of an object that a function has returned, or passes to another function.
pub(super) fn outgoing(frame: &Arc<Frame>, object: &Bound<'_, PyAny>, depth: usize) -> PyResult<LocalValue> {
    let py = object.py();
    if depth > MAX_DEPTH {
        return Err(PyValueError::new_err(format!("a value may be nested {MAX_DEPTH} deep")));
    }
    if let Ok(array) = object.cast::<DenseArray>()
        && let Some(view) = array.get().session_view()
    {
        return Ok(Value::Object(Object::Tensor(view.tensor.clone())));
    }
    let is_shape = object.is_instance(crate::form::shape_class(py)?)?;
    if !is_shape && (object.cast::<PyList>().is_ok() || object.cast::<PyTuple>().is_ok()) {
        let items = object.try_iter()?.map(|item| outgoing(frame, &item?, depth + 1));
        return Ok(Value::List(items.collect::<PyResult<_>>()?));
    }
    if let Ok(map) = object.cast::<PyDict>() {
        // A copy, because another thread may change it meanwhile.
        let map = map.copy()?;
        let entries =
            map.iter().map(|(key, value)| Ok((outgoing(frame, &key, depth + 1)?, outgoing(frame, &value, depth + 1)?)));
        return Ok(Value::Map(entries.collect::<PyResult<_>>()?));
    }
    if let Ok(function) = object.cast::<LocalFunction>() {
        return Ok(Value::Object(Object::Function(function.get().function().clone())));
    }
    if let Ok(module) = object.cast::<LocalModule>() {
        return Ok(Value::Object(Object::Module(module.get().module().clone())));
    }
    if let Ok(other) = object.cast::<LocalObject>() {
        return Ok(Value::Object(Object::Opaque(other.get().0.clone())));
    }
    let mut needs_session = false;
    match Arg::new(object, depth, &mut needs_session) {
        Ok(Arg::Plain(value)) => value.try_map(&mut |_| Err(PyTypeError::new_err("a reference without its session"))),
        Ok(Arg::Array(array)) => {
            let tensor = py.detach(|| copy_in(frame, &array)).map_err(|error| errors::exception(py, &error))?;
            Ok(Value::Object(Object::Tensor(tensor)))
        }
        Ok(Arg::Callable(Some(function))) => Ok(plain_function(function.into_function())),
        Ok(_) => Err(PyTypeError::new_err(format!(
            "an object of {} belongs to a session that this process has opened, and not to the one that the function \
             serves: return its content",
            object.get_type().qualname()?
        ))),
        // What is no value is an object of the session.
        Err(error) if error.is_instance_of::<PyTypeError>(py) && !packed::is_dataclass(object) => {
            let held = Held::new(object.clone().unbind());
            Ok(Value::Object(Object::Opaque(Opaque::new(Arc::new(held)))))
        }
        Err(error) => Err(error),
    }
}

/// Makes a tensor of the session with the content of an array.
fn copy_in(frame: &Frame, array: &Array) -> Result<Tensor> {
    let tensor = frame.context.allocate(Device::cpu(), array.dtype, &array.shape)?;
    let mut written = tensor.write()?;
    let bytes = written.bytes_mut()?;
    if bytes.len() != array.bytes.len() {
        return Err(RpcError::invalid_argument("an array has fewer bytes than its shape says"));
    }
    bytes.copy_from_slice(&array.bytes);
    drop(written);
    Ok(tensor)
}

impl DenseArray {
    /// Makes a tensor of a session accessible as memory.
    ///
    /// # Errors
    ///
    /// Its device has no addresses.
    pub(super) fn view(view: View) -> Result<Self> {
        let tensor = &view.tensor;
        let start = match tensor.storage().memory().device_address() {
            Some(start) => start.as_ptr(),
            None if tensor.storage().is_empty() => std::ptr::null_mut(),
            None => {
                return Err(RpcError::unsupported(format!(
                    "a tensor on {} has no address that Python could use",
                    tensor.device()
                )));
            }
        };
        let address = start.wrapping_add(tensor.byte_offset() as usize) as usize;
        let (len, shape, strides) =
            (tensor.size_bytes() as usize, tensor.shape().to_vec(), tensor.strides().map(<[i64]>::to_vec));
        let (dtype, device) = (tensor.dtype(), tensor.device());
        Ok(Self::over(Arc::new(view), address, len, shape, strides, dtype, device))
    }

    /// Makes a tensor accessible that the function which runs has made itself, and nothing else
    /// knows of.
    ///
    /// # Errors
    ///
    /// Its device has no addresses.
    pub(crate) fn of_own(tensor: Tensor) -> Result<Self> {
        Self::view(View::of_own(tensor))
    }

    /// Returns the tensor of a session that this is a view of.
    pub(crate) fn session_view(&self) -> Option<&View> {
        self.owner().downcast_ref()
    }
}
