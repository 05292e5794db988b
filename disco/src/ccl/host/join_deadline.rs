//! Deadline of a rank that joins a group, and the end of its session before.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use super::Options;

/// Longest sleep between two looks for the end of the session.
const SLICE: Duration = Duration::from_millis(20);

/// Time until which a rank waits for the others, and flag of its session's end, after which it
/// waits for none.
#[derive(Clone, Copy)]
pub(super) struct JoinDeadline<'a> {
    pub(super) until: Instant,
    has_ended: &'a AtomicBool,
}

impl<'a> JoinDeadline<'a> {
    /// Returns the deadline of a group that is made from now on.
    pub(super) fn of(options: &'a Options) -> Self {
        Self { until: Instant::now() + options.join_timeout, has_ended: &options.has_ended }
    }

    /// Returns a deadline at another time, and at the end of the same session.
    pub(super) fn at(self, until: Instant) -> Self {
        Self { until, ..self }
    }

    /// Returns true once the session has ended.
    pub(super) fn has_ended(self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Returns true once the rank should give up.
    pub(super) fn is_over(self) -> bool {
        self.has_ended() || Instant::now() >= self.until
    }

    /// Returns the time that is left; zero once the session has ended.
    pub(super) fn left(self) -> Duration {
        if self.has_ended() { Duration::ZERO } else { self.until.saturating_duration_since(Instant::now()) }
    }

    /// Sleeps for `pause`, but not beyond the end of the session.
    pub(super) fn sleep(self, pause: Duration) {
        let pause = self.at(Instant::now() + pause);
        while !pause.is_over() {
            std::thread::sleep(pause.left().min(SLICE));
        }
    }

    /// Returns the error of a rank that has given up; `text` says which ranks are missing.
    pub(super) fn error(self, text: String) -> RpcError {
        if self.has_ended() {
            return RpcError::new(
                ErrorKind::Closed,
                "the session has ended, or a worker was lost, before all ranks had joined",
            );
        }
        RpcError::new(ErrorKind::DeadlineExceeded, text)
    }
}
