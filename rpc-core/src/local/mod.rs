//! `LocalSession`: this process's functions and devices as a session. Every chain of sessions ends
//! at one.

mod async_jobs;
mod host;
mod job;
mod lane_runner;
mod lanes;
mod operations;
mod resolve;
#[cfg(test)]
mod tests;
mod thread_quota;
mod threads;
mod timer;

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};

use self::job::{Job, LaneKey, Parked};
use self::lane_runner::FirstOutcome;
use self::lanes::{Capacity, Lanes, QueueEntry, Removed, Turn, WaitingRequest};
use self::resolve::{RunsOn, Work};
use self::threads::Threads;
use self::timer::{Deadlines, Expire};
use crate::device::Devices;
use crate::dlpack::Device;
use crate::error::{ErrorKind, RpcError};
use crate::function::context::{Host, Usage, WorkspaceFiles};
use crate::function::object::Object;
use crate::function::registry::Registry;
use crate::handle::{Handle, HandleQuota, HandleTable};
use crate::limits::{MemoryQuota, SessionLimits};
use crate::panics::drop_each;
use crate::reply::{Outcome, ReplyControl, Responder, Submission};
use crate::session::{InPlaceWrite, Lane, Operation, Request, RpcSession, SharedSession};
use crate::value::{TensorRef, Value};

pub use self::thread_quota::ThreadQuota;

/// Executor for the futures of asynchronous functions, implemented by crates that use a runtime.
pub trait Spawner: Send + Sync {
    /// Runs `future` to completion. Must not block.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>);
}

/// Requests of a session that are not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Backlog {
    /// Requests that are admitted and not complete.
    pub admitted_requests: usize,
    /// Bytes of arguments in the admitted requests.
    pub admitted_bytes: usize,
    /// Requests that wait for admission.
    pub waiting_requests: usize,
    /// Bytes of arguments in the waiting requests.
    pub waiting_bytes: usize,
}

/// Builder of a [`LocalSession`].
pub struct LocalSessionBuilder {
    registry: Registry,
    devices: Devices,
    limits: SessionLimits,
    total_memory: Option<Arc<MemoryQuota>>,
    total_threads: Option<Arc<ThreadQuota>>,
    total_handles: Option<Arc<HandleQuota>>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    seed: Option<u64>,
}

impl LocalSessionBuilder {
    /// Sets the devices of the session; only `cpu` by default.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the session's limits.
    #[must_use]
    pub fn limits(mut self, limits: SessionLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets a limit on memory that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_memory(mut self, quota: Arc<MemoryQuota>) -> Self {
        self.total_memory = Some(quota);
        self
    }

    /// Sets a limit on threads that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_threads(mut self, quota: Arc<ThreadQuota>) -> Self {
        self.total_threads = Some(quota);
        self
    }

    /// Sets a limit on objects that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_handles(mut self, quota: Arc<HandleQuota>) -> Self {
        self.total_handles = Some(quota);
        self
    }

    /// Sets the session's folder; none by default.
    #[must_use]
    pub fn workspace(mut self, workspace: Arc<dyn WorkspaceFiles>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Adds a value that functions find by its type
    /// ([`Context::extension`](crate::Context::extension)).
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(mut self, extension: Arc<T>) -> Self {
        self.extensions.insert(TypeId::of::<T>(), extension);
        self
    }

    /// Sets the executor for the futures of asynchronous functions. By default each occupies a
    /// thread while it runs, as blocking functions do.
    #[must_use]
    pub fn spawner(mut self, spawner: Arc<dyn Spawner>) -> Self {
        self.spawner = Some(spawner);
        self
    }

    /// Sets the seed of the tag that distinguishes this session's handles from others'; random by
    /// default. For reproducible tests.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the session.
    pub fn build(self) -> LocalSession {
        crate::panics::install_hook();
        let limits = self.limits;
        // `RandomState` draws its keys from the operating system.
        let seed = self.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        let capacity = Capacity { requests: limits.max_requests.max(1), bytes: limits.max_queued_bytes };
        let threads = Threads::new(limits.max_threads, self.total_threads);
        let mut table = HandleTable::new(seed, limits.max_handles);
        if let Some(quota) = self.total_handles {
            table = table.within(quota);
        }
        let memory = MemoryQuota::new("max_memory", limits.max_memory, self.total_memory);
        let shared = Arc::new_cyclic(|this| LocalInner {
            this: this.clone(),
            limits,
            registry: self.registry,
            devices: self.devices,
            memory,
            workspace: self.workspace,
            extensions: self.extensions,
            spawner: self.spawner,
            table: Mutex::new(table),
            lanes: Mutex::new(Lanes::new(capacity, threads)),
            deadlines: Mutex::new(Deadlines::new()),
            streams: Mutex::default(),
            closing: Mutex::default(),
            gone: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
        });
        LocalSession(Arc::new(EndOnDrop(shared)))
    }
}

