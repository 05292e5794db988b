//! Channels: one ordered, reliable byte pipe between two peers, for async code and for plain
//! threads.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv6Addr, Shutdown, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::BytesMut;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::handshake::handshake_slots::ClosedFlag;
use crate::handshake::identity_proofs::Security;
use crate::session_io::SessionIo;

/// Ordered, reliable byte pipe for async code. Implemented for every type that fits.
pub trait ChannelIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + ?Sized> ChannelIo for T {}

/// Value that lives as long as a channel, such as the child process at its far end.
pub type ChannelGuard = Box<dyn Any + Send + Sync>;

/// Handshake below a channel that was accepted, such as that of TLS. It yields the channel to use.
type Upgrade = Pin<Box<dyn Future<Output = io::Result<Channel>> + Send>>;

/// Source of explanations for the end of a channel, where the transport knows one: a child process
/// has an exit status.
///
/// Called when the far side ends a channel, before there is a session or in the middle of one.
/// Implementations wait for the facts that they need, a second at most.
#[async_trait]
pub trait ExplainEnd: Send + Sync {
    /// Returns the explanation as the beginning of a sentence: "the program ended (exit status:
    /// 1)". Returns `None` if the far side has not ended.
    async fn explain(&self) -> Option<String>;

    /// Does the same as [`explain`](Self::explain), and blocks.
    fn explain_blocking(&self) -> Option<String>;
}

/// The far side of a channel, as far as the transport knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    text: String,
    machine: Machine,
    user: Option<u32>,
    process: Option<u32>,
}

impl Peer {
    /// Creates a peer on an unknown machine. Errors and logs name it by `text`, best an address.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), machine: Machine::Unknown, user: None, process: None }
    }

    /// Sets the machine that the peer is on. Servers count per-machine limits by it.
    #[must_use]
    pub fn on(self, machine: Machine) -> Self {
        Self { machine, ..self }
    }

    /// Sets the Unix user that the peer runs as, according to the kernel.
    #[must_use]
    pub fn with_user(self, user: u32) -> Self {
        Self { user: Some(user), ..self }
    }

    /// Sets the process of this machine that the peer is, according to the kernel. Sessions with it
    /// may share memory: the peer's own bytes come through the channel, and from no further peer.
    #[must_use]
    pub fn with_process(self, process: u32) -> Self {
        Self { process: Some(process), ..self }
    }

    /// Sets the process at the far end of a Unix socket: the one that has connected, has begun to
    /// listen, or has made the pair. A process that this one cannot see, such as one outside of
    /// this container, is not known.
    #[cfg(any(feature = "unix", feature = "exec"))]
    pub(crate) fn with_process_of(self, socket: &tokio::net::UnixStream) -> Self {
        let process = socket.peer_cred().ok().and_then(|peer| peer.pid());
        Self { process: process.and_then(|process| u32::try_from(process).ok()).filter(|process| *process > 0), ..self }
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
    /// Machine that the transport does not know. All of them count as one.
    #[default]
    Unknown,
    /// This machine.
    This,
    /// The machine with this IP address.
    At(IpAddr),
}

impl Machine {
    /// Returns the name under which limits for each machine count it. The addresses of an IPv6
    /// network of 64 bits count as one machine, since a single host may use any of them.
    #[must_use]
    pub fn limit_key(&self) -> String {
        match self {
            Self::At(ip) => match ip.to_canonical() {
                IpAddr::V6(ip) if !ip.is_loopback() => {
                    let network = Ipv6Addr::from_bits(ip.to_bits() >> 64 << 64);
                    format!("{network}/64")
                }
                ip => ip.to_string(),
            },
            Self::Unknown | Self::This => self.to_string(),
        }
    }
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
    /// Byte pipe. Declared before the guard, so that the far side sees the end before the guard
    /// acts on it.
    io: Io,
    peer: Peer,
    security: Security,
    upgrade: Option<Upgrade>,
    guard: Option<ChannelGuard>,
    end: Option<Arc<dyn ExplainEnd>>,
    /// Flag that is set once the connection under the channel is closed.
    parent_connection: ClosedFlag,
    /// Bytes that an earlier handshake has read, for the next handshake.
    unread: BytesMut,
}

#[cfg_attr(not(any(feature = "tcp", feature = "unix")), allow(dead_code, reason = "there are no sockets then"))]
pub(crate) enum Io {
    /// Bare socket of the system, which can do more than move bytes.
    Plain(Box<dyn PlainSocket>),
    /// Any other byte pipe.
    Other(Box<dyn ChannelIo>),
}

