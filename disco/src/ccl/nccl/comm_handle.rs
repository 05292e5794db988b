//! The handle of a communicator of NCCL, and its end, which another thread can begin while the rank
//! stands in a call of the device's driver.
//!
//! A query of a mark may wait for the driver's lock, which another thread holds for as long as it
//! frees memory, and that waits for the work on the device. If that work is a collective which
//! hangs, nothing but an abort ends all three. So NCCL is called with the handle's lock held, and
//! the device is queried without it.

use std::ffi::c_int;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::thread;
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::code;
use super::symbols::Comm;
use super::{DeviceStream, Library, busy_devices};
use crate::ccl::{Breakdown, Control, Flight};

/// Time that a rank has to leave a query and to abort by itself.
const GRACE: Duration = Duration::from_millis(100);

/// Number of times [`GRACE`] for which a rank with nothing on its stream is looked after.
const IDLE_ROUNDS: usize = 10;

/// Handle of a communicator.
pub(super) struct CommHandle {
    library: Arc<Library>,
    stream: Arc<dyn DeviceStream>,
    state: Mutex<CommState>,
    /// Notified when the communicator has been taken from here.
    taken: Condvar,
    /// Number of beginnings and ends of queries of the device: odd during a query.
    queries: AtomicU64,
    /// True while collectives are on the stream.
    is_busy: AtomicBool,
    /// True once a thread has been started that aborts for a rank that stands in a query.
    is_looked_after: AtomicBool,
}

/// The communicator, for calls with it. NCCL takes one call at a time.
pub(super) struct CommState {
    /// Null before the communicator is created and once its end has begun.
    pub(super) raw: Comm,
    /// Report of an abort that another thread has begun.
    aborted: Option<mpsc::Receiver<()>>,
}

// SAFETY: NCCL takes calls with a communicator from any thread, one at a time.
unsafe impl Send for CommState {}

