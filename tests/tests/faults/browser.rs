//! The tracker's page in a browser: Chromium without a window, driven over its DevTools protocol.
//!
//! Without Chromium the test prints that it is skipped; with `RPC_TESTS_REQUIRE_BROWSER` set it
//! fails instead. `CHROMIUM` names another program. Screenshots are left in cargo's folder for
//! temporary files of tests.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rpc_transports::Connector;
use rpc_transports::tracker::{ServerRequest, TrackerClient};
use serde_json::{Value, json};

use crate::peers::{ServerPeer, TrackerPeer, Transport};

/// Time limit of each step, longer than any takes: a step that needs more hangs.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Text that would run if a page took it for markup.
const EVIL: &str = "<img src=x onerror=\"window.evil=1\"><script>window.evil=1</script>";

#[test]
fn the_page_shows_the_pool_as_it_changes() {
    let Some(mut browser) = Browser::start() else { return };
    let tracker = TrackerPeer::start(&["--http", "127.0.0.1:0"]);
    let evil = format!("note={EVIL}");
    let serve = |flags: &[&str]| {
        let all = [&["--tracker", tracker.address(), "--tracker-key", "board"], flags].concat();
        ServerPeer::with(Transport::Tcp, &all)
    };
    let _first = serve(&["--capacity", "2", "--label", "arch=arm64"]);
    let second = serve(&["--label", &evil]);
    browser.open(tracker.page().unwrap());
    browser.until("document.getElementById('servers').textContent", "2");
    browser.until("document.getElementById('free').textContent", "3");
    browser.until("document.getElementById('live').textContent", "live");
    let rows = "document.querySelectorAll('#servers-table tbody tr').length";
    assert_eq!(browser.evaluate(rows), 2);
    // The mark shows below that the page was not loaded anew.
    browser.evaluate("window.before = document.querySelector('#servers-table tbody tr'); 0");

    // Three clients that have servers, and one that waits for a kind that is not there.
    let client = TrackerClient::connect_blocking(Connector::new(), tracker.address()).unwrap();
    let loans = client.request_many_blocking(&ServerRequest::new("board").count(3).client("ada@lab")).unwrap();
    let waits = client.clone();
    thread::spawn(move || waits.request_blocking(&ServerRequest::new("h100").client(EVIL)));
    browser.until("document.getElementById('free').textContent", "0");
    browser.until("document.getElementById('held').textContent", "3");
    browser.until("document.getElementById('waiting').textContent", "1");
    browser.until("document.querySelectorAll('#chart rect.in-use').length > 0", true);
    browser.until("document.querySelector('#servers-table').textContent.includes('ada@lab')", true);
    browser.until("document.querySelector('#queue-table').textContent.includes('h100')", true);
    browser.until("document.title", "0 free · tracker");
    assert_eq!(browser.evaluate("window.before.isConnected"), true, "rows stay where they are");
    // The page shows texts of peers as text, not as markup.
    for table in ["servers", "queue"] {
        let shows = format!("document.querySelector('#{table}-table').textContent.includes({})", json!(EVIL));
        assert_eq!(browser.evaluate(&shows), true, "{table}");
    }
    assert_eq!(browser.evaluate("document.querySelectorAll('main img, main script').length"), 0);
    // A search filters while it is typed, and the address keeps it.
    browser.evaluate(
        "{ const field = document.querySelector('#search input'); field.value = 'ARM64 board'; \
         field.dispatchEvent(new Event('input')); }",
    );
    browser.until(rows, 1);
    browser.until("location.search", "?search=ARM64+board");
    browser.until("document.querySelector('#servers-table h2').textContent", "Servers: 1 of 2 match");
    browser.pictures("overview", &[("light", 380), ("dark", 800), ("light", 1400)]);

    // Links sort and group without the script, and lead to the pages of keys and servers.
    let page = tracker.page().unwrap();
    browser.open(&format!("{page}/?sort=free&order=reversed&group=key"));
    browser.until("document.querySelector('.group').textContent.includes('0 of 3 free')", true);
    browser.until("document.querySelector('[aria-sort=ascending] a').textContent", "Free");
    let server = browser.evaluate("document.querySelector('#servers-table a[href^=\"/server/\"]').href");
    browser.open(&format!("{page}/key/board"));
    browser.until("document.querySelectorAll('.chart').length", 4);
    browser.until("document.querySelectorAll('#hour rect.in-use, #day rect.in-use').length", 2);
    browser.pictures("key", &[("dark", 380), ("light", 1400)]);
    browser.open(server.as_str().unwrap());
    browser.until("document.querySelector('#devices-table').textContent.includes('cpu:0')", true);
    browser.until("document.querySelector('#clients-table').textContent.includes('ada@lab')", true);
    browser.pictures("server", &[("light", 380), ("dark", 1400)]);
    browser.open(page);

    drop(loans);
    drop(second);
    browser.until("document.getElementById('servers').textContent", "1");
    browser.until("document.getElementById('free').textContent", "2");
    browser.until("document.querySelector('#losses-table').textContent.includes('board')", true);
    assert_eq!(browser.evaluate("typeof window.evil"), "undefined");
    assert_eq!(browser.complaints, Vec::<Value>::new(), "the browser found nothing to complain of");

    drop(tracker);
    browser.until("document.getElementById('live').className", "off");
    browser.until("document.title", "no answer · tracker");
}

