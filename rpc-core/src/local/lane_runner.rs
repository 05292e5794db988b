//! Running what was admitted: lanes one job after the other, on whichever thread there is for it.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::lanes::{Job, LaneKey, Removed, Turn};
use super::resolve::{self, Place, Work};
use super::thread_quota::WantsThreads;
use super::threads::{Claim, Employer, LaneThread, Parked};
use super::{Shared, deadline_exceeded, lock};
use crate::blocking;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::object::{Context, Host, Invocation, LocalValue, Started};
use crate::panics::drop_each;
use crate::reply::{Outcome, Responder, Submission};
use crate::session::{InPlaceWrite, Lane};
use crate::tensor::{Access, Borrow, borrow_all};
use crate::value::TensorRef;

/// What became of the first job of [`Shared::run_lane`], if its submitter waits for it in place.
pub(super) enum Ran {
    Done(Outcome),
    /// It has to wait for a tensor after all.
    Later(Submission),
}

/// Whether the caller still has the duty to run the lane.
pub(super) enum Duty {
    /// The job is over; this much of the session's capacity is to be given back.
    Stays(usize),
    /// Another thread, a future, or the release of a tensor will take it up.
    Passed,
}

impl Shared {
    /// Runs `first`, and then the lane until it is empty or somebody else has taken it up. The outcome of `first` is
    /// returned if it has no responder. `thread` is the session's thread that this is, if it is one.
    pub(super) fn run_lane(self: &Arc<Self>, key: LaneKey, first: Job<Work>, mut thread: Option<&Own>) -> Option<Ran> {
        let mut ran = None;
        let mut job = first;
        loop {
            let (outcome, duty) = self.run_job(key, job, thread);
            ran = ran.or(outcome);
            let Duty::Stays(bytes) = duty else { return ran };
            match self.proceed(key, bytes, thread) {
                Some((next, crowded)) => {
                    job = next;
                    if crowded {
                        // The lane queues for a thread behind the others.
                        thread = None;
                    }
                }
                None => return ran,
            }
        }
    }

    /// Counts a job as complete, and takes the lane's next one. With it comes whether others wait for a thread.
    fn proceed(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&Own>) -> Option<(Job<Work>, bool)> {
        let mut lanes = lock(&self.lanes);
        lanes.complete(bytes);
        let next = lanes.next(key);
        let more = lanes.has_waiting() || lanes.ended.is_some();
        if let (None, false, Some(own)) = (&next, more, thread) {
            // Together with its lane, so that a call that comes now finds the thread, and starts no other.
            own.found.set(match lanes.threads.free(key, &own.thread) {
                Some(parked) => Found::Job(Box::new(parked)),
                None => Found::Idle,
            });
        }
        let crowded = lanes.threads.has_parked();
        drop(lanes);
        if more {
            self.after_completion();
        }
        next.map(|job| (job, crowded))
    }

