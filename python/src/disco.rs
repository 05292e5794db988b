//! Disco: one controller and many workers.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ::disco::{
    Breakage, CclState, Completion, Content, DModule, DPackedFunc, DRef, DiscoError, Hosting, NodeListener, Operand,
    Options, ProcessSession, ReduceOp, SocketSession, ThreadedSession, WorkerId,
};
use pyo3::exceptions::{PyBaseException, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use rpc_core::{Devices, RpcError, Tensor, Value, VirtualDevice};
use rpc_transports::tracker::ServerRequest;

use crate::argument::{Arg, array};
use crate::array::{Array, DenseArray};
use crate::connect::connector;
use crate::disco_mesh::{DiscoMesh, InGroup, pairs};
use crate::disco_ref::DiscoRef;
use crate::errors;
use crate::form::Form;
use crate::operation::{Birth, Operation, wait};
use crate::reply::plain;
use crate::session::Session;
use crate::types;

/// A controller and its workers.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct DiscoSession {
    session: ::disco::DiscoSession,
    birth: Birth,
}

/// State of collectives: its name, its cause, the worker at fault, and those that have noticed.
type CclFacts = (&'static str, Option<Py<PyBaseException>>, Option<u32>, Vec<u32>);

/// Returns the exception for an error of Disco: failures of workers are told one by one.
pub(crate) fn exception(py: Python<'_>, error: &DiscoError) -> PyErr {
    let failures: Vec<_> = error
        .failures()
        .iter()
        .map(|failure| {
            let cause = errors::exception(py, &failure.cause).into_value(py);
            (failure.worker.0, failure.sequence, failure.command.clone(), cause)
        })
        .collect();
    let session_error = errors::exception(py, &RpcError::from(error.clone()));
    if failures.is_empty() {
        return session_error;
    }
    let made = py
        .import("tensor_rpc.disco")
        .and_then(|module| module.getattr("_workers_error")?.call1((session_error.into_value(py), failures)));
    match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    }
}

/// An operation that has been issued already.
pub(crate) fn operation<T: Send + 'static>(
    completion: Completion<T>,
    finish: impl FnOnce(Python<'_>, Form, T) -> PyResult<Py<PyAny>> + Send + 'static,
) -> Operation {
    Operation::new(async move { Ok(completion.await) }, |py, form, outcome| match outcome {
        Ok(outcome) => finish(py, form, outcome),
        Err(error) => Err(exception(py, &error)),
    })
}

fn unit(completion: Completion<()>) -> Operation {
    operation(completion, |py, _, ()| Ok(py.None()))
}

fn started(completion: Completion<::disco::DiscoSession>) -> Operation {
    operation(completion, |py, _, session| {
        Ok(Bound::new(py, DiscoSession { session, birth: Birth::now() })?.into_any().unbind())
    })
}

/// Reads the name of a reduction.
pub(crate) fn reduction(op: &str) -> PyResult<ReduceOp> {
    Ok(match op {
        "sum" => ReduceOp::Sum,
        "prod" => ReduceOp::Prod,
        "min" => ReduceOp::Min,
        "max" => ReduceOp::Max,
        "avg" => ReduceOp::Avg,
        other => {
            let text = format!("{other:?} is no reduction: there are sum, prod, min, max and avg");
            return Err(PyValueError::new_err(text));
        }
    })
}

/// Reads a constraint on the devices of workers.
pub(crate) fn constraint(py: Python<'_>, device: Option<String>) -> PyResult<Option<VirtualDevice>> {
    let device = device.map(|device| device.parse::<VirtualDevice>()).transpose();
    device.map_err(|error| errors::exception(py, &error))
}

/// Copies an array into a tensor of this process, so that the caller may change it at once.
fn tensor(array: &Array) -> PyResult<Tensor> {
    let refused = |error: RpcError| PyValueError::new_err(error.message().to_owned());
    let tensor = Tensor::zeros(array.shape.clone(), array.dtype).map_err(refused)?;
    let mut view = tensor.write().map_err(refused)?;
    view.bytes_mut().map_err(refused)?.copy_from_slice(&array.bytes);
    drop(view);
    Ok(tensor)
}

