//! Programs at a session's server, from the client's side: start, standard streams, exit status.
//!
//! A server that runs programs for its clients registers the functions `rpc.run.*`; this module
//! calls them. The program runs in the session's workspace, so [`Files`](super::Files) bring its
//! input and fetch its output. It ends, with all processes that it has started, when it exits, when
//! its [`RemoteProcess`] is dropped, and with the session.
//!
//! ```no_run
//! # fn example(session: &rpc_core::Session) -> rpc_core::Result<()> {
//! use std::time::Duration;
//!
//! let make = session.run("make").args(["-j4"]).env("CC", "clang");
//! let built = make.time_limit(Duration::from_secs(60)).output().wait()?;
//! assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
//! # Ok(())
//! # }
//! ```
//!
//! The client requests the output piece by piece, so that a client which does not read slows the
//! program down, as a full pipe does, and no side keeps more than the pieces that are in flight.

use std::collections::VecDeque;
use std::fmt;
use std::io::{self, Read};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::{Buf, Bytes};
use serde::{Deserialize, Serialize};

use crate::client::action::{Action, Options, ScopedAction};
use crate::client::files::{call_by_name, functions, local_io};
use crate::client::references::{RemoteFunction, RemoteObject};
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::Pack;
use crate::session::Lane;

/// Default of [`RemoteCommand::output_limit`] for [`RemoteCommand::output`], which keeps the output
/// in memory.
const COLLECTED_LIMIT: u64 = 16 << 20;

/// Number of pieces of output that are on their way at a time.
const PIECES_IN_FLIGHT: usize = 4;

/// Maximum length of a piece of standard input in bytes.
const INPUT_PIECE: usize = 256 << 10;

/// A program to be run, its arguments, environment and limits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunRequest {
    /// Name of the program, looked up in the server's `PATH`; or, with a slash, its path, relative
    /// to the workspace.
    pub program: String,
    /// Arguments after the name.
    pub args: Vec<String>,
    /// Variables of the environment, beside those of the server's operator.
    pub env: Vec<(String, String)>,
    /// True if the client sends standard input; otherwise it is empty.
    pub has_input: bool,
    /// Time after which the program is ended.
    pub time_limit: Option<Duration>,
    /// Bytes of output, of both streams together, after which the program is ended.
    pub output_limit: Option<u64>,
}

/// Exit status of a program: an exit code or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Exit code; `None` if a signal has ended the program.
    pub code: Option<i32>,
    /// Number of the signal that has ended the program.
    pub signal: Option<i32>,
    /// Reason for which the server has ended the program, if it has.
    pub ended_by: Option<EndCause>,
}

impl RunStatus {
    /// Returns true if the program exited with code 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

/// Reason for which a server ends a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum EndCause {
    /// The client has called [`RemoteProcess::terminate`].
    Client,
    /// [`RemoteCommand::time_limit`] has passed.
    TimeLimit,
    /// The output was more than [`RemoteCommand::output_limit`].
    OutputLimit,
    /// More processes ran at once than the server's operator allows.
    ProcessLimit,
}

impl fmt::Display for EndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "the client has ended it",
            Self::TimeLimit => "its time limit has passed",
            Self::OutputLimit => "its output was more than the limit",
            Self::ProcessLimit => "it ran more processes, or sessions of the kernel, than the server allows",
        })
    }
}

/// Status and output of a program that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunOutput {
    /// Exit status.
    pub status: RunStatus,
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
}

/// Stream of a program's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OutputStream {
    /// Standard output.
    Stdout,
    /// Standard error.
    Stderr,
}

impl OutputStream {
    /// Returns the number of the stream's descriptor, by which `rpc.run.read` calls it.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Stdout => 1,
            Self::Stderr => 2,
        }
    }

    fn from_number(number: u8) -> Result<Self> {
        match number {
            1 => Ok(Self::Stdout),
            2 => Ok(Self::Stderr),
            other => Err(RpcError::new(ErrorKind::Protocol, format!("rpc.run.read: no output has the number {other}"))),
        }
    }
}

impl Session {
    /// Returns the command that runs `program` in the session's workspace. Nothing is sent before
    /// it is started.
    pub fn run(&self, program: &str) -> RemoteCommand<'static> {
        RemoteCommand {
            session: self.clone(),
            request: RunRequest { program: program.to_owned(), ..RunRequest::default() },
            stdin: None,
            on_stdout: None,
            on_stderr: None,
        }
    }
}

/// Source of a program's standard input.
type Input = Box<dyn Read + Send>;

/// Callback for a piece of a program's output.
type OnOutput<'a> = Box<dyn FnMut(&[u8]) -> io::Result<()> + Send + 'a>;

