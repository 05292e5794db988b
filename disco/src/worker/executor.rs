//! A worker: a register file, and the thread that executes commands on it in the order of their sequence numbers.

use std::collections::HashMap;
use std::sync::Arc;

use rpc_core::function::{Function, FunctionKind, Object};
use rpc_core::{Context, DataType, ErrorKind, LocalValue, Module, RpcError, Tensor, Value, VirtualDevice, blocking};

use super::announced::{HEADER, read_layout, result_layout, write_layout};
use super::recorded::{Kept, Running};
use crate::ccl::accelerated;
use crate::ccl::{Operation, Rank};
use crate::error::{Failure, WorkerId};
use crate::link::loss::ExitGuard;
use crate::wire::command::{Command, HostTensor, Kind, OWN, On, Operand, Register, Scope};
use crate::wire::event::{Event, EventSink, Report};
use crate::wire::parameter::unfit;
use crate::wire::plan::{Layout, Plan, Way};
use crate::wire::set_up::SetUp;
use crate::worker::context::{CollectiveError, WorkerContext};
use crate::worker::feed::{Feed, Reader};
use crate::worker::process_state::ProcessState;

/// What a register holds.
#[derive(Clone, Default)]
pub(super) enum Slot {
    #[default]
    Empty,
    Value(LocalValue),
    /// What should have set it failed.
    Poisoned(Arc<Failure>),
}

/// How far beyond the registers that there are a command may set one: what it can make a worker reserve.
const MAX_GAP: usize = 1 << 16;

/// The most bytes of a value that is no tensor, on its way to the controller.
const MAX_FETCH: usize = 16 << 20;

/// The most programs of a session.
const MAX_PROGRAMS: usize = 1 << 12;

/// What a register may lose: the command that has set it.
struct AtStake {
    sequence: u64,
    command: String,
}

/// Why a command has no result.
enum Fault {
    /// It failed here.
    Own(RpcError),
    /// It depends on something that failed.
    Inherited(Arc<Failure>),
}

impl From<RpcError> for Fault {
    fn from(error: RpcError) -> Self {
        Self::Own(error)
    }
}

type Outcome<T = ()> = Result<T, Fault>;

/// One worker, on a thread of its own.
pub(crate) struct Worker {
    id: WorkerId,
    layout: Layout,
    this: WorkerContext,
    /// What all workers of the process share.
    shared: Arc<ProcessState>,
    feed: Arc<Feed>,
    sink: Arc<dyn EventSink>,
    registers: Vec<Slot>,
    /// What functions in registers are called, for failures.
    names: Vec<Option<Arc<str>>>,
    sequence: u64,
    /// How many commands, and steps of programs, there were so far in which workers may meet: the same on all of them.
    steps: u64,
    programs: HashMap<u32, Arc<Kept>>,
    running: Option<Running>,
    /// Whether collectives leave work to a device.
    is_accelerated: bool,
    /// The registers that would be lost with that.
    at_stake: HashMap<Register, AtStake>,
    executed: u64,
    reported: u64,
    /// Progress is reported when so much more credit has come free.
    report_every: u64,
    shut_down: bool,
}

impl Worker {
    pub(crate) fn new(this: WorkerContext, shared: Arc<ProcessState>, feed: Arc<Feed>) -> Self {
        Self {
            id: this.worker_id(),
            layout: shared.set_up().layout,
            this,
            sink: shared.sink(),
            report_every: shared.set_up().report_every,
            shared,
            feed,
            registers: Vec::new(),
            names: Vec::new(),
            sequence: 0,
            steps: 0,
            programs: HashMap::new(),
            running: None,
            is_accelerated: false,
            at_stake: HashMap::new(),
            executed: 0,
            reported: 0,
            shut_down: false,
        }
    }

    /// Executes commands until the end.
    pub(crate) fn run(mut self, mut reader: Reader) {
        self.this.enter();
        let mut exit = ExitGuard::new(self.id, Arc::clone(&self.sink));
        while !self.shut_down {
            let performed = reader.next(|sequence, queued| {
                self.sequence = sequence;
                self.perform(&queued.command);
                self.executed += queued.cost;
                if self.executed - self.reported >= self.report_every {
                    self.report();
                }
                self.acknowledge(&queued.command);
            });
            if performed.is_none() {
                break;
            }
        }
        exit.expect_exit();
        self.this.set_membership(Err(RpcError::new(ErrorKind::Closed, "the worker has ended")));
        WorkerContext::leave();
    }

