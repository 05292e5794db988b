//! Runs a plan: starts every step as soon as its inputs are there.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};

use bytes::Bytes;

use super::graph::{Argument, CallId, InputId, ValueId};
use super::pipeline::{CONFIRM, MAX_KEPT, MAX_RESULTS, MAX_STEPS, StepLane, Submitted};
use super::plan::{Location, Plan, PlannedStep, Step, Tensor, TensorIndex};
use super::schedule::{Schedule, Uses, made_by, needed};
use crate::client::action::{Action, Options, Pending, ScopedAction};
use crate::client::references::{RemoteFunction, RemoteTensor};
use crate::client::session::Session;
use crate::client::{CHUNK, SendRoute};
use crate::device::virtual_device::GLOBAL;
use crate::dlpack::dense_size;
use crate::error::{Result, RpcError};
use crate::function::convert::{ArgScope, IntoArg, IntoArgs};
use crate::session::Lane;
use crate::value::Value;

/// First lane for the copies of runs. They have lanes of their own, so that none waits for another,
/// nor for the requests of the session's user.
const FIRST_LANE: u32 = 1 << 30;

/// Number of lanes that runs of this process have taken so far.
static LANES_TAKEN: AtomicU32 = AtomicU32::new(0);

/// Data of an input.
#[derive(Clone, Debug)]
pub enum InputData {
    /// The elements, densely packed, little-endian. They are written to a fresh tensor.
    Bytes(Bytes),
    /// A tensor at the location that the plan has for the input, in the memory scope `global`:
    /// constrain the input to it. The graph only reads the tensor.
    Tensor(RemoteTensor),
    /// A tensor like [`Tensor`](Self::Tensor) in another memory scope of its device, which has to
    /// be that of the plan.
    TensorInScope {
        /// The tensor.
        tensor: RemoteTensor,
        /// Memory scope in which it was allocated. A tensor does not tell that itself.
        memory_scope: String,
    },
}

impl From<Bytes> for InputData {
    fn from(bytes: Bytes) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<Vec<u8>> for InputData {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(bytes.into())
    }
}

impl From<RemoteTensor> for InputData {
    fn from(tensor: RemoteTensor) -> Self {
        Self::Tensor(tensor)
    }
}

/// Outcome of a [run](Plan::run_reported).
#[derive(Debug)]
#[non_exhaustive]
pub struct RunReport {
    /// The outputs, by their names.
    pub outputs: BTreeMap<String, RemoteTensor>,
    /// The copies, in the order of the plan.
    pub copies: Vec<CopyReport>,
}

/// A copy of a run, and the route that its bytes have taken.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CopyReport {
    /// The step of the plan.
    pub step: Step,
    /// Route of the bytes.
    pub route: SendRoute,
}

impl Plan {
    /// Runs the plan on these sessions, by the names of their sites, and these inputs, by their
    /// names. The outputs are tensors, by name; all other tensors of the run are freed as soon as
    /// no step needs them.
    ///
    /// Calls run concurrently, also those of one session: independent steps may run at the same
    /// time. A failure ends the run and cancels steps that have not begun. Copies between two
    /// sessions are [sends](Session::send): they go from server to server where these allow it.
    ///
    /// Steps of one session that follow from each other do not wait for each other at the client,
    /// if the session keeps results ([`Pipe`](crate::Pipe)) and has the function `rpc.echo`, as
    /// `rpc-server` does: after the look-up of its functions, such a chain takes one round trip for
    /// every 16 steps. An input of more than a MiB, a call of more than 8 results, and a tensor
    /// that steps on several branches need, are waited for.
    ///
    /// # Errors
    ///
    /// A session or an input that is missing, unknown, or does not fit; or the error of a step,
    /// with the step's name.
    pub fn run<'a>(
        &'a self,
        sessions: &'a [(&'a str, Session)],
        inputs: Vec<(&'a str, InputData)>,
    ) -> ScopedAction<'a, BTreeMap<String, RemoteTensor>> {
        ScopedAction::steps(async move |options| Ok(run(self, sessions, inputs, options).await?.outputs))
    }

    /// Runs the plan like [`run`](Self::run), and reports the route of each copy.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn run_reported<'a>(
        &'a self,
        sessions: &'a [(&'a str, Session)],
        inputs: Vec<(&'a str, InputData)>,
    ) -> ScopedAction<'a, RunReport> {
        ScopedAction::steps(move |options| run(self, sessions, inputs, options))
    }
}

