//! Programs at the servers of all workers: one for each worker, which knows its rank.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write as _};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rpc_core::client::{OutputStream, RemoteCommand, RemoteProcess, RunRequest, RunStatus};
use rpc_core::{ErrorKind, RpcError, Session};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use crate::completion::Completion;
use crate::controller::dispatch::Controller;
use crate::controller::session::DiscoSession;
use crate::error::{DiscoError, Result, WorkerId};

/// Length in bytes after which a line is passed on without its end.
const MAX_LINE: usize = 64 << 10;

/// Number of pieces of output that wait for the callback. Each has 256 KiB at most.
const PIECES_IN_QUEUE: usize = 16;

impl DiscoSession {
    /// Returns the command that runs `program` once for each worker, in the workspace of the
    /// session with its node. The workers of one node share that folder. Nothing is sent before
    /// [`RunAll::status`].
    ///
    /// Each program has the variables `RANK` and `WORLD_SIZE`, its worker's number and the number
    /// of all workers, and `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, the same within its node.
    ///
    /// ```no_run
    /// # fn example(session: &disco::DiscoSession) -> disco::Result<()> {
    /// let statuses = session.run_all("python3").args(["train.py"]).status().wait()?;
    /// assert!(statuses.iter().all(|status| status.success()));
    /// # Ok(())
    /// # }
    /// ```
    pub fn run_all(&self, program: &str) -> RunAll {
        let request = RunRequest { program: program.to_owned(), ..RunRequest::default() };
        RunAll { controller: self.controller().clone(), request, on_line: Box::new(print_line) }
    }
}

/// Callback for a line of output, without its end.
type OnLine = Box<dyn FnMut(WorkerId, OutputStream, &[u8]) + Send>;

/// A program to be run at all workers, made by [`DiscoSession::run_all`].
#[must_use = "a command does nothing until its status is asked for"]
pub struct RunAll {
    controller: Arc<Controller>,
    request: RunRequest,
    on_line: OnLine,
}

impl RunAll {
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

    /// Sets a variable of the environment, as [`RemoteCommand::env`] does.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.env.push((name.into(), value.into()));
        self
    }

    /// Ends each program after this time, as [`RemoteCommand::time_limit`] does.
    pub fn time_limit(mut self, limit: Duration) -> Self {
        self.request.time_limit = Some(limit);
        self
    }

    /// Ends a program when it has written this many bytes. Default: no limit.
    pub fn output_limit(mut self, bytes: u64) -> Self {
        self.request.output_limit = Some(bytes);
        self
    }

    /// Calls `write` with each line of output, without its end, on a thread of its own. While it
    /// blocks, the programs wait in their pipes. Lines of more than 64 KiB come in pieces. The
    /// default prints each line to the same stream of this program, with the worker's number in
    /// brackets in front.
    pub fn on_line(mut self, write: impl FnMut(WorkerId, OutputStream, &[u8]) + Send + 'static) -> Self {
        self.on_line = Box::new(write);
        self
    }

    /// Starts all programs, and waits for their ends. Gives the exit statuses, by worker.
    ///
    /// Dropping the completion ends the programs, and so does an error: if one of them cannot be
    /// started, none goes on. A node that is lost ends its own. No line is given to
    /// [`on_line`](Self::on_line) after an error; after a drop, those that have arrived still are.
    ///
    /// Each program that runs takes a thread of its node's session, beside that of its worker. A
    /// node needs `--max-threads` of twice its workers: with fewer, programs that wait for each
    /// other may wait for ever.
    ///
    /// Its errors are those of [`RemoteCommand::status`], with the worker in front: so where a
    /// server runs no programs, or not this one. Workers of this process, and nodes that other
    /// nodes have opened ([`fan_out`](crate::SocketSession::fan_out)), run none.
    pub fn status(self) -> Completion<Vec<RunStatus>> {
        let runtime = match crate::runtime::runtime() {
            Ok(runtime) => runtime,
            Err(error) => return Completion::failed(error.into()),
        };
        // The set aborts its task when it is dropped.
        let mut task = JoinSet::new();
        task.spawn_on(self.run(), runtime.handle());
        Completion::new(async move {
            let ended = task.join_next().await;
            ended.unwrap_or_else(|| Ok(Err(RpcError::internal("a task is missing").into()))).map_err(panicked)?
        })
    }

    async fn run(self) -> Result<Vec<RunStatus>> {
        let Self { controller, request, on_line } = self;
        let mut starting = JoinSet::new();
        for (worker, command) in commands(&controller, &request)? {
            starting.spawn(async move {
                let started = command.start().await;
                started.map(|process| (worker, process)).map_err(|error| of_worker(worker, error))
            });
        }
        // All of them start before any output is requested, which takes threads of the nodes.
        let mut processes = Vec::new();
        while let Some(started) = starting.join_next().await {
            processes.push(joined(started)?);
        }
        let (output, received) = mpsc::channel(PIECES_IN_QUEUE);
        let printer = tokio::task::spawn_blocking(move || pass_on_lines(received, on_line));
        let mut running = JoinSet::new();
        for (worker, process) in processes {
            running.spawn(follow(worker, process, output.clone()));
        }
        drop(output);
        let ended = all_statuses(&mut running).await;
        // Also after an error: without their tasks the printer ends, before the error is returned.
        running.shutdown().await;
        let printed = printer.await.map_err(panicked);
        let mut statuses = ended?;
        printed?;
        statuses.sort_by_key(|(worker, _)| *worker);
        Ok(statuses.into_iter().map(|(_, status)| status).collect())
    }
}

