//! Look-ups and allocations whose outcomes later requests of their lane use before they are there.

use pyo3::prelude::*;
use rpc_core::RpcError;

use crate::errors;
use crate::operation::Options;
use crate::references::{Function, Module, Origin, Tensor};
use crate::session::{AllocPlace, Session, load};
use crate::types;

/// Returns the exception for an operation that was not submitted.
fn not_submitted(py: Python<'_>) -> impl Fn(RpcError) -> PyErr + '_ {
    move |error| errors::exception(py, &error)
}

/// Starts to look a function up.
#[pyfunction]
#[pyo3(signature = (session, name, timeout = None, lane = None))]
pub(crate) fn pipe_function(
    py: Python<'_>,
    session: &Session,
    name: String,
    timeout: Option<f64>,
    lane: Option<u32>,
) -> PyResult<Function> {
    let found = Options::new(timeout, lane)?.pipe(session.session(py)?.get_function(&name));
    Ok(Function::of(found.function().map_err(not_submitted(py))?, Some(name)))
}

/// Starts to look a function of a module up.
#[pyfunction]
#[pyo3(signature = (module, name, timeout = None, lane = None))]
pub(crate) fn pipe_module_function(
    py: Python<'_>,
    module: &Module,
    name: String,
    timeout: Option<f64>,
    lane: Option<u32>,
) -> PyResult<Function> {
    let module = module.module()?;
    let found = Options::new(timeout, lane)?.pipe(module.function(&name));
    Ok(Function::found(found.function().map_err(not_submitted(py))?, Origin::OfModule(name, module)))
}

/// Starts to load a module by a path of the server.
#[pyfunction]
#[pyo3(signature = (session, path, loader = None, timeout = None, lane = None))]
pub(crate) fn pipe_module(
    py: Python<'_>,
    session: &Session,
    path: &str,
    loader: Option<&str>,
    timeout: Option<f64>,
    lane: Option<u32>,
) -> PyResult<Module> {
    let loaded = Options::new(timeout, lane)?.pipe(load(&session.session(py)?, path, loader));
    Ok(Module::of(loaded.module().map_err(not_submitted(py))?))
}

/// Starts to allocate a tensor.
#[pyfunction]
#[pyo3(signature = (session, shape, dtype, device = None, scope = None, alignment = 0, timeout = None, lane = None))]
#[allow(clippy::too_many_arguments, reason = "keywords in Python")]
pub(crate) fn pipe_empty(
    session: &Session,
    shape: Vec<i64>,
    dtype: &Bound<'_, PyAny>,
    device: Option<&Bound<'_, PyAny>>,
    scope: Option<String>,
    alignment: u64,
    timeout: Option<f64>,
    lane: Option<u32>,
) -> PyResult<Tensor> {
    let (py, options) = (dtype.py(), Options::new(timeout, lane)?);
    let place = AllocPlace::new(device, scope, alignment)?;
    let made = options.pipe(place.alloc(&session.session(py)?, types::data_type(dtype)?, &shape));
    Ok(Tensor::of(made.tensor().map_err(not_submitted(py))?))
}
