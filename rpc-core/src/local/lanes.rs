//! Lanes of a local session: the order of its requests, and the queue in front of them.
//!
//! This file does not know the work of a request. A job is admitted, waits for its lane, and is
//! then returned to the caller, which must then keep running the lane.

use std::collections::{HashMap, HashSet, VecDeque};

use super::job::{Job, LaneKey, Parked};
use super::threads::Threads;
use crate::error::RpcError;
use crate::handle::Handle;
use crate::reply::Responder;
use crate::session::Lane;

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

/// Limits above which requests wait for admission.
#[derive(Clone, Copy, Debug)]
pub(super) struct Capacity {
    pub(super) requests: usize,
    pub(super) bytes: usize,
}

struct LaneState<W> {
    /// True while a caller is responsible for running the lane.
    busy: bool,
    queue: VecDeque<Job<W>>,
}

impl<W> Default for LaneState<W> {
    fn default() -> Self {
        Self { busy: false, queue: VecDeque::new() }
    }
}

/// A submitted request that waits for admission.
pub(super) struct WaitingRequest<R> {
    pub(super) request: R,
    pub(super) responder: Responder,
    pub(super) bytes: usize,
}

/// Entry of the queue in front of the lanes.
pub(super) enum QueueEntry<R> {
    Request(WaitingRequest<R>),
    /// Objects to be freed after the requests before it, which may use them.
    Release(Vec<Handle>),
}

/// A job that was just admitted: to be run now, or queued behind others.
pub(super) enum AdmittedJob<W> {
    /// The caller runs it, and then the lane.
    Run(LaneKey, Job<W>),
    /// The job waits for others of its lane.
    Queued,
}

