//! Commands: what the controller tells all workers, in one order, and the bytes that it takes to say so.
//!
//! A command is written once, however many links it goes over. Its form is a MessagePack value as sessions have it
//! ([`rpc_core::proto::encode_value`]), a list that begins with the number of the command. Registers in it are object references, and
//! tensors are tensor references, whose storage is their place in the list of bytes at the end. In a batch each command has a head of 16 bytes,
//! little-endian: `u64` credit that it takes, `u32` length of the value, `u32` length of the bytes that belong to it. Bulk data is not
//! in there but beside it, so that it is never copied into a message.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use rpc_core::proto::{decode_value, encode_value};
use rpc_core::{DataType, Device, Handle, Packed, Reference, RpcError, TensorRef, Value};

use crate::ccl::ReduceOp;
use crate::parameter::ParameterType;

type Result<T> = rpc_core::Result<T>;

/// The number of a register: the same on every worker.
pub(crate) type Register = u32;

/// Marks the registers that a recorded program has for itself. Those of the session stay below.
pub(crate) const OWN: Register = 1 << 31;

/// The most bytes of one tensor among the arguments of a call.
pub(crate) const MAX_INLINE_TENSOR: usize = 64 << 10;

/// The most bytes of commands, as they lie in memory, that a node holds for those of its workers that are slowest, and that one batch has. A controller that goes by its
/// window sends far less.
pub(crate) const MAX_HELD: u64 = 1 << 30;

/// The most bytes of one encoded command.
const MAX_COMMAND: usize = 32 << 20;

/// What stands in a command for a value that is not plain.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand {
    Register(Register),
    Tensor(HostTensor),
}

/// A densely packed tensor as bytes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct HostTensor {
    pub(crate) dtype: DataType,
    pub(crate) shape: Vec<i64>,
    pub(crate) bytes: Bytes,
}

/// Which workers a command is for. All others pass it by, and have null in its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    All,
    Worker0,
    /// The first worker of each group.
    FirstOfGroups,
}

/// Among whom a collective runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Scope {
    /// The workers of each group among themselves.
    #[default]
    Group,
    /// All workers.
    World,
}

/// A collective on registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Allreduce(ReduceOp),
    ReduceScatter(ReduceOp),
    Allgather,
    Broadcast,
    Scatter,
    Gather,
    AllToAll,
    Barrier,
}

/// One command. Each worker executes all of them, in the order of their sequence numbers.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Command {
    /// Stands in the place of a command that is for others.
    Nothing,
    KillReg {
        registers: Vec<Register>,
    },
    GetGlobalFunc {
        to: Register,
        name: String,
    },
    CallPacked {
        to: Register,
        function: Register,
        args: Vec<Value<Operand>>,
    },
    LoadModule {
        to: Register,
        path: String,
        device: Option<Device>,
    },
    ModuleFunction {
        to: Register,
        module: Register,
        name: String,
    },
    Empty {
        to: Register,
        device: Option<Device>,
        dtype: DataType,
        shape: Vec<i64>,
        on: On,
    },
    /// One piece of a copy. The first one makes the tensor, unless it is to go into one that is there.
    CopyToWorker0 {
        to: Register,
        fresh: bool,
        dtype: DataType,
        shape: Vec<i64>,
        offset: u64,
        data: Bytes,
        on: On,
    },
    CopyFromWorker0 {
        ticket: u64,
        from: Register,
    },
    DebugGetFromRemote {
        ticket: u64,
        worker: u32,
        from: Register,
    },
    DebugSetRegister {
        worker: u32,
        to: Register,
        value: Value<Operand>,
    },
    Collective {
        kind: Kind,
        scope: Scope,
        from: Register,
        to: Register,
        fresh: bool,
    },
    SendRecv {
        from: Register,
        to: Register,
        pairs: Vec<(u32, u32)>,
    },
    /// Without a worker it is for all.
    SyncWorker {
        ticket: u64,
        worker: Option<u32>,
    },
    /// The content is a [`crate::plane::Plan`].
    InitCcl {
        plan: Packed,
    },
    Shutdown {
        ticket: u64,
    },
    /// Keeps steps, which use so many registers of their own ([`OWN`]); some of them are parameters, others outputs.
    Define {
        program: u32,
        registers: u32,
        parameters: Vec<(u32, ParameterType)>,
        outputs: Vec<u32>,
        steps: Vec<Self>,
    },
    /// Executes the steps.
    Run {
        program: u32,
        args: Vec<Value<Operand>>,
        outputs: Vec<Register>,
    },
    Forget {
        program: u32,
    },
}

