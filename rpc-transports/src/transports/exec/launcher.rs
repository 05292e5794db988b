//! Launcher of child processes: the thread that starts, ends and reaps them.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::child::{ChildGuard, ChildStderr, POLL_MAX, POLL_MIN};
use super::{argv_of, spawn_error};
use crate::address::Address;
use crate::error::TransportError;
use crate::transports::unix_buffer::widen_unix_socket;

/// Time that a child may take to exit after its channel was closed. It is enough to write a log
/// line and remove a folder, and no more than the second within which a dead worker is to be
/// noticed.
pub const GRACE: Duration = Duration::from_secs(1);
pub(super) fn keeper_gone() -> io::Error {
    io::Error::other("the thread that starts children is gone")
}

/// Running child, and this process's end of the socket pair.
pub(super) struct Started {
    pub(super) stream: StdStream,
    pub(super) guard: ChildGuard,
}

impl Started {
    pub(super) fn peer(&self, address: &Address) -> String {
        format!("{address} (process {})", self.guard.pid)
    }
}

pub(super) type Reply = Box<dyn FnOnce(io::Result<Started>) + Send>;

/// Job of the `rpc-children` thread. The queue is unbounded. It holds at most one job for each
/// caller that waits for a start, and one for each child that exists.
pub(super) enum Job {
    Start { argv: Vec<String>, stderr: Option<ChildStderr>, reply: Reply },
    Retire(Child),
}

pub(super) fn start(
    address: &Address,
    stderr: Option<&ChildStderr>,
    reply: impl FnOnce(io::Result<Started>) + Send + 'static,
) -> Result<(), TransportError> {
    let job = Job::Start { argv: argv_of(address)?, stderr: stderr.cloned(), reply: Box::new(reply) };
    submit(job).map_err(|_| spawn_error(address, keeper_gone()))
}

/// Hands a job to the `rpc-children` thread, which the first job starts. Returns the job if the
/// thread is not running.
pub(super) fn submit(job: Job) -> Result<(), Job> {
    static KEEPER: Mutex<Option<mpsc::Sender<Job>>> = Mutex::new(None);
    let mut keeper = KEEPER.lock().unwrap_or_else(PoisonError::into_inner);
    if keeper.is_none() {
        let (sender, jobs) = mpsc::channel();
        let thread = thread::Builder::new().name("rpc-children".into());
        if thread.spawn(move || keep(&jobs)).is_ok() {
            *keeper = Some(sender);
        }
    }
    match &*keeper {
        Some(sender) => sender.send(job).map_err(|mpsc::SendError(job)| job),
        None => Err(job),
    }
}

/// Starts children, and ends those whose channel is closed. Runs on the `rpc-children` thread for
/// as long as the process.
fn keep(jobs: &mpsc::Receiver<Job>) {
    let mut retired: Vec<Retired> = Vec::new();
    let mut pause = POLL_MIN;
    loop {
        let job = if retired.is_empty() {
            jobs.recv().map_err(|_| RecvTimeoutError::Disconnected)
        } else {
            jobs.recv_timeout(pause)
        };
        match job {
            Ok(Job::Start { argv, stderr, reply }) => reply(spawn(&argv, stderr.as_ref())),
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

fn spawn(argv: &[String], stderr: Option<&ChildStderr>) -> io::Result<Started> {
    let Some((program, arguments)) = argv.split_first() else {
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
    crate::self_start::guard(&mut command)?;
    die_with_us(&mut command);
    let mut child = command.spawn()?;
    if let (Some(ChildStderr(take)), Some(pipe)) = (stderr, child.stderr.take()) {
        take(pipe.into());
    }
    // Dropping `command` closes this process's copies of the child's end. While one of them is
    // open, the stream does not end.
    drop(command);
    let pid = child.id();
    Ok(Started { stream: ours, guard: ChildGuard { process: Mutex::new(Some(child)), pid, socket } })
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
