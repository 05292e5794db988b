//! Context of a worker: what a function sees of the worker that it runs on, and the collectives
//! that it can take part in.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::function::{FromCall, Invocation, UsedDevices};
use rpc_core::tensor::Access;
use rpc_core::{Context, DataType, Device, ErrorKind, Result, RpcError, Tensor, VirtualDevice, blocking};

use super::exchanges::{Exchanges, is_exchange};
use super::tensor_loan::{fit, lend};
use crate::ccl::communicators::Membership;
use crate::ccl::{
    BreakCause, Breakdown, Ccl, CclError, Collective, CollectiveInput, Control, Flight, Operation, Rank, ReduceOp,
};
use crate::error::WorkerId;
use crate::wire::command::Scope;
use crate::wire::event::{Event, EventSink, LogLine, Report};
use crate::wire::grouping::Grouping;
use crate::wire::mesh::Mesh;
use crate::wire::plan::Layout;

/// The worker that runs the calling function. A parameter of this type takes no argument.
///
/// ```
/// use disco::{Content, ReduceOp, Scope, ThreadedSession, WorkerContext, WorkerId};
/// use rpc_core::{Registry, Tensor};
///
/// let registry = Registry::new();
/// registry.add("sum_of_ids", |worker: WorkerContext| -> rpc_core::Result<f32> {
///     let sum = Tensor::from_slice([1], &[worker.worker_id().0 as f32])?;
///     worker.allreduce(ReduceOp::Sum, &sum, &sum, Scope::World)?;
///     Ok(sum.read()?.as_slice::<f32>()?[0])
/// });
/// let session = ThreadedSession::new(3, 1).registry(registry).start().wait()?;
/// let sum = session.get_global_func("sum_of_ids")?.call(())?;
/// let sum = session.debug_get_from_remote(&sum, WorkerId(2)).wait()?;
/// assert!(matches!(sum, Content::Value(sum) if sum == 3.0.into()));
/// # Ok::<(), disco::DiscoError>(())
/// ```
///
/// Collectives have to be entered by all workers of their scope, in the same order. Tensors in them
/// must be densely packed, and in host memory or on the device that
/// [`init_ccl`](crate::DiscoSession::init_ccl) has given the worker; they are borrowed while the
/// call lasts, so that a function takes them as [`Tensor`] and not as views. Source and destination
/// may be the same tensor, and must not overlap otherwise. On a GPU a collective returns when it
/// has been given to the device's default stream: whatever is submitted there next, such as a copy
/// or a kernel, comes behind it.
#[derive(Clone)]
pub struct WorkerContext(Arc<ContextState>);

struct ContextState {
    id: WorkerId,
    layout: Layout,
    context: Context,
    logs: Option<u8>,
    device: Mutex<Device>,
    /// Devices on which there may be work to wait for: this worker's own, and those of functions
    /// and native code.
    used: Arc<UsedDevices>,
    /// Error of collectives that are lost, until the worker has dealt with it.
    lost: Mutex<Option<RpcError>>,
    /// Sink for log lines, and for reports of broken communicators.
    sink: Arc<dyn EventSink>,
    /// Communicators, or why there are none.
    membership: Mutex<Result<Membership>>,
    /// Controls of the membership, to be reached while it is in use.
    controls: Mutex<Controls>,
    /// Controls of communicators that the worker is joining others over.
    joining: Mutex<Vec<Arc<dyn Control>>>,
    /// Exchanges with workers of other sessions.
    exchanges: Arc<Exchanges>,
    meshes: Mutex<Arc<[Mesh]>>,
    activity: Mutex<Activity>,
}

/// Command that a worker executes, or has executed last.
#[derive(Clone, Debug)]
pub(crate) struct Activity {
    /// Name of the command or function; `None` before the first.
    pub(crate) command: Option<ActivityName>,
    pub(crate) sequence: u64,
    /// Time at which the worker has begun it.
    pub(crate) since: Instant,
    /// Number of the last command that the worker has executed.
    pub(crate) executed: u64,
}

