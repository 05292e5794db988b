//! Limits of a server on its clients: sessions, durations, and stalls.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rpc_core::{DataType, Device, ErrorKind, LocalSession, Registry, RpcError, Session, SharedSession};
use rpc_transports::{
    Access, Address, Bind, Channel, ConnectError, Connector, OpenRequest, ServeObserver, ServeOptions, Server, Tokens,
};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf};
use tokio::sync::Notify;

/// Time limit of events that are expected.
const LIMIT: Duration = Duration::from_secs(20);

fn server(change: impl FnOnce(&mut ServeOptions)) -> Server {
    let mut options = ServeOptions::default();
    change(&mut options);
    let open = |_: &OpenRequest| -> Result<SharedSession, RpcError> {
        let registry = Registry::new();
        registry.add_inline("nothing", || ()).add_async("never", std::future::pending::<()>);
        Ok(Arc::new(LocalSession::new(registry)))
    };
    Server::new(Arc::new(open), options)
}

async fn listen(server: &Server, address: &str) -> String {
    let address: Address = address.parse().unwrap();
    server.listen(&address, &Bind::default()).await.unwrap().to_string()
}

async fn idle(server: &Server) {
    tokio::time::timeout(LIMIT, server.idle()).await.expect("the server has no sessions in the end");
}

/// Makes an attempt that a time limit of the server ends if the machine stands still. One that
/// fails sooner fails the test, and one that fails later is followed by another.
pub(crate) async fn in_time<T>(limit: Duration, attempt: impl AsyncFn() -> Result<T, ConnectError>) -> T {
    for _ in 0..20 {
        let begun = Instant::now();
        match attempt().await {
            Ok(outcome) => return outcome,
            Err(error) => assert!(begun.elapsed() >= limit, "{error:?} before {limit:?} were over"),
        }
    }
    panic!("the machine stands still for {limit:?} again and again");
}

