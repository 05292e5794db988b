//! Encoding of commands, in batches. Section 16.1 of PROTOCOL.md lists them.
//!
//! In a batch each command has a head of 16 bytes, little-endian as everything here: `u64` credit
//! that it takes, `u32` length of its body, `u32` length of the payload that follows the body. Bulk
//! data is not in there but beside it, so that it is never copied into a message.
//!
//! A body begins with how many tensors it has, `u32`, and the length of each, `u32`; their bytes
//! begin the payload. Then come the number of the command, `u8`, and its fields: numbers as they
//! are, lists and text behind their length, `u32`. Values are those of sessions
//! ([`rpc_core::proto::encode_value`]) behind the length of their share of the payload and that of
//! their body; registers in them are object references, and tensors are tensor references, whose
//! storage is their index among the tensors.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use rpc_core::proto::{decode_value, encode_value};
use rpc_core::{
    DataType, DataTypeCode, Device, DeviceType, Handle, Packed, Reference, Result, RpcError, TensorRef, Value,
    VirtualDevice,
};

use crate::ccl::ReduceOp;
use crate::wire::command::{Command, HostTensor, Kind, MAX_HELD, On, Operand, Queued, Register, Scope};
use crate::wire::grouping::Grouping;
use crate::wire::parameter::ParameterType;

/// The most bytes of one encoded command.
const MAX_COMMAND: usize = 32 << 20;

/// A command as it goes into batches.
#[derive(Clone, Debug)]
pub(crate) struct Encoded {
    pub(crate) head: Bytes,
    pub(crate) bulk: Option<Bytes>,
}

impl Encoded {
    /// Returns the command with another credit than its own.
    pub(crate) fn with_credit(self, credit: u64) -> Self {
        let mut head = BytesMut::from(self.head);
        head[..size_of::<u64>()].copy_from_slice(&credit.to_le_bytes());
        Self { head: head.freeze(), bulk: self.bulk }
    }
}

impl Command {
    /// Encodes the command: its bytes in a batch, and the bulk that goes beside them.
    ///
    /// # Errors
    ///
    /// It is larger than a command may be.
    pub(crate) fn encode(&self) -> Result<Encoded> {
        let mut writer = Writer::default();
        self.write(&mut writer);
        let Writer { fields, values, tensors } = writer;
        let body_len = size_of::<u32>() * (1 + tensors.len()) + fields.len();
        let payload_len: usize = tensors.iter().chain(&values).map(Bytes::len).sum();
        if body_len + payload_len > MAX_COMMAND {
            return Err(RpcError::invalid_argument(format!(
                "the arguments of {} take {} bytes, and {MAX_COMMAND} are allowed: use broadcast for large data",
                self.name(),
                body_len + payload_len
            )));
        }
        let mut head = BytesMut::with_capacity(HEAD + body_len + payload_len);
        head.put_u64_le(self.cost());
        head.put_u32_le(body_len as u32);
        head.put_u32_le(payload_len as u32);
        head.put_u32_le(tensors.len() as u32);
        tensors.iter().for_each(|bytes| head.put_u32_le(bytes.len() as u32));
        head.put_slice(&fields);
        tensors.iter().chain(&values).for_each(|bytes| head.put_slice(bytes));
        Ok(Encoded { head: head.freeze(), bulk: self.bulk() })
    }

