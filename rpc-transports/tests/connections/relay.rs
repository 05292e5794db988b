//! Servers behind a relay: found by key, with a handshake from end to end, dropped when they are
//! gone, and reconnecting.

use std::sync::Arc;
use std::time::Duration;

use rpc_core::proto::{Anonymous, Handshake, HandshakeConfig, Hello, MAGIC, Role};
use rpc_core::{ErrorKind, LocalSession, Packed, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Access, Address, Bind, Certificate, Channel, ClientTls, ConnectError, Connector, Dial, OpenRequest, ParkOptions,
    ServeOptions, Server, ServerTls, SessionFactory, Tokens, TransportError, Transports,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;

use crate::limits::in_time;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

/// Time for which a relay has a client wait for a server that is on its way back.
const RETURN_LIMIT: Duration = Duration::from_secs(2);

const SECRET: &str = "client 0123456789abcdef0123456789abcdef";

/// Server with a function that returns the identity of its client.
fn server(change: impl FnOnce(&mut ServeOptions)) -> Server {
    let open = |request: &OpenRequest| -> Result<SharedSession, RpcError> {
        let (registry, identity) = (Registry::new(), request.identity.clone());
        registry.add_inline("whoami", move || identity.clone());
        Ok(Arc::new(LocalSession::new(registry)))
    };
    let mut options = ServeOptions { key: "board".into(), ..ServeOptions::default() };
    change(&mut options);
    Server::new(Arc::new(open), options)
}

fn relay(change: impl FnOnce(&mut ServeOptions)) -> Server {
    let nothing = |_: &OpenRequest| -> Result<SharedSession, RpcError> { panic!("a relay opens no sessions") };
    let mut options = ServeOptions { relay: true, ..ServeOptions::default() };
    change(&mut options);
    Server::new(Arc::new(nothing), options)
}

async fn listen(server: &Server, address: &str, tls: Option<ServerTls>) -> Address {
    let options = Bind { tls, ..Bind::default() };
    server.listen(&address.parse().unwrap(), &options).await.unwrap()
}

async fn whoami(session: &Session) -> String {
    session.function::<(), String>("whoami").await.unwrap().call(()).await.unwrap()
}

fn refusal(outcome: Result<Session, ConnectError>) -> RpcError {
    outcome.expect_err("there is no session").into_rpc_error()
}

fn board(capacity: usize) -> ParkOptions {
    ParkOptions { key: "board".into(), capacity, ..ParkOptions::default() }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, wait).await.unwrap_or_else(|_| panic!("{what}"));
}

async fn waiting(relay: &Server, count: usize) {
    let of_board = || relay.parked().iter().find(|(key, _)| key == "board").map_or(0, |(_, count)| *count);
    until(&format!("{count} wait at the relay"), || of_board() == count).await;
}

#[tokio::test]
async fn a_server_behind_a_relay_is_found_by_its_key_and_knows_its_client() {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let certificate = Certificate::from_pem(pem.as_bytes(), key.as_bytes()).unwrap();
    let tls = ServerTls::new(certificate, None).unwrap();
    let tokens = Tokens::parse(SECRET).unwrap();
    let by_token = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
    for scheme in ["tcp", "tls", "quic"] {
        let relay = relay(|options| options.access = by_token.clone());
        let address = listen(&relay, &format!("{scheme}://127.0.0.1:0"), Some(tls.clone())).await;
        let trust = ClientTls::new(pem.as_bytes(), None).unwrap();
        let dial = Dial { tokens: tokens.clone(), tls: Some(trust), ..Dial::default() };
        let server = server(|options| {
            options.access = by_token.clone();
            options.onward = dial.clone();
        });
        server.park(&address, &board(2));
        waiting(&relay, 2).await;
        let connector = Connector::new().dial(dial);
        let target = format!("{address}/board");
        let session = connector.connect(&target).await.unwrap();
        assert_eq!(whoami(&session).await, "client", "{scheme}");
        assert_eq!(session.get_function("no such function").await.unwrap_err().hop(), 1, "a relay is no hop");
        let blocking = move || {
            let session = connector.connect_blocking(&target).unwrap();
            session.function::<(), String>("whoami").wait().unwrap().call(()).wait().unwrap()
        };
        assert_eq!(tokio::task::spawn_blocking(blocking).await.unwrap(), "client");
        session.shutdown().await.unwrap();
        waiting(&relay, 2).await;
        server.stop();
        relay.stop();
    }
}

