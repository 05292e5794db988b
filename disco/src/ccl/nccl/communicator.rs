//! A communicator of NCCL: how it is made, asked how it is, and got rid of.

use std::ffi::c_int;
use std::mem;
use std::ptr;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::RpcError;

use super::config::Config;
use super::error::code;
use super::symbols::Comm;
use super::wait::{Fault, wait, wait_alone};
use super::{DeviceStream, Library, NcclError, Options, UniqueId};
use crate::ccl::{Agreement, BreakCause, Breakdown, Rank};

/// As good as for ever, and yet a time that can be added to now.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// The call that makes a communicator of another.
pub(super) const SPLIT: &str = "ncclCommSplit";

/// A communicator that does not block. Dropping it waits for the work on its stream, at most for [`Options::drain_timeout`], and takes it down, for which NCCL may need the
/// other ranks, at most for [`Options::close_timeout`] and [`Options::abort_timeout`].
pub(super) struct Communicator {
    pub(super) library: Arc<Library>,
    pub(super) stream: Arc<dyn DeviceStream>,
    pub(super) options: Options,
    /// Null before it is made, and once it has ended. This has the only copy, but for a thread that ends it.
    raw: Comm,
    rank: Rank,
    /// Whether something of NCCL may be on the stream.
    enqueued: bool,
    /// Why the group is broken, if the communicator has to be aborted and that waits for other work on the stream.
    broken: Option<Breakdown>,
    /// Where a split that failed may have left a communicator.
    halfway: Option<Halfway>,
}

/// A place that NCCL may write to for as long as the communicator exists that was split.
struct Halfway(*mut Comm);

