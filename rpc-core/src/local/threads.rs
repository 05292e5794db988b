//! Threads on which a session's blocking functions run, and the jobs that wait for a thread.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::job::{LaneKey, Parked};
use super::sync::{Condvar, Mutex, MutexGuard, spawn};
use super::thread_quota::{ThreadLease, ThreadQuota, WantsThreads};

/// Time that an idle thread waits for more work before it ends.
const IDLE: Duration = Duration::from_secs(10);

/// A piece of work for a thread.
pub(super) type ThreadTask = Box<dyn FnOnce() + Send>;

/// Pool that a thread works for.
pub(super) trait WorkerPool: Send + Sync {
    /// Decides if a thread that has been idle for long may end. If not, it is about to be given
    /// work.
    fn may_leave(&self, thread: &LaneThread) -> bool;

    /// Records that a thread has ended.
    fn left(self: Arc<Self>);
}

#[derive(Default)]
struct ThreadSlot {
    work: Option<ThreadTask>,
    retired: bool,
}

/// A thread that runs one piece of work at a time and ends when it has been idle for long, or is
/// told to.
///
/// Only one owner may give it work: its creator, or the code that has taken it out of [`Threads`].
#[derive(Clone)]
pub(super) struct LaneThread(Arc<ThreadInner>);

struct ThreadInner {
    slot: Mutex<ThreadSlot>,
    changed: Condvar,
}

impl PartialEq for LaneThread {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl LaneThread {
    /// Starts a thread.
    pub(super) fn spawn<E: WorkerPool + 'static>(pool: Weak<E>) -> io::Result<Self> {
        /// Reports the end of the thread, also when it ends by a panic.
        struct Leave<E: WorkerPool>(Weak<E>);
        impl<E: WorkerPool> Drop for Leave<E> {
            fn drop(&mut self) {
                if let Some(pool) = self.0.upgrade() {
                    pool.left();
                }
            }
        }

        #[cfg(test)]
        if REFUSE.get() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let shared = Arc::new(ThreadInner { slot: Mutex::default(), changed: Condvar::new() });
        let own = Self(shared.clone());
        let run = move || {
            let leave = Leave(pool);
            own.run(|thread| leave.0.upgrade().is_none_or(|pool| pool.may_leave(thread)));
        };
        spawn(run)?;
        Ok(Self(shared))
    }

    /// Gives an idle thread its next work.
    pub(super) fn give(&self, work: ThreadTask) {
        self.0.slot().work = Some(work);
        self.0.changed.notify_one();
    }

    /// Lets the thread end as soon as it is idle.
    pub(super) fn retire(&self) {
        self.0.slot().retired = true;
        self.0.changed.notify_one();
    }

    fn run(&self, may_leave: impl Fn(&Self) -> bool) {
        loop {
            let mut slot = self.0.slot();
            self.0.changed.wait_while_for(&mut slot, |slot| slot.work.is_none() && !slot.retired, IDLE);
            let (work, retired) = (slot.work.take(), slot.retired);
            drop(slot);
            match work {
                Some(work) => work(),
                None if retired || may_leave(self) => return,
                None => {}
            }
        }
    }
}

impl ThreadInner {
    fn slot(&self) -> MutexGuard<'_, ThreadSlot> {
        self.slot.lock()
    }
}

/// Thread for a job.
pub(super) enum Claim {
    /// This thread, which is idle.
    Idle(LaneThread),
    /// A new thread, which the caller starts; if that fails, it calls [`Threads::start_failed`].
    New,
    /// The next thread that becomes free.
    Wait,
}

/// Number of idle threads that are kept for the lane that they served last. Further ones serve any
/// lane.
pub(super) const KEPT_THREADS: usize = 64;

