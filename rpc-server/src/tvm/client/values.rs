//! Values of callers as those of the wire, and results of the server as values.

use rpc_core::dlpack::dense_strides;
use rpc_core::{DataType, Device, Reference, RpcError, TensorRef, Value};
use rpc_tvm::wire::{CallResult, MAX_DIMENSIONS, ResultKind, TensorHeader, Text, WireValue};

use super::objects::{Held, Memory, Objects, Origin, other_kind};

/// Number from which on types of devices are those by which TVM's clients mark sessions.
const FIRST_MARKED_DEVICE: i32 = 128;

/// Checks a device before it is sent.
pub(super) fn checked_device(device: Device) -> Result<Device, RpcError> {
    if (0..FIRST_MARKED_DEVICE).contains(&device.kind.0) && device.index >= 0 {
        return Ok(device);
    }
    Err(RpcError::invalid_argument(format!("there is no device {device} at a server of TVM")))
}

/// Returns an argument of a call.
pub(super) fn argument(objects: &Objects, value: Value) -> Result<WireValue, RpcError> {
    Ok(match value {
        Value::Null => WireValue::None,
        Value::Bool(value) => WireValue::Bool(value),
        Value::Int(value) => WireValue::Int(value),
        Value::Float(value) => WireValue::Float(value),
        Value::Str(text) => WireValue::Str(text.into()),
        Value::Bytes(bytes) => WireValue::Bytes(bytes),
        Value::DataType(dtype) => WireValue::DataType(dtype),
        Value::Device(device) => WireValue::Device(checked_device(device)?),
        Value::Object(Reference::Tensor(tensor)) => WireValue::Tensor(header(objects, &tensor)?),
        Value::Object(reference) => match (objects.get(reference.handle())?, &reference) {
            // The number 0 would be the session's root module, which crashes servers of TVM.
            (Held::Function { handle: 0, .. } | Held::Module(0) | Held::Object(0), _) => {
                return Err(RpcError::unsupported(
                    "the server gave no handle of the object, so that it cannot be sent",
                ));
            }
            (Held::Function { handle, .. }, Reference::Function(_)) => WireValue::Function(*handle),
            (Held::Module(handle), Reference::Module(_)) => WireValue::Module(*handle),
            (Held::Object(handle), Reference::Object(_)) => WireValue::Object(*handle),
            (Held::Ours(_) | Held::Upload(_) | Held::Download(_), _) => {
                return Err(RpcError::unsupported("the object is none of the server, and cannot be an argument there"));
            }
            (Held::Stream { .. }, _) => {
                return Err(RpcError::unsupported("a stream cannot be an argument of a function of TVM"));
            }
            _ => return Err(other_kind(reference.handle(), "object of this kind")),
        },
        Value::Shape(_) => {
            return Err(RpcError::unsupported(
                "TVM's protocol sends no shapes: pass the result of the server's function ffi.Shape",
            ));
        }
        other => {
            let name = other.type_name();
            return Err(RpcError::unsupported(format!("TVM's protocol sends no value of type {name}")));
        }
    })
}

/// Returns the header of a tensor that lies in memory of the session.
pub(super) fn header(objects: &Objects, tensor: &TensorRef) -> Result<TensorHeader, RpcError> {
    let Held::Memory(memory) = objects.get(tensor.storage)? else {
        return Err(other_kind(tensor.storage, "tensor"));
    };
    if tensor.shape.len() > MAX_DIMENSIONS {
        let (found, limit) = (tensor.shape.len(), MAX_DIMENSIONS);
        return Err(RpcError::invalid_argument(format!("a tensor has {found} dimensions, and may have {limit}")));
    }
    let size = tensor.size_bytes()?;
    if tensor.strides.as_ref().is_some_and(|strides| *strides != dense_strides(&tensor.shape)) {
        return Err(RpcError::unsupported(
            "TVM's protocol sends no tensor with gaps (strides): copy it to a dense one",
        ));
    }
    if tensor.device != memory.device {
        let (claimed, device) = (tensor.device, memory.device);
        return Err(RpcError::invalid_argument(format!("the tensor is on {device}, and not on {claimed}")));
    }
    let end = tensor.byte_offset.checked_add(size);
    if end.is_none_or(|end| end > memory.len) {
        let (offset, len) = (tensor.byte_offset, memory.len);
        let text = format!("{size} bytes at offset {offset} are not in a tensor of {len} bytes");
        return Err(RpcError::invalid_argument(text));
    }
    Ok(TensorHeader {
        data: memory.data,
        device: memory.device,
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        // Both are within the memory, whose end was checked.
        byte_offset: memory.offset + tensor.byte_offset,
    })
}

