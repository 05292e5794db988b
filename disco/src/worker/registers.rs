//! Access to the registers of a worker, also to those that a running program has for itself.

use std::sync::Arc;

use rpc_core::function::{Function, Object};
use rpc_core::{ErrorKind, LocalValue, Module, RpcError, Tensor, Value};

use super::executor::Worker;
use super::register_content::{Fault, Outcome, Slot};
use crate::error::Failure;
use crate::held_memory::HeldMemory;
use crate::wire::command::{MAX_REGISTER_GAP, OWN, Register};

/// Grows a table to `len` entries, whose memory is charged first.
fn grow<T: Clone + Default>(table: &mut Vec<T>, len: usize, held: &mut HeldMemory) -> rpc_core::Result<()> {
    let wanted = len.next_power_of_two();
    if let Some(more) = wanted.checked_sub(table.capacity()) {
        held.add(more * size_of::<T>())?;
        table.reserve_exact(wanted - table.len());
    }
    table.resize(len, T::default());
    Ok(())
}

impl Worker {
    /// Sets a register, and charges what it holds.
    ///
    /// # Errors
    ///
    /// The session may hold no more memory, or the register is far beyond those that there are. The
    /// register keeps its content then.
    pub(super) fn set(&mut self, register: Register, slot: Slot) -> rpc_core::Result<()> {
        let mut register = register;
        if register & OWN != 0
            && let Some(running) = &mut self.running
        {
            match running.session_register(register) {
                Some(of_session) => register = of_session,
                None => {
                    let own = &mut running.own[(register & !OWN) as usize];
                    self.held.add(slot.heap_bytes())?;
                    self.held.remove(own.heap_bytes());
                    *own = slot;
                    self.forget_unsettled(register);
                    return Ok(());
                }
            }
        }
        let at = register as usize;
        if at >= self.registers.len() {
            if matches!(slot, Slot::Empty) {
                return Ok(());
            }
            if at >= self.registers.len() + MAX_REGISTER_GAP {
                let text = format!("register {register} is far beyond the {} that there are", self.registers.len());
                return Err(RpcError::new(ErrorKind::Protocol, text));
            }
            grow(&mut self.registers, at + 1, &mut self.held)?;
        }
        self.held.add(slot.heap_bytes())?;
        self.held.remove(self.registers[at].heap_bytes());
        self.forget_unsettled(register);
        self.registers[at] = slot;
        Ok(())
    }

    /// Sets a register to the failure of its command. If the session may hold no more memory it is
    /// empty instead.
    pub(super) fn poison(&mut self, register: Register, failure: Arc<Failure>) {
        if self.set(register, Slot::Poisoned(failure)).is_err() {
            // Nothing is charged for that.
            _ = self.set(register, Slot::Empty);
        }
    }

    pub(super) fn forget_unsettled(&mut self, register: Register) {
        if self.is_accelerated {
            self.unsettled.remove(&register);
        }
    }

    pub(super) fn set_object(&mut self, register: Register, object: Object) -> rpc_core::Result<()> {
        self.set(register, Slot::Value(Value::Object(object)))
    }

    /// Notes the name of the function in a register, for failures.
    ///
    /// # Errors
    ///
    /// The session may hold no more memory.
    pub(super) fn set_name(&mut self, register: Register, name: Option<&str>) -> rpc_core::Result<()> {
        let of_session = self.running.as_ref().map_or(Some(register), |running| running.session_register(register));
        // A value of a program's own gets no name.
        let Some(at) =
            of_session.map(|register| register as usize).filter(|at| *at < self.registers.len() + MAX_REGISTER_GAP)
        else {
            return Ok(());
        };
        if name.is_some() && at >= self.names.len() {
            grow(&mut self.names, at + 1, &mut self.held)?;
        }
        if let Some(known) = self.names.get_mut(at) {
            self.held.add(name.map_or(0, str::len))?;
            self.held.remove(known.as_deref().map_or(0, str::len));
            *known = name.map(Arc::from);
        }
        Ok(())
    }

    pub(super) fn value(&self, register: Register) -> Outcome<LocalValue> {
        self.held(register).cloned()
    }

    pub(super) fn held(&self, register: Register) -> Outcome<&LocalValue> {
        let own = self.running.as_ref().filter(|_| register & OWN != 0);
        let slot = match own.map(|running| running.session_register(register).ok_or(running)) {
            Some(Err(running)) => running.own.get((register & !OWN) as usize),
            Some(Ok(of_session)) => self.registers.get(of_session as usize),
            None => self.registers.get(register as usize),
        };
        match slot {
            Some(Slot::Value(value)) => Ok(value),
            Some(Slot::Poisoned(failure)) => Err(Fault::Inherited(Arc::clone(failure))),
            Some(Slot::Empty) | None => Err(self.no_value(register).into()),
        }
    }

    /// Returns the error of a register that is empty.
    fn no_value(&self, register: Register) -> RpcError {
        let id = self.id;
        if self.shared.set_up().begin_after.is_none() {
            return RpcError::internal(format!("register {register} of worker {id} is empty"));
        }
        let text = format!(
            "register {register} was not restored on worker {id}, which has replaced a lost one: set it again, as by \
             debug_set_register in a function that DiscoSession::on_replace has registered"
        );
        RpcError::new(ErrorKind::NotFound, text)
    }

    /// Returns the tensor in a register; `None` for null.
    pub(super) fn tensor(&self, register: Register) -> Outcome<Option<Tensor>> {
        match self.value(register)? {
            Value::Object(Object::Tensor(tensor)) => Ok(Some(tensor)),
            Value::Null => Ok(None),
            other => Err(self.unexpected("a tensor", &other).into()),
        }
    }

    pub(super) fn function(&self, register: Register) -> Outcome<&Function> {
        match self.held(register)? {
            Value::Object(Object::Function(function)) => Ok(function),
            other => Err(self.unexpected("a function", other).into()),
        }
    }

    pub(super) fn module(&self, register: Register) -> Outcome<Arc<dyn Module>> {
        match self.value(register)? {
            Value::Object(Object::Module(module)) => Ok(module),
            other => Err(self.unexpected("a module", &other).into()),
        }
    }

    pub(super) fn unexpected(&self, expected: &str, value: &LocalValue) -> RpcError {
        let found = if let Value::Object(object) = value { object.type_name() } else { value.type_name() };
        RpcError::invalid_argument(format!("expected {expected} on worker {}, found {found}", self.id))
    }
}