/// The threads of a session.
pub(super) struct Threads<W> {
    max: usize,
    /// Quota that all threads but the first count against.
    quota: Option<Arc<ThreadQuota>>,
    /// Number of threads, including those that are being started.
    live: usize,
    /// Number of those threads that functions run for themselves, and that take no jobs.
    for_functions: usize,
    /// Number of threads that are ending and whose slot another thread has taken. Not included in
    /// `live`.
    passed_on: usize,
    /// Leases of the quota: one less than there are threads, if there is a quota.
    leases: Vec<ThreadLease>,
    /// Idle threads that are kept for the lane that they served last; the most recent at the end.
    kept: Vec<(LaneKey, LaneThread)>,
    /// Idle threads for any lane.
    spare: Vec<LaneThread>,
    /// Jobs that wait for a thread, in the order of arrival. Empty as long as a thread is idle.
    parked: VecDeque<Parked<W>>,
    /// True while the session is in the quota's queue.
    awaits_quota: bool,
    ended: bool,
}

impl<W> Threads<W> {
    pub(super) fn new(max: usize, quota: Option<Arc<ThreadQuota>>) -> Self {
        Self {
            max: max.max(1),
            quota,
            live: 0,
            for_functions: 0,
            passed_on: 0,
            leases: Vec::new(),
            kept: Vec::new(),
            spare: Vec::new(),
            parked: VecDeque::new(),
            awaits_quota: false,
            ended: false,
        }
    }

    /// Chooses a thread for a job of lane `key`. The quota gives `session` one later if there is no
    /// room.
    pub(super) fn claim(&mut self, key: LaneKey, session: impl FnOnce() -> Weak<dyn WantsThreads>) -> Claim {
        if !self.parked.is_empty() {
            return Claim::Wait;
        }
        if let Some(at) = self.kept.iter().rposition(|(lane, _)| *lane == key) {
            return Claim::Idle(self.kept.remove(at).1);
        }
        if let Some(thread) = self.spare.pop() {
            return Claim::Idle(thread);
        }
        if self.reserve() {
            return Claim::New;
        }
        if !self.kept.is_empty() {
            // The thread of the lane that has been idle for longest.
            return Claim::Idle(self.kept.remove(0).1);
        }
        if self.reserve_or_wait(session) { Claim::New } else { Claim::Wait }
    }

    /// Counts one more thread, if there is room for it.
    fn reserve(&mut self) -> bool {
        if self.live >= self.max {
            return false;
        }
        // Each session has at least one thread, so that it makes progress independently of the
        // others.
        if let Some(quota) = &self.quota
            && self.live > 0
        {
            let Some(lease) = quota.try_reserve() else { return false };
            self.leases.push(lease);
        }
        self.live += 1;
        true
    }

    /// Counts one more thread, which a function starts for itself, if there is room for it or an
    /// idle thread can end instead. The last thread of the session is left for jobs, which would
    /// otherwise wait for as long as functions keep theirs.
    pub(super) fn reserve_for_function(&mut self) -> bool {
        if self.ended || self.for_functions + 1 >= self.max || !(self.reserve() || self.pass_on_idle()) {
            return false;
        }
        self.for_functions += 1;
        true
    }

    /// Records that a thread which a function has started for itself has ended. The caller drops
    /// the returned lease outside of locks.
    pub(super) fn left_by_function(&mut self) -> Option<ThreadLease> {
        self.for_functions -= 1;
        self.left()
    }

    /// Ends an idle thread and passes its slot on to another. Returns true if there was one.
    fn pass_on_idle(&mut self) -> bool {
        let idle = match self.spare.pop() {
            Some(spare) => spare,
            None if self.kept.is_empty() => return false,
            None => self.kept.remove(0).1,
        };
        idle.retire();
        self.passed_on += 1;
        true
    }

    /// Counts one more thread, or has the quota give one in its turn, if the quota is the obstacle.
    fn reserve_or_wait(&mut self, session: impl FnOnce() -> Weak<dyn WantsThreads>) -> bool {
        let Some(quota) = self.quota.as_ref().filter(|_| self.live < self.max && !self.awaits_quota) else {
            return false;
        };
        match quota.reserve_or_wait(session) {
            Some(lease) => {
                self.leases.push(lease);
                self.live += 1;
                true
            }
            None => {
                self.awaits_quota = true;
                false
            }
        }
    }

    /// Queues a job for which there is no thread.
    pub(super) fn park(&mut self, parked: Parked<W>) {
        self.parked.push_back(parked);
    }

    /// Returns true if jobs wait for a thread.
    pub(super) fn has_parked(&self) -> bool {
        !self.parked.is_empty()
    }

