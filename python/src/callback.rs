//! Functions of this process as functions of a session.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;
use rpc_core::function::ArgScope;
use rpc_core::{CallbackHandler, ErrorKind, IntoArg as _, RemoteCallback, Result, RpcError, Session, Value};

use crate::argument::Arg;
use crate::attach::attached;
use crate::callable::Callable;
use crate::errors;
use crate::form::Form;
use crate::operation::Limits;
use crate::reply::Reply;

/// Marks that the arguments of a [`Callable`] are of any number and type.
struct AnyArgs;

impl Callable {
    fn call(&self, py: Python<'_>, args: Vec<Reply>) -> PyResult<Arg> {
        let form = if self.event_loop.is_some() { Form::Asyncio } else { Form::Blocking };
        // All are converted before the first error counts, so that all are owned and freed.
        let args: Vec<_> = args.into_iter().map(|arg| arg.into_object(py, form)).collect();
        let args = PyTuple::new(py, args.into_iter().collect::<PyResult<Vec<_>>>()?)?;
        let mut returned = self.function.bind(py).call1(args)?;
        if returned.hasattr(intern!(py, "__await__"))? {
            let Some(event_loop) = &self.event_loop else {
                let _ = returned.call_method0(intern!(py, "close"));
                return Err(PyTypeError::new_err("a coroutine function needs an event loop: use tensor_rpc.aio"));
            };
            static RUN: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
            let run = RUN.import(py, "asyncio", "run_coroutine_threadsafe")?;
            returned = run.call1((returned, event_loop))?.call_method0(intern!(py, "result"))?;
        }
        let mut needs_session = false;
        let arg = Arg::new(&returned, 0, &mut needs_session)?;
        if needs_session {
            return Err(PyTypeError::new_err(
                "a callback returns values and objects of its session: make a tensor there (session.tensor)",
            ));
        }
        Ok(arg)
    }
}

impl CallbackHandler<AnyArgs, AnyArgs> for Callable {
    fn invoke(&self, args: Vec<Value>, scope: &mut ArgScope<'_>) -> Result<Value> {
        let args: Vec<_> = args.into_iter().map(|value| Reply::new(value, scope.session)).collect();
        let returned =
            attached(|py| self.call(py, args).map_err(|error| errors::error_of(py, &error).may_have_run(true)));
        match returned {
            Some(arg) => arg?.into_arg(scope),
            None => Err(RpcError::new(ErrorKind::Closed, "the process of the callback ends")),
        }
    }
}

/// Makes a function of Python a function of `session`.
pub(crate) async fn make_callback(
    session: &Session,
    function: Callable,
    limits: &Limits,
) -> Result<RemoteCallback, RpcError> {
    limits.limit(session.callback(function)).await
}
