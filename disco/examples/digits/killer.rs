//! A killer of worker processes, which shows that a training survives their loss.

use std::process::Command;
use std::time::Instant;

use disco::{Content, DiscoSession, Replacement, WorkerId};
use rpc_core::Value;

/// One in so many epochs loses a worker, on average.
const EPOCHS_PER_LOSS: u64 = 8;

/// Kills worker processes at the ends of epochs, which a seed chooses.
pub(crate) struct Killer {
    random: u64,
    processes: Vec<i64>,
    /// Time of the last kill, until the worker has been replaced.
    killed: Option<Instant>,
}

impl Killer {
    /// Looks for the processes of the session's workers.
    pub(crate) fn new(seed: u64, session: &DiscoSession) -> disco::Result<Self> {
        // Marsaglia's generator is never 0.
        let mut this =
            Self { random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, processes: Vec::new(), killed: None };
        this.look(session)?;
        Ok(this)
    }

    fn look(&mut self, session: &DiscoSession) -> disco::Result<()> {
        let process = session.get_global_func("digits.process")?.call(())?;
        self.processes.clear();
        for worker in 0..session.num_workers() {
            if let Content::Value(Value::Int(id)) = session.debug_get_from_remote(&process, WorkerId(worker)).wait()? {
                self.processes.push(id);
            }
        }
        Ok(())
    }

    /// Kills a worker, or none, at the end of an epoch.
    pub(crate) fn end_epoch(&mut self, epoch: usize) {
        let (is_due, worker) =
            (self.next().is_multiple_of(EPOCHS_PER_LOSS), self.next() as usize % self.processes.len().max(1));
        let Some(process) = self.processes.get(worker).filter(|_| is_due && self.killed.is_none()) else { return };
        eprintln!("killing worker {worker} after epoch {epoch}");
        self.killed = Some(Instant::now());
        if let Err(error) = Command::new("kill").args(["-9", &process.to_string()]).status() {
            eprintln!("cannot kill it: {error}");
        }
    }

    /// Replaces the workers that are lost, and says how long the training stood still.
    pub(crate) fn recover(&mut self, session: &DiscoSession) -> disco::Result<()> {
        let noticed = Instant::now();
        session.recover(|_| Replacement::relaunched()).wait()?;
        let since = self.killed.take().unwrap_or(noticed);
        eprintln!("going on {:.0} ms after the loss of a worker", since.elapsed().as_secs_f64() * 1e3);
        self.look(session)
    }

    fn next(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}
