//! Registry of pinned host memory, so that copies know the memory that the device can access by
//! itself.

use std::collections::BTreeMap;

use parking_lot::RwLock;

/// Start and length in bytes of every pinned block of this crate, for all devices: the blocks are
/// portable.
static RANGES: RwLock<BTreeMap<usize, usize>> = RwLock::new(BTreeMap::new());

pub(super) fn insert(start: usize, len: usize) {
    RANGES.write().insert(start, len);
}

pub(super) fn remove(start: usize) {
    RANGES.write().remove(&start);
}

/// Returns true if all of these bytes lie in one pinned block.
pub(super) fn contains(start: *const u8, len: usize) -> bool {
    let ranges = RANGES.read();
    let below = ranges.range(..=start.addr()).next_back();
    below.is_some_and(|(first, size)| {
        // No sum can overflow: both ranges are memory.
        start.addr() + len <= first + size
    })
}