type Running<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

async fn run<'a>(
    plan: &'a Plan,
    sessions: &'a [(&'a str, Session)],
    inputs: Vec<(&'a str, InputData)>,
    options: Options<'a>,
) -> Result<RunReport> {
    let inputs = named_inputs(plan, inputs)?;
    let lanes = LANES_TAKEN.fetch_add(u32::try_from(plan.planned.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    let sessions = used_sessions(plan, sessions)?;
    let (functions, confirm, options) = (BTreeMap::new(), BTreeMap::new(), options.without_progress());
    let runner = Runner { plan, functions, confirm, sessions, inputs, lanes, options };
    let (functions, confirm) = runner.find_functions().await?;
    let runner = Runner { functions, confirm, ..runner };
    let schedule = Schedule::new(plan, |step| runner.is_pipelined(step));
    let mut progress = Progress::new(&runner, &schedule);
    let mut waiting: Vec<usize> = (0..plan.planned.len()).collect();
    // In the order in which the steps began, so that the first failure on a lane is found first.
    let mut running: Vec<(usize, Running<'_, Made>)> = Vec::new();
    let mut routes = BTreeMap::new();
    loop {
        for may_exceed in [false, true] {
            // One step is begun beyond the limits if none is left within them.
            waiting.retain(|step| match progress.begin(*step, may_exceed && running.is_empty()) {
                Some(begun) => {
                    running.push((*step, begun));
                    false
                }
                None => true,
            });
            if !running.is_empty() {
                break;
            }
        }
        if running.is_empty() {
            break;
        }
        let (at, made) = first_of(&mut running).await;
        let (step, _) = running.remove(at);
        let mut made = made
            .map_err(|error| error.context(plan.steps().nth(step).map_or_else(String::new, |step| step.to_string())))?;
        routes.extend(made.route.take().map(|route| (step, route)));
        progress.end(step, made);
    }
    let Progress { tensors, frees, .. } = progress;
    for free in frees {
        // A tensor that could not be freed goes with its reference.
        let _ = free.await;
    }
    let outputs = plan.output_names().map(|(name, slot)| Some((name.to_owned(), tensors[slot].elsewhere.clone()?)));
    let outputs = outputs.collect::<Option<_>>();
    let outputs = outputs.ok_or_else(|| RpcError::internal("a plan ended without its outputs"))?;
    let copies = plan.steps().enumerate();
    let copies = copies.filter_map(|(at, step)| routes.remove(&at).map(|route| CopyReport { step, route }));
    Ok(RunReport { outputs, copies: copies.collect() })
}

/// The tensors of a run, as far as its steps have come.
struct Progress<'a> {
    runner: &'a Runner<'a>,
    schedule: &'a Schedule,
    tensors: Vec<TensorState>,
    /// Shares of the sessions in what is pipelined, by their names.
    loads: BTreeMap<&'a str, Load>,
    /// Requests that free tensors of lanes.
    frees: Vec<Pending<()>>,
}

/// Load of a session by steps that are pipelined.
#[derive(Default)]
struct Load {
    steps: usize,
    tensors: usize,
}

/// A tensor of a run.
struct TensorState {
    /// The tensor for steps that follow on its lane, once its own step is submitted, and until the
    /// last of them is.
    on_lane: Option<RemoteTensor>,
    /// The tensor for all other steps, once its own has ended, and until the last of them has.
    elsewhere: Option<RemoteTensor>,
    /// Uses to come. Those as an output last to the end.
    uses: Uses,
}

impl<'a> Progress<'a> {
    fn new(runner: &'a Runner<'a>, schedule: &'a Schedule) -> Self {
        let state = |slot| TensorState { on_lane: None, elsewhere: None, uses: schedule.uses(slot) };
        let tensors = (0..runner.plan.tensors.len()).map(state).collect();
        Self { runner, schedule, tensors, loads: BTreeMap::new(), frees: Vec::new() }
    }

    /// Begins a step, if all that it needs is there, and its session has not too much to do or to
    /// keep, or the step may exceed that.
    fn begin(&mut self, step: usize, may_exceed: bool) -> Option<Running<'a, Made>> {
        let planned = &self.runner.plan.planned[step];
        let given = |slot: TensorIndex| match self.schedule.follows(step, slot) {
            true => self.tensors[slot].on_lane.clone(),
            false => self.tensors[slot].elsewhere.clone(),
        };
        let given = needed(planned).map(given).collect::<Option<Vec<_>>>()?;
        let Some(lane) = self.schedule.lane(step) else {
            return Some(Box::pin(self.runner.step(step, given)));
        };
        let name = self.runner.session_of(step);
        let keeps_more = self.keeps_more(step);
        let load = self.loads.entry(name).or_default();
        if !may_exceed && (load.steps >= MAX_STEPS || keeps_more && load.tensors >= MAX_KEPT) {
            return None;
        }
        load.steps += 1;
        let lane = self.runner.step_lane(name, lane);
        Some(match self.submit(step, given, lane) {
            Ok(made) => made,
            Err(error) => Box::pin(async { Err(error) }),
        })
    }

    /// Returns true if more tensors are kept for steps to come after this step than before it.
    fn keeps_more(&self, step: usize) -> bool {
        let planned = &self.runner.plan.planned[step];
        let mut last: Vec<_> = needed(planned).filter(|slot| self.schedule.follows(step, *slot)).collect();
        let uses = last.clone();
        last.sort_unstable();
        last.dedup();
        let is_last =
            |slot: &&TensorIndex| self.tensors[**slot].uses.on_lane == uses.iter().filter(|used| used == slot).count();
        let made = made_by(planned).filter(|slot| self.schedule.uses(*slot).on_lane > 0).count();
        made > last.iter().filter(is_last).count()
    }

    /// Submits a step that is pipelined.
    fn submit(
        &mut self,
        step: usize,
        given: Vec<RemoteTensor>,
        lane: Option<StepLane<'a>>,
    ) -> Result<Running<'a, Made>> {
        let planned = &self.runner.plan.planned[step];
        let lane = lane.ok_or_else(|| RpcError::internal("a step was pipelined on a session that keeps no results"))?;
        let Submitted { ended, results, frees } =
            self.runner.submit(planned, &given, &lane, |slot| self.schedule.uses(slot))?;
        self.frees.extend(frees);
        let load = self.loads.entry(self.runner.session_of(step)).or_default();
        let mut elsewhere = Vec::with_capacity(results.len());
        for (slot, result) in made_by(planned).zip(results) {
            load.tensors += usize::from(result.on_lane.is_some());
            self.tensors[slot].on_lane = result.on_lane;
            elsewhere.push(result.elsewhere);
        }
        drop(given);
        for slot in needed(planned).filter(|slot| self.schedule.follows(step, *slot)) {
            let state = &mut self.tensors[slot];
            state.uses.on_lane -= 1;
            if state.uses.on_lane == 0 {
                load.tensors -= usize::from(state.on_lane.is_some());
                self.frees.extend(state.on_lane.take().map(|tensor| lane.free(tensor)));
            }
        }
        let route = matches!(planned, PlannedStep::Copy { .. }).then_some(SendRoute::SameSession);
        Ok(Box::pin(async move {
            ended.await?;
            let mut tensors = Vec::with_capacity(elsewhere.len());
            for pending in elsewhere {
                tensors.push(match pending {
                    Some(tensor) => Some(tensor.await?),
                    None => None,
                });
            }
            Ok(Made { tensors, route })
        }))
    }

    /// Records what a step has made, and lets go of what it was the last to use.
    fn end(&mut self, step: usize, made: Made) {
        let planned = &self.runner.plan.planned[step];
        if self.schedule.lane(step).is_some() {
            self.loads.entry(self.runner.session_of(step)).or_default().steps -= 1;
        }
        for (slot, tensor) in made_by(planned).zip(made.tensors) {
            let state = &mut self.tensors[slot];
            state.elsewhere = tensor.filter(|_| state.uses.elsewhere > 0);
        }
        for slot in needed(planned).filter(|slot| !self.schedule.follows(step, *slot)) {
            let state = &mut self.tensors[slot];
            state.uses.elsewhere -= 1;
            if state.uses.elsewhere == 0 {
                state.elsewhere = None;
            }
        }
    }
}

