//! Objects of a session: functions, modules, tensors, and the application's own. Dropping the last
//! reference frees the object there.

pub(crate) mod callback;

use std::sync::Arc;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::{RemoteFunction, RemoteModule, RemoteObject, RemoteTensor};

use crate::argument::Args;
use crate::array::DenseArray;
use crate::operation::{Birth, Operation, Options};
use crate::reply::Reply;
use crate::types::{DataType, Device};

/// A reference that can be freed before it is dropped.
macro_rules! reference {
    ($($(#[$doc:meta])* $name:ident($remote:ty) $get:ident
        $({ $(#[$field_doc:meta])* $field:ident: $field_type:ty })?;)*) => {
        $(
            $(#[$doc])*
            #[pyclass(frozen, subclass, module = "tensor_rpc._native")]
            pub(crate) struct $name {
                remote: $remote,
                birth: Birth,
                $($(#[$field_doc])* $field: $field_type,)?
            }

            impl $name {
                /// Returns the reference.
                ///
                /// # Errors
                ///
                /// In the child of a fork.
                pub(crate) fn $get(&self) -> PyResult<$remote> {
                    self.birth.check()?;
                    Ok(self.remote.clone())
                }
            }
        )*
    };
}

reference! {
    /// A function of a session.
    Function(RemoteFunction) function { name: Option<String> };
    /// A module of a session.
    Module(RemoteModule) module;
    /// A tensor in a session.
    Tensor(RemoteTensor) tensor;
    /// An object of a type that the application defines.
    Object(RemoteObject) object;
    /// A function of this process as a function of a session.
    Callback(Arc<rpc_core::RemoteCallback>) callback;
}

impl Function {
    pub(crate) fn of(remote: RemoteFunction, name: Option<String>) -> Self {
        Self { remote, birth: Birth::now(), name }
    }
}

#[pymethods]
impl Function {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), birth: other.birth, name: other.name.clone() }
    }

    /// Name that the function was found by, or `None`.
    #[getter]
    fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    #[pyo3(signature = (args, timeout = None, lane = None))]
    fn call_op(&self, args: &Bound<'_, PyTuple>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (function, options) = (self.function()?, Options::new(timeout, lane)?);
        let args = Args::new(args)?;
        let work = async move {
            let args = match args.needs_session() {
                true => args.ready(&function.session()).await?,
                false => args,
            };
            options.apply(function.call::<Reply>(args)).await
        };
        Ok(Operation::new(work, |py, form, reply| reply.into_object(py, form)))
    }
}

impl Module {
    pub(crate) fn of(remote: RemoteModule) -> Self {
        Self { remote, birth: Birth::now() }
    }
}

#[pymethods]
impl Module {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), birth: other.birth }
    }

    #[pyo3(signature = (name, timeout = None, lane = None))]
    fn get_function_op(&self, name: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (module, options) = (self.module()?, Options::new(timeout, lane)?);
        let work = async move {
            let function = options.apply(module.function(&name)).await?;
            Ok((function, name))
        };
        Ok(Operation::new(work, |py, form, (function, name)| {
            let native = Bound::new(py, Function::of(function, Some(name)))?;
            form.wrap(py, "Function", native.into_any()).map(Bound::unbind)
        }))
    }
}

impl Tensor {
    pub(crate) fn of(remote: RemoteTensor) -> Self {
        Self { remote, birth: Birth::now() }
    }
}

#[pymethods]
impl Tensor {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), birth: other.birth }
    }

    /// Dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.remote.shape())
    }

    /// Distance of neighbours in each dimension, in elements; `None` for a dense tensor.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.remote.strides().map(|strides| PyTuple::new(py, strides)).transpose()
    }

    /// Type of the elements.
    #[getter]
    fn dtype(&self) -> DataType {
        DataType(self.remote.dtype())
    }

    /// Device that holds the tensor, as the session names it.
    #[getter]
    fn device(&self) -> Device {
        Device(self.remote.device())
    }

    /// Offset of the first element in its storage, in bytes.
    #[getter]
    fn byte_offset(&self) -> u64 {
        self.remote.byte_offset()
    }

    /// Size of the elements in bytes, densely packed.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.remote.size_bytes()
    }

    fn view_of(
        &self,
        shape: Vec<i64>,
        dtype: Option<DataType>,
        byte_offset: u64,
        strides: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        let tensor = self.tensor()?;
        let dtype = dtype.map_or(tensor.dtype(), |dtype| dtype.0);
        Ok(Self::of(tensor.view(tensor.byte_offset() + byte_offset, dtype, &shape, strides.as_deref())))
    }

    #[pyo3(signature = (timeout = None, lane = None))]
    fn download_op(&self, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        let work = async move {
            let session = tensor.session();
            let bytes = options.apply(session.copy_from_remote(&tensor)).await?;
            Ok(DenseArray::new(bytes, tensor.shape().to_vec(), tensor.dtype()))
        };
        Ok(Operation::new(work, |py, _, array| Ok(Bound::new(py, array)?.into_any().unbind())))
    }

    #[pyo3(signature = (source, timeout = None, lane = None))]
    fn copy_from_op(&self, source: &Bound<'_, PyAny>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        if let Ok(other) = source.cast::<Self>() {
            let other = other.get().tensor()?;
            let session = tensor.session();
            return Ok(Operation::unit(async move { options.apply(session.copy_among_remote(&other, &tensor)).await }));
        }
        let array = crate::argument::array(source)?;
        if array.dtype != tensor.dtype() || array.shape != tensor.shape() {
            return Err(PyValueError::new_err(format!(
                "the tensor is {} of shape {:?}, and the array {} of shape {:?}",
                tensor.dtype(),
                tensor.shape(),
                array.dtype,
                array.shape
            )));
        }
        let session = tensor.session();
        Ok(Operation::unit(async move { options.apply(session.copy_to_remote(&tensor, array.bytes)).await }))
    }

    fn free_op(&self) -> PyResult<Operation> {
        let tensor = self.tensor()?;
        Ok(Operation::unit(async move { tensor.free().await }))
    }
}

impl Object {
    pub(crate) fn of(remote: RemoteObject) -> Self {
        Self { remote, birth: Birth::now() }
    }
}

#[pymethods]
impl Object {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), birth: other.birth }
    }

    fn free_op(&self) -> PyResult<Operation> {
        let object = self.object()?;
        Ok(Operation::unit(async move { object.free().await }))
    }
}

impl Callback {
    pub(crate) fn of(remote: rpc_core::RemoteCallback) -> Self {
        Self { remote: Arc::new(remote), birth: Birth::now() }
    }
}

#[pymethods]
impl Callback {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), birth: other.birth }
    }
}
