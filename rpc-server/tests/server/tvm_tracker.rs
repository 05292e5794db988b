//! Servers and clients of TVM at a tracker with `--tvm`: small ones that are written here from the
//! description of the wire, and the real ones of the package `apache-tvm`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Pack, Registry, RemoteObject, Session};
use rpc_server::config::{
    ConfigError, ListenAddress, ServeConfig, Span, TrackerAddress, TrackerConfig, TvmTrackerAddress,
};
use rpc_server::tracker::{RunningTracker, Tracker};
use rpc_server::{RpcServer, Running, ServerProcess};
use rpc_transports::tracker::{Grant, HolderState, Returned, ServerRequest, Summary, TrackerClient, functions};
use rpc_transports::{Address, Connector};
use rpc_tvm::wire;
use tokio::runtime::Runtime;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(30);

/// A connection to a tracker in TVM's protocol.
pub(crate) struct Peer(pub(crate) TcpStream);

impl Peer {
    fn connect(pool: &Pool) -> Self {
        let mut peer = Self::dial(pool);
        peer.send(&[0x71, 0xf2, 2, 0]);
        assert_eq!(peer.read(4), [0x71, 0xf2, 2, 0]);
        peer
    }

    fn dial(pool: &Pool) -> Self {
        let stream = TcpStream::connect(pool.address().strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    pub(crate) fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    pub(crate) fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    pub(crate) fn say(&mut self, text: &str) {
        self.send(&framed(text));
    }

    pub(crate) fn reply(&mut self) -> String {
        let len = i32::from_le_bytes(self.read(4).try_into().unwrap());
        String::from_utf8(self.read(usize::try_from(len).unwrap())).unwrap()
    }

    pub(crate) fn ask(&mut self, text: &str) -> String {
        self.say(text);
        self.reply()
    }

    fn put(&mut self, key: &str, port: u16, match_key: &str) {
        assert_eq!(self.ask(&format!(r#"[3, "{key}", [{port}, "{match_key}"], null]"#)), "0");
    }

    /// Asks for a server. The answer may come later.
    fn request(&mut self, key: &str, priority: i32) {
        self.say(&format!(r#"[4, "{key}", "", {priority}]"#));
    }

    fn is_at_end(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(count) => count == 0,
            // Bytes that the tracker has not read are in its socket as it closes that.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn framed(text: &str) -> Vec<u8> {
    [&(text.len() as i32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn granted(port: u16, match_key: &str) -> String {
    format!(r#"[0, ["127.0.0.1", {port}, "{match_key}"]]"#)
}

/// A tracker in this process.
struct Pool {
    tracker: RunningTracker,
    runtime: Runtime,
    folder: tempfile::TempDir,
}

impl Pool {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut TrackerConfig)) -> Self {
        let mut config = TrackerConfig { listen: vec![any_port()], tvm: true, ..TrackerConfig::default() };
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let tracker = runtime.block_on(Tracker::start(&config)).unwrap();
        Self { tracker, runtime, folder: tempfile::tempdir().unwrap() }
    }

    fn address(&self) -> String {
        self.tracker.server.addresses()[0].to_string()
    }

    /// Starts a server of this project, and waits until it has registered.
    fn server(&self, key: &str, change: impl FnOnce(&mut ServeConfig)) -> Running {
        let registry = Registry::new();
        registry.add("addone", |number: i64| number + 1);
        let tracker: Address = self.address().parse().unwrap();
        let mut config = ServeConfig {
            listen: vec![any_port()],
            workdir: self.folder.path().join("work"),
            tracker: vec![TrackerAddress(tracker)],
            tracker_key: Some(key.to_owned()),
            tvm: true,
            ..ServeConfig::default()
        };
        change(&mut config);
        let server = self.runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap();
        self.until(|summary| summary.servers.iter().any(|server| server.key == key));
        server
    }

    fn client(&self) -> TrackerClient {
        self.runtime.block_on(TrackerClient::connect(&self.address())).unwrap()
    }

    /// Puts a native request into the queue.
    fn native_request(&self, request: ServerRequest) -> NativeRequest {
        self.runtime.block_on(async {
            let session = Connector::new().connect(&self.address()).await.unwrap();
            let ask = session.get_function(functions::REQUEST).await.unwrap();
            let entry = ask.call((Pack(request),)).await.unwrap();
            NativeRequest { session, entry }
        })
    }

    /// Waits until the summary satisfies the predicate.
    fn until(&self, is_so: impl Fn(&Summary) -> bool) -> Summary {
        let deadline = Instant::now() + LIMIT;
        loop {
            let summary = self.tracker.tracker.summary();
            if is_so(&summary) {
                return summary;
            }
            assert!(Instant::now() < deadline, "it does not come to that: {summary:#?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn until_waiting(&self, count: usize) {
        self.until(|summary| summary.queue.len() == count);
    }

    fn until_free(&self, places: u32) {
        self.until(|summary| summary.servers.iter().map(|server| server.free).sum::<u32>() == places);
    }
}

/// A request of a native client.
struct NativeRequest {
    session: Session,
    entry: RemoteObject,
}

impl NativeRequest {
    fn grant(&self, pool: &Pool) -> Grant {
        pool.runtime.block_on(async {
            let wait = self.session.get_function(functions::WAIT).await.unwrap();
            let Pack(mut grants): Pack<Vec<Grant>> = wait.call((&self.entry,)).await.unwrap();
            assert_eq!(grants.len(), 1);
            grants.remove(0)
        })
    }

    fn give_back(&self, pool: &Pool, serial: u64) {
        pool.runtime.block_on(async {
            let give_back = self.session.get_function(functions::GIVE_BACK).await.unwrap();
            let returned = vec![Returned { serial, why: "no way".to_owned() }];
            let () = give_back.call((&self.entry, Pack(returned))).await.unwrap();
        });
    }
}

fn any_port() -> ListenAddress {
    "tcp://127.0.0.1:0".parse().unwrap()
}

#[test]
fn a_server_of_tvm_is_given_to_its_clients_one_after_the_other() {
    let pool = Pool::new();
    let mut server = Peer::connect(&pool);
    assert_eq!(server.ask("[1]"), "0");
    assert_eq!(server.ask(r#"[5, {"key": "server:rasp", "addr": [null, 9090]}]"#), "0");
    assert_eq!(server.ask("[7]"), "[]");
    server.put("rasp", 9090, "rasp:0.1");
    assert_eq!(server.ask("[7]"), r#"["rasp:0.1"]"#);

    let (mut first, mut second) = (Peer::connect(&pool), Peer::connect(&pool));
    first.request("rasp", 1);
    assert_eq!(first.reply(), granted(9090, "rasp:0.1"));
    assert_eq!(server.ask("[7]"), "[]", "it was handed out");
    second.request("rasp", 1);
    pool.until_waiting(1);
    // The session is over.
    server.put("rasp", 9090, "rasp:0.2");
    assert_eq!(second.reply(), granted(9090, "rasp:0.2"));
    let summary = pool.until(|summary| summary.servers.len() == 1 && summary.queue.is_empty());
    assert_eq!((summary.servers[0].free, summary.servers[0].capacity), (0, 1), "one place, as before");
}

#[test]
fn a_higher_priority_comes_first_among_clients_of_both_protocols() {
    let pool = Pool::new();
    let (mut low, mut high) = (Peer::connect(&pool), Peer::connect(&pool));
    low.request("rasp", 1);
    pool.until_waiting(1);
    let native = pool.native_request(ServerRequest::new("rasp").priority(5));
    pool.until_waiting(2);
    high.request("rasp", 9);
    pool.until_waiting(3);
    let mut server = Peer::connect(&pool);
    server.put("rasp", 9090, "rasp:0.1");
    assert_eq!(high.reply(), granted(9090, "rasp:0.1"));
    server.put("rasp", 9090, "rasp:0.2");
    let grant = native.grant(&pool);
    assert_eq!(grant.address, ["tvm://127.0.0.1:9090/rasp:0.2"]);
    assert_eq!((grant.ticket.as_str(), grant.server.as_str()), ("", "127.0.0.1:9090"));
    assert_eq!(grant.labels, [("dialect".to_owned(), "tvm".to_owned())].into());
    let summary = pool.tracker.tracker.summary();
    assert_eq!(summary.servers[0].address, ["tvm://127.0.0.1:9090"], "match keys are for the clients that got them");
    assert_eq!(summary.servers[0].holders[0].state, HolderState::InUse);
    server.put("rasp", 9090, "rasp:0.3");
    assert_eq!(low.reply(), granted(9090, "rasp:0.3"));
}

#[test]
fn a_server_that_a_native_client_was_given_comes_back_when_the_server_says_so() {
    let pool = Pool::new();
    let mut server = Peer::connect(&pool);
    server.put("rasp", 9090, "rasp:0.1");
    let native = pool.native_request(ServerRequest::new("rasp"));
    let serial = native.grant(&pool).serial;
    native.give_back(&pool, serial);
    // Whatever the client says, or does not say, its session with the server may go on.
    drop(native);
    assert_eq!(pool.tracker.tracker.summary().servers[0].free, 0);
    server.put("rasp", 9090, "rasp:0.2");
    pool.until_free(1);
    // Clients that name no key may not know TVM's protocol.
    let any = pool.client();
    let nobody = pool.runtime.block_on(any.request(&ServerRequest::any().timeout(Duration::ZERO)));
    assert_eq!(nobody.unwrap_err().kind(), ErrorKind::DeadlineExceeded);
}

#[test]
fn a_server_that_refuses_the_match_key_that_was_granted_is_asked_for_again() {
    let pool = Pool::new();
    let board = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = board.local_addr().unwrap().port();
    let mut server = Peer::connect(&pool);
    server.put("rasp", port, "rasp:0.1");
    let serves = std::thread::spawn(move || {
        let mut keys = Vec::new();
        for at in 1..=2 {
            let (stream, _) = board.accept().unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut client = Peer(stream);
            let len = i32::from_le_bytes(client.read(8)[4..].try_into().unwrap());
            keys.push(String::from_utf8(client.read(len as usize)).unwrap());
            if at == 1 {
                // As a server that has a session with another client, or has restarted.
                client.send(&wire::HelloAnswer::Mismatch.encode());
                drop(client);
                server.put("rasp", port, "rasp:0.2");
                continue;
            }
            client.send(&wire::HelloAnswer::Accepted("server:rasp").encode());
            let none = wire::returned(&[wire::WireValue::None]);
            // The reply to the first request, and to the one for the size of packets.
            for _ in 0..2 {
                let len = u64::from_le_bytes(client.read(8).try_into().unwrap());
                client.read(usize::try_from(len).unwrap());
                client.send(&none);
            }
            _ = std::io::copy(&mut client.0, &mut std::io::sink());
        }
        keys
    });
    let connector = Connector::new().transports(rpc_server::transports());
    let request = ServerRequest::new("rasp").timeout(LIMIT);
    let loan = pool.runtime.block_on(async {
        TrackerClient::connect_with(connector, &pool.address()).await.unwrap().request(&request).await.unwrap()
    });
    assert!(loan.grant().address[0].ends_with("/rasp:0.2"), "{:?}", loan.grant());
    pool.runtime.block_on(async { drop(loan) });
    let keys = serves.join().unwrap();
    assert_eq!(keys, ["client:rasp:0.1", "client:rasp:0.2"]);
}

#[test]
fn a_client_of_tvm_gets_a_server_of_this_project_that_serves_it() {
    let pool = Pool::new();
    // Servers that such a client could not use.
    let socket = pool.folder.path().join("socket");
    let _native = pool.server("board", |config| config.tvm = false);
    let at_socket = ListenAddress(format!("unix:{}", socket.display()).parse().unwrap());
    let _local = pool.server("local", |config| config.listen = vec![at_socket]);
    let mut client = Peer::connect(&pool);
    client.request("board", 1);
    client.request("local", 1);
    pool.until_waiting(2);

    let server = pool.server("board", |config| {
        config.key = Some("secret".to_owned());
        config.capacity = 2;
    });
    let port = server.addresses()[0].port().unwrap();
    let reply: serde_json::Value = serde_json::from_str(&client.reply()).unwrap();
    assert_eq!((&reply[0], &reply[1][0], &reply[1][1]), (&0.into(), &"127.0.0.1".into(), &port.into()));
    let match_key = reply[1][2].as_str().unwrap().to_owned();
    assert!(match_key.starts_with("board:t1."), "{match_key}");
    let session = hello(port, &format!("client:{match_key} -timeout=60"));
    assert_eq!(session.1, 0xff271);
    pool.until(|summary| summary.servers.iter().any(|server| server.free == 1 && server.capacity == 2));
    let used = hello(port, &format!("client:{match_key}")).1;
    let wrong = hello(port, "client:board:t1.7.123456.aae3cfd88aab2f67").1;
    assert_eq!((used, wrong), (0xff273, 0xff273), "a match key is good for one session, and none can be made up");
    // Each of its places is listed, as at a tracker of TVM.
    let text = client.ask("[6]");
    let summary: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(summary[1]["queue_info"]["board"], serde_json::json!({"free": 1, "pending": 0}));
    assert_eq!(summary[1]["queue_info"]["local"], serde_json::json!({"free": 0, "pending": 1}));
    let listed = serde_json::json!({"key": "server:board", "addr": ["127.0.0.1", port]});
    assert_eq!(summary[1]["server_info"], serde_json::json!([listed, listed]));
    drop(session);
    pool.until(|summary| summary.servers.iter().any(|server| server.free == 2));
}

/// Says hello to a server in TVM's protocol. Returns the connection, and the code of the answer.
fn hello(port: u16, key: &str) -> (TcpStream, i32) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(LIMIT)).unwrap();
    stream
        .write_all(&[&0xff271_i32.to_le_bytes()[..], &(key.len() as i32).to_le_bytes(), key.as_bytes()].concat())
        .unwrap();
    let mut code = [0; 4];
    stream.read_exact(&mut code).unwrap();
    (stream, i32::from_le_bytes(code))
}

#[test]
fn a_tracker_that_is_killed_is_the_end_of_requests_that_wait() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = crate::server_program();
    program.args(["tracker", "--listen", "tcp://127.0.0.1:0", "--tvm", "--exit-with-stdin", "--log-level", "error"]);
    program.env("XDG_STATE_HOME", folder.path());
    let mut tracker = ServerProcess::spawn(program).unwrap();
    let dial = || {
        let stream = TcpStream::connect(tracker.address().strip_prefix("tcp://").unwrap()).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut peer = Peer(stream);
        peer.send(&[0x71, 0xf2, 2, 0]);
        assert_eq!(peer.read(4), [0x71, 0xf2, 2, 0]);
        peer
    };
    let (mut server, mut waits, mut in_message) = (dial(), dial(), dial());
    server.put("rasp", 9090, "rasp:0.1");
    // A connection's messages are taken in their order: with the summary the request is queued.
    waits.request("board", 1);
    assert!(waits.ask("[6]").contains("board"));
    in_message.send(&framed("[1]")[..6]);
    tracker.kill().unwrap();
    for mut peer in [server, waits, in_message] {
        assert!(peer.is_at_end());
    }
}

#[test]
fn servers_and_clients_that_are_gone_leave_nothing_behind() {
    let pool = Pool::new();
    let (mut gone, mut waits) = (Peer::connect(&pool), Peer::connect(&pool));
    gone.request("rasp", 9);
    pool.until_waiting(1);
    waits.request("rasp", 1);
    pool.until_waiting(2);
    drop(gone);
    pool.until_waiting(1);
    let mut server = Peer::connect(&pool);
    server.put("rasp", 9090, "rasp:0.1");
    assert_eq!(waits.reply(), granted(9090, "rasp:0.1"));
    // Without a description of itself, as with one.
    server.put("rasp", 9091, "rasp:0.2");
    server.put("nano", 9091, "anything");
    pool.until(|summary| summary.servers.len() == 3);
    drop(server);
    pool.until(|summary| summary.servers.is_empty());
    let mut described = Peer::connect(&pool);
    assert_eq!(described.ask(r#"[5, {"key": "server:rasp", "addr": ["pc", "9090"]}]"#), "0");
    let listed = r#"[0, {"queue_info": {}, "server_info": [{"key": "server:rasp", "addr": ["pc", "9090"]}]}]"#;
    assert_eq!(described.ask("[6]"), listed);
    assert_eq!(described.ask(r#"[5, {"key": "client:rasp"}]"#), "0");
    assert_eq!(described.ask("[6]"), r#"[0, {"queue_info": {}, "server_info": []}]"#);
    assert_eq!(described.ask(r#"[5, {"key": "server:rasp"}]"#), "0");
    drop(described);
    let deadline = Instant::now() + LIMIT;
    while waits.ask("[6]") != r#"[0, {"queue_info": {}, "server_info": []}]"# {
        assert!(Instant::now() < deadline, "the server is still listed");
    }
}

#[test]
fn a_server_is_registered_as_long_as_it_is_connected() {
    let pool = Pool::with(|config| config.lease = Span(Duration::from_millis(150)));
    let mut server = Peer::connect(&pool);
    server.put("rasp", 9090, "rasp:0.1");
    let mut client = Peer::connect(&pool);
    client.request("rasp", 1);
    assert_eq!(client.reply(), granted(9090, "rasp:0.1"));
    pool.until(|summary| summary.servers[0].heard_ago_ms > 600);
    assert_eq!(pool.tracker.tracker.summary().servers[0].free, 0, "no ticket expires");
}

#[test]
fn hosts_that_servers_name_are_checked() {
    let pool = Pool::with(|config| config.allow_advertise = vec!["tcp://pc.lan:*".to_owned()]);
    let mut server = Peer::connect(&pool);
    let mut put = |host: &str| server.ask(&format!(r#"[3, "rasp", [9090, "rasp:0.1"], {host}]"#));
    for refused in [r#""10.0.0.7""#, r#""other.lan""#, r#""a b""#, r#""""#, r#""tcp://pc.lan:1/x""#] {
        assert_eq!(put(refused), "-1", "{refused}");
    }
    assert_eq!(put(r#""pc.lan""#), "0");
    let mut client = Peer::connect(&pool);
    client.request("rasp", 1);
    assert_eq!(client.reply(), r#"[0, ["pc.lan", 9090, "rasp:0.1"]]"#);
    assert_eq!(pool.tracker.tracker.summary().servers.len(), 1);
}

#[test]
fn keys_that_only_proxies_make_are_borne() {
    let pool = Pool::new();
    let mut proxy = Peer::connect(&pool);
    let info = r#"[5, {"key": "server:proxy[K1,K2]", "addr": [null, 9090]}]"#;
    assert_eq!(proxy.ask(info), "0");
    proxy.put("K{'K:0.1', 'K", 9090, "K{'K:0.1', 'K:0.3'}0.2");
    proxy.put("K", 9090, "K:0.4");
    assert_eq!(proxy.ask("[7]"), r#"["K{'K:0.1', 'K:0.3'}0.2", "K:0.4"]"#);
    let mut client = Peer::connect(&pool);
    client.request("K{'K:0.1', 'K", 1);
    assert_eq!(client.reply(), granted(9090, "K{'K:0.1', 'K:0.3'}0.2"));
    // A native client could ask for this one.
    assert_eq!(proxy.ask(r#"[3, "K", [9090, "K {"], null]"#), "-1");
    for key in ["", &"k".repeat(2000)] {
        assert_eq!(proxy.ask(&format!(r#"[3, "{key}", [9090, "K:0.5"], null]"#)), "-1");
        assert!(client.ask(&format!(r#"[4, "{key}", "", 1]"#)).starts_with("[-1, \""));
    }
    assert_eq!(proxy.ask(r#"[3, "K", [9090, ""], null]"#), "-1");
}

#[test]
fn a_connection_may_have_several_places_and_several_requests() {
    let pool = Pool::new();
    let (mut server, mut client) = (Peer::connect(&pool), Peer::connect(&pool));
    server.put("rasp", 9090, "rasp:0.1");
    server.put("rasp", 9090, "rasp:0.2");
    for request in 0..3 {
        client.request("rasp", 1);
        if request < 2 {
            let reply = client.reply();
            assert!(reply == granted(9090, "rasp:0.1") || reply == granted(9090, "rasp:0.2"), "{reply}");
        }
    }
    // While the last request waits, other messages have their replies.
    assert_eq!(client.ask("[1]"), "0");
    assert_eq!(server.ask("[7]"), "[]");
    server.put("rasp", 9090, "rasp:0.3");
    assert_eq!(client.reply(), granted(9090, "rasp:0.3"));
    assert_eq!(pool.tracker.tracker.summary().servers.len(), 2, "as many as there have been at one time");
}

#[test]
fn limits_hold_as_for_native_peers() {
    let pool = Pool::with(|config| {
        config.max_servers_per_peer = 2;
        config.max_waiting_per_client = 2;
    });
    let (mut server, mut other) = (Peer::connect(&pool), Peer::connect(&pool));
    server.put("rasp", 9090, "rasp:0.1");
    other.put("rasp", 9091, "rasp:0.2");
    assert_eq!(server.ask(r#"[3, "rasp", [9092, "rasp:0.3"], null]"#), "-1");
    server.request("nano", 1);
    other.request("nano", 1);
    pool.until_waiting(2);
    let refused = server.ask(r#"[4, "nano", "", 1]"#);
    assert!(refused.starts_with("[-1, \"") && refused.contains("max_waiting_per_client"), "{refused}");
    drop((server, other));
    pool.until(|summary| summary.servers.is_empty() && summary.queue.is_empty());
}

#[test]
fn no_bytes_harm_the_tracker() {
    let pool = Pool::new();
    let mut witness = Peer::connect(&pool);
    let lengths = [0, -1, i32::MIN, (1 << 20) + 1, i32::MAX];
    let mut bad: Vec<Vec<u8>> = lengths.iter().map(|len| len.to_le_bytes().to_vec()).collect();
    bad.extend(["x", "{}", "[]", "[8]", "[-1]", "[1, 2]", r#"[3, "k", [-1, "m"], null]"#, r#"[4, "k"]"#].map(framed));
    bad.push(framed(&format!(r#"[5, {{"x": {}"#, "[".repeat(100_000))));
    bad.push([&3_i32.to_le_bytes()[..], &[0xff; 3]].concat());
    for bytes in bad {
        let mut peer = Peer::connect(&pool);
        assert_eq!(peer.ask("[1]"), "0");
        peer.send(&bytes);
        assert!(peer.is_at_end(), "{bytes:?}");
    }
    // A cut message, a magic number in pieces with messages behind it, and another magic number.
    let mut cut = Peer::connect(&pool);
    cut.send(&framed("[6]")[..5]);
    drop(cut);
    let mut pieces = Peer::dial(&pool);
    for byte in [0x71, 0xf2, 2, 0] {
        pieces.send(&[byte]);
    }
    pieces.say("[1]");
    pieces.say("[7]");
    assert_eq!((pieces.read(4), pieces.reply(), pieces.reply()), (vec![0x71, 0xf2, 2, 0], "0".into(), "[]".into()));
    let mut wrong = Peer::dial(&pool);
    wrong.send(&[0x71, 0xf2, 0x0f, 0, 4, 0, 0, 0, b'a', b'b', b'c', b'd']);
    let mut answer = Vec::new();
    _ = wrong.0.read_to_end(&mut answer);
    // Nobody stops a tracker from outside.
    assert_eq!(witness.ask(r#"[2, "0.1"]"#), "-1");
    assert_eq!(witness.ask("[1]"), "0");
    // A message of the largest length.
    let long = format!(r#"[2, "{}"]"#, "x".repeat((1 << 20) - 7));
    assert_eq!((long.len(), witness.ask(&long)), (1 << 20, "-1".to_owned()));
}

#[test]
fn peers_of_tvm_are_served_only_where_the_operator_says_so() {
    let pool = Pool::with(|config| config.tvm = false);
    let mut peer = Peer::dial(&pool);
    peer.send(&[0x71, 0xf2, 2, 0]);
    peer.send(&framed("[1]"));
    let mut answer = Vec::new();
    _ = peer.0.read_to_end(&mut answer);
    assert!(!answer.starts_with(&[0x71, 0xf2, 2, 0]), "{answer:?}");

    let config =
        |listen: &str| TrackerConfig { listen: vec![listen.parse().unwrap()], tvm: true, ..TrackerConfig::default() };
    assert!(matches!(config("unix:/run/pool.sock").check(), Ok(())));
    let open = TrackerConfig { insecure: true, ..config("tcp://0.0.0.0:0") };
    assert!(matches!(open.check(), Ok(())));
    let token_file = Some("tokens".into());
    let proven = TrackerConfig { token_file, ..config("tls://127.0.0.1:0") };
    assert!(matches!(proven.check(), Err(ConfigError::TvmWithIdentity)));
    let proven = TrackerConfig { insecure: false, ..config("tcp://0.0.0.0:0") };
    assert!(proven.check().is_err());
}

/// A tracker of TVM, at which a server registers.
pub(crate) struct FakeTracker(pub(crate) TcpListener);

impl FakeTracker {
    pub(crate) fn new() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").unwrap())
    }

    /// Accepts a server that is reached at this port.
    fn accept(&self, port: u16) -> Peer {
        self.accept_as("server:rasp", port)
    }

    /// Accepts a server with this name that is reached at this port.
    pub(crate) fn accept_as(&self, name: &str, port: u16) -> Peer {
        let stream = self.0.accept().unwrap().0;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut server = Peer(stream);
        assert_eq!(server.read(4), [0x71, 0xf2, 2, 0]);
        server.send(&[0x71, 0xf2, 2, 0]);
        let info: serde_json::Value = serde_json::from_str(&server.reply()).unwrap();
        assert_eq!(info, serde_json::json!([5, {"key": name, "addr": ["127.0.0.1", port]}]));
        server.say("0");
        server
    }
}

impl Peer {
    /// Returns the match key of a place that the server offers in its next message.
    pub(crate) fn next_put(&mut self, port: u16) -> String {
        let message = self.reply();
        let message: serde_json::Value = serde_json::from_str(&message).unwrap();
        let match_key = message[2][1].as_str().unwrap_or_default().to_owned();
        assert_eq!(message, serde_json::json!([3, "rasp", [port, match_key], "127.0.0.1"]));
        match_key
    }
}

/// Starts a server that registers at a tracker of TVM.
fn registering_server(tracker: &FakeTracker, runtime: &Runtime, folder: &Path) -> Running {
    let config = ServeConfig {
        listen: vec![any_port()],
        workdir: folder.to_owned(),
        tvm: true,
        key: Some("rasp".to_owned()),
        tvm_tracker: Some(tracker.0.local_addr().unwrap().to_string().parse().unwrap()),
        ..ServeConfig::default()
    };
    runtime.block_on(RpcServer::new(Registry::new()).config(config).start()).unwrap()
}

#[test]
fn a_tracker_that_dies_leaves_the_sessions_alone() {
    let tracker = FakeTracker::new();
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let server = registering_server(&tracker, &runtime, folder.path());
    let port = server.addresses()[0].port().unwrap();
    let mut peer = tracker.accept(port);
    let match_key = peer.next_put(port);
    peer.say("0");
    let (mut session, code) = hello(port, &format!("client:{match_key}"));
    assert_eq!(code, 0xff271);
    // The system closes the sockets of a process that is killed.
    drop((peer, tracker));
    session.write_all(&wire::Request::Init { version: "0.8.0".into(), constructor: Vec::new() }.encode()).unwrap();
    let begun = wire::returned(&[wire::WireValue::None]);
    let expected = [&11_i32.to_le_bytes()[..], b"server:rasp", &begun].concat();
    let mut answer = vec![0; expected.len()];
    session.read_exact(&mut answer).unwrap();
    assert_eq!(answer, expected);
    drop(session);
    runtime.block_on(server.idle());
}

#[test]
fn a_server_registers_at_a_tracker_of_tvm() {
    let tracker = FakeTracker::new();
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let server = registering_server(&tracker, &runtime, folder.path());
    let port = server.addresses()[0].port().unwrap();
    let mut peer = tracker.accept(port);
    let first = peer.next_put(port);
    assert!(first.starts_with("rasp:0."), "{first}");
    peer.say("0");
    for none in ["client:rasp", "client:rasp:0.1", "client:", "server:rasp"] {
        assert_eq!(hello(port, none).1, 0xff273, "{none}");
    }
    // The server looks at the match keys that were given out.
    assert_eq!(peer.reply(), "[7]");
    let (session, code) = hello(port, &format!("client:{first} -timeout=60"));
    assert_eq!(code, 0xff271);
    peer.say("[]");
    assert_eq!(hello(port, &format!("client:{first}")).1, 0xff273, "it is good for one session");
    drop(session);
    let second = peer.next_put(port);
    assert_ne!(second, first);
    peer.say("0");

    // The tracker is gone, and another one does not want the server at first.
    drop(peer);
    let mut refuses = tracker.accept(port);
    refuses.next_put(port);
    refuses.say("-1");
    let mut peer = tracker.accept(port);
    let third = peer.next_put(port);
    peer.say("0");
    let (lost, held) = (hello(port, &format!("client:{second}")), hello(port, &format!("client:{third}")));
    assert_eq!((lost.1, held.1), (0xff273, 0xff271));
    runtime.block_on(server.drain());
    // It may have looked at its match keys before it left.
    let end = peer.0.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
    assert!(end.is_ok() || end == Err(std::io::ErrorKind::ConnectionReset), "the server leaves: {end:?}");
}

impl FakeTracker {
    /// Accepts a client at `tvm-tracker://` that asks with priority 1, and gives it this reply.
    fn answer(&self, key: &str, reply: &str) {
        let stream = self.0.accept().unwrap().0;
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut client = Peer(stream);
        assert_eq!(client.read(4), [0x71, 0xf2, 2, 0]);
        client.send(&[0x71, 0xf2, 2, 0]);
        let request: serde_json::Value = serde_json::from_str(&client.reply()).unwrap();
        assert_eq!(request, serde_json::json!([4, key, "", 1]));
        client.say(reply);
        // The client has its grant, or refuses it.
        let _ = client.0.read(&mut [0]);
    }
}

/// A grant may be stale: the server is gone, or waits for another client.
#[test]
fn a_client_of_a_tracker_of_tvm_asks_again_after_a_stale_grant() {
    let tracker = FakeTracker::new();
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let config = ServeConfig {
        listen: vec![any_port()],
        workdir: folder.path().to_owned(),
        tvm: true,
        key: Some("board".to_owned()),
        ..ServeConfig::default()
    };
    let server = runtime.block_on(RpcServer::new(Registry::new()).config(config).start()).unwrap();
    let port = server.addresses()[0].port().unwrap();
    let address = format!("tvm-tracker://{}/rasp", tracker.0.local_addr().unwrap());
    let connector = Connector::new().transports(rpc_server::transports());
    let client = runtime.spawn(async move { connector.connect(&address).await });
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    tracker.answer("rasp", &granted(gone, "rasp:0.1"));
    tracker.answer("rasp", &granted(port, "rasp:0.2"));
    tracker.answer("rasp", &granted(port, "board"));
    let session = runtime.block_on(client).unwrap().unwrap();
    let echo = runtime.block_on(session.get_function("rpc.echo").into_future()).unwrap();
    assert_eq!(runtime.block_on(echo.call::<i64>((7_i64,)).into_future()).unwrap(), 7);
    drop(session);
}

#[test]
fn a_client_says_what_is_wrong_with_a_tracker_of_tvm() {
    let tracker = FakeTracker::new();
    let runtime = Runtime::new().unwrap();
    let address = format!("tvm-tracker://{}/rasp?timeout=9", tracker.0.local_addr().unwrap());
    let connector = Connector::new().transports(rpc_server::transports());
    for (reply, kind, text) in [
        (r#"[-1, "no luck"]"#, ErrorKind::Refused, "no luck"),
        ("-1", ErrorKind::Refused, "refused the request"),
        ("0", ErrorKind::Protocol, "malformed grant"),
        ("[0]", ErrorKind::Protocol, "malformed grant"),
        (r#"[0, ["127.0.0.1", 70000, "k"]]"#, ErrorKind::Protocol, "malformed grant"),
        (r#"[0, ["a b", 1, "k"]]"#, ErrorKind::Protocol, "a server at 'a b'"),
        (r#"[0, ["127.0.0.1", 1, "k -timeout=1"]]"#, ErrorKind::Protocol, "a key with spaces"),
        ("{", ErrorKind::Protocol, "malformed grant"),
    ] {
        let (connector, address) = (connector.clone(), address.clone());
        let client = runtime.spawn(async move { connector.connect(&address).await });
        tracker.answer("rasp", reply);
        let error = runtime.block_on(client).unwrap().unwrap_err().into_rpc_error();
        assert!(error.kind() == kind && error.to_string().contains(text), "{reply}: {error}");
    }
    let impatient = connector.clone().queue_timeout(Duration::from_millis(10));
    let error = runtime.block_on(impatient.connect(&address)).unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), ErrorKind::DeadlineExceeded, "{error}");
}

/// Lengths that no message has, other magic numbers, and ends at every point.
#[test]
fn a_tracker_that_breaks_the_protocol_is_an_error_to_its_client() {
    const MAGIC: [u8; 4] = [0x71, 0xf2, 2, 0];
    let runtime = Runtime::new().unwrap();
    let length = |len: i32| len.to_le_bytes().to_vec();
    let granted = framed(r#"[0, ["127.0.0.1", 1, "rasp:0.1"]]"#);
    for (magic, reply) in [
        (&b""[..], None),
        (&MAGIC[..2], None),
        (b"HTTP", None),
        (&MAGIC, None),
        (&MAGIC, Some(length(0))),
        (&MAGIC, Some(length(-1))),
        (&MAGIC, Some(length((1 << 20) + 1))),
        (&MAGIC, Some(length(i32::MAX))),
        (&MAGIC, Some(granted[..2].to_vec())),
        (&MAGIC, Some(granted[..granted.len() - 1].to_vec())),
    ] {
        let tracker = FakeTracker::new();
        let address = format!("tvm-tracker://{}/rasp", tracker.0.local_addr().unwrap());
        let connector = Connector::new().transports(rpc_server::transports());
        let client = runtime.spawn(async move { connector.connect(&address).await });
        let mut peer = Peer(tracker.0.accept().unwrap().0);
        drop(tracker);
        assert_eq!(peer.read(4), MAGIC);
        peer.send(magic);
        if let Some(reply) = &reply {
            assert_eq!(peer.reply(), r#"[4,"rasp","",1]"#);
            peer.send(reply);
        }
        drop(peer);
        let error = runtime.block_on(client).unwrap().unwrap_err().into_rpc_error();
        let kinds = [ErrorKind::Protocol, ErrorKind::PeerLost];
        assert!(kinds.contains(&error.kind()), "{magic:?}, {reply:?}: {error}");
    }
}

#[test]
fn a_server_comes_back_to_a_tracker_that_has_broken_the_protocol() {
    let tracker = FakeTracker::new();
    let (runtime, folder) = (Runtime::new().unwrap(), tempfile::tempdir().unwrap());
    let server = registering_server(&tracker, &runtime, folder.path());
    let port = server.addresses()[0].port().unwrap();
    for reply in [(1_i32 << 20) + 1, -1].map(i32::to_le_bytes) {
        let mut peer = tracker.accept(port);
        peer.next_put(port);
        peer.send(&reply);
        assert!(peer.is_at_end());
    }
    let mut peer = tracker.accept(port);
    let match_key = peer.next_put(port);
    peer.say("0");
    assert!(!match_key.is_empty());
    assert_eq!(hello(port, &format!("client:{match_key}")).1, 0xff271);
}

#[test]
fn a_server_with_several_places_registers_each_at_another_tracker() {
    let pool = Pool::new();
    let config = ServeConfig {
        listen: vec![any_port()],
        workdir: pool.folder.path().join("work"),
        tvm: true,
        tracker_key: Some("rasp".to_owned()),
        capacity: 2,
        allow_direct: true,
        tvm_tracker: Some(pool.address().parse().unwrap()),
        ..ServeConfig::default()
    };
    let server = pool.runtime.block_on(RpcServer::new(Registry::new()).config(config).start()).unwrap();
    let port = server.addresses()[0].port().unwrap();
    pool.until_free(2);
    assert_eq!(hello(port, "client:").1, 0xff271, "the operator lets clients come directly");
    let mut client = Peer::connect(&pool);
    let mut sessions = Vec::new();
    for _ in 0..2 {
        client.request("rasp", 1);
        let reply: serde_json::Value = serde_json::from_str(&client.reply()).unwrap();
        assert_eq!((&reply[1][0], &reply[1][1]), (&"127.0.0.1".into(), &port.into()));
        let session = hello(port, &format!("client:{}", reply[1][2].as_str().unwrap()));
        assert_eq!(session.1, 0xff271);
        sessions.push(session);
    }
    pool.until_free(0);
    drop(sessions.pop());
    pool.until_free(1);
    drop(sessions);
    pool.until_free(2);
    drop(server);
    pool.until(|summary| summary.servers.is_empty());
}

#[test]
fn a_server_that_a_tracker_of_tvm_could_not_give_out_does_not_start() {
    let good = || ServeConfig {
        listen: vec!["tcp://127.0.0.1:0".parse().unwrap()],
        tvm: true,
        key: Some("rasp".to_owned()),
        tvm_tracker: Some("pool.lan".parse().unwrap()),
        ..ServeConfig::default()
    };
    assert!(good().check().is_ok());
    assert_eq!(good().tvm_tracker.unwrap().to_string(), "tcp://pool.lan:9190");
    let tracker = vec!["tcp://127.0.0.1:1".parse().unwrap()];
    for (config, text) in [
        (ServeConfig { tvm: false, ..good() }, "--tvm"),
        (ServeConfig { key: None, ..good() }, "--tracker-key"),
        (ServeConfig { tracker, ..good() }, "instead of --tracker"),
        (ServeConfig { listen: vec!["unix:/run/s.sock".parse().unwrap()], ..good() }, "--advertise"),
    ] {
        let error = config.check().unwrap_err();
        assert!(matches!(error, ConfigError::TvmTracker { .. }) && error.to_string().contains(text), "{error}");
    }
    for malformed in ["tls://pool.lan:1", "tcp://pool.lan:1/key", "a b", ""] {
        assert!(malformed.parse::<TvmTrackerAddress>().is_err(), "{malformed}");
    }
}

#[test]
fn the_page_shows_the_dialect_of_each_server() {
    let pool = Pool::with(|config| config.http = Some("127.0.0.1:0".parse().unwrap()));
    let _both = pool.server("both", |_| {});
    let _native = pool.server("native", |config| config.tvm = false);
    let mut stock = Peer::connect(&pool);
    stock.put("stock", 9090, "stock:0.1");
    let summary = pool.until(|summary| summary.servers.len() == 3);
    let page = pool.tracker.page_address().unwrap();
    for server in summary.servers {
        let shown = pool.runtime.block_on(crate::page::get(page, &format!("/key/{}", server.key))).body;
        assert!(shown.contains(&server.address[0]), "{shown}");
        assert_eq!(shown.contains("dialect=tvm"), server.key != "native", "{shown}");
    }
}

/// The scenarios of `tvm_tracker.py`, by the servers, clients and tools of the package.
#[cfg(feature = "tvm-ffi")]
#[test]
fn servers_and_clients_of_tvm_itself_are_served() {
    let Some(environment) = crate::native_modules::tvm_ffi::environment() else { return };
    let Some(mut client) = environment.script("tvm_tracker.py") else { return };
    let pool = Pool::new();
    let _ours = pool.server("ours", |config| config.tvm_self_test = true);
    client.arg(pool.address().strip_prefix("tcp://").unwrap()).arg(env!("CARGO_BIN_EXE_rpc-server"));
    crate::tvm_client::name_client_to(&mut client);
    let output = client.output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // The server was killed.
    pool.until(|summary| summary.servers.iter().all(|server| server.key == "ours"));
}