    fn report(&mut self) {
        self.reported = self.executed;
        self.sink.send(Event::Progress { worker: self.id, sequence: self.sequence, cost: self.executed });
    }

    /// Says that a command has been executed, where somebody waits for that.
    fn acknowledge(&mut self, command: &Command) {
        let ticket = match command {
            Command::SyncWorker { ticket, worker } if worker.is_none_or(|worker| worker == self.id.0) => *ticket,
            Command::Shutdown { ticket } => {
                self.shut_down = true;
                *ticket
            }
            _ => return,
        };
        self.settle();
        if matches!(command, Command::SyncWorker { .. })
            && let Err(cause) = self.this.synchronize()
        {
            self.tell(command, cause.into());
        }
        self.report();
        self.sink.send(Event::Reached { ticket });
    }

    /// Waits for what collectives have left to the device. If some of it is lost, that is a failure of the first command that may have lost something, and poisons
    /// what all of them have set.
    fn settle(&mut self) -> Option<Arc<Failure>> {
        if !self.is_accelerated {
            return None;
        }
        let at_stake = std::mem::take(&mut self.at_stake);
        let cause = self.this.settle().err()?;
        let first = at_stake.values().min_by_key(|one| one.sequence);
        let (sequence, command) =
            first.map_or((self.sequence, "collective"), |first| (first.sequence, first.command.as_str()));
        let failure = Failure { worker: self.id, sequence, command: command.to_owned(), cause };
        self.sink.send(Event::Failed(failure.clone()));
        let failure = Arc::new(failure);
        for register in at_stake.into_keys() {
            let slot = match &mut self.running {
                Some(running) if register & OWN != 0 => running.own.get_mut((register & !OWN) as usize),
                _ => self.registers.get_mut(register as usize),
            };
            if let Some(slot) = slot {
                *slot = Slot::Poisoned(Arc::clone(&failure));
            }
        }
        Some(failure)
    }

    /// Notes what would be lost with a collective that is still on the device.
    fn note_at_stake(&mut self, command: &Command) {
        if !matches!(command, Command::CallPacked { .. } | Command::Collective { .. } | Command::SendRecv { .. }) {
            return;
        }
        let Some(register) = command.outputs() else { return };
        let place = self.running.as_ref().and_then(|running| running.place(register)).unwrap_or(register);
        let (sequence, command) = (self.sequence, self.title(command));
        self.at_stake.insert(place, AtStake { sequence, command });
    }

    /// Executes one command; what fails poisons what it should have set.
    fn perform(&mut self, command: &Command) {
        if let Command::CopyFromWorker0 { ticket, from } = command {
            if self.id.0 == 0 {
                self.fetch(*ticket, *from, true, command);
            }
            return;
        }
        if let Command::DebugGetFromRemote { ticket, worker, from } = command {
            if *worker == self.id.0 {
                self.fetch(*ticket, *from, false, command);
            }
            return;
        }
        let Err(fault) = self.execute(command) else {
            if self.is_accelerated {
                self.note_at_stake(command);
            }
            return;
        };
        let failure = self.tell(command, fault);
        if let Some(register) = command.outputs() {
            self.set(register, Slot::Poisoned(failure));
        }
    }

    /// Tells the controller of what has failed here, and gives the failure.
    fn tell(&self, command: &Command, fault: Fault) -> Arc<Failure> {
        match fault {
            Fault::Inherited(failure) => failure,
            Fault::Own(cause) => {
                let failure = self.failure(command, cause);
                tracing::debug!(%failure, "a command failed");
                self.sink.send(Event::Failed(failure.clone()));
                Arc::new(failure)
            }
        }
    }

    fn failure(&self, command: &Command, cause: RpcError) -> Failure {
        Failure { worker: self.id, sequence: self.sequence, command: self.title(command), cause }
    }

