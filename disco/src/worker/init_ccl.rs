//! Handlers of `init_ccl` and `reinit_ccl`: a worker joins new communicators, and leaves those that
//! it is in.
//!
//! While the present ones run, that takes two commands: with the first all workers join the new
//! ones and stay in the old ones, and with the second, once the controller knows that all have
//! joined, they change over. So an attempt that fails on one worker changes nothing on any. In
//! place of broken ones they enter the new ones at once. If that fails on one, a second command has
//! the others return to the meshes that they had.

use std::sync::Arc;

use rpc_core::{Device, ErrorKind, Packed, Permission, Result, RpcError};

use super::executor::Worker;
use super::joined_ccl::{FormerMeshes, JoinedCcl};
use super::register_content::Outcome;
use crate::ccl::communicators::Membership;
use crate::ccl::join_nccl;
use crate::ccl::nccl::{OnStuck, end_process_when_stuck};
use crate::error::WorkerId;
use crate::wire::event::{Event, EventSink, Report};
use crate::wire::mesh::Mesh;
use crate::wire::plan::{JoinPlan, Plan};

impl Worker {
    /// Joins the other workers for collectives as `plan` says.
    pub(super) fn init_ccl(&mut self, plan: &Packed) -> Outcome {
        // Collectives in progress end first. A lost one is reported, and poisons its registers.
        self.settle();
        let plan = Plan::decode(plan)?;
        self.layout.check(&plan.meshes)?;
        self.leave_tentative();
        if let Some(former) = self.former.take() {
            self.held.remove(former.bytes);
        }
        if plan.is_tentative {
            // A worker that waits for this one in an older command waits no more.
            self.this.leave_step();
            self.tentative = Some(self.join(plan)?);
            return Ok(());
        }
        // The old communicators are dropped before, so that no worker waits in them.
        self.this.set_membership(Err(RpcError::unsupported("the data plane is being made")));
        let (epoch, is_unconnected) = (plan.epoch, matches!(plan.join, JoinPlan::Unconnected { .. }));
        match self.join(plan) {
            Ok(joined) => {
                let bytes = std::mem::take(&mut self.mesh_bytes);
                self.former = Some(FormerMeshes { epoch, meshes: self.this.meshes(), bytes });
                self.enter(joined);
            }
            Err(error) => {
                self.is_accelerated = false;
                self.this.set_membership(Err(error.clone()));
                let cause = error.clone().context(format_args!("worker {} has no collectives", self.id));
                self.this.report_broken(Report { epoch, culprit: None, cause });
                // In a plan without connections, only collectives fail.
                if !is_unconnected {
                    return Err(error.into());
                }
            }
        }
        Ok(())
    }

    /// Enters the communicators of a tentative `init_ccl`, or lets go of them; or returns to the
    /// meshes before one that was not tentative, and has failed on another worker.
    pub(super) fn finish_init_ccl(&mut self, epoch: u64, enter: bool) -> Outcome {
        if !enter {
            self.leave_tentative();
            if let Some(former) = self.former.take_if(|former| former.epoch == epoch) {
                self.this.set_meshes(former.meshes);
                self.held.remove(std::mem::replace(&mut self.mesh_bytes, former.bytes));
            }
            return Ok(());
        }
        self.settle();
        match self.tentative.take_if(|joined| joined.membership.epoch == epoch) {
            Some(joined) => self.enter(joined),
            None => {
                self.leave_tentative();
                let text = format!("worker {} has joined no collectives of epoch {epoch}", self.id);
                return Err(RpcError::internal(text).into());
            }
        }
        Ok(())
    }

    /// Leaves the communicators of a tentative `init_ccl`, if there are any.
    fn leave_tentative(&mut self) {
        if let Some(joined) = self.tentative.take() {
            self.held.remove(joined.mesh_bytes);
        }
    }

