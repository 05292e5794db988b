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
    min_rate: u64,
    /// Since when there was nothing to do; `None` while there is.
    pub(super) idle_since: Option<Instant>,
    /// Since when the client has taken nothing of what there is to be written; `None` if all is written.
    stalled_since: Option<Instant>,
    /// A reply that waits for the client's leave although nothing else is on the way, and since when.
    pub(super) held_back: Option<(u64, Instant)>,
    /// What the client sends while a message of it is incomplete.
    incoming: Option<Pace>,
    /// What the client takes while something waits for it.
    outgoing: Option<Pace>,
}

/// What has moved since a time.
#[derive(Clone, Copy)]
struct Pace {
    since: Instant,
    moved: u64,
}

impl Patience {
    pub(super) fn new(options: &ServeOptions, now: Instant) -> Self {
        Self {
            // A time that cannot be told is never.
            expires: options.session_duration.and_then(|duration| now.checked_add(duration)),
            idle_timeout: options.idle_timeout,
            write_timeout: options.write_timeout,
            min_rate: options.min_rate,
            idle_since: Some(now),
            stalled_since: None,
            held_back: None,
            incoming: None,
            outgoing: None,
        }
    }

    /// The client has taken `count` bytes.
    pub(super) fn written(&mut self, count: usize) {
        self.stalled_since = None;
        if let Some(pace) = &mut self.outgoing {
            pace.moved += count as u64;
        }
    }

    /// Whether something waits for the client to take it.
    pub(super) fn waits_to_write(&mut self, waits: bool) {
        if waits {
            self.stalled_since.get_or_insert_with(Instant::now);
            self.outgoing.get_or_insert_with(Pace::start);
        } else {
            (self.stalled_since, self.outgoing) = (None, None);
        }
    }

    /// The client has sent `count` bytes.
    pub(super) fn read(&mut self, count: usize) {
        if let Some(pace) = &mut self.incoming {
            pace.moved += count as u64;
        }
    }

    /// Whether the client has begun a message and not finished it.
    pub(super) fn waits_to_read(&mut self, waits: bool) {
        if waits {
            self.incoming.get_or_insert_with(Pace::start);
        } else {
            self.incoming = None;
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
        let pace = |pace: Option<Pace>| pace.and_then(|pace| pace.since.checked_add(self.write_timeout));
        [self.expires, idle, stuck, pace(self.incoming), pace(self.outgoing)].into_iter().flatten().min()
    }

    /// Whether the client is stuck, or as good as: nothing can be said to it.
    pub(super) fn is_stuck(&mut self, now: Instant) -> Option<RpcError> {
        let limit = self.write_timeout;
        if self.stuck_since().is_some_and(|since| now.saturating_duration_since(since) >= limit) {
            let text = format!("write_timeout is {limit:?}, and the client has taken nothing for as long");
            return Some(RpcError::new(ErrorKind::LimitExceeded, text));
        }
        let due = (u128::from(self.min_rate) * limit.as_millis() / 1000).min(u64::MAX.into()) as u64;
        for (pace, verb) in [(&mut self.incoming, "sent"), (&mut self.outgoing, "taken")] {
            let Some(over) = pace.filter(|pace| now.saturating_duration_since(pace.since) >= limit) else { continue };
            if over.moved < due {
                let (rate, moved) = (self.min_rate, over.moved);
                let text = format!("min_rate is {rate} B/s, and the client has {verb} {moved} bytes in {limit:?}");
                return Some(RpcError::new(ErrorKind::LimitExceeded, text));
            }
            *pace = Some(Pace { since: now, moved: 0 });
        }
        None
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

impl Pace {
    fn start() -> Self {
        Self { since: Instant::now(), moved: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience(now: Instant) -> Patience {
        let options = ServeOptions { write_timeout: Duration::from_secs(60), min_rate: 10, ..ServeOptions::default() };
        Patience::new(&options, now)
    }

    #[test]
    fn a_message_that_trickles_in_is_cut_off_and_a_slow_one_is_not() {
        let start = Instant::now();
        let mut patience = patience(start);
        patience.waits_to_read(true);
        patience.read(600);
        let window = patience.ends().unwrap();
        assert!(patience.is_stuck(window).is_none(), "600 bytes in 60 s are 10 B/s");
        patience.read(599);
        let next = patience.ends().unwrap();
        assert!(patience.is_stuck(next - Duration::from_millis(1)).is_none(), "the time is not over");
        let error = patience.is_stuck(next).unwrap();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(error.message().contains("min_rate is 10 B/s, and the client has sent 599 bytes"), "{error}");
        // A message that is complete by then owes nothing.
        patience.waits_to_read(false);
        assert!(patience.ends().is_none() && patience.is_stuck(next).is_none());
    }

    #[test]
    fn a_client_that_takes_a_byte_now_and_then_is_cut_off() {
        let start = Instant::now();
        let mut patience = patience(start);
        patience.waits_to_write(true);
        patience.written(1);
        let window = patience.ends().unwrap();
        let error = patience.is_stuck(window).unwrap();
        assert!(error.message().contains("the client has taken 1 bytes"), "{error}");
        patience.waits_to_write(false);
        assert!(patience.ends().is_none());
    }
}