/// Returns the header of `len` bytes at an offset in a tensor. The element type stays if the bytes
/// are whole elements, because servers of another byte order swap by elements.
pub(super) fn piece(tensor: &TensorHeader, offset: u64, len: u64) -> TensorHeader {
    let item = element_size(tensor.dtype).filter(|item| offset.is_multiple_of(*item) && len.is_multiple_of(*item));
    let (dtype, count) = item.map_or((DataType::U8, len), |item| (tensor.dtype, len / item));
    TensorHeader { dtype, shape: vec![count.cast_signed()], byte_offset: tensor.byte_offset + offset, ..tensor.clone() }
}

/// Returns the bytes of an element; `None` if they are not whole ones.
pub(super) fn element_size(dtype: DataType) -> Option<u64> {
    let bits = u64::from(dtype.bits) * u64::from(dtype.lanes);
    (bits > 0 && bits.is_multiple_of(8)).then_some(bits / 8)
}

/// Result of a call: a plain value, or an object that is to be stored.
pub(super) enum Received {
    Value(Value),
    Object(Held, ObjectKind),
}

/// Kind of a reference, and the layout of a tensor.
pub(super) enum ObjectKind {
    Function,
    Module,
    Object,
    Tensor(TensorRef),
}

/// Returns the value that the server has returned.
pub(super) fn received(result: CallResult) -> Result<Received, RpcError> {
    Ok(Received::Value(match result {
        CallResult::Str(text) => Value::Str(text.as_str().to_owned()),
        CallResult::Bytes(bytes) => Value::Bytes(bytes),
        CallResult::Plain(value) => plain(value)?,
        CallResult::Tensor(header, handle) => return tensor(&header, handle),
        CallResult::Object(kind, handle) => {
            return Ok(match kind {
                ResultKind::Function => Received::Object(Held::Function { handle, origin: None }, ObjectKind::Function),
                ResultKind::Module => Received::Object(Held::Module(handle), ObjectKind::Module),
                _ => Received::Object(Held::Object(handle), ObjectKind::Object),
            });
        }
        _ => return Err(RpcError::unsupported("the server returned a value of an unknown kind")),
    }))
}

fn plain(value: WireValue) -> Result<Value, RpcError> {
    Ok(match value {
        WireValue::None | WireValue::Pointer(0) => Value::Null,
        WireValue::Int(value) => Value::Int(value),
        WireValue::Bool(value) => Value::Bool(value),
        WireValue::Float(value) => Value::Float(value),
        WireValue::DataType(dtype) => Value::DataType(dtype),
        WireValue::Device(device) => Value::Device(device),
        other => {
            let name = other.type_name();
            return Err(RpcError::unsupported(format!("the function returned a {name}, which means nothing here")));
        }
    })
}

fn tensor(header: &TensorHeader, handle: u64) -> Result<Received, RpcError> {
    let TensorHeader { data, device, dtype, ref shape, byte_offset: offset } = *header;
    let reference = TensorRef {
        storage: rpc_core::Handle::from_bits(0),
        byte_offset: 0,
        shape: shape.clone(),
        strides: None,
        dtype,
        device,
    };
    let len = reference.size_bytes()?;
    // Later offsets are added to this one.
    if offset.checked_add(len).is_none() {
        return Err(RpcError::new(rpc_core::ErrorKind::Protocol, "the server returned a tensor beyond all memory"));
    }
    let held = Held::Memory(Memory { data, device, offset, len, tensor: Some(handle) });
    Ok(Received::Object(held, ObjectKind::Tensor(reference)))
}

impl Objects {
    /// Stores what was received. An object that finds no room is returned with the error, to be
    /// freed at the server.
    pub(super) fn keep(&mut self, held: Held, kind: ObjectKind) -> Result<Value, (RpcError, Held)> {
        let handle = self.insert(held.clone()).map_err(|error| (error, held))?;
        Ok(match kind {
            ObjectKind::Function => Reference::Function(handle).into(),
            ObjectKind::Module => Reference::Module(handle).into(),
            ObjectKind::Object => Reference::Object(handle).into(),
            ObjectKind::Tensor(tensor) => TensorRef { storage: handle, ..tensor }.into(),
        })
    }

    /// Returns the arguments of a call.
    pub(super) fn arguments(&self, args: Vec<Value>) -> Result<Vec<WireValue>, RpcError> {
        let args = args.into_iter().enumerate();
        args.map(|(at, arg)| argument(self, arg).map_err(|error| error.context(format_args!("argument {at}"))))
            .collect()
    }

    /// Adds to a function of the server the name by which it was found.
    pub(super) fn function(handle: u64, module: Option<rpc_core::Handle>, name: &str) -> Held {
        Held::Function { handle, origin: Origin::new(module, name) }
    }
}

/// Checks a name or path before it is sent.
pub(super) fn checked_name(name: String, what: &str) -> Result<Text, RpcError> {
    const MAX_NAME: usize = 4 << 10;
    if name.len() > MAX_NAME || name.contains('\0') {
        let len = name.len();
        return Err(RpcError::invalid_argument(format!(
            "{what} has {len} bytes, and may have {MAX_NAME} at most and no NUL"
        )));
    }
    Ok(name.into())
}
