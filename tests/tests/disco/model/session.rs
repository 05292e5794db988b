//! A program on a real session, and the observations that can be compared.

use disco::{Content, DRef, DiscoError, DiscoSession, Failure, WorkerId};
use rpc_core::{DataType, ErrorKind, Tensor, Value};

use super::data::Data;
use super::program::{Among, Kind, Program, Step, between, scattered, uses_variable};

/// Observations of a session.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Seen {
    Null,
    Int(i64),
    Float(u64),
    Tensor { float: bool, shape: Vec<i64>, bits: Vec<u64> },
    Failures(Vec<Fault>),
}

/// The compared parts of a failure.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Fault {
    pub(crate) worker: u32,
    pub(crate) command: &'static str,
    pub(crate) kind: ErrorKind,
}

pub(crate) fn seen_tensor(tensor: &Tensor) -> Seen {
    let view = tensor.read().unwrap();
    let float = tensor.dtype() == DataType::F32;
    let data = match float {
        true => Data::F32(view.as_slice::<f32>().unwrap().to_vec()),
        false => Data::I64(view.as_slice::<i64>().unwrap().to_vec()),
    };
    Seen::Tensor { float, shape: tensor.shape().to_vec(), bits: data.bits() }
}

pub(crate) fn seen_failures(error: DiscoError) -> Result<Seen, DiscoError> {
    let DiscoError::Workers(failures) = error else { return Err(error) };
    let fault = |failure: Failure| Fault {
        worker: failure.worker.0,
        command: String::leak(failure.command),
        kind: failure.cause.kind(),
    };
    Ok(Seen::Failures(failures.into_iter().map(fault).collect()))
}

pub(crate) fn seen(content: Result<Content, DiscoError>) -> Result<Seen, DiscoError> {
    Ok(match content {
        Ok(Content::Tensor(tensor)) => seen_tensor(&tensor),
        Ok(Content::Value(Value::Null)) => Seen::Null,
        Ok(Content::Value(Value::Int(int))) => Seen::Int(int),
        Ok(Content::Value(Value::Float(float))) => Seen::Float(float.to_bits()),
        Ok(other) => panic!("a value that no program makes: {other:?}"),
        Err(error) => return seen_failures(error),
    })
}

pub(crate) fn seen_end(end: Result<(), DiscoError>) -> Result<Seen, DiscoError> {
    end.map_or_else(seen_failures, |()| Ok(Seen::Failures(Vec::new())))
}

pub(crate) fn perform(session: &DiscoSession, program: &Program) -> Result<Vec<Seen>, DiscoError> {
    let n = session.num_workers();
    // Made once for each session.
    let mesh = session.mesh(&Among::axes(program.shape)).wait()?;
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
                Some(session.empty_on_worker0(&layout.shape, layout.dtype(), None, scope.scope(&mesh))?)
            }
            Step::CopyIn { layout, seed, to } => {
                let made = session.copy_to_worker_0(&layout.data(*seed).tensor(&layout.shape), to.map(var))?;
                to.is_none().then_some(made)
            }
            Step::Broadcast { layout, seed, to, scope } => {
                let made =
                    session.broadcast(&layout.data(*seed).tensor(&layout.shape), to.map(var), scope.scope(&mesh))?;
                to.is_none().then_some(made)
            }
            Step::Scatter { rest, seed, to, scope } => {
                let layout = scattered(rest, program.shape, *scope);
                let made =
                    session.scatter(&layout.data(*seed).tensor(&layout.shape), to.map(var), scope.scope(&mesh))?;
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
                let (from, into, scope) = (var(*from), to.map(var), scope.scope(&mesh));
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
                session.barrier(scope.scope(&mesh))?;
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
    // At the end all variables are read.
    trace.push(seen_end(session.sync_all().wait())?);
    for var in &vars {
        for worker in 0..n {
            trace.push(seen(session.debug_get_from_remote(var, WorkerId(worker)).wait())?);
        }
    }
    Ok(trace)
}
