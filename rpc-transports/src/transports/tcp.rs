//! `tcp://` addresses: dialling a host by each of its addresses in turn, and listening.
//!
//! Both ends set `TCP_NODELAY`, since a frame is written whole and must not wait for the next. They
//! also set `SO_KEEPALIVE`, by which the kernel gives up a dead peer even if neither side sends
//! pings. Buffer sizes keep their defaults: setting them would switch off the kernel's own tuning.

use std::io;
use std::net::{IpAddr, SocketAddr, TcpStream as StdStream, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, ready};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::address::{Address, AddressError};
use crate::channel::{BlockingChannel, Channel, Machine, Peer};
use crate::error::TransportError;
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, Dial, Properties, Reach, Transport};

/// The transport of `tcp://` addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tcp;

impl Transport for Tcp {
    fn schemes(&self) -> &[&str] {
        &["tcp"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        Ok(Properties::plain(check_host_and_port(at)?))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, with))
    }

    fn dial_blocking(&self, to: &Address, with: &Dial) -> Option<Result<BlockingChannel, TransportError>> {
        Some(dial_blocking(to, with))
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        Some(to.clone())
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(bind(at, with))
    }
}

/// Checks that an address consists of a host, a port and perhaps a key. Returns its reach.
pub(crate) fn check_host_and_port(at: &Address) -> Result<Reach, AddressError> {
    let example = format!("write for example {}://board.lan:9090 or {0}://[::1]:9090/KEY", at.scheme());
    let problem = match () {
        () if at.host().is_none() => "two slashes and a host are missing",
        () if at.port().is_none() => "no port follows the host",
        () if at.user().is_some() => "there are no users",
        () if at.parameters().next().is_some() => "there are no parameters",
        () if at.has_loopback_host() => return Ok(Reach::Machine),
        () => return Ok(Reach::Network),
    };
    Err(AddressError::invalid(at, format!("{problem}; {example}")))
}

async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
    let stream = connect(address, options).await?;
    let peer = peer_of(address, &stream);
    Ok(Channel::new(stream, peer))
}

/// Returns the peer of a stream that was dialled.
pub(crate) fn peer_of(address: &Address, stream: &TcpStream) -> Peer {
    let peer = Peer::new(address.to_string());
    match stream.peer_addr() {
        Ok(socket) => peer.on(Machine::At(socket.ip().to_canonical())),
        Err(_) => peer,
    }
}

pub(crate) async fn connect(address: &Address, options: &Dial) -> Result<TcpStream, TransportError> {
    let (host, port) = host_and_port(address)?;
    let mut attempts = Attempts::new(options.limit());
    match timeout(attempts.left(), tokio::net::lookup_host((host, port))).await {
        Ok(Ok(resolved)) => attempts.aim(resolved),
        Ok(Err(error)) => return Err(unresolved(address, error)),
        Err(_) => return Err(attempts.failure(address)),
    }
    while let Some((target, share)) = attempts.next() {
        let outcome = match timeout(share, TcpStream::connect(target)).await {
            Ok(outcome) => outcome,
            Err(elapsed) => Err(elapsed.into()),
        };
        let tuned = outcome.and_then(|stream| {
            tuned(&stream)?;
            options.socket_silence.map_or(Ok(()), |silence| limit_silence(&stream, silence))?;
            Ok(stream)
        });
        match tuned {
            Ok(stream) => return Ok(stream),
            Err(error) => attempts.note(error),
        }
    }
    Err(attempts.failure(address))
}

fn dial_blocking(address: &Address, options: &Dial) -> Result<BlockingChannel, TransportError> {
    let (host, port) = host_and_port(address)?;
    let mut attempts = Attempts::new(options.limit());
    match resolve_within(attempts.left(), host, port) {
        Some(Ok(resolved)) => attempts.aim(resolved.into_iter()),
        Some(Err(error)) => return Err(unresolved(address, error)),
        None => return Err(attempts.failure(address)),
    }
    while let Some((target, share)) = attempts.next() {
        // The standard library refuses a limit of zero.
        let share = share.max(Duration::from_millis(1));
        let outcome = StdStream::connect_timeout(&target, share);
        let tuned = outcome.and_then(|stream| {
            tuned(&stream)?;
            options.socket_silence.map_or(Ok(()), |silence| limit_silence(&stream, silence))?;
            Ok(stream)
        });
        match tuned {
            Ok(stream) => return Ok(BlockingChannel::new(stream, address.to_string())),
            Err(error) => attempts.note(error),
        }
    }
    Err(attempts.failure(address))
}