#[tokio::test]
async fn as_many_clients_are_served_as_the_server_has_capacity() {
    let (relay, server) = (relay(|_| {}), server(|_| {}));
    let address = listen(&relay, "tcp://127.0.0.1:0", None).await;
    server.park(&address, &board(2));
    waiting(&relay, 2).await;
    let target = format!("{address}/board");
    let first = Connector::new().connect(&target).await.unwrap();
    let second = Connector::new().connect(&target).await.unwrap();
    let error = refusal(Connector::new().connect(&target).await);
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.message().contains("no server with key 'board'"), "{error}");
    drop(first);
    waiting(&relay, 1).await;
    let third = Connector::new().connect(&target).await.unwrap();
    assert_eq!((whoami(&second).await, whoami(&third).await), ("anonymous".into(), "anonymous".into()));
    for (target, says) in
        [(format!("{address}/other"), "'other'"), (address.to_string(), "ask for a server by its key")]
    {
        let error = refusal(Connector::new().connect(&target).await);
        assert!(error.kind() == ErrorKind::NotFound && error.message().contains(says), "{error}");
    }
}

/// Regression: of calls one after the other, each with a session of its own, most were told that no
/// server waits.
#[tokio::test]
async fn sessions_one_after_the_other_find_the_server() {
    let (relay, server) = (relay(|_| {}), server(|_| {}));
    let address = listen(&relay, "tcp://127.0.0.1:0", None).await;
    server.park(&address, &board(1));
    waiting(&relay, 1).await;
    for _ in 0..20 {
        let target = format!("{address}/board");
        let session = in_time(RETURN_LIMIT, async || Connector::new().connect(&target).await).await;
        assert_eq!(whoami(&session).await, "anonymous");
    }
}

/// Regression: a client that was let in by the relay, and said nothing to the server, held one of
/// the server's places for as long as a handshake may take.
#[tokio::test]
async fn clients_that_stop_behind_the_relay_keep_nobody_out() {
    let (relay, server) = (relay(|_| {}), server(|options| options.handshake_timeout = Duration::from_secs(3600)));
    let address = listen(&relay, "memory:stop-behind", None).await;
    server.park(&address, &board(1));
    let mut stopped = Vec::new();
    for _ in 0..3 {
        waiting(&relay, 1).await;
        let (mut io, theirs) = tokio::io::duplex(1 << 16);
        relay.serve_channel(Channel::new(theirs, "a client that stops"));
        let hello = Hello { key: "board".into(), ..Hello::new(Role::Client) };
        let config = HandshakeConfig { hello, identities: vec![Box::new(Anonymous)], hold: false, timeout: LIMIT };
        io.write_all(&Handshake::dial(config, std::time::Instant::now()).take_output()).await.unwrap();
        waiting(&relay, 0).await;
        stopped.push(io);
    }
    let target = format!("{address}?key=board");
    let first = in_time(RETURN_LIMIT, async || Connector::new().connect(&target).await).await;
    assert_eq!(whoami(&first).await, "anonymous");
    // It has the one place that there is.
    let error = refusal(Connector::new().connect(&target).await);
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    drop(first);
    in_time(RETURN_LIMIT, async || Connector::new().connect(&target).await).await;
}

/// Starts a client that stops in its handshake with the server behind the relay until it is told to
/// go on.
fn slow_client(
    relay: &Server,
    connector: Connector,
) -> (oneshot::Sender<()>, JoinHandle<Result<Session, ConnectError>>) {
    let (client, far) = tokio::io::duplex(1 << 16);
    let (near, at_relay) = tokio::io::duplex(1 << 16);
    relay.serve_channel(Channel::new(at_relay, "a slow client"));
    let (go_on, told) = oneshot::channel();
    tokio::spawn(async move {
        let ((mut from_client, mut to_client), (mut from_relay, mut to_relay)) =
            (tokio::io::split(far), tokio::io::split(near));
        let mut to_the_relay = vec![0; 1 << 16];
        let length = from_client.read(&mut to_the_relay).await.unwrap();
        to_relay.write_all(&to_the_relay[..length]).await.unwrap();
        let to_the_server = async {
            told.await.unwrap();
            tokio::io::copy(&mut from_client, &mut to_relay).await
        };
        let _ = tokio::join!(to_the_server, tokio::io::copy(&mut from_relay, &mut to_client));
    });
    let connector = connector.key("board").handshake_timeout(LIMIT);
    (go_on, tokio::spawn(async move { connector.connect_channel(Channel::new(client, "a relay")).await }))
}

