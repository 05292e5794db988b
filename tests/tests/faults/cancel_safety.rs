//! Cancel safety: each operation's future is polled any number of times and then dropped. No reply
//! is lost, no object leaks, and nothing hangs.
#![allow(clippy::async_yields_async, reason = "each case makes the future that is then polled and dropped")]
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use rpc_core::client::Files;
use rpc_core::{DataType, Device, DeviceAttribute, RemoteFunction, RemoteObject, RemoteTensor, Session};
use rpc_server::config::ServeConfig;
use rpc_server::server::{RpcServer, Running};
use rpc_tests::functions;
use rpc_transports::Connector;

use crate::peers::{self, Calls, within};

/// Maximum number of polls, more than any operation here takes.
const MAX_POLLS: usize = 400;

/// Time limit within which a lost wake-up is noticed.
const LONG: Duration = Duration::from_secs(10);

/// Moment at which an operation is dropped.
#[derive(Clone, Copy, Debug)]
enum Drops {
    /// Right after the poll.
    AtOnce,
    /// Before the next poll: the reply may have arrived, and has not been taken.
    WhenWoken,
}

/// Runtimes of the tests: one with a single thread, and one where driver, server and caller run at
/// the same time.
const RUNTIMES: [usize; 2] = [0, 2];

type BoxedFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Woken {
    woken: AtomicBool,
    task: Waker,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        self.task.wake_by_ref();
    }
}

/// Polls `future` up to `polls` times, each time after it has been woken, and drops it. Returns
/// true if it was ready before that.
async fn poll_times(mut future: BoxedFuture, polls: usize, drops: Drops) -> bool {
    let woken =
        poll_fn(|cx| Poll::Ready(Arc::new(Woken { woken: AtomicBool::new(true), task: cx.waker().clone() }))).await;
    let waker = Waker::from(woken.clone());
    let mut left = polls;
    let steps = poll_fn(|_| {
        loop {
            if left == 0 && matches!(drops, Drops::AtOnce) {
                return Poll::Ready(false);
            }
            if !woken.woken.swap(false, Ordering::AcqRel) {
                return Poll::Pending;
            }
            if left == 0 {
                return Poll::Ready(false);
            }
            left -= 1;
            if future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                return Poll::Ready(true);
            }
        }
    });
    tokio::time::timeout(LONG, steps)
        .await
        .unwrap_or_else(|_| panic!("nothing has woken the operation after {left} polls"))
}

/// A server, its address, and the session by which it is observed.
struct Origin {
    running: Running,
    address: String,
    observer: Calls,
    _folder: tempfile::TempDir,
}

impl Origin {
    async fn start(address: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let address = address.replace('*', &folder.path().display().to_string().replace('/', "-"));
        let config = ServeConfig {
            listen: vec![address.parse().unwrap()],
            workdir: folder.path().join("work"),
            ..ServeConfig::default()
        };
        let running = RpcServer::new(functions::registry()).config(config).start().await.unwrap();
        let address = running.addresses()[0].to_string();
        let observer = Calls::to(&address).await;
        Self { running, address, observer, _folder: folder }
    }
}

/// A session, and the functions and tensors that operations on it need. The functions are fetched
/// once, because they count as objects.
#[derive(Clone)]
struct Kit {
    session: Session,
    echo: RemoteFunction,
    add: RemoteFunction,
    probes: RemoteFunction,
    usage: RemoteFunction,
    dropped: RemoteObject,
    /// Function that is kept, so that its release does not disturb the count.
    _counter: RemoteFunction,
    tensor: RemoteTensor,
    other: RemoteTensor,
}

/// Size of the tensors in bytes: more chunks than are in flight at one time.
const SIZE: i64 = 10 << 20;

impl Kit {
    async fn new(session: Session) -> Self {
        let get = async |name: &str| session.get_function(name).await.unwrap();
        let counter = get("counter.new").await;
        let tensor = async || session.alloc(Device::cpu(), DataType::U8, &[SIZE]).await.unwrap();
        Self {
            echo: get("echo").await,
            add: get("add").await,
            probes: get("probe.many").await,
            usage: get("usage").await,
            dropped: counter.call(()).await.unwrap(),
            tensor: tensor().await,
            other: tensor().await,
            _counter: counter,
            session,
        }
    }

    async fn usage(&self) -> (u64, u64) {
        self.usage.call(()).concurrent().await.unwrap()
    }
}

