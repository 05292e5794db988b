//! A communicator of NCCL: its creation, the polling of its state, its abort and its end.

use std::collections::{HashSet, VecDeque};
use std::ffi::c_int;
use std::ptr;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use super::comm_handle::CommHandle;
use super::config::Config;
use super::error::code;
use super::guard::Guard;
use super::symbols::Comm;
use super::wait::{Fault, wait, wait_alone};
use super::{DeviceStream, Library, Mark, NcclError, Options, UniqueId, busy_devices};
use crate::ccl::{Agreement, BreakCause, Breakdown, Collective, Control, Operation, Rank};

/// A time limit that is practically none, and can be added to the current time without overflow.
pub(super) const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// Name of the function that creates a communicator from another one.
pub(super) const SPLIT: &str = "ncclCommSplit";

/// A communicator that does not block. Dropping it waits for the work on its stream, at most for
/// [`Options::drain_timeout`], and then ends the communicator. NCCL may need the other ranks for
/// that, which takes at most [`Options::close_timeout`] and [`Options::abort_timeout`].
pub(super) struct Communicator {
    pub(super) library: Arc<Library>,
    pub(super) stream: Arc<dyn DeviceStream>,
    pub(super) options: Options,
    /// The only copy of the communicator, except on the thread that ends it.
    handle: Arc<CommHandle>,
    _guard: Guard,
    rank: Rank,
    /// Collectives on the stream that were not done when the stream was last polled, oldest first.
    under_way: VecDeque<UnderWay>,
    /// Breakdown of the group, if the communicator has to be aborted and the abort is delayed by
    /// other work on the stream.
    broken: Option<Breakdown>,
    /// Communicator that a failed `ncclCommSplit` may have written.
    pending_split: Option<PendingSplit>,
    /// Calls that have been made, by operation and order of magnitude: NCCL may allocate memory at
    /// the first of a kind.
    made: HashSet<(Operation, u32)>,
}

/// A collective on the stream.
struct UnderWay {
    collective: Collective,
    begin: Box<dyn Mark>,
    /// Time of the first poll that found the beginning reached.
    begun: Option<Instant>,
    /// NCCL's function and the mark after it, once all of the collective has been enqueued.
    end: Option<(&'static str, Box<dyn Mark>)>,
}

impl UnderWay {
    fn has_begun(&mut self) -> Result<bool, RpcError> {
        if self.begun.is_none() && self.begin.is_reached()? {
            self.begun = Some(Instant::now());
        }
        Ok(self.begun.is_some())
    }

    fn is_over(&self) -> Result<bool, RpcError> {
        self.end.as_ref().map_or(Ok(false), |(_, end)| end.is_reached())
    }
}

/// Communicator that a failed `ncclCommSplit` may have written. NCCL may write to it for as long as
/// the communicator that was split exists.
struct PendingSplit(*mut Comm);

// SAFETY: it is a place that NCCL writes to from any thread, and that is read only once NCCL is
// done with it.
unsafe impl Send for PendingSplit {}

impl Communicator {
    /// Creates a communicator without ranks, to be followed by [`join`](Self::join). Its group has
    /// this control.
    ///
    /// # Errors
    ///
    /// Those of [`Guard::start`].
    pub(super) fn new(
        library: Arc<Library>,
        stream: Arc<dyn DeviceStream>,
        options: Options,
        rank: Rank,
        control: Arc<dyn Control>,
    ) -> Result<Self, RpcError> {
        let handle = CommHandle::new(Arc::clone(&library), Arc::clone(&stream));
        let guard = Guard::start(&handle, control, options.limit())?;
        let (under_way, made) = (VecDeque::new(), HashSet::new());
        let (broken, pending_split) = (None, None);
        Ok(Self { library, stream, options, handle, _guard: guard, rank, under_way, broken, pending_split, made })
    }

    /// Creates a communicator without ranks, to be followed by a [split](Self::split) of this one.
    /// Its group has this control.
    ///
    /// # Errors
    ///
    /// Those of [`new`](Self::new).
    pub(super) fn child(&self, control: Arc<dyn Control>) -> Result<Self, RpcError> {
        Self::new(Arc::clone(&self.library), Arc::clone(&self.stream), self.options.clone(), self.rank, control)
    }

    pub(super) fn handle(&self) -> &CommHandle {
        &self.handle
    }

