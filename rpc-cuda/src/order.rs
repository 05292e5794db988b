//! Order of work on memory across streams.
//!
//! A session's own work on memory is on the default stream, whose order suffices for it. Work of a
//! lane that has set a stream runs there: behind all work that the default stream has by then,
//! while later work of the default stream does not wait for it, unless it uses the same memory. For
//! that, each memory keeps the events behind which the last work on it is done on other streams.

use std::sync::Arc;

use cudarc::driver::sys::CUstream_st;
use parking_lot::Mutex;

use crate::CudaMemory;
use crate::event::Event;
use crate::gpu::{Handle, lock};
use crate::stream::CudaStream;
use rpc_core::error::Result;

/// The last work on a memory that the default stream does not follow yet, for each stream that has
/// some: several lanes may read one memory at a time.
#[derive(Default)]
pub(super) struct OtherStreamWork(Mutex<Vec<(Handle<CUstream_st>, Arc<Event>)>>);

impl OtherStreamWork {
    /// Lets work submitted to the stream from now on begin behind this work. The caller has entered
    /// the stream's GPU.
    pub(super) fn precede(&self, stream: &CudaStream) -> Result<()> {
        // Held until the stream has been told, so that no other thread takes the memory for free
        // before.
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
        // Removes events that are done, those of dropped streams included.
        last.retain(|(other, event)| other.0 != stream.handle().0 && !matches!(event.is_done(), Ok(true)));
        last.push((stream.handle(), event.clone()));
    }
}

impl CudaMemory {
    /// Lets later work of the default stream begin behind all work on this memory.
    pub(super) fn join(&self) -> Result<()> {
        if self.other_streams.is_none() {
            return Ok(());
        }
        self.other_streams.precede(&self.gpu().enter()?.default_stream)
    }
}

/// Calls `submit`, which submits work on these memories, all of the stream's device, to the stream.
/// Returns after that. If one of the memories is pinned, which the processor may read next, returns
/// when the work is done.
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
    memories.iter().try_for_each(|memory| memory.other_streams.precede(stream))?;
    let submitted = submit();
    let is_pinned = memories.iter().any(|memory| memory.is_pinned());
    if stream.is_default() && !is_pinned {
        return submitted;
    }
    // Also after an error: a part of the work may have been submitted.
    let done = match Event::record(gpu, opened, stream) {
        Ok(event) => Arc::new(event),
        Err(error) => return stream.synchronize_raw().and(submitted).and(Err(error)),
    };
    if is_pinned {
        done.wait()?;
    } else {
        memories.iter().for_each(|memory| memory.other_streams.set(stream, &done));
    }
    submitted
}
