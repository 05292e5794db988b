//! [`Reshard`], the controller's side: it plans the moves, has the workers of both sessions meet,
//! and tells each what to send or to receive.

use std::collections::BTreeMap;
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

use parking_lot::Mutex;
use ring::rand::{SecureRandom, SystemRandom};
use rpc_core::{DataType, ErrorKind, Pack, Packed, RpcError, Value, VirtualDevice, blocking};
use serde::de::DeserializeOwned;

use super::cut::Cut;
use super::messages::{JoinRequest, Meeting, ReshardRequest, TensorPart, WorkerEnd, WorkerMove, WorkerTask};
use super::plan::{CutTensor, Move, plan};
use super::relay::Relay;
use super::sides::{Means, Session, Side, are_near, is_encrypted, locations, means};
use super::transfer::piece_len;
use crate::ccl::communicators::CollectiveTimeouts;
use crate::ccl::host::SessionKey;
use crate::completion::Completion;
use crate::controller::dref::DRef;
use crate::controller::session::{Content, DiscoSession};
use crate::error::{DiscoError, Result, WorkerId};
use crate::weights::cached_parts::of_all;
use crate::worker::exchanges::EXCHANGE;

/// Brings tensors from the workers of one session to those of another one, which divides them in
/// another way: the weights of a trainer to the workers of an inference, for example.
///
/// The bytes go from worker to worker, each once, and nowhere is there more of a tensor than the
/// parts of the source and of the destination: pieces that lie scattered in both are gathered in a
/// buffer of 512 KiB. Where workers of two sessions are threads of one process they copy from each
/// other, on one machine they share memory, and elsewhere they connect to each other's data
/// addresses as for collectives, encrypted if a link that drives any of them is. If some cannot
/// reach others, the controller passes all pieces on, a few at a time; [`Resharded::route`] says
/// which way it was.
///
/// ```
/// use disco::{Content, Cut, DataRoute, Reshard, Scope, ThreadedSession, WorkerId};
/// use rpc_core::{DataType, Tensor};
///
/// let trainer = ThreadedSession::new(2, 1).start().wait()?;
/// let inference = ThreadedSession::new(3, 1).start().wait()?;
/// // Both workers have all of the weight; each of the three is to get a column.
/// let weight = Tensor::from_slice([2, 3], &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
/// let weight = trainer.broadcast(&weight, None, Scope::World)?;
/// let reshard = Reshard::new(&trainer, &inference);
/// let (whole, columns) = (Cut::Whole, Cut::shard(1));
/// let reshard = reshard.tensor("weight", &weight, DataType::F32, [2, 3], whole, columns);
/// let resharded = reshard.start().wait()?;
/// assert_eq!((resharded.bytes, resharded.route), (24, DataRoute::Process));
/// let column = inference.debug_get_from_remote(&resharded.tensors["weight"], WorkerId(1)).wait()?;
/// let Content::Tensor(column) = column else { panic!("no tensor") };
/// assert_eq!(column.shape(), [2, 1]);
/// assert_eq!(column.read()?.as_slice::<f32>()?, [2.0, 5.0]);
/// # Ok::<(), disco::DiscoError>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing is brought anywhere before it is started"]
pub struct Reshard {
    from: DiscoSession,
    to: DiscoSession,
    tensors: Vec<Wanted>,
    device: Option<VirtualDevice>,
    is_direct: bool,
}

/// A tensor that is to be resharded.
#[derive(Debug)]
struct Wanted {
    name: String,
    part: DRef,
    dtype: DataType,
    shape: Vec<i64>,
    from: Cut,
    to: Cut,
    /// Tensors that are to be filled, if there are any.
    filled: Option<DRef>,
}

/// Tensors that have been resharded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resharded {
    /// The tensors by their names: each worker of the session that gets them has its part.
    pub tensors: BTreeMap<String, DRef>,
    /// Bytes that have been moved.
    pub bytes: u64,
    /// Route that they have taken.
    pub route: DataRoute,
}

/// Route that the data of a reshard takes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DataRoute {
    /// From memory to memory of one process, in which all workers are threads.
    Process,
    /// Through memory that the workers of one machine share, or by reading from each other.
    SharedMemory,
    /// Over connections from worker to worker.
    Sockets {
        /// True if they are encrypted.
        encrypted: bool,
    },
    /// Through the controller, piece by piece.
    Controller {
        /// Reason why the workers did not reach each other.
        reason: String,
    },
}