    fn run_job(self: &Arc<Self>, key: LaneKey, mut job: Job<Work>, thread: Option<&Own>) -> (Option<Ran>, Duty) {
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            return self.finish(job.responder, job.bytes, Err(self.not_begun()));
        }
        if job.deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return self.finish(job.responder, job.bytes, Err(deadline_exceeded()));
        }
        let wanted = job.work.wanted();
        if wanted.is_empty() {
            return self.run_borrowed(key, job, Vec::new(), thread);
        }
        // Nearly always they are free, and then nothing has to be set up for being called back.
        let free: Option<Vec<_>> = match &wanted[..] {
            [(storage, access)] => storage.try_borrow(*access).map(|borrow| vec![borrow]),
            _ => None,
        };
        if let Some(borrows) = free {
            return self.run_borrowed(key, job, borrows, thread);
        }
        let place = Arc::new(Mutex::new(Meeting::Nobody));
        let (this, meeting) = (self.clone(), place.clone());
        let resume = Box::new(move |borrows| {
            let mut meeting = lock(&meeting);
            match std::mem::replace(&mut *meeting, Meeting::Nobody) {
                Meeting::Job(job) => {
                    drop(meeting);
                    this.resume_lane(key, *job, borrows);
                }
                _ => *meeting = Meeting::Borrows(borrows),
            }
        });
        match borrow_all(wanted, resume) {
            Err(error) => self.finish(job.responder, job.bytes, Err(error)),
            Ok(Some(borrows)) => self.run_borrowed(key, job, borrows, thread),
            Ok(None) => {
                let submission = job.responder.is_none().then(|| {
                    let (submission, responder) = self.pending();
                    responder.admit();
                    self.watch_deadline(job.deadline, &responder);
                    job.responder = Some(responder);
                    Ran::Later(submission)
                });
                let mut meeting = lock(&place);
                match std::mem::replace(&mut *meeting, Meeting::Nobody) {
                    Meeting::Borrows(borrows) => {
                        drop(meeting);
                        let (_, duty) = self.run_borrowed(key, job, borrows, thread);
                        (submission, duty)
                    }
                    _ => {
                        *meeting = Meeting::Job(Box::new(job));
                        (submission, Duty::Passed)
                    }
                }
            }
        }
    }

    /// Goes on with a lane whose job waited for tensors.
    fn resume_lane(self: &Arc<Self>, key: LaneKey, job: Job<Work>, borrows: Vec<Borrow>) {
        if let (_, Duty::Stays(bytes)) = self.run_borrowed(key, job, borrows, None) {
            self.go_on(key, bytes, None);
        }
    }

    /// Runs what is left of a lane, after a job of `bytes`.
    pub(super) fn go_on(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&Own>) {
        if let Some((next, crowded)) = self.proceed(key, bytes, thread) {
            self.run_lane(key, next, thread.filter(|_| !crowded));
        }
    }

    fn run_borrowed(
        self: &Arc<Self>,
        key: LaneKey,
        job: Job<Work>,
        borrows: Vec<Borrow>,
        thread: Option<&Own>,
    ) -> (Option<Ran>, Duty) {
        // It may have waited for its tensors, or for its thread.
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            drop(borrows);
            return self.finish(job.responder, job.bytes, Err(self.not_begun()));
        }
        if thread.is_none() && self.needs_thread(&job.work) {
            return self.hand_over(Parked { key, job, borrows });
        }
        let Job { work, responder, deadline, trace, bytes } = job;
        let context = || Context::new(self.clone(), key.lane(), deadline, trace, responder.clone());
        let outcome = match work {
            Work::Call { function, args } => {
                let borrows = if borrows.is_empty() {
                    Vec::new()
                } else {
                    let borrowed = function.borrowed_args(&args).into_iter();
                    let places: Vec<_> = borrowed.map(|(place, ..)| place).collect();
                    places.into_iter().zip(borrows).collect()
                };
                match function.start(Invocation::new(args, borrows, context())) {
                    Started::Done(outcome) => outcome,
                    Started::Future(future) => match &self.spawner {
                        Some(spawner) => return self.run_future(&**spawner, key, responder, bytes, future),
                        None => blocking::block_on(future).and_then(|outcome| outcome),
                    },
                }
            }
            Work::StreamWait { device, stream } => {
                let named = stream.map(|stream| Ok(stream.0.clone()));
                match named.unwrap_or_else(|| self.stream(key.lane(), device)) {
                    Ok(stream) => return self.wait_for_stream(&*stream, key, responder, bytes),
                    Err(error) => Err(error),
                }
            }
            work => self.perform(work, borrows, key, &context()),
        };
        let outcome = outcome.and_then(|value| self.name_objects(value));
        self.finish(responder, bytes, outcome)
    }

    fn needs_thread(&self, work: &Work) -> bool {
        work.place() == Place::Thread || (work.is_async() && self.spawner.is_none())
    }

    /// Gives a job to a thread, at once or when there is one for it.
    fn hand_over(self: &Arc<Self>, parked: Parked<Work>) -> (Option<Ran>, Duty) {
        let mut lanes = lock(&self.lanes);
        match lanes.threads.claim(parked.key, || self.this.clone()) {
            Claim::Idle(thread) => {
                drop(lanes);
                self.give(thread, parked);
            }
            Claim::New => {
                drop(lanes);
                if let Err((error, mut stranded)) = self.start_thread(parked) {
                    // The first is ours, and its lane's next may well fare the same: that is for the caller's loop.
                    let own = stranded.pop_front();
                    self.strand(stranded, &error);
                    if let Some(Parked { job, borrows, .. }) = own {
                        drop(borrows);
                        return self.finish(job.responder, job.bytes, Err(error));
                    }
                }
            }
            Claim::Wait => {
                lanes.threads.park(parked);
                drop(lanes);
                // For the first that waits, if the system had none to spare before.
                self.start_parked();
            }
        }
        (None, Duty::Passed)
    }

    fn give(self: &Arc<Self>, thread: LaneThread, parked: Parked<Work>) {
        let (this, own) = (self.clone(), Own { thread: thread.clone(), found: Cell::default() });
        thread.give(Box::new(move || this.work(&own, parked)));
    }

    /// Runs a job on a thread of the session, then its lane, and then whatever waits for a thread.
    fn work(self: &Arc<Self>, own: &Own, first: Parked<Work>) {
        let mut parked = first;
        loop {
            let Parked { key, job, borrows } = parked;
            if let (_, Duty::Stays(bytes)) = self.run_borrowed(key, job, borrows, Some(own)) {
                self.go_on(key, bytes, Some(own));
            }
            let next = match own.found.take() {
                Found::Nothing => lock(&self.lanes).threads.free(key, &own.thread),
                Found::Job(next) => Some(*next),
                Found::Idle => None,
            };
            match next {
                Some(next) => parked = next,
                None => return,
            }
        }
    }

    /// Starts a thread, for which there is room, with a job for it. Returns the jobs that will never have one.
    fn start_thread(self: &Arc<Self>, parked: Parked<Work>) -> Result<(), (RpcError, VecDeque<Parked<Work>>)> {
        match LaneThread::spawn(self.this.clone()) {
            Ok(thread) => {
                self.give(thread, parked);
                Ok(())
            }
            Err(error) => {
                let stranded = lock(&self.lanes).threads.start_failed(parked);
                if stranded.is_empty() {
                    return Ok(());
                }
                let error = format!("cannot start a thread for the lane: {error}");
                Err((RpcError::new(ErrorKind::LimitExceeded, error), stranded))
            }
        }
    }

    /// Ends jobs for which there will be no thread.
    fn strand(self: &Arc<Self>, jobs: VecDeque<Parked<Work>>, error: &RpcError) {
        for parked in jobs {
            self.drop_removed(Removed::Parked(parked), error.clone());
        }
    }

    /// Starts a thread for the first job that waits for one, if there is such a job and room for a thread.
    pub(super) fn start_parked(self: &Arc<Self>) -> bool {
        let next = lock(&self.lanes).threads.next_parked(|| self.this.clone());
        let Some(parked) = next else { return false };
        if let Err((error, stranded)) = self.start_thread(parked) {
            self.strand(stranded, &error);
        }
        true
    }

    /// Why a request that is over never began.
    fn not_begun(&self) -> RpcError {
        let ended = self.gone.load(Ordering::Acquire).then(|| lock(&self.lanes).ended.clone()).flatten();
        ended.unwrap_or_else(|| RpcError::new(ErrorKind::Cancelled, "the request was cancelled before it began"))
    }

    /// Hands the outcome of a job to whoever waits for it.
    pub(super) fn finish(&self, responder: Option<Responder>, bytes: usize, outcome: Outcome) -> (Option<Ran>, Duty) {
        let ran = match responder {
            Some(responder) => {
                responder.complete(outcome);
                None
            }
            None => Some(Ran::Done(outcome)),
        };
        (ran, Duty::Stays(bytes))
    }

    /// Stores the objects of a return and names them. If one cannot be stored, none is.
    pub(super) fn name_objects(&self, value: LocalValue) -> Outcome {
        if !value.may_hold_objects() {
            // The usual returns need no look at the table.
            return value.try_map(&mut |_| Err(RpcError::internal("a plain value held an object")));
        }
        let mut count = 0;
        value.for_each_object(&mut |_| count += 1);
        let mut table = lock(&self.table);
        // Asked under the lock: an object stored after the end would never be freed.
        let refused = if self.gone.load(Ordering::Acquire) {
            Some(RpcError::new(ErrorKind::Closed, "the session ended while the function ran"))
        } else {
            table.reserve(count).err()
        };
        if let Some(error) = refused {
            drop(table);
            drop_each([value]);
            return Err(error.may_have_run(true));
        }
        value.try_map(&mut |object| resolve::reference(&mut table, object))
    }

    pub(super) fn write_in_place(
        self: &Arc<Self>,
        lane: Lane,
        to: &TensorRef,
        offset: u64,
        len: u64,
    ) -> Option<InPlaceWrite> {
        let mut lanes = lock(&self.lanes);
        let bytes = usize::try_from(len).ok()?;
        if lanes.ended.is_some() || !lanes.has_room(bytes) || !lanes.is_idle(lane) {
            return None;
        }
        let tensor = resolve::tensor(&lock(&self.table), to).ok()?;
        let start = usize::try_from(tensor.byte_range(offset, len).ok()?.start).ok()?;
        let mut borrow = tensor.storage().try_borrow(Access::Write)?;
        borrow.bytes_mut()?;
        let job = Job { work: Work::Freed, responder: None, deadline: None, trace: None, bytes };
        let Turn::Run(key, job) = lanes.admit(lane, job) else {
            return None;
        };
        drop(lanes);
        let this = self.clone();
        let resume = move || {
            this.go_on(key, job.bytes, None);
        };
        InPlaceWrite::new(borrow, start, bytes, Box::new(resume))
    }
}

/// A thread of the session, as the one who runs on it sees it.
pub(super) struct Own {
    thread: LaneThread,
    /// What came of it when its lane became empty.
    found: Cell<Found>,
}

#[derive(Default)]
enum Found {
    /// It has yet to be asked.
    #[default]
    Nothing,
    /// There is another job for it.
    Job(Box<Parked<Work>>),
    /// It is idle, and may be given work as soon as it waits.
    Idle,
}

/// Where a job and the borrows it waits for find each other, whichever comes first.
enum Meeting {
    Nobody,
    Job(Box<Job<Work>>),
    Borrows(Vec<Borrow>),
}

impl Employer for Shared {
    fn may_leave(&self, thread: &LaneThread) -> bool {
        lock(&self.lanes).threads.dismiss(thread)
    }

    fn left(self: Arc<Self>) {
        let lease = lock(&self.lanes).threads.left();
        self.start_parked();
        drop(lease);
    }
}

impl WantsThreads for Shared {
    fn room_for_thread(self: Arc<Self>) -> bool {
        lock(&self.lanes).threads.told_of_room();
        self.start_parked()
    }
}