/// A program to be run at a session's server, made by [`Session::run`], in the manner of
/// [`std::process::Command`].
#[must_use = "a command does nothing until it is started"]
pub struct RemoteCommand<'a> {
    session: Session,
    request: RunRequest,
    stdin: Option<Input>,
    on_stdout: Option<OnOutput<'a>>,
    on_stderr: Option<OnOutput<'a>>,
}

impl<'a> RemoteCommand<'a> {
    /// Adds an argument.
    pub fn arg(mut self, arg: impl Into<String>) -> Self {
        self.request.args.push(arg.into());
        self
    }

    /// Adds several arguments.
    pub fn args(mut self, args: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.request.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of the environment. Only the server's operator sets `PATH`, `LD_*` and the
    /// variables that the server passes on itself; unless clients may run any program, the operator
    /// names the variables that they may set (`--run-client-env`).
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.env.push((name.into(), value.into()));
        self
    }

    /// Sends all of `source` to standard input, which is empty otherwise. A thread of its own reads
    /// from `source`, and ends at the end of `source`, or at the first piece that the program does
    /// not take any more.
    pub fn stdin(mut self, source: impl Read + Send + 'static) -> Self {
        self.stdin = Some(Box::new(source));
        self.piped_input()
    }

    /// Ends the program after this time: with SIGTERM, and shortly afterwards with SIGKILL.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.request.time_limit = Some(limit);
        self
    }

    /// Ends the program when it has written this many bytes, to both streams together. The default
    /// is no limit, but 16 MiB for [`output`](Self::output).
    pub fn output_limit(mut self, bytes: u64) -> Self {
        self.request.output_limit = Some(bytes);
        self
    }

    /// Calls `write` with each piece of standard output as it arrives, on the thread that polls. An
    /// error ends the program.
    pub fn on_stdout(mut self, write: impl FnMut(&[u8]) -> io::Result<()> + Send + 'a) -> Self {
        self.on_stdout = Some(Box::new(write));
        self
    }

    /// As [`on_stdout`](Self::on_stdout), for standard error.
    pub fn on_stderr(mut self, write: impl FnMut(&[u8]) -> io::Result<()> + Send + 'a) -> Self {
        self.on_stderr = Some(Box::new(write));
        self
    }

    /// Runs the program to its end. Output for which there is no callback is discarded. Dropping
    /// the operation ends the program. The program occupies the operation's lane, as every function
    /// does; see [`RemoteProcess::forward_output`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the server does not run programs, or not this one;
    /// [`ErrorKind::NotFound`] if there is no such program; [`ErrorKind::InvalidArgument`] for a
    /// variable that the client may not set; [`ErrorKind::LimitExceeded`] if the session has too
    /// many open files or too little memory; [`ErrorKind::Io`] if the program cannot be started, or
    /// a callback fails.
    pub fn status(self) -> ScopedAction<'a, RunStatus> {
        let Self { session, request, stdin, mut on_stdout, mut on_stderr } = self;
        let run = async move |options: Options<'a>| {
            let process = start(&session, &options, request, stdin).await?;
            let forward = process.forward_output(|stream, piece| {
                let write = match stream {
                    OutputStream::Stdout => on_stdout.as_mut(),
                    OutputStream::Stderr => on_stderr.as_mut(),
                };
                write.map_or(Ok(()), |write| write(piece))
            });
            options.apply(forward).await?;
            options.limit(process.status()).await
        };
        ScopedAction::steps(run)
    }

    /// Starts the program and returns as soon as it runs. The caller reads the output: callbacks
    /// are not called.
    ///
    /// # Errors
    ///
    /// As [`status`](Self::status).
    pub fn start(self) -> Action<RemoteProcess> {
        let Self { session, request, stdin, .. } = self;
        let start = async move |options: Options<'static>| start(&session, &options, request, stdin).await;
        ScopedAction::steps(start).concurrent()
    }

    /// Gives the program a standard input for [`RemoteProcess::write_input`], after
    /// [`start`](Self::start).
    pub fn piped_input(mut self) -> Self {
        self.request.has_input = true;
        self
    }
}

impl RemoteCommand<'static> {
    /// Runs the program to its end and collects its output, which is at most
    /// [`output_limit`](Self::output_limit). Callbacks are not called.
    ///
    /// # Errors
    ///
    /// As [`status`](Self::status).
    pub fn output(mut self) -> Action<RunOutput> {
        self.request.output_limit.get_or_insert(COLLECTED_LIMIT);
        let collect = async move |options: Options<'static>| {
            let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
            let command = self
                .on_stdout(|piece| {
                    stdout.extend_from_slice(piece);
                    Ok(())
                })
                .on_stderr(|piece| {
                    stderr.extend_from_slice(piece);
                    Ok(())
                });
            let status = options.apply(command.status()).await?;
            Ok(RunOutput { status, stdout, stderr })
        };
        ScopedAction::steps(collect)
    }
}

