//! A worker: it executes commands, in the order of their sequence numbers, each by its handler.
//!
//! The handlers are in `handlers`, `collectives`, `init_ccl` and `program_handlers`.

use std::collections::HashMap;
use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError};

use super::command_feed::{Feed, Reader};
use super::context::{ActivityName, WorkerContext};
use super::joined_ccl::{FormerMeshes, JoinedCcl};
use super::process_state::ProcessState;
use super::recorded_program::{RunningProgram, StoredProgram};
use super::register_content::{Fault, Outcome, Slot, UnsettledCommand};
use crate::error::{Failure, WorkerId};
use crate::held_memory::HeldMemory;
use crate::link::loss::ExitGuard;
use crate::wire::command::{Command, MAX_STEPS, OWN, Register};
use crate::wire::event::{Event, EventSink};
use crate::wire::plan::Layout;

/// Bits of a step's number that count the steps of one command: a program, which is sent as one
/// command, has no more ([`MAX_STEPS`]). The other bits are enough for the commands of years.
const STEP_BITS: u32 = MAX_STEPS.ilog2() + 1;

/// One worker, on a thread of its own.
pub(crate) struct Worker {
    pub(super) id: WorkerId,
    pub(super) layout: Layout,
    pub(super) this: WorkerContext,
    /// State that all workers of the process share.
    pub(super) shared: Arc<ProcessState>,
    pub(super) feed: Arc<Feed>,
    pub(super) sink: Arc<dyn EventSink>,
    pub(super) registers: Vec<Slot>,
    /// Charge of what is held beside tensors.
    pub(super) held: HeldMemory,
    /// Names of functions in registers, for failures.
    pub(super) names: Vec<Option<Arc<str>>>,
    pub(super) sequence: u64,
    /// Number of the steps of the command so far in which workers may meet: of a program there may
    /// be several.
    pub(super) steps: u64,
    pub(super) programs: HashMap<u32, Arc<StoredProgram>>,
    pub(super) running: Option<RunningProgram>,
    /// Communicators that a tentative `init_ccl` has joined.
    pub(super) tentative: Option<JoinedCcl>,
    /// Meshes that come back if the last `init_ccl` has failed on another worker.
    pub(super) former: Option<FormerMeshes>,
    /// Number of bytes of the session's meshes, as they are counted in `held`.
    pub(super) mesh_bytes: usize,
    /// True if collectives leave work to a device.
    pub(super) is_accelerated: bool,
    /// The registers that would be lost with that.
    pub(super) unsettled: HashMap<Register, UnsettledCommand>,
    pub(super) executed: u64,
    pub(super) reported: u64,
    /// Progress is reported when so much more credit has come free.
    pub(super) report_every: u64,
    pub(super) shut_down: bool,
}

impl Worker {
    pub(crate) fn new(this: WorkerContext, shared: Arc<ProcessState>, feed: Arc<Feed>) -> Self {
        let position = shared.set_up().position();
        Self {
            id: this.worker_id(),
            held: HeldMemory::new(this.context().clone()),
            layout: shared.set_up().layout,
            this,
            sink: shared.sink(),
            report_every: shared.set_up().report_every,
            shared,
            feed,
            registers: Vec::new(),
            names: Vec::new(),
            sequence: position.sequence,
            steps: 0,
            programs: HashMap::new(),
            running: None,
            tentative: None,
            former: None,
            mesh_bytes: 0,
            is_accelerated: false,
            unsettled: HashMap::new(),
            executed: position.credit,
            reported: position.credit,
            shut_down: false,
        }
    }

