//! Handlers of commands on registers: functions, modules, tensors, and their copies to and from the
//! controller.

use std::sync::Arc;

use rpc_core::function::{FunctionKind, Object};
use rpc_core::{
    DataType, Device, DeviceApi, Devices, ErrorKind, LocalValue, Permission, RpcError, Tensor, Value, VirtualDevice,
    blocking,
};

use super::executor::Worker;
use super::register_content::{Fault, Outcome, Slot};
use crate::ccl::Rank;
use crate::error::Failure;
use crate::wire::command::{Command, HostTensor, On, Operand, Register};

/// The most bytes of a value that is no tensor, on its way to the controller.
const MAX_FETCH: usize = 16 << 20;

impl Worker {
    /// Empties a register.
    pub(super) fn kill_reg(&mut self, register: Register) -> Outcome {
        self.set(register, Slot::Empty)?;
        self.set_name(register, None)?;
        Ok(())
    }

    /// Sets a register to a registered function.
    pub(super) fn get_global_func(&mut self, to: Register, name: &str) -> Outcome {
        let function = self.this.context().function(name)?;
        self.set_name(to, Some(name))?;
        Ok(self.set_object(to, Object::Function(function))?)
    }

    /// Calls the function in a register.
    pub(super) fn call_packed(&mut self, to: Register, function: Register, args: &[Value<Operand>]) -> Outcome {
        self.begin_step();
        let result = self.call(function, args);
        if result.is_err() {
            // If it succeeds on others, they may wait for this worker in collectives of that
            // function.
            self.this.leave_step();
        }
        Ok(self.set(to, Slot::Value(result?))?)
    }

    /// Loads a module on a device, by default the worker's own, or takes it from another worker of
    /// the process.
    pub(super) fn load_module(&mut self, to: Register, path: &str, device: Option<Device>) -> Outcome {
        let device = device.unwrap_or_else(|| self.this.device());
        check_device(self.this.context().devices(), device)?;
        let context = self.this.context().on_device(device);
        let module = self.shared.load_module(&context, path)?;
        // One for each worker: a module that is set up serves one caller at a time.
        let module = module.instance(&context, device)?.unwrap_or(module);
        Ok(self.set_object(to, Object::Module(module))?)
    }

    /// Sets a register to a function of the module in another one.
    pub(super) fn module_function(&mut self, to: Register, module: Register, name: &str) -> Outcome {
        self.this.context().authorize(&Permission::Modules)?;
        let function = self.module(module)?.function(name)?;
        self.set_name(to, Some(name))?;
        Ok(self.set_object(to, Object::Function(function))?)
    }

    /// Allocates a zeroed tensor.
    pub(super) fn empty(
        &mut self,
        to: Register,
        device: Option<&VirtualDevice>,
        (dtype, shape): (DataType, &[i64]),
        on: On,
    ) -> Outcome {
        let value = if self.is_meant(on) {
            let (wanted, context) = (device, self.this.context());
            let (device, scope) = (self.this.choose(wanted)?, wanted.and_then(VirtualDevice::memory_scope));
            let tensor = context.allocate_in_scope(device, dtype, shape, scope)?;
            Value::Object(Object::Tensor(tensor))
        } else {
            Value::Null
        };
        Ok(self.set(to, Slot::Value(value))?)
    }

    /// Takes one piece of a copy from the controller.
    pub(super) fn copy_to_worker0(
        &mut self,
        (to, fresh): (Register, bool),
        (dtype, shape): (DataType, &[i64]),
        (offset, data): (u64, &[u8]),
        on: On,
    ) -> Outcome {
        let is_for_one = matches!(on, On::Worker(_));
        if self.is_meant(on) {
            let is_kept = is_for_one && self.holds_alike(to, dtype, shape);
            self.copy_in(to, fresh && offset == 0 && !is_kept, (dtype, shape), offset, data)?;
        } else if fresh && !is_for_one {
            self.set(to, Slot::Value(Value::Null))?;
        }
        Ok(())
    }

    /// Sets a register to a value of the controller, if this is the worker that is meant.
    pub(super) fn debug_set_register(&mut self, worker: u32, to: Register, value: &Value<Operand>) -> Outcome {
        if worker == self.id.0 {
            self.set_by_value(to, value)?;
        }
        Ok(())
    }

    fn is_meant(&self, on: On) -> bool {
        match on {
            On::All => true,
            On::Worker0 => self.id.0 == 0,
            On::Worker(worker) => self.id.0 == worker,
            On::FirstOfGroups => self.layout.rank_in_group(self.id) == Rank(0),
            On::FirstOf(grouping) => grouping.rank(self.id) == Rank(0),
        }
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

    pub(super) fn resolve(&self, arg: &Value<Operand>) -> Outcome<LocalValue> {
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

    /// Makes a tensor of this worker with the content of one that came with a command.
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
            self.set_object(to, Object::Tensor(tensor))?;
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

    /// Returns true if a register holds a dense tensor of this type and shape.
    fn holds_alike(&self, register: Register, dtype: DataType, shape: &[i64]) -> bool {
        let held = self.tensor(register);
        matches!(held, Ok(Some(held)) if held.dtype() == dtype && held.shape() == shape && held.is_dense())
    }

    /// Sets a register; between tensors of the same type and shape that copies in place.
    fn set_by_value(&mut self, to: Register, value: &Value<Operand>) -> Outcome {
        if let Value::Object(Operand::Tensor(new)) = value
            && self.holds_alike(to, new.dtype, &new.shape)
            && let Ok(Some(old)) = self.tensor(to)
        {
            let start = old.byte_range(0, new.bytes.len() as u64)?.start;
            let (_, mut borrow) = old.write()?.into_parts();
            return Ok(borrow.copy_in(start, &new.bytes)?);
        }
        let value = self.resolve(value)?;
        Ok(self.set(to, Slot::Value(value))?)
    }

    /// Sends the content of a register to the controller.
    pub(super) fn fetch(&mut self, ticket: u64, from: Register, tensor_only: bool, command: &Command) {
        self.report();
        // A loss is reported, and poisons the registers concerned.
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
}

/// Checks that a session has a device.
///
/// # Errors
///
/// [`ErrorKind::DeviceUnavailable`], with the device, the reason and the devices that there are
/// for the client; and those of a driver that cannot count its devices.
fn check_device(devices: &Devices, device: Device) -> Result<(), RpcError> {
    let Err(error) = devices.get(device) else { return Ok(()) };
    if error.kind() != ErrorKind::DeviceUnavailable {
        return Err(error);
    }
    let of_kind = |(kind, api): (_, Result<&Arc<dyn DeviceApi>, &str>)| {
        let count = api.map_or(0, |api| api.count().unwrap_or(0));
        (0..count).map(move |index| Device::new(kind, index))
    };
    // Devices that the client may not use are left out.
    let offered = devices.iter().flat_map(of_kind).filter(|device| devices.get(*device).is_ok());
    let there_are: Vec<String> = offered.map(|device| device.to_string()).collect();
    let there_are = if there_are.is_empty() { "none at all".to_owned() } else { there_are.join(", ") };
    let text = format!("this worker has no device {device}, but {there_are}: {}", error.message());
    Err(RpcError::new(ErrorKind::DeviceUnavailable, text))
}