    /// What a command is called in failures.
    fn title(&self, command: &Command) -> String {
        let name = match command {
            Command::CallPacked { function, .. } => {
                let function = self.running.as_ref().map_or(Some(*function), |running| running.place(*function));
                function.and_then(|function| self.names.get(function as usize)?.as_ref()).map(|name| name.to_string())
            }
            _ => None,
        };
        let command = name.unwrap_or_else(|| command.name().to_owned());
        match &self.running {
            Some(running) => format!("{command}, step {} of program {}", running.step, running.program),
            None => command,
        }
    }

    fn execute(&mut self, command: &Command) -> Outcome {
        match command {
            Command::KillReg { register } => {
                self.set(*register, Slot::Empty);
                self.set_name(*register, None);
            }
            Command::GetGlobalFunc { to, name } => {
                let function = self.this.context().function(name)?;
                self.set_name(*to, Some(name));
                self.set_object(*to, Object::Function(function));
            }
            Command::CallPacked { to, function, args } => {
                self.begin_step();
                let result = self.call(*function, args);
                if result.is_err() {
                    // Where it succeeds on others, they may wait for this worker in collectives of that function.
                    self.this.leave_step();
                }
                self.set(*to, Slot::Value(result?));
            }
            Command::LoadModule { to, path, device } => {
                let context = self.this.context();
                let mut module = self.shared.load_module(context, path)?;
                if let Some(device) = device {
                    // One for each worker: what is set up serves one caller at a time.
                    module = module.instance(context, *device)?.unwrap_or(module);
                }
                self.set_object(*to, Object::Module(module));
            }
            Command::ModuleFunction { to, module, name } => {
                let function = self.module(*module)?.function(name)?;
                self.set_name(*to, Some(name));
                self.set_object(*to, Object::Function(function));
            }
            Command::Empty { to, device, dtype, shape, on } => {
                let value = if self.is_meant(*on) {
                    let (wanted, context) = (device.as_ref(), self.this.context());
                    let (device, scope) = (self.this.choose(wanted)?, wanted.and_then(VirtualDevice::memory_scope));
                    let tensor = context.allocate_in_scope(device, *dtype, shape, scope)?;
                    self.this.note_use(device);
                    Value::Object(Object::Tensor(tensor))
                } else {
                    Value::Null
                };
                self.set(*to, Slot::Value(value));
            }
            Command::CopyToWorker0 { to, fresh, dtype, shape, offset, data, on } => {
                if self.is_meant(*on) {
                    self.copy_in(*to, *fresh && *offset == 0, (*dtype, shape), *offset, data)?;
                } else if *fresh {
                    self.set(*to, Slot::Value(Value::Null));
                }
            }
            Command::DebugSetRegister { worker, to, value } => {
                if *worker == self.id.0 {
                    self.set_by_value(*to, value)?;
                }
            }
            Command::Collective { kind, scope, from, to, fresh } => {
                self.collective(command, *kind, *scope, *from, (*to, *fresh))?;
            }
            Command::SendRecv { from, to, pairs } => self.send_recv(command, *from, *to, pairs)?,
            Command::InitCcl { plan } => {
                // It is told, and poisons what it has to.
                self.settle();
                // The old communicators go first, so that nobody waits in them.
                self.this.set_membership(Err(RpcError::unsupported("the data plane is being made")));
                let plan: Plan = plan.decode()?;
                if let Some(device) = plan.devices.get(self.id.index()) {
                    self.this.set_device(*device);
                }
                let joined = self.shared.rendezvous().join(&plan, self.layout, self.id, self.shared.relays());
                let joined = joined.and_then(|membership| match plan.accelerated {
                    Some(flavour) => {
                        let (device, group) = (self.this.device(), self.layout.group(self.id));
                        accelerated::join(membership, flavour, plan.limits, device, group)
                    }
                    None => Ok(membership),
                });
                self.is_accelerated = plan.accelerated.is_some() && joined.is_ok();
                let failed = joined.as_ref().err().cloned();
                self.this.set_membership(joined);
                if let Some(error) = failed {
                    let cause = error.clone().context(format_args!("worker {} has no collectives", self.id));
                    self.this.tell_broken(Report { epoch: plan.epoch, culprit: None, cause });
                    // Without a way to each other only collectives fail.
                    if !matches!(plan.way, Way::Apart { .. }) {
                        return Err(error.into());
                    }
                }
                if self.feed.is_aborted() {
                    self.this.abort_collectives("the session has ended");
                }
            }
            Command::Define { program, registers, parameters, outputs, steps } => {
                if self.programs.len() >= MAX_PROGRAMS {
                    let text = format!("a session may have {MAX_PROGRAMS} recorded programs at a time: drop some");
                    return Err(RpcError::new(ErrorKind::LimitExceeded, text).into());
                }
                let kept = Kept {
                    registers: *registers as usize,
                    parameters: parameters.clone(),
                    outputs: outputs.clone(),
                    steps: steps.clone(),
                };
                kept.check()?;
                self.programs.insert(*program, Arc::new(kept));
            }
            Command::Run { program, args, outputs } => self.run_program(command, *program, args, outputs)?,
            Command::Forget { program } => _ = self.programs.remove(program),
            Command::Nothing
            | Command::SyncWorker { .. }
            | Command::Shutdown { .. }
            | Command::CopyFromWorker0 { .. }
            | Command::DebugGetFromRemote { .. } => {}
        }
        Ok(())
    }

