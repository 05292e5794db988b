//! The communicators of one worker, and its time limits for collectives.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Ccl, Control};
use crate::held_memory::HeldMemory;
use crate::options::Options;
use crate::wire::grouping::Grouping;

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
    /// Those of the worker's groups, each with its grouping.
    pub(crate) groups: Vec<(Grouping, Box<dyn Ccl>)>,
    /// Charge for the memory of communicators between threads, which all of them share.
    pub(crate) charge: Option<Arc<HeldMemory>>,
}

impl Membership {
    /// Returns all communicators, the world's first, without a grouping.
    pub(crate) fn each(&mut self) -> impl Iterator<Item = (Option<Grouping>, &mut Box<dyn Ccl>)> {
        let groups = self.groups.iter_mut().map(|(grouping, ccl)| (Some(*grouping), ccl));
        std::iter::once((None, &mut self.world)).chain(groups)
    }

    /// Returns the communicator of the worker's group in a grouping, if the session has that.
    pub(crate) fn group(&mut self, grouping: Grouping) -> Option<&mut dyn Ccl> {
        let found = self.groups.iter_mut().find(|(other, _)| *other == grouping);
        found.map(|(_, ccl)| &mut **ccl as &mut dyn Ccl)
    }

    /// Returns the controls of all communicators, in the order of [`each`](Self::each).
    pub(crate) fn controls(&self) -> Vec<(Option<Grouping>, Arc<dyn Control>)> {
        let groups = self.groups.iter().map(|(grouping, ccl)| (Some(*grouping), ccl.control()));
        std::iter::once((None, self.world.control())).chain(groups).collect()
    }
}
