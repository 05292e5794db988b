//! Sessions whose client's socket is handed to another process. A second server of this process
//! stands in for that one here, so that it can be made to fail.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::{ErrorKind, LocalSession, MemoryQuota, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Address, Bind, BoxFuture, Connector, Dialect, DialectConnection, DialectHandoff, DialectRequest, Dialects,
    EndReport, OpenRequest, PassedConnection, ReceivedSession, Recognition, ServeOptions, Server, SessionFactory,
    SessionProcess,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, watch};

/// Time limit against hanging.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Order of the server to the process.
#[derive(Clone, Debug, PartialEq)]
enum Order {
    GoAway,
    Close(RpcError),
    EndSoon,
    /// The server waits for the end of the process.
    AwaitExit,
}

#[derive(Clone, Copy, PartialEq)]
enum Behaviour {
    /// Does as it is told.
    Obedient,
    /// Serves the session, follows no order, and reports no end.
    Deaf,
    /// Takes no socket.
    Refusing,
}

/// Stand-in for the process of a session.
struct FakeProcess {
    behaviour: Behaviour,
    server: Server,
    /// Server of the session that the factory has opened; stopped when the process "ends".
    link: Server,
    session: Mutex<Option<SharedSession>>,
    to_session: mpsc::UnboundedSender<Order>,
    from_server: Mutex<Option<mpsc::UnboundedReceiver<Order>>>,
    orders: watch::Sender<Vec<Order>>,
    report: watch::Sender<Option<EndReport>>,
}

impl FakeProcess {
    fn told(&self, order: Order) {
        self.orders.send_modify(|orders| orders.push(order.clone()));
        if self.behaviour == Behaviour::Obedient {
            let _ = self.to_session.send(order);
        }
    }

    /// Ends without a report.
    fn die(&self) {
        self.link.stop();
    }

    async fn until_told(&self, expected: &Order) {
        let mut orders = self.orders.subscribe();
        let told = orders.wait_for(|orders| orders.contains(expected));
        tokio::time::timeout(TIME_LIMIT, told).await.expect("the order does not come").unwrap();
    }
}

#[async_trait]
impl SessionProcess for FakeProcess {
    async fn take(&self, connection: PassedConnection, queued: Arc<MemoryQuota>) -> io::Result<()> {
        if self.behaviour == Behaviour::Refusing {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let session = self.session.lock().take().unwrap();
        let mut received = Some(self.server.serve_passed(connection, session, queued)?);
        let (mut orders, report) = (self.from_server.lock().take().unwrap(), self.report.clone());
        let reports = self.behaviour == Behaviour::Obedient;
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    Some(order) = orders.recv() => match (order, &received) {
                        (Order::GoAway, Some(session)) => session.go_away(),
                        (Order::Close(reason), Some(session)) => session.close(reason),
                        _ => {}
                    },
                    ended = ReceivedSession::end_of(&mut received) => {
                        if reports {
                            report.send_replace(Some(ended));
                        }
                    }
                }
            }
        });
        Ok(())
    }

    fn go_away(&self) {
        self.told(Order::GoAway);
    }

    fn close(&self, reason: &RpcError) {
        self.told(Order::Close(reason.clone()));
    }

    fn end_soon(&self) {
        self.told(Order::EndSoon);
        if self.behaviour == Behaviour::Deaf {
            self.die();
        }
    }

    async fn exited(&self) {
        self.told(Order::AwaitExit);
    }

    fn client_is_gone(&self) -> bool {
        false
    }

    async fn ended(&self) -> EndReport {
        let mut report = self.report.subscribe();
        let report = report.wait_for(Option::is_some).await.unwrap().clone();
        report.unwrap()
    }
}

/// Factory whose sessions another process offers to serve.
struct Factory(Arc<FakeProcess>, SharedSession);

#[async_trait]
impl SessionFactory for Factory {
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        request.handoff.set(self.0.clone());
        Ok(self.1.clone())
    }
}

fn functions(which: &'static str) -> Registry {
    let registry = Registry::new();
    registry.add_inline("served_by", move || which);
    registry.add_inline("echo", |value: rpc_core::LocalValue| value);
    registry
}

/// A server with one client, whose session the process serves.
struct Fixture {
    process: Arc<FakeProcess>,
    server: Server,
    session: Session,
}