    fn write(&self, out: &mut Writer) {
        match self {
            Self::Nothing => out.code(0),
            Self::KillReg { register } => out.code(1).u32(*register),
            Self::GetGlobalFunc { to, name } => out.code(2).u32(*to).text(name),
            Self::CallPacked { to, function, args } => out.code(3).u32(*to).u32(*function).operands(args),
            Self::LoadModule { to, path, device } => out.code(4).u32(*to).text(path).device(*device),
            Self::ModuleFunction { to, module, name } => out.code(5).u32(*to).u32(*module).text(name),
            Self::Empty { to, device, dtype, shape, on } => {
                out.code(6).u32(*to).virtual_device(device.as_ref()).dtype(*dtype).shape(shape).on(*on)
            }
            Self::CopyToWorker0 { to, fresh, dtype, shape, offset, data: _, on } => {
                out.code(7).u32(*to).bool(*fresh).dtype(*dtype).shape(shape).u64(*offset).on(*on)
            }
            Self::CopyFromWorker0 { ticket, from } => out.code(8).u64(*ticket).u32(*from),
            Self::DebugGetFromRemote { ticket, worker, from } => out.code(9).u64(*ticket).u32(*worker).u32(*from),
            Self::DebugSetRegister { worker, to, value } => out.code(10).u32(*worker).u32(*to).operand(value),
            Self::Collective { kind, scope, from, to, fresh } => {
                let (code, op) = kind_code(*kind);
                out.code(11).u8(code).u8(op).scope(*scope).bool(*fresh).u32(*from).u32(*to)
            }
            Self::SendRecv { from, to, pairs } => {
                out.code(12).u32(*from).u32(*to).list(pairs, |out, (from, to)| _ = out.u32(*from).u32(*to))
            }
            Self::SyncWorker { ticket, worker } => {
                out.code(13).u64(*ticket).list(worker.as_slice(), |out, worker| _ = out.u32(*worker))
            }
            Self::InitCcl { plan } => out.code(14).bytes(plan.as_bytes()),
            Self::Shutdown { ticket } => out.code(15).u64(*ticket),
            Self::Define { program, registers, parameters, outputs, steps } => out
                .code(DEFINE)
                .u32(*program)
                .u32(*registers)
                .list(parameters, |out, (register, wanted)| _ = out.u32(*register).value(&wanted.to_value()))
                .registers(outputs)
                .list(steps, |out, step| step.write(out)),
            Self::Run { program, args, outputs } => out.code(17).u32(*program).registers(outputs).operands(args),
            Self::Forget { program } => out.code(18).u32(*program),
            Self::FinishInitCcl { epoch, enter } => out.code(19).u64(*epoch).bool(*enter),
        };
    }

    fn read(input: &mut Reader<'_>, bulk: &mut impl Iterator<Item = Bytes>) -> Result<Self> {
        Ok(match input.u8()? {
            0 => Self::Nothing,
            1 => Self::KillReg { register: input.u32()? },
            2 => Self::GetGlobalFunc { to: input.u32()?, name: input.text()? },
            3 => Self::CallPacked { to: input.u32()?, function: input.u32()?, args: input.operands()? },
            4 => Self::LoadModule { to: input.u32()?, path: input.text()?, device: input.device()? },
            5 => Self::ModuleFunction { to: input.u32()?, module: input.u32()?, name: input.text()? },
            6 => Self::Empty {
                to: input.u32()?,
                device: input.virtual_device()?,
                dtype: input.dtype()?,
                shape: input.shape()?,
                on: input.on()?,
            },
            7 => Self::CopyToWorker0 {
                to: input.u32()?,
                fresh: input.bool()?,
                dtype: input.dtype()?,
                shape: input.shape()?,
                offset: input.u64()?,
                on: input.on()?,
                data: bulk.next().ok_or_else(malformed)?,
            },
            8 => Self::CopyFromWorker0 { ticket: input.u64()?, from: input.u32()? },
            9 => Self::DebugGetFromRemote { ticket: input.u64()?, worker: input.u32()?, from: input.u32()? },
            10 => Self::DebugSetRegister { worker: input.u32()?, to: input.u32()?, value: input.operand()? },
            11 => {
                let kind = kind(input.u8()?, input.u8()?).ok_or_else(malformed)?;
                let scope = input.scope()?;
                Self::Collective { kind, scope, fresh: input.bool()?, from: input.u32()?, to: input.u32()? }
            }
            12 => {
                let (from, to) = (input.u32()?, input.u32()?);
                Self::SendRecv { from, to, pairs: input.list(8, |input| Ok((input.u32()?, input.u32()?)))? }
            }
            13 => {
                let (ticket, workers) = (input.u64()?, input.registers()?);
                match workers[..] {
                    [] => Self::SyncWorker { ticket, worker: None },
                    [worker] => Self::SyncWorker { ticket, worker: Some(worker) },
                    _ => return Err(malformed()),
                }
            }
            14 => Self::InitCcl { plan: Packed::from_bytes(Bytes::copy_from_slice(input.bytes()?)) },
            15 => Self::Shutdown { ticket: input.u64()? },
            DEFINE => Self::Define {
                program: input.u32()?,
                registers: input.u32()?,
                parameters: input.list(4, |input| {
                    let register = input.u32()?;
                    let wanted = ParameterType::from_value(input.value()?).ok_or_else(malformed)?;
                    Ok((register, wanted))
                })?,
                outputs: input.registers()?,
                steps: input.list(1, Self::read_step)?,
            },
            17 => {
                let (program, outputs) = (input.u32()?, input.registers()?);
                Self::Run { program, outputs, args: input.operands()? }
            }
            18 => Self::Forget { program: input.u32()? },
            19 => Self::FinishInitCcl { epoch: input.u64()?, enter: input.bool()? },
            _ => return Err(malformed()),
        })
    }

