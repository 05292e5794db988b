//! The local session: this process's functions and devices. Every other kind of session ends at one of these.

mod lanes;
mod quota;
#[cfg(test)]
mod tests;
mod thread;
mod timer;
mod work;

use std::any::{Any, TypeId};
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use self::lanes::{Capacity, Front, Job, LaneKey, Lanes, Removed, Turn, Waiting};
use self::quota::WantsThreads;
use self::thread::{Claim, Employer, LaneThread, Parked, Threads};
use self::timer::{Deadlines, Expire};
use self::work::{Place, Work};
use crate::blocking;
use crate::device::{AllocRequest, Devices};
use crate::dlpack::{self, DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::{Handle, HandleQuota, HandleTable};
use crate::module::LoadRequest;
use crate::object::{
    CatchPanic, Context, Function, Host, Invocation, LocalValue, Module, Object, Signature, Started, ThreadPlace,
    Usage, WorkspaceFiles,
};
use crate::panics::drop_each;
use crate::quota::MemoryQuota;
use crate::registry::Registry;
use crate::reply::{Outcome, ReplyControl, Responder, Submission};
use crate::session::{InPlaceWrite, Lane, Operation, Request, RpcSession};
use crate::tensor::{Access, Borrow, Storage, Tensor, borrow_all};
use crate::value::{TensorRef, Value};

pub use self::quota::ThreadQuota;

/// Runs the futures of asynchronous functions. A crate that brings a runtime implements it.
pub trait Spawner: Send + Sync {
    /// Runs `future` to its end. Must not block.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>);
}

/// What a session may hold and queue. The defaults suit one client of a server that has several.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionLimits {
    /// Requests that are admitted and not complete; more wait for admission. 1,024.
    pub max_requests: usize,
    /// Bytes of arguments in those requests, as they lie in memory ([`Value::size_hint`]); more wait for admission, and
    /// one request that is larger is admitted alone. 128 MiB.
    ///
    /// What waits for admission is in memory, too. It is for whoever submits to bound that: a program by waiting for
    /// admission, a server by what it lets its clients have under way. [`LocalSession::backlog`] tells how much it is.
    pub max_queued_bytes: usize,
    /// Objects that the session holds; more are an error. 1,048,576.
    pub max_handles: usize,
    /// Bytes of device memory that the session holds; more are an error. No limit.
    pub max_memory: u64,
    /// Threads of the session, one at least: so many blocking functions run at one time, and without a
    /// [spawner](LocalSessionBuilder::spawner) asynchronous ones. Jobs for which there is no thread wait their turn, in the
    /// order in which they came to need one, and their lanes with them. 64.
    ///
    /// Waiting needs no thread: for a lane, for a tensor, for admission. Nor do inline functions and copies of ordinary
    /// size, so that they go on while all threads are busy. A nested call runs on its caller's thread. So the limit stops
    /// nobody for ever, unless functions wait for others of their own accord, as at a barrier: where more of them meet than
    /// there are threads, those that run wait for those that cannot.
    pub max_threads: usize,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self {
            max_requests: 1024,
            max_queued_bytes: 128 << 20,
            max_handles: 1 << 20,
            max_memory: u64::MAX,
            max_threads: 64,
        }
    }
}

/// What a session has been asked for and has not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Backlog {
    /// Requests that are admitted and not complete.
    pub admitted_requests: usize,
    /// Bytes of arguments in those.
    pub admitted_bytes: usize,
    /// Requests that wait for admission.
    pub waiting_requests: usize,
    /// Bytes of arguments in those.
    pub waiting_bytes: usize,
}

/// How many pairs of lane and device a session may set a stream for.
const MAX_SET_STREAMS: usize = 4096;