impl Fixture {
    async fn start(name: &str, behaviour: Behaviour, options: ServeOptions) -> Self {
        let (process, server, at) = Self::serve(name, behaviour, options).await;
        let session = Connector::new().connect(&at).await.unwrap();
        Self { process, server, session }
    }

    /// Starts a server whose session the process serves.
    async fn serve(name: &str, behaviour: Behaviour, options: ServeOptions) -> (Arc<FakeProcess>, Server, Address) {
        let link = Server::serving(functions("the server"));
        let at = link.listen(&format!("memory:{name}").parse().unwrap(), &Bind::default()).await.unwrap();
        let linked = Connector::new().connect(&at).await.unwrap();
        let (to_session, from_server) = mpsc::unbounded_channel();
        let process = Arc::new(FakeProcess {
            behaviour,
            server: Server::new(
                Arc::new(Registry::new()),
                ServeOptions { dialects: options.dialects.clone(), ..ServeOptions::default() },
            ),
            link,
            session: Mutex::new(Some(Arc::new(LocalSession::new(functions("the process"))))),
            to_session,
            from_server: Mutex::new(Some(from_server)),
            orders: watch::Sender::default(),
            report: watch::Sender::default(),
        });
        let server = Server::new(Arc::new(Factory(process.clone(), linked.shared().clone())), options);
        let at = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
        (process, server, at)
    }

    async fn served_by(&self) -> String {
        self.session.function::<(), String>("served_by").await.unwrap().call(()).await.unwrap()
    }

    /// Returns the error that ends the client's session.
    async fn end(&self) -> RpcError {
        let ended = self.session.shared().ended().reply();
        tokio::time::timeout(TIME_LIMIT, ended).await.expect("the session does not end").unwrap_err()
    }

    async fn until_idle(&self) {
        tokio::time::timeout(TIME_LIMIT, self.server.idle()).await.expect("the connection is kept");
        assert_eq!(self.server.sessions(), 0);
    }
}

#[tokio::test]
async fn the_process_serves_large_and_small_messages_until_the_client_leaves() {
    let fixture = Fixture::start("handoff-serves", Behaviour::Obedient, ServeOptions::default()).await;
    assert_eq!(fixture.served_by().await, "the process");
    let echo = fixture.session.get_function("echo").await.unwrap();
    let large = bytes::Bytes::from(vec![7; 3 << 20]);
    assert_eq!(echo.call::<bytes::Bytes>((large.clone(),)).await.unwrap(), large);
    assert_eq!(fixture.server.sessions(), 1);
    fixture.session.shutdown().await.unwrap();
    fixture.until_idle().await;
    assert_eq!(*fixture.process.orders.borrow(), [Order::AwaitExit], "the socket is used once the process has ended");
}

#[tokio::test]
async fn a_process_that_takes_no_socket_leaves_the_session_to_the_server() {
    let fixture = Fixture::start("handoff-refused", Behaviour::Refusing, ServeOptions::default()).await;
    assert_eq!(fixture.served_by().await, "the server");
    fixture.session.shutdown().await.unwrap();
    fixture.until_idle().await;
}

#[tokio::test]
async fn a_server_that_stops_or_drains_tells_the_process() {
    for (name, drains) in [("handoff-stop", false), ("handoff-drain", true)] {
        let fixture = Fixture::start(name, Behaviour::Obedient, ServeOptions::default()).await;
        assert_eq!(fixture.served_by().await, "the process");
        if drains {
            fixture.server.drain(TIME_LIMIT).await;
            assert_eq!(fixture.process.orders.borrow()[0], Order::GoAway);
            let error = fixture.end().await;
            assert_eq!((error.kind(), error.message().contains("stopped")), (ErrorKind::Closed, false), "{error}");
        } else {
            fixture.server.stop();
            let error = fixture.end().await;
            assert!(error.message().contains("the server was stopped"), "{error}");
        }
        fixture.until_idle().await;
    }
}

#[tokio::test]
async fn the_longest_duration_holds_also_where_the_process_does_not_obey() {
    for (name, behaviour) in [("handoff-time", Behaviour::Obedient), ("handoff-deaf", Behaviour::Deaf)] {
        let options = ServeOptions { session_duration: Some(Duration::from_millis(50)), ..ServeOptions::default() };
        let fixture = Fixture::start(name, behaviour, options).await;
        let error = fixture.end().await;
        assert_eq!(error.kind(), ErrorKind::SessionTimeout, "{error}");
        let orders = fixture.process.orders.borrow().clone();
        assert!(matches!(&orders[..2], [Order::Close(_), Order::EndSoon]), "{orders:?}");
        fixture.until_idle().await;
        fixture.process.until_told(&Order::AwaitExit).await;
    }
}

