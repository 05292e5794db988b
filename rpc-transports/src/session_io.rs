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

/// Number of successful spins in a row of one task.
const MAX_SPINS: u32 = 8;

/// Byte pipe of a session's task.
pub(crate) struct SessionIo {
    io: Io,
    /// Spinning, if it is switched on and the channel is a bare socket.
    spinner: Option<Spinner>,
    /// Outcome of a look that the next read takes: input of which the runtime may not know yet, or
    /// the error that the look has taken from the socket.
    found: Option<io::Result<()>>,
}

impl SessionIo {
    /// Creates the byte pipe. Reads of a bare socket may be preceded by looks for input, for at
    /// most `spin` each.
    pub(crate) fn new(io: Io, spin: Duration) -> Self {
        let spinner = if matches!(io, Io::Plain(_)) { Spinner::new(spin) } else { None };
        Self { io, spinner, found: None }
    }

    /// Returns the number of times that a task may [spin](Self::spin) before it gives its thread to
    /// others: those that run on the same thread wait meanwhile.
    pub(crate) fn spins(&self) -> u32 {
        if self.spinner.is_some() { MAX_SPINS } else { 0 }
    }

    /// Looks for input on the current thread, for as long as spinning is worth it. Returns true if
    /// there is input, which the next read takes, or if `is_ready` has returned true.
    pub(crate) fn spin(&mut self, mut is_ready: impl FnMut() -> bool) -> bool {
        let (Some(spinner), Io::Plain(socket)) = (&mut self.spinner, &self.io) else { return false };
        let found = &mut self.found;
        spinner.wait(|| {
            *found = look(&**socket);
            found.is_some() || is_ready()
        })
    }

    fn inner(&mut self) -> Pin<&mut dyn ChannelIo> {
        Pin::new(self.io.as_channel_io())
    }
}

/// Returns `Ok` if a read would not wait, since there is input or the end of the stream, and the
/// error of the socket if there is one: the system reports it only once. `None` if a read would
/// wait.
fn look(socket: &dyn PlainSocket) -> Option<io::Result<()>> {
    let mut byte = [0];
    match recv(socket.as_fd(), &mut byte, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok(_) => Some(Ok(())),
        Err(Errno::AGAIN | Errno::INTR) => None,
        Err(error) => Some(Err(error.into())),
    }
}

impl AsyncRead for SessionIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if let Some(found) = self.found.take()
            && let Io::Plain(socket) = &self.io
        {
            found?;
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

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::io::Write as _;
    use std::net::TcpListener;

    use tokio::net::UnixStream;

    use super::*;
    use crate::channel::Channel;

    /// Long enough for every expected input.
    const LONG: Duration = Duration::from_secs(20);

    /// Returns the byte pipe of a session, after its runtime has found that there is no input, and
    /// the other end.
    async fn waiting_pair() -> (SessionIo, std::os::unix::net::UnixStream) {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let channel = Channel::new(UnixStream::from_std(ours).unwrap(), "the other end");
        let mut io = channel.into_session_parts(LONG).0;
        assert!(read(&mut io).await.is_none());
        (io, theirs)
    }

    /// Reads once; `None` if there is nothing that the byte pipe knows of.
    async fn read(io: &mut SessionIo) -> Option<io::Result<usize>> {
        let mut bytes = [0; 64 << 10];
        poll_fn(|cx| {
            let mut buffer = ReadBuf::new(&mut bytes);
            Poll::Ready(match Pin::new(&mut *io).poll_read(cx, &mut buffer) {
                Poll::Ready(outcome) => Some(outcome.map(|()| buffer.filled().len())),
                Poll::Pending => None,
            })
        })
        .await
    }

    /// Spins until there is something. Other tests may have the permission to spin meanwhile.
    fn spin(io: &mut SessionIo, is_ready: impl Fn() -> bool) {
        let started = std::time::Instant::now();
        while !io.spin(&is_ready) {
            assert!(started.elapsed() < LONG, "no spin has found anything");
            std::thread::yield_now();
        }
    }

    // The runtime of these tests learns nothing from the system while a test does not wait.
    #[tokio::test]
    async fn input_that_a_look_finds_is_read_before_the_runtime_knows_of_it() {
        let (mut io, mut theirs) = waiting_pair().await;
        theirs.write_all(&[1; 5000]).unwrap();
        assert!(read(&mut io).await.is_none(), "the runtime knows, and the test shows nothing");
        spin(&mut io, || false);
        assert_eq!(read(&mut io).await.unwrap().unwrap(), READ_AFTER_SPIN);
        spin(&mut io, || false);
        assert_eq!(read(&mut io).await.unwrap().unwrap(), 5000 - READ_AFTER_SPIN);
        drop(theirs);
        spin(&mut io, || false);
        assert_eq!(read(&mut io).await.unwrap().unwrap(), 0);
    }

    #[tokio::test]
    async fn other_work_ends_a_spin_without_input() {
        let (mut io, _theirs) = waiting_pair().await;
        spin(&mut io, || true);
        assert!(read(&mut io).await.is_none());
    }

    #[cfg(feature = "tcp")]
    #[tokio::test]
    async fn a_reset_that_a_look_finds_stays_an_error() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (theirs, _) = listener.accept().unwrap();
        ours.set_nonblocking(true).unwrap();
        let channel = Channel::new(tokio::net::TcpStream::from_std(ours).unwrap(), "the other end");
        let mut io = channel.into_session_parts(LONG).0;
        assert!(read(&mut io).await.is_none());
        rustix::net::sockopt::set_socket_linger(&theirs, Some(Duration::ZERO)).unwrap();
        drop(theirs);
        spin(&mut io, || false);
        assert_eq!(read(&mut io).await.unwrap().unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