impl Command {
    /// What the command is called in errors.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::KillReg { .. } => "kill_reg",
            Self::GetGlobalFunc { .. } => "get_global_func",
            Self::CallPacked { .. } => "call_packed",
            Self::LoadModule { .. } => "load_module",
            Self::ModuleFunction { .. } => "module_function",
            Self::Empty { .. } => "empty",
            Self::CopyToWorker0 { .. } => "copy_to_worker_0",
            Self::CopyFromWorker0 { .. } => "copy_from_worker_0",
            Self::DebugGetFromRemote { .. } => "debug_get_from_remote",
            Self::DebugSetRegister { .. } => "debug_set_register",
            Self::Collective { kind, .. } => match kind {
                Kind::Allreduce(_) => "allreduce",
                Kind::ReduceScatter(_) => "reduce_scatter",
                Kind::Allgather => "allgather",
                Kind::Broadcast => "broadcast_from_worker0",
                Kind::Scatter => "scatter_from_worker0",
                Kind::Gather => "gather_to_worker0",
                Kind::AllToAll => "all_to_all",
                Kind::Barrier => "barrier",
            },
            Self::SendRecv { .. } => "send_recv",
            Self::SyncWorker { .. } => "sync_worker",
            Self::InitCcl { .. } => "init_ccl",
            Self::Shutdown { .. } => "shutdown",
            Self::Define { .. } => "record",
            Self::Run { .. } => "run",
            Self::Forget { .. } => "forget",
        }
    }

    /// The registers that the command sets on a worker that executes it.
    pub(crate) fn outputs(&self) -> Option<Register> {
        match self {
            Self::GetGlobalFunc { to, .. }
            | Self::CallPacked { to, .. }
            | Self::LoadModule { to, .. }
            | Self::ModuleFunction { to, .. }
            | Self::Empty { to, .. }
            | Self::CopyToWorker0 { to, .. }
            | Self::DebugSetRegister { to, .. }
            | Self::SendRecv { to, .. } => Some(*to),
            Self::Collective { kind, to, .. } => (*kind != Kind::Barrier).then_some(*to),
            _ => None,
        }
    }

    /// Gives all registers of a step to `each`.
    pub(crate) fn for_each_register(&self, each: &mut impl FnMut(Register)) {
        match self {
            Self::CallPacked { to, function, args } => {
                each(*to);
                each(*function);
                args.iter().for_each(|arg| {
                    arg.for_each_object(&mut |operand| {
                        if let Operand::Register(register) = operand {
                            each(*register);
                        }
                    });
                });
            }
            Self::Empty { to, .. } => each(*to),
            Self::Collective { from, to, .. } | Self::SendRecv { from, to, .. } => {
                each(*from);
                each(*to);
            }
            _ => {}
        }
    }

    /// Whether it can be a step of a program.
    pub(crate) fn is_step(&self) -> bool {
        matches!(self, Self::CallPacked { .. } | Self::Empty { .. } | Self::Collective { .. } | Self::SendRecv { .. })
    }

    /// For whom it is.
    pub(crate) fn on(&self) -> On {
        match self {
            Self::CopyToWorker0 { on, .. } => *on,
            Self::CopyFromWorker0 { .. } => On::Worker0,
            _ => On::All,
        }
    }

    /// What the command takes of the credit, in bytes: about what it occupies while it waits.
    pub(crate) fn cost(&self) -> u64 {
        let content = match self {
            Self::KillReg { registers } => size_of_val(&registers[..]),
            Self::GetGlobalFunc { name: text, .. }
            | Self::LoadModule { path: text, .. }
            | Self::ModuleFunction { name: text, .. } => text.len(),
            Self::Empty { shape, .. } => size_of_val(&shape[..]),
            Self::CopyToWorker0 { data, shape, .. } => data.len() + size_of_val(&shape[..]),
            Self::InitCcl { plan } => plan.as_bytes().len(),
            Self::CallPacked { args, .. } => args.iter().map(size).sum(),
            Self::DebugSetRegister { value, .. } => size(value),
            Self::SendRecv { pairs, .. } => size_of_val(&pairs[..]),
            Self::Define { parameters, outputs, steps, .. } => {
                let steps: u64 = steps.iter().map(Self::cost).sum();
                steps as usize + size_of_val(&parameters[..]) + size_of_val(&outputs[..])
            }
            Self::Run { args, outputs, .. } => args.iter().map(size).sum::<usize>() + size_of_val(&outputs[..]),
            _ => 0,
        };
        128 + content as u64
    }

    /// Its bytes in a batch, and the bulk that goes beside them.
    ///
    /// # Errors
    ///
    /// It is larger than a command may be.
    pub(crate) fn encode(&self) -> Result<Encoded> {
        let mut writer = Fields::default();
        self.write(&mut writer);
        writer.values.push(Value::List(writer.tensors.into_iter().map(Value::Bytes).collect()));
        let (body, payload) = encode_value(&Value::List(writer.values));
        let payload_len: usize = payload.iter().map(Bytes::len).sum();
        if body.len() + payload_len > MAX_COMMAND {
            return Err(RpcError::invalid_argument(format!(
                "the arguments of {} take {} bytes, and {MAX_COMMAND} are allowed: use broadcast for large data",
                self.name(),
                body.len() + payload_len
            )));
        }
        let mut head = BytesMut::with_capacity(16 + body.len() + payload_len);
        head.put_u64_le(self.cost());
        head.put_u32_le(body.len() as u32);
        head.put_u32_le(payload_len as u32);
        head.put_slice(&body);
        payload.iter().for_each(|bytes| head.put_slice(bytes));
        Ok(Encoded { head: head.freeze(), bulk: self.bulk() })
    }

    /// What travels beside the command.
    pub(crate) fn bulk(&self) -> Option<Bytes> {
        if let Self::CopyToWorker0 { data, .. } = self { Some(data.clone()) } else { None }
    }

    fn write(&self, out: &mut Fields) {
        match self {
            Self::Nothing => {
                out.int(0);
            }
            Self::KillReg { registers } => {
                out.int(1).registers(registers);
            }
            Self::GetGlobalFunc { to, name } => {
                out.int(2).register(*to);
                out.values.push(name.as_str().into());
            }
            Self::CallPacked { to, function, args } => {
                out.int(3).register(*to).register(*function);
                let args = args.iter().map(|arg| out.operand(arg)).collect();
                out.values.push(Value::List(args));
            }
            Self::LoadModule { to, path, device } => {
                out.int(4).register(*to);
                out.values.push(path.as_str().into());
                out.values.push((*device).into());
            }
            Self::ModuleFunction { to, module, name } => {
                out.int(5).register(*to).register(*module);
                out.values.push(name.as_str().into());
            }
            Self::Empty { to, device, dtype, shape, on } => {
                out.int(6).register(*to);
                out.values.extend([
                    (*device).into(),
                    (*dtype).into(),
                    Value::Shape(shape.clone()),
                    on_code(*on).into(),
                ]);
            }
            Self::CopyToWorker0 { to, fresh, dtype, shape, offset, data: _, on } => {
                out.int(7).register(*to);
                out.values.extend([
                    (*fresh).into(),
                    (*dtype).into(),
                    Value::Shape(shape.clone()),
                    Value::Int(*offset as i64),
                    on_code(*on).into(),
                ]);
            }
            Self::CopyFromWorker0 { ticket, from } => {
                out.int(8).int64(*ticket).register(*from);
            }
            Self::DebugGetFromRemote { ticket, worker, from } => {
                out.int(9).int64(*ticket).register(*worker).register(*from);
            }
            Self::DebugSetRegister { worker, to, value } => {
                out.int(10).register(*worker).register(*to);
                let value = out.operand(value);
                out.values.push(value);
            }
            Self::Collective { kind, scope, from, to, fresh } => {
                let (code, op) = kind_code(*kind);
                out.int(11).int(code).int(op);
                out.values.extend([Value::Bool(*scope == Scope::Group), Value::Bool(*fresh)]);
                out.register(*from).register(*to);
            }
            Self::SendRecv { from, to, pairs } => {
                out.int(12).register(*from).register(*to);
                let pairs = pairs.iter().flat_map(|(from, to)| [Value::from(*from), Value::from(*to)]).collect();
                out.values.push(Value::List(pairs));
            }
            Self::SyncWorker { ticket, worker } => {
                out.int(13).int64(*ticket);
                out.values.push((*worker).into());
            }
            Self::InitCcl { plan } => {
                out.int(14);
                out.values.push(plan.clone().into());
            }
            Self::Shutdown { ticket } => {
                out.int(15).int64(*ticket);
            }
            Self::Define { program, registers, parameters, outputs, steps } => {
                out.int(16).register(*program).register(*registers).parameters(parameters).registers(outputs);
                let before = std::mem::take(&mut out.values);
                let steps = steps.iter().map(|step| {
                    step.write(out);
                    Value::List(std::mem::take(&mut out.values))
                });
                let steps = steps.collect();
                out.values = before;
                out.values.push(Value::List(steps));
            }
            Self::Run { program, args, outputs } => {
                out.int(17).register(*program).registers(outputs);
                let args = args.iter().map(|arg| out.operand(arg)).collect();
                out.values.push(Value::List(args));
            }
            Self::Forget { program } => {
                out.int(18).register(*program);
            }
        }
    }

    fn read(value: Value, bulk: &mut impl Iterator<Item = Bytes>) -> Result<Self> {
        let Value::List(mut values) = value else { return Err(malformed()) };
        let Some(Value::List(tensors)) = values.pop() else { return Err(malformed()) };
        let mut fields = Reading { values: values.into_iter(), tensors: Arc::new(tensors) };
        Self::read_fields(&mut fields, bulk)
    }

    fn read_fields(fields: &mut Reading, bulk: &mut impl Iterator<Item = Bytes>) -> Result<Self> {
        let command = match fields.int()? {
            0 => Self::Nothing,
            1 => Self::KillReg { registers: fields.numbers()? },
            2 => Self::GetGlobalFunc { to: fields.number()?, name: fields.text()? },
            3 => Self::CallPacked { to: fields.number()?, function: fields.number()?, args: fields.operands()? },
            4 => Self::LoadModule { to: fields.number()?, path: fields.text()?, device: fields.device()? },
            5 => Self::ModuleFunction { to: fields.number()?, module: fields.number()?, name: fields.text()? },
            6 => Self::Empty {
                to: fields.number()?,
                device: fields.device()?,
                dtype: fields.dtype()?,
                shape: fields.shape()?,
                on: fields.on()?,
            },
            7 => Self::CopyToWorker0 {
                to: fields.number()?,
                fresh: fields.bool()?,
                dtype: fields.dtype()?,
                shape: fields.shape()?,
                offset: fields.ticket()?,
                on: fields.on()?,
                data: bulk.next().ok_or_else(malformed)?,
            },
            8 => Self::CopyFromWorker0 { ticket: fields.ticket()?, from: fields.number()? },
            9 => {
                Self::DebugGetFromRemote { ticket: fields.ticket()?, worker: fields.number()?, from: fields.number()? }
            }
            10 => Self::DebugSetRegister { worker: fields.number()?, to: fields.number()?, value: fields.operand()? },
            11 => {
                let (code, op) = (fields.int()?, fields.int()?);
                let kind = kind(code, op).ok_or_else(malformed)?;
                let scope = if fields.bool()? { Scope::Group } else { Scope::World };
                Self::Collective { kind, scope, fresh: fields.bool()?, from: fields.number()?, to: fields.number()? }
            }
            12 => {
                let (from, to, flat) = (fields.number()?, fields.number()?, fields.numbers()?);
                let pairs = flat.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
                Self::SendRecv { from, to, pairs }
            }
            13 => Self::SyncWorker { ticket: fields.ticket()?, worker: fields.optional_number()? },
            14 => Self::InitCcl { plan: fields.packed()? },
            15 => Self::Shutdown { ticket: fields.ticket()? },
            16 => Self::Define {
                program: fields.number()?,
                registers: fields.number()?,
                parameters: fields.parameters()?,
                outputs: fields.numbers()?,
                steps: fields.steps()?,
            },
            17 => {
                let (program, outputs) = (fields.number()?, fields.numbers()?);
                Self::Run { program, outputs, args: fields.operands()? }
            }
            18 => Self::Forget { program: fields.number()? },
            _ => return Err(malformed()),
        };
        if fields.values.next().is_some() { Err(malformed()) } else { Ok(command) }
    }
}