impl fmt::Debug for LocalSessionBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSessionBuilder").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// This process's functions and devices as a session. Cheap to clone; clones are the same session.
///
/// Dropping the last clone ends the session and frees all that it held. Objects that a running
/// function uses stay until it returns.
#[derive(Clone)]
pub struct LocalSession(Arc<EndOnDrop>);

/// Ends the session when the last [`LocalSession`] is dropped. Running jobs hold only the inner
/// part.
struct EndOnDrop(Arc<LocalInner>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(RpcError::new(ErrorKind::Closed, "the session was dropped"));
    }
}

impl LocalSession {
    /// Creates a session with the functions of `registry`, the device `cpu`, and default limits.
    pub fn new(registry: Registry) -> Self {
        Self::builder(registry).build()
    }

    /// Returns a builder for a session with the functions of `registry`.
    pub fn builder(registry: Registry) -> LocalSessionBuilder {
        LocalSessionBuilder {
            registry,
            devices: Devices::new(),
            limits: SessionLimits::default(),
            total_memory: None,
            total_threads: None,
            total_handles: None,
            workspace: None,
            extensions: HashMap::new(),
            spawner: None,
            seed: None,
        }
    }

    /// Ends the session now: requests that have not begun fail with `error`, and all objects are
    /// freed. Callers of a running function continue to wait for it.
    pub fn close(&self, error: RpcError) {
        self.0.0.end(error);
    }

    /// Returns the session's current use of handles and memory.
    pub fn usage(&self) -> Usage {
        self.0.0.usage()
    }

    /// Returns the numbers and sizes of the requests that are not complete.
    pub fn backlog(&self) -> Backlog {
        lock(&self.0.0.lanes).backlog()
    }
}

impl fmt::Debug for LocalSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalSession").field(&self.usage()).finish()
    }
}

impl RpcSession for LocalSession {
    fn submit(&self, request: Request) -> Submission {
        self.0.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.0)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn into_shared(self) -> SharedSession {
        self.0
    }
}

impl RpcSession for EndOnDrop {
    fn submit(&self, request: Request) -> Submission {
        match request.operation {
            Operation::Release { handles } => {
                self.0.release(handles);
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => self.0.shut_down(),
            _ => self.0.submit(request),
        }
    }

    fn is_local(&self) -> bool {
        true
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.0.pending();
        responder.admit();
        lock(&self.0.closing).watchers.push(responder);
        // `end` sets the flag first and takes the watchers then, so that one of the two sees the
        // other.
        if self.0.gone.load(Ordering::SeqCst)
            && let Some(error) = lock(&self.0.lanes).ended.clone()
        {
            let watchers = std::mem::take(&mut lock(&self.0.closing).watchers);
            for watcher in watchers {
                watcher.complete(Err(error.clone()));
            }
        }
        submission
    }
}

/// Requests that wait for the end of the session.
#[derive(Default)]
struct Closing {
    /// True once a shutdown has been requested.
    requested: bool,
    /// Shutdowns that wait for the last request.
    shutdowns: Vec<Responder>,
    watchers: Vec<Responder>,
}

struct LocalInner {
    this: Weak<Self>,
    limits: SessionLimits,
    registry: Registry,
    devices: Devices,
    memory: Arc<MemoryQuota>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    /// Locked alone, or inside of `lanes`.
    table: Mutex<HandleTable<Object>>,
    lanes: Mutex<Lanes<Request, Work>>,
    /// Locked alone, or inside of `lanes`.
    deadlines: Mutex<Deadlines>,
    /// Current streams that lanes have set, by lane and device. A lane for one request has none.
    streams: Mutex<HashMap<(LaneKey, Device), Arc<resolve::StreamObject>>>,
    closing: Mutex<Closing>,
    /// Set at the end, before the table is emptied: nothing is stored in the table from then on.
    gone: AtomicBool,
    next_id: AtomicU64,
}

/// Locks a mutex, ignoring poison: functions run outside of these locks, so a panic cannot leave
/// their data half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

impl LocalInner {
    fn pending(&self) -> (Submission, Responder) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let control: Arc<dyn ReplyControl> = Arc::new(LocalReplyControl(self.this.clone()));
        Submission::pending(control, id)
    }