    /// Creates the communicator of `size` ranks at NCCL, together with the other ranks.
    pub(super) fn join(&mut self, control: &mut dyn Agreement, id: UniqueId, size: usize) -> Result<(), Fault> {
        const CALL: &str = "ncclCommInitRankConfig";
        let mut config = self.config();
        let [size, rank] = [size, self.rank.index()].map(|number| c_int::try_from(number).unwrap_or(-1));
        let init = self.library.functions().comm_init_rank_config;
        let mut comm = self.handle.lock();
        // SAFETY: both pointers are valid for the time of the call, which does not keep them.
        let result = unsafe { init(&raw mut comm.raw, size, id, rank, &raw mut config) };
        self.check(comm.raw, CALL, result)?;
        drop(comm);
        self.settle(control, CALL, self.options.join_timeout)
    }

    /// Makes `child` the communicator of those ranks that pass the same `color`, in the order of
    /// `key`. All ranks of this communicator call it. The caller waits for the new one with
    /// [`settle`](Self::settle).
    pub(super) fn split(
        &mut self,
        child: &Self,
        control: &mut dyn Agreement,
        (color, key): (c_int, c_int),
        limit: Duration,
    ) -> Result<(), Fault> {
        let split = self.library.functions().comm_split.get(&self.library)?;
        let mut config = self.config();
        // NCCL may write there until the call has settled, which may be after this function has
        // returned.
        let written: *mut Comm = Box::into_raw(Box::new(ptr::null_mut()));
        let comm = self.handle.lock();
        // SAFETY: this communicator exists, and no call with it is in progress; `written` is not
        // freed before NCCL is done with it.
        let result = unsafe { split(comm.raw, color, key, written, &raw mut config) };
        let begun = self.check(comm.raw, SPLIT, result).map_err(Fault::from);
        drop(comm);
        if let Err(fault) = begun.and_then(|()| self.settle(control, SPLIT, limit)) {
            self.pending_split = Some(PendingSplit(written));
            return Err(fault);
        }
        // SAFETY: from `Box::into_raw`, and the call has settled, so that NCCL no longer writes to
        // it.
        let raw = *unsafe { Box::from_raw(written) };
        if raw.is_null() {
            return Err(RpcError::internal(format!("{SPLIT} gave no communicator")).into());
        }
        child.handle.lock().raw = raw;
        Ok(())
    }

    fn config(&self) -> Config {
        Config::new(self.library.version(), (self.options.min_ctas, self.options.max_ctas))
    }

    /// Returns the rank, and the number of ranks.
    pub(super) fn rank_and_size(&self) -> Result<(Rank, usize), NcclError> {
        let functions = self.library.functions();
        let comm = self.handle.lock();
        let [rank, size] = [("ncclCommUserRank", functions.comm_user_rank), ("ncclCommCount", functions.comm_count)]
            .map(|(call, ask)| {
                let mut answer = 0;
                // SAFETY: the communicator exists, and the answer has a place.
                let result = unsafe { ask(comm.raw, &raw mut answer) };
                self.check(comm.raw, call, result).map(|()| answer)
            });
        Ok((Rank(u32::try_from(rank?).unwrap_or(u32::MAX)), usize::try_from(size?).unwrap_or(0)))
    }

    /// Waits until no call with the communicator is in progress. Errors name the last one, `call`.
    pub(super) fn settle(&self, control: &mut dyn Agreement, call: &'static str, limit: Duration) -> Result<(), Fault> {
        wait(control, call, Some(limit), || Ok(self.is_settled(call)?))
    }

    fn is_settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let mut state = code::SUCCESS;
        let comm = self.handle.lock();
        if comm.raw.is_null() {
            // Its end has begun: the group is broken, which a check of the group tells.
            return Ok(false);
        }
        // SAFETY: the communicator exists, and the state has a place.
        let result = unsafe { (self.library.functions().comm_get_async_error)(comm.raw, &raw mut state) };
        self.check(comm.raw, "ncclCommGetAsyncError", result)?;
        self.check(comm.raw, call, state)?;
        Ok(state != code::IN_PROGRESS)
    }

    /// Checks the result of a call with `comm`. A call in progress has not failed.
    pub(super) fn check(&self, comm: Comm, call: &'static str, result: c_int) -> Result<(), NcclError> {
        match result {
            code::SUCCESS | code::IN_PROGRESS => Ok(()),
            code => Err(self.library.error(call, code, comm)),
        }
    }

    /// Makes room on the device for a call of a kind that this communicator has not made yet,
    /// unless a communicator of this process has collectives in progress on the device.
    pub(super) fn make_room(&mut self, collective: Collective) {
        let magnitude = collective.bytes().unwrap_or(0).checked_ilog2().unwrap_or(0);
        if !busy_devices::has_collectives(self.stream.device())
            && self.made.insert((collective.operation, magnitude))
            && let Err(error) = self.handle.query(|| self.stream.make_room())
        {
            tracing::debug!(%error, "no room was made for NCCL on its device");
        }
    }

