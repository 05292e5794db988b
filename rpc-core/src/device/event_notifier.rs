//! Notification of waiters when events of a driver are reached, by one thread for all.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::api::WhenDone;
use crate::error::{Result, RpcError};

/// Point in the work of a stream, as a driver has it.
pub trait DeviceEvent: Send + 'static {
    /// Returns true once the point has been reached. Does not block.
    ///
    /// # Errors
    ///
    /// The error of the work before it, or [`DeviceLost`](crate::ErrorKind::DeviceLost).
    fn is_done(&self) -> Result<bool>;
}

/// Thread that waits for the events of a driver, for
/// [`Stream::when_done`](super::Stream::when_done) of a device. A crate has one, in a `static`.
///
/// The thread checks all events when the driver calls back ([`wake`](Self::wake)), and from time to
/// time: a driver need not call back if the device is lost. Nothing is checked while nobody waits.
pub struct EventNotifier<E> {
    thread_name: &'static str,
    state: Mutex<State<E>>,
    changed: Condvar,
}

struct State<E> {
    /// Waits that were added since the thread last checked.
    new: Vec<PendingWait<E>>,
    /// True if the driver has called back since then.
    called_back: bool,
    has_thread: bool,
}

/// A wait for an event.
struct PendingWait<E> {
    event: E,
    since: Instant,
    done: WhenDone,
}

impl<E: DeviceEvent> EventNotifier<E> {
    /// Creates a notifier. Its thread, which gets this name, starts with the first wait and stays.
    #[must_use]
    pub const fn new(thread_name: &'static str) -> Self {
        let state = State { new: Vec::new(), called_back: false, has_thread: false };
        Self { thread_name, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Calls `done` on the thread when the event has been reached, or has failed. A panic of `done`
    /// is logged, and affects no other wait.
    ///
    /// # Errors
    ///
    /// `done`, if the system cannot start the thread: the caller waits by itself.
    pub fn when_reached(&'static self, event: E, done: WhenDone) -> Result<(), WhenDone> {
        let mut state = self.state.lock();
        if !state.has_thread {
            if let Err(error) = thread::Builder::new().name(self.thread_name.into()).spawn(|| self.watch()) {
                tracing::warn!(%error, "cannot start the thread that watches streams");
                return Err(done);
            }
            state.has_thread = true;
        }
        state.new.push(PendingWait { event, since: Instant::now(), done });
        drop(state);
        self.changed.notify_one();
        Ok(())
    }

    /// Has the thread check the events now. For callbacks of the driver: it does not block, and
    /// calls no driver.
    pub fn wake(&self) {
        self.state.lock().called_back = true;
        self.changed.notify_one();
    }

    fn watch(&self) {
        let mut waiting: Vec<PendingWait<E>> = Vec::new();
        loop {
            let mut state = self.state.lock();
            if waiting.is_empty() {
                self.changed.wait_while(&mut state, |state| state.new.is_empty());
            } else {
                let pause = waiting.iter().map(PendingWait::pause).min().unwrap_or(LONGEST_PAUSE);
                let is_quiet = |state: &mut State<E>| !state.called_back && state.new.is_empty();
                self.changed.wait_while_for(&mut state, is_quiet, pause);
            }
            state.called_back = false;
            waiting.append(&mut state.new);
            drop(state);
            for one in std::mem::take(&mut waiting) {
                // A panic must not affect other waits.
                let checked = catch_unwind(AssertUnwindSafe(|| one.event.is_done()));
                match checked.unwrap_or_else(|_| Err(RpcError::internal("the check of an event panicked"))) {
                    Ok(false) => waiting.push(one),
                    outcome => {
                        if catch_unwind(AssertUnwindSafe(|| (one.done)(outcome.map(drop)))).is_err() {
                            crate::log_limited!(ERROR, "the callback of a wait for a stream panicked");
                        }
                    }
                }
            }
        }
    }
}

impl<E> PendingWait<E> {
    /// Returns the time until the next check: short for recent waits, and never noticeably long.
    fn pause(&self) -> Duration {
        (self.since.elapsed() / 8).clamp(SHORTEST_PAUSE, LONGEST_PAUSE)
    }
}

impl<E> fmt::Debug for EventNotifier<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventNotifier").field("thread_name", &self.thread_name).finish_non_exhaustive()
    }
}

const SHORTEST_PAUSE: Duration = Duration::from_micros(50);

const LONGEST_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::error::ErrorKind;

    /// Event that says these answers, one at each check, and panics when it is told to.
    struct Scripted(mpsc::Receiver<Result<bool>>);

    impl DeviceEvent for Scripted {
        fn is_done(&self) -> Result<bool> {
            let answer = self.0.try_recv().unwrap_or(Ok(false));
            answer.inspect_err(|error| assert_ne!(error.kind(), ErrorKind::Cancelled, "on purpose"))
        }
    }

    fn scripted(answers: impl IntoIterator<Item = Result<bool>>) -> Scripted {
        let (sender, script) = mpsc::channel();
        answers.into_iter().for_each(|answer| sender.send(answer).unwrap());
        Scripted(script)
    }

    /// Waits for an event of a notifier, with a limit against a test that hangs.
    fn wait(notifier: &'static EventNotifier<Scripted>, event: Scripted) -> Result<()> {
        let (told, end) = mpsc::channel();
        assert!(notifier.when_reached(event, Box::new(move |reached| _ = told.send(reached))).is_ok());
        end.recv_timeout(Duration::from_secs(60)).unwrap()
    }

    #[test]
    fn an_event_is_checked_without_callbacks_until_it_is_reached_or_fails() {
        static NOTIFIER: EventNotifier<Scripted> = EventNotifier::new("rpc-test-wait");
        assert_eq!(wait(&NOTIFIER, scripted([Ok(false), Ok(false), Ok(true)])), Ok(()));
        let lost = || Err(RpcError::new(ErrorKind::DeviceLost, "the device is gone"));
        assert_eq!(wait(&NOTIFIER, scripted([Ok(false), lost(), Ok(true)])).unwrap_err().kind(), ErrorKind::DeviceLost);
        let panics = || Err(RpcError::new(ErrorKind::Cancelled, "the driver panics"));
        assert_eq!(wait(&NOTIFIER, scripted([panics()])).unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(wait(&NOTIFIER, scripted([Ok(true)])), Ok(()));
    }

    #[test]
    fn a_wait_that_lasts_or_whose_callback_panics_keeps_no_other() {
        static NOTIFIER: EventNotifier<Scripted> = EventNotifier::new("rpc-test-wait");
        let (told, end) = mpsc::channel();
        let (answers, script) = mpsc::channel();
        assert!(NOTIFIER.when_reached(Scripted(script), Box::new(move |reached| _ = told.send(reached))).is_ok());
        assert!(NOTIFIER.when_reached(scripted([Ok(true)]), Box::new(|_| panic!("on purpose"))).is_ok());
        assert_eq!(wait(&NOTIFIER, scripted([Ok(true)])), Ok(()));
        assert!(end.try_recv().is_err());
        answers.send(Ok(true)).unwrap();
        NOTIFIER.wake();
        assert_eq!(end.recv_timeout(Duration::from_secs(60)).unwrap(), Ok(()));
    }
}
