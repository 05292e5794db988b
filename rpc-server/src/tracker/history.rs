//! Usage of the pool over the last hour, minute by minute.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rpc_transports::tracker::Sample;

use super::scheduler::SlotTotals;

const MINUTE: Duration = Duration::from_secs(60);

/// Number of minutes that are kept: those of an hour, and the current one.
const MINUTES: usize = 61;

/// Usage in the last hour.
#[derive(Debug)]
pub(super) struct History {
    /// Minutes, the oldest first. The last one is the current minute.
    minutes: VecDeque<Minute>,
    last: SlotTotals,
}

#[derive(Clone, Copy, Debug)]
struct Minute {
    began: Instant,
    capacity: u64,
    busy: u64,
    waiting: u64,
    granted: u64,
}

impl Minute {
    fn new(began: Instant, totals: SlotTotals) -> Self {
        let busy = totals.capacity - totals.free;
        Self { began, capacity: totals.capacity, busy, waiting: totals.waiting, granted: 0 }
    }
}

impl History {
    pub(super) fn new(now: Instant) -> Self {
        let last = SlotTotals::default();
        Self { minutes: [Minute::new(now, last)].into(), last }
    }

    /// Records the totals that apply from now on.
    pub(super) fn note(&mut self, now: Instant, totals: SlotTotals) {
        self.turn(now);
        let granted = totals.granted - self.last.granted;
        self.last = totals;
        if let Some(minute) = self.minutes.back_mut() {
            minute.capacity = totals.capacity;
            minute.busy = minute.busy.max(totals.capacity - totals.free);
            minute.waiting = minute.waiting.max(totals.waiting);
            minute.granted += granted;
        }
    }

    /// Returns the samples of the last hour, the oldest minute first.
    pub(super) fn samples(&mut self, now: Instant) -> Vec<Sample> {
        self.turn(now);
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let sample = |minute: &Minute| Sample {
            ago_ms: super::millis(now.saturating_duration_since(minute.began)),
            capacity: narrow(minute.capacity),
            busy: narrow(minute.busy),
            waiting: narrow(minute.waiting),
            granted: narrow(minute.granted),
        };
        self.minutes.iter().map(sample).collect()
    }

    /// Starts the minutes that have begun since the last call.
    fn turn(&mut self, now: Instant) {
        while let Some(last) = self.minutes.back() {
            let mut next = last.began + MINUTE;
            if next > now {
                return;
            }
            let passed = now.saturating_duration_since(next).as_secs() / MINUTE.as_secs();
            if let Some(unseen) = passed.checked_sub(MINUTES as u64) {
                // The last change is older than the history.
                next += MINUTE * u32::try_from(unseen).unwrap_or(0);
            }
            self.minutes.push_back(Minute::new(next, self.last));
            if self.minutes.len() > MINUTES {
                self.minutes.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minutes_keep_their_peaks_and_an_hour_is_remembered() {
        let start = Instant::now();
        let mut history = History::new(start);
        let totals = |free, waiting, granted| SlotTotals { capacity: 4, free, waiting, granted };
        history.note(start, totals(4, 0, 0));
        history.note(start + Duration::from_secs(10), totals(1, 2, 3));
        history.note(start + Duration::from_secs(20), totals(4, 0, 3));
        history.note(start + 3 * MINUTE, totals(3, 0, 4));
        let samples = history.samples(start + 3 * MINUTE);
        let numbers: Vec<_> = samples.iter().map(|s| (s.capacity, s.busy, s.waiting, s.granted)).collect();
        assert_eq!(numbers, [(4, 3, 2, 3), (4, 0, 0, 0), (4, 0, 0, 0), (4, 1, 0, 1)]);
        assert_eq!(samples[0].ago_ms, 180_000);

        // Usage stays until it changes; a gap longer than an hour costs no more than an hour.
        let samples = history.samples(start + 1000 * MINUTE);
        assert_eq!(samples.len(), MINUTES);
        assert!(samples.iter().all(|sample| sample.busy == 1 && sample.ago_ms <= 61 * 60_000), "{samples:?}");
    }
}
