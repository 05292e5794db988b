//! Metrics and health, read over HTTP as a scraper does.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::client::LeaseOptions;
use rpc_core::device::{AllocRequest, DeviceState, Memory, Stream};
use rpc_core::{
    DataType, Device, DeviceApi, DeviceAttribute, DeviceType, Devices, ErrorKind, Registry, Result, RpcError, Session,
    Value,
};
use rpc_server::config::{ServeConfig, ServeError};
use rpc_server::server::exit_code;
use rpc_server::{RpcServer, Running};
use rpc_transports::Connector;
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::Notify;

use crate::NO_OPENCL;

/// The status line, the headers and the body of an answer.
struct Answer {
    status: u16,
    head: String,
    body: String,
}

/// Sends `request` and reads up to the end of the connection. Blocks.
fn exchange(address: SocketAddr, request: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
}

fn get(address: SocketAddr, path: &str) -> Answer {
    exchange(address, &format!("GET {path} HTTP/1.1\r\nHost: here\r\n\r\n"))
}

struct Fixture {
    running: Running,
    _folder: tempfile::TempDir,
}

impl Fixture {
    async fn start(registry: Registry, change: impl FnOnce(&mut ServeConfig)) -> Self {
        Self::start_with(registry, Devices::new(), change).await
    }

    async fn start_with(registry: Registry, devices: Devices, change: impl FnOnce(&mut ServeConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = ServeConfig {
            listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
            workdir: folder.path().join("work"),
            metrics: Some("127.0.0.1:0".parse().unwrap()),
            ..ServeConfig::default()
        };
        change(&mut config);
        let running = RpcServer::new(registry).devices(devices).config(config).start().await.unwrap();
        Self { running, _folder: folder }
    }

    async fn connect(&self) -> Session {
        Connector::new().connect(&self.running.addresses()[0].to_string()).await.unwrap()
    }

    async fn get(&self, path: &'static str) -> Answer {
        let address = self.running.metrics_address().unwrap();
        tokio::task::spawn_blocking(move || get(address, path)).await.unwrap()
    }

    /// Samples by name and labels.
    async fn metrics(&self) -> HashMap<String, f64> {
        let answer = self.get("/metrics").await;
        assert_eq!(answer.status, 200);
        assert!(answer.head.contains("content-type: text/plain; version=0.0.4"), "{}", answer.head);
        let samples = answer.body.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ').unwrap();
            (name.to_owned(), value.parse().unwrap())
        };
        samples.map(sample).collect()
    }

    /// Reads metrics until `done`: an event may be counted shortly after the client has its answer.
    async fn until(&self, done: impl Fn(&HashMap<String, f64>) -> bool) -> HashMap<String, f64> {
        let mut last = HashMap::new();
        let read = async {
            loop {
                last = self.metrics().await;
                if done(&last) {
                    return;
                }
            }
        };
        let outcome = tokio::time::timeout(Duration::from_secs(20), read).await;
        assert!(outcome.is_ok(), "{last:#?}");
        last
    }
}

