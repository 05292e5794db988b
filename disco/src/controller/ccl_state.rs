//! States of a session's collectives, seen from the controller.
//!
//! ```text
//!             a worker finds a communicator broken, or abort_ccl
//!   Running ───────────────────────────────────────────────────► Broken
//!      ▲ ▲                                                         │ ▲
//!      │ └── reinit_ccl ──► Reinitialising ◄── reinit_ccl ─────────┘ │
//!      │                       │       │                             │
//!      └── all have joined ────┘       └── some did not come ────────┘
//! ```
//!
//! From Running the attempt is tentative: the old communicators stay until all workers have joined
//! the new ones, and if some did not come the state is Running again.
//!
//! Each making of the communicators has a number, its *epoch*; reports of an earlier one are of no
//! interest.

use std::collections::HashSet;

use rpc_core::{ErrorKind, RpcError};

use crate::ccl::backend::Backend;
use crate::error::WorkerId;
use crate::wire::event::Report;

/// State of a session's collectives.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CclState {
    /// The collectives run, as far as the controller knows.
    Running,
    /// They return the cause; all other commands run.
    /// [`reinit_ccl`](crate::DiscoSession::reinit_ccl) makes them anew.
    Broken(Breakage),
    /// They are being made anew.
    Reinitialising,
    /// The session has ended, because of this.
    Ended(RpcError),
}

impl CclState {
    /// Returns the breakage, if the collectives are broken.
    pub fn breakage(&self) -> Option<&Breakage> {
        if let Self::Broken(breakage) = self { Some(breakage) } else { None }
    }
}

/// Breakage of a session's collectives.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Breakage {
    /// Cause, and the call that each rank was known to be in: its number, operation, type and
    /// count.
    pub cause: RpcError,
    /// The worker that it happened to: that died, fell silent or never came. `None` if no worker is
    /// at fault or it is not known.
    pub culprit: Option<WorkerId>,
    /// The workers that have found a communicator broken so far, in the order in which they said
    /// so.
    pub noticed_by: Vec<WorkerId>,
}

/// The controller's knowledge of its workers' communicators.
#[derive(Debug, Default)]
pub(crate) struct Collectives {
    /// Epoch of the communicators that are there, or are being made in place of broken ones.
    epoch: u64,
    /// The last epoch that was given to an attempt.
    last_epoch: u64,
    backend: Backend,
    being_made: bool,
    broken: Option<Breakage>,
    /// Workers in the breakage's `noticed_by`.
    noticed_by: HashSet<WorkerId>,
}

impl Collectives {
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Takes an epoch that no attempt has had.
    pub(crate) fn next_epoch(&mut self) -> u64 {
        self.last_epoch += 1;
        self.last_epoch
    }

