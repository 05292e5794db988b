//! Blocking waits for futures on a plain thread, without a runtime.
//!
//! Every operation of a session is a future; its blocking form runs that future with [`block_on`].
//! Two things distinguish it from a parked thread. A session may leave its input and output to the
//! thread that waits for it ([`Driver`]): the waiting thread then does the work
//! itself, and a call costs no switch to another thread. And waiting inside an async runtime is an
//! error, because it would stop the very thread that has to make progress.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use crate::error::{ErrorKind, Result, RpcError};

/// The input and output of a session that has no thread of its own for them: the threads that wait
/// for its replies do the work. Implemented by sessions; see
/// [`Submission::driven`](crate::Submission::driven).
pub trait Driver: Send + Sync {
    /// Does the session's input and output on the calling thread until `done` returns true. Asks it
    /// after every wait, after every signal that interrupts a wait, and some times a second.
    fn drive(&self, done: &dyn Fn() -> bool);

    /// Sees to it that another thread does the input and output from now on: a reply is awaited in
    /// a way that lends no thread, as from async code. Must not block.
    fn attend(&self);

    /// Announces a call of [`attend`](Self::attend) after some more requests, so that all of them
    /// are written together. A caller that is late must not hold them up for more than about a
    /// millisecond. Must not block.
    fn attend_soon(&self) {
        self.attend();
    }
}

static RUNTIME_PROBE: OnceLock<fn() -> bool> = OnceLock::new();

/// Installs the function that returns true if the calling thread is running async code. The first
/// installed function stays.
///
/// This crate depends on no runtime; the crate that uses one installs its probe when it creates a
/// session.
pub fn set_runtime_probe(probe: fn() -> bool) {
    let _ = RUNTIME_PROBE.set(probe);
}

thread_local! {
    /// True inside of [`allow_blocking`].
    static ALLOWED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`, in which this thread may block although the probe of the runtime takes it for one
/// that runs async code.
///
/// tokio does not tell the thread that is inside of `Runtime::block_on` from a thread that has only
/// entered a runtime (`Handle::enter`), nor from `block_in_place` inside of `block_on`. Both may
/// block, and say so by this function.
///
/// ```
/// use rpc_core::blocking::{allow_blocking, block_on};
///
/// assert_eq!(allow_blocking(|| block_on(async { 3 })).unwrap(), 3);
/// ```
pub fn allow_blocking<T>(work: impl FnOnce() -> T) -> T {
    /// Restores the thread's previous state, also when `work` panics.
    struct Restore(bool);

    impl Drop for Restore {
        fn drop(&mut self) {
            ALLOWED.set(self.0);
        }
    }

    let _restore = Restore(ALLOWED.replace(true));
    work()
}

/// Checks that the calling thread may block.
///
/// # Errors
///
/// [`ErrorKind::ApiMisuse`] if it is running async code.
pub fn check_may_block() -> Result<()> {
    if ALLOWED.get() || !RUNTIME_PROBE.get().is_some_and(|probe| probe()) {
        return Ok(());
    }
    Err(RpcError::new(
        ErrorKind::ApiMisuse,
        "a blocking form was called from inside an async runtime: use the async form and await it, or move the call \
         to `spawn_blocking` or a thread of its own (or, where blocking does no harm, into `blocking::allow_blocking`)",
    ))
}

/// Sessions that the future polled by [`block_on`] on this thread waits for.
enum WaitTarget {
    /// No session that this thread has to drive: park it.
    Parked,
    /// One session, which this thread will drive.
    One(Arc<dyn Driver>),
    /// Several sessions: they are asked to drive themselves.
    Many,
    /// Sessions that the caller of [`collect_drivers`] asks to drive themselves.
    Collected(Vec<Arc<dyn Driver>>),
}

thread_local! {
    /// `None` outside of [`block_on`] and [`collect_drivers`].
    static WAITING: RefCell<Option<WaitTarget>> = const { RefCell::new(None) };
}

/// Records that the future being polled waits for a reply of a session that has to be driven.
pub(crate) fn waiting_for(driver: &Arc<dyn Driver>) {
    let attend = WAITING.with_borrow_mut(|waiting| match waiting {
        None | Some(WaitTarget::Many) => vec![driver.clone()],
        Some(WaitTarget::Parked) => {
            *waiting = Some(WaitTarget::One(driver.clone()));
            Vec::new()
        }
        Some(WaitTarget::One(first)) if Arc::ptr_eq(first, driver) => Vec::new(),
        Some(WaitTarget::Collected(drivers)) => {
            add_driver(drivers, driver);
            Vec::new()
        }
        Some(WaitTarget::One(first)) => {
            let both = vec![first.clone(), driver.clone()];
            *waiting = Some(WaitTarget::Many);
            both
        }
    });
    // Outside of the borrow, because a session may run any code here.
    for driver in attend {
        driver.attend();
    }
}

fn add_driver(drivers: &mut Vec<Arc<dyn Driver>>, driver: &Arc<dyn Driver>) {
    if !drivers.iter().any(|known| Arc::ptr_eq(known, driver)) {
        drivers.push(driver.clone());
    }
}

/// Restores the thread's wait target, also when a future panics.
struct RestoreTarget(Option<WaitTarget>);

impl Drop for RestoreTarget {
    fn drop(&mut self) {
        let outer = self.0.take();
        WAITING.with_borrow_mut(|waiting| *waiting = outer);
    }
}

/// Runs `poll`, which polls a future that the one polled by [`block_on`] does not wait for. The
/// sessions that `poll` needs are asked to drive themselves, as outside of [`block_on`].
pub(crate) fn apart<T>(poll: impl FnOnce() -> T) -> T {
    let _restore = RestoreTarget(WAITING.with_borrow_mut(Option::take));
    poll()
}

/// Runs `poll`, and adds to `drivers` the sessions whose replies the futures polled in it wait for.
/// The caller has to [ask them to attend](Driver::attend): for an executor that polls many futures
/// in a row, whose requests are to be written together.
pub fn collect_drivers<T>(drivers: &mut Vec<Arc<dyn Driver>>, poll: impl FnOnce() -> T) -> T {
    let collected = WaitTarget::Collected(std::mem::take(drivers));
    let _restore = RestoreTarget(WAITING.with_borrow_mut(|waiting| waiting.replace(collected)));
    let polled = poll();
    if let Some(WaitTarget::Collected(found)) = WAITING.with_borrow_mut(Option::take) {
        *drivers = found;
    }
    polled
}

struct Signal {
    woken: AtomicBool,
    thread: Thread,
}

impl Wake for Signal {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // A thread that drives its session wakes itself, and needs no unparking.
        if !self.woken.swap(true, Ordering::AcqRel) && self.thread.id() != thread::current().id() {
            self.thread.unpark();
        }
    }
}

