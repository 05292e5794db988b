//! Sessions, and how they are opened.

use std::time::Duration;

use parking_lot::RwLock;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use rpc_core::{ErrorKind, RpcError};
use rpc_server::pki::trust::ClientTrust;
use rpc_transports::Connector;

use crate::argument;
use crate::errors;
use crate::objects;
use crate::operation::{Birth, Operation, Options};
use crate::types;

/// A session: a place where functions run and memory lives.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Session {
    /// `None` once it is closed.
    session: RwLock<Option<rpc_core::Session>>,
    birth: Birth,
    /// Where it leads, as text.
    address: String,
}

impl Session {
    pub(crate) fn of(session: rpc_core::Session, address: String) -> Self {
        Self { session: RwLock::new(Some(session)), birth: Birth::now(), address }
    }

    /// Returns the session.
    ///
    /// # Errors
    ///
    /// It is closed, or was made before a fork.
    pub(crate) fn session(&self, py: Python<'_>) -> PyResult<rpc_core::Session> {
        self.birth.check()?;
        self.session.read().clone().ok_or_else(|| {
            errors::exception(py, &RpcError::new(ErrorKind::Closed, "this session has been closed here"))
        })
    }
}

#[pymethods]
impl Session {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        let session = RwLock::new(other.session.read().clone());
        Self { session, birth: other.birth, address: other.address.clone() }
    }

    /// Where the session leads.
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

    /// True after `close`.
    #[getter]
    fn is_closed(&self) -> bool {
        self.session.read().is_none()
    }

    #[pyo3(signature = (name, timeout = None, lane = None))]
    fn get_function_op(
        &self,
        py: Python<'_>,
        name: String,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(py)?, Options::new(timeout, lane)?);
        let work = async move {
            let function = options.apply(session.get_function(&name)).await?;
            Ok((function, name))
        };
        Ok(Operation::new(work, |py, form, (function, name)| {
            let native = Bound::new(py, objects::Function::of(function, Some(name)))?;
            form.wrap(py, "Function", native.into_any()).map(Bound::unbind)
        }))
    }

    #[pyo3(signature = (array, device = None, timeout = None, lane = None))]
    fn tensor_op(
        &self,
        array: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(array.py())?, Options::new(timeout, lane)?);
        let device = device.map_or(Ok(rpc_core::Device::cpu()), types::device)?;
        let array = argument::array(array)?;
        let work = async move {
            let tensor = options.apply(session.alloc(device, array.dtype, &array.shape)).await?;
            if !array.bytes.is_empty() {
                options.apply(session.copy_to_remote(&tensor, array.bytes)).await?;
            }
            Ok(tensor)
        };
        Ok(Operation::new(work, tensor))
    }

    #[pyo3(signature = (shape, dtype, device = None, scope = None, timeout = None, lane = None))]
    fn empty_op(
        &self,
        shape: Vec<i64>,
        dtype: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        scope: Option<String>,
        timeout: Option<f64>,
        lane: Option<u32>,
    ) -> PyResult<Operation> {
        let (session, options) = (self.session(dtype.py())?, Options::new(timeout, lane)?);
        let device = device.map_or(Ok(rpc_core::Device::cpu()), types::device)?;
        let dtype = types::data_type(dtype)?;
        let work = async move { options.apply(session.alloc_in_scope(device, dtype, &shape, scope.as_deref())).await };
        Ok(Operation::new(work, tensor))
    }

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
        let work = async move {
            options
                .apply(match loader {
                    Some(loader) => session.load_module_with(&loader, &path),
                    None => session.load_module(&path),
                })
                .await
        };
        Ok(Operation::new(work, |py, form, module| {
            let native = Bound::new(py, objects::Module::of(module))?;
            form.wrap(py, "Module", native.into_any()).map(Bound::unbind)
        }))
    }

    fn callback_op(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<Operation> {
        let session = self.session(py)?;
        let work = async move { objects::callback::make_callback(&session, function).await };
        Ok(Operation::new(work, |py, _, callback| {
            Ok(Bound::new(py, objects::Callback::of(callback))?.into_any().unbind())
        }))
    }

    /// Waits until the session ends, and returns why.
    fn ended_op(&self, py: Python<'_>) -> PyResult<Operation> {
        let session = self.session(py)?;
        let work = async move { Ok(session.ended().await) };
        Ok(Operation::new(work, |py, _, error| Ok(errors::exception(py, &error).into_value(py).into_any())))
    }

    /// Ends the session in an orderly way.
    fn shutdown_op(&self, py: Python<'_>) -> PyResult<Operation> {
        let session = self.session(py)?;
        Ok(Operation::unit(async move { session.shutdown().await }))
    }

    /// Gives the session up here: it ends when its last object is freed.
    fn forget(&self) {
        let session = self.session.write().take();
        drop(session);
    }
}

