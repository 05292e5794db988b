//! Processes that die or stop, links that are cut, and peers that misbehave: with real processes
//! and real sockets.

use std::future::Future;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::proto::{FrameHeader, Hello, Kind, Role};
use rpc_core::{DataType, Device, ErrorKind, Lane, RemoteTensor, Result, RpcError, Session};
use rpc_server::builtins::ServerInfo;
use rpc_tests::harness::{BothForms, Form, on_thread, poll_once};
use rpc_transports::{BlockingIo, ConnectError, Connector};
use rustix::process::Signal;
use tokio::task::JoinHandle;

use crate::peers::arrivals::Arrivals;
use crate::peers::{
    self, Calls, ClientPeer, DEAD, KEEP_ALIVE, LIMIT, RawPeer, ServerPeer, Transport, at_pace, is_running, pace,
    signal, within,
};

/// Makes each test over each of the transports, with the asynchronous and the blocking client.
macro_rules! each_way {
    ($($test:ident: $($transport:ident as $async:ident $blocking:ident)*;)*) => {$(
        mod $test {
            use super::{Form, Transport, peers};

            $(#[test]
            fn $async() {
                peers::run_where_silence_counts(|| super::$test(Transport::$transport, Form::Async));
            }

            #[test]
            fn $blocking() {
                peers::run_where_silence_counts(|| super::$test(Transport::$transport, Form::Blocking));
            })*
        }
    )*};
    (over all: $($test:ident)*) => {
        each_way! {
            $($test:
                Tcp as tcp_async tcp_blocking
                Unix as unix_async unix_blocking
                Tls as tls_async tls_blocking
                Quic as quic_async quic_blocking;)*
        }
    };
    (over plain: $($test:ident)*) => {
        each_way! { $($test: Tcp as tcp_async tcp_blocking Unix as unix_async unix_blocking;)* }
    };
}

mod bad_peers;

each_way! {
    over all:
    a_killed_client_holds_nothing_any_more
    a_client_killed_while_it_is_busy_leaves_nothing
    a_killed_server_is_lost_to_all_pending_calls
    a_server_killed_in_the_handshake_is_lost
    a_stopped_server_is_silent_to_all_pending_calls
    a_stopped_client_loses_its_session
    a_killed_hop_is_lost_to_the_client_and_the_origin_frees
    a_killed_origin_is_an_error_of_another_hop
    a_server_that_drains_finishes_what_was_asked
}

async fn connect(form: Form, connector: Connector, address: &str) -> std::result::Result<Session, ConnectError> {
    match form {
        Form::Async => connector.connect(address).await,
        Form::Blocking => {
            let address = address.to_owned();
            on_thread(move || connector.connect_blocking(&address)).await
        }
    }
}

/// Time limit of each step, longer than any takes: a step that needs more hangs.
const TIME_LIMIT: Duration = Duration::from_secs(45);

async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(TIME_LIMIT, future).await.unwrap_or_else(|_| panic!("not over after {TIME_LIMIT:?}"))
}

/// Returns a connector that notices silence after [`DEAD`].
fn quick() -> Connector {
    peers::connector().keep_alive(KEEP_ALIVE)
}

/// Pending operation, which yields its result and the time of its end by [`pace`].
struct Watched {
    what: &'static str,
    outcome: JoinHandle<(Result<()>, Duration)>,
}

