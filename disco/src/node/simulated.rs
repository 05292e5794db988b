//! Workers that execute nothing: for measuring a controller, and the nodes between, with more
//! workers than a machine can run.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use rpc_core::{Result, Value};

use crate::error::WorkerId;
use crate::wire::command::{Command, Queued};
use crate::wire::event::{Event, EventSink};
use crate::wire::set_up::{CommandPosition, SetUp};
use crate::worker::command_feed::out_of_order;

/// An [extension](rpc_core::Context::extension) of the sessions that a node serves: its workers
/// execute nothing, and report each command as executed at once. Values that are fetched from them
/// are null, and they have no collectives.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedWorkers;

/// The simulated workers of a node.
pub(super) struct SimulatedHost {
    first: u32,
    count: u32,
    report_every: u64,
    sink: Arc<dyn EventSink>,
    progress: Mutex<Progress>,
}

/// Progress of all of them, which is the same.
struct Progress {
    /// The number of the last command.
    sequence: u64,
    executed: u64,
    reported: u64,
}

impl SimulatedHost {
    pub(super) fn new(set_up: &SetUp, sink: Arc<dyn EventSink>) -> Self {
        let SetUp { first, count, report_every, .. } = *set_up;
        let CommandPosition { sequence, credit } = set_up.position();
        let progress = Progress { sequence, executed: credit, reported: credit };
        Self { first, count, report_every, sink, progress: Mutex::new(progress) }
    }

    /// "Executes" commands, of which the first has this number.
    ///
    /// # Errors
    ///
    /// It is not the next number.
    pub(super) fn submit(&self, first: u64, commands: &[Queued]) -> Result<()> {
        // Held to the end, so that reports are in the order of commands.
        let mut progress = self.progress.lock();
        if first != progress.sequence + 1 {
            return Err(out_of_order(first, progress.sequence + 1));
        }
        for queued in commands {
            progress.sequence += 1;
            progress.executed = progress.executed.saturating_add(queued.cost);
            match *queued.command {
                Command::SyncWorker { ticket, worker: Some(worker) } if self.has(worker) => {
                    self.report(&mut progress, Some(ticket), worker..worker + 1);
                }
                Command::SyncWorker { ticket, worker: None } | Command::Shutdown { ticket } => {
                    self.report(&mut progress, Some(ticket), self.first..self.first + self.count);
                }
                Command::DebugGetFromRemote { ticket, worker, .. } if self.has(worker) => {
                    self.sink.send_content(ticket, Ok(Value::Null));
                }
                Command::CopyFromWorker0 { ticket, .. } if self.has(0) => {
                    self.sink.send_content(ticket, Ok(Value::Null));
                }
                _ if progress.executed - progress.reported >= self.report_every => {
                    self.report(&mut progress, None, self.first..self.first + self.count);
                }
                _ => {}
            }
        }
        Ok(())
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    fn has(&self, worker: u32) -> bool {
        (self.first..self.first + self.count).contains(&worker)
    }

    fn report(&self, progress: &mut Progress, ticket: Option<u64>, workers: Range<u32>) {
        for worker in workers {
            let worker = WorkerId(worker);
            self.sink.send(Event::Progress { worker, sequence: progress.sequence, cost: progress.executed });
            if let Some(ticket) = ticket {
                self.sink.send(Event::Reached { ticket });
            }
        }
        progress.reported = progress.executed;
    }
}
