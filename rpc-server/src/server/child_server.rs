//! Servers as child processes, for examples, tests, and programs with a server of their own.
//!
//! A program can be its own server: it calls [`run_as_child_if_asked`] first in `main`, and starts
//! itself again with [`ServerProcess::spawn_self`].
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::server::child_server::{ServerProcess, run_as_child_if_asked};
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let registry = Registry::new();
//!     registry.add("add", |a: i64, b: i64| a + b);
//!     run_as_child_if_asked(&registry);
//!
//!     let server = ServerProcess::spawn_self()?;
//!     let session = rpc_transports::Connector::new().connect_blocking(server.address())?;
//!     let add = session.function::<(i64, i64), i64>("add").wait()?;
//!     println!("{}", add.call((1, 2)).wait()?);
//!     Ok(())
//! }
//! ```

use std::io::{self, BufRead, BufReader, Write};
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use rpc_core::{Devices, Registry};
use rpc_transports::program::{self, Program};
use rpc_transports::{Address, self_start};

use crate::config::ServeConfig;
use crate::policy;
use crate::server::RpcServer;
use crate::server::exit_code;

/// First argument of a program that is started as its own server; addresses follow.
const CHILD_ARGUMENT: &str = "--serve-as-child";

/// Prefix of the line that a server prints for each address.
const LISTENING: &str = "listening on ";

/// True once `main` has called [`run_as_child_if_asked`].
static HOOKED: AtomicBool = AtomicBool::new(false);

/// A server in a child process. Dropping it kills the child and waits for its end.
#[derive(Debug)]
pub struct ServerProcess {
    address: String,
    child: Child,
}

/// Error of the start of a server process.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The program cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The program ended or closed its output before it printed an address.
    #[error("{program} ended before it listened ({status}); what it wrote to standard error says why")]
    Ended {
        /// The program.
        program: String,
        /// Exit status.
        status: ExitStatus,
    },
    /// The hook has not been called: the child would run this program from its beginning, and start
    /// itself in turn.
    #[error(
        "this program cannot be started again as a server: its `main` has not called the hook for that; add the line \
         `rpc_server::run_as_child_if_asked(&registry);` before everything else in `main`"
    )]
    NoHook,
    /// This process was itself started by its program, and no hook has taken over in it.
    #[error(transparent)]
    Endless(#[from] self_start::EndlessStart),
}

impl ServerProcess {
    /// Starts `command` and waits until it prints `listening on ADDRESS`, as `rpc-server serve`
    /// does.
    ///
    /// The child's standard input is a pipe that stays open as long as this process lives. A server
    /// with `--exit-with-stdin`, or one started by [`run_as_child_if_asked`], ends with this
    /// process, however that ends. Later output of the child goes to standard error.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or ends without listening.
    pub fn spawn(mut command: Command) -> Result<Self, SpawnError> {
        let program = command.get_program().to_string_lossy().into_owned();
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(|source| SpawnError::Start { program: program.clone(), source })?;
        // From here on an early return drops `server`, which kills the child.
        let stdout = child.stdout.take();
        let mut server = Self { address: String::new(), child };
        let mut lines = stdout.map(BufReader::new).into_iter().flat_map(BufRead::lines).map_while(Result::ok);
        match lines.find_map(|line| line.strip_prefix(LISTENING).map(str::to_owned)) {
            Some(address) => server.address = address,
            None => {
                let _ = server.child.kill();
                let status =
                    server.child.wait().map_err(|source| SpawnError::Start { program: program.clone(), source })?;
                return Err(SpawnError::Ended { program, status });
            }
        }
        // The output is read to its end, so that the child never blocks on a full pipe.
        let pass_on = move || lines.for_each(|line| drop(writeln!(io::stderr(), "{line}")));
        if let Err(error) = std::thread::Builder::new().name("rpc-child-output".into()).spawn(pass_on) {
            tracing::warn!(%error, "the output of the server process is lost");
        }
        Ok(server)
    }

    /// Starts this program again, as a server on a free port of the loopback interface. The program
    /// must have called [`run_as_child_if_asked`].
    ///
    /// # Errors
    ///
    /// As [`spawn`](Self::spawn); [`SpawnError::NoHook`] if the hook has not been called.
    pub fn spawn_self() -> Result<Self, SpawnError> {
        if !HOOKED.load(Ordering::Relaxed) {
            return Err(SpawnError::NoHook);
        }
        self_start::check()?;
        let command = self_start::command(&Program::this());
        let mut command = command.map_err(|source| SpawnError::Start { program: "this program".to_owned(), source })?;
        command.args([CHILD_ARGUMENT, "tcp://127.0.0.1:0"]);
        Self::spawn(command)
    }

    /// Returns the first address that the server listens on.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Returns the process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of the server.
    ///
    /// # Errors
    ///
    /// The error of the system.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        // `Child::wait` closes the standard input first, which might end the server.
        let stdin = self.child.stdin.take();
        let status = self.child.wait();
        self.child.stdin = stdin;
        status
    }

    /// Kills the server and waits for its end.
    ///
    /// # Errors
    ///
    /// The error of the system.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // Both do nothing if the child has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves `registry` and exits, if this process was started by [`ServerProcess::spawn_self`];
/// otherwise returns at once.
///
/// Call it first in `main`, before arguments are read and threads are started. The first argument
/// `--serve-as-child` selects this. The child serves until its standard input ends, which happens
/// when its parent ends.
///
/// It includes [`run_if_isolated`](crate::isolate::run_if_isolated) and
/// [`disco::serve_if_worker_with_access`].
pub fn run_as_child_if_asked(registry: &Registry) {
    disco::serve_if_worker_with_access(registry, Devices::new, policy::restore);
    crate::isolate::run_if_isolated(registry);
    HOOKED.store(true, Ordering::Relaxed);
    let mut args = program::args().skip(1);
    if args.next().is_none_or(|first| first != CHILD_ARGUMENT) {
        return;
    }
    self_start::hook_took_over();
    let listen: Result<Vec<Address>, _> = args.map(|address| address.to_string_lossy().parse()).collect();
    let code = match listen {
        Ok(listen) => {
            let listen = listen.into_iter().map(Into::into).collect();
            let config = ServeConfig { listen, exit_with_stdin: true, ..ServeConfig::default() };
            exit_code::of_server(&RpcServer::new(registry.clone()).config(config).run_blocking())
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            exit_code::USAGE
        }
    };
    process::exit(code.into());
}
