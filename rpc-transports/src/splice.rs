//! Tunnels: bytes copied between two channels in both directions, without interpretation.
//!
//! Between two plain sockets on Linux the kernel moves large amounts. All other bytes pass through
//! a buffer of this process.

mod pipe;

use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use rpc_core::OpenFileQuota;
use tokio::io::AsyncWrite;

use self::pipe::Pipe;
use crate::channel::Channel;
use crate::channel_io::{READ_MAX, ReadAhead};

/// Time for which the second direction of a tunnel may be silent after the end of the first.
pub const TUNNEL_LINGER: Duration = Duration::from_secs(5);

/// Limit on the time in which no byte moves through a tunnel.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SilenceLimit {
    /// The tunnel ends after this time: its ends send something now and then.
    Always(Duration),
    /// The tunnel ends if bytes wait for so long for an end that takes none. Otherwise its ends may
    /// be silent for as long as they like.
    WhileBytesWait(Duration),
}

/// Copies bytes both ways until both directions have ended, one has broken, or no byte has moved
/// for the time of `silence`, or for [`TUNNEL_LINGER`] after the end of one direction. The bytes
/// `from_a` go before those that are read from `a`; what was read from `b` already goes first, too.
///
/// Pipes count against `open_files`; where it has no room, bytes are copied.
///
/// The ends of the tunnel test each other's presence. The limit on silence is for two ends that
/// vanish together.
///
/// # Errors
///
/// The error of the channel that broke, or [`TimedOut`](io::ErrorKind::TimedOut).
pub(crate) async fn splice(
    a: &mut Channel,
    b: &mut Channel,
    from_a: BytesMut,
    silence: SilenceLimit,
    open_files: &OpenFileQuota,
) -> io::Result<()> {
    let (silence, may_rest) = match silence {
        SilenceLimit::Always(limit) => (limit, false),
        SilenceLimit::WhileBytesWait(limit) => (limit, true),
    };
    let (mut there, mut back) = (OneWay::new(from_a, open_files), OneWay::new(b.take_unread(), open_files));
    let mut timer = std::pin::pin!(tokio::time::sleep(silence));
    let mut moved = 0;
    let mut lingers = false;
    poll_fn(|cx| {
        let first = there.poll(&mut *a, &mut *b, cx)?;
        let second = back.poll(&mut *b, &mut *a, cx)?;
        match (first, second) {
            (Poll::Ready(()), Poll::Ready(())) => return Poll::Ready(Ok(())),
            (Poll::Pending, Poll::Pending) => {}
            // From here on a shorter silence ends the tunnel.
            _ if !std::mem::replace(&mut lingers, true) => {
                timer.as_mut().reset(tokio::time::Instant::now() + TUNNEL_LINGER);
            }
            _ => {}
        }
        let so_far = there.moved + back.moved;
        if so_far != std::mem::replace(&mut moved, so_far) {
            let limit = if lingers { TUNNEL_LINGER.min(silence) } else { silence };
            timer.as_mut().reset(tokio::time::Instant::now() + limit);
        }
        while timer.as_mut().poll(cx).is_ready() {
            if lingers || !may_rest || there.holds_bytes() || back.holds_bytes() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            timer.as_mut().reset(tokio::time::Instant::now() + silence);
        }
        Poll::Pending
    })
    .await
}

/// One direction of a tunnel.
struct OneWay<'a> {
    open_files: &'a OpenFileQuota,
    read: ReadAhead,
    /// Pipe by which the kernel moves the bytes while large amounts come. The buffer is empty then.
    pipe: Option<Pipe>,
    /// True if the last read filled the buffer.
    is_bulk: bool,
    moved: u64,
    needs_flush: bool,
    state: Direction,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Open,
    /// State after the sender's end, before the receiver's end has been shut down.
    Ending,
    Ended,
}

impl<'a> OneWay<'a> {
    /// Creates a direction in which the bytes in `buffer` go first.
    fn new(buffer: BytesMut, open_files: &'a OpenFileQuota) -> Self {
        let mut read = ReadAhead::new(BytesMut::new());
        // Set here and not in `new`, since these bytes need not count as a read: they are written
        // first.
        read.buffer = buffer;
        Self { open_files, read, pipe: None, is_bulk: false, moved: 0, needs_flush: false, state: Direction::Open }
    }

    /// Returns true if bytes wait here for the receiver.
    fn holds_bytes(&self) -> bool {
        !self.read.buffer.is_empty() || self.needs_flush || self.pipe.as_ref().is_some_and(Pipe::holds_bytes)
    }

