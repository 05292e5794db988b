//! The session: all operations that a controller has on its workers.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::function::Object;
use rpc_core::tensor::Access;
use rpc_core::{DataType, Device, ErrorKind, RpcError, Tensor, Value, VirtualDevice};

use crate::ccl::ReduceOp;
use crate::ccl::backend::Backend;
use crate::completion::Completion;
use crate::controller::ccl_state::CclState;
use crate::controller::dispatch::Controller;
use crate::controller::dref::{DModule, DPackedFunc, DRef, IntoArgument, IntoArguments, Operand, Recorded, resolve};
use crate::error::{DiscoError, Result, WorkerId};
use crate::program::recorder::{Program, Recorder};
use crate::wire::command::{Command, Kind, MAX_INLINE_TENSOR, On, Register, Scope};
use crate::wire::mesh::Mesh;

/// Number of bytes of a copy that travel in one command.
const CHUNK: usize = 1 << 20;

/// Copies of up to so many bytes are taken at once; from larger tensors the bytes go as they are,
/// and the tensor stays borrowed until then.
const COPIED: u64 = 64 << 10;

/// A controller and its workers. Cheap to clone; clones are the same session.
///
/// Operations give their results without waiting for the workers, which execute all commands in the
/// order in which they were issued. Issuing blocks only while the workers are behind by a whole
/// window ([`Options::window`](crate::Options::window)); async code awaits [`room`](Self::room) now
/// and then. What fails on a worker poisons its results and is reported by
/// [`sync_worker`](Self::sync_worker) and [`sync_all`](Self::sync_all).
///
/// When the last clone and all references are gone, the session ends as it is: what has not been
/// executed is not. Use [`shutdown`](Self::shutdown) to end it in good order.
#[derive(Clone)]
pub struct DiscoSession(Arc<Controller>);

/// Content of a register, copied to the controller.
#[derive(Clone, Debug)]
pub enum Content {
    /// A plain value: it names no objects.
    Value(Value),
    /// A copy of a tensor, in the controller's memory.
    Tensor(Tensor),
}

