//! Pending work on one memory in streams other than the default one.

use std::sync::Arc;

use cudarc::driver::sys::CUstream_st;
use parking_lot::Mutex;

use crate::event::Event;
use crate::handle::Handle;
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
        let mut last = self.0.lock();
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

    /// Returns true if the default stream follows all work on the memory.
    pub(super) fn is_none(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Records that the last work on the memory in this stream ends with the event.
    pub(super) fn set(&self, stream: &CudaStream, event: &Arc<Event>) {
        let mut last = self.0.lock();
        // Removes events that are done, those of dropped streams included.
        last.retain(|(other, event)| other.0 != stream.handle().0 && !matches!(event.is_done(), Ok(true)));
        last.push((stream.handle(), event.clone()));
    }
}