async fn bind(address: &Address, options: &Bind) -> Result<Listener, TransportError> {
    let listener = bind_socket(address, options, |target| listen(target, options.backlog)).await?;
    let bound = listener.local_addr().map_err(|error| TransportError::from_io(address.to_string(), error))?;
    Ok(Listener::new(named(address, bound), TcpSource(listener)))
}

/// Binds a socket by means of `bind` to the first address of the host that accepts it. Goes on to
/// the next of the `ports_to_try` only if a port was in use.
pub(crate) async fn bind_socket<S>(
    address: &Address,
    options: &Bind,
    bind: impl Fn(SocketAddr) -> io::Result<S>,
) -> Result<S, TransportError> {
    let (host, port) = host_and_port(address)?;
    let resolved = tokio::net::lookup_host((host, port)).await;
    let targets: Vec<SocketAddr> = resolved.map_err(|error| unresolved(address, error))?.collect();
    let mut failure = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for port in ports_to_try(port, options) {
        let mut in_use = false;
        for mut target in targets.iter().copied() {
            target.set_port(port);
            match bind(target) {
                Ok(socket) => return Ok(socket),
                Err(error) => {
                    in_use |= error.kind() == io::ErrorKind::AddrInUse;
                    failure = error;
                }
            }
        }
        if !in_use {
            break; // What failed has nothing to do with the port.
        }
    }
    Err(match &options.port_range {
        Some(range) if failure.kind() == io::ErrorKind::AddrInUse => TransportError::PortsInUse {
            address: address.to_string(),
            first: *range.start(),
            last: *range.end(),
            source: Arc::new(failure),
        },
        _ => TransportError::from_io(address.to_string(), failure),
    })
}

fn host_and_port(address: &Address) -> Result<(&str, u16), TransportError> {
    check_host_and_port(address)?;
    Ok(address.host_and_port().unwrap_or_default())
}

fn unresolved(address: &Address, error: io::Error) -> TransportError {
    TransportError::Resolve { address: address.to_string(), source: error.into() }
}

/// Addresses of one host, and the time that is left to try them.
struct Attempts {
    limit: Duration,
    deadline: Instant,
    targets: std::vec::IntoIter<SocketAddr>,
    /// Error of the attempts so far: an answer if there was one, else a time-out.
    failure: Option<io::Error>,
}

impl Attempts {
    fn new(limit: Duration) -> Self {
        Self { limit, deadline: Instant::now() + limit, targets: Vec::new().into_iter(), failure: None }
    }

    /// Sets the addresses to try. IPv4 and IPv6 alternate, and the family that the resolver puts
    /// first begins. A family without a route therefore costs a share of the time and not all of
    /// it.
    fn aim(&mut self, resolved: impl Iterator<Item = SocketAddr>) {
        let resolved: Vec<SocketAddr> = resolved.collect();
        let first_is_v6 = resolved.first().is_some_and(SocketAddr::is_ipv6);
        let (first, second): (Vec<_>, Vec<_>) =
            (resolved.iter().copied()).partition(|target| target.is_ipv6() == first_is_v6);
        let mut first = first.into_iter();
        let mut second = second.into_iter();
        let mut targets = Vec::with_capacity(resolved.len());
        while targets.len() < resolved.len() {
            targets.extend(first.next());
            targets.extend(second.next());
        }
        self.targets = targets.into_iter();
        if self.targets.len() == 0 {
            self.failure = Some(io::ErrorKind::AddrNotAvailable.into());
        }
    }

    /// Returns the next address and the time to try it: an equal share of the time that is left.
    fn next(&mut self) -> Option<(SocketAddr, Duration)> {
        let sharers = u32::try_from(self.targets.len()).unwrap_or(u32::MAX);
        let target = self.targets.next()?;
        Some((target, self.left() / sharers))
    }

