//! Runs a plan: starts every step as soon as its inputs are there.

use std::collections::BTreeMap;
use std::future::{Future, IntoFuture, poll_fn};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Poll;

use bytes::{Bytes, BytesMut};

use super::graph::{Argument, CallId, InputId, ValueId};
use super::plan::{Location, Plan, PlannedStep, Tensor, TensorIndex};
use crate::client::action::{Options, ScopedAction};
use crate::client::references::{RemoteFunction, RemoteTensor};
use crate::client::session::Session;
use crate::device::virtual_device::GLOBAL;
use crate::dlpack::dense_size;
use crate::error::{Result, RpcError};
use crate::function::convert::{ArgScope, IntoArg, IntoArgs};
use crate::session::Lane;
use crate::value::Value;

/// Size in bytes of the pieces of a copy between sessions: one is read while another is written.
const PIECE: u64 = 4 << 20;

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

impl Plan {
    /// Runs the plan on these sessions, by the names of their sites, and these inputs, by their
    /// names. The outputs are tensors, by name; all other tensors of the run are freed as soon as
    /// no step needs them.
    ///
    /// Calls run concurrently, also those of one session: independent steps may run at the same
    /// time. A failure ends the run and cancels steps that have not begun.
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
        ScopedAction::steps(move |options| run(self, sessions, inputs, options))
    }
}

type Running<'a, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

