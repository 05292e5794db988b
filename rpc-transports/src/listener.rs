//! Listeners: sources of incoming channels, and the errors of accepting that end a listener.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::task::{Context, Poll};
use std::time::Duration;

use rustix::io::Errno;
use tokio::time::Instant;

use crate::address::Address;
use crate::channel::Channel;
use crate::error::TransportError;

/// Source of incoming channels. Dropping it stops listening; channels accepted before live on.
pub struct Listener {
    address: Address,
    source: Box<dyn Accept>,
    /// End of the pause, if accepting must wait for resources to be freed. Kept here rather than in
    /// the future of `accept`, so that dropping that future neither loses nor shortens the wait.
    pause: Option<Instant>,
    /// Length of the next pause.
    pause_len: Duration,
    /// Descriptor that gives way to one more connection when the process can open no more, so that
    /// its client can be told. `None` from then on, until another can be opened.
    reserve: Option<OwnedFd>,
}

/// The source of a listener's channels, which a transport implements.
pub trait Accept: Send {
    /// Returns the next channel, or the reason why there is none now. An error does not by itself
    /// end the listener: [`Listener::accept`] passes over errors that concern one connection alone.
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>>;
}

impl Listener {
    /// Creates a listener. [`local_address`](Self::local_address) returns `address`, which must
    /// have the port that was chosen and the key that was asked for.
    pub fn new(address: Address, source: impl Accept + 'static) -> Self {
        Self { address, source: Box::new(source), pause: None, pause_len: PAUSE_MIN, reserve: open_reserve() }
    }

    /// Waits for the next channel. Cancel-safe: dropping the future loses no connection.
    ///
    /// A connection that died while it waited is passed over. When file descriptors or memory run
    /// out, one more connection is accepted ([`has_reserve`](Self::has_reserve) is false then).
    /// After that, accepting pauses (5 ms, doubling up to 1 s), says so in the log, and goes on by
    /// itself.
    ///
    /// # Errors
    ///
    /// Any error that ends the listener for good, such as that of a socket that the system took
    /// away.
    pub async fn accept(&mut self) -> Result<Channel, TransportError> {
        loop {
            if let Some(until) = self.pause {
                tokio::time::sleep_until(until).await;
                self.pause = None;
            }
            let error = match poll_fn(|cx| self.source.poll_accept(cx)).await {
                Ok(channel) => {
                    self.pause_len = PAUSE_MIN;
                    if self.reserve.is_none() {
                        self.reserve = open_reserve();
                    }
                    return Ok(channel);
                }
                Err(error) => error,
            };
            match AcceptFailure::of(&error) {
                AcceptFailure::Connection => {
                    tracing::debug!(address = %self.address, %error, "a connection died unaccepted");
                }
                // Dropped here, so that the next attempt has a descriptor.
                AcceptFailure::Exhausted if self.reserve.take().is_some() => {}
                AcceptFailure::Exhausted => {
                    rpc_core::log_limited!(
                        WARN,
                        address = %self.address,
                        %error,
                        pause = ?self.pause_len,
                        "the system has no room for a connection: accepting again after a pause"
                    );
                    self.pause = Some(Instant::now() + self.pause_len);
                    self.pause_len = (self.pause_len * 2).min(PAUSE_MAX);
                }
                AcceptFailure::Listener => {
                    return Err(TransportError::from_io(self.address.to_string(), error));
                }
            }
        }
    }

    /// Returns false if the process could open no more descriptors after the last connection was
    /// accepted. That connection should be refused: it has the descriptor that was kept for this.
    #[must_use]
    pub fn has_reserve(&self) -> bool {
        self.reserve.is_some()
    }

    /// Returns the address of the listener, with the port that was chosen. A wildcard host stays a
    /// wildcard.
    #[must_use]
    pub fn local_address(&self) -> &Address {
        &self.address
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").field("address", &self.address).finish_non_exhaustive()
    }
}