impl Reshard {
    /// Begins a reshard from the workers of one session to those of another one.
    pub fn new(from: &DiscoSession, to: &DiscoSession) -> Self {
        Self { from: from.clone(), to: to.clone(), tensors: Vec::new(), device: None, is_direct: false }
    }

    /// Adds a tensor of this type and shape. The workers that have it hold `part`, cut as `from`
    /// says; the others get theirs cut as `to` says.
    pub fn tensor(
        mut self,
        name: impl Into<String>,
        part: &DRef,
        dtype: DataType,
        shape: impl Into<Vec<i64>>,
        from: Cut,
        to: Cut,
    ) -> Self {
        let (name, shape) = (name.into(), shape.into());
        self.tensors.push(Wanted { name, part: part.clone(), dtype, shape, from, to, filled: None });
        self
    }

    /// Has the tensor that was added last fill these tensors, which have to be cut as was said,
    /// instead of new ones. If the reshard fails, they have some of the elements and not others.
    pub fn fill(mut self, tensors: &DRef) -> Self {
        if let Some(last) = self.tensors.last_mut() {
            last.filled = Some(tensors.clone());
        }
        self
    }

    /// Constraint on the device of the new tensors, as [`empty`](DiscoSession::empty) takes it.
    /// Default: the workers' default devices.
    pub fn device(mut self, device: VirtualDevice) -> Self {
        self.device = Some(device);
        self
    }

    /// Has the data never go through the controller: workers that cannot reach each other are an
    /// error. Default: it does where it has to.
    pub fn direct(mut self) -> Self {
        self.is_direct = true;
        self
    }

    /// Starts it. The workers do it behind all commands that both sessions have been given before,
    /// and it resolves when all have done so. Until then no command may write to the tensors that
    /// are brought, or set their registers: the copies could be of neither state.
    ///
    /// Nothing is moved, and no command fails, if tensors cannot be cut as was said, are of another
    /// type or shape, or if there are elements that no worker has. When a worker fails or dies
    /// meanwhile, all others of both sessions stop and say so, and there are no new tensors:
    /// the error names the session and the worker. The failures of workers that have stopped are
    /// also reported by the next [`sync_all`](DiscoSession::sync_all) of either session.
    pub fn start(self) -> Completion<Resharded> {
        // Commands block while the workers are behind, so they are issued on a thread that may
        // block.
        Completion::spawn(async move {
            let done = tokio::task::spawn_blocking(move || self.run()).await;
            done.map_err(|error| RpcError::internal(format!("a reshard panicked: {error}")))?
        })
    }

    fn run(self) -> Result<Resharded> {
        if std::sync::Arc::ptr_eq(self.from.controller(), self.to.controller()) {
            let text = "a reshard within one session: its workers have collectives for that, such as all_to_all";
            return Err(DiscoError::invalid(text));
        }
        let (from, to) = (Side::of(&self.from), Side::of(&self.to));
        let tensors = self.cut_tensors()?;
        let moves = plan(&tensors, &|source, destination| are_near(&from, &to, source, destination))?;
        let bytes = moves.iter().map(|one| one.to.len).sum();
        let means = means(&from, &to);
        let ends = self.open(&from, &to, &means)?;
        self.check_parts(&tensors, &ends)?;
        let work = Work { reshard: &self, tensors: &tensors, moves: &moves };
        let outcome = match means {
            Means::None(reason) => Err(Unreachable(reason)),
            _ => work.directly(&from, &to, &ends, &means)?,
        };
        let (received, route) = match outcome {
            Ok(done) => done,
            Err(Unreachable(reason)) if self.is_direct => {
                let text = format!("the workers of two sessions have no way to each other: {reason}");
                return Err(RpcError::unsupported(text).into());
            }
            Err(Unreachable(reason)) => {
                tracing::info!(%reason, "the data of a reshard goes through the controller");
                (work.through_controller()?, DataRoute::Controller { reason })
            }
        };
        let tensor = Session::To.named(self.to.get_global_func("disco.reshard.tensor"))?;
        let tensors = (0..).zip(&self.tensors).map(|(number, wanted): (u32, _)| {
            Ok((wanted.name.clone(), Session::To.named(tensor.call((&received, number)))?))
        });
        Ok(Resharded { tensors: tensors.collect::<Result<_>>()?, bytes, route })
    }

