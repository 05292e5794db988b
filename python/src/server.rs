//! Servers in this process.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::IntoPyObjectExt as _;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use rpc_core::RpcError;
use rpc_server::config::{ConfigError, ServeConfig, ServeError};
use rpc_server::isolate::gpu;
use rpc_server::logging;
use rpc_server::{RpcServer, Running, ServeSettings};
use tokio::sync::{Notify, watch};
use tokio::task::JoinError;

use crate::child::program_of;
use crate::connect::chain;
use crate::errors;
use crate::functions::{Registry, runtime};
use crate::operation::{Birth, Operation};

/// Name of the settings in errors, where programs have that of their configuration file.
const SOURCE: &str = "of this server";

/// Level of events of session processes, if the program has not chosen one.
const LEVEL_OF_PROCESSES: &str = "warn";

/// A server of functions, which runs between its start and its end.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Server {
    registry: rpc_core::Registry,
    config: ServeConfig,
    /// True if events go to standard error: a program says so by the setting of their level.
    logs: bool,
    state: Arc<Mutex<ServerState>>,
    birth: Birth,
}

enum ServerState {
    /// Not started; with the end of a start that was given up, which may not be over.
    New(Option<End>),
    /// A start for which a program is being prepared.
    Preparing(Option<End>),
    Starting(Start),
    Running(Arc<Running>),
    Stopped,
}

/// A start in progress.
struct Start {
    give_up: Arc<Notify>,
    end: End,
}

impl Start {
    /// Gives the start up. Returns its end.
    fn give_up(self) -> End {
        self.give_up.notify_one();
        self.end
    }
}

/// End of a task of the server, after which none of its addresses is in use by that.
#[derive(Clone)]
struct End(watch::Receiver<()>);

impl End {
    /// Returns an end that is there when the sender is dropped.
    fn new() -> (watch::Sender<()>, Self) {
        let (sender, receiver) = watch::channel(());
        (sender, Self(receiver))
    }

    async fn wait(mut self) {
        while self.0.changed().await.is_ok() {}
    }

    /// Returns the operation that waits for an end, if there is one to wait for.
    fn operation(end: Option<Self>) -> Operation {
        Operation::unit(async move {
            if let Some(end) = end {
                end.wait().await;
            }
            Ok(())
        })
    }
}

/// Ends a server that runs, whether the end is waited for or not.
fn end(running: Arc<Running>) -> PyResult<End> {
    let (over, end) = End::new();
    runtime()?.spawn(async move {
        running.end().await;
        drop(over);
    });
    Ok(end)
}

/// Starts a server behind the end of an earlier start, unless this one is given up. Records the
/// outcome in `state`. Returns true if the server runs then.
async fn start(
    server: RpcServer,
    config: ServeConfig,
    earlier: Option<End>,
    give_up: Arc<Notify>,
    state: Arc<Mutex<ServerState>>,
) -> Result<Result<bool, ServeError>, JoinError> {
    if let Some(earlier) = earlier {
        earlier.wait().await;
    }
    let devices = tokio::select! {
        biased;
        () = give_up.notified() => return Ok(Ok(false)),
        devices = tokio::task::spawn_blocking(move || gpu::for_server(&config)) => devices,
    };
    let outcome = match devices {
        // It is short, and goes on to its end: the addresses of one that is dropped are in use for
        // a moment longer.
        Ok(devices) => tokio::spawn(server.devices(devices).start()).await,
        Err(failed) => Err(failed),
    };
    let unused = {
        let mut state = state.lock();
        let is_wanted = matches!(&*state, ServerState::Starting(start) if Arc::ptr_eq(&start.give_up, &give_up));
        match outcome {
            Ok(Ok(running)) if is_wanted => {
                *state = ServerState::Running(Arc::new(running));
                return Ok(Ok(true));
            }
            Ok(Ok(running)) => running,
            failed if is_wanted => {
                *state = ServerState::New(None);
                return failed.map(|failed| failed.map(|_| false));
            }
            _ => return Ok(Ok(false)),
        }
    };
    unused.end().await;
    Ok(Ok(false))
}

impl Server {
    fn running(&self) -> PyResult<Arc<Running>> {
        self.birth.check()?;
        match &*self.state.lock() {
            ServerState::Running(running) => Ok(running.clone()),
            ServerState::New(_) | ServerState::Preparing(_) | ServerState::Starting(_) => {
                Err(PyRuntimeError::new_err("the server has not been started"))
            }
            ServerState::Stopped => Err(stopped()),
        }
    }
}

fn stopped() -> PyErr {
    PyRuntimeError::new_err("the server has been stopped")
}

fn task_failed<T>(_: T) -> RpcError {
    RpcError::internal("a task of the server has failed")
}

#[pymethods]
impl Server {
    /// Makes a server with settings as TOML.
    #[new]
    fn new(registry: &Bound<'_, Registry>, settings: &str) -> PyResult<Self> {
        let mut settings = ServeSettings::from_toml(settings, Path::new(SOURCE)).map_err(wrong_settings)?;
        let logs = settings.log_level.is_some();
        if !logs {
            // For the processes of sessions, whose standard error is that of this program.
            settings.log_level = LEVEL_OF_PROCESSES.parse().ok();
        }
        let config = settings.resolve().map_err(wrong_settings)?;
        let registry = registry.get().registry()?;
        Ok(Self { registry, config, logs, state: Arc::new(Mutex::new(ServerState::New(None))), birth: Birth::now() })
    }

    /// Begins a start, which `start_op` goes on with: the server can be stopped from now on.
    fn begin_start(&self) -> PyResult<()> {
        self.birth.check()?;
        let mut state = self.state.lock();
        let ServerState::New(earlier) = &mut *state else {
            return Err(PyRuntimeError::new_err("a server is started once"));
        };
        *state = ServerState::Preparing(earlier.take());
        Ok(())
    }

