//! The threads on which blocking functions run.

use std::io;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// How long an idle thread waits for more work before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// A piece of work for a thread.
pub(super) type Work = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Slot {
    work: Option<Work>,
    retired: bool,
}

/// A thread that runs one piece of work at a time and ends when it has been idle for long, or when all handles to it are
/// gone.
#[derive(Clone)]
pub(super) struct LaneThread(Arc<Shared>);

struct Shared {
    slot: Mutex<Slot>,
    changed: Condvar,
}

impl LaneThread {
    /// Starts a thread.
    pub(super) fn spawn() -> io::Result<Self> {
        let shared = Arc::new(Shared { slot: Mutex::default(), changed: Condvar::new() });
        let own = shared.clone();
        std::thread::Builder::new().name("rpc-lane".into()).spawn(move || own.run())?;
        Ok(Self(shared))
    }

    /// Gives the thread its next work, unless it has ended in the meantime: then the work comes back.
    pub(super) fn give(&self, work: Work) -> Result<(), Work> {
        let mut slot = self.0.slot.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.retired || slot.work.is_some() {
            return Err(work);
        }
        slot.work = Some(work);
        drop(slot);
        self.0.changed.notify_one();
        Ok(())
    }

    /// Lets the thread end as soon as it is idle.
    pub(super) fn retire(&self) {
        self.0.slot.lock().unwrap_or_else(PoisonError::into_inner).retired = true;
        self.0.changed.notify_one();
    }

    /// Whether the thread has ended.
    pub(super) fn is_retired(&self) -> bool {
        self.0.slot.lock().unwrap_or_else(PoisonError::into_inner).retired
    }
}

impl Shared {
    fn run(&self) {
        loop {
            let slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
            let wait = self.changed.wait_timeout_while(slot, IDLE, |slot| slot.work.is_none() && !slot.retired);
            let (mut slot, _) = wait.unwrap_or_else(PoisonError::into_inner);
            match slot.work.take() {
                Some(work) => {
                    drop(slot);
                    work();
                }
                None => {
                    slot.retired = true;
                    return;
                }
            }
        }
    }
}
