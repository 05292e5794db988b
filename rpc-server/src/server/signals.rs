//! The signals that a server knows.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM, SIGINT and SIGHUP, from now on received here instead of ending the process.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    pub(super) fn install() -> io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The number of the next signal that asks to stop.
    pub(super) async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }

    /// As [`next`](Self::next); calls `reload` at each SIGHUP until then.
    pub(super) async fn next_but_hangup(&mut self, reload: impl Fn()) -> i32 {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return SignalKind::terminate().as_raw_value(),
                _ = self.interrupt.recv() => return SignalKind::interrupt().as_raw_value(),
                _ = self.hangup.recv() => reload(),
            }
        }
    }
}