    /// Starts to serve. `program` are the words of the command that processes of sessions run. The
    /// outcome is true once all addresses are listened on, and false if the server was stopped
    /// before that.
    #[pyo3(signature = (program = None))]
    fn start_op(&self, program: Option<Vec<OsString>>) -> PyResult<Operation> {
        self.birth.check()?;
        let (program, runtime) = (program.map(program_of).transpose()?, runtime()?);
        if self.logs {
            logging::init(&self.config.log_level, self.config.log_format);
        }
        let (registry, config) = (self.registry.clone(), self.config.clone());
        let mut server = RpcServer::new(registry).config(config.clone());
        if let Some(program) = program {
            server = server.program(program);
        }
        let mut state = self.state.lock();
        let ServerState::Preparing(earlier) = &mut *state else {
            return Ok(Operation::new(async { Ok(()) }, |py, _, ()| false.into_py_any(py)));
        };
        let (earlier, give_up, (over, end)) = (earlier.take(), Arc::<Notify>::default(), End::new());
        let work = start(server, config, earlier, give_up.clone(), self.state.clone());
        let task = runtime.spawn(async move {
            let outcome = work.await;
            drop(over);
            outcome
        });
        *state = ServerState::Starting(Start { give_up, end });
        drop(state);
        let work = async move { task.await.and_then(|outcome| outcome).map_err(task_failed) };
        Ok(Operation::new(work, |py, _, outcome: Result<bool, ServeError>| {
            outcome.map_err(|error| cannot_serve(py, &error))?.into_py_any(py)
        }))
    }

    /// Gives a start up, also one that is complete. The server can be started again, and a start
    /// waits for the end of this one. It goes on if nothing waits for it.
    fn give_up_start_op(&self) -> PyResult<Operation> {
        self.birth.check()?;
        let mut state = self.state.lock();
        let earlier = match std::mem::replace(&mut *state, ServerState::Stopped) {
            ServerState::New(earlier) | ServerState::Preparing(earlier) => earlier,
            ServerState::Starting(start) => Some(start.give_up()),
            ServerState::Running(running) => Some(end(running)?),
            ServerState::Stopped => return Ok(End::operation(None)),
        };
        *state = ServerState::New(earlier.clone());
        Ok(End::operation(earlier))
    }

    /// Addresses that the server listens on, with the ports that were chosen.
    #[getter]
    fn addresses(&self) -> PyResult<Vec<String>> {
        Ok(self.running()?.addresses().iter().map(ToString::to_string).collect())
    }

    /// Address of metrics and health, if they are served.
    #[getter]
    fn metrics_address(&self) -> PyResult<Option<String>> {
        Ok(self.running()?.metrics_address().map(|address| address.to_string()))
    }

    /// Number of open sessions.
    #[getter]
    fn sessions(&self) -> PyResult<usize> {
        Ok(self.running()?.sessions())
    }

    /// True between the start and the end.
    #[getter]
    fn is_running(&self) -> bool {
        matches!(*self.state.lock(), ServerState::Running(_))
    }

    /// True once it has been stopped or drained.
    #[getter]
    fn is_stopped(&self) -> bool {
        matches!(*self.state.lock(), ServerState::Stopped)
    }

    /// Reads certificates, tokens and the policy again.
    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running()?;
        py.detach(|| running.reload()).map_err(|error| cannot_serve(py, &error))
    }

    /// Ends all sessions, and waits until their clients know; gives up a start in progress. Does
    /// nothing before the start. It goes on if nothing waits for it.
    fn stop_op(&self) -> PyResult<Operation> {
        if !self.birth.is_here() {
            return Ok(End::operation(None));
        }
        let mut state = self.state.lock();
        Ok(End::operation(match std::mem::replace(&mut *state, ServerState::Stopped) {
            ServerState::New(earlier) => {
                *state = ServerState::New(earlier.clone());
                earlier
            }
            ServerState::Preparing(earlier) => earlier,
            ServerState::Starting(start) => Some(start.give_up()),
            ServerState::Running(running) => Some(end(running)?),
            ServerState::Stopped => None,
        }))
    }

    /// Refuses new sessions, tells clients to leave, waits for their sessions within the drain
    /// timeout, and ends those that are left. It goes on if nothing waits for it.
    fn drain_op(&self) -> PyResult<Operation> {
        let (running, state) = (self.running()?, self.state.clone());
        let drain = runtime()?.spawn(async move {
            running.drain().await;
            let mut state = state.lock();
            if matches!(&*state, ServerState::Running(current) if Arc::ptr_eq(current, &running)) {
                *state = ServerState::Stopped;
            }
        });
        Ok(Operation::unit(async move { drain.await.map_err(task_failed) }))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.birth.is_here() {
            // The threads of the server are those of the parent.
            std::mem::forget(self.state.clone());
        }
    }
}

/// Returns the exception for settings that are wrong: `TypeError` for a name that there is not.
fn wrong_settings(error: ConfigError) -> PyErr {
    let text = chain(&error).replace(&format!("the configuration file {SOURCE} is not right"), "a setting is wrong");
    match error {
        ConfigError::Syntax { .. } if text.contains("unknown field") => PyTypeError::new_err(text),
        _ => PyValueError::new_err(text),
    }
}

fn cannot_serve(py: Python<'_>, error: &ServeError) -> PyErr {
    match error {
        ServeError::Config(error) => PyValueError::new_err(chain(error)),
        _ => errors::exception(py, &RpcError::new(rpc_core::ErrorKind::Io, chain(error))),
    }
}
