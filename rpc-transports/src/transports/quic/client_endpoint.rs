//! Endpoint of a client, which learns that the port of its server is closed.

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::time::Instant;

use quinn::{Endpoint, EndpointConfig, TokioRuntime, VarInt};

use super::closed_port::PeerPort;
#[cfg(target_os = "linux")]
use super::watched_socket::{WatchedSocket, report_errors};

/// Code of a connection whose peer has a closed port, and so does not learn it.
const PORT_CLOSED: VarInt = VarInt::from_u32(3);

/// Endpoint of a client, for one connection.
pub(super) struct ClientEndpoint {
    pub(super) endpoint: Endpoint,
    /// Port of the server, where the system tells that one is closed.
    pub(super) port: Option<Arc<PeerPort>>,
    /// Socket of the endpoint, if the port is watched.
    #[cfg(target_os = "linux")]
    socket: Option<Arc<WatchedSocket>>,
}

impl ClientEndpoint {
    #[cfg(target_os = "linux")]
    pub(super) fn new(socket: UdpSocket, server: SocketAddr) -> io::Result<Self> {
        let (config, runtime) = (EndpointConfig::default(), Arc::new(TokioRuntime));
        if let Err(error) = report_errors(&socket, server) {
            // A server that is gone is found by its silence.
            tracing::debug!(%error, %server, "the system does not tell of closed ports");
            let endpoint = Endpoint::new(config, None, socket, runtime)?;
            return Ok(Self { endpoint, port: None, socket: None });
        }
        let port = Arc::new(PeerPort::new(Instant::now()));
        let socket = WatchedSocket::new(socket, server, port.clone())?;
        let endpoint = Endpoint::new_with_abstract_socket(config, None, socket.clone(), runtime)?;
        Ok(Self { endpoint, port: Some(port), socket: Some(socket) })
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn new(socket: UdpSocket, _: SocketAddr) -> io::Result<Self> {
        let endpoint = Endpoint::new(EndpointConfig::default(), None, socket, Arc::new(TokioRuntime))?;
        Ok(Self { endpoint, port: None })
    }

    /// Closes the connection once its server's port is closed. Returns when it has ended. While
    /// channels wait for a server that is silent, it is sent packets that it drops.
    pub(super) async fn watch(self, connection: quinn::Connection) {
        tokio::select! {
            _ = connection.closed() => {}
            () = self.port_closed() => connection.close(PORT_CLOSED, b""),
        }
    }

    /// Resolves once the server's port is closed.
    pub(super) async fn port_closed(&self) {
        #[cfg(target_os = "linux")]
        if let Some(socket) = &self.socket {
            return socket.closed().await;
        }
        std::future::pending().await
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

    use super::*;
    use crate::transports::quic::settings::udp;

    /// A regression: where the system could not report closed ports, no connection could be made.
    #[tokio::test]
    async fn a_system_that_does_not_tell_of_closed_ports_is_enough() {
        let any = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);
        let watched = ClientEndpoint::new(udp(any).unwrap(), any).unwrap();
        assert!(watched.port.is_some() && watched.socket.is_some());
        // The option for IPv6 is refused for a socket of IPv4.
        let server = SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 1);
        let plain = ClientEndpoint::new(udp(any).unwrap(), server).unwrap();
        assert!(plain.port.is_none() && plain.socket.is_none());
    }
}