    fn is_meant(&self, on: On) -> bool {
        match on {
            On::All => true,
            On::Worker0 => self.id.0 == 0,
            On::FirstOfGroups => self.layout.rank_in_group(self.id) == Rank(0),
        }
    }

    /// Runs the steps of a program; each that fails is a failure of its own.
    fn run_program(
        &mut self,
        command: &Command,
        program: u32,
        args: &[Value<Operand>],
        outputs: &[Register],
    ) -> Outcome {
        let kept = self.programs.get(&program).cloned();
        let kept = kept.filter(|kept| kept.parameters.len() == args.len() && kept.outputs.len() == outputs.len());
        let kept = kept.ok_or_else(|| RpcError::internal(format!("there is no program {program} like that")))?;
        let mut running =
            Running { program, step: 0, places: vec![None; kept.registers], own: vec![Slot::Empty; kept.registers] };
        for (place, ((at, wanted), arg)) in (1..).zip(kept.parameters.iter().zip(args)) {
            // What failed earlier fits: it is for the steps to inherit that.
            let found = match arg {
                Value::Object(Operand::Register(register)) => match self.registers.get(*register as usize) {
                    Some(Slot::Value(value)) => wanted.check_local(value),
                    Some(Slot::Poisoned(_)) => Ok(()),
                    Some(Slot::Empty) | None => wanted.check_local(&Value::Null),
                },
                // The controller has looked at it.
                _ => Ok(()),
            };
            let at = *at as usize;
            running.own[at] = match (found, arg) {
                (Err(found), _) => {
                    let cause = unfit(place, wanted, &format!("{found} on worker {}", self.id));
                    Slot::Poisoned(self.tell(command, cause.into()))
                }
                (Ok(()), Value::Object(Operand::Register(register))) => {
                    running.places[at] = Some(*register);
                    Slot::Empty
                }
                (Ok(()), value) => match self.resolve(value) {
                    Ok(value) => Slot::Value(value),
                    Err(fault) => Slot::Poisoned(self.tell(command, fault)),
                },
            };
        }
        for (output, register) in kept.outputs.iter().zip(outputs) {
            running.places[*output as usize] = Some(*register);
        }
        self.running = Some(running);
        for (number, step) in (1..).zip(&kept.steps) {
            if let Some(running) = &mut self.running {
                running.step = number;
            }
            self.perform(step);
            if self.feed.is_aborted() {
                break;
            }
        }
        self.running = None;
        // The registers that were the program's own are gone.
        self.at_stake.retain(|register, _| register & OWN == 0);
        Ok(())
    }

    /// Workers may meet in what comes now.
    fn begin_step(&mut self) {
        self.steps += 1;
        self.this.begin_step(self.steps);
    }

