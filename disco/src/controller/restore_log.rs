//! Commands by which a worker that replaces a lost one gets its functions, modules, programs and
//! weights.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use rpc_core::{Device, Packed, Value};

use crate::error::{Failure, WorkerId};
use crate::wire::command::{Command, Operand, Register};

/// Origins of a worker's functions, modules, programs and weights, as long as those live.
#[derive(Default)]
pub(super) struct RestoreLog {
    /// Origin of the content of registers, where it can be made again.
    registers: BTreeMap<Register, Content>,
    /// Definitions of programs, by number.
    programs: BTreeMap<u32, Arc<Command>>,
    /// Commands that have set these registers, by number, each with the workers on which it has
    /// failed.
    set_by: BTreeMap<u64, (Register, BTreeSet<WorkerId>)>,
    /// Numbers of these commands.
    setters: BTreeMap<Register, u64>,
}

/// Content of a register that can be made again.
enum Content {
    /// A registered function.
    Function(Arc<Command>),
    Source(Arc<Source>),
    /// A value of a source, which may have lost its own register.
    Derived(Arc<Source>, Derivation),
}

/// An object that others are made of. Two loads of one module are two sources.
enum Source {
    Module {
        path: String,
        device: Option<Device>,
        /// Default devices of the workers when it was loaded.
        default_devices: Arc<[Device]>,
    },
    /// Files of weights, as a loader has requested them.
    Files(Packed),
}

/// A value of a source.
enum Derivation {
    /// The function of a module that has this name.
    Function(String),
    /// The tensor that a loader has requested, for workers that read their parts by themselves.
    Weight(Packed),
}

impl Source {
    /// Adds the commands that make it again in a register of the workers of a node, which have
    /// these default devices now. A module is loaded on the device that it was on. If that was the
    /// default device of each worker, and one has another now, it is that of the first.
    fn make(&self, (workers, devices): (&Range<u32>, &[Device]), to: Register, commands: &mut Vec<Arc<Command>>) {
        match self {
            Self::Module { path, device, default_devices } => {
                let default =
                    |devices: &[Device], worker| devices.get(worker as usize).copied().unwrap_or(Device::cpu());
                let mut all = workers.clone();
                let has_changed = all.any(|worker| default(default_devices, worker) != default(devices, worker));
                let then = || has_changed.then(|| default(default_devices, workers.start));
                commands.push(Arc::new(Command::LoadModule { to, path: path.clone(), device: device.or_else(then) }));
            }
            Self::Files(wanted) => {
                commands.extend(call(to, "disco.weights.open", vec![Value::Packed(wanted.clone())]));
            }
        }
    }
}

impl Derivation {
    /// Adds the commands that make it again of its source, which is in `from`.
    fn make(&self, from: Register, to: Register, commands: &mut Vec<Arc<Command>>) {
        match self {
            Self::Function(name) => {
                commands.push(Arc::new(Command::ModuleFunction { to, module: from, name: name.clone() }));
            }
            Self::Weight(request) => {
                let files = Value::Object(Operand::Register(from));
                commands.extend(call(to, "disco.weights.load", vec![files, Value::Packed(request.clone())]));
            }
        }
    }
}

/// Returns the commands that set a register to the result of a registered function.
fn call(to: Register, name: &str, args: Vec<Value<Operand>>) -> [Arc<Command>; 2] {
    let function = Command::GetGlobalFunc { to, name: name.to_owned() };
    [Arc::new(function), Arc::new(Command::CallPacked { to, function: to, args })]
}

impl RestoreLog {
    /// Notes a command that is issued with this number, while the workers have these default
    /// devices.
    pub(super) fn note(&mut self, sequence: u64, command: &Arc<Command>, devices: &Arc<[Device]>) {
        self.note_content(command, devices);
        if let Some(register) = command.outputs()
            && self.registers.contains_key(&register)
        {
            self.set_by.insert(sequence, (register, BTreeSet::new()));
            self.setters.insert(register, sequence);
        }
    }

