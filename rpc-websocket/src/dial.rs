//! Dialling: a TCP connection, perhaps through a proxy, TLS for `wss://`, and the HTTP upgrade.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rpc_transports::transports::tcp::Tcp;
use rpc_transports::{Address, Channel, Dial, Peer, Transport, TransportError};
use tokio::time::timeout;
use tokio_tungstenite::client_async_with_config;
use tokio_tungstenite::tungstenite::Error;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::handshake::client::{Request, Response};

use crate::proxy::{self, Proxies};
use crate::stream::{MessageStream, into_io, limits};
use crate::{ALPN, PATH, is_encrypted, over_tcp, port};

/// Header of a server's answer that tells how the connection arrives there: [`PLAIN`], or
/// encrypted.
pub(crate) const CHANNEL_HEADER: &str = "rpc-channel";

/// Value of [`CHANNEL_HEADER`] for a connection that arrives without encryption.
pub(crate) const PLAIN: &str = "plain";

/// Value of [`CHANNEL_HEADER`] for a connection that arrives encrypted.
pub(crate) const ENCRYPTED: &str = "encrypted";

/// Opens a channel to `to`, through a proxy if there is one for it.
pub(crate) async fn dial(proxies: &Proxies, to: &Address, with: &Dial) -> Result<Channel, TransportError> {
    let begun = Instant::now();
    let Some(target) = over_tcp(to) else { return Err(TransportError::unsupported(to, "name a host")) };
    let over = match proxies.choose(to)? {
        Some(proxy) => {
            let over = Tcp.dial(proxy.address(), with).await?;
            let left = with.limit().saturating_sub(begun.elapsed());
            proxy::tunnel(over, &proxy, to, left).await?
        }
        None => Tcp.dial(&target, with).await?,
    };
    let left = with.limit().saturating_sub(begun.elapsed());
    upgrade(to, over, with, left).await
}

/// Makes a stream of bytes that leads to `to` a channel: TLS for `wss://`, then the HTTP upgrade.
pub(crate) async fn upgrade(
    to: &Address,
    mut over: Channel,
    with: &Dial,
    limit: Duration,
) -> Result<Channel, TransportError> {
    let begun = Instant::now();
    let peer = Peer::new(to.to_string()).on(over.machine());
    let below = over.take_security();
    let (io, _, guard) = over.into_parts();
    let (io, security) = if is_encrypted(to) {
        with.client_tls(to)?.connect(to, ALPN, io, limit).await?
    } else {
        // As encrypted as the way there, through a tunnel say.
        (io, below)
    };
    let request = request(to).map_err(|error| TransportError::from_io(to.to_string(), into_io(error)))?;
    let left = limit.saturating_sub(begun.elapsed());
    let upgrading = client_async_with_config(request, io, Some(limits()));
    let (socket, response) = match timeout(left, upgrading).await {
        Ok(outcome) => outcome.map_err(|error| refused(to, error))?,
        Err(_) => return Err(TransportError::TimedOut { address: to.to_string(), limit }),
    };
    if is_encrypted(to) && arrives_plain(&response) && !with.tokens.is_empty() {
        let source = io::Error::new(io::ErrorKind::InvalidData, "the connection arrives at the server unencrypted");
        return Err(TransportError::Insecure {
            address: to.to_string(),
            source: Arc::new(source),
            hint: TLS_ENDS_EARLY,
        });
    }
    let channel = Channel::new(MessageStream::new(socket), peer).with_security(security);
    Ok(match guard {
        Some(guard) => channel.with_guard(guard),
        None => channel,
    })
}

const TLS_ENDS_EARLY: &str = "a proxy in front of the server ends TLS, so that a token cannot be bound to the \
     connection; have the proxy pass TLS through, or go through it as a tunnel";

/// Returns true if the server says that the connection arrives there without encryption.
fn arrives_plain(response: &Response) -> bool {
    response.headers().get(CHANNEL_HEADER).is_some_and(|value| value == PLAIN)
}

/// The HTTP request of an upgrade.
fn request(to: &Address) -> Result<Request, Error> {
    let host = to.host().unwrap_or_default();
    let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
    let path = to.parameter(PATH);
    format!("{}://{host}:{}{}", to.scheme(), port(to), path.as_deref().unwrap_or("/")).into_client_request()
}

/// Sorts out why there is no WebSocket.
fn refused(to: &Address, error: Error) -> TransportError {
    let error = match error {
        Error::Http(response) => {
            let status = response.status();
            let said = response.body().as_deref().and_then(|body| std::str::from_utf8(body).ok()).unwrap_or_default();
            let said: String = said.lines().next().unwrap_or_default().chars().take(200).collect();
            let text = match said.as_str() {
                "" => format!("the HTTP server there answers '{status}' instead of opening a WebSocket"),
                said => format!("the HTTP server there answers '{status}' instead of opening a WebSocket: {said}"),
            };
            io::Error::other(text)
        }
        error => into_io(error),
    };
    TransportError::from_io(to.to_string(), error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_name_host_port_and_path() {
        let of = |text: &str| request(&text.parse().unwrap()).unwrap();
        let request = of("wss://board.lan/key?path=/rpc/7");
        assert_eq!(request.uri().path(), "/rpc/7");
        assert_eq!(request.headers()["host"], "board.lan:443");
        let request = of("ws://[::1]:9090/key");
        assert_eq!(request.uri().path(), "/");
        assert_eq!(request.headers()["host"], "[::1]:9090");
        assert!(!request.headers().contains_key("origin"), "programs are no web pages");
    }
}