    fn set(&mut self, register: Register, slot: Slot) {
        let mut register = register;
        if register & OWN != 0
            && let Some(running) = &mut self.running
        {
            match running.place(register) {
                Some(place) => register = place,
                None => {
                    running.own[(register & !OWN) as usize] = slot;
                    self.not_at_stake(register);
                    return;
                }
            }
        }
        let at = register as usize;
        if at >= self.registers.len() + MAX_GAP {
            tracing::error!(register, "a controller uses a register far beyond those that there are");
            return;
        }
        if at >= self.registers.len() {
            self.registers.resize(at + 1, Slot::Empty);
        }
        self.not_at_stake(register);
        self.registers[at] = slot;
    }

    fn not_at_stake(&mut self, register: Register) {
        if self.is_accelerated {
            self.at_stake.remove(&register);
        }
    }

    fn set_object(&mut self, register: Register, object: Object) {
        self.set(register, Slot::Value(Value::Object(object)));
    }

    fn set_name(&mut self, register: Register, name: Option<&str>) {
        let place = self.running.as_ref().map_or(Some(register), |running| running.place(register));
        // What a program has for itself goes by what it is.
        let Some(at) = place.map(|register| register as usize).filter(|at| *at < self.registers.len() + MAX_GAP) else {
            return;
        };
        if name.is_some() && at >= self.names.len() {
            self.names.resize(at + 1, None);
        }
        if let Some(place) = self.names.get_mut(at) {
            *place = name.map(Arc::from);
        }
    }

    fn value(&self, register: Register) -> Outcome<LocalValue> {
        self.held(register).cloned()
    }

    fn held(&self, register: Register) -> Outcome<&LocalValue> {
        let own = self.running.as_ref().filter(|_| register & OWN != 0);
        let slot = match own.map(|running| running.place(register).ok_or(running)) {
            Some(Err(running)) => running.own.get((register & !OWN) as usize),
            Some(Ok(place)) => self.registers.get(place as usize),
            None => self.registers.get(register as usize),
        };
        match slot {
            Some(Slot::Value(value)) => Ok(value),
            Some(Slot::Poisoned(failure)) => Err(Fault::Inherited(Arc::clone(failure))),
            Some(Slot::Empty) | None => {
                Err(RpcError::internal(format!("register {register} of worker {} is empty", self.id)).into())
            }
        }
    }

    /// The tensor in a register; `None` for null.
    fn tensor(&self, register: Register) -> Outcome<Option<Tensor>> {
        match self.value(register)? {
            Value::Object(Object::Tensor(tensor)) => Ok(Some(tensor)),
            Value::Null => Ok(None),
            other => Err(self.unexpected("a tensor", &other).into()),
        }
    }

    fn function(&self, register: Register) -> Outcome<&Function> {
        match self.held(register)? {
            Value::Object(Object::Function(function)) => Ok(function),
            other => Err(self.unexpected("a function", other).into()),
        }
    }

    fn module(&self, register: Register) -> Outcome<Arc<dyn Module>> {
        match self.value(register)? {
            Value::Object(Object::Module(module)) => Ok(module),
            other => Err(self.unexpected("a module", &other).into()),
        }
    }

    fn unexpected(&self, expected: &str, value: &LocalValue) -> RpcError {
        let found = if let Value::Object(object) = value { object.type_name() } else { value.type_name() };
        RpcError::invalid_argument(format!("expected {expected} on worker {}, found {found}", self.id))
    }

    fn call(&self, function: Register, args: &[Value<Operand>]) -> Outcome<LocalValue> {
        let function = self.function(function)?;
        let args = args.iter().map(|arg| self.resolve(arg)).collect::<Outcome<Vec<_>>>()?;
        let context = self.this.context();
        let result = match function.kind() {
            FunctionKind::Async => blocking::block_on(context.call_async(function, args))?,
            FunctionKind::Blocking | FunctionKind::Inline => context.call(function, args),
        };
        Ok(result?)
    }