    fn note(&mut self, error: io::Error) {
        let is_answer = error.kind() != io::ErrorKind::TimedOut;
        if is_answer || self.failure.is_none() {
            self.failure = Some(error);
        }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn failure(self, address: &Address) -> TransportError {
        let address = address.to_string();
        match self.failure {
            Some(error) if error.kind() != io::ErrorKind::TimedOut => TransportError::from_io(address, error),
            _ => TransportError::TimedOut { address, limit: self.limit },
        }
    }
}

/// Resolves a host on a thread of its own, because the system's resolver takes no time limit.
/// Returns `None` once the time is up. The thread then ends when the resolver does.
fn resolve_within(limit: Duration, host: &str, port: u16) -> Option<io::Result<std::vec::IntoIter<SocketAddr>>> {
    // An IP address needs no resolver, and therefore no thread.
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(Ok(vec![SocketAddr::new(ip, port)].into_iter()));
    }
    let (reply, answer) = mpsc::sync_channel(1);
    let host = host.to_owned();
    let resolve = move || {
        let _ = reply.send((host.as_str(), port).to_socket_addrs());
    };
    match thread::Builder::new().name("rpc-resolve".into()).spawn(resolve) {
        Ok(_) => answer.recv_timeout(limit).ok(),
        Err(error) => Some(Err(error)),
    }
}

/// Sets the options of a new stream, and refuses one that is connected to itself.
///
/// A socket that dials a free local port may by chance get the same port as its own. TCP then
/// connects it to itself. The caller gets the error of a port without a listener.
fn tuned(stream: &impl AsFd) -> io::Result<()> {
    let socket = SockRef::from(stream);
    if let (Ok(near), Ok(far)) = (socket.local_addr(), socket.peer_addr())
        && near.as_socket() == far.as_socket()
    {
        return Err(io::ErrorKind::ConnectionRefused.into());
    }
    socket.set_tcp_nodelay(true)?;
    socket.set_keepalive(true)
}

/// Number of unanswered probes after which a silent connection is given up.
const PROBES: u32 = 3;

/// Makes the kernel test the peer's machine at this interval of silence, and give up the connection
/// when it has not answered a few times. A peer that is there may take as long as it likes.
pub(crate) fn probe_silence(stream: &impl AsFd, interval: Duration) -> io::Result<()> {
    // The kernel counts in seconds, and refuses zero.
    let interval = interval.max(Duration::from_secs(1));
    let keep_alive = TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(PROBES);
    SockRef::from(stream).set_tcp_keepalive(&keep_alive)
}

/// Makes the kernel give up the connection once the peer's machine has been silent for so long,
/// whether bytes of this side wait for its acknowledgement or none are on the way.
fn limit_silence(stream: &impl AsFd, silence: Duration) -> io::Result<()> {
    let socket = SockRef::from(stream);
    // The kernel counts in seconds, and refuses zero.
    let interval = (silence / (PROBES + 1)).max(Duration::from_secs(1));
    let keep_alive = TcpKeepalive::new().with_time(interval).with_interval(interval).with_retries(PROBES);
    socket.set_tcp_keepalive(&keep_alive)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(silence))?;
    Ok(())
}

/// Longest time between two probes of the kernel, which counts seconds in 15 bits.
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(9 * 3600);

/// Makes the kernel give up a connection once the peer's machine has been silent for six times the
/// `keep_alive`: it probes after three times as long. For connections whose protocol has no pings.
/// Other sockets than those of TCP stay as they are.
pub(crate) fn probe(socket: BorrowedFd<'_>, keep_alive: Duration) {
    let limited = |interval: Duration| interval.clamp(Duration::from_secs(1), MAX_PROBE_INTERVAL);
    let (time, interval) = (limited(keep_alive.saturating_mul(PROBES)), limited(keep_alive));
    let probes = TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(PROBES);
    // A socket that refuses its options is dying, or none of TCP.
    let _ = SockRef::from(&socket).set_tcp_keepalive(&probes);
}

/// Acknowledges what was read from the socket at once, and leaves the delays of a connection that
/// asks and answers in turn. Other sockets than those of TCP stay as they are.
#[cfg_attr(not(target_os = "linux"), allow(unused_variables, reason = "other systems have no such option"))]
pub(crate) fn acknowledge(socket: BorrowedFd<'_>) {
    // A socket that refuses its options is dying, or none of TCP.
    #[cfg(target_os = "linux")]
    let _ = SockRef::from(&socket).set_tcp_quickack(true);
}

