//! Usage of the pool and of each key: over the last hour, minute by minute, and over the last day.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use rpc_transports::tracker::Sample;

use super::scheduler::{Scheduler, SlotTotals};

const MINUTE: Duration = Duration::from_secs(60);

/// Periods of a history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Periods {
    pub(super) length: Duration,
    /// Number of periods that are kept, the current one included.
    pub(super) count: usize,
}

/// The minutes of an hour, and the current one.
pub(super) const LAST_HOUR: Periods = Periods { length: MINUTE, count: 61 };

/// The quarters of an hour of a day, and the current one.
pub(super) const LAST_DAY: Periods = Periods { length: Duration::from_secs(15 * 60), count: 97 };

/// Maximum number of keys with histories. Each takes about 12 KiB.
const MAX_KEYS: usize = 64;

/// Usage in the last periods.
#[derive(Debug)]
pub(super) struct History {
    of: Periods,
    /// Periods, the oldest first. The last one is the current period.
    periods: VecDeque<Period>,
    last: SlotTotals,
}

#[derive(Clone, Copy, Debug)]
struct Period {
    began: Instant,
    capacity: u64,
    busy: u64,
    waiting: u64,
    granted: u64,
    waited_ms: u64,
}

impl Period {
    fn new(began: Instant, totals: SlotTotals) -> Self {
        let SlotTotals { capacity, free, waiting, .. } = totals;
        Self { began, capacity, busy: capacity - free, waiting, granted: 0, waited_ms: 0 }
    }
}

impl History {
    pub(super) fn new(now: Instant, of: Periods) -> Self {
        let last = SlotTotals::default();
        Self { of, periods: [Period::new(now, last)].into(), last }
    }

    /// Records the totals that apply from now on.
    pub(super) fn note(&mut self, now: Instant, totals: SlotTotals) {
        self.turn(now);
        let SlotTotals { capacity, free, waiting, granted, waited_ms } = totals;
        // The sums of a key begin again after its last server has left.
        let before = if granted < self.last.granted { SlotTotals::default() } else { self.last };
        self.last = totals;
        if let Some(period) = self.periods.back_mut() {
            period.capacity = capacity;
            period.busy = period.busy.max(capacity - free);
            period.waiting = period.waiting.max(waiting);
            period.granted += granted - before.granted;
            period.waited_ms += waited_ms.saturating_sub(before.waited_ms);
        }
    }

    /// Returns the samples of the periods, the oldest first.
    pub(super) fn samples(&mut self, now: Instant) -> Vec<Sample> {
        self.turn(now);
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let sample = |period: &Period| Sample {
            ago_ms: super::millis(now.saturating_duration_since(period.began)),
            capacity: narrow(period.capacity),
            busy: narrow(period.busy),
            waiting: narrow(period.waiting),
            granted: narrow(period.granted),
            waited_ms: period.waited_ms,
        };
        self.periods.iter().map(sample).collect()
    }

    /// Returns true if nothing has been granted or has waited, and there are no slots.
    fn is_empty(&mut self, now: Instant) -> bool {
        self.turn(now);
        self.periods.iter().all(|period| (period.capacity, period.waiting, period.granted) == (0, 0, 0))
    }

    /// Starts the periods that have begun since the last call.
    fn turn(&mut self, now: Instant) {
        let Periods { length, count } = self.of;
        while let Some(last) = self.periods.back() {
            let mut next = last.began + length;
            if next > now {
                return;
            }
            let passed = now.saturating_duration_since(next).as_secs() / length.as_secs();
            if let Some(unseen) = passed.checked_sub(count as u64) {
                // The last change is older than the history.
                next += length * u32::try_from(unseen).unwrap_or(0);
            }
            self.periods.push_back(Period::new(next, self.last));
            if self.periods.len() > count {
                self.periods.pop_front();
            }
        }
    }
}

/// Histories of the first keys that servers have registered with.
#[derive(Debug)]
pub(super) struct KeyHistories {
    keys: BTreeMap<String, KeyHistory>,
    /// Totals of the pool when all keys were noted last.
    last: SlotTotals,
}

#[derive(Debug)]
struct KeyHistory {
    hour: History,
    day: History,
}

/// Samples of one key.
#[derive(Clone, Debug, Default)]
pub(super) struct KeySamples {
    pub(super) hour: Vec<Sample>,
    pub(super) day: Vec<Sample>,
}

impl KeyHistories {
    pub(super) fn new() -> Self {
        Self { keys: BTreeMap::new(), last: SlotTotals::default() }
    }

