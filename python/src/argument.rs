//! Arguments of calls: objects of Python as values of a session.

use std::sync::Arc;

use ::disco::Operand;
use pyo3::exceptions::{PyMemoryError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PyString, PyTuple, PyType,
};
use rpc_core::function::ArgScope;
use rpc_core::value::MAX_DEPTH;
use rpc_core::{IntoArg, IntoArgs, Result, Value};

use crate::array::Array;
use crate::buffer::shared_bytes;
use crate::callable::Callable;
use crate::disco_recorded::DiscoRecorded;
use crate::disco_ref::DiscoRef;
use crate::form::shape_class;
use crate::packed;
use crate::references::{Callback, Function, Module, Object, Pipe, Tensor};
use crate::reply::Reply;

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
    Pipe(rpc_core::Pipe<Reply>),
    Callback(Arc<rpc_core::client::RemoteCallback>),
    /// A value that the workers of Disco have, or that a program of theirs makes.
    Disco(Operand),
    /// An array of this process, which becomes a tensor for the time of the call.
    Array(Array),
    /// A function of this process, which becomes a callback for the time of the call; `None` once
    /// it has.
    Callable(Option<Callable>),
}

/// Arguments of a call.
pub(crate) struct Args {
    pub(crate) args: Vec<Arg>,
    /// True if some have to be made in the session before the call.
    pub(crate) needs_session: bool,
}

impl Args {
    /// Reads positional arguments. With `on_loop`, functions among them are called in the form of
    /// asyncio, for the event loop that runs.
    ///
    /// # Errors
    ///
    /// `TypeError` with the index for an object that is no value.
    pub(crate) fn new(args: &Bound<'_, PyTuple>, on_loop: bool) -> PyResult<Self> {
        let args_py = args.py();
        let mut needs_session = false;
        let args: Vec<_> = args
            .iter_borrowed()
            .enumerate()
            .map(|(index, arg)| {
                Arg::new(&arg, 0, &mut needs_session).map_err(|error| of_argument(arg.py(), index, error))
            })
            .collect::<PyResult<_>>()?;
        let mut made = Self { args, needs_session };
        if needs_session && on_loop {
            let event_loop = running_loop(args_py)?;
            made.for_each(|arg| {
                if let Arg::Callable(Some(function)) = arg {
                    function.on_loop(&event_loop);
                }
            });
        }
        Ok(made)
    }

    /// Puts an argument in front of the others.
    pub(crate) fn insert_first(&mut self, arg: Arg) {
        self.args.insert(0, arg);
    }

    /// Visits all arguments that have no parts, and all parts of the others.
    fn for_each(&mut self, mut visit: impl FnMut(&mut Arg)) {
        let mut waiting: Vec<&mut Arg> = self.args.iter_mut().collect();
        while let Some(arg) = waiting.pop() {
            match arg {
                Arg::List(items) => waiting.extend(items),
                Arg::Map(entries) => entries.iter_mut().for_each(|(key, value)| waiting.extend([key, value])),
                arg => visit(arg),
            }
        }
    }

    pub(crate) fn needs_session(&self) -> bool {
        self.needs_session
    }
}

/// Returns the event loop of asyncio that runs on this thread.
pub(crate) fn running_loop(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import(intern!(py, "asyncio"))?.call_method0(intern!(py, "get_running_loop"))
}

/// Says in an error which argument it is about.
fn of_argument(py: Python<'_>, index: usize, error: PyErr) -> PyErr {
    let text = format!("argument {index}: {}", error.value(py));
    // Others may be made in another way, such as UnicodeEncodeError.
    let class = error.get_type(py);
    let plain: [Bound<'_, PyType>; 4] = [
        py.get_type::<PyTypeError>(),
        py.get_type::<PyValueError>(),
        py.get_type::<PyOverflowError>(),
        py.get_type::<PyMemoryError>(),
    ];
    if plain.iter().any(|plain| plain.is(&class)) { PyErr::from_type(class, text) } else { error }
}

