//! Pending work on one memory in streams other than the default one.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::event::Event;
use crate::stream::{OpenClStream, Queue};
use rpc_core::error::Result;

/// The last work on a memory that the default stream does not follow yet, for each stream that has
/// some: several lanes may read one memory at a time.
#[derive(Default)]
pub(super) struct OtherStreamWork(Mutex<Vec<(Weak<Queue>, Arc<Event>)>>);

impl OtherStreamWork {
    /// Lets work submitted to the stream from now on begin behind this work.
    pub(super) fn precede(&self, stream: &OpenClStream) -> Result<()> {
        // Held until the stream has been told, so that no other thread takes the memory for free
        // before.
        let mut last = self.0.lock();
        let of_others = last.iter().filter(|(queue, _)| !is_of(queue, stream));
        stream.wait_events(of_others.map(|(_, event)| &**event))?;
        if stream.is_default() {
            last.clear();
        }
        Ok(())
    }

    /// Records that the last work on the memory in this stream ends with the event.
    pub(super) fn set(&self, stream: &OpenClStream, event: &Arc<Event>) {
        let mut last = self.0.lock();
        // Removes events that are done, those of dropped streams included.
        last.retain(|(queue, event)| !is_of(queue, stream) && !matches!(event.is_done(), Ok(true)));
        last.push((Arc::downgrade(stream.queue()), event.clone()));
    }

    /// Takes the ends of all work, when the memory is no longer used.
    pub(super) fn take(&mut self) -> Vec<Arc<Event>> {
        std::mem::take(self.0.get_mut()).into_iter().map(|(_, event)| event).collect()
    }
}

fn is_of(queue: &Weak<Queue>, stream: &OpenClStream) -> bool {
    queue.upgrade().is_some_and(|queue| stream.is(&queue))
}