    fn resolve(&self, arg: &Value<Operand>) -> Outcome<LocalValue> {
        Ok(match arg {
            Value::Object(Operand::Register(register)) => self.value(*register)?,
            Value::Object(Operand::Tensor(tensor)) => Value::Object(Object::Tensor(self.receive(tensor)?)),
            Value::List(values) => Value::List(values.iter().map(|value| self.resolve(value)).collect::<Outcome<_>>()?),
            Value::Map(pairs) => {
                let pair = |(key, value): &(_, _)| Ok((self.resolve(key)?, self.resolve(value)?));
                Value::Map(pairs.iter().map(pair).collect::<Outcome<_>>()?)
            }
            plain => plain.clone().try_map(&mut |_: Operand| Err(RpcError::internal("an operand in a plain value")))?,
        })
    }

    /// A tensor of this worker with the content of one that came with a command.
    fn receive(&self, tensor: &HostTensor) -> Outcome<Tensor> {
        let made = self.this.allocate(tensor.dtype, &tensor.shape)?;
        let (_, mut borrow) = made.write()?.into_parts();
        borrow.copy_in(0, &tensor.bytes)?;
        Ok(made)
    }

    fn copy_in(
        &mut self,
        to: Register,
        make: bool,
        (dtype, shape): (DataType, &[i64]),
        offset: u64,
        data: &[u8],
    ) -> Outcome {
        if make {
            let tensor = self.this.allocate(dtype, shape)?;
            self.set_object(to, Object::Tensor(tensor));
        }
        let Some(tensor) = self.tensor(to)? else {
            return Err(self.unexpected("a tensor", &Value::Null).into());
        };
        let elements = rpc_core::dlpack::element_count(shape)?;
        if tensor.dtype() != dtype || tensor.element_count() != elements {
            return Err(RpcError::invalid_argument(format!(
                "a copy of {dtype} {shape:?} into {} {:?} on worker {}: dtype and number of elements must be the same",
                tensor.dtype(),
                tensor.shape(),
                self.id
            ))
            .into());
        }
        let range = tensor.byte_range(offset, data.len() as u64)?;
        let (_, mut borrow) = tensor.write()?.into_parts();
        Ok(borrow.copy_in(range.start, data)?)
    }

    /// Sets a register; between tensors of the same type and number of elements that copies in place.
    fn set_by_value(&mut self, to: Register, value: &Value<Operand>) -> Outcome {
        if let Value::Object(Operand::Tensor(new)) = value
            && let Ok(Some(old)) = self.tensor(to)
            && old.dtype() == new.dtype
            && old.shape() == new.shape
            && old.is_dense()
        {
            let start = old.byte_range(0, new.bytes.len() as u64)?.start;
            let (_, mut borrow) = old.write()?.into_parts();
            return Ok(borrow.copy_in(start, &new.bytes)?);
        }
        let value = self.resolve(value)?;
        self.set(to, Slot::Value(value));
        Ok(())
    }

    /// Sends what a register holds to the controller.
    fn fetch(&mut self, ticket: u64, from: Register, tensor_only: bool, command: &Command) {
        self.report();
        // What is lost is told, and poisons what it has to.
        self.settle();
        let content = self.value(from).and_then(|value| match &value {
            Value::Object(Object::Tensor(tensor)) => {
                tensor.byte_range(0, tensor.size_bytes())?;
                drop(tensor.read()?);
                Ok(value)
            }
            other if tensor_only => Err(self.unexpected("a tensor", other).into()),
            other if other.size_with(&|_| 0) > MAX_FETCH => Err(RpcError::new(
                ErrorKind::LimitExceeded,
                format!(
                    "the value takes {} bytes of memory, and {MAX_FETCH} are allowed: make a tensor of it",
                    other.size_with(&|_| 0)
                ),
            )
            .into()),
            other => {
                let mut objects = 0;
                other.for_each_object(&mut |_| objects += 1);
                if objects == 0 { Ok(value) } else { Err(self.unexpected("a value or a tensor", other).into()) }
            }
        });
        let content = content.map_err(|fault| match fault {
            Fault::Own(cause) => self.failure(command, cause),
            Fault::Inherited(failure) => Failure::clone(&failure),
        });
        self.sink.send_content(ticket, content);
    }

