//! The order of a local session's requests: lanes, the queue in front of them, and the threads behind them.
//!
//! This file knows nothing of what a request does. A job is admitted, waits for its lane, and is then given to
//! whoever called with the duty to run the lane on.

use std::collections::{HashMap, VecDeque};

use super::thread::LaneThread;
use crate::error::RpcError;
use crate::reply::Responder;
use crate::session::Lane;

/// A lane of the session: one that clients name, or one that was made for a single request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LaneKey(u64);

impl LaneKey {
    /// Whether the lane was made for one request.
    pub(super) fn is_single_use(self) -> bool {
        self.0 > u64::from(u32::MAX)
    }

    /// What functions see as their lane.
    pub(super) fn lane(self) -> Lane {
        u32::try_from(self.0).map_or(Lane::CONCURRENT, Lane)
    }
}

/// How much a session takes before admission has to wait.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    pub(super) requests: usize,
    pub(super) bytes: usize,
}

/// A request that has been admitted; `W` is what it does.
#[derive(Debug)]
pub(super) struct Job<W> {
    pub(super) work: W,
    /// Absent while the submitter waits for the job to run where it stands.
    pub(super) responder: Option<Responder>,
    pub(super) deadline: Option<std::time::Instant>,
    /// What it counts against the session's capacity.
    pub(super) bytes: usize,
}

impl<W> Job<W> {
    fn has_id(&self, id: u64) -> bool {
        self.responder.as_ref().is_some_and(|responder| responder.id() == id)
    }
}

/// An idle lane keeps its thread for itself while there are no more lanes than this; beyond, any lane may have it.
const KEPT_LANES: usize = 64;

struct LaneState<W> {
    /// Somebody has the duty to run the lane.
    busy: bool,
    queue: VecDeque<Job<W>>,
    thread: Option<LaneThread>,
}

impl<W> Default for LaneState<W> {
    fn default() -> Self {
        Self { busy: false, queue: VecDeque::new(), thread: None }
    }
}

/// A request that waits for room, as it was submitted.
pub(super) struct Waiting<R> {
    pub(super) request: R,
    pub(super) responder: Responder,
    pub(super) bytes: usize,
}

/// What to do with a job that was just admitted.
pub(super) enum Turn<W> {
    /// The caller runs it, and then the lane.
    Run(LaneKey, Job<W>),
    /// It waits for others of its lane.
    Queued,
}

/// All lanes of a session. `R` is a request as submitted, `W` one that has been admitted.
pub(super) struct Lanes<R, W> {
    capacity: Capacity,
    requests: usize,
    bytes: usize,
    /// In the order of submission. Not empty only while there is no room.
    waiting: VecDeque<Waiting<R>>,
    /// Lane 0, which nearly everything uses, is not worth a look into the map.
    default: LaneState<W>,
    others: HashMap<LaneKey, LaneState<W>>,
    next_single_use: u64,
    /// Threads of lanes that are gone, for the next lane that needs one.
    idle_threads: Vec<LaneThread>,
    pub(super) ended: Option<RpcError>,
}

impl<R, W> Lanes<R, W> {
    pub(super) fn new(capacity: Capacity) -> Self {
        Self {
            capacity,
            requests: 0,
            bytes: 0,
            waiting: VecDeque::new(),
            default: LaneState::default(),
            others: HashMap::new(),
            next_single_use: u64::from(u32::MAX) + 1,
            idle_threads: Vec::new(),
            ended: None,
        }
    }

