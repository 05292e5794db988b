//! How long a server waits for a client that could draw things out for ever.

use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use super::ServeOptions;

/// How long things may take that a client can draw out.
pub(super) struct Patience {
    /// When the session has lasted long enough.
    pub(super) expires: Option<Instant>,
    pub(super) idle_timeout: Option<Duration>,
    write_timeout: Duration,
    /// Since when there was nothing to do; `None` while there is.
    pub(super) idle_since: Option<Instant>,
    /// Since when the client has taken nothing of what there is to be written; `None` if all is written.
    pub(super) stalled_since: Option<Instant>,
    /// A reply that waits for the client's leave although nothing else is on the way, and since when.
    pub(super) held_back: Option<(u64, Instant)>,
}

impl Patience {
    pub(super) fn new(options: &ServeOptions, now: Instant) -> Self {
        Self {
            // A time that cannot be told is never.
            expires: options.session_duration.and_then(|duration| now.checked_add(duration)),
            idle_timeout: options.idle_timeout,
            write_timeout: options.write_timeout,
            idle_since: Some(now),
            stalled_since: None,
            held_back: None,
        }
    }

    /// Since when the client has done nothing that it owes.
    fn stuck_since(&self) -> Option<Instant> {
        self.stalled_since.or(self.held_back.map(|(_, since)| since))
    }

    /// When to look again.
    pub(super) fn ends(&self) -> Option<Instant> {
        let idle = self.idle_since.zip(self.idle_timeout).and_then(|(since, limit)| since.checked_add(limit));
        let stuck = self.stuck_since().and_then(|since| since.checked_add(self.write_timeout));
        [self.expires, idle, stuck].into_iter().flatten().min()
    }

    /// Whether the client is stuck: nothing can be said to it.
    pub(super) fn is_stuck(&self, now: Instant) -> Option<RpcError> {
        self.stuck_since().filter(|since| now.saturating_duration_since(*since) >= self.write_timeout).map(|_| {
            let limit = self.write_timeout;
            let text = format!("write_timeout is {limit:?}, and the client has taken nothing for as long");
            RpcError::new(ErrorKind::LimitExceeded, text)
        })
    }

    /// Why the session is over, if it is.
    pub(super) fn is_over(&self, now: Instant) -> Option<RpcError> {
        let timeout = |text: String| Some(RpcError::new(ErrorKind::SessionTimeout, text).may_have_run(true));
        if self.expires.is_some_and(|expires| now >= expires) {
            return timeout("session_duration is over: the server lets no session last longer".to_owned());
        }
        let limit = self.idle_timeout?;
        if self.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= limit) {
            return timeout(format!("idle_timeout is {limit:?}, and there was no request for as long"));
        }
        None
    }
}