/// Runs the operation of `make` with each number of polls, until it is ready. After each run the
/// session works, and holds the same objects as before.
async fn sweep(what: &str, address: &str, make: impl AsyncFn(&Kit) -> BoxedFuture) {
    let origin = Origin::start(address).await;
    let kit = Kit::new(Connector::new().connect(&origin.address).await.unwrap()).await;
    let before = kit.usage().await;
    let mut complete = 0;
    for polls in 0..MAX_POLLS {
        for drops in [Drops::AtOnce, Drops::WhenWoken] {
            // Other calls run before and behind the operation, on the same lane and on another one.
            let front = kit.add.call::<i64>((1, 2)).start();
            let beside = kit.echo.call::<i64>((7,)).concurrent().start();
            let ended = poll_times(make(&kit).await, polls, drops).await;
            complete += u32::from(ended);
            let at = format!("{what}, dropped {drops:?} after {polls} polls");
            let behind = kit.add.call::<i64>((20, 22)).start();
            for (call, expected) in [(front, 3), (beside, 7), (behind, 42)] {
                let value = tokio::time::timeout(LONG, call).await.unwrap_or_else(|_| panic!("{at}: a lost reply"));
                assert_eq!(value.unwrap_or_else(|error| panic!("{at}: {error}")), expected, "{at}");
            }
            within(LONG, &format!("{at}: nothing has leaked (held before: {before:?})"), async || {
                kit.usage().await == before
            })
            .await;
        }
        // Each number is tried several times, because the polls that an operation takes vary.
        if complete >= 6 {
            break;
        }
    }
    assert!(complete >= 6, "{what} comes to its end");
    // The objects that were kept still work.
    kit.session.copy_to_remote(&kit.tensor, vec![9; SIZE as usize]).await.unwrap();
    assert!(kit.session.copy_from_remote(&kit.tensor).await.unwrap().iter().all(|byte| *byte == 9));
    drop(kit);
    let server = &origin.running;
    within(LONG, "the session ends", async || server.sessions() == 1).await;
    nothing_is_left(&origin).await;
}

/// Waits until the observer has the only session.
async fn nothing_is_left(origin: &Origin) {
    within(LONG, "all is freed", async || {
        let left = origin.observer.info().await;
        (left.sessions, left.handles, left.memory_bytes) == (1, 1, 0)
    })
    .await;
}

/// Returns a future that drops the result of the operation, if there is one.
fn boxed<O: IntoFuture<IntoFuture: Send + 'static>>(operation: O) -> BoxedFuture
where
    O::Output: Send,
{
    let future = operation.into_future();
    Box::pin(async move { drop(future.await) })
}

macro_rules! operations {
    ($($name:ident = |$kit:ident| $operation:expr;)*) => {$(
        mod $name {
            use super::*;

            fn test(address: &'static str) {
                for workers in RUNTIMES {
                    peers::run_on(workers, move || {
                        sweep(stringify!($name), address, async |$kit: &Kit| -> BoxedFuture { $operation })
                    });
                }
            }

            #[test]
            fn memory() {
                test("memory:cancel*");
            }

            #[test]
            fn tcp() {
                test("tcp://127.0.0.1:0");
            }
        }
    )*};
}

