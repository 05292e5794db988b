//! Tools of a clause: sessions of one fixture, and operations in one of their
//! two forms.

use std::collections::HashMap;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::{
    Action, FromReply, IntoArgs, Lane, Pending, RemoteFunction, RemoteObject, Result, Session, SessionLimits, Usage,
};

use crate::fixture::Fixture;
use crate::functions;

/// Time limit of a clause: longer than any takes on a slow machine, those included that wait for a
/// compiler first. A test that needs more hangs.
const WATCHDOG: Duration = Duration::from_secs(180);

/// Time limit of what happens by itself, such as a free on its way.
const SOON: Duration = Duration::from_secs(10);

/// Form in which a test connects and waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Everything is awaited.
    Async,
    /// Everything is waited for on plain threads.
    Blocking,
}

/// A fixture and a form, as each clause is given them.
pub struct Harness {
    fixture: Arc<dyn Fixture>,
    form: Form,
}

/// Runs one clause as a test: on a runtime of its own, and under a watchdog that turns a hang into
/// a failure.
pub fn run(name: &str, fixture: impl FnOnce() -> Arc<dyn Fixture> + Send + 'static, form: Form, clause: Clause) {
    let (done, outcome) = mpsc::channel::<()>();
    let body = move || {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime starts");
        let entered = runtime.enter();
        let harness = Harness { fixture: fixture(), form };
        drop(entered);
        runtime.block_on(clause(&harness));
        drop(harness);
        runtime.shutdown_background();
        drop(done);
    };
    let test = thread::Builder::new().name(name.to_owned()).spawn(body).expect("a thread starts");
    match outcome.recv_timeout(WATCHDOG) {
        Err(RecvTimeoutError::Timeout) => panic!("{name} has not finished after {WATCHDOG:?}"),
        _ => {
            if let Err(panic) = test.join() {
                resume_unwind(panic);
            }
        }
    }
}

/// A clause of the contract, to be checked in a harness.
pub type Clause = for<'a> fn(&'a Harness) -> Pin<Box<dyn Future<Output = ()> + 'a>>;

impl Harness {
    /// Returns a new session with default limits.
    pub async fn session(&self) -> Session {
        self.session_with(SessionLimits::default()).await
    }

    /// Returns a new session with these limits.
    pub async fn session_with(&self, limits: SessionLimits) -> Session {
        match self.form {
            Form::Async => self.fixture.session(limits).await,
            Form::Blocking => {
                let fixture = self.fixture.clone();
                on_thread(move || fixture.blocking_session(limits)).await
            }
        }
    }

    /// Returns a new session and all functions of the origin.
    pub async fn client(&self) -> TestClient<'_> {
        TestClient::new(self, self.session().await).await
    }

    /// As [`client`](Self::client), with these limits.
    pub async fn client_with(&self, limits: SessionLimits) -> TestClient<'_> {
        TestClient::new(self, self.session_with(limits).await).await
    }

    /// Performs `operation` in the form of the harness.
    pub async fn get<O: BothForms>(&self, operation: O) -> Result<O::Value> {
        match self.form {
            Form::Async => operation.into_future().await,
            Form::Blocking => on_thread(move || operation.wait()).await,
        }
    }

    /// Returns the form in which operations are performed.
    pub fn form(&self) -> Form {
        self.form
    }

    /// Returns the number of links between the client and the origin.
    pub fn hops(&self) -> u16 {
        self.fixture.hops()
    }

    /// Returns limits with room for this many requests.
    pub fn narrow(&self, max_requests: usize) -> SessionLimits {
        SessionLimits { max_requests, ..SessionLimits::default() }
    }

    /// Returns a tag that no other test of any process uses.
    pub fn tag(&self) -> String {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Debug for Harness {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Harness").field("form", &self.form).field("hops", &self.hops()).finish()
    }
}

/// An operation in both its forms.
pub trait BothForms: IntoFuture<Output = Result<Self::Value>> + Send + 'static {
    /// Type of the result.
    type Value: Send + 'static;

    /// Performs the operation on the calling thread.
    ///
    /// # Errors
    ///
    /// The operation's.
    fn wait(self) -> Result<Self::Value>;
}

macro_rules! both_forms {
    ($([$($generics:tt)*] $operation:ty => $value:ty;)*) => {
        $(impl<$($generics)*> BothForms for $operation {
            type Value = $value;

            fn wait(self) -> Result<$value> {
                <$operation>::wait(self)
            }
        })*
    };
}

