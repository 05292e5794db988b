//! What every transport yields: channels, the listeners they come from, and how either can fail.

use std::any::Any;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::BytesMut;
use rustix::io::Errno;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use crate::address::Address;
#[cfg(feature = "tls")]
use crate::certificates::{ClientTls, ServerTls};
#[cfg(feature = "exec")]
use crate::child::ChildStderr;
use crate::handshakes::Over;
use crate::identity::{Security, Tokens};

/// An ordered, reliable byte pipe as the async runtime sees it. Implemented for all that fits.
pub trait ChannelIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + ?Sized> ChannelIo for T {}

/// Something that lives as long as a channel, such as the child process at its far end.
pub type ChannelGuard = Box<dyn Any + Send + Sync>;

/// What a channel becomes once both sides have agreed on how it is encrypted.
pub(crate) type Securing = Pin<Box<dyn Future<Output = io::Result<(Box<dyn ChannelIo>, Security)>> + Send>>;

/// One ordered, reliable byte pipe between two peers.
pub struct Channel {
    /// Declared before the guard, so that the far side sees the end before the guard acts on it.
    io: Io,
    peer: String,
    security: Security,
    securing: Option<Securing>,
    guard: Option<ChannelGuard>,
    /// Whether the connection that it is one of is over.
    beneath: Over,
    /// What was read of it by a handshake before the one to come.
    unread: BytesMut,
}

#[cfg_attr(not(any(feature = "tcp", feature = "unix")), allow(dead_code, reason = "there are no sockets then"))]
enum Io {
    /// A socket of the system's and nothing more, of which more is known than that it is bytes.
    Plain(Box<dyn PlainSocket>),
    Other(Box<dyn ChannelIo>),
}

/// What the kernel can move bytes from and to by itself: what tokio's sockets have in common beside bytes.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only there it moves them"))]
pub(crate) trait PlainSocket: ChannelIo + AsFd {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn try_read_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize>;
    fn try_write_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize>;
}

macro_rules! plain_sockets {
    ($($feature:literal: $socket:ident)*) => {$(
        #[cfg(feature = $feature)]
        impl PlainSocket for tokio::net::$socket {
            fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_read_ready(cx)
            }

            fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
                self.poll_write_ready(cx)
            }

            fn try_read_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize> {
                self.try_io(tokio::io::Interest::READABLE, io)
            }

            fn try_write_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize> {
                self.try_io(tokio::io::Interest::WRITABLE, io)
            }
        }
    )*

        impl Io {
            fn new<I: ChannelIo + 'static>(io: I) -> Self {
                #[cfg_attr(not(any(feature = "tcp", feature = "unix")), allow(unused_mut, reason = "there are no sockets then"))]
                let mut io = Some(io);
                $(
                    #[cfg(feature = $feature)]
                    if let Some(socket) = (&mut io as &mut dyn Any).downcast_mut::<Option<tokio::net::$socket>>()
                        && let Some(socket) = socket.take()
                    {
                        return Self::Plain(Box::new(socket));
                    }
                )*
                // It was taken only where this is not reached.
                io.map_or_else(|| Self::Other(Box::new(tokio::io::empty())), |io| Self::Other(Box::new(io)))
            }
        }
    };
}

plain_sockets! {
    "tcp": TcpStream
    "unix": UnixStream
}

impl Channel {
    /// A channel over `io`. `peer` is the text by which errors name the far side.
    pub fn new(io: impl ChannelIo + 'static, peer: impl Into<String>) -> Self {
        Self {
            io: Io::new(io),
            peer: peer.into(),
            security: Security::default(),
            securing: None,
            guard: None,
            beneath: Over::default(),
            unread: BytesMut::new(),
        }
    }

    /// The same channel, of a connection that may be over before the channel hears of it.
    #[cfg(feature = "quic")]
    pub(crate) fn standing_on(self, beneath: Over) -> Self {
        Self { beneath, ..self }
    }

    /// Whether the connection that it is one of is over.
    pub(crate) fn beneath(&self) -> Over {
        self.beneath.clone()
    }

