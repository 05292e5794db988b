//! A small HTTP/1.1 listener for metrics, health and the status page.
//!
//! Clients are on the same machine and send at most about one request a second. Each connection
//! serves one request within a few seconds, and the number of connections is small, so this takes
//! little from the server. For one connection more the oldest is closed: a request is answered at
//! once, so that the oldest is the slowest, and keeps no other out. Only GET and HEAD are answered:
//! nothing can be changed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue, X_CONTENT_TYPE_OPTIONS};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinHandle, JoinSet};

/// Maximum number of connections; for one more the oldest is closed.
const MAX_CONNECTIONS: usize = 16;

/// Longest time of a connection.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);

/// Pause after a failed accept, whose usual cause is a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const PLAIN: &str = "text/plain; charset=utf-8";

/// A site that answers GET and HEAD.
pub(crate) trait Site: Send + Sync + 'static {
    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>>;
}

/// An HTTP server, which answers until it is dropped.
#[derive(Debug)]
pub(crate) struct HttpServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl HttpServer {
    pub(crate) async fn start(address: SocketAddr, site: Arc<dyn Site>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        Ok(Self { address, task: tokio::spawn(accept(listener, site)) })
    }

    /// Returns the address that it listens on, with the port that was chosen.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        // The task owns the connections, which end with it.
        self.task.abort();
    }
}

pub(crate) fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    response(status, PLAIN, text)
}

pub(crate) fn response(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

async fn accept(listener: TcpListener, site: Arc<dyn Site>) {
    // Owner of the connections, which end with it.
    let mut connections = JoinSet::new();
    let mut open: VecDeque<AbortHandle> = VecDeque::with_capacity(MAX_CONNECTIONS);
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                while connections.try_join_next().is_some() {}
                open.retain(|connection| !connection.is_finished());
                if open.len() >= MAX_CONNECTIONS
                    && let Some(oldest) = open.pop_front()
                {
                    oldest.abort();
                }
                let site = site.clone();
                open.push_back(connections.spawn(async move {
                    let _ = tokio::time::timeout(CONNECTION_LIMIT, serve(stream, site)).await;
                }));
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept a connection over HTTP");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(stream: TcpStream, site: Arc<dyn Site>) {
    let respond = service_fn(|request: Request<Incoming>| {
        let response = match *request.method() {
            Method::GET | Method::HEAD => site.respond(&request),
            _ => not_allowed(),
        };
        async { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).keep_alive(false);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), respond).await {
        tracing::debug!(%error, "a connection over HTTP failed");
    }
}

fn not_allowed() -> Response<Full<Bytes>> {
    let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered here\n");
    response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
    response
}
