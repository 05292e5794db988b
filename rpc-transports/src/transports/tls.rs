//! `tls://` addresses: TLS 1.3 over TCP.

use std::io;
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::address::{Address, AddressError};
use crate::channel::{Channel, ChannelIo, Peer};
use crate::error::TransportError;
use crate::handshake::certificates::{ALPN, BINDING_LABEL, ClientTls, Holder, ServerTls, server_name};
use crate::handshake::identity_proofs::Security;
use crate::listener::{Accept, Listener};
use crate::transport::{Bind, BoxFuture, Dial, Properties, Transport};
use crate::transports::tcp;

/// The transport of `tls://` addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Tls;

impl Transport for Tls {
    fn schemes(&self) -> &[&str] {
        &["tls"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        Ok(Properties::encrypted(tcp::check_host_and_port(at)?))
    }

    fn dial<'a>(&'a self, to: &'a Address, with: &'a Dial) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(dial(to, with))
    }

    fn tunnel_target(&self, to: &Address) -> Option<Address> {
        to.clone().with_scheme("tcp").ok()
    }

    fn dial_over<'a>(
        &'a self,
        to: &'a Address,
        over: Channel,
        with: &'a Dial,
    ) -> BoxFuture<'a, Result<Channel, TransportError>> {
        Box::pin(async move {
            let tls = with.client_tls(to)?;
            let machine = over.machine();
            let (io, _, guard) = over.into_parts();
            let (io, security) = tls.connect(to, ALPN, io, with.limit()).await?;
            let channel = Channel::new(io, Peer::new(to.to_string()).on(machine)).with_security(security);
            Ok(match guard {
                Some(guard) => channel.with_guard(guard),
                None => channel,
            })
        })
    }

    fn bind<'a>(&'a self, at: &'a Address, with: &'a Bind) -> BoxFuture<'a, Result<Listener, TransportError>> {
        Box::pin(bind(at, with))
    }
}

async fn dial(address: &Address, options: &Dial) -> Result<Channel, TransportError> {
    let tls = options.client_tls(address)?;
    let begun = Instant::now();
    let stream = tcp::connect(address, options).await?;
    let peer = tcp::peer_of(address, &stream);
    let left = options.limit().saturating_sub(begun.elapsed());
    let (io, security) = tls.connect(address, ALPN, stream, left).await?;
    Ok(Channel::new(io, peer).with_security(security))
}

impl Dial {
    /// Returns the trust in the server at `to`. It is [`tls`](Self::tls) if that is set. With
    /// tokens alone, any certificate is accepted, because both sides prove that they know a token
    /// for just this connection.
    ///
    /// # Errors
    ///
    /// [`TransportError::Unsupported`] without trust and tokens.
    pub fn client_tls(&self, to: &Address) -> Result<&ClientTls, TransportError> {
        static BY_TOKEN: LazyLock<Option<ClientTls>> = LazyLock::new(|| ClientTls::unverified(None).ok());
        match &self.tls {
            Some(tls) => Ok(tls),
            None if self.tokens.is_empty() => Err(TransportError::unsupported(to, NO_CLIENT_TLS)),
            None => BY_TOKEN.as_ref().ok_or_else(|| TransportError::unsupported(to, NO_CLIENT_TLS)),
        }
    }
}

