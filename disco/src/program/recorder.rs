//! Recorded programs: a sequence of commands that the workers keep, and run as one.
//!
//! While a program is recorded its operations are written down with registers of its own: its
//! parameters and what its steps make. Registers of the session that it uses are *captured*, and
//! stay while it does. A run is one command, with an argument for each parameter and a fresh
//! register for each output; all else is let go when it ends.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rpc_core::{DataType, Value, VirtualDevice};

use crate::ccl::ReduceOp;
use crate::controller::dispatch::Controller;
use crate::controller::dref::{Argument, DPackedFunc, DRef, IntoArguments, Operand, Recorded, inline, resolve};
use crate::error::{DiscoError, Result, WorkerId};
use crate::wire::command::{self, Command, Kind, MAX_STEPS, OWN, On, Register, Scope};
use crate::wire::parameter::{Given, ParameterType, unfit};

/// Steps of a program that is being recorded.
struct Recording {
    controller: Arc<Controller>,
    /// Number by which its values know the recording: no other has the same in this process.
    number: u64,
    state: Mutex<Steps>,
}

#[derive(Default)]
struct Steps {
    steps: Vec<Command>,
    /// Number of the program's own registers, and those of them that are parameters.
    registers: u32,
    parameters: Vec<(u32, ParameterType)>,
    captured: Vec<DRef>,
}

impl Recording {
    fn lock(&self) -> MutexGuard<'_, Steps> {
        self.state.lock()
    }
}

/// Records the steps of a program: see [`DiscoSession::record`](crate::DiscoSession::record) and
/// [`DiscoSession::recorder`](crate::DiscoSession::recorder).
///
/// The operations are those of the session, without those that talk to the controller: copies,
/// looks into registers, syncs, and the loading of functions and modules, which comes before.
/// Errors are those of the session, at once; a reference of another recording or session is one.
#[derive(Debug)]
pub struct Recorder(Recording);

