//! Listening: TCP connections, each with TLS for `wss://` and the HTTP upgrade as its own handshake.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rpc_transports::transports::tcp::Tcp;
use rpc_transports::{
    Accept, Address, AllowedOrigins, Bind, Channel, Listener, Peer, ServerTls, Transport, TransportError,
};
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::header::ORIGIN;
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode};
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;

use crate::dial::{CHANNEL_HEADER, ENCRYPTED, PLAIN};
use crate::stream::{MessageStream, limits};
use crate::{ALPN, is_encrypted, over_tcp};

/// Listens on `at`, for clients that are no web pages, and for the pages of `origins` and those of
/// the listener.
pub(crate) async fn bind(origins: AllowedOrigins, at: &Address, with: &Bind) -> Result<Listener, TransportError> {
    let tls = match (is_encrypted(at), &with.tls) {
        (false, _) => None,
        (true, Some(tls)) => Some(tls.clone()),
        (true, None) => return Err(TransportError::unsupported(at, NO_CERTIFICATE)),
    };
    let Some(tcp) = over_tcp(at) else { return Err(TransportError::unsupported(at, "name a host")) };
    let listener = Tcp.bind(&tcp, with).await?;
    let local = match listener.local_address().port() {
        Some(port) => at.clone().with_port(port),
        None => at.clone(),
    };
    let origins = [origins, with.origins.clone()];
    Ok(Listener::new(local, Upgrades { next: accept(listener), origins, tls }))
}

const NO_CERTIFICATE: &str = "need a certificate to show; make one with: rpc-cli cert";

/// Accepted TCP connections, each as a channel that has its upgrade before it.
struct Upgrades {
    /// The connection that is waited for. It owns the listener meanwhile, so that a pause for lack
    /// of files is kept when the task that polls is woken for another reason.
    next: Accepting,
    /// Origins that the transport serves, and those that this listener serves.
    origins: [AllowedOrigins; 2],
    tls: Option<ServerTls>,
}

type Accepting = Pin<Box<dyn Future<Output = (Listener, Result<Channel, TransportError>)> + Send>>;

fn accept(mut listener: Listener) -> Accepting {
    Box::pin(async move {
        let accepted = listener.accept().await;
        (listener, accepted)
    })
}

impl Accept for Upgrades {
    fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Channel>> {
        let (listener, accepted) = ready!(self.next.as_mut().poll(cx));
        self.next = accept(listener);
        // The listener below has passed over what concerns one connection alone.
        let channel = accepted.map_err(io::Error::other)?;
        let peer = Peer::new(channel.peer()).on(channel.machine());
        let upgrade = upgrade(channel, peer.clone(), self.origins.clone(), self.tls.clone(), limits());
        Poll::Ready(Ok(Channel::upgrading(upgrade, peer)))
    }
}

/// Answers the upgrade request of an accepted connection, of which nothing has been read, and
/// returns the channel in its binary messages. For protocols beside the native one that WebSockets
/// carry, too, at addresses of other transports.
///
/// Requests of web pages are refused unless `origins` lists their origin: see the
/// [security](crate#security) of this crate. The path may be any. The caller limits the time.
///
/// A message may have `max_message` bytes. The peer can have twice as many held here from then on,
/// which the caller accounts for.
///
/// # Errors
///
/// [`PermissionDenied`](io::ErrorKind::PermissionDenied) for a web page that is refused,
/// [`InvalidInput`](io::ErrorKind::InvalidInput) for a request that is none for a WebSocket, and
/// errors of the connection.
pub async fn accept_upgrade(channel: Channel, origins: AllowedOrigins, max_message: usize) -> io::Result<Channel> {
    let peer = Peer::new(channel.peer()).on(channel.machine());
    let limits = limits().max_message_size(Some(max_message)).max_frame_size(Some(max_message));
    upgrade(channel, peer, [origins, AllowedOrigins::default()], None, limits).await
}

/// Performs the handshakes of an accepted connection: TLS, if there is a certificate, and HTTP.
async fn upgrade(
    mut over: Channel,
    peer: Peer,
    origins: [AllowedOrigins; 2],
    tls: Option<ServerTls>,
    limits: WebSocketConfig,
) -> io::Result<Channel> {
    let below = over.take_security();
    let (io, name, guard) = over.into_parts();
    let (io, security) = match tls {
        Some(tls) => tls.accept(ALPN, io).await?,
        None => (io, below),
    };
    let encrypted = security.is_encrypted();
    #[allow(clippy::result_large_err, reason = "the library's type")]
    let answer = |request: &Request, mut response: Response| {
        if let Err(origin) = check_origin(request, &origins) {
            rpc_transports::log_limited!(
                WARN,
                peer = %name,
                origin,
                "a web page was refused: its origin is not allowed (--allow-origin)"
            );
            return Err(forbidden());
        }
        let arrives = if encrypted { ENCRYPTED } else { PLAIN };
        response.headers_mut().insert(CHANNEL_HEADER, HeaderValue::from_static(arrives));
        Ok(response)
    };
    let socket = accept_hdr_async_with_config(io, answer, Some(limits)).await.map_err(no_upgrade)?;
    let channel = Channel::new(MessageStream::new(socket), peer).with_security(security);
    Ok(match guard {
        Some(guard) => channel.with_guard(guard),
        None => channel,
    })
}

