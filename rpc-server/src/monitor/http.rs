//! `/metrics`, `/healthz` and `/readyz` over HTTP/1.1.
//!
//! Who asks is a scraper or a supervisor on the same machine, a few times a minute. So each connection serves one request,
//! within a few seconds, and there are only a few at a time: whatever comes here cannot take much from the server.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinHandle, JoinSet};

use super::{Monitor, Phase};

/// Connections at a time; others wait.
const MAX_CONNECTIONS: usize = 16;

/// How long one may take in all.
const CONNECTION_LIMIT: Duration = Duration::from_secs(10);

/// How long to wait after a connection could not be accepted, which is most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The format that Prometheus reads.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
const PLAIN: &str = "text/plain; charset=utf-8";

/// A listener that answers until this is dropped.
#[derive(Debug)]
pub(super) struct MonitorServer {
    address: SocketAddr,
    task: JoinHandle<()>,
}

impl MonitorServer {
    pub(super) async fn start(address: SocketAddr, monitor: Arc<Monitor>) -> io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let task = tokio::spawn(async move {
            tokio::join!(accept(listener, &monitor), monitor.upkeep());
        });
        Ok(Self { address, task })
    }

    /// Where it listens, with the port that was chosen.
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MonitorServer {
    fn drop(&mut self) {
        // Its connections are dropped with it.
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, monitor: &Arc<Monitor>) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        // Never closed.
        let Ok(place) = room.clone().acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let monitor = monitor.clone();
                connections.spawn(async move {
                    let _place = place;
                    let _ = tokio::time::timeout(CONNECTION_LIMIT, serve(stream, monitor)).await;
                });
            }
            Err(error) => {
                tracing::debug!(%error, "cannot accept a connection for metrics");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn serve(stream: TcpStream, monitor: Arc<Monitor>) {
    let respond = service_fn(|request: Request<Incoming>| {
        let response = respond(request.method(), request.uri().path(), &monitor);
        async { Ok::<_, Infallible>(response) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).keep_alive(false);
    if let Err(error) = builder.serve_connection(TokioIo::new(stream), respond).await {
        tracing::debug!(%error, "a connection for metrics failed");
    }
}

fn respond(method: &Method, path: &str, monitor: &Monitor) -> Response<Full<Bytes>> {
    let known = matches!(path, "/metrics" | "/healthz" | "/readyz");
    if known && !matches!(*method, Method::GET | Method::HEAD) {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET and HEAD are answered here\n");
        response.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return response;
    }
    match path {
        "/metrics" => response(StatusCode::OK, METRICS_TYPE, monitor.render()),
        "/healthz" => plain(StatusCode::OK, "ok\n"),
        "/readyz" => match monitor.phase() {
            Phase::Starting => plain(StatusCode::SERVICE_UNAVAILABLE, "starting\n"),
            Phase::Ready => plain(StatusCode::OK, "ready\n"),
            Phase::Deaf => plain(StatusCode::SERVICE_UNAVAILABLE, "an address is not listened on any more\n"),
            Phase::Draining => plain(StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
        },
        _ => plain(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n"),
    }
}

fn plain(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    response(status, PLAIN, text)
}

fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
