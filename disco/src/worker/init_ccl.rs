//! Handler of `init_ccl` and `reinit_ccl`: a worker leaves its communicators and joins new ones.

use rpc_core::{Packed, RpcError};

use super::executor::Worker;
use super::register_content::Outcome;
use crate::ccl::join_nccl;
use crate::wire::event::Report;
use crate::wire::plan::{JoinPlan, Plan};

impl Worker {
    /// Joins the other workers for collectives as `plan` says.
    pub(super) fn init_ccl(&mut self, plan: &Packed) -> Outcome {
        // Collectives in progress end first. A lost one is reported, and poisons its registers.
        self.settle();
        // The old communicators are dropped before, so that no worker waits in them.
        self.this.set_membership(Err(RpcError::unsupported("the data plane is being made")));
        let plan: Plan = plan.decode()?;
        if let Some(device) = plan.devices.get(self.id.index()) {
            self.this.set_device(*device);
        }
        let joined = self.shared.rendezvous().join(&plan, self.layout, self.id, self.shared.relays());
        let joined = joined.and_then(|membership| {
            if !plan.nccl {
                return Ok(membership);
            }
            let (device, group) = (self.this.device(), self.layout.group(self.id));
            join_nccl::join(membership, plan.timeouts, device, group)
        });
        self.is_accelerated = plan.nccl && joined.is_ok();
        let failed = joined.as_ref().err().cloned();
        self.this.set_membership(joined);
        if let Some(error) = failed {
            let cause = error.clone().context(format_args!("worker {} has no collectives", self.id));
            self.this.report_broken(Report { epoch: plan.epoch, culprit: None, cause });
            // In a plan without connections, only collectives fail.
            if !matches!(plan.join, JoinPlan::Unconnected { .. }) {
                return Err(error.into());
            }
        }
        if self.feed.is_aborted() {
            self.this.abort_collectives("the session has ended");
        }
        Ok(())
    }
}