/// Sorts out why there is no WebSocket: nothing is said against the client's identity.
fn no_upgrade(error: Error) -> io::Error {
    match error {
        Error::Http(_) => io::Error::new(io::ErrorKind::PermissionDenied, "a web page whose origin is not allowed"),
        Error::Io(error) => error,
        error => io::Error::new(io::ErrorKind::InvalidInput, error),
    }
}

/// Checks that a request is not one of a web page, or of a page that is allowed. Fails with the
/// origin, cut for the log.
fn check_origin(request: &Request, allowed: &[AllowedOrigins]) -> Result<(), String> {
    for origin in request.headers().get_all(ORIGIN) {
        let origin = String::from_utf8_lossy(origin.as_bytes());
        if !allowed.iter().any(|origins| origins.contains(&origin)) {
            return Err(origin.chars().take(200).collect());
        }
    }
    Ok(())
}

fn forbidden() -> ErrorResponse {
    let mut response = ErrorResponse::new(Some("this origin is not allowed here".to_owned()));
    *response.status_mut() = StatusCode::FORBIDDEN;
    response
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio_tungstenite::client_async_with_config;
    use tokio_tungstenite::tungstenite::client::IntoClientRequest;

    use super::*;

    #[test]
    fn only_pages_of_listed_origins_pass() {
        let origins = [AllowedOrigins::new(["https://console.example"]), AllowedOrigins::new(["http://127.0.0.1:80"])];
        let of = |origins_sent: &[&str]| {
            let mut request = Request::builder();
            for origin in origins_sent {
                request = request.header(ORIGIN, *origin);
            }
            check_origin(&request.body(()).unwrap(), &origins)
        };
        assert_eq!(of(&[]), Ok(()), "programs send no origin");
        assert_eq!(of(&["https://console.example"]), Ok(()));
        assert_eq!(of(&["https://Console.Example"]), Ok(()));
        assert_eq!(of(&["http://127.0.0.1:80"]), Ok(()));
        for refused in ["null", "http://console.example", "https://console.example:8443", "https://evil.example", ""] {
            assert!(of(&[refused]).is_err(), "{refused}");
            assert!(of(&["https://console.example", refused]).is_err(), "one of two, {refused}");
        }
    }

    #[tokio::test]
    async fn a_connection_of_another_listener_is_upgraded_but_not_for_a_foreign_page() {
        let origins = AllowedOrigins::new(["https://console.example"]);
        for (origin, passes) in
            [(None, true), (Some("https://console.example"), true), (Some("https://evil.example"), false)]
        {
            let (near, far) = tokio::io::duplex(4096);
            let accepting = accept_upgrade(Channel::new(far, "a test"), origins.clone(), 8);
            let mut request = "ws://127.0.0.1/ws".into_client_request().unwrap();
            if let Some(origin) = origin {
                request.headers_mut().insert(ORIGIN, HeaderValue::from_static(origin));
            }
            let (accepted, dialled) = tokio::join!(accepting, client_async_with_config(request, near, Some(limits())));
            assert_eq!((accepted.is_ok(), dialled.is_ok()), (passes, passes), "{origin:?}");
            let (Ok(mut accepted), Ok((dialled, _))) = (accepted, dialled) else { continue };
            let mut dialled = MessageStream::new(dialled);
            dialled.write_all(b"bytes").await.unwrap();
            dialled.flush().await.unwrap();
            let mut bytes = [0; 5];
            accepted.io_mut().read_exact(&mut bytes).await.unwrap();
            assert_eq!(&bytes, b"bytes");
            dialled.write_all(b"too long!").await.unwrap();
            dialled.flush().await.unwrap();
            let error = accepted.io_mut().read(&mut bytes).await.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "a message above the limit");
        }
    }

    #[tokio::test]
    async fn a_request_for_a_page_is_no_upgrade() {
        let (mut near, far) = tokio::io::duplex(4096);
        near.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
        let error = accept_upgrade(Channel::new(far, "a test"), AllowedOrigins::default(), 8).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}");
    }
}