impl fmt::Debug for RunAll {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunAll").field("request", &self.request).finish_non_exhaustive()
    }
}

/// Returns the command of each worker.
fn commands(controller: &Controller, request: &RunRequest) -> Result<Vec<(WorkerId, RemoteCommand<'static>)>> {
    let world_size = controller.layout.world_size;
    controller.lock().check()?;
    let mut commands = Vec::new();
    for link in controller.links() {
        if link.nodes > 1 {
            return Err(DiscoError::invalid(
                "programs are run at nodes that the controller opens itself, and not behind \
                 other nodes (fan_out)",
            ));
        }
        let session = link.session()?;
        for worker in link.workers() {
            let ranks = [
                ("RANK", worker),
                ("WORLD_SIZE", world_size),
                ("LOCAL_RANK", worker - link.first),
                ("LOCAL_WORLD_SIZE", link.count),
            ];
            commands.push((WorkerId(worker), command(&session, request, &ranks)));
        }
    }
    Ok(commands)
}

fn command(session: &Session, request: &RunRequest, ranks: &[(&str, u32)]) -> RemoteCommand<'static> {
    let mut command = session.run(&request.program).args(request.args.iter().cloned());
    for (name, value) in &request.env {
        command = command.env(name, value);
    }
    for (name, value) in ranks {
        command = command.env(*name, value.to_string());
    }
    if let Some(limit) = request.time_limit {
        command = command.time_limit(limit);
    }
    if let Some(limit) = request.output_limit {
        command = command.output_limit(limit);
    }
    command
}

/// Piece of a worker's output; `None` at its end.
type Output = (WorkerId, Option<(OutputStream, Bytes)>);

/// Requests the output of a program until its end, and then its exit status.
async fn follow(
    worker: WorkerId,
    process: RemoteProcess,
    output: mpsc::Sender<Output>,
) -> Result<(WorkerId, RunStatus), RpcError> {
    loop {
        let piece = process.read_output().await.map_err(|error| of_worker(worker, error))?;
        let is_end = piece.is_none();
        if output.send((worker, piece)).await.is_err() {
            return Err(RpcError::new(ErrorKind::Cancelled, "the callback for lines of output has panicked"));
        }
        if is_end {
            let status = process.status().await.map_err(|error| of_worker(worker, error))?;
            return Ok((worker, status));
        }
    }
}