fn watch<O: BothForms>(form: Form, what: &'static str, operation: O) -> Watched
where
    O::IntoFuture: Send,
{
    let run: std::pin::Pin<Box<dyn Future<Output = Result<O::Value>> + Send>> = match form {
        Form::Async => {
            let mut operation = Box::pin(operation.into_future());
            // The first poll is here, so that the operation does not begin only when its task runs.
            match poll_once(&mut operation) {
                Some(outcome) => Box::pin(std::future::ready(outcome)),
                None => operation,
            }
        }
        Form::Blocking => {
            let (begins, begun) = mpsc::channel();
            let operation = on_thread(move || {
                let _ = begins.send(());
                operation.wait()
            });
            begun.recv().unwrap();
            Box::pin(operation)
        }
    };
    Watched { what, outcome: tokio::spawn(async move { (run.await.map(drop), pace::now()) }) }
}

const ENDLESS: &str = "endless copies";

/// Copies without end, so that bytes are always in flight. `copied` counts the copies.
fn watch_copies(form: Form, session: &Session, tensor: RemoteTensor, copied: Arc<AtomicU64>) -> Watched {
    let session = session.clone();
    let data = bytes::Bytes::from(vec![1; tensor.size_bytes() as usize]);
    let copy = move || {
        let copied = copied.clone();
        session.copy_to_remote(&tensor, data.clone()).progress(move |bytes| copied.store(bytes, Ordering::Relaxed))
    };
    let run: std::pin::Pin<Box<dyn Future<Output = Result<()>> + Send>> = match form {
        Form::Async => Box::pin(async move {
            loop {
                copy().await?;
            }
        }),
        Form::Blocking => Box::pin(on_thread(move || {
            loop {
                copy().wait()?;
            }
        })),
    };
    Watched { what: ENDLESS, outcome: tokio::spawn(async move { (run.await, pace::now()) }) }
}

/// Session with all kinds of pending requests: running and queued calls on several lanes, copies
/// that wait behind calls, and copies that move.
struct Busy {
    session: Session,
    pending: Vec<Watched>,
}

impl Busy {
    /// Starts the requests on a session that `connect` opens. `observer` is another session with
    /// the same origin.
    async fn new(form: Form, tag: &str, observer: &Calls, connect: impl AsyncFn() -> Session) -> Self {
        let session = connect().await;
        let hold = session.get_function("hold.tagged").await.unwrap();
        let add = session.get_function("add").await.unwrap();
        let mut tensors = Vec::new();
        for mebibytes in [4, 4, 64] {
            tensors.push(session.alloc(Device::cpu(), DataType::U8, &[mebibytes << 20]).await.unwrap());
        }
        let mut pending = Vec::new();
        for lane in [Lane(1), Lane(2), Lane::CONCURRENT] {
            pending.push(watch(form, "a running call", hold.call::<()>((tag,)).lane(lane).start()));
        }
        for lane in [Lane(1), Lane(2)] {
            pending.push(watch(form, "a queued call", add.call::<i64>((1, 2)).lane(lane).start()));
        }
        let data = vec![0; 4 << 20];
        pending.push(watch(form, "a queued copy to", session.copy_to_remote(&tensors[0], data).lane(Lane(1))));
        pending.push(watch(form, "a queued copy from", session.copy_from_remote(&tensors[1]).lane(Lane(2))));
        let copied = Arc::new(AtomicU64::new(0));
        pending.push(watch_copies(form, &session, tensors.remove(2), copied.clone()));
        within(TIME_LIMIT, "three calls run", async || {
            let runs = observer.run::<i64>("tagged.alive", (tag,)).await == 3 && copied.load(Ordering::Relaxed) > 0;
            runs || pending.iter().any(|watched| watched.outcome.is_finished())
        })
        .await;
        // The requests in front of these have left this process.
        for _ in 0..20 {
            assert_eq!(add.call::<i64>((1, 2)).concurrent().await.unwrap(), 3);
        }
        Self { session, pending }
    }

    /// Checks that all requests fail with the same error, within the limit after `since`.
    async fn fails(self, kind: ErrorKind, hop: u16, since: Duration) {
        let mut slowest = Duration::ZERO;
        for Watched { what, outcome } in self.pending {
            let (outcome, at) = soon(outcome).await.unwrap();
            let error = outcome.expect_err(what);
            assert_eq!((error.kind(), error.hop()), (kind, hop), "{what}: {error}");
            // The next of the endless copies may not have begun.
            assert!(error.request_may_have_run() || what == ENDLESS, "{what}: {error}");
            assert!(error.peer().is_some(), "{what}: {error}");
            let took = at.saturating_sub(since);
            assert!(took <= LIMIT, "{what} failed after {took:?}");
            slowest = slowest.max(took);
        }
        println!("everything had failed after {slowest:?}");
        let ended = self.session.ended().await;
        assert_eq!((ended.kind(), ended.hop()), (kind, hop), "{ended}");
        let late = self.session.get_function("add").await.unwrap_err();
        assert_eq!((late.kind(), late.request_may_have_run()), (kind, false), "{late}");
    }
}

/// Checks that a session without pending requests ends in time, too.
async fn idle_ends(idle: Session, kind: ErrorKind, since: Duration) -> Duration {
    let ended = soon(idle.ended()).await;
    let took = pace::since(since);
    assert_eq!(ended.kind(), kind, "{ended}");
    assert!(took <= LIMIT, "an idle session noticed after {took:?}");
    took
}

fn name(form: Form) -> &'static str {
    if form == Form::Async { "async" } else { "blocking" }
}

