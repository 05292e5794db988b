//! Methods of the objects of a session: functions, modules, tensors, and the application's own.

use std::sync::Arc;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::client::Modules;
use rpc_core::{ErrorKind, RemoteFunction, RemoteTensor};

use crate::argument::{self, Args};
use crate::array::{DenseArray, WritableArray};
use crate::array_memory;
use crate::buffer::{self, NewBytes};
use crate::form::Form;
use crate::operation::{Operation, Options, UserCalls, wait_for};
use crate::prepare::prepare;
use crate::references::{Callback, Function, Module, Object, Origin, Pipe, Tensor};
use crate::reply::Reply;
use crate::types::{DataType, Device};

#[pymethods]
impl Function {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { remote: other.remote.clone(), origin: other.origin.clone() }
    }

    /// Name that the function was found by, or `None`.
    #[getter]
    fn name(&self) -> Option<&str> {
        match self.origin.facts() {
            Origin::Named(name) | Origin::OfModule(name, _) => Some(name),
            Origin::Returned => None,
        }
    }

    /// Calls the function, and waits on this thread. It makes no operation, because a call of a
    /// small function takes little longer than that would.
    #[pyo3(signature = (*args, timeout = None, lane = None))]
    fn __call__(&self, args: &Bound<'_, PyTuple>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Py<PyAny>> {
        let (py, options) = (args.py(), Options::new(timeout, lane)?);
        let function = self.remote.get()?;
        let args = Args::new(args, false)?;
        if args.needs_session() {
            return prepared_call(function.clone(), args, options).wait(py);
        }
        wait_for(py, options, function.call::<Reply>(args))?.into_object(py, Form::Blocking)
    }

    #[pyo3(signature = (args, timeout = None, lane = None, on_loop = false))]
    pub(crate) fn call_op(
        &self,
        args: &Bound<'_, PyTuple>,
        timeout: Option<f64>,
        lane: Option<u32>,
        on_loop: bool,
    ) -> PyResult<Operation> {
        let (function, options) = (self.remote.get()?, Options::new(timeout, lane)?);
        let args = Args::new(args, on_loop)?;
        if !args.needs_session() {
            return Ok(Operation::action(options, function.call::<Reply>(args), reply));
        }
        Ok(prepared_call(function.clone(), args, options))
    }

    /// Starts a call, whose result stays in the session for later calls.
    #[pyo3(signature = (args, timeout = None, lane = None))]
    fn pipe_call(&self, args: &Bound<'_, PyTuple>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Pipe> {
        let (function, options) = (self.remote.get()?, Options::new(timeout, lane)?);
        let args = Args::new(args, false)?;
        if args.needs_session() {
            let text = "arrays and functions of this process take several requests: make a tensor or a callback first";
            return Err(PyTypeError::new_err(text));
        }
        Ok(Pipe::of(options.pipe(function.call::<Reply>(args))))
    }

    /// Asks for the signature as text; `None` if the session does not tell.
    fn signature_op(&self) -> PyResult<Operation> {
        let function = self.function()?;
        let origin = self.origin.get()?.clone();
        let work = async move {
            let session = function.session();
            let told = match origin {
                Origin::Returned => return Ok(None),
                Origin::Named(name) => {
                    let ask = async {
                        let signature = session.get_function("rpc.signature").concurrent().await?;
                        signature.call::<Option<(Vec<String>, String)>>((name,)).concurrent().await
                    };
                    let text = |(params, returns): (Vec<String>, _)| format!("({}) -> {returns}", params.join(", "));
                    ask.await.map(|told| told.map(text))
                }
                Origin::OfModule(name, module) => {
                    let functions = Modules::new(&session).functions(&module).concurrent().await;
                    let signature =
                        |functions: Vec<(String, String)>| functions.into_iter().find(|(of, _)| *of == name);
                    functions.map(|functions| signature(functions).map(|(_, signature)| signature))
                }
            };
            match told {
                // A session that has no such function, or withholds it, tells no signatures.
                Err(error)
                    if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Refused | ErrorKind::Unsupported) =>
                {
                    Ok(None)
                }
                told => told,
            }
        };
        Ok(Operation::new(work, |py, _, text| Ok(text.into_pyobject(py)?.unbind())))
    }
}

