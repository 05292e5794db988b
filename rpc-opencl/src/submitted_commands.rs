//! Commands of a queue that are not done yet, and the first error of those that are.
//!
//! OpenCL keeps no error for the queue: it is with the event of the command that has failed, which
//! nobody may hold any more when the command runs.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::event::Event;
use rpc_core::error::{Result, RpcError};

/// The commands of one queue, which run in order.
#[derive(Default)]
pub(super) struct Commands(Mutex<State>);

#[derive(Default)]
struct State {
    pending: VecDeque<Arc<Event>>,
    failure: Option<RpcError>,
}

impl Commands {
    /// Adds a command that has been submitted behind the others. Waits for the older half if there
    /// are [`MOST`]: drivers take any number, which a client could make them keep behind a kernel
    /// that never ends.
    pub(super) fn add(&self, command: Event) -> Arc<Event> {
        let command = Arc::new(command);
        let mut state = self.0.lock();
        state.take_finished();
        state.pending.push_back(command.clone());
        let middle = if state.pending.len() < MOST { None } else { state.pending.get(MOST / 2).cloned() };
        drop(state);
        if let Some(middle) = middle {
            // The error is kept with the others.
            _ = middle.wait();
            self.0.lock().take_finished();
        }
        command
    }

    /// Returns the first error of the commands that are done, and forgets it.
    pub(super) fn take_failure(&self) -> Result<()> {
        let mut state = self.0.lock();
        state.take_finished();
        state.failure.take().map_or(Ok(()), Err)
    }

    /// Returns the end of the last command; `None` if all are done.
    pub(super) fn last(&self) -> Option<Arc<Event>> {
        let mut state = self.0.lock();
        state.take_finished();
        state.pending.back().cloned()
    }
}

impl State {
    /// Removes the commands that are done, up to the first that is not.
    fn take_finished(&mut self) {
        while let Some(first) = self.pending.front() {
            match first.is_done() {
                Ok(false) => return,
                Ok(true) => {}
                Err(error) => _ = self.failure.get_or_insert(error),
            }
            self.pending.pop_front();
        }
    }
}

/// Largest number of commands of a queue that are not done.
const MOST: usize = 512;
