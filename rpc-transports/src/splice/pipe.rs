//! Bytes moved from socket to socket through a pipe in the kernel: `splice(2)` of Linux.

use std::io;
use std::task::{Context, Poll};

use rpc_core::OpenFileQuota;

use crate::channel::Channel;

#[cfg(target_os = "linux")]
pub(super) use linux::Pipe;
#[cfg(not(target_os = "linux"))]
pub(super) use other::Pipe;

#[cfg(target_os = "linux")]
mod linux {
    use std::os::fd::OwnedFd;
    use std::task::ready;

    use rustix::pipe::{PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice};

    use rpc_core::limits::OpenFileLease;

    use super::{Channel, Context, OpenFileQuota, Poll, io};
    use crate::channel::PlainSocket;

    /// Requested capacity. The pipes of a user other than root may have 64 MiB together.
    const SIZE: usize = 256 << 10;

    /// Amount below which a copy costs less than two more system calls.
    const LITTLE: usize = 16 << 10;

    /// Kernel pipe for one direction.
    pub(in super::super) struct Pipe {
        /// End that is read.
        source: OwnedFd,
        /// End that is written to.
        sink: OwnedFd,
        _open: OpenFileLease,
        held: usize,
        /// Number of bytes that the last fill took.
        last: usize,
    }

    impl Pipe {
        /// Creates a pipe for the bytes between two channels. `None` if one of them is not a plain
        /// socket, or if no more files can be opened.
        pub(in super::super) fn between(from: &Channel, to: &Channel, open_files: &OpenFileQuota) -> Option<Self> {
            from.plain_socket().and(to.plain_socket())?;
            let open = open_files.reserve(2).ok()?;
            let (source, sink) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
            // A pipe of the default size works as well, only slower.
            let _ = fcntl_setpipe_size(&sink, SIZE);
            Some(Self { source, sink, _open: open, held: 0, last: 0 })
        }

        /// Moves some bytes, and returns how many were written: 0 at the end of the stream, after
        /// all bytes have been.
        pub(in super::super) fn poll(
            &mut self,
            from: &Channel,
            to: &Channel,
            cx: &mut Context<'_>,
        ) -> Poll<io::Result<usize>> {
            let (Some(from), Some(to)) = (from.plain_socket(), to.plain_socket()) else { return Poll::Ready(Ok(0)) };
            if self.held == 0 {
                self.last = ready!(self.poll_fill(from, cx))?;
                self.held = self.last;
            }
            if self.held == 0 {
                return Poll::Ready(Ok(0));
            }
            let passed = ready!(self.poll_drain(to, cx))?;
            self.held -= passed;
            Poll::Ready(Ok(passed))
        }

        /// Returns true if bytes are in the pipe.
        pub(in super::super) fn holds_bytes(&self) -> bool {
            self.held > 0
        }

        /// Returns true if the pipe is empty, and the last fill was too small to be worth a pipe.
        pub(in super::super) fn is_little(&self) -> bool {
            self.held == 0 && self.last < LITTLE
        }

        fn poll_fill(&self, from: &dyn PlainSocket, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
            let mut fill = || Ok(splice(from, None, &self.sink, None, SIZE, FLAGS)?);
            loop {
                ready!(from.poll_read_ready(cx))?;
                match from.try_read_io(&mut fill) {
                    // The next `poll_read_ready` registers this task to be woken.
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    outcome => return Poll::Ready(outcome),
                }
            }
        }

        fn poll_drain(&self, to: &dyn PlainSocket, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
            let mut drain = || Ok(splice(&self.source, None, to, None, self.held, FLAGS)?);
            loop {
                ready!(to.poll_write_ready(cx))?;
                match to.try_write_io(&mut drain) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Ok(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                    outcome => return Poll::Ready(outcome),
                }
            }
        }
    }

    const FLAGS: SpliceFlags = SpliceFlags::MOVE.union(SpliceFlags::NONBLOCK);
}

#[cfg(not(target_os = "linux"))]
mod other {
    use super::{Channel, Context, Poll, io};

    /// Type without values: other systems have no `splice`.
    pub(in super::super) enum Pipe {}

    impl Pipe {
        pub(in super::super) fn between(_: &Channel, _: &Channel) -> Option<Self> {
            None
        }

        pub(in super::super) fn poll(
            &mut self,
            _: &Channel,
            _: &Channel,
            _: &mut Context<'_>,
        ) -> Poll<io::Result<usize>> {
            match *self {}
        }

        pub(in super::super) fn holds_bytes(&self) -> bool {
            match *self {}
        }

        pub(in super::super) fn is_little(&self) -> bool {
            match *self {}
        }
    }
}