/// Returns the ports to try: the address's own port first, then the range. Port 0 is left out if
/// there is a range.
fn ports_to_try(port: u16, options: &Bind) -> impl Iterator<Item = u16> {
    let range = options.port_range.clone();
    let own = (port != 0 || range.is_none()).then_some(port);
    own.into_iter().chain(range.into_iter().flatten())
}

pub(crate) fn listen(target: SocketAddr, backlog: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(target), Type::STREAM, Some(Protocol::TCP))?;
    // The IPv6 wildcard means every address of this machine, IPv4 too, whatever the system's
    // default.
    if target.is_ipv6() && target.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    // On Unix, `SO_REUSEADDR` lets a restarted server have its port back while old connections
    // linger. On other systems it would let two servers share a port.
    #[cfg(unix)]
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&target.into())?;
    socket.listen(i32::try_from(backlog).unwrap_or(i32::MAX))?;
    TcpListener::from_std(socket.into())
}

/// Returns the address that a listener is bound to, with the scheme and the key of `asked`.
pub(crate) fn named(asked: &Address, bound: SocketAddr) -> Address {
    // The fallback is never used, because an IP address is a valid host.
    let at = asked.clone().with_port(bound.port());
    at.clone().with_host(&host_of(bound)).unwrap_or(at)
}

/// As [`named`], for a listener that shows a certificate: a name that was asked for stays, since
/// the certificate may be for that name alone.
#[cfg(any(feature = "tls", feature = "quic"))]
pub(crate) fn named_as_asked(asked: &Address, bound: SocketAddr) -> Address {
    match asked.host().map(str::parse::<IpAddr>) {
        Some(Err(_)) => asked.clone().with_port(bound.port()),
        _ => named(asked, bound),
    }
}

fn host_of(socket: SocketAddr) -> String {
    Address::from(socket).host().unwrap_or_default().to_owned()
}

/// Returns the peer that an accepted connection comes from.
pub(crate) fn peer_at(scheme: &str, socket: SocketAddr) -> Peer {
    Peer::new(format!("{scheme}://{socket}")).on(Machine::At(socket.ip().to_canonical()))
}

/// Returns the next stream of a listener, and the address that it comes from.
pub(crate) fn poll_stream(listener: &TcpListener, cx: &mut Context<'_>) -> Poll<io::Result<(TcpStream, SocketAddr)>> {
    let (stream, peer) = ready!(listener.poll_accept(cx))?;
    // A stream that refuses its options is dying. Its first read reports the cause better.
    let _ = tuned(&stream);
    Poll::Ready(Ok((stream, SocketAddr::new(peer.ip().to_canonical(), peer.port()))))
}

struct TcpSource(TcpListener);

