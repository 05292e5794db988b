//! Arguments of calls: objects of Python as values of a session.

use std::sync::Arc;

use bytes::Bytes;
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PyString, PyTuple};
use rpc_core::function::ArgScope;
use rpc_core::value::MAX_DEPTH;
use rpc_core::{Device, IntoArg, IntoArgs, Result, Session, Value};

use crate::array::Array;
use crate::objects;
use crate::objects::callback::make_callback;
use crate::packed;

/// An argument of a call, or a part of one.
pub(crate) enum Arg {
    /// A value without objects in it.
    Plain(Value),
    List(Vec<Self>),
    Map(Vec<(Self, Self)>),
    Tensor(rpc_core::RemoteTensor),
    Function(rpc_core::RemoteFunction),
    Module(rpc_core::RemoteModule),
    Object(rpc_core::RemoteObject),
    Callback(Arc<rpc_core::client::RemoteCallback>),
    /// A value that the workers of Disco have.
    Disco(::disco::DRef),
    /// An array of this process, which becomes a tensor for the time of the call.
    Array(Array),
    /// A function of this process, which becomes a callback for the time of the call.
    Callable(Py<PyAny>),
}

/// Arguments of a call.
pub(crate) struct Args {
    args: Vec<Arg>,
    /// True if some have to be made in the session before the call.
    needs_session: bool,
}

impl Args {
    /// Reads positional arguments.
    ///
    /// # Errors
    ///
    /// `TypeError` with the index for an object that is no value.
    pub(crate) fn new(args: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let mut needs_session = false;
        let args = args
            .iter_borrowed()
            .enumerate()
            .map(|(index, arg)| {
                Arg::new(&arg, 0, &mut needs_session).map_err(|error| {
                    let py = arg.py();
                    let text = format!("argument {index}: {}", error.value(py));
                    PyErr::from_type(error.get_type(py), text)
                })
            })
            .collect::<PyResult<_>>()?;
        Ok(Self { args, needs_session })
    }

    /// Makes the tensors and callbacks of arguments that are arrays and functions of this process.
    pub(crate) async fn ready(mut self, session: &Session) -> Result<Self> {
        if std::mem::take(&mut self.needs_session) {
            let mut waiting: Vec<&mut Arg> = self.args.iter_mut().collect();
            while let Some(arg) = waiting.pop() {
                match arg {
                    Arg::List(items) => waiting.extend(items),
                    Arg::Map(entries) => entries.iter_mut().for_each(|(key, value)| waiting.extend([key, value])),
                    Arg::Array(array) => {
                        let tensor = upload(session, Device::cpu(), array).await?;
                        *arg = Self::tensor(tensor);
                    }
                    Arg::Callable(function) => {
                        let function = Python::attach(|py| function.clone_ref(py));
                        *arg = Arg::Callback(Arc::new(make_callback(session, function).await?));
                    }
                    _ => {}
                }
            }
        }
        Ok(self)
    }

    pub(crate) fn needs_session(&self) -> bool {
        self.needs_session
    }

    fn tensor(tensor: rpc_core::RemoteTensor) -> Arg {
        Arg::Tensor(tensor)
    }
}

/// Makes a tensor with the content of an array.
pub(crate) async fn upload(session: &Session, device: Device, array: &Array) -> Result<rpc_core::RemoteTensor> {
    let tensor = session.alloc(device, array.dtype, &array.shape).await?;
    if !array.bytes.is_empty() {
        session.copy_to_remote(&tensor, array.bytes.clone()).await?;
    }
    Ok(tensor)
}

/// Reads an array: an object with `__dlpack__` or a buffer.
pub(crate) fn array(object: &Bound<'_, PyAny>) -> PyResult<Array> {
    if object.hasattr("__dlpack__")? {
        return Array::from_dlpack(object);
    }
    match PyMemoryView::from(object) {
        Ok(view) => Array::from_buffer(&view),
        // Lists and numbers, by numpy's rules.
        Err(_) => match object.py().import("numpy") {
            Ok(numpy) => Array::from_dlpack(&numpy.call_method1("asarray", (object,))?),
            Err(_) => Err(PyTypeError::new_err(format!(
                "an object of {} is no array: one with __dlpack__ or a buffer is wanted",
                object.get_type().qualname()?
            ))),
        },
    }
}

