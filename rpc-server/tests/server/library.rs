//! The server as a library: addresses, sessions, limits, the ready file, and the end.

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rpc_core::client::Files;
use rpc_core::{DataType, Device, ErrorKind, Pack, Registry, RemoteObject, Session};
use rpc_server::builtins::{ServerInfo, TimeOptions, time_function};
use rpc_server::config::{ByteSize, ConfigError, Isolate, ServeConfig, ServeError, Span};
use rpc_server::{RpcServer, Running};
use rpc_transports::{ConnectError, Connector};
use tokio::sync::Semaphore;

/// A server with a folder of its own.
struct Fixture {
    running: Running,
    folder: tempfile::TempDir,
}

impl Fixture {
    async fn start(registry: Registry, change: impl FnOnce(&mut ServeConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(&folder);
        change(&mut config);
        let running = RpcServer::new(registry).config(config).start().await.unwrap();
        Self { running, folder }
    }

    fn address(&self) -> String {
        self.running.addresses()[0].to_string()
    }

    async fn connect(&self) -> Session {
        Connector::new().connect(&self.address()).await.unwrap()
    }
}

fn config(folder: &tempfile::TempDir) -> ServeConfig {
    ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        workdir: folder.path().join("work"),
        ..ServeConfig::default()
    }
}

async fn info(session: &Session) -> ServerInfo {
    let Pack(info) = session.get_function("rpc.info").await.unwrap().call(()).await.unwrap();
    info
}