/// Regression: a client that was slow in its handshake took the last place, and the server, which
/// waited at the relay again, took one client more there and refused it.
#[tokio::test]
async fn a_server_waits_at_the_relay_for_as_many_clients_as_it_has_places() {
    let (relay, server) = (relay(|_| {}), server(|_| {}));
    let address = listen(&relay, "memory:slow-client", None).await;
    server.park(&address, &board(2));
    waiting(&relay, 2).await;
    let (go_on, slow) = slow_client(&relay, Connector::new());
    waiting(&relay, 1).await;
    // The server does not wait for the client's handshake.
    waiting(&relay, 2).await;
    go_on.send(()).unwrap();
    let slow = slow.await.unwrap().unwrap();
    assert_eq!(whoami(&slow).await, "anonymous");
    // Nor for the end of its session, while there is a place for another client.
    waiting(&relay, 1).await;
    let target = format!("{address}?key=board");
    let second = Connector::new().connect(&target).await.unwrap();
    let error = refusal(Connector::new().connect(&target).await);
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!((whoami(&slow).await, whoami(&second).await), ("anonymous".into(), "anonymous".into()));
    drop(slow);
    waiting(&relay, 1).await;
    assert_eq!(whoami(&second).await, "anonymous");
}

/// Opener of sessions for clients with a ticket. It says that one without has come, and then waits
/// for a word before it refuses it.
struct WithTicket {
    come: Semaphore,
    refuse: Semaphore,
}

#[async_trait::async_trait]
impl SessionFactory for WithTicket {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        if request.ticket.is_none() {
            self.come.add_permits(1);
            drop(self.refuse.acquire().await);
            return Err(RpcError::new(ErrorKind::Refused, "a client without a ticket"));
        }
        let registry = Registry::new();
        registry.add_inline("whoami", || "with a ticket".to_owned());
        Ok(Arc::new(LocalSession::new(registry)))
    }
}

/// Regression: a client that was slow in its handshake had the channel of another place leave the
/// relay before the server had looked at its ticket.
#[tokio::test]
async fn a_client_that_is_refused_takes_no_place_at_the_relay() {
    let factory = Arc::new(WithTicket { come: Semaphore::new(0), refuse: Semaphore::new(0) });
    let options = ServeOptions { key: "board".into(), ..ServeOptions::default() };
    let (relay, server) = (relay(|_| {}), Server::new(factory.clone(), options));
    let address = listen(&relay, "memory:without-ticket", None).await;
    server.park(&address, &board(1));
    waiting(&relay, 1).await;
    let (go_on, slow) = slow_client(&relay, Connector::new());
    waiting(&relay, 0).await;
    waiting(&relay, 1).await;
    go_on.send(()).unwrap();
    drop(factory.come.acquire().await.unwrap());
    let session = Connector::new().ticket("t").connect(&format!("{address}?key=board")).await.unwrap();
    assert_eq!(whoami(&session).await, "with a ticket");
    factory.refuse.add_permits(1);
    let error = refusal(slow.await.unwrap());
    assert!(error.message().contains("without a ticket"), "{error}");
}

#[tokio::test]
async fn a_relay_is_reached_through_hops_and_tunnels() {
    let (relay, server) = (relay(|_| {}), server(|_| {}));
    let address = listen(&relay, "tcp://127.0.0.1:0", None).await;
    server.park(&address, &board(1));
    let hop = self::server(|options| options.allow_forward = vec!["*".into()]);
    let hop = listen(&hop, "tcp://127.0.0.1:0", None).await;
    for via in [hop.to_string(), format!("tunnel:{hop}")] {
        waiting(&relay, 1).await;
        let session = Connector::new().via(&via).connect(&format!("{address}/board")).await.unwrap();
        assert_eq!(whoami(&session).await, "anonymous", "{via}");
    }
}

