//! Workers as child processes of the controller.

use std::ops::Range;
use std::sync::Arc;

use rpc_core::RpcError;
use rpc_transports::{Address, Connector, self_start};

use super::launch;
use crate::completion::Completion;
use crate::controller::session::DiscoSession;
use crate::error::{DiscoError, Result, WorkerId};
use crate::link::replacement::Relaunch;
use crate::link::session_source::Source;
use crate::logs;
use crate::node::self_start::this_program_as_worker;
use crate::options::Options;

/// A session whose workers are child processes of this one.
///
/// ```no_run
/// use disco::ProcessSession;
/// use rpc_core::Registry;
///
/// fn main() -> Result<(), disco::DiscoError> {
///     let registry = Registry::new();
///     registry.add("pid", || i64::from(std::process::id()));
///     disco::serve_if_worker(&registry); // does not return in a worker
///
///     let session = ProcessSession::new(4, 1).start().wait()?;
///     session.get_global_func("pid")?.call(())?;
///     session.sync_all().wait()?;
///     session.shutdown().wait()
/// }
/// ```
#[derive(Debug)]
pub struct ProcessSession {
    num_workers: u32,
    num_groups: u32,
    /// `None` is this program.
    command: Option<Vec<String>>,
    options: Options,
}

impl ProcessSession {
    /// Creates a session with `num_workers` workers in `num_groups` groups of equal size. Each is
    /// this program again, which has to call [`serve_if_worker`](crate::serve_if_worker).
    #[must_use]
    pub fn new(num_workers: u32, num_groups: u32) -> Self {
        Self { num_workers, num_groups, command: None, options: Options::default() }
    }

    /// Sets another program as worker, and its arguments: it serves a registry with [disco's
    /// functions](crate::register) over its standard input and output.
    #[must_use]
    pub fn command<S: Into<String>>(mut self, argv: impl IntoIterator<Item = S>) -> Self {
        self.command = Some(argv.into_iter().map(Into::into).collect());
        self
    }

    /// Settings of the session.
    #[must_use]
    pub fn options(mut self, options: Options) -> Self {
        self.options = options;
        self
    }

    /// Starts the processes and their workers.
    ///
    /// Its errors are a program that cannot be started, or is no node; and without
    /// [`command`](Self::command) a `main` that has not called
    /// [`serve_if_worker`](crate::serve_if_worker), because its children would launch in turn.
    pub fn start(self) -> Completion<DiscoSession> {
        let (command, count, logs) = (self.command, self.num_workers, self.options.worker_logs.map(logs::number));
        let again = command.clone();
        let relaunch: Relaunch = Arc::new(move |workers: Range<u32>| {
            let process = address_of(again.as_deref()).map(|address| process(&address, workers.start, logs));
            Box::pin(async { process })
        });
        let size = (count as usize, 1, self.num_groups);
        launch(size, Vec::new(), self.options, Some(relaunch), async move {
            let address = address_of(command.as_deref())?;
            Ok((0..count).map(|number| process(&address, number, logs).into()).collect())
        })
    }
}

/// Returns the address of the process of a worker, which runs this command, or this program.
fn address_of(command: Option<&[String]>) -> Result<String> {
    let Some(command) = command else { return Ok(this_program_as_worker(None)?) };
    // The command may be this program by another name, or start it.
    self_start::check().map_err(|error| RpcError::unsupported(error.to_string()))?;
    Ok(Address::exec(command).map_err(|error| DiscoError::invalid(error.to_string()))?.to_string())
}

/// Returns the process of a worker at an address, whose standard error is logged up to this level.
fn process(address: &str, worker: u32, logs: Option<u8>) -> Source {
    let transports = logs::of_stderr(logs, move |line| logs::show(WorkerId(worker), &line));
    Source::Address(Box::new(Connector::new().transports(transports)), address.to_owned())
}
