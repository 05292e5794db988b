//! State of a session: the queue of requests, their deadlines and cancellation, and its end.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rpc_core::limits::MemoryQuota;
use rpc_core::reply::{Outcome, ReplyControl};
use rpc_core::{ErrorKind, Handle, Operation, Request, Responder, RpcError, Submission, Value};
use tokio::sync::Notify;

use super::link::Link;
use super::objects::Objects;
use super::outcomes::Outcomes;
use super::timer::Timer;

/// Longest time for which the end of a session waits until the objects of its callers are freed.
const FAREWELL: Duration = Duration::from_secs(1);

/// Facts about the server, as the handshake has found them.
pub(super) struct ServerFacts {
    pub(super) key: String,
    /// Largest frame of a copy that the server takes.
    pub(super) max_packet: u64,
}

/// State that the callers of a session share with the task that serves them.
pub(super) struct ClientCore {
    /// Address of the server.
    pub(super) peer: String,
    /// Key that the server has told.
    pub(super) key: String,
    /// Largest call, and largest result of one, in bytes.
    pub(super) max_message: u64,
    /// Largest frame of a copy that the server takes.
    pub(super) max_packet: u64,
    /// Memory of all sessions for frames, files and replies.
    pub(super) memory: Arc<MemoryQuota>,
    pub(super) link: Link,
    pub(super) objects: Mutex<Objects>,
    pub(super) outcomes: Outcomes,
    queue: Mutex<Queue>,
    /// Wakes the executor.
    queued: Notify,
    timer: Timer,
    /// Wakes those who watch callers, when one has got its outcome or is gone.
    gone: Notify,
    next_id: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<(u64, Operation)>,
    /// Requests without an outcome.
    live: HashMap<u64, Live>,
    deadlines: BTreeSet<(Instant, u64)>,
    end_watchers: Vec<Responder>,
    /// True once the session is dropped.
    is_dropped: bool,
    ended: Option<RpcError>,
}

struct Live {
    responder: Responder,
    deadline: Option<Instant>,
    has_begun: bool,
    /// True once the caller has given the request up.
    is_cancelled: bool,
}

impl ReplyControl for ClientCore {
    fn cancel(&self, id: u64) {
        let mut queue = self.queue.lock();
        let Some(at) = queue.waiting.iter().position(|(waiting, _)| *waiting == id) else {
            if let Some(live) = queue.live.get_mut(&id) {
                live.is_cancelled = true;
                self.gone.notify_waiters();
            }
            return;
        };
        let operation = queue.waiting.remove(at);
        let live = queue.forget(id);
        drop(queue);
        self.gone.notify_waiters();
        drop(operation);
        if let Some(live) = live {
            let error = RpcError::new(ErrorKind::Cancelled, "the request was cancelled");
            self.outcomes.complete(live.responder, Err(error));
        }
    }

    fn discard(&self, reply: Value) {
        self.release(reply.handles());
    }

    fn has_ended(&self) -> bool {
        self.queue.lock().ended.is_some()
    }
}

impl ClientCore {
    pub(super) fn new(
        peer: String,
        server: ServerFacts,
        max_message: u64,
        memory: Arc<MemoryQuota>,
        link: Link,
        objects: Objects,
        outcomes: Outcomes,
    ) -> Self {
        let ServerFacts { key, max_packet } = server;
        Self {
            peer,
            key,
            max_message,
            max_packet,
            memory,
            link,
            objects: Mutex::new(objects),
            outcomes,
            queue: Mutex::default(),
            queued: Notify::new(),
            timer: Timer::default(),
            gone: Notify::new(),
            next_id: AtomicU64::new(1),
        }
    }

