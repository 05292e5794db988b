//! Notification of waiters when streams reach an event, by one thread for all.
//!
//! The driver calls back on a thread of its own, which must not wait, as what is notified may. And
//! it need not call back if the device is lost before; so the thread also polls from time to time.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::thread;
use std::time::{Duration, Instant};

use opencl3::event::{CL_COMPLETE, set_event_callback};
use opencl3::types::{cl_event, cl_int};
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::event::Event;
use rpc_core::device::WhenDone;
use rpc_core::error::Result;

/// A wait for an event.
struct PendingWait {
    event: Event,
    since: Instant,
    done: WhenDone,
}

struct NotifierState {
    /// Waits that were added since the thread last checked.
    new: Vec<PendingWait>,
    /// True if the driver has called back since then.
    called_back: bool,
    has_thread: bool,
}

static STATE: Mutex<NotifierState> =
    Mutex::new(NotifierState { new: Vec::new(), called_back: false, has_thread: false });
static CHANGED: Condvar = Condvar::new();

/// Calls `done` when the event has been reached, or can no longer be.
///
/// # Errors
///
/// `done`, if no thread can be started.
pub(super) fn when_reached(event: Event, done: WhenDone) -> Result<(), WhenDone> {
    let mut state = lock();
    if !state.has_thread {
        if let Err(error) = thread::Builder::new().name("rpc-opencl-wait".into()).spawn(watch) {
            tracing::warn!(%error, "cannot start the thread that watches streams");
            return Err(done);
        }
        state.has_thread = true;
    }
    drop(state);
    // Without the callback the thread polls.
    if let Err(code) = set_event_callback(event.raw(), CL_COMPLETE, on_reached, ptr::null_mut()) {
        tracing::debug!(code, "the driver does not call back");
    }
    lock().new.push(PendingWait { event, since: Instant::now(), done });
    CHANGED.notify_one();
    Ok(())
}

/// Callback for the driver, called when an awaited event has been reached.
extern "C" fn on_reached(_: cl_event, _: cl_int, _: *mut c_void) {
    lock().called_back = true;
    CHANGED.notify_one();
}

fn watch() {
    let mut waiting: Vec<PendingWait> = Vec::new();
    loop {
        let mut state = lock();
        if waiting.is_empty() {
            CHANGED.wait_while(&mut state, |state| state.new.is_empty());
        } else {
            let pause = waiting.iter().map(PendingWait::pause).min().unwrap_or(LONGEST_PAUSE);
            let is_quiet = |state: &mut NotifierState| !state.called_back && state.new.is_empty();
            CHANGED.wait_while_for(&mut state, is_quiet, pause);
        }
        state.called_back = false;
        waiting.append(&mut state.new);
        drop(state);
        for one in std::mem::take(&mut waiting) {
            match one.event.is_done() {
                Ok(false) => waiting.push(one),
                outcome => {
                    // A panic must not affect other waits.
                    if catch_unwind(AssertUnwindSafe(|| (one.done)(outcome.map(drop)))).is_err() {
                        rpc_core::log_limited!(ERROR, "the callback of a wait for a stream panicked");
                    }
                }
            }
        }
    }
}

impl PendingWait {
    /// Returns the time until the next poll: short for recent waits, and never noticeably long.
    fn pause(&self) -> Duration {
        (self.since.elapsed() / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }
}

fn lock() -> MutexGuard<'static, NotifierState> {
    STATE.lock()
}

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);

const LONGEST_PAUSE: Duration = Duration::from_millis(10);
