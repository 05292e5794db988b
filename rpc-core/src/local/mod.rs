//! `LocalSession`: this process's functions and devices as a session. Every chain of sessions ends
//! at one.

mod async_jobs;
mod context_host;
mod deadlines;
mod device_gate;
mod job;
mod lane_runner;
mod lanes;
mod local_session;
mod operations;
mod pipes;
mod resolve;
mod spawner;
mod sync;
#[cfg(test)]
mod tests;
mod thread_quota;
mod threads;

use std::any::{Any, TypeId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use self::deadlines::{Deadlines, Expire};
use self::job::{Job, LaneKey, Parked};
use self::lane_runner::FirstOutcome;
use self::lanes::{AdmittedJob, Lanes, QueueEntry, Removed, WaitingRequest};
use self::pipes::{PipeSlot, Pipes};
use self::resolve::{PinnedOperation, RunsOn};
use crate::access_control::AccessControl;
use crate::device::Devices;
use crate::dlpack::Device;
use crate::error::{ErrorKind, RpcError};
use crate::function::context::WorkspaceFiles;
use crate::function::object::Object;
use crate::function::registry::Registry;
use crate::handle::{Handle, HandleTable};
use crate::limits::{OpenFileQuota, SessionLimits};
use crate::memory_quota::MemoryQuota;
use crate::panics::drop_each;
use crate::reply::{Outcome, ReplyControl, Responder, Submission};
use crate::session::Request;
use crate::value::Value;

pub use self::device_gate::{DeviceGate, DeviceUse};
pub use self::lanes::Backlog;
pub use self::local_session::{LocalSession, LocalSessionBuilder};
pub use self::spawner::Spawner;
pub use self::thread_quota::ThreadQuota;

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
    /// Rights of the client; `None` for all.
    access: Option<Arc<dyn AccessControl>>,
    devices: Devices,
    memory: Arc<MemoryQuota>,
    open_files: OpenFileQuota,
    /// Host memory for reads from devices whose memory the host cannot access, and for what
    /// functions stage.
    staging: Arc<MemoryQuota>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    gate: Option<device_gate::SessionGate>,
    /// Locked alone, or inside of `lanes` or `pipes`.
    table: Mutex<HandleTable<Object>>,
    /// Locked alone, or inside of `lanes`.
    pipes: Mutex<Pipes>,
    lanes: sync::Mutex<Lanes<Submitted, PinnedOperation>>,
    /// Locked alone, or inside of `lanes`.
    deadlines: Mutex<Deadlines>,
    /// Current streams that lanes have set, by lane and device. A lane for one request has none.
    streams: Mutex<HashMap<(LaneKey, Device), Arc<resolve::StreamObject>>>,
    closing: Mutex<Closing>,
    /// Set at the end, before the table is emptied: nothing is stored in the table from then on.
    gone: AtomicBool,
    next_id: AtomicU64,
}

/// A request, and the cell for its result.
struct Submitted {
    request: Request,
    slot: Option<PipeSlot>,
}