/// Name of a command or of a function.
#[derive(Clone, Debug)]
pub(crate) enum ActivityName {
    Command(&'static str),
    Function(Arc<str>),
}

impl fmt::Display for ActivityName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Command(name) => f.write_str(name),
            Self::Function(name) => f.write_str(name),
        }
    }
}

/// Controls of a membership's communicators, for any thread.
#[derive(Default)]
struct Controls {
    epoch: u64,
    all: Vec<(Option<Grouping>, Arc<dyn Control>)>,
    /// True once the controller has been told that they are broken.
    told: bool,
    /// Last epoch whose collectives another worker or the controller has ended, and the cause. It
    /// may come before the communicators exist.
    ended: Option<(u64, RpcError)>,
}

thread_local! {
    static CURRENT: RefCell<Option<WorkerContext>> = const { RefCell::new(None) };
}

/// Error of a collective.
pub(crate) enum CollectiveError {
    /// Fault of this worker, disagreement of ranks, or a broken group.
    Own(RpcError),
    /// Missing input of another worker.
    Inherited(WorkerId, RpcError),
}

impl From<CollectiveError> for RpcError {
    fn from(error: CollectiveError) -> Self {
        match error {
            CollectiveError::Own(error) => error,
            CollectiveError::Inherited(worker, error) => error.context(format_args!("worker {worker}")),
        }
    }
}

impl WorkerContext {
    /// Creates the context of a worker. `logs` is the level up to which the controller wants to see
    /// the lines that the worker logs.
    pub(crate) fn new(
        id: WorkerId,
        layout: Layout,
        context: Context,
        sink: Arc<dyn EventSink>,
        logs: Option<u8>,
    ) -> Self {
        let used = Arc::new(UsedDevices::default());
        Self(Arc::new(ContextState {
            id,
            layout,
            context: context.recording_devices(Arc::clone(&used)),
            logs,
            device: Mutex::new(Device::cpu()),
            used,
            lost: Mutex::default(),
            sink,
            membership: Mutex::new(Err(RpcError::unsupported("it has not joined the others"))),
            controls: Mutex::default(),
            joining: Mutex::default(),
            exchanges: Arc::default(),
            meshes: Mutex::new(Arc::default()),
            activity: Mutex::new(Activity { command: None, sequence: 0, since: Instant::now(), executed: 0 }),
        }))
    }

    /// Makes this the worker of the calling thread.
    pub(crate) fn enter(&self) {
        CURRENT.with_borrow_mut(|current| *current = Some(self.clone()));
    }

    /// Ends what [`enter`](Self::enter) began.
    pub(crate) fn leave() {
        let worker = CURRENT.with_borrow_mut(Option::take);
        drop(worker);
    }

    /// Returns true if lines of this level are to go to the controller.
    pub(crate) fn wants_logs(&self, level: u8) -> bool {
        self.0.logs.is_some_and(|least| level <= least)
    }

    /// Sends a line to the controller.
    pub(crate) fn log(&self, line: LogLine) {
        self.0.sink.send(Event::Logged { worker: self.0.id, line });
    }

    /// Returns the worker of the calling thread, if it is one.
    pub fn current() -> Option<Self> {
        // Also asked while a thread ends, by whatever is logged then.
        CURRENT.try_with(|current| current.try_borrow().ok()?.clone()).ok().flatten()
    }

    /// Returns the number of this worker in its session.
    pub fn worker_id(&self) -> WorkerId {
        self.0.id
    }

    /// Returns the number of workers of the session.
    pub fn world_size(&self) -> u32 {
        self.0.layout.world_size
    }

    /// Returns the number of groups.
    pub fn num_groups(&self) -> u32 {
        self.0.layout.num_groups
    }

    /// Returns the number of workers in each group.
    pub fn group_size(&self) -> u32 {
        self.0.layout.group_size()
    }

