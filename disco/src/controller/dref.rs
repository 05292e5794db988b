//! References to registers: the controller's side of values that live on the workers.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::{DataType, Device, Pack, Packed, Shape, Tensor, Value};
use serde::Serialize;

use crate::controller::dispatch::Controller;
use crate::error::{DiscoError, Result};
use crate::wire::command::{self, Command, HostTensor, MAX_INLINE_TENSOR, OWN, Register};

/// One register: a value on every worker, each with its own. Cheap to clone.
///
/// Dropping the last clone frees the values, behind all commands that use them. It never blocks.
#[derive(Clone)]
pub struct DRef(Arc<OwnedRegister>);

struct OwnedRegister {
    controller: Arc<Controller>,
    register: Register,
}

impl Drop for OwnedRegister {
    fn drop(&mut self) {
        self.controller.kill(self.register);
    }
}

impl DRef {
    /// Issues a command that sets a fresh register. Returns the reference to it.
    ///
    /// # Errors
    ///
    /// Those of [`Controller::issue`]: the register is free again then, since no worker knows it.
    pub(crate) fn issue(controller: &Arc<Controller>, command: impl FnOnce(Register) -> Command) -> Result<Self> {
        let register = controller.take_register();
        let issued = controller.issue(command(register));
        if issued.is_err() {
            controller.give_back(&[register]);
        }
        issued.map(|()| Self::owning(controller, register))
    }

    /// Issues a command that sets `count` fresh registers, as [`issue`](Self::issue) does for one.
    pub(crate) fn issue_all(
        controller: &Arc<Controller>,
        count: usize,
        command: impl FnOnce(Vec<Register>) -> Command,
    ) -> Result<Vec<Self>> {
        let registers: Vec<Register> = (0..count).map(|_| controller.take_register()).collect();
        let issued = controller.issue(command(registers.clone()));
        if issued.is_err() {
            controller.give_back(&registers);
        }
        issued.map(|()| registers.into_iter().map(|register| Self::owning(controller, register)).collect())
    }

    fn owning(controller: &Arc<Controller>, register: Register) -> Self {
        Self(Arc::new(OwnedRegister { controller: Arc::clone(controller), register }))
    }

    pub(crate) fn controller(&self) -> &Arc<Controller> {
        &self.0.controller
    }

    /// Returns the number of the register, if it is one of `controller`'s session.
    pub(crate) fn register_in(&self, controller: &Arc<Controller>) -> Result<Register> {
        if Arc::ptr_eq(&self.0.controller, controller) {
            Ok(self.0.register)
        } else {
            Err(DiscoError::invalid("the reference belongs to another session"))
        }
    }

    /// Returns the number of the register, the same on every worker. It is used for another value
    /// once this one is freed.
    pub fn register(&self) -> u32 {
        self.0.register
    }
}

impl fmt::Debug for DRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DRef({})", self.0.register)
    }
}

/// A function on every worker.
#[derive(Clone, Debug)]
pub struct DPackedFunc(pub(crate) DRef);

impl DPackedFunc {
    /// Calls the function on all workers, and gives the results without waiting for them. Arguments
    /// are a tuple of values and references, or a list of [`Argument`]s.
    ///
    /// # Errors
    /// The session has ended, or an argument cannot be sent. Failures of the function itself are
    /// reported by [`sync_all`](crate::DiscoSession::sync_all).
    pub fn call(&self, args: impl IntoArguments) -> Result<DRef> {
        let controller = self.0.controller();
        let args = args.into_arguments()?;
        let args = args.into_iter().map(|arg| resolve(arg, controller)).collect::<Result<_>>()?;
        let function = self.0.register();
        DRef::issue(controller, |to| Command::CallPacked { to, function, args })
    }

    /// Returns the function as a value, to be passed to others.
    pub fn reference(&self) -> &DRef {
        &self.0
    }
}

impl From<DRef> for DPackedFunc {
    /// Takes a value for a function. If it is none, calls fail.
    fn from(reference: DRef) -> Self {
        Self(reference)
    }
}

/// A module on every worker.
#[derive(Clone, Debug)]
pub struct DModule(pub(crate) DRef);

impl DModule {
    /// Returns the function `name` of the module.
    ///
    /// # Errors
    ///
    /// The session has ended. Where a worker's module has no such function, its uses fail there.
    pub fn function(&self, name: &str) -> Result<DPackedFunc> {
        let module = self.0.register();
        let function = |to| Command::ModuleFunction { to, module, name: name.to_owned() };
        DRef::issue(self.0.controller(), function).map(DPackedFunc)
    }

    /// Returns the module as a value, to be passed to functions.
    pub fn reference(&self) -> &DRef {
        &self.0
    }
}

impl From<DRef> for DModule {
    /// Takes a value for a module. If it is none, its functions fail.
    fn from(reference: DRef) -> Self {
        Self(reference)
    }
}

/// A value in a program that is being recorded: a parameter, the result of a step, or a captured
/// reference. It is for its [`Recorder`](crate::Recorder) alone.
#[derive(Clone, Copy)]
pub struct Recorded {
    pub(crate) recording: u64,
    pub(crate) register: Register,
}

impl fmt::Debug for Recorded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.register & OWN {
            0 => write!(f, "Recorded(captured {})", self.register),
            _ => write!(f, "Recorded({})", self.register & !OWN),
        }
    }
}

/// Value of an argument that is not plain.
#[derive(Clone, Debug)]
pub enum Operand {
    /// Each worker's own value.
    Reference(DRef),
    /// A small tensor of the controller's, of which each worker gets a copy: up to 64 KiB.
    Tensor(Tensor),
    /// A value of a program that is being recorded: for its [`Recorder`](crate::Recorder) alone.
    Recorded(Recorded),
}