    /// Executes commands until the end.
    pub(crate) fn run(mut self, mut reader: Reader) {
        self.this.enter();
        let mut exit = ExitGuard::new(self.id, Arc::clone(&self.sink));
        while !self.shut_down {
            let performed = reader.next(|sequence, queued| {
                (self.sequence, self.steps) = (sequence, 0);
                self.this.begin_command(sequence, self.activity_name(&queued.command));
                self.perform(&queued.command);
                self.this.end_command();
                self.executed = self.executed.saturating_add(queued.cost);
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
        self.tentative = None;
        self.this.set_membership(Err(RpcError::new(ErrorKind::Closed, "the worker has ended")));
        WorkerContext::leave();
    }

    pub(super) fn report(&mut self) {
        self.this.wait_for_room();
        self.reported = self.executed;
        self.sink.send(Event::Progress { worker: self.id, sequence: self.sequence, cost: self.executed });
    }

    /// Reports that a command has been executed, if a caller waits for that.
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
            self.report_failure(command, cause.into());
        }
        // It waits for room, so that there is room for the other event, too.
        self.report();
        self.sink.send(Event::Reached { ticket });
    }

    /// Waits for work that collectives have left to the device. If some of it is lost, that is a
    /// failure of the first command that may have lost something, and poisons the registers that
    /// all of them have set.
    pub(super) fn settle(&mut self) -> Option<Arc<Failure>> {
        if !self.is_accelerated {
            return None;
        }
        let unsettled = std::mem::take(&mut self.unsettled);
        let cause = self.this.settle().err()?;
        let first = unsettled.values().min_by_key(|one| one.sequence);
        let (sequence, command) =
            first.map_or((self.sequence, "collective"), |first| (first.sequence, first.command.as_str()));
        let failure = Failure { worker: self.id, sequence, command: command.to_owned(), cause };
        self.send_failure(&failure);
        let failure = Arc::new(failure);
        for register in unsettled.into_keys() {
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

    /// Notes the registers that would be lost with a collective that is still on the device.
    fn note_unsettled(&mut self, command: &Command) {
        if !matches!(command, Command::CallPacked { .. } | Command::Collective { .. } | Command::SendRecv { .. }) {
            return;
        }
        let Some(register) = command.outputs() else { return };
        let of_session =
            self.running.as_ref().and_then(|running| running.session_register(register)).unwrap_or(register);
        let (sequence, command) = (self.sequence, self.title(command));
        self.unsettled.insert(of_session, UnsettledCommand { sequence, command });
    }

    /// Executes one command; a failure poisons the registers that it should have set.
    pub(super) fn perform(&mut self, command: &Command) {
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
                self.note_unsettled(command);
            }
            return;
        };
        let failure = self.report_failure(command, fault);
        if let Some(register) = command.outputs() {
            self.poison(register, failure);
        }
    }

    /// Reports the failure of a command here to the controller, and returns it.
    pub(super) fn report_failure(&self, command: &Command, fault: Fault) -> Arc<Failure> {
        match fault {
            Fault::Inherited(failure) => failure,
            Fault::Own(cause) => {
                let failure = self.failure(command, cause);
                tracing::debug!(%failure, "a command failed");
                self.send_failure(&failure);
                Arc::new(failure)
            }
        }
    }

    /// Sends a failure once there is room for it.
    fn send_failure(&self, failure: &Failure) {
        self.this.wait_for_room();
        self.sink.send(Event::Failed(failure.clone()));
    }

    pub(super) fn failure(&self, command: &Command, cause: RpcError) -> Failure {
        Failure { worker: self.id, sequence: self.sequence, command: self.title(command), cause }
    }

    /// Returns the name of a command, or of the function that it calls.
    fn activity_name(&self, command: &Command) -> ActivityName {
        let name = match command {
            Command::CallPacked { function, .. } => {
                let function =
                    self.running.as_ref().map_or(Some(*function), |running| running.session_register(*function));
                function.and_then(|function| self.names.get(function as usize)?.clone())
            }
            _ => None,
        };
        name.map_or_else(|| ActivityName::Command(command.name()), ActivityName::Function)
    }

    /// Returns the title of a command in failures.
    fn title(&self, command: &Command) -> String {
        let command = self.activity_name(command).to_string();
        match &self.running {
            Some(running) => format!("{command}, step {} of program {}", running.step, running.program),
            None => command,
        }
    }

    /// Executes one command by its handler.
    fn execute(&mut self, command: &Command) -> Outcome {
        match command {
            Command::KillReg { register } => self.kill_reg(*register),
            Command::GetGlobalFunc { to, name } => self.get_global_func(*to, name),
            Command::CallPacked { to, function, args } => self.call_packed(*to, *function, args),
            Command::LoadModule { to, path, device } => self.load_module(*to, path, *device),
            Command::ModuleFunction { to, module, name } => self.module_function(*to, *module, name),
            Command::Empty { to, device, dtype, shape, on } => self.empty(*to, device.as_ref(), (*dtype, shape), *on),
            Command::CopyToWorker0 { to, fresh, dtype, shape, offset, data, on } => {
                self.copy_to_worker0((*to, *fresh), (*dtype, shape), (*offset, data), *on)
            }
            Command::DebugSetRegister { worker, to, value } => self.debug_set_register(*worker, *to, value),
            Command::Collective { kind, scope, from, to, fresh } => {
                self.collective(command, *kind, *scope, *from, (*to, *fresh))
            }
            Command::SendRecv { from, to, pairs } => self.send_recv(command, *from, *to, pairs),
            Command::InitCcl { plan } => self.init_ccl(plan),
            Command::FinishInitCcl { epoch, enter } => self.finish_init_ccl(*epoch, *enter),
            Command::Define { program, registers, parameters, outputs, steps } => {
                let stored = StoredProgram {
                    registers: *registers as usize,
                    parameters: parameters.clone(),
                    outputs: outputs.clone(),
                    steps: steps.clone(),
                    bytes: command.cost() as usize,
                };
                self.define_program(*program, stored)
            }
            Command::Run { program, args, outputs } => self.run_program(command, *program, args, outputs),
            Command::Forget { program } => self.forget_program(*program),
            // Syncs and shutdowns are acknowledged once they have been executed; fetches reply by
            // themselves.
            Command::Nothing
            | Command::SyncWorker { .. }
            | Command::Shutdown { .. }
            | Command::CopyFromWorker0 { .. }
            | Command::DebugGetFromRemote { .. } => Ok(()),
        }
    }

    /// Begins a step in which workers may meet. Its number is made of that of the command, so that
    /// it is the same on all workers, also on those that have begun later.
    pub(super) fn begin_step(&mut self) {
        self.steps += 1;
        self.this.begin_step((self.sequence << STEP_BITS).wrapping_add(self.steps));
    }
}
