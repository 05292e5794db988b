//! `/metrics`, `/healthz` and `/readyz` over HTTP/1.1.

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::{Request, Response, StatusCode};

use super::{Monitor, Phase};
use crate::http_listener::{Site, plain, response};

/// Media type of the format of Prometheus.
const METRICS_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Site for Monitor {
    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        match request.uri().path() {
            "/metrics" => response(StatusCode::OK, METRICS_TYPE, self.render()),
            "/healthz" => plain(StatusCode::OK, "ok\n"),
            "/readyz" => match self.phase() {
                Phase::Starting => plain(StatusCode::SERVICE_UNAVAILABLE, "starting\n"),
                Phase::Ready => plain(StatusCode::OK, "ready\n"),
                Phase::ListenerLost => {
                    plain(StatusCode::SERVICE_UNAVAILABLE, "an address is not listened on any more\n")
                }
                Phase::Draining => plain(StatusCode::SERVICE_UNAVAILABLE, "draining\n"),
            },
            _ => plain(StatusCode::NOT_FOUND, "there are /metrics, /healthz and /readyz\n"),
        }
    }
}