/// The clock is paused: time passes while all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_server_waits_for_longer_than_a_handshake_may_take() {
    let limit = Duration::from_millis(100);
    let (relay, server) = (relay(|options| options.handshake_timeout = limit), server(|_| {}));
    let address = listen(&relay, "memory:long-wait", None).await;
    server.park(&address, &ParkOptions { handshake_timeout: limit, ..board(1) });
    waiting(&relay, 1).await;
    let connections = relay.sessions();
    tokio::time::sleep(limit * 4).await;
    assert_eq!(relay.sessions(), connections);
    // Sessions have threads, for which a paused clock does not wait.
    tokio::time::resume();
    let session = Connector::new().key("board").connect(&address).await.unwrap();
    assert_eq!(whoami(&session).await, "anonymous");
}

/// The clock is paused: time passes while all tasks wait.
#[tokio::test(start_paused = true)]
async fn a_server_that_is_gone_or_silent_is_dropped_by_the_relay() {
    let relay = relay(|options| options.keep_alive = Duration::from_millis(50));
    let hello = Hello { key: "board".into(), ..Hello::new(Role::Server) };
    let config = HandshakeConfig { hello, identities: vec![Box::new(Anonymous)], hold: false, timeout: LIMIT };
    let greeting = Handshake::dial(config, std::time::Instant::now()).take_output();
    // One server closes its channel, and the other reads what it is sent and says nothing more.
    let (mut gone, theirs) = tokio::io::duplex(1 << 16);
    relay.serve_channel(Channel::new(theirs, "one that goes"));
    let (mut silent, theirs) = tokio::io::duplex(1 << 16);
    relay.serve_channel(Channel::new(theirs, "one that is silent"));
    for server in [&mut gone, &mut silent] {
        server.write_all(&greeting).await.unwrap();
    }
    waiting(&relay, 2).await;
    drop(gone);
    waiting(&relay, 0).await;
    let mut heard = Vec::new();
    silent.read_to_end(&mut heard).await.unwrap();
    tokio::time::timeout(LIMIT, relay.idle()).await.unwrap();
}

#[tokio::test]
async fn servers_reconnect_to_a_relay_that_was_restarted() {
    let (first, server) = (relay(|_| {}), server(|_| {}));
    // While there is no relay, nothing else of this machine may get the port: it is that of an
    // address which no other test uses, where the system has more than one.
    let host = if cfg!(target_os = "linux") { "127.0.77.1" } else { "127.0.0.1" };
    let address = listen(&first, &format!("tcp://{host}:0"), None).await;
    server.park(&address, &board(3));
    waiting(&first, 3).await;
    first.stop();
    first.stopped(LIMIT).await;
    let second = relay(|_| {});
    listen(&second, &address.to_string(), None).await;
    waiting(&second, 3).await;
    assert_eq!(whoami(&Connector::new().connect(&format!("{address}/board")).await.unwrap()).await, "anonymous");
    // A server that goes away leaves no channel at the relay.
    server.drain(LIMIT).await;
    waiting(&second, 0).await;
}

#[tokio::test]
async fn a_relay_can_be_the_client_of_servers_parked_at_it() {
    let (tokens, tls) = (Tokens::parse(SECRET).unwrap(), certified());
    let by_token = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
    for scheme in ["tcp", "tls", "quic"] {
        let relay = relay(|options| options.access = by_token.clone());
        let address = listen(&relay, &format!("{scheme}://127.0.0.1:0"), Some(tls.0.clone())).await;
        let trust = ClientTls::new(tls.1.as_bytes(), None).unwrap();
        let server = server(|options| {
            options.access = by_token.clone();
            options.onward = Dial { tokens: tokens.clone(), tls: Some(trust), ..Dial::default() };
        });
        let waits = tokio::spawn({
            let (server, address) = (server.clone(), address.clone());
            async move { server.park_once(&address, &board(1)).await }
        });
        // The relay proves itself like any client, and is refused like any.
        let connector = Connector::new().tokens(tokens.clone());
        let (key, session) = relay.connect_parked(&connector, |key| key == "board").await.unwrap();
        assert_eq!((key.as_str(), whoami(&session).await.as_str()), ("board", "client"));
        // Servers that are connected stay, although no more can come.
        relay.stop();
        assert_eq!(whoami(&session).await, "client");
        let error = relay.connect_parked(&connector, |_| true).await.unwrap_err().into_rpc_error();
        assert_eq!(error.kind(), ErrorKind::Draining);
        drop(session);
        assert!(waits.await.unwrap().unwrap());
    }
}

