//! The stream of a connection in a dialect, which keeps the timeouts of the session.

use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::BytesMut;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::activity::{OutputState, Progress};
use crate::channel::{Channel, ChannelIo};
use crate::clock;
use crate::serve::output_mark::OutputMark;
use crate::serve::stall_timeouts::StallTimeouts;

/// Stream of a connection. It gives the bytes that were read already first, and keeps the timeouts
/// of the session.
pub(super) struct WatchedStream {
    unread: BytesMut,
    channel: Channel,
    progress: Arc<Mutex<Progress>>,
    /// Waker of the last poll of the outgoing direction, and the one that was passed on for it.
    output_waker: Option<(Waker, Waker)>,
    /// Mark at which the output stands, for a process that has passed the socket.
    mark: Option<OutputMark>,
    /// True while a message is written in several parts.
    is_inside_message: bool,
}

/// Waker of output that waits for the channel. It notes that the channel can take output again,
/// since the write that waits may have been cancelled.
struct OutputWaker {
    progress: Arc<Mutex<Progress>>,
    task: Waker,
}

/// Stream that begins with bytes that were read already.
pub(super) struct UnreadStream {
    unread: BytesMut,
    inner: Box<dyn ChannelIo>,
}

impl UnreadStream {
    pub(super) fn new(unread: BytesMut, inner: Box<dyn ChannelIo>) -> Self {
        Self { unread, inner }
    }
}

impl WatchedStream {
    /// Creates the stream, whose first bytes are those that the channel has read already.
    pub(super) fn new(mut channel: Channel, progress: Arc<Mutex<Progress>>) -> Self {
        let unread = channel.take_unread();
        Self { unread, channel, progress, output_waker: None, mark: None, is_inside_message: false }
    }

    /// Notes in `mark` from now on whether the output stands inside of a message.
    pub(super) fn mark_output_in(&mut self, mark: OutputMark) {
        self.mark = Some(mark);
    }

    /// Says that what is written is a part of a message, or that it was the last part.
    pub(super) fn set_inside_message(&mut self, is_inside: bool) {
        self.is_inside_message = is_inside;
        if let Some(mark) = &mut self.mark {
            mark.note(is_inside);
        }
    }

    /// Returns the channel, with the bytes that were read already. The timeouts do not see what
    /// passes through it.
    pub(super) fn channel_mut(&mut self) -> &mut Channel {
        if !self.unread.is_empty() {
            self.channel.put_back(std::mem::take(&mut self.unread));
        }
        &mut self.channel
    }

    /// Returns the channel.
    pub(super) fn channel(&self) -> &Channel {
        &self.channel
    }

    /// Takes the channel out, with the bytes that were read already. The stream is at its end then.
    pub(super) fn take_channel(&mut self) -> Channel {
        let empty = Channel::new(tokio::io::empty(), self.channel.peer());
        let mut channel = std::mem::replace(&mut self.channel, empty);
        channel.put_back(std::mem::take(&mut self.unread));
        channel
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

    /// Polls the outgoing direction, and passes the outcome on to `record`, with the timeouts and
    /// the state of the output.
    fn poll_output<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Channel, &mut Context<'_>) -> Poll<io::Result<T>>,
        record: impl FnOnce(&Poll<io::Result<T>>, &mut StallTimeouts, &mut OutputState),
    ) -> Poll<io::Result<T>> {
        let waker = self.output_waker(cx.waker());
        let outcome = poll(&mut self.channel, &mut Context::from_waker(&waker));
        let Progress { timeouts: Some(timeouts), output, .. } = &mut *self.progress.lock() else { return outcome };
        record(&outcome, timeouts, output);
        outcome
    }
}

/// Records the outcome of a write of `len_bytes`.
fn record_write(
    outcome: &Poll<io::Result<usize>>,
    len_bytes: usize,
    timeouts: &mut StallTimeouts,
    output: &mut OutputState,
) {
    let now = clock::now();
    match *outcome {
        Poll::Pending => {
            timeouts.resume_output(now);
            timeouts.set_writing(true);
            *output = OutputState::Blocked;
        }
        Poll::Ready(Ok(written)) if written > 0 => {
            timeouts.resume_output(now);
            timeouts.wrote_with_more_to_come(written, now);
            *output = if written == len_bytes { OutputState::Taken } else { OutputState::Partial };
        }
        // The client has taken nothing.
        Poll::Ready(_) => {}
    }
}