/// Returns a call behind the requests that make its tensors and callbacks.
fn prepared_call(function: RemoteFunction, args: Args, options: Options) -> Operation {
    let work = async move {
        let limits = options.begin();
        let args = prepare(args, &function.session(), &limits).await?;
        limits.apply(function.call::<Reply>(args)).await
    };
    Operation::new(work, reply).heavy()
}

/// Makes the object that a call returns.
pub(crate) fn reply(py: Python<'_>, form: Form, reply: Reply) -> PyResult<Py<PyAny>> {
    reply.into_object(py, form)
}

#[pymethods]
impl Module {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self { remote: other.get().remote.clone() }
    }

    #[pyo3(signature = (name, timeout = None, lane = None))]
    fn get_function_op(&self, name: String, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (module, options) = (self.module()?, Options::new(timeout, lane)?);
        let work = async move {
            let function = options.apply(module.function(&name)).await?;
            Ok((function, Origin::OfModule(name, module)))
        };
        Ok(Operation::new(work, |py, form, (function, origin)| {
            let native = Bound::new(py, Function::found(function, origin))?;
            form.wrap(py, "Function", native.into_any()).map(Bound::unbind)
        }))
    }

    /// Asks for pairs of names and signatures.
    #[pyo3(signature = (timeout = None, lane = None))]
    fn functions_op(&self, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (module, options) = (self.module()?, Options::new(timeout, lane)?);
        let work = async move { options.apply(Modules::new(&module.session()).functions(&module)).await };
        Ok(Operation::new(work, |py, _, functions| Ok(functions.into_pyobject(py)?.unbind())))
    }

    fn free_op(&self) -> PyResult<Operation> {
        let module = self.module()?;
        Ok(Operation::unit(async move { module.free().await }))
    }
}

