//! The clock of deadlines, leases and keep-alive: the system's monotonic clock unless the runtime
//! has one of its own.
//!
//! A deadline is an instant that one crate sets and another compares, so all of them ask the same
//! clock. A runtime whose timers follow a clock that tests can pause installs that clock here.

use std::sync::OnceLock;
use std::time::Instant;

static CLOCK: OnceLock<fn() -> Instant> = OnceLock::new();

/// Returns the present time.
#[must_use]
pub fn now() -> Instant {
    CLOCK.get().map_or_else(Instant::now, |now| now())
}

/// Installs the clock of the process. It is called on any thread, also on those that no runtime
/// owns, and must not block. Only the first call has an effect.
pub fn install(now: fn() -> Instant) {
    // A later one is the same clock: there is one runtime crate below all sessions.
    let _ = CLOCK.set(now);
}
