//! The client's side: the threads that take calls of a closure, run it, and answer.
//!
//! One thread at least always waits for the next call. A thread that has got one first sees to it that another waits, so
//! that the closure can be called again while it runs, from inside of itself included.

use std::any::Any;
use std::fmt;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::thread;

use parking_lot::{Mutex, MutexGuard};

use super::handler::CallbackHandler;
use crate::client::action::{Action, Options, ScopedAction};
use crate::client::held_lane;
use crate::client::references::{RemoteFunction, RemoteObject};
use crate::client::session::Session;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::callback;
use crate::function::convert::{ArgScope, IntoArg};
use crate::function::object::panic_error;
use crate::session::{Lane, SharedSession, is_same};
use crate::value::{Packed, Reference, Value};

/// The most calls of one callback that run at a time, those included that wait for calls inside of them: one more is an
/// error to its caller, where to let it wait might be for ever.
///
/// Each of them takes a thread of the client, and at the origin one of the session's
/// ([`SessionLimits::max_threads`](crate::SessionLimits::max_threads), twice as many by default) for the function that
/// waits for it.
pub const MAX_RUNNING: usize = 32;

/// Threads beyond this many that wait retire. With one alone each call would have to start another.
const KEPT_WAITING: usize = 2;

/// How often in a row asking for a call may fail at a limit.
const MAX_FAILURES: usize = 16;

impl Session {
    /// Makes `handler` a function of the session: the [callback](RemoteCallback) is passed where a function is expected,
    /// and whoever calls it there runs the closure here.
    ///
    /// The closure runs on threads that the callback owns, up to [`MAX_RUNNING`] calls at a time, and may use the session
    /// itself; see the [module](crate::client::callbacks) for what it must not do. Its errors reach its caller with all their
    /// facts; a panic is one of kind [`Panic`](ErrorKind::Panic), and arguments that do not fit are one of kind
    /// [`InvalidArgument`](ErrorKind::InvalidArgument).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if the origin knows no callbacks, [`ErrorKind::LimitExceeded`] if no thread can be started,
    /// and whatever ends the session.
    pub fn callback<A, R>(&self, handler: impl CallbackHandler<A, R>) -> Action<RemoteCallback> {
        let handler: Handler = Box::new(move |args, scope| handler.invoke(args, scope));
        let session = self.clone();
        ScopedAction::steps(async move |options| make(session, handler, options).await).concurrent()
    }
}

