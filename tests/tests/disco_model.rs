//! Random programs against a plain interpreter: what a session's workers hold and what fails on them is what a program says that goes through
//! the workers one after the other, whatever the launch.
//!
//! The interpreter knows the rules of the documentation and no others: values follow from commands in their order, a failure poisons what should
//! have been set and is told once, and a collective with an input that failed gives nobody an output. Reductions fold in the order of ranks, so
//! that floats agree to the bit; only NaNs count as equal to each other.
//!
//! `PROPTEST_CASES` says how many programs are tried.

// A test that panics has failed.
#![allow(clippy::unwrap_used)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::time::Duration;

use disco::{Content, DRef, DiscoError, DiscoSession, Failure, Options, ReduceOp, Scope, WorkerId};
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestCaseError, TestRunner};
use rpc_core::{DataType, ErrorKind, Tensor, Value};
use rpc_tests::spmd::{Fixture, Launch};

const NODE: &str = env!("CARGO_BIN_EXE_disco_node");

const LAUNCHES: [Launch; 5] = [
    Launch::Threads,
    Launch::Processes(NODE),
    Launch::Tcp { per_node: 1, data_over_tcp: false },
    Launch::Tcp { per_node: 1, data_over_tcp: true },
    Launch::Chain,
];

/// Numbers of workers and groups.
const SHAPES: [(u32, u32); 5] = [(1, 1), (2, 1), (2, 2), (3, 1), (4, 2)];

/// Programs of a run of which nothing else is said.
const CASES: u32 = 120;

/// The elements of a tensor: `float32` or `int64`.
#[derive(Clone, Debug, PartialEq)]
enum Data {
    F32(Vec<f32>),
    I64(Vec<i64>),
}

impl Data {
    fn len(&self) -> usize {
        match self {
            Self::F32(data) => data.len(),
            Self::I64(data) => data.len(),
        }
    }

    fn zeros(&self, len: usize) -> Self {
        match self {
            Self::F32(_) => Self::F32(vec![0.0; len]),
            Self::I64(_) => Self::I64(vec![0; len]),
        }
    }

    fn same_type(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    fn slice(&self, from: usize, len: usize) -> Self {
        match self {
            Self::F32(data) => Self::F32(data[from..from + len].to_vec()),
            Self::I64(data) => Self::I64(data[from..from + len].to_vec()),
        }
    }

    fn concat(parts: &[Self]) -> Self {
        let mut all = parts[0].zeros(0);
        for part in parts {
            match (&mut all, part) {
                (Self::F32(all), Self::F32(part)) => all.extend(part),
                (Self::I64(all), Self::I64(part)) => all.extend(part),
                _ => panic!("parts of two types"),
            }
        }
        all
    }

    /// The reduction of several ranks' data, in the order of ranks.
    fn reduce(parts: &[Self], op: ReduceOp) -> Self {
        let n = parts.len();
        match &parts[0] {
            Self::F32(first) => Self::F32(
                (0..first.len())
                    .map(|i| {
                        let each = parts.iter().map(|part| if let Self::F32(data) = part { data[i] } else { panic!() });
                        let folded = each.reduce(|a, b| fold_f32(op, a, b)).unwrap();
                        if op == ReduceOp::Avg { folded / n as f32 } else { folded }
                    })
                    .collect(),
            ),
            Self::I64(first) => Self::I64(
                (0..first.len())
                    .map(|i| {
                        let each = parts.iter().map(|part| if let Self::I64(data) = part { data[i] } else { panic!() });
                        let folded = each.reduce(|a, b| fold_i64(op, a, b)).unwrap();
                        if op == ReduceOp::Avg { folded.wrapping_div(n as i64) } else { folded }
                    })
                    .collect(),
            ),
        }
    }

    fn tensor(&self, shape: &[i64]) -> Tensor {
        match self {
            Self::F32(data) => Tensor::from_slice(shape, data),
            Self::I64(data) => Tensor::from_slice(shape, data),
        }
        .unwrap()
    }

    /// What can be compared: one NaN is like another.
    fn bits(&self) -> Vec<u64> {
        match self {
            Self::F32(data) => {
                data.iter().map(|x| if x.is_nan() { u64::MAX } else { u64::from(x.to_bits()) }).collect()
            }
            Self::I64(data) => data.iter().map(|x| *x as u64).collect(),
        }
    }
}

fn fold_f32(op: ReduceOp, a: f32, b: f32) -> f32 {
    match op {
        ReduceOp::Prod => a * b,
        // Of two zeros the one of the higher rank counts as the smaller and the larger.
        ReduceOp::Min | ReduceOp::Max if a.is_nan() || b.is_nan() => f32::NAN,
        ReduceOp::Min => {
            if b <= a {
                b
            } else {
                a
            }
        }
        ReduceOp::Max => {
            if b >= a {
                b
            } else {
                a
            }
        }
        _ => a + b,
    }
}

fn fold_i64(op: ReduceOp, a: i64, b: i64) -> i64 {
    match op {
        ReduceOp::Prod => a.wrapping_mul(b),
        ReduceOp::Min => a.min(b),
        ReduceOp::Max => a.max(b),
        _ => a.wrapping_add(b),
    }
}

/// Which elements a new tensor has.
#[derive(Clone, Debug)]
struct Layout {
    float: bool,
    shape: Vec<i64>,
}

impl Layout {
    fn len(&self) -> usize {
        self.shape.iter().product::<i64>() as usize
    }