/// Socket that the kernel can move bytes from and to by itself. The trait has the methods that
/// tokio's sockets share beside reading and writing.
#[cfg_attr(not(target_os = "linux"), allow(dead_code, reason = "only there it moves them"))]
pub(crate) trait PlainSocket: ChannelIo + AsFd {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<()>>;
    fn try_read_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize>;
    fn try_write_io(&self, io: &mut dyn FnMut() -> io::Result<usize>) -> io::Result<usize>;
    /// Takes the socket out of the runtime.
    fn into_descriptor(self: Box<Self>) -> io::Result<OwnedFd>;
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

            fn into_descriptor(self: Box<Self>) -> io::Result<OwnedFd> {
                Ok(self.into_std()?.into())
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
                // `io` is always `Some` here: taking the socket out of it returns above.
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
    /// Creates a channel over `io`. Errors name the far side by `peer`.
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

    /// Sets the flag of the connection under the channel, which may close before the channel
    /// notices.
    #[cfg(feature = "quic")]
    pub(crate) fn with_parent_connection(self, parent_connection: ClosedFlag) -> Self {
        Self { parent_connection, ..self }
    }

    /// Returns the flag that is set once the connection under the channel is closed.
    pub(crate) fn parent_connection(&self) -> ClosedFlag {
        self.parent_connection.clone()
    }

    /// Sets the guard, which the channel keeps alive for as long as itself.
    #[must_use]
    pub fn with_guard(self, guard: ChannelGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Keeps `other` alive for as long as the channel, in addition to the guard.
    #[must_use]
    pub fn with_additional_guard(mut self, other: impl Send + Sync + 'static) -> Self {
        let guard = self.guard.take();
        self.with_guard(Box::new((guard, other)))
    }

    /// Sets the bytes that have been read from the channel already, for the next handshake.
    pub(crate) fn after_reading(self, unread: BytesMut) -> Self {
        Self { unread, ..self }
    }

    /// Sets the bytes that have been read already, to be read again.
    pub(crate) fn put_back(&mut self, unread: BytesMut) {
        self.unread = unread;
    }

    /// Takes the bytes that have been read already. A second call returns none.
    pub(crate) fn take_unread(&mut self) -> BytesMut {
        std::mem::take(&mut self.unread)
    }

    /// Turns the channel into one that leads on to a further peer, named `text`, of which nothing
    /// is known yet.
    pub(crate) fn with_further_peer(self, text: impl Into<String>) -> Self {
        let first_link_encrypted = self.security.is_encrypted() || self.security.first_link_encrypted;
        let security = Security { first_link_encrypted, ..Security::default() };
        // For limits, the channel comes from the machine that it leads through.
        let peer = Peer { text: text.into(), user: None, process: None, ..self.peer };
        Self { peer, security, upgrade: None, ..self }
    }

    /// Wraps the channel's bytes, for example in a recorder. Sessions over it share no memory with
    /// the peer, so that all bytes come through the channel.
    #[must_use]
    pub fn map_io<I: ChannelIo + 'static>(self, wrap: impl FnOnce(Box<dyn ChannelIo>) -> I) -> Self {
        let peer = Peer { process: None, ..self.peer };
        Self { io: Io::new(wrap(self.io.boxed())), peer, ..self }
    }

    /// Sets the security of a channel whose bytes pass through an encrypted stream. `security` is
    /// the value that came with the stream from [`ClientTls::connect`](crate::ClientTls::connect)
    /// or [`ServerTls::accept`](crate::ServerTls::accept), or that was
    /// [taken](Self::take_security) from the channel whose bytes these are.
    #[must_use]
    pub fn with_security(self, security: Security) -> Self {
        Self { security, ..self }
    }

    /// Takes the security out of a channel, for a channel that wraps its bytes. This channel counts
    /// as not encrypted from now on.
    #[must_use]
    pub fn take_security(&mut self) -> Security {
        std::mem::take(&mut self.security)
    }

    /// Sets the source that explains the channel's end.
    #[must_use]
    pub fn explained_by(self, end: Arc<dyn ExplainEnd>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Creates a channel that a listener has accepted from `peer` and that is usable once `upgrade`
    /// is done, such as a handshake of TLS. [`secure`](Self::secure) runs it.
    pub fn upgrading(upgrade: impl Future<Output = io::Result<Self>> + Send + 'static, peer: impl Into<Peer>) -> Self {
        Self { upgrade: Some(Box::pin(upgrade)), ..Self::new(tokio::io::empty(), peer) }
    }

    /// Runs the handshake that an accepted channel needs before its bytes can be used, such as that
    /// of TLS. A listener leaves it to the caller, so that a slow client holds up no other. Other
    /// channels need none. The handshake has no time limit of its own. A channel whose future was
    /// dropped is of no use.
    ///
    /// # Errors
    ///
    /// Any error of the handshake.
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

    /// Returns the facts that are known about the far side and the encryption.
    #[must_use]
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// Returns the byte pipe.
    pub fn io_mut(&mut self) -> &mut dyn ChannelIo {
        self.io.as_channel_io()
    }

    /// Returns the socket if the channel is a bare one.
    pub(crate) fn plain_socket(&self) -> Option<&dyn PlainSocket> {
        match &self.io {
            Io::Plain(io) => Some(&**io),
            Io::Other(_) => None,
        }
    }

    /// Takes the socket of a bare channel out of the runtime. The channel has none then.
    ///
    /// # Errors
    ///
    /// The channel is no bare socket, and stays as it is; or any error that the system reports.
    pub(crate) fn take_socket(&mut self) -> io::Result<OwnedFd> {
        if let Io::Other(_) = self.io {
            return Err(io::ErrorKind::Unsupported.into());
        }
        match std::mem::replace(&mut self.io, Io::Other(Box::new(tokio::io::empty()))) {
            Io::Plain(socket) => socket.into_descriptor(),
            Io::Other(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Gives the channel a socket, in the current runtime.
    ///
    /// # Errors
    ///
    /// The socket is of a kind that this build has no transport for, or any error that the system
    /// reports.
    pub(crate) fn put_socket(&mut self, socket: OwnedFd) -> io::Result<()> {
        let domain = rustix::net::sockopt::socket_domain(&socket)?;
        #[cfg(feature = "unix")]
        if domain == rustix::net::AddressFamily::UNIX {
            self.io = Io::Plain(Box::new(tokio::net::UnixStream::from_std(socket.into())?));
            return Ok(());
        }
        #[cfg(feature = "tcp")]
        if [rustix::net::AddressFamily::INET, rustix::net::AddressFamily::INET6].contains(&domain) {
            self.io = Io::Plain(Box::new(tokio::net::TcpStream::from_std(socket.into())?));
            return Ok(());
        }
        let text = format!("this build has no transport for sockets of the domain {}", domain.as_raw());
        Err(io::Error::new(io::ErrorKind::Unsupported, text))
    }

    /// Creates a channel over a socket that another process has passed, in the current runtime.
    ///
    /// # Errors
    ///
    /// As [`put_socket`](Self::put_socket).
    pub(crate) fn of_socket(socket: OwnedFd, peer: Peer) -> io::Result<Self> {
        let mut channel = Self::new(tokio::io::empty(), peer);
        channel.put_socket(socket)?;
        Ok(channel)
    }

    /// Returns the name of the far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer.text
    }

    /// Returns the machine of the far side.
    #[must_use]
    pub fn machine(&self) -> Machine {
        self.peer.machine
    }

    /// Returns the Unix user that the far side runs as, if the kernel says.
    #[must_use]
    pub fn user(&self) -> Option<u32> {
        self.peer.user
    }

    /// Returns the process that the far side is, if sessions may share memory with it.
    pub(crate) fn process(&self) -> Option<u32> {
        self.peer.process
    }

    /// Returns the source that explains the channel's end, if there is one.
    #[must_use]
    pub fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    /// Returns the value that lives as long as the channel: for an `exec:` address, an `Arc` of the
    /// `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Splits the channel into byte pipe, name of the peer, and guard. Dropping the guard may cut
    /// the channel, so keep it until the bytes are done.
    #[must_use]
    pub fn into_parts(self) -> (Box<dyn ChannelIo>, String, Option<ChannelGuard>) {
        (self.io.boxed(), self.peer.text, self.guard)
    }

    /// Splits the channel as [`into_parts`](Self::into_parts) does, for the task of a session that
    /// looks for input for at most `spin` before it waits.
    pub(crate) fn into_session_parts(self, spin: Duration) -> (SessionIo, String, Option<ChannelGuard>) {
        (SessionIo::new(self.io, spin), self.peer.text, self.guard)
    }
}

impl Io {
    fn boxed(self) -> Box<dyn ChannelIo> {
        match self {
            Self::Plain(io) => io,
            Self::Other(io) => io,
        }
    }

    pub(crate) fn as_channel_io(&mut self) -> &mut dyn ChannelIo {
        match self {
            Self::Plain(io) => &mut **io,
            Self::Other(io) => &mut **io,
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// Channel for a caller's own thread: a standard socket, without a runtime.
///
/// It starts in blocking mode. Reads and writes go straight to the socket, each one system call.
pub struct BlockingChannel {
    /// Socket. Declared before the guard, for the same reason as in [`Channel`].
    io: BlockingIo,
    peer: String,
    /// True if the far side is a process of this machine, with which sessions may share memory.
    shares_memory: bool,
    guard: Option<ChannelGuard>,
    end: Option<Arc<dyn ExplainEnd>>,
}

impl BlockingChannel {
    /// Creates a channel over `io`. Errors name the far side by `peer`.
    pub fn new(io: impl Into<BlockingIo>, peer: impl Into<String>) -> Self {
        Self { io: io.into(), peer: peer.into(), shares_memory: false, guard: None, end: None }
    }

    /// Lets sessions share memory with the far side, which is a process of this machine: the
    /// counterpart of [`Peer::with_process`].
    #[must_use]
    pub fn sharing_memory(self) -> Self {
        Self { shares_memory: true, ..self }
    }

    /// Returns true if sessions may share memory with the far side.
    pub(crate) fn shares_memory(&self) -> bool {
        self.shares_memory
    }

    /// Sets the guard, which the channel keeps alive for as long as itself.
    #[must_use]
    pub fn with_guard(self, guard: ChannelGuard) -> Self {
        Self { guard: Some(guard), ..self }
    }

    /// Sets the source that explains the channel's end.
    #[must_use]
    pub fn explained_by(self, end: Arc<dyn ExplainEnd>) -> Self {
        Self { end: Some(end), ..self }
    }

    /// Returns the source that explains the channel's end, if there is one.
    #[must_use]
    pub fn end(&self) -> Option<&Arc<dyn ExplainEnd>> {
        self.end.as_ref()
    }

    /// Chooses whether reads and writes wait, or fail with [`io::ErrorKind::WouldBlock`].
    ///
    /// # Errors
    ///
    /// Any error that the system reports.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.io.set_nonblocking(nonblocking)
    }

    /// Returns the socket. A shared reference can read and write, and other threads may do so at
    /// the same time.
    #[must_use]
    pub fn io(&self) -> &BlockingIo {
        &self.io
    }

    /// Returns the name of the far side, for error messages.
    #[must_use]
    pub fn peer(&self) -> &str {
        &self.peer
    }

    /// Returns the value that lives as long as the channel: for an `exec:` address, an `Arc` of the
    /// `ChildGuard`.
    #[must_use]
    pub fn guard(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.guard.as_deref()
    }

    /// Splits the channel into socket, peer and guard. Dropping the guard may cut the channel, so
    /// keep it until the bytes are done.
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
    /// TCP socket, from a `tcp://` address.
    Tcp(TcpStream),
    /// Unix socket, from a `unix:`, `exec:` or `ssh://` address.
    Unix(UnixStream),
}

impl BlockingIo {
    /// Makes a second owner of the same socket. Both share its mode and its position in the stream.
    ///
    /// # Errors
    ///
    /// Any error that the system reports, such as too many open files.
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
    /// Any error that the system reports.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_nonblocking(nonblocking),
            Self::Unix(stream) => stream.set_nonblocking(nonblocking),
        }
    }

    /// Limits the time that a read waits. `None` means no limit.
    ///
    /// # Errors
    ///
    /// A limit of zero, and any error that the system reports.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.set_read_timeout(timeout),
            Self::Unix(stream) => stream.set_read_timeout(timeout),
        }
    }

    /// Ends one direction or both, for all owners; blocked reads and writes return.
    ///
    /// # Errors
    ///
    /// Any error that the system reports, such as that the peer is gone already.
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
    fn the_hosts_of_an_ipv6_network_count_as_one_machine() {
        let key = |ip: &str| Machine::At(ip.parse().unwrap()).limit_key();
        assert_eq!(key("2001:db8:1:2:3:4:5:6"), key("2001:db8:1:2:ffff::1"));
        assert_eq!(key("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::/64");
        assert_ne!(key("2001:db8:1:2::1"), key("2001:db8:1:3::1"));
        assert_eq!(key("::ffff:192.0.2.1"), key("192.0.2.1"));
        assert_ne!(key("192.0.2.1"), key("192.0.2.2"));
        assert_eq!(key("::1"), "::1");
    }

    #[test]
    fn wrappers_and_further_peers_share_no_memory() {
        let channel = || Channel::new(tokio::io::empty(), Peer::new("a process").with_process(1));
        assert_eq!(channel().process(), Some(1));
        assert_eq!(channel().map_io(|io| io).process(), None);
        assert_eq!(channel().with_further_peer("behind it").process(), None);
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
