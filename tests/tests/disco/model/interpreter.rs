//! The interpreter: a program step by step, one worker after the other.

use std::collections::HashMap;

use rpc_core::ErrorKind;

use super::collective::collective;
use super::data::{Data, Layout};
use super::program::{Among, Kind, Program, Step, between, scattered, uses_variable};
use super::session::{Fault, Seen};
use super::slot::{ModelTensor, Slot, Trouble, WRONG};

pub(crate) fn interpret(program: &Program) -> Model {
    let (n, groups) = program.shape;
    let mut model =
        Model { n, groups, vars: Vec::new(), untold: Vec::new(), trace: Vec::new(), collectives: HashMap::new() };
    program.steps.iter().for_each(|step| model.step(step));
    model.tell(None);
    let slots: Vec<Seen> = model.vars.iter().flatten().map(Slot::seen).collect();
    model.trace.extend(slots);
    model
}

pub(crate) struct Model {
    pub(crate) n: u32,
    pub(crate) groups: u32,
    /// Slots of each variable, one for each worker.
    pub(crate) vars: Vec<Vec<Slot>>,
    pub(crate) untold: Vec<Fault>,
    pub(crate) trace: Vec<Seen>,
    /// Number of times that each collective among several workers has moved data, and has failed.
    pub(crate) collectives: HashMap<&'static str, [u32; 2]>,
}

impl Model {
    pub(crate) fn at(&self, var: usize) -> usize {
        var % self.vars.len()
    }

    /// Runs a command on each worker by itself. `run` returns the result there, or the reason why
    /// there is none.
    pub(crate) fn each(
        &mut self,
        command: &'static str,
        run: impl Fn(&Self, u32) -> Result<Slot, Trouble>,
    ) -> Vec<Slot> {
        let outcomes: Vec<_> = (0..self.n).map(|worker| run(self, worker)).collect();
        self.settle(command, outcomes)
    }

    /// Records the failures, and returns the slots of the output.
    pub(crate) fn settle(&mut self, command: &'static str, outcomes: Vec<Result<Slot, Trouble>>) -> Vec<Slot> {
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

    /// Returns the groups of workers that a collective runs in.
    pub(crate) fn scopes(&self, scope: Among) -> Vec<Vec<u32>> {
        let size = scope.size((self.n, self.groups));
        if scope == Among::Across {
            let stride = self.n / self.groups;
            return (0..stride).map(|first| (0..size).map(|rank| first + rank * stride).collect()).collect();
        }
        (0..self.n).collect::<Vec<_>>().chunks(size as usize).map(<[u32]>::to_vec).collect()
    }

    pub(crate) fn first_of(&self, scope: Among) -> Vec<u32> {
        self.scopes(scope).iter().map(|members| members[0]).collect()
    }

    /// Places the controller's tensor on the first workers of a scope.
    pub(crate) fn bring(&mut self, layout: &Layout, seed: u32, scope: Among) -> Vec<Slot> {
        let firsts = self.first_of(scope);
        let slot = |worker| match firsts.contains(&worker) {
            true => Slot::Tensor(ModelTensor::new(layout.data(seed), &layout.shape)),
            false => Slot::Null,
        };
        (0..self.n).map(slot).collect()
    }

    pub(crate) fn collective(&mut self, kind: Kind, scope: Among, from: &[Slot], to: Option<usize>) {
        let mut outcomes: Vec<_> = (0..self.n).map(|_| None).collect();
        for members in self.scopes(scope) {
            let sources: Vec<&Slot> = members.iter().map(|worker| &from[*worker as usize]).collect();
            let targets = to.map(|to| members.iter().map(|worker| &self.vars[to][*worker as usize]).collect());
            let made = collective(kind, &members, &sources, targets);
            if members.len() > 1 {
                // On the other workers a gather leaves the output unchanged.
                let first = &made[0];
                let moved = matches!(first, Ok(Slot::Tensor(made)) if made.len() > 0);
                let failed = first.is_err();
                let counts = self.collectives.entry(kind.command()).or_default();
                counts[0] += u32::from(moved);
                counts[1] += u32::from(failed);
            }
            for (worker, outcome) in members.into_iter().zip(made) {
                outcomes[worker as usize] = Some(outcome);
            }
        }
        let outcomes = outcomes.into_iter().map(|outcome| outcome.expect("each worker is in one group")).collect();
        let slots = self.settle(kind.command(), outcomes);
        match to {
            Some(to) => self.vars[to] = slots,
            None => self.vars.push(slots),
        }
    }

    pub(crate) fn send_recv(&mut self, from: usize, to: usize, pairs: &[(u32, u32)]) {
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

    pub(crate) fn tell(&mut self, worker: Option<u32>) {
        let all = std::mem::take(&mut self.untold);
        let (told, kept) = all.into_iter().partition(|fault| worker.is_none_or(|worker| worker == fault.worker));
        self.untold = kept;
        self.trace.push(Seen::Failures(told));
    }

    /// Returns the value of a variable on a worker, or the failure of this command.
    pub(crate) fn look(&mut self, var: usize, worker: u32, tensor_only: Option<&'static str>) {
        let slot = &self.vars[var][worker as usize];
        let seen = match (slot, tensor_only) {
            (Slot::Tensor(_) | Slot::Poison(_), _) | (_, None) => slot.seen(),
            (_, Some(command)) => Seen::Failures(vec![Fault { worker, command, kind: ErrorKind::InvalidArgument }]),
        };
        self.trace.push(seen);
    }

    pub(crate) fn step(&mut self, step: &Step) {
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
            Step::CopyIn { layout, seed, to: None } => Some(self.bring(layout, *seed, Among::World)),
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