/// Opens a descriptor of no use but to be closed. `None` if the process can open no more. A socket,
/// since no permission on any file is needed for one.
fn open_reserve() -> Option<OwnedFd> {
    std::os::unix::net::UnixDatagram::unbound().ok().map(OwnedFd::from)
}

/// Scope of an error of `accept`.
enum AcceptFailure {
    /// Loss of one connection. Others are not affected.
    Connection,
    /// Lack of a resource in the process or the system. Trying again at once would spin.
    Exhausted,
    /// Failure of the listener itself.
    Listener,
}

impl AcceptFailure {
    fn of(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Self::Exhausted,
            // On Linux, `accept` reports resets and also the network errors of the new connection.
            // It reports a firewall's refusal as a missing permission.
            Some(
                Errno::CONNABORTED
                | Errno::CONNRESET
                | Errno::INTR
                | Errno::PROTO
                | Errno::PERM
                | Errno::TIMEDOUT
                | Errno::NETDOWN
                | Errno::NETUNREACH
                | Errno::HOSTDOWN
                | Errno::HOSTUNREACH
                | Errno::NOPROTOOPT
                | Errno::OPNOTSUPP,
            ) => Self::Connection,
            _ => Self::Listener,
        }
    }
}

/// First pause: long enough for another connection to end, short enough to go unnoticed.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// Longest pause: a dialler gives up after 10 s, so it has several chances.
const PAUSE_MAX: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::error::Error as _;

    use super::*;

    /// Source that yields the results that it was given, then nothing.
    struct Scripted(VecDeque<io::Result<Channel>>);

    impl Accept for Scripted {
        fn poll_accept(&mut self, _: &mut Context<'_>) -> Poll<io::Result<Channel>> {
            self.0.pop_front().map_or(Poll::Pending, Poll::Ready)
        }
    }

    fn listener(script: impl IntoIterator<Item = io::Result<Channel>>) -> Listener {
        Listener::new("local:".parse().unwrap(), Scripted(script.into_iter().collect()))
    }

    fn failure(errno: Errno) -> io::Result<Channel> {
        Err(errno.into())
    }

    fn channel() -> io::Result<Channel> {
        Ok(Channel::new(tokio::io::empty(), "nobody"))
    }

    #[tokio::test]
    async fn a_connection_that_died_unaccepted_is_passed_over() {
        let mut listener = listener([failure(Errno::CONNABORTED), failure(Errno::PROTO), channel()]);
        assert_eq!(listener.accept().await.unwrap().peer(), "nobody");
    }

    #[tokio::test(start_paused = true)]
    async fn exhaustion_pauses_and_the_pause_survives_cancellation() {
        let mut listener = listener([failure(Errno::MFILE), failure(Errno::NFILE), channel()]);
        listener.reserve = None;
        let start = Instant::now();
        // The first attempt meets the failure, and is dropped within the pause.
        let early = tokio::time::timeout(PAUSE_MIN / 5, listener.accept()).await;
        assert!(early.is_err());
        listener.accept().await.unwrap();
        assert_eq!(start.elapsed(), PAUSE_MIN + PAUSE_MIN * 2);
        assert_eq!(listener.pause_len, PAUSE_MIN);
    }

    #[tokio::test(start_paused = true)]
    async fn the_reserve_gives_way_to_one_connection_without_a_pause() {
        let mut listener = listener([failure(Errno::MFILE), channel()]);
        assert!(listener.has_reserve());
        let start = Instant::now();
        assert_eq!(listener.accept().await.unwrap().peer(), "nobody");
        assert_eq!(start.elapsed(), Duration::ZERO);
        // Another one could be opened.
        assert!(listener.has_reserve());
    }

    #[tokio::test]
    async fn a_broken_listener_is_an_error() {
        let mut listener = listener([failure(Errno::BADF)]);
        let error = listener.accept().await.unwrap_err();
        assert!(matches!(error, TransportError::Io { .. }), "{error:?}");
        assert_eq!(error.address(), "local:");
        assert!(error.source().is_some());
    }
}
