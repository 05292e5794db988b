//! The state that both ends of a request share.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Waker;

use parking_lot::{Mutex, MutexGuard};

use super::contract::{Outcome, ReplyControl, ReplySink};
use crate::blocking::{self, Driver};
use crate::error::{ErrorKind, RpcError};

/// Function that is shown an outcome. See
/// [`Submission::inspect`](crate::Submission::inspect).
pub(super) type Observer = Box<dyn FnOnce(&Outcome) + Send>;

#[derive(Default)]
pub(super) struct SlotState {
    pub(super) stage: Stage,
    /// True once the caller has asked for cancellation. It may still be waiting.
    pub(super) cancelled: bool,
    pub(super) waker: Option<Waker>,
    pub(super) sink: Option<(Arc<dyn ReplySink>, u64)>,
    pub(super) observer: Option<Observer>,
}

#[derive(Default)]
pub(super) enum Stage {
    /// Waiting for admission.
    #[default]
    Queued,
    /// Admitted: the position in the lane is fixed.
    Admitted,
    /// Completed, and being shown to the observer. Further completions are ignored.
    Shown,
    /// Completed, and not yet taken.
    Done(Outcome),
    /// Taken by the caller, or given up by it.
    Over,
}

pub(super) struct Slot {
    pub(super) id: u64,
    /// Number of [`Responder`](crate::Responder)s. The caller's end is not counted.
    pub(super) responders: AtomicUsize,
    pub(super) control: Arc<dyn ReplyControl>,
    /// Input and output of the session, if waiting threads have to do it.
    pub(super) driver: Option<Arc<dyn Driver>>,
    pub(super) state: Mutex<SlotState>,
}

impl Slot {
    pub(super) fn state(&self) -> MutexGuard<'_, SlotState> {
        // A panic cannot leave the state half changed: each change is one assignment.
        self.state.lock()
    }

    pub(super) fn cancel(&self) {
        self.state().cancelled = true;
        self.control.cancel(self.id);
    }

    /// Lets the waiting thread drive the session, if it has to be driven.
    pub(super) fn wait_driven(&self) {
        if let Some(driver) = &self.driver {
            blocking::waiting_for(driver);
        }
    }

    /// Completes the request. Returns true if this was the first completion. Otherwise, and also if
    /// the caller is gone, frees the objects in `outcome`.
    pub(super) fn complete(&self, outcome: Outcome) -> bool {
        let mut state = self.state();
        let first = matches!(state.stage, Stage::Queued | Stage::Admitted);
        // A further observer may be added while one is being shown the outcome.
        while let Some(observer) = state.observer.take() {
            if let Stage::Queued | Stage::Admitted = state.stage {
                state.stage = Stage::Shown;
            }
            drop(state);
            if first {
                observer(&outcome);
            } else {
                observer(&Err(
                    RpcError::new(ErrorKind::Cancelled, "the caller no longer waits for the reply").may_have_run(true)
                ));
            }
            state = self.state();
        }
        match state.stage {
            // The caller may have given up while the outcome was shown.
            Stage::Queued | Stage::Admitted | Stage::Shown if first => {
                if let Some((sink, token)) = state.sink.take() {
                    state.stage = Stage::Over;
                    drop(state);
                    sink.deliver(token, outcome);
                } else {
                    state.stage = Stage::Done(outcome);
                    let waker = state.waker.take();
                    drop(state);
                    if let Some(waker) = waker {
                        waker.wake();
                    }
                }
                true
            }
            _ => {
                drop(state);
                if let Ok(value) = outcome {
                    self.control.discard(value);
                }
                false
            }
        }
    }

    /// Gives up the reply: frees it if it is there. Otherwise cancels the request, if `cancel` is
    /// true.
    pub(super) fn abandon(&self, cancel: bool) {
        let mut state = self.state();
        let stage = std::mem::replace(&mut state.stage, Stage::Over);
        let waker = state.waker.take();
        let sink = state.sink.take();
        drop(state);
        drop((waker, sink));
        match stage {
            Stage::Done(Ok(value)) => self.control.discard(value),
            Stage::Queued | Stage::Admitted if cancel => self.control.abandon(self.id),
            _ => {}
        }
    }
}

/// Replaces the waker of a waiting task, unless it is the same.
pub(super) fn set_waker(current: &mut Option<Waker>, waker: &Waker) {
    match current {
        Some(current) if current.will_wake(waker) => {}
        current => *current = Some(waker.clone()),
    }
}