/// Makes a [`LocalSession`].
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
    /// The devices of the session; `cpu` alone without this.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// What the session may hold and queue.
    #[must_use]
    pub fn limits(mut self, limits: SessionLimits) -> Self {
        self.limits = limits;
        self
    }

    /// A limit on memory that several sessions share, beside the session's own.
    #[must_use]
    pub fn total_memory(mut self, quota: Arc<MemoryQuota>) -> Self {
        self.total_memory = Some(quota);
        self
    }

    /// A limit on threads that several sessions share, beside the session's own.
    #[must_use]
    pub fn total_threads(mut self, quota: Arc<ThreadQuota>) -> Self {
        self.total_threads = Some(quota);
        self
    }

    /// A limit on objects that several sessions share, beside the session's own.
    #[must_use]
    pub fn total_handles(mut self, quota: Arc<HandleQuota>) -> Self {
        self.total_handles = Some(quota);
        self
    }

    /// The session's folder; none without this.
    #[must_use]
    pub fn workspace(mut self, workspace: Arc<dyn WorkspaceFiles>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Gives functions something to find by its type ([`Context::extension`]).
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(mut self, extension: Arc<T>) -> Self {
        self.extensions.insert(TypeId::of::<T>(), extension);
        self
    }

    /// Where the futures of asynchronous functions run; without this each has a thread while it runs, as blocking
    /// functions do.
    #[must_use]
    pub fn spawner(mut self, spawner: Arc<dyn Spawner>) -> Self {
        self.spawner = Some(spawner);
        self
    }

    /// What tells this session's handles from those of others; random without this. For tests that need repetition.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Makes the session.
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
        let shared = Arc::new_cyclic(|this| Shared {
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
        LocalSession(Arc::new(Owner(shared)))
    }
}

impl fmt::Debug for LocalSessionBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSessionBuilder").field("limits", &self.limits).finish_non_exhaustive()
    }
}

/// This process's functions and devices as a session. Cheap to clone; clones are the same session.
///
/// Dropping the last clone ends the session and frees all that it held; what a function that is still running uses stays
/// until it returns.
#[derive(Clone)]
pub struct LocalSession(Arc<Owner>);

/// Ends the session when the last [`LocalSession`] is dropped. Running jobs hold the inner part only.
struct Owner(Arc<Shared>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.end(RpcError::new(ErrorKind::Closed, "the session was dropped"));
    }
}

impl LocalSession {
    /// A session with the functions of `registry`, the device `cpu`, and default limits.
    pub fn new(registry: Registry) -> Self {
        Self::builder(registry).build()
    }

    /// A session to be configured.
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

    /// Ends the session now: what has not begun fails with `error`, and all objects are freed. Whoever waits for a
    /// function that is running goes on waiting for it.
    pub fn close(&self, error: RpcError) {
        self.0.0.end(error);
    }

    /// What the session holds at present.
    pub fn usage(&self) -> Usage {
        self.0.0.usage()
    }

    /// What the session has yet to do.
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
        match request.operation {
            Operation::Release { handles } => {
                self.0.0.release(handles);
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => self.0.0.shut_down(),
            _ => self.0.0.submit(request),
        }
    }

    fn is_local(&self) -> bool {
        true
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.0.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.0.0.pending();
        responder.admit();
        lock(&self.0.0.closing).watchers.push(responder);
        // Whoever ends the session says so first and looks for watchers then, so that one of the two sees the other.
        if self.0.0.gone.load(Ordering::SeqCst)
            && let Some(error) = lock(&self.0.0.lanes).ended.clone()
        {
            let watchers = std::mem::take(&mut lock(&self.0.0.closing).watchers);
            for watcher in watchers {
                watcher.complete(Err(error.clone()));
            }
        }
        submission
    }
}

/// Who waits for the end.
#[derive(Default)]
struct Closing {
    /// Set once a shutdown has been asked for.
    requested: bool,
    /// The shutdowns that wait for the last request.
    shutdowns: Vec<Responder>,
    watchers: Vec<Responder>,
}

struct Shared {
    this: Weak<Self>,
    limits: SessionLimits,
    registry: Registry,
    devices: Devices,
    memory: Arc<MemoryQuota>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    /// Taken alone, or inside of `lanes`.
    table: Mutex<HandleTable<Object>>,
    lanes: Mutex<Lanes<Request, Work>>,
    /// Taken alone, or inside of `lanes`.
    deadlines: Mutex<Deadlines>,
    /// The current streams that lanes have set, by lane and device. A lane for one request has none.
    streams: Mutex<HashMap<(LaneKey, Device), Arc<work::StreamObject>>>,
    closing: Mutex<Closing>,
    /// Set at the end, before the table is emptied: nothing is stored in it from then on.
    gone: AtomicBool,
    next_id: AtomicU64,
}

