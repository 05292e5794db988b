//! Limit on the rate of log lines that a peer can cause.

use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
// For `log_limited!`, in crates that may not depend on it.
#[doc(hidden)]
pub use tracing;

/// Lines of one kind that are logged within [`INTERVAL`], by default.
const MAX_LINES: u32 = 10;

/// Time over which lines are counted. It begins with the first line after the last interval.
const INTERVAL: Duration = Duration::from_secs(10);

/// Limit on log lines of one kind: ten within ten seconds, or another number. Peers can cause the
/// lines, and must not fill the operator's disk, or hide other lines among theirs.
///
/// [`log_limited!`](crate::log_limited) makes one for each place that logs.
#[derive(Debug)]
pub struct LogLimit {
    max_lines: u32,
    count: Mutex<LineCount>,
}

#[derive(Debug)]
struct LineCount {
    /// Begin of the interval. `None` before the first line.
    since: Option<Instant>,
    /// Lines that were logged in the interval.
    logged: u32,
    /// Lines that were left out since the last one that was logged.
    left_out: u64,
}

/// Remark on lines that are left out beside the one that is logged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// Number of lines that were left out before this one.
    Before(u64),
    /// Time for which lines after this one are left out.
    AfterFor(Duration),
}

impl LogLimit {
    /// Creates a limit. Nothing is logged so far.
    #[must_use]
    pub const fn new() -> Self {
        Self::with_max_lines(MAX_LINES)
    }

    /// Creates a limit of so many lines within ten seconds.
    #[must_use]
    pub const fn with_max_lines(max_lines: u32) -> Self {
        Self { max_lines, count: Mutex::new(LineCount { since: None, logged: 0, left_out: 0 }) }
    }

    /// Counts a line at the time `now`. Returns `None` if it is to be left out; otherwise the
    /// remark that belongs to it, if lines before or after it are left out.
    pub fn admit(&self, now: Instant) -> Option<Option<LeftOut>> {
        let mut count = self.count.lock();
        let elapsed = count.since.map_or(INTERVAL, |since| now.saturating_duration_since(since));
        if elapsed >= INTERVAL {
            (count.since, count.logged) = (Some(now), 0);
        } else if count.logged >= self.max_lines {
            count.left_out += 1;
            return None;
        }
        count.logged += 1;
        let before = std::mem::take(&mut count.left_out);
        Some(if count.logged == self.max_lines {
            Some(LeftOut::AfterFor(INTERVAL.saturating_sub(elapsed)))
        } else {
            (before > 0).then_some(LeftOut::Before(before))
        })
    }
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Before(count) => write!(f, "{count} more like this since the last one"),
            Self::AfterFor(time) => write!(f, "all like this in the next {} s", time.as_secs_f64().ceil()),
        }
    }
}

/// Logs an event as `tracing::event!` does, but at most ten within ten seconds from one place in
/// the program. The field `left_out` says how many lines were left out.
///
/// For every line at `info` or above that a peer can cause.
///
/// ```
/// # let (peer, error) = ("10.0.0.7:4711", "no token");
/// rpc_core::log_limited!(WARN, peer, %error, "refused a client");
/// ```
#[macro_export]
macro_rules! log_limited {
    ($level:ident, $($event:tt)+) => {{
        static LIMIT: $crate::log_limit::LogLimit = $crate::log_limit::LogLimit::new();
        if $crate::log_limit::tracing::enabled!($crate::log_limit::tracing::Level::$level)
            && let Some(left_out) = LIMIT.admit(::std::time::Instant::now())
        {
            let left_out = left_out.map($crate::log_limit::tracing::field::display);
            $crate::log_limit::tracing::event!($crate::log_limit::tracing::Level::$level, left_out, $($event)+);
        }
    }};
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Counts events.
    struct Counter(Arc<AtomicU64>);

    impl Subscriber for Counter {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn a_thousand_lines_from_one_place_are_at_most_ten_in_ten_seconds() {
        let (logged, start) = (Arc::new(AtomicU64::new(0)), Instant::now());
        tracing::subscriber::with_default(Counter(logged.clone()), || {
            for peer in 0..1000 {
                log_limited!(WARN, peer, "refused a client");
            }
        });
        let intervals = 1 + start.elapsed().as_secs() / INTERVAL.as_secs();
        assert!((10..=intervals * u64::from(MAX_LINES)).contains(&logged.load(Ordering::Relaxed)));
    }

    #[test]
    fn ten_lines_pass_in_ten_seconds_and_the_others_are_counted() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        let at = |seconds: u64| limit.admit(start + Duration::from_secs(seconds));
        for _ in 1..MAX_LINES {
            assert_eq!(at(0), Some(None));
        }
        assert_eq!(at(4).unwrap().unwrap().to_string(), "all like this in the next 6 s");
        for _ in 0..17 {
            assert_eq!(at(9), None);
        }
        assert_eq!(at(10).unwrap().unwrap().to_string(), "17 more like this since the last one");
        assert_eq!(at(10), Some(None));
    }

    #[test]
    fn lines_that_come_now_and_then_all_pass() {
        let (limit, start) = (LogLimit::new(), Instant::now());
        for minute in 0..100 {
            assert_eq!(limit.admit(start + Duration::from_secs(60 * minute)), Some(None));
        }
    }
}
