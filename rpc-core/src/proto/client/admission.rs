//! Requests of a client that wait for credit, and the order in which they get it.

use std::collections::{BTreeMap, BTreeSet};

use crate::proto::credit_frame::cost;
use crate::proto::id_map::IdMap;
use crate::proto::output::Message;
use crate::session::{Lane, ReadBuffer};

/// A request that waits for credit.
pub(super) struct QueuedRequest<T> {
    pub(super) id: u64,
    /// Number of the submission. Later ones have larger numbers.
    pub(super) submission: u64,
    pub(super) token: T,
    pub(super) lane: Lane,
    pub(super) message: Message,
    pub(super) into: Option<ReadBuffer>,
}

impl<T> QueuedRequest<T> {
    fn needs_bytes(&self) -> bool {
        cost(self.message.size) > 0
    }
}

/// The requests that wait for credit.
///
/// Only the first request of each lane is a candidate. Credit in bytes goes to the oldest candidate
/// that needs some: the others wait until it has enough, however little they need, so that a large
/// request does not starve behind small ones. Candidates that need none pass it, since the number
/// of requests is all that they wait for. Every operation takes logarithmic time.
pub(super) struct AdmissionQueue<T> {
    /// All waiting requests by submission.
    requests: BTreeMap<u64, QueuedRequest<T>>,
    /// Submission of each waiting request.
    by_id: IdMap<u64>,
    /// Lane and submission of each waiting request, except the concurrent ones.
    by_lane: BTreeSet<(u32, u64)>,
    /// Submissions of the candidates that need credit in bytes.
    need_bytes: BTreeSet<u64>,
    /// Submissions of the other candidates.
    need_no_bytes: BTreeSet<u64>,
}

impl<T> Default for AdmissionQueue<T> {
    fn default() -> Self {
        Self {
            requests: BTreeMap::new(),
            by_id: IdMap::default(),
            by_lane: BTreeSet::new(),
            need_bytes: BTreeSet::new(),
            need_no_bytes: BTreeSet::new(),
        }
    }
}

impl<T> AdmissionQueue<T> {
    /// Queues a request, which is the latest submission.
    pub(super) fn push(&mut self, request: QueuedRequest<T>) {
        let (submission, lane) = (request.submission, request.lane);
        let is_candidate = !self.has_lane(lane);
        self.by_id.insert(request.id, submission);
        if lane != Lane::CONCURRENT {
            self.by_lane.insert((lane.0, submission));
        }
        if is_candidate {
            self.candidates(request.needs_bytes()).insert(submission);
        }
        self.requests.insert(submission, request);
    }

    /// Removes the request that is admitted next, if `window` bytes of credit are enough for one.
    /// There must be room for one more request.
    pub(super) fn next(&mut self, window: u64) -> Option<QueuedRequest<T>> {
        let enough =
            |submission: &u64| self.requests.get(submission).is_some_and(|first| cost(first.message.size) <= window);
        let large = self.need_bytes.first().filter(|first| enough(first));
        let next = *large.into_iter().chain(self.need_no_bytes.first()).min()?;
        self.take(next)
    }

    /// Removes a request by its id.
    pub(super) fn remove(&mut self, id: u64) -> Option<QueuedRequest<T>> {
        let submission = *self.by_id.get(&id)?;
        self.take(submission)
    }

    /// Removes all requests, the oldest first.
    pub(super) fn take_all(&mut self) -> impl Iterator<Item = QueuedRequest<T>> {
        std::mem::take(self).requests.into_values()
    }

    /// Returns true if a request must queue behind others, even if there is enough credit for it.
    pub(super) fn is_behind(&self, lane: Lane, message: &Message) -> bool {
        self.has_lane(lane) || (cost(message.size) > 0 && !self.need_bytes.is_empty())
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Returns the number of the oldest submission.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.requests.first_key_value().map(|(submission, _)| *submission)
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    fn take(&mut self, submission: u64) -> Option<QueuedRequest<T>> {
        let request = self.requests.remove(&submission)?;
        self.by_id.remove(&request.id);
        let was_candidate = self.candidates(request.needs_bytes()).remove(&submission);
        if request.lane != Lane::CONCURRENT {
            self.by_lane.remove(&(request.lane.0, submission));
            if was_candidate
                && let Some(next) = self.first_of(request.lane)
                && let Some(needs_bytes) = self.requests.get(&next).map(QueuedRequest::needs_bytes)
            {
                self.candidates(needs_bytes).insert(next);
            }
        }
        Some(request)
    }

    fn has_lane(&self, lane: Lane) -> bool {
        lane != Lane::CONCURRENT && self.first_of(lane).is_some()
    }

    fn first_of(&self, lane: Lane) -> Option<u64> {
        self.by_lane.range((lane.0, 0)..=(lane.0, u64::MAX)).next().map(|(_, submission)| *submission)
    }

    fn candidates(&mut self, need_bytes: bool) -> &mut BTreeSet<u64> {
        if need_bytes { &mut self.need_bytes } else { &mut self.need_no_bytes }
    }
}
