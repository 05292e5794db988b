//! Flight recorder: the last calls of a rank, and those that are still running.

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::{CclError, Collective};

/// Number of calls that are kept.
const KEPT: usize = 64;

/// One call of a rank.
#[derive(Clone, Debug)]
pub struct Flight {
    /// Number of the call. Collectives of a group count together, from 1; transfers between two
    /// ranks have a count of their own on each pair and direction.
    pub sequence: u64,
    /// The call.
    pub collective: Collective,
    /// Time at which this rank entered it.
    pub entered: Instant,
    /// Duration of the call; `None` while it runs.
    pub took: Option<Duration>,
    /// Outcome of the call.
    pub outcome: Outcome,
}

/// Outcome of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The call has not ended.
    Outstanding,
    /// The call ended with a result.
    Done,
    /// The call ended with an error of its own: ranks disagreed, or one had no input.
    Failed,
    /// The call ended with the end of the group.
    Broken,
}

impl fmt::Display for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} #{}: ", self.collective, self.sequence)?;
        match (self.outcome, self.took) {
            (Outcome::Done, Some(took)) => write!(f, "done in {took:.1?}"),
            (Outcome::Failed, Some(took)) => write!(f, "failed after {took:.1?}"),
            (Outcome::Broken, Some(took)) => write!(f, "broken after {took:.1?}"),
            _ => write!(f, "entered {:.1?} ago", self.entered.elapsed()),
        }
    }
}

/// Keeps the last flights of one rank.
#[derive(Debug, Default)]
pub(crate) struct Recorder(Mutex<VecDeque<Flight>>);

impl Recorder {
    pub(crate) fn enter(&self, sequence: u64, collective: Collective) {
        let mut flights = self.0.lock();
        if flights.len() == KEPT {
            flights.pop_front();
        }
        let entered = Instant::now();
        flights.push_back(Flight { sequence, collective, entered, took: None, outcome: Outcome::Outstanding });
    }

    pub(crate) fn leave(&self, result: &Result<(), CclError>) {
        let mut flights = self.0.lock();
        if let Some(flight) = flights.back_mut() {
            flight.took = Some(flight.entered.elapsed());
            flight.outcome = match result {
                Ok(()) => Outcome::Done,
                Err(CclError::Broken(_)) => Outcome::Broken,
                Err(_) => Outcome::Failed,
            };
        }
    }

    pub(crate) fn flights(&self) -> Vec<Flight> {
        self.0.lock().iter().cloned().collect()
    }

    /// Returns the call that is running, or else the last one.
    pub(crate) fn last(&self) -> Option<Flight> {
        self.0.lock().back().cloned()
    }
}