thread_local! {
    /// One signal per thread, so that a call allocates none. A nested wait takes a fresh one.
    static SIGNAL: RefCell<Option<Arc<Signal>>> = const { RefCell::new(None) };
}

/// Restores the thread's previous wait state, also when a future panics.
struct RestoreOnDrop(Option<WaitTarget>, Option<Arc<Signal>>);

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        let outer = self.0.take();
        WAITING.with_borrow_mut(|waiting| *waiting = outer);
        let signal = self.1.take();
        SIGNAL.with_borrow_mut(|slot| *slot = signal);
    }
}

/// Runs `future` to completion on the calling thread.
///
/// # Errors
///
/// Those of [`check_may_block`].
pub fn block_on<F: Future>(future: F) -> Result<F::Output> {
    match run(future, None)? {
        Some(output) => Ok(output),
        // Nothing stops it.
        None => Err(RpcError::internal("a wait ended without its outcome")),
    }
}

/// Runs `future` like [`block_on`], until `stop` returns true: then the future is dropped, which
/// cancels its operation, and the result is `None`.
///
/// `stop` is asked on the calling thread: whenever a signal has interrupted a wait for the session,
/// and else every [`STOP_INTERVAL`], or as often as the session's [`Driver`] asks. It should cost
/// little.
///
/// ```
/// use rpc_core::blocking::block_on_unless;
///
/// assert_eq!(block_on_unless(async { 3 }, &|| false).unwrap(), Some(3));
/// assert_eq!(block_on_unless(std::future::pending::<i64>(), &|| true).unwrap(), None);
/// ```
///
/// # Errors
///
/// Those of [`check_may_block`].
pub fn block_on_unless<F: Future>(future: F, stop: &dyn Fn() -> bool) -> Result<Option<F::Output>> {
    run(future, Some(stop))
}

/// Longest time for which a parked thread does not ask whether it should stop.
pub const STOP_INTERVAL: Duration = Duration::from_millis(50);

