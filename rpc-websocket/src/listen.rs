//! Listening: TCP connections, each with TLS for `wss://` and the HTTP upgrade as its own handshake.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rpc_transports::transports::tcp::Tcp;
use rpc_transports::{
    Accept, Address, AllowedOrigins, Bind, Channel, Listener, Peer, Security, ServerTls, Transport, TransportError,
};
use tokio_tungstenite::accept_hdr_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::handshake::server::{ErrorResponse, Request, Response};
use tokio_tungstenite::tungstenite::http::header::ORIGIN;
use tokio_tungstenite::tungstenite::http::{HeaderValue, StatusCode};

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
        let upgrade = upgrade(channel, peer.clone(), self.origins.clone(), self.tls.clone());
        Poll::Ready(Ok(Channel::upgrading(upgrade, peer)))
    }
}

/// Performs the handshakes of an accepted connection: TLS, if there is a certificate, and HTTP.
async fn upgrade(
    over: Channel,
    peer: Peer,
    origins: [AllowedOrigins; 2],
    tls: Option<ServerTls>,
) -> io::Result<Channel> {
    let (io, name, guard) = over.into_parts();
    let encrypted = tls.is_some();
    let (io, security) = match tls {
        Some(tls) => tls.accept(ALPN, io).await?,
        None => (io, Security::default()),
    };
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
    let socket = accept_hdr_async_with_config(io, answer, Some(limits())).await.map_err(no_upgrade)?;
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
}
