//! Servers and clients of TVM at a relay with `--tvm`: small ones that are written here from the
//! description of the wire, servers and clients of this project, and the real ones of the package
//! `apache-tvm`.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, Registry, Session};
use rpc_server::config::{ConfigError, RelayConfig, ServeConfig, Span, TrackerConfig, TvmProxyAddress};
use rpc_server::server::Relay;
use rpc_server::tracker::{RunningTracker, Tracker};
use rpc_server::{RpcServer, Running, ServerProcess};
use rpc_transports::Connector;
use tokio::runtime::Runtime;

use crate::tvm_tracker::{FakeTracker, Peer as TrackerPeer};

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(30);

const ACCEPTED: i32 = 0xff271;
const DUPLICATE: i32 = 0xff272;
const MISMATCH: i32 = 0xff273;

/// A relay for peers of TVM in this process.
struct Proxy {
    running: Running,
    runtime: Runtime,
}

impl Proxy {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl FnOnce(&mut RelayConfig)) -> Self {
        let mut config =
            RelayConfig { listen: vec!["tcp://127.0.0.1:0".parse().unwrap()], tvm: true, ..RelayConfig::default() };
        change(&mut config);
        let runtime = Runtime::new().unwrap();
        let running = runtime.block_on(Relay::new(&config).unwrap().start()).unwrap();
        Self { running, runtime }
    }

    fn port(&self) -> u16 {
        self.running.addresses()[0].port().unwrap()
    }

    fn dial(&self) -> Peer {
        Peer::dial(self.port())
    }

    /// Dials, and says hello with this key.
    fn hello(&self, key: &str) -> Peer {
        let mut peer = self.dial();
        peer.send(&hello(key));
        peer
    }

    /// As [`hello`](Self::hello), and waits until the relay has admitted the peer beside `others`.
    fn waits(&self, key: &str, others: usize) -> Peer {
        let peer = self.hello(key);
        self.until_sessions(others + 1);
        peer
    }

    /// A server and a client that are paired.
    fn pair(&self, key: &str) -> (Peer, Peer) {
        let mut server = self.hello(&format!("server:{key}"));
        let mut client = self.hello(&format!("client:{key}"));
        server.expect_accepted(&format!("client:{key}"));
        client.expect_accepted(&format!("server:{key}"));
        (server, client)
    }

    /// Waits until the relay has so many sessions.
    fn until_sessions(&self, count: usize) {
        until(|| self.running.sessions() == count);
    }
}

