//! Child processes behind channels: starting them, their exit status, their end.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdStream;
use std::process::{Child, ExitStatus};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::{Mutex, MutexGuard};
use tokio::net::UnixStream;
use tokio::sync::oneshot;

use super::launcher::{ChildCommand, ChildStderr, Launched, POLL_MAX, POLL_MIN, launch, launcher_gone, retire};
use crate::channel::{BlockingChannel, Channel, ExplainEnd, Peer};

/// Running child, and this process's end of the socket pair.
pub(in crate::transports) struct Started {
    stream: StdStream,
    guard: ChildGuard,
}

impl Started {
    /// Starts a child. Dropping the future ends a child that was being started.
    pub(in crate::transports) async fn start(command: ChildCommand, stderr: Option<ChildStderr>) -> io::Result<Self> {
        let (reply, answer) = oneshot::channel();
        launch(command, stderr, move |outcome| {
            // If the dialler has given up, dropping the started child ends it.
            let _ = reply.send(outcome.map(Self::from));
        })?;
        answer.await.unwrap_or_else(|_| Err(launcher_gone()))
    }

    /// Starts a child, and blocks until it runs.
    pub(in crate::transports) fn start_blocking(
        command: ChildCommand,
        stderr: Option<ChildStderr>,
    ) -> io::Result<Self> {
        let (reply, answer) = mpsc::sync_channel(1);
        launch(command, stderr, move |outcome| {
            let _ = reply.send(outcome.map(Self::from));
        })?;
        answer.recv().unwrap_or_else(|_| Err(launcher_gone()))
    }

    /// Returns the process id of the child.
    pub(in crate::transports) fn pid(&self) -> u32 {
        self.guard.pid
    }

    /// Returns the channel to the child, which owns the child. `end` makes the explanation of the
    /// channel's end from the child.
    pub(in crate::transports) fn into_channel<E: ExplainEnd + 'static>(
        self,
        peer: Peer,
        end: impl FnOnce(Weak<ChildGuard>) -> E,
    ) -> io::Result<Channel> {
        let guard = Arc::new(self.guard);
        self.stream.set_nonblocking(true)?;
        let stream = UnixStream::from_std(self.stream)?;
        let end = Arc::new(end(Arc::downgrade(&guard)));
        Ok(Channel::new(stream, peer).with_guard(Box::new(guard)).explained_by(end))
    }

    /// Does the same as [`into_channel`](Self::into_channel), for a plain thread.
    pub(in crate::transports) fn into_blocking_channel<E: ExplainEnd + 'static>(
        self,
        peer: String,
        end: impl FnOnce(Weak<ChildGuard>) -> E,
    ) -> BlockingChannel {
        let guard = Arc::new(self.guard);
        let end = Arc::new(end(Arc::downgrade(&guard)));
        BlockingChannel::new(self.stream, peer).with_guard(Box::new(guard)).explained_by(end)
    }
}

impl From<Launched> for Started {
    fn from(Launched { child, stream, socket }: Launched) -> Self {
        let pid = child.id();
        Self { stream, guard: ChildGuard { process: Mutex::new(Some(child)), pid, socket } }
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
    process: Mutex<Option<Child>>,
    pid: u32,
    /// Second owner of this process's end of the socket pair. If another task or thread still holds
    /// the stream when the guard is dropped, the child sees the end of the stream all the same.
    socket: StdStream,
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
        self.process.lock()
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
        retire(child);
    }
}