/// Reads an array: an object with `__dlpack__` or a buffer.
pub(crate) fn array(object: &Bound<'_, PyAny>) -> PyResult<Array> {
    let py = object.py();
    if let Ok(tensor) = object.cast::<Tensor>() {
        // It would be copied here and back; a loop of asyncio would even wait for itself.
        let _ = tensor.get().tensor()?;
        return Err(PyTypeError::new_err("this is a tensor of a session already: x.copy_from(y) copies from it"));
    }
    if object.hasattr(intern!(py, "__dlpack__"))? {
        return Array::from_dlpack(object);
    }
    match PyMemoryView::from(object) {
        Ok(view) => Array::from_buffer(&view),
        // Lists and numbers, by numpy's rules.
        Err(_) => match py.import(intern!(py, "numpy")) {
            Ok(numpy) => Array::from_dlpack(&numpy.call_method1(intern!(py, "asarray"), (object,))?),
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
        let py = object.py();
        // Values, the most frequent first.
        if object.cast_exact::<PyInt>().is_ok() {
            return integer(object);
        }
        if let Ok(number) = object.cast::<PyFloat>() {
            return Ok(Self::Plain(Value::Float(number.value())));
        }
        if let Ok(text) = object.cast::<PyString>() {
            return Ok(Self::Plain(Value::Str(text.to_cow()?.into_owned())));
        }
        if let Ok(tensor) = object.cast::<Tensor>() {
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
        if let Ok(bytes) = object.cast::<PyBytes>() {
            return Ok(Self::Plain(Value::Bytes(shared_bytes(bytes))));
        }
        if let Ok(bytes) = object.cast::<PyByteArray>() {
            return Ok(Self::Plain(Value::Bytes(bytes.to_vec().into())));
        }
        if object.cast::<PyList>().is_ok() || object.cast::<PyTuple>().is_ok() {
            if object.is_instance(shape_class(py)?)? {
                return Ok(Self::Plain(Value::Shape(object.extract()?)));
            }
            let items = object.try_iter()?.map(|item| Self::new(&item?, depth + 1, needs_session));
            return Ok(Self::List(items.collect::<PyResult<_>>()?));
        }
        if let Ok(map) = object.cast::<PyDict>() {
            let mut entry = |item: Bound<'_, PyAny>| Self::new(&item, depth + 1, needs_session);
            // A copy: code that a conversion calls may change the dictionary.
            let entries = map.copy()?;
            let entries = entries.iter().map(|(key, value)| Ok((entry(key)?, entry(value)?)));
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
        // A number of numpy has a buffer, too, and is a number for us.
        if is_numpy_number(object)? {
            let item = object.call_method0(intern!(py, "item"))?;
            if item.get_type().is(object.get_type()) {
                return Err(no_value(object));
            }
            return Self::new(&item, depth + 1, needs_session);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? && !object.is_instance_of::<PyType>() {
            *needs_session = true;
            return Array::from_dlpack(object).map(Self::Array);
        }
        if packed::is_dataclass(object) {
            return packed::pack(object).map(|packed| Self::Plain(Value::Packed(packed)));
        }
        if object.hasattr(intern!(py, "__index__"))? && !object.is_instance_of::<PyType>() {
            return integer(&object.call_method0(intern!(py, "__index__"))?);
        }
        if let Ok(view) = PyMemoryView::from(object) {
            *needs_session = true;
            return Array::from_buffer(&view).map(Self::Array);
        }
        if object.is_callable() && !object.is_instance_of::<PyType>() {
            *needs_session = true;
            return Ok(Self::Callable(Some(Callable::new(object))));
        }
        Err(no_value(object))
    }

    fn reference(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        Ok(Some(if let Ok(function) = object.cast::<Function>() {
            Self::Function(function.get().function()?)
        } else if let Ok(module) = object.cast::<Module>() {
            Self::Module(module.get().module()?)
        } else if let Ok(pipe) = object.cast::<Pipe>() {
            Self::Pipe(pipe.get().pipe()?)
        } else if let Ok(callback) = object.cast::<Callback>() {
            Self::Callback(callback.get().callback()?)
        } else if let Ok(reference) = object.cast::<DiscoRef>() {
            Self::Disco(Operand::Reference(reference.get().reference()?))
        } else if let Ok(recorded) = object.cast::<DiscoRecorded>() {
            Self::Disco(recorded.get().operand())
        } else if let Ok(other) = object.cast::<Object>() {
            Self::Object(other.get().object()?)
        } else {
            return Ok(None);
        }))
    }
}

fn no_value(object: &Bound<'_, PyAny>) -> PyErr {
    let what = match object.cast::<PyType>() {
        Ok(class) => class.qualname().map(|name| format!("the class {name}")),
        Err(_) => object.get_type().qualname().map(|name| format!("an object of {name}")),
    };
    PyTypeError::new_err(format!(
        "{} is no value of a session; there are: None, bool, int, float, str, bytes, lists, dictionaries, \
         dataclasses, arrays (with __dlpack__ or a buffer), functions, and objects of the session",
        what.unwrap_or_else(|_| "this".to_owned())
    ))
}

/// Returns true for an object of a subclass of `numpy.generic`.
fn is_numpy_number(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    if !object.hasattr(intern!(py, "__array_interface__"))? {
        return Ok(false);
    }
    for class in object.get_type().mro() {
        let class = class.cast_into::<PyType>()?;
        if class.name()? == "generic" && class.module()? == "numpy" {
            return Ok(true);
        }
    }
    Ok(false)
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
            Self::Pipe(pipe) => pipe.into_arg(scope),
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