    /// Queues a request.
    pub(super) fn submit(self: &Arc<Self>, request: Request) -> Submission {
        if let Operation::Release { handles } = request.operation {
            self.release(handles);
            return Submission::ready(Ok(Value::Null));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (submission, responder) = Submission::pending(self.clone(), id);
        if let Err((responder, error)) = self.enqueue(id, request, responder) {
            responder.complete(Err(error));
        }
        submission
    }

    /// Queues a request, which is no release, under an id of the caller's.
    ///
    /// # Errors
    ///
    /// The error with which the session has ended; a request whose result is to be kept.
    pub(super) fn enqueue(&self, id: u64, request: Request, responder: Responder) -> Result<(), (Responder, RpcError)> {
        if request.pipe.is_some() {
            let text = "TVM's protocol keeps no results for later requests: await each one, and pass it on";
            return Err((responder, RpcError::unsupported(text)));
        }
        let mut queue = self.queue.lock();
        if let Some(error) = queue.ended.clone() {
            return Err((responder, error));
        }
        queue.waiting.push_back((id, request.operation));
        let live = Live { responder, deadline: request.deadline, has_begun: false, is_cancelled: false };
        queue.live.insert(id, live);
        if let Some(deadline) = request.deadline {
            queue.deadlines.insert((deadline, id));
        }
        drop(queue);
        self.queued.notify_one();
        if request.deadline.is_some() {
            self.timer.notify();
        }
        Ok(())
    }

    /// Returns the end of the session, as an outcome.
    pub(super) fn ended(self: &Arc<Self>) -> Submission {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (submission, responder) = Submission::pending(self.clone(), id);
        let mut queue = self.queue.lock();
        match queue.ended.clone() {
            Some(error) => {
                drop(queue);
                responder.complete(Err(error));
            }
            None => {
                // Callers that are gone need not be told.
                queue.end_watchers.retain(|watcher| !watcher.is_complete());
                queue.end_watchers.push(responder);
            }
        }
        submission
    }

    /// Notes that the session is dropped: it ends after the requests before that.
    pub(super) fn abandon(&self) {
        self.queue.lock().is_dropped = true;
        self.queued.notify_one();
        self.gone.notify_waiters();
    }

    /// Frees objects behind all requests that wait already.
    pub(super) fn release(&self, handles: Vec<Handle>) {
        // Each object is queued once at most, so that the queue is bounded by the objects.
        let handles = self.objects.lock().mark_released(handles);
        if handles.is_empty() {
            return;
        }
        let mut queue = self.queue.lock();
        if queue.ended.is_none() {
            queue.waiting.push_back((0, Operation::Release { handles }));
            drop(queue);
            self.queued.notify_one();
        }
    }

    /// Waits for the next request. Returns `None` once the session is dropped and all requests
    /// before that have been taken.
    pub(super) async fn next(&self) -> Option<(u64, Operation)> {
        loop {
            let (queued, gone) = (self.queued.notified(), self.gone.notified());
            let (is_empty, shutdown) = {
                let mut queue = self.queue.lock();
                if queue.waiting.is_empty() && queue.is_dropped {
                    return None;
                }
                let shutdown = queue.awaited_shutdown();
                if shutdown == Some(0) {
                    // It knows how long to wait for what is unanswered.
                    return queue.waiting.pop_front();
                }
                (queue.waiting.is_empty(), shutdown)
            };
            if is_empty {
                queued.await;
                continue;
            }
            let limit = if shutdown.is_some() { FAREWELL } else { Duration::MAX };
            // A request that waits for room can be cancelled.
            tokio::select! {
                biased;
                () = self.link.room(0) => {
                    let next = self.queue.lock().waiting.pop_front();
                    if next.is_some() {
                        return next;
                    }
                }
                () = gone => {}
                // It may be the shutdown.
                () = queued => {}
                () = self.timer.sleep(limit) => {
                    // Objects that are not freed end with the session.
                    let mut queue = self.queue.lock();
                    if let Some(at) = queue.awaited_shutdown() {
                        return queue.waiting.remove(at);
                    }
                }
            }
        }
    }

    /// Admits a request. Returns false if its caller has given it up.
    pub(super) fn begin(&self, id: u64) -> bool {
        let mut queue = self.queue.lock();
        let Some(live) = queue.live.get_mut(&id) else { return false };
        live.has_begun = true;
        let responder = live.responder.clone();
        drop(queue);
        self.outcomes.admit(responder);
        true
    }

    /// Waits until a frame of `len` bytes may be sent for a request.
    ///
    /// # Errors
    ///
    /// Nobody waits for the request any more.
    pub(super) async fn room(&self, id: u64, len: u64) -> Result<(), RpcError> {
        loop {
            let gone = self.gone.notified();
            let is_wanted = self.queue.lock().live.get(&id).is_some_and(|live| !live.is_cancelled);
            if !is_wanted {
                return Err(RpcError::new(ErrorKind::Cancelled, "the request was cancelled"));
            }
            tokio::select! {
                biased;
                () = self.link.room(len) => return Ok(()),
                () = gone => {}
            }
        }
    }

    /// Completes a request. Objects in an outcome that nobody takes are freed.
    pub(super) fn complete(&self, id: u64, outcome: Outcome) {
        let live = self.queue.lock().forget(id);
        self.gone.notify_waiters();
        match (live, outcome) {
            (Some(live), outcome) => {
                let with_peer = |error: RpcError| error.with_peer(&*self.peer);
                self.outcomes.complete(live.responder, outcome.map_err(with_peer));
            }
            (None, Ok(value)) => self.discard(value),
            (None, Err(_)) => {}
        }
    }

    /// Tells callers whose deadlines have passed.
    fn expire(&self, now: Instant) {
        let mut queue = self.queue.lock();
        let mut expired = Vec::new();
        while let Some(&(deadline, id)) = queue.deadlines.first()
            && deadline <= now
        {
            queue.waiting.retain(|(waiting, _)| *waiting != id);
            let live = queue.forget(id);
            queue.deadlines.remove(&(deadline, id));
            expired.extend(live);
        }
        drop(queue);
        if expired.is_empty() {
            return;
        }
        self.gone.notify_waiters();
        for live in expired {
            let error = RpcError::new(ErrorKind::DeadlineExceeded, "the deadline of the request has passed");
            self.outcomes.complete(live.responder, Err(error.may_have_run(live.has_begun)));
        }
    }

    /// Returns the time when [`handle_timeout`](Self::handle_timeout) must be called next.
    pub(super) fn poll_timeout(&self) -> Option<Instant> {
        let deadline = self.queue.lock().deadlines.first().map(|(deadline, _)| *deadline);
        deadline.into_iter().chain(self.timer.next()).min()
    }

    /// Handles the passage of time: deadlines, and time limits of steps.
    pub(super) fn handle_timeout(&self, now: Instant) {
        self.expire(now);
        self.timer.pass(now);
    }

    /// Handles the passage of time as it goes by.
    pub(super) async fn watch_time(&self) -> RpcError {
        loop {
            let earlier = self.timer.earlier();
            match self.poll_timeout() {
                None => earlier.await,
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(at.into()) => self.handle_timeout(Instant::now()),
                    () = earlier => {}
                },
            }
        }
    }

