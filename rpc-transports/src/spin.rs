//! Adaptive spinning: a thread looks for input for a while before it sleeps, which saves the time
//! that waking it would take.
//!
//! Waking a thread on an idle core costs tens of microseconds, several times as much as a system
//! call. A [`Spinner`] looks for input for at most as long, and yields its core between two looks.
//! It learns: after looks in vain it is used ever less often. It stops at once where another thread
//! wants the core. Of several cores, a process leaves one free of spinning threads.

use std::sync::LazyLock;
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

/// Permissions to spin of this process.
static SLOTS: LazyLock<SpinSlots> = LazyLock::new(|| {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    SpinSlots::new((cores - 1).max(1))
});

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
        let Some(_slot) = SLOTS.take() else { return false };
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

/// Permissions for threads to spin.
struct SpinSlots {
    most: usize,
    /// Number of threads that spin now.
    spinning: AtomicUsize,
}

impl SpinSlots {
    fn new(most: usize) -> Self {
        Self { most, spinning: AtomicUsize::new(0) }
    }

    /// Takes a permission for one thread, if one is left.
    fn take(&self) -> Option<SpinSlot<'_>> {
        let one_more = |spinning| (spinning < self.most).then_some(spinning + 1);
        let taken = self.spinning.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more);
        taken.is_ok().then(|| SpinSlot(self))
    }
}

/// Permission to spin, for one thread, until dropped.
struct SpinSlot<'a>(&'a SpinSlots);

impl Drop for SpinSlot<'_> {
    fn drop(&mut self) {
        self.0.spinning.fetch_sub(1, Ordering::AcqRel);
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
    fn there_are_as_many_permissions_as_allowed_and_each_is_returned_once() {
        let slots = SpinSlots::new(2);
        let (first, second) = (slots.take(), slots.take());
        assert!(first.is_some() && second.is_some() && slots.take().is_none());
        drop(first);
        assert!(slots.take().is_some());
        drop(second);
        assert_eq!(slots.spinning.load(Ordering::Acquire), 0);
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
