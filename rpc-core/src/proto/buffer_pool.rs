//! Pool of buffers for received payloads: reused memory is several times faster than fresh memory.

use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;

/// Idle buffers that are kept: as many as one copy has in flight.
const KEPT: usize = 8;

/// Smallest capacity in bytes of a buffer that is kept.
const MIN: usize = 64 << 10;

/// Pool of idle buffers. Clones share the same pool.
#[derive(Clone, Debug, Default)]
pub(super) struct BufferPool(Arc<Mutex<Vec<Vec<u8>>>>);

impl BufferPool {
    /// Returns an initialised buffer of `len` bytes. Its content is unspecified.
    pub(super) fn take(&self, len: usize) -> PooledBuffer {
        let mut kept = self.0.lock();
        let position = kept.iter().position(|buffer| buffer.capacity() >= len && buffer.capacity() <= 2 * len.max(MIN));
        let found = position.map(|position| kept.swap_remove(position));
        drop(kept);
        let buffer = match found {
            Some(mut buffer) => {
                // Shrinking is free, and growing only writes bytes that have not been written
                // before.
                buffer.resize(len, 0);
                buffer
            }
            None => vec![0; len],
        };
        PooledBuffer { buffer, pool: self.clone() }
    }
}

/// A buffer that returns to its pool when it is dropped.
#[derive(Debug)]
pub(super) struct PooledBuffer {
    buffer: Vec<u8>,
    pool: BufferPool,
}

impl PooledBuffer {
    /// Converts the buffer to shared bytes. It returns to the pool when the last clone is dropped.
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
        let mut kept = self.pool.0.lock();
        if buffer.capacity() >= MIN && kept.len() < KEPT {
            kept.push(buffer);
        }
    }
}
