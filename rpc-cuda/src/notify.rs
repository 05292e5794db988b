//! Tells when streams have come to a point, by one thread for all who wait.
//!
//! The driver rings when a stream gets there, and does not when the device is lost on the way; so the thread also asks from
//! time to time.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::event::Event;
use rpc_core::device::WhenDone;
use rpc_core::error::Result;

/// Somebody who waits.
struct Waiting {
    event: Event,
    since: Instant,
    done: WhenDone,
}

struct State {
    /// Who has come since the thread looked last.
    new: Vec<Waiting>,
    /// Whether the driver has rung since.
    rung: bool,
    has_thread: bool,
}

static STATE: Mutex<State> = Mutex::new(State { new: Vec::new(), rung: false, has_thread: false });
static BELL: Condvar = Condvar::new();

/// Has `done` called when the event has been reached, or can no longer be.
///
/// # Errors
///
/// `done`, if there is no thread to be had.
pub(super) fn when_reached(event: Event, done: WhenDone) -> Result<(), WhenDone> {
    let mut state = lock();
    if !state.has_thread {
        if let Err(error) = thread::Builder::new().name("rpc-cuda-wait".into()).spawn(watch) {
            tracing::warn!(%error, "no thread to watch streams");
            return Err(done);
        }
        state.has_thread = true;
    }
    state.new.push(Waiting { event, since: Instant::now(), done });
    drop(state);
    BELL.notify_one();
    Ok(())
}

/// Called by the driver when a stream has come to a point that somebody waits for; it must not call the driver in turn.
pub(super) unsafe extern "C" fn ring(_: *mut c_void) {
    lock().rung = true;
    BELL.notify_one();
}

fn watch() {
    let mut waiting: Vec<Waiting> = Vec::new();
    loop {
        let mut state = lock();
        if waiting.is_empty() {
            BELL.wait_while(&mut state, |state| state.new.is_empty());
        } else {
            let pause = waiting.iter().map(Waiting::pause).min().unwrap_or(LONGEST_PAUSE);
            let is_quiet = |state: &mut State| !state.rung && state.new.is_empty();
            BELL.wait_while_for(&mut state, is_quiet, pause);
        }
        state.rung = false;
        waiting.append(&mut state.new);
        drop(state);
        for one in std::mem::take(&mut waiting) {
            match one.event.is_done() {
                Ok(false) => waiting.push(one),
                outcome => {
                    // Others wait, too.
                    if catch_unwind(AssertUnwindSafe(|| (one.done)(outcome.map(drop)))).is_err() {
                        tracing::error!("who waited for a stream panicked");
                    }
                }
            }
        }
    }
}

impl Waiting {
    /// When to ask next, if nobody rings: soon for what has just begun, and never so late that it would be noticed.
    fn pause(&self) -> Duration {
        (self.since.elapsed() / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }
}

fn lock() -> MutexGuard<'static, State> {
    STATE.lock()
}

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);

const LONGEST_PAUSE: Duration = Duration::from_millis(10);