    fn dtype(&self) -> DataType {
        if self.float { DataType::F32 } else { DataType::I64 }
    }

    /// Elements that follow from a seed.
    fn data(&self, seed: u32) -> Data {
        let element = |i: usize| i64::from(seed.wrapping_mul(31).wrapping_add(i as u32 * 17) % 23) - 9;
        match self.float {
            true => Data::F32((0..self.len()).map(|i| element(i) as f32 * 0.5).collect()),
            false => Data::I64((0..self.len()).map(element).collect()),
        }
    }

    fn zeros(&self) -> Data {
        if self.float { Data::F32(vec![0.0; self.len()]) } else { Data::I64(vec![0; self.len()]) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Allreduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Allgather,
    Broadcast,
    Scatter,
    Gather,
    AllToAll,
}

impl Kind {
    fn command(self) -> &'static str {
        match self {
            Self::Allreduce(_) => "allreduce",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Allgather => "allgather",
            Self::Broadcast => "broadcast_from_worker0",
            Self::Scatter => "scatter_from_worker0",
            Self::Gather => "gather_to_worker0",
            Self::AllToAll => "all_to_all",
        }
    }

    fn is_one_sided(self) -> bool {
        matches!(self, Self::Broadcast | Self::Scatter)
    }
}

/// One line of a program. Variables and workers are numbers, taken modulo what there is.
#[derive(Clone, Debug)]
enum Step {
    /// A tensor with other elements on every worker.
    Fill {
        layout: Layout,
        seed: u32,
    },
    Empty {
        layout: Layout,
    },
    EmptyOnFirst {
        layout: Layout,
        scope: Scope,
    },
    CopyIn {
        layout: Layout,
        seed: u32,
        to: Option<usize>,
    },
    Broadcast {
        layout: Layout,
        seed: u32,
        to: Option<usize>,
        scope: Scope,
    },
    Scatter {
        rest: Layout,
        seed: u32,
        to: Option<usize>,
        scope: Scope,
    },
    CopyOut {
        from: usize,
    },
    Get {
        from: usize,
        worker: u32,
    },
    Drop {
        at: usize,
    },
    WorkerId,
    Echo {
        of: usize,
    },
    AddTo {
        to: usize,
        value: i8,
    },
    Copy {
        of: usize,
    },
    FailOn {
        worker: u32,
    },
    FailOnAll,
    PanicOn {
        worker: u32,
    },
    TensorUnless {
        worker: u32,
    },
    SumOfIds {
        rounds: u32,
    },
    Collective {
        kind: Kind,
        scope: Scope,
        from: usize,
        to: Option<usize>,
    },
    Barrier {
        scope: Scope,
    },
    SendRecv {
        from: usize,
        to: usize,
        pairs: Vec<(u32, u32)>,
    },
    SetInt {
        to: usize,
        worker: u32,
        value: i64,
    },
    SetTensor {
        to: usize,
        worker: u32,
        layout: Layout,
        seed: u32,
    },
    Sync {
        worker: u32,
    },
    SyncAll,
}

#[derive(Clone, Debug)]
struct Program {
    shape: (u32, u32),
    steps: Vec<Step>,
}

/// What can be seen of a session.
#[derive(Clone, Debug, PartialEq)]
enum Seen {
    Null,
    Int(i64),
    Float(u64),
    Tensor { float: bool, shape: Vec<i64>, bits: Vec<u64> },
    Failures(Vec<Fault>),
}

/// A failure, as far as it is compared.
#[derive(Clone, Debug, PartialEq)]
struct Fault {
    worker: u32,
    command: &'static str,
    kind: ErrorKind,
}

// What really happens.

fn seen_tensor(tensor: &Tensor) -> Seen {
    let view = tensor.read().unwrap();
    let float = tensor.dtype() == DataType::F32;
    let data = match float {
        true => Data::F32(view.as_slice::<f32>().unwrap().to_vec()),
        false => Data::I64(view.as_slice::<i64>().unwrap().to_vec()),
    };
    Seen::Tensor { float, shape: tensor.shape().to_vec(), bits: data.bits() }
}

fn seen_failures(error: DiscoError) -> Result<Seen, DiscoError> {
    let DiscoError::Workers(failures) = error else { return Err(error) };
    let fault = |failure: Failure| Fault {
        worker: failure.worker.0,
        command: String::leak(failure.command),
        kind: failure.cause.kind(),
    };
    Ok(Seen::Failures(failures.into_iter().map(fault).collect()))
}

fn seen(content: Result<Content, DiscoError>) -> Result<Seen, DiscoError> {
    Ok(match content {
        Ok(Content::Tensor(tensor)) => seen_tensor(&tensor),
        Ok(Content::Value(Value::Null)) => Seen::Null,
        Ok(Content::Value(Value::Int(int))) => Seen::Int(int),
        Ok(Content::Value(Value::Float(float))) => Seen::Float(float.to_bits()),
        Ok(other) => panic!("a value that no program makes: {other:?}"),
        Err(error) => return seen_failures(error),
    })
}

fn seen_end(end: Result<(), DiscoError>) -> Result<Seen, DiscoError> {
    end.map_or_else(seen_failures, |()| Ok(Seen::Failures(Vec::new())))
}

fn perform(session: &DiscoSession, program: &Program) -> Result<Vec<Seen>, DiscoError> {
    let n = session.num_workers();
    let mut vars: Vec<DRef> = Vec::new();
    let mut trace = Vec::new();
    let call = |name: &str| session.get_global_func(name);
    for step in &program.steps {
        let var = |at: usize| &vars[at % vars.len()];
        let made = match step {
            step if vars.is_empty() && uses_variable(step) => continue,
            Step::Fill { layout, seed } => {
                let x = session.empty(&layout.shape, layout.dtype(), None)?;
                for worker in 0..n {
                    let own = layout.data(seed.wrapping_add(worker)).tensor(&layout.shape);
                    session.debug_set_register(&x, WorkerId(worker), &own)?;
                }
                Some(x)
            }
            Step::Empty { layout } => Some(session.empty(&layout.shape, layout.dtype(), None)?),
            Step::EmptyOnFirst { layout, scope } => {
                Some(session.empty_on_worker0(&layout.shape, layout.dtype(), None, *scope)?)
            }
            Step::CopyIn { layout, seed, to } => {
                let made = session.copy_to_worker_0(&layout.data(*seed).tensor(&layout.shape), to.map(var))?;
                to.is_none().then_some(made)
            }
            Step::Broadcast { layout, seed, to, scope } => {
                let made = session.broadcast(&layout.data(*seed).tensor(&layout.shape), to.map(var), *scope)?;
                to.is_none().then_some(made)
            }
            Step::Scatter { rest, seed, to, scope } => {
                let layout = scattered(rest, program.shape, *scope);
                let made = session.scatter(&layout.data(*seed).tensor(&layout.shape), to.map(var), *scope)?;
                to.is_none().then_some(made)
            }
            Step::CopyOut { from } => {
                trace.push(seen(session.copy_from_worker_0(var(*from)).wait().map(Content::Tensor))?);
                None
            }
            Step::Get { from, worker } => {
                trace.push(seen(session.debug_get_from_remote(var(*from), WorkerId(worker % n)).wait())?);
                None
            }
            Step::Drop { at } => {
                let at = at % vars.len();
                vars.swap_remove(at);
                None
            }
            Step::WorkerId => Some(call("worker_id")?.call(())?),
            Step::Echo { of } => Some(call("echo")?.call((var(*of),))?),
            Step::AddTo { to, value } => Some(call("add_to")?.call((var(*to), f64::from(*value)))?),
            Step::Copy { of } => Some(call("copy")?.call((var(*of),))?),
            Step::FailOn { worker } => Some(call("fail_on")?.call((worker % n,))?),
            Step::FailOnAll => Some(call("fail")?.call(())?),
            Step::PanicOn { worker } => Some(call("panic_on")?.call((worker % n,))?),
            Step::TensorUnless { worker } => Some(call("tensor_unless")?.call((worker % (n + 1),))?),
            Step::SumOfIds { rounds } => Some(call("sum_of_ids")?.call((*rounds,))?),
            Step::Collective { kind, scope, from, to } => {
                let (from, into, scope) = (var(*from), to.map(var), *scope);
                let made = match kind {
                    Kind::Allreduce(op) => session.allreduce(from, into, *op, scope),
                    Kind::ReduceScatter(op) => session.reduce_scatter(from, into, *op, scope),
                    Kind::Allgather => session.allgather(from, into, scope),
                    Kind::Broadcast => session.broadcast_from_worker0(from, into, scope),
                    Kind::Scatter => session.scatter_from_worker0(from, into, scope),
                    Kind::Gather => session.gather_to_worker0(from, into, scope),
                    Kind::AllToAll => session.all_to_all(from, into, scope),
                }?;
                to.is_none().then_some(made)
            }
            Step::Barrier { scope } => {
                session.barrier(*scope)?;
                None
            }
            Step::SendRecv { from, to, pairs } => {
                let pairs: Vec<_> =
                    between(pairs, n).into_iter().map(|(from, to)| (WorkerId(from), WorkerId(to))).collect();
                session.send_recv(var(*from), var(*to), &pairs)?;
                None
            }
            Step::SetInt { to, worker, value } => {
                session.debug_set_register(var(*to), WorkerId(worker % n), *value)?;
                None
            }
            Step::SetTensor { to, worker, layout, seed } => {
                let tensor = layout.data(*seed).tensor(&layout.shape);
                session.debug_set_register(var(*to), WorkerId(worker % n), &tensor)?;
                None
            }
            Step::Sync { worker } => {
                trace.push(seen_end(session.sync_worker(WorkerId(worker % n)).wait())?);
                None
            }
            Step::SyncAll => {
                trace.push(seen_end(session.sync_all().wait())?);
                None
            }
        };
        vars.extend(made);
    }
    // In the end everything is looked at.
    trace.push(seen_end(session.sync_all().wait())?);
    for var in &vars {
        for worker in 0..n {
            trace.push(seen(session.debug_get_from_remote(var, WorkerId(worker)).wait())?);
        }
    }
    Ok(trace)
}

fn uses_variable(step: &Step) -> bool {
    match step {
        Step::CopyIn { to, .. } | Step::Broadcast { to, .. } | Step::Scatter { to, .. } => to.is_some(),
        Step::CopyOut { .. }
        | Step::Get { .. }
        | Step::Drop { .. }
        | Step::Echo { .. }
        | Step::AddTo { .. }
        | Step::Copy { .. }
        | Step::Collective { .. }
        | Step::SendRecv { .. }
        | Step::SetInt { .. }
        | Step::SetTensor { .. } => true,
        _ => false,
    }
}

/// The pairs that there are among `n` workers.
fn between(pairs: &[(u32, u32)], n: u32) -> Vec<(u32, u32)> {
    pairs.iter().map(|(from, to)| (from % n, to % n)).filter(|(from, to)| from != to).collect()
}

fn scattered(rest: &Layout, (n, groups): (u32, u32), scope: Scope) -> Layout {
    let size = if scope == Scope::World { n } else { n / groups };
    Layout { float: rest.float, shape: [&[i64::from(size)], &rest.shape[..]].concat() }
}

// What should happen.

#[derive(Clone, Debug)]
struct ModelTensor {
    data: Rc<RefCell<Data>>,
    shape: Vec<i64>,
}

impl ModelTensor {
    fn new(data: Data, shape: &[i64]) -> Self {
        Self { data: Rc::new(RefCell::new(data)), shape: shape.to_vec() }
    }

