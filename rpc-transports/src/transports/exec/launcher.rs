//! Launcher of child processes: the thread that starts, ends and reaps them.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::transports::unix_buffer::widen_unix_socket;

/// Time that a child may take to exit after its channel was closed. It is enough to write a log
/// line and remove a folder, and no more than the second within which a dead worker is to be
/// noticed.
pub const GRACE: Duration = Duration::from_secs(1);

/// Shortest interval at which a child's status is polled, because not every system can wait for an
/// exit with a time limit. Most children exit at once. For the others the interval doubles up to
/// `POLL_MAX`.
pub(super) const POLL_MIN: Duration = Duration::from_millis(1);
pub(super) const POLL_MAX: Duration = Duration::from_millis(20);

/// Receiver of the standard error of child processes: see
/// [`Exec::stderr`](super::Exec::stderr).
#[derive(Clone)]
pub struct ChildStderr(Arc<dyn Fn(OwnedFd) + Send + Sync>);

impl ChildStderr {
    /// Creates a receiver from a function that gets the reading end of a pipe for each child that
    /// has started. The function must not block. It must see to it that the pipe is read until its
    /// end: a child that fills the pipe waits.
    pub fn new(take: impl Fn(OwnedFd) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }

    /// Hands over the reading end of a child's pipe.
    pub(in crate::transports) fn take(&self, pipe: OwnedFd) {
        (self.0)(pipe);
    }
}

impl fmt::Debug for ChildStderr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChildStderr")
    }
}

/// Command line of a child.
pub(in crate::transports) struct ChildCommand {
    /// The program and its arguments.
    pub(in crate::transports) argv: Vec<String>,
    /// Number of words, from the first one, that name programs of this machine. The others name
    /// them on another machine, as in `ssh HOST PROGRAM`.
    pub(in crate::transports) local_words: usize,
}

impl ChildCommand {
    /// Returns the command line all of which is about this machine.
    pub(super) fn local(argv: Vec<String>) -> Self {
        Self { local_words: argv.len(), argv }
    }

    /// Returns the program that is started on this machine.
    pub(in crate::transports) fn program(&self) -> Option<String> {
        self.argv.first().cloned()
    }
}

/// Child that has been started, and this process's end of the socket pair.
pub(super) struct Launched {
    pub(super) child: Child,
    pub(super) stream: StdStream,
    /// Second owner of the same end.
    pub(super) socket: StdStream,
}

type Reply = Box<dyn FnOnce(io::Result<Launched>) + Send>;

/// Job of the `rpc-children` thread. The queue is unbounded. It holds at most one job for each
/// caller that waits for a start, and one for each child that exists.
enum Job {
    Start { command: ChildCommand, stderr: Option<ChildStderr>, reply: Reply },
    Retire(Child),
}

/// Has the `rpc-children` thread start a child. The thread calls `reply` with the outcome, and
/// waits until `reply` returns.
///
/// # Errors
///
/// The thread cannot be started. `reply` is not called then.
pub(super) fn launch(
    command: ChildCommand,
    stderr: Option<ChildStderr>,
    reply: impl FnOnce(io::Result<Launched>) + Send + 'static,
) -> io::Result<()> {
    submit(Job::Start { command, stderr, reply: Box::new(reply) }).map_err(|_| launcher_gone())
}

