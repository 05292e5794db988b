//! Stream of QUIC as the bytes of a channel.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::{RecvStream, SendStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::closed_port::{PeerPort, Wait};

/// Both directions of a stream.
pub(super) struct QuicIo {
    pub(super) send: SendStream,
    pub(super) recv: RecvStream,
    /// Port of the server, if it is watched.
    pub(super) port: Option<Arc<PeerPort>>,
    /// Mark that bytes were written and none were read since. A session has then most often sent a
    /// request, and waits for the answer.
    pub(super) wait: Option<Wait>,
}

impl QuicIo {
    /// Notes that `written` bytes were written.
    fn wait_after(&mut self, written: usize) {
        if written > 0 && self.wait.is_none() {
            self.wait = self.port.as_ref().map(PeerPort::wait);
        }
    }

    /// Returns the cause of an error, if it is known better than by QUIC.
    fn explain(&self, error: io::Error) -> io::Error {
        match &self.port {
            Some(port) if port.is_closed() => io::Error::new(io::ErrorKind::ConnectionReset, PORT_CLOSED_TEXT),
            _ => error,
        }
    }
}

/// Error of a channel whose peer's port is closed.
const PORT_CLOSED_TEXT: &str = "the peer's port is closed: its system says that no program uses it any more";

impl AsyncRead for QuicIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let outcome = AsyncRead::poll_read(Pin::new(&mut self.recv), cx, buffer);
        if buffer.filled().len() > before {
            self.wait = None;
        }
        outcome.map_err(|error| self.explain(error))
    }
}

impl AsyncWrite for QuicIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let outcome = AsyncWrite::poll_write(Pin::new(&mut self.send), cx, bytes);
        if let Poll::Ready(Ok(count)) = outcome {
            self.wait_after(count);
        }
        outcome.map_err(|error| self.explain(error))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut written = 0;
        for slice in slices.iter().filter(|slice| !slice.is_empty()) {
            match AsyncWrite::poll_write(Pin::new(&mut self.send), cx, slice) {
                Poll::Ready(Ok(count)) => {
                    written += count;
                    if count < slice.len() {
                        break;
                    }
                }
                // The bytes already taken are reported first. An error comes again at the next
                // write.
                _ if written > 0 => break,
                other => return other.map_err(|error| self.explain(error)),
            }
        }
        self.wait_after(written);
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(Pin::new(&mut self.send), cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.send), cx)
    }
}
