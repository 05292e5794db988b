//! Bare TLS and QUIC connections, for comparison with ours.

use std::io;
use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Connection, Endpoint, EndpointConfig, RecvStream, SendStream, TokioRuntime, TransportConfig};
use rpc_server::cli::Failure;
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};

use crate::certificates::Certificates;

fn failed(source: io::Error) -> Failure {
    Failure::local("bare TLS or QUIC failed", source)
}

fn server_config(certificates: &Certificates) -> io::Result<Arc<rustls::ServerConfig>> {
    let chain = CertificateDer::pem_file_iter(certificates.certificate()).map_err(io::Error::other)?;
    let chain = chain.collect::<Result<_, _>>().map_err(io::Error::other)?;
    let key = PrivateKeyDer::from_pem_file(certificates.key()).map_err(io::Error::other)?;
    let builder = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).map_err(io::Error::other)?;
    let mut config = builder.with_no_client_auth().with_single_cert(chain, key).map_err(io::Error::other)?;
    // Connections of our TLS transport are not resumed either.
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn client_config(certificates: &Certificates) -> io::Result<Arc<rustls::ClientConfig>> {
    let mut roots = RootCertStore::empty();
    roots
        .add(CertificateDer::from_pem_file(certificates.authority()).map_err(io::Error::other)?)
        .map_err(io::Error::other)?;
    let builder = rustls::ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_protocol_versions(&[&rustls::version::TLS13]).map_err(io::Error::other)?;
    Ok(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

pub(super) type BareTls = Box<TlsStream<TcpStream>>;

/// Role of one side of a TLS connection.
#[derive(Clone)]
pub(super) enum Tls {
    Server(TlsAcceptor),
    Client(TlsConnector),
}

impl Tls {
    pub(super) fn server(certificates: &Certificates) -> Result<Self, Failure> {
        Ok(Self::Server(TlsAcceptor::from(server_config(certificates).map_err(failed)?)))
    }

    pub(super) fn client(certificates: &Certificates) -> Result<Self, Failure> {
        Ok(Self::Client(TlsConnector::from(client_config(certificates).map_err(failed)?)))
    }

    pub(super) async fn secure(&self, stream: TcpStream) -> io::Result<BareTls> {
        Ok(Box::new(match self {
            Self::Server(acceptor) => TlsStream::Server(acceptor.accept(stream).await?),
            Self::Client(connector) => {
                let name = ServerName::from(std::net::IpAddr::from(Ipv4Addr::LOCALHOST));
                TlsStream::Client(connector.connect(name, stream).await?)
            }
        }))
    }
}

/// Returns a configuration with windows as large as those of our QUIC transport.
fn transport() -> Arc<TransportConfig> {
    const STREAM_WINDOW: u32 = 24 << 20;
    const CONNECTION_WINDOW: u32 = 32 << 20;
    let mut config = TransportConfig::default();
    config.stream_receive_window(STREAM_WINDOW.into());
    config.receive_window(CONNECTION_WINDOW.into());
    config.send_window(CONNECTION_WINDOW.into());
    Arc::new(config)
}

fn udp() -> io::Result<UdpSocket> {
    const SOCKET_BUFFER: usize = 2 << 20;
    let socket = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into())?;
    Ok(socket.into())
}

/// Binds an endpoint for a server on a free port.
pub(super) fn quic_server(certificates: &Certificates) -> Result<Endpoint, Failure> {
    let endpoint = || -> io::Result<Endpoint> {
        let crypto = QuicServerConfig::try_from(server_config(certificates)?).map_err(io::Error::other)?;
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(transport());
        Endpoint::new(EndpointConfig::default(), Some(config), udp()?, Arc::new(TokioRuntime))
    };
    endpoint().map_err(failed)
}

/// Binds an endpoint for any number of client connections.
pub(super) fn quic_client(certificates: &Certificates) -> Result<Endpoint, Failure> {
    let endpoint = || -> io::Result<Endpoint> {
        let crypto = QuicClientConfig::try_from(client_config(certificates)?).map_err(io::Error::other)?;
        let mut config = quinn::ClientConfig::new(Arc::new(crypto));
        config.transport_config(transport());
        let mut endpoint = Endpoint::new(EndpointConfig::default(), None, udp()?, Arc::new(TokioRuntime))?;
        endpoint.set_default_client_config(config);
        Ok(endpoint)
    };
    endpoint().map_err(failed)
}

/// One stream of a connection, and the connection, which stays open with it.
pub(super) struct QuicStream {
    send: SendStream,
    recv: RecvStream,
    connection: Connection,
}

impl QuicStream {
    pub(super) async fn connect(endpoint: &Endpoint, port: u16) -> io::Result<Self> {
        let target = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let connection = endpoint.connect(target, "127.0.0.1").map_err(io::Error::other)?.await?;
        Self::open(&connection).await
    }

    pub(super) async fn open(connection: &Connection) -> io::Result<Self> {
        let (send, recv) = connection.open_bi().await?;
        Ok(Self { send, recv, connection: connection.clone() })
    }

    pub(super) async fn accept(connection: &Connection) -> io::Result<Self> {
        let (send, recv) = connection.accept_bi().await?;
        Ok(Self { send, recv, connection: connection.clone() })
    }

    pub(super) fn connection(&self) -> &Connection {
        &self.connection
    }
}

impl AsyncRead for QuicStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        AsyncRead::poll_read(Pin::new(&mut self.recv), cx, buffer)
    }
}

impl AsyncWrite for QuicStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        AsyncWrite::poll_write(Pin::new(&mut self.send), cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_flush(Pin::new(&mut self.send), cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        AsyncWrite::poll_shutdown(Pin::new(&mut self.send), cx)
    }
}
