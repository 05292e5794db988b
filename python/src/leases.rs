//! Leases: exclusive use of a device among the sessions of a server.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use rpc_core::client::{self, LeaseOptions};

use crate::form::Form;
use crate::operation::{Born, Operation, Options, seconds};
use crate::session::Session;
use crate::types::{self, Device};

/// Waits for a lease.
#[pyfunction]
#[pyo3(signature = (session, device, max_duration = None, priority = 0, timeout = None))]
pub(crate) fn lease_op(
    session: &Bound<'_, Session>,
    device: &Bound<'_, PyAny>,
    max_duration: Option<f64>,
    priority: i32,
    timeout: Option<f64>,
) -> PyResult<Operation> {
    let (session, options) = (session.get().session(session.py())?, Options::new(timeout, None)?);
    let (device, terms) = (types::device(device)?, terms(max_duration, priority)?);
    let work = async move { options.apply(session.lease(device, &terms)).await };
    Ok(Operation::new(work, granted))
}

/// Asks for a lease without waiting for it.
#[pyfunction]
#[pyo3(signature = (session, device, max_duration = None, priority = 0, timeout = None))]
pub(crate) fn request_lease_op(
    session: &Bound<'_, Session>,
    device: &Bound<'_, PyAny>,
    max_duration: Option<f64>,
    priority: i32,
    timeout: Option<f64>,
) -> PyResult<Operation> {
    let (session, options) = (session.get().session(session.py())?, Options::new(timeout, None)?);
    let (device, terms) = (types::device(device)?, terms(max_duration, priority)?);
    let work = async move { options.apply(session.request_lease(device, &terms)).await };
    Ok(Operation::new(work, |py, form, request| {
        let native = Bound::new(py, LeaseRequest(Born::new(request)))?;
        form.wrap(py, "LeaseRequest", native.into_any()).map(Bound::unbind)
    }))
}

fn terms(max_duration: Option<f64>, priority: i32) -> PyResult<LeaseOptions> {
    let terms = LeaseOptions::default().priority(priority);
    Ok(match max_duration {
        Some(limit) => terms.max_duration(seconds(limit)?),
        None => terms,
    })
}

fn granted(py: Python<'_>, form: Form, lease: client::Lease) -> PyResult<Py<PyAny>> {
    let native = Bound::new(py, Lease(Born::new(Arc::new(Mutex::new(Some(lease))))))?;
    form.wrap(py, "Lease", native.into_any()).map(Bound::unbind)
}

/// A request for a lease, which waits in the queue of its device.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct LeaseRequest(Born<client::LeaseRequest>);

#[pymethods]
impl LeaseRequest {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Device that is asked for.
    #[getter]
    fn device(&self) -> Device {
        Device(self.0.facts().device())
    }

    /// Asks for the number of requests in front of this one.
    fn ahead_op(&self) -> PyResult<Operation> {
        let request = self.0.get()?.clone();
        let work = async move { request.ahead().await };
        Ok(Operation::new(work, |py, _, ahead| Ok(ahead.into_pyobject(py)?.into_any().unbind())))
    }

    /// Waits for the lease.
    #[pyo3(signature = (timeout = None))]
    fn granted_op(&self, timeout: Option<f64>) -> PyResult<Operation> {
        let (request, options) = (self.0.get()?.clone(), Options::new(timeout, None)?);
        let work = async move { options.apply(request.granted()).await };
        Ok(Operation::new(work, granted))
    }
}

/// Exclusive use of a device. Dropping it ends the lease.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Lease(Born<Arc<Mutex<Option<client::Lease>>>>);

impl Lease {
    fn with<T>(&self, read: impl FnOnce(&client::Lease) -> T) -> PyResult<T> {
        match &*self.0.get()?.lock() {
            Some(lease) => Ok(read(lease)),
            None => Err(PyRuntimeError::new_err("this lease was released")),
        }
    }
}

#[pymethods]
impl Lease {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        Self(other.get().0.clone())
    }

    /// Device that the lease is for.
    #[getter]
    fn device(&self) -> PyResult<Device> {
        self.with(|lease| Device(lease.device()))
    }

    /// Seconds for which the request has waited at the server.
    #[getter]
    fn waited(&self) -> PyResult<f64> {
        self.with(|lease| lease.waited().as_secs_f64())
    }

    /// Seconds since the grant.
    #[getter]
    fn held(&self) -> PyResult<f64> {
        self.with(|lease| lease.held().as_secs_f64())
    }

    /// Seconds after which the server ends the session.
    #[getter]
    fn expires_in(&self) -> PyResult<f64> {
        self.with(|lease| match lease.expires_in() {
            Duration::MAX => f64::INFINITY,
            left => left.as_secs_f64(),
        })
    }

    /// True once it was released here.
    #[getter]
    fn is_released(&self) -> PyResult<bool> {
        Ok(self.0.get()?.lock().is_none())
    }

    /// Ends the lease, and returns the seconds for which it was held.
    fn release_op(&self) -> PyResult<Operation> {
        let lease = self.0.get()?.clone();
        let work = async move {
            let held = lease.lock().take();
            match held {
                Some(lease) => Ok(Some(lease.release().await?)),
                None => Ok(None),
            }
        };
        Ok(Operation::new(work, |py, _, held| match held {
            Some(held) => Ok(held.as_secs_f64().into_pyobject(py)?.into_any().unbind()),
            None => Err(PyRuntimeError::new_err("this lease was released")),
        }))
    }
}