/// Waits until a condition holds.
fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + LIMIT;
    while !condition() {
        assert!(Instant::now() < deadline, "it does not come to that");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn hello(key: &str) -> Vec<u8> {
    [&ACCEPTED.to_le_bytes()[..], &(key.len() as i32).to_le_bytes(), key.as_bytes()].concat()
}

/// A server or client of TVM.
struct Peer(TcpStream);

impl Peer {
    fn dial(port: u16) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        stream.set_nodelay(true).unwrap();
        Self(stream)
    }

    fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(bytes).unwrap();
    }

    fn read(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.0.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn code(&mut self) -> i32 {
        i32::from_le_bytes(self.read(4).try_into().unwrap())
    }

    /// Expects the answer that the other side has come, with its key.
    fn expect_accepted(&mut self, key: &str) {
        let expected = hello(key);
        assert_eq!(self.read(expected.len()), expected, "{key}");
    }

    /// Expects this answer and the end.
    fn expect_refused(mut self, code: i32) {
        assert_eq!(self.code(), code);
        assert!(self.is_at_end());
    }

    fn is_at_end(&mut self) -> bool {
        match self.0.read(&mut [0]) {
            Ok(count) => count == 0,
            // Bytes that the relay has not read are in its socket as it closes that.
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn a_server_and_a_client_are_paired_by_their_key_whoever_comes_first() {
    let proxy = Proxy::new();
    for server_first in [true, false] {
        let (server_key, client_key) = ("server:kk", "client:kk -timeout=1");
        let [(first_key, second_key), _] = match server_first {
            true => [(server_key, client_key), (client_key, server_key)],
            false => [(client_key, server_key), (server_key, client_key)],
        };
        let mut first = proxy.waits(first_key, 0);
        let other = proxy.waits("server:other", 1);
        let mut second = proxy.dial();
        // Byte by byte, as it may come.
        for byte in hello(second_key) {
            second.send(&[byte]);
        }
        first.expect_accepted(second_key);
        second.expect_accepted(first_key);
        let (mut from, mut to) = (first, second);
        for round in 0..2 {
            let sent: Vec<u8> = (0..(4 << 20) + round).map(|at| (at * 31 + at / 997) as u8).collect();
            std::thread::scope(|scope| {
                scope.spawn(|| from.send(&sent));
                assert!(to.read(sent.len()) == sent);
            });
            std::mem::swap(&mut from, &mut to);
        }
        // Bytes that one side has sent before its end arrive, and then the end.
        from.send(b"last words");
        drop(from);
        assert_eq!(to.read(10), b"last words");
        assert!(to.is_at_end());
        drop((to, other));
        proxy.until_sessions(0);
    }
}

#[test]
fn the_next_server_serves_the_next_client() {
    let proxy = Proxy::new();
    for round in 0..3_u8 {
        let (mut server, mut client) = proxy.pair("");
        client.send(&[round]);
        assert_eq!(server.read(1), [round]);
        // Of another pair under the same key, nothing is mixed.
        let (mut other_server, mut other_client) = proxy.pair("");
        other_server.send(&[100 + round]);
        server.send(&[200 + round]);
        assert_eq!((client.read(1), other_client.read(1)), (vec![200 + round], vec![100 + round]));
        drop(server);
        assert!(client.is_at_end());
    }
}

/// Says hello for each key. Returns those who wait with their keys, once `refused` of them were
/// refused as duplicates.
fn all_but_refused<'a>(proxy: &Proxy, keys: &[&'a str], refused: usize) -> Vec<(Peer, &'a str)> {
    let mut waiting: Vec<_> = keys.iter().map(|key| (proxy.hello(key), *key)).collect();
    until(|| {
        waiting.retain_mut(|(peer, _)| {
            peer.0.set_nonblocking(true).unwrap();
            let has_answer = peer.0.peek(&mut [0; 4]).is_ok_and(|count| count == 4);
            peer.0.set_nonblocking(false).unwrap();
            if has_answer {
                assert_eq!(peer.code(), DUPLICATE);
                assert!(peer.is_at_end());
            }
            !has_answer
        });
        waiting.len() == keys.len() - refused
    });
    waiting
}

#[test]
fn a_second_one_that_waits_under_a_key_is_refused_as_by_tvms_proxy() {
    let proxy = Proxy::new();
    for [first, second, other_side] in
        [["server:a", "server:a x", "client:a"], ["client:b", "client:b -timeout=1", "server:b"]]
    {
        // The one that has come first still waits.
        let (mut waiting, key) = all_but_refused(&proxy, &[first, second], 1).remove(0);
        proxy.hello(other_side).expect_accepted(key);
        waiting.expect_accepted(other_side);
    }
}

#[test]
fn more_may_wait_under_a_key_where_the_operator_says_so() {
    let proxy = Proxy::with(|config| config.max_waiting_per_key = 2);
    let mut waiting = all_but_refused(&proxy, &["server:a 1", "server:a 2", "server:a 3"], 1);
    for _ in 0..2 {
        let mut client = proxy.hello("client:a");
        let len = hello("server:a 1").len();
        let answer = client.read(len);
        let at = waiting.iter().position(|(_, key)| answer == hello(key)).unwrap();
        waiting.remove(at).0.expect_accepted("client:a");
    }
}

#[test]
fn what_no_peer_says_ends_its_own_connection_alone() {
    let proxy = Proxy::with(|config| config.handshake_timeout = Span(Duration::from_millis(300)));
    let mut waiting = proxy.waits("server:a", 0);
    for wrong in ["client:b -timeout=abc", "clients:b", "k", " client:b", "client"] {
        proxy.hello(wrong).expect_refused(MISMATCH);
    }
    // Requests before the answer, an endless key, no key at all, and another protocol.
    let endless = [&ACCEPTED.to_le_bytes()[..], &i32::MAX.to_le_bytes(), b"client:b"].concat();
    let negative = [&ACCEPTED.to_le_bytes()[..], &(-1_i32).to_le_bytes()].concat();
    let early = [hello("client:b"), b"request".to_vec()].concat();
    let not_text = [&ACCEPTED.to_le_bytes()[..], &8_i32.to_le_bytes(), b"client:\xff"].concat();
    for wrong in [endless, negative, early, not_text] {
        let mut peer = proxy.dial();
        peer.send(&wrong);
        assert!(peer.is_at_end(), "{wrong:?}");
    }
    let mut early = proxy.waits("client:b", 1);
    early.send(b"request");
    assert!(early.is_at_end());
    // A hello that does not end, and one that does not begin.
    for part in [&hello("client:b")[..10], &[]] {
        let mut slow = proxy.dial();
        slow.send(part);
        assert!(slow.is_at_end(), "{part:?}");
    }
    proxy.until_sessions(1);
    proxy.hello("client:a").expect_accepted("server:a");
    waiting.expect_accepted("client:a");
}

#[test]
fn a_relay_that_is_killed_is_the_end_of_those_who_wait_and_of_pairs() {
    let folder = tempfile::tempdir().unwrap();
    let mut program = crate::server_program();
    program.args(["relay", "--listen", "tcp://127.0.0.1:0", "--tvm", "--exit-with-stdin", "--log-level", "error"]);
    program.env("XDG_STATE_HOME", folder.path());
    let mut relay = ServerProcess::spawn(program).unwrap();
    let port = relay.address().rsplit_once(':').unwrap().1.parse().unwrap();
    let say = |bytes: &[u8]| {
        let mut peer = Peer::dial(port);
        peer.send(bytes);
        peer
    };
    let (mut server, mut client) = (say(&hello("server:rasp")), say(&hello("client:rasp")));
    server.expect_accepted("client:rasp");
    client.expect_accepted("server:rasp");
    // In the middle of a message.
    client.send(&[1, 0, 0, 0, 0, 0]);
    assert_eq!(server.read(6), [1, 0, 0, 0, 0, 0]);
    let waits = ["server:board", "client:nobody"].map(|key| say(&hello(key)));
    let in_hello = say(&hello("server:board")[..7]);
    relay.kill().unwrap();
    for mut peer in [server, client, in_hello].into_iter().chain(waits) {
        assert!(peer.is_at_end());
    }
}

#[test]
fn those_for_whom_nobody_comes_are_refused_in_the_end() {
    let soon = Span(Duration::from_millis(100));
    let proxy = Proxy::with(|config| config.tvm_server_timeout = soon);
    let client = proxy.waits("client:b", 0);
    proxy.hello("server:a").expect_refused(MISMATCH);
    proxy.until_sessions(1);
    drop(client);
    let proxy = Proxy::with(|config| config.tvm_client_timeout = soon);
    let _server = proxy.waits("server:b", 0);
    proxy.hello("client:a").expect_refused(MISMATCH);
    proxy.until_sessions(1);
}

#[test]
fn a_peer_that_goes_while_it_waits_is_forgotten() {
    let proxy = Proxy::new();
    for (first, second) in [("server:a", "client:a"), ("client:a", "server:a")] {
        drop(proxy.waits(first, 0));
        proxy.until_sessions(0);
        // The next one is no duplicate of the one that is gone, nor paired with it.
        let mut waiting = proxy.waits(first, 0);
        proxy.hello(second).expect_accepted(first);
        waiting.expect_accepted(second);
        drop(waiting);
        proxy.until_sessions(0);
        drop(proxy.waits(first, 0));
        proxy.until_sessions(0);
        let mut waiting = proxy.waits(second, 0);
        proxy.hello(first).expect_accepted(second);
        waiting.expect_accepted(first);
        drop(waiting);
        proxy.until_sessions(0);
    }
}

#[test]
fn a_server_that_has_lost_its_client_may_finish_its_answer() {
    let proxy = Proxy::new();
    for [first, second] in [["server:a", "client:a"], ["client:a", "server:a"]] {
        let (mut first_peer, mut second_peer) = (proxy.waits(first, 0), proxy.hello(second));
        first_peer.expect_accepted(second);
        second_peer.expect_accepted(first);
        let is_server = first.starts_with("server");
        let (mut server, client) = if is_server { (first_peer, second_peer) } else { (second_peer, first_peer) };
        drop(client);
        assert!(server.is_at_end(), "nothing more comes");
        // A server of TVM to which nobody listens any more fails for good at its second answer.
        // This is more than sockets hold.
        for _ in 0..32 {
            server.send(&[0; 1 << 20]);
        }
        drop(server);
        proxy.until_sessions(0);
    }
}

#[test]
fn waiting_and_paired_peers_count_against_the_limits_of_the_relay() {
    let proxy = Proxy::with(|config| config.max_sessions = 3);
    let (server, client) = proxy.pair("a");
    let waiting = proxy.waits("server:a", 2);
    proxy.hello("client:a").expect_refused(MISMATCH);
    drop((server, client));
    proxy.until_sessions(1);
    proxy.hello("client:a").expect_accepted("server:a");
    drop(waiting);
    let proxy = Proxy::with(|config| config.max_sessions_per_peer = 1);
    let _waiting = proxy.waits("server:a", 0);
    proxy.hello("server:b").expect_refused(MISMATCH);
}

#[test]
fn a_relay_that_drains_sends_away_those_who_wait_and_lets_the_others_end() {
    let proxy = Proxy::new();
    let (mut server, mut client) = proxy.pair("a");
    let [waiting_server, waiting_client] = [proxy.waits("server:b", 2), proxy.waits("client:c", 3)];
    let draining = async {
        let others = tokio::task::spawn_blocking(move || {
            waiting_server.expect_refused(MISMATCH);
            waiting_client.expect_refused(MISMATCH);
            client.send(b"still here");
            assert_eq!(server.read(10), b"still here");
            drop(client);
            assert!(server.is_at_end());
        });
        let (others, ()) = tokio::join!(others, proxy.running.drain());
        others.unwrap();
    };
    proxy.runtime.block_on(async { tokio::time::timeout(LIMIT, draining).await }).expect("the relay ends");
}

/// A tracker of this project that speaks TVM's protocol.
struct Pool {
    tracker: RunningTracker,
    _runtime: Runtime,
}

impl Pool {
    fn new() -> Self {
        let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
        let config = TrackerConfig { listen, tvm: true, ..TrackerConfig::default() };
        let runtime = Runtime::new().unwrap();
        let tracker = runtime.block_on(Tracker::start(&config)).unwrap();
        Self { tracker, _runtime: runtime }
    }

    fn port(&self) -> u16 {
        self.tracker.server.addresses()[0].port().unwrap()
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port())
    }

    fn until_free(&self, places: u32) {
        until(|| self.tracker.tracker.summary().servers.iter().map(|server| server.free).sum::<u32>() == places);
    }

    fn until_servers(&self, count: usize) {
        until(|| self.tracker.tracker.summary().servers.len() == count);
    }

    /// Asks for a server, and returns its port and match key.
    fn request(&self, key: &str) -> (u64, String) {
        let stream = TcpStream::connect(("127.0.0.1", self.port())).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let mut peer = TrackerPeer(stream);
        peer.send(&[0x71, 0xf2, 2, 0]);
        assert_eq!(peer.read(4), [0x71, 0xf2, 2, 0]);
        let reply: serde_json::Value = serde_json::from_str(&peer.ask(&format!(r#"[4, "{key}", "", 1]"#))).unwrap();
        (reply[1][1].as_u64().unwrap(), reply[1][2].as_str().unwrap().to_owned())
    }
}

#[test]
fn servers_that_wait_are_registered_at_a_tracker_until_they_go() {
    let pool = Pool::new();
    let proxy = Proxy::with(|config| config.tvm_tracker = Some(pool.address().parse().unwrap()));
    let port = u64::from(proxy.port());
    // Several of one key wait: each has a match key of its own.
    let (mut first, second) = (proxy.hello("server:rasp"), proxy.hello("server:rasp"));
    pool.until_free(2);
    proxy.hello("client:rasp").expect_refused(MISMATCH);
    proxy.hello("client:rasp:0.5").expect_refused(MISMATCH);
    drop(second);
    pool.until_servers(1);
    let (granted_port, match_key) = pool.request("rasp");
    assert!(granted_port == port && match_key.starts_with("rasp:0."), "{match_key}");
    let mut client = proxy.hello(&format!("client:{match_key} -timeout=5"));
    client.expect_accepted("server:rasp");
    first.expect_accepted(&format!("client:{match_key} -timeout=5"));
    client.send(b"request");
    assert_eq!(first.read(7), b"request");
    // It is good for one session, and the server is not free while that lasts.
    proxy.hello(&format!("client:{match_key}")).expect_refused(MISMATCH);
    assert_eq!(pool.tracker.tracker.summary().servers.iter().map(|server| server.free).sum::<u32>(), 0);
    drop((first, client));
    pool.until_servers(0);
    proxy.until_sessions(0);
    let _again = proxy.hello("server:rasp");
    pool.until_free(1);
    assert_ne!(pool.request("rasp").1, match_key);
}

#[test]
fn a_tracker_of_tvm_is_told_what_its_proxy_would_tell() {
    let tracker = FakeTracker::new();
    let address = tracker.0.local_addr().unwrap().to_string();
    let proxy = Proxy::with(|config| config.tvm_tracker = Some(address.parse().unwrap()));
    let mut server = proxy.hello("server:rasp x");
    let mut peer = tracker.accept_as("server:proxy[rasp]", proxy.port());
    let first = peer.next_put(proxy.port());
    peer.say("0");
    assert_eq!(peer.reply(), "[7]", "the relay looks at the match key");
    peer.say(&format!("[\"{first}\"]"));
    // The tracker is gone, and knows the server again under another match key.
    drop(peer);
    let mut peer = tracker.accept_as("server:proxy[rasp]", proxy.port());
    let second = peer.next_put(proxy.port());
    peer.say("0");
    proxy.hello(&format!("client:{first}")).expect_refused(MISMATCH);
    let client_key = format!("client:{second}");
    let mut client = proxy.hello(&client_key);
    client.expect_accepted("server:rasp x");
    server.expect_accepted(&client_key);
    drop((server, client));
    // Whatever was under way, the connection ends with the server.
    let end = peer.0.read_to_end(&mut Vec::new()).map_err(|error| error.kind());
    assert!(end.is_ok() || end == Err(std::io::ErrorKind::ConnectionReset), "{end:?}");
}

/// A server of this project that waits at a proxy.
fn waiting_server(runtime: &Runtime, port: u16, change: impl FnOnce(&mut ServeConfig)) -> (Running, tempfile::TempDir) {
    let registry = Registry::new();
    registry.add("addone", |number: i64| number + 1);
    let folder = tempfile::tempdir().unwrap();
    let mut config = ServeConfig {
        listen: Vec::new(),
        workdir: folder.path().join("work"),
        key: Some("board".to_owned()),
        tvm: true,
        tvm_proxy: Some(format!("127.0.0.1:{port}").parse().unwrap()),
        ..ServeConfig::default()
    };
    change(&mut config);
    let running = runtime.block_on(RpcServer::new(registry).config(config).start()).unwrap();
    (running, folder)
}

fn connect(port: u16, key: &str) -> Result<Session, ErrorKind> {
    let connector = Connector::new().transports(rpc_server::transports()).handshake_timeout(LIMIT);
    connector.connect_blocking(&format!("tvm://127.0.0.1:{port}/{key}")).map_err(|error| error.into_rpc_error().kind())
}

fn add_one(session: &Session) -> i64 {
    session.get_function("addone").wait().unwrap().call((41,)).wait().unwrap()
}

#[test]
fn a_server_of_this_project_waits_at_a_proxy_and_serves_one_client_after_the_other() {
    let proxy = Proxy::new();
    let (server, _folder) = waiting_server(&proxy.runtime, proxy.port(), |_| {});
    for _ in 0..2 {
        // A client that comes while the server is busy, or on its way back, waits.
        let session = connect(proxy.port(), "board").unwrap();
        assert_eq!(add_one(&session), 42);
        assert_eq!(server.sessions(), 1);
        drop(session);
        until(|| server.sessions() == 0);
    }
    // The server gets the time-out that the client has sent through the proxy.
    let session = connect(proxy.port(), "board?timeout=0.2").unwrap();
    until(|| server.sessions() == 0);
    drop(session);
    proxy.runtime.block_on(server.drain());
    proxy.until_sessions(0);
}

#[test]
fn a_server_with_several_places_waits_while_it_serves() {
    let proxy = Proxy::new();
    let (server, _folder) = waiting_server(&proxy.runtime, proxy.port(), |config| config.capacity = 2);
    let sessions = [connect(proxy.port(), "board").unwrap(), connect(proxy.port(), "board").unwrap()];
    assert_eq!(sessions.each_ref().map(add_one), [42; 2]);
    assert_eq!(server.sessions(), 2);
    // Of four connections at the relay, none waits.
    proxy.until_sessions(4);
    let [first, second] = sessions;
    drop(first);
    // The free place waits again.
    proxy.until_sessions(3);
    assert_eq!(add_one(&connect(proxy.port(), "board").unwrap()), 42);
    drop(second);
}

#[test]
fn a_server_comes_back_to_a_proxy_that_was_gone_or_has_refused_it() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let runtime = Runtime::new().unwrap();
    let (server, _folder) = waiting_server(&runtime, listener.local_addr().unwrap().port(), |_| {});
    let accept = || {
        let mut peer = Peer(listener.accept().unwrap().0);
        peer.0.set_read_timeout(Some(LIMIT)).unwrap();
        assert_eq!(peer.read(20), hello("server:board"));
        peer
    };
    drop(accept());
    accept().send(&DUPLICATE.to_le_bytes());
    // Requests may follow the answer at once, or be none at all.
    let mut nonsense = accept();
    nonsense.send(&[hello("client:board"), vec![0xff; 64]].concat());
    while !nonsense.is_at_end() {}
    accept().send(&MISMATCH.to_le_bytes());
    accept().send(b"HTTP/1.1");
    // A key that makes no sense is the client's own fault.
    let mut wrong = accept();
    wrong.send(&hello("client:board -timeout=abc"));
    assert!(wrong.is_at_end());
    let _peer = accept();
    assert_eq!(server.sessions(), 0);
}

#[test]
fn a_native_server_and_its_client_meet_at_the_same_relay() {
    let proxy = Proxy::new();
    let relay = proxy.running.addresses()[0].clone();
    let (_server, _folder) = waiting_server(&proxy.runtime, proxy.port(), |config| {
        config.relay = vec![format!("{relay}/native").parse().unwrap()];
    });
    assert_eq!(add_one(&connect(proxy.port(), "board").unwrap()), 42);
    let session = Connector::new().connect_blocking(&format!("{relay}/native")).unwrap();
    assert_eq!(add_one(&session), 42);
}

#[test]
fn peers_of_tvm_meet_only_where_the_operator_says_so() {
    let proxy = Proxy::with(|config| config.tvm = false);
    let mut peer = proxy.hello("server:a");
    let mut answer = Vec::new();
    _ = peer.0.read_to_end(&mut answer);
    assert!(!answer.starts_with(&ACCEPTED.to_le_bytes()) && proxy.running.sessions() == 0, "{answer:?}");

    let config =
        |listen: &str| RelayConfig { listen: vec![listen.parse().unwrap()], tvm: true, ..RelayConfig::default() };
    assert!(config("unix:/run/relay.sock").check().is_ok());
    assert!(RelayConfig { insecure: true, ..config("tcp://0.0.0.0:0") }.check().is_ok());
    assert!(config("tcp://0.0.0.0:0").check().is_err());
    let proven = RelayConfig { token_file: Some("tokens".into()), ..config("tls://127.0.0.1:0") };
    assert!(matches!(proven.check(), Err(ConfigError::TvmWithIdentity)));
    let local = || config("tcp://127.0.0.1:0");
    let tracker = || Some("pool.lan".parse().unwrap());
    assert!(RelayConfig { tvm_tracker: tracker(), ..local() }.check().is_ok());
    for wrong in [
        RelayConfig { tvm_tracker: tracker(), tvm: false, ..local() },
        RelayConfig { tvm_tracker: tracker(), ..config("unix:/run/relay.sock") },
    ] {
        assert!(matches!(wrong.check(), Err(ConfigError::TvmTracker { .. })));
    }
    let zero = Span(Duration::ZERO);
    for wrong in [
        RelayConfig { tvm_client_timeout: zero, ..local() },
        RelayConfig { tvm_server_timeout: zero, ..local() },
        RelayConfig { max_waiting_per_key: 0, ..local() },
    ] {
        assert!(matches!(wrong.check(), Err(ConfigError::Zero { .. })));
    }
}

#[test]
fn a_server_waits_only_at_a_proxy_that_its_operator_trusts() {
    let at = |proxy: &str| ServeConfig {
        listen: Vec::new(),
        tvm: true,
        tvm_proxy: Some(proxy.parse().unwrap()),
        ..ServeConfig::default()
    };
    assert!(at("127.0.0.1:9090").check().is_ok());
    assert_eq!(at("gateway.lan").tvm_proxy.unwrap().to_string(), "tcp://gateway.lan:9090");
    let error = at("gateway.lan").check().unwrap_err();
    assert!(matches!(error, ConfigError::InsecureTvmProxy { .. }), "{error}");
    assert!(ServeConfig { insecure: true, ..at("gateway.lan") }.check().is_ok());
    let tracker = vec!["tcp://127.0.0.1:1".parse().unwrap()];
    for wrong in [
        ServeConfig { tvm: false, ..at("127.0.0.1:9090") },
        ServeConfig { tvm_tracker: Some("127.0.0.1:1".parse().unwrap()), ..with_key(at("127.0.0.1:9090")) },
        ServeConfig { tracker, ..with_key(at("127.0.0.1:9090")) },
    ] {
        let error = wrong.check().unwrap_err();
        assert!(matches!(error, ConfigError::TvmProxy { .. }), "{error}");
    }
    for malformed in ["tls://gateway.lan:1", "tcp://gateway.lan:1/key", "a b", ""] {
        assert!(malformed.parse::<TvmProxyAddress>().is_err(), "{malformed}");
    }
}

fn with_key(config: ServeConfig) -> ServeConfig {
    let listen = vec!["tcp://127.0.0.1:0".parse().unwrap()];
    ServeConfig { key: Some("board".to_owned()), listen, ..config }
}

/// A server that comes by WebSocket, as those in browsers do.
#[cfg(feature = "websocket")]
struct WebSocketPeer(Peer);

#[cfg(feature = "websocket")]
impl WebSocketPeer {
    /// Asks for a WebSocket. Returns the status of the answer, too.
    fn connect(port: u16, origin: Option<&str>) -> (Self, String) {
        let mut peer = Peer::dial(port);
        let origin = origin.map(|origin| format!("Origin: {origin}\r\n")).unwrap_or_default();
        let request = format!(
            "GET /ws HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
             Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{origin}\r\n"
        );
        peer.send(request.as_bytes());
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.extend(peer.read(1));
        }
        let status = String::from_utf8(head).unwrap().split_whitespace().nth(1).unwrap().to_owned();
        (Self(peer), status)
    }

    /// Sends a message. Its mask is zero.
    fn send(&mut self, message: &[u8]) {
        let len = (message.len() as u64).to_be_bytes();
        self.0.send(&[&[0x82, 0x80 | 127][..], &len, &[0; 4], message].concat());
    }

    /// Reads a message of less than 126 bytes.
    fn read(&mut self) -> Vec<u8> {
        let header = self.0.read(2);
        assert!(header[0] == 0x82 && header[1] < 126, "{header:?}");
        self.0.read(header[1].into())
    }
}

#[cfg(feature = "websocket")]
#[test]
fn a_server_that_comes_by_websocket_is_paired_at_the_same_address() {
    let proxy = Proxy::new();
    let (mut server, status) = WebSocketPeer::connect(proxy.port(), None);
    assert_eq!(status, "101");
    // As TVM's does it: the fields of the hello as messages of their own.
    let text = hello("server:web");
    server.send(&text[..4]);
    server.send(&text[4..8]);
    server.send(&text[8..]);
    proxy.until_sessions(1);
    let mut client = proxy.hello("client:web -timeout=5");
    client.expect_accepted("server:web");
    let mut answer = server.read();
    assert!(answer.len() >= 4, "the code is in the first message");
    while answer.len() < hello("client:web -timeout=5").len() {
        answer.extend(server.read());
    }
    assert_eq!(answer, hello("client:web -timeout=5"));
    client.send(b"request");
    assert_eq!(server.read(), b"request");
    // A reply of any size that a proxy of TVM passes on is one message.
    let reply = vec![7; 9 << 20];
    std::thread::scope(|scope| {
        scope.spawn(|| server.send(&reply));
        assert!(client.read(reply.len()) == reply);
    });
    // A message above that is the end, as at a proxy of TVM.
    server.0.send(&[&[0x82, 0x80 | 127][..], &(11_u64 << 20).to_be_bytes(), &[0; 4]].concat());
    assert!(client.is_at_end());
    drop((server, client));
    proxy.until_sessions(0);
}

#[cfg(feature = "websocket")]
#[test]
fn a_foreign_web_page_is_refused() {
    let proxy = Proxy::with(|config| config.allow_origin = vec!["https://console.example".parse().unwrap()]);
    for (origin, status) in [
        ("https://evil.example", "403"),
        ("http://127.0.0.1", "403"),
        ("null", "403"),
        ("https://console.example", "101"),
    ] {
        assert_eq!(WebSocketPeer::connect(proxy.port(), Some(origin)).1, status, "{origin}");
    }
    // A request for a page is none for a WebSocket.
    let mut page = proxy.dial();
    page.send(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    assert!(page.is_at_end());
}

/// The scenarios of `tvm_proxy.py`, by the servers and clients of the package.
#[cfg(feature = "tvm-ffi")]
#[test]
fn servers_and_clients_of_tvm_itself_meet() {
    let Some(environment) = crate::native_modules::tvm_ffi::environment() else { return };
    let Some(mut scenarios) = environment.script("tvm_proxy.py") else { return };
    scenarios.arg(env!("CARGO_BIN_EXE_rpc-server")).arg(env!("CARGO_BIN_EXE_rpc-cli"));
    crate::tvm_client::name_client_to(&mut scenarios);
    let output = scenarios.output().unwrap();
    assert!(
        output.status.success(),
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}
