//! The clock of sessions and handshakes: the one that tokio's timers go by.

use std::time::Instant;

/// Returns the time of the current runtime, which a test may have paused, and the system's time
/// without a runtime. Deadlines that are set by it fall due when tokio's timers do.
pub(crate) fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