    fn len(&self) -> usize {
        self.data.borrow().len()
    }

    fn get(&self) -> Data {
        self.data.borrow().clone()
    }

    fn set(&self, data: Data) {
        *self.data.borrow_mut() = data;
    }

    fn is(&self, layout: &Layout) -> bool {
        matches!(*self.data.borrow(), Data::F32(_)) == layout.float
    }
}

#[derive(Clone, Debug)]
enum Slot {
    Null,
    Int(i64),
    Float(f64),
    Tensor(ModelTensor),
    Poison(Fault),
}

/// Why a command has no result.
#[derive(Clone, Debug)]
enum Trouble {
    /// It failed here, in this way.
    Own(ErrorKind),
    /// It depends on what failed.
    Inherited(Fault),
}

const WRONG: Trouble = Trouble::Own(ErrorKind::InvalidArgument);

struct Model {
    n: u32,
    groups: u32,
    /// Each variable, on each worker.
    vars: Vec<Vec<Slot>>,
    untold: Vec<Fault>,
    trace: Vec<Seen>,
}

impl Slot {
    fn tensor(&self) -> Result<ModelTensor, Trouble> {
        match self {
            Self::Tensor(tensor) => Ok(tensor.clone()),
            Self::Poison(fault) => Err(Trouble::Inherited(fault.clone())),
            _ => Err(WRONG),
        }
    }