operations! {
    get_function = |kit| boxed(kit.session.get_function("echo"));
    an_inline_call = |kit| boxed(kit.echo.call::<i64>((1,)));
    a_call = |kit| boxed(kit.add.call::<i64>((1, 2)));
    a_concurrent_call = |kit| boxed(kit.add.call::<i64>((1, 2)).concurrent());
    a_call_with_a_deadline = |kit| boxed(kit.add.call::<i64>((1, 2)).timeout(Duration::from_secs(60)));
    a_call_with_large_arguments = |kit| boxed(kit.echo.call::<bytes::Bytes>((bytes::Bytes::from(vec![1; 3 << 20]),)));
    a_call_that_returns_objects = |kit| boxed(kit.probes.call::<Vec<RemoteObject>>((&kit.dropped, 20)));
    an_admission = |kit| {
        let mut pending = kit.probes.call::<Vec<RemoteObject>>((&kit.dropped, 20)).start();
        boxed(async move {
            pending.admitted().await.unwrap();
        })
    };
    alloc = |kit| boxed(kit.session.alloc(Device::cpu(), DataType::F32, &[1 << 20]));
    copy_to = |kit| boxed(kit.session.copy_to_remote(&kit.tensor, vec![1; SIZE as usize]));
    copy_from = |kit| boxed(kit.session.copy_from_remote(&kit.tensor));
    copy_among = |kit| boxed(kit.session.copy_among_remote(&kit.tensor, &kit.other));
    upload = |kit| {
        let session = kit.session.clone();
        boxed(async move { session.upload(&[1 << 16], &vec![1.0_f32; 1 << 16]).await })
    };
    free_of_a_tensor = |kit| {
        let tensor = kit.session.alloc(Device::cpu(), DataType::F32, &[1 << 16]).await.unwrap();
        boxed(tensor.free())
    };
    free_of_a_tensor_with_a_view = |kit| {
        let tensor = kit.session.alloc(Device::cpu(), DataType::F32, &[1 << 16]).await.unwrap();
        let view = tensor.view(0, DataType::U8, &[4], None);
        let freed = tensor.free();
        boxed(async move {
            freed.await.unwrap();
            drop(view);
        })
    };
    create_stream = |kit| boxed(kit.session.create_stream(Device::cpu()));
    free_of_a_stream = |kit| {
        let stream = kit.session.create_stream(Device::cpu()).await.unwrap();
        boxed(kit.session.free_stream(stream))
    };
    stream_wait = |kit| boxed(kit.session.stream_wait(Device::cpu(), None));
    sync_stream_from_to = |kit| {
        let stream = kit.session.create_stream(Device::cpu()).await.unwrap();
        let session = kit.session.clone();
        boxed(async move {
            session.sync_stream_from_to((Device::cpu(), None), (Device::cpu(), Some(&stream))).await.unwrap();
        })
    };
    alloc_on_a_virtual_device = |kit| {
        let anywhere: rpc_core::VirtualDevice = "*,scope=host".parse().unwrap();
        boxed(kit.session.alloc_aligned(anywhere, DataType::F32, &[1 << 16], 4096))
    };
    attribute = |kit| boxed(kit.session.attribute(Device::cpu(), DeviceAttribute::Name));
    load_module = |kit| boxed(kit.session.load_module("arithmetic"));
    put = |kit| {
        let put = Files::new(&kit.session).put_bytes("file", vec![1; 3 << 20]);
        boxed(put)
    };
    get = |kit| {
        let files = Files::new(&kit.session);
        files.put_bytes("file", vec![1; 3 << 20]).await.unwrap();
        boxed(async move {
            let mut sink = Vec::new();
            files.get("file", &mut sink).await.unwrap();
            assert_eq!(sink.len(), 3 << 20);
        })
    };
    ls = |kit| boxed(Files::new(&kit.session).ls(""));
}

/// Sessions are opened and closed, and the objects that are left are counted at the server.
async fn sweep_sessions(what: &str, address: &str, make: impl AsyncFn(&str) -> BoxedFuture) {
    let origin = Origin::start(address).await;
    let mut complete = 0;
    for polls in 0..MAX_POLLS {
        for drops in [Drops::AtOnce, Drops::WhenWoken] {
            complete += u32::from(poll_times(make(&origin.address).await, polls, drops).await);
            let at = format!("{what}, dropped {drops:?} after {polls} polls");
            assert_eq!(origin.observer.run::<i64>("add", (20, 22)).await, 42, "{at}");
            let server = &origin.running;
            within(LONG, &format!("{at}: no session is left"), async || server.sessions() == 1).await;
        }
        if complete >= 6 {
            break;
        }
    }
    assert!(complete >= 6, "{what} comes to its end");
    nothing_is_left(&origin).await;
}

macro_rules! session_operations {
    ($($name:ident = |$address:ident| $operation:expr;)*) => {$(
        mod $name {
            use super::*;

            fn test(address: &'static str) {
                for workers in RUNTIMES {
                    peers::run_on(workers, move || {
                        sweep_sessions(stringify!($name), address, async |$address: &str| -> BoxedFuture { $operation })
                    });
                }
            }

            #[test]
            fn memory() {
                test("memory:sessions*");
            }

            #[test]
            fn tcp() {
                test("tcp://127.0.0.1:0");
            }
        }
    )*};
}

session_operations! {
    connect = |address| {
        let address = address.to_owned();
        boxed(async move { drop(Connector::new().connect(&address).await.unwrap()) })
    };
    shutdown = |address| {
        let session = Connector::new().connect(address).await.unwrap();
        let held = session.alloc(Device::cpu(), DataType::F32, &[1 << 16]).await.unwrap();
        boxed(async move {
            session.shutdown().await.unwrap();
            drop(held);
        })
    };
    ended = |address| {
        let session = Connector::new().connect(address).await.unwrap();
        let pending = session.shutdown().start();
        boxed(async move {
            session.ended().await;
            drop(pending);
        })
    };
    a_call_on_the_last_reference = |address| {
        let session = Calls::to(address).await;
        boxed(async move {
            session.run::<i64>("add", (1, 2)).await;
        })
    };
}
