//! Maps by request id.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map from request ids, at the cost of a multiplication a look-up.
///
/// A peer that chooses its ids so that they collide slows down its own session, and not by much: the maps hold no more
/// than the requests that it may have under way.
pub(super) type IdMap<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Spreads ids, which mostly count up, over all bits.
#[derive(Debug, Default)]
pub(super) struct IdHasher(u64);

impl Hasher for IdHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, id: u64) {
        let spread = u128::from(id) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (spread >> 64) as u64 ^ spread as u64;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 ^ u64::from(*byte));
        }
    }
}