/// A command as it goes into batches.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    pub(crate) head: Bytes,
    pub(crate) bulk: Option<Bytes>,
}

/// A command on its way through a worker's queue.
#[derive(Clone, Debug)]
pub(crate) struct Queued {
    pub(crate) cost: u64,
    pub(crate) command: Arc<Command>,
}

/// Reads a batch: the heads of its commands behind each other, and the bulk of those that have some.
///
/// # Errors
///
/// Anything malformed; more than [`MAX_HELD`].
pub(crate) fn decode_batch(heads: Bytes, bulk: Vec<Bytes>) -> Result<Vec<Queued>> {
    let mut bulk = bulk.into_iter();
    let mut commands = Vec::new();
    let mut held = 0;
    let mut rest = &heads[..];
    while !rest.is_empty() {
        let Some((head, behind)) = rest.split_first_chunk::<16>() else { return Err(malformed()) };
        let u32_at = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let cost = u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32;
        let (body, behind) = behind.split_at_checked(u32_at(8) as usize).ok_or_else(malformed)?;
        let (payload, behind) = behind.split_at_checked(u32_at(12) as usize).ok_or_else(malformed)?;
        rest = behind;
        // Most have none, and need no share of the batch.
        let payload = if payload.is_empty() { Bytes::new() } else { heads.slice_ref(payload) };
        let value = decode_value(body, payload)?;
        let command = Command::read(value, &mut bulk)?;
        held += command.cost();
        if held > MAX_HELD {
            return Err(RpcError::limit("the bytes of one batch of commands in memory", MAX_HELD, held));
        }
        commands.push(Queued { cost, command: Arc::new(command) });
    }
    if bulk.next().is_some() { Err(malformed()) } else { Ok(commands) }
}