impl Recorder {
    pub(crate) fn new(controller: &Arc<Controller>) -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let number = LAST.fetch_add(1, Ordering::Relaxed);
        Self(Recording { controller: Arc::clone(controller), number, state: Mutex::default() })
    }

    /// Adds a parameter, a value that each run is given: any argument of a call, such as a number,
    /// a small tensor, or a reference. The first call makes the first parameter.
    pub fn parameter(&self) -> Recorded {
        self.parameter_of(ParameterType::Any)
    }

    /// Adds a parameter of this type. A run with a value of another type is refused at once. The
    /// type of a reference is known to the workers only: on each that holds a value of another type
    /// the run fails, and poisons what depends on the parameter.
    pub fn parameter_of(&self, wanted: ParameterType) -> Recorded {
        let made = self.own();
        self.0.lock().parameters.push((made.register & !OWN, wanted));
        made
    }

    /// Adds a register of the session, as it is at each run. It lives for as long as the program.
    ///
    /// # Errors
    ///
    /// It is of another session.
    pub fn capture(&self, reference: &DRef) -> Result<Recorded> {
        let register = reference.register_in(&self.0.controller)?;
        self.0.lock().captured.push(reference.clone());
        Ok(Recorded { recording: self.0.number, register })
    }

    /// Calls a function on every worker. Arguments are values, recorded values, and references,
    /// which are captured.
    ///
    /// # Errors
    ///
    /// An argument cannot be recorded.
    pub fn call(&self, function: &DPackedFunc, args: impl IntoArguments) -> Result<Recorded> {
        let function = self.capture(function.reference())?.register;
        let args = args.into_arguments()?.into_iter().map(|arg| self.argument(arg)).collect::<Result<_>>()?;
        self.step(|to| Command::CallPacked { to, function, args })
    }

    /// Calls a function that is itself a recorded value, such as a parameter.
    ///
    /// # Errors
    ///
    /// As [`call`](Self::call).
    pub fn call_value(&self, function: &Recorded, args: impl IntoArguments) -> Result<Recorded> {
        let function = self.register(function)?;
        let args = args.into_arguments()?.into_iter().map(|arg| self.argument(arg)).collect::<Result<_>>()?;
        self.step(|to| Command::CallPacked { to, function, args })
    }

    /// Allocates a zeroed tensor at each run, as
    /// [`DiscoSession::empty`](crate::DiscoSession::empty).
    ///
    /// # Errors
    ///
    /// None as yet.
    pub fn empty(&self, shape: &[i64], dtype: DataType, device: Option<VirtualDevice>) -> Result<Recorded> {
        self.step(|to| Command::Empty { to, device, dtype, shape: shape.to_vec(), on: On::All })
    }

    /// As [`DiscoSession::broadcast_from_worker0`](crate::DiscoSession::broadcast_from_worker0).
    ///
    /// # Errors
    ///
    /// A value of another recording.
    pub fn broadcast_from_worker0(&self, from: &Recorded, to: Option<&Recorded>, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::Broadcast, scope, from, to)
    }

    /// As [`DiscoSession::scatter_from_worker0`](crate::DiscoSession::scatter_from_worker0).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn scatter_from_worker0(&self, from: &Recorded, to: Option<&Recorded>, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::Scatter, scope, from, to)
    }

    /// As [`DiscoSession::gather_to_worker0`](crate::DiscoSession::gather_to_worker0).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn gather_to_worker0(&self, from: &Recorded, to: Option<&Recorded>, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::Gather, scope, from, to)
    }

    /// As [`DiscoSession::allreduce`](crate::DiscoSession::allreduce).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn allreduce(&self, from: &Recorded, to: Option<&Recorded>, op: ReduceOp, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::Allreduce(op), scope, from, to)
    }

    /// As [`DiscoSession::allgather`](crate::DiscoSession::allgather).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn allgather(&self, from: &Recorded, to: Option<&Recorded>, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::Allgather, scope, from, to)
    }

    /// As [`DiscoSession::reduce_scatter`](crate::DiscoSession::reduce_scatter).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn reduce_scatter(
        &self,
        from: &Recorded,
        to: Option<&Recorded>,
        op: ReduceOp,
        scope: Scope,
    ) -> Result<Recorded> {
        self.collective(Kind::ReduceScatter(op), scope, from, to)
    }

    /// As [`DiscoSession::all_to_all`](crate::DiscoSession::all_to_all).
    ///
    /// # Errors
    ///
    /// As [`broadcast_from_worker0`](Self::broadcast_from_worker0).
    pub fn all_to_all(&self, from: &Recorded, to: Option<&Recorded>, scope: Scope) -> Result<Recorded> {
        self.collective(Kind::AllToAll, scope, from, to)
    }

    /// As [`DiscoSession::barrier`](crate::DiscoSession::barrier).
    pub fn barrier(&self, scope: Scope) {
        let barrier = Command::Collective { kind: Kind::Barrier, scope, from: 0, to: 0, fresh: false };
        self.0.lock().steps.push(barrier);
    }

    /// As [`DiscoSession::send_recv`](crate::DiscoSession::send_recv).
    ///
    /// # Errors
    ///
    /// A pair of workers that there are not, or of one with itself; a value of another recording.
    pub fn send_recv(&self, from: &Recorded, to: &Recorded, pairs: &[(WorkerId, WorkerId)]) -> Result<()> {
        let pairs = self.0.controller.pairs(pairs)?;
        let step = Command::SendRecv { from: self.register(from)?, to: self.register(to)?, pairs };
        self.0.lock().steps.push(step);
        Ok(())
    }

    /// Ends the recording, and sends the program to the workers.
    ///
    /// # Errors
    ///
    /// Outputs that no step makes, or one of them twice; a program that is too large; the session
    /// has ended.
    pub fn finish(self, outputs: &[Recorded]) -> Result<Program> {
        let outputs = outputs.iter().map(|output| self.register(output)).collect::<Result<Vec<_>>>()?;
        let controller = Arc::clone(&self.0.controller);
        let state = std::mem::take(&mut *self.0.lock());
        for (position, output) in outputs.iter().enumerate() {
            let is_made = output & OWN != 0 && state.parameters.iter().all(|(at, _)| *at != output & !OWN);
            if !is_made || outputs[..position].contains(output) {
                return Err(DiscoError::invalid(
                    "the outputs of a program are values that its steps make, each of them once",
                ));
            }
        }
        if state.steps.len() > MAX_STEPS {
            return Err(DiscoError::invalid(format!(
                "a program of {} steps, where {MAX_STEPS} are allowed: record several, and run one after the other",
                state.steps.len()
            )));
        }
        let number = controller.take_program();
        let parameters = state.parameters.iter().map(|(_, wanted)| wanted.clone()).collect();
        let define = Command::Define {
            program: number,
            registers: state.registers,
            parameters: state.parameters,
            outputs: outputs.iter().map(|output| output & !OWN).collect(),
            steps: state.steps,
        };
        controller.issue(define)?;
        let outputs = outputs.len();
        Ok(Program(Arc::new(StoredProgram { controller, number, parameters, outputs, _captured: state.captured })))
    }

    /// Returns a fresh register of the program's own.
    fn own(&self) -> Recorded {
        let mut state = self.0.lock();
        state.registers += 1;
        Recorded { recording: self.0.number, register: OWN | (state.registers - 1) }
    }

    fn register(&self, recorded: &Recorded) -> Result<Register> {
        if recorded.recording == self.0.number {
            Ok(recorded.register)
        } else {
            Err(DiscoError::invalid("the value belongs to the recording of another program"))
        }
    }

    fn argument(&self, argument: Argument) -> Result<Value<command::Operand>> {
        argument.try_map(&mut |operand| {
            Ok(match operand {
                Operand::Reference(reference) => command::Operand::Register(self.capture(&reference)?.register),
                Operand::Recorded(recorded) => command::Operand::Register(self.register(&recorded)?),
                Operand::Tensor(tensor) => command::Operand::Tensor(inline(&tensor)?),
            })
        })
    }

    fn step(&self, command: impl FnOnce(Register) -> Command) -> Result<Recorded> {
        let made = self.own();
        self.0.lock().steps.push(command(made.register));
        Ok(made)
    }

    fn collective(&self, kind: Kind, scope: Scope, from: &Recorded, to: Option<&Recorded>) -> Result<Recorded> {
        let from = self.register(from)?;
        let (target, fresh) = match to {
            Some(to) => (*to, false),
            None => (self.own(), true),
        };
        let to = self.register(&target)?;
        self.0.lock().steps.push(Command::Collective { kind, scope, from, to, fresh });
        Ok(target)
    }
}

