//! Activity of a connection in a dialect: the requests and messages in progress, which decide by
//! which of the server's time limits the connection is judged.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use parking_lot::Mutex;

use crate::clock;
use crate::serve::stall_timeouts::StallTimeouts;

/// Handle by which a dialect tells what its connection is doing. Cheap to clone; usable while the
/// stream is borrowed or split.
///
/// While no mark exists, the server's [`idle_timeout`](crate::ServeOptions::idle_timeout) runs,
/// whatever bytes the client sends. Marks that are taken before the session is opened count from
/// its opening on. Marks may be taken and dropped anywhere, also in other tasks and threads.
#[derive(Clone)]
pub struct DialectActivity(Arc<Mutex<Progress>>);

/// Mark of a request in progress. While one exists, the server's limit on idle sessions does not
/// count.
pub struct Working(Arc<Mutex<Progress>>);

/// Mark of a message of which a part has arrived. While one exists, the client has to send at least
/// [`min_rate`](crate::ServeOptions::min_rate), and the server's limit on idle sessions does not
/// count.
pub struct Receiving(Arc<Mutex<Progress>>);

/// State that a connection shares with the server's task for it.
#[derive(Default)]
pub(super) struct Progress {
    /// Timeouts of the session. `None` until there is one.
    pub(super) timeouts: Option<StallTimeouts>,
    /// Number of [`Working`] marks.
    working: usize,
    /// Number of [`Receiving`] marks.
    receiving: usize,
    /// State of the output that the dialect has offered to the channel.
    pub(super) output: OutputState,
    /// Waker of the server's task, except while that polls the dialect. Marks that change meanwhile
    /// in another place wake the task, so that it sets its alarm to the new timeouts.
    server_task: Option<Waker>,
}

/// State of the output that a dialect has offered to the channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OutputState {
    /// The channel has taken all of it.
    #[default]
    Taken,
    /// The channel has taken the first part of a write. The rest waits for the dialect.
    Partial,
    /// The last write found no room. Lasts until a write makes progress: on most channels, a flush
    /// says nothing about room.
    Blocked,
    /// The channel has taken all writes, and a flush waits.
    Flushing,
}

impl DialectActivity {
    pub(super) fn new(progress: Arc<Mutex<Progress>>) -> Self {
        Self(progress)
    }

    /// Marks the beginning of a request. The request ends when the mark is dropped, which should be
    /// after its answer has been written.
    #[must_use]
    pub fn working(&self) -> Working {
        change_marks(&self.0, |progress| progress.working += 1);
        Working(self.0.clone())
    }

    /// Marks a message of the client as begun. It has arrived when the mark is dropped. The dialect
    /// reads on while the mark exists: time that it spends otherwise counts as the client's.
    #[must_use]
    pub fn receiving(&self) -> Receiving {
        change_marks(&self.0, |progress| progress.receiving += 1);
        Receiving(self.0.clone())
    }
}

impl Progress {
    /// Starts the timeouts of the session.
    pub(super) fn start(&mut self, timeouts: StallTimeouts) {
        self.timeouts = Some(timeouts);
        self.update();
    }

    /// Records that the server's task is about to poll the dialect. It looks at the timeouts
    /// afterwards, so that changes need not wake it.
    pub(super) fn begin_poll(&mut self) {
        self.server_task = None;
    }

    /// Records that the server's task has polled the dialect. `waker` wakes the task for changes
    /// from here on. If the channel has taken all output, the client owes nothing.
    pub(super) fn end_poll(&mut self, waker: &Waker) {
        self.server_task = Some(waker.clone());
        if let Some(timeouts) = self.timeouts.as_mut().filter(|_| self.output == OutputState::Taken) {
            timeouts.set_writing(false);
        }
    }

    /// Applies the number of marks to the timeouts.
    fn update(&mut self) {
        let Some(timeouts) = &mut self.timeouts else { return };
        timeouts.set_receiving(self.receiving > 0);
        if self.working + self.receiving > 0 {
            timeouts.idle_since = None;
        } else {
            timeouts.idle_since.get_or_insert_with(clock::now);
        }
    }
}

/// Changes the number of marks, and wakes the server's task if that would not notice otherwise.
fn change_marks(progress: &Mutex<Progress>, change: impl FnOnce(&mut Progress)) {
    let mut progress = progress.lock();
    change(&mut progress);
    progress.update();
    let server_task = progress.server_task.take();
    // The task takes the lock as soon as it is woken.
    drop(progress);
    if let Some(task) = server_task {
        task.wake();
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        change_marks(&self.0, |progress| progress.working -= 1);
    }
}

impl Drop for Receiving {
    fn drop(&mut self) {
        change_marks(&self.0, |progress| progress.receiving -= 1);
    }
}

impl fmt::Debug for DialectActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Progress { working, receiving, .. } = &*self.0.lock();
        f.debug_struct("DialectActivity").field("working", working).field("receiving", receiving).finish()
    }
}

impl fmt::Debug for Working {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Working")
    }
}

impl fmt::Debug for Receiving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Receiving")
    }
}