/// The bytes of each command of a batch that [`decode_batch`] has read: its head and what follows that.
pub(crate) fn split_batch(mut heads: Bytes) -> impl Iterator<Item = Bytes> {
    std::iter::from_fn(move || {
        let head = heads.first_chunk::<16>()?;
        let u32_at = |at: usize| u32::from_le_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]) as usize;
        let len = u32_at(8).saturating_add(u32_at(12)).saturating_add(16);
        Some(heads.split_to(len.min(heads.len())))
    })
}

fn malformed() -> RpcError {
    RpcError::new(rpc_core::ErrorKind::Protocol, "a malformed command")
}

fn size(value: &Value<Operand>) -> usize {
    value.size_with(&|operand| match operand {
        Operand::Tensor(tensor) => tensor.bytes.len() + size_of_val(&tensor.shape[..]),
        Operand::Register(_) => 0,
    })
}

fn on_code(on: On) -> u8 {
    match on {
        On::All => 0,
        On::Worker0 => 1,
        On::FirstOfGroups => 2,
    }
}

const OPS: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Min, ReduceOp::Max, ReduceOp::Avg];

fn kind_code(kind: Kind) -> (u8, u8) {
    let op = |op: ReduceOp| OPS.iter().position(|one| *one == op).unwrap_or(0) as u8;
    match kind {
        Kind::Allreduce(reduce) => (1, op(reduce)),
        Kind::ReduceScatter(reduce) => (2, op(reduce)),
        Kind::Allgather => (3, 0),
        Kind::Broadcast => (4, 0),
        Kind::Scatter => (5, 0),
        Kind::Gather => (6, 0),
        Kind::AllToAll => (7, 0),
        Kind::Barrier => (8, 0),
    }
}

