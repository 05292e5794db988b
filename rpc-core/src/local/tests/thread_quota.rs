//! Tests of the hand-over of threads between sessions.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::local::ThreadQuota;
use crate::local::thread_quota::{FEW_WAITING, ThreadLease, WantsThreads};

/// A session that tries to take one more permit from within the call that gives it one.
#[derive(Default)]
struct Recorder {
    quota: Option<Arc<ThreadQuota>>,
    needs_none: bool,
    given: Mutex<Vec<ThreadLease>>,
}

impl WantsThreads for Recorder {
    fn take_thread(self: Arc<Self>, lease: ThreadLease) -> Option<ThreadLease> {
        if let Some(quota) = &self.quota {
            assert!(quota.try_reserve().is_none(), "the permit could be taken while it was handed over");
        }
        if self.needs_none {
            return Some(lease);
        }
        self.given.lock().push(lease);
        None
    }
}

fn wait(quota: &Arc<ThreadQuota>, session: &Arc<Recorder>) {
    let weak: Weak<Recorder> = Arc::downgrade(session);
    assert!(quota.reserve_or_wait(|| weak).is_none());
}

/// Regression: the permit was returned, and the oldest waiter told to try. When another session
/// took it first, the waiter queued again and was told again, for ever.
#[test]
fn a_permit_goes_to_the_session_that_has_waited_for_longest() {
    let quota = ThreadQuota::new(1);
    let session = |needs_none| Arc::new(Recorder { quota: Some(quota.clone()), needs_none, ..Recorder::default() });
    let (idle, first, second) = (session(true), session(false), session(false));
    let lease = quota.try_reserve();
    wait(&quota, &idle);
    wait(&quota, &Arc::new(Recorder::default()));
    wait(&quota, &first);
    wait(&quota, &second);
    drop(lease);
    assert_eq!((first.given.lock().len(), second.given.lock().len(), quota.used()), (1, 0, 1));
    let given = first.given.lock().pop();
    drop(given);
    assert_eq!((second.given.lock().len(), quota.used(), quota.is_awaited()), (1, 1, false));
    let given = second.given.lock().pop();
    drop(given);
    assert_eq!(quota.used(), 0);
}

#[test]
fn sessions_that_are_gone_do_not_fill_the_queue() {
    let quota = ThreadQuota::new(1);
    let _lease = quota.try_reserve();
    for _ in 0..10 * FEW_WAITING {
        wait(&quota, &Arc::new(Recorder::default()));
    }
    assert!(quota.waiting() <= FEW_WAITING);
}