    /// Begins the history of a key with which a server registers. At the limit it takes the place
    /// of a key that has had no server for a day, if there is one.
    pub(super) fn track(&mut self, now: Instant, key: &str) {
        if self.keys.contains_key(key) {
            return;
        }
        if self.keys.len() >= MAX_KEYS {
            let unused = self.keys.iter_mut().find_map(|(key, history)| history.day.is_empty(now).then(|| key.clone()));
            let Some(unused) = unused else { return };
            self.keys.remove(&unused);
        }
        let history = KeyHistory { hour: History::new(now, LAST_HOUR), day: History::new(now, LAST_DAY) };
        self.keys.insert(key.to_owned(), history);
    }

    /// Records the totals of all keys that apply from now on.
    pub(super) fn note(&mut self, now: Instant, scheduler: &Scheduler) {
        let totals = scheduler.totals();
        // Most reports change nothing.
        if totals == std::mem::replace(&mut self.last, totals) {
            return;
        }
        for (key, KeyHistory { hour, day }) in &mut self.keys {
            let totals = scheduler.totals_of(key);
            for history in [hour, day] {
                if history.last != totals {
                    history.note(now, totals);
                }
            }
        }
    }

    /// Returns the samples of all keys.
    pub(super) fn samples(&mut self, now: Instant) -> BTreeMap<String, KeySamples> {
        let samples =
            |history: &mut KeyHistory| KeySamples { hour: history.hour.samples(now), day: history.day.samples(now) };
        self.keys.iter_mut().map(|(key, history)| (key.clone(), samples(history))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(free: u64, waiting: u64, granted: u64) -> SlotTotals {
        SlotTotals { capacity: 4, free, waiting, granted, waited_ms: granted * 100 }
    }

    #[test]
    fn minutes_keep_their_peaks_and_an_hour_is_remembered() {
        let start = Instant::now();
        let mut history = History::new(start, LAST_HOUR);
        history.note(start, totals(4, 0, 0));
        history.note(start + Duration::from_secs(10), totals(1, 2, 3));
        history.note(start + Duration::from_secs(20), totals(4, 0, 3));
        history.note(start + 3 * MINUTE, totals(3, 0, 4));
        let samples = history.samples(start + 3 * MINUTE);
        let numbers: Vec<_> = samples.iter().map(|s| (s.capacity, s.busy, s.waiting, s.granted, s.waited_ms)).collect();
        assert_eq!(numbers, [(4, 3, 2, 3, 300), (4, 0, 0, 0, 0), (4, 0, 0, 0, 0), (4, 1, 0, 1, 100)]);
        assert_eq!(samples[0].ago_ms, 180_000);

        // Usage stays until it changes; a gap longer than an hour costs no more than an hour.
        let samples = history.samples(start + 1000 * MINUTE);
        assert_eq!(samples.len(), LAST_HOUR.count);
        assert!(samples.iter().all(|sample| sample.busy == 1 && sample.ago_ms <= 61 * 60_000), "{samples:?}");
    }

    #[test]
    fn the_sums_of_a_key_may_begin_again() {
        let start = Instant::now();
        let mut history = History::new(start, LAST_DAY);
        history.note(start, totals(2, 0, 7));
        history.note(start, SlotTotals::default());
        history.note(start, totals(3, 0, 1));
        let sample = history.samples(start)[0];
        assert_eq!((sample.granted, sample.waited_ms, sample.busy), (8, 800, 2));
    }

    #[test]
    fn keys_beyond_the_limit_take_the_place_of_those_without_servers_for_a_day() {
        let start = Instant::now();
        let mut histories = KeyHistories::new();
        (0..MAX_KEYS).for_each(|number| histories.track(start, &format!("k{number:02}")));
        for history in histories.keys.values_mut() {
            history.day.note(start, totals(4, 0, 1));
        }
        let hours = |hours: u32| start + hours * 60 * MINUTE;
        histories.track(hours(25), "one more");
        assert!(!histories.keys.contains_key("one more"), "all others have servers");
        if let Some(left) = histories.keys.get_mut("k07") {
            left.day.note(hours(25), SlotTotals::default());
        }
        histories.track(hours(48), "one more");
        assert!(!histories.keys.contains_key("one more"), "one had a server a day ago");
        histories.track(hours(50), "one more");
        assert!(histories.keys.len() == MAX_KEYS && histories.keys.contains_key("one more"));
        assert!(!histories.keys.contains_key("k07"));
    }
}