#[pymethods]
impl Tensor {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self { remote: other.get().remote.clone() }
    }

    /// Dimensions, outermost first.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.remote.facts().shape())
    }

    /// Distance of neighbours in each dimension, in elements; `None` for a dense tensor.
    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.remote.facts().strides().map(|strides| PyTuple::new(py, strides)).transpose()
    }

    /// Type of the elements.
    #[getter]
    fn dtype(&self) -> DataType {
        DataType(self.remote.facts().dtype())
    }

    /// Device that holds the tensor, as the session names it.
    #[getter]
    fn device(&self) -> Device {
        Device(self.remote.facts().device())
    }

    /// Offset of the first element in its storage, in bytes.
    #[getter]
    fn byte_offset(&self) -> u64 {
        self.remote.facts().byte_offset()
    }

    /// Size of the elements in bytes, densely packed.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.remote.facts().size_bytes()
    }

    fn view_of(
        &self,
        shape: Vec<i64>,
        dtype: Option<DataType>,
        byte_offset: u64,
        strides: Option<Vec<i64>>,
    ) -> PyResult<Self> {
        if strides.as_ref().is_some_and(|strides| strides.len() != shape.len()) {
            return Err(PyValueError::new_err("a view has one stride for each dimension"));
        }
        let tensor = self.tensor()?;
        let dtype = dtype.map_or(tensor.dtype(), |dtype| dtype.0);
        Ok(Self::of(tensor.view(byte_offset, dtype, &shape, strides.as_deref())))
    }

    #[pyo3(signature = (progress = None, timeout = None, lane = None))]
    fn download_op(&self, progress: Option<Py<PyAny>>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        let len = usize::try_from(tensor.size_bytes()).unwrap_or(usize::MAX);
        let memory = array_memory::memory(len)?;
        let work = async move {
            let session = tensor.session();
            let copy = reported.report(session.copy_from_remote_into(&tensor, None, memory), progress);
            let bytes = options.apply(copy).await?;
            Ok(DenseArray::new(bytes, tensor.shape().to_vec(), tensor.dtype()))
        };
        Ok(Operation::with_calls(&calls, work, |py, _, array| Ok(Bound::new(py, array)?.into_any().unbind())))
    }

    #[pyo3(signature = (source, progress = None, timeout = None, lane = None))]
    fn copy_from_op(
        &self,
        source: &Bound<'_, PyAny>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        if let Ok(other) = source.cast::<Self>() {
            let other = other.get().tensor()?;
            let session = tensor.session();
            return Ok(Operation::unit(async move { options.apply(session.copy_among_remote(&other, &tensor)).await }));
        }
        let array = argument::array(source)?;
        check_same_form(&tensor, array.dtype, &array.shape)?;
        Ok(write(tensor, 0, array.bytes, progress, options))
    }

    #[pyo3(signature = (array, progress = None, timeout = None, lane = None))]
    fn copy_to_op(
        &self,
        array: &Bound<'_, PyAny>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        let mut array = WritableArray::new(array)?;
        check_same_form(&tensor, array.dtype, &array.shape)?;
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        let work = async move {
            let session = tensor.session();
            let copy = session.copy_from_remote_to_slice(&tensor, 0, array.bytes_mut());
            options.apply(reported.report(copy, progress)).await
        };
        Ok(Operation::with_calls(&calls, work, |py, _, ()| Ok(py.None())))
    }

    /// Reads bytes of a dense tensor, from `start` to `stop`.
    #[pyo3(signature = (start = 0, stop = None, progress = None, timeout = None, lane = None))]
    fn read_op(
        &self,
        py: Python<'_>,
        start: u64,
        stop: Option<u64>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        let stop = stop.unwrap_or(tensor.size_bytes());
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        if start > stop || stop > tensor.size_bytes() {
            let text = format!("the tensor has {} bytes, and not those from {start} to {stop}", tensor.size_bytes());
            return Err(PyValueError::new_err(text));
        }
        let mut bytes = NewBytes::new(py, stop - start)?;
        let work = async move {
            let session = tensor.session();
            let copy = session.copy_from_remote_to_slice(&tensor, start, bytes.content());
            options.apply(reported.report(copy, progress)).await?;
            Ok(bytes)
        };
        Ok(Operation::with_calls(&calls, work, |_, _, bytes| Ok(bytes.into_object())))
    }

    /// Writes bytes into a dense tensor, from `offset` on.
    #[pyo3(signature = (data, offset = 0, progress = None, timeout = None, lane = None))]
    fn write_op(
        &self,
        data: &Bound<'_, PyAny>,
        offset: u64,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (tensor, options) = (self.tensor()?, Options::new(timeout, lane)?);
        Ok(write(tensor, offset, buffer::bytes(data)?, progress, options))
    }

    fn free_op(&self) -> PyResult<Operation> {
        let tensor = self.tensor()?;
        Ok(Operation::unit(async move { tensor.free().await }))
    }
}

fn check_same_form(tensor: &RemoteTensor, dtype: rpc_core::DataType, shape: &[i64]) -> PyResult<()> {
    if dtype == tensor.dtype() && shape == tensor.shape() {
        return Ok(());
    }
    Err(PyValueError::new_err(format!(
        "the tensor is {} of shape {:?}, and the array {dtype} of shape {shape:?}",
        tensor.dtype(),
        tensor.shape()
    )))
}

/// Returns the copy of bytes into a tensor.
fn write(
    tensor: RemoteTensor,
    offset: u64,
    data: bytes::Bytes,
    progress: Option<Py<PyAny>>,
    options: Options,
) -> Operation {
    let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
    let reported = calls.clone();
    let work = async move {
        let session = tensor.session();
        let copy = session.copy_to_remote_at(&tensor, offset, data);
        options.apply(reported.report(copy, progress)).await
    };
    Operation::with_calls(&calls, work, |py, _, ()| Ok(py.None()))
}

#[pymethods]
impl Object {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self { remote: other.get().remote.clone() }
    }

    fn free_op(&self) -> PyResult<Operation> {
        let object = self.object()?;
        Ok(Operation::unit(async move { object.free().await }))
    }
}

#[pymethods]
impl Pipe {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self { remote: other.get().remote.clone() }
    }

    #[pyo3(signature = (timeout = None))]
    fn result_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let options = Options::new(timeout, None)?;
        Ok(Operation::action(options, self.pipe()?.fetch(), reply))
    }
}

#[pymethods]
impl Callback {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self { remote: other.get().remote.clone() }
    }
}
