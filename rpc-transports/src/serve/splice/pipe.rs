//! Bytes from socket to socket by way of a pipe, and not of this process: `splice(2)` of Linux.

use std::io;
use std::task::{Context, Poll};

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

    use super::{Channel, Context, Poll, io};
    use crate::channel::PlainSocket;

    /// What a pipe is to hold. All those of a user who is not root may have 64 MiB.
    const SIZE: usize = 256 << 10;

    /// Below this a copy costs less than two system calls more.
    const LITTLE: usize = 16 << 10;

    /// The pipe for one direction.
    pub(in super::super) struct Pipe {
        /// The end that is read.
        source: OwnedFd,
        /// The end that is written to.
        sink: OwnedFd,
        held: usize,
        /// How much came the last time.
        last: usize,
    }

    impl Pipe {
        /// A pipe for what goes from one of these to the other, if both are sockets and there are files to be had.
        pub(in super::super) fn between(from: &Channel, to: &Channel) -> Option<Self> {
            from.plain_socket().and(to.plain_socket())?;
            let (source, sink) = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).ok()?;
            // One of the usual size does as well, only slower.
            let _ = fcntl_setpipe_size(&sink, SIZE);
            Some(Self { source, sink, held: 0, last: 0 })
        }

        /// Moves something. Gives how much was passed on: 0 is the end of the stream, by when that is all.
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

        /// Whether it is empty, and so little came the last time that it is not worth a pipe.
        pub(in super::super) fn is_little(&self) -> bool {
            self.held == 0 && self.last < LITTLE
        }

        fn poll_fill(&self, from: &dyn PlainSocket, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
            let mut fill = || Ok(splice(from, None, &self.sink, None, SIZE, FLAGS)?);
            loop {
                ready!(from.poll_read_ready(cx))?;
                match from.try_read_io(&mut fill) {
                    // The next look at the socket has this task woken.
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

    /// There is none.
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

        pub(in super::super) fn is_little(&self) -> bool {
            match *self {}
        }
    }
}
