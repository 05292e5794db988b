//! The connection to a session process, which reports the exit cause of the process.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::UnixStream;

use super::exit_cause::ProcessLimits;
use super::supervisor::Process;
use crate::server::recent_errors::RecentErrors;

/// A connection that explains its end: where a plain socket would report an end, it waits for the
/// end of the process and reports the exit cause.
pub(super) struct ProcessIo {
    pub(super) stream: UnixStream,
    pub(super) process: Arc<Process>,
    pub(super) limits: ProcessLimits,
    /// Errors of the server, to which a process that fails is added.
    pub(super) errors: Arc<RecentErrors>,
}

impl ProcessIo {
    /// Handles a broken connection: returns the exit cause of the process, which gets a grace to
    /// end.
    fn poll_broken<T>(&self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        self.process.kill_after_grace();
        self.process.poll_exit_cause(cx).map(|exit_cause| {
            let text = exit_cause.describe(&self.limits);
            // A process that was killed because its client has gone has not failed.
            let is_expected = exit_cause.killed && self.process.has_no_client();
            if exit_cause.status.is_some_and(|status| !status.success()) && !is_expected {
                self.errors.add(&text);
            }
            Err(io::Error::other(text))
        })
    }
}

impl AsyncRead for ProcessIo {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let filled = buffer.filled().len();
        let wanted = buffer.remaining() > 0;
        match Pin::new(&mut self.stream).poll_read(cx, buffer) {
            Poll::Ready(Ok(())) if buffer.filled().len() > filled || !wanted => Poll::Ready(Ok(())),
            Poll::Ready(_) => self.poll_broken(cx),
            // A process that the session process has started may keep the connection open.
            Poll::Pending => {
                ready!(self.process.poll_exit_cause(cx));
                // Bytes that the process wrote before may have arrived without the runtime knowing
                // yet.
                let rest = recv(&self.stream, buffer.initialize_unfilled(), RecvFlags::DONTWAIT);
                match rest {
                    Ok((len @ 1.., _)) => {
                        buffer.advance(len);
                        Poll::Ready(Ok(()))
                    }
                    Ok(_) | Err(_) => self.poll_broken(cx),
                }
            }
        }
    }
}

impl AsyncWrite for ProcessIo {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write(cx, bytes) {
            Poll::Ready(Err(_)) => self.poll_broken(cx),
            other => other,
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match Pin::new(&mut self.stream).poll_write_vectored(cx, slices) {
            Poll::Ready(Err(_)) => self.poll_broken(cx),
            other => other,
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
