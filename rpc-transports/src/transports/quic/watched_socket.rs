//! Socket of a client's connection that learns from the system that the peer's port is closed. Only
//! Linux reports that for sockets with several peers, which those of QUIC are.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use nix::libc;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt};
use quinn::udp::{RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncUdpSocket, UdpPoller};
use tokio::io::Interest;

use super::closed_port::{PeerPort, QUOTED};

/// Number of reports that are taken from the system before others get a turn. Anybody can send
/// messages, faster than they are taken.
const REPORTS_AT_ONCE: usize = 64;

/// Number of times that a packet is offered to the system. For each report that comes in, it
/// refuses one packet with the error of the report, and sends nothing.
const ATTEMPTS: usize = 4;

/// Time to wait for room in the socket's buffer where the system does not tell of it.
const ROOM_PAUSE: Duration = Duration::from_millis(1);

/// Socket of a client that has one peer.
#[derive(Debug)]
pub(super) struct WatchedSocket {
    io: tokio::net::UdpSocket,
    state: UdpSocketState,
    peer: SocketAddr,
    port: Arc<PeerPort>,
    /// True if the last packet found no room in the socket's buffer.
    is_blocked: AtomicBool,
}

impl WatchedSocket {
    /// Creates a socket that [reports](report_errors) errors. Needs a tokio runtime.
    pub(super) fn new(socket: UdpSocket, peer: SocketAddr, port: Arc<PeerPort>) -> io::Result<Arc<Self>> {
        let state = UdpSocketState::new((&socket).into())?;
        let io = tokio::net::UdpSocket::from_std(socket)?;
        Ok(Arc::new(Self { io, state, peer, port, is_blocked: AtomicBool::new(false) }))
    }

    /// Watches the port. Resolves when it is closed.
    pub(super) async fn closed(&self) {
        while !self.port.is_closed() {
            tokio::select! {
                // First, so that no number of reports keeps the probe from being sent.
                biased;
                () = tokio::time::sleep(self.port.pause(Instant::now())) => {
                    if let Some(probe) = self.port.probe(Instant::now()) {
                        // The next one may be sent.
                        let _ = self.send(&self.packet(&probe));
                    }
                }
                // An error of the socket itself ends the connection in other ways.
                ready = self.io.ready(Interest::ERROR) => match ready {
                    Ok(_) => {
                        let _ = self.io.try_io(Interest::ERROR, || self.take_reports());
                        tokio::task::yield_now().await;
                    }
                    Err(_) => return std::future::pending().await,
                }
            }
        }
    }

    /// Takes messages from the socket's error queue. Returns the error at its end, if it is
    /// reached.
    fn take_reports(&self) -> io::Result<()> {
        for _ in 0..REPORTS_AT_ONCE {
            let mut quoted = [0; 2 * QUOTED];
            let mut slices = [IoSliceMut::new(&mut quoted)];
            // The last type is room for what else the socket is told with each packet.
            let mut space = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6, [u8; 256]);
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            let message = recvmsg::<SockaddrStorage>(self.io.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
            let is_refusal = message.cmsgs()?.any(|control| is_refusal_by(self.peer.ip(), &control));
            // The address is the one that the quoted packet was sent to.
            let to = message.address.as_ref().and_then(socket_address);
            let length = message.bytes;
            if is_refusal && to.is_some_and(|to| (to.ip(), to.port()) == (self.peer.ip(), self.peer.port())) {
                self.port.reported(&quoted[..length]);
            }
        }
        Ok(())
    }

    /// Returns a packet for the peer.
    fn packet<'a>(&self, contents: &'a [u8]) -> Transmit<'a> {
        Transmit { destination: self.peer, ecn: None, contents, segment_size: None, src_ip: None }
    }

    fn send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.io.try_io(Interest::WRITABLE, || send_despite_reports(|| self.state.try_send((&self.io).into(), transmit)))
    }
}

