//! HTTP proxies: which one an address is dialled through, and the `CONNECT` that opens the way.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Empty;
use hyper::client::conn::http1;
use hyper::header::{HOST, HeaderValue, PROXY_AUTHORIZATION};
use hyper::{Request, StatusCode, Uri};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::TokioIo;
use rpc_transports::{Address, Channel, TransportError};
use tokio::time::timeout;

use crate::{is_encrypted, port};

/// The choice of a proxy for each address.
///
/// Addresses on the loopback interface are never dialled through a proxy.
#[derive(Clone)]
pub struct Proxies(Option<Arc<Matcher>>);

impl Proxies {
    /// The proxies of the usual variables, read now: `https_proxy` for `wss://`, `http_proxy` for `ws://`,
    /// `all_proxy` for both, but for the hosts in `no_proxy`; the upper-case names count, too, as
    /// they do for curl.
    #[must_use]
    pub fn from_environment() -> Self {
        Self(Some(Arc::new(Matcher::from_env())))
    }

    /// The proxy `proxy` (`http://[user:password@]host:port`) for all addresses but those of the hosts
    /// in `except`, a comma-separated list in the form of `no_proxy`.
    #[must_use]
    pub fn fixed(proxy: &str, except: &str) -> Self {
        Self(Some(Arc::new(Matcher::builder().all(proxy).no(except).build())))
    }

    /// No proxy for any address.
    #[must_use]
    pub fn none() -> Self {
        Self(None)
    }

    /// Returns the proxy for `to`, or `None` if it is dialled directly.
    pub(crate) fn choose(&self, to: &Address) -> Result<Option<Proxy>, TransportError> {
        let Some(matcher) = &self.0 else { return Ok(None) };
        if to.has_loopback_host() {
            return Ok(None);
        }
        let scheme = if is_encrypted(to) { "https" } else { "http" };
        let Ok(uri) = format!("{scheme}://{}/", authority(to)).parse::<Uri>() else { return Ok(None) };
        let Some(found) = matcher.intercept(&uri) else { return Ok(None) };
        let host = found.uri().host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let address = match found.uri().scheme_str() {
            None | Some("http") => Address::tcp(host, found.uri().port_u16().unwrap_or(80)),
            Some(_) => return Err(TransportError::unsupported(to, OTHER_PROXY)),
        };
        let address = address.map_err(|_| TransportError::unsupported(to, NO_PROXY_ADDRESS))?;
        Ok(Some(Proxy { address, authorization: found.basic_auth().cloned() }))
    }
}

const OTHER_PROXY: &str = "can be dialled through http:// proxies only; look at https_proxy, http_proxy and all_proxy, \
     or list the host in no_proxy";

const NO_PROXY_ADDRESS: &str = "need a proxy with a valid host; look at https_proxy, http_proxy and all_proxy";

impl Default for Proxies {
    fn default() -> Self {
        Self::from_environment()
    }
}

/// Shows no password.
impl fmt::Debug for Proxies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Proxies(..)" } else { "Proxies(none)" })
    }
}

/// A proxy that an address is dialled through.
pub(crate) struct Proxy {
    address: Address,
    authorization: Option<HeaderValue>,
}

impl Proxy {
    /// The `tcp://` address of the proxy.
    pub(crate) fn address(&self) -> &Address {
        &self.address
    }
}

/// Host and port of an address as HTTP writes them.
fn authority(to: &Address) -> String {
    let host = to.host().unwrap_or_default();
    if host.contains(':') { format!("[{host}]:{}", port(to)) } else { format!("{host}:{}", port(to)) }
}

/// Asks the proxy at the far end of `over` for a way to `to`. The answer is a stream of bytes that
/// leads there.
pub(crate) async fn tunnel(
    over: Channel,
    proxy: &Proxy,
    to: &Address,
    limit: Duration,
) -> Result<Channel, TransportError> {
    match timeout(limit, connect(over, proxy, to)).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => {
            let through = format!("{to} through the proxy {}", proxy.address);
            Err(TransportError::from_io(through, error))
        }
        Err(_) => Err(TransportError::TimedOut { address: format!("{to} through the proxy {}", proxy.address), limit }),
    }
}

