//! The order of work on memory, whatever stream it is on.
//!
//! What a session does with memory is on the default stream, and needs no more order than that has. Work of a lane that has
//! set a stream of its own goes there: behind all that the default stream has by then, while later work of the default
//! stream does not wait for it, unless it is on the same memory. For that each memory keeps the points behind which the last
//! work on it is done on other streams.

use std::sync::Arc;

use cudarc::driver::sys::CUstream_st;
use parking_lot::Mutex;

use crate::CudaMemory;
use crate::event::Event;
use crate::gpu::{Handle, lock};
use crate::stream::CudaStream;
use rpc_core::error::Result;

/// The last work on a memory that the default stream is not behind yet, of each stream that has some: several lanes may read
/// one memory at a time.
#[derive(Default)]
pub(super) struct Elsewhere(Mutex<Vec<(Handle<CUstream_st>, Arc<Event>)>>);

impl Elsewhere {
    /// Has what is submitted to the stream from now on begin behind it. The caller has entered the stream's GPU.
    pub(super) fn precede(&self, stream: &CudaStream) -> Result<()> {
        // Held until the stream has been told, so that nobody takes the memory for free before.
        let mut last = lock(&self.0);
        for (other, event) in last.iter() {
            if other.0 != stream.handle().0 {
                stream.wait_event(event)?;
            }
        }
        if stream.is_default() {
            last.clear();
        }
        Ok(())
    }

    fn is_none(&self) -> bool {
        lock(&self.0).is_empty()
    }

    fn set(&self, stream: &CudaStream, event: &Arc<Event>) {
        let mut last = lock(&self.0);
        // Of streams that are gone, too.
        last.retain(|(other, event)| other.0 != stream.handle().0 && !matches!(event.is_done(), Ok(true)));
        last.push((stream.handle(), event.clone()));
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
        memories.iter().for_each(|memory| memory.elsewhere.set(stream, &done));
    }
    submitted
}
