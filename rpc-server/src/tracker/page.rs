//! The tracker's status page: the present table of `rpc-cli status` for a browser on the same
//! machine.
//!
//! | path | content |
//! | --- | --- |
//! | `/` | the page, complete without its script, which updates it every second |
//! | `/status.json` | the output of `rpc-cli status --json` |
//! | `/page.css`, `/page.js` | the page's style and script; none is loaded from elsewhere |
//!
//! Much of the content was written by servers and clients. All of it is escaped where it is
//! written, and the page's policy allows no script but the one above. On a loopback address only
//! requests for this machine by name or number are answered: a page from elsewhere, loaded in the
//! browser, cannot read this one through a name that points here.

mod chart;
mod html;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{CONTENT_SECURITY_POLICY, HOST, HeaderValue, REFERRER_POLICY, X_FRAME_OPTIONS};
use hyper::http::uri::Authority;
use hyper::{Request, Response, StatusCode};
use parking_lot::Mutex;

use super::service::Tracker;
use crate::http_listener::{HttpServer, Site, plain, response};

/// Time for which an answer is reused, so that any number of browsers costs little.
const FRESH: Duration = Duration::from_millis(250);

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'none'; frame-ancestors 'none'";

/// Serves the page of a tracker, until the result is dropped.
pub(super) async fn serve(address: SocketAddr, tracker: &Arc<Tracker>) -> io::Result<HttpServer> {
    let page = Page {
        tracker: Arc::downgrade(tracker),
        loopback: address.ip().to_canonical().is_loopback(),
        page: Mutex::default(),
        json: Mutex::default(),
    };
    HttpServer::start(address, Arc::new(page)).await
}

struct Page {
    /// Tracker of the page, which the page does not keep alive.
    tracker: Weak<Tracker>,
    loopback: bool,
    page: Mutex<Option<Answer>>,
    json: Mutex<Option<Answer>>,
}

/// Body of an answer, and the time at which it was made.
type Answer = (Instant, Bytes);

impl Site for Page {
    fn respond(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let mut response = self.answer(request);
        let headers = response.headers_mut();
        headers.insert(CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY));
        headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
        headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
        headers.insert("cross-origin-resource-policy", HeaderValue::from_static("same-origin"));
        response
    }
}

impl Page {
    fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
        if self.loopback && !host.is_some_and(means_this_machine) {
            return plain(StatusCode::MISDIRECTED_REQUEST, "this page is at localhost or 127.0.0.1 only\n");
        }
        match request.uri().path() {
            "/" => self.fresh(&self.page, "text/html; charset=utf-8", |tracker| html::page(&tracker.summary())),
            "/status.json" => self.fresh(&self.json, "application/json", |tracker| {
                // Serialization cannot fail: the summary consists of maps, text and numbers.
                serde_json::to_string(&tracker.summary()).unwrap_or_default()
            }),
            "/page.css" => response(StatusCode::OK, "text/css; charset=utf-8", include_str!("page/page.css")),
            "/page.js" => response(StatusCode::OK, "text/javascript; charset=utf-8", include_str!("page/page.js")),
            _ => plain(StatusCode::NOT_FOUND, "there are / and /status.json\n"),
        }
    }

    fn fresh(
        &self,
        last: &Mutex<Option<Answer>>,
        content_type: &'static str,
        make: impl FnOnce(&Tracker) -> String,
    ) -> Response<Full<Bytes>> {
        // The lock is held while the page is made, so concurrent requests get the same page.
        let mut last = last.lock();
        if let Some((_, body)) = last.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
            return response(StatusCode::OK, content_type, body.clone());
        }
        let Some(tracker) = self.tracker.upgrade() else {
            return plain(StatusCode::SERVICE_UNAVAILABLE, "the tracker stops\n");
        };
        let body = Bytes::from(make(&tracker));
        *last = Some((Instant::now(), body.clone()));
        response(StatusCode::OK, content_type, body)
    }
}

/// Returns true if a `Host` is `localhost` or an IP address: other names could be made to point
/// here by a foreign page.
fn means_this_machine(host: &str) -> bool {
    let Ok(authority) = host.parse::<Authority>() else { return false };
    let name = authority.host();
    let number = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    name.eq_ignore_ascii_case("localhost") || number.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::means_this_machine;

    #[test]
    fn the_page_accepts_host_names_of_this_machine_alone() {
        for host in ["localhost", "LOCALHOST:9191", "127.0.0.1", "127.0.0.1:9191", "[::1]:9191"] {
            assert!(means_this_machine(host), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example:80", "127.0.0.1.evil.example", "a b"] {
            assert!(!means_this_machine(host), "{host}");
        }
    }
}
