//! Which host memory is pinned, so that copies know what the device can reach by itself.

use std::collections::BTreeMap;

use parking_lot::RwLock;

/// Start and length in bytes of every block of ours, for all devices: they are portable.
static RANGES: RwLock<BTreeMap<usize, usize>> = RwLock::new(BTreeMap::new());

pub(super) fn insert(start: usize, len: usize) {
    RANGES.write().insert(start, len);
}

pub(super) fn remove(start: usize) {
    RANGES.write().remove(&start);
}

/// Whether all of these bytes lie in one block of ours.
pub(super) fn contains(start: *const u8, len: usize) -> bool {
    let ranges = RANGES.read();
    let below = ranges.range(..=start.addr()).next_back();
    below.is_some_and(|(first, size)| {
        // No sum can overflow: both ranges are memory.
        start.addr() + len <= first + size
    })
}