/// Returns an argument of a call on workers.
fn argument(arg: Arg) -> PyResult<::disco::Argument> {
    Ok(match arg {
        Arg::Plain(value) => {
            let refuse = |_| Err(RpcError::invalid_argument("an object of a session"));
            value
                .try_map(&mut { refuse })
                .map_err(|error: RpcError| PyTypeError::new_err(error.message().to_owned()))?
        }
        Arg::List(items) => Value::List(items.into_iter().map(argument).collect::<PyResult<_>>()?),
        Arg::Map(entries) => Value::Map(
            entries.into_iter().map(|(key, value)| Ok((argument(key)?, argument(value)?))).collect::<PyResult<_>>()?,
        ),
        Arg::Disco(operand) => Value::Object(operand),
        Arg::Array(array) => Value::Object(Operand::Tensor(tensor(&array)?)),
        _ => {
            return Err(PyTypeError::new_err(
                "workers take values, small arrays (64 KiB; broadcast larger ones) and what is theirs (DRef); objects \
                 of a session and functions of this process exist here only",
            ));
        }
    })
}

/// Returns the arguments of a call on workers.
pub(crate) fn arguments(args: &Bound<'_, PyTuple>) -> PyResult<Vec<::disco::Argument>> {
    args.iter_borrowed().map(|arg| argument(Arg::new(&arg, 0, &mut false)?)).collect()
}

impl DiscoSession {
    /// Returns the session.
    ///
    /// # Errors
    ///
    /// In the child of a fork.
    pub(crate) fn session(&self) -> PyResult<&::disco::DiscoSession> {
        self.birth.check()?;
        Ok(&self.session)
    }

    /// Issues a command. Waits, so that a signal can stop it, only while the workers are behind by
    /// a whole window.
    fn issue(
        &self,
        py: Python<'_>,
        command: impl FnOnce(&::disco::DiscoSession) -> ::disco::Result<DRef> + Send,
    ) -> PyResult<DiscoRef> {
        self.room(py)?;
        let session = &self.session;
        py.detach(|| command(session)).map(DiscoRef::of).map_err(|error| exception(py, &error))
    }

    fn room(&self, py: Python<'_>) -> PyResult<()> {
        room(py, self.session()?)
    }
}

/// Waits, so that a signal can stop it, while the workers are behind by a whole window.
pub(crate) fn room(py: Python<'_>, session: &::disco::DiscoSession) -> PyResult<()> {
    let mut room = pin!(session.room());
    match room.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(room) => room.map_err(|error| exception(py, &error)),
        Poll::Pending => {
            let session = session.clone();
            let room = wait(py, async move { Ok(session.room().await) })?;
            room.map_err(|error| exception(py, &error))
        }
    }
}

#[pymethods]
impl DiscoSession {
    #[new]
    fn new(other: &Bound<'_, Self>) -> Self {
        let other = other.get();
        Self { session: other.session.clone(), birth: other.birth }
    }

    /// Number of workers.
    #[getter]
    fn num_workers(&self) -> u32 {
        self.session.num_workers()
    }

    /// Number of groups.
    #[getter]
    fn num_groups(&self) -> u32 {
        self.session.num_groups()
    }

    fn function(&self, py: Python<'_>, name: &str) -> PyResult<DiscoRef> {
        self.issue(py, |session| Ok(session.get_global_func(name)?.reference().clone()))
    }

    #[pyo3(signature = (function, args))]
    fn call(&self, py: Python<'_>, function: &DiscoRef, args: &Bound<'_, PyTuple>) -> PyResult<DiscoRef> {
        let (function, args) = (DPackedFunc::from(function.reference()?), arguments(args)?);
        self.issue(py, |session| session.call_packed(&function, args))
    }

    fn module(&self, py: Python<'_>, path: &str, device: Option<&Bound<'_, PyAny>>) -> PyResult<DiscoRef> {
        let device = device.map(types::device).transpose()?;
        self.issue(py, |session| Ok(session.load_module(path, device)?.reference().clone()))
    }

    fn module_function(&self, py: Python<'_>, module: &DiscoRef, name: &str) -> PyResult<DiscoRef> {
        let module = DModule::from(module.reference()?);
        self.issue(py, |_| Ok(module.function(name)?.reference().clone()))
    }