    /// The same channel, keeping `guard` alive for as long as itself.
    #[must_use]
    pub fn with_guard(self, guard: ChannelGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// The same channel, keeping something else alive, too.
    pub(crate) fn holding(mut self, other: impl Send + Sync + 'static) -> Self {
        let guard = self.guard.take();
        self.with_guard(Box::new((guard, other)))
    }

    /// The same channel, of which this has been read already: it is for the next handshake.
    pub(crate) fn after_reading(self, unread: BytesMut) -> Self {
        Self { unread, ..self }
    }

    /// What has been read already, once.
    pub(crate) fn take_unread(&mut self) -> BytesMut {
        std::mem::take(&mut self.unread)
    }

    /// The same bytes, where they lead on to somebody at `peer` of whom nothing is known yet.
    pub(crate) fn leading_to(self, peer: impl Into<String>) -> Self {
        let encrypted_way = self.security.is_encrypted() || self.security.encrypted_way;
        let security = Security { encrypted_way, ..Security::default() };
        Self { peer: peer.into(), security, securing: None, ..self }
    }

    /// The same channel, with something around its bytes, such as a recorder.
    #[must_use]
    pub fn map_io<I: ChannelIo + 'static>(self, wrap: impl FnOnce(Box<dyn ChannelIo>) -> I) -> Self {
        Self { io: Io::new(wrap(self.io.boxed())), ..self }
    }

    #[cfg(any(feature = "tls", feature = "exec"))]
    pub(crate) fn with_security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// A channel that is there when `securing` is done.
    #[cfg(feature = "tls")]
    pub(crate) fn to_be_secured(securing: Securing, peer: impl Into<String>) -> Self {
        Self { securing: Some(securing), ..Self::new(tokio::io::empty(), peer) }
    }

    /// Finishes what an accepted channel needs before its bytes can be used: the handshake of TLS, which a listener leaves to
    /// whoever takes the channel, so that a slow client holds up no other. Nothing for other channels. Has no time limit of
    /// its own; a channel whose future was dropped is of no use.
    ///
    /// # Errors
    ///
    /// Why there is no secure channel.
    pub async fn secure(&mut self) -> io::Result<()> {
        if let Some(securing) = self.securing.take() {
            let (io, security) = securing.await?;
            (self.io, self.security) = (Io::Other(io), security);
        }
        Ok(())
    }

    /// What is known about the far side.
    #[must_use]
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// The bytes.
    pub fn io_mut(&mut self) -> &mut dyn ChannelIo {
        match &mut self.io {
            Io::Plain(io) => &mut **io,
            Io::Other(io) => &mut **io,
        }
    }

    /// The socket, where the channel is nothing more.
    pub(crate) fn plain_socket(&self) -> Option<&dyn PlainSocket> {
        match &self.io {
            Io::Plain(io) => Some(&**io),
            Io::Other(_) => None,
        }
    }

    /// The far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What lives as long as the channel; for an `exec:` address, the `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Bytes, peer and guard. Dropping the guard may cut the channel, so keep it until the bytes are done.
    #[must_use]
    pub fn into_parts(self) -> (Box<dyn ChannelIo>, String, Option<ChannelGuard>) {
        (self.io.boxed(), self.peer, self.guard)
    }
}