type Handler = Box<dyn Fn(Vec<Value>, &mut ArgScope<'_>) -> Result<Value> + Send + Sync>;

/// Makes a callback: its functions at the origin, and the first thread that waits for a call.
async fn make(session: Session, handler: Handler, options: Options<'_>) -> Result<RemoteCallback> {
    crate::panics::install_hook();
    let get = |name| options.apply(session.get_function(name)).start();
    let (create, next, done) = (get(callback::CREATE), get(callback::NEXT), get(callback::DONE));
    let (create, next, done) = (create.await?, next.await?, done.await?);
    let (function, source) = options.apply(create.call::<(RemoteFunction, RemoteObject)>(())).await?;
    let service = Arc::new(Service {
        session,
        next,
        done,
        source: Reference::Object(source.handle()),
        held: Mutex::new(Some(source)),
        handler,
        threads: Mutex::new(Threads { waiting: 1, running: 0 }),
    });
    // From here on dropping it stops what has been started.
    let callback = RemoteCallback(Arc::new(Owner { function, service }));
    let service = &callback.0.service;
    let mut services = lock(&SERVICES);
    services.retain(|service| service.strong_count() > 0);
    services.push(Arc::downgrade(service));
    drop(services);
    service.spawn().map_err(no_thread)?;
    Ok(callback)
}

/// A closure of this process as a function of a session. Cheap to clone; clones are the same callback.
///
/// A reference to it is an argument that arrives as a function, and keeps it until the reply of that call. Dropping the
/// last clone never blocks and lets go of the closure: whoever waits for it at the origin, or calls it later, gets an
/// [`InvalidHandle`](ErrorKind::InvalidHandle) error that says so. Where the closure runs at that moment it runs to its
/// end, and what it returns is discarded. The end of the session, and [`Session::shutdown`], let go of it as well.
///
/// A callback that its own closure has captured is never dropped.
#[derive(Clone)]
pub struct RemoteCallback(Arc<Owner>);

impl RemoteCallback {
    /// The function at the origin, to be called by the client itself. It is one like any other and outlives the callback,
    /// but fails then.
    pub fn function(&self) -> &RemoteFunction {
        &self.0.function
    }

    /// The session whose function it is.
    pub fn session(&self) -> Session {
        self.0.service.session.clone()
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

/// Whoever has the callback, as opposed to the threads that serve it.
struct Owner {
    function: RemoteFunction,
    service: Arc<Service>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.service.stop();
    }
}

/// All that may be running, so that a shutdown finds those of its session.
static SERVICES: Mutex<Vec<Weak<Service>>> = Mutex::new(Vec::new());

/// Lets go of all closures of `session`, which is about to be shut down: that waits for all requests, and there is always
/// one of a callback's that waits for a call.
pub(crate) fn stop_all(session: &SharedSession) {
    // Stopped outside of the lock: it frees objects, which is the session's business.
    let services: Vec<_> = lock(&SERVICES).iter().filter_map(Weak::upgrade).collect();
    for service in services {
        if is_same(service.session.shared(), session) {
            service.stop();
        }
    }
}

/// What the threads of one callback share.
struct Service {
    session: Session,
    next: RemoteFunction,
    done: RemoteFunction,
    /// Names the source in requests, which do not pin it: freeing it is what ends them.
    source: Reference,
    /// Keeps the source. `None` once the closure was let go of.
    held: Mutex<Option<RemoteObject>>,
    handler: Handler,
    threads: Mutex<Threads>,
}

struct Threads {
    /// Those that wait for a call, or are about to.
    waiting: usize,
    /// Those that run the closure.
    running: usize,
}

/// A call, its arguments, and the lane that waits for it.
type Taken = (RemoteObject, Vec<Value>, Option<u32>);

impl Service {
    /// Starts a thread, which is counted among those that wait.
    fn spawn(self: &Arc<Self>) -> io::Result<()> {
        let service = self.clone();
        thread::Builder::new().name("rpc-callback".into()).spawn(move || service.serve()).map(drop)
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
        // Nobody may wait for threads that are not there.
        self.stop();
    }

    /// The next call; `None` when there will be none.
    fn take(&self) -> Option<Taken> {
        for _ in 0..MAX_FAILURES {
            let args = vec![Value::Object(self.source.clone())];
            match self.next.call::<Option<Taken>>(args).concurrent().wait() {
                Ok(taken) => return taken,
                // One call came too large, or was one object too many: its caller has been told, and others may fit.
                Err(error) if error.kind() == ErrorKind::LimitExceeded => {}
                Err(_) => return None,
            }
        }
        None
    }

    /// Turns a thread that waited into one that runs the closure, and has another one wait.
    fn begin(self: &Arc<Self>) -> Result<()> {
        let mut threads = lock(&self.threads);
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

    /// Turns a thread that ran the closure into one that waits again. Whether there is a need for one.
    fn finish(&self) -> bool {
        let mut threads = lock(&self.threads);
        threads.running -= 1;
        let stays = threads.waiting < KEPT_WAITING;
        threads.waiting += usize::from(stays);
        stays
    }

    fn run(&self, call: &RemoteObject, args: Vec<Value>, lane: Option<Lane>) {
        let session = self.session.shared();
        // What is returned lives until it has been answered.
        let mut scope = ArgScope { session, pins: Vec::new() };
        let held = held_lane::hold(session, lane);
        let outcome = catch_unwind(AssertUnwindSafe(|| (self.handler)(args, &mut scope)));
        drop(held);
        self.answer(call, outcome.unwrap_or_else(|payload| Err(panic_error(&*payload))));
    }

    /// Tells the caller. One that is gone does not hear it, nor does the closure of that.
    fn answer(&self, call: &RemoteObject, outcome: Result<Value>) {
        let tell = |outcome: Result<Value>| {
            let mut args = vec![Value::Object(Reference::Object(call.handle()))];
            match outcome {
                Ok(value) => args.push(value),
                Err(error) => args.extend([Value::Null, Packed::encode(&error)?.into()]),
            }
            self.done.call::<()>(args).concurrent().wait()
        };
        // A return that cannot be sent is an error that can.
        if let Err(error) = tell(outcome)
            && !error.ends_session()
        {
            let _ = tell(Err(error.may_have_run(true)));
        }
    }

    /// Lets go of the closure: all who wait for it, here and at the origin, are told by the end of the source.
    fn stop(&self) {
        let held = lock(&self.held).take();
        drop(held);
    }
}

fn no_thread(error: io::Error) -> RpcError {
    RpcError::new(ErrorKind::LimitExceeded, format!("cannot start a thread for the closure: {error}"))
}

/// None of the data behind these locks is left half changed by a panic: closures run outside of them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
