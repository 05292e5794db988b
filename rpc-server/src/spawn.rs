//! Servers as child processes: for examples, tests, and programs that want a server for themselves.
//!
//! A program with functions of its own can be its own server: it calls [`run_as_child_if_asked`] first thing in `main`, and
//! starts itself again with [`ServerProcess::spawn_self`].
//!
//! ```no_run
//! use rpc_core::Registry;
//! use rpc_server::spawn::{ServerProcess, run_as_child_if_asked};
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
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{env, process};

use rpc_core::Registry;
use rpc_transports::{Address, self_start};

use crate::config::ServeConfig;
use crate::exit;
use crate::server::RpcServer;

/// The first argument of a program that is started as its own server; addresses follow.
const CHILD_ARGUMENT: &str = "--serve-as-child";

/// What a server prints for each address that it listens on.
const LISTENING: &str = "listening on ";

/// True once `main` has called [`run_as_child_if_asked`].
static HOOKED: AtomicBool = AtomicBool::new(false);

/// A server in a child process. Dropping this kills the child and waits for its end.
#[derive(Debug)]
pub struct ServerProcess {
    address: String,
    child: Child,
}

/// Why a server process did not come up.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SpawnError {
    /// The program cannot be started.
    #[error("cannot start {program}")]
    Start {
        /// The program.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// The program ended, or closed its output, without saying where it listens.
    #[error("{program} ended before it listened ({status}); what it wrote to standard error says why")]
    Ended {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// The hook has not been called: the child would be this program from its beginning, and start itself in turn.
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
    /// Starts `command` and waits until it prints `listening on ADDRESS`, as `rpc-server serve` does.
    ///
    /// The child's standard input is a pipe that stays open as long as this process lives: a server with
    /// `--exit-with-stdin`, or one that came through [`run_as_child_if_asked`], ends with this process, however that ends.
    /// What it prints later is passed on to standard error.
    ///
    /// # Errors
    ///
    /// The program cannot be started, or ends without listening.
    pub fn spawn(mut command: Command) -> Result<Self, SpawnError> {
        let program = command.get_program().to_string_lossy().into_owned();
        let started = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut child = started.map_err(|source| SpawnError::Start { program: program.clone(), source })?;
        // From here on an early return kills the child.
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
        // So that the child never waits for a full pipe.
        let pass_on = move || lines.for_each(|line| drop(writeln!(io::stderr(), "{line}")));
        if let Err(error) = std::thread::Builder::new().name("rpc-child-output".into()).spawn(pass_on) {
            tracing::warn!(%error, "the output of the server process is lost");
        }
        Ok(server)
    }

    /// Starts this program again, as a server on a free port of the loopback interface. The program must have called
    /// [`run_as_child_if_asked`].
    ///
    /// # Errors
    ///
    /// As [`spawn`](Self::spawn); [`SpawnError::NoHook`] if the hook has not been called.
    pub fn spawn_self() -> Result<Self, SpawnError> {
        if !HOOKED.load(Ordering::Relaxed) {
            return Err(SpawnError::NoHook);
        }
        self_start::check()?;
        let program =
            env::current_exe().map_err(|source| SpawnError::Start { program: "this program".to_owned(), source })?;
        let mut command = Command::new(program);
        command.args([CHILD_ARGUMENT, "tcp://127.0.0.1:0"]);
        self_start::mark(&mut command);
        Self::spawn(command)
    }

    /// Where the server listens: the first address, if there are several.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the server ends by itself, or by a signal.
    ///
    /// # Errors
    ///
    /// What the system reports.
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        // Not `Child::wait`, which closes the standard input first, and so might end it.
        let stdin = self.child.stdin.take();
        let status = self.child.wait();
        self.child.stdin = stdin;
        status
    }

    /// Kills the server and waits for its end.
    ///
    /// # Errors
    ///
    /// What the system reports.
    pub fn kill(&mut self) -> io::Result<ExitStatus> {
        self.child.kill()?;
        self.child.wait()
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        // If it has ended already, both do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Serves `registry` and exits, if this process was started by [`ServerProcess::spawn_self`]; otherwise returns at once.
///
/// Call it first thing in `main`, before arguments are looked at and threads are started: the first argument
/// `--serve-as-child` is what tells. The child serves until its standard input ends, which it does when its parent ends.
///
/// It stands for [`run_if_isolated`](crate::isolate::run_if_isolated) and for [`disco::serve_if_worker`], too.
pub fn run_as_child_if_asked(registry: &Registry) {
    disco::serve_if_worker(registry);
    crate::isolate::run_if_isolated(registry);
    HOOKED.store(true, Ordering::Relaxed);
    let mut args = env::args().skip(1);
    if args.next().as_deref() != Some(CHILD_ARGUMENT) {
        return;
    }
    self_start::hook_took_over();
    let listen: Result<Vec<Address>, _> = args.map(|address| address.parse()).collect();
    let code = match listen {
        Ok(listen) => {
            let listen = listen.into_iter().map(Into::into).collect();
            let config = ServeConfig { listen, exit_with_stdin: true, ..ServeConfig::default() };
            exit::of_server(&RpcServer::builder().registry(registry.clone()).config(config).build().run_blocking())
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "{error}");
            exit::USAGE
        }
    };
    process::exit(code.into());
}