    /// Whether a request of `bytes` can be admitted now. One that is larger than the whole capacity is admitted alone.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.waiting.is_empty() && self.fits(bytes)
    }

    fn fits(&self, bytes: usize) -> bool {
        self.requests < self.capacity.requests
            && (self.bytes == 0 || self.bytes.saturating_add(bytes) <= self.capacity.bytes)
    }

    /// Whether requests wait for room.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Queues a request for which there is no room.
    pub(super) fn wait(&mut self, waiting: Waiting<R>) {
        self.waiting.push_back(waiting);
    }

    /// The next waiting request, if there is room for it now. The caller admits it.
    pub(super) fn next_waiting(&mut self) -> Option<Waiting<R>> {
        let bytes = self.waiting.front()?.bytes;
        if self.fits(bytes) { self.waiting.pop_front() } else { None }
    }

    /// Whether a job of `lane` would run at once.
    pub(super) fn is_idle(&self, lane: Lane) -> bool {
        match lane {
            Lane::DEFAULT => !self.default.busy,
            Lane::CONCURRENT => true,
            Lane(number) => self.others.get(&LaneKey(number.into())).is_none_or(|state| !state.busy),
        }
    }

    /// Gives `job` its place in `lane`.
    pub(super) fn admit(&mut self, lane: Lane, job: Job<W>) -> Turn<W> {
        self.requests += 1;
        self.bytes += job.bytes;
        let key = match lane {
            Lane::CONCURRENT => {
                self.next_single_use += 1;
                LaneKey(self.next_single_use)
            }
            Lane(number) => LaneKey(number.into()),
        };
        let state = self.state(key);
        if state.busy {
            state.queue.push_back(job);
            Turn::Queued
        } else {
            state.busy = true;
            Turn::Run(key, job)
        }
    }

    /// Counts a job as complete.
    pub(super) fn complete(&mut self, bytes: usize) {
        self.requests -= 1;
        self.bytes -= bytes;
    }

    /// The next job of a lane whose last one is complete, or the end of the caller's duty.
    pub(super) fn next(&mut self, key: LaneKey) -> Option<Job<W>> {
        let state = self.state(key);
        if let Some(job) = state.queue.pop_front() {
            return Some(job);
        }
        state.busy = false;
        // Only what is worth remembering is kept, so that a client cannot fill the map with idle lanes.
        let forget = key.is_single_use() || state.thread.as_ref().is_none_or(LaneThread::is_retired);
        if key != LaneKey(0) && (forget || self.others.len() > KEPT_LANES) {
            let thread = self.others.remove(&key).and_then(|state| state.thread);
            self.idle_threads.extend(thread);
        }
        None
    }

    /// The thread of a lane, if it has one, or an idle one, which becomes the lane's.
    pub(super) fn thread(&mut self, key: LaneKey) -> Option<LaneThread> {
        if let Some(thread) = self.state(key).thread.clone().filter(|thread| !thread.is_retired()) {
            return Some(thread);
        }
        self.idle_threads.retain(|thread| !thread.is_retired());
        let thread = self.idle_threads.pop()?;
        self.state(key).thread = Some(thread.clone());
        Some(thread)
    }

    /// Makes `thread` that of a lane.
    pub(super) fn set_thread(&mut self, key: LaneKey, thread: LaneThread) {
        self.state(key).thread = Some(thread);
    }

    /// Takes a request that has not begun out of the queues.
    pub(super) fn remove(&mut self, id: u64) -> Option<Removed<R, W>> {
        if let Some(at) = self.waiting.iter().position(|waiting| waiting.responder.id() == id) {
            return self.waiting.remove(at).map(Removed::Waiting);
        }
        let queues = std::iter::once(&mut self.default).chain(self.others.values_mut()).map(|state| &mut state.queue);
        for queue in queues {
            if let Some(at) = queue.iter().position(|job| job.has_id(id)) {
                return queue.remove(at).map(Removed::Queued);
            }
        }
        None
    }

    /// Ends everything that has not begun; what runs goes on. The caller completes the requests returned.
    pub(super) fn end(&mut self, error: RpcError) -> Vec<Removed<R, W>> {
        self.ended.get_or_insert(error);
        let mut removed: Vec<_> = self.waiting.drain(..).map(Removed::Waiting).collect();
        for state in std::iter::once(&mut self.default).chain(self.others.values_mut()) {
            removed.extend(state.queue.drain(..).map(Removed::Queued));
            if let Some(thread) = &state.thread {
                thread.retire();
            }
        }
        self.idle_threads.drain(..).for_each(|thread| thread.retire());
        removed
    }

    /// Whether no request is admitted or waiting.
    pub(super) fn is_quiet(&self) -> bool {
        self.requests == 0 && self.waiting.is_empty()
    }

    fn state(&mut self, key: LaneKey) -> &mut LaneState<W> {
        if key == LaneKey(0) { &mut self.default } else { self.others.entry(key).or_default() }
    }
}

/// A request that will not run.
pub(super) enum Removed<R, W> {
    Waiting(Waiting<R>),
    Queued(Job<W>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_were_used_once_are_not_remembered() {
        let mut lanes: Lanes<(), ()> = Lanes::new(Capacity { requests: 8, bytes: 0 });
        for number in 1..1000 {
            let job = Job { work: (), responder: None, deadline: None, bytes: 0 };
            let Turn::Run(key, _) = lanes.admit(Lane(number), job) else { panic!("lane {number} was not idle") };
            if lanes.thread(key).is_none() {
                lanes.set_thread(key, LaneThread::spawn().unwrap());
            }
            lanes.complete(0);
            assert!(lanes.next(key).is_none());
            assert!(lanes.others.len() <= KEPT_LANES && lanes.idle_threads.len() <= 1);
        }
        lanes.end(RpcError::internal("over"));
    }
}