    /// Reads a step of a program, which has no bulk and no steps itself.
    fn read_step(input: &mut Reader<'_>) -> Result<Self> {
        if input.body.first() == Some(&DEFINE) {
            return Err(malformed());
        }
        let step = Self::read(input, &mut std::iter::empty())?;
        if step.is_step() { Ok(step) } else { Err(malformed()) }
    }
}

/// The bytes of a head.
const HEAD: usize = 16;

/// The number of the command that has others in it.
const DEFINE: u8 = 16;

/// Reads a batch: the heads of its commands behind each other, and the bulk of those that have
/// some.
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
        let mut input = Reader::new(body, payload)?;
        let command = Command::read(&mut input, &mut bulk)?;
        input.finish()?;
        held += command.cost();
        if held > MAX_HELD {
            return Err(RpcError::limit("the bytes of one batch of commands in memory", MAX_HELD, held));
        }
        commands.push(Queued { cost, command: Arc::new(command), charge: None });
    }
    if bulk.next().is_some() { Err(malformed()) } else { Ok(commands) }
}

/// Returns the bytes of each command of a batch that [`decode_batch`] has read: its head and what
/// follows that.
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

fn kind(code: u8, op: u8) -> Option<Kind> {
    let op = OPS.get(usize::from(op)).copied()?;
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
struct Writer {
    fields: Vec<u8>,
    /// The payload of values, in their order.
    values: Vec<Bytes>,
    tensors: Vec<Bytes>,
}

impl Writer {
    fn code(&mut self, code: u8) -> &mut Self {
        self.u8(code)
    }

    fn u8(&mut self, value: u8) -> &mut Self {
        self.fields.put_u8(value);
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.fields.put_u32_le(value);
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.fields.put_u64_le(value);
        self
    }

    fn bool(&mut self, value: bool) -> &mut Self {
        self.u8(value.into())
    }

    fn on(&mut self, on: On) -> &mut Self {
        match on {
            On::All => self.u8(0),
            On::Worker0 => self.u8(1),
            On::FirstOfGroups => self.u8(2),
            On::Worker(worker) => self.u8(3).u32(worker),
            On::FirstOf(grouping) => self.u8(4).grouping(grouping),
        }
    }

    fn scope(&mut self, scope: Scope) -> &mut Self {
        match scope {
            Scope::World => self.u8(0),
            Scope::Group => self.u8(1),
            Scope::Groups(grouping) => self.u8(2).grouping(grouping),
        }
    }

    fn grouping(&mut self, grouping: Grouping) -> &mut Self {
        self.u32(grouping.size()).u32(grouping.stride())
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        // A longer text is too long for a command, which is found out at the end.
        self.u32(u32::try_from(bytes.len()).unwrap_or(u32::MAX));
        self.fields.put_slice(bytes);
        self
    }

    fn text(&mut self, text: &str) -> &mut Self {
        self.bytes(text.as_bytes())
    }

    fn dtype(&mut self, dtype: DataType) -> &mut Self {
        self.u8(dtype.code.0).u8(dtype.bits);
        self.fields.put_u16_le(dtype.lanes);
        self
    }

    fn device(&mut self, device: Option<Device>) -> &mut Self {
        self.list(device.as_slice(), |out, device| {
            out.fields.put_i32_le(device.kind.0);
            out.fields.put_i32_le(device.index);
        })
    }

    /// As text, which is checked where it is read.
    fn virtual_device(&mut self, device: Option<&VirtualDevice>) -> &mut Self {
        self.list(device.as_slice(), |out, device| _ = out.text(&device.to_string()))
    }

    fn shape(&mut self, shape: &[i64]) -> &mut Self {
        self.list(shape, |out, len| out.fields.put_i64_le(*len))
    }

    fn registers(&mut self, registers: &[Register]) -> &mut Self {
        self.list(registers, |out, register| _ = out.u32(*register))
    }

    fn list<T>(&mut self, items: &[T], mut each: impl FnMut(&mut Self, &T)) -> &mut Self {
        self.u32(u32::try_from(items.len()).unwrap_or(u32::MAX));
        items.iter().for_each(|item| each(self, item));
        self
    }

    fn value(&mut self, value: &Value) -> &mut Self {
        let (body, payload) = encode_value(value);
        let payload_len: usize = payload.iter().map(Bytes::len).sum();
        self.u32(u32::try_from(payload_len).unwrap_or(u32::MAX)).bytes(&body);
        self.values.extend(payload);
        self
    }

    fn operands(&mut self, values: &[Value<Operand>]) -> &mut Self {
        self.list(values, |out, value| _ = out.operand(value))
    }

    fn operand(&mut self, value: &Value<Operand>) -> &mut Self {
        let replaced = value.clone().try_map(&mut |operand| {
            Ok::<_, std::convert::Infallible>(match operand {
                Operand::Register(register) => Reference::Object(Handle::from_bits(register.into())),
                Operand::Tensor(tensor) => {
                    let storage = Handle::from_bits(self.tensors.len() as u64);
                    self.tensors.push(tensor.bytes);
                    let (shape, dtype, device) = (tensor.shape, tensor.dtype, Device::cpu());
                    Reference::Tensor(Box::new(TensorRef {
                        storage,
                        byte_offset: 0,
                        shape,
                        strides: None,
                        dtype,
                        device,
                    }))
                }
            })
        });
        match replaced {
            Ok(value) => self.value(&value),
            Err(never) => match never {},
        }
    }
}

/// Reads the fields of a command.
struct Reader<'a> {
    body: &'a [u8],
    payload: Bytes,
    tensors: Vec<Bytes>,
}

