//! This program as one that the interpreter runs: how it is started again, what it is then, and the
//! commands that are other programs elsewhere.

use std::ffi::OsString;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use rpc_server::isolate::{self, gpu};
use rpc_server::server::disco_node;
use rpc_server::{builtins, cli, daemon, transports};
use rpc_transports::Dialects;
use rpc_transports::program::{self, Program};

use crate::functions::Registry;

/// Reads the words of a command that starts a program.
pub(crate) fn program_of(words: Vec<OsString>) -> PyResult<Program> {
    Program::of_command(words).ok_or_else(|| PyValueError::new_err("a command has at least one word"))
}

/// Records the arguments of this program, its name first, and the words of the command that starts
/// it again.
#[pyfunction]
pub(crate) fn embed(args: Vec<OsString>, again: Vec<OsString>) -> PyResult<()> {
    program::embed(args, program_of(again)?);
    Ok(())
}

/// Becomes what the arguments of this program say, such as the process of a session, and ends it
/// then; otherwise returns, and this program can be started again from now on.
#[pyfunction]
pub(crate) fn become_child(py: Python<'_>, registry: &Bound<'_, Registry>) -> PyResult<()> {
    let registry = registry.get().registry()?;
    py.detach(|| {
        gpu::answer_if_asked();
        builtins::register(&registry);
        // First, so that session processes can have worker processes.
        disco_node::serve_if_worker(&registry);
        isolate::run_if_isolated_with(&registry, || gpu::devices(&registry));
    });
    Ok(())
}

/// Runs ``rpc-cli`` with the arguments of this program, and returns its exit code.
#[pyfunction]
pub(crate) fn run_rpc_cli(py: Python<'_>) -> u8 {
    py.detach(|| cli::run_with(transports()))
}

/// Runs ``rpc-server`` with the arguments of this program, and returns its exit code. `importer`
/// makes a registry of the functions of modules (``--python``).
#[pyfunction]
pub(crate) fn run_rpc_server(py: Python<'_>, importer: Py<PyAny>) -> u8 {
    let import = |modules: &[String]| {
        Python::attach(|py| {
            let registry = importer.bind(py).call1((modules.to_vec(),))?;
            registry.cast::<Registry>()?.get().registry()
        })
        .map_err(|error: PyErr| error.to_string())
    };
    py.detach(|| daemon::run_with(transports(), Dialects::default(), Some(&import)))
}