fn calls(metrics: &HashMap<String, f64>, function: &str, outcome: &str) -> f64 {
    let name = format!("rpc_calls_total{{function=\"{function}\",outcome=\"{outcome}\"}}");
    metrics.get(&name).copied().unwrap_or(0.0)
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_count_by_function_and_outcome_and_their_durations_are_sorted() {
    let registry = Registry::new();
    registry.add("fail", || -> Result<(), RpcError> { Err(RpcError::new(ErrorKind::Application, "no")) });
    registry.add("a \"quoted\"\\ name", || ());
    registry.add("give", || rpc_core::Function::inline(|| 7_i64));
    let fixture = Fixture::start(registry, |_| {}).await;
    let session = fixture.connect().await;
    let before = fixture.metrics().await;
    assert_eq!((before["rpc_sessions"], before["rpc_sessions_opened_total"]), (1.0, 1.0));

    // Inline, on a thread, failing, with a name that has to be escaped, and one that has none.
    let echo = session.get_function("rpc.echo").await.unwrap();
    for _ in 0..3 {
        echo.call::<i64>((7,)).await.unwrap();
    }
    session.get_function("rpc.noop").await.unwrap().call::<()>(()).await.unwrap();
    session.get_function("fail").await.unwrap().call::<()>(()).await.unwrap_err();
    session.get_function("a \"quoted\"\\ name").await.unwrap().call::<()>(()).await.unwrap();
    let given: rpc_core::RemoteFunction = session.get_function("give").await.unwrap().call(()).await.unwrap();
    assert_eq!(given.call::<i64>(()).await.unwrap(), 7);
    session.get_function("no such function").await.unwrap_err();

    let after = fixture.metrics().await;
    for (function, outcome, count) in [
        ("rpc.echo", "ok", 3.0),
        ("rpc.noop", "ok", 1.0),
        ("fail", "application", 1.0),
        ("a \\\"quoted\\\"\\\\ name", "ok", 1.0),
        ("give", "ok", 1.0),
        ("other", "ok", 1.0),
    ] {
        assert_eq!(calls(&after, function, outcome), count, "{function}: {after:#?}");
    }
    assert!(!after.keys().any(|name| name.contains("no such")), "names that are not registered appear nowhere");
    assert_eq!(after["rpc_calls_in_progress"], 0.0);
    assert_eq!(after["rpc_call_duration_seconds_count{function=\"rpc.echo\"}"], 3.0);
    assert_eq!(after["rpc_call_duration_seconds_bucket{function=\"rpc.echo\",le=\"+Inf\"}"], 3.0);
    assert!(after["rpc_call_duration_seconds_sum{function=\"rpc.echo\"}"] < 60.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn cancelled_and_running_calls_are_counted_apart() {
    let (go, begun) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let registry = Registry::new();
    let (wait, begin) = (go.clone(), begun.clone());
    registry.add_async("wait", move |_: rpc_core::Context| {
        let (wait, begin) = (wait.clone(), begin.clone());
        async move {
            begin.notify_one();
            wait.notified().await;
            Ok::<_, RpcError>(())
        }
    });
    let fixture = Fixture::start(registry, |_| {}).await;
    let session = fixture.connect().await;
    let wait = session.get_function("wait").await.unwrap();
    let (mut first, mut second) = (wait.call::<()>(()).start(), wait.call::<()>(()).start());
    first.admitted().await.unwrap();
    second.admitted().await.unwrap();
    begun.notified().await;
    fixture.until(|metrics| metrics["rpc_calls_in_progress"] == 2.0).await;
    // The second call has not begun: it waits for the first one in its lane.
    drop(second);
    // One answer may hold one metric from before the cancellation and another from after it.
    let cancelled = |metrics: &HashMap<String, f64>| calls(metrics, "wait", "cancelled") == 1.0;
    let metrics = fixture.until(|metrics| cancelled(metrics) && metrics["rpc_calls_in_progress"] == 1.0).await;
    assert_eq!(calls(&metrics, "wait", "ok"), 0.0);
    go.notify_one();
    first.await.unwrap();
    let ended = |metrics: &HashMap<String, f64>| metrics["rpc_calls_in_progress"] == 0.0;
    let metrics = fixture.until(|metrics| calls(metrics, "wait", "ok") == 1.0 && ended(metrics)).await;
    assert_eq!(calls(&metrics, "wait", "cancelled"), 1.0);

    // A call whose client goes away.
    let third = wait.call::<()>(()).start();
    begun.notified().await;
    drop((third, wait, session));
    go.notify_one();
    fixture.until(|metrics| metrics["rpc_sessions"] == 0.0 && metrics["rpc_calls_in_progress"] == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_objects_memory_and_leases_are_counted() {
    let fixture = Fixture::start(Registry::new(), |_| {}).await;
    let session = fixture.connect().await;
    // Several pieces, most of which are received in place.
    let data = vec![7_u8; 5 << 20];
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[5 << 20]).await.unwrap();
    session.copy_to_remote(&tensor, data.clone()).await.unwrap();
    let back: Vec<u8> = session.download(&tensor).await.unwrap();
    assert!(back == data);
    let metrics = fixture.metrics().await;
    let bytes = |direction| metrics[&format!("rpc_tensor_bytes_total{{direction=\"{direction}\"}}")];
    assert_eq!((bytes("in"), bytes("out")), (f64::from(5 << 20), f64::from(5 << 20)));
    assert_eq!((metrics["rpc_handles"], metrics["rpc_memory_bytes"]), (1.0, f64::from(5 << 20)));
    assert_eq!(metrics[&format!("rpc_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"))], 1.0);
    let lease = session.lease(Device::cpu(), &LeaseOptions::default()).await.unwrap();
    let held = fixture.metrics().await;
    assert_eq!((held["rpc_leases"], held["rpc_lease_requests_waiting"]), (1.0, 0.0));
    lease.release().await.unwrap();
    let released = fixture.metrics().await;
    assert_eq!((released["rpc_leases"], released["rpc_leases_granted_total"]), (0.0, 1.0));
    drop((tensor, session));
    let held = ["rpc_sessions", "rpc_handles", "rpc_memory_bytes"];
    let gone = fixture.until(|metrics| held.iter().all(|name| metrics[*name] == 0.0)).await;
    assert_eq!(gone["rpc_sessions_opened_total"], 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_gets_no_session_is_counted_with_the_reason() {
    let fixture = Fixture::start(Registry::new(), |_| {}).await;
    let address = fixture.running.addresses()[0].to_string();
    Connector::new().workspace("../outside").connect(&address).await.unwrap_err();
    // The client may have the reply before the server has counted the refusal.
    let metrics = loop {
        let metrics = fixture.metrics().await;
        let refusals = metrics.iter().filter(|(name, _)| name.starts_with("rpc_refusals_total{reason="));
        match &refusals.collect::<Vec<_>>()[..] {
            [] => {}
            [(_, count)] if **count == 1.0 => break metrics,
            refusals => panic!("{refusals:?}"),
        }
    };
    assert_eq!(metrics["rpc_sessions_opened_total"], 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_server_is_healthy_and_not_ready() {
    let fixture = Fixture::start(Registry::new(), |_| {}).await;
    let session = fixture.connect().await;
    let echo = session.get_function("rpc.sleep").await.unwrap();
    let mut call = echo.call::<()>((3600.0,)).start();
    call.admitted().await.unwrap();
    fixture.until(|metrics| metrics["rpc_calls_in_progress"] == 1.0).await;
    for path in ["/healthz", "/readyz"] {
        assert_eq!(fixture.get(path).await.status, 200, "{path}");
    }
    let drain = fixture.running.drain();
    let mut drain = Box::pin(drain);
    let look = async {
        loop {
            let ready = fixture.get("/readyz").await;
            if ready.status == 503 {
                return ready.body;
            }
        }
    };
    let body = tokio::select! {
        () = &mut drain => panic!("drained with a call in progress"),
        body = look => body,
    };
    assert_eq!((body.as_str(), fixture.get("/healthz").await.status), ("draining\n", 200));
    drop(call);
    tokio::time::timeout(Duration::from_secs(20), &mut drain).await.unwrap();
    drop(drain);
    assert_eq!((fixture.get("/readyz").await.status, fixture.get("/healthz").await.status), (503, 200));
    let address = fixture.running.metrics_address().unwrap();
    drop(fixture);
    // The listener is closed by a task that is being dropped.
    let closed = async {
        while TcpStream::connect(address).is_ok() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), closed).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_off_by_default() {
    let fixture = Fixture::start(Registry::new(), |config| config.metrics = None).await;
    assert_eq!(fixture.running.metrics_address(), None);
    fixture.connect().await.get_function("rpc.echo").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn two_servers_of_one_process_have_counters_of_their_own() {
    let (first, second) =
        (Fixture::start(Registry::new(), |_| {}).await, Fixture::start(Registry::new(), |_| {}).await);
    let _session = first.connect().await;
    let sessions = async |fixture: &Fixture| fixture.metrics().await["rpc_sessions"];
    assert_eq!((sessions(&first).await, sessions(&second).await), (1.0, 0.0));
}

#[tokio::test(flavor = "multi_thread")]
async fn other_paths_and_methods_and_plain_noise_are_answered_briefly() {
    let fixture = Fixture::start(Registry::new(), |_| {}).await;
    assert_eq!(fixture.get("/").await.status, 404);
    assert_eq!(fixture.get("/metrics?name[]=rpc_sessions").await.status, 200);
    let address = fixture.running.metrics_address().unwrap();
    let ask = async |request: String| tokio::task::spawn_blocking(move || exchange(address, &request)).await.unwrap();
    let post = ask("POST /metrics HTTP/1.1\r\nHost: here\r\nContent-Length: 0\r\n\r\n".to_owned()).await;
    assert!(post.status == 405 && post.head.contains("allow: get, head"), "{}", post.head);
    let head = ask("HEAD /healthz HTTP/1.1\r\nHost: here\r\n\r\n".to_owned()).await;
    assert_eq!((head.status, head.body.as_str()), (200, ""));
    assert_eq!(ask("\x16\x03\x01 no http at all\r\n\r\n".to_owned()).await.status, 400);
    assert!(ask(format!("GET /{} HTTP/1.1\r\n\r\n", "a".repeat(1 << 17))).await.status >= 400);
    // Silent connections are limited in number, and the oldest give way. A regression: others
    // waited for them, ten seconds for each sixteen.
    let mute: Vec<_> = (0..40).map(|_| TcpStream::connect(address).unwrap()).collect();
    assert_eq!(fixture.get("/healthz").await.status, 200);
    for (at, mut stream) in mute.into_iter().enumerate().skip(25) {
        stream.set_nonblocking(true).unwrap();
        let outcome = stream.read(&mut [0]);
        assert!(matches!(&outcome, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{at}: {outcome:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_in_use_is_named() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().to_owned(),
        metrics: Some(address.to_string().parse().unwrap()),
        ..ServeConfig::default()
    };
    let error = RpcServer::default().config(config).start().await.unwrap_err();
    assert!(matches!(error, ServeError::Metrics { .. }) && error.to_string().contains(&address.to_string()), "{error}");
    assert_eq!(exit_code::of_server(&Err(error)), exit_code::UNAVAILABLE);
}

#[test]
fn the_daemon_prints_the_address_of_metrics_and_is_not_ready_while_it_drains() {
    for isolate in ["none", "process"] {
        daemon(isolate);
    }
}

fn daemon(isolate: &str) {
    let folder = tempfile::tempdir().unwrap();
    let mut command = crate::server_program();
    command.args(["serve", "--listen", "tcp://127.0.0.1:0", "--metrics", "localhost:0", "--log-level", "error"]);
    command
        .args(["--isolate", isolate, "--workdir"])
        .arg(folder.path())
        .env_clear()
        .env(NO_OPENCL.0, NO_OPENCL.1)
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let address = lines.next().unwrap().strip_prefix("listening on ").unwrap().to_owned();
    let metrics: SocketAddr = lines.next().unwrap().strip_prefix("metrics on http://").unwrap().parse().unwrap();
    assert_eq!(get(metrics, "/readyz").status, 200);
    // A call that keeps the server from ending.
    let session = Connector::new().connect_blocking(&address).unwrap();
    let echo = session.function::<(i64,), i64>("rpc.echo").wait().unwrap();
    assert_eq!(echo.call((7,)).wait().unwrap(), 7);
    let counted = "rpc_calls_total{function=\"rpc.echo\",outcome=\"ok\"} 1";
    assert!(get(metrics, "/metrics").body.contains(counted), "{isolate}");
    let sleep = session.function::<(f64,), ()>("rpc.sleep").wait().unwrap();
    let call = std::thread::spawn(move || sleep.call((3600.0,)).wait());
    while !get(metrics, "/metrics").body.contains("rpc_calls_in_progress 1") {}
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    while get(metrics, "/readyz").status != 503 {}
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(143));
    call.join().unwrap().unwrap_err();
}

/// Device that tells its state, and that cannot be used.
struct TellingDevice;

impl DeviceApi for TellingDevice {
    fn kind(&self) -> DeviceType {
        DeviceType::EXT_DEV
    }

    fn count(&self) -> Result<i32> {
        Ok(2)
    }

    fn attribute(&self, _: i32, _: DeviceAttribute) -> Result<Value> {
        Ok(Value::Null)
    }

    fn state(&self, index: i32) -> DeviceState {
        let mut state = DeviceState::default();
        if index == 1 {
            (state.clock_mhz, state.used_memory, state.utilization_percent) = (Some(1980), Some(7 << 20), Some(31));
        }
        state
    }

    fn allocate(&self, _: i32, _: &AllocRequest<'_>) -> Result<Box<dyn Memory>> {
        Err(RpcError::unsupported("no memory"))
    }

    fn create_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Err(RpcError::unsupported("no streams"))
    }

    fn default_stream(&self, _: i32) -> Result<Arc<dyn Stream>> {
        Err(RpcError::unsupported("no streams"))
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn devices_that_tell_their_state_have_gauges() {
    let devices = Devices::new().with(Arc::new(TellingDevice));
    let fixture = Fixture::start_with(Registry::new(), devices, |_| {}).await;
    let of = |metric: &str, index| format!("rpc_device_{metric}{{device=\"ext_dev:{index}\"}}");
    let clock = of("clock_megahertz", 1);
    let metrics = fixture.until(|metrics| metrics.contains_key(&clock)).await;
    assert_eq!(metrics[&clock], 1980.0);
    assert_eq!(metrics[&of("memory_used_bytes", 1)], f64::from(7 << 20));
    assert_eq!(metrics[&of("utilization_percent", 1)], 31.0);
    assert!(metrics.get(&of("clock_megahertz", 0)).is_none_or(|clock| clock.is_nan()));
}