    fn submit(self: &Arc<Self>, request: Request) -> Submission {
        let bytes = request_bytes(&request.operation);
        let mut lanes = lock(&self.lanes);
        if let Some(error) = &lanes.ended {
            let error = error.clone();
            drop(lanes);
            return Submission::ready(Err(error));
        }
        if request.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            drop(lanes);
            return Submission::ready(Err(deadline_exceeded()));
        }
        if !lanes.has_room(bytes) {
            let (submission, responder) = self.pending();
            self.watch_deadline(request.deadline, &responder);
            lanes.wait(WaitingRequest { request, responder, bytes });
            return submission;
        }
        let Request { lane, deadline, trace, operation } = request;
        let (work, garbage) = resolve::resolve(&mut lock(&self.table), operation);
        let work = match work {
            Ok(work) => work,
            Err(error) => {
                drop(lanes);
                drop_each(garbage);
                return Submission::ready(Err(error));
            }
        };
        // A future outlives the submission: its function needs a responder from the start, to see
        // cancellation.
        let here = work.runs_on() == RunsOn::AnyThread && !work.is_async() && lanes.is_idle(lane);
        let (submission, responder) = if here { (None, None) } else { unzip(self.pending()) };
        let turn = lanes.admit(lane, Job { work, responder: responder.clone(), deadline, trace, bytes });
        drop(lanes);
        drop_each(garbage);
        if let Some(responder) = &responder {
            responder.admit();
            self.watch_deadline(deadline, responder);
        }
        let outcome = match turn {
            Turn::Run(key, job) => self.run_lane(key, job, None),
            Turn::Queued => None,
        };
        match (submission, outcome) {
            (Some(submission), _) => submission,
            (None, Some(FirstOutcome::Done(outcome))) => self.ready(outcome),
            (None, Some(FirstOutcome::Later(submission))) => submission,
            (None, None) => Submission::ready(Err(RpcError::internal("a job that ran in place left no outcome"))),
        }
    }

    fn ready(&self, outcome: Outcome) -> Submission {
        match &outcome {
            Ok(value) if value.may_hold_objects() => {
                Submission::ready_with(Arc::new(LocalReplyControl(self.this.clone())), outcome)
            }
            _ => Submission::ready(outcome),
        }
    }

    /// Admits waiting requests, after one has completed.
    ///
    /// Requests that run at once complete inside this function and call it again. Those calls
    /// return, and leave the next request to the outer loop, so that a long queue does not exhaust
    /// the stack.
    fn admit_waiting(self: &Arc<Self>) {
        thread_local! {
            /// Sessions whose loops are on this thread's stack.
            static ADMITTING: RefCell<Vec<*const LocalInner>> = const { RefCell::new(Vec::new()) };
        }
        /// Removes the innermost session again, also after a panic.
        struct Leave;
        impl Drop for Leave {
            fn drop(&mut self) {
                ADMITTING.with_borrow_mut(|sessions| sessions.pop());
            }
        }

        if !lock(&self.lanes).has_waiting() {
            return;
        }
        let this = Arc::as_ptr(self);
        let nested = ADMITTING.with_borrow_mut(|sessions| {
            let nested = sessions.contains(&this);
            if !nested {
                sessions.push(this);
            }
            nested
        });
        if nested {
            return;
        }
        let _leave = Leave;
        loop {
            let mut lanes = lock(&self.lanes);
            let WaitingRequest { request, responder, bytes } = match lanes.next_waiting() {
                Some(QueueEntry::Request(waiting)) => waiting,
                Some(QueueEntry::Release(handles)) => {
                    drop(lanes);
                    self.free(handles);
                    continue;
                }
                None => return,
            };
            let Request { lane, deadline, trace, operation } = request;
            let (work, garbage) = resolve::resolve(&mut lock(&self.table), operation);
            let turn = match work {
                Ok(work) => {
                    let job = Job { work, responder: Some(responder.clone()), deadline, trace, bytes };
                    Ok(lanes.admit(lane, job))
                }
                Err(error) => Err(error),
            };
            drop(lanes);
            drop_each(garbage);
            responder.admit();
            match turn {
                Ok(Turn::Run(key, job)) => drop(self.run_lane(key, job, None)),
                Ok(Turn::Queued) => {}
                Err(error) => drop(responder.complete(Err(error))),
            }
        }
    }

    fn watch_deadline(&self, deadline: Option<Instant>, responder: &Responder) {
        if let Some(deadline) = deadline {
            lock(&self.deadlines).watch(deadline, responder, || self.this.clone());
        }
    }

    /// Releases objects, behind the requests that wait for admission and may use them.
    fn release(&self, handles: Vec<Handle>) {
        let mut lanes = lock(&self.lanes);
        if lanes.has_waiting() {
            let table = lock(&self.table);
            // Only live handles, so that a client cannot fill the queue with handles that name
            // nothing.
            lanes.release_later(handles.into_iter().filter(|handle| table.get(*handle).is_ok()));
            return;
        }
        drop(lanes);
        self.free(handles);
    }

    fn free(&self, handles: Vec<Handle>) {
        let mut table = lock(&self.table);
        let freed: Vec<_> = handles.into_iter().map(|handle| table.remove(handle)).collect();
        drop(table);
        // An object's own `drop` runs here, outside of the lock.
        drop_each(freed);
    }

    /// Removes a request from the queues and completes it with `error`. Returns true if it was
    /// queued.
    fn remove(self: &Arc<Self>, id: u64, error: RpcError) -> bool {
        let removed = lock(&self.lanes).remove(id);
        let found = removed.is_some();
        if let Some(removed) = removed {
            self.drop_removed(removed, error);
            self.after_completion();
        }
        found
    }

    fn drop_removed(self: &Arc<Self>, removed: Removed<Request, Work>, error: RpcError) {
        let (responder, admitted) = match removed {
            Removed::Waiting(waiting) => (Some(waiting.responder), None),
            Removed::Queued(job) => (job.responder, Some((job.bytes, None))),
            Removed::Parked(Parked { key, job, borrows }) => {
                drop(borrows);
                (job.responder, Some((job.bytes, Some(key))))
            }
        };
        if let Some(responder) = responder {
            responder.complete(Err(error));
        }
        // After the reply, as in `finish`.
        match admitted {
            None => {}
            Some((bytes, None)) => lock(&self.lanes).complete(bytes),
            Some((bytes, Some(key))) => self.go_on(key, bytes, None),
        }
    }

    fn end(self: &Arc<Self>, error: RpcError) {
        let removed = lock(&self.lanes).end(error.clone());
        for removed in removed {
            self.drop_removed(removed, error.clone());
        }
        self.gone.store(true, Ordering::Release);
        let objects = lock(&self.table).drain();
        let streams = std::mem::take(&mut *lock(&self.streams));
        drop_each(objects);
        drop_each(streams);
        // Running requests keep their deadlines.
        lock(&self.deadlines).compact();
        let closing = std::mem::take(&mut *lock(&self.closing));
        for watcher in closing.watchers {
            watcher.complete(Err(error.clone()));
        }
        for shutdown in closing.shutdowns {
            shutdown.complete(Ok(Value::Null));
        }
    }

    fn shut_down(self: &Arc<Self>) -> Submission {
        let (submission, responder) = self.pending();
        responder.admit();
        let mut closing = lock(&self.closing);
        closing.requested = true;
        closing.shutdowns.push(responder);
        drop(closing);
        let closed = RpcError::new(ErrorKind::Closed, "the session was shut down");
        // New requests are refused from now on; admitted and waiting ones continue.
        lock(&self.lanes).ended.get_or_insert(closed);
        self.after_completion();
        submission
    }

    /// Admits waiting requests and ends a session that is shutting down. Called after every
    /// completion.
    fn after_completion(self: &Arc<Self>) {
        self.admit_waiting();
        let closing = lock(&self.closing).requested;
        if closing && lock(&self.lanes).is_quiet() {
            self.end(RpcError::new(ErrorKind::Closed, "the session was shut down"));
        }
    }
}

