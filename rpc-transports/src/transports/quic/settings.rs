//! Settings of QUIC that clients and servers share: windows, timeouts, sockets, channel bindings.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use quinn::{IdleTimeout, TransportConfig, VarInt};
use socket2::{Domain, Protocol, Socket, Type};

use crate::handshake::certificates::BINDING_LABEL;

/// Number of bytes that one channel may have in flight. It is enough for a copy at 1 GB/s with a
/// round trip of 25 ms, or at 1 Gbit/s with 200 ms.
const STREAM_WINDOW: u32 = 24 << 20;

/// Number of bytes that all channels of a connection together may have in flight. It bounds what a
/// peer can make this side hold before it is read, whatever the window of a channel is.
pub(super) const CONNECTION_WINDOW: u32 = 32 << 20;

/// Returns the idle timeout of a connection whose sessions test their channels at the interval
/// `keep_alive`. It is twice as long as the sessions wait, so that the sessions notice silence
/// first and report it. By default it is 30 s.
pub(super) fn idle_for(keep_alive: Duration) -> Duration {
    keep_alive.saturating_mul(6)
}

pub(super) fn transport(idle: Duration) -> TransportConfig {
    let mut config = TransportConfig::default();
    // QUIC sends no pings of its own. The pings of sessions keep a connection alive as long as the
    // sessions last.
    let longest = IdleTimeout::from(VarInt::MAX);
    config.max_idle_timeout(Some(IdleTimeout::try_from(idle).unwrap_or(longest)));
    config.stream_receive_window(STREAM_WINDOW.into());
    config.receive_window(CONNECTION_WINDOW.into());
    config.send_window(CONNECTION_WINDOW.into());
    // Only clients open channels. A server raises this limit for its connections.
    config.max_concurrent_bidi_streams(VarInt::from_u32(0));
    config.max_concurrent_uni_streams(VarInt::from_u32(0));
    config.datagram_receive_buffer_size(None);
    config
}

/// Size of the socket's buffers, in bytes. With the system's default, packets are lost as soon as
/// the receiver is late.
const SOCKET_BUFFER: usize = 2 << 20;

pub(super) fn udp(target: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(target), Type::DGRAM, Some(Protocol::UDP))?;
    if target.is_ipv6() && target.ip().is_unspecified() {
        socket.set_only_v6(false)?;
    }
    socket.set_nonblocking(true)?;
    // The system may allow less than this size.
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.bind(&target.into())?;
    Ok(socket.into())
}

pub(super) fn binding(connection: &quinn::Connection) -> io::Result<[u8; 32]> {
    let mut binding = [0; 32];
    connection
        .export_keying_material(&mut binding, BINDING_LABEL, b"")
        .map_err(|_| io::Error::other("the connection yields no keying material"))?;
    Ok(binding)
}
