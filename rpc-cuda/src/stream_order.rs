//! Order of work on memory across streams.
//!
//! A session's own work on memory is on the default stream, whose order suffices for it. Work of a
//! lane that has set a stream runs there: behind all work that the default stream has by then,
//! while later work of the default stream does not wait for it, unless it uses the same memory. For
//! that, each memory keeps the events behind which the last work on it is done on other streams
//! (`other_stream_work.rs`).

use std::sync::Arc;

use crate::memory::CudaMemory;
use crate::opened_gpu::OpenedGpu;
use crate::stream::CudaStream;
use rpc_core::error::Result;

/// Calls `submit`, which submits work on these memories to the stream; all of them belong to `gpu`,
/// as the stream does. Returns after that. If one of the memories is pinned, which the processor
/// may read next, returns when the work is done.
pub(super) fn in_order(
    gpu: &OpenedGpu,
    stream: &CudaStream,
    memories: &[&CudaMemory],
    submit: impl FnOnce() -> Result<()>,
) -> Result<()> {
    gpu.enter()?;
    if !stream.is_default() {
        stream.wait_for_stream(&gpu.default_stream)?;
    }
    memories.iter().try_for_each(|memory| memory.other_streams.precede(stream))?;
    let submitted = submit();
    let is_pinned = memories.iter().any(|memory| memory.is_pinned());
    if stream.is_default() && !is_pinned {
        return submitted;
    }
    // Also after an error: a part of the work may have been submitted.
    let done = match stream.record() {
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
