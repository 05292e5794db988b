//! Buffers for received payloads, used again and again: memory that has been touched is several times faster than fresh.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

/// How many idle buffers are kept: what one copy has under way.
const KEPT: usize = 8;

/// Buffers below this are not worth keeping.
const MIN: usize = 64 << 10;

/// Keeps buffers that were given back. Cheap to clone; clones are the same pool.
#[derive(Clone, Debug, Default)]
pub(super) struct BufferPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl BufferPool {
    /// An initialised buffer of `len` bytes with whatever content.
    pub(super) fn take(&self, len: usize) -> PooledBuffer {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = kept.iter().position(|buffer| buffer.capacity() >= len && buffer.capacity() <= 2 * len.max(MIN));
        let found = place.map(|place| kept.swap_remove(place));
        drop(kept);
        let buffer = match found {
            Some(mut buffer) => {
                // Shrinking is free, and growing only writes what has not been written before.
                buffer.resize(len, 0);
                buffer
            }
            None => vec![0; len],
        };
        PooledBuffer { buffer, pool: self.clone() }
    }
}

/// A buffer that goes back to its pool when it is dropped.
#[derive(Debug)]
pub(super) struct PooledBuffer {
    buffer: Vec<u8>,
    pool: BufferPool,
}

impl PooledBuffer {
    /// The buffer as shared bytes; it goes back when the last clone is dropped.
    pub(super) fn into_bytes(self) -> Bytes {
        Bytes::from_owner(self)
    }

    pub(super) fn as_mut(&mut self) -> &mut [u8] {
        &mut self.buffer
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let buffer = std::mem::take(&mut self.buffer);
        let mut kept = self.pool.0.lock().unwrap_or_else(PoisonError::into_inner);
        if buffer.capacity() >= MIN && kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}
