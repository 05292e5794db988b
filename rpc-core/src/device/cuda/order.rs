//! The order of work on memory, whatever stream it is on.
//!
//! What a session does with memory is on the default stream, and needs no more order than that has. Work of a lane that has
//! set a stream of its own goes there: behind all that the default stream has by then, while later work of the default
//! stream does not wait for it, unless it is on the same memory. For that each memory keeps the point behind which its last
//! work on another stream is done.

use std::sync::{Arc, Mutex};

use super::CudaMemory;
use super::event::Event;
use super::gpu::lock;
use super::stream::CudaStream;
use crate::error::Result;

/// The last work on a memory that the default stream is not behind yet.
#[derive(Default)]
pub(super) struct Elsewhere(Mutex<Option<Arc<Event>>>);

impl Elsewhere {
    /// Has what is submitted to the stream from now on begin behind it. The caller has entered the stream's GPU.
    pub(super) fn precede(&self, stream: &CudaStream) -> Result<()> {
        // Held until the stream has been told, so that nobody takes the memory for free before.
        let mut event = lock(&self.0);
        if let Some(done) = &*event {
            stream.wait_event(done)?;
            if stream.is_default() {
                *event = None;
            }
        }
        Ok(())
    }

    fn is_none(&self) -> bool {
        lock(&self.0).is_none()
    }

    fn set(&self, event: &Arc<Event>) {
        *lock(&self.0) = Some(event.clone());
    }
}

impl CudaMemory {
    /// Has later work of the default stream come behind all work on this memory.
    pub(super) fn join(&self) -> Result<()> {
        if self.elsewhere.is_none() {
            return Ok(());
        }
        self.elsewhere.precede(&self.gpu().enter()?.default_stream)
    }
}

/// Has `submit` give work on these memories, all of the stream's device, to the stream. Returns when it has; or if one of them is
/// pinned, which the processor may look at next, when the work is done.
pub(super) fn in_order(
    stream: &CudaStream,
    memories: &[&CudaMemory],
    submit: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let gpu = stream.gpu();
    let opened = gpu.enter()?;
    if !stream.is_default() {
        stream.wait_for_stream(&opened.default_stream)?;
    }
    memories.iter().try_for_each(|memory| memory.elsewhere.precede(stream))?;
    let submitted = submit();
    let is_pinned = memories.iter().any(|memory| memory.is_pinned());
    if stream.is_default() && !is_pinned {
        return submitted;
    }
    // Also if it has failed: a part of it may be there.
    let done = match Event::record(gpu, opened, stream) {
        Ok(event) => Arc::new(event),
        Err(error) => return stream.synchronize_raw().and(submitted).and(Err(error)),
    };
    if is_pinned {
        done.wait()?;
    } else {
        memories.iter().for_each(|memory| memory.elsewhere.set(&done));
    }
    submitted
}