/// Checks that the server of `watcher` holds no more than before, within [`LIMIT`].
async fn freed(watcher: &Calls, before: &ServerInfo) -> Duration {
    at_pace(LIMIT, "the server has freed everything", async || {
        let info = watcher.info().await;
        (info.handles, info.memory_bytes, info.sessions) == (before.handles, before.memory_bytes, before.sessions)
    })
    .await
}

async fn a_killed_client_holds_nothing_any_more(transport: Transport, form: Form) {
    // What a server does with memory does not depend on the transport, and filling it takes time.
    let bytes = if transport == Transport::Tcp { 1 << 30 } else { 256 << 20 };
    let server = ServerPeer::start(transport);
    let watcher = Calls::to(server.address()).await;
    let before = watcher.info().await;
    let mut client = ClientPeer::start(name(form), server.address(), 1000, bytes);
    let during = watcher.info().await;
    assert!(during.handles >= before.handles + 1001, "{during:?}");
    assert!(during.memory_bytes >= before.memory_bytes + bytes, "{during:?}");
    assert!(peers::memory(server.pid(), "VmRSS") > bytes);
    pace::now();
    client.kill();
    let took = freed(&watcher, &before).await;
    println!("{transport:?}: freed after {took:?}");
    // The system needs time to free so many pages.
    within(TIME_LIMIT, "the memory is the system's again", async || peers::memory(server.pid(), "VmRSS") < 128 << 20)
        .await;
}

async fn a_client_killed_while_it_is_busy_leaves_nothing(transport: Transport, form: Form) {
    let server = ServerPeer::start(transport);
    let watcher = Calls::to(server.address()).await;
    let before = watcher.info().await;
    let mut client = ClientPeer::busy(name(form), server.address(), 10, 1 << 20, "killed client");
    let runs = async || watcher.run::<i64>("tagged.alive", ("killed client",)).await == 1;
    within(TIME_LIMIT, "its call runs", runs).await;
    pace::now();
    client.kill();
    let since = pace::now();
    let took = freed(&watcher, &before).await;
    at_pace(LIMIT, "its call has ended", async || watcher.run::<i64>("tagged.alive", ("killed client",)).await == 0)
        .await;
    println!("{transport:?}: freed after {took:?}, the call over after {:?}", pace::since(since));
}

async fn a_killed_server_is_lost_to_all_pending_calls(transport: Transport, form: Form) {
    // The client has to notice it, so that the server has a long keep-alive.
    let mut server = ServerPeer::with(transport, &[]);
    let watcher = Calls::to(server.address()).await;
    let open = async || connect(form, peers::connector(), server.address()).await.unwrap();
    let busy = Busy::new(form, "killed", &watcher, open).await;
    let idle = open().await;
    let kind = ErrorKind::PeerLost;
    let since = pace::now();
    server.kill();
    let took = idle_ends(idle, kind, since).await;
    println!("{transport:?}: an idle session noticed after {took:?}");
    busy.fails(kind, 0, since).await;
}

/// The server is killed at different moments before the client has a session.
async fn a_server_killed_in_the_handshake_is_lost(transport: Transport, form: Form) {
    for _ in 0..ATTEMPTS {
        if killed_in_the_handshake(transport, form).await {
            return;
        }
    }
    panic!("{transport:?}: {ATTEMPTS} attempts were over before the server died");
}

/// Number of attempts at a scenario that a stall of the machine keeps from being set up.
const ATTEMPTS: u32 = 5;