impl DiscoSession {
    pub(crate) fn new(controller: Arc<Controller>) -> Self {
        Self(controller)
    }

    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.0
    }

    /// Returns the number of workers.
    pub fn num_workers(&self) -> u32 {
        self.0.layout.world_size
    }

    /// Returns the number of groups.
    pub fn num_groups(&self) -> u32 {
        self.0.layout.num_groups
    }

    /// Resolves when a command can be issued without waiting.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub async fn room(&self) -> Result<()> {
        self.0.room().await
    }

    /// Looks up the function registered under `name` on every worker.
    ///
    /// # Errors
    ///
    /// The session has ended. Where a worker has no such function, its uses fail there.
    pub fn get_global_func(&self, name: &str) -> Result<DPackedFunc> {
        self.fresh(|to| Command::GetGlobalFunc { to, name: name.to_owned() }).map(DPackedFunc)
    }

    /// Calls a function on all workers, as [`DPackedFunc::call`].
    ///
    /// # Errors
    ///
    /// As there.
    pub fn call_packed(&self, function: &DPackedFunc, args: impl IntoArguments) -> Result<DRef> {
        function.0.register_in(&self.0)?;
        function.call(args)
    }

    /// Loads a module on every worker, once for each device in a process. `path` is what a loader
    /// there takes: a name, a path in the workspace, on servers that allow modules also a path of
    /// theirs, or `sha256:` and the digest of one that they have.
    ///
    /// It is loaded on `device`, or else on each worker's default device. A module that has to be
    /// set up, such as a model for TVM's virtual machine, is set up there on each worker by itself
    /// ([`Module::instance`](rpc_core::Module::instance)).
    ///
    /// # Errors
    ///
    /// The session has ended. Where a worker has no such module, its uses fail there.
    pub fn load_module(&self, path: &str, device: Option<Device>) -> Result<DModule> {
        self.fresh(|to| Command::LoadModule { to, path: path.to_owned(), device }).map(DModule)
    }

    /// Allocates a zeroed tensor on every worker: on its default device if that satisfies `device`,
    /// else on the first of the worker's devices that does, in the memory scope that `device`
    /// names. Where none does, the command fails with the devices that there are.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub fn empty(&self, shape: &[i64], dtype: DataType, device: Option<VirtualDevice>) -> Result<DRef> {
        self.fresh(|to| Command::Empty { to, device, dtype, shape: shape.to_vec(), on: On::All })
    }

    /// Allocates a zeroed tensor on the first worker of each group, or on worker 0 alone. The
    /// others have null.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub fn empty_on_worker0(
        &self,
        shape: &[i64],
        dtype: DataType,
        device: Option<VirtualDevice>,
        scope: Scope,
    ) -> Result<DRef> {
        self.fresh(|to| Command::Empty { to, device, dtype, shape: shape.to_vec(), on: first_of(scope) })
    }

    /// Copies a tensor of the controller to worker 0: into `to`, which must have the same type and
    /// as many elements there, or into a new tensor. The other workers have null then.
    ///
    /// It does not wait: above 64 KiB the tensor is borrowed for reading until its bytes have left.
    ///
    /// # Errors
    ///
    /// The tensor is not densely packed in host memory, or is being written; the session has ended.
    pub fn copy_to_worker_0(&self, tensor: &Tensor, to: Option<&DRef>) -> Result<DRef> {
        self.copy_to(tensor, to, On::Worker0)
    }

    /// Copies worker 0's tensor to the controller, as it is when worker 0 has executed all that was
    /// issued before.
    pub fn copy_from_worker_0(&self, from: &DRef) -> Completion<Tensor> {
        let from = match from.register_in(&self.0) {
            Ok(from) => from,
            Err(error) => return Completion::failed(error),
        };
        let content = self.0.fetch(|ticket| Command::CopyFromWorker0 { ticket, from });
        Completion::new(async move {
            match content.await? {
                Value::Object(Object::Tensor(tensor)) => Ok(tensor),
                other => Err(RpcError::internal(format!("worker 0 sent {} for a tensor", other.type_name())).into()),
            }
        })
    }

    /// Copies worker 0's tensor into a tensor of the controller, which must have the same type and
    /// as many elements. That is borrowed for writing until the copy is complete, and is unchanged
    /// after an error.
    ///
    /// Its errors are also a tensor that is not densely packed in host memory, or in use.
    pub fn copy_from_worker_0_into(&self, from: &DRef, to: &Tensor) -> Completion<()> {
        let borrowed = || -> Result<_> {
            let range = to.byte_range(0, to.size_bytes())?;
            let (_, mut borrow) = to.write()?.into_parts();
            if borrow.bytes_mut().is_none() {
                return Err(DiscoError::invalid("the tensor to be filled is not in host memory"));
            }
            Ok((range.start, borrow))
        };
        let (start, mut borrow) = match borrowed() {
            Ok(borrowed) => borrowed,
            Err(error) => return Completion::failed(error),
        };
        let (dtype, elements, shape) = (to.dtype(), to.element_count(), to.shape().to_vec());
        let content = self.copy_from_worker_0(from);
        Completion::new(async move {
            let content = content.await?;
            if content.dtype() != dtype || content.element_count() != elements {
                let (there, at) = (content.dtype(), content.shape());
                return Err(DiscoError::invalid(format!(
                    "a copy of {there} {at:?} into {dtype} {shape:?}: dtype and number of elements must be the same"
                )));
            }
            Ok(borrow.copy_in(start, content.read()?.bytes()?)?)
        })
    }

    /// Gives every worker a copy of a tensor of the controller: in `to`, or in a new tensor.
    ///
    /// The data goes to worker 0, or within groups to the first worker of each, which pass it on.
    ///
    /// # Errors
    ///
    /// As [`copy_to_worker_0`](Self::copy_to_worker_0).
    pub fn broadcast(&self, tensor: &Tensor, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        let from = self.copy_to(tensor, None, first_of(scope))?;
        self.broadcast_from_worker0(&from, to, scope)
    }

    /// Gives each worker its part of a tensor of the controller, whose first dimension counts the
    /// workers of a group, or all of them: in `to`, or in a new tensor, which has the other
    /// dimensions.
    ///
    /// The data goes to worker 0, or within groups to the first worker of each, which pass it on.
    ///
    /// # Errors
    ///
    /// As [`copy_to_worker_0`](Self::copy_to_worker_0); and another first dimension.
    pub fn scatter(&self, tensor: &Tensor, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        let size = self.0.layout.grouping(scope).size();
        if tensor.shape().first() != Some(&i64::from(size)) {
            return Err(DiscoError::invalid(format!(
                "scatter of {} {:?} among {size} workers: the first dimension must be {size}",
                tensor.dtype(),
                tensor.shape()
            )));
        }
        let from = self.copy_to(tensor, None, first_of(scope))?;
        self.scatter_from_worker0(&from, to, scope)
    }

    /// Gives every worker the first one's `from`, in `to` or in a new tensor.
    ///
    /// # Errors
    ///
    /// The session has ended. What does not fit on a worker is told by
    /// [`sync_all`](Self::sync_all).
    pub fn broadcast_from_worker0(&self, from: &DRef, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        self.collective(Kind::Broadcast, scope, from, to)
    }

    /// Gives each worker its part of the first one's `from`, in `to` or in a new tensor, which has
    /// all dimensions but the first.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn scatter_from_worker0(&self, from: &DRef, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        self.collective(Kind::Scatter, scope, from, to)
    }

    /// Puts all workers' `from` behind each other on the first one: in `to`, which the others need
    /// not have, or in a new tensor with one more dimension in front.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn gather_to_worker0(&self, from: &DRef, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        self.collective(Kind::Gather, scope, from, to)
    }

    /// Reduces all workers' `from`, element by element, into the `to` of all or a new tensor. Both
    /// may be the same.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn allreduce(&self, from: &DRef, to: Option<&DRef>, op: ReduceOp, scope: Scope) -> Result<DRef> {
        self.collective(Kind::Allreduce(op), scope, from, to)
    }

    /// Puts all workers' `from` behind each other in the `to` of all, or in a new tensor with one
    /// more dimension in front.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn allgather(&self, from: &DRef, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        self.collective(Kind::Allgather, scope, from, to)
    }

    /// Reduces all workers' `from`, of which each worker gets its share: in `to`, or in a new
    /// tensor, which has all dimensions but the first.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn reduce_scatter(&self, from: &DRef, to: Option<&DRef>, op: ReduceOp, scope: Scope) -> Result<DRef> {
        self.collective(Kind::ReduceScatter(op), scope, from, to)
    }

    /// Sends every worker its share of every worker's `from`: in `to`, or in a new tensor of the
    /// same shape.
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn all_to_all(&self, from: &DRef, to: Option<&DRef>, scope: Scope) -> Result<DRef> {
        self.collective(Kind::AllToAll, scope, from, to)
    }

    /// Lets no worker go on before all have come here. The controller does not wait.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub fn barrier(&self, scope: Scope) -> Result<()> {
        self.0.issue(Command::Collective { kind: Kind::Barrier, scope, from: 0, to: 0, fresh: false })
    }

    /// Sends the tensor `from` of the first of each pair to the tensor `to` of the second, one pair
    /// after the other. A `to` that no pair receives into stays as it is.
    ///
    /// # Errors
    ///
    /// A pair of workers that there are not, or of one with itself; the session has ended.
    pub fn send_recv(&self, from: &DRef, to: &DRef, pairs: &[(WorkerId, WorkerId)]) -> Result<()> {
        let (from, to) = (from.register_in(&self.0)?, to.register_in(&self.0)?);
        let pairs = self.0.pairs(pairs)?;
        self.0.issue(Command::SendRecv { from, to, pairs })
    }

    /// Records a program: what `steps` does with the recorder is not executed, but kept on the
    /// workers, which then run it as often as one likes by one small command each time. `steps`
    /// gives the outputs.
    ///
    /// ```
    /// use disco::{ReduceOp, Scope, ThreadedSession};
    /// use rpc_core::{DataType, Registry, Tensor, TensorViewMut};
    ///
    /// let registry = Registry::new();
    /// registry.add("add", |mut x: TensorViewMut, value: f32| -> rpc_core::Result<()> {
    ///     x.as_mut_slice::<f32>()?.iter_mut().for_each(|x| *x += value);
    ///     Ok(())
    /// });
    /// let session = ThreadedSession::new(2, 1).registry(registry).start().wait()?;
    /// let add = session.get_global_func("add")?;
    /// let program = session.record(|program| {
    ///     let (x, value) = (program.parameter(), program.parameter());
    ///     program.call(&add, (&x, &value))?;
    ///     Ok(vec![program.allreduce(&x, None, ReduceOp::Sum, Scope::World)?])
    /// })?;
    /// let x = session.empty(&[1], DataType::F32, None)?;
    /// for expected in [3.0, 6.0] {
    ///     let sums = program.run((&x, 1.5))?;
    ///     let sum = session.copy_from_worker_0(&sums[0]).wait()?;
    ///     assert_eq!(sum.read()?.as_slice::<f32>()?, [expected]);
    /// }
    /// # Ok::<(), disco::DiscoError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of `steps`; outputs that no step makes; a program that is too large; the session has
    /// ended.
    pub fn record(&self, steps: impl FnOnce(&Recorder) -> Result<Vec<Recorded>>) -> Result<Program> {
        let recorder = self.recorder();
        let outputs = steps(&recorder)?;
        recorder.finish(&outputs)
    }

    /// Begins to record a program without a closure: [`Recorder::finish`] ends that. A recorder
    /// that is dropped has sent nothing.
    pub fn recorder(&self) -> Recorder {
        Recorder::new(&self.0)
    }

    /// Chooses the backend of collectives, and with it each worker's default device: that of the
    /// backend's kind with the worker's id. There are as many ids as workers, or as many as each
    /// node has workers, which then count for every node.
    ///
    /// `host` is there without this call. It needs no ids; where some are given only their number
    /// matters, because a machine has one `cpu`. The default devices are that one again.
    ///
    /// `mpi` is for workers that are processes of one job of MPI, one worker in each:
    /// `mpirun -n 4 rpc-server worker --mpi --controller ADDRESS`, of an `rpc-server` that was
    /// built with the feature `mpi`, or [`ccl::host::mpi`](crate::ccl::host). Its tensors are in
    /// host memory, too.
    ///
    /// `nccl` moves the data of tensors on CUDA devices ([`ccl::nccl`](crate::ccl::nccl)), one
    /// device for each worker. The library is looked for by each worker, and all have to have the
    /// same version. Workers with GPUs should be processes, which they are by default where a node
    /// has several ([`Hosting`](crate::Hosting)): only the end of one helps where NCCL hangs. Its
    /// collectives are given to the devices' streams, and workers go on to the next command:
    /// [`sync_worker`](Self::sync_worker) waits for them, and so do the copies of their results to
    /// the controller. If the data plane breaks meanwhile, that sync or copy tells it, and what
    /// commands have made since the sync before is poisoned.
    ///
    /// Its errors are another number of ids, an unknown backend, and those of
    /// [`reinit_ccl`](Self::reinit_ccl).
    pub fn init_ccl(&self, name: &str, device_ids: &[i32]) -> Completion<()> {
        let chosen = Backend::named(name).map_err(DiscoError::from);
        let chosen = chosen.and_then(|backend| Ok((backend, self.0.devices(backend.device_kind(), device_ids)?)));
        match chosen {
            Ok((backend, devices)) => self.0.reinit(Some(backend), devices),
            Err(error) => Completion::failed(error),
        }
    }

    /// Makes the collectives anew, whether they have broken or not. It waits until the workers have
    /// executed all that was issued before; then they meet under a new number, and traffic of the
    /// old collectives is refused. Issue other collectives when this has
    /// resolved: until then they may still meet the old ones.
    ///
    /// Collectives that run are left once all workers have met, so that a failure changes nothing:
    /// they still run, with the backend and the default devices that they had. Until then the
    /// workers have both.
    ///
    /// In broken collectives no worker waits, so that a worker holds this up only by being busy
    /// with something else.
    ///
    /// Its errors, all of which name workers where they can:
    ///
    /// * [`DeadlineExceeded`](ErrorKind::DeadlineExceeded): workers are busy with what was issued
    ///   before for longer than [`init_timeout`](crate::Options::init_timeout), or a node does not
    ///   answer for as long: the collectives stay as they were. Or workers are not back from
    ///   meeting the others, after three times as long. Try again when those workers are back.
    /// * [`Busy`](ErrorKind::Busy): they are being made anew already.
    /// * [`Unsupported`](ErrorKind::Unsupported): the workers have no way to each other.
    /// * failures of workers that have not met the others: the collectives are as they were,
    ///   running or broken, with the same default devices.
    /// * what has ended the session.
    pub fn reinit_ccl(&self) -> Completion<()> {
        self.0.reinit(None, Vec::new())
    }

    /// Arranges all workers as a grid with these axes, whose sizes multiply to the number of
    /// workers. Each axis has a [group](Mesh::group) for collectives, and functions on workers find
    /// it by its name ([`WorkerContext::axis`](crate::WorkerContext::axis)).
    ///
    /// ```
    /// use disco::{ReduceOp, ThreadedSession, WorkerId};
    /// use rpc_core::Tensor;
    ///
    /// let session = ThreadedSession::new(6, 1).start().wait()?;
    /// let mesh = session.mesh(&[("dp", 2), ("tp", 3)]).wait()?;
    /// assert_eq!(mesh.coordinates(WorkerId(4))?, [1, 1]);
    /// let (dp, tp) = (mesh.group("dp")?, mesh.group("tp")?);
    /// // Each row of three workers divides the elements, and each column adds up its share.
    /// let x = session.scatter(&Tensor::from_slice([3], &[1.0_f32, 2.0, 3.0])?, None, tp)?;
    /// let sums = session.allreduce(&x, None, ReduceOp::Sum, dp)?;
    /// let sum = session.copy_from_worker_0(&session.gather_to_worker0(&sums, None, tp)?).wait()?;
    /// assert_eq!(sum.read()?.as_slice::<f32>()?, [2.0, 4.0, 6.0]);
    /// # Ok::<(), disco::DiscoError>(())
    /// ```
    ///
    /// The workers make the collectives anew for that, as in [`reinit_ccl`](Self::reinit_ccl), and
    /// every later making has the mesh, too. A mesh that the session has already costs nothing. A
    /// session may have several meshes, such as one whose axis joins two neighbouring ones of
    /// another; an axis of one name is the same division of the workers in all of them.
    ///
    /// Its errors are another number of workers than the session's; names that are empty, longer
    /// than 64 bytes or there twice; a size of 0; more than 8 axes of a mesh, 16 meshes or 15
    /// different groupings of a session; and those of [`reinit_ccl`](Self::reinit_ccl). Then the
    /// session does not have the mesh.
    pub fn mesh(&self, axes: &[(&str, u32)]) -> Completion<Mesh> {
        match Mesh::new(axes.iter().copied()) {
            Ok(mesh) => self.0.add_mesh(mesh),
            Err(error) => Completion::failed(error.into()),
        }
    }

    /// Returns the state of the collectives; if they are broken, by whom and how, as far as the
    /// controller has heard. Never waits.
    pub fn ccl_state(&self) -> CclState {
        self.0.ccl_state()
    }

    /// Breaks the collectives: those that workers are in, and all later ones, return an error with
    /// this reason, until [`reinit_ccl`](Self::reinit_ccl). Passes all commands that wait, and
    /// never waits itself. Where the collectives are broken already it does nothing.
    ///
    /// # Errors
    ///
    /// The session has ended.
    pub fn abort_ccl(&self, reason: &str) -> Result<()> {
        self.0.abort_ccl(reason)
    }

    /// Resolves when the worker has executed all that was issued before, and its devices have done
    /// what that gave to their default streams.
    ///
    /// Its errors are the worker's failures that have not been reported yet; and what ends the
    /// session.
    pub fn sync_worker(&self, worker: WorkerId) -> Completion<()> {
        match self.check(worker) {
            Ok(()) => self.0.sync(Some(worker)),
            Err(error) => Completion::failed(error),
        }
    }

    /// Resolves when all workers have executed all that was issued before.
    ///
    /// Its errors are all failures that have not been reported yet, in the order of commands; and
    /// what ends the session.
    pub fn sync_all(&self) -> Completion<()> {
        self.0.sync(None)
    }

    /// Returns the content of a register on a worker, once it has executed all that was issued
    /// before: a value without objects, or a tensor.
    pub fn debug_get_from_remote(&self, from: &DRef, worker: WorkerId) -> Completion<Content> {
        let from = match self.check(worker).and_then(|()| from.register_in(&self.0)) {
            Ok(from) => from,
            Err(error) => return Completion::failed(error),
        };
        let content = self.0.fetch(|ticket| Command::DebugGetFromRemote { ticket, worker: worker.0, from });
        Completion::new(async move {
            match content.await? {
                Value::Object(Object::Tensor(tensor)) => Ok(Content::Tensor(tensor)),
                value => {
                    let refuse = |_: Object| Err(RpcError::internal("a worker sent an object"));
                    Ok(Content::Value(value.try_map(&mut { refuse })?))
                }
            }
        })
    }

    /// Sets a register on one worker. A tensor that meets one of the same type and shape is copied
    /// into it; all else replaces what was there.
    ///
    /// A tensor of any size may be the value, and tensors of up to 64 KiB may be within lists. A
    /// larger one is borrowed for reading until its bytes have left.
    ///
    /// # Errors
    ///
    /// No such worker; a tensor in a list that is too large, or one that is not densely packed in
    /// host memory; the session has ended.
    pub fn debug_set_register(&self, to: &DRef, worker: WorkerId, value: impl IntoArgument) -> Result<()> {
        self.set_register(Some(to), worker, value).map(drop)
    }

    /// As [`debug_set_register`](Self::debug_set_register), or for a fresh register. Returns the
    /// reference to it.
    pub(crate) fn set_register(&self, to: Option<&DRef>, worker: WorkerId, value: impl IntoArgument) -> Result<DRef> {
        self.check(worker)?;
        let value = value.into_argument()?;
        if let Value::Object(Operand::Tensor(tensor)) = &value
            && tensor.size_bytes() > MAX_INLINE_TENSOR as u64
        {
            return self.send(tensor, to, true, On::Worker(worker.0));
        }
        let value = resolve(value, &self.0)?;
        self.issue_to(to, |to| Command::DebugSetRegister { worker: worker.0, to, value })
    }

    /// Ends the session in good order: the workers execute all that was issued, for as long as
    /// [`shutdown_timeout`](crate::Options::shutdown_timeout) allows. In any case the session has
    /// ended then, and what was started for it is gone or going.
    ///
    /// Its error names workers that were left behind, or is the one that has ended the session
    /// meanwhile. A session that had ended before is no error.
    pub fn shutdown(&self) -> Completion<()> {
        self.0.shut_down()
    }

    fn check(&self, worker: WorkerId) -> Result<()> {
        if worker.0 < self.num_workers() {
            return Ok(());
        }
        let error = format!("there is no worker {worker} in a session of {}", self.num_workers());
        Err(RpcError::new(ErrorKind::InvalidArgument, error).into())
    }

    fn fresh(&self, command: impl FnOnce(u32) -> Command) -> Result<DRef> {
        DRef::issue(&self.0, command)
    }

    fn collective(&self, kind: Kind, scope: Scope, from: &DRef, to: Option<&DRef>) -> Result<DRef> {
        let (from, fresh) = (from.register_in(&self.0)?, to.is_none());
        self.issue_to(to, |to| Command::Collective { kind, scope, from, to, fresh })
    }

    fn copy_to(&self, tensor: &Tensor, to: Option<&DRef>, on: On) -> Result<DRef> {
        self.send(tensor, to, to.is_none(), on)
    }

    /// Sends a tensor to a register of workers, or else to a fresh one, piece by piece.
    fn send(&self, tensor: &Tensor, to: Option<&DRef>, fresh: bool, on: On) -> Result<DRef> {
        let bytes = bytes_of(tensor)?;
        let piece = |to, offset: usize| {
            let data = bytes.slice(offset..bytes.len().min(offset + CHUNK));
            let (dtype, shape) = (tensor.dtype(), tensor.shape().to_vec());
            Command::CopyToWorker0 { to, fresh, dtype, shape, offset: offset as u64, data, on }
        };
        let target = self.issue_to(to, |to| piece(to, 0))?;
        for offset in (CHUNK..bytes.len()).step_by(CHUNK) {
            self.0.issue(piece(target.register(), offset))?;
        }
        Ok(target)
    }

    /// Issues a command that sets a register, or else a fresh one. Returns the reference to it.
    fn issue_to(&self, to: Option<&DRef>, command: impl FnOnce(Register) -> Command) -> Result<DRef> {
        let Some(to) = to else { return DRef::issue(&self.0, command) };
        self.0.issue(command(to.register_in(&self.0)?))?;
        Ok(to.clone())
    }
}

fn first_of(scope: Scope) -> On {
    match scope {
        Scope::Group => On::FirstOfGroups,
        Scope::World => On::Worker0,
        Scope::Groups(grouping) => On::FirstOf(grouping),
    }
}

/// Returns the bytes of a dense tensor in host memory: copied if they are few, else borrowed.
fn bytes_of(tensor: &Tensor) -> Result<Bytes> {
    let range = tensor.byte_range(0, tensor.size_bytes())?;
    let view = tensor.read()?;
    let bytes = view.bytes()?;
    if tensor.size_bytes() <= COPIED {
        return Ok(Bytes::copy_from_slice(bytes));
    }
    let (_, borrow) = view.into_parts();
    debug_assert_eq!(borrow.access(), Access::Read);
    borrow.into_bytes(range).ok_or_else(|| RpcError::internal("a tensor without bytes").into())
}

impl fmt::Debug for DiscoSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DiscoSession({} workers in {} groups)", self.num_workers(), self.num_groups())
    }
}
