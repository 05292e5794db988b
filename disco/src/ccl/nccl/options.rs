//! Settings of a rank.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::ccl::Breakdown;

/// Called when a communicator of NCCL can be neither used nor got rid of, with why its group is
/// broken. Buffers of all calls that were under way may still be read and written.
pub type OnStuck = Arc<dyn Fn(&Breakdown) + Send + Sync>;

/// Settings of [`NcclCcl`](super::NcclCcl). All ranks of a group should have the same. How long
/// ranks wait for each other before NCCL is called, is a setting of the control communicator.
#[derive(Clone)]
#[non_exhaustive]
pub struct Options {
    /// Time making a group takes at most, once all ranks are there: NCCL looks for the ways between
    /// all devices. Default: 2 minutes.
    pub join_timeout: Duration,
    /// Time work of the owner's may hold a collective up on any rank's stream: a rank has to allow
    /// for what the others have in front of theirs, which it does not see. `None` is for ever: then
    /// nothing but the end of a process, an error of NCCL's or an abort ends a collective that
    /// hangs. Default: 5 minutes.
    pub drain_timeout: Option<Duration>,
    /// Time a collective takes at most, from when all ranks have come to it and their streams are
    /// free. NCCL tells no progress, and opens connections at first use. So a collective that this
    /// rank's stream has begun and not ended within both limits together breaks the group. Default:
    /// 1 minute, which is enough for 100 GB over a network of 20 GB/s or for anything between the
    /// GPUs of one machine.
    pub stall_timeout: Duration,
    /// Time that an abort of NCCL's communicator may take beside the owner's own work, until
    /// [`on_stuck`](Self::on_stuck) is called. Default: 10 seconds.
    pub abort_timeout: Duration,
    /// Time that leaving a group in good order may take, for which NCCL needs the other ranks too.
    /// After that the communicator is aborted. Default: 5 seconds.
    pub close_timeout: Duration,
    /// The fewest and the most blocks of threads that a collective takes of the device, `minCTAs`
    /// and `maxCTAs`. From NCCL 2.17 on. Default: NCCL's choice.
    pub min_ctas: Option<u16>,
    /// See [`min_ctas`](Self::min_ctas).
    pub max_ctas: Option<u16>,
    /// Action when an abort hangs. Default: to log why and end this process with `abort`, so that
    /// no exit handler can hang in turn. With any action, memory of the device that was lent to the
    /// call is not to be used or freed any more.
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
                tracing::error!(%breakdown, "an abort of NCCL hangs: this process ends");
                std::process::abort();
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