    /// Returns all tensors, with the parts of the workers.
    fn cut_tensors(&self) -> Result<Vec<CutTensor>> {
        let mut names = std::collections::HashSet::new();
        let cut = |wanted: &Wanted| {
            let Wanted { name, dtype, shape, .. } = wanted;
            let cut = |side: &DiscoSession, cut: &Cut| cut.regions(side.controller().layout, shape);
            let regions = || Ok((cut(&self.from, &wanted.from)?, cut(&self.to, &wanted.to)?));
            let (from, to) = regions().map_err(|error: RpcError| error.context(format_args!("tensor '{name}'")))?;
            Ok(CutTensor { name: name.clone(), dtype: *dtype, shape: shape.clone(), from, to })
        };
        if let Some(twice) = self.tensors.iter().find(|wanted| !names.insert(&wanted.name)) {
            return Err(DiscoError::invalid(format!("two tensors of a reshard have the name '{}'", twice.name)));
        }
        self.tensors.iter().map(cut).collect()
    }

    /// Returns the references to the parts that the workers have.
    fn parts(&self) -> Vec<&DRef> {
        self.tensors.iter().map(|wanted| &wanted.part).collect()
    }

    /// Returns the references to the tensors that are to be filled; none for new ones.
    fn filled(&self) -> Vec<Option<&DRef>> {
        self.tensors.iter().map(|wanted| wanted.filled.as_ref()).collect()
    }

    /// Has all workers say how others reach them, and what they have.
    fn open(&self, from: &Side, to: &Side, means: &Means) -> Result<Ends> {
        let ranks = self.from.num_workers().saturating_add(self.to.num_workers());
        let open = |whose: Session,
                    session: &DiscoSession,
                    side: &Side,
                    parts: Vec<Option<&DRef>>,
                    segment: u32|
         -> Result<_> {
            let listen = if *means == Means::Sockets { side.listen() } else { Vec::new() };
            let request = ReshardRequest { listen, segment };
            let opened = whose.call(session, "disco.reshard.open", (Pack(request), parts))?;
            let ends = whose.call(session, "disco.reshard.describe", (&opened,))?;
            Ok((opened, of_all(session, &ends)))
        };
        let segment = if *means == Means::Memory { ranks } else { 0 };
        let (opened_sources, sources) =
            open(Session::From, &self.from, from, self.parts().into_iter().map(Some).collect(), segment)?;
        let (opened_destinations, destinations) = open(Session::To, &self.to, to, self.filled(), 0)?;
        let sources = collect(Session::From, sources, unpack)?;
        let destinations = collect(Session::To, destinations, unpack)?;
        Ok(Ends { opened_sources, opened_destinations, sources, destinations })
    }

    /// Checks that the workers have what the caller says.
    fn check_parts(&self, tensors: &[CutTensor], ends: &Ends) -> Result<()> {
        for (number, (tensor, wanted)) in tensors.iter().zip(&self.tensors).enumerate() {
            let sides = [(Session::From, &ends.sources, &tensor.from, &wanted.from, true)];
            let filled = (Session::To, &ends.destinations, &tensor.to, &wanted.to, wanted.filled.is_some());
            for (session, ends, regions, cut, _) in sides.into_iter().chain([filled]).filter(|(.., there)| *there) {
                for (worker, (end, region)) in ends.iter().zip(regions).enumerate() {
                    let expected = TensorPart { dtype: tensor.dtype, shape: region.shape() };
                    let found = end.tensors.get(number).and_then(Option::as_ref);
                    if found == Some(&expected) {
                        continue;
                    }
                    let found = found.map_or_else(|| "nothing".to_owned(), TensorPart::to_string);
                    return Err(DiscoError::invalid(format!(
                        "tensor '{}' of {} {:?}, {cut}: worker {worker} of the session that {session} the tensors has \
                         {found} of it, and was to have {expected}",
                        tensor.name, tensor.dtype, tensor.shape
                    )));
                }
            }
        }
        Ok(())
    }
}

