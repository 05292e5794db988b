//! The tracker's status page as HTTP gives it.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rpc_server::config::{ConfigError, HttpAddress, ServeError, TrackerConfig};
use rpc_server::tracker::{RunningTracker, Tracker};
use rpc_transports::tracker::{ServerRequest, Summary, TrackerClient};

const EVIL: &str = "<script>alert(1)</script>";

pub(crate) struct Answer {
    status: u16,
    head: String,
    pub(crate) body: String,
}

/// Sends a request, and reads the answer to its end.
async fn ask(address: SocketAddr, request: &str) -> Answer {
    let request = request.to_owned();
    let exchange = move || {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Answer { status, head: head.to_lowercase(), body: body.to_owned() }
    };
    tokio::task::spawn_blocking(exchange).await.unwrap()
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> Answer {
    ask(address, &format!("GET {path} HTTP/1.1\r\nHost: {address}\r\n\r\n")).await
}

fn config() -> TrackerConfig {
    TrackerConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        http: Some("127.0.0.1:0".parse().unwrap()),
        ..TrackerConfig::default()
    }
}

async fn start() -> (RunningTracker, SocketAddr) {
    let running = Tracker::start(&config()).await.unwrap();
    let page = running.page_address().unwrap();
    (running, page)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_shows_names_of_peers_as_text_and_allows_no_scripts() {
    let (running, page) = start().await;
    let client = TrackerClient::connect(&running.server.addresses()[0].to_string()).await.unwrap();
    let request = ServerRequest::new("board").client(EVIL).label(EVIL, EVIL);
    let waiting = tokio::spawn(async move { client.request(&request).await });
    let asked = async {
        loop {
            let answer = get(page, "/").await;
            assert_eq!(answer.status, 200);
            if answer.body.contains("alert(1)") {
                return answer;
            }
        }
    };
    let answer = tokio::time::timeout(Duration::from_secs(20), asked).await.unwrap();
    waiting.abort();
    assert!(!answer.body.contains(EVIL), "{}", answer.body);
    assert!(answer.body.contains("&lt;script&gt;alert(1)&lt;/script&gt;"), "{}", answer.body);
    assert!(answer.body.contains("<b id=\"waiting\">1</b>"), "{}", answer.body);
    for header in [
        "content-type: text/html; charset=utf-8",
        "x-content-type-options: nosniff",
        "content-security-policy: default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
         base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
        "referrer-policy: no-referrer",
        "x-frame-options: deny",
        "cross-origin-resource-policy: same-origin",
        "cache-control: no-store",
    ] {
        assert!(answer.head.contains(header), "{header}: {}", answer.head);
    }
    // Styles and scripts of the page are neither inline nor from other hosts.
    for part in ["style=", " onload", "http://", "https://", "//cdn"] {
        assert!(!answer.body.contains(part), "{part}: {}", answer.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn page_serves_its_files_and_nothing_else() {
    let (running, page) = start().await;
    for (path, content_type) in [("/page.css", "text/css"), ("/page.js", "text/javascript"), ("/", "text/html")] {
        let answer = get(page, path).await;
        assert_eq!(answer.status, 200, "{path}");
        assert!(
            answer.head.contains(&format!("content-type: {content_type}; charset=utf-8")),
            "{path}: {}",
            answer.head
        );
    }
    let answer = get(page, "/status.json").await;
    assert!(answer.head.contains("content-type: application/json"), "{}", answer.head);
    let summary: Summary = serde_json::from_str(&answer.body).unwrap();
    assert_eq!((summary.lease_ms, summary.servers.len()), (10_000, 0));
    assert_eq!(running.tracker.summary().lease_ms, summary.lease_ms);
    for path in ["/other", "/../page.css", "/page.css/", "//"] {
        assert_eq!(get(page, path).await.status, 404, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_methods_and_foreign_hosts_are_refused() {
    let (_running, page) = start().await;
    for method in ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"] {
        let request = format!("{method} / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n");
        let answer = ask(page, &request).await;
        assert!(answer.status == 405 && answer.head.contains("allow: get, head"), "{method}: {}", answer.head);
    }
    let head = ask(page, "HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n").await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    // A host name of an attacker that resolves to this machine: their page could read ours by it.
    for host in ["rebound.example", "127.0.0.1.rebound.example:80", ""] {
        let answer = ask(page, &format!("GET /status.json HTTP/1.1\r\nHost: {host}\r\n\r\n")).await;
        assert!(answer.status >= 400 && !answer.body.contains("servers"), "{host}: {}", answer.body);
    }
    // Bytes that are not HTTP do not stop the server.
    let noise = ask(page, "\u{1}\u{2}\r\n\r\n").await;
    assert_eq!(noise.status, 400);
    assert_eq!(get(page, "/").await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_is_served_on_loopback_alone_unless_insecure_is_given() {
    let mut config = config();
    config.http = Some("0.0.0.0:0".parse().unwrap());
    let error = Tracker::start(&config).await.unwrap_err();
    assert!(matches!(error, ServeError::Config(ConfigError::InsecurePage { .. })), "{error}");
    config.insecure = true;
    let running = Tracker::start(&config).await.unwrap();
    let port = running.page_address().unwrap().port();
    let answer = ask(([127, 0, 0, 1], port).into(), "GET / HTTP/1.1\r\nHost: tracker.lan\r\n\r\n").await;
    assert_eq!(answer.status, 200);

    config.http = Some(HttpAddress(([127, 0, 0, 1], port).into()));
    let error = Tracker::start(&config).await.unwrap_err();
    assert!(matches!(error, ServeError::Page { .. }), "{error}");
}