impl Arg {
    /// Reads an object. Sets `needs_session` if it, or a part of it, has to be made in the session.
    pub(crate) fn new(object: &Bound<'_, PyAny>, depth: usize, needs_session: &mut bool) -> PyResult<Self> {
        if depth > MAX_DEPTH {
            return Err(PyValueError::new_err(format!("a value may be nested {MAX_DEPTH} deep")));
        }
        // Values, the most frequent first.
        if let Ok(tensor) = object.cast::<objects::Tensor>() {
            return Ok(Self::Tensor(tensor.get().tensor()?));
        }
        if object.is_none() {
            return Ok(Self::Plain(Value::Null));
        }
        if let Ok(truth) = object.cast::<PyBool>() {
            return Ok(Self::Plain(Value::Bool(truth.is_true())));
        }
        if object.cast::<PyInt>().is_ok() {
            return integer(object);
        }
        if let Ok(number) = object.cast::<PyFloat>() {
            return Ok(Self::Plain(Value::Float(number.value())));
        }
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self::Plain(Value::Str(text.to_cow()?.into_owned())));
        }
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self::Plain(Value::Bytes(Bytes::copy_from_slice(bytes.as_bytes()))));
        }
        if let Ok(bytes) = object.cast::<PyByteArray>() {
            return Ok(Self::Plain(Value::Bytes(bytes.to_vec().into())));
        }
        if object.is_instance(crate::form::shape_class(object.py())?)? {
            return Ok(Self::Plain(Value::Shape(object.extract()?)));
        }
        if object.cast::<PyList>().is_ok() || object.cast::<PyTuple>().is_ok() {
            let items = object.try_iter()?.map(|item| Self::new(&item?, depth + 1, needs_session));
            return Ok(Self::List(items.collect::<PyResult<_>>()?));
        }
        if let Ok(map) = object.cast::<PyDict>() {
            let mut entry = |item: Bound<'_, PyAny>| Self::new(&item, depth + 1, needs_session);
            let entries = map.iter().map(|(key, value)| Ok((entry(key)?, entry(value)?)));
            return Ok(Self::Map(entries.collect::<PyResult<_>>()?));
        }
        if let Some(reference) = Self::reference(object)? {
            return Ok(reference);
        }
        if let Ok(dtype) = object.cast::<crate::types::DataType>() {
            return Ok(Self::Plain(Value::DataType(dtype.get().0)));
        }
        if let Ok(device) = object.cast::<crate::types::Device>() {
            return Ok(Self::Plain(Value::Device(device.get().0)));
        }
        // A number of numpy is an array of no dimensions for DLPack, and a number for us.
        let is_number = object.hasattr("dtype")? && object.hasattr("item")? && is_scalar(object)?;
        if is_number {
            return Self::new(&object.call_method0("item")?, depth + 1, needs_session);
        }
        if object.hasattr("__dlpack__")? {
            *needs_session = true;
            return Array::from_dlpack(object).map(Self::Array);
        }
        if packed::is_dataclass(object) {
            return packed::pack(object).map(|packed| Self::Plain(Value::Packed(packed)));
        }
        if object.hasattr("__index__")? {
            return integer(&object.call_method0("__index__")?);
        }
        if let Ok(view) = PyMemoryView::from(object) {
            *needs_session = true;
            return Array::from_buffer(&view).map(Self::Array);
        }
        if object.is_callable() {
            *needs_session = true;
            return Ok(Self::Callable(object.clone().unbind()));
        }
        Err(PyTypeError::new_err(format!(
            "an object of {} is no value of a session; there are: None, bool, int, float, str, bytes, lists, \
             dictionaries, dataclasses, arrays (with __dlpack__ or a buffer), functions, and objects of the session",
            object.get_type().qualname()?
        )))
    }

    fn reference(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        Ok(Some(if let Ok(function) = object.cast::<objects::Function>() {
            Self::Function(function.get().function()?)
        } else if let Ok(module) = object.cast::<objects::Module>() {
            Self::Module(module.get().module()?)
        } else if let Ok(callback) = object.cast::<objects::Callback>() {
            Self::Callback(callback.get().callback()?)
        } else if let Ok(reference) = object.cast::<crate::disco::DiscoRef>() {
            Self::Disco(reference.get().reference()?)
        } else if let Ok(other) = object.cast::<objects::Object>() {
            Self::Object(other.get().object()?)
        } else {
            return Ok(None);
        }))
    }
}

/// Returns true for a number of an array library, which has no dimensions and is immutable.
fn is_scalar(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let module: String = object.get_type().getattr("__module__")?.extract()?;
    Ok(module == "numpy" && object.get_type().name()? != "ndarray" && object.hasattr("__array_interface__")?)
}

fn integer(object: &Bound<'_, PyAny>) -> PyResult<Arg> {
    match object.extract::<i64>() {
        Ok(number) => Ok(Arg::Plain(Value::Int(number))),
        Err(error) if error.is_instance_of::<PyOverflowError>(object.py()) => {
            Err(PyOverflowError::new_err("an integer has 64 bits with a sign"))
        }
        Err(error) => Err(error),
    }
}

impl IntoArg for Arg {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        match self {
            Self::Plain(value) => Ok(value),
            Self::List(items) => {
                items.into_iter().map(|item| item.into_arg(scope)).collect::<Result<_>>().map(Value::List)
            }
            Self::Map(entries) => entries
                .into_iter()
                .map(|(key, value)| Ok((key.into_arg(scope)?, value.into_arg(scope)?)))
                .collect::<Result<_>>()
                .map(Value::Map),
            Self::Tensor(tensor) => tensor.into_arg(scope),
            Self::Function(function) => function.into_arg(scope),
            Self::Module(module) => module.into_arg(scope),
            Self::Object(object) => object.into_arg(scope),
            Self::Callback(callback) => {
                let value = callback.function().into_arg(scope)?;
                scope.pins.push(callback);
                Ok(value)
            }
            Self::Disco(_) => Err(rpc_core::RpcError::invalid_argument(
                "a value of Disco's workers cannot be an argument of a session",
            )),
            Self::Array(_) | Self::Callable(_) => {
                Err(rpc_core::RpcError::internal("an argument was not made before the call"))
            }
        }
    }
}

impl IntoArgs for Args {
    fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        self.args.into_iter().map(|arg| arg.into_arg(scope)).collect()
    }
}