impl fmt::Debug for RemoteCommand<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RemoteCommand").field("request", &self.request).finish_non_exhaustive()
    }
}

/// A program that runs at a session's server. Cheap to clone; clones are the same program. Dropping
/// the last one ends the program and all processes that it has started.
///
/// All operations but [`forward_output`](Self::forward_output) are concurrent: none waits for
/// another.
#[derive(Clone, Debug)]
pub struct RemoteProcess(Arc<ProcessFunctions>);

/// The functions of a running program. Those for its input, which most programs are run without,
/// are fetched when they are called.
#[derive(Debug)]
struct ProcessFunctions {
    session: Session,
    process: RemoteObject,
    read: RemoteFunction,
    wait: RemoteFunction,
    terminate: RemoteFunction,
    write: OnceLock<RemoteFunction>,
    /// Limit on the output in bytes.
    output_limit: Option<u64>,
    /// Bytes of output that have arrived.
    received: AtomicU64,
}

impl ProcessFunctions {
    /// Checks a piece of output that has arrived: its stream, and the limit, which a server may not
    /// keep.
    fn accept(&self, (number, piece): (u8, Bytes)) -> Result<(OutputStream, Bytes)> {
        let stream = OutputStream::from_number(number)?;
        let len = piece.len() as u64;
        let received = self.received.fetch_add(len, Ordering::Relaxed).saturating_add(len);
        match self.output_limit {
            Some(limit) if received > limit => Err(RpcError::new(
                ErrorKind::Protocol,
                format!("rpc.run.read: the server sends more output than the limit of {limit} bytes"),
            )),
            _ => Ok((stream, piece)),
        }
    }
}

impl RemoteProcess {
    /// Waits for the next piece of output; `None` once there will be no more.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if another call waits for output; [`ErrorKind::Protocol`] if the server
    /// sends more than the [limit](RemoteCommand::output_limit).
    pub fn read_output(&self) -> Action<Option<(OutputStream, Bytes)>> {
        let this = self.clone();
        let read = async move |options: Options<'static>| {
            let piece = options.apply(this.0.read.call::<Option<(u8, Bytes)>>((&this.0.process,))).await?;
            piece.map(|piece| this.0.accept(piece)).transpose()
        };
        ScopedAction::steps(read).concurrent()
    }

    /// Calls `write` with each piece of output, on the thread that polls, until there will be no
    /// more. An error of `write` ends the operation.
    ///
    /// Several pieces are on their way at a time. The lane of the operation keeps their order, and
    /// is occupied until the end of the program: other operations of that lane wait for it. On
    /// [`Lane::CONCURRENT`] it is one piece at a time, which is slower.
    ///
    /// # Errors
    ///
    /// As [`read_output`](Self::read_output), and [`ErrorKind::Io`] if `write` fails.
    pub fn forward_output<'a>(
        &self,
        mut write: impl FnMut(OutputStream, &[u8]) -> io::Result<()> + Send + 'a,
    ) -> ScopedAction<'a, ()> {
        let this = self.clone();
        ScopedAction::steps(async move |options: Options<'a>| {
            let in_flight = if options.lane == Lane::CONCURRENT { 1 } else { PIECES_IN_FLIGHT };
            let mut window = VecDeque::with_capacity(in_flight);
            loop {
                while window.len() < in_flight {
                    let read = this.0.read.call::<Option<(u8, Bytes)>>((&this.0.process,));
                    let mut pending = options.apply(read).start();
                    pending.admitted().await?;
                    window.push_back(pending);
                }
                let Some(pending) = window.pop_front() else { return Ok(()) };
                let Some(piece) = pending.await? else { return Ok(()) };
                let (stream, piece) = this.0.accept(piece)?;
                write(stream, &piece).map_err(|error| local_io("cannot store what the program wrote", &error))?;
            }
        })
    }

    /// Waits for the end of the program. A program that writes more than a pipe holds does not end
    /// before its output has been [read](Self::read_output).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if the process that watches the program has been killed.
    pub fn status(&self) -> Action<RunStatus> {
        let this = self.clone();
        let wait = async move |options: Options<'static>| {
            let Pack(status) = options.apply(this.0.wait.call((&this.0.process,))).await?;
            Ok(status)
        };
        ScopedAction::steps(wait).concurrent()
    }

    /// Writes all of `data` to standard input, and waits until the program has taken it, or the
    /// pipe holds it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if the program does not read standard input any more;
    /// [`ErrorKind::InvalidArgument`] if it has none, or it was closed.
    pub fn write_input(&self, data: impl Into<Bytes>) -> Action<()> {
        let (this, mut data) = (self.clone(), data.into());
        let write = async move |options: Options<'static>| {
            while !data.is_empty() {
                let taken = options.apply(this.write_some(&data)).await?;
                data.advance(taken);
            }
            Ok(())
        };
        ScopedAction::steps(write).concurrent()
    }

    /// Closes standard input: the program reads its end.
    pub fn close_input(&self) -> Action<()> {
        let this = self.clone();
        let close = async move |options: Options<'static>| {
            call_by_name(&this.0.session, &options, "rpc.run.close_input", (&this.0.process,)).await
        };
        ScopedAction::steps(close).concurrent()
    }

    /// Ends the program: with SIGTERM, and shortly afterwards with SIGKILL. Does not wait for the
    /// end.
    pub fn terminate(&self) -> Action<()> {
        self.0.terminate.call((&self.0.process,)).concurrent()
    }

    /// Writes the beginning of `data` to standard input. The result is its length, which is zero if
    /// the program has not read for a while.
    fn write_some(&self, data: &Bytes) -> Action<usize> {
        let (this, data) = (self.clone(), data.clone());
        let write = async move |options: Options<'static>| {
            let write = match this.0.write.get() {
                Some(write) => write,
                None => {
                    let write = options.apply(this.0.session.get_function("rpc.run.write")).await?;
                    this.0.write.get_or_init(|| write)
                }
            };
            options.apply(write.call((&this.0.process, data))).await
        };
        ScopedAction::steps(write).concurrent()
    }

    /// Starts the thread that sends `source` to standard input.
    fn feed(&self, mut source: Input) -> Result<()> {
        // The thread may wait for the source for ever, and must not keep the program alive.
        let process = Arc::downgrade(&self.0);
        let feed = move || {
            let mut buffer = vec![0; INPUT_PIECE];
            // An error of the source ends the input, as does a program that closes it.
            while let Ok(len @ 1..) = read(&mut source, &mut buffer) {
                let mut piece = Bytes::copy_from_slice(&buffer[..len]);
                while !piece.is_empty() {
                    let Some(process) = process.upgrade().map(Self) else { return };
                    let Ok(taken) = process.write_some(&piece).wait() else { return };
                    piece.advance(taken);
                }
            }
            if let Some(process) = process.upgrade().map(Self) {
                let _ = process.close_input().wait();
            }
        };
        let started = std::thread::Builder::new().name("rpc-run-input".into()).spawn(feed);
        started.map(drop).map_err(|error| local_io("cannot start a thread for standard input", &error))
    }
}

