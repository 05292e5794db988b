//! Pair of workers whose data is relayed.

use serde::{Deserialize, Serialize};

/// Workers between which bytes are to be relayed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct RelayedPair {
    pub(crate) from: u32,
    pub(crate) to: u32,
    /// True for the communicator of all workers, false for that of their group.
    pub(crate) is_world: bool,
}