    /// Returns true if the communicators are broken.
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.is_some()
    }

    /// Returns the worker that has broken the communicators, if it is known.
    pub(crate) fn culprit(&self) -> Option<WorkerId> {
        self.broken.as_ref().and_then(|breakage| breakage.culprit)
    }

    /// Returns true if the loss of a worker may have broken the communicators, or those that are
    /// being made.
    pub(crate) fn is_affected(&self) -> bool {
        self.is_broken() || self.being_made
    }

    /// Returns the backend that they are made with, until another one is chosen.
    pub(crate) fn backend(&self) -> Backend {
        self.backend
    }

    pub(crate) fn state(&self) -> CclState {
        match &self.broken {
            _ if self.being_made => CclState::Reinitialising,
            Some(breakage) => CclState::Broken(breakage.clone()),
            None => CclState::Running,
        }
    }

    /// Takes the report of a worker. Returns true if it is the first of the epoch, which the other
    /// workers have to get.
    pub(crate) fn broke(&mut self, worker: WorkerId, report: Report) -> bool {
        if report.epoch != self.epoch {
            return false;
        }
        match &mut self.broken {
            Some(breakage) => {
                if self.noticed_by.insert(worker) {
                    breakage.noticed_by.push(worker);
                }
                // Word of an abort may overtake that of its reason.
                if breakage.culprit.is_none() && report.culprit.is_some() {
                    breakage.culprit = report.culprit;
                    breakage.cause = report.cause;
                }
                false
            }
            None => {
                let Report { culprit, cause, .. } = report;
                self.broken = Some(Breakage { cause, culprit, noticed_by: vec![worker] });
                self.noticed_by = HashSet::from([worker]);
                true
            }
        }
    }

    /// Breaks the collectives from here. Says whether they were not broken before.
    pub(crate) fn abort(&mut self, cause: RpcError) -> bool {
        let is_news = self.broken.is_none();
        if is_news {
            self.broken = Some(Breakage { cause, culprit: None, noticed_by: Vec::new() });
            self.noticed_by.clear();
        }
        is_news
    }

    /// Breaks the collectives because a worker is lost. Returns the epochs that the others have to
    /// leave: that of the communicators, and that of those that they may be joining.
    pub(crate) fn lose(&mut self, worker: WorkerId, cause: RpcError) -> [u64; 2] {
        match &mut self.broken {
            Some(breakage) if breakage.culprit.is_some() => {}
            Some(breakage) => (breakage.culprit, breakage.cause) = (Some(worker), cause),
            None => {
                self.broken = Some(Breakage { cause, culprit: Some(worker), noticed_by: Vec::new() });
                self.noticed_by.clear();
            }
        }
        [self.epoch, self.last_epoch]
    }

    /// Begins to make them anew.
    ///
    /// # Errors
    ///
    /// Another caller has begun already.
    pub(crate) fn begin(&mut self) -> Result<(), RpcError> {
        if std::mem::replace(&mut self.being_made, true) {
            let text = "the collectives are being made anew already: wait for that before the next time";
            return Err(RpcError::new(ErrorKind::Busy, text));
        }
        Ok(())
    }

    /// Records that the workers leave their communicators for those of this epoch.
    pub(crate) fn advance(&mut self, epoch: u64, backend: Backend) {
        (self.epoch, self.backend) = (epoch, backend);
        self.broken = None;
    }

    /// Records that a tentative attempt has succeeded. Returns the reason of an abort that came
    /// meanwhile, which holds for the new communicators, too.
    pub(crate) fn change_over(&mut self, epoch: u64, backend: Backend) -> Option<RpcError> {
        let aborted = self.broken.take().map(|breakage| breakage.cause);
        let aborted = aborted.filter(|cause| cause.kind() == ErrorKind::Cancelled);
        self.advance(epoch, backend);
        if let Some(cause) = &aborted {
            self.abort(cause.clone());
        }
        aborted
    }

    /// Records that an attempt has failed, so that the next one has this backend again.
    pub(crate) fn restore(&mut self, backend: Backend) {
        self.backend = backend;
    }

    /// Ends the attempt. Its outcome is in the workers' reports.
    pub(crate) fn finish(&mut self) {
        self.being_made = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(epoch: u64, culprit: Option<u32>, text: &'static str) -> Report {
        Report { epoch, culprit: culprit.map(WorkerId), cause: RpcError::internal(text) }
    }

    #[test]
    fn the_first_report_counts_and_a_cause_replaces_an_abort() {
        let mut collectives = Collectives::default();
        assert_eq!(collectives.state(), CclState::Running);
        assert!(collectives.broke(WorkerId(2), report(0, None, "aborted")));
        assert!(!collectives.broke(WorkerId(0), report(0, Some(1), "died")));
        assert!(!collectives.broke(WorkerId(0), report(0, Some(3), "later")));
        let state = collectives.state();
        let breakage = state.breakage().unwrap();
        assert_eq!((breakage.culprit, breakage.cause.message()), (Some(WorkerId(1)), "died"));
        assert_eq!(breakage.noticed_by, [WorkerId(2), WorkerId(0)]);
        assert!(!collectives.abort(RpcError::internal("too late")));
    }

    #[test]
    fn an_abort_during_a_tentative_attempt_holds_for_the_new_communicators() {
        let mut collectives = Collectives::default();
        collectives.begin().unwrap();
        let epoch = collectives.next_epoch();
        assert_eq!(collectives.change_over(epoch, Backend::Nccl), None);
        collectives.finish();
        assert_eq!(
            (collectives.state(), collectives.backend(), collectives.epoch()),
            (CclState::Running, Backend::Nccl, 1)
        );
        collectives.begin().unwrap();
        // One that fails leaves its number unused for good.
        assert_eq!([collectives.next_epoch(), collectives.next_epoch()], [2, 3]);
        assert!(collectives.abort(RpcError::new(ErrorKind::Cancelled, "enough")));
        assert!(collectives.change_over(3, Backend::Host).is_some());
        collectives.finish();
        assert_eq!(collectives.state().breakage().unwrap().cause.message(), "enough");
        assert!(collectives.is_broken());
    }

    #[test]
    fn a_loss_breaks_the_communicators_and_those_that_are_being_made() {
        let mut collectives = Collectives::default();
        collectives.begin().unwrap();
        assert_eq!(collectives.next_epoch(), 1);
        assert!(collectives.abort(RpcError::internal("enough")));
        assert_eq!(collectives.lose(WorkerId(2), RpcError::internal("died")), [0, 1]);
        // The first worker that is lost stays the culprit.
        assert_eq!(collectives.lose(WorkerId(1), RpcError::internal("died, too")), [0, 1]);
        collectives.finish();
        let state = collectives.state();
        let breakage = state.breakage().unwrap();
        assert_eq!((breakage.culprit, breakage.cause.message()), (Some(WorkerId(2)), "died"));
        assert!(!collectives.broke(WorkerId(0), report(0, Some(1), "noticed")));
    }

    #[test]
    fn reports_of_an_earlier_epoch_are_ignored() {
        let mut collectives = Collectives::default();
        assert!(collectives.abort(RpcError::internal("enough")));
        collectives.begin().unwrap();
        assert_eq!(collectives.begin().unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(collectives.state(), CclState::Reinitialising);
        collectives.advance(1, Backend::Host);
        assert!(!collectives.broke(WorkerId(0), report(0, Some(1), "old")));
        collectives.finish();
        assert_eq!(collectives.state(), CclState::Running);
        // One that cannot even begin processes things as they were.
        assert!(collectives.broke(WorkerId(0), report(1, Some(1), "new")));
        collectives.begin().unwrap();
        collectives.finish();
        assert!(collectives.state().breakage().is_some());
    }
}