/// None of the data behind these locks is left half changed by a panic: functions run outside of them.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn pending(&self) -> (Submission, Responder) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let control: Arc<dyn ReplyControl> = Arc::new(Control(self.this.clone()));
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
            lanes.wait(Waiting { request, responder, bytes });
            return submission;
        }
        let Request { lane, deadline, trace, operation } = request;
        let (work, garbage) = work::resolve(&mut lock(&self.table), operation);
        let work = match work {
            Ok(work) => work,
            Err(error) => {
                drop(lanes);
                drop_each(garbage);
                return Submission::ready(Err(error));
            }
        };
        // A future outlives the submission: its function needs a responder from the start, to learn of cancellation by.
        let here = work.place() == Place::Here && !work.is_async() && lanes.is_idle(lane);
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
            (None, Some(Ran::Done(outcome))) => self.ready(outcome),
            (None, Some(Ran::Later(submission))) => submission,
            (None, None) => Submission::ready(Err(RpcError::internal("a job that ran in place left no outcome"))),
        }
    }

    fn ready(&self, outcome: Outcome) -> Submission {
        match &outcome {
            Ok(Value::Object(_) | Value::List(_)) => {
                Submission::ready_with(Arc::new(Control(self.this.clone())), outcome)
            }
            _ => Submission::ready(outcome),
        }
    }

    /// Admits requests that waited, now that one is complete.
    ///
    /// Requests that run at once complete in here, and come here again: those calls return, and leave the next request
    /// to the loop further out, so that a long queue does not exhaust the stack.
    fn admit_waiting(self: &Arc<Self>) {
        thread_local! {
            /// The sessions whose loops are on this thread's stack.
            static ADMITTING: RefCell<Vec<*const Shared>> = const { RefCell::new(Vec::new()) };
        }
        /// Takes the innermost session out again, also when something panics.
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
            let Waiting { request, responder, bytes } = match lanes.next_waiting() {
                Some(Front::Request(waiting)) => waiting,
                Some(Front::Release(handles)) => {
                    drop(lanes);
                    self.free(handles);
                    continue;
                }
                None => return,
            };
            let Request { lane, deadline, trace, operation } = request;
            let (work, garbage) = work::resolve(&mut lock(&self.table), operation);
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

    /// Lets objects go, behind the requests that wait for admission: they may use them.
    fn release(&self, handles: Vec<Handle>) {
        let mut lanes = lock(&self.lanes);
        if lanes.has_waiting() {
            let table = lock(&self.table);
            // Only what there is, so that nobody can fill the queue with handles that name nothing.
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

    /// Takes a request out of the queues and completes it with `error`. Whether it was there.
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
        // Behind the reply, as in `finish`.
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
        // What still runs keeps its deadline.
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
        // New requests are refused from now on; those that were admitted or wait go on.
        lock(&self.lanes).ended.get_or_insert(closed);
        self.after_completion();
        submission
    }

    /// Things to do whenever there is one request less.
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

/// What a request counts against the capacity: what it keeps in memory while it waits, beyond the same few bytes for each.
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

/// What became of the first job of [`Shared::run_lane`], if its submitter waits for it in place.
enum Ran {
    Done(Outcome),
    /// It has to wait for a tensor after all.
    Later(Submission),
}

/// Whether the caller still has the duty to run the lane.
enum Duty {
    /// The job is over; this much of the session's capacity is to be given back.
    Stays(usize),
    /// Another thread, a future, or the release of a tensor will take it up.
    Passed,
}

impl Shared {
    /// Runs `first`, and then the lane until it is empty or somebody else has taken it up. The outcome of `first` is
    /// returned if it has no responder. `thread` is the session's thread that this is, if it is one.
    fn run_lane(self: &Arc<Self>, key: LaneKey, first: Job<Work>, mut thread: Option<&Own>) -> Option<Ran> {
        let mut ran = None;
        let mut job = first;
        loop {
            let (outcome, duty) = self.run_job(key, job, thread);
            ran = ran.or(outcome);
            let Duty::Stays(bytes) = duty else { return ran };
            match self.proceed(key, bytes, thread) {
                Some((next, crowded)) => {
                    job = next;
                    if crowded {
                        // The lane queues for a thread behind the others.
                        thread = None;
                    }
                }
                None => return ran,
            }
        }
    }

    /// Counts a job as complete, and takes the lane's next one. With it comes whether others wait for a thread.
    fn proceed(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&Own>) -> Option<(Job<Work>, bool)> {
        let mut lanes = lock(&self.lanes);
        lanes.complete(bytes);
        let next = lanes.next(key);
        let more = lanes.has_waiting() || lanes.ended.is_some();
        if let (None, false, Some(own)) = (&next, more, thread) {
            // Together with its lane, so that a call that comes now finds the thread, and starts no other.
            own.found.set(match lanes.threads.free(key, &own.thread) {
                Some(parked) => Found::Job(Box::new(parked)),
                None => Found::Idle,
            });
        }
        let crowded = lanes.threads.has_parked();
        drop(lanes);
        if more {
            self.after_completion();
        }
        next.map(|job| (job, crowded))
    }

    fn run_job(self: &Arc<Self>, key: LaneKey, mut job: Job<Work>, thread: Option<&Own>) -> (Option<Ran>, Duty) {
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            return self.finish(job.responder, job.bytes, Err(self.not_begun()));
        }
        if job.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return self.finish(job.responder, job.bytes, Err(deadline_exceeded()));
        }
        let wanted = job.work.wanted();
        if wanted.is_empty() {
            return self.run_borrowed(key, job, Vec::new(), thread);
        }
        // Nearly always they are free, and then nothing has to be set up for being called back.
        let free: Option<Vec<_>> = match &wanted[..] {
            [(storage, access)] => storage.try_borrow(*access).map(|borrow| vec![borrow]),
            _ => None,
        };
        if let Some(borrows) = free {
            return self.run_borrowed(key, job, borrows, thread);
        }
        let place = Arc::new(Mutex::new(Meeting::Nobody));
        let (this, meeting) = (self.clone(), place.clone());
        let resume = Box::new(move |borrows| {
            let mut meeting = lock(&meeting);
            match std::mem::replace(&mut *meeting, Meeting::Nobody) {
                Meeting::Job(job) => {
                    drop(meeting);
                    this.resume_lane(key, *job, borrows);
                }
                _ => *meeting = Meeting::Borrows(borrows),
            }
        });
        match borrow_all(wanted, resume) {
            Err(error) => self.finish(job.responder, job.bytes, Err(error)),
            Ok(Some(borrows)) => self.run_borrowed(key, job, borrows, thread),
            Ok(None) => {
                let submission = job.responder.is_none().then(|| {
                    let (submission, responder) = self.pending();
                    responder.admit();
                    self.watch_deadline(job.deadline, &responder);
                    job.responder = Some(responder);
                    Ran::Later(submission)
                });
                let mut meeting = lock(&place);
                match std::mem::replace(&mut *meeting, Meeting::Nobody) {
                    Meeting::Borrows(borrows) => {
                        drop(meeting);
                        let (_, duty) = self.run_borrowed(key, job, borrows, thread);
                        (submission, duty)
                    }
                    _ => {
                        *meeting = Meeting::Job(Box::new(job));
                        (submission, Duty::Passed)
                    }
                }
            }
        }
    }

    /// Goes on with a lane whose job waited for tensors.
    fn resume_lane(self: &Arc<Self>, key: LaneKey, job: Job<Work>, borrows: Vec<Borrow>) {
        if let (_, Duty::Stays(bytes)) = self.run_borrowed(key, job, borrows, None) {
            self.go_on(key, bytes, None);
        }
    }

    /// Runs what is left of a lane, after a job of `bytes`.
    fn go_on(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&Own>) {
        if let Some((next, crowded)) = self.proceed(key, bytes, thread) {
            self.run_lane(key, next, thread.filter(|_| !crowded));
        }
    }

    fn run_borrowed(
        self: &Arc<Self>,
        key: LaneKey,
        job: Job<Work>,
        borrows: Vec<Borrow>,
        thread: Option<&Own>,
    ) -> (Option<Ran>, Duty) {
        // It may have waited for its tensors, or for its thread.
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            drop(borrows);
            return self.finish(job.responder, job.bytes, Err(self.not_begun()));
        }
        if thread.is_none() && self.needs_thread(&job.work) {
            return self.hand_over(Parked { key, job, borrows });
        }
        let Job { work, responder, deadline, trace, bytes } = job;
        let context = || Context::new(self.clone(), key.lane(), deadline, trace, responder.clone());
        let outcome = match work {
            Work::Call { function, args } => {
                let borrows = if borrows.is_empty() {
                    Vec::new()
                } else {
                    let places: Vec<_> = work::borrowed_args(&function, &args).map(|(place, ..)| place).collect();
                    places.into_iter().zip(borrows).collect()
                };
                match function.start(Invocation::new(args, borrows, context())) {
                    Started::Done(outcome) => outcome,
                    Started::Future(future) => match &self.spawner {
                        Some(spawner) => return self.run_future(&**spawner, key, responder, bytes, future),
                        None => blocking::block_on(future).and_then(|outcome| outcome),
                    },
                }
            }
            work => self.perform(work, borrows, key, &context()),
        };
        let outcome = outcome.and_then(|value| self.name_objects(value));
        self.finish(responder, bytes, outcome)
    }

    fn needs_thread(&self, work: &Work) -> bool {
        work.place() == Place::Thread || (work.is_async() && self.spawner.is_none())
    }

    /// Gives a job to a thread, at once or when there is one for it.
    fn hand_over(self: &Arc<Self>, parked: Parked<Work>) -> (Option<Ran>, Duty) {
        let mut lanes = lock(&self.lanes);
        match lanes.threads.claim(parked.key, || self.this.clone()) {
            Claim::Idle(thread) => {
                drop(lanes);
                self.give(thread, parked);
            }
            Claim::New => {
                drop(lanes);
                if let Err((error, mut stranded)) = self.start_thread(parked) {
                    // The first is ours, and its lane's next may well fare the same: that is for the caller's loop.
                    let own = stranded.pop_front();
                    self.strand(stranded, &error);
                    if let Some(Parked { job, borrows, .. }) = own {
                        drop(borrows);
                        return self.finish(job.responder, job.bytes, Err(error));
                    }
                }
            }
            Claim::Wait => {
                lanes.threads.park(parked);
                drop(lanes);
                // For the first that waits, if the system had none to spare before.
                self.start_parked();
            }
        }
        (None, Duty::Passed)
    }

    fn give(self: &Arc<Self>, thread: LaneThread, parked: Parked<Work>) {
        let (this, own) = (self.clone(), Own { thread: thread.clone(), found: Cell::default() });
        thread.give(Box::new(move || this.work(&own, parked)));
    }

    /// Runs a job on a thread of the session, then its lane, and then whatever waits for a thread.
    fn work(self: &Arc<Self>, own: &Own, first: Parked<Work>) {
        let mut parked = first;
        loop {
            let Parked { key, job, borrows } = parked;
            if let (_, Duty::Stays(bytes)) = self.run_borrowed(key, job, borrows, Some(own)) {
                self.go_on(key, bytes, Some(own));
            }
            let next = match own.found.take() {
                Found::Nothing => lock(&self.lanes).threads.free(key, &own.thread),
                Found::Job(next) => Some(*next),
                Found::Idle => None,
            };
            match next {
                Some(next) => parked = next,
                None => return,
            }
        }
    }

    /// Starts a thread, for which there is room, with a job for it. Returns the jobs that will never have one.
    fn start_thread(self: &Arc<Self>, parked: Parked<Work>) -> Result<(), (RpcError, VecDeque<Parked<Work>>)> {
        match LaneThread::spawn(self.this.clone()) {
            Ok(thread) => {
                self.give(thread, parked);
                Ok(())
            }
            Err(error) => {
                let stranded = lock(&self.lanes).threads.start_failed(parked);
                if stranded.is_empty() {
                    return Ok(());
                }
                let error = format!("cannot start a thread for the lane: {error}");
                Err((RpcError::new(ErrorKind::LimitExceeded, error), stranded))
            }
        }
    }

    /// Ends jobs for which there will be no thread.
    fn strand(self: &Arc<Self>, jobs: VecDeque<Parked<Work>>, error: &RpcError) {
        for parked in jobs {
            self.drop_removed(Removed::Parked(parked), error.clone());
        }
    }

    /// Starts a thread for the first job that waits for one, if there is such a job and room for a thread.
    fn start_parked(self: &Arc<Self>) -> bool {
        let next = lock(&self.lanes).threads.next_parked(|| self.this.clone());
        let Some(parked) = next else { return false };
        if let Err((error, stranded)) = self.start_thread(parked) {
            self.strand(stranded, &error);
        }
        true
    }

    /// Gives a future to the spawner. What it is for goes on when it is over.
    fn run_future(
        self: &Arc<Self>,
        spawner: &dyn Spawner,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        future: CatchPanic,
    ) -> (Option<Ran>, Duty) {
        let (submission, responder) = match responder {
            Some(responder) => (None, responder),
            None => {
                let (submission, responder) = self.pending();
                responder.admit();
                (Some(Ran::Later(submission)), responder)
            }
        };
        let stage = Arc::new(AtomicU8::new(SPAWNING));
        let end = FutureEnd { shared: self.clone(), key, bytes, responder: Some(responder), stage: stage.clone() };
        let task = Box::pin(Task { future: Some(future), end });
        if catch_unwind(AssertUnwindSafe(|| spawner.spawn(task))).is_err() {
            tracing::error!("the spawner panicked");
        }
        // A future that is over already leaves the lane to us: were it to go on itself, a spawner that runs or drops its
        // futures at once would nest as deep as the lane is long.
        let duty = if stage.swap(SPAWNED, Ordering::AcqRel) == OVER { Duty::Stays(bytes) } else { Duty::Passed };
        (submission, duty)
    }

    /// Why a request that is over never began.
    fn not_begun(&self) -> RpcError {
        let ended = self.gone.load(Ordering::Acquire).then(|| lock(&self.lanes).ended.clone()).flatten();
        ended.unwrap_or_else(|| RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it began"))
    }

    /// Hands the outcome of a job to whoever waits for it.
    fn finish(&self, responder: Option<Responder>, bytes: usize, outcome: Outcome) -> (Option<Ran>, Duty) {
        let ran = match responder {
            Some(responder) => {
                responder.complete(outcome);
                None
            }
            None => Some(Ran::Done(outcome)),
        };
        (ran, Duty::Stays(bytes))
    }

    /// Stores the objects of a return and names them. If one cannot be stored, none is.
    fn name_objects(&self, value: LocalValue) -> Outcome {
        match value {
            // The usual returns need no look at the table.
            Value::Object(_) | Value::List(_) => {}
            plain => return plain.try_map(&mut |_| Err(RpcError::internal("a plain value held an object"))),
        }
        let mut count = 0;
        value.for_each_object(&mut |_| count += 1);
        let mut table = lock(&self.table);
        // Asked under the lock: an object stored after the end would never be freed.
        let refused = if self.gone.load(Ordering::Acquire) {
            Some(RpcError::new(ErrorKind::Closed, "the session ended while the function ran"))
        } else {
            table.reserve(count).err()
        };
        if let Some(error) = refused {
            drop(table);
            drop_each([value]);
            return Err(error.may_have_run(true));
        }
        value.try_map(&mut |object| work::reference(&mut table, object))
    }

    /// Does whatever is not a call.
    fn perform(&self, work: Work, mut borrows: Vec<Borrow>, lane: LaneKey, context: &Context) -> Result<LocalValue> {
        match work {
            Work::Get { name } => self.registry.get(&name).map(|function| Value::Object(Object::Function(function))),
            Work::Alloc { device, dtype, shape, scope } => self
                .allocate(device, dtype, &shape, scope.as_deref())
                .map(|tensor| Value::Object(Object::Tensor(tensor))),
            Work::Write { range, data, .. } => {
                first(&mut borrows)?.copy_in(range.start, &data)?;
                Ok(Value::Null)
            }
            Work::Read { range, into, .. } => {
                let mut borrow = first(&mut borrows)?;
                let len = range.end - range.start;
                if let Some(into) = into
                    && let Some(mut buffer) = into.take()
                {
                    let copied = if buffer.len() as u64 == len {
                        borrow.copy_out(range.start, &mut buffer).map(|()| true)
                    } else {
                        Ok(false)
                    };
                    into.put_back(buffer);
                    if copied? {
                        return Ok(Value::Null);
                    }
                }
                if borrow.bytes().is_some() {
                    let bytes = borrow.into_bytes(range);
                    return bytes
                        .map(Value::Bytes)
                        .ok_or_else(|| RpcError::internal("a checked range was out of bounds"));
                }
                // A range that was checked against memory fits memory.
                let mut bytes = vec![0; len as usize];
                borrow = borrow.share().unwrap_or(borrow);
                borrow.copy_out(range.start, &mut bytes)?;
                Ok(Value::Bytes(Bytes::from(bytes)))
            }
            Work::Copy { from, to } => self.copy(&from, &to, borrows).map(|()| Value::Null),
            Work::Freed => Ok(Value::Null),
            Work::Attribute { device, attribute } => self
                .devices
                .attribute(device, attribute)?
                .try_map(&mut |_| Err(RpcError::internal("an attribute is no object"))),
            Work::CreateStream { device } => {
                self.devices.get(device)?.create_stream(device.index).map(work::stream_object)
            }
            Work::SetStream { device, stream } => {
                self.devices.get(device)?;
                if lane.is_single_use() {
                    // No later request will ever see it.
                    return Ok(Value::Null);
                }
                let mut streams = lock(&self.streams);
                let key = (lane, device);
                let full = streams.len() >= MAX_SET_STREAMS && !streams.contains_key(&key);
                let old = match stream {
                    Some(_) if full => {
                        let limit = MAX_SET_STREAMS as u64;
                        return Err(RpcError::limit("max_set_streams", limit, limit + 1));
                    }
                    Some(stream) => streams.insert(key, stream),
                    None => streams.remove(&key),
                };
                drop(streams);
                drop(old);
                Ok(Value::Null)
            }
            Work::StreamWait { device, stream } => {
                let api = self.devices.get(device)?;
                let current = stream.or_else(|| lock(&self.streams).get(&(lane, device)).cloned());
                match current {
                    Some(stream) => stream.0.synchronize()?,
                    None => api.default_stream(device.index)?.synchronize()?,
                }
                Ok(Value::Null)
            }
            Work::LoadModule { path, loader } => {
                let request = LoadRequest { path: &path, context };
                self.registry
                    .load_module(loader.as_deref(), &request)
                    .map(|module| Value::Object(Object::Module(module)))
            }
            Work::ModuleFunction { module, name } => {
                module.function(&name).map(|function| Value::Object(Object::Function(function)))
            }
            Work::Call { .. } => Err(RpcError::internal("calls are not performed here")),
        }
    }

    fn copy(&self, from: &Tensor, to: &Tensor, borrows: Vec<Borrow>) -> Result<()> {
        let len = from.size_bytes();
        let (source, destination) = (from.byte_range(0, len)?.start, to.byte_range(0, len)?.start);
        // The device that is not the host knows how to reach host memory, not the other way round.
        let device = if from.device().kind == dlpack::DeviceType::CPU { to.device() } else { from.device() };
        let api = self.devices.get(device)?;
        let mut borrows = borrows.into_iter();
        match (borrows.next(), borrows.next()) {
            (Some(mut both), None) if source != destination => both.copy_within(&**api, source, destination, len),
            (Some(_), None) => Ok(()),
            (Some(read), Some(mut write)) => write.copy_from(&**api, destination, &read, source, len),
            _ => Err(RpcError::internal("a copy was not given its borrows")),
        }
    }

    fn write_in_place(self: &Arc<Self>, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        let mut lanes = lock(&self.lanes);
        let bytes = usize::try_from(len).ok()?;
        if lanes.ended.is_some() || !lanes.has_room(bytes) || !lanes.is_idle(lane) {
            return None;
        }
        let tensor = work::tensor(&lock(&self.table), to).ok()?;
        let start = usize::try_from(tensor.byte_range(offset, len).ok()?.start).ok()?;
        let mut borrow = tensor.storage().try_borrow(Access::Write)?;
        borrow.bytes_mut()?;
        let job = Job { work: Work::Freed, responder: None, deadline: None, trace: None, bytes };
        let Turn::Run(key, job) = lanes.admit(lane, job) else {
            return None;
        };
        drop(lanes);
        let this = self.clone();
        let resume = move || {
            this.go_on(key, job.bytes, None);
        };
        InPlaceWrite::new(borrow, start, bytes, Box::new(resume))
    }
}