    fn empty(
        &self,
        shape: Vec<i64>,
        dtype: &Bound<'_, PyAny>,
        device: Option<String>,
        worker0_only: bool,
        in_group: InGroup,
    ) -> PyResult<DiscoRef> {
        let (py, dtype) = (dtype.py(), types::data_type(dtype)?);
        let device = constraint(py, device)?;
        self.issue(py, |session| match worker0_only {
            true => session.empty_on_worker0(&shape, dtype, device, in_group.scope()),
            false => session.empty(&shape, dtype, device),
        })
    }

    /// Sends an array of the controller: to worker 0 (`copy`), all (`broadcast`), or in parts
    /// (`scatter`).
    fn send(
        &self,
        how: &str,
        source: &Bound<'_, PyAny>,
        to: Option<&DiscoRef>,
        in_group: InGroup,
    ) -> PyResult<DiscoRef> {
        let tensor = tensor(&array(source)?)?;
        let to = to.map(DiscoRef::reference).transpose()?;
        self.issue(source.py(), |session| match how {
            "broadcast" => session.broadcast(&tensor, to.as_ref(), in_group.scope()),
            "scatter" => session.scatter(&tensor, to.as_ref(), in_group.scope()),
            _ => session.copy_to_worker_0(&tensor, to.as_ref()),
        })
    }

    fn collective(
        &self,
        py: Python<'_>,
        kind: &str,
        from: &DiscoRef,
        to: Option<&DiscoRef>,
        op: &str,
        in_group: InGroup,
    ) -> PyResult<DiscoRef> {
        let (from, to) = (from.reference()?, to.map(DiscoRef::reference).transpose()?);
        let (to, scope) = (to.as_ref(), in_group.scope());
        let op = reduction(op)?;
        self.issue(py, |session| match kind {
            "allreduce" => session.allreduce(&from, to, op, scope),
            "reduce_scatter" => session.reduce_scatter(&from, to, op, scope),
            "allgather" => session.allgather(&from, to, scope),
            "all_to_all" => session.all_to_all(&from, to, scope),
            "broadcast" => session.broadcast_from_worker0(&from, to, scope),
            "scatter" => session.scatter_from_worker0(&from, to, scope),
            _ => session.gather_to_worker0(&from, to, scope),
        })
    }

    fn barrier(&self, py: Python<'_>, in_group: InGroup) -> PyResult<()> {
        self.room(py)?;
        let session = &self.session;
        py.detach(|| session.barrier(in_group.scope())).map_err(|error| exception(py, &error))
    }

    /// Sends tensors between pairs of workers.
    fn send_recv(&self, py: Python<'_>, from: &DiscoRef, to: &DiscoRef, pairs: Vec<(u32, u32)>) -> PyResult<()> {
        let (from, to) = (from.reference()?, to.reference()?);
        let pairs: Vec<_> = pairs.into_iter().map(|(from, to)| (WorkerId(from), WorkerId(to))).collect();
        self.room(py)?;
        let session = &self.session;
        py.detach(|| session.send_recv(&from, &to, &pairs)).map_err(|error| exception(py, &error))
    }

    /// Returns the name of the collectives' state, its cause, the worker at fault, and those that
    /// have noticed.
    fn ccl_state(&self, py: Python<'_>) -> PyResult<CclFacts> {
        let state = self.session()?.ccl_state();
        let error = |error: &RpcError| Some(errors::exception(py, error).into_value(py));
        Ok(match &state {
            CclState::Running => ("running", None, None, vec![]),
            CclState::Reinitialising => ("reinitialising", None, None, vec![]),
            CclState::Ended(cause) => ("ended", error(cause), None, vec![]),
            CclState::Broken(Breakage { cause, culprit, noticed_by, .. }) => {
                let noticed_by = noticed_by.iter().map(|worker| worker.0).collect();
                ("broken", error(cause), culprit.map(|worker| worker.0), noticed_by)
            }
            _ => ("unknown", None, None, vec![]),
        })
    }

    fn abort_ccl(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        let session = self.session()?;
        py.detach(|| session.abort_ccl(reason)).map_err(|error| exception(py, &error))
    }