/// The workers of both sessions, as they can be reached.
struct Ends {
    opened_sources: DRef,
    opened_destinations: DRef,
    sources: Vec<WorkerEnd>,
    destinations: Vec<WorkerEnd>,
}

/// Workers did not reach each other, for this reason.
struct Unreachable(String);

/// A reshard that has been planned.
struct Work<'a> {
    reshard: &'a Reshard,
    tensors: &'a [CutTensor],
    moves: &'a [Move],
}

/// Held while commands by which workers of two sessions wait for each other are issued to both, so
/// that those of several reshards are in the same order everywhere.
static ISSUING: Mutex<()> = Mutex::new(());

impl Work<'_> {
    fn from(&self) -> &DiscoSession {
        &self.reshard.from
    }

    fn to(&self) -> &DiscoSession {
        &self.reshard.to
    }

    /// Has the workers meet, and move the data themselves. The result is the tensors of each worker
    /// in one register.
    fn directly(
        &self,
        from: &Side,
        to: &Side,
        ends: &Ends,
        means: &Means,
    ) -> Result<std::result::Result<(DRef, DataRoute), Unreachable>> {
        let number = exchange_number()?;
        let (meeting, route) = self.meeting(from, to, ends, means)?;
        let joined = self.join(number, meeting, ends);
        let (sources, destinations) = match joined {
            Ok(Ok(joined)) => joined,
            // The others wait for the one that has failed.
            Ok(Err(Unreachable(reason))) => {
                self.end(number, &RpcError::new(ErrorKind::Unsupported, reason.clone()));
                return Ok(Err(Unreachable(reason)));
            }
            Err(error) => {
                self.end(number, &error.cause().clone());
                return Err(error);
            }
        };
        let received = self.move_all(&sources, &destinations);
        let received = received.inspect_err(|error| self.end(number, error.cause()))?;
        Ok(Ok((received, route)))
    }

    /// Returns how the workers meet.
    fn meeting(&self, from: &Side, to: &Side, ends: &Ends, means: &Means) -> Result<(Meeting, DataRoute)> {
        let mut all = ends.sources.iter().chain(&ends.destinations);
        if *means == Means::Memory {
            let process = ends.sources.first().map(|end| &end.process);
            if all.all(|end| Some(&end.process) == process) {
                return Ok((Meeting::Process { key: SessionKey::generate()? }, DataRoute::Process));
            }
            #[cfg(target_os = "linux")]
            if let Some(ticket) = ends.sources.first().and_then(|end| end.ticket.clone()) {
                return Ok((Meeting::Segment { ticket }, DataRoute::SharedMemory));
            }
            return Err(RpcError::new(ErrorKind::Protocol, "worker 0 has made no segment for a reshard").into());
        }
        let advertised = |session: &DiscoSession, ends: &[WorkerEnd]| {
            let advertise = session.controller().options.advertise.clone();
            let address = move |(worker, end): (u32, &WorkerEnd)| {
                let missing = || RpcError::new(ErrorKind::Protocol, format!("worker {worker} does not listen"));
                let bound = end.address.ok_or_else(missing)?;
                Ok(advertise.as_ref().map_or(bound, |advertise| advertise.address(WorkerId(worker), bound)))
            };
            (0..).zip(ends).map(address).collect::<rpc_core::Result<Vec<_>>>()
        };
        let mut addresses = advertised(self.from(), &ends.sources)?;
        addresses.extend(advertised(self.to(), &ends.destinations)?);
        let encrypt = is_encrypted(from, to);
        let (key, locations) = (SessionKey::generate()?, locations(from, to));
        Ok((Meeting::Sockets { key, encrypt, addresses, locations }, DataRoute::Sockets { encrypted: encrypt }))
    }

    /// Has all workers join each other.
    fn join(
        &self,
        number: u64,
        meeting: Meeting,
        ends: &Ends,
    ) -> Result<std::result::Result<(DRef, DRef), Unreachable>> {
        let sources = self.from().num_workers();
        let request = JoinRequest {
            number,
            first: 0,
            sources,
            size: sources + self.to().num_workers(),
            timeouts: self.timeouts(&meeting),
            meeting,
        };
        let join = |whose: Session, session: &DiscoSession, opened: &DRef, first: u32| -> Result<_> {
            let request = JoinRequest { first, ..request.clone() };
            let joined = whose.call(session, "disco.reshard.join", (opened, Pack(request)))?;
            let failure = whose.call(session, "disco.reshard.failure", (&joined,))?;
            Ok((joined, of_all(session, &failure)))
        };
        let issuing = ISSUING.lock();
        let (source, told_sources) = join(Session::From, self.from(), &ends.opened_sources, 0)?;
        let (destination, told_destinations) = join(Session::To, self.to(), &ends.opened_destinations, sources)?;
        drop(issuing);
        let mut answers = Answers::default();
        answers.add(Session::From, told_sources);
        answers.add(Session::To, told_destinations);
        // A worker that has failed says why, and the others wait for it until they are told.
        let failed = answers.wait(|session, worker, content| match content {
            Content::Value(Value::Null) => Ok(None),
            Content::Value(Value::Str(reason)) => {
                Ok(Some(Unreachable(format!("worker {worker} of the session that {session} the tensors: {reason}"))))
            }
            other => Err(unexpected(&other)),
        })?;
        Ok(match failed {
            Some(unreachable) => Err(unreachable),
            None => Ok((source, destination)),
        })
    }

    /// Returns the time limits of both sessions: of each the longer one.
    fn timeouts(&self, meeting: &Meeting) -> CollectiveTimeouts {
        let [a, b] = [self.from(), self.to()].map(|session| CollectiveTimeouts::of(&session.controller().options));
        let (direct, join) = (a.direct.max(b.direct), a.join.max(b.join));
        // All are there: they have just said where they listen. If some cannot reach others, there
        // is another way, which is not kept waiting for as long as collectives would be.
        let is_short = matches!(meeting, Meeting::Sockets { .. }) && !self.reshard.is_direct;
        CollectiveTimeouts {
            entry: a.entry.zip(b.entry).map(|(a, b)| a.max(b)),
            stall: a.stall.max(b.stall),
            join: if is_short { join.min(4 * direct) } else { join },
            direct,
        }
    }

    /// Has all workers send and receive, and waits for them.
    fn move_all(&self, sources: &DRef, destinations: &DRef) -> Result<DRef> {
        let first = self.from().num_workers();
        let tasks_of_sources = self.set_tasks(Session::From, |worker| {
            let own = self.moves.iter().filter(|one| one.source == worker);
            let moves = own.map(|one| worker_move(one, one.destination + first, one.from.clone())).collect();
            WorkerTask { moves, parts: Vec::new(), device: None }
        })?;
        let tasks_of_destinations = self.set_tasks(Session::To, |worker| self.task_of_destination(worker))?;
        let issuing = ISSUING.lock();
        let args = (sources, &tasks_of_sources, self.reshard.parts());
        let sent = Session::From.call(self.from(), "disco.reshard.send", args)?;
        let args = (destinations, &tasks_of_destinations, self.reshard.filled());
        let received = Session::To.call(self.to(), "disco.reshard.receive", args)?;
        drop(issuing);
        let is_received = Session::To.call(self.to(), "disco.reshard.is_done", (&received,))?;
        let mut answers = Answers::default();
        answers.add(Session::From, of_all(self.from(), &sent));
        answers.add(Session::To, of_all(self.to(), &is_received));
        answers.wait(|_, _, _| Ok(None::<()>))?;
        Ok(received)
    }

    /// Returns the task of a worker that receives.
    fn task_of_destination(&self, worker: u32) -> WorkerTask {
        let own = self.moves.iter().filter(|one| one.destination == worker);
        let moves = own.map(|one| worker_move(one, one.source, one.to.clone())).collect();
        let part = |tensor: &CutTensor| TensorPart { dtype: tensor.dtype, shape: tensor.to[worker as usize].shape() };
        WorkerTask { moves, parts: self.tensors.iter().map(part).collect(), device: self.reshard.device.clone() }
    }

    /// Gives each worker of a session its task.
    fn set_tasks(&self, whose: Session, task: impl Fn(u32) -> WorkerTask) -> Result<DRef> {
        let session = match whose {
            Session::From => self.from(),
            Session::To => self.to(),
        };
        let set = |to: Option<&DRef>, worker| session.set_register(to, WorkerId(worker), Pack(task(worker)));
        let tasks = whose.named(set(None, 0))?;
        for worker in 1..session.num_workers() {
            whose.named(set(Some(&tasks), worker))?;
        }
        Ok(tasks)
    }

    /// Moves the data through the controller. The result is as that of
    /// [`directly`](Self::directly).
    fn through_controller(&self) -> Result<DRef> {
        let tasks =
            self.set_tasks(Session::To, |worker| WorkerTask { moves: Vec::new(), ..self.task_of_destination(worker) })?;
        let received = Session::To.call(self.to(), "disco.reshard.allocate", (&tasks, self.reshard.filled()))?;
        let (from, to, parts) = (self.from(), self.to(), self.reshard.parts());
        let done = Relay { from, to, parts, moves: self.moves }.run(&received)?;
        collect(Session::To, of_all(self.to(), &done), |_| Ok(()))?;
        Ok(received)
    }

    /// Ends the exchange on all workers of both sessions, which may wait for each other.
    fn end(&self, number: u64, cause: &RpcError) {
        for session in [self.from(), self.to()] {
            session.controller().links().iter().for_each(|link| link.break_collectives(number, cause, false));
        }
    }
}