impl Accept for TcpSource {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let (stream, peer) = ready!(poll_stream(&self.0, cx))?;
        Poll::Ready(Ok(Channel::new(stream, peer_at("tcp", peer))))
    }
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, IoSliceMut, Read, Write};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn listener(host: &str) -> Listener {
        let address = Address::tcp(host, 0).unwrap();
        bind(&address, &Bind::default()).await.unwrap()
    }

    fn with_long_timeout() -> Dial {
        Dial::default()
    }

    fn hasty() -> Dial {
        Dial { connect_timeout: Duration::from_millis(300), ..Dial::default() }
    }

    async fn echo_once(mut listener: Listener) -> Channel {
        let mut channel = listener.accept().await.unwrap();
        let mut buffer = [0; 4];
        channel.io_mut().read_exact(&mut buffer).await.unwrap();
        channel.io_mut().write_all(&buffer).await.unwrap();
        channel
    }

    /// Makes an address without a listener: its port belongs to a socket that is bound and never
    /// listens.
    fn deaf() -> (Socket, Address) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        socket.bind(&any.into()).unwrap();
        let bound = socket.local_addr().unwrap().as_socket().unwrap();
        (socket, bound.into())
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_kernel_is_told_how_long_a_peer_may_be_silent() {
        let listener = listener("127.0.0.1").await;
        let silence = Some(Duration::from_secs(8));
        let options = Dial { socket_silence: silence, ..with_long_timeout() };
        let stream = connect(listener.local_address(), &options).await.unwrap();
        let socket = SockRef::from(&stream);
        assert_eq!(socket.tcp_user_timeout().unwrap(), silence);
        assert_eq!(socket.tcp_keepalive_time().unwrap(), Duration::from_secs(2));
        assert_eq!(socket.tcp_keepalive_interval().unwrap(), Duration::from_secs(2));
    }

    /// A kernel in this state acknowledges the first half of a message after 40 ms, while the
    /// peer's keeps the second half until then.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_connection_that_asks_and_answers_acknowledges_at_once_when_told_to() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (accepted, dialed) = tokio::join!(listener.accept(), TcpStream::connect(address));
        let (mut near, mut far) = (accepted.unwrap().0, dialed.unwrap());
        let delays = |near: &TcpStream| !SockRef::from(near).tcp_quickack().unwrap();
        for _ in 0..100 {
            far.write_all(b"?").await.unwrap();
            near.read_exact(&mut [0]).await.unwrap();
            near.write_all(b"!").await.unwrap();
            far.read_exact(&mut [0]).await.unwrap();
        }
        assert!(delays(&near), "acknowledgements travel with the answers by now");
        acknowledge(near.as_fd());
        assert!(!delays(&near));
    }

    #[tokio::test]
    async fn bytes_cross_and_the_options_are_set_on_both_sides() {
        let listener = listener("127.0.0.1").await;
        let address = listener.local_address().clone();
        assert_ne!(address.port(), Some(0));
        let server = tokio::spawn(echo_once(listener));
        let mut channel = dial(&address, &with_long_timeout()).await.unwrap();
        assert_eq!(channel.peer(), address.to_string());
        channel.io_mut().write_all(b"ping").await.unwrap();
        let mut buffer = [0; 4];
        channel.io_mut().read_exact(&mut buffer).await.unwrap();
        assert_eq!(&buffer, b"ping");
        assert!(server.await.unwrap().peer().starts_with("tcp://127.0.0.1:"));
    }

    #[tokio::test]
    async fn a_blocking_dial_needs_no_runtime_and_writes_and_reads_vectored() {
        let listener = listener("127.0.0.1").await;
        let address = listener.local_address().clone();
        let client = thread::spawn(move || {
            let mut channel = dial_blocking(&address, &with_long_timeout()).unwrap();
            assert!(SockRef::from(&channel).tcp_nodelay().unwrap());
            assert!(SockRef::from(&channel).keepalive().unwrap());
            let slices = [IoSlice::new(b"pi"), IoSlice::new(b"ng")];
            assert_eq!(channel.write_vectored(&slices).unwrap(), 4);
            let (mut left, mut right) = ([0; 1], [0; 8]);
            let mut buffers = [IoSliceMut::new(&mut left), IoSliceMut::new(&mut right)];
            assert_eq!(channel.read_vectored(&mut buffers).unwrap(), 4);
            assert_eq!((&left, &right[..3]), (b"p", &b"ing"[..]));
            channel.set_nonblocking(true).unwrap();
            let kind = channel.read(&mut left).unwrap_err().kind();
            assert_eq!(kind, io::ErrorKind::WouldBlock);
        });
        let _open = echo_once(listener).await;
        tokio::task::spawn_blocking(|| client.join()).await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_port_without_listener_refuses() {
        let (_socket, address) = deaf();
        let error = dial(&address, &with_long_timeout()).await.unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
        let error = dial_blocking(&address, &with_long_timeout()).unwrap_err();
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
    }

    #[tokio::test]
    async fn a_name_that_does_not_exist_is_not_resolved() {
        let address = Address::tcp("does-not-exist.invalid", 1).unwrap();
        for error in [
            dial(&address, &with_long_timeout()).await.unwrap_err(),
            dial_blocking(&address, &with_long_timeout()).unwrap_err(),
        ] {
            // Without any network the resolver may take longer than the limit.
            assert!(matches!(error, TransportError::Resolve { .. } | TransportError::TimedOut { .. }), "{error:?}");
        }
    }

    /// Linux drops the handshake when the queue of unaccepted connections is full.
    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn a_peer_that_never_answers_times_out() {
        let options = Bind { backlog: 1, ..Default::default() };
        let any = Address::tcp("127.0.0.1", 0).unwrap();
        let listener = bind(&any, &options).await.unwrap();
        let address = listener.local_address();
        let mut queued = Vec::new();
        let error = loop {
            match dial(address, &hasty()).await {
                Ok(channel) => queued.push(channel),
                Err(error) => break error,
            }
            assert!(queued.len() < 16, "the queue never fills");
        };
        for error in [error, dial_blocking(address, &hasty()).unwrap_err()] {
            let TransportError::TimedOut { limit, .. } = error else {
                panic!("{error:?}");
            };
            assert_eq!(limit, hasty().connect_timeout);
        }
    }

    #[tokio::test]
    async fn the_ipv6_wildcard_takes_ipv4_too_and_stays_a_wildcard() {
        if std::net::TcpListener::bind("[::1]:0").is_err() {
            return; // This machine has no IPv6.
        }
        let mut listener = listener("::").await;
        let port = listener.local_address().port().unwrap();
        assert_eq!(listener.local_address().to_string(), format!("tcp://[::]:{port}"));
        for host in ["127.0.0.1", "::1"] {
            let address = Address::tcp(host, port).unwrap();
            let _near = dial(&address, &with_long_timeout()).await.unwrap();
            let far = listener.accept().await.unwrap();
            let host = address.with_port(0).to_string();
            let host = host.strip_suffix('0').unwrap();
            assert!(far.peer().starts_with(host), "{} for {host}", far.peer());
        }
    }

    #[tokio::test]
    async fn a_port_in_use_is_an_error_or_moves_on_through_the_range() {
        let first = listener("127.0.0.1").await;
        let taken = first.local_address().port().unwrap();
        let address = first.local_address().clone().with_key("k").unwrap();
        let error = bind(&address, &Bind::default()).await.unwrap_err();
        assert!(matches!(error, TransportError::AddressInUse { .. }), "{error:?}");

        let options = Bind { port_range: Some(taken..=taken.saturating_add(64)), ..Default::default() };
        for asked in [address.clone(), address.with_port(0)] {
            let second = bind(&asked, &options).await.unwrap();
            let port = second.local_address().port().unwrap();
            assert!(port > taken && port - taken <= 64);
            assert_eq!(second.local_address().key(), Some("k"));
        }
    }

    #[tokio::test]
    async fn cancelled_accepts_lose_no_connection() {
        let mut listener = listener("127.0.0.1").await;
        let address = listener.local_address().clone();
        for _ in 0..8 {
            {
                // The future is polled once, so that it waits on the socket, and then dropped.
                let mut accepting = std::pin::pin!(listener.accept());
                let polled = std::future::poll_fn(|cx| Poll::Ready(accepting.as_mut().poll(cx)));
                assert!(polled.await.is_pending());
            }
            let _near = dial(&address, &with_long_timeout()).await.unwrap();
            listener.accept().await.unwrap();
        }
    }

    #[test]
    fn families_alternate_and_share_the_time() {
        let of = |text: &str| text.parse::<SocketAddr>().unwrap();
        let (a6, b6, c6) = (of("[::1]:1"), of("[::2]:1"), of("[::3]:1"));
        let a4 = of("10.0.0.1:1");
        let mut attempts = Attempts::new(Duration::from_secs(40));
        attempts.aim([a6, b6, c6, a4].into_iter());
        let (target, share) = attempts.next().unwrap();
        assert_eq!(target, a6);
        assert!(share <= Duration::from_secs(10) && share > Duration::from_secs(9));
        let rest: Vec<_> = std::iter::from_fn(|| attempts.next()).map(|(target, _)| target).collect();
        assert_eq!(rest, [a4, b6, c6]);
    }

    #[test]
    fn an_answer_explains_more_than_a_time_out() {
        let address = Address::tcp("h", 1).unwrap();
        let mut attempts = Attempts::new(Duration::from_secs(1));
        attempts.note(io::ErrorKind::TimedOut.into());
        attempts.note(io::ErrorKind::ConnectionRefused.into());
        attempts.note(io::ErrorKind::TimedOut.into());
        let error = attempts.failure(&address);
        assert!(matches!(error, TransportError::Refused { .. }), "{error:?}");
    }
}