    /// Notes the failure of a worker. A value that could not be made on any of so many workers is
    /// not made again on another.
    pub(super) fn note_failure(&mut self, failure: &Failure, num_workers: u32) {
        let Some((register, workers)) = self.set_by.get_mut(&failure.sequence) else { return };
        workers.insert(failure.worker);
        if workers.len() < num_workers as usize {
            return;
        }
        let register = *register;
        let mut gone = vec![register];
        if let Some(Content::Source(failed)) = self.registers.get(&register) {
            let is_of = |content: &Content| matches!(content, Content::Derived(of, _) if Arc::ptr_eq(of, failed));
            gone.extend(self.registers.iter().filter(|(_, content)| is_of(content)).map(|(derived, _)| *derived));
        }
        gone.into_iter().for_each(|register| self.forget(register));
    }

    fn note_content(&mut self, command: &Arc<Command>, devices: &Arc<[Device]>) {
        match &**command {
            Command::GetGlobalFunc { to, .. } => self.set(*to, Content::Function(Arc::clone(command))),
            Command::LoadModule { to, path, device } => {
                let default_devices = Arc::clone(devices);
                let module = Source::Module { path: path.clone(), device: *device, default_devices };
                self.set(*to, Content::Source(Arc::new(module)));
            }
            Command::ModuleFunction { to, module, name } => {
                self.derive(*to, *module, Derivation::Function(name.clone()));
            }
            Command::KillReg { register } => self.forget(*register),
            Command::Define { program, .. } => _ = self.programs.insert(*program, Arc::clone(command)),
            Command::Forget { program } => _ = self.programs.remove(program),
            Command::Run { outputs, .. } => outputs.iter().for_each(|output| self.forget(*output)),
            other => {
                if let Some(register) = other.outputs() {
                    self.forget(register);
                }
            }
        }
    }

    /// Notes that a register has files of weights that a loader has requested.
    pub(super) fn note_files(&mut self, register: Register, wanted: Packed) {
        self.set(register, Content::Source(Arc::new(Source::Files(wanted))));
    }

    /// Notes that a register has a tensor of files in another one, which a loader has requested.
    pub(super) fn note_weight(&mut self, register: Register, files: Register, request: Packed) {
        self.derive(register, files, Derivation::Weight(request));
    }

    fn set(&mut self, register: Register, content: Content) {
        self.forget(register);
        self.registers.insert(register, content);
    }

    fn forget(&mut self, register: Register) {
        self.registers.remove(&register);
        if let Some(setter) = self.setters.remove(&register) {
            self.set_by.remove(&setter);
        }
    }

    fn derive(&mut self, to: Register, from: Register, derivation: Derivation) {
        match self.registers.get(&from) {
            Some(Content::Source(source)) => {
                let source = Arc::clone(source);
                self.set(to, Content::Derived(source, derivation));
            }
            _ => self.forget(to),
        }
    }

