//! Recorded programs at a worker: their storage and their state while they run.

use rpc_core::{ErrorKind, RpcError};

use super::register_content::Slot;
use crate::wire::command::{Command, MAX_STEPS, OWN, Register};
use crate::wire::parameter::ParameterType;

/// A recorded program.
pub(super) struct StoredProgram {
    pub(super) registers: usize,
    pub(super) parameters: Vec<(u32, ParameterType)>,
    pub(super) outputs: Vec<u32>,
    pub(super) steps: Vec<Command>,
    /// Bytes that it takes, as they are charged.
    pub(super) bytes: usize,
}

impl StoredProgram {
    /// Checks that it has no more steps than can be numbered, and that all registers of its own are
    /// among those that it says it has.
    pub(super) fn check(&self) -> rpc_core::Result<()> {
        if self.steps.len() > MAX_STEPS {
            let text = format!("a program of {} steps, where {MAX_STEPS} are allowed", self.steps.len());
            return Err(RpcError::new(ErrorKind::Protocol, text));
        }
        let fits = |at: &u32| (*at as usize) < self.registers;
        let mut all_fit = self.parameters.iter().map(|(at, _)| at).chain(&self.outputs).all(fits);
        for step in &self.steps {
            step.for_each_register(&mut |register| all_fit &= register & OWN == 0 || fits(&(register & !OWN)));
        }
        if all_fit && self.registers <= MAX_OWN {
            return Ok(());
        }
        Err(RpcError::new(ErrorKind::Protocol, "a program with registers that it does not have"))
    }
}

/// The most registers that a program has for itself.
const MAX_OWN: usize = 1 << 20;

/// A program that runs.
pub(super) struct RunningProgram {
    pub(super) program: u32,
    /// The number of the step, from 1.
    pub(super) step: u32,
    /// Registers of the session that its parameters and outputs are in now.
    pub(super) session_registers: Vec<Option<Register>>,
    /// Content of its other registers.
    pub(super) own: Vec<Slot>,
}

impl RunningProgram {
    /// Returns the register of the session that one of the program is, if it is one.
    pub(super) fn session_register(&self, register: Register) -> Option<Register> {
        if register & OWN == 0 {
            Some(register)
        } else {
            self.session_registers.get((register & !OWN) as usize).copied()?
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: steps behind so many had the numbers of the next command's, and collectives of
    /// different commands might have met.
    #[test]
    fn a_program_has_no_more_steps_than_can_be_numbered() {
        let program = |steps| {
            let steps = vec![Command::Nothing; steps];
            StoredProgram { registers: 0, parameters: Vec::new(), outputs: Vec::new(), steps, bytes: 0 }
        };
        program(MAX_STEPS).check().unwrap();
        let error = program(MAX_STEPS + 1).check().unwrap_err();
        assert!(error.message().contains("a program of 1048576 steps, where 1048575 are allowed"), "{error}");
    }
}