    /// Returns the number of this worker's group.
    pub fn group(&self) -> u32 {
        self.0.layout.group(self.0.id)
    }

    /// Returns the number of this worker in its group.
    pub fn rank_in_group(&self) -> Rank {
        self.0.layout.rank_in_group(self.0.id)
    }

    /// Returns the device of tensors for which no device is named.
    pub fn device(&self) -> Device {
        *lock(&self.0.device)
    }

    /// Returns the session of the process that the worker is in: its devices, its functions, its
    /// folder.
    pub fn context(&self) -> &Context {
        &self.0.context
    }

    /// Returns the device of the worker that satisfies a constraint: its own if that does, or if
    /// there is no constraint.
    pub(crate) fn choose(&self, wanted: Option<&VirtualDevice>) -> Result<Device> {
        let own = self.device();
        wanted.map_or(Ok(own), |wanted| self.context().devices().choose(wanted, own))
    }

    /// Waits until the devices that this worker has tensors on, or that its functions and native
    /// code have used, have done what was submitted to their default streams. One that fails is
    /// told of once.
    pub(crate) fn synchronize(&self) -> Result<()> {
        let mut outcome = Ok(());
        for device in self.0.used.all() {
            let stream =
                self.context().devices().get(device).and_then(|api| api.default_stream(device.index)?.synchronize());
            if stream.is_err() {
                self.0.used.remove(device);
            }
            outcome = outcome.and(stream);
        }
        outcome
    }

    /// Waits until all that this worker's collectives have left to its device is done, as they do
    /// where tensors are on GPUs: they return when they have been given to the device's stream, in
    /// front of whatever is submitted there next. [`sync_worker`](crate::DiscoSession::sync_worker)
    /// does it, too. A function that acts on what it copies from there has to, because after a loss
    /// copies succeed.
    ///
    /// # Errors
    ///
    /// Some of it is lost, because the data plane broke meanwhile. That is told once here, and to
    /// the controller by the next sync: what has been made of it since is of no use.
    pub fn complete(&self) -> Result<()> {
        let mut membership = lock(&self.0.membership);
        let Ok(membership) = membership.as_mut() else { return Ok(()) };
        let epoch = membership.epoch;
        let mut outcome = Ok(());
        for (grouping, ccl) in membership.each() {
            let scope = grouping.map_or(Scope::World, Scope::Groups);
            if let Err(error) = ccl.complete() {
                let error = match error {
                    CclError::Broken(breakdown) => self.broken(scope, epoch, &breakdown),
                    other => other.into(),
                };
                lock(&self.0.lost).get_or_insert_with(|| error.clone());
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }

    /// As [`complete`](Self::complete), and takes the error of lost collectives, even if a function
    /// has got it already.
    pub(crate) fn settle(&self) -> Result<()> {
        let completed = self.complete();
        lock(&self.0.lost).take().map_or(completed, Err)
    }

    /// Allocates a zeroed, densely packed tensor on the worker's device.
    ///
    /// # Errors
    ///
    /// The device's, and a limit that is reached.
    pub fn allocate(&self, dtype: DataType, shape: &[i64]) -> Result<Tensor> {
        let device = self.device();
        self.0.context.allocate(device, dtype, shape)
    }

    /// Reduces the elements of all workers' `from` into the `to` of all.
    ///
    /// # Errors
    ///
    /// This worker's arguments do not fit; another worker's input failed; workers disagree; or the
    /// data plane is broken.
    pub fn allreduce(&self, op: ReduceOp, from: &Tensor, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Allreduce(op), Ok((Some(from), Some(to))))?)
    }

