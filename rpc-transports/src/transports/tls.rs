//! `tls://` addresses: TLS 1.3 over TCP.

use std::io;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::address::Address;
use crate::channel::{Channel, ChannelIo};
use crate::error::TransportError;
use crate::handshake::certificates::{ALPN, BINDING_LABEL, ClientTls, ServerTls, keys_of, name_of, server_name};
use crate::handshake::identity::Security;
use crate::listener::{Accept, Listener};
use crate::transport::{DialOptions, ListenOptions};
use crate::transports::tcp;

pub(crate) async fn dial(address: &Address, options: &DialOptions) -> Result<Channel, TransportError> {
    let Some(tls) = &options.tls else { return Err(TransportError::unsupported(address, NO_CLIENT_TLS)) };
    let begun = Instant::now();
    let stream = tcp::connect(address, options).await?;
    let left = options.limit().saturating_sub(begun.elapsed());
    secure_dialled(address, options, tls, stream, left).await
}

/// TLS over a channel that leads to `address` by way of others.
pub(crate) async fn dial_through(
    address: &Address,
    options: &DialOptions,
    channel: Channel,
) -> Result<Channel, TransportError> {
    let Some(tls) = &options.tls else { return Err(TransportError::unsupported(address, NO_CLIENT_TLS)) };
    let (io, _, guard) = channel.into_parts();
    let channel = secure_dialled(address, options, tls, io, options.limit()).await?;
    Ok(match guard {
        Some(guard) => channel.with_guard(guard),
        None => channel,
    })
}

async fn secure_dialled(
    address: &Address,
    options: &DialOptions,
    tls: &ClientTls,
    stream: impl ChannelIo + 'static,
    limit: Duration,
) -> Result<Channel, TransportError> {
    let name = server_name(address).map_err(|error| insecure(address, io::Error::other(error)))?;
    let connecting = TlsConnector::from(tls.config().clone()).connect(name, stream);
    let stream = match tokio::time::timeout(limit, connecting).await {
        Ok(outcome) => outcome.map_err(|error| insecure(address, error))?,
        Err(_) => return Err(TransportError::TimedOut { address: address.to_string(), limit: options.limit() }),
    };
    let mut security = Security {
        server_verified: tls.verifies(),
        showed_certificate: tls.shows_certificate(),
        ..Security::default()
    };
    let binding = stream.get_ref().1.export_keying_material([0; 32], BINDING_LABEL, None);
    security.binding = Some(binding.map_err(|error| insecure(address, io::Error::other(error)))?);
    Ok(Channel::new(stream, address.to_string()).with_security(security))
}

pub(crate) const NO_CLIENT_TLS: &str =
    "need to know whom to trust: give the certificate of an authority (--ca), or a token (--token-file)";

pub(crate) const NO_SERVER_TLS: &str = "need a certificate to show; make one with: rpc-cli cert";

/// What went wrong with the encryption, with a hint for the usual reasons.
pub(crate) fn insecure(address: &Address, source: io::Error) -> TransportError {
    if matches!(source.kind(), io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe) {
        // The link broke, and nobody has said anything about the encryption.
        return TransportError::from_io(address.to_string(), source);
    }
    if let Some(problem) = problem_of_the_peer(&source) {
        return TransportError::Unauthenticated { address: address.to_string(), problem, source: Arc::new(source) };
    }
    let text = source.to_string();
    let hint = if text.contains("UnknownIssuer") || text.contains("BadSignature") {
        "its certificate is not by the authority that was given"
    } else if text.contains("NotValidForName") || text.contains("not valid for name") {
        "its certificate is for another name"
    } else if text.contains("Expired") || text.contains("expired") {
        "its certificate has expired; renew it with: rpc-cli cert"
    } else if text.contains("InvalidContentType")
        || text.contains("corrupt")
        || text.contains("end of file")
        || text.contains("eof")
    {
        "does it speak TLS at all?"
    } else {
        "are the certificates of both sides right?"
    };
    TransportError::Insecure { address: address.to_string(), source: Arc::new(source), hint }
}

/// What the server has against the client's certificate, as an error of the session that there is not. The client's own part
/// of the handshake is over by the time at which the server looks at it: a client hears of it whenever it next asks something of
/// the connection, over TCP always once the channel is there, over QUIC also before.
pub(crate) fn objection(error: &io::Error) -> Option<RpcError> {
    let problem = problem_of_the_peer(error)?;
    Some(RpcError::new(ErrorKind::Unauthenticated, format!("the server refused the connection: {problem}")))
}

/// What the server has against the client's certificate.
fn problem_of_the_peer(error: &io::Error) -> Option<&'static str> {
    // By their numbers in RFC 8446.
    match alert(error)? {
        116 => Some("it wants a certificate (--cert, --cert-key)"),
        45 => Some("the client's certificate has expired; renew it with: rpc-cli cert"),
        48 | 51 => Some("the client's certificate is not by an authority that it trusts"),
        42..=44 | 46 | 49 => Some("it does not take the client's certificate"),
        _ => None,
    }
}

/// The number of the TLS alert that ended a connection.
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

/// Why the QUIC connection is gone, whichever operation met it.
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

pub(crate) async fn bind(address: &Address, options: &ListenOptions) -> Result<Listener, TransportError> {
    let Some(tls) = options.tls.clone() else { return Err(TransportError::unsupported(address, NO_SERVER_TLS)) };
    let listener = tcp::bind_socket(address, options, |target| tcp::listen(target, options.backlog)).await?;
    let bound = listener.local_addr().map_err(|error| TransportError::from_io(address.to_string(), error))?;
    Ok(Listener::new(tcp::named(address, bound), TlsSource { listener, tls }))
}

struct TlsSource {
    listener: TcpListener,
    tls: ServerTls,
}

impl Accept for TlsSource {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let (stream, peer) = ready!(tcp::poll_stream(&self.listener, cx))?;
        let acceptor = TlsAcceptor::from(self.tls.config());
        Poll::Ready(Ok(Channel::to_be_secured(Box::pin(secure(acceptor, stream)), format!("tls://{peer}"))))
    }
}

/// How long a client may take to read what TLS has against it.
const LINGER: Duration = Duration::from_secs(1);

/// Lets a client read the alert. A connection that is closed while input waits to be read is reset, and the alert lost.
async fn drain(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let mut scrap = [0; 4096];
    while stream.read(&mut scrap).await? > 0 {}
    Ok(())
}

async fn secure(acceptor: TlsAcceptor, stream: TcpStream) -> io::Result<(Box<dyn ChannelIo>, Security)> {
    let stream = match acceptor.accept(stream).into_fallible().await {
        Ok(stream) => stream,
        Err((error, stream)) => {
            let _ = tokio::time::timeout(LINGER, drain(stream)).await;
            return Err(error);
        }
    };
    let connection = stream.get_ref().1;
    if connection.alpn_protocol() != Some(ALPN) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the client speaks TLS for something else (ALPN)"));
    }
    let binding = connection.export_keying_material([0; 32], BINDING_LABEL, None).map_err(io::Error::other)?;
    let shown = connection.peer_certificates().and_then(<[_]>::first);
    let security = Security {
        binding: Some(binding),
        certificate: shown.and_then(name_of),
        keys: shown.map(keys_of).unwrap_or_default(),
        ..Security::default()
    };
    Ok((Box::new(stream), security))
}
