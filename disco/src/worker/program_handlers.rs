//! Handlers of the commands that store, run and delete recorded programs.

use std::sync::Arc;

use rpc_core::{ErrorKind, RpcError, Value};

use super::executor::Worker;
use super::recorded_program::{RunningProgram, StoredProgram};
use super::register_content::{Outcome, Slot};
use crate::wire::command::{Command, OWN, Operand, Register};
use crate::wire::parameter::unfit;

/// The most programs of a session.
const MAX_PROGRAMS: usize = 1 << 12;

impl Worker {
    /// Keeps a program under a number.
    pub(super) fn define_program(&mut self, number: u32, program: StoredProgram) -> Outcome {
        if self.programs.len() >= MAX_PROGRAMS {
            let text = format!("a session may have {MAX_PROGRAMS} recorded programs at a time: drop some");
            return Err(RpcError::new(ErrorKind::LimitExceeded, text).into());
        }
        program.check()?;
        self.held.add(program.bytes)?;
        self.forget_program(number)?;
        self.programs.insert(number, Arc::new(program));
        Ok(())
    }

    /// Drops a program.
    pub(super) fn forget_program(&mut self, number: u32) -> Outcome {
        if let Some(program) = self.programs.remove(&number) {
            self.held.remove(program.bytes);
        }
        Ok(())
    }

    /// Runs the steps of a program; each that fails is a failure of its own.
    pub(super) fn run_program(
        &mut self,
        command: &Command,
        program: u32,
        args: &[Value<Operand>],
        outputs: &[Register],
    ) -> Outcome {
        let stored = self.programs.get(&program).cloned();
        let stored =
            stored.filter(|stored| stored.parameters.len() == args.len() && stored.outputs.len() == outputs.len());
        let stored = stored.ok_or_else(|| RpcError::internal(format!("there is no program {program} like that")))?;
        let registers = stored.registers * (size_of::<Option<Register>>() + size_of::<Slot>());
        self.held.add(registers)?;
        let mut running = RunningProgram {
            program,
            step: 0,
            session_registers: vec![None; stored.registers],
            own: vec![Slot::Empty; stored.registers],
        };
        for (position, ((at, wanted), arg)) in (1..).zip(stored.parameters.iter().zip(args)) {
            // A failed value fits: the steps inherit its failure.
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
                    let cause = unfit(position, wanted, &format!("{found} on worker {}", self.id));
                    Slot::Poisoned(self.report_failure(command, cause.into()))
                }
                (Ok(()), Value::Object(Operand::Register(register))) => {
                    running.session_registers[at] = Some(*register);
                    Slot::Empty
                }
                (Ok(()), value) => match self.resolve(value) {
                    Ok(value) => Slot::Value(value),
                    Err(fault) => Slot::Poisoned(self.report_failure(command, fault)),
                },
            };
        }
        // Counted behind the loop: two parameters may name one register, which holds the last
        // value.
        let parameters = running.own.iter().map(Slot::heap_bytes).sum();
        if let Err(error) = self.held.add(parameters) {
            self.held.remove(registers);
            return Err(error.into());
        }
        for (output, register) in stored.outputs.iter().zip(outputs) {
            running.session_registers[*output as usize] = Some(*register);
        }
        self.running = Some(running);
        for (number, step) in (1..).zip(&stored.steps) {
            if let Some(running) = &mut self.running {
                running.step = number;
            }
            self.perform(step);
            if self.feed.is_aborted() {
                break;
            }
        }
        let own = self.running.take().map_or(0, |running| running.own.iter().map(Slot::heap_bytes).sum());
        self.held.remove(registers + own);
        // The registers that were the program's own are gone.
        self.unsettled.retain(|register, _| register & OWN == 0);
        Ok(())
    }
}