/// Reads once from `source`, and again after an interruption.
fn read(source: &mut Input, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            read => return read,
        }
    }
}

/// Starts the program of `request`, and the thread that sends `stdin`.
async fn start(
    session: &Session,
    options: &Options<'_>,
    request: RunRequest,
    stdin: Option<Input>,
) -> Result<RemoteProcess> {
    let names = ["rpc.run.start", "rpc.run.read", "rpc.run.wait", "rpc.run.terminate"];
    let [start, read, wait, terminate] = functions(session, options, names).await?;
    let output_limit = request.output_limit;
    let process = options.apply(start.call((Pack(request),))).await?;
    let process = RemoteProcess(Arc::new(ProcessFunctions {
        session: session.clone(),
        process,
        read,
        wait,
        terminate,
        write: OnceLock::new(),
        output_limit,
        received: AtomicU64::new(0),
    }));
    if let Some(stdin) = stdin {
        process.feed(stdin)?;
    }
    Ok(process)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LocalSession, Registry, Shared};

    #[test]
    fn a_server_does_not_exceed_the_output_limit() {
        struct Program;

        let registry = Registry::new();
        registry
            .add("rpc.run.start", |_: Pack<RunRequest>| Shared(Arc::new(Program)))
            .add("rpc.run.read", |_: Shared<Program>| Some((1_u8, Bytes::from_static(&[b'y'; 1024]))))
            .add("rpc.run.wait", |_: Shared<Program>| ())
            .add("rpc.run.write", |_: Shared<Program>, _: Bytes| 0)
            .add("rpc.run.close_input", |_: Shared<Program>| ())
            .add("rpc.run.terminate", |_: Shared<Program>| ());
        let session = Session::new(LocalSession::new(registry));
        let mut arrived = 0;
        let count = |piece: &[u8]| {
            arrived += piece.len();
            Ok(())
        };
        let error = session.run("yes").output_limit(4096).on_stdout(count).status().wait().unwrap_err();
        assert_eq!((error.kind(), arrived), (ErrorKind::Protocol, 4096), "{error}");
        let process = session.run("yes").output_limit(1024).start().wait().unwrap();
        assert!(process.read_output().wait().unwrap().is_some());
        assert_eq!(process.read_output().wait().unwrap_err().kind(), ErrorKind::Protocol);
    }
}