fn tensor(py: Python<'_>, form: crate::form::Form, tensor: rpc_core::RemoteTensor) -> PyResult<Py<PyAny>> {
    let native = Bound::new(py, objects::Tensor::of(tensor))?;
    form.wrap(py, "Tensor", native.into_any()).map(Bound::unbind)
}

/// Opens a session. `options` are those of `tensor_rpc.connect`.
#[pyfunction]
pub(crate) fn connect(address: String, options: &Bound<'_, PyDict>) -> PyResult<Operation> {
    let connector = connector(options)?;
    let work = async move {
        // The dialling itself blocks a thread of its own, so that neither an event loop nor Ctrl-C
        // waits for it.
        let (send, receive) = tokio::sync::oneshot::channel();
        let dialled = address.clone();
        let dial = move || {
            let _ = send.send(connector.connect_blocking(dialled.as_str()).map_err(|error| error.into_rpc_error()));
        };
        std::thread::Builder::new()
            .name("rpc-connect".to_owned())
            .spawn(dial)
            .map_err(|error| RpcError::internal(format!("no thread can be started: {error}")))?;
        let session = receive.await.map_err(|_| RpcError::internal("the thread that connects has ended"))??;
        Ok((session, address))
    };
    Ok(Operation::new(work, |py, form, (session, address)| {
        let native = Bound::new(py, Session::of(session, address))?;
        form.wrap(py, "Session", native.into_any()).map(Bound::unbind)
    }))
}

/// Returns a connector with the options of `tensor_rpc.connect`.
pub(crate) fn connector(options: &Bound<'_, PyDict>) -> PyResult<Connector> {
    let mut connector = Connector::new().transports(rpc_server::transports());
    let mut trust = ClientTrust::default();
    for (name, value) in options {
        if value.is_none() {
            continue;
        }
        let seconds = || -> PyResult<Duration> {
            Duration::try_from_secs_f64(value.extract()?).map_err(|error| PyValueError::new_err(error.to_string()))
        };
        connector = match name.extract::<String>()?.as_str() {
            "via" => value.extract::<Vec<String>>()?.iter().fold(connector, |connector, hop| connector.via(hop)),
            "key" => connector.key(&value.extract::<String>()?),
            "workspace" => connector.workspace(&value.extract::<String>()?),
            "connect_timeout" => {
                let limit = seconds()?;
                connector.connect_timeout(limit).handshake_timeout(limit)
            }
            "queue_timeout" => connector.queue_timeout(seconds()?),
            "keep_alive" => connector.keep_alive(seconds()?),
            "spin" => connector.spin(seconds()?),
            "token_file" => {
                trust.token_file = Some(value.extract()?);
                connector
            }
            "ca" => {
                trust.ca = Some(value.extract()?);
                connector
            }
            "cert" => {
                trust.cert = Some(value.extract()?);
                connector
            }
            "cert_key" => {
                trust.cert_key = Some(value.extract()?);
                connector
            }
            other => return Err(PyTypeError::new_err(format!("connect has no option {other:?}"))),
        };
    }
    let dial = trust.dial_options().map_err(|error| PyValueError::new_err(chain(&error)))?;
    Ok(connector.dial(dial))
}

/// Returns an error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