impl ClientTls {
    /// Encrypts a stream of bytes that leads to `to`, by the client's part of a TLS handshake. Both
    /// sides must want to speak `protocol` (ALPN). The certificate must be for the host of `to`.
    ///
    /// The [`Security`] that comes with the encrypted stream belongs to the [`Channel`] over it.
    ///
    /// # Errors
    ///
    /// [`TransportError::TimedOut`] after `limit`. [`TransportError::Insecure`] and
    /// [`TransportError::Unauthenticated`], which hint at the cause. [`TransportError::Closed`] if
    /// the connection breaks.
    pub async fn connect(
        &self,
        to: &Address,
        protocol: &[u8],
        io: impl ChannelIo + 'static,
        limit: Duration,
    ) -> Result<(Box<dyn ChannelIo>, Security), TransportError> {
        let name = server_name(to).map_err(|error| insecure(to, io::Error::other(error)))?;
        let mut config = self.config().clone();
        if protocol != ALPN {
            Arc::make_mut(&mut config).alpn_protocols = vec![protocol.to_vec()];
        }
        let connecting = TlsConnector::from(config).connect(name, io);
        let stream = match tokio::time::timeout(limit, connecting).await {
            Ok(outcome) => outcome.map_err(|error| insecure(to, error))?,
            Err(_) => return Err(TransportError::TimedOut { address: to.to_string(), limit }),
        };
        let binding = stream.get_ref().1.export_keying_material([0; 32], BINDING_LABEL, None);
        let security = Security {
            binding: Some(binding.map_err(|error| insecure(to, io::Error::other(error)))?),
            server_verified: self.verifies(),
            showed_certificate: self.shows_certificate(),
            ..Security::default()
        };
        Ok((Box::new(stream), security))
    }
}

impl ServerTls {
    /// Encrypts a stream of bytes from a client, by the server's part of a TLS handshake. The
    /// client has to name `protocol` (ALPN). The call belongs into [`Channel::upgrading`], so that
    /// a slow client holds up no other.
    ///
    /// The [`Security`] that comes with the encrypted stream belongs to the [`Channel`] over it.
    ///
    /// # Errors
    ///
    /// Errors of TLS: [`InvalidData`](io::ErrorKind::InvalidData) if either side objects to
    /// something. The client has been told.
    pub async fn accept(
        &self,
        protocol: &[u8],
        io: impl ChannelIo + 'static,
    ) -> io::Result<(Box<dyn ChannelIo>, Security)> {
        let mut config = self.config();
        if protocol != ALPN {
            Arc::make_mut(&mut config).alpn_protocols = vec![protocol.to_vec()];
        }
        let stream = match TlsAcceptor::from(config).accept(io).into_fallible().await {
            Ok(stream) => stream,
            Err((error, stream)) => {
                let _ = tokio::time::timeout(LINGER, drain(stream)).await;
                return Err(error);
            }
        };
        let connection = stream.get_ref().1;
        if connection.alpn_protocol() != Some(protocol) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the client speaks TLS for something else (ALPN)"));
        }
        let binding = connection.export_keying_material([0; 32], BINDING_LABEL, None).map_err(io::Error::other)?;
        let shown = connection.peer_certificates().and_then(<[_]>::first);
        let Holder { name, keys } = Holder::of(shown)?;
        let security = Security { binding: Some(binding), certificate: name, keys, ..Security::default() };
        Ok((Box::new(stream), security))
    }
}

const NO_CLIENT_TLS: &str = "need to know whom to trust: give the certificate of an \
     authority, or a token (Connector::tls or Connector::tokens; \
     --ca or --token-file)";

pub(crate) const NO_SERVER_TLS: &str = "need a certificate to show; make one with: rpc-cli cert";

/// Makes the error of a failed TLS or QUIC handshake, with a hint at the usual causes.
pub(crate) fn insecure(address: &Address, source: io::Error) -> TransportError {
    if matches!(source.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) {
        // The link broke, which says nothing about the encryption.
        return TransportError::from_io(address.to_string(), source);
    }
    if let Some(problem) = problem_of_the_peer(&source) {
        return TransportError::Unauthenticated { address: address.to_string(), problem, source: Arc::new(source) };
    }
    let text = source.to_string();
    let hint = if text.contains("UnknownIssuer") || text.contains("BadSignature") {
        "its certificate is not by the authority that was given; give the certificate of its own (--ca)"
    } else if text.contains("NotValidForName") || text.contains("not valid for name") {
        "its certificate is for another name; use one that it has, or make one for this name: rpc-cli cert --host"
    } else if text.contains("Expired") || text.contains("expired") {
        "its certificate has expired; renew it with: rpc-cli cert"
    } else if text.contains("InvalidContentType")
        || text.contains("corrupt")
        || text.contains("end of file")
        || text.contains("eof")
    {
        "does it speak TLS at all? The address of a server without TLS begins with tcp://"
    } else {
        "are the certificates of both sides right?"
    };
    TransportError::Insecure { address: address.to_string(), source: Arc::new(source), hint }
}

