//! Sessions: functions, tensors, devices, modules, and their end.

use std::collections::HashMap;
use std::fs::File;
use std::io::Seek as _;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyTuple};
use rpc_core::client::{Digest, LeaseOptions, Modules, SendRoute};
use rpc_core::{Action, DataType, DeviceAttribute, ErrorKind, RemoteFunction, RemoteTensor, RpcError, VirtualDevice};
use rpc_server::modules::hash;

use crate::argument::{self, Arg, Args};
use crate::callable::Callable;
use crate::callback;
use crate::errors;
use crate::form::Form;
use crate::objects;
use crate::operation::{Born, Operation, Options, UserCalls};
use crate::prepare::prepare;
use crate::references;
use crate::reply::Reply;
use crate::types;

/// A session: a place where functions run and memory lives.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Session {
    /// `None` once it is closed.
    session: Born<Arc<RwLock<Option<rpc_core::Session>>>>,
    /// Functions that were called by their names.
    functions: Born<Arc<Mutex<HashMap<String, RemoteFunction>>>>,
    /// Address of its far end, as text.
    address: String,
}

impl Session {
    pub(crate) fn of(session: rpc_core::Session, address: String) -> Self {
        let session = Born::new(Arc::new(RwLock::new(Some(session))));
        Self { session, functions: Born::new(Arc::default()), address }
    }

    /// Returns the session.
    ///
    /// # Errors
    ///
    /// It is closed, or was made before a fork.
    pub(crate) fn session(&self, py: Python<'_>) -> PyResult<rpc_core::Session> {
        self.session.get()?.read().clone().ok_or_else(|| {
            errors::exception(py, &RpcError::new(ErrorKind::Closed, "this session has been closed here"))
        })
    }
}