impl<'a> Reader<'a> {
    fn new(body: &'a [u8], payload: Bytes) -> Result<Self> {
        let mut this = Self { body, payload, tensors: Vec::new() };
        this.tensors = this.list(4, |this| {
            let len = this.u32()? as usize;
            this.share(len)
        })?;
        Ok(this)
    }

    fn finish(&self) -> Result<()> {
        if self.body.is_empty() && self.payload.is_empty() { Ok(()) } else { Err(malformed()) }
    }

    /// Takes the next bytes of the payload.
    fn share(&mut self, len: usize) -> Result<Bytes> {
        match len {
            0 => Ok(Bytes::new()),
            _ if len > self.payload.len() => Err(malformed()),
            _ => Ok(self.payload.split_to(len)),
        }
    }

    fn array<const LEN: usize>(&mut self) -> Result<[u8; LEN]> {
        let (array, rest) = self.body.split_first_chunk().ok_or_else(malformed)?;
        self.body = rest;
        Ok(*array)
    }

    fn u8(&mut self) -> Result<u8> {
        self.array().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn bool(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(malformed()),
        }
    }

    fn bytes(&mut self) -> Result<&'a [u8]> {
        let len = self.u32()? as usize;
        let (bytes, rest) = self.body.split_at_checked(len).ok_or_else(malformed)?;
        self.body = rest;
        Ok(bytes)
    }

    fn text(&mut self) -> Result<String> {
        String::from_utf8(self.bytes()?.to_vec()).map_err(|_| malformed())
    }

    fn dtype(&mut self) -> Result<DataType> {
        let (code, bits) = (DataTypeCode(self.u8()?), self.u8()?);
        Ok(DataType { code, bits, lanes: u16::from_le_bytes(self.array()?) })
    }

    fn device(&mut self) -> Result<Option<Device>> {
        let devices = self.list(8, |this| {
            let kind = DeviceType(i32::from_le_bytes(this.array()?));
            Ok(Device::new(kind, i32::from_le_bytes(this.array()?)))
        })?;
        if devices.len() > 1 { Err(malformed()) } else { Ok(devices.first().copied()) }
    }

    fn virtual_device(&mut self) -> Result<Option<VirtualDevice>> {
        let mut devices = self.list(4, |this| this.text()?.parse())?;
        if devices.len() > 1 { Err(malformed()) } else { Ok(devices.pop()) }
    }

    fn shape(&mut self) -> Result<Vec<i64>> {
        self.list(8, |this| this.array().map(i64::from_le_bytes))
    }

    fn registers(&mut self) -> Result<Vec<Register>> {
        self.list(4, Self::u32)
    }

    fn on(&mut self) -> Result<On> {
        Ok(match self.u8()? {
            0 => On::All,
            1 => On::Worker0,
            2 => On::FirstOfGroups,
            3 => On::Worker(self.u32()?),
            4 => On::FirstOf(self.grouping()?),
            _ => return Err(malformed()),
        })
    }

    fn scope(&mut self) -> Result<Scope> {
        Ok(match self.u8()? {
            0 => Scope::World,
            1 => Scope::Group,
            2 => Scope::Groups(self.grouping()?),
            _ => return Err(malformed()),
        })
    }

    fn grouping(&mut self) -> Result<Grouping> {
        Grouping::new(self.u32()?, self.u32()?).map_err(|_| malformed())
    }

    /// Reads a list of items that take so many bytes at least. A length that the rest cannot hold
    /// is an error before it reserves memory.
    fn list<T>(&mut self, least: usize, mut each: impl FnMut(&mut Self) -> Result<T>) -> Result<Vec<T>> {
        let len = self.u32()? as usize;
        if len > self.body.len() / least {
            return Err(malformed());
        }
        (0..len).map(|_| each(self)).collect()
    }

    fn value(&mut self) -> Result<Value> {
        let payload_len = self.u32()? as usize;
        let body = self.bytes()?;
        let payload = self.share(payload_len)?;
        Ok(decode_value(body, payload)?)
    }

    fn operands(&mut self) -> Result<Vec<Value<Operand>>> {
        self.list(8, Self::operand)
    }

    fn operand(&mut self) -> Result<Value<Operand>> {
        let value = self.value()?;
        value.try_map(&mut |reference| match reference {
            Reference::Object(handle) => {
                u32::try_from(handle.to_bits()).map(Operand::Register).map_err(|_| malformed())
            }
            Reference::Tensor(tensor) => {
                let TensorRef { storage, shape, dtype, .. } = *tensor;
                let index = usize::try_from(storage.to_bits()).map_err(|_| malformed())?;
                let bytes = self.tensors.get(index).ok_or_else(malformed)?.clone();
                Ok(Operand::Tensor(HostTensor { dtype, shape, bytes }))
            }
            _ => Err(malformed()),
        })
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::wire::command::OWN;

    /// Returns one command of each kind, and more where a kind has several forms.
    pub(crate) fn all() -> Vec<Command> {
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
            Command::KillReg { register: 1 << 31 },
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
            Command::Empty {
                to: OWN | 2,
                device: "cuda:1,scope=host,target=cuda -arch=sm_90".parse().ok(),
                dtype: DataType::I8,
                shape: vec![3],
                on: On::All,
            },
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
        commands.push(Command::FinishInitCcl { epoch: 2, enter: true });
        commands.push(Command::CopyToWorker0 {
            to: 8,
            fresh: true,
            dtype: DataType::U8,
            shape: vec![4],
            offset: 0,
            data: Bytes::from_static(b"bulk"),
            on: On::Worker(3),
        });
        let grouping = Grouping::new(2, 3).unwrap();
        let scope = Scope::Groups(grouping);
        commands.push(Command::Collective { kind: Kind::Allgather, scope, from: 1, to: 2, fresh: false });
        let on = On::FirstOf(grouping);
        commands.push(Command::Empty { to: 7, device: None, dtype: DataType::I8, shape: vec![3], on });
        commands
    }

    #[test]
    fn every_command_is_among_the_samples() {
        let samples = all();
        let names: std::collections::HashSet<_> = samples.iter().map(std::mem::discriminant).collect();
        for command in crate::node::flood_tests::of_each_kind() {
            assert!(names.contains(&std::mem::discriminant(&command)), "{}", command.name());
        }
    }

    #[test]
    fn the_specification_names_each_command_beside_its_number() {
        let specification = include_str!("../../../PROTOCOL.md");
        let words = specification.split_whitespace().collect::<Vec<_>>().join(" ");
        for command in all() {
            let head = command.encode().unwrap().head;
            let tensors = u32::from_le_bytes(head[HEAD..HEAD + 4].try_into().unwrap()) as usize;
            let (number, name) = (head[HEAD + 4 + 4 * tensors], command.name());
            let is_row = |line: &str| line.starts_with(&format!("| {number} | ")) && line.contains(name);
            let is_named = match command {
                // The kind is behind the number.
                Command::Collective { .. } => words.contains(&format!("{} {name}", head[HEAD + 5])),
                _ => specification.lines().any(is_row),
            };
            assert!(is_named, "{number} {name}");
        }
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
