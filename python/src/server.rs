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

use crate::child::program_of;
use crate::connect::chain;
use crate::errors;
use crate::functions::{Registry, runtime};
use crate::operation::{Birth, wait};

/// Name of the settings in errors, where programs have that of their configuration file.
const SOURCE: &str = "of this server";

/// Level of events of session processes, if the program has not chosen one.
const LEVEL_OF_PROCESSES: &str = "warn";

/// A server of functions, which runs between `start` and `stop`.
#[pyclass(frozen, subclass, module = "tensor_rpc._native")]
pub(crate) struct Server {
    registry: rpc_core::Registry,
    config: ServeConfig,
    /// True if events go to standard error: a program says so by the setting of their level.
    logs: bool,
    running: Mutex<ServerState>,
    birth: Birth,
}

enum ServerState {
    New,
    Running(Arc<Running>),
    Stopped,
}

impl Server {
    fn running(&self) -> PyResult<Arc<Running>> {
        self.birth.check()?;
        match &*self.running.lock() {
            ServerState::Running(running) => Ok(running.clone()),
            ServerState::New => Err(PyRuntimeError::new_err("the server has not been started")),
            ServerState::Stopped => Err(PyRuntimeError::new_err("the server has been stopped")),
        }
    }

    /// Waits for `work`, which runs on the package's runtime.
    fn wait_for<T: Send + 'static>(py: Python<'_>, work: impl Future<Output = T> + Send + 'static) -> PyResult<T> {
        let task = runtime()?.spawn(work);
        wait(py, async move { task.await.map_err(|_| RpcError::internal("a task of the server has failed")) })
    }
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
        Ok(Self { registry, config, logs, running: Mutex::new(ServerState::New), birth: Birth::now() })
    }

    /// Starts to serve: when this returns, all addresses are listened on. `program` are the words
    /// of the command that processes of sessions run.
    #[pyo3(signature = (program = None))]
    fn start(&self, py: Python<'_>, program: Option<Vec<OsString>>) -> PyResult<()> {
        self.birth.check()?;
        if !matches!(*self.running.lock(), ServerState::New) {
            return Err(PyRuntimeError::new_err("a server is started once"));
        }
        if self.logs {
            logging::init(&self.config.log_level, self.config.log_format);
        }
        let devices = py.detach(|| gpu::for_server(&self.config));
        let mut server = RpcServer::new(self.registry.clone()).devices(devices).config(self.config.clone());
        if let Some(words) = program {
            server = server.program(program_of(words)?);
        }
        let running = Self::wait_for(py, server.start())?.map_err(|error| cannot_serve(py, &error))?;
        *self.running.lock() = ServerState::Running(Arc::new(running));
        Ok(())
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

    /// True between `start` and the end.
    #[getter]
    fn is_running(&self) -> bool {
        matches!(*self.running.lock(), ServerState::Running(_))
    }

    /// Reads certificates, tokens and the policy again.
    fn reload(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running()?;
        py.detach(|| running.reload()).map_err(|error| cannot_serve(py, &error))
    }

    /// Ends all sessions, and waits until their clients know. Does nothing if the server does not
    /// run.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let Ok(running) = self.running() else { return Ok(()) };
        *self.running.lock() = ServerState::Stopped;
        Self::wait_for(py, async move { running.end().await })
    }

    /// Refuses new sessions, tells clients to leave, waits for their sessions within the drain
    /// timeout, and ends those that are left.
    fn drain(&self, py: Python<'_>) -> PyResult<()> {
        let running = self.running()?;
        Self::wait_for(py, async move { running.drain().await })?;
        *self.running.lock() = ServerState::Stopped;
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !self.birth.is_here() {
            // The threads of the server are those of the parent.
            let state = std::mem::replace(self.running.get_mut(), ServerState::Stopped);
            std::mem::forget(state);
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