fn kind(code: i64, op: i64) -> Option<Kind> {
    let op = OPS.get(usize::try_from(op).ok()?).copied()?;
    Some(match code {
        1 => Kind::Allreduce(op),
        2 => Kind::ReduceScatter(op),
        3 => Kind::Allgather,
        4 => Kind::Broadcast,
        5 => Kind::Scatter,
        6 => Kind::Gather,
        7 => Kind::AllToAll,
        8 => Kind::Barrier,
        _ => return None,
    })
}

/// Writes the fields of a command.
#[derive(Default)]
struct Fields {
    values: Vec<Value>,
    tensors: Vec<Bytes>,
}

impl Fields {
    fn int(&mut self, value: u8) -> &mut Self {
        self.values.push(value.into());
        self
    }

    fn int64(&mut self, value: u64) -> &mut Self {
        // Tickets count from 1, and offsets are those of memory.
        self.values.push(Value::Int(value as i64));
        self
    }

    fn register(&mut self, register: Register) -> &mut Self {
        self.values.push(register.into());
        self
    }

    fn registers(&mut self, registers: &[Register]) -> &mut Self {
        self.values.push(Value::List(registers.iter().map(|register| Value::from(*register)).collect()));
        self
    }

    fn parameters(&mut self, parameters: &[(u32, ParameterType)]) -> &mut Self {
        let each = parameters.iter().flat_map(|(register, wanted)| [Value::from(*register), wanted.to_value()]);
        self.values.push(Value::List(each.collect()));
        self
    }

