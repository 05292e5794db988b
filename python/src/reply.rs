//! Replies: values of a session as objects of Python.

use pyo3::IntoPyObjectExt as _;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use rpc_core::value::Reference;
use rpc_core::{FromReply, RemoteFunction, RemoteModule, RemoteObject, RemoteTensor, Session, SharedSession, Value};

use crate::form::{Form, shape_class};
use crate::packed;
use crate::references;
use crate::types::{DataType, Device};

/// A value of a session, with the objects in it. They are freed if it becomes no object of Python.
pub(crate) struct Reply {
    /// `None` once it has been converted.
    value: Option<Value>,
    session: SharedSession,
}

impl Reply {
    pub(crate) fn new(value: Value, session: &SharedSession) -> Self {
        Self { value: Some(value), session: session.clone() }
    }

    pub(crate) fn into_object(mut self, py: Python<'_>, form: Form) -> PyResult<Py<PyAny>> {
        let value = self.value.take().unwrap_or_default();
        object(py, form, value, &self.session)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            Session::from(self.session.clone()).release(&value);
        }
    }
}

impl FromReply for Reply {
    fn from_reply(value: Value, session: &SharedSession) -> rpc_core::Result<Self> {
        Ok(Self::new(value, session))
    }
}

/// Makes an object of a value of a client. All objects of the session in it are owned in any case,
/// so that they are freed if one cannot be made.
fn object(py: Python<'_>, form: Form, value: Value, session: &SharedSession) -> PyResult<Py<PyAny>> {
    plain(py, value, &mut |reference| reference_object(py, form, reference, session))
}

/// Makes an object of a value, and those of the objects in it by `make`, which is called for each
/// of them in any case.
pub(crate) fn plain<O>(
    py: Python<'_>,
    value: Value<O>,
    make: &mut impl FnMut(O) -> PyResult<Py<PyAny>>,
) -> PyResult<Py<PyAny>> {
    match value {
        Value::Null => Ok(py.None()),
        Value::Bool(truth) => truth.into_py_any(py),
        Value::Int(number) => number.into_py_any(py),
        Value::Float(number) => number.into_py_any(py),
        Value::Str(text) => text.into_py_any(py),
        Value::Bytes(bytes) => Ok(PyBytes::new(py, &bytes).into_any().unbind()),
        Value::Shape(dims) => Ok(shape_class(py)?.call1((dims,))?.unbind()),
        Value::DataType(dtype) => DataType(dtype).into_py_any(py),
        Value::Device(device) => Device(device).into_py_any(py),
        Value::List(items) => {
            let items: Vec<_> = items.into_iter().map(|item| plain(py, item, make)).collect();
            Ok(PyList::new(py, items.into_iter().collect::<PyResult<Vec<_>>>()?)?.into_any().unbind())
        }
        Value::Map(entries) => {
            let mut made = Vec::with_capacity(entries.len());
            for (key, value) in entries {
                made.push((plain(py, key, make), plain(py, value, make)));
            }
            let map = PyDict::new(py);
            for (key, value) in made {
                map.set_item(key?, value?)?;
            }
            Ok(map.into_any().unbind())
        }
        Value::Packed(packed) => packed::unpack(py, &packed),
        Value::Object(reference) => make(reference),
        other => Err(pyo3::exceptions::PyNotImplementedError::new_err(format!(
            "this version has no class for a value of kind {}",
            other.type_name()
        ))),
    }
}

/// Makes an object of a reference, which it owns.
fn reference_object(py: Python<'_>, form: Form, reference: Reference, session: &SharedSession) -> PyResult<Py<PyAny>> {
    let failed = |error: rpc_core::RpcError| crate::errors::exception(py, &error);
    let name = match &reference {
        Reference::Function(_) => "Function",
        Reference::Module(_) => "Module",
        Reference::Tensor(_) => "Tensor",
        _ => "Object",
    };
    let value = Value::Object(reference);
    let native = match name {
        "Function" => references::Function::of(RemoteFunction::from_reply(value, session).map_err(failed)?, None)
            .into_bound_py_any(py)?,
        "Module" => {
            references::Module::of(RemoteModule::from_reply(value, session).map_err(failed)?).into_bound_py_any(py)?
        }
        "Tensor" => {
            references::Tensor::of(RemoteTensor::from_reply(value, session).map_err(failed)?).into_bound_py_any(py)?
        }
        _ => references::Object::of(RemoteObject::from_reply(value, session).map_err(failed)?).into_bound_py_any(py)?,
    };
    Ok(form.wrap(py, name, native)?.unbind())
}