    fn poll(&mut self, from: &mut Channel, to: &mut Channel, cx: &mut Context<'_>) -> io::Result<Poll<()>> {
        loop {
            if let Some(pipe) = &mut self.pipe {
                match pipe.poll(from, to, cx)? {
                    Poll::Pending => return Ok(Poll::Pending),
                    Poll::Ready(0) => (self.pipe, self.state) = (None, Direction::Ending),
                    Poll::Ready(count) => {
                        self.moved += count as u64;
                        if pipe.is_little() {
                            self.pipe = None;
                        }
                    }
                }
                continue;
            }
            while !self.read.buffer.is_empty() {
                match Pin::new(&mut to.io_mut()).poll_write(cx, &self.read.buffer)? {
                    Poll::Pending => return Ok(Poll::Pending),
                    Poll::Ready(0) => return Err(io::ErrorKind::WriteZero.into()),
                    Poll::Ready(count) => {
                        self.read.buffer.advance(count);
                        self.moved += count as u64;
                        self.needs_flush = true;
                    }
                }
            }
            if std::mem::take(&mut self.is_bulk) {
                self.pipe = Pipe::between(from, to, self.open_files);
                if self.pipe.is_some() {
                    self.read = ReadAhead::new(BytesMut::new());
                    continue;
                }
            }
            let mut to = to.io_mut();
            match self.state {
                Direction::Open => match self.read.poll_more(from.io_mut(), cx)? {
                    Poll::Ready(0) => self.state = Direction::Ending,
                    Poll::Ready(count) => self.is_bulk = count == READ_MAX,
                    Poll::Pending => {
                        if self.needs_flush && Pin::new(&mut to).poll_flush(cx)?.is_ready() {
                            self.needs_flush = false;
                        }
                        return Ok(Poll::Pending);
                    }
                },
                Direction::Ending => match Pin::new(&mut to).poll_shutdown(cx) {
                    Poll::Pending => return Ok(Poll::Pending),
                    // A receiver that is gone does not need the end.
                    Poll::Ready(_) => self.state = Direction::Ended,
                },
                Direction::Ended => return Ok(Poll::Ready(())),
            }
        }
    }
}

#[cfg(all(test, feature = "unix"))]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::UnixStream;

    use super::*;

    /// Covers large and small amounts, both ways at once, after bytes that were read before, in
    /// pieces that are not whole pages.
    #[tokio::test]
    async fn all_bytes_arrive_in_their_order_and_so_does_the_end() {
        const MUCH: usize = (8 << 20) + 4321;
        const LIMIT: SilenceLimit = SilenceLimit::Always(Duration::from_secs(60));
        let ((near, a), (b, far)) = (UnixStream::pair().unwrap(), UnixStream::pair().unwrap());
        let (mut a, mut b) = (Channel::new(a, "a"), Channel::new(b, "b"));
        assert!(a.plain_socket().is_some());
        let open_files = OpenFileQuota::new("max_total_open_files", u64::MAX, None);
        let tunnel = splice(&mut a, &mut b, BytesMut::from(&b"before"[..]), LIMIT, &open_files);
        let bytes = |seed: usize| (0..MUCH).map(move |at| (at * 31 + at / 997 + seed) as u8).collect::<Vec<_>>();
        let talk = async |socket: UnixStream, seed: usize, expected: Vec<u8>| {
            let (mut read, mut write) = socket.into_split();
            let say = async {
                write.write_all(b"little").await.unwrap();
                write.write_all(&bytes(seed)).await.unwrap();
                tokio::task::yield_now().await;
                write.write_all(b"again little").await.unwrap();
                write.shutdown().await.unwrap();
            };
            let hear = async {
                let mut heard = Vec::new();
                read.read_to_end(&mut heard).await.unwrap();
                assert!(heard == expected, "{} bytes of {}", heard.len(), expected.len());
            };
            tokio::join!(say, hear);
        };
        let said = |seed| [&b"little"[..], &bytes(seed), b"again little"].concat();
        let to_far = [&b"before"[..], &said(1)].concat();
        let (ended, (), ()) = tokio::join!(tunnel, talk(near, 1, said(2)), talk(far, 2, to_far));
        ended.unwrap();
        // The pipes are gone.
        assert_eq!(open_files.used(), 0);
    }

    /// The clock is paused.
    #[tokio::test(start_paused = true)]
    async fn a_tunnel_whose_ends_may_rest_ends_when_one_takes_no_bytes() {
        const LIMIT: Duration = Duration::from_secs(60);
        let ((mut near, a), (b, far)) = (tokio::io::duplex(16), tokio::io::duplex(16));
        let (mut a, mut b) = (Channel::new(a, "a"), Channel::new(b, "b"));
        let open_files = OpenFileQuota::new("max_total_open_files", u64::MAX, None);
        let tunnel = splice(&mut a, &mut b, BytesMut::new(), SilenceLimit::WhileBytesWait(LIMIT), &open_files);
        let mut tunnel = std::pin::pin!(tunnel);
        assert!(tokio::time::timeout(10 * LIMIT, &mut tunnel).await.is_err(), "nothing waits");
        let began = tokio::time::Instant::now();
        // The far end has room for 16 bytes, and the rest waits in the tunnel.
        let (ended, written) = tokio::join!(tunnel, near.write_all(&[0; 33]));
        written.unwrap();
        assert_eq!((ended.unwrap_err().kind(), began.elapsed()), (io::ErrorKind::TimedOut, LIMIT));
        drop(far);
    }
}