    /// Marks the beginning of a collective on the stream. What is enqueued until its
    /// [end](Self::end_of) belongs to it.
    pub(super) fn begin(&mut self, collective: Collective) -> Result<(), RpcError> {
        let begin = self.handle.query(|| self.stream.mark())?;
        self.under_way.push_back(UnderWay { collective, begin, begun: None, end: None });
        self.handle.set_busy(true);
        Ok(())
    }

    /// Marks the end of the collective that began last: `call` has enqueued the rest of it.
    pub(super) fn end_of(&mut self, call: &'static str) -> Result<(), RpcError> {
        let end = self.handle.query(|| self.stream.mark())?;
        if let Some(last) = self.under_way.back_mut() {
            last.end = Some((call, end));
        }
        Ok(())
    }

    /// Returns the number of collectives on the stream at the last poll.
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// Returns true if any collective on the stream has a result that its caller expects. A barrier
    /// has none, and one that was not enqueued completely has already failed in its own call.
    pub(super) fn has_results_to_come(&self) -> bool {
        let has_result = |one: &UnderWay| one.end.is_some() && one.collective.operation != Operation::Barrier;
        self.under_way.iter().any(has_result)
    }

    /// Polls the stream. Returns true if no collective is left on it.
    ///
    /// # Errors
    ///
    /// NCCL or the device reports a failure; or a collective that has begun exceeds its time limit.
    pub(super) fn progress(&mut self) -> Result<bool, Fault> {
        let progress = self.poll_stream();
        self.handle.set_busy(!self.under_way.is_empty());
        progress
    }

