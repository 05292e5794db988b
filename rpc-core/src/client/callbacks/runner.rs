//! The client's side of callbacks: the threads that take calls of a closure, run it, and answer.
//!
//! At least one thread always waits for the next call. A thread that has taken a call first makes
//! sure that another waits, so that the closure can be called again while it runs, also from inside
//! itself.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::Mutex;

use super::handler::CallbackHandler;
use crate::client::action::{Action, Options, ScopedAction};
use crate::client::lane_deadlock;
use crate::client::references::{RemoteFunction, RemoteObject};
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::callback;
use crate::function::convert::{ArgScope, IntoArg};
use crate::panics::panic_error;
use crate::session::{Lane, SharedSession, is_same};
use crate::value::{Packed, Reference, Value};

/// Largest number of calls of one callback that run at a time, including those that wait for nested
/// calls. One more is an error to its caller, because letting it wait might be for ever.
///
/// Each of them takes a thread of the client, and at the origin one of the session's
/// ([`SessionLimits::max_threads`](crate::SessionLimits::max_threads), twice as many by default)
/// for the function that waits for it.
pub const MAX_RUNNING: usize = 32;

/// Number of waiting threads above which further ones retire. With only one, each call would have
/// to start another.
const KEPT_WAITING: usize = 2;

/// Number of consecutive requests for a call that may fail at a limit.
const MAX_FAILURES: usize = 16;

impl Session {
    /// Makes `handler` a function of the session: the [callback](RemoteCallback) is passed where a
    /// function is expected, and calls of it there run the closure here.
    ///
    /// The closure runs on threads that the callback owns, up to [`MAX_RUNNING`] calls at a time,
    /// and may use the session itself; see the [module](crate::client::callbacks) for its
    /// restrictions. Its errors reach its caller with all their facts; a panic is one of kind
    /// [`Panic`](ErrorKind::Panic), and arguments that do not fit are one of kind
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if the origin does not support callbacks,
    /// [`ErrorKind::LimitExceeded`] if no thread can be started, and errors of the session.
    pub fn callback<A, R>(&self, handler: impl CallbackHandler<A, R>) -> Action<RemoteCallback> {
        let handler: Handler = Box::new(move |args, scope| handler.invoke(args, scope));
        let session = self.clone();
        ScopedAction::steps(async move |options| create_callback(session, handler, options).await).concurrent()
    }
}

type Handler = Box<dyn Fn(Vec<Value>, &mut ArgScope<'_>) -> Result<Value> + Send + Sync>;

/// Creates a callback: its functions at the origin, and the first thread that waits for a call.
async fn create_callback(session: Session, handler: Handler, options: Options<'_>) -> Result<RemoteCallback> {
    crate::panics::install_hook();
    let get = |name| options.apply(session.get_function(name)).start();
    let (create, next, done) = (get(callback::CREATE), get(callback::NEXT), get(callback::DONE));
    let (create, next, done) = (create.await?, next.await?, done.await?);
    let (function, source) = options.apply(create.call::<(RemoteFunction, RemoteObject)>(())).await?;
    let runner = Arc::new(CallbackRunner {
        session,
        next,
        done,
        source: Reference::Object(source.handle()),
        held: Mutex::new(Some(source)),
        handler,
        threads: Mutex::new(Threads { waiting: 1, running: 0 }),
    });
    // From here on, dropping it stops everything that has been started.
    let callback = RemoteCallback(Arc::new(Owner { function, runner }));
    let runner = &callback.0.runner;
    let mut runners = RUNNERS.lock();
    runners.retain(|runner| runner.strong_count() > 0);
    runners.push(Arc::downgrade(runner));
    drop(runners);
    runner.spawn().map_err(no_thread)?;
    Ok(callback)
}

/// A closure of this process as a function of a session. Cheap to clone; clones are the same
/// callback.
///
/// A reference to it is an argument that arrives as a function, and keeps it until the reply of
/// that call. Dropping the last clone never blocks and releases the closure: callers at the origin
/// that wait for it or call it later get an [`InvalidHandle`](ErrorKind::InvalidHandle) error that
/// says so. A call that is running then runs to its end, and its result is discarded. The end of
/// the session, and [`Session::shutdown`], release it as well.
///
/// A callback that its own closure has captured is never dropped.
#[derive(Clone)]
pub struct RemoteCallback(Arc<Owner>);

impl RemoteCallback {
    /// Returns the function at the origin, to be called by the client itself. It outlives the
    /// callback, but fails then.
    pub fn function(&self) -> &RemoteFunction {
        &self.0.function
    }

    /// Returns the session of the function.
    pub fn session(&self) -> Session {
        self.0.runner.session.clone()
    }
}

impl IntoArg for &RemoteCallback {
    fn type_kind() -> Option<&'static str> {
        Some("function")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let owner: Arc<dyn Any + Send + Sync> = self.0.clone();
        scope.pins.push(owner);
        self.function().into_arg(scope)
    }
}

impl fmt::Debug for RemoteCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteCallback({})", self.0.function.handle())
    }
}