/// Returns the server's objection to the client's certificate, as an error of the session that did
/// not come about. The server looks at the certificate only after the client's own part of the
/// handshake is over. The client learns of the objection at its next operation on the connection:
/// over TCP always once the channel is there, over QUIC sometimes before.
pub(crate) fn objection(error: &io::Error) -> Option<RpcError> {
    let problem = problem_of_the_peer(error)?;
    Some(RpcError::new(ErrorKind::Unauthenticated, format!("the server refused the connection: {problem}")))
}

/// Returns the server's objection to the client's certificate.
fn problem_of_the_peer(error: &io::Error) -> Option<&'static str> {
    // The numbers are those of RFC 8446.
    match alert(error)? {
        116 => Some("it wants a certificate (--cert, --cert-key)"),
        45 => Some("the client's certificate has expired; renew it with: rpc-cli cert"),
        48 | 51 => Some("the client's certificate is not by an authority that it trusts"),
        42..=44 | 46 | 49 => Some("it does not take the client's certificate"),
        _ => None,
    }
}

/// Returns the number of the TLS alert that ended a connection.
fn alert(error: &io::Error) -> Option<u8> {
    let cause = error.get_ref()?;
    if let Some(rustls::Error::AlertReceived(alert)) = cause.downcast_ref() {
        return Some(u8::from(*alert));
    }
    #[cfg(feature = "quic")]
    if let Some(quinn::ConnectionError::ConnectionClosed(close)) = lost_connection(error) {
        // RFC 9001: the alert is the lower byte of the code.
        let code = u64::from(close.error_code).checked_sub(0x100)?;
        return u8::try_from(code).ok();
    }
    None
}

/// Returns the cause for which the QUIC connection is gone, from the error of any operation.
#[cfg(feature = "quic")]
fn lost_connection(error: &io::Error) -> Option<&quinn::ConnectionError> {
    let cause = error.get_ref()?;
    if let Some(quinn::ReadError::ConnectionLost(error)) = cause.downcast_ref() {
        return Some(error);
    }
    if let Some(quinn::WriteError::ConnectionLost(error)) = cause.downcast_ref() {
        return Some(error);
    }
    cause.downcast_ref()
}

async fn bind(address: &Address, options: &Bind) -> Result<Listener, TransportError> {
    let Some(tls) = options.tls.clone() else { return Err(TransportError::unsupported(address, NO_SERVER_TLS)) };
    let listener = tcp::bind_socket(address, options, |target| tcp::listen(target, options.backlog)).await?;
    let bound = listener.local_addr().map_err(|error| TransportError::from_io(address.to_string(), error))?;
    Ok(Listener::new(tcp::named_as_asked(address, bound), TlsSource { listener, tls }))
}

struct TlsSource {
    listener: TcpListener,
    tls: ServerTls,
}

impl Accept for TlsSource {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let (stream, peer) = ready!(tcp::poll_stream(&self.listener, cx))?;
        let (tls, peer) = (self.tls.clone(), tcp::peer_at("tls", peer));
        let named = peer.clone();
        let upgrade = async move {
            let (io, security) = tls.accept(ALPN, stream).await?;
            Ok(Channel::new(io, named).with_security(security))
        };
        Poll::Ready(Ok(Channel::upgrading(upgrade, peer)))
    }
}

/// Time that a client may take to read the server's TLS alert.
const LINGER: Duration = Duration::from_secs(1);

/// Lets a client read the alert. If a connection is closed while input waits to be read, it is
/// reset and the alert is lost.
async fn drain(mut stream: impl ChannelIo) -> io::Result<()> {
    stream.shutdown().await?;
    let mut scrap = [0; 4096];
    while stream.read(&mut scrap).await? > 0 {}
    Ok(())
}