/// Leaves a child whose channel is closed to the `rpc-children` thread, which ends and reaps it.
pub(super) fn retire(child: Child) {
    if let Err(Job::Retire(mut child)) = submit(Job::Retire(child)) {
        // Unreachable: the thread that started this child runs as long as the process. The child is
        // ended here all the same, so that none is left behind.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Makes the error of a start while there is no thread that starts children.
pub(super) fn launcher_gone() -> io::Error {
    io::Error::other("the thread that starts children is gone")
}

/// Hands a job to the `rpc-children` thread, which the first job starts. Returns the job if the
/// thread is not running.
fn submit(job: Job) -> Result<(), Job> {
    static LAUNCHER: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);
    let mut launcher = LAUNCHER.lock();
    if launcher.is_none() {
        let (sender, jobs) = mpsc::channel();
        let thread = thread::Builder::new().name("rpc-children".into());
        if thread.spawn(move || run(&jobs)).is_ok() {
            *launcher = Some(sender);
        }
    }
    match &*launcher {
        Some(sender) => sender.send(job).map_err(|mpsc::SendError(job)| job),
        None => Err(job),
    }
}

/// Starts children, and ends those whose channel is closed. Runs on the `rpc-children` thread for
/// as long as the process.
fn run(jobs: &mpsc::Receiver<Job>) {
    let mut retired: Vec<Retired> = Vec::new();
    let mut pause = POLL_MIN;
    loop {
        let job = if retired.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            jobs.recv_timeout(pause)
        };
        match job {
            Ok(Job::Start { command, stderr, reply }) => reply(spawn(&command, stderr.as_ref())),
            Ok(Job::Retire(child)) => {
                retired.push(Retired::new(child));
                pause = POLL_MIN;
            }
            Err(RecvTimeoutError::Timeout) => pause = (pause * 2).min(POLL_MAX),
            // Unreachable, because the sender is static. Returning would be harmless.
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let now = Instant::now();
        retired.retain_mut(|child| !child.is_reaped(now));
    }
}

/// Child whose channel is closed and which has not been reaped.
struct Retired {
    child: Child,
    killed_at: Instant,
    killed: bool,
}

impl Retired {
    fn new(child: Child) -> Self {
        Self { child, killed_at: Instant::now() + GRACE, killed: false }
    }

    fn is_reaped(&mut self, now: Instant) -> bool {
        match self.child.try_wait() {
            Ok(None) if now >= self.killed_at && !self.killed => {
                // The child is reaped in a later round. A child inside a system call may take long
                // to die, and the other children must not wait for it.
                self.killed = true;
                let _ = self.child.kill();
                false
            }
            Ok(None) => false,
            // An error means that other code has reaped the child.
            Ok(Some(_)) | Err(_) => true,
        }
    }
}

fn spawn(child: &ChildCommand, stderr: Option<&ChildStderr>) -> io::Result<Launched> {
    let Some((program, arguments)) = child.argv.split_first() else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let (ours, theirs) = StdStream::pair()?;
    [&ours, &theirs].into_iter().for_each(widen_unix_socket);
    let socket = ours.try_clone()?;
    let mut command = Command::new(program);
    command.args(arguments).stdin(OwnedFd::from(theirs.try_clone()?)).stdout(OwnedFd::from(theirs));
    if stderr.is_some() {
        command.stderr(Stdio::piped());
    }
    crate::self_start::guard(&mut command, child.local_words)?;
    die_with_us(&mut command);
    let mut child = command.spawn()?;
    if let (Some(stderr), Some(pipe)) = (stderr, child.stderr.take()) {
        stderr.take(pipe.into());
    }
    // Dropping `command` closes this process's copies of the child's end. While one of them is
    // open, the stream does not end.
    drop(command);
    Ok(Launched { child, stream: ours, socket })
}

/// Tells the kernel to kill the child as soon as the calling thread is gone. The setting survives
/// `exec`, unless the program raises its privileges.
#[cfg(any(target_os = "linux", target_os = "android"))]
fn die_with_us(command: &mut Command) {
    use std::os::unix::process::CommandExt as _;

    use rustix::io::Errno;
    use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

    let parent = getpid();
    let set_up = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // If the parent died before that call, no signal comes. The child then has another parent.
        if getppid() != Some(parent) {
            return Err(Errno::SRCH.into());
        }
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe work is allowed, since another thread
    // may have held any lock at the time of the fork. The closure makes two system calls, takes no
    // lock, and neither allocates nor frees: `parent` is a plain number, and an `io::Error` made
    // from an error number is one as well. It touches no file descriptor.
    unsafe {
        command.pre_exec(set_up);
    }
}

/// Does nothing, because other kernels have no such signal. The child reads the end of the stream
/// instead.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn die_with_us(_command: &mut Command) {}