fn worker_move(one: &Move, peer: u32, runs: super::byte_runs::ByteRuns) -> WorkerMove {
    WorkerMove { tensor: one.tensor as u32, peer, runs, piece: piece_len(&one.from, &one.to) }
}

/// Returns a number for an exchange, which no other one has.
fn exchange_number() -> Result<u64> {
    let mut bytes = [0; 8];
    SystemRandom::new().fill(&mut bytes).map_err(|_| RpcError::internal("the system gives no random numbers"))?;
    Ok(u64::from_le_bytes(bytes) & (EXCHANGE - 1) | EXCHANGE)
}

/// Answers of workers of both sessions that have not come yet.
#[derive(Default)]
struct Answers(Vec<Option<(Session, u32, Completion<Content>)>>);

impl Answers {
    fn add(&mut self, session: Session, answers: Vec<Completion<Content>>) {
        self.0.extend((0..).zip(answers).map(|(worker, answer)| Some((session, worker, answer))));
    }

    /// Waits until all are there, or `stops` gives something for one. The first error ends it.
    fn wait<T>(mut self, mut stops: impl FnMut(Session, u32, Content) -> Result<Option<T>>) -> Result<Option<T>> {
        let mut poll_all = move |cx: &mut std::task::Context<'_>| {
            for slot in &mut self.0 {
                let Some((session, worker, answer)) = slot else { continue };
                let Poll::Ready(content) = Pin::new(answer).poll(cx) else { continue };
                let (session, worker) = (*session, *worker);
                *slot = None;
                match session.named(content).and_then(|content| stops(session, worker, content)) {
                    Ok(None) => {}
                    stop => return Poll::Ready(stop),
                }
            }
            if self.0.iter().all(Option::is_none) { Poll::Ready(Ok(None)) } else { Poll::Pending }
        };
        blocking::block_on(poll_fn(&mut poll_all))?
    }
}

/// Waits for the answers of one session.
fn collect<T>(
    session: Session,
    answers: Vec<Completion<Content>>,
    mut read: impl FnMut(Content) -> Result<T>,
) -> Result<Vec<T>> {
    let read = |answer: Completion<Content>| session.named(answer.wait()).and_then(&mut read);
    answers.into_iter().map(read).collect()
}

fn unpack<T: DeserializeOwned>(content: Content) -> Result<T> {
    match content {
        Content::Value(Value::Packed(packed)) => Ok(Packed::decode(&packed)?),
        other => Err(unexpected(&other)),
    }
}

fn unexpected(content: &Content) -> DiscoError {
    RpcError::new(ErrorKind::Protocol, format!("a worker answers a reshard with {content:?}")).into()
}

impl fmt::Display for DataRoute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Process => f.write_str("within one process"),
            Self::SharedMemory => f.write_str("through shared memory"),
            Self::Sockets { encrypted: false } => f.write_str("over sockets"),
            Self::Sockets { encrypted: true } => f.write_str("over encrypted sockets"),
            Self::Controller { reason } => write!(f, "through the controller, because {reason}"),
        }
    }
}