#[tokio::test]
async fn parking_once_fails_when_the_relay_has_gone() {
    let relay = relay(|_| {});
    let address = listen(&relay, "tcp://127.0.0.1:0", None).await;
    let server = server(|_| {});
    let waits = tokio::spawn({
        let (server, address) = (server.clone(), address.clone());
        async move { server.park_once(&address, &board(1)).await }
    });
    waiting(&relay, 1).await;
    relay.stop();
    let gone = waits.await.unwrap().unwrap_err().into_rpc_error();
    assert_eq!(gone.kind(), ErrorKind::Draining);
    let error = server.park_once(&address, &board(1)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Transport(_)), "{error:?}");
}

#[tokio::test]
async fn a_server_waits_at_no_relay_that_was_not_verified() {
    for scheme in ["tls", "quic"] {
        let (relay, (tls, _)) = (relay(|_| {}), certified());
        let address = listen(&relay, &format!("{scheme}://127.0.0.1:0"), Some(tls)).await;
        let unverified = Dial { tls: Some(ClientTls::unverified(None).unwrap()), ..Dial::default() };
        let server = server(|options| options.onward = unverified);
        let parked = tokio::time::timeout(LIMIT, server.park_once(&address, &board(1))).await;
        let error = parked.expect("it waits at no such relay").unwrap_err();
        assert!(matches!(&error, ConnectError::Transport(TransportError::Unsupported { .. })), "{error:?}");
        assert_eq!(relay.parked(), []);
    }
}

#[tokio::test]
async fn a_relay_without_proof_gets_no_session_with_a_parked_server() {
    let relay = relay(|_| {});
    let address = listen(&relay, "tcp://127.0.0.1:0", None).await;
    let tokens = Tokens::parse(SECRET).unwrap();
    let server = server(|options| options.access = Access { anonymous: false, tokens, certificates: false });
    let waits = tokio::spawn(async move { server.park_once(&address, &board(1)).await });
    let error = relay.connect_parked(&Connector::new(), |_| true).await.unwrap_err().into_rpc_error();
    assert_eq!(error.kind(), ErrorKind::Unauthenticated);
    assert!(!waits.await.unwrap().unwrap());
}

/// Returns a certificate for a server of this machine, and its PEM text for clients that trust it.
fn certified() -> (ServerTls, String) {
    let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
    let (pem, key) = (made.cert.pem(), made.signing_key.serialize_pem());
    let certificate = Certificate::from_pem(pem.as_bytes(), key.as_bytes()).unwrap();
    (ServerTls::new(certificate, None).unwrap(), pem)
}

/// Body of a golden hello.
fn golden(name: &str) -> Vec<u8> {
    let lines = include_str!("relay_golden.txt").lines().filter_map(|line| line.split_once(" = "));
    let mut found = lines.filter(|(other, _)| *other == name);
    let (_, hex) = found.next().unwrap_or_else(|| panic!("relay_golden.txt has no hello '{name}'"));
    let digits = hex.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap());
    digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
}

const HELLO: u8 = 1;
const ACCEPT: u8 = 2;
const REJECT: u8 = 3;

fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut frame = vec![0; 24];
    frame[..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
    frame[20] = kind;
    frame.extend_from_slice(body);
    frame
}

fn first_frame(body: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &frame(HELLO, body)].concat()
}

async fn read_magic(io: &mut (impl AsyncRead + Unpin + ?Sized)) {
    let mut magic = [0; 8];
    io.read_exact(&mut magic).await.unwrap();
    assert_eq!(magic, MAGIC);
}

async fn read_frame(io: &mut (impl AsyncRead + Unpin + ?Sized)) -> (u8, Vec<u8>) {
    let mut header = [0; 24];
    io.read_exact(&mut header).await.unwrap();
    let mut body = vec![0; u32::from_le_bytes(header[..4].try_into().unwrap()) as usize];
    io.read_exact(&mut body).await.unwrap();
    (header[20], body)
}

/// Reads a hello, and compares it with a golden one but for the name of the program.
async fn assert_hello(io: &mut (impl AsyncRead + Unpin + ?Sized), name: &str) {
    read_magic(io).await;
    let (kind, body) = read_frame(io).await;
    assert_eq!(kind, HELLO);
    let hello: Hello = Packed::from_bytes(body.into()).decode().unwrap();
    let named = Packed::encode(&Hello { agent: "golden".to_owned(), ..hello }).unwrap();
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(hex(named.as_bytes()), hex(&golden(name)), "{name}");
}

