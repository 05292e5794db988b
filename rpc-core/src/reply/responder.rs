//! [`Responder`]: the end of a request at the session that serves it.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use super::contract::Outcome;
use super::slot::{Slot, Stage};
use crate::error::RpcError;

/// The serving end of one request: admits and completes it.
///
/// Cheap to clone. The first completion counts and later ones are discarded, so that a deadline and
/// a result may race. Dropping all clones without completing is a bug of the session, and the
/// caller gets an internal error.
pub struct Responder(pub(super) Arc<Slot>);

impl Clone for Responder {
    fn clone(&self) -> Self {
        self.0.responders.fetch_add(1, Ordering::Relaxed);
        Self(self.0.clone())
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        // `AcqRel`, as for any reference count: the last responder must see everything that the
        // others did.
        if self.0.responders.fetch_sub(1, Ordering::AcqRel) == 1 && !self.is_over() {
            self.0.complete(Err(
                RpcError::internal("the session dropped the request without a reply").may_have_run(true)
            ));
        }
    }
}

impl Responder {
    /// Admits the request: fixes its position in its lane and resolves the first stage.
    pub fn admit(&self) {
        let mut state = self.0.state();
        if let Stage::Queued = state.stage {
            state.stage = Stage::Admitted;
            let waker = state.waker.take();
            drop(state);
            if let Some(waker) = waker {
                waker.wake();
            }
        }
    }

    /// Completes the request. Returns true if this was the first completion. Otherwise, and also if
    /// the caller is gone, the objects in `outcome` are freed.
    pub fn complete(&self, outcome: Outcome) -> bool {
        self.0.complete(outcome)
    }

    /// Returns true if the request has been completed, or its caller is gone.
    pub fn is_complete(&self) -> bool {
        matches!(self.0.state().stage, Stage::Shown | Stage::Done(_) | Stage::Over)
    }

    /// Returns true if further work on the request is pointless: it is complete, its caller is gone
    /// or has asked for cancellation, or the session has ended.
    pub fn is_over(&self) -> bool {
        let cancelled = self.0.state().cancelled;
        cancelled || self.is_complete() || self.0.control.has_ended()
    }

    /// Returns the request's id in its session.
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns a weak responder, for code that may complete the request but does not have to.
    pub(crate) fn downgrade(&self) -> WeakResponder {
        WeakResponder(Arc::downgrade(&self.0))
    }
}

/// Weak reference to a [`Responder`]. Keeps neither the reply nor its objects alive.
pub(crate) struct WeakResponder(Weak<Slot>);

impl WeakResponder {
    /// Returns the responder, unless the request is complete.
    pub(crate) fn upgrade(&self) -> Option<Responder> {
        let slot = self.0.upgrade()?;
        slot.responders.fetch_add(1, Ordering::Relaxed);
        let responder = Responder(slot);
        (!responder.is_complete()).then_some(responder)
    }

    /// Returns true if the request is not complete yet.
    pub(crate) fn is_pending(&self) -> bool {
        self.0.upgrade().is_some_and(|slot| matches!(slot.state().stage, Stage::Queued | Stage::Admitted))
    }
}

impl fmt::Debug for Responder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Responder({})", self.0.id)
    }
}
