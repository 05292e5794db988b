//! Tunnels: the bytes of one channel passed to another, both ways, unseen.

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::AsyncWrite;

use crate::channel_io::ReadAhead;
use crate::transport::ChannelIo;

/// How long the second direction may go on when the first has ended: for what was said last.
const LINGER: Duration = Duration::from_secs(5);

/// Passes bytes both ways, `from_a` before what is read from there, until both directions have ended, one has broken, or nothing has moved for `silence`. The ends
/// of the tunnel test each other; that one is for two ends that vanish together.
///
/// # Errors
///
/// The channel that broke, or [`TimedOut`](io::ErrorKind::TimedOut).
pub(crate) async fn splice(
    a: &mut dyn ChannelIo,
    b: &mut dyn ChannelIo,
    from_a: BytesMut,
    silence: Duration,
) -> io::Result<()> {
    let (mut there, mut back) = (OneWay::new(from_a), OneWay::new(BytesMut::new()));
    let mut timer = std::pin::pin!(tokio::time::sleep(silence));
    let mut moved = 0;
    let mut lingers = false;
    poll_fn(|cx| {
        let first = there.poll(&mut *a, &mut *b, cx)?;
        let second = back.poll(&mut *b, &mut *a, cx)?;
        match (first, second) {
            (Poll::Ready(()), Poll::Ready(())) => return Poll::Ready(Ok(())),
            (Poll::Pending, Poll::Pending) => {}
            // The timer is not put off any more.
            _ if !std::mem::replace(&mut lingers, true) => {
                timer.as_mut().reset(tokio::time::Instant::now() + LINGER);
            }
            _ => {}
        }
        let so_far = there.moved + back.moved;
        if so_far != std::mem::replace(&mut moved, so_far) && !lingers {
            timer.as_mut().reset(tokio::time::Instant::now() + silence);
        }
        timer.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()))
    })
    .await
}

/// One direction of a tunnel.
struct OneWay {
    read: ReadAhead,
    moved: u64,
    unflushed: bool,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Open,
    /// The sender has ended, and the receiver is to hear of it.
    Ending,
    Ended,
}

impl OneWay {
    /// What is in `buffer` goes first.
    fn new(buffer: BytesMut) -> Self {
        let mut read = ReadAhead::new(BytesMut::new());
        // Not to be read again: it is written before.
        read.buffer = buffer;
        Self { read, moved: 0, unflushed: false, state: State::Open }
    }

    fn poll(
        &mut self,
        from: &mut dyn ChannelIo,
        mut to: &mut dyn ChannelIo,
        cx: &mut Context<'_>,
    ) -> io::Result<Poll<()>> {
        loop {
            while !self.read.buffer.is_empty() {
                match Pin::new(&mut to).poll_write(cx, &self.read.buffer)? {
                    Poll::Pending => return Ok(Poll::Pending),
                    Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Poll::Ready(count) => {
                        self.read.buffer.advance(count);
                        self.moved += count as u64;
                        self.unflushed = true;
                    }
                }
            }
            match self.state {
                State::Open => match self.read.poll_more(from, cx)? {
                    Poll::Ready(0) => self.state = State::Ending,
                    Poll::Ready(_) => {}
                    Poll::Pending => {
                        if self.unflushed && Pin::new(&mut to).poll_flush(cx)?.is_ready() {
                            self.unflushed = false;
                        }
                        return Ok(Poll::Pending);
                    }
                },
                State::Ending => match Pin::new(&mut to).poll_shutdown(cx) {
                    Poll::Pending => return Ok(Poll::Pending),
                    // One that has gone already needs not hear of it.
                    Poll::Ready(_) => self.state = State::Ended,
                },
                State::Ended => return Ok(Poll::Ready(())),
            }
        }
    }
}
