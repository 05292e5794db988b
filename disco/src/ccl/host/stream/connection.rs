//! Data connections while they are made: each step has a time limit, and ends when the connection
//! is not wanted any more.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
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

/// Longest step between two looks at the time limit and at [`GivenUp`].
const SLICE: Duration = Duration::from_millis(20);

/// Function that returns true once a connection is not wanted any more.
pub(super) type GivenUp<'a> = dyn Fn() -> bool + Sync + 'a;

/// Time limit of a connection that is being made.
#[derive(Clone, Copy)]
struct StepLimit<'a> {
    until: Instant,
    given_up: &'a GivenUp<'a>,
}

impl StepLimit<'_> {
    /// Returns the time limit of the next step.
    fn next(self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        if (self.given_up)() {
            Err(io::Error::new(io::ErrorKind::ConnectionAborted, "it is not wanted any more"))
        } else if left.is_zero() {
            Err(io::ErrorKind::TimedOut.into())
        } else {
            Ok(left.min(SLICE))
        }
    }

    /// Repeats a step, to which it gives the time limit, until it does not run into that.
    fn repeat<T>(self, mut step: impl FnMut(Option<Duration>) -> io::Result<T>) -> io::Result<T> {
        loop {
            match step(Some(self.next()?)) {
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
                result => return result,
            }
        }
    }
}

/// A connection while it is made: reads and writes block, together for no longer than it was given,
/// and only while it is wanted.
pub(super) struct Stream<'a> {
    connection: Connection,
    limit: StepLimit<'a>,
}

impl<'a> Stream<'a> {
    pub(super) fn new(connection: Connection, timeout: Duration, given_up: &'a GivenUp<'a>) -> io::Result<Self> {
        match &connection {
            Connection::Tcp(stream) => stream.set_nonblocking(false)?,
            Connection::Unix(stream) => stream.set_nonblocking(false)?,
        }
        Ok(Self { connection, limit: StepLimit { until: Instant::now() + timeout, given_up } })
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

/// Connects to an address until `until`, and only while the connection is wanted.
pub(super) fn connect(address: SocketAddr, until: Instant, given_up: &GivenUp<'_>) -> io::Result<TcpStream> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    let limit = StepLimit { until, given_up };
    let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None)?;
    socket.set_nonblocking(true)?;
    match socket.connect(&address.into()) {
        Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
        _ => {}
    }
    let outcome = limit.repeat(|at_most| {
        let at_most = Timespec { tv_sec: 0, tv_nsec: at_most.unwrap_or(SLICE).subsec_nanos().into() };
        match poll(&mut [PollFd::new(&socket, PollFlags::OUT)], Some(&at_most))? {
            0 => Err(io::ErrorKind::WouldBlock.into()),
            _ => socket.take_error(),
        }
    })?;
    outcome.map_or_else(|| Ok(socket.into()), Err)
}

/// Returns the stream as the socket of a link, encrypted if there is a secret.
pub(super) fn boxed(stream: impl Socket + 'static, secret: Option<Secret>) -> Box<dyn Socket> {
    match secret {
        Some(secret) => Box::new(secret.secure(stream)),
        None => Box::new(stream),
    }
}

impl Read for Stream<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let connection = &mut self.connection;
        self.limit.repeat(|at_most| match connection {
            Connection::Tcp(stream) => stream.set_read_timeout(at_most).and_then(|()| stream.read(bytes)),
            Connection::Unix(stream) => stream.set_read_timeout(at_most).and_then(|()| stream.read(bytes)),
        })
    }
}

impl Write for Stream<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let connection = &mut self.connection;
        self.limit.repeat(|at_most| match connection {
            Connection::Tcp(stream) => stream.set_write_timeout(at_most).and_then(|()| stream.write(bytes)),
            Connection::Unix(stream) => stream.set_write_timeout(at_most).and_then(|()| stream.write(bytes)),
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;

    use super::*;

    /// Returns the kind of error of `step`, whose connection is given up once it has begun.
    fn error_once_given_up(step: impl FnOnce(&GivenUp<'_>) -> io::Error + Send) -> io::ErrorKind {
        let (given_up, began) = (AtomicBool::new(false), AtomicBool::new(false));
        let asked: &GivenUp<'_> = &|| {
            began.store(true, Ordering::Relaxed);
            given_up.load(Ordering::Relaxed)
        };
        std::thread::scope(|scope| {
            let (sender, receiver) = mpsc::channel();
            scope.spawn(move || sender.send(step(asked).kind()).unwrap());
            while !began.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            given_up.store(true, Ordering::Relaxed);
            receiver.recv_timeout(Duration::from_secs(60)).unwrap()
        })
    }

    const LONG: Duration = Duration::from_secs(300);

    fn late() -> Instant {
        Instant::now() + LONG
    }

    /// Regression: a rank stayed in a handshake for five seconds after the end of its session.
    #[test]
    fn a_handshake_ends_when_it_is_given_up() {
        let (ours, _silent) = UnixStream::pair().unwrap();
        let kind = error_once_given_up(|given_up| {
            Stream::new(Connection::Unix(ours), LONG, given_up).unwrap().read_exact(&mut [0]).unwrap_err()
        });
        assert_eq!(kind, io::ErrorKind::ConnectionAborted);
    }

    /// The same for an address from which there is no answer: a listener whose queue is full.
    #[test]
    fn an_attempt_to_connect_ends_when_it_is_given_up() {
        let full = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        full.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        full.listen(0).unwrap();
        let address = full.local_addr().unwrap().as_socket().unwrap();
        let _waiting = TcpStream::connect(address).unwrap();
        let kind = error_once_given_up(|given_up| connect(address, late(), given_up).unwrap_err());
        assert_eq!(kind, io::ErrorKind::ConnectionAborted);
    }

    #[test]
    fn an_attempt_to_connect_tells_its_outcome() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let stream = connect(address, late(), &|| false).unwrap();
        assert_eq!(stream.peer_addr().unwrap(), address);
        drop((stream, listener));
        // Bound, so that no other program takes the port, and not listened on.
        let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
        let address = closed.local_addr().unwrap().as_socket().unwrap();
        let error = connect(address, late(), &|| false).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    }
}