#[tokio::test]
async fn the_client_is_told_why_its_process_has_ended() {
    let fixture = Fixture::start("handoff-lost", Behaviour::Obedient, ServeOptions::default()).await;
    assert_eq!(fixture.served_by().await, "the process");
    fixture.process.die();
    let error = fixture.end().await;
    assert!(error.message().contains("the server was stopped"), "the end of the link: {error}");
    fixture.process.until_told(&Order::AwaitExit).await;
    fixture.until_idle().await;
}

/// A dialect of lines: `LINES`, perhaps `soon`, and then any, which are answered by the name of
/// what serves them and the line. It hands its connection to the process at once. `large` is
/// answered by a message in two parts, of which the second one never comes.
#[derive(Debug)]
struct Lines;

impl Dialect for Lines {
    fn name(&self) -> &str {
        "lines"
    }

    fn recognize(&self, first: &[u8]) -> Recognition {
        if first.starts_with(b"LINES") { Recognition::Accept } else { Recognition::NeedMore }
    }

    fn serve<'a>(&'a self, connection: &'a mut DialectConnection) -> BoxFuture<'a, Result<(), RpcError>> {
        Box::pin(async {
            let mut input = Vec::new();
            while !input.ends_with(b"LINES\n") {
                input.push(connection.io().read_u8().await.unwrap());
            }
            let soon = read_line(connection).await.unwrap() == "soon";
            let deadline = soon.then(|| {
                let reason = RpcError::new(ErrorKind::SessionTimeout, "it is late");
                (std::time::Instant::now() + Duration::from_secs(1), reason)
            });
            connection.open(DialectRequest::default()).await?;
            // A line that was read and is answered by whoever goes on.
            let input = format!("{}\n", read_line(connection).await.unwrap()).into_bytes();
            let handoff = DialectHandoff { state: b"a state".to_vec(), input, deadline, held: Box::new(()) };
            match connection.hand_off(handoff).await {
                Ok(()) => Ok(()),
                Err(DialectHandoff { input, .. }) => {
                    let first = String::from_utf8(input).unwrap();
                    answer_lines(connection, Some(first.trim_end().to_owned())).await
                }
            }
        })
    }

    fn resume<'a>(
        &'a self,
        connection: &'a mut DialectConnection,
        state: &'a [u8],
    ) -> BoxFuture<'a, Result<(), RpcError>> {
        assert_eq!((state, connection.identity()), (&b"a state"[..], "anonymous"));
        Box::pin(answer_lines(connection, None))
    }

    fn last_message(&self, reason: &RpcError) -> Vec<u8> {
        format!("! {}\n", reason.message()).into_bytes()
    }
}

async fn answer_lines(connection: &mut DialectConnection, first: Option<String>) -> Result<(), RpcError> {
    let session = connection.session().unwrap();
    let served_by = session.function::<(), String>("served_by").await?;
    let mut notices = connection.notices();
    let mut going_away = notices.clone();
    let mut next = first;
    loop {
        let line = match next.take() {
            Some(line) => line,
            None => tokio::select! {
                biased;
                reason = notices.stopped() => {
                    let text = format!("! {}\n", reason.message());
                    connection.io().write_all(text.as_bytes()).await.unwrap();
                    return Err(reason);
                }
                reason = going_away.going_away() => {
                    let text = format!("! {}\n", reason.kind());
                    connection.io().write_all(text.as_bytes()).await.unwrap();
                    return Ok(());
                }
                line = read_line(connection) => match line {
                    Some(line) => line,
                    None => return Ok(()),
                }
            },
        };
        if line == "large" {
            connection.begin_message();
            connection.io().write_all(b"half of it\n").await.unwrap();
            continue;
        }
        let text = format!("{}: {line}\n", served_by.call(()).await?);
        connection.io().write_all(text.as_bytes()).await.unwrap();
    }
}