    fn operand(&mut self, value: &Value<Operand>) -> Value {
        let replaced = value.clone().try_map(&mut |operand| {
            Ok::<_, std::convert::Infallible>(match operand {
                Operand::Register(register) => Reference::Object(Handle::from_bits(register.into())),
                Operand::Tensor(tensor) => {
                    let storage = Handle::from_bits(self.tensors.len() as u64);
                    self.tensors.push(tensor.bytes);
                    let (shape, dtype, device) = (tensor.shape, tensor.dtype, Device::cpu());
                    Reference::Tensor(TensorRef { storage, byte_offset: 0, shape, strides: None, dtype, device })
                }
            })
        });
        match replaced {
            Ok(value) => value,
            Err(never) => match never {},
        }
    }
}

/// Reads the fields of a command.
struct Reading {
    values: std::vec::IntoIter<Value>,
    tensors: Arc<Vec<Value>>,
}

impl Reading {
    fn next(&mut self) -> Result<Value> {
        self.values.next().ok_or_else(malformed)
    }

    fn int(&mut self) -> Result<i64> {
        if let Value::Int(int) = self.next()? { Ok(int) } else { Err(malformed()) }
    }

    fn number(&mut self) -> Result<u32> {
        u32::try_from(self.int()?).map_err(|_| malformed())
    }

    fn parameters(&mut self) -> Result<Vec<(u32, ParameterType)>> {
        let Value::List(values) = self.next()? else { return Err(malformed()) };
        let (mut values, mut parameters) = (values.into_iter(), Vec::new());
        while let Some(register) = values.next() {
            let Value::Int(register) = register else { return Err(malformed()) };
            let register = u32::try_from(register).map_err(|_| malformed())?;
            let wanted = values.next().and_then(ParameterType::from_value).ok_or_else(malformed)?;
            parameters.push((register, wanted));
        }
        Ok(parameters)
    }

    fn ticket(&mut self) -> Result<u64> {
        u64::try_from(self.int()?).map_err(|_| malformed())
    }

    fn optional_number(&mut self) -> Result<Option<u32>> {
        match self.next()? {
            Value::Null => Ok(None),
            Value::Int(int) => u32::try_from(int).map(Some).map_err(|_| malformed()),
            _ => Err(malformed()),
        }
    }

    fn numbers(&mut self) -> Result<Vec<u32>> {
        let Value::List(values) = self.next()? else { return Err(malformed()) };
        Self { values: values.into_iter(), tensors: Arc::default() }.all_numbers()
    }

