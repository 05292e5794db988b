//! Timeouts of a served session, against clients that could delay it without end.

use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use crate::clock;

/// Limits of a server on the time that a session may take.
pub(super) struct StallLimits {
    pub(super) session_duration: Option<Duration>,
    pub(super) idle_timeout: Option<Duration>,
    pub(super) write_timeout: Duration,
    pub(super) min_rate: u64,
}

/// Timeouts of one session: its duration, its idle time, and stalls of the client.
pub(super) struct StallTimeouts {
    /// End of the longest duration of the session.
    pub(super) expires: Option<Instant>,
    /// Longest time without a request.
    pub(super) idle_timeout: Option<Duration>,
    write_timeout: Duration,
    min_rate: u64,
    /// Time since which the session has been idle. `None` while it is busy.
    pub(super) idle_since: Option<Instant>,
    /// Time since which the client has taken none of the pending output. `None` if all is written.
    stalled_since: Option<Instant>,
    /// Reply that waits for the client's credit although no other bytes are on their way, and the
    /// time since which it waits.
    pub(super) held_back: Option<(u64, Instant)>,
    /// Throughput of the client's input, while one of its messages is incomplete.
    incoming: Option<Throughput>,
    /// Throughput of the output that the client takes, while output is pending.
    outgoing: Option<Throughput>,
    /// Time since which no output waits for the channel, although some may follow. The stall and
    /// the throughput of the output do not advance meanwhile.
    output_paused: Option<Instant>,
}

/// Number of bytes that have moved since a time.
#[derive(Clone, Copy)]
struct Throughput {
    since: Instant,
    bytes: u64,
}

impl StallTimeouts {
    /// Creates the timeouts of a session that begins at `now`.
    pub(super) fn new(limits: &StallLimits, now: Instant) -> Self {
        Self {
            // A time that the clock cannot express is treated as never.
            expires: limits.session_duration.and_then(|duration| now.checked_add(duration)),
            idle_timeout: limits.idle_timeout,
            write_timeout: limits.write_timeout,
            min_rate: limits.min_rate,
            idle_since: Some(now),
            stalled_since: None,
            held_back: None,
            incoming: None,
            outgoing: None,
            output_paused: None,
        }
    }

    /// Records that the client has taken `count` bytes.
    pub(super) fn wrote(&mut self, count: usize) {
        self.stalled_since = None;
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.bytes += count as u64;
        }
    }

    /// Records that the client has taken `count` bytes, after which it owes nothing unless more
    /// output follows at once. If it does, the throughput counts on.
    pub(super) fn wrote_with_more_to_come(&mut self, count: usize, now: Instant) {
        self.outgoing.get_or_insert_with(Throughput::start);
        self.wrote(count);
        self.pause_output(now);
    }

    /// Records whether output is pending that the client has to take.
    pub(super) fn set_writing(&mut self, is_writing: bool) {
        if is_writing {
            self.stalled_since.get_or_insert_with(clock::now);
            self.outgoing.get_or_insert_with(Throughput::start);
        } else {
            (self.stalled_since, self.outgoing, self.output_paused) = (None, None, None);
        }
    }

    /// Records that the channel can take output again, and that none is known to wait for it.
    pub(super) fn pause_output(&mut self, now: Instant) {
        if self.stalled_since.is_some() || self.outgoing.is_some() {
            self.output_paused.get_or_insert(now);
        }
    }

    /// Records that output has been offered to the channel. The time since
    /// [`pause_output`](Self::pause_output) does not count as the client's.
    pub(super) fn resume_output(&mut self, now: Instant) {
        let Some(paused) = self.output_paused.take() else { return };
        let pause = now.saturating_duration_since(paused);
        let throughput = self.outgoing.as_mut().map(|outgoing| &mut outgoing.since);
        for since in self.stalled_since.as_mut().into_iter().chain(throughput) {
            *since += pause;
        }
    }

    /// Records that the client has sent `count` bytes.
    pub(super) fn received(&mut self, count: usize) {
        if let Some(incoming) = &mut self.incoming {
            incoming.bytes += count as u64;
        }
    }

    /// Records whether the client has begun a message and not finished it.
    pub(super) fn set_receiving(&mut self, is_receiving: bool) {
        if is_receiving {
            self.incoming.get_or_insert_with(Throughput::start);
        } else {
            self.incoming = None;
        }
    }

    /// Returns the time since which the client has withheld an action that it owes.
    fn stuck_since(&self) -> Option<Instant> {
        let stalled_since = self.stalled_since.filter(|_| self.output_paused.is_none());
        stalled_since.or(self.held_back.map(|(_, since)| since))
    }

    /// Returns the time at which the timeouts have to be checked again.
    pub(super) fn next(&self) -> Option<Instant> {
        let idle = self.idle_since.zip(self.idle_timeout).and_then(|(since, limit)| since.checked_add(limit));
        let stuck = self.stuck_since().and_then(|since| since.checked_add(self.write_timeout));
        let window = |throughput: Option<Throughput>| {
            throughput.and_then(|throughput| throughput.since.checked_add(self.write_timeout))
        };
        let outgoing = self.outgoing.filter(|_| self.output_paused.is_none());
        [self.expires, idle, stuck, window(self.incoming), window(outgoing)].into_iter().flatten().min()
    }

    /// Returns an error if the client has stalled, or is too slow. No message can reach the client
    /// then.
    pub(super) fn check_stall(&mut self, now: Instant) -> Option<RpcError> {
        let limit = self.write_timeout;
        if self.stuck_since().is_some_and(|since| now.saturating_duration_since(since) >= limit) {
            let text = format!("write_timeout is {limit:?}, and the client has taken nothing for as long");
            return Some(RpcError::new(ErrorKind::LimitExceeded, text));
        }
        let due = (u128::from(self.min_rate) * limit.as_millis() / 1000).min(u64::MAX.into()) as u64;
        let outgoing = Some(&mut self.outgoing).filter(|_| self.output_paused.is_none());
        let directions = [Some((&mut self.incoming, "sent")), outgoing.map(|outgoing| (outgoing, "taken"))];
        for (throughput, verb) in directions.into_iter().flatten() {
            let window = throughput.filter(|throughput| now.saturating_duration_since(throughput.since) >= limit);
            let Some(Throughput { bytes, .. }) = window else { continue };
            if bytes < due {
                let rate = self.min_rate;
                let text = format!("min_rate is {rate} B/s, and the client has {verb} {bytes} bytes in {limit:?}");
                return Some(RpcError::new(ErrorKind::LimitExceeded, text));
            }
            *throughput = Some(Throughput { since: now, bytes: 0 });
        }
        None
    }

    /// Returns an error if the session has lasted or idled for too long. The client can still be
    /// sent the reason.
    pub(super) fn check_session(&self, now: Instant) -> Option<RpcError> {
        if self.expires.is_some_and(|expires| now >= expires) {
            return Some(lasted_too_long());
        }
        let limit = self.idle_timeout?;
        if self.idle_since.is_some_and(|since| now.saturating_duration_since(since) >= limit) {
            let text = format!("idle_timeout is {limit:?}, and there was no request for as long");
            return Some(RpcError::new(ErrorKind::SessionTimeout, text).may_have_run(true));
        }
        None
    }
}

