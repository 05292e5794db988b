//! Models of the scheduling under shuttle, which runs the threads of a test one at a time in orders
//! that it chooses: no order may lose a wake-up, a permit or a request.
//!
//! `RPC_MODEL_RUNS` sets the number of orders that each model tries.

use std::cell::Cell;
use std::io;
use std::ops::{Deref, DerefMut};

use parking_lot::Mutex as PlainMutex;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::{Runner, future, rand, thread};

use super::*;
use crate::local::sync::system;
use crate::local::thread_quota::{ThreadLease, WantsThreads};

thread_local! {
    /// True while this thread runs a model. Shuttle runs all threads of a model on one.
    static MODELLED: Cell<bool> = const { Cell::new(false) };
}

/// Mutex of a model where one runs, and of the system elsewhere.
#[derive(Debug)]
pub(in crate::local) enum Mutex<T> {
    System(parking_lot::Mutex<T>),
    Model(shuttle::sync::Mutex<T>),
}

impl<T> Mutex<T> {
    pub(in crate::local) fn new(value: T) -> Self {
        if MODELLED.get() {
            Self::Model(shuttle::sync::Mutex::new(value))
        } else {
            Self::System(parking_lot::Mutex::new(value))
        }
    }

    pub(in crate::local) fn lock(&self) -> MutexGuard<'_, T> {
        match self {
            Self::System(mutex) => MutexGuard::System(mutex.lock()),
            Self::Model(mutex) => MutexGuard::Model(Some(mutex.lock().unwrap())),
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

pub(in crate::local) enum MutexGuard<'a, T> {
    System(parking_lot::MutexGuard<'a, T>),
    /// `None` only while a [`Condvar`] has it.
    Model(Option<shuttle::sync::MutexGuard<'a, T>>),
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        match self {
            Self::System(guard) => guard,
            Self::Model(guard) => guard.as_ref().unwrap(),
        }
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        match self {
            Self::System(guard) => guard,
            Self::Model(guard) => guard.as_mut().unwrap(),
        }
    }
}

pub(in crate::local) enum Condvar {
    System(parking_lot::Condvar),
    Model(shuttle::sync::Condvar),
}

impl Condvar {
    pub(in crate::local) fn new() -> Self {
        if MODELLED.get() { Self::Model(shuttle::sync::Condvar::new()) } else { Self::System(Default::default()) }
    }

    pub(in crate::local) fn notify_one(&self) {
        match self {
            Self::System(condvar) => _ = condvar.notify_one(),
            Self::Model(condvar) => condvar.notify_one(),
        }
    }

    /// Waits while `condition` is true. In a model the time passes, or it does not, by chance.
    pub(in crate::local) fn wait_while_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        mut condition: impl FnMut(&mut T) -> bool,
        timeout: Duration,
    ) {
        match (self, guard) {
            (Self::System(condvar), MutexGuard::System(guard)) => {
                condvar.wait_while_for(guard, condition, timeout);
            }
            (Self::Model(condvar), MutexGuard::Model(slot)) => {
                while condition(slot.as_mut().unwrap()) {
                    if rand::Rng::gen_bool(&mut rand::thread_rng(), 0.1) {
                        return;
                    }
                    *slot = slot.take().map(|guard| condvar.wait(guard).unwrap());
                }
            }
            _ => unreachable!("a lock was made in a model, and its condition variable was not"),
        }
    }
}

pub(in crate::local) fn spawn(run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    if !MODELLED.get() {
        return system::spawn(run);
    }
    drop(thread::spawn(run));
    Ok(())
}

/// Runs `model` in many orders: half of them random, half with few switches at unlikely points.
fn explore(model: impl Fn() + Send + Sync + Clone + 'static) {
    fn run(scheduler: impl Scheduler + 'static, model: impl Fn() + Send + Sync + 'static) {
        let mut config = shuttle::Config::new();
        // Our code is not built for the 60 KiB that a thread has by default.
        config.stack_size = 1 << 20;
        Runner::new(scheduler, config).run(model);
    }

    /// Ends the model on this thread, also when it panics.
    struct Restore;

    impl Drop for Restore {
        fn drop(&mut self) {
            MODELLED.set(false);
        }
    }

    let runs = std::env::var("RPC_MODEL_RUNS").map_or(100, |runs| runs.parse().unwrap());
    let _restore = Restore;
    MODELLED.set(true);
    run(RandomScheduler::new(runs), model.clone());
    run(PctScheduler::new(3, runs), model);
}

/// A session that wants permits, and keeps each until it is told to return it.
#[derive(Default)]
struct Wanting {
    given: PlainMutex<Vec<ThreadLease>>,
    /// Number of permits that it still wants.
    wants: AtomicUsize,
}

impl Wanting {
    fn wants_one(&self) -> bool {
        self.wants.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |wants| wants.checked_sub(1)).is_ok()
    }
}