both_forms! {
    [T: Send + 'static] Action<T> => T;
    [T: Send + 'static] Pending<T> => T;
    [] rpc_core::PendingReply => rpc_core::Value;
}

/// Runs `body` on a thread that knows no runtime, from now on; the future resolves to what it
/// returns.
pub fn on_thread<T: Send + 'static>(body: impl FnOnce() -> T + Send + 'static) -> impl Future<Output = T> + Send {
    let (sender, receiver) = tokio::sync::oneshot::channel();
    let thread = thread::Builder::new().name("plain".to_owned());
    let thread = thread.spawn(move || drop(sender.send(body()))).expect("a thread starts");
    async move {
        match receiver.await {
            Ok(value) => value,
            Err(_) => resume_unwind(thread.join().expect_err("a thread that sends nothing has panicked")),
        }
    }
}

/// Polls `future` once, and leaves it alone if it is not ready.
pub fn poll_once<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    match Pin::new(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// A session and all functions of its origin.
pub struct TestClient<'a> {
    /// Harness that the client belongs to.
    pub harness: &'a Harness,
    /// The session.
    pub session: Session,
    functions: HashMap<String, RemoteFunction>,
}

impl<'a> TestClient<'a> {
    /// Fetches the functions of the origin.
    pub async fn new(harness: &'a Harness, session: Session) -> Self {
        let mut functions = HashMap::new();
        for name in functions::names() {
            let function = harness.get(session.get_function(&name)).await.unwrap();
            functions.insert(name, function);
        }
        Self { harness, session, functions }
    }

    /// Returns the function of that name.
    pub fn function(&self, name: &str) -> &RemoteFunction {
        self.functions.get(name).unwrap_or_else(|| panic!("the origin has a function '{name}'"))
    }

    /// Returns a call that has not been started.
    pub fn call<R: FromReply>(&self, name: &str, args: impl IntoArgs) -> Action<R> {
        self.function(name).call(args)
    }

    /// Performs a call on the default lane.
    ///
    /// # Errors
    ///
    /// The call's.
    pub async fn try_run<R: FromReply + Send + 'static>(&self, name: &str, args: impl IntoArgs) -> Result<R> {
        self.harness.get(self.call::<R>(name, args)).await
    }

    /// Performs a call on the default lane, which must succeed.
    pub async fn run<R: FromReply + Send + 'static>(&self, name: &str, args: impl IntoArgs) -> R {
        self.try_run(name, args).await.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Performs a call beside all others, which must succeed.
    pub async fn aside<R: FromReply + Send + 'static>(&self, name: &str, args: impl IntoArgs) -> R {
        let outcome = self.harness.get(self.call::<R>(name, args).concurrent()).await;
        outcome.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Performs an operation, which must succeed.
    pub async fn get<O: BothForms>(&self, operation: O) -> O::Value {
        self.harness.get(operation).await.unwrap()
    }

    /// Makes a closed gate at the origin.
    pub async fn gate(&self) -> Gate<'_> {
        Gate { client: self, object: self.aside("gate.new", ()).await }
    }

    /// Makes a counter at the origin.
    pub async fn counter(&self) -> Counter<'_> {
        Counter { client: self, object: self.aside("counter.new", ()).await }
    }

    /// Makes a journal at the origin.
    pub async fn journal(&self) -> Journal<'_> {
        Journal { client: self, object: self.aside("journal.new", ()).await }
    }

    /// Returns what the session holds at the origin.
    pub async fn usage(&self) -> Usage {
        let (handles, memory_bytes) = self.aside::<(u64, u64)>("usage", ()).await;
        Usage { handles, memory_bytes }
    }

    /// Waits until the session holds at the origin what it held when `baseline` was taken.
    pub async fn settles_at(&self, baseline: Usage) {
        let started = Instant::now();
        loop {
            let usage = self.usage().await;
            if usage == baseline {
                return;
            }
            assert!(started.elapsed() < SOON, "the session holds {usage:?} and should hold {baseline:?}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Asserts that the session works.
    pub async fn works(&self) {
        assert_eq!(self.aside::<i64>("add", (20, 22)).await, 42);
        assert_eq!(self.run::<i64>("add", (20, 22)).await, 42);
    }
}

impl fmt::Debug for TestClient<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestClient").field("harness", self.harness).finish_non_exhaustive()
    }
}

macro_rules! tools {
    ($($(#[$doc:meta])* $tool:ident;)*) => {
        $($(#[$doc])*
        #[derive(Debug)]
        pub struct $tool<'a> {
            client: &'a TestClient<'a>,
            /// The object itself, to be passed to functions.
            pub object: RemoteObject,
        })*
    };
}

tools! {
    /// A gate at the origin, worked on lanes of its own.
    Gate;
    /// A counter at the origin, worked on lanes of its own.
    Counter;
    /// A journal at the origin, read on a lane of its own.
    Journal;
}

impl Gate<'_> {
    /// Starts a call that waits at the gate.
    pub fn wait(&self, lane: Lane) -> Pending<()> {
        self.client.call("gate.wait", (&self.object,)).lane(lane).start()
    }

    /// Lets all waiting calls through, and those to come.
    pub async fn open(&self) {
        self.client.aside::<()>("gate.open", (&self.object,)).await;
    }

    /// Returns when so many calls have come to the gate.
    pub async fn reach(&self, calls: i64) {
        self.client.aside::<()>("gate.reach", (&self.object, calls)).await;
    }
}

impl Counter<'_> {
    /// Returns the count.
    pub async fn value(&self) -> i64 {
        self.client.aside("counter.value", (&self.object,)).await
    }

    /// Returns when the count is at least `least`.
    pub async fn reach(&self, least: i64) -> i64 {
        self.client.aside("counter.reach", (&self.object, least)).await
    }
}

impl Journal<'_> {
    /// Returns the entries so far.
    pub async fn entries(&self) -> Vec<i64> {
        self.client.aside("journal.entries", (&self.object,)).await
    }
}

/// Waits until `condition` holds: for what happens by itself and cannot be waited for.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let started = Instant::now();
    while !condition().await {
        assert!(started.elapsed() < SOON, "{what} has not come to pass");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