/// Returns false if the machine stood still for so long that the client had given up before the
/// server was killed: that shows nothing.
async fn killed_in_the_handshake(transport: Transport, form: Form) -> bool {
    let begun = pace::begin();
    let mut server = ServerPeer::start(transport);
    // The server is stopped, and its system still accepts connections for it.
    server.signal(Signal::STOP);
    let connector = peers::connector().connect_timeout(LIMIT).handshake_timeout(TIME_LIMIT);
    let address = server.address().to_owned();
    let arrivals = Arrivals::at(&address);
    let attempt = tokio::spawn(async move { (connect(form, connector, &address).await, pace::now()) });
    within(TIME_LIMIT, "the client waits for an answer", async || arrivals.have_come()).await;
    if attempt.is_finished() {
        let attempt = attempt.await;
        assert!(pace::worst_since(begun) > STALL, "{transport:?}: over before the server died: {attempt:?}");
        return false;
    }
    let since = pace::now();
    server.kill();
    let (outcome, at) = attempt.await.unwrap();
    let error = outcome.expect_err("no session").into_rpc_error();
    // If the server dies before it has sent anything, the error only says that there is no
    // session; over QUIC, that nothing answers.
    assert!([ErrorKind::PeerLost, ErrorKind::PeerSilent, ErrorKind::Refused].contains(&error.kind()), "{error}");
    let took = at.saturating_sub(since);
    assert!(took <= LIMIT, "given up after {took:?}");
    println!("{transport:?}: given up after {took:?}: {error}");
    true
}

/// Time for which a beat stands still where the machine does. Limits of a second by the clock, in
/// place of the pace, mean nothing then.
const STALL: Duration = Duration::from_millis(300);

async fn a_stopped_server_is_silent_to_all_pending_calls(transport: Transport, form: Form) {
    let server = ServerPeer::with(transport, &[]);
    let watcher = Calls::to(server.address()).await;
    let open = async || connect(form, quick(), server.address()).await.unwrap();
    let busy = Busy::new(form, "stopped", &watcher, open).await;
    let idle = open().await;
    let (since, begun) = (pace::now(), Instant::now());
    server.signal(Signal::STOP);
    idle_ends(idle, ErrorKind::PeerSilent, since).await;
    // The last bytes of the peer may be one interval old, and a little more on a busy machine.
    assert!(begun.elapsed() >= KEEP_ALIVE, "given up after {:?}", begun.elapsed());
    busy.fails(ErrorKind::PeerSilent, 0, since).await;
    server.signal(Signal::CONT);
    // The server goes on after the outage, and ends calls of the lost session.
    let later = Calls::to(server.address()).await;
    within(TIME_LIMIT, "the calls of the lost session end", async || {
        later.run::<i64>("tagged.alive", ("stopped",)).await == 0
    })
    .await;
}

async fn a_stopped_client_loses_its_session(transport: Transport, form: Form) {
    let server = ServerPeer::quick(transport);
    let watcher = Calls::to(server.address()).await;
    let before = watcher.info().await;
    let mut client = ClientPeer::start(name(form), server.address(), 1000, 1 << 20);
    assert!(watcher.info().await.handles >= before.handles + 1001);
    pace::now();
    let begun = Instant::now();
    client.signal(Signal::STOP);
    freed(&watcher, &before).await;
    let took = begun.elapsed();
    assert!(took >= KEEP_ALIVE, "a client that is alive was given up after {took:?}");
    client.signal(Signal::CONT);
    let reason = on_thread(move || client.reason()).await;
    assert!(["peer_silent", "peer_lost"].contains(&reason.as_str()), "{reason}");
}

async fn a_killed_hop_is_lost_to_the_client_and_the_origin_frees(transport: Transport, form: Form) {
    let origin = ServerPeer::start(transport);
    // The client and the origin have to notice it.
    let mut hop = ServerPeer::with(transport, &[]);
    let watcher = Calls::to(origin.address()).await;
    let before = watcher.info().await;
    let connector = peers::connector().via(hop.address());
    let open = async || connect(form, connector.clone(), origin.address()).await.unwrap();
    let busy = Busy::new(form, "hop", &watcher, open).await;
    assert_ne!(watcher.info().await.handles, before.handles);
    let since = pace::now();
    hop.kill();
    let freed = freed(&watcher, &before);
    let (took, ()) = tokio::join!(freed, busy.fails(ErrorKind::PeerLost, 0, since));
    println!("{transport:?}: the origin has freed everything after {took:?}");
    at_pace(LIMIT, "no call runs", async || watcher.run::<i64>("tagged.alive", ("hop",)).await == 0).await;
}

