//! Input and output that the tasks of clients and servers share: reading ahead, vectored writes,
//! flushing and timers.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::task::coop::unconstrained;
use tokio::time::Sleep;

use crate::channel::ChannelIo;
use crate::clock;

/// Number of slices that one vectored write takes.
pub(crate) const SLICES: usize = 32;

/// Size of a first read: an idle session should be small.
const READ_MIN: usize = 4 << 10;

/// Size of a read when small messages come in large numbers.
pub(crate) const READ_MAX: usize = 64 << 10;

/// Buffer between channel and endpoint.
#[derive(Debug)]
pub(crate) struct ReadAhead {
    pub(crate) buffer: BytesMut,
    size: usize,
    /// True if the buffer began with bytes that the endpoint has not seen: they come before any
    /// read.
    unseen: bool,
}

impl ReadAhead {
    pub(crate) fn new(buffer: BytesMut) -> Self {
        Self { unseen: !buffer.is_empty(), buffer, size: READ_MIN }
    }

    /// Reads more into the buffer. Returns 0 at the end of the stream.
    pub(crate) fn poll_more(&mut self, io: &mut dyn ChannelIo, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if std::mem::take(&mut self.unseen) {
            return Poll::Ready(Ok(self.buffer.len()));
        }
        self.buffer.reserve(self.size);
        // The limit keeps a read small although the buffer may have much more room.
        let mut room = (&mut self.buffer).limit(self.size);
        let outcome = pin!(io.read_buf(&mut room)).poll(cx);
        match outcome {
            Poll::Pending => {
                if self.buffer.is_empty() && self.size > READ_MIN {
                    // The channel is idle, and the large buffer is freed.
                    self.size = READ_MIN;
                    self.buffer = BytesMut::new();
                }
                Poll::Pending
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(count)) => {
                if count == self.size {
                    self.size = (self.size * 4).min(READ_MAX);
                }
                Poll::Ready(Ok(count))
            }
        }
    }

    /// Reads straight into `target`. Returns 0 at the end of the stream.
    pub(crate) fn poll_into(
        &mut self,
        mut io: &mut dyn ChannelIo,
        target: &mut [u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<usize>> {
        // A header follows, and then more bulk, of which little should pass through the buffer.
        self.size = READ_MIN;
        let mut target = ReadBuf::new(target);
        ready!(Pin::new(&mut io).poll_read(cx, &mut target))?;
        Poll::Ready(Ok(target.filled().len()))
    }
}

/// Writes as much of `slices` as the channel takes.
pub(crate) fn poll_write(
    io: &mut dyn ChannelIo,
    slices: &[IoSlice<'_>],
    cx: &mut Context<'_>,
) -> Poll<io::Result<usize>> {
    let mut io = io;
    let io = Pin::new(&mut io);
    let written = ready!(match slices {
        // One slice, which is the usual case, costs the kernel less this way.
        [one] => io.poll_write(cx, one),
        several => io.poll_write_vectored(cx, several),
    })?;
    Poll::Ready(if written == 0 { Err(io::ErrorKind::WriteZero.into()) } else { Ok(written) })
}

/// Pending flush of a channel. TLS keeps bytes that the socket has no room for until it is flushed
/// again.
#[derive(Debug, Default)]
pub(crate) struct Flush {
    wanted: bool,
}

impl Flush {
    /// Records that the channel has taken bytes.
    pub(crate) fn want(&mut self) {
        self.wanted = true;
    }

    /// Returns true if all bytes taken have left, as far as this side can tell.
    pub(crate) fn is_done(&self) -> bool {
        !self.wanted
    }

    /// Continues flushing. The task will be woken if flushing is not done then.
    pub(crate) fn poll(&mut self, io: &mut dyn ChannelIo, cx: &mut Context<'_>) -> io::Result<()> {
        let mut io = io;
        if self.wanted
            && let Poll::Ready(flushed) = Pin::new(&mut io).poll_flush(cx)
        {
            flushed?;
            self.wanted = false;
        }
        Ok(())
    }
}

/// Timer that wakes the task when the endpoint's next timeout is due.
///
/// With every byte received the timeout moves into the future. The timer is then left alone: it
/// goes off too early once, and is set again.
///
/// It goes off although the task may have used up tokio's cooperative budget, for example by
/// reading what a busy peer sends. A peer could else postpone its timeouts without end.
#[derive(Debug)]
pub(crate) struct Alarm {
    sleep: Option<Pin<Box<Sleep>>>,
    set_to: Option<Instant>,
}

impl Alarm {
    pub(crate) fn new() -> Self {
        Self { sleep: None, set_to: None }
    }

    /// Returns the time if `timeout` is due. Otherwise the task will be woken when it is.
    pub(crate) fn poll(&mut self, timeout: Option<Instant>, cx: &mut Context<'_>) -> Option<Instant> {
        let timeout = timeout?;
        if self.set_to.is_none_or(|set_to| timeout < set_to) {
            self.set(timeout);
        }
        while self.sleep.as_mut().is_some_and(|sleep| pin!(unconstrained(sleep.as_mut())).poll(cx).is_ready()) {
            let now = clock::now();
            if now >= timeout {
                // The caller handles the timeout, and passes a later one the next time.
                self.set_to = None;
                return Some(now);
            }
            self.set(timeout);
        }
        None
    }

    fn set(&mut self, timeout: Instant) {
        self.set_to = Some(timeout);
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().reset(timeout.into()),
            None => self.sleep = Some(Box::pin(tokio::time::sleep_until(timeout.into()))),
        }
    }
}

/// Returns the text of an error of a channel without the reference to the manual of a library, as
/// that of rustls for a peer that dies.
pub(crate) fn without_reference(error: &dyn fmt::Display) -> String {
    let mut text = error.to_string();
    if let Some(end) = text.find(": https://") {
        text.truncate(end);
    }
    text
}
