//! The type of a probe, and the two kinds of samples: times and rates.

use std::time::Instant;

use rpc_server::cli::Failure;

/// Function that takes the given number of samples.
pub(super) type Probe = Box<dyn FnMut(usize) -> Result<Vec<f64>, Failure>>;

/// Returns the microseconds since `start`.
pub(super) fn timed(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

/// Returns `count` per second since `start`.
pub(super) fn rate(count: usize, start: Instant) -> f64 {
    count as f64 / start.elapsed().as_secs_f64().max(1e-9)
}
