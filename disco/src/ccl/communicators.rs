//! The communicators of one worker, and its time limits for collectives.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ccl, Control};
use crate::options::Options;

/// Time limits of workers that wait for each other.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct CollectiveTimeouts {
    pub(crate) entry: Option<Duration>,
    pub(crate) stall: Duration,
    pub(crate) join: Duration,
    /// Time for reaching another worker directly, before its data is relayed.
    pub(crate) direct: Duration,
}

impl CollectiveTimeouts {
    pub(crate) fn of(options: &Options) -> Self {
        let Options { collective_timeout, stall_timeout, init_timeout, direct_timeout, .. } = options;
        Self { entry: *collective_timeout, stall: *stall_timeout, join: *init_timeout, direct: *direct_timeout }
    }

    /// Returns these limits, none of them beyond [`LONGEST`] and [`LONGEST_JOIN`]: they come from a
    /// peer, and times are computed from them.
    pub(crate) fn bounded(self) -> Self {
        let bounded = |limit: Duration| limit.min(LONGEST);
        let (entry, stall) = (self.entry.map(bounded), bounded(self.stall));
        Self { entry, stall, join: self.join.min(LONGEST_JOIN), direct: self.direct.min(LONGEST_JOIN) }
    }
}

/// Longest time limit: far more than a session lasts, and far from what clocks cannot express.
const LONGEST: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Longest time for joining, in which a worker does nothing else.
const LONGEST_JOIN: Duration = Duration::from_secs(3600);

/// The communicators of one worker.
pub(crate) struct Membership {
    pub(crate) epoch: u64,
    pub(crate) world: Box<dyn Ccl>,
    /// `None` where the world is the one group.
    pub(crate) group: Option<Box<dyn Ccl>>,
}

impl Membership {
    pub(crate) fn each(&mut self) -> impl Iterator<Item = &mut Box<dyn Ccl>> {
        [Some(&mut self.world), self.group.as_mut()].into_iter().flatten()
    }

    pub(crate) fn controls(&self) -> Vec<Arc<dyn Control>> {
        [Some(&self.world), self.group.as_ref()].into_iter().flatten().map(|ccl| ccl.control()).collect()
    }
}