    fn set_register(&self, to: &DiscoRef, worker: u32, value: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, to) = (value.py(), to.reference()?);
        let value = argument(Arg::new(value, 0, &mut false)?)?;
        self.room(py)?;
        let session = &self.session;
        py.detach(|| session.debug_set_register(&to, WorkerId(worker), value)).map_err(|error| exception(py, &error))
    }

    fn get_register_op(&self, from: &DiscoRef, worker: u32) -> PyResult<Operation> {
        let content = self.session.debug_get_from_remote(&from.reference()?, WorkerId(worker));
        Ok(operation(content, |py, _, content| match content {
            Content::Tensor(tensor) => dense(py, tensor),
            Content::Value(value) => {
                plain(py, value, &mut |_| Err(PyValueError::new_err("an object of a worker, where only values can be")))
            }
        }))
    }

    fn copy_from_worker_0_op(&self, from: &DiscoRef) -> PyResult<Operation> {
        let content = self.session.copy_from_worker_0(&from.reference()?);
        Ok(operation(content, |py, _, tensor| dense(py, tensor)))
    }

    fn init_ccl_op(&self, name: &str, device_ids: Vec<i32>) -> PyResult<Operation> {
        self.birth.check()?;
        Ok(unit(self.session.init_ccl(name, &device_ids)))
    }

    fn reinit_ccl_op(&self) -> PyResult<Operation> {
        self.birth.check()?;
        Ok(unit(self.session.reinit_ccl()))
    }

    fn mesh_op(&self, axes: &Bound<'_, PyDict>) -> PyResult<Operation> {
        self.birth.check()?;
        let axes = pairs(Some(axes))?;
        let axes: Vec<(&str, u32)> = axes.iter().map(|(name, size)| (name.as_str(), *size)).collect();
        Ok(operation(self.session.mesh(&axes), |py, _, mesh| Ok(Bound::new(py, DiscoMesh(mesh))?.into_any().unbind())))
    }

    fn sync_op(&self, worker: Option<u32>) -> PyResult<Operation> {
        self.birth.check()?;
        Ok(unit(match worker {
            Some(worker) => self.session.sync_worker(WorkerId(worker)),
            None => self.session.sync_all(),
        }))
    }

    /// Waits until a command can be issued without waiting.
    fn room_op(&self) -> PyResult<Operation> {
        let session = self.session()?.clone();
        Ok(Operation::new(async move { Ok(session.room().await) }, |py, _, room: ::disco::Result<()>| {
            room.map_err(|error| exception(py, &error))?;
            Ok(py.None())
        }))
    }

    fn shutdown_op(&self) -> PyResult<Operation> {
        self.birth.check()?;
        Ok(unit(self.session.shutdown()))
    }
}

/// Makes an array of a tensor in the controller's memory.
fn dense(py: Python<'_>, tensor: Tensor) -> PyResult<Py<PyAny>> {
    let view = tensor.read().and_then(DenseArray::of_view).map_err(|error| errors::exception(py, &error))?;
    Ok(Bound::new(py, view)?.into_any().unbind())
}

/// Reads the settings of a session by their names.
fn options(settings: &Bound<'_, PyDict>) -> PyResult<Options> {
    let mut options = Options::default();
    for (name, value) in settings {
        let seconds = || -> PyResult<Duration> {
            Duration::try_from_secs_f64(value.extract()?).map_err(|error| PyValueError::new_err(error.to_string()))
        };
        match name.extract::<String>()?.as_str() {
            _ if value.is_none() => {}
            "window" => options.window = value.extract()?,
            "pin_workers" => options.pin_workers = value.extract()?,
            "allow_controller_relay" => options.allow_controller_relay = value.extract()?,
            "keep_alive" => options.keep_alive = seconds()?,
            "collective_timeout" => options.collective_timeout = Some(seconds()?),
            "stall_timeout" => options.stall_timeout = seconds()?,
            "data_addresses" => {
                let addresses: Vec<String> = value.extract()?;
                let parsed: Result<_, _> = addresses.iter().map(|address| address.parse()).collect();
                options.data_addresses = parsed.map_err(|_| {
                    PyValueError::new_err(format!("data_addresses are IP addresses, not {addresses:?}"))
                })?;
            }
            "direct_timeout" => options.direct_timeout = seconds()?,
            "init_timeout" => options.init_timeout = seconds()?,
            "shutdown_timeout" => options.shutdown_timeout = seconds()?,
            "hosting" => {
                options.hosting = match value.extract::<String>()?.as_str() {
                    "threads" => Hosting::Threads,
                    "processes" => Hosting::Processes,
                    other => {
                        let text = format!("hosting is 'threads' or 'processes', and not {other:?}");
                        return Err(PyValueError::new_err(text));
                    }
                }
            }
            other => return Err(PyTypeError::new_err(format!("a session of Disco has no setting {other:?}"))),
        }
    }
    Ok(options)
}

