//! The bytes of a session's task, with spinning in front of reads where the channel is a bare
//! socket.

use std::io::{self, IoSlice};
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::channel::{ChannelIo, Io, PlainSocket};
use crate::spin::Spinner;

/// Bytes that a read behind a successful spin takes at most: the runtime does not know yet that
/// there is more.
const READ_AFTER_SPIN: usize = 4 << 10;

/// Byte pipe of a session's task.
pub(crate) struct SessionIo {
    io: Io,
    /// Spinning, if it is switched on and the channel is a bare socket.
    spinner: Option<Spinner>,
    /// True if a look has found input of which the runtime may not know yet.
    has_input: bool,
}

impl SessionIo {
    /// Creates the byte pipe. Reads of a bare socket may be preceded by looks for input, each for at
    /// most `spin`.
    pub(crate) fn new(io: Io, spin: Duration) -> Self {
        let spinner = if matches!(io, Io::Plain(_)) { Spinner::new(spin) } else { None };
        Self { io, spinner, has_input: false }
    }

    /// Returns true if [`spin`](Self::spin) may do anything.
    pub(crate) fn can_spin(&self) -> bool {
        self.spinner.is_some()
    }

    /// Looks for input on the current thread, for as long as spinning is worth it. Returns true if
    /// there is input, which the next read takes, or if `is_ready` has returned true.
    pub(crate) fn spin(&mut self, mut is_ready: impl FnMut() -> bool) -> bool {
        let (Some(spinner), Io::Plain(socket)) = (&mut self.spinner, &self.io) else { return false };
        let has_input = &mut self.has_input;
        spinner.wait(|| {
            *has_input = has_arrived(&**socket);
            *has_input || is_ready()
        })
    }

    fn inner(&mut self) -> Pin<&mut dyn ChannelIo> {
        Pin::new(self.io.as_channel_io())
    }
}

/// Returns true if a read would not wait: there is input, the end of the stream, or an error.
fn has_arrived(socket: &dyn PlainSocket) -> bool {
    let mut byte = [0];
    !matches!(recv(socket.as_fd(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT), Err(Errno::AGAIN | Errno::INTR))
}

impl AsyncRead for SessionIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if std::mem::take(&mut self.has_input)
            && let Io::Plain(socket) = &self.io
        {
            // The runtime reads only what it has been told of by the system.
            let room = buffer.initialize_unfilled_to(buffer.remaining().min(READ_AFTER_SPIN));
            match recv(socket.as_fd(), room, RecvFlags::DONTWAIT) {
                Ok((count, _)) => {
                    buffer.advance(count);
                    return Poll::Ready(Ok(()));
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Poll::Ready(Err(error.into())),
            }
        }
        self.inner().poll_read(cx, buffer)
    }
}

impl AsyncWrite for SessionIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.io {
            Io::Plain(socket) => socket.is_write_vectored(),
            Io::Other(io) => io.is_write_vectored(),
        }
    }
}