impl Io {
    fn boxed(self) -> Box<dyn ChannelIo> {
        match self {
            Self::Plain(io) => io,
            Self::Other(io) => io,
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// A channel for a caller's own thread: a standard socket, no runtime.
///
/// It starts in blocking mode. Reads and writes go straight to the socket, each one system call.
#[derive(Debug)]
pub struct BlockingChannel {
    /// Declared before the guard, for the same reason as in [`Channel`].
    io: BlockingIo,
    peer: String,
    guard: Option<ChannelGuard>,
}

impl BlockingChannel {
    /// A channel over `io`. `peer` is the text by which errors name the far side.
    pub fn new(io: impl Into<BlockingIo>, peer: impl Into<String>) -> Self {
        Self { io: io.into(), peer: peer.into(), guard: None }
    }

    /// The same channel, keeping `guard` alive for as long as itself.
    #[must_use]
    pub fn with_guard(self, guard: ChannelGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Chooses whether reads and writes wait, or fail with [`io::ErrorKind::WouldBlock`].
    ///
    /// # Errors
    ///
    /// Whatever the system reports.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.io.set_nonblocking(nonblocking)
    }

    /// The socket. A shared reference can read and write, and other threads may do so at the same time.
    #[must_use]
    pub fn io(&self) -> &BlockingIo {
        &self.io
    }

    /// The far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// What lives as long as the channel; for an `exec:` address, the `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Socket, peer and guard. Dropping the guard may cut the channel, so keep it until the bytes are done.
    #[must_use]
    pub fn into_parts(self) -> (BlockingIo, String, Option<ChannelGuard>) {
        (self.io, self.peer, self.guard)
    }
}

impl Read for BlockingChannel {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        (&self.io).read(buffer)
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        (&self.io).read_vectored(buffers)
    }
}

impl Write for BlockingChannel {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (&self.io).write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        (&self.io).write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for BlockingChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.as_fd()
    }
}

/// The standard socket in a [`BlockingChannel`].
#[derive(Debug)]
pub enum BlockingIo {
    /// From a `tcp://` address.
    Tcp(TcpStream),
    /// From a `unix:` or an `exec:` address.
    Unix(UnixStream),
}

impl BlockingIo {
    /// A second owner of the same socket; both share its mode and its place in the stream.
    ///
    /// # Errors
    ///
    /// Whatever the system reports, such as too many open files.
    pub fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
        }
    }

    /// Chooses whether reads and writes wait, or fail with [`io::ErrorKind::WouldBlock`].
    ///
    /// # Errors
    ///
    /// Whatever the system reports.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(nonblocking),
            Self::Unix(stream) => stream.set_nonblocking(nonblocking),
        }
    }

    /// Ends one direction or both, for all owners; blocked reads and writes return.
    ///
    /// # Errors
    ///
    /// Whatever the system reports, such as that the peer is gone already.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Unix(stream) => stream.shutdown(how),
        }
    }
}

impl Read for &BlockingIo {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self {
            BlockingIo::Tcp(stream) => (&*stream).read(buffer),
            BlockingIo::Unix(stream) => (&*stream).read(buffer),
        }
    }

    fn read_vectored(&mut self, buffers: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match self {
            BlockingIo::Tcp(stream) => (&*stream).read_vectored(buffers),
            BlockingIo::Unix(stream) => (&*stream).read_vectored(buffers),
        }
    }
}

impl Write for &BlockingIo {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            BlockingIo::Tcp(stream) => (&*stream).write(bytes),
            BlockingIo::Unix(stream) => (&*stream).write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match self {
            BlockingIo::Tcp(stream) => (&*stream).write_vectored(slices),
            BlockingIo::Unix(stream) => (&*stream).write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for BlockingIo {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

impl From<TcpStream> for BlockingIo {
    fn from(stream: TcpStream) -> Self {
        Self::Tcp(stream)
    }
}

impl From<UnixStream> for BlockingIo {
    fn from(stream: UnixStream) -> Self {
        Self::Unix(stream)
    }
}

/// How to dial.
#[derive(Clone, Debug)]
pub struct DialOptions {
    /// The tokens by which this side proves itself, and by which it makes sure of the other. Default: none.
    pub tokens: Tokens,
    /// How servers are trusted, for `tls://` and `quic://`. Default: none, and those cannot be dialled.
    #[cfg(feature = "tls")]
    pub tls: Option<ClientTls>,
    /// How long a QUIC connection may be silent before it is given up. Default: 30 s. A [`Connector`](crate::Connector) sets it
    /// to twice what its sessions allow.
    #[cfg(feature = "quic")]
    pub quic_idle: Duration,
    /// How long resolving and connecting may take together. Default: 10 s, which leaves room for three
    /// lost packets (the kernel repeats them after 1, 2 and 4 s) on one of the host's addresses. Starting
    /// a child process is not limited.
    pub connect_timeout: Duration,
    /// Who takes what child processes write to standard error. Default: nobody, and it goes to the standard error of this one.
    #[cfg(feature = "exec")]
    pub child_stderr: Option<ChildStderr>,
}

impl DialOptions {
    /// The time limit, cut to what can be added to any clock.
    pub(crate) fn limit(&self) -> Duration {
        self.connect_timeout.min(Duration::from_secs(365 * 24 * 3600))
    }
}

impl Default for DialOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "quic")]
            quic_idle: QUIC_IDLE,
            tokens: Tokens::default(),
            connect_timeout: Duration::from_secs(10),
            #[cfg(feature = "exec")]
            child_stderr: None,
        }
    }
}

