//! Supervision of collectives in progress on the device while no call of the caller polls them.
//! Without it, a rank that has died or a lost network would make the stream hang, and each thread
//! that waits for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::member::Member;

/// Interval of polls.
const PERIOD: Duration = Duration::from_millis(5);

/// A rank, and the flags that say if it has to be polled.
pub(super) struct Watched {
    member: Mutex<Member>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct State {
    /// True while a collective may be in progress.
    is_busy: bool,
    /// True once there will be no more collectives.
    is_leaving: bool,
}

/// The thread that polls the collectives of a rank. Dropping it ends the thread, and waits until it
/// has ended.
pub(super) struct Watcher {
    watched: Arc<Watched>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Watched {
    pub(super) fn new(member: Member) -> Self {
        Self { member: Mutex::new(member), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Locks the rank. If a call has panicked under this lock, the group has been broken.
    pub(super) fn member(&self) -> MutexGuard<'_, Member> {
        self.member.lock()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Records that a collective may be in progress from now on.
    pub(super) fn begin(&self) {
        if !std::mem::replace(&mut self.state().is_busy, true) {
            self.changed.notify_one();
        }
    }

    fn watch(&self) {
        while self.wait() {
            // A call of the caller holds the lock, and polls by itself.
            let Some(mut member) = self.member.try_lock() else { continue };
            // An error stays in the rank, for the next call.
            let looked = catch_unwind(AssertUnwindSafe(|| member.look(true)));
            if looked.is_err() {
                member.take_back();
            }
            // The rank's lock is still held, so that no collective begins in between.
            if !matches!(looked, Ok(Ok(false))) {
                self.state().is_busy = false;
            }
        }
    }

    /// Waits until the next poll is due. Returns false once the thread has to end.
    fn wait(&self) -> bool {
        let mut state = self.state();
        let is_idle = |state: &mut State| !state.is_busy && !state.is_leaving;
        if is_idle(&mut state) {
            self.changed.wait_while(&mut state, is_idle);
        }
        self.changed.wait_while_for(&mut state, |state| !state.is_leaving, PERIOD);
        !state.is_leaving
    }
}

impl Watcher {
    /// # Errors
    ///
    /// The system has no thread to spare.
    pub(super) fn start(watched: &Arc<Watched>) -> std::io::Result<Self> {
        let watched = Arc::clone(watched);
        let run = Arc::clone(&watched);
        let thread = thread::Builder::new().name("nccl-watch".to_owned()).spawn(move || run.watch())?;
        Ok(Self { watched, thread: Some(thread) })
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.watched.state().is_leaving = true;
        self.watched.changed.notify_one();
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            _ = thread.join();
        }
    }
}
