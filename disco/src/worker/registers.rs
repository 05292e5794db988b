//! Access to the registers of a worker, also to those that a running program has for itself.

use std::sync::Arc;

use rpc_core::function::{Function, Object};
use rpc_core::{LocalValue, Module, RpcError, Tensor, Value};

use super::executor::Worker;
use super::register_content::{Fault, Outcome, Slot};
use crate::wire::command::{OWN, Register};

/// Most registers beyond those that exist at which a command may set one: it bounds the memory that
/// a command can make a worker reserve.
const MAX_GAP: usize = 1 << 16;

impl Worker {
    pub(super) fn set(&mut self, register: Register, slot: Slot) {
        let mut register = register;
        if register & OWN != 0
            && let Some(running) = &mut self.running
        {
            match running.session_register(register) {
                Some(of_session) => register = of_session,
                None => {
                    running.own[(register & !OWN) as usize] = slot;
                    self.forget_unsettled(register);
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
        self.forget_unsettled(register);
        self.registers[at] = slot;
    }

    pub(super) fn forget_unsettled(&mut self, register: Register) {
        if self.is_accelerated {
            self.unsettled.remove(&register);
        }
    }

    pub(super) fn set_object(&mut self, register: Register, object: Object) {
        self.set(register, Slot::Value(Value::Object(object)));
    }

    pub(super) fn set_name(&mut self, register: Register, name: Option<&str>) {
        let of_session = self.running.as_ref().map_or(Some(register), |running| running.session_register(register));
        // A value of a program's own gets no name.
        let Some(at) = of_session.map(|register| register as usize).filter(|at| *at < self.registers.len() + MAX_GAP)
        else {
            return;
        };
        if name.is_some() && at >= self.names.len() {
            self.names.resize(at + 1, None);
        }
        if let Some(known) = self.names.get_mut(at) {
            *known = name.map(Arc::from);
        }
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
            Some(Slot::Empty) | None => {
                Err(RpcError::internal(format!("register {register} of worker {} is empty", self.id)).into())
            }
        }
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