/// Waits until all programs have ended, or for the first error.
async fn all_statuses(
    running: &mut JoinSet<Result<(WorkerId, RunStatus), RpcError>>,
) -> Result<Vec<(WorkerId, RunStatus)>> {
    let mut statuses = Vec::new();
    while let Some(ended) = running.join_next().await {
        statuses.push(joined(ended)?);
    }
    Ok(statuses)
}

/// Beginning of a line that is not complete.
#[derive(Default)]
struct BegunLine {
    text: Vec<u8>,
    /// True if the text before has been passed on without the end of the line.
    is_cut: bool,
}

/// Calls `on_line` with the lines of all workers, until all have ended.
fn pass_on_lines(mut output: mpsc::Receiver<Output>, mut on_line: OnLine) {
    let mut begun: HashMap<WorkerId, [BegunLine; 2]> = HashMap::new();
    while let Some((worker, piece)) = output.blocking_recv() {
        let Some((stream, piece)) = piece else {
            let lines = begun.remove(&worker).unwrap_or_default();
            for (stream, line) in [OutputStream::Stdout, OutputStream::Stderr].into_iter().zip(lines) {
                if !line.text.is_empty() {
                    on_line(worker, stream, &line.text);
                }
            }
            continue;
        };
        let line = &mut begun.entry(worker).or_default()[usize::from(stream == OutputStream::Stderr)];
        for part in piece.split_inclusive(|byte| *byte == b'\n') {
            if std::mem::take(&mut line.is_cut) && part == b"\n" {
                // The end of the line that was cut.
                continue;
            }
            line.text.extend_from_slice(part);
            let is_whole = line.text.ends_with(b"\n");
            if is_whole || line.text.len() >= MAX_LINE {
                on_line(worker, stream, line.text.strip_suffix(b"\n").unwrap_or(&line.text));
                line.text.clear();
                line.is_cut = !is_whole;
            }
        }
    }
}

/// Prints a line of a worker. A stream that is closed loses it.
fn print_line(worker: WorkerId, stream: OutputStream, line: &[u8]) {
    let line = [format!("[{worker}] ").as_bytes(), line, b"\n"].concat();
    let _ = match stream {
        OutputStream::Stdout => io::stdout().write_all(&line),
        OutputStream::Stderr => io::stderr().write_all(&line),
    };
}

fn of_worker(worker: WorkerId, error: RpcError) -> RpcError {
    error.context(format_args!("worker {worker}"))
}

fn joined<T>(outcome: std::result::Result<Result<T, RpcError>, JoinError>) -> Result<T> {
    Ok(outcome.map_err(panicked)??)
}

fn panicked(error: JoinError) -> RpcError {
    RpcError::internal(format!("a task panicked: {error}"))
}

#[cfg(test)]
mod tests {
    use parking_lot::Mutex;

    use super::*;

    #[test]
    fn the_end_of_a_line_that_was_cut_is_no_line_of_its_own() {
        let (output, received) = mpsc::channel(PIECES_IN_QUEUE);
        let long = vec![b'x'; MAX_LINE];
        let pieces: [&[u8]; 4] = [&long, b"\n\nshort\n", &long, b"rest\nlast"];
        for piece in pieces {
            let piece = Some((OutputStream::Stdout, Bytes::copy_from_slice(piece)));
            output.blocking_send((WorkerId(0), piece)).unwrap();
        }
        output.blocking_send((WorkerId(0), None)).unwrap();
        drop(output);
        let lines = Arc::new(Mutex::new(Vec::new()));
        let collected = lines.clone();
        pass_on_lines(received, Box::new(move |_, _, line: &[u8]| collected.lock().push(line.to_vec())));
        let expected: [&[u8]; 6] = [&long, b"", b"short", &long, b"rest", b"last"];
        assert_eq!(*lines.lock(), expected);
    }
}
