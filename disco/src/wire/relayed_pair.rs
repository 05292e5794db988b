//! Pair of workers whose data is relayed.

use serde::{Deserialize, Serialize};

/// Workers between which bytes are to be relayed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RelayedPair {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// Communicator of the connection: 0 is that of all workers, and the others are those of their
    /// groups, in the order of the joined groupings of the plan.
    pub(crate) communicator: u32,
}
