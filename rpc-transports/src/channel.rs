//! Channels: one ordered, reliable byte pipe between two peers, for async code and for plain
//! threads.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::handshake::handshake_limit::ClosedFlag;
use crate::handshake::identity::Security;

/// An ordered, reliable byte pipe as the async runtime sees it. Implemented for all that fits.
pub trait ChannelIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + ?Sized> ChannelIo for T {}

/// Something that lives as long as a channel, such as the child process at its far end.
pub type ChannelGuard = Box<dyn Any + Send + Sync>;

/// The handshake below a channel that was accepted, such as that of TLS, which ends with the
/// channel to use.
type Upgrade = Pin<Box<dyn Future<Output = io::Result<Channel>> + Send>>;

/// Explains how the far side of a channel has ended, where the transport knows: a child process has
/// an exit status.
///
/// Asked when a channel ends before there is a session. Implementations wait for what they need to
/// know, a second at most.
#[async_trait]
pub trait ExplainEnd: Send + Sync {
    /// Returns the explanation as the beginning of a sentence: "the program ended (exit status:
    /// 1)". `None` if the far side has not ended.
    async fn explain(&self) -> Option<String>;

    /// As [`explain`](Self::explain), and blocks.
    fn explain_blocking(&self) -> Option<String>;
}

/// The far side of a channel, as far as the transport knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    text: String,
    machine: Machine,
    user: Option<u32>,
}

impl Peer {
    /// A peer that errors and logs name by `text`, best an address, and whose machine is not known.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), machine: Machine::Unknown, user: None }
    }

    /// The same peer, on this machine or another one: per-machine limits of servers count by it.
    #[must_use]
    pub fn on(self, machine: Machine) -> Self {
        Self { machine, ..self }
    }

    /// The same peer, which runs as this Unix user, as the kernel says.
    #[must_use]
    pub fn with_user(self, user: u32) -> Self {
        Self { user: Some(user), ..self }
    }
}

impl<T: Into<String>> From<T> for Peer {
    fn from(text: T) -> Self {
        Self::new(text)
    }
}

/// The machine that a peer is on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Machine {
    /// A machine that the transport does not tell. All of them count as one.
    #[default]
    Unknown,
    /// This machine.
    This,
    /// The machine with this IP address.
    At(IpAddr),
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("unknown machines"),
            Self::This => f.write_str("this machine"),
            Self::At(ip) => ip.fmt(f),
        }
    }
}

/// One ordered, reliable byte pipe between two peers.
pub struct Channel {
    /// Declared before the guard, so that the far side sees the end before the guard acts on it.
    io: Io,
    peer: Peer,
    security: Security,
    upgrade: Option<Upgrade>,
    guard: Option<ChannelGuard>,
    end: Option<Arc<dyn ExplainEnd>>,
    /// Whether the connection that it is one of is over.
    parent_connection: ClosedFlag,
    /// What was read of it by a handshake before the one to come.
    unread: BytesMut,
}

#[cfg_attr(not(any(feature = "tcp", feature = "unix")), allow(dead_code, reason = "there are no sockets then"))]
enum Io {
    /// A socket of the system's and nothing more, of which more is known than that it is bytes.
    Plain(Box<dyn PlainSocket>),
    Other(Box<dyn ChannelIo>),
}

