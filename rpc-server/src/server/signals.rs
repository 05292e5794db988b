//! Signals that a server handles.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receiver of SIGTERM, SIGINT and SIGHUP, which no longer end the process.
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

    /// Returns the number of the next SIGTERM or SIGINT.
    pub(super) async fn next(&mut self) -> i32 {
        tokio::select! {
            _ = self.terminate.recv() => SignalKind::terminate().as_raw_value(),
            _ = self.interrupt.recv() => SignalKind::interrupt().as_raw_value(),
        }
    }

    /// Returns the number of the next SIGTERM or SIGINT. Calls `reload` at each SIGHUP until then.
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