/// A thread of the session, as the one who runs on it sees it.
struct Own {
    thread: LaneThread,
    /// What came of it when its lane became empty.
    found: Cell<Found>,
}

#[derive(Default)]
enum Found {
    /// It has yet to be asked.
    #[default]
    Nothing,
    /// There is another job for it.
    Job(Box<Parked<Work>>),
    /// It is idle, and may be given work as soon as it waits.
    Idle,
}

/// The future is being given to the spawner.
const SPAWNING: u8 = 0;
/// The future goes on with its lane when it is over.
const SPAWNED: u8 = 1;
/// The future was over before it was spawned, and has left the lane to the one who spawns it.
const OVER: u8 = 2;

/// The future of an asynchronous function, and what it is for.
struct Task {
    /// Dropped before the rest is seen to, so that its tensors are free by then.
    future: Option<CatchPanic>,
    end: FutureEnd,
}

impl Future for Task {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> Poll<()> {
        let Some(future) = &mut self.future else { return Poll::Ready(()) };
        let outcome = ready!(Pin::new(future).poll(cx));
        drop_each(self.future.take());
        self.end.complete(outcome);
        Poll::Ready(())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        drop_each(self.future.take());
    }
}

/// Sees to it that a request gets its reply, and its lane goes on, however its future ends: a runtime that shuts down drops
/// futures halfway.
struct FutureEnd {
    shared: Arc<Shared>,
    key: LaneKey,
    bytes: usize,
    /// `None` once all has been seen to.
    responder: Option<Responder>,
    stage: Arc<AtomicU8>,
}

