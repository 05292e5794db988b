//! The HTTP client of the exporter: one HTTP/1.1 request over plain TCP for each batch of spans.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper::header::{CONNECTION, HOST, HeaderValue};
use hyper::{Request, Response, Uri};
use hyper_util::rt::TokioIo;
use opentelemetry_http::{HttpClient, HttpError};
use tokio::net::TcpStream;
use tokio::runtime::Handle;

/// Longest time for one batch. Later batches wait meanwhile, and are lost if they become too many.
const EXPORT_LIMIT: Duration = Duration::from_secs(10);

/// Maximum length of an answer, which tells how many spans were refused, and why.
const MAX_ANSWER: usize = 64 << 10;

/// Sender of requests on the server's runtime, because the thread that exports has none.
#[derive(Debug)]
pub(super) struct Collector {
    runtime: Handle,
    /// True if the last batch failed, so that a failure is logged once and not for each batch.
    failing: Arc<AtomicBool>,
}

impl Collector {
    pub(super) fn new() -> Self {
        Self { runtime: Handle::current(), failing: Arc::default() }
    }
}

#[async_trait]
impl HttpClient for Collector {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = self.runtime.spawn(async move {
            match tokio::time::timeout(EXPORT_LIMIT, exchange(request)).await {
                Ok(outcome) => outcome,
                Err(_) => Err(format!("the collector has not answered in {EXPORT_LIMIT:?}").into()),
            }
        });
        let outcome = exchange.await.unwrap_or_else(|error| Err(error.into()));
        let failure = match &outcome {
            Ok(response) if response.status().is_success() => None,
            Ok(response) => Some(format!("the collector answered {}", response.status())),
            Err(error) => Some(error.to_string()),
        };
        let failed_before = self.failing.swap(failure.is_some(), Ordering::Relaxed);
        match failure {
            Some(error) if !failed_before => tracing::warn!(error, "cannot export spans; they are lost"),
            None if failed_before => tracing::info!("spans are exported again"),
            _ => {}
        }
        outcome
    }
}

async fn exchange(request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let (mut head, body) = request.into_parts();
    let host = head.uri.host().ok_or("the endpoint names no host")?;
    let port = head.uri.port_u16().unwrap_or(80);
    // An IPv6 address has brackets in a URL, and none here.
    let stream = TcpStream::connect((host.trim_matches(['[', ']']), port)).await?;
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;

    let authority = head.uri.authority().map(|authority| HeaderValue::from_str(authority.as_str())).transpose()?;
    let path = head.uri.path_and_query().cloned().ok_or("the endpoint has no path")?;
    head.headers.insert(HOST, authority.unwrap_or(HeaderValue::from_static("")));
    head.headers.insert(CONNECTION, HeaderValue::from_static("close"));
    head.uri = Uri::from(path);

    let exchange = async move {
        let (head, body) = sender.send_request(Request::from_parts(head, Full::new(body))).await?.into_parts();
        let body = Limited::new(body, MAX_ANSWER).collect().await?.to_bytes();
        Ok::<_, HttpError>(Response::from_parts(head, body))
    };
    // The connection ends when the exchange is over and drops the sender.
    let (answer, _) = tokio::join!(exchange, connection);
    answer
}
