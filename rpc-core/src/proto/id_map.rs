//! Maps keyed by request id.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Map keyed by request id. A look-up costs one multiplication for the hash.
///
/// A peer that chooses colliding ids slows down only its own session, and only a little: the maps
/// hold no more entries than the requests that it may have in flight.
pub(super) type IdMap<V> = HashMap<u64, V, BuildHasherDefault<IdHasher>>;

/// Hasher that spreads ids, which mostly count up, over all bits.
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