/// Makes the system report errors of the packets that `socket` sends to `peer`. Some systems and
/// sandboxes cannot.
pub(super) fn report_errors(socket: &UdpSocket, peer: SocketAddr) -> io::Result<()> {
    match peer {
        SocketAddr::V4(_) => setsockopt(socket, sockopt::Ipv4RecvErr, &true)?,
        SocketAddr::V6(_) => setsockopt(socket, sockopt::Ipv6RecvErr, &true)?,
    }
    Ok(())
}

/// Returns true if this is a message of the machine `peer` that its port is closed. Those of
/// routers and firewalls in between tell nothing about its programs.
fn is_refusal_by(peer: IpAddr, control: &ControlMessageOwned) -> bool {
    let (error, origin, sender) = match control {
        ControlMessageOwned::Ipv4RecvErr(error, sender) => {
            let sender = sender.map(|sender| IpAddr::V4(Ipv4Addr::from_bits(u32::from_be(sender.sin_addr.s_addr))));
            (error, libc::SO_EE_ORIGIN_ICMP, sender)
        }
        ControlMessageOwned::Ipv6RecvErr(error, sender) => {
            let sender = sender.map(|sender| IpAddr::V6(sender.sin6_addr.s6_addr.into()));
            (error, libc::SO_EE_ORIGIN_ICMP6, sender)
        }
        _ => return false,
    };
    let is_refusal = error.ee_origin == origin && i32::try_from(error.ee_errno) == Ok(libc::ECONNREFUSED);
    is_refusal && sender == Some(peer)
}

/// Sends a packet by the function `send`, again if it fails by the report of an earlier packet.
/// Fails only if there is no room in the socket's buffer.
fn send_despite_reports(mut send: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..ATTEMPTS {
        match send() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(error),
            // The packet is too large, or the network card cannot split it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMSGSIZE | libc::EIO | libc::EINVAL)) => break,
            Err(_) => {}
            Ok(()) => break,
        }
    }
    // Packets may be lost, and are sent again.
    Ok(())
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

impl AsyncUdpSocket for WatchedSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(RoomPoller { socket: self, waiting: None })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        // Of several packets that are sent at once the first one is enough.
        self.port.sent(Instant::now(), transmit.contents);
        let sent = self.send(transmit);
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            self.is_blocked.store(true, Ordering::Relaxed);
        }
        sent
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.io.poll_recv_ready(cx))?;
            let received = self.io.try_io(Interest::READABLE, || self.state.recv((&self.io).into(), buffers, meta));
            // Errors are reports of packets that were sent. The next call gives what was received.
            if let Ok(count) = received {
                if meta[..count].iter().any(|meta| meta.addr == self.peer) {
                    self.port.received(Instant::now());
                }
                return Poll::Ready(Ok(count));
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.state.gro_segments()
    }
}

type Waiting = Pin<Box<dyn Future<Output = io::Result<()>> + Send + Sync>>;

/// Poller of a socket for room in its buffer.
struct RoomPoller {
    socket: Arc<WatchedSocket>,
    waiting: Option<Waiting>,
}

impl UdpPoller for RoomPoller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Self { socket, waiting } = &mut *self;
        let room = waiting.get_or_insert_with(|| {
            let socket = socket.clone();
            Box::pin(async move {
                let ready = socket.io.ready(Interest::WRITABLE).await?;
                // After an error the runtime takes the socket for one that is always ready.
                if ready.is_write_closed() && socket.is_blocked.swap(false, Ordering::Relaxed) {
                    tokio::time::sleep(ROOM_PAUSE).await;
                }
                Ok(())
            })
        });
        let outcome = ready!(room.as_mut().poll(cx));
        *waiting = None;
        Poll::Ready(outcome)
    }
}