/// Reads a line; `None` at the end.
async fn read_line(connection: &mut DialectConnection) -> Option<String> {
    let mut line = Vec::new();
    loop {
        match connection.io().read_u8().await.ok()? {
            b'\n' => return Some(String::from_utf8(line).unwrap()),
            byte => line.push(byte),
        }
    }
}

/// A client of the dialect, and the server behind it.
struct LinesClient {
    process: Arc<FakeProcess>,
    server: Server,
    stream: TcpStream,
}

impl LinesClient {
    async fn start(name: &str, behaviour: Behaviour, lines: &str) -> Self {
        let options = ServeOptions { dialects: Dialects::default().with(Lines), ..ServeOptions::default() };
        let (process, server, at) = Fixture::serve(name, behaviour, options).await;
        let mut stream = TcpStream::connect(at.to_string().strip_prefix("tcp://").unwrap()).await.unwrap();
        stream.write_all(format!("LINES\n{lines}").as_bytes()).await.unwrap();
        Self { process, server, stream }
    }

    /// Returns the next line; an empty text at the end.
    async fn line(&mut self) -> String {
        let mut line = Vec::new();
        let read = async {
            while let Ok(byte) = self.stream.read_u8().await {
                if byte == b'\n' {
                    break;
                }
                line.push(byte);
            }
        };
        tokio::time::timeout(TIME_LIMIT, read).await.expect("no line comes");
        String::from_utf8(line).unwrap()
    }

    async fn ends(mut self) {
        assert_eq!(self.line().await, "");
        drop(self.stream);
        tokio::time::timeout(TIME_LIMIT, self.server.idle()).await.expect("the connection is kept");
        assert_eq!(self.server.sessions(), 0);
    }
}

#[tokio::test]
async fn a_dialect_hands_its_connection_over_with_all_that_was_read() {
    for (name, behaviour, by) in [
        ("handoff-lines", Behaviour::Obedient, "the process"),
        ("handoff-lines-refused", Behaviour::Refusing, "the server"),
    ] {
        let mut client = LinesClient::start(name, behaviour, "late\none\ntwo\nthr").await;
        for expected in ["one", "two"] {
            assert_eq!(client.line().await, format!("{by}: {expected}"));
        }
        client.stream.write_all(b"ee\n").await.unwrap();
        assert_eq!(client.line().await, format!("{by}: three"));
        assert_eq!(client.server.sessions(), 1);
        client.stream.shutdown().await.unwrap();
        client.ends().await;
    }
}

#[tokio::test]
async fn the_process_of_a_dialect_is_told_to_drain_and_to_stop() {
    for (name, drains, expected) in
        [("handoff-lines-drain", true, "! draining"), ("handoff-lines-stop", false, "! the server was stopped")]
    {
        let mut client = LinesClient::start(name, Behaviour::Obedient, "late\none\n").await;
        assert_eq!(client.line().await, "the process: one");
        let server = client.server.clone();
        if drains {
            tokio::spawn(async move { server.drain(TIME_LIMIT).await });
        } else {
            server.stop();
        }
        assert_eq!(client.line().await, expected);
        client.ends().await;
    }
}

#[tokio::test]
async fn the_client_of_a_dialect_is_told_why_its_process_has_ended_unless_a_message_is_under_way() {
    for (name, inside) in [("handoff-lines-lost", false), ("handoff-lines-inside", true)] {
        let mut client = LinesClient::start(name, Behaviour::Deaf, "late\none\n").await;
        assert_eq!(client.line().await, "the process: one");
        if inside {
            client.stream.write_all(b"large\n").await.unwrap();
            assert_eq!(client.line().await, "half of it");
        }
        client.process.die();
        let told = client.line().await;
        assert!(told.is_empty() == inside && told.contains("the server was stopped") != inside, "{told}");
        client.process.until_told(&Order::AwaitExit).await;
    }
}

#[tokio::test]
async fn a_process_that_misses_the_time_of_its_dialect_is_ended_for_that_reason() {
    let mut client = LinesClient::start("handoff-lines-late", Behaviour::Deaf, "soon\none\n").await;
    assert_eq!(client.line().await, "the process: one");
    assert_eq!(client.line().await, "! it is late");
    client.process.until_told(&Order::EndSoon).await;
    assert!(!client.process.orders.borrow().iter().any(|order| matches!(order, Order::Close(_))), "it ends by itself");
}