/// What the kernel can move bytes from and to by itself: what tokio's sockets have in common beside
/// bytes.
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
                #[cfg_attr(
                    not(any(feature = "tcp", feature = "unix")),
                    allow(unused_mut, reason = "there are no sockets then")
                )]
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
    pub fn new(io: impl ChannelIo + 'static, peer: impl Into<Peer>) -> Self {
        Self {
            io: Io::new(io),
            peer: peer.into(),
            security: Security::default(),
            upgrade: None,
            guard: None,
            end: None,
            parent_connection: ClosedFlag::default(),
            unread: BytesMut::new(),
        }
    }

    /// The same channel, of a connection that may be over before the channel hears of it.
    #[cfg(feature = "quic")]
    pub(crate) fn with_parent_connection(self, parent_connection: ClosedFlag) -> Self {
        Self { parent_connection, ..self }
    }

    /// Whether the connection that it is one of is over.
    pub(crate) fn parent_connection(&self) -> ClosedFlag {
        self.parent_connection.clone()
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
    pub(crate) fn leading_to(self, text: impl Into<String>) -> Self {
        let encrypted_way = self.security.is_encrypted() || self.security.encrypted_way;
        let security = Security { encrypted_way, ..Security::default() };
        // For limits it comes from the machine that it leads through.
        let peer = Peer { text: text.into(), user: None, ..self.peer };
        Self { peer, security, upgrade: None, ..self }
    }

    /// The same channel, with something around its bytes, such as a recorder.
    #[must_use]
    pub fn map_io<I: ChannelIo + 'static>(self, wrap: impl FnOnce(Box<dyn ChannelIo>) -> I) -> Self {
        Self { io: Io::new(wrap(self.io.boxed())), ..self }
    }

    /// The same channel, whose bytes pass through the encrypted stream that `security` came with,
    /// from [`ClientTls::connect`](crate::ClientTls::connect) or
    /// [`ServerTls::accept`](crate::ServerTls::accept).
    #[must_use]
    pub fn with_security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// The same channel, whose end can be explained.
    #[must_use]
    pub fn explained_by(self, end: Arc<dyn ExplainEnd>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// A channel that a listener has accepted from `peer`, and that is there when `upgrade` is
    /// done, such as a handshake of TLS. [`secure`](Self::secure) does it.
    pub fn upgrading(upgrade: impl Future<Output = io::Result<Self>> + Send + 'static, peer: impl Into<Peer>) -> Self {
        Self { upgrade: Some(Box::pin(upgrade)), ..Self::new(tokio::io::empty(), peer) }
    }

    /// Finishes what an accepted channel needs before its bytes can be used: the handshake of TLS,
    /// which a listener leaves to whoever takes the channel, so that a slow client holds up no
    /// other. Nothing for other channels. Has no time limit of its own; a channel whose future was
    /// dropped is of no use.
    ///
    /// # Errors
    ///
    /// Why there is no secure channel.
    pub async fn secure(&mut self) -> io::Result<()> {
        while let Some(upgrade) = self.upgrade.take() {
            let upgraded = upgrade.await?;
            (self.io, self.security, self.upgrade) = (upgraded.io, upgraded.security, upgraded.upgrade);
            self.guard = match (self.guard.take(), upgraded.guard) {
                (Some(own), Some(its)) => Some(Box::new((own, its))),
                (own, its) => own.or(its),
            };
            self.end = upgraded.end.or(self.end.take());
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

    /// The name of the far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer.text
    }

    /// The machine of the far side.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.peer.machine
    }

    /// The Unix user that the far side runs as, if the kernel says.
    #[must_use]
    pub fn user(&self) -> Option<u32> {
        self.peer.user
    }

    /// The explanation of the channel's end, if there is one.
    #[must_use]
    pub fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    /// The value that lives as long as the channel: for an `exec:` address, an `Arc` of the
    /// `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Bytes, name of the peer, and guard. Dropping the guard may cut the channel, so keep it until
    /// the bytes are done.
    #[must_use]
    pub fn into_parts(self) -> (Box<dyn ChannelIo>, String, Option<ChannelGuard>) {
        (self.io.boxed(), self.peer.text, self.guard)
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
pub struct BlockingChannel {
    /// Declared before the guard, for the same reason as in [`Channel`].
    io: BlockingIo,
    peer: String,
    guard: Option<ChannelGuard>,
    end: Option<Arc<dyn ExplainEnd>>,
}

impl BlockingChannel {
    /// A channel over `io`. `peer` is the text by which errors name the far side.
    pub fn new(io: impl Into<BlockingIo>, peer: impl Into<String>) -> Self {
        Self { io: io.into(), peer: peer.into(), guard: None, end: None }
    }

    /// The same channel, keeping `guard` alive for as long as itself.
    #[must_use]
    pub fn with_guard(self, guard: ChannelGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// The same channel, whose end can be explained.
    #[must_use]
    pub fn explained_by(self, end: Arc<dyn ExplainEnd>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// The explanation of the channel's end, if there is one.
    #[must_use]
    pub fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    /// Chooses whether reads and writes wait, or fail with [`io::ErrorKind::WouldBlock`].
    ///
    /// # Errors
    ///
    /// Whatever the system reports.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.io.set_nonblocking(nonblocking)
    }

    /// The socket. A shared reference can read and write, and other threads may do so at the same
    /// time.
    #[must_use]
    pub fn io(&self) -> &BlockingIo {
        &self.io
    }

    /// The far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// The value that lives as long as the channel: for an `exec:` address, an `Arc` of the
    /// `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Socket, peer and guard. Dropping the guard may cut the channel, so keep it until the bytes
    /// are done.
    #[must_use]
    pub fn into_parts(self) -> (BlockingIo, String, Option<ChannelGuard>) {
        (self.io, self.peer, self.guard)
    }
}

impl fmt::Debug for BlockingChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingChannel").field("peer", &self.peer).finish_non_exhaustive()
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

    /// Limits how long a read waits. `None` is for ever.
    pub(crate) fn set_read_timeout(&self, timeout: Option<std::time::Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
            Self::Unix(stream) => stream.set_read_timeout(timeout),
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

#[cfg(test)]
mod tests {
    use super::*;

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
