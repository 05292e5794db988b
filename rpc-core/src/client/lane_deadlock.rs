//! Detection of a deadlock in closures: a request on the lane that waits for the closure. Each
//! would wait for the other.

use std::cell::RefCell;

use crate::error::{ErrorKind, Result, RpcError};
use crate::session::{Lane, SharedSession, is_same};

thread_local! {
    /// Session and lane that wait for the closure on this thread.
    static HELD: RefCell<Option<(SharedSession, Lane)>> = const { RefCell::new(None) };
}

/// Records that `lane` of `session` waits for this thread, until the guard is dropped.
pub(crate) fn hold(session: &SharedSession, lane: Option<Lane>) -> impl Drop {
    struct Release;
    impl Drop for Release {
        fn drop(&mut self) {
            let held = HELD.with_borrow_mut(Option::take);
            // Outside of the borrow: it may be the last reference to the session.
            drop(held);
        }
    }
    HELD.with_borrow_mut(|held| *held = lane.map(|lane| (session.clone(), lane)));
    Release
}

/// Refuses a request on a lane that waits for the closure on this thread.
///
/// # Errors
///
/// [`ErrorKind::ApiMisuse`].
pub(crate) fn check(session: &SharedSession, lane: Lane) -> Result<()> {
    let is_held = HELD
        .with_borrow(|held| held.as_ref().is_some_and(|(held, waiting)| *waiting == lane && is_same(held, session)));
    if !is_held {
        return Ok(());
    }
    Err(RpcError::new(
        ErrorKind::ApiMisuse,
        format!("lane {lane} waits for the closure that makes this request: make it concurrent, or use another lane"),
    ))
}
