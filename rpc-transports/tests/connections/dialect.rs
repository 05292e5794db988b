//! A dialect of a test's own, next to native clients on the same address.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use rpc_core::proto::{Anonymous, Handshake, HandshakeConfig, Hello, Role};
use rpc_core::{ErrorKind, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Access, Address, Bind, BoxFuture, Channel, ClientTls, ConnectError, Connector, Dial, Dialect, DialectConnection,
    DialectRequest, Dialects, OpenRequest, Recognition, RelayedConnection, ServeObserver, ServeOptions, Server, Tokens,
    Transports,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::oneshot;

use crate::chains::certificate;
use crate::limits::in_time;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

/// A protocol of lines: `LINES`, the key, perhaps with ` onward to ` a further server or ` busy`,
/// and then calls such as `add 1 2`, or one of the commands `deaf`, `message`, `background`,
/// `flood` and `hold BYTES`. A call of `never` is said to have begun.
#[derive(Debug)]
struct Lines;

const GREETING: &str = "LINES\n";

impl Dialect for Lines {
    fn name(&self) -> &str {
        "lines"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        match GREETING.as_bytes() {
            greeting if first.starts_with(greeting) => Recognition::Accept,
            greeting if greeting.starts_with(first) => Recognition::NeedMore,
            _ => Recognition::Decline,
        }
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(serve(connection))
    }

    fn refusal(&self, reason: &RpcError) -> Vec<u8> {
        format!("! {}\n", reason.kind()).into_bytes()
    }
}

async fn serve(connection: &mut DialectConnection) -> Result<(), RpcError> {
    assert_eq!(read_line(connection.io()).await?, "LINES", "the stream begins with the first byte");
    let first = read_line(connection.io()).await?;
    let (key, is_busy) = (first.split(' ').next().unwrap_or_default().to_owned(), first.ends_with(" busy"));
    let activity = connection.activity();
    // A request that begins before the session, and ends by `background` alone.
    let mut busy = is_busy.then(|| activity.working());
    let session = match connection.open(DialectRequest { key, ..DialectRequest::default() }).await {
        Ok(session) => session,
        Err(error) => {
            say(connection.io(), format!("! {}", error.kind())).await?;
            return Err(error);
        }
    };
    let session = match first.split_once(" onward to ") {
        None => session,
        Some((_, target)) => match connection.further_servers().connect(target, "board").await {
            Ok(next) => {
                connection.forward_to(&next)?;
                next
            }
            Err(error) => {
                say(connection.io(), format!("! {}", error.kind())).await?;
                return Err(error);
            }
        },
    };
    let identity = connection.identity().to_owned();
    let (mut notices, queued) = (connection.notices(), connection.queued().clone());
    let (mut input, mut output) = tokio::io::split(connection.io());
    say(&mut output, format!("ready {identity}")).await?;
    let mut held = Vec::new();
    loop {
        let line = tokio::select! {
            reason = notices.going_away() => return say(&mut output, format!("bye {}", reason.kind())).await,
            line = read_line(&mut input) => line?,
        };
        match line.as_str() {
            "deaf" => {
                say(&mut output, "deaf".to_owned()).await?;
                std::future::pending::<()>().await;
            }
            "message" => {
                let _receiving = activity.receiving();
                say(&mut output, "go".to_owned()).await?;
                read_line(&mut input).await?;
                continue;
            }
            "background" => {
                let working = busy.take();
                // Runs after this poll, and nothing else wakes the dialect.
                tokio::spawn(async move { drop(working) });
                continue;
            }
            "flood" => {
                let flood = async { while output.write_all(&[b'.'; 1 << 16]).await.is_ok() {} };
                tokio::select! {
                    biased;
                    () = flood => {}
                    // The write is cancelled as soon as the channel is full.
                    () = std::future::ready(()) => {}
                }
                continue;
            }
            _ => {}
        }
        let working = activity.working();
        if line == "never" {
            say(&mut output, "begun".to_owned()).await?;
        }
        let answer = match line.strip_prefix("hold ") {
            Some(bytes) => Ok(match queued.reserve(bytes.parse().unwrap()) {
                Ok(lease) => {
                    held.push(lease);
                    "held".to_owned()
                }
                Err(error) => format!("! {error}"),
            }),
            None => call(&session, &line).await.map(|sum| format!("= {sum}")),
        };
        say(&mut output, answer.unwrap_or_else(|error| format!("! {}", error.kind()))).await?;
        drop(working);
    }
}

async fn call(session: &Session, line: &str) -> Result<i64, RpcError> {
    let mut words = line.split(' ');
    let function = session.get_function(words.next().unwrap_or_default()).await?;
    let mut number = || words.next().and_then(|word| word.parse().ok()).unwrap_or(0_i64);
    function.call((number(), number())).await
}

async fn read_line(input: &mut (impl AsyncRead + Unpin + ?Sized)) -> Result<String, RpcError> {
    line(input).await.ok_or_else(|| RpcError::new(ErrorKind::Closed, "the client has gone"))
}

async fn say(output: &mut (impl AsyncWrite + Unpin + ?Sized), line: String) -> Result<(), RpcError> {
    let written = output.write_all(format!("{line}\n").as_bytes()).await;
    written.map_err(|error| RpcError::new(ErrorKind::PeerLost, error.to_string()))
}

/// Returns the next line, or `None` at the end of the stream.
async fn line(io: &mut (impl AsyncRead + Unpin + ?Sized)) -> Option<String> {
    let mut line = Vec::new();
    loop {
        match io.read_u8().await {
            Ok(b'\n') => return Some(String::from_utf8(line).unwrap()),
            Ok(byte) => line.push(byte),
            Err(_) => return None,
        }
    }
}

/// Observer that records the refusals.
#[derive(Debug, Default)]
struct Refusals(Mutex<Vec<ErrorKind>>);

impl ServeObserver for Refusals {
    fn refused(&self, reason: ErrorKind) {
        self.0.lock().unwrap().push(reason);
    }
}

fn server(change: impl FnOnce(&mut ServeOptions)) -> Server {
    let registry = Registry::new();
    registry.add("add", |a: i64, b: i64| a + b);
    registry.add_async("never", |_: i64, _: i64| std::future::pending::<i64>());
    let dialects = Dialects::default().with(Lines);
    let mut options = ServeOptions { dialects, key: "board".to_owned(), ..ServeOptions::default() };
    change(&mut options);
    Server::new(Arc::new(registry), options)
}

async fn listen(server: &Server, address: &str) -> Address {
    server.listen(&address.parse().unwrap(), &Bind::default()).await.unwrap()
}

/// A client of the dialect.
struct Client(Channel);

impl Client {
    /// Connects, and asks for a session.
    async fn connect(address: &Address) -> (Self, String) {
        let channel = Transports::default().dial(address, &Dial::default()).await.unwrap();
        Self::over(channel).await
    }

    async fn over(channel: Channel) -> (Self, String) {
        Self::begin(channel, "LINES\nboard\n").await
    }

    async fn begin(channel: Channel, greeting: &str) -> (Self, String) {
        let mut this = Self(channel);
        this.send(greeting).await;
        let answer = this.line().await.unwrap_or_default();
        (this, answer)
    }

    async fn send(&mut self, text: &str) {
        self.0.io_mut().write_all(text.as_bytes()).await.unwrap();
    }

    async fn line(&mut self) -> Option<String> {
        tokio::time::timeout(LIMIT, line(self.0.io_mut())).await.expect("the server answers or ends")
    }

    async fn ask(&mut self, text: &str) -> String {
        self.send(&format!("{text}\n")).await;
        self.line().await.unwrap_or_default()
    }

    /// Asks a server that may end the connection before.
    async fn try_ask(&mut self, text: &str, expected: &str) -> Result<(), ConnectError> {
        let answer = match self.0.io_mut().write_all(format!("{text}\n").as_bytes()).await {
            Ok(()) => self.line().await,
            Err(_) => None,
        };
        if answer.as_deref() == Some(expected) {
            return Ok(());
        }
        Err(RpcError::new(ErrorKind::PeerLost, format!("{answer:?} is the answer to {text:?}")).into())
    }
}

async fn calls_natively(connector: Connector, address: &Address) {
    let session = connector.connect(address).await.unwrap();
    assert_eq!(session.function::<(i64, i64), i64>("add").await.unwrap().call((1, 2)).await.unwrap(), 3);
}

async fn idle(server: &Server) {
    tokio::time::timeout(LIMIT, server.idle()).await.expect("the server has no sessions in the end");
    assert_eq!(server.sessions(), 0);
}

#[tokio::test]
async fn clients_of_a_dialect_and_native_ones_share_an_address() {
    let server = server(|_| {});
    let folder = tempfile::tempdir().unwrap();
    let unix = format!("unix:{}/s", folder.path().display());
    for address in ["tcp://127.0.0.1:0", "memory:dialect", &unix] {
        let address = listen(&server, address).await;
        calls_natively(Connector::new(), &address).await;
        let (mut client, answer) = Client::connect(&address).await;
        assert_eq!(answer, "ready anonymous");
        assert_eq!(client.ask("add 1 2").await, "= 3");
        assert_eq!(client.ask("nothing").await, format!("! {}", ErrorKind::NotFound));
        calls_natively(Connector::new(), &address).await;
        assert_eq!(client.ask("add 40 2").await, "= 42");
    }
    idle(&server).await;
}

#[tokio::test]
async fn first_bytes_may_come_slowly_but_not_for_ever() {
    let (refusals, handshake_timeout) = (Arc::new(Refusals::default()), Duration::from_millis(500));
    let server = server(|options| {
        options.handshake_timeout = handshake_timeout;
        options.observer = Some(refusals.clone());
    });
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let mut client = in_time(handshake_timeout, async || {
        let mut client = Client(Transports::default().dial(&address, &Dial::default()).await?);
        for byte in b"LINES\nboard" {
            // If the server has closed the connection, its answer is missing.
            let _ = client.0.io_mut().write_all(&[*byte]).await;
            let _ = client.0.io_mut().flush().await;
            tokio::task::yield_now().await;
        }
        // The end of the line is the last byte.
        client.try_ask("", "ready anonymous").await?;
        Ok(client)
    })
    .await;
    // Of attempts for which the machine stood still.
    let already_refused = refusals.0.lock().unwrap().len();
    for beginning in ["", "LIN", "LINES\nboa"] {
        let mut slow = Client(Transports::default().dial(&address, &Dial::default()).await.unwrap());
        slow.send(beginning).await;
        assert_eq!(slow.line().await, None, "{beginning:?} is cut off");
    }
    assert_eq!(refusals.0.lock().unwrap()[already_refused..], [ErrorKind::DeadlineExceeded; 3]);
    assert_eq!(client.ask("add 1 2").await, "= 3", "the limit is for the handshake alone");
}

#[tokio::test]
async fn unknown_first_bytes_get_no_session() {
    let refusals = Arc::new(Refusals::default());
    let server = server(|options| options.observer = Some(refusals.clone()));
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    for unknown in ["GET / HTTP/1.1\r\n\r\n", "LINED\n"] {
        let mut client = Client(Transports::default().dial(&address, &Dial::default()).await.unwrap());
        client.send(unknown).await;
        assert_eq!(client.line().await, None, "{unknown:?}");
    }
    idle(&server).await;
    assert_eq!(refusals.0.lock().unwrap().len(), 2);
    let (mut client, _) = Client::connect(&address).await;
    assert_eq!(client.ask("add 1 2").await, "= 3");
}

#[tokio::test]
async fn sessions_in_a_dialect_count_with_the_others() {
    let refusals = Arc::new(Refusals::default());
    let server = server(|options| {
        options.max_sessions = 2;
        options.observer = Some(refusals.clone());
    });
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let native = Connector::new().connect(&address).await.unwrap();
    let (client, answer) = Client::connect(&address).await;
    assert_eq!((answer.as_str(), server.sessions()), ("ready anonymous", 2));
    let (_, answer) = Client::connect(&address).await;
    assert_eq!(answer, format!("! {}", ErrorKind::LimitExceeded));
    assert!(Connector::new().connect(&address).await.is_err());
    assert_eq!(*refusals.0.lock().unwrap(), [ErrorKind::LimitExceeded; 2]);
    drop((client, native));
    idle(&server).await;
    let (_client, answer) = Client::connect(&address).await;
    assert_eq!(answer, "ready anonymous");
}

#[tokio::test]
async fn a_client_that_asks_for_another_key_is_refused() {
    let server = server(|options| options.key = "other".to_owned());
    let (_, answer) = Client::connect(&listen(&server, "memory:dialect-key").await).await;
    assert_eq!(answer, format!("! {}", ErrorKind::Refused));
}

#[tokio::test]
async fn a_session_without_requests_ends_and_one_that_works_does_not() {
    let idle_timeout = Duration::from_millis(200);
    let server = server(|options| options.idle_timeout = Some(idle_timeout));
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let busy = in_time(idle_timeout, async || {
        let (mut busy, _) = Client::connect(&address).await;
        busy.try_ask("never", "begun").await?;
        Ok(busy)
    })
    .await;
    let (mut quiet, _) = Client::connect(&address).await;
    assert_eq!(quiet.line().await.unwrap(), format!("bye {}", ErrorKind::SessionTimeout), "it is told");
    assert_eq!(quiet.line().await, None);
    one_is_left(&server).await;
    server.stop();
    idle(&server).await;
    drop(busy);
}

async fn one_is_left(server: &Server) {
    let freed = async {
        while server.sessions() > 1 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, freed).await.expect("the other session is freed");
    assert_eq!(server.sessions(), 1, "this one goes on");
}

#[tokio::test]
async fn a_request_that_begins_before_the_session_counts_as_work() {
    let server = server(|options| options.idle_timeout = Some(Duration::from_millis(200)));
    let address = listen(&server, "memory:dialect-early").await;
    let channel = Transports::default().dial(&address, &Dial::default()).await.unwrap();
    let (mut busy, _) = Client::begin(channel, "LINES\nboard busy\n").await;
    let (mut quiet, _) = Client::connect(&address).await;
    assert_eq!(quiet.line().await.unwrap(), format!("bye {}", ErrorKind::SessionTimeout));
    one_is_left(&server).await;
    assert_eq!(busy.ask("add 1 2").await, "= 3");
}

#[tokio::test]
async fn a_request_that_ends_in_another_task_leaves_an_idle_session() {
    let server = server(|options| options.idle_timeout = Some(Duration::from_millis(100)));
    let address = listen(&server, "memory:dialect-background").await;
    let channel = Transports::default().dial(&address, &Dial::default()).await.unwrap();
    let (mut client, _) = Client::begin(channel, "LINES\nboard busy\n").await;
    // The session has never been idle so far, so that no alarm of the server is set.
    assert_eq!(client.ask("background").await, format!("bye {}", ErrorKind::SessionTimeout));
    assert_eq!(client.line().await, None);
    idle(&server).await;
}

#[tokio::test]
async fn bytes_that_are_no_request_do_not_keep_a_session() {
    let server = server(|options| options.idle_timeout = Some(Duration::from_millis(200)));
    let address = listen(&server, "memory:dialect-bytes").await;
    let (mut client, _) = Client::connect(&address).await;
    let trickling = async { while client.0.io_mut().write_all(b"x").await.is_ok() {} };
    tokio::time::timeout(LIMIT, trickling).await.expect("the server cuts the connection");
    idle(&server).await;
}

#[tokio::test]
async fn a_message_that_comes_more_slowly_than_the_least_rate_is_cut_off() {
    let server = server(|options| {
        options.write_timeout = Duration::from_millis(200);
        options.min_rate = 1 << 20;
    });
    let address = listen(&server, "memory:dialect-rate").await;
    let ((mut between, _), (mut slow, _)) = (Client::connect(&address).await, Client::connect(&address).await);
    // One client is in between two messages for longer than the time limit. Its message is there
    // as a whole when the server begins to read it, so that no delay of this test counts.
    assert_eq!(between.ask("message\na whole message").await, "go");
    assert_eq!(between.ask("add 1 2").await, "= 3");
    // The other one sends no more than a part.
    slow.send("message\na part").await;
    assert_eq!((slow.line().await.as_deref(), slow.line().await), (Some("go"), None));
    assert_eq!(between.ask("add 1 2").await, "= 3");
}

#[tokio::test]
async fn a_cancelled_write_is_no_stall_once_the_client_reads() {
    let server = server(|options| options.write_timeout = Duration::from_millis(300));
    let address = listen(&server, "memory:dialect-cancel").await;
    let ((mut client, _), (mut stalled, _)) = (Client::connect(&address).await, Client::connect(&address).await);
    client.send("flood\n").await;
    assert_eq!(client.0.io_mut().read_u8().await.unwrap(), b'.');
    // The other one stalls later, and is cut off.
    assert_eq!(stalled.ask("add 1 2").await, "= 3");
    let asking = async { while stalled.0.io_mut().write_all(b"add 1 2\n").await.is_ok() {} };
    tokio::time::timeout(LIMIT, asking).await.expect("the server cuts the connection");
    one_is_left(&server).await;
    let answer = client.ask("add 1 2").await;
    assert!(answer.ends_with(".= 3"), "the answer follows the flood");
}

#[tokio::test]
async fn the_end_of_the_session_is_the_end_of_the_connection() {
    let origin = server(|_| {});
    let origin_address = listen(&origin, "memory:dialect-origin").await;
    let session = Connector::new().connect(&origin_address).await.unwrap();
    let shared = session.shared().clone();
    let dialects = Dialects::default().with(Lines);
    let options = ServeOptions { dialects, key: "board".to_owned(), ..ServeOptions::default() };
    let factory = move |_: &OpenRequest| Ok::<SharedSession, RpcError>(shared.clone());
    let server = Server::new(Arc::new(factory), options);
    let address = listen(&server, "memory:dialect-ended").await;
    let ((mut client, _), (mut deaf, _)) = (Client::connect(&address).await, Client::connect(&address).await);
    assert_eq!((client.ask("add 1 2").await.as_str(), deaf.ask("deaf").await.as_str()), ("= 3", "deaf"));
    origin.stop();
    let reason = tokio::time::timeout(LIMIT, session.ended()).await.unwrap();
    assert_eq!((client.line().await, client.line().await), (Some(format!("bye {}", reason.kind())), None));
    assert_eq!(deaf.line().await, None);
    idle(&server).await;
}

#[tokio::test]
async fn a_dialect_leads_its_clients_on_to_further_servers() {
    let far = server(|_| {});
    let far_address = listen(&far, "memory:dialect-led-to").await;
    let hop = server(|options| options.allow_forward = vec!["memory:dialect-led-to*".to_owned()]);
    let address = listen(&hop, "memory:dialect-leads-on").await;
    let onward = async |target: &str| {
        let channel = Transports::default().dial(&address, &Dial::default()).await.unwrap();
        Client::begin(channel, &format!("LINES\nboard onward to {target}\n")).await
    };
    for (target, refusal) in [("memory:elsewhere", "! refused"), ("memory:dialect-led-to-away", "! peer lost")] {
        assert_eq!(onward(target).await.1, refusal);
    }
    let (mut client, ready) = onward(&far_address.to_string()).await;
    assert_eq!((ready.as_str(), client.ask("add 1 2").await.as_str()), ("ready anonymous", "= 3"));
    assert_eq!((hop.sessions(), far.sessions()), (1, 1));
    // The end of the further session is the end of the connection.
    far.stop();
    assert!(client.line().await.is_some_and(|line| line.starts_with("bye ")));
    assert_eq!(client.line().await, None);
    idle(&hop).await;
    idle(&far).await;
}

#[tokio::test]
async fn bytes_that_a_dialect_holds_count_against_the_limits_of_session_and_server() {
    let server = server(|options| {
        options.max_total_queued = 1000;
        (options.limits.window, options.limits.max_message) = (900, 900);
    });
    let address = listen(&server, "memory:dialect-queued").await;
    let ((mut first, _), (mut second, _)) = (Client::connect(&address).await, Client::connect(&address).await);
    let refused = |name, limit, bytes| format!("! {}", RpcError::limit(name, limit, bytes));
    assert_eq!(first.ask("hold 901").await, refused("window", 900, 901), "a session has its limit");
    assert_eq!(first.ask("hold 800").await, "held");
    assert_eq!(second.ask("hold 300").await, refused("max_total_queued", 1000, 1100), "all sessions have one");
    drop(first);
    one_is_left(&server).await;
    assert_eq!(second.ask("hold 300").await, "held");
}

#[tokio::test]
async fn a_client_that_needs_no_proof_leaves_its_probation_with_its_session() {
    let (tls, trust) = certificate();
    let tokens = Tokens::parse("alice 0123456789abcdef0123456789abcdef").unwrap();
    let server = server(|options| {
        options.access = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
        options.dialects = Dialects::default().with_unproven(Lines);
        options.max_handshakes = 1;
    });
    let bind = Bind { tls: Some(tls), ..Bind::default() };
    let address = server.listen(&"quic://127.0.0.1:0".parse().unwrap(), &bind).await.unwrap();
    // Another `keep_alive` for each, so that each has a connection of its own.
    let connect = async |seconds| {
        let dial = Dial { tls: Some(trust.clone()), keep_alive: Duration::from_secs(seconds), ..Dial::default() };
        Client::over(Transports::default().dial(&address, &dial).await.unwrap()).await
    };
    let (mut first, _) = connect(5).await;
    let (mut second, _) = connect(6).await;
    // On probation the first one would have given way.
    assert_eq!((first.ask("add 1 2").await.as_str(), second.ask("add 1 2").await.as_str()), ("= 3", "= 3"));
    // What it may use without proof is the dialect alone.
    assert!(Connector::new().tls(trust.clone()).connect(&address).await.is_err());
    calls_natively(Connector::new().tls(trust.clone()).tokens(tokens.clone()), &address).await;
}

#[tokio::test]
async fn the_streams_of_proven_clients_are_not_for_one_whose_session_has_ended() {
    let (tls, trust) = certificate();
    let server = server(|options| {
        options.access = Access { anonymous: false, tokens: Tokens::default(), certificates: true };
        options.dialects = Dialects::default().with_unproven(Lines);
        // Two connections.
        (options.max_sessions, options.max_handshakes) = (1, 1);
    });
    let bind = Bind { tls: Some(tls), ..Bind::default() };
    let address = server.listen(&"quic://127.0.0.1:0".parse().unwrap(), &bind).await.unwrap();
    let dial = Dial { tls: Some(trust), keep_alive: Duration::from_secs(7), ..Dial::default() };
    let transports = Transports::default();
    let open = async || transports.dial(&address, &dial).await;
    let (client, answer) = Client::over(open().await.unwrap()).await;
    assert_eq!(answer, "ready anonymous");
    // Keeps the connection.
    let mut opened = vec![open().await.unwrap()];
    drop(client);
    idle(&server).await;
    // A stream that is not granted makes the client try another connection.
    while opened.len() < 32
        && let Ok(channel) = open().await
    {
        opened.push(channel);
    }
    assert!(opened.len() < 16, "a client on probation has opened {} channels", opened.len());
}

#[tokio::test]
async fn a_client_that_takes_no_output_is_cut_off() {
    let server = server(|options| options.write_timeout = Duration::from_millis(300));
    let address = listen(&server, "memory:dialect-stall").await;
    let (mut client, _) = Client::connect(&address).await;
    // The answers fill the channel, because the client reads none.
    let asking = async {
        loop {
            if client.0.io_mut().write_all(b"add 1 2\n").await.is_err() {
                return;
            }
        }
    };
    tokio::time::timeout(LIMIT, asking).await.expect("the server cuts the connection");
    idle(&server).await;
}

#[tokio::test]
async fn a_session_ends_after_its_longest_duration() {
    let duration = Duration::from_millis(100);
    let server = server(|options| options.session_duration = Some(duration));
    let address = listen(&server, "memory:dialect-duration").await;
    let mut client = in_time(duration, async || {
        let (mut client, _) = Client::connect(&address).await;
        client.try_ask("deaf", "deaf").await?;
        Ok(client)
    })
    .await;
    assert_eq!(client.line().await, None);
    idle(&server).await;
}

#[tokio::test]
async fn draining_and_stopping_end_sessions_in_a_dialect() {
    let server = server(|_| {});
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let ((mut client, _), (mut deaf, _)) = (Client::connect(&address).await, Client::connect(&address).await);
    assert_eq!(deaf.ask("deaf").await, "deaf", "it takes no notice from here on");
    let drained = server.clone();
    let draining = tokio::spawn(async move { drained.drain(LIMIT).await });
    let bye = format!("bye {}", ErrorKind::Draining);
    assert_eq!((client.line().await, client.line().await), (Some(bye), None));
    assert!(!draining.is_finished(), "the other one does not listen");
    server.stop();
    tokio::time::timeout(LIMIT, server.stopped(2 * LIMIT)).await.expect("a dialect cannot hold up the end");
    assert_eq!((deaf.line().await, server.sessions()), (None, 0));
    draining.await.unwrap();
}

#[tokio::test]
async fn where_an_identity_is_demanded_a_dialect_needs_a_certificate_or_the_operators_word() {
    let tokens = Tokens::parse("alice 0123456789abcdef0123456789abcdef").unwrap();
    let refusals = Arc::new(Refusals::default());
    let access = Access { anonymous: false, tokens: tokens.clone(), certificates: false };
    let closed = server(|options| {
        options.access = access.clone();
        options.observer = Some(refusals.clone());
    });
    let address = listen(&closed, "memory:dialect-closed").await;
    let (mut client, answer) = Client::connect(&address).await;
    assert_eq!(answer, format!("! {}", ErrorKind::Unauthenticated));
    assert_eq!((client.line().await, closed.sessions()), (None, 0));
    assert_eq!(*refusals.0.lock().unwrap(), [ErrorKind::Unauthenticated]);
    calls_natively(Connector::new().tokens(tokens), &address).await;

    let open = server(|options| {
        options.access = access;
        options.dialects = Dialects::default().with_unproven(Lines);
    });
    let address = listen(&open, "memory:dialect-open").await;
    assert_eq!(Client::connect(&address).await.1, "ready anonymous");
    // The exception is for the dialect alone.
    assert!(Connector::new().connect(&address).await.is_err());
}

#[tokio::test]
async fn a_dialect_works_behind_tls_and_quic() {
    let (tls, trust) = certificate();
    let server = server(|_| {});
    for scheme in ["tls", "quic"] {
        let bind = Bind { tls: Some(tls.clone()), ..Bind::default() };
        let address = server.listen(&format!("{scheme}://127.0.0.1:0").parse().unwrap(), &bind).await.unwrap();
        let dial = Dial { tls: Some(ClientTls::clone(&trust)), ..Dial::default() };
        let channel = Transports::default().dial(&address, &dial).await.unwrap();
        let (mut client, answer) = Client::over(channel).await;
        assert_eq!((answer.as_str(), client.ask("add 1 2").await.as_str()), ("ready anonymous", "= 3"));
        calls_natively(Connector::new().tls(trust.clone()), &address).await;
    }
}

#[tokio::test]
async fn a_dialect_works_at_the_end_of_a_tunnel() {
    let target = server(|_| {});
    let target = listen(&target, "tcp://127.0.0.1:0").await;
    let hop = server(|options| options.allow_forward.push("tcp://*".to_owned()));
    let hop = listen(&hop, "memory:dialect-hop").await;
    let mut channel = Transports::default().dial(&hop, &Dial::default()).await.unwrap();
    let mut hello = Hello::new(Role::Client);
    (hello.forward, hello.tunnel) = (vec![target.to_string()], true);
    let config = HandshakeConfig { hello, identities: vec![Box::new(Anonymous)], hold: false, timeout: LIMIT };
    let (mut handshake, mut input) = (Handshake::dial(config, Instant::now()), BytesMut::new());
    loop {
        channel.io_mut().write_all(&handshake.take_output()).await.unwrap();
        if handshake.handle_input(&mut input).unwrap().is_some() {
            break;
        }
        assert!(channel.io_mut().read_buf(&mut input).await.unwrap() > 0);
    }
    channel.io_mut().write_all(&handshake.take_output()).await.unwrap();
    let (mut client, answer) = Client::over(channel).await;
    assert_eq!((answer.as_str(), client.ask("add 1 2").await.as_str()), ("ready anonymous", "= 3"));
}

/// A protocol of a relay: `MEET`, and then the bytes of the next peer that says so.
#[derive(Debug, Default)]
struct Meet(Mutex<Option<oneshot::Sender<oneshot::Sender<RelayedConnection>>>>);

impl Dialect for Meet {
    fn name(&self) -> &str {
        "meet"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        if first.starts_with(b"MEET\n") { Recognition::Accept } else { Recognition::NeedMore }
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async move {
            connection.probe_silence();
            assert!(connection.detach().is_none(), "it has no place yet");
            // A channel over the bytes of the first one, from the first byte on.
            connection.upgrade(async |channel| Ok(channel.map_io(|io| io))).await.unwrap();
            assert_eq!(read_line(connection.io()).await?, "MEET");
            if let Err(error) = connection.admit() {
                say(connection.io(), format!("! {}", error.kind())).await?;
                return Err(error);
            }
            let error = connection.open(DialectRequest::default()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ApiMisuse, "{error}");
            let (claim, claimed) = oneshot::channel();
            let first = {
                let mut waiting = self.0.lock().unwrap();
                let first = waiting.take();
                if first.is_none() {
                    *waiting = Some(claim);
                }
                first
            };
            let Some(first) = first else {
                say(connection.io(), "wait".to_owned()).await?;
                let handover = claimed.await.unwrap();
                handover.send(connection.detach().unwrap()).unwrap();
                return Ok(());
            };
            let (handover, handed) = oneshot::channel();
            first.send(handover).unwrap();
            let mut first = handed.await.unwrap();
            say(first.io(), "met".to_owned()).await?;
            say(connection.io(), "met".to_owned()).await?;
            connection.splice(&mut first).await.unwrap();
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_relay_connects_the_peers_of_its_dialect_with_each_other() {
    let options = ServeOptions {
        dialects: Dialects::default().with(Meet::default()),
        relay: true,
        max_sessions: 2,
        ..ServeOptions::default()
    };
    let relay = Server::new(Arc::new(Registry::new()), options);
    let address = listen(&relay, "tcp://127.0.0.1:0").await;
    let dial = async || Transports::default().dial(&address, &Dial::default()).await.unwrap();
    let (mut first, answer) = Client::begin(dial().await, "MEET\n").await;
    assert_eq!((answer.as_str(), relay.sessions()), ("wait", 1));
    // Bytes behind the greeting go to the other one.
    let (mut second, answer) = Client::begin(dial().await, "MEET\nhello\n").await;
    assert_eq!((answer.as_str(), first.line().await.as_deref()), ("met", Some("met")));
    assert_eq!(first.line().await.as_deref(), Some("hello"));
    first.send("and back\n").await;
    assert_eq!(second.line().await.as_deref(), Some("and back"));
    assert_eq!(relay.sessions(), 2, "the one that waited keeps its place");
    let (mut third, answer) = Client::begin(dial().await, "MEET\n").await;
    assert_eq!(answer, format!("! {}", ErrorKind::LimitExceeded));
    assert_eq!(third.line().await, None);
    // Servers that park natively are taken at the same address, and clients have no session there.
    assert!(Connector::new().connect(&address).await.is_err());
    drop(first);
    assert_eq!(second.line().await, None);
    drop(second);
    idle(&relay).await;
}
