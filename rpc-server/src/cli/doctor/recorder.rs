//! A recorder of the first bytes that a peer sends.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// First bytes received from a peer.
#[derive(Clone, Default)]
pub(super) struct Received(Arc<Mutex<Vec<u8>>>);

/// Number of recorded bytes: enough to tell protocols apart.
const FIRST_BYTES: usize = 64;

impl Received {
    fn add(&self, bytes: &[u8]) {
        let mut first = self.0.lock();
        let room = FIRST_BYTES - first.len();
        first.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0.lock().clone()
    }
}

pub(super) struct Recorder<T> {
    pub(super) io: T,
    pub(super) received: Received,
}

impl<T: AsyncRead + Unpin> AsyncRead for Recorder<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.io).poll_read(cx, buffer))?;
        self.received.add(&buffer.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Recorder<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}
