//! A running program, in the session process: its reaper and the pipes of its standard streams.

use std::io::{self, PipeReader, PipeWriter, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use rpc_core::client::{EndCause, OutputStream, RunRequest, RunStatus};
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::{Context, ErrorKind, Result, RpcError};
use rustix::buffer::spare_capacity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::io::Errno;
use rustix::pipe::fcntl_setpipe_size;
use rustix::process::Pid;

use super::messages::{self, MESSAGES, ProgramSetup, Started, TERMINATE};
use super::policy::RunPolicy;
use super::reaper_guard::{self, start_reaper};
use crate::builtins::cancelled;
use crate::workspace::Workspace;

/// Capacity of a pipe in bytes: the most that the system gives to every user.
const PIPE_BYTES: u64 = 1 << 20;

/// Maximum length of a piece of output in bytes: most of a pipe, and less than a message of 1 MiB.
const MAX_PIECE: u64 = 960 << 10;

/// The same in a session whose limit on queued bytes is smaller.
const SMALL_PIECE: u64 = 256 << 10;

/// Length from which a piece is taken as one of many: a program that shows its progress, or a few
/// lines, writes less at once.
const LARGE_PIECE: u64 = 32 << 10;

/// Time that a piece behind a large one is given to become as large as it may: with the smaller
/// pieces that come without it, the processes on the way to the client mostly wake each other.
const FILL_TIME: Duration = Duration::from_micros(400);

/// Descriptors of a program: its reaper, and three pipes.
const FILES_OF_PROGRAM: u64 = 4;

/// Interval at which a waiting call checks for cancellation.
const CANCEL_CHECK: Duration = Duration::from_millis(50);

/// Longest wait of one write for a program that does not read.
const WRITE_WAIT: Duration = Duration::from_millis(200);

/// A program that runs for a client. Dropping it kills the program and all that it has started.
pub(crate) struct RunningProgram {
    output: Mutex<OutputPipes>,
    stdin: Mutex<Option<PipeWriter>>,
    /// Connection to the reaper, which ends the program when the connection is closed.
    control: Arc<UnixStream>,
    status: Mutex<Option<Result<RunStatus>>>,
    /// True once the output was more than its limit.
    is_over_limit: AtomicBool,
    /// Id of the reaper.
    reaper: Pid,
    _open: OpenFileLease,
    _pipes: MemoryLease,
}

struct OutputPipes {
    /// Pipes of standard output and of standard error, until their ends.
    pipes: [Option<PipeReader>; 2],
    /// The pipe that is looked at first.
    first: usize,
    /// True once the last piece was a large one.
    is_bulk: bool,
    /// Bytes that may still be read.
    left: Option<u64>,
    /// True once there were more.
    is_over_limit: bool,
}

impl RunningProgram {
    /// Starts the program of `request` in `workspace`.
    ///
    /// # Errors
    ///
    /// The program or a variable is not allowed; the session has too many open files or too little
    /// memory; the program cannot be started.
    pub(crate) fn start(
        context: &Context,
        policy: &RunPolicy,
        workspace: &Workspace,
        request: &RunRequest,
    ) -> Result<Self> {
        let folder = workspace.path();
        let setup = ProgramSetup {
            version: MESSAGES.version(),
            path: policy.program(request, folder).map_err(RpcError::without_effect)?,
            args: [std::slice::from_ref(&request.program), &request.args].concat(),
            env: policy.environment(request, folder).map_err(RpcError::without_effect)?,
            folder: folder.to_owned(),
            time_limit: request.time_limit,
            max_processes: policy.max_processes,
        };
        let pipes = if request.has_input { 3 } else { 2 };
        let _open = context.reserve_open_files(FILES_OF_PROGRAM)?;
        let _pipes = context.reserve_memory(pipes * PIPE_BYTES)?;
        let cannot = |error: io::Error| {
            RpcError::new(ErrorKind::Io, format!("cannot start the program '{}': {error}", request.program))
        };
        let (stdout, program_stdout) = output_pipe().map_err(cannot)?;
        let (stderr, program_stderr) = output_pipe().map_err(cannot)?;
        let stdin = request.has_input.then(input_pipe).transpose().map_err(cannot)?;
        let (program_stdin, stdin) = stdin.unzip();
        let (reaper, control) = start_reaper().map_err(cannot)?;
        let program = Self {
            output: Mutex::new(OutputPipes {
                pipes: [Some(stdout), Some(stderr)],
                first: 0,
                is_bulk: false,
                left: request.output_limit,
                is_over_limit: false,
            }),
            stdin: Mutex::new(stdin),
            control,
            status: Mutex::default(),
            is_over_limit: AtomicBool::new(false),
            reaper,
            _open,
            _pipes,
        };
        let mut streams = vec![program_stdout.as_fd(), program_stderr.as_fd()];
        streams.extend(program_stdin.as_ref().map(AsFd::as_fd));
        setup.send(&program.control, &streams).map_err(cannot)?;
        // The ends of the program are with the program alone, so that its end is theirs.
        drop((program_stdout, program_stderr, program_stdin));
        while !wait_for(&*program.control, PollFlags::IN)? {
            if context.is_cancelled() {
                return Err(cancelled());
            }
        }
        messages::receive::<Started>(&program.control).map_err(cannot)?.into_result(&request.program)?;
        Ok(program)
    }

    /// Waits for the next piece of output; `None` once there will be no more.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Busy`] if another call waits for output; [`ErrorKind::Cancelled`].
    pub(crate) fn read(&self, context: &Context) -> Result<Option<(OutputStream, Bytes)>> {
        let busy = || RpcError::new(ErrorKind::Busy, "another call reads the output of this program");
        let mut output = self.output.try_lock().ok_or_else(busy)?;
        loop {
            let has_ended = self.status.lock().is_some();
            // A process that is none of the program's may have got hold of a pipe, so that the end
            // of the program counts, and what is in the pipes at that time.
            let ready = output.poll((!has_ended).then_some(&*self.control))?;
            match ready {
                Ready::Pipe(index) => {
                    if let Some(piece) = output.read(index, context)? {
                        return Ok(Some(piece));
                    }
                    if output.is_over_limit {
                        self.is_over_limit.store(true, Ordering::Relaxed);
                        self.terminate();
                        // The program, which may not end before it has written, gets an error.
                        output.pipes = [None, None];
                    }
                }
                Ready::Control => self.receive_status(),
                Ready::Nothing if has_ended => return Ok(None),
                Ready::Nothing => {}
            }
            if context.is_cancelled() {
                return Err(cancelled());
            }
        }
    }

    /// Waits for the end of the program.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Cancelled`]; [`ErrorKind::Io`] if the reaper has been killed.
    pub(crate) fn wait(&self, context: &Context) -> Result<RunStatus> {
        loop {
            if let Some(status) = &*self.status.lock() {
                return status.clone();
            }
            if wait_for(&*self.control, PollFlags::IN)? {
                self.receive_status();
            }
            if context.is_cancelled() {
                return Err(cancelled());
            }
        }
    }

    /// Writes the beginning of `data` to standard input. Returns its length, which is zero if the
    /// program has not read for a while.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if there is no standard input; [`ErrorKind::Io`] if the
    /// program has closed it; [`ErrorKind::Cancelled`].
    pub(crate) fn write(&self, context: &Context, data: &[u8]) -> Result<usize> {
        let deadline = Instant::now() + WRITE_WAIT;
        let mut stdin = self.stdin.lock();
        let pipe = stdin.as_mut();
        let pipe =
            pipe.ok_or_else(|| RpcError::invalid_argument("this program has no standard input, or it was closed"))?;
        while Instant::now() < deadline {
            match pipe.write(data) {
                Ok(written) => return Ok(written),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => _ = wait_for(pipe, PollFlags::OUT)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    return Err(RpcError::new(ErrorKind::Io, format!("the program does not read its input: {error}")));
                }
            }
            if context.is_cancelled() {
                return Err(cancelled());
            }
        }
        Ok(0)
    }

    /// Closes standard input.
    pub(crate) fn close_input(&self) {
        drop(self.stdin.lock().take());
    }

    /// Begins to end the program.
    pub(crate) fn terminate(&self) {
        // A reaper that is gone has ended the program.
        let _ = (&*self.control).write_all(&[TERMINATE]);
        reaper_guard::resume(self.reaper);
    }

    /// Receives the status, which the reaper has sent, or the end of the connection.
    fn receive_status(&self) {
        let mut status = self.status.lock();
        if status.is_none() {
            // What a killed reaper leaves is ended by its guard.
            let received = messages::receive(&self.control).map_err(|error| {
                RpcError::new(ErrorKind::Io, format!("the process that watches the program was killed: {error}"))
            });
            // The program may have ended by the closed pipe, before the reaper could end it.
            let is_over_limit = self.is_over_limit.load(Ordering::Relaxed);
            *status = Some(received.map(|status: RunStatus| match status.ended_by {
                None | Some(EndCause::Client) if is_over_limit => {
                    RunStatus { ended_by: Some(EndCause::OutputLimit), ..status }
                }
                _ => status,
            }));
        }
    }
}

