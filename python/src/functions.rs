//! Functions of Python that sessions call.
//!
//! A function runs on the thread of its lane, and has the interpreter only while its own code runs:
//! arguments that are borrowed, results that are copied and calls that wait need none. Coroutines
//! run on one event loop of the process ([`coroutines`]).
//!
//! `frame.rs`, `objects.rs` and `values.rs` import each other: a call converts values, among which
//! are functions, which are called with values in turn.

pub(crate) mod coroutines;
mod frame;
mod objects;
mod values;

use std::sync::{Arc, mpsc};

use parking_lot::Mutex;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use rpc_core::function::{LocalValue, Object};
use rpc_core::tensor::Borrow;
use rpc_core::{ErrorKind, FunctionKind, Result, RpcError, Signature, Value};

use crate::attach::attached;
use crate::errors;
use crate::operation::Birth;
pub(crate) use frame::Context;
use frame::Frame;
pub(crate) use objects::{LocalFunction, LocalModule, LocalObject};

/// An object of Python that lives in sessions. It is dropped on a thread of its own, because the
/// threads of sessions must not wait for the interpreter.
pub(crate) struct Held(Option<Py<PyAny>>);

impl Held {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }

    /// Returns the object, which is there until the drop.
    pub(crate) fn get(&self, py: Python<'_>) -> Py<PyAny> {
        self.0.as_ref().map_or_else(|| py.None(), |object| object.clone_ref(py))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        /// The thread, and the process that it runs in.
        static DROPS: Mutex<Option<(Birth, mpsc::Sender<Py<PyAny>>)>> = Mutex::new(None);
        let Some(object) = self.0.take() else { return };
        let mut drops = DROPS.lock();
        let (_, send) = match &*drops {
            Some(running) if running.0.is_here() => running,
            // A thread of the parent of a fork is none of the child's.
            _ => drops.insert((Birth::now(), start_dropping())),
        };
        // Without the thread the object is dropped when a thread next has the interpreter.
        let _ = send.send(object);
    }
}

/// Starts the thread that drops objects.
fn start_dropping() -> mpsc::Sender<Py<PyAny>> {
    let (send, receive) = mpsc::channel::<Py<PyAny>>();
    let drop_all = move || {
        while let Ok(object) = receive.recv() {
            // After the end of the interpreter nothing of it may be touched.
            let mut object = Some(object);
            if attached(|_| drop(object.take())).is_none() {
                std::mem::forget(object);
            }
        }
    };
    let _ = std::thread::Builder::new().name("rpc-drop".to_owned()).spawn(drop_all);
    send
}

/// A function of Python, with the conversions of its arguments and its result.
pub(crate) struct Definition {
    /// The function itself.
    function: Held,
    /// `(context, arguments) -> tuple`: checks and converts the arguments. `None` passes them on.
    convert: Option<Held>,
    /// `(result) -> result`: checks and converts the result.
    finish: Option<Held>,
}

impl Definition {
    /// Converts the arguments and calls the function.
    ///
    /// # Errors
    ///
    /// Arguments that do not fit, without a traceback; an exception of the function, with one.
    fn call<'py>(&self, py: Python<'py>, frame: &Arc<Frame>, values: Vec<LocalValue>) -> Result<Bound<'py, PyAny>> {
        let convert = || -> PyResult<Bound<'py, PyTuple>> {
            let args: PyResult<Vec<_>> = values.into_iter().map(|value| values::incoming(py, frame, value)).collect();
            let args = PyTuple::new(py, args?)?;
            match &self.convert {
                Some(convert) => {
                    let context = Bound::new(py, Context::of(frame.clone()))?;
                    Ok(convert.get(py).bind(py).call1((context, args))?.cast_into()?)
                }
                None => Ok(args),
            }
        };
        let args = convert().map_err(|error| errors::error_without_traceback(py, &error))?;
        self.function.get(py).bind(py).call1(args).map_err(|error| errors::error_of(py, &error).may_have_run(true))
    }

    /// Makes a value of what the function has returned.
    fn value_of(&self, frame: &Arc<Frame>, returned: Bound<'_, PyAny>) -> Result<LocalValue> {
        let py = returned.py();
        let returned = match &self.finish {
            Some(finish) => finish.get(py).bind(py).call1((returned,)),
            None => Ok(returned),
        };
        let value = returned.and_then(|returned| values::outgoing(frame, &returned, 0));
        value.map_err(|error| errors::error_without_traceback(py, &error).may_have_run(true))
    }
}

/// Definition that a function of a session was made from.
pub(crate) struct Origin(Arc<Definition>);

impl Origin {
    /// Returns the function of Python.
    pub(crate) fn function(&self, py: Python<'_>) -> Py<PyAny> {
        self.0.function.get(py)
    }
}

fn interpreter_has_ended() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the program of the function is ending")
}

