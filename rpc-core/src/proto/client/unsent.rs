//! Requests of a client that are admitted and have not been sent whole.

use std::collections::BTreeSet;

use crate::proto::id_map::IdMap;

/// Requests that are admitted and have not been sent whole. Most requests are sent at once, and are
/// never among them.
#[derive(Default)]
pub(super) struct Unsent {
    /// Number of the submission of each request.
    by_id: IdMap<u64>,
    submissions: BTreeSet<u64>,
}

impl Unsent {
    pub(super) fn insert(&mut self, id: u64, submission: u64) {
        self.by_id.insert(id, submission);
        self.submissions.insert(submission);
    }

    pub(super) fn remove(&mut self, id: u64) {
        if let Some(submission) = self.by_id.remove(&id) {
            self.submissions.remove(&submission);
        }
    }

    pub(super) fn contains(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Returns the number of the oldest submission.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.submissions.first().copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_id.is_empty()
    }
}
