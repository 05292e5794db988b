//! The stream of a connection in a dialect, which keeps the timeouts of the session.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::activity::Progress;
use crate::channel::Channel;
use crate::clock;

/// Stream of a connection. It gives the bytes that were read already first, and keeps the timeouts
/// of the session.
pub(super) struct WatchedStream {
    unread: BytesMut,
    channel: Channel,
    progress: Arc<Mutex<Progress>>,
    /// Waker of the last poll of the outgoing direction, and the one that was passed on for it.
    output_waker: Option<(Waker, Waker)>,
}

/// Waker of output that waits for the channel. It notes that the channel can take output again,
/// since the write that waits may have been cancelled.
struct OutputWaker {
    progress: Arc<Mutex<Progress>>,
    task: Waker,
}

impl WatchedStream {
    /// Creates the stream, whose first bytes are those that the channel has read already.
    pub(super) fn new(mut channel: Channel, progress: Arc<Mutex<Progress>>) -> Self {
        let unread = channel.take_unread();
        Self { unread, channel, progress, output_waker: None }
    }

    /// Returns the waker for the outgoing direction of the channel, on behalf of `task`.
    fn output_waker(&mut self, task: &Waker) -> Waker {
        if let Some((_, passed_on)) = self.output_waker.as_ref().filter(|(last, _)| last.will_wake(task)) {
            return passed_on.clone();
        }
        let waker = Arc::new(OutputWaker { progress: self.progress.clone(), task: task.clone() });
        let (_, passed_on) = self.output_waker.insert((task.clone(), waker.into()));
        passed_on.clone()
    }

    /// Polls the outgoing direction, and records the outcome. `is_done` tells from the value
    /// whether all output has been taken, and by how many bytes.
    fn poll_output<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Channel, &mut Context<'_>) -> Poll<io::Result<T>>,
        is_done: impl FnOnce(&T) -> (bool, usize),
    ) -> Poll<io::Result<T>> {
        let waker = self.output_waker(cx.waker());
        let outcome = poll(&mut self.channel, &mut Context::from_waker(&waker));
        let mut progress = self.progress.lock();
        let Some(timeouts) = &mut progress.timeouts else { return outcome };
        let now = clock::now();
        timeouts.resume_output(now);
        match &outcome {
            Poll::Pending => timeouts.set_writing(true),
            Poll::Ready(Ok(value)) => {
                let (is_done, written) = is_done(value);
                timeouts.wrote(written);
                if is_done {
                    timeouts.set_writing(false);
                } else {
                    // The rest waits for the dialect.
                    timeouts.pause_output(now);
                }
            }
            Poll::Ready(Err(_)) => {}
        }
        outcome
    }
}

impl Wake for OutputWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if let Some(timeouts) = &mut self.progress.lock().timeouts {
            timeouts.pause_output(clock::now());
        }
        self.task.wake_by_ref();
    }
}

impl AsyncRead for WatchedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let before = buffer.filled().len();
        if this.unread.is_empty() {
            ready!(pin!(this.channel.io_mut()).poll_read(cx, buffer))?;
        } else {
            let count = this.unread.len().min(buffer.remaining());
            buffer.put_slice(&this.unread.split_to(count));
        }
        if let Some(timeouts) = &mut this.progress.lock().timeouts {
            timeouts.received(buffer.filled().len() - before);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WatchedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let write = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_write(cx, bytes);
        self.poll_output(cx, write, |written| (*written == bytes.len(), *written))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_flush(cx);
        self.poll_output(cx, flush, |()| (true, 0))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_shutdown(cx);
        self.poll_output(cx, shutdown, |()| (true, 0))
    }
}