impl CommHandle {
    /// Creates a handle without a communicator, for the work of a stream.
    pub(super) fn new(library: Arc<Library>, stream: Arc<dyn DeviceStream>) -> Arc<Self> {
        let state = Mutex::new(CommState { raw: ptr::null_mut(), aborted: None });
        let (taken, queries) = (Condvar::new(), AtomicU64::new(0));
        let (is_busy, is_looked_after) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { library, stream, state, taken, queries, is_busy, is_looked_after })
    }

    /// Locks the communicator for a call of NCCL.
    pub(super) fn lock(&self) -> MutexGuard<'_, CommState> {
        self.state.lock()
    }

    /// Returns true if no communicator has been created, or its end has begun.
    pub(super) fn has_ended(&self) -> bool {
        self.lock().raw.is_null()
    }

    /// Returns true if there is no communicator, and nothing is known of an end that has begun.
    pub(super) fn is_empty(&self) -> bool {
        let state = self.lock();
        state.raw.is_null() && state.aborted.is_none()
    }

    /// Calls `ask`, which calls the device's driver and may wait for its lock.
    pub(super) fn query<T>(&self, ask: impl FnOnce() -> T) -> T {
        self.queries.fetch_add(1, Ordering::SeqCst);
        let answer = ask();
        self.queries.fetch_add(1, Ordering::SeqCst);
        answer
    }

    /// Records if there are collectives on the stream, for this handle and for its device.
    pub(super) fn set_busy(&self, is_busy: bool) {
        let device = self.stream.device();
        match (self.is_busy.swap(is_busy, Ordering::SeqCst), is_busy) {
            (false, true) => busy_devices::add(device),
            (true, false) => busy_devices::subtract(device),
            _ => {}
        }
    }

    /// Records that the collectives on the stream hang and are not polled any more. For the other
    /// communicators of the device they stay in progress.
    pub(super) fn give_up_work(&self) {
        self.is_busy.store(false, Ordering::SeqCst);
    }

    /// Ends the communicator by `call`, which may hang, on a thread of its own, or finds the abort
    /// that another thread has begun. The returned channel reports the end of the call.
    ///
    /// # Errors
    ///
    /// `None` if there is no communicator any more; an error if no thread could be started.
    pub(super) fn end(&self, call: unsafe extern "C" fn(Comm) -> c_int) -> Option<std::io::Result<mpsc::Receiver<()>>> {
        let mut state = self.lock();
        if let Some(aborted) = state.aborted.take() {
            return Some(Ok(aborted));
        }
        let raw = mem::replace(&mut state.raw, ptr::null_mut());
        drop(state);
        self.taken.notify_all();
        (!raw.is_null()).then(|| self.call_alone(call, raw))
    }

    /// Calls `call`, which ends `raw` and may hang, on a thread of its own. `raw` is the only copy
    /// of a communicator.
    pub(super) fn call_alone(
        &self,
        call: unsafe extern "C" fn(Comm) -> c_int,
        raw: Comm,
    ) -> std::io::Result<mpsc::Receiver<()>> {
        /// The only copy of a communicator.
        struct Last(Comm);
        // SAFETY: this is the only copy of the communicator.
        unsafe impl Send for Last {}

        let (last, stream, library) = (Last(raw), Arc::clone(&self.stream), Arc::clone(&self.library));
        let (tell, told) = mpsc::channel();
        thread::Builder::new().name("nccl-end".to_owned()).spawn(move || {
            let last = last;
            // If this fails, the library reports the error itself.
            _ = stream.make_current();
            // SAFETY: the communicator exists, and no other thread has a copy of it any more.
            let result = unsafe { call(last.0) };
            if !matches!(result, code::SUCCESS | code::IN_PROGRESS) {
                rpc_core::log_limited!(
                    WARN,
                    text = library.error_string(result),
                    "a communicator of NCCL ended with an error"
                );
            }
            _ = tell.send(());
        })?;
        Ok(told)
    }

    /// Aborts the communicator of a group that is broken if its rank stands in a query of the
    /// device. Returns once the rank has aborted, or has had nothing on the stream for a while: it
    /// may have been about to enqueue a collective when the group broke.
    fn abort_for_a_rank_that_stands(&self) {
        let (mut before, mut idle) = (self.queries.load(Ordering::SeqCst), 0);
        let mut state = self.lock();
        while !state.raw.is_null() && idle < IDLE_ROUNDS {
            self.taken.wait_for(&mut state, GRACE);
            let queries = self.queries.load(Ordering::SeqCst);
            if !self.is_busy.load(Ordering::SeqCst) {
                // It may stand in the driver on the way to its first collective.
                idle += usize::from(queries.is_multiple_of(2));
            } else if queries == before && queries % 2 == 1 && !state.raw.is_null() {
                match self.call_alone(self.library.functions().comm_abort, state.raw) {
                    Ok(aborted) => *state = CommState { raw: ptr::null_mut(), aborted: Some(aborted) },
                    Err(error) => rpc_core::log_limited!(WARN, %error, "no thread to abort a communicator of NCCL"),
                }
            }
            before = queries;
        }
    }
}

/// Control of a rank: that of its control communicator, whose abort reaches NCCL's communicator
/// even if the rank stands in a query of the device.
pub(super) struct NcclControl {
    control: Arc<dyn Control>,
    handle: Weak<CommHandle>,
}

impl NcclControl {
    pub(super) fn new(control: Arc<dyn Control>, handle: &Arc<CommHandle>) -> Self {
        Self { control, handle: Arc::downgrade(handle) }
    }
}

impl Control for NcclControl {
    fn abort(&self, reason: &str) {
        self.control.abort(reason);
        let Some(handle) = self.handle.upgrade() else { return };
        // A peer can ask for any number of aborts, and one thread does for all of them: a group
        // that is broken stays so.
        if handle.is_looked_after.swap(true, Ordering::SeqCst) {
            return;
        }
        let (thread, looked_after) = (thread::Builder::new().name("nccl-abort".to_owned()), Arc::clone(&handle));
        if let Err(error) = thread.spawn(move || looked_after.abort_for_a_rank_that_stands()) {
            handle.is_looked_after.store(false, Ordering::SeqCst);
            rpc_core::log_limited!(WARN, %error, "no thread to abort for a rank that stands in a call of the driver");
        }
    }

    fn broken(&self) -> Option<Arc<Breakdown>> {
        self.control.broken()
    }

    fn flights(&self) -> Vec<Flight> {
        self.control.flights()
    }

    fn describe(&self) -> String {
        self.control.describe()
    }
}