/// Results of a step.
struct Made {
    /// The tensors; `None` for one that only later steps of the same lane use.
    tensors: Vec<Option<RemoteTensor>>,
    /// Route of a copy.
    route: Option<SendRoute>,
}

impl From<Vec<RemoteTensor>> for Made {
    fn from(tensors: Vec<RemoteTensor>) -> Self {
        Self { tensors: tensors.into_iter().map(Some).collect(), route: None }
    }
}

/// Waits until one of several futures has completed. Returns its position and result: of a step
/// that has failed and of those that failed with it, the first one.
async fn first_of<T>(running: &mut [(usize, Running<'_, T>)]) -> (usize, Result<T>) {
    fn completed<T>(running: &mut [(usize, Running<'_, T>)], cx: &mut Context<'_>) -> Option<(usize, Result<T>)> {
        running.iter_mut().enumerate().find_map(|(at, (_, one))| match one.as_mut().poll(cx) {
            Poll::Ready(outcome) => Some((at, outcome)),
            Poll::Pending => None,
        })
    }
    poll_fn(|cx| match completed(running, cx) {
        // The cause may have come since its step was asked for it: it is told before what follows
        // from it.
        Some((at, Err(error))) => {
            Poll::Ready(completed(&mut running[..at], cx).filter(|(_, one)| one.is_err()).unwrap_or((at, Err(error))))
        }
        Some(one) => Poll::Ready(one),
        None => Poll::Pending,
    })
    .await
}

/// Returns the inputs, in the order of the graph.
fn named_inputs(plan: &Plan, given: Vec<(&str, InputData)>) -> Result<Vec<InputData>> {
    let count = given.len();
    let mut given: BTreeMap<&str, InputData> = given.into_iter().collect();
    if given.len() < count {
        return Err(RpcError::invalid_argument("an input is given twice"));
    }
    let inputs = plan.graph.inputs.iter().map(|input| {
        given
            .remove(&*input.name)
            .ok_or_else(|| RpcError::invalid_argument(format!("input '{}' is missing", input.name)))
    });
    let inputs = inputs.collect::<Result<_>>()?;
    match given.keys().next() {
        Some(name) => Err(RpcError::invalid_argument(format!("the graph has no input '{name}'"))),
        None => Ok(inputs),
    }
}

/// Returns the sessions that the plan uses.
fn used_sessions<'a>(plan: &Plan, given: &'a [(&str, Session)]) -> Result<BTreeMap<String, &'a Session>> {
    for (number, (name, _)) in given.iter().enumerate() {
        if given[..number].iter().any(|(other, _)| other == name) {
            return Err(RpcError::invalid_argument(format!("session '{name}' is given twice")));
        }
    }
    let used = plan.tensors.iter().map(|tensor| &tensor.location);
    let used = used.chain(plan.planned.iter().filter_map(|step| match step {
        PlannedStep::Call { location, .. } => Some(location),
        _ => None,
    }));
    let session = |name: &String| {
        let found = given.iter().find(|(given, _)| given == name);
        found.map(|(_, session)| session).ok_or_else(|| {
            RpcError::invalid_argument(format!("the plan uses session '{name}', which it was not given"))
        })
    };
    used.map(|location| Ok((location.session.clone(), session(&location.session)?))).collect()
}

/// Functions by session and name.
type Functions = BTreeMap<(String, String), RemoteFunction>;

struct Runner<'a> {
    plan: &'a Plan,
    sessions: BTreeMap<String, &'a Session>,
    functions: Functions,
    /// The function [`CONFIRM`], by session: of those that pipeline steps.
    confirm: BTreeMap<String, RemoteFunction>,
    inputs: Vec<InputData>,
    /// First lane of this run, relative to `FIRST_LANE`.
    lanes: u32,
    /// Options of the run. Its steps take their lanes from the plan.
    options: Options<'static>,
}

impl Runner<'_> {
    /// Finds the functions that the plan calls, and [`CONFIRM`].
    async fn find_functions(&self) -> Result<(Functions, BTreeMap<String, RemoteFunction>)> {
        let find = |session: &Session, name| self.options.limit(session.get_function(name).concurrent()).start();
        let mut pending = BTreeMap::new();
        for step in &self.plan.planned {
            if let PlannedStep::Call { call, location, .. } = step {
                let name = &self.plan.graph.calls[call.0].function;
                let session = self.sessions[&location.session];
                let key = (location.session.clone(), name.clone());
                pending.entry(key).or_insert_with(|| find(session, name));
            }
        }
        let keeping = self.sessions.iter().filter(|(_, session)| session.shared().keeps_results());
        let confirming: Vec<_> = keeping.map(|(name, session)| (name.clone(), find(session, CONFIRM))).collect();
        let mut functions = BTreeMap::new();
        for (key, function) in pending {
            let function = function.await.map_err(|error| error.context(format!("session '{}'", key.0)))?;
            functions.insert(key, function);
        }
        let mut confirm = BTreeMap::new();
        for (name, function) in confirming {
            // A session without it, or whose policy withholds it, runs one step after the other.
            confirm.extend(function.await.ok().map(|function| (name, function)));
        }
        Ok((functions, confirm))
    }

    /// Returns true if a step is a single request to one session that can be submitted before the
    /// steps have ended that it depends on.
    fn is_pipelined(&self, step: usize) -> bool {
        let bytes = |value| match value {
            ValueId::Input(InputId(input)) => match &self.inputs[input] {
                InputData::Bytes(bytes) => Some(bytes),
                _ => None,
            },
            ValueId::Result(..) => None,
        };
        let tensors = &self.plan.tensors;
        let fits = match &self.plan.planned[step] {
            PlannedStep::Input { input, .. } => bytes((*input).into()).is_some_and(|bytes| bytes.len() <= CHUNK),
            PlannedStep::Copy { from, to } => {
                let is_within = tensors[*from].location.session == tensors[*to].location.session;
                is_within && bytes(tensors[*to].value).is_none()
            }
            PlannedStep::Call { results, .. } => results.len() <= MAX_RESULTS,
        };
        fits && self.confirm.contains_key(self.session_of(step))
    }

    /// Returns the name of the session where a step runs.
    fn session_of(&self, step: usize) -> &str {
        match &self.plan.planned[step] {
            PlannedStep::Input { to, .. } | PlannedStep::Copy { to, .. } => &self.plan.tensors[*to].location.session,
            PlannedStep::Call { location, .. } => &location.session,
        }
    }

    /// Returns a lane for pipelined steps of a session.
    fn step_lane<'b>(&'b self, session: &str, lane: usize) -> Option<StepLane<'b>> {
        let confirm = self.confirm.get(session)?;
        let (session, lane, options) = (self.sessions[session], self.lane_of(lane), &self.options);
        Some(StepLane { session, confirm, lane, options })
    }

    /// Submits a step with the tensors that it needs.
    fn submit(
        &self,
        step: &PlannedStep,
        given: &[RemoteTensor],
        lane: &StepLane<'_>,
        uses: impl Fn(TensorIndex) -> Uses,
    ) -> Result<Submitted> {
        let allocate = |slot: &TensorIndex| Ok((lane.allocate(&self.plan.tensors[*slot])?, uses(*slot)));
        match step {
            PlannedStep::Input { input, to } => {
                let InputData::Bytes(bytes) = &self.inputs[input.0] else {
                    return Err(RpcError::internal("a tensor that was given has no bytes"));
                };
                self.check_size(bytes, *to)?;
                let to = allocate(to)?;
                let write = lane.write(&to.0.tensor, bytes.clone());
                lane.submit(write, vec![to], |()| ())
            }
            PlannedStep::Copy { to, .. } => {
                let [from] = given else { return Err(RpcError::internal("a copy has no source")) };
                let to = allocate(to)?;
                let copy = lane.session.copy_among_remote(from, &to.0.tensor);
                lane.submit(copy, vec![to], |()| ())
            }
            PlannedStep::Call { call, location, results, .. } => {
                let results = results.iter().map(allocate).collect::<Result<Vec<_>>>()?;
                let made: Vec<_> = results.iter().map(|(fresh, _)| fresh.tensor.clone()).collect();
                let request = self.request(*call, location, given, &made);
                // The results are freed by their last use.
                drop(made);
                let session = lane.session.clone();
                lane.submit(request, results, move |returned: Value| session.release(&returned))
            }
        }
    }

    /// Runs a step with the tensors that it needs, and returns those that it makes.
    async fn step(&self, step: usize, needed: Vec<RemoteTensor>) -> Result<Made> {
        let lane = self.lane_of(step);
        match &self.plan.planned[step] {
            PlannedStep::Input { input, to } => Ok(vec![self.input(*input, *to, lane).await?].into()),
            PlannedStep::Copy { to, .. } => self.copy(&needed, *to, lane).await,
            PlannedStep::Call { call, location, results, .. } => {
                Ok(self.call(*call, location, needed, results).await?.into())
            }
        }
    }

    async fn input(&self, input: InputId, to: TensorIndex, lane: Lane) -> Result<RemoteTensor> {
        match &self.inputs[input.0] {
            InputData::Bytes(bytes) => self.written(bytes, to, lane).await,
            InputData::Tensor(given) => self.given(given, GLOBAL, to),
            InputData::TensorInScope { tensor, memory_scope } => self.given(tensor, memory_scope, to),
        }
    }

    /// Returns a tensor of the caller's that is to be the input, if it is where the plan has that.
    fn given(&self, given: &RemoteTensor, memory_scope: &str, to: TensorIndex) -> Result<RemoteTensor> {
        let Tensor { layout, location, .. } = &self.plan.tensors[to];
        given.reference_in(self.sessions[&location.session].shared())?;
        let fits = given.dtype() == layout.dtype && given.shape() == layout.shape && given.strides().is_none();
        if !fits || given.device() != location.device {
            let (dtype, shape) = (layout.dtype, &layout.shape);
            return Err(RpcError::invalid_argument(format!(
                "a densely packed tensor of {dtype} {shape:?} on {} is needed, but {given:?} was given",
                location.device
            )));
        }
        if memory_scope != location.memory_scope {
            return Err(RpcError::invalid_argument(format!(
                "a tensor in the memory scope '{}' is needed, but one in '{memory_scope}' was given",
                location.memory_scope
            )));
        }
        Ok(given.clone())
    }

    /// Allocates a tensor and writes these bytes to it.
    async fn written(&self, bytes: &Bytes, to: TensorIndex, lane: Lane) -> Result<RemoteTensor> {
        self.check_size(bytes, to)?;
        let tensor = &self.plan.tensors[to];
        let fresh = self.fresh(tensor).await?;
        let write = self.sessions[&tensor.location.session].copy_to_remote(&fresh, bytes.clone());
        self.options.limit(write.lane(lane)).await?;
        Ok(fresh)
    }

    /// Checks that these are all bytes of a tensor.
    fn check_size(&self, bytes: &Bytes, to: TensorIndex) -> Result<()> {
        let layout = &self.plan.tensors[to].layout;
        let wanted = dense_size(&layout.shape, layout.dtype)?;
        if bytes.len() as u64 != wanted {
            return Err(RpcError::invalid_argument(format!(
                "{wanted} bytes are needed, but {} were given",
                bytes.len()
            )));
        }
        Ok(())
    }

    /// Returns the lane of this run with this number. Each step has one of its own.
    fn lane_of(&self, step: usize) -> Lane {
        let taken = self.lanes.wrapping_add(step as u32);
        Lane(FIRST_LANE + taken % (Lane::CONCURRENT.0 - FIRST_LANE))
    }

    async fn fresh(&self, tensor: &Tensor) -> Result<RemoteTensor> {
        let Tensor { layout, location, .. } = tensor;
        let session = self.sessions[&location.session];
        let alloc = session.alloc_in_scope(location.device, layout.dtype, &layout.shape, Some(&location.memory_scope));
        self.options.limit(alloc.concurrent()).await
    }

    async fn copy(&self, from: &[RemoteTensor], slot: TensorIndex, lane: Lane) -> Result<Made> {
        let tensor = &self.plan.tensors[slot];
        // Bytes that this process sent need not be fetched again.
        if let ValueId::Input(input) = tensor.value
            && let InputData::Bytes(bytes) = &self.inputs[input.0]
        {
            let reason = "it has the bytes of this input".to_owned();
            let route = Some(SendRoute::ThroughClient { reason });
            return Ok(Made { tensors: vec![Some(self.written(bytes, slot, lane).await?)], route });
        }
        let [from] = from else { return Err(RpcError::internal("a copy has no source")) };
        let to = self.fresh(tensor).await?;
        let session = self.sessions[&tensor.location.session];
        let route = if from.reference_in(session.shared()).is_ok() {
            self.options.limit(session.copy_among_remote(from, &to).concurrent()).await?;
            SendRoute::SameSession
        } else {
            let send = from.session().send(from, session, &to);
            self.options.limit(send.lane(lane)).await?
        };
        Ok(Made { tensors: vec![Some(to)], route: Some(route) })
    }

    async fn call(
        &self,
        call: CallId,
        location: &Location,
        tensors: Vec<RemoteTensor>,
        results: &[TensorIndex],
    ) -> Result<Vec<RemoteTensor>> {
        let mut made = Vec::with_capacity(results.len());
        for slot in results {
            made.push(self.fresh(&self.plan.tensors[*slot]).await?);
        }
        let request = self.request(call, location, &tensors, &made);
        let returned = self.options.limit(request.concurrent()).await?;
        self.sessions[&location.session].release(&returned);
        Ok(made)
    }

    /// Returns the request that calls a function with these tensors.
    fn request(
        &self,
        call: CallId,
        location: &Location,
        tensors: &[RemoteTensor],
        results: &[RemoteTensor],
    ) -> Action<Value> {
        let call = &self.plan.graph.calls[call.0];
        let function = &self.functions[&(location.session.clone(), call.function.clone())];
        function.call(Arguments { arguments: &call.arguments, tensors, results })
    }
}

/// The arguments of a call, followed by its results.
struct Arguments<'a> {
    arguments: &'a [Argument],
    tensors: &'a [RemoteTensor],
    results: &'a [RemoteTensor],
}

impl IntoArgs for Arguments<'_> {
    fn into_args(self, scope: &mut ArgScope<'_>) -> Result<Vec<Value>> {
        let mut tensors = self.tensors.iter();
        let arguments = self.arguments.iter().map(|argument| match argument {
            Argument::Value(value) => Ok(value.clone()),
            Argument::Tensor(_) => match tensors.next() {
                Some(tensor) => tensor.into_arg(scope),
                None => Err(RpcError::internal("a call without a tensor that it takes")),
            },
        });
        let mut arguments = arguments.collect::<Result<Vec<_>>>()?;
        for result in self.results {
            arguments.push(result.into_arg(scope)?);
        }
        Ok(arguments)
    }
}
