//! A function that measures another one: what a client holds of it.

use std::time::Duration;

use rpc_core::{Handle, Reference, Value};

/// A measurement: the function, and how often it is called. The measuring itself is
/// `rpc.time_function`, which runs where the function does.
pub(super) struct TimeEvaluator {
    pub(super) function: Handle,
    /// Function that is called before each measurement, with the same arguments.
    pub(super) before: Option<Handle>,
    pub(super) timer: Handle,
    pub(super) number: i64,
    pub(super) repeat: i64,
    pub(super) min_repeat_ms: i64,
    /// Number of attempts of no duration at all, by the clock, after which a measurement is as it
    /// is, although `min_repeat_ms` is not reached.
    pub(super) limit_zero_time_iterations: i64,
    pub(super) cooldown: Duration,
    pub(super) repeats_to_cooldown: i64,
    pub(super) cache_flush_bytes: i64,
}

/// Attempts at a measurement that lasts for at least a time: each makes more calls than the one
/// before, as TVM's evaluator does.
#[derive(Debug)]
pub(super) struct Attempts {
    /// Number of calls in the next attempt.
    pub(super) number: i64,
    min_repeat_ms: f64,
    zero_times_left: i64,
}

impl Attempts {
    pub(super) fn new(evaluator: &TimeEvaluator, number: i64) -> Self {
        let TimeEvaluator { min_repeat_ms, limit_zero_time_iterations, .. } = *evaluator;
        Self { number, min_repeat_ms: min_repeat_ms as f64, zero_times_left: limit_zero_time_iterations }
    }

    /// Records the duration of the attempt. Returns true if it is the last one, whose number of
    /// calls stays; another attempt would have more.
    pub(super) fn ends_with(&mut self, duration_ms: f64) -> bool {
        if duration_ms <= 0.0 {
            self.zero_times_left = self.zero_times_left.saturating_sub(1);
        }
        if duration_ms >= self.min_repeat_ms || self.zero_times_left <= 0 {
            return true;
        }
        if duration_ms > 0.0 {
            const GOLDEN_RATIO: f64 = 1.618;
            let number = self.number as f64;
            self.number = (self.min_repeat_ms / (duration_ms / number) + 1.0).max(number * GOLDEN_RATIO) as i64;
        }
        false
    }
}

impl TimeEvaluator {
    /// Returns the objects of the session that the measurement holds.
    pub(super) fn objects(&self) -> Value {
        let functions = [Some(self.function), self.before, Some(self.timer)];
        Value::List(functions.into_iter().flatten().map(|handle| Reference::Function(handle).into()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attempts(number: i64, min_repeat_ms: i64, limit_zero_time_iterations: i64) -> Attempts {
        Attempts { number, min_repeat_ms: min_repeat_ms as f64, zero_times_left: limit_zero_time_iterations }
    }

    #[test]
    fn attempts_grow_until_one_lasts_long_enough() {
        let mut attempts = attempts(10, 100, 100);
        // A millisecond for each call.
        assert!(!attempts.ends_with(10.0));
        assert_eq!(attempts.number, 101);
        assert!(attempts.ends_with(101.0));
        assert_eq!(attempts.number, 101);
        // One that was nearly long enough grows by more than it lacks.
        let mut attempts = super::tests::attempts(1000, 100, 100);
        assert!(!attempts.ends_with(99.999));
        assert_eq!(attempts.number, 1618);
    }

    #[test]
    fn attempts_of_no_duration_are_limited() {
        let mut limited = attempts(10, 100, 3);
        assert!(!limited.ends_with(0.0) && !limited.ends_with(0.0));
        assert_eq!(limited.number, 10, "nothing tells how many would be enough");
        assert!(limited.ends_with(0.0));
        // Others between them do not start the count again.
        let mut mixed = attempts(10, 100, 2);
        assert!(!mixed.ends_with(0.0) && !mixed.ends_with(1.0) && mixed.ends_with(0.0));
        for limit in [0, -1, i64::MIN] {
            assert!(attempts(10, 100, limit).ends_with(1.0), "no limit is left at all");
        }
        assert!(attempts(10, 0, 100).ends_with(0.0), "no time is asked for");
    }
}