    fn seen(&self) -> Seen {
        match self {
            Self::Null => Seen::Null,
            Self::Int(int) => Seen::Int(*int),
            Self::Float(float) => Seen::Float(float.to_bits()),
            Self::Tensor(tensor) => {
                let data = tensor.data.borrow();
                let float = matches!(*data, Data::F32(_));
                Seen::Tensor { float, shape: tensor.shape.clone(), bits: data.bits() }
            }
            Self::Poison(fault) => Seen::Failures(vec![fault.clone()]),
        }
    }
}

impl Model {
    fn at(&self, var: usize) -> usize {
        var % self.vars.len()
    }

    /// Runs a command on every worker by itself: what it makes there, or why it makes nothing.
    fn each(&mut self, command: &'static str, run: impl Fn(&Self, u32) -> Result<Slot, Trouble>) -> Vec<Slot> {
        let outcomes: Vec<_> = (0..self.n).map(|worker| run(self, worker)).collect();
        self.settle(command, outcomes)
    }

    /// Notes what has failed; gives what the output holds.
    fn settle(&mut self, command: &'static str, outcomes: Vec<Result<Slot, Trouble>>) -> Vec<Slot> {
        let mut slots = Vec::new();
        for (worker, outcome) in (0..).zip(outcomes) {
            slots.push(match outcome {
                Ok(slot) => slot,
                Err(Trouble::Inherited(fault)) => Slot::Poison(fault),
                Err(Trouble::Own(kind)) => {
                    let fault = Fault { worker, command, kind };
                    self.untold.push(fault.clone());
                    Slot::Poison(fault)
                }
            });
        }
        slots
    }

    /// The groups of workers that a collective runs in.
    fn scopes(&self, scope: Scope) -> Vec<Vec<u32>> {
        let size = if scope == Scope::World { self.n } else { self.n / self.groups };
        (0..self.n).collect::<Vec<_>>().chunks(size as usize).map(<[u32]>::to_vec).collect()
    }

    fn first_of(&self, scope: Scope) -> Vec<u32> {
        self.scopes(scope).iter().map(|members| members[0]).collect()
    }

    /// The controller's tensor on the first workers of a scope.
    fn bring(&mut self, layout: &Layout, seed: u32, scope: Scope) -> Vec<Slot> {
        let firsts = self.first_of(scope);
        let slot = |worker| match firsts.contains(&worker) {
            true => Slot::Tensor(ModelTensor::new(layout.data(seed), &layout.shape)),
            false => Slot::Null,
        };
        (0..self.n).map(slot).collect()
    }

    fn collective(&mut self, kind: Kind, scope: Scope, from: &[Slot], to: Option<usize>) {
        let mut outcomes = Vec::new();
        for members in self.scopes(scope) {
            let sources: Vec<&Slot> = members.iter().map(|worker| &from[*worker as usize]).collect();
            let targets = to.map(|to| members.iter().map(|worker| &self.vars[to][*worker as usize]).collect());
            outcomes.extend(collective(kind, &members, &sources, targets));
        }
        let slots = self.settle(kind.command(), outcomes);
        match to {
            Some(to) => self.vars[to] = slots,
            None => self.vars.push(slots),
        }
    }

