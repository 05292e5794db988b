//! The local session: this process's functions and devices. Every other kind of session ends at one of these.

mod lanes;
mod quota;
mod thread;
mod timer;
mod work;

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use bytes::Bytes;

use self::lanes::{Capacity, Job, LaneKey, Lanes, Removed, Turn, Waiting};
use self::thread::LaneThread;
use self::work::{Place, Work};
use crate::blocking;
use crate::device::{AllocRequest, Devices};
use crate::dlpack::{self, DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::handle::HandleTable;
use crate::module::LoadRequest;
use crate::object::{
    Context, Function, Host, Invocation, LocalValue, Object, Signature, Started, Usage, WorkspaceFiles,
};
use crate::panics::drop_each;
use crate::registry::Registry;
use crate::reply::{Outcome, ReplyControl, Responder, Submission};
use crate::session::{InPlaceWrite, Lane, Operation, Request, RpcSession};
use crate::tensor::{Access, Borrow, Storage, Tensor, borrow_all};
use crate::value::{TensorRef, Value};

pub use self::quota::{MemoryLease, MemoryQuota};

/// Runs the futures of asynchronous functions. A crate that brings a runtime implements it.
pub trait Spawner: Send + Sync {
    /// Runs `future` to its end. Must not block.
    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>);
}

/// What a session may hold and queue. The defaults suit one client of a server that has several.
#[derive(Clone, Debug)]
pub struct SessionLimits {
    /// Requests that are admitted and not complete; more wait for admission. 1,024.
    pub max_requests: usize,
    /// Bytes of arguments in those requests; more wait for admission. 128 MiB.
    pub max_queued_bytes: usize,
    /// Objects that the session holds; more are an error. 1,048,576.
    pub max_handles: usize,
    /// Bytes of device memory that the session holds; more are an error. No limit.
    pub max_memory: u64,
}

impl Default for SessionLimits {
    fn default() -> Self {
        Self { max_requests: 1024, max_queued_bytes: 128 << 20, max_handles: 1 << 20, max_memory: u64::MAX }
    }
}

/// How many pairs of lane and device a session may set a stream for.
const MAX_SET_STREAMS: usize = 4096;

/// Makes a [`LocalSession`].
pub struct LocalSessionBuilder {
    registry: Registry,
    devices: Devices,
    limits: SessionLimits,
    total_memory: Option<Arc<MemoryQuota>>,
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

