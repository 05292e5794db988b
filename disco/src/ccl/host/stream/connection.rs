//! Data connections during their handshake: each read and write has a time limit.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use super::framed_connection::Link;
use super::secure::Secret;
use super::socket::Socket;

/// Connection between two ranks, before it becomes a link.
pub(super) enum Connection {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Connection {
    pub(super) fn try_clone(&self) -> io::Result<Self> {
        match self {
            Self::Tcp(stream) => stream.try_clone().map(Self::Tcp),
            Self::Unix(stream) => stream.try_clone().map(Self::Unix),
        }
    }
}

/// A connection while it is made: reads and writes block, together for no longer than it was given.
pub(super) struct Stream {
    pub(super) connection: Connection,
    pub(super) until: Instant,
}

impl Stream {
    pub(super) fn new(connection: Connection, timeout: Duration) -> io::Result<Self> {
        match &connection {
            Connection::Tcp(stream) => stream.set_nonblocking(false)?,
            Connection::Unix(stream) => stream.set_nonblocking(false)?,
        }
        Ok(Self { connection, until: Instant::now() + timeout })
    }

    /// Returns the time left for the handshake.
    pub(super) fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }

    /// Converts the stream into a link, which does not block. From here on the kernel tests a
    /// machine that says nothing.
    pub(super) fn into_link(self, secret: Option<Secret>) -> io::Result<Link> {
        let socket: Box<dyn Socket> = match self.connection {
            Connection::Tcp(stream) => {
                stream.set_nodelay(true)?;
                stream.set_nonblocking(true)?;
                let keepalive = socket2::TcpKeepalive::new()
                    .with_time(Duration::from_secs(5))
                    .with_interval(Duration::from_secs(5))
                    .with_retries(2);
                socket2::SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
                #[cfg(target_os = "linux")]
                socket2::SockRef::from(&stream).set_tcp_user_timeout(Some(Duration::from_secs(15)))?;
                boxed(stream, secret)
            }
            Connection::Unix(stream) => {
                stream.set_nonblocking(true)?;
                boxed(stream, secret)
            }
        };
        Ok(Link::new(socket))
    }
}

/// Returns the stream as the socket of a link, encrypted if there is a secret.
pub(super) fn boxed(stream: impl Socket + 'static, secret: Option<Secret>) -> Box<dyn Socket> {
    match secret {
        Some(secret) => Box::new(secret.secure(stream)),
        None => Box::new(stream),
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.left()?;
        match &mut self.connection {
            Connection::Tcp(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(bytes)),
            Connection::Unix(stream) => stream.set_read_timeout(left).and_then(|()| stream.read(bytes)),
        }
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let left = self.left()?;
        match &mut self.connection {
            Connection::Tcp(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
            Connection::Unix(stream) => stream.set_write_timeout(left).and_then(|()| stream.write(bytes)),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