/// All lanes of a session. `R` is a request as submitted, `W` the work of an admitted one.
pub(super) struct Lanes<R, W> {
    capacity: Capacity,
    requests: usize,
    bytes: usize,
    /// Requests that wait for admission, in the order of submission. Empty as long as there is
    /// room.
    waiting: VecDeque<QueueEntry<R>>,
    /// Number of requests in `waiting`; their bytes follow.
    waiting_requests: usize,
    waiting_bytes: usize,
    /// Handles of all queued releases. Each is queued once, so that there are no more of them than
    /// objects.
    releasing: HashSet<Handle>,
    /// Lane 0, which nearly all requests use, kept out of the map.
    default: LaneState<W>,
    others: HashMap<LaneKey, LaneState<W>>,
    next_single_use: u64,
    /// Jobs that wait until another session has released a device.
    waiting_for_devices: Vec<Parked<W>>,
    pub(super) threads: Threads<W>,
    /// True once [`end`](Self::end) has been called.
    is_over: bool,
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
            waiting_for_devices: Vec::new(),
            threads,
            is_over: false,
            ended: None,
        }
    }

    /// Returns true if a request of `bytes` can be admitted now. One that is larger than the whole
    /// capacity is admitted alone.
    pub(super) fn has_room(&self, bytes: usize) -> bool {
        self.waiting.is_empty() && self.fits(bytes)
    }

    fn fits(&self, bytes: usize) -> bool {
        self.requests < self.capacity.requests
            && (self.bytes == 0 || self.bytes.saturating_add(bytes) <= self.capacity.bytes)
    }

    /// Returns true if requests wait for admission.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Queues a request for which there is no room.
    pub(super) fn wait(&mut self, waiting: WaitingRequest<R>) {
        self.waiting_requests += 1;
        self.waiting_bytes += waiting.bytes;
        self.waiting.push_back(QueueEntry::Request(waiting));
    }

    /// Queues a release behind the waiting requests. `handles` name objects of the session.
    pub(super) fn release_later(&mut self, handles: impl Iterator<Item = Handle>) {
        let handles = handles.filter(|handle| self.releasing.insert(*handle));
        if let Some(QueueEntry::Release(last)) = self.waiting.back_mut() {
            last.extend(handles);
        } else {
            self.waiting.push_back(QueueEntry::Release(handles.collect()));
        }
    }

    /// Removes the next queue entry, if there is room for it now. The caller admits or frees it.
    pub(super) fn next_waiting(&mut self) -> Option<QueueEntry<R>> {
        if let QueueEntry::Request(waiting) = self.waiting.front()?
            && !self.fits(waiting.bytes)
        {
            return None;
        }
        let next = self.waiting.pop_front();
        match &next {
            Some(QueueEntry::Request(waiting)) => {
                self.waiting_requests -= 1;
                self.waiting_bytes -= waiting.bytes;
            }
            Some(QueueEntry::Release(handles)) => handles.iter().for_each(|handle| {
                self.releasing.remove(handle);
            }),
            None => {}
        }
        next
    }

    /// Returns true if a job of `lane` would run at once.
    pub(super) fn is_idle(&self, lane: Lane) -> bool {
        match lane {
            Lane::DEFAULT => !self.default.busy,
            Lane::CONCURRENT => true,
            Lane(number) => self.others.get(&LaneKey(number.into())).is_none_or(|state| !state.busy),
        }
    }

    /// Admits `job` to `lane`.
    pub(super) fn admit(&mut self, lane: Lane, job: Job<W>) -> AdmittedJob<W> {
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
            AdmittedJob::Queued
        } else {
            state.busy = true;
            AdmittedJob::Run(key, job)
        }
    }

    /// Counts a job as complete.
    pub(super) fn complete(&mut self, bytes: usize) {
        self.requests -= 1;
        self.bytes -= bytes;
    }

    /// Returns the next job of a lane whose last one is complete. `None` ends the caller's
    /// responsibility for the lane.
    pub(super) fn next(&mut self, key: LaneKey) -> Option<Job<W>> {
        let state = self.state(key);
        if let Some(job) = state.queue.pop_front() {
            return Some(job);
        }
        state.busy = false;
        // An unused lane is removed from the map, so that a client cannot fill it.
        if key != LaneKey(0) {
            self.others.remove(&key);
        }
        None
    }

    /// Returns true once [`end`](Self::end) has been called.
    pub(super) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Keeps a job whose device another session has for itself. Its lane waits with it.
    pub(super) fn wait_for_devices(&mut self, parked: Parked<W>) {
        self.waiting_for_devices.push(parked);
    }

    /// Removes the jobs that wait for devices. The caller runs them.
    pub(super) fn take_waiting_for_devices(&mut self) -> Vec<Parked<W>> {
        std::mem::take(&mut self.waiting_for_devices)
    }

    /// Removes a request that has not begun from the queues.
    pub(super) fn remove(&mut self, id: u64) -> Option<Removed<R, W>> {
        let is_it =
            |front: &QueueEntry<R>| matches!(front, QueueEntry::Request(waiting) if waiting.responder.id() == id);
        if let Some(at) = self.waiting.iter().position(is_it) {
            let Some(QueueEntry::Request(waiting)) = self.waiting.remove(at) else { return None };
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
        if let Some(at) = self.waiting_for_devices.iter().position(|parked| parked.job.has_id(id)) {
            return Some(Removed::Parked(self.waiting_for_devices.swap_remove(at)));
        }
        self.threads.remove(id).map(Removed::Parked)
    }

    /// Ends every request that has not begun; running ones continue. The caller completes the
    /// requests returned.
    pub(super) fn end(&mut self, error: RpcError) -> Vec<Removed<R, W>> {
        self.ended.get_or_insert(error);
        self.is_over = true;
        let waiting = self.waiting.drain(..).filter_map(|front| match front {
            QueueEntry::Request(waiting) => Some(Removed::Waiting(waiting)),
            // The end of the session frees all objects.
            QueueEntry::Release(_) => None,
        });
        let mut removed: Vec<_> = waiting.collect();
        (self.waiting_requests, self.waiting_bytes) = (0, 0);
        self.releasing.clear();
        for state in std::iter::once(&mut self.default).chain(self.others.values_mut()) {
            removed.extend(state.queue.drain(..).map(Removed::Queued));
        }
        removed.extend(self.take_waiting_for_devices().into_iter().map(Removed::Parked));
        removed.extend(self.threads.end().map(Removed::Parked));
        removed
    }

    /// Returns true if no request is admitted or waiting.
    pub(super) fn is_quiet(&self) -> bool {
        self.requests == 0 && self.waiting.is_empty()
    }

    /// Returns the numbers of admitted and waiting requests, and their bytes.
    pub(super) fn backlog(&self) -> Backlog {
        Backlog {
            admitted_requests: self.requests,
            admitted_bytes: self.bytes,
            waiting_requests: self.waiting_requests,
            waiting_bytes: self.waiting_bytes,
        }
    }

    /// Returns the number of objects that wait to be freed, and of their queue entries.
    #[cfg(test)]
    pub(super) fn releasing_len(&self) -> (usize, usize) {
        (self.releasing.len(), self.waiting.iter().filter(|front| matches!(front, QueueEntry::Release(_))).count())
    }

    fn state(&mut self, key: LaneKey) -> &mut LaneState<W> {
        if key == LaneKey(0) { &mut self.default } else { self.others.entry(key).or_default() }
    }
}

/// A request that will not run.
pub(super) enum Removed<R, W> {
    Waiting(WaitingRequest<R>),
    Queued(Job<W>),
    /// Its lane must be continued by the caller.
    Parked(Parked<W>),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_lanes_are_removed_from_the_map() {
        let mut lanes: Lanes<(), ()> = Lanes::new(Capacity { requests: 8, bytes: 0 }, Threads::new(8, None));
        for number in 1..1000 {
            let job = Job { work: (), responder: None, deadline: None, trace: None, bytes: 0 };
            let AdmittedJob::Run(key, _) = lanes.admit(Lane(number), job) else { panic!("lane {number} was not idle") };
            lanes.complete(0);
            assert!(lanes.next(key).is_none());
            assert!(lanes.others.is_empty());
        }
    }
}
