//! The handle of a communicator of NCCL, which its rank shares with the [guard](super::guard).
//!
//! A query of a mark may wait for the driver's lock, which another thread holds for as long as it
//! frees memory, and that waits for the work on the device. If that work is a collective which
//! hangs, nothing but an abort ends all three. So NCCL is called with the handle's lock held, and
//! the device is queried without it.

use std::ffi::c_int;
use std::mem;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::error::code;
use super::symbols::Comm;
use super::{DeviceStream, Library, busy_devices};

/// Handle of a communicator.
pub(super) struct CommHandle {
    library: Arc<Library>,
    stream: Arc<dyn DeviceStream>,
    state: Mutex<CommState>,
    /// Notified when the guard has something to do.
    changed: Condvar,
    /// Number of beginnings and ends of queries of the device: odd during a query.
    queries: AtomicU64,
    /// True while collectives are on the stream.
    is_busy: AtomicBool,
    /// False while the guard sleeps until collectives are on the stream.
    is_guarded: AtomicBool,
}

/// The communicator, for calls with it. NCCL takes one call at a time.
pub(super) struct CommState {
    /// Null before the communicator is created and once its end has begun.
    pub(super) raw: Comm,
    /// Call that the guard has to make.
    pub(super) request: Option<EndRequest>,
    /// Report of an abort that the guard has begun by itself.
    aborted: Option<mpsc::Receiver<()>>,
    /// True once the guard has to end.
    pub(super) is_leaving: bool,
}

// SAFETY: NCCL takes calls with a communicator from any thread, one at a time.
unsafe impl Send for CommState {}

/// Request to end a communicator. It has the only copy of it.
pub(super) struct EndRequest {
    call: unsafe extern "C" fn(Comm) -> c_int,
    raw: Comm,
    ended: mpsc::Sender<()>,
}

impl EndRequest {
    /// Calls NCCL, which may hang, and reports the end of the call.
    pub(super) fn run(self, library: &Library) {
        // SAFETY: the communicator exists, and no other thread has a copy of it any more.
        let result = unsafe { (self.call)(self.raw) };
        if !matches!(result, code::SUCCESS | code::IN_PROGRESS) {
            rpc_core::log_limited!(
                WARN,
                text = library.error_string(result),
                "a communicator of NCCL ended with an error"
            );
        }
        // The rank no longer waits for a call that has taken too long.
        _ = self.ended.send(());
    }
}

impl CommHandle {
    /// Creates a handle without a communicator, for the work of a stream.
    pub(super) fn new(library: Arc<Library>, stream: Arc<dyn DeviceStream>) -> Arc<Self> {
        let state = Mutex::new(CommState { raw: ptr::null_mut(), request: None, aborted: None, is_leaving: false });
        let (changed, queries) = (Condvar::new(), AtomicU64::new(0));
        let (is_busy, is_guarded) = (AtomicBool::new(false), AtomicBool::new(false));
        Arc::new(Self { library, stream, state, changed, queries, is_busy, is_guarded })
    }

    pub(super) fn library(&self) -> &Library {
        &self.library
    }

    pub(super) fn stream(&self) -> &dyn DeviceStream {
        &*self.stream
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

    /// Returns the number of the query that the rank is in.
    pub(super) fn query_in_progress(&self) -> Option<u64> {
        Some(self.queries.load(Ordering::SeqCst)).filter(|queries| queries % 2 == 1)
    }

    /// Records if there are collectives on the stream, for the guard and for the device.
    pub(super) fn set_busy(&self, is_busy: bool) {
        let device = self.stream.device();
        match (self.is_busy.swap(is_busy, Ordering::SeqCst), is_busy) {
            (false, true) => {
                busy_devices::add(device);
                if !self.is_guarded.swap(true, Ordering::SeqCst) {
                    // The guard has the lock until it sleeps.
                    drop(self.lock());
                    self.changed.notify_all();
                }
            }
            (true, false) => busy_devices::subtract(device),
            _ => {}
        }
    }

    pub(super) fn is_busy(&self) -> bool {
        self.is_busy.load(Ordering::SeqCst)
    }

    /// Records that the collectives on the stream hang and are not polled any more. For the other
    /// communicators of the device they stay in progress.
    pub(super) fn give_up_work(&self) {
        self.is_busy.store(false, Ordering::SeqCst);
    }

    /// Sleeps until the guard has something to do.
    pub(super) fn sleep(&self, state: &mut MutexGuard<'_, CommState>) {
        self.is_guarded.store(false, Ordering::SeqCst);
        // A collective that began before is seen here; one that begins later notifies.
        if !self.is_busy() {
            self.changed.wait(state);
        }
        self.is_guarded.store(true, Ordering::SeqCst);
    }

    /// Sleeps as [`sleep`](Self::sleep) does, for so long at most, also while collectives are on
    /// the stream.
    pub(super) fn sleep_for(&self, state: &mut MutexGuard<'_, CommState>, time: Duration) {
        self.changed.wait_for(state, time);
    }

    /// Lets the guard end the communicator by `call`, or finds the abort that it has begun. The
    /// returned channel reports the end of the call, which may hang. `None` if there is no
    /// communicator any more.
    pub(super) fn end(&self, call: unsafe extern "C" fn(Comm) -> c_int) -> Option<mpsc::Receiver<()>> {
        let mut state = self.lock();
        if let Some(aborted) = state.aborted.take() {
            return Some(aborted);
        }
        let raw = mem::replace(&mut state.raw, ptr::null_mut());
        (!raw.is_null()).then(|| self.request(&mut state, call, raw))
    }

    /// Lets the guard abort `raw`, the only copy of a communicator that is not the handle's. Its
    /// own has ended. The returned channel reports the end of the call, which may hang.
    pub(super) fn abort_other(&self, raw: Comm) -> mpsc::Receiver<()> {
        self.request(&mut self.lock(), self.library.functions().comm_abort, raw)
    }

    /// Requests the abort of the communicator, if there is one, for a rank that finds it in its
    /// next [`end`](Self::end).
    pub(super) fn abort_for_rank(&self, state: &mut CommState) {
        let raw = mem::replace(&mut state.raw, ptr::null_mut());
        if !raw.is_null() {
            state.aborted = Some(self.request(state, self.library.functions().comm_abort, raw));
        }
    }

    fn request(
        &self,
        state: &mut CommState,
        call: unsafe extern "C" fn(Comm) -> c_int,
        raw: Comm,
    ) -> mpsc::Receiver<()> {
        let (ended, told) = mpsc::channel();
        state.request = Some(EndRequest { call, raw, ended });
        self.changed.notify_all();
        told
    }

    /// Lets the guard end, once it is done with the present request.
    pub(super) fn leave(&self) {
        self.lock().is_leaving = true;
        self.changed.notify_all();
    }
}