/// Sessions notice a silent peer after 15 s, by default; the connection under them lasts longer.
#[cfg(feature = "quic")]
const QUIC_IDLE: Duration = Duration::from_secs(30);

/// How a server treats the QUIC connections that its channels are on.
#[cfg(feature = "quic")]
#[derive(Clone, Debug)]
pub struct QuicOptions {
    /// How long a connection may be silent before it is given up. 30 s.
    pub idle: Duration,
    /// How long a connection may take to come about, and then to have its first channel. 10 s.
    pub handshake: Duration,
    /// How many connections there may be whose clients are not known. For one more, the oldest one of the machine that has
    /// most of them is closed. 1,024.
    pub max_handshakes: usize,
    /// How many connections there may be in all; more are refused. 5,120.
    pub max_connections: usize,
    /// How many channels one connection may have at a time. For one more its client waits a second, and makes another
    /// connection. 1,024.
    pub max_channels: u32,
}

#[cfg(feature = "quic")]
impl Default for QuicOptions {
    fn default() -> Self {
        Self {
            idle: QUIC_IDLE,
            handshake: Duration::from_secs(10),
            max_handshakes: 1024,
            max_connections: 5120,
            max_channels: 1024,
        }
    }
}

/// How to listen.
#[derive(Clone, Debug)]
pub struct ListenOptions {
    /// What the server shows of itself, for `tls://` and `quic://`. Default: none, and those cannot be listened on.
    #[cfg(feature = "tls")]
    pub tls: Option<ServerTls>,
    /// What holds for QUIC connections, below the channels on them. [`Server::listen`](crate::Server::listen) sets it by what it
    /// allows its sessions and handshakes.
    #[cfg(feature = "quic")]
    pub quic: QuicOptions,
    /// How many connections may wait to be accepted. Default: 1024, so that a burst of workers that
    /// start together gets in; the kernel cuts it to its own limit. Costs nothing while unused.
    pub backlog: u32,
    /// Ports to try in turn when the address says port 0 or its port is in use. Default: none, so
    /// that port 0 is any free port, and a port in use is an error.
    pub port_range: Option<RangeInclusive<u16>>,
    /// Who may connect to a Unix socket, as a file mode. Default: `0o600`, this user alone; with
    /// `0o660` its group too.
    pub unix_mode: u32,
}

impl Default for ListenOptions {
    fn default() -> Self {
        Self {
            #[cfg(feature = "tls")]
            tls: None,
            #[cfg(feature = "quic")]
            quic: QuicOptions::default(),
            backlog: 1024,
            port_range: None,
            unix_mode: 0o600,
        }
    }
}

/// Where channels arrive. Dropping it stops listening; channels accepted before live on.
pub struct Listener {
    address: Address,
    source: Box<dyn Accept>,
    /// Set while accepting must wait for something to be freed. Kept here rather than in the future of
    /// `accept`, so that dropping that future neither loses nor shortens the wait.
    pause: Option<Instant>,
    /// How long the next pause lasts.
    pause_len: Duration,
}

/// One transport's own listener.
pub(crate) trait Accept: Send {
    /// The next channel, or why there is none now. An error does not end the listener.
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>>;
}

impl Listener {
    pub(crate) fn new(address: Address, source: impl Accept + 'static) -> Self {
        Self { address, source: Box::new(source), pause: None, pause_len: PAUSE_MIN }
    }

