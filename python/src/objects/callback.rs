//! Functions of this process as functions of a session.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::function::ArgScope;
use rpc_core::{CallbackHandler, IntoArg as _, RemoteCallback, Result, RpcError, Session, Value};

use crate::argument::Arg;
use crate::errors;
use crate::form::Form;
use crate::reply::Reply;

/// A function of Python that a session calls.
struct Callable(Py<PyAny>);

/// Marks that the arguments of a [`Callable`] are of any number and type.
struct AnyArgs;

impl CallbackHandler<AnyArgs, AnyArgs> for Callable {
    fn invoke(&self, args: Vec<Value>, scope: &mut ArgScope<'_>) -> Result<Value> {
        let args: Vec<_> = args.into_iter().map(|value| Reply::new(value, scope.session)).collect();
        let arg = Python::attach(|py| {
            let call = || -> PyResult<Arg> {
                let args: PyResult<Vec<_>> = args.into_iter().map(|arg| arg.into_object(py, Form::Blocking)).collect();
                let returned = self.0.bind(py).call1(PyTuple::new(py, args?)?)?;
                let mut needs_session = false;
                let arg = Arg::new(&returned, 0, &mut needs_session)?;
                if needs_session {
                    return Err(pyo3::exceptions::PyTypeError::new_err(
                        "a callback returns values and objects of its session: make a tensor there (session.tensor)",
                    ));
                }
                Ok(arg)
            };
            call().map_err(|error| errors::error_of(py, &error))
        })?;
        arg.into_arg(scope)
    }
}

/// Makes a function of Python a function of `session`.
pub(crate) async fn make_callback(session: &Session, function: Py<PyAny>) -> Result<RemoteCallback, RpcError> {
    session.callback(Callable(function)).await
}