/// Returns the error for a session that has lasted for as long as any may.
pub(super) fn lasted_too_long() -> RpcError {
    let text = "session_duration is over: the server lets no session last longer";
    RpcError::new(ErrorKind::SessionTimeout, text).may_have_run(true)
}

impl Throughput {
    fn start() -> Self {
        Self { since: clock::now(), bytes: 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timeouts(now: Instant) -> StallTimeouts {
        let write_timeout = Duration::from_secs(60);
        let limits = StallLimits { session_duration: None, idle_timeout: None, write_timeout, min_rate: 10 };
        StallTimeouts::new(&limits, now)
    }

    #[test]
    fn a_message_that_trickles_in_is_cut_off_and_a_slow_one_is_not() {
        let start = Instant::now();
        let mut timeouts = timeouts(start);
        timeouts.set_receiving(true);
        timeouts.received(600);
        let window = timeouts.next().unwrap();
        assert!(timeouts.check_stall(window).is_none(), "600 bytes in 60 s are 10 B/s");
        timeouts.received(599);
        let next = timeouts.next().unwrap();
        assert!(timeouts.check_stall(next - Duration::from_millis(1)).is_none(), "the time is not over");
        let error = timeouts.check_stall(next).unwrap();
        assert_eq!(error.kind(), ErrorKind::LimitExceeded);
        assert!(error.message().contains("min_rate is 10 B/s, and the client has sent 599 bytes"), "{error}");
        // After a complete message the client owes nothing.
        timeouts.set_receiving(false);
        assert!(timeouts.next().is_none() && timeouts.check_stall(next).is_none());
    }

    #[test]
    fn a_client_that_takes_a_byte_now_and_then_is_cut_off() {
        let start = Instant::now();
        let mut timeouts = timeouts(start);
        timeouts.set_writing(true);
        timeouts.wrote(1);
        let window = timeouts.next().unwrap();
        let error = timeouts.check_stall(window).unwrap();
        assert!(error.message().contains("the client has taken 1 bytes"), "{error}");
        timeouts.set_writing(false);
        assert!(timeouts.next().is_none());
    }

    #[test]
    fn time_in_which_no_output_waits_is_not_the_clients() {
        let start = Instant::now();
        let mut timeouts = timeouts(start);
        timeouts.set_writing(true);
        let limit = timeouts.next().unwrap();
        // A write is cancelled after a second, when the channel can take output again.
        let (pause, hour) = (limit - Duration::from_secs(59), Duration::from_secs(3600));
        timeouts.pause_output(pause);
        assert!(timeouts.next().is_none() && timeouts.check_stall(limit).is_none());
        // The next write goes on where the last one was.
        timeouts.resume_output(pause + hour);
        let later = timeouts.next().unwrap();
        assert_eq!(later, limit + hour);
        let error = timeouts.check_stall(later).unwrap();
        assert!(error.message().contains("the client has taken nothing for as long"), "{error}");
        // A client that takes everything owes nothing after a pause, either.
        timeouts.pause_output(later);
        timeouts.set_writing(false);
        timeouts.resume_output(later + hour);
        assert!(timeouts.next().is_none());
    }
}
