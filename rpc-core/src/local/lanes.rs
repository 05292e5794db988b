//! The order of a local session's requests: lanes, and the queue in front of them.
//!
//! This file knows nothing of what a request does. A job is admitted, waits for its lane, and is then given to
//! whoever called with the duty to run the lane on.

use std::collections::{HashMap, HashSet, VecDeque};

use super::Backlog;
use super::threads::{Parked, Threads};
use crate::error::RpcError;
use crate::handle::Handle;
use crate::reply::Responder;
use crate::session::Lane;
use crate::trace::TraceContext;

/// A lane of the session: one that clients name, or one that was made for a single request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LaneKey(u64);

impl LaneKey {
    /// Whether the lane was made for one request.
    pub(super) fn is_single_use(self) -> bool {
        self.0 > u64::from(u32::MAX)
    }

    /// The lane that clients name so; one for a single request has no name.
    pub(super) fn shared(lane: Lane) -> Option<Self> {
        (lane != Lane::CONCURRENT).then_some(Self(u64::from(lane.0)))
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
    pub(super) trace: Option<TraceContext>,
    /// What it counts against the session's capacity.
    pub(super) bytes: usize,
}

impl<W> Job<W> {
    pub(super) fn has_id(&self, id: u64) -> bool {
        self.responder.as_ref().is_some_and(|responder| responder.id() == id)
    }
}

struct LaneState<W> {
    /// Somebody has the duty to run the lane.
    busy: bool,
    queue: VecDeque<Job<W>>,
}

impl<W> Default for LaneState<W> {
    fn default() -> Self {
        Self { busy: false, queue: VecDeque::new() }
    }
}

/// A request that waits for room, as it was submitted.
pub(super) struct Waiting<R> {
    pub(super) request: R,
    pub(super) responder: Responder,
    pub(super) bytes: usize,
}

/// What waits in front of the lanes.
pub(super) enum Front<R> {
    Request(Waiting<R>),
    /// Objects to be freed behind the requests in front, which may use them.
    Release(Vec<Handle>),
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
    waiting: VecDeque<Front<R>>,
    /// The requests among them, and their bytes.
    waiting_requests: usize,
    waiting_bytes: usize,
    /// The handles of all releases that wait: each waits once, so that there are no more of them than objects.
    releasing: HashSet<Handle>,
    /// Lane 0, which nearly everything uses, is not worth a look into the map.
    default: LaneState<W>,
    others: HashMap<LaneKey, LaneState<W>>,
    next_single_use: u64,
    pub(super) threads: Threads<W>,
    pub(super) ended: Option<RpcError>,
}

impl<R, W> Lanes<R, W> {
    pub(super) fn new(capacity: Capacity, threads: Threads<W>) -> Self {
        Self {
            capacity,
            requests: 0,
            bytes: 0,
            waiting: VecDeque::new(),
            waiting_requests: 0,
            waiting_bytes: 0,
            releasing: HashSet::new(),
            default: LaneState::default(),
            others: HashMap::new(),
            next_single_use: u64::from(u32::MAX) + 1,
            threads,
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
        self.waiting_requests += 1;
        self.waiting_bytes += waiting.bytes;
        self.waiting.push_back(Front::Request(waiting));
    }

    /// Queues a release behind the requests that wait. `handles` name objects of the session.
    pub(super) fn release_later(&mut self, handles: impl Iterator<Item = Handle>) {
        let handles = handles.filter(|handle| self.releasing.insert(*handle));
        if let Some(Front::Release(last)) = self.waiting.back_mut() {
            last.extend(handles);
        } else {
            self.waiting.push_back(Front::Release(handles.collect()));
        }
    }

    /// What is next of what waits, if there is room for it now. The caller admits or frees it.
    pub(super) fn next_waiting(&mut self) -> Option<Front<R>> {
        if let Front::Request(waiting) = self.waiting.front()?
            && !self.fits(waiting.bytes)
        {
            return None;
        }
        let next = self.waiting.pop_front();
        match &next {
            Some(Front::Request(waiting)) => {
                self.waiting_requests -= 1;
                self.waiting_bytes -= waiting.bytes;
            }
            Some(Front::Release(handles)) => handles.iter().for_each(|handle| {
                self.releasing.remove(handle);
            }),
            None => {}
        }
        next
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
        // A lane that nobody uses is not remembered, so that a client cannot fill the map.
        if key != LaneKey(0) {
            self.others.remove(&key);
        }
        None
    }

    /// Takes a request that has not begun out of the queues.
    pub(super) fn remove(&mut self, id: u64) -> Option<Removed<R, W>> {
        let is_it = |front: &Front<R>| matches!(front, Front::Request(waiting) if waiting.responder.id() == id);
        if let Some(at) = self.waiting.iter().position(is_it) {
            let Some(Front::Request(waiting)) = self.waiting.remove(at) else { return None };
            self.waiting_requests -= 1;
            self.waiting_bytes -= waiting.bytes;
            return Some(Removed::Waiting(waiting));
        }
        let queues = std::iter::once(&mut self.default).chain(self.others.values_mut()).map(|state| &mut state.queue);
        for queue in queues {
            if let Some(at) = queue.iter().position(|job| job.has_id(id)) {
                return queue.remove(at).map(Removed::Queued);
            }
        }
        self.threads.remove(id).map(Removed::Parked)
    }

    /// Ends everything that has not begun; what runs goes on. The caller completes the requests returned.
    pub(super) fn end(&mut self, error: RpcError) -> Vec<Removed<R, W>> {
        self.ended.get_or_insert(error);
        let waiting = self.waiting.drain(..).filter_map(|front| match front {
            Front::Request(waiting) => Some(Removed::Waiting(waiting)),
            // All objects are freed.
            Front::Release(_) => None,
        });
        let mut removed: Vec<_> = waiting.collect();
        (self.waiting_requests, self.waiting_bytes) = (0, 0);
        self.releasing.clear();
        for state in std::iter::once(&mut self.default).chain(self.others.values_mut()) {
            removed.extend(state.queue.drain(..).map(Removed::Queued));
        }
        removed.extend(self.threads.end().map(Removed::Parked));
        removed
    }

    /// Whether no request is admitted or waiting.
    pub(super) fn is_quiet(&self) -> bool {
        self.requests == 0 && self.waiting.is_empty()
    }

    /// What is admitted and what waits.
    pub(super) fn backlog(&self) -> Backlog {
        Backlog {
            admitted_requests: self.requests,
            admitted_bytes: self.bytes,
            waiting_requests: self.waiting_requests,
            waiting_bytes: self.waiting_bytes,
        }
    }

    /// How many objects wait to be freed, and in how many pieces.
    #[cfg(test)]
    pub(super) fn releasing_len(&self) -> (usize, usize) {
        (self.releasing.len(), self.waiting.iter().filter(|front| matches!(front, Front::Release(_))).count())
    }

    fn state(&mut self, key: LaneKey) -> &mut LaneState<W> {
        if key == LaneKey(0) { &mut self.default } else { self.others.entry(key).or_default() }
    }
}

/// A request that will not run.
pub(super) enum Removed<R, W> {
    Waiting(Waiting<R>),
    Queued(Job<W>),
    /// Its lane is to be gone on with.
    Parked(Parked<W>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_that_were_used_once_are_not_remembered() {
        let mut lanes: Lanes<(), ()> = Lanes::new(Capacity { requests: 8, bytes: 0 }, Threads::new(8, None));
        for number in 1..1000 {
            let job = Job { work: (), responder: None, deadline: None, trace: None, bytes: 0 };
            let Turn::Run(key, _) = lanes.admit(Lane(number), job) else { panic!("lane {number} was not idle") };
            lanes.complete(0);
            assert!(lanes.next(key).is_none());
            assert!(lanes.others.is_empty());
        }
    }
}