impl fmt::Debug for Recording {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recording").field("steps", &self.lock().steps.len()).finish_non_exhaustive()
    }
}

/// A recorded program, which the workers keep until the last clone is dropped. Cheap to clone.
#[derive(Clone)]
pub struct Program(Arc<StoredProgram>);

struct StoredProgram {
    controller: Arc<Controller>,
    number: u32,
    parameters: Vec<ParameterType>,
    outputs: usize,
    _captured: Vec<DRef>,
}

impl Program {
    /// Runs all steps on every worker, as one command in its order among the others: gives the
    /// outputs, without waiting for them.
    ///
    /// Values of steps that are no outputs are dropped at the end of the run. A step that fails
    /// poisons what it should have made, and the next ones run; its failure says which step of
    /// which program it was.
    ///
    /// # Errors
    ///
    /// Another number of arguments than parameters, one of another type than the parameter's, or
    /// one that cannot be sent; the session has ended.
    pub fn run(&self, args: impl IntoArguments) -> Result<Vec<DRef>> {
        let StoredProgram { controller, number, parameters, outputs, .. } = &*self.0;
        let args = args.into_arguments()?;
        if args.len() != parameters.len() {
            let text = format!("{} arguments for a program with {} parameters", args.len(), parameters.len());
            return Err(DiscoError::invalid(text));
        }
        for (position, (arg, wanted)) in (1..).zip(args.iter().zip(parameters)) {
            let found = wanted.check(arg, |operand| match operand {
                Operand::Tensor(tensor) => Given::Tensor(tensor.dtype(), tensor.shape()),
                Operand::Reference(_) | Operand::Recorded(_) => Given::Unknown,
            });
            found.map_err(|found| DiscoError::Session(unfit(position, wanted, &found)))?;
        }
        let args = args.into_iter().map(|arg| resolve(arg, controller)).collect::<Result<_>>()?;
        DRef::issue_all(controller, *outputs, |outputs| Command::Run { program: *number, args, outputs })
    }

    /// Returns the number by which failures name the program.
    pub fn number(&self) -> u32 {
        self.0.number
    }
}

impl Drop for StoredProgram {
    fn drop(&mut self) {
        self.controller.forget_program(self.number);
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StoredProgram { number, parameters, outputs, .. } = &*self.0;
        write!(f, "Program({number}: {} parameters, {outputs} outputs)", parameters.len())
    }
}