fn run<F: Future>(future: F, stop: Option<&dyn Fn() -> bool>) -> Result<Option<F::Output>> {
    check_may_block()?;
    let stopped = || stop.is_some_and(|stop| stop());
    let signal = SIGNAL
        .with_borrow_mut(Option::take)
        .unwrap_or_else(|| Arc::new(Signal { woken: AtomicBool::new(false), thread: thread::current() }));
    let _restore = RestoreOnDrop(WAITING.with_borrow_mut(Option::take), Some(signal.clone()));
    let waker = Waker::from(signal.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        signal.woken.store(false, Ordering::Release);
        WAITING.with_borrow_mut(|waiting| *waiting = Some(WaitTarget::Parked));
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return Ok(Some(output));
        }
        let is_stopped = Cell::new(false);
        let woken = || {
            signal.woken.load(Ordering::Acquire) || {
                is_stopped.set(is_stopped.get() || stopped());
                is_stopped.get()
            }
        };
        match WAITING.with_borrow_mut(|waiting| waiting.replace(WaitTarget::Parked)) {
            Some(WaitTarget::One(driver)) => driver.drive(&woken),
            _ => {
                while !woken() {
                    match stop {
                        Some(_) => thread::park_timeout(STOP_INTERVAL),
                        None => thread::park(),
                    }
                }
            }
        }
        if is_stopped.get() {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use parking_lot::Mutex;

    use super::*;
    use crate::ScopedAction;

    #[test]
    fn a_future_woken_from_another_thread_finishes() {
        let mut started = false;
        let future = std::future::poll_fn(move |cx| {
            if std::mem::replace(&mut started, true) {
                return Poll::Ready(5);
            }
            let waker = cx.waker().clone();
            thread::spawn(move || waker.wake());
            Poll::Pending
        });
        assert_eq!(block_on(future).unwrap(), 5);
    }

    #[test]
    fn a_wait_that_is_stopped_drops_its_future() {
        /// A session whose reply never comes.
        struct Silent;

        impl Driver for Silent {
            fn drive(&self, done: &dyn Fn() -> bool) {
                while !done() {
                    thread::yield_now();
                }
            }

            fn attend(&self) {}
        }

        let silent: Arc<dyn Driver> = Arc::new(Silent);
        for is_driven in [true, false] {
            let (alive, asked) = (Arc::new(()), Cell::new(0));
            let held = alive.clone();
            let future = std::future::poll_fn(|_| {
                let _ = &held;
                if is_driven {
                    waiting_for(&silent);
                }
                Poll::<()>::Pending
            });
            let stop = || {
                asked.set(asked.get() + 1);
                asked.get() == 3
            };
            assert_eq!(block_on_unless(future, &stop).unwrap(), None);
            assert_eq!(asked.get(), 3, "not asked again once it has said so");
            drop(held);
            assert_eq!(Arc::strong_count(&alive), 1);
        }
    }

    #[test]
    fn an_outcome_that_is_there_is_not_stopped() {
        assert_eq!(block_on_unless(std::future::ready(4), &|| true).unwrap(), Some(4));
    }

    /// A session that counts its requests, and replies after them.
    #[derive(Default)]
    struct Counted {
        driven: AtomicUsize,
        attended: AtomicUsize,
        waker: Mutex<Option<Waker>>,
    }

    impl Driver for Counted {
        fn drive(&self, done: &dyn Fn() -> bool) {
            self.driven.fetch_add(1, Ordering::Relaxed);
            self.reply();
            assert!(done());
        }

        fn attend(&self) {
            self.attended.fetch_add(1, Ordering::Relaxed);
            self.reply();
        }
    }

    impl Counted {
        fn reply(&self) {
            if let Some(waker) = self.waker.lock().take() {
                waker.wake();
            }
        }
    }

    #[test]
    fn an_operation_that_is_only_started_is_not_waited_for() {
        let (awaited, started) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
        let drivers: [Arc<dyn Driver>; 2] = [awaited.clone(), started.clone()];
        let mut pending = None;
        let future = std::future::poll_fn(|cx| {
            if pending.is_some() {
                return Poll::Ready(());
            }
            *awaited.waker.lock() = Some(cx.waker().clone());
            waiting_for(&drivers[0]);
            let driver = drivers[1].clone();
            let steps = std::future::poll_fn(move |_| {
                waiting_for(&driver);
                Poll::<Result<()>>::Pending
            });
            pending = Some(ScopedAction::steps(|_| steps).start());
            Poll::Pending
        });
        block_on(future).unwrap();
        let counts =
            |session: &Counted| (session.driven.load(Ordering::Relaxed), session.attended.load(Ordering::Relaxed));
        assert_eq!((counts(&awaited), counts(&started)), ((1, 0), (0, 1)));
    }

    #[test]
    fn sessions_that_are_collected_are_asked_by_the_caller() {
        let sessions = [Arc::new(Counted::default()), Arc::new(Counted::default())];
        let drivers: [Arc<dyn Driver>; 2] = [sessions[0].clone(), sessions[1].clone()];
        let mut collected = Vec::new();
        for _ in 0..2 {
            collect_drivers(&mut collected, || drivers.iter().for_each(waiting_for));
        }
        assert_eq!(collected.len(), 2, "each session once");
        let attended = || sessions.each_ref().map(|session| session.attended.load(Ordering::Relaxed));
        assert_eq!(attended(), [0, 0]);
        collected.iter().for_each(|driver| driver.attend());
        assert_eq!(attended(), [1, 1]);
        // A wait inside drives its session, and afterwards all is as before.
        collect_drivers(&mut collected, || {
            *sessions[0].waker.lock() = None;
            let mut polled = false;
            let wait = std::future::poll_fn(|cx| {
                if std::mem::replace(&mut polled, true) {
                    return Poll::Ready(());
                }
                *sessions[0].waker.lock() = Some(cx.waker().clone());
                waiting_for(&drivers[0]);
                Poll::Pending
            });
            block_on(wait).unwrap();
        });
        assert_eq!(sessions[0].driven.load(Ordering::Relaxed), 1);
        waiting_for(&drivers[1]);
        assert_eq!(attended(), [1, 2]);
    }

    #[test]
    fn nested_waits_do_not_disturb_each_other() {
        let inner = async { block_on(async { 1 }).unwrap() + 1 };
        assert_eq!(block_on(inner).unwrap(), 2);
    }
}