impl WantsThreads for Wanting {
    fn take_thread(self: Arc<Self>, lease: ThreadLease) -> Option<ThreadLease> {
        thread::yield_now();
        if !self.wants_one() {
            return Some(lease);
        }
        self.given.lock().push(lease);
        None
    }
}

#[test]
fn permits_reach_every_session_that_waits_for_one() {
    explore(|| {
        let quota = ThreadQuota::new(2);
        let sessions = (0..4).map(|_| {
            let quota = quota.clone();
            thread::spawn(move || {
                let session = Arc::new(Wanting::default());
                for _ in 0..3 {
                    session.wants.fetch_add(1, Ordering::SeqCst);
                    let waiting: Weak<Wanting> = Arc::downgrade(&session);
                    if let Some(lease) = quota.reserve_or_wait(|| waiting) {
                        assert!(session.wants_one());
                        session.given.lock().push(lease);
                    }
                    loop {
                        let given = session.given.lock().pop();
                        assert!(quota.used() <= 2);
                        if given.is_some() {
                            break;
                        }
                        thread::yield_now();
                    }
                }
            })
        });
        sessions.collect::<Vec<_>>().into_iter().for_each(|session| session.join().unwrap());
        assert_eq!((quota.used(), quota.waiting()), (0, 0));
    });
}

/// Submits calls to two sessions that share a quota, from two threads, several on each lane. Checks
/// that each call runs once, in the order of its lane, and that all threads end.
fn calls_from_two_threads(max_threads: usize, quota: usize) {
    const LANES: u32 = 2;
    let quota = ThreadQuota::new(quota);
    let order: Arc<PlainMutex<Vec<[i64; 3]>>> = Arc::default();
    let sessions = [0_i64, 1].map(|index| {
        let (registry, entries) = (Registry::new(), order.clone());
        registry.add("note", move |lane: i64, n: i64| {
            thread::yield_now();
            entries.lock().push([index, lane, n]);
        });
        let limits = SessionLimits { max_threads, ..SessionLimits::default() };
        let session = LocalSession::builder(registry).limits(limits).total_threads(quota.clone()).build();
        let note = handle(&session, "note");
        (session, note)
    });
    let callers = [0_u32, 1].map(|caller| {
        let sessions = sessions.clone();
        thread::spawn(move || {
            let mut replies = Vec::new();
            for n in 0..2 {
                for (session, note) in &sessions {
                    for lane in (0..LANES).map(|lane| LANES * caller + lane) {
                        let call = call(*note, vec![i64::from(lane).into(), i64::from(n).into()]);
                        replies.push(session.submit(call.on(Lane(lane))).reply());
                    }
                }
            }
            replies.into_iter().for_each(|reply| _ = future::block_on(reply).unwrap());
        })
    });
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    let order = std::mem::take(&mut *order.lock());
    for (index, (session, _)) in sessions.iter().enumerate() {
        for lane in 0..2 * LANES {
            let ran = order.iter().filter(|[session, on, _]| (*session, *on) == (index as i64, lane.into()));
            assert_eq!(ran.map(|[.., n]| *n).collect::<Vec<_>>(), [0, 1]);
        }
        assert!(session.local_inner().lanes.lock().threads.live() <= max_threads);
        session.close(RpcError::new(ErrorKind::Closed, "over"));
    }
    while sessions.iter().any(|(session, _)| session.local_inner().lanes.lock().threads.live() > 0) {
        thread::yield_now();
    }
    while quota.used() > 0 {
        thread::yield_now();
    }
}

#[test]
fn calls_run_once_and_in_order_with_threads_enough() {
    explore(|| calls_from_two_threads(8, 8));
}

#[test]
fn calls_run_once_and_in_order_while_they_wait_for_threads() {
    explore(|| calls_from_two_threads(3, 1));
}