fn unzip<A, B>((a, b): (A, B)) -> (Option<A>, Option<B>) {
    (Some(a), Some(b))
}

fn deadline_exceeded() -> RpcError {
    RpcError::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")
}

/// Returns the bytes that a request counts against the capacity: the memory that it keeps while it
/// waits, apart from a small constant.
fn request_bytes(operation: &Operation) -> usize {
    match operation {
        Operation::Call { args, .. } => args.iter().map(Value::size_hint).sum(),
        Operation::Write { to, data, .. } => data.len() + to.heap_bytes(),
        Operation::Read { from, .. } => from.heap_bytes(),
        Operation::Copy { from, to } => from.heap_bytes() + to.heap_bytes(),
        Operation::Alloc { shape, scope, .. } => {
            size_of::<i64>() * shape.capacity() + scope.as_ref().map_or(0, String::capacity)
        }
        Operation::GetFunction { name } | Operation::ModuleFunction { name, .. } => name.capacity(),
        Operation::LoadModule { path, loader } => path.capacity() + loader.as_ref().map_or(0, String::capacity),
        _ => 0,
    }
}

impl Expire for LocalInner {
    fn expire(self: Arc<Self>) {
        let due = lock(&self.deadlines).take_due(Instant::now(), || self.this.clone());
        for responder in due {
            if !self.remove(responder.id(), deadline_exceeded()) {
                responder.complete(Err(deadline_exceeded().may_have_run(true)));
            }
        }
    }
}

/// Callbacks of the session's replies. Does not keep the session alive.
struct LocalReplyControl(Weak<LocalInner>);

impl ReplyControl for LocalReplyControl {
    fn cancel(&self, id: u64) {
        if let Some(shared) = self.0.upgrade() {
            shared.remove(id, RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it began"));
        }
    }

    fn has_ended(&self) -> bool {
        self.0.upgrade().is_none_or(|shared| shared.gone.load(Ordering::Acquire))
    }

    fn discard(&self, reply: Value) {
        if let Some(shared) = self.0.upgrade() {
            shared.free(reply.handles());
        }
    }
}
