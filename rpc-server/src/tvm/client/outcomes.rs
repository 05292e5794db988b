//! The way of outcomes to callers.

use std::collections::VecDeque;

use parking_lot::Mutex;
use rpc_core::Responder;
use rpc_core::proto::ClientEvent;
use rpc_core::reply::Outcome;

/// Deliverer of outcomes.
pub(super) enum Outcomes {
    /// Outcomes get to their callers as they come to be.
    AtOnce,
    /// Outcomes are events for a driver, which holds a lock as they come to be.
    Queued(Mutex<VecDeque<ClientEvent<Responder>>>),
}

impl Outcomes {
    pub(super) fn queued() -> Self {
        Self::Queued(Mutex::default())
    }

    /// Admits a request.
    pub(super) fn admit(&self, responder: Responder) {
        match self {
            Self::AtOnce => responder.admit(),
            Self::Queued(events) => events.lock().push_back(ClientEvent::Admitted(responder)),
        }
    }

    /// Completes a request.
    pub(super) fn complete(&self, responder: Responder, outcome: Outcome) {
        match self {
            Self::AtOnce => _ = responder.complete(outcome),
            Self::Queued(events) => events.lock().push_back(ClientEvent::Reply(responder, outcome)),
        }
    }

    /// Returns the next event for the driver.
    pub(super) fn poll(&self) -> Option<ClientEvent<Responder>> {
        match self {
            Self::AtOnce => None,
            Self::Queued(events) => events.lock().pop_front(),
        }
    }
}