impl Drop for RunningProgram {
    fn drop(&mut self) {
        let _ = self.control.shutdown(std::net::Shutdown::Both);
        reaper_guard::resume(self.reaper);
    }
}

/// Source of the next event of a program.
enum Ready {
    Pipe(usize),
    Control,
    Nothing,
}

impl OutputPipes {
    /// Waits a moment for output or, if `control` is given, for the reaper; without it, returns at
    /// once.
    fn poll(&mut self, control: Option<&UnixStream>) -> Result<Ready> {
        let timeout = if control.is_some() { CANCEL_CHECK } else { Duration::ZERO };
        let order = [self.first, 1 - self.first];
        let open = order.into_iter().filter_map(|index| Some((index, self.pipes[index].as_ref()?)));
        let (indices, mut fds): (Vec<_>, Vec<_>) =
            open.map(|(index, pipe)| (index, PollFd::new(pipe, PollFlags::IN))).unzip();
        fds.extend(control.map(|control| PollFd::new(control, PollFlags::IN)));
        poll_for(&mut fds, timeout)?;
        let ready = fds.iter().position(|fd| !fd.revents().is_empty());
        Ok(match ready.map(|at| indices.get(at)) {
            Some(Some(index)) => Ready::Pipe(*index),
            Some(None) => Ready::Control,
            None => Ready::Nothing,
        })
    }