/// Records the outcome of a flush, or of the end of the outgoing direction.
fn record_flush(outcome: &Poll<io::Result<()>>, timeouts: &mut StallTimeouts, output: &mut OutputState) {
    let now = clock::now();
    match outcome {
        Poll::Pending => {
            timeouts.resume_output(now);
            timeouts.set_writing(true);
            if *output != OutputState::Blocked {
                *output = OutputState::Flushing;
            }
        }
        // Most channels have nothing to flush, although a write found no room.
        Poll::Ready(Ok(())) if *output == OutputState::Blocked => {}
        Poll::Ready(Ok(())) => {
            timeouts.resume_output(now);
            timeouts.wrote_with_more_to_come(0, now);
            *output = OutputState::Taken;
        }
        Poll::Ready(Err(_)) => {}
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

impl AsyncRead for UnreadStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            return pin!(&mut self.inner).poll_read(cx, buffer);
        }
        let count = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread.split_to(count));
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for UnreadStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        pin!(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        pin!(&mut self.inner).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        pin!(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        pin!(&mut self.inner).poll_shutdown(cx)
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
        let staged = bytes.len();
        let is_whole = !self.is_inside_message;
        if let Some(mark) = self.mark.as_mut().filter(|_| is_whole) {
            mark.before_write(staged);
        }
        let write = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_write(cx, bytes);
        let record = |outcome: &_, timeouts: &mut _, output: &mut _| record_write(outcome, staged, timeouts, output);
        let outcome = self.poll_output(cx, write, record);
        if let (Poll::Ready(Ok(written)), Some(mark)) = (&outcome, self.mark.as_mut().filter(|_| is_whole)) {
            mark.after_write(*written, staged);
            mark.before_write(staged - written);
        }
        outcome
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flush = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_flush(cx);
        self.poll_output(cx, flush, record_flush)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shutdown = |channel: &mut Channel, cx: &mut Context<'_>| pin!(channel.io_mut()).poll_shutdown(cx);
        self.poll_output(cx, shutdown, record_flush)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::time::Duration;

    use rpc_core::RpcError;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;
    use crate::serve::stall_timeouts::StallLimits;

    const WRITE_TIMEOUT: Duration = Duration::from_secs(60);
    /// Least rate in bytes per second.
    const MIN_RATE: u64 = 10;
    /// Size of the channel in bytes.
    const CAPACITY_BYTES: usize = 1024;

    /// Stream whose channel is full, and the client's end of it.
    struct Full {
        stream: WatchedStream,
        progress: Arc<Mutex<Progress>>,
        client: DuplexStream,
    }

    impl Full {
        async fn new() -> Self {
            let (client, server) = tokio::io::duplex(CAPACITY_BYTES);
            let progress = Arc::new(Mutex::new(Progress::default()));
            let limits = StallLimits {
                session_duration: None,
                idle_timeout: None,
                write_timeout: WRITE_TIMEOUT,
                min_rate: MIN_RATE,
            };
            progress.lock().start(StallTimeouts::new(&limits, clock::now()));
            let mut this =
                Self { stream: WatchedStream::new(Channel::new(server, "a test"), progress.clone()), progress, client };
            this.stream.write_all(&[0; CAPACITY_BYTES]).await.unwrap();
            this.end_poll();
            assert!(this.check().is_none(), "a client owes nothing while no output waits");
            this
        }

        /// Polls one write. Returns false if the channel has no room, and cancels the write.
        async fn write(&mut self, len_bytes: usize) -> bool {
            let bytes = vec![0; len_bytes];
            let outcome = poll_fn(|cx| Poll::Ready(pin!(&mut self.stream).poll_write(cx, &bytes))).await;
            assert!(matches!(outcome, Poll::Pending | Poll::Ready(Ok(_))), "{outcome:?}");
            outcome.is_ready()
        }

        /// Has the client take some bytes.
        async fn take(&mut self, len_bytes: usize) {
            self.client.read_exact(&mut vec![0; len_bytes]).await.unwrap();
        }

        /// Ends a poll of the server's task.
        fn end_poll(&self) {
            self.progress.lock().end_poll(Waker::noop());
        }

        /// Returns the reason to cut the connection, if there is one by now.
        fn check(&self) -> Option<RpcError> {
            self.progress.lock().timeouts.as_mut().unwrap().check_stall(clock::now())
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_does_not_excuse_a_cancelled_write() {
        let mut full = Full::new().await;
        assert!(!full.write(16).await);
        full.end_poll();
        tokio::time::advance(WRITE_TIMEOUT / 2).await;
        full.stream.flush().await.unwrap();
        full.end_poll();
        tokio::time::advance(WRITE_TIMEOUT / 2).await;
        let error = full.check().expect("the client has taken nothing for the whole time");
        assert!(error.message().contains("the client has taken nothing"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_flush_after_the_client_has_read_does_not_resume_the_stall() {
        let mut full = Full::new().await;
        assert!(!full.write(16).await);
        full.end_poll();
        full.take(16).await;
        full.stream.flush().await.unwrap();
        full.end_poll();
        tokio::time::advance(2 * WRITE_TIMEOUT).await;
        assert!(full.check().is_none(), "the channel has had room all the time");
    }

    #[tokio::test(start_paused = true)]
    async fn writes_that_follow_each_other_share_the_throughput() {
        let mut full = Full::new().await;
        // The rate comes to 16 bytes in two thirds of the time limit.
        let step = WRITE_TIMEOUT * 2 / 3;
        assert!(!full.write(16).await);
        full.end_poll();
        tokio::time::advance(step).await;
        assert!(full.check().is_none(), "the time is not over");
        full.take(16).await;
        assert!(full.write(16).await);
        full.stream.flush().await.unwrap();
        assert!(!full.write(16).await, "the channel is full again");
        full.end_poll();
        assert!(full.check().is_none(), "the time is not over");
        tokio::time::advance(step).await;
        let error = full.check().expect("the client is too slow");
        assert!(error.message().contains("the client has taken 16 bytes"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_has_taken_all_output_owes_nothing() {
        let mut full = Full::new().await;
        for _ in 0..3 {
            assert!(!full.write(16).await);
            full.end_poll();
            tokio::time::advance(WRITE_TIMEOUT * 2 / 3).await;
            full.take(16).await;
            assert!(full.write(16).await);
            full.end_poll();
            assert!(full.check().is_none());
        }
        tokio::time::advance(WRITE_TIMEOUT).await;
        assert!(full.check().is_none());
    }
}
