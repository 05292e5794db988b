//! Handlers of `init_ccl` and `reinit_ccl`: a worker joins new communicators, and leaves those that
//! it is in.
//!
//! While the present ones run, that takes two commands: with the first all workers join the new
//! ones and stay in the old ones, and with the second, once the controller knows that all have
//! joined, they change over. So an attempt that fails on one worker changes nothing on any.

use rpc_core::{Device, Packed, Result, RpcError};

use super::executor::Worker;
use super::register_content::Outcome;
use crate::ccl::communicators::Membership;
use crate::ccl::join_nccl;
use crate::wire::event::Report;
use crate::wire::plan::{JoinPlan, Plan};

/// Communicators that a worker has joined and has not entered yet.
pub(super) struct JoinedCcl {
    membership: Membership,
    is_accelerated: bool,
    device: Device,
}

impl Worker {
    /// Joins the other workers for collectives as `plan` says.
    pub(super) fn init_ccl(&mut self, plan: &Packed) -> Outcome {
        // Collectives in progress end first. A lost one is reported, and poisons its registers.
        self.settle();
        let plan: Plan = plan.decode()?;
        self.tentative = None;
        if plan.is_tentative {
            // A worker that waits for this one in an older command waits no more.
            self.this.leave_step();
            self.tentative = Some(self.join(&plan)?);
            return Ok(());
        }
        // The old communicators are dropped before, so that no worker waits in them.
        self.this.set_membership(Err(RpcError::unsupported("the data plane is being made")));
        match self.join(&plan) {
            Ok(joined) => self.enter(joined),
            Err(error) => {
                self.is_accelerated = false;
                self.this.set_membership(Err(error.clone()));
                let cause = error.clone().context(format_args!("worker {} has no collectives", self.id));
                self.this.report_broken(Report { epoch: plan.epoch, culprit: None, cause });
                // In a plan without connections, only collectives fail.
                if !matches!(plan.join, JoinPlan::Unconnected { .. }) {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Enters the communicators of a tentative `init_ccl`, or lets go of them.
    pub(super) fn finish_init_ccl(&mut self, epoch: u64, enter: bool) -> Outcome {
        let joined = self.tentative.take();
        if !enter {
            return Ok(());
        }
        self.settle();
        let joined = joined.filter(|joined| joined.membership.epoch == epoch);
        let missing = || RpcError::internal(format!("worker {} has joined no collectives of epoch {epoch}", self.id));
        let joined = joined.ok_or_else(missing)?;
        self.enter(joined);
        Ok(())
    }

    fn join(&self, plan: &Plan) -> Result<JoinedCcl> {
        let device = plan.devices.get(self.id.index()).copied().unwrap_or_else(|| self.this.device());
        let mut membership = self.shared.rendezvous().join(plan, self.layout, self.id, self.shared.relays())?;
        if plan.nccl {
            membership = join_nccl::join(membership, plan.timeouts, device, self.layout.group(self.id))?;
        }
        Ok(JoinedCcl { membership, is_accelerated: plan.nccl, device })
    }

    fn enter(&mut self, joined: JoinedCcl) {
        self.this.set_device(joined.device);
        self.is_accelerated = joined.is_accelerated;
        self.this.set_membership(Ok(joined.membership));
        if self.feed.is_aborted() {
            self.this.abort_collectives("the session has ended");
        }
    }
}
