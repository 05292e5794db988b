//! Settings of one rank of a group over NCCL.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::ccl::Breakdown;

/// Callback for a communicator of NCCL that can be neither used nor aborted. Its argument is the
/// breakdown of the group. The device may still read and write the buffers of all calls that were
/// in progress.
pub type OnStuck = Arc<dyn Fn(&Breakdown) + Send + Sync>;

/// Returns a callback that logs the breakdown and ends this process with `abort`, so that no exit
/// handler can hang in turn. For a rank that has a process of its own.
#[must_use]
pub fn end_process_when_stuck() -> OnStuck {
    Arc::new(|breakdown| {
        tracing::error!(%breakdown, "an abort of NCCL hangs: this process ends");
        std::process::abort();
    })
}

/// Settings of [`NcclCcl`](super::NcclCcl). All ranks of a group should have the same. The time for
/// which ranks wait for each other before NCCL is called is a setting of the control communicator.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// Time limit for creating a group, by a split or not, from when all ranks have come: NCCL
    /// determines the connections between all devices. Default: 2 minutes.
    pub join_timeout: Duration,
    /// Time for which other work of the caller may delay a collective on any rank's stream. It has
    /// to cover the work of all ranks, because a rank cannot see the streams of the others. `None`
    /// is no limit: then only the end of a process, an error of NCCL or an abort ends a collective
    /// that hangs. Default: 5 minutes.
    pub drain_timeout: Option<Duration>,
    /// Time limit for a collective, from when all ranks have come to it and their streams are free.
    /// NCCL does not report progress, and opens connections at first use. So a collective breaks
    /// the group if this rank's stream has begun it and not ended it within this limit and
    /// [`drain_timeout`](Self::drain_timeout) together. Default: 1 minute, which is enough for 100
    /// GB over a network of 20 GB/s or for anything between the GPUs of one machine.
    pub stall_timeout: Duration,
    /// Time limit for an abort of NCCL's communicator, without the time that other work of the
    /// caller takes on the stream. Then [`on_stuck`](Self::on_stuck) is called. Default: 10
    /// seconds.
    pub abort_timeout: Duration,
    /// Time limit for leaving a group that is not broken, for which NCCL needs the other ranks too.
    /// After that the communicator is aborted. Default: 5 seconds.
    pub close_timeout: Duration,
    /// Minimum number of thread blocks (CTAs) that a collective uses on the device: NCCL's
    /// `minCTAs`, from NCCL 2.17 on. Default: NCCL's choice.
    pub min_ctas: Option<u16>,
    /// Maximum number of thread blocks: `maxCTAs`, as [`min_ctas`](Self::min_ctas).
    pub max_ctas: Option<u16>,
    /// Callback for an abort that hangs. Default: logs the breakdown, and the process goes on: it
    /// may be a controller's, or serve others. Device memory that was lent to the call must not be
    /// used or freed after a callback that returns, except behind the work of the same stream.
    /// Ranks that are processes of their own have [`end_process_when_stuck`]. Disco's workers have
    /// that, too, except for threads of their controller's process, which end the session.
    pub on_stuck: OnStuck,
}

impl Options {
    /// Returns the time limit from the beginning of a collective on this rank's stream to its end.
    pub(super) fn limit(&self) -> Option<Duration> {
        self.drain_timeout.map(|drain| drain.saturating_add(self.stall_timeout))
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            join_timeout: Duration::from_secs(120),
            drain_timeout: Some(Duration::from_secs(300)),
            stall_timeout: Duration::from_secs(60),
            abort_timeout: Duration::from_secs(10),
            close_timeout: Duration::from_secs(5),
            min_ctas: None,
            max_ctas: None,
            on_stuck: Arc::new(|breakdown| {
                tracing::error!(%breakdown, "an abort of NCCL hangs: the memory of its calls stays in use");
            }),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("join_timeout", &self.join_timeout)
            .field("drain_timeout", &self.drain_timeout)
            .field("stall_timeout", &self.stall_timeout)
            .field("abort_timeout", &self.abort_timeout)
            .field("close_timeout", &self.close_timeout)
            .field("min_ctas", &self.min_ctas)
            .field("max_ctas", &self.max_ctas)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ccl::{BreakCause, Rank};

    /// Regression: a program whose ranks were threads was aborted with them.
    #[test]
    fn a_process_survives_a_hanging_abort_unless_it_wants_to_end() {
        let (cause, rank) = (BreakCause::Backend("it hangs".to_owned()), Rank(1));
        let (during, flights) = (String::new(), String::new());
        (Options::default().on_stuck)(&Breakdown { cause, rank, noticed_by: rank, during, flights });
    }
}
