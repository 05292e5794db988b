//! Execution of admitted requests: runs lanes one job after the other, on any thread that is
//! available.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use parking_lot::Mutex;

use super::device_gate::{DeviceUse, GateTurn};
use super::job::{Job, LaneKey, Parked};
use super::lanes::{AdmittedJob, Removed};
use super::resolve::{self, PinnedOperation, RunsOn};
use super::thread_quota::{ThreadLease, WantsThreads};
use super::threads::{Claim, LaneThread, WorkerPool};
use super::{LocalInner, cancelled, deadline_exceeded};
use crate::blocking;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::{Context, Host};
use crate::function::function::Started;
use crate::function::invocation::Invocation;
use crate::function::object::LocalValue;
use crate::panics::drop_each;
use crate::reply::{Outcome, Responder, Submission};
use crate::session::{InPlaceWrite, Lane};
use crate::tensor::{Access, Borrow, borrow_all};
use crate::value::TensorRef;

/// Result of the first job of [`LocalInner::run_lane`], if its submitter waits for it in place.
pub(super) enum FirstOutcome {
    Done(Outcome),
    /// The job has to wait for a tensor after all.
    Later(Submission),
}

/// Owner of a lane after a job: the caller, or other code that continues the lane.
pub(super) enum LaneHandoff {
    /// The job has ended. The caller keeps the lane, and must return this many bytes of the
    /// session's capacity.
    Kept(usize),
    /// Another thread, a future, or the release of a tensor will continue the lane.
    HandedOver,
}

