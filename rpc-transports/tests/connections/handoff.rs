//! Sessions whose client's socket is handed to another process. A second server of this process
//! stands in for that one here, so that it can be made to fail.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::{ErrorKind, LocalSession, MemoryQuota, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Bind, Connector, EndReport, OpenRequest, PassedConnection, ReceivedSession, ServeOptions, Server, SessionFactory,
    SessionProcess,
};
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
        let link = Server::serving(functions("the server"));
        let at = link.listen(&format!("memory:{name}").parse().unwrap(), &Bind::default()).await.unwrap();
        let linked = Connector::new().connect(&at).await.unwrap();
        let (to_session, from_server) = mpsc::unbounded_channel();
        let process = Arc::new(FakeProcess {
            behaviour,
            server: Server::serving(Registry::new()),
            link,
            session: Mutex::new(Some(Arc::new(LocalSession::new(functions("the process"))))),
            to_session,
            from_server: Mutex::new(Some(from_server)),
            orders: watch::Sender::default(),
            report: watch::Sender::default(),
        });
        let server = Server::new(Arc::new(Factory(process.clone(), linked.shared().clone())), options);
        let at = server.listen(&"tcp://127.0.0.1:0".parse().unwrap(), &Bind::default()).await.unwrap();
        let session = Connector::new().connect(&at).await.unwrap();
        Self { process, server, session }
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