struct Browser {
    child: Child,
    stdin: ChildStdin,
    said: Receiver<Value>,
    next: u64,
    session: Option<String>,
    /// Errors of scripts, and violations of the page's content policy.
    complaints: Vec<Value>,
    _folder: tempfile::TempDir,
}

impl Browser {
    /// Starts the browser. Returns `None` if there is none.
    fn start() -> Option<Self> {
        let program = std::env::var("CHROMIUM").unwrap_or_else(|_| "chromium".to_owned());
        let version = Command::new(&program).arg("--version").stderr(Stdio::null()).output();
        if !version.is_ok_and(|version| version.status.success()) {
            let why = format!("there is no browser '{program}' (Debian: apt-get install chromium)");
            assert!(std::env::var_os("RPC_TESTS_REQUIRE_BROWSER").is_none(), "{why}");
            println!("SKIPPED: {why}");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        // The protocol is spoken over the descriptors 3 and 4.
        let mut command = Command::new("sh");
        command.args(["-c", "exec \"$@\" 3<&0 4>&1 </dev/null >/dev/null 2>&1", "sh", &program]);
        command.args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]);
        command.args(["--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"]);
        command.arg(format!("--user-data-dir={}", folder.path().display()));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (says, said) = mpsc::channel();
        thread::spawn(move || {
            let mut stdout = BufReader::new(stdout);
            let mut message = Vec::new();
            while stdout.read_until(0, &mut message).is_ok_and(|count| count > 0) {
                message.pop();
                let _ = says.send(serde_json::from_slice(&message).unwrap());
                message.clear();
            }
        });
        let (next, session, complaints) = (0, None, Vec::new());
        Some(Self { child, stdin, said, next, session, complaints, _folder: folder })
    }

    fn open(&mut self, url: &str) {
        let target = self.call("Target.createTarget", json!({"url": "about:blank"}));
        let attached = self.call("Target.attachToTarget", json!({"targetId": target["targetId"], "flatten": true}));
        self.session = Some(attached["sessionId"].as_str().unwrap().to_owned());
        for domain in ["Page", "Runtime", "Log"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
        self.call("Page.navigate", json!({"url": url}));
        self.until("document.readyState", "complete");
    }

    /// Runs a command to its end.
    fn call(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let mut message = json!({"id": self.next, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = json!(session);
        }
        self.stdin.write_all(format!("{message}\0").as_bytes()).unwrap();
        loop {
            let said = self.said.recv_timeout(TIME_LIMIT).expect("the browser answers");
            if said["id"] == self.next {
                assert!(said["error"].is_null(), "{method}: {}", said["error"]);
                return said["result"].clone();
            }
            let entry = &said["params"]["entry"];
            // The browser also reports that the page has lost its server, which some tests cause.
            let complains = entry["level"] == "error" && entry["source"] != "network";
            if said["method"] == "Runtime.exceptionThrown" || complains {
                self.complaints.push(said["params"].clone());
            }
        }
    }

    fn evaluate(&mut self, expression: &str) -> Value {
        let result = self.call("Runtime.evaluate", json!({"expression": expression, "returnByValue": true}));
        result["result"]["value"].clone()
    }

    /// Waits until the expression has the expected value, without reloading the page.
    fn until(&mut self, expression: &str, expected: impl Into<Value>) {
        let (expected, begun) = (expected.into(), Instant::now());
        loop {
            let value = self.evaluate(expression);
            if value == expected {
                return;
            }
            assert!(begun.elapsed() < TIME_LIMIT, "{expression} is {value}, and not {expected}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Takes pictures at several widths. No page is wider than its window.
    fn pictures(&mut self, name: &str, of: &[(&str, u32)]) {
        for (scheme, width) in of.iter().copied() {
            self.screenshot(name, scheme, width);
            assert_eq!(self.evaluate("document.documentElement.scrollWidth <= innerWidth"), true, "{name} at {width}");
        }
    }

    fn screenshot(&mut self, name: &str, scheme: &str, width: u32) {
        let metrics = json!({"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", metrics);
        let scheme_is = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
        self.call("Emulation.setEmulatedMedia", scheme_is);
        let shot = self.call("Page.captureScreenshot", json!({"format": "png"}));
        let image = from_base64(shot["data"].as_str().unwrap());
        assert!(image.starts_with(b"\x89PNG") && image.len() > 5000, "{} bytes", image.len());
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("tracker-{name}-{scheme}-{width}.png"));
        fs::write(&file, image).unwrap();
        println!("{}", file.display());
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    const DIGITS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bytes, mut bits, mut count) = (Vec::new(), 0_u32, 0);
    for digit in text.bytes().take_while(|digit| *digit != b'=') {
        bits = bits << 6 | DIGITS.iter().position(|known| *known == digit).unwrap() as u32;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
        }
    }
    bytes
}