    fn all_numbers(mut self) -> Result<Vec<u32>> {
        (0..self.values.len()).map(|_| self.number()).collect()
    }

    /// Steps of a program, which have no bulk and no steps themselves.
    fn steps(&mut self) -> Result<Vec<Command>> {
        let Value::List(steps) = self.next()? else { return Err(malformed()) };
        let read = |step| {
            let Value::List(values) = step else { return Err(malformed()) };
            let mut fields = Self { values: values.into_iter(), tensors: Arc::clone(&self.tensors) };
            match fields.values.as_slice().first() {
                Some(Value::Int(16..)) | None => Err(malformed()),
                Some(_) => Command::read_fields(&mut fields, &mut std::iter::empty()),
            }
        };
        let steps: Vec<Command> = steps.into_iter().map(read).collect::<Result<_>>()?;
        if steps.iter().all(Command::is_step) { Ok(steps) } else { Err(malformed()) }
    }

    fn bool(&mut self) -> Result<bool> {
        if let Value::Bool(bool) = self.next()? { Ok(bool) } else { Err(malformed()) }
    }

    fn text(&mut self) -> Result<String> {
        if let Value::Str(text) = self.next()? { Ok(text) } else { Err(malformed()) }
    }

    fn dtype(&mut self) -> Result<DataType> {
        if let Value::DataType(dtype) = self.next()? { Ok(dtype) } else { Err(malformed()) }
    }

    fn shape(&mut self) -> Result<Vec<i64>> {
        if let Value::Shape(shape) = self.next()? { Ok(shape) } else { Err(malformed()) }
    }

    fn packed(&mut self) -> Result<Packed> {
        if let Value::Packed(packed) = self.next()? { Ok(packed) } else { Err(malformed()) }
    }

    fn device(&mut self) -> Result<Option<Device>> {
        match self.next()? {
            Value::Null => Ok(None),
            Value::Device(device) => Ok(Some(device)),
            _ => Err(malformed()),
        }
    }

    fn on(&mut self) -> Result<On> {
        [On::All, On::Worker0, On::FirstOfGroups]
            .get(usize::try_from(self.int()?).map_err(|_| malformed())?)
            .copied()
            .ok_or_else(malformed)
    }

    fn operand(&mut self) -> Result<Value<Operand>> {
        let value = self.next()?;
        self.replace(value)
    }

    fn operands(&mut self) -> Result<Vec<Value<Operand>>> {
        let Value::List(values) = self.next()? else { return Err(malformed()) };
        values.into_iter().map(|value| self.replace(value)).collect()
    }