    /// Waits for the next channel. Cancel-safe: dropping the future loses no connection.
    ///
    /// A connection that died while it waited is passed over. When files or memory run out, accepting
    /// pauses (5 ms, doubling up to 1 s), says so in the log, and goes on by itself.
    ///
    /// # Errors
    ///
    /// Only what ends the listener for good, such as a socket that the system took away.
    pub async fn accept(&mut self) -> Result<Channel, TransportError> {
        loop {
            if let Some(until) = self.pause {
                tokio::time::sleep_until(until).await;
                self.pause = None;
            }
            let error = match poll_fn(|cx| self.source.poll_accept(cx)).await {
                Ok(channel) => {
                    self.pause_len = PAUSE_MIN;
                    return Ok(channel);
                }
                Err(error) => error,
            };
            match AcceptFailure::of(&error) {
                AcceptFailure::Connection => {
                    tracing::debug!(address = %self.address, %error, "a connection died unaccepted");
                }
                AcceptFailure::Exhausted => {
                    tracing::warn!(
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

    /// What is listened on, with the port that was chosen. A wildcard host stays a wildcard.
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

/// What an error of `accept` says about the listener.
enum AcceptFailure {
    /// One connection is gone; others are not affected.
    Connection,
    /// The process or the system has run out of something; trying again at once would spin.
    Exhausted,
    /// The listener itself is broken.
    Listener,
}

impl AcceptFailure {
    fn of(error: &io::Error) -> Self {
        match Errno::from_io_error(error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => Self::Exhausted,
            // Besides a reset, Linux hands the network errors of the new connection to `accept`, and a
            // firewall's refusal as a missing permission.
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

/// Long enough for another connection to end, short enough to go unnoticed.
const PAUSE_MIN: Duration = Duration::from_millis(5);
/// A dialler gives up after 10 s; this leaves it several chances.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Why a channel could not be had. Each variant names the address as text.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The host answered that nobody listens there.
    #[error("{address} refused the connection; is a server listening there?")]
    Refused {
        /// What was dialled.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Nothing answered in time.
    #[error("no answer from {address} within {limit:?}; is the host up, and does no firewall drop packets?")]
    TimedOut {
        /// What was dialled.
        address: String,
        /// How long was waited.
        limit: Duration,
    },
    /// No network leads there.
    #[error("no route to {address}; is this machine on the right network?")]
    Unreachable {
        /// What was dialled.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The host name has no address.
    #[error("cannot find the host of {address}; is its name right?")]
    Resolve {
        /// What was dialled or to be listened on.
        address: String,
        /// What the resolver said.
        source: Arc<io::Error>,
    },
    /// There is no such socket file, or no such folder to make it in.
    #[error("no such file or folder: {address}; has the server been started?")]
    NotFound {
        /// What was dialled or to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// This user may not use the address.
    #[error("not permitted to use {address}; is this the right user?")]
    PermissionDenied {
        /// What was dialled or to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Somebody else listens there.
    #[error("{address} is in use; stop what listens there or choose another address")]
    AddressInUse {
        /// What was to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The address is right, and this cannot be done with it.
    #[error("cannot use {address}: {scheme} addresses {why}")]
    Unsupported {
        /// What was dialled or to be listened on.
        address: String,
        /// Its kind.
        scheme: &'static str,
        /// The rest of a sentence that starts with "such addresses".
        why: &'static str,
    },
    /// The two sides did not agree on how to encrypt the channel, or one does not trust the other's certificate.
    #[error("no secure channel with {address}; {hint}")]
    Insecure {
        /// What was dialled.
        address: String,
        /// What TLS or QUIC said.
        source: Arc<io::Error>,
        /// What to look at.
        hint: &'static str,
    },
    /// The server does not take the client's certificate, or wants one. Where the server says so only after the client has
    /// a channel, the same is said of the session.
    #[error("the server refused the connection: {problem}")]
    Unauthenticated {
        /// What was dialled.
        address: String,
        /// What the server has against the certificate.
        problem: &'static str,
        /// What TLS or QUIC said.
        source: Arc<io::Error>,
    },
    /// The child process did not start.
    #[error("cannot start {address}; is the program installed, executable and on PATH?")]
    Spawn {
        /// The command.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The far side ended the channel while it was being set up, or the listener is gone.
    #[error("{address} closed the connection")]
    Closed {
        /// The far side.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Anything else that the system reports.
    #[error("input or output failed on {address}")]
    Io {
        /// The far side.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
}

impl TransportError {
    /// Sorts an error of the system into a variant.
    ///
    /// The kernel's own time-out counts as [`Unreachable`](Self::Unreachable), since no limit was set
    /// that it could name.
    pub fn from_io(address: impl Into<String>, error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        let address = address.into();
        let kind = error.kind();
        let source = Arc::new(error);
        match kind {
            Kind::ConnectionRefused => Self::Refused { address, source },
            Kind::TimedOut | Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NetworkDown => {
                Self::Unreachable { address, source }
            }
            Kind::NotFound => Self::NotFound { address, source },
            Kind::PermissionDenied => Self::PermissionDenied { address, source },
            Kind::AddrInUse => Self::AddressInUse { address, source },
            Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::BrokenPipe
            | Kind::NotConnected
            | Kind::UnexpectedEof => Self::Closed { address, source },
            _ => Self::Io { address, source },
        }
    }

    /// The address that the error is about.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Self::Refused { address, .. }
            | Self::TimedOut { address, .. }
            | Self::Unreachable { address, .. }
            | Self::Resolve { address, .. }
            | Self::NotFound { address, .. }
            | Self::PermissionDenied { address, .. }
            | Self::AddressInUse { address, .. }
            | Self::Unsupported { address, .. }
            | Self::Insecure { address, .. }
            | Self::Unauthenticated { address, .. }
            | Self::Spawn { address, .. }
            | Self::Closed { address, .. }
            | Self::Io { address, .. } => address,
        }
    }

    pub(crate) fn unsupported(address: &Address, why: &'static str) -> Self {
        Self::Unsupported { address: address.to_string(), scheme: address.scheme(), why }
    }
}

/// The send buffer of a Unix socket, in bytes; the kernel doubles it for what it keeps beside them.
#[cfg(any(feature = "unix", feature = "exec"))]
const UNIX_SEND_BUFFER: usize = 512 << 10;

/// Gives a Unix socket a larger send buffer, as far as the system allows. With the usual one, of 208 KiB, both sides of a copy wait for each other every hundred
/// kilobytes or so, and each wait is a wake-up. The kernel does not grow it by itself as it does TCP's, and receiving takes no buffer.
#[cfg(any(feature = "unix", feature = "exec"))]
pub(crate) fn widen_unix_socket(socket: impl AsFd) {
    _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, UNIX_SEND_BUFFER);
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::error::Error as _;

    use super::*;

    /// Yields what it was given, then nothing.
    struct Scripted(VecDeque<io::Result<Channel>>);

    impl Accept for Scripted {
        fn poll_accept(&mut self, _: &mut Context<'_>) -> Poll<io::Result<Channel>> {
            self.0.pop_front().map_or(Poll::Pending, Poll::Ready)
        }
    }

    fn listener(script: impl IntoIterator<Item = io::Result<Channel>>) -> Listener {
        Listener::new(Address::local(), Scripted(script.into_iter().collect()))
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
        let start = Instant::now();
        // The first attempt meets the failure, and is dropped within the pause.
        let early = tokio::time::timeout(PAUSE_MIN / 5, listener.accept()).await;
        assert!(early.is_err());
        listener.accept().await.unwrap();
        assert_eq!(start.elapsed(), PAUSE_MIN + PAUSE_MIN * 2);
        assert_eq!(listener.pause_len, PAUSE_MIN);
    }

    #[tokio::test]
    async fn a_broken_listener_is_an_error() {
        let mut listener = listener([failure(Errno::BADF)]);
        let error = listener.accept().await.unwrap_err();
        assert!(matches!(error, TransportError::Io { .. }), "{error:?}");
        assert_eq!(error.address(), "local:");
        assert!(error.source().is_some());
    }

    #[test]
    fn messages_are_lower_case_without_full_stop_and_leave_the_cause_to_source() {
        let error = io::Error::from(Errno::CONNREFUSED);
        let cause = error.to_string();
        let error = TransportError::from_io("tcp://h:1", error);
        let text = error.to_string();
        assert!(text.starts_with("tcp://h:1 refused"), "{text}");
        assert!(!text.ends_with('.') && !text.contains(&cause), "{text}");
        assert_eq!(error.source().unwrap().to_string(), cause);
    }

    #[test]
    fn a_channel_drops_its_bytes_before_its_guard() {
        struct Io(Arc<()>);
        struct Guard(Arc<()>);
        impl AsyncRead for Io {
            fn poll_read(
                self: std::pin::Pin<&mut Self>,
                _: &mut Context<'_>,
                _: &mut tokio::io::ReadBuf<'_>,
            ) -> Poll<io::Result<()>> {
                let _ = &self.0;
                Poll::Pending
            }
        }
        impl Drop for Guard {
            fn drop(&mut self) {
                assert_eq!(Arc::strong_count(&self.0), 1);
            }
        }
        let alive = Arc::new(());
        let io = tokio::io::join(Io(Arc::clone(&alive)), tokio::io::sink());
        drop(Channel::new(io, "nobody").with_guard(Box::new(Guard(alive))));
    }
}
