//! Polling of a state until it is reached, with a time limit.

use std::thread;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use super::NcclError;
use crate::ccl::{Agreement, CclError};

/// Time for which a rank polls without sleeping: longer than a small collective takes.
pub(super) const EAGER: Duration = Duration::from_millis(1);

/// Shortest and longest sleep between two polls after [`EAGER`]. The sleep is 1/64 of the time
/// waited so far, so that it delays the result by little.
const SLEEP: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));

/// Reason why this rank cannot go on.
#[derive(Debug)]
pub(super) enum Fault {
    /// Error that all ranks have, or get in their next call.
    Common(CclError),
    /// Error that only this rank knows of so far.
    Own(RpcError),
}

impl From<CclError> for Fault {
    fn from(error: CclError) -> Self {
        Self::Common(error)
    }
}

impl From<RpcError> for Fault {
    fn from(error: RpcError) -> Self {
        Self::Own(error)
    }
}

impl From<NcclError> for Fault {
    fn from(error: NcclError) -> Self {
        Self::Own(error.into())
    }
}

/// Waits until `ready` returns true. Checks meanwhile if another rank has broken the group.
///
/// # Errors
///
/// The error of `ready` or of the control communicator; `what`, which names the awaited call in the
/// error, has taken as long as `limit`.
pub(super) fn wait(
    control: &mut dyn Agreement,
    what: &str,
    limit: Option<Duration>,
    mut ready: impl FnMut() -> Result<bool, Fault>,
) -> Result<(), Fault> {
    let began = Instant::now();
    while !ready()? {
        let waited = began.elapsed();
        if let Some(limit) = limit.filter(|limit| waited >= *limit) {
            let text = format!("{what} has not ended within {limit:?}");
            return Err(Fault::Own(RpcError::new(ErrorKind::DeadlineExceeded, text)));
        }
        if waited >= EAGER {
            control.check()?;
        }
        pause(waited);
    }
    Ok(())
}

/// Waits until `ready` returns true, or the time `until`, without checking the group. Returns true
/// if it was ready.
pub(super) fn wait_alone(until: Instant, mut ready: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    while !ready() {
        if Instant::now() >= until {
            return false;
        }
        pause(began.elapsed());
    }
    true
}

pub(super) fn pause(waited: Duration) {
    if waited < EAGER {
        thread::yield_now();
    } else {
        thread::sleep((waited / 64).clamp(SLEEP.0, SLEEP.1));
    }
}
