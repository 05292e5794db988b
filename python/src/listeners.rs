//! Listeners near a session's server: connections that come there are served here.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use rpc_core::client::{RemoteConnection, RemoteListener};

use crate::buffer;
use crate::operation::{Born, Operation, Options};
use crate::session::Session;

/// Has the server listen at an address.
#[pyfunction]
#[pyo3(signature = (session, address, timeout = None))]
pub(crate) fn listen_op(session: &Bound<'_, Session>, address: &str, timeout: Option<f64>) -> PyResult<Operation> {
    let (session, options) = (session.get().session(session.py())?, Options::new(timeout, None)?);
    let listen = session.listen(address);
    let work = async move { options.apply(listen).await };
    Ok(Operation::new(work, |py, form, listener| {
        let native = Bound::new(py, Listener(Born::new(Arc::new(listener))))?;
        form.wrap(py, "Listener", native.into_any()).map(Bound::unbind)
    }))
}

/// A listener near a session's server. Dropping it closes the port.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Listener(Born<Arc<RemoteListener>>);

#[pymethods]
impl Listener {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Address, with the port that was chosen.
    #[getter]
    fn address(&self) -> &str {
        self.0.facts().address()
    }

    /// Waits for the next connection.
    #[pyo3(signature = (timeout = None))]
    fn accept_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let (listener, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let work = async move { options.apply(listener.accept()).await };
        Ok(Operation::new(work, |py, form, connection| {
            let native = Bound::new(py, Connection(Born::new(connection)))?;
            form.wrap(py, "Connection", native.into_any()).map(Bound::unbind)
        }))
    }
}

/// A connection that was accepted near a session's server. Dropping it closes the connection.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Connection(Born<RemoteConnection>);

#[pymethods]
impl Connection {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Name of the peer, for people.
    #[getter]
    fn peer(&self) -> &str {
        self.0.facts().peer()
    }

    /// Waits for bytes; `None` once the peer has sent its last.
    #[pyo3(signature = (timeout = None))]
    fn read_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let (connection, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let work = async move { options.apply(connection.read()).await };
        Ok(Operation::new(work, |py, _, bytes| {
            Ok(bytes.map(|bytes| PyBytes::new(py, &bytes)).into_pyobject(py)?.unbind())
        }))
    }

    #[pyo3(signature = (data, timeout = None))]
    fn write_op(&self, data: &Bound<'_, PyAny>, timeout: Option<f64>) -> PyResult<Operation> {
        let (connection, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let data = buffer::bytes(data)?;
        Ok(Operation::unit(async move { options.apply(connection.write(data)).await }))
    }

    fn finish_op(&self) -> PyResult<Operation> {
        let connection = self.0.get()?.clone();
        Ok(Operation::unit(async move { connection.finish().await }))
    }
}