impl LocalInner {
    /// Runs `first`, and then the lane until it is empty or has been taken over. Returns the
    /// outcome of `first` if it has no responder. `thread` is the session's own thread, if this is
    /// one.
    pub(super) fn run_lane(
        self: &Arc<Self>,
        key: LaneKey,
        first: Job<PinnedOperation>,
        mut thread: Option<&CurrentThread>,
    ) -> Option<FirstOutcome> {
        let mut ran = None;
        let mut job = first;
        loop {
            let (outcome, handoff) = self.run_job(key, job, thread);
            ran = ran.or(outcome);
            let LaneHandoff::Kept(bytes) = handoff else { return ran };
            match self.complete_and_take_next(key, bytes, thread) {
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

    /// Counts a job as complete, and takes the lane's next one. The flag is true if others wait for
    /// a thread.
    fn complete_and_take_next(
        self: &Arc<Self>,
        key: LaneKey,
        bytes: usize,
        thread: Option<&CurrentThread>,
    ) -> Option<(Job<PinnedOperation>, bool)> {
        let mut lanes = self.lanes.lock();
        lanes.complete(bytes);
        let next = lanes.next(key);
        let more = lanes.has_waiting() || lanes.ended.is_some();
        if let (None, false, Some(own)) = (&next, more, thread) {
            // Together with its lane, under one lock, so that a call that arrives now finds the
            // thread and starts no other.
            own.next.set(match lanes.threads.free(key, &own.thread) {
                Some(parked) => NextJob::Job(Box::new(parked)),
                None => NextJob::Idle,
            });
        }
        let crowded = lanes.threads.has_parked();
        drop(lanes);
        if more {
            self.after_completion();
        }
        next.map(|job| (job, crowded))
    }

    fn run_job(
        self: &Arc<Self>,
        key: LaneKey,
        mut job: Job<PinnedOperation>,
        thread: Option<&CurrentThread>,
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            return self.refuse(job, self.not_begun());
        }
        if job.deadline.is_some_and(|deadline| deadline <= crate::clock::now()) {
            return self.refuse(job, deadline_exceeded());
        }
        if let PinnedOperation::Piped(piped) = &mut job.work
            && let Err(error) = self.begin_piped(piped)
        {
            return self.finish(job.responder, job.bytes, Err(error));
        }
        let required = job.work.required_borrows();
        if required.is_empty() {
            return self.run_borrowed(key, job, Vec::new(), thread);
        }
        // Nearly always they are free, and then no callback has to be set up.
        let free: Option<Vec<_>> = match &required[..] {
            [(storage, access)] => storage.try_borrow(*access).map(|borrow| vec![borrow]),
            _ => None,
        };
        if let Some(borrows) = free {
            return self.run_borrowed(key, job, borrows, thread);
        }
        let rendezvous = Arc::new(Mutex::new(Rendezvous::Empty));
        let (this, resumed) = (self.clone(), rendezvous.clone());
        let resume = Box::new(move |borrows| {
            let mut rendezvous = resumed.lock();
            match std::mem::replace(&mut *rendezvous, Rendezvous::Empty) {
                Rendezvous::Job(job) => {
                    drop(rendezvous);
                    this.resume_lane(key, *job, borrows);
                }
                _ => *rendezvous = Rendezvous::Borrows(borrows),
            }
        });
        match borrow_all(required, resume) {
            Err(error) => self.refuse(job, error),
            Ok(Some(borrows)) => self.run_borrowed(key, job, borrows, thread),
            Ok(None) => {
                let submission = self.defer(&mut job);
                let mut rendezvous = rendezvous.lock();
                match std::mem::replace(&mut *rendezvous, Rendezvous::Empty) {
                    Rendezvous::Borrows(borrows) => {
                        drop(rendezvous);
                        let (_, handoff) = self.run_borrowed(key, job, borrows, thread);
                        (submission, handoff)
                    }
                    _ => {
                        *rendezvous = Rendezvous::Job(Box::new(job));
                        (submission, LaneHandoff::HandedOver)
                    }
                }
            }
        }
    }

    /// Gives a job that cannot begin yet a responder, if its submitter waits for it in place.
    /// Returns the submission for the submitter.
    pub(super) fn defer(&self, job: &mut Job<PinnedOperation>) -> Option<FirstOutcome> {
        job.responder.is_none().then(|| {
            let (submission, responder) = self.pending();
            responder.admit();
            self.watch_deadline(job.deadline, &responder);
            job.responder = Some(responder);
            FirstOutcome::Later(submission)
        })
    }

    /// Continues a lane whose job waited for tensors.
    fn resume_lane(self: &Arc<Self>, key: LaneKey, job: Job<PinnedOperation>, borrows: Vec<Borrow>) {
        if let (_, LaneHandoff::Kept(bytes)) = self.run_borrowed(key, job, borrows, None) {
            self.continue_lane(key, bytes, None);
        }
    }

    /// Runs the rest of a lane, after a job of `bytes`.
    pub(super) fn continue_lane(self: &Arc<Self>, key: LaneKey, bytes: usize, thread: Option<&CurrentThread>) {
        if let Some((next, crowded)) = self.complete_and_take_next(key, bytes, thread) {
            self.run_lane(key, next, thread.filter(|_| !crowded));
        }
    }

    fn run_borrowed(
        self: &Arc<Self>,
        key: LaneKey,
        job: Job<PinnedOperation>,
        borrows: Vec<Borrow>,
        thread: Option<&CurrentThread>,
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        // The job may have waited for its tensors, or for its thread.
        if job.responder.as_ref().is_some_and(Responder::is_over) {
            drop(borrows);
            return self.refuse(job, self.not_begun());
        }
        let (job, borrows, uses) = match self.pass_gate(key, job, borrows) {
            GateTurn::Begin(job, borrows, uses) => (job, borrows, uses),
            GateTurn::NotNow(outcome, handoff) => return (outcome, handoff),
        };
        if thread.is_none() && self.needs_thread(&job.work) {
            // The thread asks again. Until then the job uses no device, however long it waits, and
            // is not counted twice if the thread begins before this one goes on.
            drop(uses);
            return self.hand_over(Parked { key, job, borrows });
        }
        let Job { work, responder, deadline, trace, bytes } = job;
        let (work, piped) = match work {
            PinnedOperation::Piped(piped) => {
                let (work, piped) = piped.into_operation();
                (work, Some(Box::new(piped)))
            }
            work => (work, None),
        };
        let context = || Context::new(self.clone(), key.lane(), deadline, trace, responder.clone());
        let outcome = match work {
            PinnedOperation::Call { function, args } => {
                let borrows = if borrows.is_empty() {
                    Vec::new()
                } else {
                    let borrowed = function.borrowed_args(&args).into_iter();
                    let indices: Vec<_> = borrowed.map(|(index, ..)| index).collect();
                    indices.into_iter().zip(borrows).collect()
                };
                match function.start(Invocation::new(args, borrows, context())) {
                    Started::Done(outcome) => outcome,
                    Started::Future(future) => match &self.spawner {
                        Some(spawner) => {
                            return self.run_future(&**spawner, key, responder, bytes, (uses, piped), future);
                        }
                        None => blocking::block_on(future).and_then(|outcome| outcome),
                    },
                }
            }
            PinnedOperation::StreamWait { device, stream } => {
                let named = stream.map(|stream| Ok(stream.0.clone()));
                match named.unwrap_or_else(|| self.stream(key.lane(), device)) {
                    Ok(stream) => return self.wait_for_stream(&*stream, key, responder, bytes, (uses, piped)),
                    Err(error) => Err(error),
                }
            }
            work => self.execute_operation(work, borrows, key, &context()),
        };
        let outcome = self.conclude(piped, responder.as_ref(), outcome);
        // Before the reply, so that a caller that has it finds the device unused.
        drop(uses);
        self.finish(responder, bytes, outcome)
    }

    fn needs_thread(&self, work: &PinnedOperation) -> bool {
        work.runs_on() == RunsOn::LaneThread || (work.is_async() && self.spawner.is_none())
    }

    /// Gives a job to a thread, at once or when one becomes available.
    fn hand_over(self: &Arc<Self>, parked: Parked<PinnedOperation>) -> (Option<FirstOutcome>, LaneHandoff) {
        let mut lanes = self.lanes.lock();
        match lanes.threads.claim(parked.key, || self.this.clone()) {
            Claim::Idle(thread) => {
                drop(lanes);
                self.give_to_thread(thread, parked);
            }
            Claim::New => {
                drop(lanes);
                if let Err(StartFailed { error, mut stranded, lease }) = self.start_thread(parked) {
                    drop(lease);
                    // The first is this job. The lane's next job may well fail in the same way; the
                    // caller's loop handles it.
                    let own = stranded.pop_front();
                    self.strand(stranded, &error);
                    if let Some(Parked { job, borrows, .. }) = own {
                        drop(borrows);
                        return self.refuse(job, error);
                    }
                }
            }
            Claim::Wait => {
                lanes.threads.park(parked);
                drop(lanes);
                // For the first waiting job, if the system had no thread to spare before.
                self.start_parked();
            }
        }
        (None, LaneHandoff::HandedOver)
    }

    fn give_to_thread(self: &Arc<Self>, thread: LaneThread, parked: Parked<PinnedOperation>) {
        let (this, own) = (self.clone(), CurrentThread { thread: thread.clone(), next: Cell::default() });
        thread.give(Box::new(move || this.run_on_thread(&own, parked)));
    }

    /// Runs a job on a thread of the session, then its lane, and then other jobs that wait for a
    /// thread.
    fn run_on_thread(self: &Arc<Self>, own: &CurrentThread, first: Parked<PinnedOperation>) {
        let mut parked = first;
        loop {
            let Parked { key, job, borrows } = parked;
            if let (_, LaneHandoff::Kept(bytes)) = self.run_borrowed(key, job, borrows, Some(own)) {
                self.continue_lane(key, bytes, Some(own));
            }
            let next = match own.next.take() {
                NextJob::Undecided => self.lanes.lock().threads.free(key, &own.thread),
                NextJob::Job(next) => Some(*next),
                NextJob::Idle => None,
            };
            match next {
                Some(next) => parked = next,
                None => return,
            }
        }
    }

    /// Starts a thread, for which there is room, with a job for it.
    fn start_thread(self: &Arc<Self>, parked: Parked<PinnedOperation>) -> Result<(), StartFailed> {
        match LaneThread::spawn(self.this.clone()) {
            Ok(thread) => {
                self.give_to_thread(thread, parked);
                Ok(())
            }
            Err(error) => {
                let (stranded, lease) = self.lanes.lock().threads.start_failed(parked);
                let failed = StartFailed {
                    error: RpcError::new(
                        ErrorKind::LimitExceeded,
                        format!("cannot start a thread for the lane: {error}"),
                    ),
                    stranded,
                    lease,
                };
                Err(failed)
            }
        }
    }

    /// Fails jobs that will never have a thread.
    fn strand(self: &Arc<Self>, jobs: VecDeque<Parked<PinnedOperation>>, error: &RpcError) {
        for parked in jobs {
            self.drop_removed(Removed::Parked(parked), error.clone());
        }
    }

    /// Starts a thread for the first job that waits for one, if there is such a job and room for a
    /// thread.
    pub(super) fn start_parked(self: &Arc<Self>) {
        let next = self.lanes.lock().threads.next_parked(|| self.this.clone());
        let Some(parked) = next else { return };
        if let Err(StartFailed { error, stranded, lease }) = self.start_thread(parked) {
            drop(lease);
            self.strand(stranded, &error);
        }
    }

    /// Returns the error of a request that ended before it began.
    fn not_begun(&self) -> RpcError {
        let ended = self.gone.load(Ordering::Acquire).then(|| self.lanes.lock().ended.clone()).flatten();
        ended.unwrap_or_else(cancelled)
    }

    /// Ends a job that is not performed.
    pub(super) fn refuse(&self, job: Job<PinnedOperation>, error: RpcError) -> (Option<FirstOutcome>, LaneHandoff) {
        job.work.fail(&error);
        self.finish(job.responder, job.bytes, Err(error))
    }

    /// Gives the outcome of a job to its responder, or returns it.
    pub(super) fn finish(
        &self,
        responder: Option<Responder>,
        bytes: usize,
        outcome: Outcome,
    ) -> (Option<FirstOutcome>, LaneHandoff) {
        let ran = match responder {
            Some(responder) => {
                responder.complete(outcome);
                None
            }
            None => Some(FirstOutcome::Done(outcome)),
        };
        (ran, LaneHandoff::Kept(bytes))
    }

    /// Stores the objects of a return value and replaces them by references. If one cannot be
    /// stored, none is.
    pub(super) fn name_objects(&self, value: LocalValue) -> Outcome {
        if !value.may_hold_objects() {
            // Ordinary return values need no access to the table.
            return value.map_plain();
        }
        let mut count = 0;
        value.for_each_object(&mut |_| count += 1);
        let mut table = self.table.lock();
        // Checked under the lock: an object stored after the end would never be freed.
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
        let mut lanes = self.lanes.lock();
        let bytes = usize::try_from(len).ok()?;
        if lanes.ended.is_some() || !lanes.has_room(bytes) || !lanes.is_idle(lane) {
            return None;
        }
        let tensor = resolve::tensor(&*self.table.lock(), to).ok()?;
        let start = usize::try_from(tensor.byte_range(offset, len).ok()?.start).ok()?;
        let uncounted = |turn| matches!(turn, Poll::Ready(Ok(used)) if !DeviceUse::is_counted(&used));
        if self.gate.as_ref().is_some_and(|gate| !uncounted(gate.poll_device(tensor.device()))) {
            // The request waits, or is refused, when it has been read. A use that is counted would
            // last for as long as the client takes to send the bytes.
            return None;
        }
        let mut borrow = tensor.storage().try_borrow(Access::Write)?;
        borrow.bytes_mut()?;
        let job = Job { work: PinnedOperation::Freed, responder: None, deadline: None, trace: None, bytes };
        let AdmittedJob::Run(key, job) = lanes.admit(lane, job) else {
            return None;
        };
        drop(lanes);
        let this = self.clone();
        let resume = move || {
            this.continue_lane(key, job.bytes, None);
        };
        InPlaceWrite::new(borrow, start, bytes, Box::new(resume))
    }
}

/// A thread that the system refused.
struct StartFailed {
    error: RpcError,
    /// Jobs that will never have a thread.
    stranded: VecDeque<Parked<PinnedOperation>>,
    /// Lease of the thread, to be dropped or returned outside of locks.
    lease: Option<ThreadLease>,
}

/// The session's thread that is running, as seen by the code on it.
pub(super) struct CurrentThread {
    thread: LaneThread,
    /// Decision about the thread, made when its lane became empty.
    next: Cell<NextJob>,
}

#[derive(Default)]
enum NextJob {
    /// Not decided yet.
    #[default]
    Undecided,
    /// The thread takes this job.
    Job(Box<Parked<PinnedOperation>>),
    /// The thread is idle, and may be given work as soon as it waits.
    Idle,
}

/// Rendezvous of a job with the borrows that it waits for; either may arrive first.
enum Rendezvous {
    Empty,
    Job(Box<Job<PinnedOperation>>),
    Borrows(Vec<Borrow>),
}

impl WorkerPool for LocalInner {
    fn may_leave(&self, thread: &LaneThread) -> bool {
        self.lanes.lock().threads.dismiss(thread)
    }

    fn left(self: Arc<Self>) {
        let lease = self.lanes.lock().threads.left();
        self.start_parked();
        drop(lease);
    }
}

impl WantsThreads for LocalInner {
    fn take_thread(self: Arc<Self>, lease: ThreadLease) -> Option<ThreadLease> {
        let (parked, lease) = self.lanes.lock().threads.take_granted(lease);
        let Some(parked) = parked else { return lease };
        match self.start_thread(parked) {
            Ok(()) => {
                // For the next waiting job. It queues behind the other sessions.
                self.start_parked();
                lease
            }
            Err(failed) => {
                self.strand(failed.stranded, &failed.error);
                lease.or(failed.lease)
            }
        }
    }
}
