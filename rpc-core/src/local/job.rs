//! Jobs of a local session: requests that have been admitted, and the lanes that they belong to.

use std::time::Instant;

use crate::reply::Responder;
use crate::session::Lane;
use crate::tensor::Borrow;
use crate::trace::TraceContext;

/// A lane of the session: one that clients name, or one that was created for a single request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LaneKey(pub(super) u64);

impl LaneKey {
    /// Returns true if the lane was created for one request.
    pub(super) fn is_single_use(self) -> bool {
        self.0 > u64::from(u32::MAX)
    }

    /// Returns the lane with the client's number; a lane for a single request has no number.
    pub(super) fn shared(lane: Lane) -> Option<Self> {
        (lane != Lane::CONCURRENT).then_some(Self(u64::from(lane.0)))
    }

    /// Returns the lane as functions see it.
    pub(super) fn lane(self) -> Lane {
        u32::try_from(self.0).map_or(Lane::CONCURRENT, Lane)
    }
}

/// An admitted request. `W` is its work.
#[derive(Debug)]
pub(super) struct Job<W> {
    pub(super) work: W,
    /// `None` while the submitter waits on its own thread for the job to run.
    pub(super) responder: Option<Responder>,
    pub(super) deadline: Option<Instant>,
    pub(super) trace: Option<TraceContext>,
    /// Bytes that it counts against the session's capacity.
    pub(super) bytes: usize,
}

impl<W> Job<W> {
    pub(super) fn has_id(&self, id: u64) -> bool {
        self.responder.as_ref().is_some_and(|responder| responder.id() == id)
    }
}

/// A job that waits for a thread. Its lane waits with it.
pub(super) struct Parked<W> {
    pub(super) key: LaneKey,
    pub(super) job: Job<W>,
    /// Borrows of the tensors that it uses.
    pub(super) borrows: Vec<Borrow>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::local::resolve::PinnedOperation;

    #[test]
    fn requests_and_jobs_are_small_enough_to_be_moved_in_registers() {
        assert!(size_of::<crate::Request>() <= 128, "{}", size_of::<crate::Request>());
        assert!(size_of::<Job<PinnedOperation>>() <= 128, "{}", size_of::<Job<PinnedOperation>>());
        assert!(size_of::<crate::Value>() <= 40, "{}", size_of::<crate::Value>());
    }
}
