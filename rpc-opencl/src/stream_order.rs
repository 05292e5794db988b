//! Order of work on memory across streams.
//!
//! A session's own work on memory is on the default stream, whose order suffices for it. Work of a
//! lane that has set a stream runs there: behind all work that the default stream has by then,
//! while later work of the default stream does not wait for it, unless it uses the same memory. For
//! that, each memory keeps the events behind which the last work on it is done on other streams
//! (`other_stream_work.rs`).

use std::ptr;
use std::sync::Arc;

use crate::event::Event;
use crate::memory::OpenClMemory;
use crate::opened_device::OpenedDevice;
use crate::stream::OpenClStream;
use rpc_core::error::Result;

/// Calls `submit`, which submits work on these memories to the stream and returns its end; all of
/// them belong to `device`, as the stream does. Returns after that. If the processor reaches one of
/// the memories, returns when the work is done.
pub(super) fn in_order(
    device: &'static OpenedDevice,
    stream: &OpenClStream,
    memories: &[&OpenClMemory],
    submit: impl FnOnce() -> Result<Arc<Event>>,
) -> Result<()> {
    if !stream.is_default() {
        stream.wait_for_stream(&device.default_stream)?;
    }
    memories.iter().try_for_each(|memory| memory.other_streams.precede(stream))?;
    // The device may use memory only while the processor does not have it.
    // One that is given twice is lent once.
    let is_first = |(at, memory): (usize, &&OpenClMemory)| !memories[..at].iter().any(|other| ptr::eq(*other, *memory));
    let once = memories.iter().enumerate().filter(|(at, memory)| is_first((*at, memory))).map(|(_, memory)| memory);
    let lent = once.filter_map(|memory| memory.lend_to_device(stream).transpose());
    let lent: Vec<_> = lent.collect::<Result<_>>()?;
    let submitted = submit();
    if !stream.is_default()
        && let Ok(done) = &submitted
    {
        memories.iter().for_each(|memory| memory.other_streams.set(stream, done));
    }
    stream.flush()?;
    if lent.is_empty() {
        return submitted.map(drop);
    }
    lent.into_iter().try_for_each(|lent| lent.take_back())?;
    submitted?;
    // The work is done.
    stream.take_failure()
}