    fn replace(&self, value: Value) -> Result<Value<Operand>> {
        value.try_map(&mut |reference| match reference {
            Reference::Object(handle) => {
                u32::try_from(handle.to_bits()).map(Operand::Register).map_err(|_| malformed())
            }
            Reference::Tensor(TensorRef { storage, shape, dtype, .. }) => {
                let place = usize::try_from(storage.to_bits()).map_err(|_| malformed())?;
                let Some(Value::Bytes(bytes)) = self.tensors.get(place) else { return Err(malformed()) };
                Ok(Operand::Tensor(HostTensor { dtype, shape, bytes: bytes.clone() }))
            }
            _ => Err(malformed()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Command> {
        let tensor = HostTensor { dtype: DataType::F32, shape: vec![1, 2], bytes: Bytes::from_static(b"12345678") };
        let value = Value::List(vec![
            Value::Object(Operand::Register(7)),
            Value::Float(0.5),
            Value::Object(Operand::Tensor(tensor.clone())),
            Value::Bytes(Bytes::from_static(b"raw")),
            Value::Null,
        ]);
        let mut commands = vec![
            Command::Nothing,
            Command::KillReg { registers: vec![1, 2, 1 << 31] },
            Command::GetGlobalFunc { to: 3, name: "f".to_owned() },
            Command::CallPacked { to: 4, function: 3, args: vec![value.clone(), Value::Int(-1)] },
            Command::LoadModule { to: 5, path: "m".to_owned(), device: Some(Device::cuda(1)) },
            Command::ModuleFunction { to: 6, module: 5, name: "g".to_owned() },
            Command::Empty { to: 7, device: None, dtype: DataType::I8, shape: vec![3], on: On::FirstOfGroups },
            Command::CopyToWorker0 {
                to: 8,
                fresh: true,
                dtype: DataType::U8,
                shape: vec![4],
                offset: 1 << 40,
                data: Bytes::from_static(b"bulk"),
                on: On::Worker0,
            },
            Command::CopyFromWorker0 { ticket: 1 << 50, from: 8 },
            Command::DebugGetFromRemote { ticket: 2, worker: 3, from: 4 },
            Command::DebugSetRegister { worker: 3, to: 4, value },
            Command::SendRecv { from: 1, to: 2, pairs: vec![(0, 1), (1, 0)] },
            Command::SyncWorker { ticket: 9, worker: None },
            Command::SyncWorker { ticket: 9, worker: Some(1) },
            Command::InitCcl { plan: Packed::from_bytes(Bytes::from_static(b"\xc0")) },
            Command::Shutdown { ticket: 10 },
            Command::Run {
                program: 3,
                args: vec![Value::Object(Operand::Register(7)), Value::Int(1)],
                outputs: vec![8],
            },
            Command::Forget { program: 3 },
        ];
        let tensor = HostTensor { dtype: DataType::U8, shape: vec![3], bytes: Bytes::from_static(b"abc") };
        let steps = vec![
            Command::CallPacked {
                to: OWN | 1,
                function: 3,
                args: vec![Value::Object(Operand::Tensor(tensor)), Value::Null],
            },
            Command::Empty { to: OWN | 2, device: None, dtype: DataType::I8, shape: vec![3], on: On::All },
            Command::Collective { kind: Kind::Barrier, scope: Scope::Group, from: 0, to: 0, fresh: false },
            Command::SendRecv { from: OWN | 1, to: OWN | 2, pairs: vec![(0, 1)] },
        ];
        let parameters = vec![(0, ParameterType::Any), (2, ParameterType::tensor(DataType::F32, &[-1, 2]))];
        commands.push(Command::Define { program: 9, registers: 3, parameters, outputs: vec![2, 1], steps });
        let reductions = OPS.into_iter().flat_map(|op| [Kind::Allreduce(op), Kind::ReduceScatter(op)]);
        let others = [Kind::Allgather, Kind::Broadcast, Kind::Scatter, Kind::Gather, Kind::AllToAll, Kind::Barrier];
        for kind in reductions.chain(others) {
            commands.push(Command::Collective { kind, scope: Scope::World, from: 1, to: 2, fresh: true });
        }
        commands
    }

    #[test]
    fn commands_survive_a_batch() {
        let (mut heads, mut bulk) = (BytesMut::new(), Vec::new());
        for command in all() {
            let encoded = command.encode().unwrap();
            heads.put_slice(&encoded.head);
            bulk.extend(encoded.bulk);
        }
        let heads = heads.freeze();
        let decoded = decode_batch(heads.clone(), bulk).unwrap();
        for (before, after) in all().iter().zip(&decoded) {
            assert_eq!(*before, *after.command);
            assert_eq!(before.cost(), after.cost);
        }
        assert_eq!(decoded.len(), all().len());
        // They go on as they came.
        let split: Vec<Bytes> = split_batch(heads).collect();
        assert_eq!(split, all().iter().map(|command| command.encode().unwrap().head).collect::<Vec<_>>());
    }

    #[test]
    fn a_cut_batch_is_an_error_and_nothing_worse() {
        for command in all() {
            let Encoded { head, bulk } = command.encode().unwrap();
            for len in 1..head.len() {
                decode_batch(head.slice(..len), bulk.clone().into_iter().collect()).unwrap_err();
            }
        }
        decode_batch(Bytes::new(), vec![Bytes::new()]).unwrap_err();
    }

    #[test]
    fn a_command_that_is_too_large_names_broadcast() {
        let args = vec![Value::Bytes(Bytes::from(vec![0; MAX_COMMAND + 1]))];
        let error = Command::CallPacked { to: 1, function: 2, args }.encode().unwrap_err();
        assert!(error.message().contains("use broadcast"), "{error}");
    }
}