/// Owners of the callback, as opposed to the threads that run the closure.
struct Owner {
    function: RemoteFunction,
    runner: Arc<CallbackRunner>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.runner.stop();
    }
}

/// All runners that may have threads, so that a shutdown finds those of its session.
static RUNNERS: Mutex<Vec<Weak<CallbackRunner>>> = Mutex::new(Vec::new());

/// Releases all closures of `session`, which is about to be shut down. A shutdown waits for all
/// requests, and a callback always has one that waits for a call.
pub(crate) fn stop_all(session: &SharedSession) {
    // Stopped outside of the lock, because stopping frees objects, which calls the session.
    let runners: Vec<_> = RUNNERS.lock().iter().filter_map(Weak::upgrade).collect();
    for runner in runners {
        if is_same(runner.session.shared(), session) {
            runner.stop();
        }
    }
}

/// State that the threads of one callback share.
struct CallbackRunner {
    session: Session,
    next: RemoteFunction,
    done: RemoteFunction,
    /// Names the source in requests, without pinning it: freeing the source ends them.
    source: Reference,
    /// Keeps the source. `None` once the closure was released.
    held: Mutex<Option<RemoteObject>>,
    handler: Handler,
    threads: Mutex<Threads>,
}

struct Threads {
    /// Number of threads that wait for a call, or are about to.
    waiting: usize,
    /// Number of threads that run the closure.
    running: usize,
}

/// A call, its arguments, and the lane that waits for it.
type IncomingCall = (RemoteObject, Vec<Value>, Option<u32>);

impl CallbackRunner {
    /// Starts a thread, counted as waiting.
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let runner = self.clone();
        thread::Builder::new().name("rpc-callback".into()).spawn(move || runner.serve()).map(drop)
    }

    fn serve(self: Arc<Self>) {
        while let Some((call, args, lane)) = self.take() {
            match self.begin() {
                Ok(()) => {
                    self.run(&call, args, lane.map(Lane));
                    if !self.finish() {
                        return;
                    }
                }
                Err(error) => {
                    args.iter().for_each(|arg| self.session.release(arg));
                    self.answer(&call, Err(error));
                }
            }
        }
        // No caller may wait for threads that do not exist.
        self.stop();
    }

    /// Takes the next call; `None` if there will be none.
    fn take(&self) -> Option<IncomingCall> {
        for _ in 0..MAX_FAILURES {
            let args = vec![Value::Object(self.source.clone())];
            match self.next.call::<Option<IncomingCall>>(args).concurrent().wait() {
                Ok(taken) => return taken,
                // One call was too large, or had one object too many. Its caller has been told;
                // others may fit.
                Err(error) if error.kind() == ErrorKind::LimitExceeded => {}
                Err(_) => return None,
            }
        }
        None
    }

    /// Turns a waiting thread into one that runs the closure, and makes another one wait.
    fn begin(self: &Arc<Self>) -> Result<()> {
        let mut threads = self.threads.lock();
        if threads.running == MAX_RUNNING {
            return Err(RpcError::new(
                ErrorKind::LimitExceeded,
                format!("the closure runs {MAX_RUNNING} times already, which is as often as it may at a time"),
            ));
        }
        if threads.waiting == 1 {
            self.spawn().map_err(no_thread)?;
            threads.waiting += 1;
        }
        threads.waiting -= 1;
        threads.running += 1;
        Ok(())
    }

    /// Turns a thread that ran the closure into a waiting one. Returns true if it is needed.
    fn finish(&self) -> bool {
        let mut threads = self.threads.lock();
        threads.running -= 1;
        let stays = threads.waiting < KEPT_WAITING;
        threads.waiting += usize::from(stays);
        stays
    }

    fn run(&self, call: &RemoteObject, args: Vec<Value>, lane: Option<Lane>) {
        let session = self.session.shared();
        // The result lives until it has been sent.
        let mut scope = ArgScope { session, pins: Vec::new() };
        let held = lane_deadlock::hold(session, lane);
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.handler)(args, &mut scope)));
        drop(held);
        self.answer(call, outcome.unwrap_or_else(|payload| Err(panic_error(&*payload))));
    }

    /// Sends the outcome to the caller. If the caller is gone, it is discarded.
    fn answer(&self, call: &RemoteObject, outcome: Result<Value>) {
        let tell = |outcome: Result<Value>| {
            let mut args = vec![Value::Object(Reference::Object(call.handle()))];
            match outcome {
                Ok(value) => args.push(value),
                Err(error) => args.extend([Value::Null, Packed::encode(&error)?.into()]),
            }
            self.done.call::<()>(args).concurrent().wait()
        };
        // A result that cannot be sent is replaced by an error that can.
        if let Err(error) = tell(outcome)
            && !error.ends_session()
        {
            let _ = tell(Err(error.may_have_run(true)));
        }
    }

    /// Releases the closure: the end of the source is reported to all waiting calls, here and at
    /// the origin.
    fn stop(&self) {
        let held = self.held.lock().take();
        drop(held);
    }
}

fn no_thread(error: io::Error) -> RpcError {
    RpcError::new(ErrorKind::LimitExceeded, format!("cannot start a thread for the closure: {error}"))
}