    /// Takes part in a collective on registers. Whatever is wrong here, the other workers must hear of it by this one's taking part.
    fn collective(
        &mut self,
        command: &Command,
        kind: Kind,
        scope: Scope,
        from: Register,
        (to, fresh): (Register, bool),
    ) -> Outcome {
        self.begin_step();
        let (rank, size) = self.this.rank(scope);
        let root = Rank(0);
        let is_root = rank == root;
        let operation = match kind {
            Kind::Allreduce(op) => Operation::Allreduce(op),
            Kind::ReduceScatter(op) => Operation::ReduceScatter(op),
            Kind::Allgather => Operation::Allgather,
            Kind::Broadcast => Operation::Broadcast { root },
            Kind::Scatter => Operation::Scatter { root },
            Kind::Gather => Operation::Gather { root },
            Kind::AllToAll => Operation::AllToAll,
            Kind::Barrier => return self.take_part(command, scope, Operation::Barrier, Ok((None, None))),
        };
        let one_sided = matches!(kind, Kind::Broadcast | Kind::Scatter);
        let source =
            if one_sided && !is_root { Ok(None) } else { self.tensor(from).and_then(|found| self.present(found)) };
        let target = if fresh {
            // Only the root of a broadcast or scatter knows what the others have to expect.
            let layout = match &source {
                _ if one_sided => Some(self.announce(command, scope, kind, size, &source)?),
                Ok(Some(tensor)) => result_layout(kind, tensor, size).map_err(Fault::Own).transpose(),
                Ok(None) => None,
                Err(Fault::Own(error)) => Some(Err(Fault::Own(error.clone()))),
                Err(Fault::Inherited(failure)) => Some(Err(Fault::Inherited(Arc::clone(failure)))),
            };
            match layout {
                Some(Ok((dtype, shape))) if kind != Kind::Gather || is_root => {
                    self.this.allocate(dtype, &shape).map(Some).map_err(Fault::Own)
                }
                Some(Err(fault)) => Err(fault),
                _ => Ok(None),
            }
        } else if kind == Kind::Gather && !is_root {
            Ok(None)
        } else {
            self.tensor(to).and_then(|found| self.present(found))
        };
        let tensors = source.and_then(|source| Ok((source, target?)));
        let target = tensors.as_ref().ok().and_then(|(_, target)| target.clone());
        self.take_part(command, scope, operation, tensors)?;
        if fresh {
            self.set(to, Slot::Value(target.map_or(Value::Null, |tensor| Value::Object(Object::Tensor(tensor)))));
        }
        Ok(())
    }

    fn present(&self, tensor: Option<Tensor>) -> Outcome<Option<Tensor>> {
        match tensor {
            Some(tensor) => Ok(Some(tensor)),
            None => Err(self.unexpected("a tensor", &Value::Null).into()),
        }
    }

    /// Tells everybody what the first worker's tensor will give them, before its data.
    fn announce(
        &mut self,
        command: &Command,
        scope: Scope,
        kind: Kind,
        size: u32,
        source: &Outcome<Option<Tensor>>,
    ) -> Outcome<Outcome<(DataType, Vec<i64>)>> {
        let operation = Operation::Broadcast { root: Rank(0) };
        // Where all tensors of collectives are, which may have no room left.
        let header = match self.this.allocate(DataType::U8, &[HEADER]) {
            Ok(header) => header,
            Err(error) => {
                self.take_part(command, scope, operation, Err(Fault::Own(error.clone())))?;
                return Err(error.into());
            }
        };
        let described = match source {
            Ok(Some(tensor)) => result_layout(kind, tensor, size).map_err(Fault::Own).and_then(|layout| {
                let (dtype, shape) = layout.ok_or_else(|| RpcError::internal("a result without layout"))?;
                write_layout(&header, dtype, &shape)?;
                Ok(())
            }),
            Ok(None) => Ok(()),
            Err(Fault::Own(error)) => Err(Fault::Own(error.clone())),
            Err(Fault::Inherited(failure)) => Err(Fault::Inherited(Arc::clone(failure))),
        };
        let tensors = described.map(|()| (Some(header.clone()), Some(header.clone())));
        self.take_part(command, scope, operation, tensors)?;
        if let Some(failure) = self.settle() {
            return Err(Fault::Inherited(failure));
        }
        Ok(Ok(read_layout(&header)?))
    }

