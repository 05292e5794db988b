//! Socket of a client's connection that learns from the system that the peer's port is closed. Only
//! Linux reports that for sockets with several peers, which those of QUIC are.

use std::fmt;
use std::future::Future;
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
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
    /// Makes the system report errors of packets to `peer`. Needs a tokio runtime.
    pub(super) fn new(socket: UdpSocket, peer: SocketAddr, port: Arc<PeerPort>) -> io::Result<Arc<Self>> {
        match peer {
            SocketAddr::V4(_) => setsockopt(&socket, sockopt::Ipv4RecvErr, &true)?,
            SocketAddr::V6(_) => setsockopt(&socket, sockopt::Ipv6RecvErr, &true)?,
        }
        let state = UdpSocketState::new((&socket).into())?;
        let io = tokio::net::UdpSocket::from_std(socket)?;
        Ok(Arc::new(Self { io, state, peer, port, is_blocked: AtomicBool::new(false) }))
    }

    /// Watches the port. Resolves when it is closed. While `is_used`, packets are sent to a peer
    /// that is silent: the system learns of a closed port only by what is sent there.
    pub(super) async fn closed(&self, is_used: impl Fn() -> bool) {
        while !self.port.is_closed() {
            tokio::select! {
                // An error of the socket itself ends the connection in other ways.
                ready = self.io.ready(Interest::ERROR) => match ready {
                    Ok(_) => _ = self.io.try_io(Interest::ERROR, || self.take_reports()),
                    Err(_) => return std::future::pending().await,
                },
                () = tokio::time::sleep(self.port.pause()) => {
                    let now = Instant::now();
                    if is_used() && let Some(probe) = self.port.probe(now) {
                        self.port.sent(now, &probe);
                        // The next one may be sent.
                        let _ = self.io.try_send_to(&probe, self.peer);
                    }
                }
            }
        }
    }

    /// Takes all messages from the socket's error queue. Returns the error at its end.
    fn take_reports(&self) -> io::Result<()> {
        // The queue is finite, and grows only by what this socket sends.
        loop {
            let mut quoted = [0; 2 * QUOTED];
            let mut slices = [IoSliceMut::new(&mut quoted)];
            // The last type is room for what else the socket is told with each packet.
            let mut space = nix::cmsg_space!(libc::sock_extended_err, libc::sockaddr_in6, [u8; 256]);
            let flags = MsgFlags::MSG_ERRQUEUE | MsgFlags::MSG_DONTWAIT;
            let message = recvmsg::<SockaddrStorage>(self.io.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
            let is_refusal = message.cmsgs()?.any(|control| match control {
                ControlMessageOwned::Ipv4RecvErr(error, _) | ControlMessageOwned::Ipv6RecvErr(error, _) => {
                    let by_icmp = [libc::SO_EE_ORIGIN_ICMP, libc::SO_EE_ORIGIN_ICMP6].contains(&error.ee_origin);
                    by_icmp && i32::try_from(error.ee_errno) == Ok(libc::ECONNREFUSED)
                }
                _ => false,
            });
            // The address is the one that the quoted packet was sent to.
            let to = message.address.as_ref().and_then(socket_address);
            let length = message.bytes;
            if is_refusal && to.is_some_and(|to| (to.ip(), to.port()) == (self.peer.ip(), self.peer.port())) {
                self.port.reported(&quoted[..length]);
            }
        }
    }
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
        let sent = self.io.try_io(Interest::WRITABLE, || {
            match self.state.try_send((&self.io).into(), transmit) {
                // The report of an earlier packet, by which the system has not sent this one.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    self.state.send((&self.io).into(), transmit)
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(error),
                // Packets may be lost, and are sent again.
                _ => Ok(()),
            }
        });
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