async fn a_killed_origin_is_an_error_of_another_hop(transport: Transport, form: Form) {
    let mut origin = ServerPeer::with(transport, &[]);
    let other = ServerPeer::with(transport, &[]);
    // The hop has to notice it, from the system.
    let hop = ServerPeer::with(transport, &[]);
    let watcher = Calls::to(origin.address()).await;
    let connector = peers::connector().via(hop.address());
    let neighbour = Calls::over(connect(form, connector.clone(), other.address()).await.unwrap());
    let open = async || connect(form, connector.clone(), origin.address()).await.unwrap();
    let busy = Busy::new(form, "origin", &watcher, open).await;
    let since = pace::now();
    origin.kill();
    busy.fails(ErrorKind::PeerLost, 1, since).await;
    assert_eq!(neighbour.run::<i64>("add", (20, 22)).await, 42);
    let next = Calls::over(connect(form, connector.clone(), other.address()).await.unwrap());
    assert_eq!(next.run::<i64>("add", (20, 22)).await, 42);
    // The hop refuses to connect to the dead origin, and gives the reason.
    let refused = connect(form, connector, origin.address()).await.unwrap_err().into_rpc_error();
    assert_eq!((refused.kind(), refused.hop()), (ErrorKind::PeerLost, 1), "{refused}");
}

mod a_child_process {
    use super::*;

    fn address(folder: &tempfile::TempDir) -> String {
        format!("exec:{} serve --stdio --workdir {}", peers::PROGRAM, folder.path().display())
    }

    fn dies_with_its_parent(form: &'static str) {
        peers::run(move || async move {
            let folder = tempfile::tempdir().unwrap();
            let mut parent = ClientPeer::start(form, &address(&folder), 10, 1 << 20);
            assert!(is_running(parent.server));
            pace::now();
            parent.kill();
            at_pace(LIMIT, "the child is gone", async || !is_running(parent.server)).await;
        });
    }

    #[test]
    fn dies_with_its_parent_async() {
        dies_with_its_parent("async");
    }

    #[test]
    fn dies_with_its_parent_blocking() {
        dies_with_its_parent("blocking");
    }

    fn is_lost_when_it_dies(form: Form) {
        peers::run(move || async move {
            let folder = tempfile::tempdir().unwrap();
            let session = connect(form, Connector::new(), &address(&folder)).await.unwrap();
            let itself = Calls::over(session.clone());
            let pid = itself.run::<i64>("pid", ()).await as u32;
            let busy = Busy::new(form, "child", &itself, async || session.clone()).await;
            drop(session);
            drop(itself);
            let since = pace::now();
            signal(pid, Signal::KILL);
            busy.fails(ErrorKind::PeerLost, 0, since).await;
            at_pace(LIMIT, "the child is reaped", async || !std::path::Path::new(&format!("/proc/{pid}")).exists())
                .await;
        });
    }

    #[test]
    fn is_lost_when_it_dies_async() {
        is_lost_when_it_dies(Form::Async);
    }

    #[test]
    fn is_lost_when_it_dies_blocking() {
        is_lost_when_it_dies(Form::Blocking);
    }
}

async fn a_server_that_drains_finishes_what_was_asked(transport: Transport, form: Form) {
    for _ in 0..ATTEMPTS {
        if drains(transport, form).await {
            return;
        }
    }
    panic!("{transport:?}: the machine stood still in {ATTEMPTS} attempts");
}