    /// Reads a piece of a pipe that has one, or is at its end, and closes the pipe at its end.
    /// Reads nothing beyond the limit.
    fn read(&mut self, index: usize, context: &Context) -> Result<Option<(OutputStream, Bytes)>> {
        let Some(pipe) = &mut self.pipes[index] else { return Ok(None) };
        let in_pipe = || rustix::io::ioctl_fionread(&*pipe).map_err(|error| output_error(error.into()));
        let mut available = in_pipe()?;
        if self.is_bulk && (1..MAX_PIECE).contains(&available) {
            thread::sleep(FILL_TIME);
            available = in_pipe()?;
        }
        self.is_bulk = available >= LARGE_PIECE;
        if self.left == Some(0) && available > 0 {
            self.is_over_limit = true;
            return Ok(None);
        }
        // Without a byte there, the read finds the end.
        let mut len = available.clamp(1, MAX_PIECE).min(self.left.unwrap_or(u64::MAX).max(1));
        let staged = match context.stage(len) {
            Err(error) if error.kind() == ErrorKind::LimitExceeded && len > SMALL_PIECE => {
                len = SMALL_PIECE;
                context.stage(len)
            }
            staged => staged,
        };
        let _staged = staged?;
        let mut piece = Vec::with_capacity(len as usize);
        let read = read_some(pipe, &mut piece).map_err(output_error)?;
        if read == 0 {
            self.pipes[index] = None;
            return Ok(None);
        }
        if let Some(left) = &mut self.left {
            *left -= read as u64;
        }
        // The streams take turns.
        self.first = 1 - index;
        let stream = if index == 0 { OutputStream::Stdout } else { OutputStream::Stderr };
        Ok(Some((stream, piece.into())))
    }
}

/// Reads once into the room that `piece` has left. Returns the number of bytes.
fn read_some(pipe: &PipeReader, piece: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        match rustix::io::read(pipe, spare_capacity(piece)) {
            Err(Errno::INTR) => {}
            read => return Ok(read?),
        }
    }
}

fn output_error(error: io::Error) -> RpcError {
    RpcError::new(ErrorKind::Io, format!("cannot read the output of the program: {error}"))
}

/// Waits a moment for an event of `fd`. Returns true if it has come.
fn wait_for(fd: &impl AsFd, event: PollFlags) -> Result<bool> {
    let mut fds = [PollFd::new(fd, event)];
    poll_for(&mut fds, CANCEL_CHECK)?;
    Ok(!fds[0].revents().is_empty())
}

fn poll_for(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<()> {
    let timeout = Timespec::try_from(timeout).ok();
    match poll(fds, timeout.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(RpcError::new(ErrorKind::Io, format!("cannot wait for the program: {error}"))),
    }
}

fn output_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = io::pipe()?;
    // The default is a sixteenth of it, and good enough where the system gives no more.
    let _ = fcntl_setpipe_size(&reader, PIPE_BYTES as usize);
    Ok((reader, writer))
}

/// Returns a pipe whose writing end does not block.
fn input_pipe() -> io::Result<(PipeReader, PipeWriter)> {
    let (reader, writer) = output_pipe()?;
    fcntl_setfl(&writer, fcntl_getfl(&writer)? | OFlags::NONBLOCK)?;
    Ok((reader, writer))
}