fn refusal(outcome: Result<Session, ConnectError>) -> RpcError {
    match outcome {
        Err(ConnectError::Session(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// Observer that records the refusals.
#[derive(Debug, Default)]
struct Heard(Mutex<Vec<ErrorKind>>);

impl ServeObserver for Heard {
    fn refused(&self, reason: ErrorKind) {
        self.0.lock().unwrap().push(reason);
    }
}

#[tokio::test]
async fn sessions_of_one_client_are_limited() {
    let secret = "0123456789abcdef0123456789abcdef";
    let tokens = Tokens::parse(&format!("alice {secret}\nbob {}", secret.replace('0', "f"))).unwrap();
    let only = |name: &str| {
        let line =
            if name == "alice" { format!("alice {secret}") } else { format!("bob {}", secret.replace('0', "f")) };
        Tokens::parse(&line).unwrap()
    };
    let heard = Arc::new(Heard::default());
    let server = server(|options| {
        options.max_sessions_per_peer = 2;
        options.access = Access { anonymous: true, tokens, ..Access::default() };
        options.observer = Some(heard.clone());
    });
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let (alice, bob) = (Connector::new().tokens(only("alice")), Connector::new().tokens(only("bob")));
    let mut sessions = Vec::new();
    // Each connection comes from another port, and counts for the same client nevertheless.
    for connector in [&alice, &bob, &Connector::new()] {
        sessions.push(connector.connect(&address).await.unwrap());
        sessions.push(connector.connect(&address).await.unwrap());
        let error = refusal(connector.connect(&address).await);
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(error.message().contains("max_sessions_per_peer is 2"), "{error}");
    }
    assert_eq!(*heard.0.lock().unwrap(), [ErrorKind::LimitExceeded; 3]);
    drop(sessions);
    idle(&server).await;
    alice.connect(&address).await.unwrap();
}

#[tokio::test]
async fn a_session_ends_after_its_longest_duration_even_while_it_works() {
    let duration = Duration::from_millis(100);
    let server = server(|options| options.session_duration = Some(duration));
    for scheme in ["tcp://127.0.0.1:0", "memory:lasts"] {
        let address = listen(&server, scheme).await;
        let (session, call) = in_time(duration, async || {
            let session = Connector::new().connect(&address).await?;
            let call = session.get_function("never").await?.call::<()>(()).start();
            // The server has received the call before this one.
            session.get_function("nothing").concurrent().await?;
            Ok((session, call))
        })
        .await;
        let error = call.await.unwrap_err();
        assert_eq!((error.kind(), error.request_may_have_run()), (ErrorKind::SessionTimeout, true), "{error}");
        assert!(error.message().contains("session_duration"), "{error}");
        // The session has ended, and the server goes on.
        assert_eq!(session.get_function("nothing").await.unwrap_err().kind(), ErrorKind::SessionTimeout);
        in_time(duration, async || {
            Connector::new().connect(&address).await?.get_function("nothing").await?;
            Ok(())
        })
        .await;
    }
    idle(&server).await;
}

#[tokio::test]
async fn a_session_without_requests_ends_and_one_with_a_long_call_does_not() {
    let idle_timeout = Duration::from_millis(200);
    let server = server(|options| {
        options.idle_timeout = Some(idle_timeout);
        // Pings do not count as requests.
        options.keep_alive = Duration::from_millis(20);
    });
    let address = listen(&server, "tcp://127.0.0.1:0").await;
    let connector = Connector::new().keep_alive(Duration::from_millis(20));
    let (busy, call) = in_time(idle_timeout, async || {
        let busy = connector.connect(&address).await?;
        let call = busy.get_function("never").await?.call::<()>(()).start();
        // The server has received the call before this one.
        busy.get_function("nothing").concurrent().await?;
        Ok((busy, call))
    })
    .await;
    let call = tokio::spawn(call);
    let quiet = connector.connect(&address).await.unwrap();
    let error = tokio::time::timeout(LIMIT, quiet.ended()).await.expect("it ends");
    assert_eq!(error.kind(), ErrorKind::SessionTimeout);
    assert!(error.message().contains("idle_timeout is 200ms"), "{error}");
    assert!(!call.is_finished());
    drop(quiet);
    call.abort();
    drop(busy);
    idle(&server).await;
}

/// Stream whose reader or writer stops on command.
struct Stalling {
    io: DuplexStream,
    stops_reading: Arc<AtomicBool>,
    /// True once writes stop, after one more byte.
    stops_writing: Arc<AtomicBool>,
    last_byte: bool,
}

impl Stalling {
    fn new(io: DuplexStream) -> (Self, Arc<AtomicBool>, Arc<AtomicBool>) {
        let [reading, writing] = [(); 2].map(|()| Arc::new(AtomicBool::new(false)));
        let (stops_reading, stops_writing) = (reading.clone(), writing.clone());
        (Self { io, stops_reading, stops_writing, last_byte: false }, reading, writing)
    }
}

impl AsyncRead for Stalling {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.stops_reading.load(Ordering::SeqCst) {
            return Poll::Pending;
        }
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Stalling {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.stops_writing.load(Ordering::SeqCst) {
            return Pin::new(&mut self.io).poll_write(cx, bytes);
        }
        if std::mem::replace(&mut self.last_byte, true) {
            return Poll::Pending;
        }
        Pin::new(&mut self.io).poll_write(cx, &bytes[..1])
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[tokio::test]
async fn a_client_that_reads_nothing_is_disconnected() {
    let server = server(|options| {
        options.write_timeout = Duration::from_millis(100);
        // So that the keep-alive does not end the session.
        options.keep_alive = Duration::from_secs(3600);
    });
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (ours, stops_reading, _) = Stalling::new(ours);
    server.serve_channel(Channel::new(theirs, "a client that stops reading"));
    let channel = Channel::new(ours, "the server");
    let session = Connector::new().keep_alive(Duration::from_secs(3600)).connect_channel(channel).await.unwrap();
    let tensor = session.alloc(Device::cpu(), DataType::U8, &[1 << 20]).await.unwrap();
    // Output that fits into the stream's buffer does not count as stalled.
    assert_eq!(session.copy_from_remote(&tensor).await.unwrap().len(), 1 << 20);
    stops_reading.store(true, Ordering::SeqCst);
    let read = tokio::spawn(async move { session.copy_from_remote(&tensor).await });
    idle(&server).await;
    read.abort();
}

/// Replies wait for slots of the shared memory then, and none for the channel.
#[cfg(target_os = "linux")]
#[tokio::test]
async fn a_client_that_takes_nothing_from_shared_memory_is_disconnected() {
    let write_timeout = Duration::from_millis(100);
    let server = server(|options| {
        options.write_timeout = write_timeout;
        options.keep_alive = Duration::from_secs(3600);
    });
    let (session, tensor, stops_reading) = in_time(write_timeout, async || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let (ours, stops_reading, _) = Stalling::new(ours);
        let process = |name: &str| rpc_transports::Peer::new(name).with_process(std::process::id());
        server.serve_channel(Channel::new(theirs, process("a client that stops reading")));
        let channel = Channel::new(ours, process("the server"));
        let session = Connector::new().keep_alive(Duration::from_secs(3600)).connect_channel(channel).await?;
        let tensor = session.alloc(Device::cpu(), DataType::U8, &[8 << 20]).await?;
        // From here on the peers share memory.
        session.copy_to_remote(&tensor, vec![0; 1 << 20]).await?;
        Ok((session, tensor, stops_reading))
    })
    .await;
    stops_reading.store(true, Ordering::SeqCst);
    let read = tokio::spawn(async move { session.copy_from_remote(&tensor).await });
    idle(&server).await;
    read.abort();
}

#[tokio::test]
async fn a_client_that_never_finishes_a_message_is_disconnected() {
    let server = server(|options| {
        options.write_timeout = Duration::from_millis(100);
        options.keep_alive = Duration::from_secs(3600);
    });
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let (ours, _, stops_writing) = Stalling::new(ours);
    server.serve_channel(Channel::new(theirs, "a client that stops writing"));
    let channel = Channel::new(ours, "the server");
    let session = Connector::new().keep_alive(Duration::from_secs(3600)).connect_channel(channel).await.unwrap();
    assert!(session.get_function("no such function").await.is_err());
    stops_writing.store(true, Ordering::SeqCst);
    let call = tokio::spawn(async move { session.get_function("no such function").await });
    idle(&server).await;
    // The keep-alive has not ended the session, and the client sees the end.
    assert_eq!(call.await.unwrap().unwrap_err().kind(), ErrorKind::PeerLost);
}

/// An object of the session blocks in `drop` until the test lets it go on.
#[tokio::test]
async fn a_server_is_idle_once_the_objects_of_its_sessions_are_freed() {
    struct Slow(Arc<Notify>, tokio::runtime::Handle);
    impl Drop for Slow {
        fn drop(&mut self) {
            self.1.block_on(self.0.notified());
        }
    }
    let (freed, runtime) = (Arc::new(Notify::new()), tokio::runtime::Handle::current());
    let told = freed.clone();
    let open = move |_: &OpenRequest| -> Result<SharedSession, RpcError> {
        let registry = Registry::new();
        let slow = Mutex::new(Some(Slow(told.clone(), runtime.clone())));
        registry.add_inline("slow", move || rpc_core::Shared(Arc::new(slow.lock().unwrap().take())));
        Ok(Arc::new(LocalSession::new(registry)))
    };
    let server = Server::new(Arc::new(open), ServeOptions::default());
    let address = listen(&server, "memory:freed").await;
    let session = Connector::new().connect(&address).await.unwrap();
    let object = session.get_function("slow").await.unwrap().call::<rpc_core::RemoteObject>(()).await.unwrap();
    server.stop();
    let mut stopped = std::pin::pin!(server.stopped(LIMIT));
    assert_eq!(session.ended().await.kind(), ErrorKind::Closed);
    assert!(is_pending(stopped.as_mut()).await);
    freed.notify_one();
    stopped.await;
    assert_eq!(server.sessions(), 0);
    drop(object);
}

/// Returns true if a future is still pending.
async fn is_pending<F: Future<Output = ()>>(mut future: Pin<&mut F>) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await
}

/// Stream that on command ends its input and takes no more output. It reports the end at once,
/// without the runtime, as TLS does once it has seen the end.
struct HalfClosed {
    io: DuplexStream,
    closed: Arc<AtomicBool>,
    last_byte: bool,
}

impl AsyncRead for HalfClosed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.closed.load(Ordering::SeqCst) {
            return Poll::Ready(Ok(()));
        }
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for HalfClosed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if !self.closed.load(Ordering::SeqCst) {
            return Pin::new(&mut self.io).poll_write(cx, bytes);
        }
        // One byte of a message is taken, so that output is left.
        if std::mem::replace(&mut self.last_byte, true) { Poll::Pending } else { Poll::Ready(Ok(1)) }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// The end is read once, although output is left that the server does not take.
#[test]
fn a_server_that_closes_and_reads_nothing_more_does_not_make_its_client_spin() {
    let (tell, told) = std::sync::mpsc::channel();
    // On a thread of its own, since a client's task that spins would never return.
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let kind = runtime.block_on(async {
            let server = server(|options| options.keep_alive = Duration::from_secs(3600));
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            let closed = Arc::new(AtomicBool::new(false));
            server.serve_channel(Channel::new(theirs, "a client"));
            let ours = HalfClosed { io: ours, closed: closed.clone(), last_byte: false };
            let connector = Connector::new().keep_alive(Duration::from_secs(3600));
            let session = connector.connect_channel(Channel::new(ours, "the server")).await.unwrap();
            closed.store(true, Ordering::SeqCst);
            session.get_function("nothing").await.unwrap_err().kind()
        });
        _ = tell.send(kind);
    });
    assert_eq!(told.recv_timeout(LIMIT).expect("the client's task ends"), ErrorKind::PeerLost);
}