impl LocalInner {
    fn pending(&self) -> (Submission, Responder) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let control: Arc<dyn ReplyControl> = Arc::new(LocalReplyControl(self.this.clone()));
        Submission::pending(control, id)
    }

    fn submit(self: &Arc<Self>, request: Request) -> Submission {
        let bytes = request.operation.memory();
        let mut lanes = self.lanes.lock();
        if let Some(error) = &lanes.ended {
            let error = error.clone();
            drop(lanes);
            return Submission::ready(Err(error));
        }
        let slot = match self.open_pipe(&request) {
            Ok(slot) => slot,
            Err(error) => {
                drop(lanes);
                return Submission::ready(Err(error));
            }
        };
        if request.deadline.is_some_and(|deadline| deadline <= crate::clock::now()) {
            drop(lanes);
            // Requests that name the result fail for the same reason.
            slot.iter().for_each(|slot| slot.fail(&deadline_exceeded()));
            return Submission::ready(Err(deadline_exceeded()));
        }
        if !lanes.has_room(bytes) {
            let (submission, responder) = self.pending();
            self.watch_deadline(request.deadline, &responder);
            lanes.wait(WaitingRequest { request: Submitted { request, slot }, responder, bytes });
            return submission;
        }
        let Request { lane, deadline, trace, operation, pipe: _ } = request;
        let (work, garbage) = self.pin(lane, operation, slot);
        let work = match work {
            Ok(work) => work,
            Err(error) => {
                drop(lanes);
                garbage.discard();
                return Submission::ready(Err(error));
            }
        };
        // A future outlives the submission: its function needs a responder from the start, to see
        // cancellation.
        let here =
            work.may_run_in_place() && work.runs_on() == RunsOn::AnyThread && !work.is_async() && lanes.is_idle(lane);
        let (submission, responder) = if here { (None, None) } else { unzip(self.pending()) };
        let turn = lanes.admit(lane, Job { work, responder: responder.clone(), deadline, trace, bytes });
        drop(lanes);
        garbage.discard();
        if let Some(responder) = &responder {
            responder.admit();
            self.watch_deadline(deadline, responder);
        }
        let outcome = match turn {
            AdmittedJob::Run(key, job) => self.run_lane(key, job, None),
            AdmittedJob::Queued => None,
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

        if !self.lanes.lock().has_waiting() {
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
            let mut lanes = self.lanes.lock();
            let WaitingRequest { request: Submitted { request, slot }, responder, bytes } = match lanes.next_waiting() {
                Some(QueueEntry::Request(waiting)) => waiting,
                Some(QueueEntry::Release(handles)) => {
                    drop(lanes);
                    self.free(handles);
                    continue;
                }
                None => return,
            };
            let Request { lane, deadline, trace, operation, pipe: _ } = request;
            let (work, garbage) = self.pin(lane, operation, slot);
            let turn = match work {
                Ok(work) => {
                    let job = Job { work, responder: Some(responder.clone()), deadline, trace, bytes };
                    Ok(lanes.admit(lane, job))
                }
                Err(error) => Err(error),
            };
            drop(lanes);
            garbage.discard();
            responder.admit();
            match turn {
                Ok(AdmittedJob::Run(key, job)) => drop(self.run_lane(key, job, None)),
                Ok(AdmittedJob::Queued) => {}
                Err(error) => drop(responder.complete(Err(error))),
            }
        }
    }

    fn watch_deadline(&self, deadline: Option<Instant>, responder: &Responder) {
        if let Some(deadline) = deadline {
            self.deadlines.lock().watch(deadline, responder, || self.this.clone());
        }
    }

    /// Releases objects, behind the requests that wait for admission and may use them.
    fn release(&self, handles: Vec<Handle>) {
        let mut lanes = self.lanes.lock();
        if lanes.has_waiting() {
            let (pipes, table) = (self.pipes.lock(), self.table.lock());
            // Only live handles, so that a client cannot fill the queue with handles that name
            // nothing.
            let is_live = |handle: &Handle| table.get(*handle).is_ok() || pipes.contains(*handle);
            lanes.release_later(handles.into_iter().filter(is_live));
            return;
        }
        drop(lanes);
        self.free(handles);
    }

    fn free(&self, handles: Vec<Handle>) {
        if handles.iter().any(|handle| handle.is_pipe()) {
            drop_each(self.take_pipes(handles.iter().copied().filter(|handle| handle.is_pipe())));
        }
        let mut table = self.table.lock();
        let freed: Vec<_> = handles.into_iter().map(|handle| table.remove(handle)).collect();
        drop(table);
        // An object's own `drop` runs here, outside of the lock.
        drop_each(freed);
    }

    /// Removes a request from the queues and completes it with `error`. Returns true if it was
    /// queued.
    fn remove(self: &Arc<Self>, id: u64, error: RpcError) -> bool {
        let removed = self.lanes.lock().remove(id);
        let found = removed.is_some();
        if let Some(removed) = removed {
            self.drop_removed(removed, error);
            self.after_completion();
        }
        found
    }

    fn drop_removed(self: &Arc<Self>, removed: Removed<Submitted, PinnedOperation>, error: RpcError) {
        let (responder, admitted) = match removed {
            Removed::Waiting(waiting) => {
                waiting.request.slot.iter().for_each(|slot| slot.fail(&error));
                (Some(waiting.responder), None)
            }
            Removed::Queued(job) => {
                job.work.fail(&error);
                (job.responder, Some((job.bytes, None)))
            }
            Removed::Parked(Parked { key, job, borrows }) => {
                drop(borrows);
                job.work.fail(&error);
                (job.responder, Some((job.bytes, Some(key))))
            }
        };
        if let Some(responder) = responder {
            responder.complete(Err(error));
        }
        // After the reply, as in `finish`.
        match admitted {
            None => {}
            Some((bytes, None)) => self.lanes.lock().complete(bytes),
            Some((bytes, Some(key))) => self.continue_lane(key, bytes, None),
        }
    }

    fn end(self: &Arc<Self>, error: RpcError) {
        let removed = self.lanes.lock().end(error.clone());
        for removed in removed {
            self.drop_removed(removed, error.clone());
        }
        self.gone.store(true, Ordering::Release);
        let results = self.pipes.lock().drain();
        let objects = self.table.lock().drain();
        let streams = std::mem::take(&mut *self.streams.lock());
        drop_each(results);
        drop_each(objects);
        drop_each(streams);
        // Running requests keep their deadlines.
        self.deadlines.lock().compact();
        let closing = std::mem::take(&mut *self.closing.lock());
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
        let mut closing = self.closing.lock();
        closing.requested = true;
        closing.shutdowns.push(responder);
        drop(closing);
        let closed = RpcError::new(ErrorKind::Closed, "the session was shut down");
        // New requests are refused from now on; admitted and waiting ones continue.
        self.lanes.lock().ended.get_or_insert(closed);
        self.after_completion();
        submission
    }

    /// Admits waiting requests and ends a session that is shutting down. Called after every
    /// completion.
    fn after_completion(self: &Arc<Self>) {
        self.admit_waiting();
        let closing = self.closing.lock().requested;
        if closing && self.lanes.lock().is_quiet() {
            self.end(RpcError::new(ErrorKind::Closed, "the session was shut down"));
        }
    }
}

fn unzip<A, B>((a, b): (A, B)) -> (Option<A>, Option<B>) {
    (Some(a), Some(b))
}

fn cancelled() -> RpcError {
    RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it began")
}

fn deadline_exceeded() -> RpcError {
    RpcError::new(ErrorKind::DeadlineExceeded, "the request's deadline passed")
}

impl Expire for LocalInner {
    fn expire(self: Arc<Self>) {
        let due = self.deadlines.lock().take_due(crate::clock::now(), || self.this.clone());
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
        if let Some(session) = self.0.upgrade() {
            session.remove(id, cancelled());
        }
    }

    fn has_ended(&self) -> bool {
        self.0.upgrade().is_none_or(|session| session.gone.load(Ordering::Acquire))
    }

    fn discard(&self, reply: Value) {
        if let Some(session) = self.0.upgrade() {
            session.free(reply.handles());
        }
    }
}