    fn send_recv(&mut self, from: usize, to: usize, pairs: &[(u32, u32)]) {
        let mut troubles: HashMap<u32, Trouble> = HashMap::new();
        for (sender, receiver) in between(pairs, self.n) {
            let source = self.vars[from][sender as usize].tensor();
            let target = self.vars[to][receiver as usize].tensor();
            let ends = [(sender, source.as_ref().err()), (receiver, target.as_ref().err())];
            let poisoned = ends.iter().find_map(|(worker, trouble)| Some((*worker, (*trouble)?.clone())));
            let (at_sender, at_receiver) = match (poisoned, &source, &target) {
                (Some((origin, trouble)), ..) => {
                    let kind = match &trouble {
                        Trouble::Own(kind) => *kind,
                        Trouble::Inherited(fault) => fault.kind,
                    };
                    let of_other = Trouble::Inherited(Fault { worker: origin, command: "send_recv", kind });
                    let at = |own: &Result<ModelTensor, Trouble>| own.clone().err().unwrap_or(of_other.clone());
                    (Some(at(&source)), Some(at(&target)))
                }
                (None, Ok(source), Ok(target)) => {
                    let (from, to) = (source.get(), target.get());
                    if from.same_type(&to) && from.len() == to.len() {
                        target.set(from);
                        (None, None)
                    } else {
                        (Some(WRONG), Some(WRONG))
                    }
                }
                _ => unreachable!("an end without a tensor has trouble"),
            };
            for (worker, trouble) in [(sender, at_sender), (receiver, at_receiver)] {
                if let Some(trouble) = trouble {
                    troubles.entry(worker).or_insert(trouble);
                }
            }
        }
        let outcomes = (0..self.n).map(|worker| match troubles.remove(&worker) {
            Some(trouble) => Err(trouble),
            None => Ok(self.vars[to][worker as usize].clone()),
        });
        let outcomes = outcomes.collect();
        self.vars[to] = self.settle("send_recv", outcomes);
    }

    fn tell(&mut self, worker: Option<u32>) {
        let all = std::mem::take(&mut self.untold);
        let (told, kept) = all.into_iter().partition(|fault| worker.is_none_or(|worker| worker == fault.worker));
        self.untold = kept;
        self.trace.push(Seen::Failures(told));
    }

    /// What a look at a variable on a worker gives, which fails as this command.
    fn look(&mut self, var: usize, worker: u32, tensor_only: Option<&'static str>) {
        let slot = &self.vars[var][worker as usize];
        let seen = match (slot, tensor_only) {
            (Slot::Tensor(_) | Slot::Poison(_), _) | (_, None) => slot.seen(),
            (_, Some(command)) => Seen::Failures(vec![Fault { worker, command, kind: ErrorKind::InvalidArgument }]),
        };
        self.trace.push(seen);
    }

