//! Models under shuttle, which runs the threads of a test one at a time in orders that it chooses,
//! and the types by which it can switch between them. Outside of a model these are the system's.
//!
//! `RPC_MODEL_RUNS` sets the number of orders that each model tries.
//!
//! Shuttle knows sequential consistency alone: each operation takes effect at once, for all
//! threads. A weaker ordering than the code needs is not found; the comments at the fences say
//! which order is needed and why.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::atomic::{self, Ordering};
use std::time::Duration;

use parking_lot::MutexGuard;
use shuttle::Runner;
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};

use super::system;

thread_local! {
    /// True while this thread runs a model. Shuttle runs all threads of a model on one.
    static MODELLED: Cell<bool> = const { Cell::new(false) };
    /// Threads of the model that wait on words.
    static WAITERS: RefCell<Vec<Waiter>> = const { RefCell::new(Vec::new()) };
}

/// Thread of a model that waits on a word.
struct Waiter {
    word: *const atomic::AtomicU32,
    is_woken: Rc<Cell<bool>>,
    thread: shuttle::thread::Thread,
}

/// Lets a model go on with another thread.
fn switch() {
    if MODELLED.get() {
        // Time does not pass in a model.
        shuttle::thread::sleep(Duration::ZERO);
    }
}

/// Declares atomics that a model can interrupt before each operation.
macro_rules! atomics {
    ($($name:ident of $value:ty;)+) => {$(
        #[derive(Debug, Default)]
        #[repr(transparent)]
        pub(crate) struct $name(atomic::$name);

        #[allow(dead_code, reason = "each of them has what any of them needs")]
        impl $name {
            pub(crate) fn new(value: $value) -> Self {
                Self(atomic::$name::new(value))
            }

            /// Returns the atomic at an address.
            ///
            /// # Safety
            ///
            /// As for the standard library's.
            pub(crate) unsafe fn from_ptr<'a>(start: *mut $value) -> &'a Self {
                // SAFETY: the caller's promise, and this type has the form of the one inside.
                unsafe { &*start.cast::<Self>() }
            }

            pub(crate) fn load(&self, order: Ordering) -> $value {
                switch();
                self.0.load(order)
            }

            pub(crate) fn store(&self, value: $value, order: Ordering) {
                switch();
                self.0.store(value, order);
            }

            pub(crate) fn swap(&self, value: $value, order: Ordering) -> $value {
                switch();
                self.0.swap(value, order)
            }

            pub(crate) fn compare_exchange(
                &self,
                from: $value,
                to: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                switch();
                self.0.compare_exchange(from, to, success, failure)
            }

            pub(crate) fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }
        }
    )+};
}

atomics! {
    AtomicBool of bool;
    AtomicU32 of u32;
    AtomicU64 of u64;
}

impl AtomicU32 {
    pub(crate) fn fetch_add(&self, value: u32, order: Ordering) -> u32 {
        switch();
        self.0.fetch_add(value, order)
    }
}

impl AtomicU64 {
    pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        switch();
        self.0.fetch_add(value, order)
    }

    pub(crate) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
        switch();
        self.0.fetch_sub(value, order)
    }
}

pub(crate) fn fence(order: Ordering) {
    switch();
    atomic::fence(order);
}

#[derive(Debug)]
pub(crate) struct OnceLock<T>(std::sync::OnceLock<T>);

impl<T> OnceLock<T> {
    pub(crate) const fn new() -> Self {
        Self(std::sync::OnceLock::new())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        switch();
        self.0.get()
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        switch();
        self.0.set(value)
    }

    pub(crate) fn get_or_init(&self, value: impl FnOnce() -> T) -> &T {
        switch();
        self.0.get_or_init(value)
    }

    pub(crate) fn take(&mut self) -> Option<T> {
        self.0.take()
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Mutex<T>(parking_lot::Mutex<T>);

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(parking_lot::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        if !MODELLED.get() {
            return self.0.lock();
        }
        loop {
            switch();
            match self.0.try_lock() {
                Some(guard) => return guard,
                None => shuttle::thread::yield_now(),
            }
        }
    }
}

#[derive(Debug)]
pub(crate) enum Thread {
    System(std::thread::Thread),
    Model(shuttle::thread::Thread),
}

impl Thread {
    pub(crate) fn unpark(&self) {
        match self {
            Self::System(thread) => thread.unpark(),
            Self::Model(thread) => thread.unpark(),
        }
    }
}

pub(crate) fn current() -> Thread {
    if MODELLED.get() { Thread::Model(shuttle::thread::current()) } else { Thread::System(std::thread::current()) }
}

pub(crate) fn park() {
    if MODELLED.get() { shuttle::thread::park() } else { std::thread::park() }
}

pub(crate) fn yield_now() {
    if MODELLED.get() { shuttle::thread::yield_now() } else { std::thread::yield_now() }
}

/// As the system's. In a model without a time limit, so that a lost wake-up is a deadlock.
pub(crate) fn wait_on(word: &AtomicU32, value: u32, at_most: Duration) {
    if !MODELLED.get() {
        return system::wait_on(&word.0, value, at_most);
    }
    // The value is compared and the thread made to wait in one step, as the kernel does it.
    if word.load(Ordering::SeqCst) != value {
        return;
    }
    let (is_woken, thread) = (Rc::new(Cell::new(false)), shuttle::thread::current());
    let waiter = Waiter { word: &raw const word.0, is_woken: Rc::clone(&is_woken), thread };
    WAITERS.with_borrow_mut(|waiters| waiters.push(waiter));
    while !is_woken.get() {
        shuttle::thread::park();
    }
}

pub(crate) fn wake(word: &AtomicU32) {
    if !MODELLED.get() {
        return system::wake(&word.0);
    }
    switch();
    let is_there = |waiter: &mut Waiter| std::ptr::eq(waiter.word, &raw const word.0);
    let woken: Vec<Waiter> = WAITERS.with_borrow_mut(|waiters| waiters.extract_if(.., is_there).collect());
    for waiter in woken {
        waiter.is_woken.set(true);
        waiter.thread.unpark();
    }
}

/// Runs `model` in many orders: half of them random, half with few switches at unlikely points.
pub(crate) fn explore(model: impl Fn() + Send + Sync + Clone + 'static) {
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
            WAITERS.with_borrow_mut(Vec::clear);
        }
    }

    let runs = std::env::var("RPC_MODEL_RUNS").map_or(100, |runs| runs.parse().unwrap());
    let _restore = Restore;
    MODELLED.set(true);
    run(RandomScheduler::new(runs), model.clone());
    run(PctScheduler::new(3, runs), model);
}
