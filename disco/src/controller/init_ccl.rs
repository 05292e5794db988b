//! `reinit_ccl`, which replaces the collectives of a session: ends the old ones, joins all workers
//! in the next epoch, and checks that all have joined.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{Device, DeviceType, ErrorKind, RpcError};

use crate::ccl::backend::Backend;
use crate::ccl::join_nccl::longest_join;
use crate::completion::Completion;
use crate::controller::dispatch::{Controller, ControllerState, Issuer};
use crate::controller::join_plan::Attempt;
use crate::error::{DiscoError, Result};
use crate::wire::command::Command;
use crate::wire::mesh::Mesh;

impl Controller {
    /// Returns the default devices of all workers, of this kind and with these ids: one for each
    /// worker, or one for each worker of a node.
    ///
    /// # Errors
    ///
    /// Another number of ids.
    pub(crate) fn devices(&self, kind: DeviceType, ids: &[i32]) -> Result<Vec<Device>> {
        let world = self.layout.world_size;
        let nodes: usize = self.links().iter().map(|link| link.nodes).sum();
        // All have as many.
        let per_node = u32::try_from(nodes).ok().and_then(|nodes| world.checked_div(nodes));
        let fits =
            ids.is_empty() || ids.len() == world as usize || per_node.is_some_and(|count| ids.len() == count as usize);
        if !fits {
            let per_node = per_node.filter(|count| *count != world);
            let per_node =
                per_node.map_or_else(String::new, |count| format!(", one for each of the {count} of a node"));
            return Err(DiscoError::invalid(format!(
                "{} device ids for {world} workers: give one for each{per_node}, or none",
                ids.len()
            )));
        }
        // A machine has one host memory, and may have several of all else.
        let device = |worker: u32| match ids {
            [] => Device::new(kind, 0),
            _ if kind == DeviceType::CPU => Device::cpu(),
            ids => Device::new(kind, ids[worker as usize % ids.len()]),
        };
        Ok((0..world).map(device).collect())
    }

    /// Makes the collectives anew, behind all that has been issued, with these default devices for
    /// the workers, or those that they have, and with this backend, or the one that they have.
    pub(crate) fn reinit(self: &Arc<Self>, backend: Option<Backend>, devices: Vec<Device>) -> Completion<()> {
        match self.begin(backend, None) {
            Ok(attempt) => {
                let attempt = Attempt { devices, ..attempt };
                Completion::spawn(Arc::clone(self).replace_ccl(attempt))
            }
            Err(error) => Completion::failed(error),
        }
    }

    /// Makes the collectives anew with one more mesh, unless the workers know it.
    pub(crate) fn add_mesh(self: &Arc<Self>, mesh: Mesh) -> Completion<Mesh> {
        let is_known = {
            let state = self.lock();
            state.ended.is_none() && state.meshes.contains(&mesh)
        };
        if is_known {
            return Completion::new(std::future::ready(Ok(mesh)));
        }
        match self.begin(None, Some(mesh.clone())) {
            Ok(attempt) => {
                let replaced = Arc::clone(self).replace_ccl(attempt);
                Completion::spawn(async move { replaced.await.map(|()| mesh) })
            }
            Err(error) => Completion::failed(error),
        }
    }

    /// Begins to make the collectives anew. Returns the attempt, which leaves the devices as they
    /// are.
    ///
    /// # Errors
    ///
    /// The session has ended; workers are missing; the mesh does not fit the session; another
    /// caller has begun already.
    fn begin(&self, backend: Option<Backend>, mesh: Option<Mesh>) -> Result<Attempt> {
        let mut state = self.lock();
        state.check()?;
        let meshes: Vec<Mesh> = state.meshes.iter().cloned().chain(mesh).collect();
        self.layout.check(&meshes)?;
        state.collectives.begin()?;
        let backend = backend.unwrap_or(state.collectives.backend());
        Ok(Attempt { issuer: Issuer::Caller, backend, devices: Vec::new(), meshes })
    }

    /// Makes the collectives anew, and ends what [`begin`](Self::begin) has begun.
    async fn replace_ccl(self: Arc<Self>, attempt: Attempt) -> Result<()> {
        let mut outcome = self.make_ccl(&attempt).await;
        if let Err(error) = outcome {
            outcome = Err(self.find_loss(error).await);
        }
        let mut state = self.lock();
        state.collectives.finish();
        if outcome.is_ok() {
            state.meshes = attempt.meshes;
            if !attempt.devices.is_empty() {
                state.devices = attempt.devices.into();
            }
        }
        outcome
    }