    fn join(&mut self, plan: Plan) -> Result<JoinedCcl> {
        let mesh_bytes = plan.meshes.iter().map(Mesh::cost).sum();
        self.held.add(mesh_bytes)?;
        let joined = self.join_others(&plan);
        if joined.is_err() {
            self.held.remove(mesh_bytes);
        }
        let (membership, device) = joined?;
        Ok(JoinedCcl { membership, is_accelerated: plan.nccl, device, meshes: plan.meshes, mesh_bytes })
    }

    fn join_others(&self, plan: &Plan) -> Result<(Membership, Device)> {
        let device = plan.devices.get(self.id.index()).copied().unwrap_or_else(|| self.this.device());
        self.this.context().authorize(&Permission::Device(device))?;
        let (rendezvous, relays) = (self.shared.rendezvous(), self.shared.relays());
        let mut membership = rendezvous.join(plan, self.shared.set_up(), self.id, relays, self.this.context())?;
        if plan.nccl {
            // Elsewhere the process is the worker's alone, or that of one session.
            let on_stuck = match self.shared.is_beside_controller() {
                true => lose_worker(self.id, self.shared.sink()),
                false => end_process_when_stuck(),
            };
            // It begins with collectives of these communicators, which the end of the session ends.
            self.this.set_joining(membership.controls().into_iter().map(|(_, control)| control).collect());
            if self.feed.is_aborted() {
                self.this.end_collectives();
            }
            let joined = join_nccl::join(membership, plan.timeouts, device, self.id, on_stuck);
            self.this.set_joining(Vec::new());
            membership = joined?;
        }
        Ok((membership, device))
    }

    fn enter(&mut self, joined: JoinedCcl) {
        self.this.set_device(joined.device);
        self.held.remove(std::mem::replace(&mut self.mesh_bytes, joined.mesh_bytes));
        self.this.set_meshes(joined.meshes.into());
        self.is_accelerated = joined.is_accelerated;
        self.this.set_membership(Ok(joined.membership));
        if self.feed.is_aborted() {
            self.this.end_collectives();
        }
    }
}

/// Returns the callback for a communicator of NCCL that hangs for good in the process of the
/// controller: it ends the session and not the process. What the device still writes to is used by
/// no later work, which is behind it on the stream.
fn lose_worker(worker: WorkerId, sink: Arc<dyn EventSink>) -> OnStuck {
    Arc::new(move |breakdown| {
        tracing::error!(worker = worker.0, %breakdown, "an abort of NCCL hangs: the session ends");
        let text = format!("NCCL hangs on its device, which stays in use until this process ends: {breakdown}");
        sink.send(Event::Lost { worker, error: RpcError::new(ErrorKind::DeviceLost, text) });
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ccl::{BreakCause, Breakdown, Rank};
    use crate::held_memory::tests::context;
    use crate::link::event_queue::EventQueue;
    use crate::wire::event::decode_events;

    /// Regression: a controller whose workers are threads was aborted with them.
    #[test]
    fn a_communicator_that_hangs_beside_the_controller_is_the_loss_of_its_worker() {
        let queue = Arc::new(EventQueue::new(context(u64::MAX)));
        let sink: Arc<dyn EventSink> = Arc::<EventQueue>::clone(&queue);
        let (cause, rank) = (BreakCause::Backend("it hangs".to_owned()), Rank(1));
        let (during, flights) = (String::new(), String::new());
        lose_worker(WorkerId(1), sink)(&Breakdown { cause, rank, noticed_by: rank, during, flights });
        let events = rpc_core::blocking::block_on(queue.next()).unwrap().unwrap();
        let events = events.try_map(&mut |_| Err::<rpc_core::Reference, _>(())).unwrap();
        let [Event::Lost { worker: WorkerId(1), error }] = &decode_events(events).unwrap()[..] else { panic!() };
        assert_eq!(error.kind(), ErrorKind::DeviceLost);
        assert!(error.message().contains("it hangs"), "{error}");
    }
}