/// One argument of a call.
pub type Argument = Value<Operand>;

/// A type that can be an argument.
pub trait IntoArgument {
    /// Converts the argument.
    ///
    /// # Errors
    ///
    /// A number that is out of range, or a value that cannot be packed.
    fn into_argument(self) -> Result<Argument>;
}

/// A tuple of up to sixteen arguments, or a list of any number of them.
pub trait IntoArguments {
    /// Converts the arguments.
    ///
    /// # Errors
    ///
    /// As [`IntoArgument::into_argument`].
    fn into_arguments(self) -> Result<Vec<Argument>>;
}

/// Returns the argument as commands have it.
pub(crate) fn resolve(argument: Argument, controller: &Arc<Controller>) -> Result<Value<command::Operand>> {
    argument.try_map(&mut |operand| {
        Ok(match operand {
            Operand::Reference(reference) => command::Operand::Register(reference.register_in(controller)?),
            Operand::Tensor(tensor) => command::Operand::Tensor(inline(&tensor)?),
            Operand::Recorded(_) => {
                return Err(DiscoError::invalid(
                    "the value belongs to the recording of a program: call with its recorder",
                ));
            }
        })
    })
}

pub(crate) fn inline(tensor: &Tensor) -> Result<HostTensor> {
    if tensor.size_bytes() > MAX_INLINE_TENSOR as u64 {
        return Err(DiscoError::invalid(format!(
            "a tensor of {} bytes among the arguments of a call, where {MAX_INLINE_TENSOR} are allowed: broadcast \
             it first",
            tensor.size_bytes()
        )));
    }
    let view = tensor.read()?;
    let bytes = Bytes::copy_from_slice(view.bytes()?);
    Ok(HostTensor { dtype: tensor.dtype(), shape: tensor.shape().to_vec(), bytes })
}

macro_rules! plain {
    ($($rust:ty)*) => {
        $(impl IntoArgument for $rust {
            fn into_argument(self) -> Result<Argument> {
                Ok(self.into())
            }
        })*
    };
}

plain!(() bool i8 i16 i32 i64 u8 u16 u32 f32 f64 &str String Bytes DataType Device Packed);

macro_rules! wide {
    ($($rust:ty)*) => {
        $(impl IntoArgument for $rust {
            fn into_argument(self) -> Result<Argument> {
                let int = i64::try_from(self);
                int.map(Value::Int).map_err(|_| DiscoError::invalid(format!("{self} is out of range for int")))
            }
        })*
    };
}

wide!(isize u64 usize);

impl IntoArgument for Argument {
    fn into_argument(self) -> Result<Argument> {
        Ok(self)
    }
}

impl IntoArgument for Shape {
    fn into_argument(self) -> Result<Argument> {
        Ok(Value::Shape(self.0))
    }
}

impl<T: Serialize> IntoArgument for Pack<T> {
    fn into_argument(self) -> Result<Argument> {
        Ok(Packed::encode(&self.0)?.into())
    }
}

impl IntoArgument for &DRef {
    fn into_argument(self) -> Result<Argument> {
        Ok(Value::Object(Operand::Reference(self.clone())))
    }
}

impl IntoArgument for &DPackedFunc {
    fn into_argument(self) -> Result<Argument> {
        (&self.0).into_argument()
    }
}

impl IntoArgument for &DModule {
    fn into_argument(self) -> Result<Argument> {
        (&self.0).into_argument()
    }
}

impl IntoArgument for &Recorded {
    fn into_argument(self) -> Result<Argument> {
        Ok(Value::Object(Operand::Recorded(*self)))
    }
}

impl IntoArgument for &Tensor {
    fn into_argument(self) -> Result<Argument> {
        Ok(Value::Object(Operand::Tensor(self.clone())))
    }
}

impl<T: IntoArgument> IntoArgument for Option<T> {
    fn into_argument(self) -> Result<Argument> {
        self.map_or(Ok(Value::Null), T::into_argument)
    }
}

impl<T: IntoArgument> IntoArgument for Vec<T> {
    fn into_argument(self) -> Result<Argument> {
        self.into_iter().map(T::into_argument).collect::<Result<_>>().map(Value::List)
    }
}

impl<K: IntoArgument, V: IntoArgument> IntoArgument for BTreeMap<K, V> {
    fn into_argument(self) -> Result<Argument> {
        let pair = |(key, value): (K, V)| Ok((key.into_argument()?, value.into_argument()?));
        self.into_iter().map(pair).collect::<Result<_>>().map(Value::Map)
    }
}

impl IntoArguments for Vec<Argument> {
    fn into_arguments(self) -> Result<Vec<Argument>> {
        Ok(self)
    }
}

macro_rules! tuples {
    ($($item:ident)*) => {
        #[allow(non_snake_case)]
        impl<$($item: IntoArgument),*> IntoArguments for ($($item,)*) {
            fn into_arguments(self) -> Result<Vec<Argument>> {
                let ($($item,)*) = self;
                Ok(vec![$($item.into_argument()?),*])
            }
        }
    };
}

tuples!();
tuples!(A1);
tuples!(A1 A2);
tuples!(A1 A2 A3);
tuples!(A1 A2 A3 A4);
tuples!(A1 A2 A3 A4 A5);
tuples!(A1 A2 A3 A4 A5 A6);
tuples!(A1 A2 A3 A4 A5 A6 A7);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15);
tuples!(A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 A11 A12 A13 A14 A15 A16);