async fn connect(over: Channel, proxy: &Proxy, to: &Address) -> io::Result<Channel> {
    let (io, _, guard) = over.into_parts();
    let (mut sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(io::Error::other)?;
    // It ends with the answer: the bytes behind an upgrade are no longer its own.
    let driver = tokio::spawn(connection.with_upgrades());
    let authority = authority(to);
    let mut request = Request::connect(&authority).header(HOST, &authority);
    if let Some(authorization) = &proxy.authorization {
        request = request.header(PROXY_AUTHORIZATION, authorization);
    }
    let request = request.body(Empty::<Bytes>::new()).map_err(io::Error::other)?;
    let response = sender.send_request(request).await.map_err(io::Error::other)?;
    match response.status() {
        status if status.is_success() => {}
        StatusCode::PROXY_AUTHENTICATION_REQUIRED => {
            driver.abort();
            return Err(io::Error::other(
                "the proxy wants a name and password: put them into its URL (http://NAME:PASSWORD@HOST)",
            ));
        }
        status => {
            driver.abort();
            return Err(io::Error::other(format!("the proxy answers '{status}' instead of opening the way")));
        }
    }
    let upgraded = hyper::upgrade::on(response).await.map_err(io::Error::other)?;
    let channel = Channel::new(TokioIo::new(upgraded), to.to_string());
    Ok(match guard {
        Some(guard) => channel.with_guard(guard),
        None => channel,
    })
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};

    use super::*;

    fn address(text: &str) -> Address {
        text.parse().unwrap()
    }

    #[test]
    fn the_loopback_interface_and_listed_hosts_are_dialled_directly() {
        let proxies = Proxies::fixed("http://me:secret@proxy.lan:3128", "board.lan,10.0.0.0/8");
        let through = |text: &str| proxies.choose(&address(text)).unwrap().map(|proxy| proxy.address.to_string());
        assert_eq!(through("wss://far.example").as_deref(), Some("tcp://proxy.lan:3128"));
        assert_eq!(through("ws://far.example:9090/key").as_deref(), Some("tcp://proxy.lan:3128"));
        for direct in ["ws://board.lan", "ws://10.1.2.3:80", "ws://127.0.0.1:9090", "wss://localhost", "ws://[::1]"] {
            assert_eq!(through(direct), None, "{direct}");
        }
        let found = proxies.choose(&address("wss://far.example")).unwrap().unwrap();
        assert_eq!(found.authorization.unwrap(), "Basic bWU6c2VjcmV0");
        assert!(Proxies::none().choose(&address("wss://far.example")).unwrap().is_none());
        assert!(!format!("{proxies:?}").contains("secret"));
    }

    #[test]
    fn proxies_of_another_kind_are_refused_in_words() {
        let proxies = Proxies::fixed("socks5://proxy.lan:1080", "");
        let error = proxies.choose(&address("wss://far.example")).err().unwrap();
        assert!(error.to_string().contains("http:// proxies only"), "{error}");
    }

    /// Reads the head of a request.
    async fn head(io: &mut DuplexStream) -> String {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(io.read_u8().await.unwrap());
        }
        String::from_utf8(head).unwrap()
    }

    #[tokio::test]
    async fn a_proxy_is_asked_for_the_way_and_then_passes_bytes() {
        let (near, mut far) = tokio::io::duplex(4096);
        let proxies = Proxies::fixed("http://me:secret@proxy.lan:3128", "");
        let to = address("wss://far.example/key");
        let proxy = proxies.choose(&to).unwrap().unwrap();
        let asking = tokio::spawn(async move {
            tunnel(Channel::new(near, "proxy"), &proxy, &to, Duration::from_secs(60)).await.unwrap()
        });
        let asked = head(&mut far).await.to_ascii_lowercase();
        assert!(asked.starts_with("connect far.example:443 http/1.1\r\n"), "{asked}");
        assert!(asked.contains("host: far.example:443\r\n"), "{asked}");
        assert!(asked.contains("proxy-authorization: basic bwu6c2vjcmv0\r\n"), "{asked}");
        // The first bytes of the target may come together with the proxy's answer.
        far.write_all(b"HTTP/1.1 200 Connection established\r\n\r\nhello").await.unwrap();
        let mut channel = asking.await.unwrap();
        let mut heard = [0; 5];
        channel.io_mut().read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"hello");
        channel.io_mut().write_all(b"there").await.unwrap();
        channel.io_mut().flush().await.unwrap();
        far.read_exact(&mut heard).await.unwrap();
        assert_eq!(&heard, b"there");
    }

    #[tokio::test]
    async fn a_proxy_that_refuses_is_quoted() {
        for (answer, expected) in [
            ("HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n", "name and password"),
            ("HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", "403 Forbidden"),
        ] {
            let (near, mut far) = tokio::io::duplex(4096);
            let to = address("wss://far.example");
            let proxy = Proxies::fixed("http://proxy.lan:3128", "").choose(&to).unwrap().unwrap();
            let asking = tokio::spawn(async move {
                tunnel(Channel::new(near, "proxy"), &proxy, &to, Duration::from_secs(60)).await.unwrap_err()
            });
            head(&mut far).await;
            far.write_all(answer.as_bytes()).await.unwrap();
            let error = asking.await.unwrap();
            let cause = std::error::Error::source(&error).unwrap().to_string();
            assert!(cause.contains(expected), "{cause}");
            assert!(error.to_string().contains("through the proxy tcp://proxy.lan:3128"), "{error}");
        }
    }
}
