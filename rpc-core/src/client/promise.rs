//! The part of a reference to a result that is not there yet: the lane that it is bound to, and the
//! request that it comes from.

use std::cell::RefCell;
use std::future::Future as _;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

use crate::blocking;
use crate::client::action::Pending;
use crate::error::{ErrorKind, Result, RpcError};
use crate::session::Lane;
use crate::value::TensorRef;

/// A request whose result the session keeps. Dropping it cancels the request if it has not begun.
pub(crate) struct Promise {
    lane: Lane,
    outcome: Mutex<Outcome>,
    /// Layout of the result, if the request is an allocation.
    pub(crate) tensor: Option<TensorRef>,
    /// Name of the operation, for errors.
    pub(crate) name: &'static str,
}

enum Outcome {
    Pending(Pending<()>),
    Succeeded,
    Failed(RpcError),
}

impl Promise {
    pub(crate) fn new(lane: Lane, pending: Pending<()>, tensor: Option<TensorRef>, name: &'static str) -> Self {
        Self { lane, outcome: Mutex::new(Outcome::Pending(pending)), tensor, name }
    }

    /// Checks that a request which names the result is on its lane.
    pub(crate) fn check_lane(&self, lane: Lane) -> Result<()> {
        if self.lane == lane {
            return Ok(());
        }
        let bound = self.lane;
        let text = format!("the result of an operation of lane {bound} is not known on lane {lane}: fetch it first");
        Err(RpcError::new(ErrorKind::ApiMisuse, text))
    }

    pub(crate) fn lane(&self) -> Lane {
        self.lane
    }

    /// Returns the error of the request, if its reply has arrived. A request that was refused has
    /// been answered before the session admits one that names its result.
    pub(crate) fn error(&self) -> Option<RpcError> {
        let mut outcome = self.outcome.lock();
        blocking::apart(|| outcome.update());
        if let Outcome::Failed(error) = &*outcome { Some(error.clone()) } else { None }
    }

    /// Makes the session send the request soon, although nothing waits for its reply.
    pub(crate) fn send_soon(&self) {
        let mut drivers = Vec::new();
        blocking::collect_drivers(&mut drivers, || self.outcome.lock().update());
        drivers.iter().for_each(|driver| driver.attend_soon());
    }
}

impl Outcome {
    /// Takes the reply, if it has arrived.
    fn update(&mut self) {
        if let Self::Pending(pending) = self
            && let Poll::Ready(ended) = Pin::new(pending).poll(&mut Context::from_waker(Waker::noop()))
        {
            *self = ended.map_or_else(Self::Failed, |()| Self::Succeeded);
        }
    }
}

thread_local! {
    /// Promises whose last reference has gone while this thread drops another one. `None` while it
    /// drops none.
    static DROPPED: RefCell<Option<Vec<Promise>>> = const { RefCell::new(None) };
}

/// Drops a promise.
///
/// Its request may hold the last reference to the result of an earlier one, whose request holds
/// that of another: they are dropped one after the other, so that a long chain does not exhaust the
/// stack.
pub(crate) fn drop_promise(promise: Box<Promise>) {
    /// Ends the list of this thread, also after a panic.
    struct Leave;

    impl Drop for Leave {
        fn drop(&mut self) {
            let rest = DROPPED.with_borrow_mut(Option::take);
            // Outside of the borrow, which the drop of a promise takes.
            drop(rest);
        }
    }

    let mut next = Some(*promise);
    let mut list = |dropped: &mut Option<Vec<_>>| match dropped {
        Some(dropped) => dropped.extend(next.take()),
        None => *dropped = Some(Vec::new()),
    };
    if DROPPED.try_with(|dropped| list(&mut dropped.borrow_mut())).is_err() {
        // The thread ends, and has no list any more.
        return;
    }
    if next.is_none() {
        return;
    }
    let _leave = Leave;
    while let Some(promise) = next {
        drop(promise);
        next = DROPPED.with_borrow_mut(|dropped| dropped.as_mut().and_then(Vec::pop));
    }
}
