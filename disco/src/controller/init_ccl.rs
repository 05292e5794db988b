//! `reinit_ccl`, which replaces the collectives of a session: ends the old ones, joins all workers
//! in the next epoch, and checks that all have joined.

use std::future::poll_fn;
use std::sync::Arc;
use std::time::Duration;

use rpc_core::{Device, DeviceType, ErrorKind, RpcError};

use crate::ccl::backend::Backend;
use crate::ccl::join_nccl::longest_join;
use crate::completion::Completion;
use crate::controller::dispatch::{Controller, ControllerState};
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
        let nodes: usize = self.links.iter().map(|link| link.nodes).sum();
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
            Ok((backend, meshes)) => Completion::spawn(Arc::clone(self).replace_ccl(backend, devices, meshes)),
            Err(error) => Completion::failed(error.into()),
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
            Ok((backend, meshes)) => {
                let replaced = Arc::clone(self).replace_ccl(backend, Vec::new(), meshes);
                Completion::spawn(async move { replaced.await.map(|()| mesh) })
            }
            Err(error) => Completion::failed(error.into()),
        }
    }

    /// Begins to make the collectives anew. Returns the backend that they are to have, and their
    /// meshes.
    ///
    /// # Errors
    ///
    /// The session has ended; the mesh does not fit it; another caller has begun already.
    fn begin(&self, backend: Option<Backend>, mesh: Option<Mesh>) -> rpc_core::Result<(Backend, Vec<Mesh>)> {
        let mut state = self.lock();
        if let Some(error) = &state.ended {
            return Err(error.clone());
        }
        let meshes: Vec<Mesh> = state.meshes.iter().cloned().chain(mesh).collect();
        self.layout.check(&meshes)?;
        state.collectives.begin()?;
        Ok((backend.unwrap_or(state.collectives.backend()), meshes))
    }

    /// Makes the collectives anew, and ends what [`begin`](Self::begin) has begun.
    async fn replace_ccl(self: Arc<Self>, backend: Backend, devices: Vec<Device>, meshes: Vec<Mesh>) -> Result<()> {
        let mut outcome = self.make_anew(backend, devices.clone(), &meshes).await;
        // Workers begin to join NCCL by returning the idle memory of their pools to the driver.
        // A second attempt returns the memory that has become idle since, such as that of the
        // first.
        if backend == Backend::Nccl
            && let Err(DiscoError::Workers(failures)) = &outcome
            && failures.iter().any(|failure| failure.cause.kind() == ErrorKind::OutOfMemory)
        {
            tracing::warn!(failure = %failures[0], "a GPU has too little memory for NCCL: trying once more");
            outcome = self.make_anew(backend, devices, &meshes).await;
        }
        let mut state = self.lock();
        state.collectives.finish();
        if outcome.is_ok() {
            state.meshes = meshes;
        }
        outcome
    }

    async fn make_anew(self: &Arc<Self>, backend: Backend, devices: Vec<Device>, meshes: &[Mesh]) -> Result<()> {
        let limit = self.options.init_timeout;
        self.drain(limit, "still busy with what was issued before").await?;
        // A future that holds the guard's variable cannot move between threads.
        let attempt = |state: &mut ControllerState| {
            let collectives = &mut state.collectives;
            (collectives.next_epoch(), collectives.backend(), !collectives.is_broken())
        };
        let (epoch, before, is_tentative) = attempt(&mut self.lock());
        let meeting = tokio::time::timeout(limit, self.meet(epoch, backend, devices, meshes, is_tentative)).await;
        let sequence = meeting.unwrap_or_else(|_| {
            let text = format!("the nodes have not said within {limit:?} where their workers can be reached");
            Err(RpcError::new(ErrorKind::DeadlineExceeded, text).into())
        })?;
        // The workers have the same limit for meeting all others, and for meeting those of each of
        // their groups, and say more of what went wrong.
        let groupings = self.layout.groupings(meshes).len().max(1);
        let nccl = if backend == Backend::Nccl { longest_join(limit, groupings) } else { Duration::ZERO };
        let meeting = (2 + groupings as u32) * limit;
        let drained = self.drain(meeting + nccl, "not back from making the collectives anew").await;
        let met = self.outcome_of(sequence, drained);
        if is_tentative {
            self.finish_tentative(epoch, backend, met.is_ok())?;
        } else if met.is_err() {
            self.lock().collectives.restore(before);
            // Those that have entered the new ones have the meshes of this attempt. If this cannot
            // be issued, the session has ended.
            _ = self.push(Command::FinishInitCcl { epoch, enter: false });
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
    fn finish_tentative(&self, epoch: u64, backend: Backend, enter: bool) -> Result<()> {
        let aborted = if enter { self.lock().collectives.change_over(epoch, backend) } else { None };
        self.push(Command::FinishInitCcl { epoch, enter })?;
        if let Some(cause) = aborted {
            self.links.iter().for_each(|link| link.break_collectives(epoch, &cause));
        }
        Ok(())
    }

    /// Waits until all workers have executed the commands that were issued. In broken collectives
    /// no worker waits, so that only a worker that does not come back holds this up: such ones are
    /// `late`.
    async fn drain(self: &Arc<Self>, limit: Duration, late: &str) -> Result<()> {
        let (sequence, reached) = self.all_reach();
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
    fn all_reach(self: &Arc<Self>) -> (u64, impl Future<Output = Result<()>> + use<>) {
        let guard = self.open_ticket(self.layout.world_size);
        let issued = self.push(Command::SyncWorker { ticket: guard.ticket(), worker: None });
        let this = Arc::clone(self);
        let sequence = *issued.as_ref().unwrap_or(&0);
        let reached = async move {
            issued?;
            poll_fn(|cx| this.poll_ticket(guard.ticket(), cx)).await
        };
        (sequence, reached)
    }
}