#[pymethods]
impl Session {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        let (session, functions) = (other.session.clone(), other.functions.clone());
        Self { session, functions, address: other.address.clone() }
    }

    /// Address of the far end.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// True if the session is in this process.
    #[getter]
    fn is_local(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.session(py)?.is_local())
    }

    /// True if all that this process sends and receives is encrypted.
    #[getter]
    fn is_encrypted(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.session(py)?.is_encrypted())
    }

    /// True after `close`, and in the child of a fork.
    #[getter]
    fn is_closed(&self) -> bool {
        self.session.get().map_or(true, |session| session.read().is_none())
    }

    /// Looks a function up. With `types`, those of the arguments, if their number is known, and of
    /// the return are compared with its signature.
    #[pyo3(signature = (name, timeout = None, lane = None, types = None))]
    fn get_function_op(
        &self,
        py: Python<'_>,
        name: String,
        timeout: Option<f64>,
        lane: Option<u32>,
        types: Option<(Option<Vec<String>>, String)>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let work = async move {
            let function = match types {
                Some((args, returns)) => session.function_of_types(&name, args.as_deref(), &returns),
                None => session.get_function(&name),
            };
            let function = options.apply(function).await?;
            Ok((function, name))
        };
        Ok(Operation::new(work, |py, form, (function, name)| {
            let native = Bound::new(py, references::Function::of(function, Some(name)))?;
            form.wrap(py, "Function", native.into_any()).map(Bound::unbind)
        }))
    }

    /// Calls a function by its name, which is looked up the first time.
    #[pyo3(signature = (name, args, timeout = None, lane = None, on_loop = false))]
    fn call_op(
        &self,
        py: Python<'_>,
        name: &str,
        args: &Bound<'_, PyTuple>,
        timeout: Option<f64>,
        lane: Option<u32>,
        on_loop: bool,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let functions = self.functions.get()?;
        let args = Args::new(args, on_loop)?;
        let found = functions.lock().get(name).cloned();
        match found {
            Some(function) if !args.needs_session() => {
                Ok(Operation::action(options, function.call::<Reply>(args), objects::reply))
            }
            found => {
                let (functions, name) = (functions.clone(), name.to_owned());
                let is_heavy = args.needs_session();
                let work = async move {
                    let limits = options.begin();
                    let function = match found {
                        Some(function) => function,
                        None => {
                            let function = limits.apply(session.get_function(&name)).await?;
                            functions.lock().entry(name).or_insert(function).clone()
                        }
                    };
                    let args = prepare(args, &session, &limits).await?;
                    limits.apply(function.call::<Reply>(args)).await
                };
                let made = Operation::new(work, objects::reply);
                Ok(if is_heavy { made.heavy() } else { made })
            }
        }
    }

    /// Asks for lists of name, signature and, if the server tells them, description.
    #[pyo3(signature = (timeout = None, lane = None))]
    fn functions_op(&self, py: Python<'_>, timeout: Option<f64>, lane: Option<u32>) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let work = async move {
            let limits = options.begin();
            let functions = limits.apply(session.get_function("rpc.functions")).await?;
            match limits.apply(functions.call::<Vec<Vec<String>>>((true,))).await {
                // An older server takes no argument.
                Err(error) if error.kind() == ErrorKind::InvalidArgument => limits.apply(functions.call(())).await,
                told => told,
            }
        };
        Ok(Operation::new(work, |py, _, functions| Ok(functions.into_pyobject(py)?.unbind())))
    }

    #[pyo3(signature = (array, device = None, scope = None, progress = None, timeout = None, lane = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn tensor_op(
        &self,
        array: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        scope: Option<String>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(array.py())?, Options::new(timeout, lane)?);
        let place = AllocPlace::new(device, scope, 0)?;
        let array = argument::array(array)?;
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        let work = async move {
            let limits = options.begin();
            let made = place.alloc(&session, array.dtype, &array.shape);
            let tensor = limits.apply(made).await?;
            if !array.bytes.is_empty() {
                let copy = reported.report(session.copy_to_remote(&tensor, array.bytes), progress);
                limits.apply(copy).await?;
            }
            Ok(tensor)
        };
        Ok(Operation::with_calls(&calls, work, tensor))
    }

    #[pyo3(signature = (shape, dtype, device = None, scope = None, alignment = 0, timeout = None, lane = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn empty_op(
        &self,
        shape: Vec<i64>,
        dtype: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        scope: Option<String>,
        alignment: u64,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(dtype.py())?, Options::new(timeout, lane)?);
        let place = AllocPlace::new(device, scope, alignment)?;
        let dtype = types::data_type(dtype)?;
        let work = async move { options.apply(place.alloc(&session, dtype, &shape)).await };
        Ok(Operation::new(work, tensor))
    }

    /// Copies the bytes from `start` to `stop` of a tensor of this session to a tensor of another,
    /// from its byte `offset` on. Returns the kind of the route, and an address or a reason.
    #[pyo3(signature = (source, session, destination, start = 0, stop = None, offset = 0, progress = None,
        timeout = None, lane = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn send_op(
        &self,
        source: &Bound<'_, references::Tensor>,
        session: &Bound<'_, Self>,
        destination: &Bound<'_, references::Tensor>,
        start: u64,
        stop: Option<u64>,
        offset: u64,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let py = source.py();
        let (from_session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let (from, to) = (source.get().tensor()?, destination.get().tensor()?);
        let to_session = session.get().session(py)?;
        let range = start..stop.unwrap_or(from.size_bytes());
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        let work = async move {
            let send = from_session.send_range(&from, range, &to_session, &to, offset);
            options.apply(reported.report(send, progress)).await
        };
        Ok(Operation::with_calls(&calls, work, |py, _, route| {
            let (kind, address, reason) = match route {
                SendRoute::Direct { address } => ("direct", Some(address), None),
                SendRoute::ThroughClient { reason } => ("client", None, Some(reason)),
                SendRoute::SameSession => ("session", None, None),
                _ => ("other", None, None),
            };
            Ok((kind, address, reason).into_pyobject(py)?.into_any().unbind())
        }))
    }

    /// Loads a module by a path of the server.
    #[pyo3(signature = (path, loader = None, timeout = None, lane = None))]
    fn load_module_op(
        &self,
        py: Python<'_>,
        path: String,
        loader: Option<String>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let work = async move { options.apply(load(&session, &path, loader.as_deref())).await };
        Ok(Operation::new(work, module))
    }

    /// Sends a file of this machine to the server, unless the server has it, and loads it.
    #[pyo3(signature = (path, loader = None, progress = None, timeout = None, lane = None))]
    fn upload_module_op(
        &self,
        py: Python<'_>,
        path: PathBuf,
        loader: Option<String>,
        progress: Option<Py<PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let opened = File::open(&path).and_then(|file| Ok((file.metadata()?.is_file(), file)));
        let (is_file, mut file) = opened.map_err(|error| errors::os_error(py, &error, &path))?;
        if !is_file {
            return Err(PyValueError::new_err(format!("{} is no regular file", path.display())));
        }
        let (calls, progress) = (UserCalls::default(), progress.map(Arc::new));
        let reported = calls.clone();
        let work = async move {
            let limits = options.begin();
            let unreadable = |error: std::io::Error| {
                RpcError::new(ErrorKind::Io, format!("cannot read {}: {error}", path.display()))
            };
            let (digest, len) = hash(&file).map_err(unreadable)?;
            file.rewind().map_err(unreadable)?;
            let upload = reported.report(Modules::new(&session).upload(digest, len, file), progress);
            limits.apply(upload).await?;
            limits.apply(load(&session, &digest.module_path(), loader.as_deref())).await
        };
        Ok(Operation::with_calls(&calls, work, module))
    }

    /// Makes the server store a file of its own as a module, and returns the path of that.
    #[pyo3(signature = (path, timeout = None, lane = None))]
    fn import_module_op(
        &self,
        py: Python<'_>,
        path: String,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let work = async move { options.apply(Modules::new(&session).import(&path)).await };
        Ok(Operation::new(work, |py, _, digest: Digest| {
            Ok(digest.module_path().into_pyobject(py)?.into_any().unbind())
        }))
    }

    #[pyo3(signature = (function, timeout = None, on_loop = false))]
    fn callback_op(&self, function: &Bound<'_, PyAny>, timeout: Option<f64>, on_loop: bool) -> PyResult<Operation> {
        let (session, options) = (self.session(function.py())?, Options::new(timeout, None)?);
        if !function.is_callable() {
            let class = function.get_type().qualname()?;
            return Err(pyo3::exceptions::PyTypeError::new_err(format!("an object of {class} cannot be called")));
        }
        let mut callable = Callable::new(function);
        if on_loop {
            callable.on_loop(&argument::running_loop(function.py())?);
        }
        let work = async move { callback::make_callback(&session, callable, &options.begin()).await };
        Ok(Operation::new(work, |py, _, callback| {
            Ok(Bound::new(py, references::Callback::of(callback))?.into_any().unbind())
        }))
    }

    /// Asks for an attribute of a device, by its name.
    #[pyo3(signature = (device, name, timeout = None, lane = None))]
    fn attribute_op(
        &self,
        device: &Bound<'_, PyAny>,
        name: &str,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(device.py())?, Options::new(timeout, lane)?);
        let device = types::device(device)?;
        let attribute = DeviceAttribute::ALL.iter().find(|attribute| attribute.name() == name).ok_or_else(|| {
            let names: Vec<_> = DeviceAttribute::ALL.iter().map(|attribute| attribute.name()).collect();
            PyValueError::new_err(format!("no attribute is called {name:?}; there are: {}", names.join(", ")))
        })?;
        let work = async move {
            let value = options.apply(session.attribute(device, *attribute)).await?;
            Ok(Reply::new(value, session.shared()))
        };
        Ok(Operation::new(work, |py, form, reply| reply.into_object(py, form)))
    }

    #[pyo3(signature = (device, timeout = None, lane = None))]
    fn create_stream_op(
        &self,
        device: &Bound<'_, PyAny>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(device.py())?, Options::new(timeout, lane)?);
        let device = types::device(device)?;
        let work = async move { options.apply(session.create_stream(device)).await };
        Ok(Operation::new(work, |py, form, stream| {
            let native = Bound::new(py, references::Object::of(stream))?;
            form.wrap(py, "Object", native.into_any()).map(Bound::unbind)
        }))
    }

    #[pyo3(signature = (device, stream = None, timeout = None, lane = None))]
    fn set_stream_op(
        &self,
        device: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, references::Object>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(device.py())?, Options::new(timeout, lane)?);
        let device = types::device(device)?;
        let stream = stream.map(|stream| stream.get().object()).transpose()?;
        Ok(Operation::unit(async move { options.apply(session.set_stream(device, stream.as_ref())).await }))
    }

    #[pyo3(signature = (device, stream = None, timeout = None, lane = None))]
    fn stream_wait_op(
        &self,
        device: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, references::Object>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(device.py())?, Options::new(timeout, lane)?);
        let device = types::device(device)?;
        let stream = stream.map(|stream| stream.get().object()).transpose()?;
        Ok(Operation::unit(async move { options.apply(session.stream_wait(device, stream.as_ref())).await }))
    }

    /// Lets later work of the stream `destination` begin behind the work of `source` so far. Each
    /// is a device and a stream of it, none for its current one.
    #[pyo3(signature = (source, destination, timeout = None, lane = None))]
    fn sync_stream_from_to_op(
        &self,
        source: (Bound<'_, PyAny>, Option<Bound<'_, references::Object>>),
        destination: (Bound<'_, PyAny>, Option<Bound<'_, references::Object>>),
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(source.0.py())?, Options::new(timeout, lane)?);
        let side = |(device, stream): (Bound<'_, PyAny>, Option<Bound<'_, references::Object>>)| {
            let stream = stream.map(|stream| stream.get().object()).transpose()?;
            PyResult::Ok((types::device(&device)?, stream))
        };
        let ((from_device, from), (to_device, to)) = (side(source)?, side(destination)?);
        Ok(Operation::unit(async move {
            let (from, to) = ((from_device, from.as_ref()), (to_device, to.as_ref()));
            options.apply(session.sync_stream_from_to(from, to)).await
        }))
    }

    /// Measures calls of a function at the server: a list of seconds per call. `counts` are the
    /// number of calls in a sample, samples, calls before the first one, and bytes to flush.
    #[pyo3(signature = (function, args, counts, min_repeat_ms, lease = None, timeout = None, lane = None))]
    #[allow(clippy::too_many_arguments, reason = "keywords in Python")]
    fn time_op(
        &self,
        function: &Bound<'_, references::Function>,
        args: &Bound<'_, PyTuple>,
        counts: (u64, u64, u64, u64),
        min_repeat_ms: f64,
        lease: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(args.py())?, Options::new(timeout, lane)?);
        let function = function.get().function()?;
        let lease = lease.map(types::device).transpose()?;
        let mut args = Args::new(args, false)?;
        let (number, repeat, warmup, flush) = counts;
        let whole = |count: u64| Arg::Plain(rpc_core::Value::Int(count.try_into().unwrap_or(i64::MAX)));
        let min_repeat_ms = Arg::Plain(rpc_core::Value::Float(min_repeat_ms));
        for arg in [whole(flush), whole(warmup), min_repeat_ms, whole(repeat), whole(number)] {
            args.insert_first(arg);
        }
        args.insert_first(Arg::Function(function));
        let work = async move {
            let limits = options.begin();
            let timer = limits.apply(session.get_function("rpc.time_function")).await?;
            let args = prepare(args, &session, &limits).await?;
            let lease = match lease {
                Some(device) => Some(limits.limit(session.lease(device, &LeaseOptions::default())).await?),
                None => None,
            };
            let samples = limits.apply(timer.call::<Vec<f64>>(args)).await;
            // Dropped last, so that it lasts as long as the measurement.
            drop(lease);
            samples
        };
        Ok(Operation::new(work, |py, _, samples| Ok(samples.into_pyobject(py)?.unbind())))
    }

    /// Waits until the session ends, and returns why.
    fn ended_op(&self, py: Python<'_>) -> PyResult<Operation> {
        let session = self.session(py)?;
        let work = async move { Ok(session.ended().await) };
        Ok(Operation::new(work, |py, _, error| Ok(errors::exception(py, &error).into_value(py).into_any())))
    }

    /// Ends the session in an orderly way.
    #[pyo3(signature = (timeout = None))]
    fn shutdown_op(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, None)?);
        Ok(Operation::unit(async move { options.apply(session.shutdown()).await }))
    }

    /// Gives the session up here: it ends when its last object is freed.
    fn forget(&self) {
        if let (Ok(session), Ok(functions)) = (self.session.get(), self.functions.get()) {
            let functions = std::mem::take(&mut *functions.lock());
            let session = session.write().take();
            drop((functions, session));
        }
    }
}

