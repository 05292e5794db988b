//! Servers in this process.

use std::ffi::OsString;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use rpc_core::RpcError;
use rpc_server::config::{ConfigError, ServeConfig, ServeError};
use rpc_server::isolate::gpu;
use rpc_server::logging;
use rpc_server::{RpcServer, Running, ServeSettings};
use tokio::task::{JoinError, JoinHandle};

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
    New,
    Starting,
    Running(Arc<Running>),
    Stopped,
}

/// A start in progress. Dropping it lets the server be started again.
struct Start(Arc<Mutex<ServerState>>);

impl Start {
    fn begin(state: &Arc<Mutex<ServerState>>) -> PyResult<Self> {
        let mut locked = state.lock();
        if !matches!(*locked, ServerState::New) {
            return Err(PyRuntimeError::new_err("a server is started once"));
        }
        *locked = ServerState::Starting;
        Ok(Self(state.clone()))
    }

    /// Records the server that runs now, unless it was stopped meanwhile: it ends then.
    fn succeed(self, running: Running) -> PyResult<()> {
        let mut state = self.0.lock();
        if !matches!(*state, ServerState::Starting) {
            return Err(stopped());
        }
        *state = ServerState::Running(Arc::new(running));
        Ok(())
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        if matches!(*state, ServerState::Starting) {
            *state = ServerState::New;
        }
    }
}

/// A task of the package's runtime, which ends with the last reference.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Server {
    fn running(&self) -> PyResult<Arc<Running>> {
        self.birth.check()?;
        match &*self.state.lock() {
            ServerState::Running(running) => Ok(running.clone()),
            ServerState::New | ServerState::Starting => Err(PyRuntimeError::new_err("the server has not been started")),
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
        Ok(Self { registry, config, logs, state: Arc::new(Mutex::new(ServerState::New)), birth: Birth::now() })
    }

    /// Starts to serve: after this all addresses are listened on. `program` are the words of the
    /// command that processes of sessions run. An operation that is dropped ends what has started.
    #[pyo3(signature = (program = None))]
    fn start_op(&self, program: Option<Vec<OsString>>) -> PyResult<Operation> {
        self.birth.check()?;
        let (program, runtime) = (program.map(program_of).transpose()?, runtime()?);
        let start = Start::begin(&self.state)?;
        if self.logs {
            logging::init(&self.config.log_level, self.config.log_format);
        }
        let (registry, config) = (self.registry.clone(), self.config.clone());
        let work = async move {
            let mut task = AbortOnDrop(runtime.spawn(async move {
                let of_devices = config.clone();
                let devices = tokio::task::spawn_blocking(move || gpu::for_server(&of_devices)).await?;
                let mut server = RpcServer::new(registry).devices(devices).config(config);
                if let Some(program) = program {
                    server = server.program(program);
                }
                Ok::<_, JoinError>(server.start().await)
            }));
            (&mut task.0).await.map_err(task_failed)?.map_err(task_failed)
        };
        Ok(Operation::new(work, move |py, _, outcome| {
            start.succeed(outcome.map_err(|error| cannot_serve(py, &error))?)?;
            Ok(py.None())
        }))
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

    /// Reads certificates, tokens and the policy again.
    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running()?;
        py.detach(|| running.reload()).map_err(|error| cannot_serve(py, &error))
    }

    /// Ends all sessions, and waits until their clients know. Does nothing if the server does not
    /// run. It goes on if nothing waits for it.
    fn stop_op(&self) -> PyResult<Operation> {
        let running = if self.birth.is_here() { self.take_running() } else { None };
        let Some(running) = running else { return Ok(Operation::unit(async { Ok(()) })) };
        let end = runtime()?.spawn(async move { running.end().await });
        Ok(Operation::unit(async move { end.await.map_err(task_failed) }))
    }

    /// Refuses new sessions, tells clients to leave, waits for their sessions within the drain
    /// timeout, and ends those that are left. It goes on if nothing waits for it.
    fn drain_op(&self) -> PyResult<Operation> {
        let (running, state) = (self.running()?, self.state.clone());
        let drain = runtime()?.spawn(async move { running.drain().await });
        Ok(Operation::new(async move { drain.await.map_err(task_failed) }, move |py, _, ()| {
            *state.lock() = ServerState::Stopped;
            Ok(py.None())
        }))
    }
}

impl Server {
    /// Returns the server that runs, if one does: it counts as stopped from now on, and so does one
    /// that is starting.
    fn take_running(&self) -> Option<Arc<Running>> {
        let mut state = self.state.lock();
        match std::mem::replace(&mut *state, ServerState::Stopped) {
            ServerState::Running(running) => Some(running),
            ServerState::New => {
                *state = ServerState::New;
                None
            }
            ServerState::Starting | ServerState::Stopped => None,
        }
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