fn refusal(outcome: Result<Session, ConnectError>) -> rpc_core::RpcError {
    outcome.unwrap_err().into_rpc_error()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_address_serves_the_programs_own_functions() {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    let socket = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}", socket.path().join("socket").display());
    let fixture = Fixture::start(registry, |config| config.listen.push(unix.parse().unwrap())).await;
    let [tcp, unix_bound] = fixture.running.addresses() else { panic!("{:?}", fixture.running) };
    assert_ne!(tcp.port(), Some(0));
    assert_eq!(unix_bound.to_string(), unix);
    for address in fixture.running.addresses() {
        let session = Connector::new().connect(&address.to_string()).await.unwrap();
        let add = session.function::<(i64, i64), i64>("add").await.unwrap();
        assert_eq!(add.call((1, 2)).await.unwrap(), 3);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn info_counts_over_all_sessions_and_forgets_those_that_ended() {
    let fixture = Fixture::start(Registry::new(), |config| config.key = Some("board".to_owned())).await;
    let (first, second) = (fixture.connect().await, fixture.connect().await);
    let tensor = second.alloc(Device::cpu(), DataType::U8, &[1 << 20]).await.unwrap();
    let new_object = second.get_function("rpc.new_object").await.unwrap();
    let object: RemoteObject = new_object.call(()).await.unwrap();
    let held = info(&first).await;
    assert_eq!((held.sessions, held.memory_bytes, held.key.as_deref()), (2, 1 << 20, Some("board")));
    assert!(held.handles >= 3);
    second.shutdown().await.unwrap();
    drop((tensor, new_object, object, second));
    // The server frees the objects when it has seen the end, which this client is not told.
    let gone = async {
        loop {
            let left = info(&first).await;
            if (left.sessions, left.memory_bytes) == (1, 0) {
                return left;
            }
        }
    };
    let left = tokio::time::timeout(Duration::from_secs(10), gone).await.unwrap();
    assert!(left.handles < held.handles);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_has_its_own_limits_and_those_of_all_sessions() {
    let fixture = Fixture::start(Registry::new(), |config| {
        config.max_memory = ByteSize(1 << 20);
        config.max_total_memory = Some(ByteSize(3 << 19));
        config.max_sessions = 2;
    })
    .await;
    let (first, second) = (fixture.connect().await, fixture.connect().await);
    let alloc = async |session: &Session, len| session.alloc(Device::cpu(), DataType::U8, &[len]).await;
    let error = alloc(&first, (1 << 20) + 1).await.unwrap_err();
    assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_memory"), "{error}");
    let _tensor = alloc(&first, 1 << 20).await.unwrap();
    let error = alloc(&second, 1 << 20).await.unwrap_err();
    assert!(error.kind() == ErrorKind::LimitExceeded && error.message().contains("max_total_memory"), "{error}");
    let _half = alloc(&second, 1 << 19).await.unwrap();
    let error = refusal(Connector::new().connect(&fixture.address()).await);
    assert!(error.message().contains("max_sessions"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_asks_for_another_key_is_refused() {
    let fixture = Fixture::start(Registry::new(), |config| config.key = Some("board".to_owned())).await;
    let connector = Connector::new();
    connector.clone().key("board").connect(&fixture.address()).await.unwrap();
    connector.connect(&format!("{}/board", fixture.address())).await.unwrap();
    let error = refusal(connector.key("other").connect(&fixture.address()).await);
    assert!(error.message().contains("board") && error.message().contains("other"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_workspace_is_removed_with_its_session_and_a_named_one_is_kept() {
    let fixture = Fixture::start(Registry::new(), |_| {}).await;
    let named = Connector::new().workspace("shared");
    let private_files = || {
        let servers = std::fs::read_dir(fixture.folder.path().join("work/private")).unwrap().flatten();
        servers.filter_map(|server| std::fs::read_dir(server.path()).ok()).flat_map(Iterator::flatten).count()
    };
    let session = fixture.connect().await;
    assert_eq!(private_files(), 0, "a session that exchanges no files has no folder");
    Files::new(&session).put_bytes("file", "private").await.unwrap();
    assert_eq!(private_files(), 1);
    session.shutdown().await.unwrap();
    drop(session);

    let first = named.connect(&fixture.address()).await.unwrap();
    Files::new(&first).put_bytes("file", "named").await.unwrap();
    first.shutdown().await.unwrap();
    let second = named.connect(&fixture.address()).await.unwrap();
    let mut content = Vec::new();
    Files::new(&second).get("file", &mut content).await.unwrap();
    assert_eq!(content, b"named");

    assert!(named.workspace("../escape").connect(&fixture.address()).await.is_err());
    drop((first, second));
    fixture.running.drain().await;
    drop(fixture.running);
    // Dropping the server waits for the folders to be removed, once the sessions' last references
    // are gone.
    let empty = async {
        while std::fs::read_dir(fixture.folder.path().join("work/private")).unwrap().next().is_some() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), empty).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_ready_file_names_the_bound_addresses_and_is_removed_with_the_server() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    std::fs::write(&ready, "left by an earlier server").unwrap();
    let mut config = config(&folder);
    config.listen.push("tcp://127.0.0.1:0".parse().unwrap());
    config.ready_file = Some(ready.clone());
    let running = RpcServer::default().config(config).start().await.unwrap();
    let expected: String = running.addresses().iter().map(|address| format!("{address}\n")).collect();
    assert_eq!(std::fs::read_to_string(&ready).unwrap(), expected);
    drop(running);
    assert!(!ready.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cannot_start_says_why_and_leaves_no_ready_file() {
    let folder = tempfile::tempdir().unwrap();
    let ready = folder.path().join("ready");
    let start = async |change: &dyn Fn(&mut ServeConfig)| {
        let mut config = config(&folder);
        config.ready_file = Some(ready.clone());
        change(&mut config);
        RpcServer::default().config(config).start().await.map(drop).unwrap_err()
    };
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("tcp://{}", taken.local_addr().unwrap());
    let error = start(&|config| config.listen.push(address.parse().unwrap())).await;
    assert!(matches!(error, ServeError::Listen(_)), "{error:?}");
    let error = start(&|config| config.listen.push("tcp://0.0.0.0:0".parse().unwrap())).await;
    assert!(matches!(error, ServeError::Config(ConfigError::Insecure { .. })), "{error:?}");
    let error = start(&|config| config.workdir = "/dev/null/work".into()).await;
    assert!(matches!(error, ServeError::Workdir { .. }), "{error:?}");
    assert!(!ready.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_program_without_the_hook_cannot_isolate_sessions() {
    let folder = tempfile::tempdir().unwrap();
    let config = ServeConfig { isolate: Isolate::Process, ..config(&folder) };
    let error = RpcServer::default().config(config).start().await.unwrap_err();
    assert!(matches!(error, ServeError::Config(ConfigError::NoIsolationHook)), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_lets_a_running_call_finish_and_takes_no_new_clients() {
    let (entered, leave) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let registry = Registry::new();
    let (entered_here, leave_here) = (entered.clone(), leave.clone());
    registry.add_async("slow", move || {
        let (entered, leave) = (entered_here.clone(), leave_here.clone());
        async move {
            entered.add_permits(1);
            leave.acquire().await.map(|permit| permit.forget()).map_err(|error| error.to_string())?;
            Ok::<_, String>(7)
        }
    });
    let fixture = Fixture::start(registry, |_| {}).await;
    let session = fixture.connect().await;
    let slow = session.function::<(), i64>("slow").await.unwrap();
    let call = slow.call(()).start();
    entered.acquire().await.unwrap().forget();
    let address = fixture.address();
    let drain = async {
        fixture.running.drain().await;
    };
    let client = async {
        // Once new clients are turned away the drain has begun.
        while Connector::new().connect(&address).await.is_ok() {}
        leave.add_permits(1);
        assert_eq!(call.await.unwrap(), 7);
    };
    tokio::time::timeout(Duration::from_secs(20), async { tokio::join!(drain, client) }).await.unwrap();
    assert_eq!(fixture.running.sessions(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_do_not_end_in_time_are_stopped() {
    let registry = Registry::new();
    let started = Arc::new(Semaphore::new(0));
    let starting = started.clone();
    registry.add_async("forever", move || {
        starting.add_permits(1);
        pending::<()>()
    });
    let fixture = Fixture::start(registry, |config| config.drain_timeout = Span(Duration::from_millis(50))).await;
    let session = fixture.connect().await;
    let forever = session.function::<(), ()>("forever").await.unwrap();
    let call = forever.call(()).start();
    started.acquire().await.unwrap().forget();
    fixture.running.drain().await;
    let error = tokio::time::timeout(Duration::from_secs(5), call).await.unwrap().unwrap_err();
    assert!(error.ends_session() && error.request_may_have_run(), "{error:?}");
    tokio::time::timeout(Duration::from_secs(5), fixture.running.idle()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn asynchronous_functions_are_timed_on_the_servers_runtime() {
    let registry = Registry::new();
    let calls = Arc::new(AtomicU64::new(0));
    let counter = calls.clone();
    registry.add_async("tick", move || {
        counter.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(Duration::from_millis(1))
    });
    let fixture = Fixture::start(registry, |_| {}).await;
    let session = fixture.connect().await;
    let tick = session.get_function("tick").await.unwrap();
    let options = TimeOptions { repeat: 3, ..TimeOptions::default() };
    let samples = time_function(&session, &tick, &options, ()).await.unwrap();
    assert!(samples.len() == 3 && samples.iter().all(|seconds| *seconds >= 1e-3), "{samples:?}");
    assert_eq!(calls.load(Ordering::Relaxed), 4);
}