    fn poll_stream(&mut self) -> Result<bool, Fault> {
        let handle = Arc::clone(&self.handle);
        let Some(last) = self.under_way.back() else { return Ok(true) };
        // NCCL's own error comes first, because it says why a stream makes no progress.
        self.is_settled(last.end.as_ref().map_or("", |(call, _)| call))?;
        let limit = self.options.limit();
        while let Some(first) = self.under_way.front_mut() {
            let is_over = handle.query(|| first.is_over());
            if handle.has_ended() {
                // The stream may have reached the mark by the abort.
                return Ok(false);
            }
            if is_over? {
                self.under_way.pop_front();
                continue;
            }
            if handle.query(|| first.has_begun())?
                && let (Some(limit), Some(begun)) = (limit, first.begun)
                && begun.elapsed() >= limit
            {
                let (collective, call) = (first.collective, first.end.as_ref().map_or("", |(call, _)| call));
                let text = format!("{call} of {collective} has not ended within {limit:?}");
                return Err(Fault::Own(RpcError::new(ErrorKind::DeadlineExceeded, text)));
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// Aborts the communicator, unless it has been aborted, and waits until none of its work is on
    /// the device any more. Calls [`Options::on_stuck`] if that takes too long.
    ///
    /// If only other work of the caller is on the stream, the abort is left to the drop of this
    /// communicator: NCCL would wait for that work, and no thread waits for a collective.
    pub(super) fn abort(&mut self, breakdown: &Breakdown) {
        if !self.under_way.is_empty() || self.handle.query(|| self.stream.is_done()).unwrap_or(true) {
            self.abort_now(breakdown);
        } else {
            self.broken = Some(breakdown.clone());
        }
    }

    fn abort_now(&mut self, breakdown: &Breakdown) {
        let abort = self.library.functions().comm_abort;
        let Some(told) = self.handle.end(abort) else { return };
        let mut timeouts = EndTimeouts::new(&self.options, !self.under_way.is_empty());
        let mut is_over = self.wait_for_end(&told, &mut timeouts);
        if let Some(PendingSplit(child)) = self.pending_split.take().filter(|_| is_over) {
            // SAFETY: from `Box::into_raw`, and the communicator that it was split from has ended,
            // so that NCCL no longer writes to it.
            let child = *unsafe { Box::from_raw(child) };
            is_over = child.is_null() || self.wait_for_end(&self.handle.abort_other(child), &mut timeouts);
        }
        if !is_over {
            // Marks of work that hangs are not polled any more.
            self.under_way.clear();
            self.handle.give_up_work();
            (self.options.on_stuck)(breakdown);
        }
    }

    /// Waits until the call that ends a communicator has returned, which `told` reports, and none
    /// of its work is on the stream. Returns false if that takes longer than `timeouts` allow.
    fn wait_for_end(&mut self, told: &mpsc::Receiver<()>, timeouts: &mut EndTimeouts) -> bool {
        let mut is_back = false;
        loop {
            // On a device that has failed, no work is in progress either.
            while self.under_way.front().is_some_and(|first| first.end.is_some() && first.is_over().unwrap_or(true)) {
                self.under_way.pop_front();
            }
            // Work that was not enqueued completely has no mark at its end. It is over once the
            // call of NCCL has returned.
            if is_back && self.under_way.iter().all(|one| one.end.is_none()) {
                self.under_way.clear();
                self.handle.set_busy(false);
                return true;
            }
            let is_of_nccl = match self.under_way.front_mut() {
                Some(first) => first.has_begun(),
                None => self.stream.is_done(),
            };
            let is_of_nccl = is_of_nccl.unwrap_or(true);
            if !timeouts.lasts(is_of_nccl) {
                return false;
            }
            if is_back {
                thread::sleep(LOOK);
            } else {
                is_back = told.recv_timeout(LOOK).is_ok();
            }
        }
    }

    /// Waits until the stream has done the other work of the caller, at most for
    /// [`Options::drain_timeout`]. Returns true if the communicator can be ended now.
    fn drain(&self) -> bool {
        let limit = self.options.drain_timeout.unwrap_or(FOR_EVER);
        !self.under_way.is_empty() || wait_alone(Instant::now() + limit, || self.stream.is_done().unwrap_or(true))
    }

    /// Finalises and destroys the communicator of a group that is not broken. Returns false if it
    /// does not end in time.
    fn close(&mut self) -> bool {
        // If this fails, the library reports the error itself.
        _ = self.stream.make_current();
        let until = Instant::now() + self.options.close_timeout;
        let comm = self.handle.lock();
        // SAFETY: the communicator exists, and no call with it is in progress.
        let result = unsafe { (self.library.functions().comm_finalize)(comm.raw) };
        let begun = self.check(comm.raw, "ncclCommFinalize", result);
        drop(comm);
        let finalised = begun.is_ok()
            && wait_alone(until, || self.is_settled("ncclCommFinalize").unwrap_or(true))
            && self.is_settled("ncclCommFinalize").is_ok();
        if finalised {
            let Some(told) = self.handle.end(self.library.functions().comm_destroy) else { return false };
            return self.wait_for_end(&told, &mut EndTimeouts::new(&self.options, true));
        }
        self.abort_now(&self.stuck());
        true
    }

    /// Returns the breakdown for a communicator that hangs while it is ended.
    fn stuck(&self) -> Breakdown {
        let text = "NCCL's communicator does not go down".to_owned();
        let (cause, rank) = (BreakCause::Backend(text), self.rank);
        Breakdown { cause, rank, noticed_by: rank, during: String::new(), flights: String::new() }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.handle.is_empty() {
            return;
        }
        if self.handle.has_ended() {
            return self.abort_now(&self.stuck());
        }
        if !self.drain() {
            rpc_core::log_limited!(ERROR, "a communicator of NCCL stays, because the work on its stream does not end");
            return;
        }
        if let Some(breakdown) = self.broken.take() {
            self.abort_now(&breakdown);
        } else if !self.close() {
            (self.options.on_stuck)(&self.stuck());
        }
    }
}

/// Time limits for ending a communicator. NCCL waits for all work on its device, which may include
/// other work of the caller.
struct EndTimeouts {
    /// Limit for the work of NCCL alone.
    limit: Duration,
    /// Time at which everything, other work of the caller included, has to be over.
    last: Instant,
    hanging: Duration,
    looked: Instant,
}

impl EndTimeouts {
    fn new(options: &Options, may_be_mixed: bool) -> Self {
        let (limit, looked) = (options.abort_timeout, Instant::now());
        let owners = if may_be_mixed { options.drain_timeout.unwrap_or(FOR_EVER) } else { Duration::ZERO };
        Self { limit, last: looked + limit + owners, hanging: Duration::ZERO, looked }
    }

    /// Returns true while there is time left. The time since the last call counts as NCCL's if
    /// `is_of_nccl`.
    fn lasts(&mut self, is_of_nccl: bool) -> bool {
        let now = Instant::now();
        if is_of_nccl {
            self.hanging += now - self.looked;
        }
        self.looked = now;
        self.hanging < self.limit && now < self.last
    }
}

/// Interval at which a thread that waits for the end of a communicator polls its progress.
const LOOK: Duration = Duration::from_millis(1);