    fn take_part(
        &self,
        command: &Command,
        scope: Scope,
        operation: Operation,
        tensors: Outcome<(Option<Tensor>, Option<Tensor>)>,
    ) -> Outcome {
        let (inherited, tensors) = match tensors {
            Ok(tensors) => (None, Ok(tensors)),
            Err(Fault::Own(error)) => (None, Err(error)),
            // What failed elsewhere is told with where that was.
            Err(Fault::Inherited(failure)) => {
                let cause = failure
                    .cause
                    .clone()
                    .context(format_args!("worker {}: {} (#{})", failure.worker, failure.command, failure.sequence));
                (Some(failure), Err(cause))
            }
        };
        let borrowed = tensors.as_ref().map(|(from, to)| (from.as_ref(), to.as_ref())).map_err(RpcError::clone);
        match (self.this.run(scope, operation, borrowed), inherited) {
            (Ok(()), _) => Ok(()),
            (Err(_), Some(failure)) => Err(Fault::Inherited(failure)),
            (Err(CollectiveError::Own(error)), None) => Err(Fault::Own(error)),
            (Err(CollectiveError::Inherited(worker, cause)), None) => Err(Fault::Inherited(Arc::new(Failure {
                worker,
                sequence: self.sequence,
                command: command.name().to_owned(),
                cause,
            }))),
        }
    }

    /// Sends and receives by pairs. All workers go through them in one order, so that nobody waits in a circle.
    fn send_recv(&mut self, command: &Command, from: Register, to: Register, pairs: &[(u32, u32)]) -> Outcome {
        self.begin_step();
        let mut outcome = Ok(());
        for (sender, receiver) in pairs {
            let (operation, tensors) = if *sender == self.id.0 {
                let tensor = self.tensor(from).and_then(|found| self.present(found));
                (Operation::Send { to: Rank(*receiver) }, tensor.map(|tensor| (tensor, None)))
            } else if *receiver == self.id.0 {
                let tensor = self.tensor(to).and_then(|found| self.present(found));
                (Operation::Recv { from: Rank(*sender) }, tensor.map(|tensor| (None, tensor)))
            } else {
                continue;
            };
            // The other ends of the pairs to come wait all the same.
            let this = self.take_part(command, Scope::World, operation, tensors);
            outcome = outcome.and(this);
        }
        outcome
    }
}

/// Starts a worker's thread.
///
/// # Errors
///
/// The session may have no more threads, or the system has none.
pub(crate) fn start(
    id: WorkerId,
    context: Context,
    shared: Arc<ProcessState>,
    feed: Arc<Feed>,
    reader: Reader,
) -> rpc_core::Result<WorkerContext> {
    let place = context.reserve_thread().map_err(|error| error.context(format_args!("worker {id}")))?;
    let SetUp { layout, pin, logs, .. } = *shared.set_up();
    let this = WorkerContext::new(id, layout, context, shared.sink(), logs);
    let worker = Worker::new(this.clone(), shared, feed);
    let run = move || {
        // Until the thread ends.
        let _place = place;
        if pin {
            pin_to_processor(id);
        }
        let _span = tracing::info_span!("worker", id = id.0).entered();
        worker.run(reader);
    };
    std::thread::Builder::new()
        .name(format!("disco-{id}"))
        .spawn(run)
        .map_err(|error| RpcError::new(ErrorKind::LimitExceeded, format!("no thread for worker {id}: {error}")))?;
    Ok(this)
}

/// Keeps the calling thread on one of the processors that it may use now.
#[cfg(target_os = "linux")]
fn pin_to_processor(id: WorkerId) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let pinned = sched_getaffinity(None).and_then(|allowed| {
        let processors: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor)).collect();
        let mut one = CpuSet::new();
        if let Some(processor) = processors.get(id.index() % processors.len().max(1)) {
            one.set(*processor);
        }
        sched_setaffinity(None, &one)
    });
    if let Err(error) = pinned {
        tracing::warn!(%error, "a worker is not pinned to a processor");
    }
}

#[cfg(not(target_os = "linux"))]
fn pin_to_processor(_: WorkerId) {
    tracing::warn!("workers cannot be pinned to processors on this system");
}