/// Returns false if the machine stood still for about the second that a server gives a client to
/// read its last message: that shows nothing.
async fn drains(transport: Transport, form: Form) -> bool {
    let begun = pace::begin();
    // No client dies here: one whose connection is full of an endless copy may answer late.
    let mut server = ServerPeer::with(transport, &[]);
    let session = connect(form, peers::connector(), server.address()).await.unwrap();
    let idle = connect(form, peers::connector(), server.address()).await.unwrap();
    let sleep = session.get_function("rpc.sleep").await.unwrap();
    let echo = session.get_function("echo").await.unwrap();
    let small = session.alloc(Device::cpu(), DataType::U8, &[4 << 20]).await.unwrap();
    let large = session.alloc(Device::cpu(), DataType::U8, &[64 << 20]).await.unwrap();
    let copied = Arc::new(AtomicU64::new(0));
    let endless = watch_copies(form, &session, large, copied.clone());
    let answered = [
        watch(form, "a running call", sleep.call::<()>((2.0,)).lane(Lane(1)).start()),
        watch(form, "a queued call", echo.call::<i64>((1,)).lane(Lane(1)).start()),
        watch(form, "a queued copy", session.copy_to_remote(&small, vec![1; 4 << 20]).lane(Lane(1))),
        watch(form, "a queued copy back", session.copy_from_remote(&small).lane(Lane(1))),
        watch(form, "another running call", sleep.call::<()>((1.9,)).concurrent().start()),
    ];
    within(TIME_LIMIT, "copies move", async || copied.load(Ordering::Relaxed) > 0).await;
    for _ in 0..20 {
        assert_eq!(echo.call::<i64>((1,)).concurrent().await.unwrap(), 1);
    }
    let since = pace::now();
    server.signal(Signal::TERM);
    // The idle session ends at once.
    let ended = soon(idle.ended()).await;
    assert!(pace::since(since) <= LIMIT, "an idle session ends at once");
    if ended.kind() == ErrorKind::PeerLost && pace::worst_since(begun) > STALL {
        return false;
    }
    assert!(matches!(ended.kind(), ErrorKind::Closed | ErrorKind::Draining), "{ended}");
    // New requests are refused while the old ones run, with an error that permits a retry.
    let refused = loop {
        match echo.call::<i64>((1,)).concurrent().await {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(refused.kind(), ErrorKind::Draining, "{refused}");
    assert!(refused.is_retryable(), "{refused}");
    for Watched { what, outcome } in answered {
        let (outcome, _) = outcome.await.unwrap();
        outcome.unwrap_or_else(|error| panic!("{what}: {error}"));
    }
    // A copy is many requests: an endless one is cut between two of them.
    let (outcome, _) = endless.outcome.await.unwrap();
    let cut = outcome.unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::Draining, "{cut}");
    let since = pace::now();
    let ended = soon(session.ended()).await;
    assert!(pace::since(since) <= LIMIT, "the session ends when all is answered");
    assert!(matches!(ended.kind(), ErrorKind::Closed | ErrorKind::Draining), "{ended}");
    assert_eq!(server.exit_code(), Some(0));
    let refused = connect(form, Connector::new(), server.address()).await.unwrap_err();
    assert!(matches!(refused, ConnectError::Transport(_)), "{refused}");
    true
}

/// Regression: a killed server was noticed by its silence alone, although its system says at once
/// that the port is closed.
#[test]
fn a_killed_quic_server_is_noticed_by_its_closed_port() {
    peers::run(|| async {
        for form in [Form::Async, Form::Blocking] {
            let mut server = ServerPeer::start(Transport::Quic);
            // Silence tells nothing in the time of the test.
            let connector = peers::connector().keep_alive(Duration::from_secs(3600));
            let session = connect(form, connector, server.address()).await.unwrap();
            let hold = session.get_function("hold.tagged").await.unwrap();
            let call = watch(form, "a running call", hold.call::<()>(("closed port",)).start());
            server.kill();
            let (outcome, _) = soon(call.outcome).await.unwrap();
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
            assert!(error.message().contains("port is closed"), "{error}");
        }
    });
}

/// The next session once waited for the whole time limit of a handshake, over a connection whose
/// server was gone.
#[test]
fn a_quic_server_that_has_begun_anew_is_reached_over_a_new_connection() {
    peers::run(|| async {
        const NEVER: Duration = Duration::from_secs(3600);
        let mut server = ServerPeer::start(Transport::Quic);
        // The keep-alive is too long to notice that the first connection is dead.
        let connector = peers::connector().keep_alive(NEVER).handshake_timeout(NEVER);
        let first = connector.connect(server.address()).await.unwrap();
        server.kill();
        server.exit();
        let server = ServerPeer::again(Transport::Quic, server.address());
        for _ in 0..2 {
            let second = connector.connect(server.address()).await.unwrap();
            let echo = second.function::<(i64,), i64>("rpc.echo").await.unwrap();
            assert_eq!(echo.call((42,)).await.unwrap(), 42);
        }
        drop(first);
    });
}