    /// Reduces the elements of all workers' `from`, of which each worker gets its share in `to`.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn reduce_scatter(&self, op: ReduceOp, from: &Tensor, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::ReduceScatter(op), Ok((Some(from), Some(to))))?)
    }

    /// Puts all workers' `from` behind each other in the `to` of all.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn allgather(&self, from: &Tensor, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Allgather, Ok((Some(from), Some(to))))?)
    }

    /// Gives all workers the elements of the first worker's `from`, which only that worker needs.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn broadcast_from_worker0(&self, from: Option<&Tensor>, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Broadcast { root: Rank(0) }, Ok((from, Some(to))))?)
    }

    /// Gives all workers a share of the first worker's `from`, which only that worker needs.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn scatter_from_worker0(&self, from: Option<&Tensor>, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Scatter { root: Rank(0) }, Ok((from, Some(to))))?)
    }

    /// Puts all workers' `from` behind each other in the first worker's `to`, which no other
    /// worker needs.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn gather_to_worker0(&self, from: &Tensor, to: Option<&Tensor>, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Gather { root: Rank(0) }, Ok((Some(from), to)))?)
    }

    /// Sends every worker its share of `from`, and gathers what they send in `to`.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn all_to_all(&self, from: &Tensor, to: &Tensor, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::AllToAll, Ok((Some(from), Some(to))))?)
    }

    /// Waits until all workers have come here.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn barrier(&self, scope: Scope) -> Result<()> {
        Ok(self.run(scope, Operation::Barrier, Ok((None, None)))?)
    }

    /// Sends a tensor to another worker, which receives it with
    /// [`recv_from_worker`](Self::recv_from_worker).
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn send_to_worker(&self, tensor: &Tensor, to: WorkerId) -> Result<()> {
        self.check_peer(to)?;
        Ok(self.run(Scope::World, Operation::Send { to: Rank(to.0) }, Ok((Some(tensor), None)))?)
    }

    /// Receives a tensor from another worker, which sends it with
    /// [`send_to_worker`](Self::send_to_worker).
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn recv_from_worker(&self, tensor: &Tensor, from: WorkerId) -> Result<()> {
        self.check_peer(from)?;
        Ok(self.run(Scope::World, Operation::Recv { from: Rank(from.0) }, Ok((None, Some(tensor))))?)
    }

    /// Receives a tensor that worker 0 sends with [`send_to_worker`](Self::send_to_worker).
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce).
    pub fn recv_from_worker0(&self, tensor: &Tensor) -> Result<()> {
        self.recv_from_worker(tensor, WorkerId(0))
    }

    /// Sends a tensor to the worker with the same number in the next group.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce); and there is no next group.
    pub fn send_to_next_group(&self, tensor: &Tensor) -> Result<()> {
        let to = WorkerId(self.0.id.0 + self.group_size());
        if to.0 >= self.world_size() {
            return Err(RpcError::invalid_argument(format!("worker {} is in the last group", self.0.id)));
        }
        self.send_to_worker(tensor, to)
    }

    /// Receives a tensor from the worker with the same number in the group before this one.
    ///
    /// # Errors
    ///
    /// As [`allreduce`](Self::allreduce); and there is no such group.
    pub fn recv_from_prev_group(&self, tensor: &Tensor) -> Result<()> {
        let from = self.0.id.0.checked_sub(self.group_size());
        let from =
            from.ok_or_else(|| RpcError::invalid_argument(format!("worker {} is in the first group", self.0.id)))?;
        self.recv_from_worker(tensor, WorkerId(from))
    }

    fn check_peer(&self, peer: WorkerId) -> Result<()> {
        if peer.0 < self.world_size() && peer != self.0.id {
            return Ok(());
        }
        Err(RpcError::invalid_argument(format!(
            "worker {} cannot exchange tensors with worker {peer} in a session of {}",
            self.0.id,
            self.world_size()
        )))
    }

    /// Records that the worker begins a command. All before it have been executed.
    pub(crate) fn begin_command(&self, sequence: u64, command: ActivityName) {
        let activity = Activity { command: Some(command), sequence, since: Instant::now(), executed: sequence - 1 };
        *lock(&self.0.activity) = activity;
    }

    /// Records that the worker has executed the command that it began last.
    pub(crate) fn end_command(&self) {
        let mut activity = lock(&self.0.activity);
        activity.executed = activity.sequence;
    }

    /// Returns the present activity of the worker.
    pub(crate) fn activity(&self) -> Activity {
        lock(&self.0.activity).clone()
    }

    /// Returns the last calls in collectives, each with its grouping; those of all workers have
    /// none.
    pub(crate) fn calls(&self) -> Vec<(Option<Grouping>, Flight)> {
        let controls = lock(&self.0.controls).all.clone();
        let calls = controls.iter().flat_map(|(grouping, control)| {
            let flights = control.flights().into_iter();
            flights.map(move |flight| (*grouping, flight))
        });
        calls.collect()
    }

    /// Sets the device of tensors for which no device is named.
    pub(crate) fn set_device(&self, device: Device) {
        *lock(&self.0.device) = device;
    }

    /// Becomes a member of new communicators, and leaves those it was in.
    pub(crate) fn set_membership(&self, membership: Result<Membership>) {
        if membership.is_err() {
            // Dropping them may wait for a device, and a thread that wants to end that finds the
            // controls until it is over.
            let old =
                std::mem::replace(&mut *lock(&self.0.membership), Err(RpcError::unsupported("it has left the others")));
            drop(old);
        }
        let mut controls = lock(&self.0.controls);
        let ended = controls.ended.take();
        *controls = match &membership {
            Ok(membership) => {
                Controls { epoch: membership.epoch, all: membership.controls(), told: false, ended: ended.clone() }
            }
            Err(_) => Controls { ended: ended.clone(), ..Controls::default() },
        };
        drop(controls);
        if let (Ok(membership), Some((epoch, cause))) = (&membership, &ended)
            && membership.epoch == *epoch
        {
            self.abort_collectives(cause.message());
        }
        let old = std::mem::replace(&mut *lock(&self.0.membership), membership);
        drop(old);
    }

    /// Sets the communicators that the worker is joining others over; none once it has joined.
    pub(crate) fn set_joining(&self, controls: Vec<Arc<dyn Control>>) {
        *lock(&self.0.joining) = controls;
    }

    /// Ends all collectives, also those by which the worker joins others: the session has ended.
    pub(crate) fn end_collectives(&self) {
        let reason = "the session has ended";
        self.abort_collectives(reason);
        let joining = lock(&self.0.joining).clone();
        joining.iter().for_each(|control| control.abort(reason));
        self.0.exchanges.end_all(reason);
    }

    /// Ends the collective that the worker is in, and all later ones.
    pub(crate) fn abort_collectives(&self, reason: &str) {
        let controls = lock(&self.0.controls).all.clone();
        controls.iter().for_each(|(_, control)| control.abort(reason));
    }

    /// As [`abort_collectives`](Self::abort_collectives), if they are still those of that epoch.
    pub(crate) fn break_collectives(&self, epoch: u64, cause: &RpcError) {
        if is_exchange(epoch) {
            return self.0.exchanges.end(epoch, cause);
        }
        let mut controls = lock(&self.0.controls);
        if controls.ended.as_ref().is_none_or(|(known, _)| *known <= epoch) {
            controls.ended = Some((epoch, cause.clone()));
        }
        let concerned = controls.epoch == epoch;
        drop(controls);
        if concerned {
            self.abort_collectives(cause.message());
        }
    }

    /// Returns the worker's exchanges with workers of other sessions.
    pub(crate) fn exchanges(&self) -> &Arc<Exchanges> {
        &self.0.exchanges
    }

    /// Tells the controller, once, that the communicators of an epoch are broken, or cannot be
    /// made.
    pub(crate) fn report_broken(&self, report: Report) {
        let mut controls = lock(&self.0.controls);
        if controls.epoch == report.epoch && std::mem::replace(&mut controls.told, true) {
            return;
        }
        drop(controls);
        self.wait_for_room();
        self.0.sink.send(Event::CclBroken { worker: self.0.id, report });
    }

    /// Tells the controller that so many more bytes of weights have come, which this loader waits
    /// for.
    pub(crate) fn report_loaded(&self, loader: u64, bytes: u64) {
        self.wait_for_room();
        self.0.sink.send(Event::Loaded { worker: self.0.id, loader, bytes });
    }

    /// Waits until events have room: few bytes of commands can lead to any number of events, before
    /// a controller that reads none.
    pub(crate) fn wait_for_room(&self) {
        // A worker has a thread of its own, which may wait. The end of the host makes room.
        _ = blocking::block_on(poll_fn(|cx| self.0.sink.poll_room(cx)));
    }

    /// Returns the error of a collective whose communicator is broken, and reports it to the
    /// controller.
    fn broken(&self, scope: Scope, epoch: u64, breakdown: &Arc<Breakdown>) -> RpcError {
        let mut cause = RpcError::from(CclError::Broken(Arc::clone(breakdown)));
        // The kind is the same if the controller tells this worker of a breakdown before the worker
        // that has noticed it does.
        if let (BreakCause::Aborted(_), Some((ended, by))) = (&breakdown.cause, &lock(&self.0.controls).ended)
            && *ended == epoch
        {
            cause = RpcError::new(by.kind(), cause.message().to_owned()).may_have_run(true);
        }
        let grouping = self.0.layout.grouping(scope);
        if grouping.size() < self.world_size() {
            let (group, first) = (grouping.group(self.0.id), grouping.first(self.0.id));
            cause = if grouping == self.0.layout.grouping(Scope::Group) {
                cause.context(format_args!("in group {group}, whose rank 0 is worker {first}"))
            } else {
                cause.context(format_args!("in {grouping}, in that whose rank 0 is worker {first}"))
            };
        }
        let culprit = match breakdown.cause {
            BreakCause::Aborted(_) => None,
            _ => Some(self.worker_of(scope, breakdown.rank)),
        };
        self.report_broken(Report { epoch, culprit, cause: cause.clone() });
        cause
    }

    /// Tells the communicators which command the worker executes from now on, so that collectives
    /// of different ones do not meet.
    pub(crate) fn begin_step(&self, step: u64) {
        if let Ok(membership) = lock(&self.0.membership).as_mut() {
            membership.each().for_each(|(_, ccl)| ccl.set_step(step));
        }
    }

    /// Tells the communicators that the command has failed, and may have left out collectives.
    pub(crate) fn leave_step(&self) {
        if let Ok(membership) = lock(&self.0.membership).as_mut() {
            membership.each().for_each(|(_, ccl)| ccl.leave_step());
        }
    }

    /// Returns the number of this worker in its group of `scope`: along an axis of a mesh, its
    /// coordinate there.
    pub fn rank_in(&self, scope: Scope) -> Rank {
        self.0.layout.grouping(scope).rank(self.0.id)
    }

    /// Returns the number of workers in each group of `scope`.
    pub fn size_of(&self, scope: Scope) -> u32 {
        self.0.layout.grouping(scope).size()
    }

    /// Returns the scope of collectives along an axis of a [mesh](crate::DiscoSession::mesh) of the
    /// session.
    ///
    /// # Errors
    ///
    /// No mesh has such an axis. The error names those that there are.
    pub fn axis(&self, name: &str) -> Result<Scope> {
        let meshes = self.meshes();
        // An axis means the same in all meshes of a session.
        if let Some(mesh) = meshes.iter().find(|mesh| mesh.size(name).is_ok()) {
            return mesh.group(name);
        }
        let all: Vec<_> = meshes.iter().map(ToString::to_string).collect();
        let there = if all.is_empty() { "none".to_owned() } else { all.join(", ") };
        let text = format!("no mesh of this session has an axis {name:?}; its meshes: {there}");
        Err(RpcError::new(ErrorKind::NotFound, text))
    }

    /// Returns the [meshes](crate::DiscoSession::mesh) of the session, the oldest first.
    pub fn meshes(&self) -> Arc<[Mesh]> {
        Arc::clone(&lock(&self.0.meshes))
    }

    /// Sets the meshes of the session.
    pub(crate) fn set_meshes(&self, meshes: Arc<[Mesh]>) {
        *lock(&self.0.meshes) = meshes;
    }

    /// Returns this worker's rank in `scope`, and the number of ranks there.
    pub(crate) fn rank(&self, scope: Scope) -> (Rank, u32) {
        (self.rank_in(scope), self.size_of(scope))
    }

    /// Returns the worker that is `rank` in `scope`.
    fn worker_of(&self, scope: Scope, rank: Rank) -> WorkerId {
        self.0.layout.grouping(scope).member(self.0.id, rank)
    }

    /// Takes part in a collective with a source and a destination, where it needs them; or, where
    /// it has none because of an error, with that.
    pub(crate) fn run(
        &self,
        scope: Scope,
        operation: Operation,
        tensors: Result<(Option<&Tensor>, Option<&Tensor>), RpcError>,
    ) -> Result<(), CollectiveError> {
        let (rank, size) = self.rank(scope);
        let mut membership = lock(&self.0.membership);
        let membership = match membership.as_mut() {
            Ok(membership) => membership,
            Err(error) => {
                let context = format_args!("worker {} cannot take part in {operation}", self.0.id);
                return Err(CollectiveError::Own(error.clone().context(context)));
            }
        };
        let epoch = membership.epoch;
        let grouping = self.0.layout.grouping(scope);
        let ccl: Option<&mut dyn Ccl> = match grouping == self.0.layout.grouping(Scope::World) {
            true => Some(&mut *membership.world),
            false => membership.group(grouping),
        };
        let Some(ccl) = ccl else {
            // On all workers alike: they have the same meshes.
            let text = format!("{operation} among {grouping}, which are of no mesh of this session");
            return Err(CollectiveError::Own(RpcError::invalid_argument(text)));
        };
        let checked = tensors.and_then(|(from, to)| {
            let (collective, from, to) = fit(operation, rank, size, from, to)?;
            Ok((collective, lend(from, to, rank, |buffers| ccl.run(collective, buffers.into()))?))
        });
        match checked {
            Ok((_, Ok(()))) => Ok(()),
            Ok((_, Err(CclError::Poisoned { rank: origin, cause, .. }))) if origin != rank => {
                let worker = match operation {
                    Operation::Send { .. } | Operation::Recv { .. } => WorkerId(origin.0),
                    _ => self.worker_of(scope, origin),
                };
                Err(CollectiveError::Inherited(worker, cause))
            }
            Ok((_, Err(CclError::Broken(breakdown)))) => {
                Err(CollectiveError::Own(self.broken(scope, epoch, &breakdown)))
            }
            Ok((_, Err(error))) => Err(CollectiveError::Own(error.into())),
            Err(error) => {
                let empty = Collective::new(operation, DataType::U8, 0);
                // It says nothing new but where the group is broken.
                match ccl.run(empty, CollectiveInput::Poisoned(error.clone())) {
                    Err(CclError::Broken(breakdown)) => {
                        Err(CollectiveError::Own(self.broken(scope, epoch, &breakdown)))
                    }
                    _ => Err(CollectiveError::Own(error)),
                }
            }
        }
    }
}

impl FromCall for WorkerContext {
    fn describe() -> Option<(std::borrow::Cow<'static, str>, Option<Access>)> {
        None
    }

    fn from_call(_: &mut Invocation) -> Result<Self> {
        Self::current().ok_or_else(|| {
            RpcError::new(ErrorKind::ApiMisuse, "the function can only be called on a worker of a disco session")
        })
    }
}

impl fmt::Debug for WorkerContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "WorkerContext({} of {})", self.0.id, self.world_size())
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