    /// Where the futures of asynchronous functions run; on the thread of their lane without this.
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
        let shared = Arc::new_cyclic(|this| Shared {
            this: this.clone(),
            registry: self.registry,
            devices: self.devices,
            memory: MemoryQuota::new("max_memory", limits.max_memory, self.total_memory),
            workspace: self.workspace,
            extensions: self.extensions,
            spawner: self.spawner,
            table: Mutex::new(HandleTable::new(seed, limits.max_handles)),
            lanes: Mutex::new(Lanes::new(capacity)),
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
                let mut table = lock(&self.0.0.table);
                let freed: Vec<_> = handles.into_iter().map(|handle| table.remove(handle)).collect();
                drop(table);
                // An object's own `drop` runs here, outside of the lock.
                drop_each(freed);
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
    registry: Registry,
    devices: Devices,
    memory: Arc<MemoryQuota>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    /// Taken alone, or inside of `lanes`.
    table: Mutex<HandleTable<Object>>,
    lanes: Mutex<Lanes<Request, Work>>,
    /// The current streams that lanes have set, by lane and device.
    streams: Mutex<HashMap<(Lane, Device), Arc<work::StreamObject>>>,
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
        let Request { lane, deadline, operation } = request;
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
        let turn = lanes.admit(lane, Job { work, responder: responder.clone(), deadline, bytes });
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
            let Some(Waiting { request, responder, bytes }) = lanes.next_waiting() else { return };
            let Request { lane, deadline, operation } = request;
            let (work, garbage) = work::resolve(&mut lock(&self.table), operation);
            let turn = match work {
                Ok(work) => {
                    let job = Job { work, responder: Some(responder.clone()), deadline, bytes };
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
        let Some(deadline) = deadline else { return };
        let (this, responder) = (self.this.clone(), responder.clone());
        timer::call_at(deadline, move || {
            if responder.is_complete() {
                return;
            }
            let removed = this.upgrade().is_some_and(|this| this.remove(responder.id(), deadline_exceeded()));
            if !removed {
                responder.complete(Err(deadline_exceeded().may_have_run(true)));
            }
        });
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

    fn drop_removed(&self, removed: Removed<Request, Work>, error: RpcError) {
        let (responder, bytes) = match removed {
            Removed::Waiting(waiting) => (Some(waiting.responder), None),
            Removed::Queued(job) => (job.responder, Some(job.bytes)),
        };
        if let Some(responder) = responder {
            responder.complete(Err(error));
        }
        // Behind the reply, as in `finish`.
        if let Some(bytes) = bytes {
            lock(&self.lanes).complete(bytes);
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

/// What a request counts against the capacity: what it keeps in memory while it waits.
fn request_bytes(operation: &Operation) -> usize {
    match operation {
        Operation::Call { args, .. } => args.iter().map(Value::size_hint).sum(),
        Operation::Write { data, .. } => data.len(),
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
    /// returned if it has no responder. `thread` is the lane's thread, if this is it.
    fn run_lane(self: &Arc<Self>, key: LaneKey, first: Job<Work>, thread: Option<&LaneThread>) -> Option<Ran> {
        let mut ran = None;
        let mut job = first;
        loop {
            let (outcome, duty) = self.run_job(key, job, thread);
            ran = ran.or(outcome);
            let Duty::Stays(bytes) = duty else { return ran };
            match self.proceed(key, bytes) {
                Some(next) => job = next,
                None => {
                    if key.is_single_use() {
                        lock(&self.streams).retain(|(lane, _), _| *lane != Lane::CONCURRENT);
                    }
                    return ran;
                }
            }
        }
    }

    /// Counts a job as complete, and takes the lane's next one.
    fn proceed(self: &Arc<Self>, key: LaneKey, bytes: usize) -> Option<Job<Work>> {
        let mut lanes = lock(&self.lanes);
        lanes.complete(bytes);
        let next = lanes.next(key);
        let more = lanes.has_waiting() || lanes.ended.is_some();
        drop(lanes);
        if more {
            self.after_completion();
        }
        next
    }

    fn run_job(self: &Arc<Self>, key: LaneKey, mut job: Job<Work>, thread: Option<&LaneThread>) -> (Option<Ran>, Duty) {
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
    fn go_on(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&LaneThread>) {
        if let Some(next) = self.proceed(key, bytes) {
            self.run_lane(key, next, thread);
        }
    }

    fn run_borrowed(
        self: &Arc<Self>,
        key: LaneKey,
        job: Job<Work>,
        borrows: Vec<Borrow>,
        thread: Option<&LaneThread>,
    ) -> (Option<Ran>, Duty) {
        // It may have waited for its tensors, or for its thread.
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            drop(borrows);
            return self.finish(job.responder, job.bytes, Err(self.not_begun()));
        }
        if thread.is_none() && job.work.place() == Place::Thread {
            return self.hand_over(key, job, borrows);
        }
        let Job { work, responder, deadline, bytes } = job;
        let context = || Context::new(self.clone(), key.lane(), deadline, responder.clone());
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
                    Started::Future(future) => return self.run_future(key, responder, bytes, future),
                }
            }
            work => self.perform(work, borrows, &context()),
        };
        let outcome = outcome.and_then(|value| self.name_objects(value));
        self.finish(responder, bytes, outcome)
    }

    /// Gives a job to the lane's thread.
    fn hand_over(self: &Arc<Self>, key: LaneKey, job: Job<Work>, borrows: Vec<Borrow>) -> (Option<Ran>, Duty) {
        let existing = lock(&self.lanes).thread(key);
        let thread = match existing.map_or_else(LaneThread::spawn, Ok) {
            Ok(thread) => thread,
            Err(error) => {
                let error =
                    RpcError::new(ErrorKind::LimitExceeded, format!("cannot start a thread for the lane: {error}"));
                return self.finish(job.responder, job.bytes, Err(error));
            }
        };
        let (this, own) = (self.clone(), thread.clone());
        let work = Box::new(move || {
            if let (_, Duty::Stays(bytes)) = this.run_borrowed(key, job, borrows, Some(&own)) {
                this.go_on(key, bytes, Some(&own));
            }
        });
        lock(&self.lanes).set_thread(key, thread.clone());
        if let Err(work) = thread.give(work) {
            // The thread went idle for good between two looks, or is just finishing its last work: take a new one.
            match LaneThread::spawn() {
                Ok(thread) => {
                    lock(&self.lanes).set_thread(key, thread.clone());
                    // A fresh thread takes work.
                    drop(thread.give(work));
                }
                // Last resort: here, rather than not at all.
                Err(_) => work(),
            }
        }
        (None, Duty::Passed)
    }

    fn run_future(
        self: &Arc<Self>,
        key: LaneKey,
        responder: Option<Responder>,
        bytes: usize,
        future: crate::object::CatchPanic,
    ) -> (Option<Ran>, Duty) {
        let (submission, responder) = match responder {
            Some(responder) => (None, responder),
            None => {
                let (submission, responder) = self.pending();
                responder.admit();
                (Some(Ran::Later(submission)), responder)
            }
        };
        let this = self.clone();
        let task = async move {
            let outcome = future.await.and_then(|value| this.name_objects(value));
            responder.complete(outcome);
            this.go_on(key, bytes, None);
        };
        match &self.spawner {
            Some(spawner) => spawner.spawn(Box::pin(task)),
            None => {
                let run = move || drop(blocking::block_on(task));
                if let Err(error) = std::thread::Builder::new().name("rpc-async".into()).spawn(run) {
                    tracing::error!(%error, "cannot start a thread for an asynchronous function");
                }
            }
        }
        (submission, Duty::Passed)
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
            table.check_room(count).err()
        };
        if let Some(error) = refused {
            drop(table);
            drop_each([value]);
            return Err(error.may_have_run(true));
        }
        value.try_map(&mut |object| work::reference(&mut table, object))
    }

    /// Does whatever is not a call.
    fn perform(&self, work: Work, mut borrows: Vec<Borrow>, context: &Context) -> Result<LocalValue> {
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
                let mut streams = lock(&self.streams);
                let key = (context.lane(), device);
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
                let current = stream.or_else(|| lock(&self.streams).get(&(context.lane(), device)).cloned());
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
        let Turn::Run(key, job) = lanes.admit(lane, Job { work: Work::Freed, responder: None, deadline: None, bytes })
        else {
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

fn first(borrows: &mut Vec<Borrow>) -> Result<Borrow> {
    borrows.pop().ok_or_else(|| RpcError::internal("a copy was not given its borrow"))
}

/// Where a job and the borrows it waits for find each other, whichever comes first.
enum Meeting {
    Nobody,
    Job(Box<Job<Work>>),
    Borrows(Vec<Borrow>),
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

    fn usage(&self) -> Usage {
        Usage { handles: lock(&self.table).len() as u64, memory_bytes: self.memory.used() }
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
            let mut table = lock(&shared.table);
            let freed: Vec<_> = reply.handles().into_iter().map(|handle| table.remove(handle)).collect();
            drop(table);
            drop_each(freed);
        }
    }
}
