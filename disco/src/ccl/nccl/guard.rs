//! The guard of a communicator: a thread that ends it, and that aborts it for a rank that stands in
//! a call of the device's driver.
//!
//! The guard makes no call of the driver itself after its start (NCCL does, when it ends the
//! communicator), since such a call may wait for a collective that hangs, which only the abort
//! ends. For a rank that stands in the driver it also notices that the group is broken, or that the
//! time limit has passed: all threads that poll may stand there.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use rpc_core::{ErrorKind, RpcError};

use super::comm_handle::{CommHandle, CommState};
use crate::ccl::Control;

/// Interval at which the guard polls while collectives are on the stream: also the time that a rank
/// has to leave a call of the driver and to abort by itself.
const PERIOD: Duration = Duration::from_millis(100);

/// Owner of a guard's thread, which ends when this is dropped. That is not waited for: an abort may
/// hang.
pub(super) struct Guard {
    handle: Arc<CommHandle>,
}

/// State of the thread.
struct GuardThread {
    handle: Arc<CommHandle>,
    control: Arc<dyn Control>,
    limit: Option<Duration>,
}

impl Guard {
    /// Starts the guard of a communicator whose group has this control. `limit` is the time limit
    /// of a call of the driver while collectives are on the stream.
    ///
    /// # Errors
    ///
    /// The system has no thread to spare; the error of the driver, as the device is made the
    /// current one of the thread.
    pub(super) fn start(
        handle: &Arc<CommHandle>,
        control: Arc<dyn Control>,
        limit: Option<Duration>,
    ) -> Result<Self, RpcError> {
        let guard = GuardThread { handle: Arc::clone(handle), control, limit };
        let (tell, told) = mpsc::channel();
        let thread = thread::Builder::new().name("nccl-guard".to_owned()).spawn(move || {
            // NCCL ends a communicator on its device. Without a current one it would make that of
            // number 0 current afterwards, and open it.
            let made = guard.handle.stream().make_current();
            let is_ready = made.is_ok();
            _ = tell.send(made);
            if is_ready {
                guard.run();
            }
        });
        thread.map_err(|error| {
            RpcError::new(ErrorKind::LimitExceeded, format!("no thread for a communicator of NCCL: {error}"))
        })?;
        told.recv().unwrap_or_else(|_| Err(RpcError::internal("the guard of a communicator of NCCL panicked")))?;
        Ok(Self { handle: Arc::clone(handle) })
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.handle.leave();
    }
}

impl GuardThread {
    /// Serves the handle until the owner of the guard is dropped.
    fn run(&self) {
        // The call of the driver that the rank was in at the last poll, and the time of the first
        // poll that found it there.
        let mut standing: Option<(u64, Instant)> = None;
        let mut state = self.handle.lock();
        loop {
            if let Some(request) = state.request.take() {
                parking_lot::MutexGuard::unlocked(&mut state, || request.run(self.handle.library()));
            } else if state.is_leaving {
                return;
            } else if !self.handle.is_busy() {
                standing = None;
                self.handle.sleep(&mut state);
            } else {
                self.handle.sleep_for(&mut state, PERIOD);
                let query = self.handle.query_in_progress();
                standing = match (standing, query) {
                    (Some((before, since)), Some(query)) if before == query => Some((query, since)),
                    (_, query) => query.map(|query| (query, Instant::now())),
                };
                if let Some((_, since)) = standing {
                    self.supervise(&mut state, since.elapsed());
                }
            }
        }
    }

    /// Breaks the group of a rank that has been in one call of the driver for longer than its time
    /// limit, and aborts for a rank whose group is broken.
    fn supervise(&self, state: &mut CommState, time: Duration) {
        if let Some(limit) = self.limit.filter(|limit| time >= *limit) {
            self.control.abort(&format!("a call of the device's driver has not returned within {limit:?}"));
        }
        if time >= PERIOD && self.control.broken().is_some() {
            self.handle.abort_for_rank(state);
        }
    }
}