    /// Makes the collectives anew, if need be in two attempts.
    pub(super) async fn make_ccl(self: &Arc<Self>, attempt: &Attempt) -> Result<()> {
        let outcome = self.make_anew(attempt).await;
        // Workers begin to join NCCL by returning the idle memory of their pools to the driver.
        // A second attempt returns the memory that has become idle since, such as that of the
        // first.
        if attempt.backend == Backend::Nccl
            && let Err(DiscoError::Workers(failures)) = &outcome
            && failures.iter().any(|failure| failure.cause.kind() == ErrorKind::OutOfMemory)
        {
            tracing::warn!(failure = %failures[0], "a GPU has too little memory for NCCL: trying once more");
            return self.make_anew(attempt).await;
        }
        outcome
    }

    async fn make_anew(self: &Arc<Self>, attempt: &Attempt) -> Result<()> {
        let Attempt { issuer, backend, meshes, .. } = attempt;
        let (issuer, backend) = (*issuer, *backend);
        let limit = self.options.init_timeout;
        self.drain(issuer, limit, "still busy with what was issued before").await?;
        // A future that holds the guard's variable cannot move between threads.
        let begun = |state: &mut ControllerState| {
            let collectives = &mut state.collectives;
            (collectives.next_epoch(), collectives.backend(), !collectives.is_broken())
        };
        let (epoch, before, is_tentative) = begun(&mut self.lock());
        let meeting = tokio::time::timeout(limit, self.meet(epoch, attempt, is_tentative)).await;
        let sequence = meeting.unwrap_or_else(|_| {
            let text = format!("the nodes have not said within {limit:?} where their workers can be reached");
            Err(RpcError::new(ErrorKind::DeadlineExceeded, text).into())
        })?;
        // The workers have the same limit for meeting all others, and for meeting those of each of
        // their groups, and say more of what went wrong.
        let groupings = self.layout.groupings(meshes).len().max(1);
        let nccl = if backend == Backend::Nccl { longest_join(limit, groupings) } else { Duration::ZERO };
        let meeting = (2 + groupings as u32) * limit;
        let drained = self.drain(issuer, meeting + nccl, "not back from making the collectives anew").await;
        let met = self.outcome_of(sequence, drained);
        if is_tentative {
            self.finish_tentative(issuer, epoch, backend, met.is_ok())?;
        } else if met.is_err() {
            self.lock().collectives.restore(before);
            // Those that have entered the new ones have the meshes of this attempt. If this cannot
            // be issued, the session has ended, or makes the collectives anew for a lost worker.
            _ = self.push_as(issuer, Command::FinishInitCcl { epoch, enter: false });
        }
        met
    }

    /// Returns the outcome of the command with this number, which is watched until here.
    fn outcome_of(&self, sequence: u64, drained: Result<()>) -> Result<()> {
        let mut state = self.lock();
        if drained.is_err() {
            // A sync tells those that there are.
            state.failures.unwatch(sequence);
            return drained;
        }
        // The others are of commands that other callers have issued, who will ask for them.
        let failed = state.failures.take_of(sequence);
        if failed.is_empty() { Ok(()) } else { Err(DiscoError::Workers(failed)) }
    }

    /// Has all workers enter the communicators that they have joined, or let go of them.
    fn finish_tentative(&self, issuer: Issuer, epoch: u64, backend: Backend, enter: bool) -> Result<()> {
        let (queued, encoded) = self.prepare(Command::FinishInitCcl { epoch, enter })?;
        let mut state = self.lock();
        state.check_for(issuer)?;
        let aborted = if enter { state.collectives.change_over(epoch, backend) } else { None };
        self.push_in(&mut state, &queued, encoded.as_ref());
        drop(state);
        if let Some(cause) = aborted {
            self.break_collectives(epoch, &cause);
        }
        Ok(())
    }

    /// Waits until all workers have executed the commands that were issued. In broken collectives
    /// no worker waits, so that only a worker that does not come back holds this up: such ones are
    /// `late`.
    async fn drain(self: &Arc<Self>, issuer: Issuer, limit: Duration, late: &str) -> Result<()> {
        let (sequence, reached) = self.all_reach(issuer);
        match tokio::time::timeout(limit, reached).await {
            Ok(outcome) => outcome,
            Err(_) => {
                let text = format!("{} {late}, after {limit:?}", self.behind(sequence));
                Err(RpcError::new(ErrorKind::DeadlineExceeded, text).into())
            }
        }
    }

    /// Issues a sync of all workers. Returns the number of that command, and a future that resolves
    /// once all have executed it.
    pub(super) fn all_reach(self: &Arc<Self>, issuer: Issuer) -> (u64, impl Future<Output = Result<()>> + use<>) {
        let guard = self.open_ticket(self.layout.world_size);
        let issued = self.push_as(issuer, Command::SyncWorker { ticket: guard.ticket(), worker: None });
        let this = Arc::clone(self);
        let sequence = *issued.as_ref().unwrap_or(&0);
        let reached = async move {
            issued?;
            poll_fn(|cx| this.poll_ticket(guard.ticket(), cx)).await
        };
        (sequence, reached)
    }
}
