//! The tracker's status pages, for a browser on the same machine.
//!
//! | path | content |
//! | --- | --- |
//! | `/` | the overview: keys, servers, queue, losses and events |
//! | `/key/KEY` | one key, with charts of the last hour and day |
//! | `/server/ID` | one server, with its devices, clients and last errors |
//! | `/status.json` | the output of `rpc-cli status --json` |
//! | `/page.css`, `/page.js` | style and script of the pages; none is loaded from elsewhere |
//!
//! The pages are complete without the script, which updates them every second. The query of the
//! overview searches, sorts and groups: `?search=WORDS&sort=free&order=reversed&group=key`.
//!
//! Much of the content was written by servers and clients. All of it is escaped where it is
//! written, and the page's policy allows no script but the one above. On a loopback address only
//! requests for this machine by name or number are answered: a page from elsewhere, loaded in the
//! browser, cannot read this one through a name that points here.

mod chart;
mod key_view;
mod markup;
mod overview;
mod query;
mod sections;
mod server_view;

use std::collections::BTreeMap;
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

use rpc_transports::tracker::Summary;

use self::query::Query;
use super::history::KeySamples;
use super::service::Tracker;
use crate::http_listener::{HttpServer, Site, plain, response};

/// Time for which the tracker's state is reused, so that any number of browsers costs little.
const FRESH: Duration = Duration::from_millis(250);

const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
                      form-action 'self'; frame-ancestors 'none'";

/// Serves the pages of a tracker, until the result is dropped. Where there are no servers, they
/// show `serve_command`, which starts one.
pub(super) async fn serve(
    address: SocketAddr,
    tracker: &Arc<Tracker>,
    serve_command: String,
) -> io::Result<HttpServer> {
    let page = Page {
        tracker: Arc::downgrade(tracker),
        loopback: address.ip().to_canonical().is_loopback(),
        serve_command,
        view: Mutex::default(),
        overview: Mutex::default(),
        json: Mutex::default(),
    };
    HttpServer::start(address, Arc::new(page)).await
}

struct Page {
    /// Tracker of the page, which the page does not keep alive.
    tracker: Weak<Tracker>,
    loopback: bool,
    serve_command: String,
    view: Latest<Arc<PoolView>>,
    overview: Latest<Bytes>,
    json: Latest<Bytes>,
}

/// The last of something that is made anew when it is old, and the time at which it was made.
type Latest<T> = Mutex<Option<(Instant, T)>>;

/// State of a tracker that the pages show.
struct PoolView {
    summary: Summary,
    /// Usage of the keys that have histories.
    keys: BTreeMap<String, KeySamples>,
    serve_command: String,
}

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
        let (path, query) = (request.uri().path(), Query::parse(request.uri().query().unwrap_or_default()));
        match path {
            "/page.css" => return response(StatusCode::OK, "text/css; charset=utf-8", include_str!("page/page.css")),
            "/page.js" => {
                return response(StatusCode::OK, "text/javascript; charset=utf-8", include_str!("page/page.js"));
            }
            _ => {}
        }
        let Some(view) = self.view() else { return plain(StatusCode::SERVICE_UNAVAILABLE, "the tracker stops\n") };
        match path {
            "/" if query == Query::default() => {
                html(StatusCode::OK, fresh(&self.overview, || Bytes::from(overview::page(&view, &query))))
            }
            "/" => html(StatusCode::OK, overview::page(&view, &query)),
            "/status.json" => {
                // Serialization cannot fail: the summary consists of maps, text and numbers.
                let make = || Bytes::from(serde_json::to_string(&view.summary).unwrap_or_default());
                response(StatusCode::OK, "application/json", fresh(&self.json, make))
            }
            _ => {
                let key = path.strip_prefix("/key/").map(|key| key_view::page(&view, &query::decoded(key)));
                let id = path.strip_prefix("/server/").map(|id| id.parse().ok());
                let page = key.or_else(|| id.map(|id| server_view::page(&view, id?)));
                match page {
                    Some(Some(page)) => html(StatusCode::OK, page),
                    Some(None) => html(StatusCode::NOT_FOUND, overview::not_here(&view)),
                    None => plain(StatusCode::NOT_FOUND, "there are /, /key/KEY, /server/ID and /status.json\n"),
                }
            }
        }
    }

    /// Returns the state of the tracker; `None` once the tracker has ended.
    fn view(&self) -> Option<Arc<PoolView>> {
        let tracker = self.tracker.upgrade()?;
        Some(fresh(&self.view, || {
            let (summary, keys) = (tracker.summary(), tracker.key_samples());
            Arc::new(PoolView { summary, keys, serve_command: self.serve_command.clone() })
        }))
    }
}

/// Returns the latest, or what `make` makes if it is old.
fn fresh<T: Clone>(latest: &Latest<T>, make: impl FnOnce() -> T) -> T {
    // The lock is held meanwhile, so concurrent requests get the same.
    let mut latest = latest.lock();
    if let Some((_, value)) = latest.as_ref().filter(|(made, _)| made.elapsed() < FRESH) {
        return value.clone();
    }
    let value = make();
    *latest = Some((Instant::now(), value.clone()));
    value
}

fn html(status: StatusCode, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    response(status, "text/html; charset=utf-8", body)
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