    /// Returns true if no request waits for its outcome.
    pub(super) fn is_quiet(&self) -> bool {
        self.queue.lock().live.is_empty()
    }

    /// Waits until the session is dropped and no caller waits for a reply. The connection then is
    /// to end, though the server may still run a function: nothing else stops that.
    pub(super) async fn abandoned(&self) {
        loop {
            let gone = self.gone.notified();
            let (is_abandoned, is_idle) = {
                let queue = self.queue.lock();
                (queue.is_abandoned(), queue.live.is_empty())
            };
            if is_abandoned {
                // The executor ends the session by itself once all objects are freed.
                if is_idle {
                    self.timer.sleep(FAREWELL).await;
                }
                return;
            }
            gone.await;
        }
    }

    /// Waits until all requests before the shutdown `id` are answered; of those that nobody waits
    /// for, as a call whose deadline has passed, for a moment only.
    pub(super) async fn settled(&self, id: u64) {
        loop {
            let gone = self.gone.notified();
            if self.queue.lock().live.keys().all(|live| *live == id) {
                tokio::select! {
                    () = self.link.answered() => {}
                    () = self.timer.sleep(FAREWELL) => {}
                }
                return;
            }
            tokio::select! {
                () = self.link.answered() => return,
                () = gone => {}
            }
        }
    }

    /// Tells all callers that the session has ended with `error`.
    pub(super) fn tell(&self, error: &RpcError) {
        let mut queue = self.queue.lock();
        queue.ended = Some(error.clone());
        let waiting = std::mem::take(&mut queue.waiting);
        let live = std::mem::take(&mut queue.live);
        let watchers = std::mem::take(&mut queue.end_watchers);
        queue.deadlines.clear();
        drop(queue);
        drop(waiting);
        for live in live.into_values() {
            self.outcomes.complete(live.responder, Err(error.clone().may_have_run(live.has_begun)));
        }
        for watcher in watchers {
            watcher.complete(Err(error.clone()));
        }
        drop(self.objects.lock().drain());
    }
}

impl Queue {
    /// Returns the place of a shutdown among the requests that wait, if objects alone are to be
    /// freed before it, and nobody waits for anything else.
    fn awaited_shutdown(&self) -> Option<usize> {
        let is_release = |operation: &Operation| matches!(operation, Operation::Release { .. });
        let at = self.waiting.iter().position(|(_, operation)| !is_release(operation))?;
        let (id, operation) = &self.waiting[at];
        let is_awaited = matches!(operation, Operation::Shutdown) && self.live.keys().all(|live| live == id);
        is_awaited.then_some(at)
    }

    fn is_abandoned(&self) -> bool {
        self.is_dropped && self.live.values().all(|live| live.is_cancelled)
    }

    /// Removes a request that has its outcome.
    fn forget(&mut self, id: u64) -> Option<Live> {
        let live = self.live.remove(&id)?;
        if let Some(deadline) = live.deadline {
            self.deadlines.remove(&(deadline, id));
        }
        Some(live)
    }
}

/// Returns the error of a session that this side has ended.
pub(super) fn closed() -> RpcError {
    RpcError::new(ErrorKind::Closed, "the session was shut down")
}