/// Starts workers as threads of this process.
#[pyfunction]
pub(crate) fn disco_threads(
    num_workers: u32,
    num_groups: u32,
    registry: &crate::functions::Registry,
    settings: &Bound<'_, PyDict>,
) -> PyResult<Operation> {
    let session = ThreadedSession::new(num_workers, num_groups).registry(registry.registry()?);
    Ok(started(session.options(options(settings)?).start()))
}

/// Starts workers as processes: of `command`, or of this program again.
#[pyfunction]
pub(crate) fn disco_processes(
    num_workers: u32,
    num_groups: u32,
    command: Option<Vec<String>>,
    settings: &Bound<'_, PyDict>,
) -> PyResult<Operation> {
    let session = ProcessSession::new(num_workers, num_groups).options(options(settings)?);
    Ok(started(match command {
        Some(command) => session.command(command).start(),
        None => session.start(),
    }))
}

/// Starts workers at servers.
#[pyfunction]
pub(crate) fn disco_servers(
    addresses: Vec<String>,
    workers_per_node: u32,
    num_groups: u32,
    connect: &Bound<'_, PyDict>,
    settings: &Bound<'_, PyDict>,
) -> PyResult<Operation> {
    let first = addresses.first().cloned().unwrap_or_default();
    let (connector, _) = connector(first, connect)?;
    let session = SocketSession::new(addresses, workers_per_node, num_groups);
    Ok(started(session.connector(connector).options(options(settings)?).start()))
}

/// Starts workers at servers that a tracker hands out.
#[pyfunction]
pub(crate) fn disco_from_tracker(
    tracker: String,
    key: &str,
    count: u32,
    workers_per_node: u32,
    num_groups: u32,
    connect: &Bound<'_, PyDict>,
    settings: &Bound<'_, PyDict>,
) -> PyResult<Operation> {
    let (connector, tracker) = connector(tracker, connect)?;
    let session =
        SocketSession::from_tracker(tracker, ServerRequest::new(key).count(count), workers_per_node, num_groups);
    Ok(started(session.connector(connector).options(options(settings)?).start()))
}

/// Starts workers at the far ends of sessions.
#[pyfunction]
pub(crate) fn disco_over(
    py: Python<'_>,
    sessions: Vec<Py<Session>>,
    workers_per_session: u32,
    num_groups: u32,
    settings: &Bound<'_, PyDict>,
) -> PyResult<Operation> {
    let sessions = sessions.iter().map(|session| session.get().session(py)).collect::<PyResult<Vec<_>>>()?;
    Ok(started(::disco::DiscoSession::over(sessions, workers_per_session, num_groups, options(settings)?)))
}

/// A place that nodes dial.
#[pyclass(frozen, module = "tensor_rpc._native")]
pub(crate) struct DiscoListener(NodeListener);

#[pymethods]
impl DiscoListener {
    /// Address that nodes dial.
    #[getter]
    fn address(&self) -> String {
        self.0.address()
    }

    fn start_op(
        &self,
        nodes: usize,
        workers_per_node: u32,
        num_groups: u32,
        join_timeout: Option<f64>,
        controller: Option<&crate::functions::Registry>,
        settings: &Bound<'_, PyDict>,
    ) -> PyResult<Operation> {
        let session = SocketSession::dialled_by(nodes, &self.0, workers_per_node, num_groups);
        let session = match controller {
            Some(registry) => session.controller_as_node(registry.registry()?, Devices::new()),
            None => session,
        };
        let session = match join_timeout.map(Duration::try_from_secs_f64) {
            Some(limit) => session.join_timeout(limit.map_err(|error| PyValueError::new_err(error.to_string()))?),
            None => session,
        };
        Ok(started(session.options(options(settings)?).start()))
    }
}

/// Makes a place that nodes dial.
#[pyfunction]
pub(crate) fn disco_listen(address: &str) -> Operation {
    operation(NodeListener::bind(address), |py, _, listener| {
        Ok(Bound::new(py, DiscoListener(listener))?.into_any().unbind())
    })
}