async fn run<'a>(
    plan: &'a Plan,
    sessions: &'a [(&'a str, Session)],
    inputs: Vec<(&'a str, InputData)>,
    options: Options<'a>,
) -> Result<BTreeMap<String, RemoteTensor>> {
    let inputs = named_inputs(plan, inputs)?;
    let lanes = LANES_TAKEN.fetch_add(u32::try_from(plan.tensors.len()).unwrap_or(u32::MAX), Ordering::Relaxed);
    let sessions = used_sessions(plan, sessions)?;
    let runner = Runner { plan, functions: BTreeMap::new(), sessions, inputs, lanes, options };
    let runner = Runner { functions: runner.find_functions().await?, ..runner };
    let mut tensors: Vec<Option<RemoteTensor>> = vec![None; plan.tensors.len()];
    // Outputs are needed to the end.
    let mut uses = vec![0_usize; plan.tensors.len()];
    plan.planned.iter().flat_map(needed).chain(plan.outputs.iter().copied()).for_each(|slot| uses[slot] += 1);
    let mut waiting: Vec<usize> = (0..plan.planned.len()).collect();
    let mut running: Vec<(usize, Running<'_, Vec<RemoteTensor>>)> = Vec::new();
    loop {
        waiting.retain(|step| {
            let needed = needed(&plan.planned[*step]).map(|slot| tensors[slot].clone());
            let Some(needed) = needed.collect::<Option<Vec<_>>>() else { return true };
            running.push((*step, Box::pin(runner.step(*step, needed))));
            false
        });
        if running.is_empty() {
            break;
        }
        let (at, made) = first_of(&mut running).await;
        let (step, _) = running.swap_remove(at);
        let made = made
            .map_err(|error| error.context(plan.steps().nth(step).map_or_else(String::new, |step| step.to_string())))?;
        made_by(&plan.planned[step])
            .zip(made)
            .for_each(|(slot, tensor)| tensors[slot] = (uses[slot] > 0).then_some(tensor));
        for slot in needed(&plan.planned[step]) {
            uses[slot] -= 1;
            if uses[slot] == 0 {
                tensors[slot] = None;
            }
        }
    }
    let outputs = plan.output_names().map(|(name, slot)| Some((name.to_owned(), tensors[slot].clone()?)));
    outputs.collect::<Option<_>>().ok_or_else(|| RpcError::internal("a plan ended without its outputs"))
}

/// Returns the tensors that a step needs.
fn needed(step: &PlannedStep) -> impl Iterator<Item = TensorIndex> {
    let slots = match step {
        PlannedStep::Input { .. } => &[][..],
        PlannedStep::Copy { from, .. } => std::slice::from_ref(from),
        PlannedStep::Call { tensors, .. } => tensors,
    };
    slots.iter().copied()
}

/// Returns the tensors that a step makes.
fn made_by(step: &PlannedStep) -> impl Iterator<Item = TensorIndex> {
    let slots = match step {
        PlannedStep::Input { to, .. } | PlannedStep::Copy { to, .. } => std::slice::from_ref(to),
        PlannedStep::Call { results, .. } => results,
    };
    slots.iter().copied()
}

/// Waits until one of several futures has completed. Returns its position and result.
async fn first_of<T>(running: &mut [(usize, Running<'_, T>)]) -> (usize, Result<T>) {
    poll_fn(|cx| {
        for (at, (_, one)) in running.iter_mut().enumerate() {
            if let Poll::Ready(outcome) = one.as_mut().poll(cx) {
                return Poll::Ready((at, outcome));
            }
        }
        Poll::Pending
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

struct Runner<'a> {
    plan: &'a Plan,
    sessions: BTreeMap<String, &'a Session>,
    /// Functions by session and name.
    functions: BTreeMap<(String, String), RemoteFunction>,
    inputs: Vec<InputData>,
    /// First lane of this run, relative to `FIRST_LANE`.
    lanes: u32,
    /// Options of the run. Its steps take their lanes from the plan.
    options: Options<'a>,
}

impl Runner<'_> {
    async fn find_functions(&self) -> Result<BTreeMap<(String, String), RemoteFunction>> {
        let mut pending = BTreeMap::new();
        for step in &self.plan.planned {
            if let PlannedStep::Call { call, location, .. } = step {
                let name = &self.plan.graph.calls[call.0].function;
                let session = self.sessions[&location.session];
                let find = || self.options.limit(session.get_function(name).concurrent()).start();
                pending.entry((location.session.clone(), name.clone())).or_insert_with(find);
            }
        }
        let mut functions = BTreeMap::new();
        for (key, function) in pending {
            let function = function.await.map_err(|error| error.context(format!("session '{}'", key.0)))?;
            functions.insert(key, function);
        }
        Ok(functions)
    }

    /// Runs a step with the tensors that it needs, and returns those that it makes.
    async fn step(&self, step: usize, needed: Vec<RemoteTensor>) -> Result<Vec<RemoteTensor>> {
        match &self.plan.planned[step] {
            PlannedStep::Input { input, to } => Ok(vec![self.input(*input, *to).await?]),
            PlannedStep::Copy { to, .. } => Ok(vec![self.copy(&needed, *to).await?]),
            PlannedStep::Call { call, location, results, .. } => self.call(*call, location, needed, results).await,
        }
    }

    async fn input(&self, input: InputId, to: TensorIndex) -> Result<RemoteTensor> {
        match &self.inputs[input.0] {
            InputData::Bytes(bytes) => self.written(bytes, to).await,
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
    async fn written(&self, bytes: &Bytes, to: TensorIndex) -> Result<RemoteTensor> {
        let tensor = &self.plan.tensors[to];
        let wanted = dense_size(&tensor.layout.shape, tensor.layout.dtype)?;
        if bytes.len() as u64 != wanted {
            return Err(RpcError::invalid_argument(format!(
                "{wanted} bytes are needed, but {} were given",
                bytes.len()
            )));
        }
        let fresh = self.fresh(tensor).await?;
        let write = self.sessions[&tensor.location.session].copy_to_remote(&fresh, bytes.clone());
        self.options.limit(write.lane(self.lane_of(to))).await?;
        Ok(fresh)
    }

    /// Returns the lane of the copy that makes this tensor.
    fn lane_of(&self, slot: TensorIndex) -> Lane {
        let taken = self.lanes.wrapping_add(slot as u32);
        Lane(FIRST_LANE + taken % (Lane::CONCURRENT.0 - FIRST_LANE))
    }

    async fn fresh(&self, tensor: &Tensor) -> Result<RemoteTensor> {
        let Tensor { layout, location, .. } = tensor;
        let session = self.sessions[&location.session];
        let alloc = session.alloc_in_scope(location.device, layout.dtype, &layout.shape, Some(&location.memory_scope));
        self.options.limit(alloc.concurrent()).await
    }

    async fn copy(&self, from: &[RemoteTensor], slot: TensorIndex) -> Result<RemoteTensor> {
        let tensor = &self.plan.tensors[slot];
        // Bytes that this process sent need not be fetched again.
        if let ValueId::Input(input) = tensor.value
            && let InputData::Bytes(bytes) = &self.inputs[input.0]
        {
            return self.written(bytes, slot).await;
        }
        let [from] = from else { return Err(RpcError::internal("a copy has no source")) };
        let to = self.fresh(tensor).await?;
        let session = self.sessions[&tensor.location.session];
        if from.reference_in(session.shared()).is_ok() {
            self.options.limit(session.copy_among_remote(from, &to).concurrent()).await?;
        } else {
            self.copy_between(from, &to, self.lane_of(slot)).await?;
        }
        Ok(to)
    }

    async fn call(
        &self,
        call: CallId,
        location: &Location,
        tensors: Vec<RemoteTensor>,
        results: &[TensorIndex],
    ) -> Result<Vec<RemoteTensor>> {
        let what = &self.plan.graph.calls[call.0];
        let mut made = Vec::with_capacity(results.len());
        for slot in results {
            made.push(self.fresh(&self.plan.tensors[*slot]).await?);
        }
        let function = &self.functions[&(location.session.clone(), what.function.clone())];
        let arguments = Arguments { arguments: &what.arguments, tensors: &tensors, results: &made };
        let returned = self.options.limit(function.call::<Value>(arguments).concurrent()).await?;
        function.session().release(&returned);
        Ok(made)
    }

    /// Copies from one session to another, through this process: a piece is read while the previous
    /// one is written.
    async fn copy_between(&self, from: &RemoteTensor, to: &RemoteTensor, lane: Lane) -> Result<()> {
        let (source, target, len) = (from.session(), to.session(), from.size_bytes());
        let read = |at: u64| {
            let read = source.copy_range_from_remote(from, at..len.min(at + PIECE));
            self.options.limit(read.lane(lane))
        };
        let mut at = 0;
        let mut piece = if len > 0 { read(0).await? } else { BytesMut::new() };
        while at < len {
            let next = at + piece.len() as u64;
            let write = self.options.limit(target.copy_to_remote_at(to, at, piece.freeze()).lane(lane));
            if next < len {
                piece = both(write, read(next)).await?;
            } else {
                write.await?;
                break;
            }
            at = next;
        }
        Ok(())
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

/// Waits for both futures and returns the result of the second.
async fn both<T>(
    first: impl IntoFuture<Output = Result<()>>,
    second: impl IntoFuture<Output = Result<T>>,
) -> Result<T> {
    let (mut first, mut second) = (pin!(first.into_future()), pin!(second.into_future()));
    let (mut is_done, mut given) = (false, None);
    poll_fn(|cx| {
        if !is_done && let Poll::Ready(outcome) = first.as_mut().poll(cx) {
            is_done = true;
            if let Err(error) = outcome {
                return Poll::Ready(Err(error));
            }
        }
        if given.is_none()
            && let Poll::Ready(outcome) = second.as_mut().poll(cx)
        {
            match outcome {
                Ok(value) => given = Some(value),
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
        if is_done && let Some(value) = given.take() { Poll::Ready(Ok(value)) } else { Poll::Pending }
    })
    .await
}
