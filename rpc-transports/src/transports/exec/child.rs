//! Guard of a child process behind a channel: its exit status, its end, its standard error.

use std::fmt;
use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use super::launcher::{Job, submit};
use crate::channel::ExplainEnd;

/// Receiver of the standard error of child processes: see [`Exec::stderr`].
#[derive(Clone)]
pub struct ChildStderr(Arc<dyn Fn(OwnedFd) + Send + Sync>);

impl ChildStderr {
    /// Creates a receiver from a function that gets the reading end of a pipe for each child that
    /// has started. The function must not block. It must see to it that the pipe is read until its
    /// end: a child that fills the pipe waits.
    pub fn new(take: impl Fn(OwnedFd) + Send + Sync + 'static) -> Self {
        Self(Arc::new(take))
    }
}

impl fmt::Debug for ChildStderr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ChildStderr")
    }
}

/// Child process behind a channel. To get it, downcast the channel's guard to an `Arc` of this
/// type. Dropping it closes the channel and ends the child, without waiting for either.
///
/// A child that exits early is reaped only when its status is asked for or the guard is dropped.
/// Until then no other process gets its process id.
#[derive(Debug)]
pub struct ChildGuard {
    /// The child, or `None` once dropping has begun.
    pub(super) process: Mutex<Option<Child>>,
    pub(super) pid: u32,
    /// Second owner of this process's end of the socket pair. If another task or thread still holds
    /// the stream when the guard is dropped, the child sees the end of the stream all the same.
    pub(super) socket: StdStream,
}

/// Time that a child may take to exit after it has closed its connection.
const EXIT: Duration = Duration::from_millis(500);

/// Explanation of a channel's end by the exit status of the child. Weak, so that it keeps no child
/// alive.
pub(super) struct ChildEnd(pub(super) Weak<ChildGuard>);

#[async_trait]
impl ExplainEnd for ChildEnd {
    async fn explain(&self) -> Option<String> {
        let guard = self.0.upgrade()?;
        let status = tokio::time::timeout(EXIT, guard.exited()).await;
        status.ok().and_then(io::Result::ok).map(explained)
    }

    fn explain_blocking(&self) -> Option<String> {
        self.0.upgrade()?.exited_within(EXIT).ok().flatten().map(explained)
    }
}

fn explained(status: ExitStatus) -> String {
    format!("the program ended ({status})")
}

impl ChildGuard {
    /// Returns the exit status of the child, or `None` while it runs.
    ///
    /// The stream may end a moment before the child exits. To explain the end of a stream, use
    /// [`exited`](Self::exited) or [`exited_within`](Self::exited_within).
    ///
    /// # Errors
    ///
    /// The child has ended and its status is lost, because this process ignores or collects the
    /// ends of all its children.
    pub fn exit_status(&self) -> io::Result<Option<ExitStatus>> {
        self.process().as_mut().map_or(Ok(None), Child::try_wait)
    }

    /// Waits until the child has ended. Cancel-safe.
    ///
    /// # Errors
    ///
    /// As [`exit_status`](Self::exit_status).
    pub async fn exited(&self) -> io::Result<ExitStatus> {
        let mut pause = POLL_MIN;
        loop {
            if let Some(status) = self.exit_status()? {
                return Ok(status);
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// Blocks until the child has ended or the time is up. Returns `None` if the time is up.
    ///
    /// # Errors
    ///
    /// As [`exit_status`](Self::exit_status).
    pub fn exited_within(&self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let start = Instant::now();
        let mut pause = POLL_MIN;
        loop {
            let status = self.exit_status()?;
            if status.is_some() || start.elapsed() >= limit {
                return Ok(status);
            }
            thread::sleep(pause);
            pause = (pause * 2).min(POLL_MAX);
        }
    }

    /// Kills the child now, without grace. A child that has ended is left as it is.
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn kill(&self) -> io::Result<()> {
        self.process().as_mut().map_or(Ok(()), Child::kill)
    }

    /// Returns the child's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    fn process(&self) -> MutexGuard<'_, Option<Child>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ChildGuard {
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Both);
        let Some(mut child) = self.process().take() else {
            return;
        };
        if matches!(child.try_wait(), Ok(Some(_))) {
            return;
        }
        if let Err(Job::Retire(mut child)) = submit(Job::Retire(child)) {
            // Unreachable: the thread that started this child runs as long as the process. The
            // child is ended here all the same, so that none is left behind.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
/// Shortest interval at which a child's status is polled, because not every system can wait for an
/// exit with a time limit. Most children exit at once. For the others the interval doubles up to
/// `POLL_MAX`.
pub(super) const POLL_MIN: Duration = Duration::from_millis(1);
pub(super) const POLL_MAX: Duration = Duration::from_millis(20);