impl FutureEnd {
    fn complete(&mut self, outcome: Result<LocalValue>) {
        let Some(responder) = self.responder.take() else { return };
        responder.complete(outcome.and_then(|value| self.shared.name_objects(value)));
        if self.stage.swap(OVER, Ordering::AcqRel) == SPAWNED {
            self.shared.go_on(self.key, self.bytes, None);
        }
    }
}

impl Drop for FutureEnd {
    fn drop(&mut self) {
        let dropped = RpcError::internal("the runtime dropped the function before it returned");
        self.complete(Err(dropped.may_have_run(true)));
    }
}

fn first(borrows: &mut Vec<Borrow>) -> Result<Borrow> {
    borrows.pop().ok_or_else(|| RpcError::internal("a copy was not given its borrow"))
}

/// Where a job and the borrows it waits for find each other, whichever comes first.
enum Meeting {
    Nobody,
    Job(Box<Job<Work>>),
    Borrows(Vec<Borrow>),
}

impl Employer for Shared {
    fn may_leave(&self, thread: &LaneThread) -> bool {
        lock(&self.lanes).threads.dismiss(thread)
    }

    fn left(self: Arc<Self>) {
        let lease = lock(&self.lanes).threads.left();
        self.start_parked();
        drop(lease);
    }
}

