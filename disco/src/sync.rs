//! Atomics, locks and waits of the command feed and of shared memory. In tests they are types of
//! the same form, which a model of the threads' orders can interrupt.

#[cfg(test)]
#[allow(unsafe_code)]
pub(crate) mod modelled;

#[cfg(not(test))]
pub(crate) use std::sync::OnceLock;
#[cfg(not(test))]
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, fence};
#[cfg(not(test))]
pub(crate) use std::thread::{Thread, current, park, yield_now};

#[cfg(not(test))]
pub(crate) use parking_lot::Mutex;

#[cfg(test)]
pub(crate) use self::modelled::{
    AtomicBool, AtomicU32, AtomicU64, Mutex, OnceLock, Thread, current, fence, park, wait_on, wake, yield_now,
};
#[cfg(not(test))]
pub(crate) use self::system::{wait_on, wake};

/// Waits on words that several processes may share.
mod system {
    use std::sync::atomic::AtomicU32;
    use std::time::Duration;

    #[cfg(target_os = "linux")]
    use rustix::thread::futex;

    /// Sleeps while the word has this value, until it is woken, or for `at_most`. May return
    /// earlier.
    #[cfg(target_os = "linux")]
    pub(crate) fn wait_on(word: &AtomicU32, value: u32, at_most: Duration) {
        let timeout = futex::Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
        // Not `PRIVATE`: the word may be in several processes. The reason of the wake-up does not
        // matter: the waiter looks for itself.
        _ = futex::wait(word, futex::Flags::empty(), value, Some(&timeout));
    }

    /// Wakes all that wait on the word.
    #[cfg(target_os = "linux")]
    pub(crate) fn wake(word: &AtomicU32) {
        _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
    }

    /// Waits without a futex: a sleeper looks every millisecond.
    #[cfg(not(target_os = "linux"))]
    pub(crate) fn wait_on(_: &AtomicU32, _: u32, at_most: Duration) {
        std::thread::sleep(at_most.min(Duration::from_millis(1)));
    }

    #[cfg(not(target_os = "linux"))]
    pub(crate) fn wake(_: &AtomicU32) {}
}