impl fmt::Debug for RoomPoller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RoomPoller").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(origin: u8, errno: i32) -> libc::sock_extended_err {
        let ee_errno = errno.unsigned_abs();
        libc::sock_extended_err {
            ee_errno,
            ee_origin: origin,
            ee_type: 3,
            ee_code: 3,
            ee_pad: 0,
            ee_info: 0,
            ee_data: 0,
        }
    }

    fn v4(sender: Ipv4Addr, origin: u8, errno: i32) -> ControlMessageOwned {
        let sender = nix::sys::socket::SockaddrIn::from(std::net::SocketAddrV4::new(sender, 0));
        ControlMessageOwned::Ipv4RecvErr(report(origin, errno), Some(*sender.as_ref()))
    }

    /// A regression: a firewall on the way that began to refuse packets ended live connections.
    #[test]
    fn only_the_machine_itself_tells_that_its_port_is_closed() {
        let [peer, router] = [Ipv4Addr::new(192, 0, 2, 7), Ipv4Addr::new(192, 0, 2, 1)];
        let is_refusal = |control: &ControlMessageOwned| is_refusal_by(peer.into(), control);
        assert!(is_refusal(&v4(peer, libc::SO_EE_ORIGIN_ICMP, libc::ECONNREFUSED)));
        assert!(!is_refusal(&v4(router, libc::SO_EE_ORIGIN_ICMP, libc::ECONNREFUSED)));
        assert!(!is_refusal(&v4(peer, libc::SO_EE_ORIGIN_ICMP, libc::EHOSTUNREACH)));
        assert!(!is_refusal(&v4(peer, libc::SO_EE_ORIGIN_LOCAL, libc::ECONNREFUSED)));
        let unsigned = ControlMessageOwned::Ipv4RecvErr(report(libc::SO_EE_ORIGIN_ICMP, libc::ECONNREFUSED), None);
        assert!(!is_refusal(&unsigned));
        let v6: [std::net::Ipv6Addr; 2] = ["2001:db8::7", "2001:db8::1"].map(|address| address.parse().unwrap());
        for sender in v6 {
            let address = nix::sys::socket::SockaddrIn6::from(std::net::SocketAddrV6::new(sender, 0, 0, 0));
            let report = report(libc::SO_EE_ORIGIN_ICMP6, libc::ECONNREFUSED);
            let control = ControlMessageOwned::Ipv6RecvErr(report, Some(*address.as_ref()));
            assert_eq!(is_refusal_by(v6[0].into(), &control), sender == v6[0]);
        }
    }

    /// A regression: packets were lost whenever anybody sent a message for the socket.
    #[test]
    fn a_packet_is_sent_despite_reports() {
        let attempts = |errors: &[i32]| {
            let mut made = 0;
            let outcome = send_despite_reports(|| {
                made += 1;
                errors.get(made - 1).map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(*errno)))
            });
            (outcome.map_err(|error| error.raw_os_error()), made)
        };
        assert_eq!(attempts(&[]), (Ok(()), 1));
        assert_eq!(attempts(&[libc::EHOSTUNREACH]), (Ok(()), 2));
        assert_eq!(attempts(&[libc::ECONNREFUSED, libc::EHOSTUNREACH, libc::ECONNREFUSED]), (Ok(()), 4));
        assert_eq!(attempts(&[libc::ENETUNREACH; 10]), (Ok(()), ATTEMPTS));
        assert_eq!(attempts(&[libc::ECONNREFUSED, libc::EAGAIN]), (Err(Some(libc::EAGAIN)), 2));
        for of_the_packet in [libc::EMSGSIZE, libc::EIO, libc::EINVAL] {
            assert_eq!(attempts(&[of_the_packet]), (Ok(()), 1));
        }
    }

    #[tokio::test]
    async fn reports_are_taken_in_rounds() {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.set_nonblocking(true).unwrap();
        // Nothing listens there once the other socket is gone.
        let closed = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        report_errors(&socket, closed).unwrap();
        let watched = WatchedSocket::new(socket, closed, Arc::new(PeerPort::new(Instant::now()))).unwrap();
        watched.io.writable().await.unwrap();
        for number in 0..=u8::try_from(REPORTS_AT_ONCE).unwrap() {
            watched.send(&watched.packet(&[number; 2 * QUOTED])).unwrap();
        }
        watched.take_reports().unwrap();
        assert_eq!(watched.take_reports().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