// SAFETY: NCCL takes calls with a communicator from any thread, one at a time, and `&mut` or ownership sees to that: `&self` methods are called by the
// owner alone, as there is no `Sync`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// A communicator that is yet to be [joined](Self::join).
    pub(super) fn new(library: Arc<Library>, stream: Arc<dyn DeviceStream>, options: Options, rank: Rank) -> Self {
        Self { library, stream, options, raw: ptr::null_mut(), rank, enqueued: false, broken: None, halfway: None }
    }

    /// Makes it a communicator of `size` ranks, together with the others.
    pub(super) fn join(&mut self, control: &mut dyn Agreement, id: UniqueId, size: usize) -> Result<(), Fault> {
        const CALL: &str = "ncclCommInitRankConfig";
        let mut config = self.config();
        let [size, rank] = [size, self.rank.index()].map(|number| c_int::try_from(number).unwrap_or(-1));
        let init = self.library.functions().comm_init_rank_config;
        // SAFETY: the communicator and the configuration are places of that type for the time of the call, which does not keep them.
        let result = unsafe { init(&raw mut self.raw, size, id, rank, &raw mut config) };
        self.check(CALL, result)?;
        self.settle(control, CALL, self.options.join_timeout)
    }

    /// Makes a communicator of those ranks of this one that give the same `color`, in the order of `key`. All ranks of this one call it. The new one is yet to
    /// [settle](Self::settle).
    pub(super) fn split(&mut self, control: &mut dyn Agreement, color: c_int, key: c_int) -> Result<Self, Fault> {
        let split = self.library.functions().comm_split.get(&self.library)?;
        let mut config = self.config();
        // NCCL may write there until it has settled, and so possibly after this function.
        let place: *mut Comm = Box::into_raw(Box::new(ptr::null_mut()));
        // SAFETY: this communicator exists, and no call with it is in progress; `place` stays.
        let result = unsafe { split(self.raw, color, key, place, &raw mut config) };
        let begun = self.check(SPLIT, result).map_err(Fault::from);
        if let Err(fault) = begun.and_then(|()| self.settle(control, SPLIT, self.options.join_timeout)) {
            self.halfway = Some(Halfway(place));
            return Err(fault);
        }
        // SAFETY: from `Box::into_raw`, and NCCL is through with it.
        let raw = *unsafe { Box::from_raw(place) };
        if raw.is_null() {
            return Err(RpcError::internal(format!("{SPLIT} gave no communicator")).into());
        }
        let mut this = Self::new(Arc::clone(&self.library), Arc::clone(&self.stream), self.options.clone(), self.rank);
        this.raw = raw;
        Ok(this)
    }

    fn config(&self) -> Config {
        Config::new(self.library.version(), (self.options.min_ctas, self.options.max_ctas))
    }

    /// Which rank this is, and of how many.
    pub(super) fn place(&self) -> Result<(Rank, usize), NcclError> {
        let functions = self.library.functions();
        let [rank, size] = [("ncclCommUserRank", functions.comm_user_rank), ("ncclCommCount", functions.comm_count)]
            .map(|(call, ask)| {
                let mut answer = 0;
                // SAFETY: the communicator exists, and the answer has a place.
                let result = unsafe { ask(self.raw, &raw mut answer) };
                self.check(call, result).map(|()| answer)
            });
        Ok((Rank(u32::try_from(rank?).unwrap_or(u32::MAX)), usize::try_from(size?).unwrap_or(0)))
    }

    /// Waits until no call with the communicator is in progress: the last was `call`.
    pub(super) fn settle(&self, control: &mut dyn Agreement, call: &'static str, limit: Duration) -> Result<(), Fault> {
        wait(control, call, Some(limit), || Ok(self.is_settled(call)?))
    }

    /// Waits until what was enqueued is done.
    pub(super) fn finish(&self, control: &mut dyn Agreement, call: &'static str) -> Result<(), Fault> {
        // What NCCL says goes first: it knows why a stream does not get on.
        wait(control, call, Some(self.options.stall_timeout), || Ok(self.is_settled(call)? && self.stream.is_done()?))
    }

    fn is_settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let mut state = code::SUCCESS;
        // SAFETY: the communicator exists, and the state has a place.
        let result = unsafe { (self.library.functions().comm_get_async_error)(self.raw, &raw mut state) };
        self.check("ncclCommGetAsyncError", result)?;
        self.check(call, state)?;
        Ok(state != code::IN_PROGRESS)
    }

    /// Whether a call has failed, which it has not while it is in progress.
    pub(super) fn check(&self, call: &'static str, result: c_int) -> Result<(), NcclError> {
        match result {
            code::SUCCESS | code::IN_PROGRESS => Ok(()),
            code => Err(self.library.error(call, code, self.raw)),
        }
    }

    pub(super) fn raw(&self) -> Comm {
        self.raw
    }

    /// What is enqueued from here on is NCCL's, too, until the stream is [done](Self::finish).
    pub(super) fn begin(&mut self) {
        self.enqueued = true;
    }

    /// The stream has done all of it.
    pub(super) fn is_through(&mut self) {
        self.enqueued = false;
    }

    /// Aborts the communicator, unless it has been, and waits until nothing of it is on the device any more. Calls [`Options::on_stuck`] if that takes too long.
    ///
    /// Where only the owner's own work is on the stream, NCCL would wait for that, and nobody waits for this communicator: it is aborted when it is dropped.
    pub(super) fn abort(&mut self, breakdown: &Breakdown) {
        if self.enqueued || self.stream.is_done().unwrap_or(true) {
            self.abort_now(breakdown);
        } else {
            self.broken = Some(breakdown.clone());
        }
    }

    fn abort_now(&mut self, breakdown: &Breakdown) {
        let raw = mem::replace(&mut self.raw, ptr::null_mut());
        if raw.is_null() {
            return;
        }
        let until = Instant::now() + self.options.abort_timeout;
        let functions = self.library.functions();
        let mut is_over = self.end(functions.comm_abort, raw, until);
        if let Some(Halfway(place)) = self.halfway.take().filter(|_| is_over) {
            // SAFETY: from `Box::into_raw`, and with the communicator that it was split from NCCL has let go of it.
            let child = *unsafe { Box::from_raw(place) };
            is_over = child.is_null() || self.end(functions.comm_abort, child, until);
        }
        // A device that has failed does nothing any more, either.
        if !(is_over && wait_alone(until, || self.stream.is_done().unwrap_or(true))) {
            (self.options.on_stuck)(breakdown);
        }
    }

    /// Waits until the stream has done the owner's own work, which may take as long as in front of a collective.
    fn drain(&self) -> bool {
        let limit = self.options.drain_timeout.unwrap_or(FOR_EVER);
        self.enqueued || wait_alone(Instant::now() + limit, || self.stream.is_done().unwrap_or(true))
    }

    /// Takes the communicator down while all is well. Says whether that has worked.
    fn close(&mut self) -> bool {
        let until = Instant::now() + self.options.close_timeout;
        // SAFETY: the communicator exists, and no call with it is in progress.
        let result = unsafe { (self.library.functions().comm_finalize)(self.raw) };
        let finalised = self.check("ncclCommFinalize", result).is_ok()
            && wait_alone(until, || self.is_settled("ncclCommFinalize").unwrap_or(true))
            && self.is_settled("ncclCommFinalize").is_ok();
        if finalised {
            let raw = mem::replace(&mut self.raw, ptr::null_mut());
            return self.end(self.library.functions().comm_destroy, raw, until + self.options.abort_timeout);
        }
        self.abort_now(&self.stuck());
        true
    }

    /// Ends `raw` by a call that may hang, on a thread of its own. Says whether it came back in time.
    fn end(&self, call: unsafe extern "C" fn(Comm) -> c_int, raw: Comm, until: Instant) -> bool {
        /// The one copy of a communicator.
        struct Last(Comm);
        // SAFETY: whoever has it is the only one who knows the communicator.
        unsafe impl Send for Last {}

        let (last, stream, library) = (Last(raw), Arc::clone(&self.stream), Arc::clone(&self.library));
        let (tell, told) = mpsc::channel();
        let spawned = thread::Builder::new().name("nccl-end".to_owned()).spawn(move || {
            let last = last;
            // If it cannot be, the library says so itself.
            _ = stream.make_current();
            // SAFETY: the communicator exists, and no other thread knows it any more.
            let result = unsafe { call(last.0) };
            if !matches!(result, code::SUCCESS | code::IN_PROGRESS) {
                tracing::warn!(text = library.error_string(result), "a communicator of NCCL ended with an error");
            }
            _ = tell.send(());
        });
        spawned.is_ok() && told.recv_timeout(until.saturating_duration_since(Instant::now())).is_ok()
    }

    /// What to say of a rank that hangs when it leaves.
    fn stuck(&self) -> Breakdown {
        let text = "NCCL's communicator does not go down".to_owned();
        let (cause, rank) = (BreakCause::Backend(text), self.rank);
        Breakdown { cause, rank, noticed_by: rank, during: String::new(), flights: String::new() }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        _ = self.stream.make_current();
        if !self.drain() {
            tracing::error!("a communicator of NCCL stays, because the work on its stream does not end");
            return;
        }
        if let Some(breakdown) = self.broken.take() {
            self.abort_now(&breakdown);
        } else if !self.close() {
            (self.options.on_stuck)(&self.stuck());
        }
    }
}
