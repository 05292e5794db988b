//! Adaptive spinning: a thread looks for input for a while before it sleeps, which saves the time
//! that waking it would take.
//!
//! Waking a thread on an idle core costs tens of microseconds, several times as much as a system
//! call. A [`Spinner`] looks for input for at most as long, and gives up its core between two looks.
//! It learns: after looks in vain it is used ever less often. It stops at once where another thread
//! wants the core, and one core of the machine always stays free of spinning threads, if there are
//! several.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Time for which a thread looks for input before it sleeps, where spinning is switched on: as long
/// as waking it would take.
pub const SPIN: Duration = Duration::from_micros(50);

/// Longest time that giving up the core takes if no other thread wants it.
const UNCONTENDED: Duration = Duration::from_micros(10);

/// Number of waits in vain after which the pause between two attempts grows no more. By then one
/// wait in 64 spins.
const MOST_MISSES: u32 = 6;

/// Number of threads of this process that spin now.
static SPINNING: AtomicUsize = AtomicUsize::new(0);

/// Spinning of one session, with what it has learned.
#[derive(Debug)]
pub(crate) struct Spinner {
    /// Longest time of one wait.
    limit: Duration,
    /// Number of waits in vain since the last one that helped, at most [`MOST_MISSES`].
    misses: u32,
    /// Number of waits that are left out before the next attempt.
    pause: u32,
}

impl Spinner {
    /// Creates a spinner that looks for `limit`; `None` for no time.
    pub(crate) fn new(limit: Duration) -> Option<Self> {
        (!limit.is_zero()).then_some(Self { limit, misses: 0, pause: 0 })
    }

    /// Looks until `is_ready` returns true, and returns true then. Returns false when the time is
    /// over, another thread wants the core, or too many threads spin already, and at once while
    /// spinning has not helped lately.
    pub(crate) fn wait(&mut self, is_ready: impl FnMut() -> bool) -> bool {
        if self.pause > 0 {
            self.pause -= 1;
            return false;
        }
        let Some(_slot) = SpinSlot::take() else { return false };
        let helped = look(self.limit, is_ready);
        self.learn(helped);
        helped
    }

    fn learn(&mut self, helped: bool) {
        self.misses = if helped { 0 } else { (self.misses + 1).min(MOST_MISSES) };
        self.pause = (1 << self.misses) - 1;
    }
}

/// Looks until `is_ready` returns true, the time is over, or another thread wants the core.
fn look(limit: Duration, mut is_ready: impl FnMut() -> bool) -> bool {
    let began = Instant::now();
    let mut before = began;
    loop {
        if is_ready() {
            return true;
        }
        thread::yield_now();
        let now = Instant::now();
        if now - began >= limit || now - before > UNCONTENDED {
            // The other thread may have been the one that is waited for.
            return is_ready();
        }
        before = now;
    }
}

/// Permission to spin, for one thread.
struct SpinSlot;

impl SpinSlot {
    fn take() -> Option<Self> {
        static MOST: OnceLock<usize> = OnceLock::new();
        let cores = || thread::available_parallelism().map_or(1, usize::from);
        let most = *MOST.get_or_init(|| (cores() - 1).max(1));
        let taken = SPINNING
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |spinning| (spinning < most).then_some(spinning + 1));
        taken.is_ok().then(|| Self)
    }
}

impl Drop for SpinSlot {
    fn drop(&mut self) {
        SPINNING.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_time_is_no_spinner() {
        assert!(Spinner::new(Duration::ZERO).is_none());
    }

    #[test]
    fn input_that_comes_ends_the_look() {
        let mut looks = 0;
        let is_ready = || {
            looks += 1;
            looks == 2
        };
        assert!(look(Duration::from_secs(60), is_ready));
        assert!(!look(SPIN, || false));
    }

    #[test]
    fn a_refused_permission_does_not_return_one() {
        let taken: Vec<_> = std::iter::from_fn(SpinSlot::take).take(64).collect();
        // Other tests spin as well, so that the number is not known.
        assert!(SpinSlot::take().is_none());
        drop(taken);
        assert!(SPINNING.load(Ordering::Acquire) < 64);
    }

    #[test]
    fn waits_in_vain_make_spinning_rarer_and_one_that_helps_restores_it() {
        let mut spinner = Spinner::new(SPIN).unwrap();
        let pauses: Vec<_> = (0..8)
            .map(|_| {
                spinner.learn(false);
                spinner.pause
            })
            .collect();
        assert_eq!(pauses, [1, 3, 7, 15, 31, 63, 63, 63]);
        while spinner.pause > 0 {
            assert!(!spinner.wait(|| unreachable!("a pause does not look")));
        }
        spinner.learn(true);
        assert_eq!(spinner.pause, 0);
    }
}