impl WantsThreads for Shared {
    fn room_for_thread(self: Arc<Self>) -> bool {
        lock(&self.lanes).threads.told_of_room();
        self.start_parked()
    }
}

impl Expire for Shared {
    fn expire(self: Arc<Self>) {
        let due = lock(&self.deadlines).take_due(Instant::now(), || self.this.clone());
        for responder in due {
            if !self.remove(responder.id(), deadline_exceeded()) {
                responder.complete(Err(deadline_exceeded().may_have_run(true)));
            }
        }
    }
}

impl Host for Shared {
    fn devices(&self) -> &Devices {
        &self.devices
    }

    fn function(&self, name: &str) -> Option<Function> {
        self.registry.get(name).ok()
    }

    fn functions(&self) -> Vec<(String, Signature)> {
        self.registry.functions()
    }

    fn load_module(&self, loader: Option<&str>, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>> {
        self.registry.load_module(loader, request)
    }

    fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>> {
        self.workspace.as_ref()
    }

    fn extension(&self, type_id: TypeId) -> Option<Arc<dyn Any + Send + Sync>> {
        self.extensions.get(&type_id).cloned()
    }

    fn allocate(&self, device: Device, dtype: DataType, shape: &[i64], scope: Option<&str>) -> Result<Tensor> {
        let api = self.devices.get(device)?;
        let size = dlpack::dense_size(shape, dtype)?;
        let lease = self.memory.reserve(size)?;
        let memory = api.allocate(device.index, &AllocRequest { size, alignment: 0, scope })?;
        let storage = Storage::new(device, memory, Some(Box::new(lease)));
        Tensor::new(storage, 0, shape, None, dtype)
    }

    fn limits(&self) -> &SessionLimits {
        &self.limits
    }

    fn reserve_thread(&self) -> Result<ThreadPlace> {
        if !lock(&self.lanes).threads.reserve_for_function() {
            return Err(RpcError::new(
                ErrorKind::LimitExceeded,
                "the session, or all sessions together, may have no more threads (max_threads, max_total_threads)",
            ));
        }
        Ok(ThreadPlace::new(TakenThread(self.this.clone())))
    }

    fn usage(&self) -> Usage {
        Usage { handles: lock(&self.table).len() as u64, memory_bytes: self.memory.used() }
    }
}

/// A thread of a function's own, which counts until this is dropped.
struct TakenThread(Weak<Shared>);

impl Drop for TakenThread {
    fn drop(&mut self) {
        let Some(shared) = self.0.upgrade() else { return };
        let lease = lock(&shared.lanes).threads.left();
        drop(lease);
        // Jobs of this session may have waited for its own limit, of which no quota tells.
        shared.start_parked();
    }
}

/// What replies hold of their session: nothing that keeps it alive.
struct Control(Weak<Shared>);

impl ReplyControl for Control {
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