/// Makes a function of sessions of a definition.
fn function_of(definition: Arc<Definition>, signature: Signature, is_coroutine: bool) -> rpc_core::Function {
    let origin = Some(Arc::new(Origin(definition.clone())) as Arc<dyn std::any::Any + Send + Sync>);
    if is_coroutine {
        return rpc_core::Function::foreign_asynchronous(signature, origin, move |context, values, borrows| {
            coroutines::start(definition.clone(), context, values, borrows)
        });
    }
    let body = move |context: &rpc_core::Context, values: Vec<LocalValue>, borrows: Vec<Borrow>| {
        let frame = Frame::new(context, borrows);
        let call = |py: Python<'_>| {
            let _current = frame::enter(&frame);
            let returned = definition.call(py, &frame, values)?;
            definition.value_of(&frame, returned)
        };
        let outcome = attached(call).unwrap_or_else(|| Err(interpreter_has_ended()));
        frame.end();
        outcome
    };
    rpc_core::Function::foreign(FunctionKind::Blocking, signature, origin, body)
}

/// Makes a function of sessions of any callable object: its arguments and its result are passed on
/// as they are.
fn plain_function(function: Py<PyAny>) -> LocalValue {
    let definition = Definition { function: Held::new(function), convert: None, finish: None };
    let signature = Signature { params: vec!["...".into()], returns: "any".into() };
    Value::Object(Object::Function(function_of(Arc::new(definition), signature, false)))
}

/// Functions and modules that sessions offer.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Registry {
    registry: rpc_core::Registry,
    birth: Birth,
}

impl Registry {
    /// Returns the registry.
    ///
    /// # Errors
    ///
    /// In the child of a fork.
    pub(crate) fn registry(&self) -> PyResult<rpc_core::Registry> {
        self.birth.check()?;
        Ok(self.registry.clone())
    }
}

#[pymethods]
impl Registry {
    #[new]
    fn new() -> Self {
        Self { registry: rpc_core::Registry::new(), birth: Birth::now() }
    }

    /// Registers a function. `params` and `returns` are the names of its types.
    #[pyo3(signature = (name, function, convert, finish, params, returns, description, is_coroutine))]
    #[expect(clippy::too_many_arguments, reason = "the facts of a function, which one caller has")]
    fn add_function(
        &self,
        name: &str,
        function: Py<PyAny>,
        convert: Option<Py<PyAny>>,
        finish: Option<Py<PyAny>>,
        params: Vec<String>,
        returns: String,
        description: Option<String>,
        is_coroutine: bool,
    ) -> PyResult<()> {
        let definition = Definition {
            function: Held::new(function),
            convert: convert.map(Held::new),
            finish: finish.map(Held::new),
        };
        let signature = Signature { params: params.into_iter().map(Into::into).collect(), returns: returns.into() };
        let registry = self.registry()?;
        let added = registry.add_function(name, function_of(Arc::new(definition), signature, is_coroutine));
        if let Some(description) = description {
            added.describe(description);
        }
        Ok(())
    }

    /// Names and signatures of all functions, by name.
    fn signatures(&self) -> PyResult<Vec<(String, String)>> {
        let functions = self.registry()?.functions();
        Ok(functions.into_iter().map(|(name, signature)| (name, signature.to_string())).collect())
    }

    fn __repr__(&self) -> String {
        format!("<registry of {} functions>", self.registry.functions().len())
    }
}

/// Returns the runtime of the package: servers, and asynchronous functions of local sessions.
pub(crate) fn runtime() -> PyResult<&'static tokio::runtime::Runtime> {
    static RUNTIME: Mutex<Option<(Birth, &'static tokio::runtime::Runtime)>> = Mutex::new(None);
    let mut slot = RUNTIME.lock();
    if let Some((birth, runtime)) = *slot
        && birth.is_here()
    {
        return Ok(runtime);
    }
    let made = tokio::runtime::Builder::new_multi_thread().enable_all().thread_name("rpc-server").build();
    let made = made.map_err(|error| PyRuntimeError::new_err(format!("no threads can be started: {error}")))?;
    // It serves until the process ends, and so it is never dropped.
    let runtime: &'static _ = Box::leak(Box::new(made));
    *slot = Some((Birth::now(), runtime));
    Ok(runtime)
}

/// Opens a session in this process with the functions of a registry.
#[pyfunction]
pub(crate) fn local(registry: &Bound<'_, Registry>) -> PyResult<crate::session::Session> {
    let registry = registry.get().registry()?;
    rpc_server::builtins::register(&registry);
    let spawner = {
        let _entered = runtime()?.enter();
        rpc_transports::TokioSpawner::current()
    };
    let session = rpc_core::LocalSession::builder(registry).spawner(Arc::new(spawner)).build();
    Ok(crate::session::Session::of(rpc_core::Session::new(session), "local:".to_owned()))
}