    /// Removes the first waiting job, if there is room for a thread for it. The caller starts one,
    /// as with [`Claim::New`].
    pub(super) fn next_parked(&mut self, session: impl FnOnce() -> Weak<dyn WantsThreads>) -> Option<Parked<W>> {
        if self.parked.is_empty() || !(self.reserve() || self.reserve_or_wait(session)) {
            return None;
        }
        self.parked.pop_front()
    }

    /// Takes the thread that the quota gives in its turn, for the first waiting job. The caller
    /// starts one, as with [`Claim::New`]. Returns the lease as well if the session needs none.
    pub(super) fn take_granted(&mut self, lease: ThreadLease) -> (Option<Parked<W>>, Option<ThreadLease>) {
        self.awaits_quota = false;
        if self.live >= self.max {
            return (None, Some(lease));
        }
        let Some(parked) = self.parked.pop_front() else { return (None, Some(lease)) };
        self.live += 1;
        if self.live == 1 {
            // All threads have ended since the session asked, and the first needs no lease.
            return (Some(parked), Some(lease));
        }
        self.leases.push(lease);
        (Some(parked), None)
    }

    /// Handles a failure to start the thread that was reserved for `parked`. Returns the jobs that
    /// will never have a thread, in their order: none as long as there are other threads, for which
    /// they wait. The caller drops the returned lease outside of locks.
    pub(super) fn start_failed(&mut self, parked: Parked<W>) -> (VecDeque<Parked<W>>, Option<ThreadLease>) {
        let lease = self.left();
        self.parked.push_front(parked);
        let stranded = if self.live == 0 { std::mem::take(&mut self.parked) } else { VecDeque::new() };
        (stranded, lease)
    }

    /// Takes a thread that has no more work in lane `key`. Returns the next job for it, or `None`
    /// if it is idle from now on.
    pub(super) fn free(&mut self, key: LaneKey, thread: &LaneThread) -> Option<Parked<W>> {
        if let Some(parked) = self.parked.pop_front() {
            return Some(parked);
        }
        if self.ended || (!self.leases.is_empty() && self.quota.as_ref().is_some_and(|quota| quota.is_awaited())) {
            thread.retire();
        } else if key.is_single_use() || self.kept.len() >= KEPT_THREADS {
            self.spare.push(thread.clone());
        } else {
            self.kept.push((key, thread.clone()));
        }
        None
    }

    /// Removes an idle thread for good. Returns true if it was idle.
    pub(super) fn dismiss(&mut self, thread: &LaneThread) -> bool {
        if let Some(at) = self.spare.iter().position(|spare| spare == thread) {
            self.spare.remove(at);
            return true;
        }
        let at = self.kept.iter().position(|(_, kept)| kept == thread);
        at.map(|at| self.kept.remove(at)).is_some()
    }

    /// Records that a thread has ended. The caller drops the returned lease outside of locks.
    pub(super) fn left(&mut self) -> Option<ThreadLease> {
        if self.passed_on > 0 {
            self.passed_on -= 1;
            return None;
        }
        self.live -= 1;
        if self.leases.len() >= self.live.max(1) { self.leases.pop() } else { None }
    }

    /// Removes a waiting job.
    pub(super) fn remove(&mut self, id: u64) -> Option<Parked<W>> {
        let at = self.parked.iter().position(|parked| parked.job.has_id(id))?;
        self.parked.remove(at)
    }

    /// Ends all idle threads, and returns the waiting jobs.
    pub(super) fn end(&mut self) -> impl Iterator<Item = Parked<W>> {
        self.ended = true;
        self.kept.drain(..).for_each(|(_, thread)| thread.retire());
        self.spare.drain(..).for_each(|thread| thread.retire());
        std::mem::take(&mut self.parked).into_iter()
    }

    #[cfg(test)]
    pub(super) fn idle(&self) -> usize {
        self.kept.len() + self.spare.len()
    }

    #[cfg(test)]
    pub(super) fn live(&self) -> usize {
        self.live
    }
}

#[cfg(test)]
thread_local! {
    /// True makes starting threads from this thread fail, as if the system had no more.
    pub(super) static REFUSE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}