/// Returns the loading of a module by a path of the server.
pub(crate) fn load(
    session: &rpc_core::Session,
    path: &str,
    loader: Option<&str>,
) -> rpc_core::Action<rpc_core::RemoteModule> {
    match loader {
        Some(loader) => session.load_module_with(loader, path),
        None => session.load_module(path),
    }
}

fn module(py: Python<'_>, form: Form, module: rpc_core::RemoteModule) -> PyResult<Py<PyAny>> {
    let native = Bound::new(py, references::Module::of(module))?;
    form.wrap(py, "Module", native.into_any()).map(Bound::unbind)
}

fn tensor(py: Python<'_>, form: Form, tensor: RemoteTensor) -> PyResult<Py<PyAny>> {
    let native = Bound::new(py, references::Tensor::of(tensor))?;
    form.wrap(py, "Tensor", native.into_any()).map(Bound::unbind)
}

/// Place of an allocation, as a caller in Python names it.
pub(crate) struct AllocPlace {
    on: Place,
    alignment: u64,
}

enum Place {
    Device(rpc_core::Device, Option<String>),
    Constraint(VirtualDevice),
}

impl AllocPlace {
    /// Reads a device, or the text of a constraint, which has a comma or an asterisk. `cpu:0` is
    /// the default.
    pub(crate) fn new(device: Option<&Bound<'_, PyAny>>, scope: Option<String>, alignment: u64) -> PyResult<Self> {
        let invalid = |error: RpcError| PyValueError::new_err(error.message().to_owned());
        let text = device.and_then(|device| device.cast::<PyString>().ok()).map(ToString::to_string);
        let constraint = match text.filter(|text| text.contains([',', '*'])) {
            Some(text) => Some(text.parse::<VirtualDevice>().map_err(invalid)?),
            None => None,
        };
        let with_scope = |constraint: VirtualDevice, scope: String| {
            let scoped = VirtualDevice::builder().memory_scope(scope).build().map_err(invalid)?;
            let joined = constraint.join(&scoped);
            joined.ok_or_else(|| PyValueError::new_err(format!("{constraint} has another memory scope")))
        };
        let on = match (constraint, scope) {
            (Some(constraint), None) => Place::Constraint(constraint),
            (Some(constraint), Some(scope)) => Place::Constraint(with_scope(constraint, scope)?),
            (None, scope) => {
                let device = device.map_or(Ok(rpc_core::Device::cpu()), types::device)?;
                match scope {
                    Some(scope) if alignment != 0 => Place::Constraint(with_scope(device.into(), scope)?),
                    scope => Place::Device(device, scope),
                }
            }
        };
        Ok(Self { on, alignment })
    }

    pub(crate) fn alloc(&self, session: &rpc_core::Session, dtype: DataType, shape: &[i64]) -> Action<RemoteTensor> {
        match &self.on {
            Place::Device(device, None) => session.alloc_aligned(*device, dtype, shape, self.alignment),
            Place::Device(device, scope) => session.alloc_in_scope(*device, dtype, shape, scope.as_deref()),
            Place::Constraint(constraint) => session.alloc_aligned(constraint, dtype, shape, self.alignment),
        }
    }
}