#[tokio::test]
async fn a_relay_answers_golden_hellos_with_golden_hellos() {
    let relay = relay(|_| {});
    let (mut board, far) = tokio::io::duplex(1 << 16);
    relay.serve_channel(Channel::new(far, "a board"));
    board.write_all(&first_frame(&golden("server"))).await.unwrap();
    assert_hello(&mut board, "relay to server").await;
    board.write_all(&frame(ACCEPT, &[])).await.unwrap();
    waiting(&relay, 1).await;
    let (mut client, far) = tokio::io::duplex(1 << 16);
    relay.serve_channel(Channel::new(far, "a client"));
    client.write_all(&first_frame(&golden("client"))).await.unwrap();
    assert_hello(&mut client, "relay to client").await;
    client.write_all(&frame(ACCEPT, &[])).await.unwrap();
    assert_eq!(read_frame(&mut client).await, (ACCEPT, Vec::new()));
    assert_eq!(read_frame(&mut board).await, (ACCEPT, Vec::new()));
    client.write_all(b"from the client").await.unwrap();
    let mut bytes = [0; 15];
    board.read_exact(&mut bytes).await.unwrap();
    assert_eq!(&bytes, b"from the client");
}

#[tokio::test]
async fn servers_and_clients_say_golden_hellos_to_a_relay() {
    let address: Address = "memory:golden-relay".parse().unwrap();
    let mut listener = Transports::default().bind(&address, &Bind::default()).await.unwrap();
    let parked = tokio::spawn({
        let (server, address) = (server(|_| {}), address.clone());
        async move { server.park_once(&address, &board(1)).await }
    });
    let mut accepted = listener.accept().await.unwrap();
    assert_hello(accepted.io_mut(), "server").await;
    accepted.io_mut().write_all(&first_frame(&golden("relay to server"))).await.unwrap();
    assert_eq!(read_frame(accepted.io_mut()).await, (ACCEPT, Vec::new()));
    drop(accepted);
    assert!(parked.await.unwrap().is_err(), "the relay went away before a client came");
    let connecting = tokio::spawn(async move { Connector::new().connect("memory:golden-relay?key=board").await });
    let mut accepted = listener.accept().await.unwrap();
    assert_hello(accepted.io_mut(), "client").await;
    drop(accepted);
    refusal(connecting.await.unwrap());
}

#[tokio::test]
async fn another_version_at_a_relay_is_refused_and_the_older_side_is_named() {
    let decode = |name| Packed::from_bytes(golden(name).into()).decode::<Hello>().unwrap();
    let with_versions = |name, version_min, version_max| {
        let hello = Hello { version_min, version_max, ..decode(name) };
        first_frame(Packed::encode(&hello).unwrap().as_bytes())
    };
    for (versions, expected) in [((2, 3), "update the side that speaks 1 to 1"), ((0, 0), "that speaks 0 to 0")] {
        // A server and a client of another version at the relay.
        for name in ["server", "client"] {
            let relay = relay(|_| {});
            let (mut near, far) = tokio::io::duplex(1 << 16);
            relay.serve_channel(Channel::new(far, "another version"));
            near.write_all(&with_versions(name, versions.0, versions.1)).await.unwrap();
            read_magic(&mut near).await;
            let (kind, body) = read_frame(&mut near).await;
            assert_eq!(kind, REJECT);
            assert!(String::from_utf8_lossy(&body).contains(expected), "{name}: {}", String::from_utf8_lossy(&body));
        }
        // A server at a relay of another version.
        let address: Address = format!("memory:relay-{}", versions.1).parse().unwrap();
        let mut listener = Transports::default().bind(&address, &Bind::default()).await.unwrap();
        let parked = tokio::spawn(async move { server(|_| {}).park_once(&address, &board(1)).await });
        let mut accepted = listener.accept().await.unwrap();
        accepted.io_mut().write_all(&with_versions("relay to server", versions.0, versions.1)).await.unwrap();
        let error = parked.await.unwrap().unwrap_err().into_rpc_error();
        assert_eq!(error.kind(), ErrorKind::VersionMismatch);
        assert!(error.message().contains(expected), "{error}");
    }
}