    /// Returns the commands that make all of it again on these workers of one node, which have
    /// these default devices now, in their order. They use `scratch` for sources without a
    /// register.
    pub(super) fn replay(&self, workers: &Range<u32>, devices: &[Device], scratch: Register) -> Vec<Arc<Command>> {
        let mut commands: Vec<Arc<Command>> = Vec::new();
        let mut known: BTreeMap<*const Source, Register> = BTreeMap::new();
        // Derived registers, by their source.
        let mut derived: BTreeMap<*const Source, Vec<_>> = BTreeMap::new();
        for (register, content) in &self.registers {
            match content {
                Content::Function(command) => commands.push(Arc::clone(command)),
                Content::Source(source) => {
                    known.insert(Arc::as_ptr(source), *register);
                    source.make((workers, devices), *register, &mut commands);
                }
                Content::Derived(source, derivation) => {
                    derived.entry(Arc::as_ptr(source)).or_default().push((source, *register, derivation));
                }
            }
        }
        for (at, of_source) in derived {
            let mut from = known.get(&at).copied();
            for (source, to, derivation) in of_source {
                let from = *from.get_or_insert_with(|| {
                    source.make((workers, devices), scratch, &mut commands);
                    scratch
                });
                derivation.make(from, to, &mut commands);
            }
        }
        commands.push(Arc::new(Command::KillReg { register: scratch }));
        commands.extend(self.programs.values().cloned());
        commands
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(commands: &[Command]) -> RestoreLog {
        let (mut log, devices) = (RestoreLog::default(), Arc::from([Device::cpu(); 2]));
        (1..).zip(commands).for_each(|(number, command)| log.note(number, &Arc::new(command.clone()), &devices));
        log
    }

    fn replayed(log: &RestoreLog, devices: &[Device]) -> Vec<Command> {
        let commands = log.replay(&(1..2), devices, 99);
        let mut commands: Vec<_> = commands.iter().map(|command| Command::clone(command)).collect();
        commands.retain(|command| *command != Command::KillReg { register: 99 });
        commands
    }

    fn find(to: Register, name: &str) -> Command {
        Command::GetGlobalFunc { to, name: name.to_owned() }
    }

    fn load(to: Register, device: Option<Device>) -> Command {
        Command::LoadModule { to, path: "m".to_owned(), device }
    }

    fn function(to: Register, module: Register, name: &str) -> Command {
        Command::ModuleFunction { to, module, name: name.to_owned() }
    }

    fn define(program: u32) -> Command {
        Command::Define { program, registers: 0, parameters: Vec::new(), outputs: Vec::new(), steps: Vec::new() }
    }

    #[test]
    fn what_lives_is_made_again_in_an_order_in_which_it_can_be() {
        let commands = [find(3, "f"), load(2, None), function(1, 2, "g"), define(4), define(5)];
        let mut log = noted(&commands);
        let expected = [load(2, None), find(3, "f"), function(1, 2, "g"), define(4), define(5)];
        assert_eq!(replayed(&log, &[]), expected);
        for gone in [Command::KillReg { register: 3 }, Command::Forget { program: 4 }] {
            log.note(6, &Arc::new(gone), &Arc::from([]));
        }
        assert_eq!(replayed(&log, &[]), [load(2, None), function(1, 2, "g"), define(5)]);
    }

    #[test]
    fn a_module_whose_register_is_gone_is_loaded_once_for_all_of_its_functions() {
        let log = noted(&[
            load(1, None),
            function(2, 1, "f"),
            function(3, 1, "g"),
            Command::KillReg { register: 1 },
            load(1, None),
            function(4, 1, "f"),
            Command::KillReg { register: 1 },
        ]);
        let again = replayed(&log, &[]);
        let loads = again.iter().filter(|command| **command == load(99, None)).count();
        assert_eq!((again.len(), loads), (5, 2), "{again:?}");
        for expected in [function(2, 99, "f"), function(3, 99, "g"), function(4, 99, "f")] {
            assert!(again.contains(&expected), "{again:?}");
        }
    }

    #[test]
    fn a_register_that_is_set_by_anything_else_is_not_restored() {
        let call = |to| Command::CallPacked { to, function: 1, args: Vec::new() };
        let run = Command::Run { program: 7, args: Vec::new(), outputs: vec![3] };
        let log = noted(&[find(1, "f"), find(2, "g"), call(2), find(3, "h"), run, function(4, 9, "of no module")]);
        assert_eq!(replayed(&log, &[]), [find(1, "f")]);
    }

    /// Regression: every replacement failed, as long as a register lived whose command had failed.
    #[test]
    fn what_has_failed_on_all_workers_is_not_made_again() {
        let mut log = noted(&[find(1, "f"), load(2, None), function(3, 2, "g"), find(4, "h"), find(5, "i")]);
        log.note(6, &Arc::new(find(5, "j")), &Arc::from([]));
        let mut fails = |worker, sequence| {
            let cause = rpc_core::RpcError::not_found("there is none");
            let failure = Failure { worker: WorkerId(worker), sequence, command: String::new(), cause };
            log.note_failure(&failure, 2);
        };
        for (worker, number) in [(0, 1), (0, 1), (0, 2), (0, 4), (0, 5), (1, 2), (1, 4), (1, 5)] {
            fails(worker, number);
        }
        assert_eq!(replayed(&log, &[]), [find(1, "f"), find(5, "j")]);
        assert_eq!((log.set_by.len(), log.setters.len()), (2, 2));
    }

    #[test]
    fn a_module_is_loaded_on_the_device_that_was_the_default_one() {
        let (cpu, gpu) = (Device::cpu(), Device::cuda(1));
        let log = noted(&[load(1, None), load(2, Some(gpu))]);
        assert_eq!(replayed(&log, &[gpu, cpu]), [load(1, None), load(2, Some(gpu))]);
        assert_eq!(replayed(&log, &[cpu, gpu]), [load(1, Some(cpu)), load(2, Some(gpu))]);
    }
}