    fn step(&mut self, step: &Step) {
        let n = self.n;
        let made = match step {
            step if self.vars.is_empty() && uses_variable(step) => return,
            Step::Fill { layout, seed } => Some(self.each("empty", |_, worker| {
                Ok(Slot::Tensor(ModelTensor::new(layout.data(seed.wrapping_add(worker)), &layout.shape)))
            })),
            Step::Empty { layout } => {
                Some(self.each("empty", |_, _| Ok(Slot::Tensor(ModelTensor::new(layout.zeros(), &layout.shape)))))
            }
            Step::EmptyOnFirst { layout, scope } => {
                let firsts = self.first_of(*scope);
                Some(self.each("empty", |_, worker| {
                    Ok(match firsts.contains(&worker) {
                        true => Slot::Tensor(ModelTensor::new(layout.zeros(), &layout.shape)),
                        false => Slot::Null,
                    })
                }))
            }
            Step::CopyIn { layout, seed, to: None } => Some(self.bring(layout, *seed, Scope::World)),
            Step::CopyIn { layout, seed, to: Some(to) } => {
                let to = self.at(*to);
                let slots = self.each("copy_to_worker_0", |model, worker| {
                    let slot = &model.vars[to][worker as usize];
                    if worker != 0 {
                        return Ok(slot.clone());
                    }
                    let tensor = slot.tensor()?;
                    if !tensor.is(layout) || tensor.len() != layout.len() {
                        return Err(WRONG);
                    }
                    tensor.set(layout.data(*seed));
                    Ok(slot.clone())
                });
                self.vars[to] = slots;
                None
            }
            Step::Broadcast { layout, seed, to, scope } => {
                let from = self.bring(layout, *seed, *scope);
                self.collective(Kind::Broadcast, *scope, &from, to.map(|to| self.at(to)));
                None
            }
            Step::Scatter { rest, seed, to, scope } => {
                let from = self.bring(&scattered(rest, (n, self.groups), *scope), *seed, *scope);
                self.collective(Kind::Scatter, *scope, &from, to.map(|to| self.at(to)));
                None
            }
            Step::CopyOut { from } => {
                self.look(self.at(*from), 0, Some("copy_from_worker_0"));
                None
            }
            Step::Get { from, worker } => {
                self.look(self.at(*from), worker % n, None);
                None
            }
            Step::Drop { at } => {
                let at = self.at(*at);
                self.vars.swap_remove(at);
                None
            }
            Step::WorkerId => Some(self.each("worker_id", |_, worker| Ok(Slot::Int(worker.into())))),
            Step::Echo { of } => {
                let of = self.at(*of);
                Some(self.vars[of].clone())
            }
            Step::AddTo { to, value } => {
                let to = self.at(*to);
                Some(self.each("add_to", |model, worker| {
                    let tensor = model.vars[to][worker as usize].tensor()?;
                    let Data::F32(mut data) = tensor.get() else { return Err(WRONG) };
                    data.iter_mut().for_each(|x| *x += f32::from(*value));
                    tensor.set(Data::F32(data));
                    Ok(Slot::Null)
                }))
            }
            Step::Copy { of } => {
                let of = self.at(*of);
                Some(self.each("copy", |model, worker| {
                    let tensor = model.vars[of][worker as usize].tensor()?;
                    let data = tensor.get();
                    if !matches!(data, Data::F32(_)) {
                        return Err(WRONG);
                    }
                    Ok(Slot::Tensor(ModelTensor::new(data, &tensor.shape)))
                }))
            }
            Step::FailOn { worker } => {
                let bad = worker % n;
                let fails = |worker| if worker == bad { Err(Trouble::Own(ErrorKind::Application)) } else { Ok(()) };
                Some(self.each("fail_on", |_, worker| fails(worker).map(|()| Slot::Float(1.0))))
            }
            Step::FailOnAll => Some(self.each("fail", |_, _| Err(Trouble::Own(ErrorKind::Application)))),
            Step::PanicOn { worker } => {
                let bad = worker % n;
                let panics = |worker| if worker == bad { Err(Trouble::Own(ErrorKind::Panic)) } else { Ok(Slot::Null) };
                Some(self.each("panic_on", |_, worker| panics(worker)))
            }
            Step::TensorUnless { worker } => {
                let bad = worker % (n + 1);
                Some(self.each("tensor_unless", |_, worker| match worker == bad {
                    true => Err(Trouble::Own(ErrorKind::Application)),
                    false => Ok(Slot::Tensor(ModelTensor::new(Data::F32(vec![1.0, 2.0]), &[2]))),
                }))
            }
            Step::SumOfIds { rounds } => {
                let sum = if *rounds == 0 { 0.0 } else { f64::from((0..n).sum::<u32>()) };
                Some(self.each("sum_of_ids", |_, _| Ok(Slot::Float(sum))))
            }
            Step::Collective { kind, scope, from, to } => {
                let from = self.vars[self.at(*from)].clone();
                self.collective(*kind, *scope, &from, to.map(|to| self.at(to)));
                None
            }
            Step::Barrier { .. } => None,
            Step::SendRecv { from, to, pairs } => {
                self.send_recv(self.at(*from), self.at(*to), pairs);
                None
            }
            Step::SetInt { to, worker, value } => {
                let to = self.at(*to);
                self.vars[to][(worker % n) as usize] = Slot::Int(*value);
                None
            }
            Step::SetTensor { to, worker, layout, seed } => {
                let to = self.at(*to);
                let slot = &mut self.vars[to][(worker % n) as usize];
                match slot {
                    Slot::Tensor(tensor) if tensor.is(layout) && tensor.shape == layout.shape => {
                        tensor.set(layout.data(*seed));
                    }
                    slot => *slot = Slot::Tensor(ModelTensor::new(layout.data(*seed), &layout.shape)),
                }
                None
            }
            Step::Sync { worker } => {
                self.tell(Some(worker % n));
                None
            }
            Step::SyncAll => {
                self.tell(None);
                None
            }
        };
        self.vars.extend(made);
    }
}

/// A collective among the members of one scope: what the output holds on each, or why it is poisoned.
fn collective(kind: Kind, members: &[u32], from: &[&Slot], to: Option<Vec<&Slot>>) -> Vec<Result<Slot, Trouble>> {
    let n = members.len();
    let kind_of = |trouble: &Trouble| match trouble {
        Trouble::Own(kind) => *kind,
        Trouble::Inherited(fault) => fault.kind,
    };
    // Those without an input fail by themselves, and the others because of the first of them.
    let poisoned = |troubles: &[Option<Trouble>], origin: usize| -> Vec<Result<Slot, Trouble>> {
        let kind_of_origin = kind_of(troubles[origin].as_ref().unwrap());
        let fault = Fault { worker: members[origin], command: kind.command(), kind: kind_of_origin };
        let outcome = |own: &Option<Trouble>| Err(own.clone().unwrap_or(Trouble::Inherited(fault.clone())));
        troubles.iter().map(outcome).collect()
    };
    let result_shape = |tensor: &ModelTensor| match kind {
        Kind::Allreduce(_) | Kind::Broadcast | Kind::AllToAll => Ok(tensor.shape.clone()),
        Kind::Allgather | Kind::Gather => Ok([&[n as i64], &tensor.shape[..]].concat()),
        Kind::Scatter | Kind::ReduceScatter(_) => match tensor.shape.split_first() {
            Some((first, rest)) if *first == n as i64 => Ok(rest.to_vec()),
            _ => Err(WRONG),
        },
    };
    let needs_from = |rank: usize| !kind.is_one_sided() || rank == 0;
    let needs_to = |rank: usize| kind != Kind::Gather || rank == 0;
    let sources: Vec<Result<Option<ModelTensor>, Trouble>> =
        (0..n).map(|rank| if needs_from(rank) { from[rank].tensor().map(Some) } else { Ok(None) }).collect();
    let fresh = to.is_none();
    if fresh && kind.is_one_sided() {
        // The layout goes ahead, and with it all that can be wrong.
        let announced = sources[0].clone().and_then(|source| result_shape(&source.unwrap()));
        if let Err(trouble) = announced {
            let mut troubles = vec![None; n];
            troubles[0] = Some(trouble);
            return poisoned(&troubles, 0);
        }
    }
    let make = |tensor: &ModelTensor| {
        let shape = result_shape(tensor)?;
        let len = shape.iter().product::<i64>() as usize;
        Ok(ModelTensor::new(tensor.get().zeros(len), &shape))
    };
    let targets: Vec<Result<Option<ModelTensor>, Trouble>> = (0..n)
        .map(|rank| match &to {
            _ if !needs_to(rank) => match (&to, &sources[rank]) {
                // It looks at its source all the same.
                (None, Ok(Some(source))) => make(source).map(|_| None),
                _ => Ok(None),
            },
            Some(to) => to[rank].tensor().map(Some),
            None if kind.is_one_sided() => make(sources[0].as_ref().unwrap().as_ref().unwrap()).map(Some),
            None => match &sources[rank] {
                Ok(source) => make(source.as_ref().unwrap()).map(Some),
                Err(trouble) => Err(trouble.clone()),
            },
        })
        .collect();
    // How many times the elements that the call counts.
    let (from_times, to_times) = match kind {
        Kind::ReduceScatter(_) | Kind::Scatter => (n, 1),
        Kind::Allgather | Kind::Gather => (1, n),
        Kind::AllToAll => (n, n),
        Kind::Allreduce(_) | Kind::Broadcast => (1, 1),
    };
    // The type and count of each rank's call, or its trouble.
    let mut calls = Vec::new();
    for rank in 0..n {
        let call = sources[rank].clone().and_then(|source| {
            let target = targets[rank].clone()?;
            if let (Some(source), Some(target)) = (&source, &target)
                && !source.get().same_type(&target.get())
            {
                return Err(WRONG);
            }
            let mut counts = [(&source, from_times), (&target, to_times)]
                .into_iter()
                .filter_map(|(tensor, times)| Some((tensor.as_ref()?.len(), times)))
                .map(|(len, times)| if len % times == 0 { Ok(len / times) } else { Err(WRONG) });
            let first = counts.next().unwrap()?;
            for other in counts {
                if other? != first {
                    return Err(WRONG);
                }
            }
            let either = source.as_ref().or(target.as_ref()).unwrap();
            Ok((matches!(either.get(), Data::F32(_)), first))
        });
        calls.push(call);
    }
    let mut healthy = calls.iter().filter_map(|call| call.as_ref().ok());
    let agreed = healthy.next().copied();
    if healthy.any(|call| Some(*call) != agreed) {
        return calls.into_iter().map(|call| Err(call.err().unwrap_or(WRONG))).collect();
    }
    if let Some(origin) = calls.iter().position(Result::is_err) {
        let troubles: Vec<_> = calls.into_iter().map(Result::err).collect();
        return poisoned(&troubles, origin);
    }
    let (_, count) = agreed.unwrap();
    let inputs: Vec<Option<Data>> =
        sources.into_iter().map(|source| source.unwrap().map(|tensor| tensor.get())).collect();
    let all = || inputs.iter().map(|input| input.clone().unwrap()).collect::<Vec<_>>();
    let share = |data: &Data, rank: usize| data.slice(rank * count, count);
    (0..n)
        .map(|rank| {
            let result = match kind {
                Kind::Allreduce(op) => Data::reduce(&all(), op),
                Kind::ReduceScatter(op) => share(&Data::reduce(&all(), op), rank),
                Kind::Allgather | Kind::Gather => Data::concat(&all()),
                Kind::Broadcast => inputs[0].clone().unwrap(),
                Kind::Scatter => share(inputs[0].as_ref().unwrap(), rank),
                Kind::AllToAll => Data::concat(&all().iter().map(|data| share(data, rank)).collect::<Vec<_>>()),
            };
            Ok(match (targets[rank].as_ref().unwrap(), &to) {
                (Some(target), to) => {
                    target.set(result);
                    to.as_ref().map_or_else(|| Slot::Tensor(target.clone()), |to| to[rank].clone())
                }
                (None, Some(to)) => to[rank].clone(),
                (None, None) => Slot::Null,
            })
        })
        .collect()
}

fn interpret(program: &Program) -> Vec<Seen> {
    let (n, groups) = program.shape;
    let mut model = Model { n, groups, vars: Vec::new(), untold: Vec::new(), trace: Vec::new() };
    program.steps.iter().for_each(|step| model.step(step));
    model.tell(None);
    let slots: Vec<Seen> = model.vars.iter().flatten().map(Slot::seen).collect();
    model.trace.extend(slots);
    model.trace
}

// Where programs come from.

fn layout() -> impl Strategy<Value = Layout> {
    let shape = prop_oneof![
        Just(vec![0]),
        Just(vec![1]),
        Just(vec![2]),
        Just(vec![4]),
        Just(vec![2, 2]),
        Just(vec![3, 2]),
        Just(vec![4, 1, 2]),
        Just(vec![12]),
        // More than travels with an announcement.
        Just(vec![12, 500]),
    ];
    (any::<bool>(), shape).prop_map(|(float, shape)| Layout { float, shape })
}

fn small() -> impl Strategy<Value = Layout> {
    layout().prop_filter("small", |layout| layout.len() < 100)
}

fn scope() -> impl Strategy<Value = Scope> {
    prop_oneof![Just(Scope::World), Just(Scope::Group)]
}

fn kind() -> impl Strategy<Value = Kind> {
    let op = prop_oneof![
        Just(ReduceOp::Sum),
        Just(ReduceOp::Prod),
        Just(ReduceOp::Min),
        Just(ReduceOp::Max),
        Just(ReduceOp::Avg)
    ];
    prop_oneof![
        3 => op.clone().prop_map(Kind::Allreduce),
        1 => op.prop_map(Kind::ReduceScatter),
        1 => Just(Kind::Allgather),
        1 => Just(Kind::Broadcast),
        1 => Just(Kind::Scatter),
        1 => Just(Kind::Gather),
        1 => Just(Kind::AllToAll),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let var = 0..6_usize;
    let worker = 0..4_u32;
    let seed = 0..1000_u32;
    let to = proptest::option::of(0..6_usize);
    let pairs = proptest::collection::vec((0..4_u32, 0..4_u32), 0..4);
    prop_oneof![
        5 => (layout(), seed.clone()).prop_map(|(layout, seed)| Step::Fill { layout, seed }),
        1 => layout().prop_map(|layout| Step::Empty { layout }),
        1 => (layout(), scope()).prop_map(|(layout, scope)| Step::EmptyOnFirst { layout, scope }),
        2 => (layout(), seed.clone(), to.clone()).prop_map(|(layout, seed, to)| Step::CopyIn { layout, seed, to }),
        1 => (layout(), seed.clone(), to.clone(), scope())
            .prop_map(|(layout, seed, to, scope)| Step::Broadcast { layout, seed, to, scope }),
        1 => (small(), seed.clone(), to.clone(), scope())
            .prop_map(|(rest, seed, to, scope)| Step::Scatter { rest, seed, to, scope }),
        1 => var.clone().prop_map(|from| Step::CopyOut { from }),
        1 => (var.clone(), worker.clone()).prop_map(|(from, worker)| Step::Get { from, worker }),
        2 => var.clone().prop_map(|at| Step::Drop { at }),
        1 => Just(Step::WorkerId),
        1 => var.clone().prop_map(|of| Step::Echo { of }),
        2 => (var.clone(), any::<i8>()).prop_map(|(to, value)| Step::AddTo { to, value }),
        1 => var.clone().prop_map(|of| Step::Copy { of }),
        1 => worker.clone().prop_map(|worker| Step::FailOn { worker }),
        1 => Just(Step::FailOnAll),
        1 => worker.clone().prop_map(|worker| Step::PanicOn { worker }),
        1 => (0..5_u32).prop_map(|worker| Step::TensorUnless { worker }),
        1 => (0..3_u32).prop_map(|rounds| Step::SumOfIds { rounds }),
        9 => (kind(), scope(), var.clone(), to).prop_map(|(kind, scope, from, to)| Step::Collective { kind, scope, from, to }),
        1 => scope().prop_map(|scope| Step::Barrier { scope }),
        2 => (var.clone(), var.clone(), pairs).prop_map(|(from, to, pairs)| Step::SendRecv { from, to, pairs }),
        1 => (var.clone(), worker.clone(), any::<i64>())
            .prop_map(|(to, worker, value)| Step::SetInt { to, worker, value }),
        2 => (var, worker.clone(), small(), seed)
            .prop_map(|(to, worker, layout, seed)| Step::SetTensor { to, worker, layout, seed }),
        1 => worker.prop_map(|worker| Step::Sync { worker }),
        1 => Just(Step::SyncAll),
    ]
}

fn program() -> impl Strategy<Value = Program> {
    let shape = proptest::sample::select(SHAPES.to_vec());
    (shape, proptest::collection::vec(step(), 1..30)).prop_map(|(shape, steps)| Program { shape, steps })
}

/// Sessions that programs have left in good order, for the next one.
#[derive(Default)]
struct Sessions(HashMap<(usize, (u32, u32)), Fixture>);

impl Sessions {
    fn take(&mut self, launch: usize, shape: (u32, u32)) -> Fixture {
        self.0.remove(&(launch, shape)).unwrap_or_else(|| {
            let mut options = Options::default();
            // A hang is a failure that programs can be shrunk by.
            options.collective_timeout = Some(Duration::from_secs(10));
            LAUNCHES[launch].try_start_with(shape.0, shape.1, options).unwrap()
        })
    }
}

fn agree(sessions: &RefCell<Sessions>, program: &Program) -> Result<(), TestCaseError> {
    let expected = interpret(program);
    for (launch, kind) in LAUNCHES.iter().enumerate() {
        let fixture = sessions.borrow_mut().take(launch, program.shape);
        let found = perform(&fixture.session, program);
        prop_assert_eq!(found.as_ref(), Ok(&expected), "{:?}", kind);
        sessions.borrow_mut().0.insert((launch, program.shape), fixture);
    }
    Ok(())
}

#[test]
fn workers_do_what_a_sequential_program_would() {
    let cases = if std::env::var_os("PROPTEST_CASES").is_some() { Config::default().cases } else { CASES };
    let seeds = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/disco_model.proptest-regressions");
    let config = Config {
        cases,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(seeds))),
        max_shrink_iters: 2000,
        ..Config::default()
    };
    let sessions = RefCell::default();
    let outcome = TestRunner::new(config).run(&program(), |program| agree(&sessions, &program));
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}
