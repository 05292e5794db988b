//! Encoding of values: MessagePack, with extension types for the kinds of value that MessagePack
//! lacks.
//!
//! Bulk bytes are not part of the MessagePack. A bytes value is written as its length; the bytes
//! themselves follow in the frame's payload, in the order of the values, so that they are never
//! copied into a body.
//!
//! | extension | value | content, little-endian |
//! | --- | --- | --- |
//! | 1 | bytes | u64 length in the payload |
//! | 2 | shape | i64 each |
//! | 3 | dtype | u8 code, u8 bits, u16 lanes |
//! | 4 | device | i32 kind, i32 index |
//! | 5 | packed | MessagePack |
//! | 6 | function | u64 handle |
//! | 7 | module | u64 handle |
//! | 8 | object | u64 handle |
//! | 9 | tensor | u64 handle, u64 byte offset, dtype, device, u8 dimensions, u8 strided, i64 each |
//! | 10 | pipe | u64 handle |
//!
//! The i64 numbers of a tensor are one for each dimension of the shape and, if `strided` is 1, one
//! stride for each dimension; otherwise `strided` is 0.

use bytes::Bytes;
use rmp::{Marker, encode};

use crate::dlpack::{DataType, DataTypeCode, Device, DeviceType};
use crate::error::{ErrorKind, RpcError};
use crate::handle::Handle;
use crate::tensor::MAX_DIMENSIONS;
use crate::value::{MAX_DEPTH, Packed, Reference, TensorRef, Value};

/// Error in the encoding of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CodecError {
    /// The body ends inside a value.
    #[error("the body ends inside of a value")]
    Truncated,
    /// The body continues after its last value, or the payload is longer than its values.
    #[error("{0} bytes are left over")]
    Trailing(usize),
    /// A marker or an extension type that is not allowed at this position.
    #[error("unexpected marker {0:#04x}")]
    Unexpected(u8),
    /// A string that is not UTF-8.
    #[error("a string is not UTF-8")]
    NotUtf8,
    /// Lists and maps are nested deeper than [`MAX_DEPTH`].
    #[error("values are nested deeper than {MAX_DEPTH}")]
    TooDeep,
    /// The message has too many values; small values take far more memory than bytes on the wire.
    #[error("a message has more than {MAX_VALUES} values")]
    TooMany,
    /// A number is outside its range.
    #[error("a number is out of range")]
    OutOfRange,
    /// An operation that this version does not know. Only the request is refused; the session
    /// continues.
    #[error("unknown operation {0}")]
    UnknownOperation(u64),
    /// An attribute of a device that this version does not know. Only the request is refused.
    #[error("unknown attribute {0} of a device")]
    UnknownAttribute(u64),
}

impl From<CodecError> for RpcError {
    fn from(error: CodecError) -> Self {
        let kind = match error {
            CodecError::UnknownOperation(_) | CodecError::UnknownAttribute(_) => ErrorKind::Unsupported,
            _ => ErrorKind::Protocol,
        };
        Self::new(kind, error.to_string())
    }
}

type Result<T> = std::result::Result<T, CodecError>;

fn unexpected(marker: Marker) -> CodecError {
    CodecError::Unexpected(marker.to_u8())
}

/// Takes the outcome of writing to a `Vec`, which cannot fail.
fn infallible<T, E>(written: std::result::Result<T, E>) {
    debug_assert!(written.is_ok(), "memory takes every write");
}

/// Largest number of values in one message, counting list elements and the keys and values of maps.
/// More numbers than that belong in a tensor, bytes or a packed value.
pub(crate) const MAX_VALUES: usize = 1 << 20;

/// MessagePack's nil.
const NIL: u8 = Marker::Null.to_u8();
/// Largest number that is a byte of its own in MessagePack.
const MAX_FIX_POS: u8 = 0x7f;
/// MessagePack's array without elements; the length is added for up to [`MAX_FIX_ARRAY`] elements.
const FIX_ARRAY: u8 = Marker::FixArray(0).to_u8();
const MAX_FIX_ARRAY: usize = 15;

const EXT_BYTES: u8 = 1;
const EXT_SHAPE: u8 = 2;
const EXT_DTYPE: u8 = 3;
const EXT_DEVICE: u8 = 4;
const EXT_PACKED: u8 = 5;
const EXT_FUNCTION: u8 = 6;
const EXT_MODULE: u8 = 7;
const EXT_OBJECT: u8 = 8;
const EXT_TENSOR: u8 = 9;
const EXT_PIPE: u8 = 10;

/// Writer of one message: its body and the pieces of its payload.
#[derive(Debug, Default)]
pub(crate) struct Writer {
    pub(crate) body: Vec<u8>,
    pub(crate) payload: Vec<Bytes>,
    /// True if the message names a result that the session keeps by its place in the arguments.
    pub(crate) has_pipes: bool,
    /// Reason why the message must not be sent: a part of it would be refused by every receiver.
    pub(crate) invalid: Option<&'static str>,
    pub(super) depth: usize,
    pub(super) values: usize,
}

impl Writer {
    /// Returns the writer of a message whose body is written to `body`, which is cleared first.
    pub(crate) fn into_body(mut body: Vec<u8>) -> Self {
        body.clear();
        Self { body, ..Self::default() }
    }

    pub(crate) fn nil(&mut self) {
        self.body.push(NIL);
    }

    pub(crate) fn bool(&mut self, value: bool) {
        infallible(encode::write_bool(&mut self.body, value));
    }

    // Nearly all numbers and lengths of small calls have forms of one byte, which are written
    // without the general encoder.
    pub(crate) fn uint(&mut self, value: u64) {
        match u8::try_from(value) {
            Ok(small @ ..=MAX_FIX_POS) => self.body.push(small),
            _ => infallible(encode::write_uint(&mut self.body, value)),
        }
    }

    pub(crate) fn int(&mut self, value: i64) {
        match u8::try_from(value) {
            Ok(small @ ..=MAX_FIX_POS) => self.body.push(small),
            _ => infallible(encode::write_sint(&mut self.body, value)),
        }
    }

    pub(crate) fn float(&mut self, value: f64) {
        infallible(encode::write_f64(&mut self.body, value));
    }

    pub(crate) fn str(&mut self, text: &str) {
        infallible(encode::write_str(&mut self.body, text));
    }

    pub(crate) fn array(&mut self, len: usize) {
        if len <= MAX_FIX_ARRAY {
            return self.body.push(FIX_ARRAY | len as u8);
        }
        infallible(encode::write_array_len(&mut self.body, len as u32));
    }

    pub(crate) fn map(&mut self, len: usize) {
        infallible(encode::write_map_len(&mut self.body, len as u32));
    }

    fn ext(&mut self, kind: u8, len: usize) {
        infallible(encode::write_ext_meta(&mut self.body, len as u32, kind as i8));
    }

    /// Writes MessagePack's own `bin` type, which is no [`Value`]: only for fixed fields of a body.
    pub(crate) fn bin<const N: usize>(&mut self, bytes: [u8; N]) {
        const { assert!(N <= u8::MAX as usize) }
        infallible(encode::write_bin(&mut self.body, &bytes));
    }

    pub(crate) fn handle(&mut self, handle: Handle) {
        self.uint(handle.to_bits());
    }

    fn reference(&mut self, kind: u8, handle: Handle) {
        self.ext(kind, 8);
        self.body.extend_from_slice(&handle.to_bits().to_le_bytes());
    }

    pub(crate) fn bytes(&mut self, bytes: &Bytes) {
        self.ext(EXT_BYTES, 8);
        self.body.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
        if !bytes.is_empty() {
            self.payload.push(bytes.clone());
        }
    }

    pub(crate) fn dtype(&mut self, dtype: DataType) {
        self.ext(EXT_DTYPE, 4);
        self.dtype_content(dtype);
    }

    fn dtype_content(&mut self, dtype: DataType) {
        self.body.extend_from_slice(&[dtype.code.0, dtype.bits]);
        self.body.extend_from_slice(&dtype.lanes.to_le_bytes());
    }

    pub(crate) fn device(&mut self, device: Device) {
        self.ext(EXT_DEVICE, 8);
        self.device_content(device);
    }

    fn device_content(&mut self, device: Device) {
        self.body.extend_from_slice(&device.kind.0.to_le_bytes());
        self.body.extend_from_slice(&device.index.to_le_bytes());
    }

    pub(crate) fn shape(&mut self, shape: &[i64]) {
        self.ext(EXT_SHAPE, 8 * shape.len());
        self.dimensions(shape);
    }

    fn dimensions(&mut self, dimensions: &[i64]) {
        for dimension in dimensions {
            self.body.extend_from_slice(&dimension.to_le_bytes());
        }
    }

    pub(crate) fn tensor(&mut self, tensor: &TensorRef) {
        let strides = tensor.strides.as_deref().unwrap_or_default();
        if tensor.shape.len() > MAX_DIMENSIONS {
            self.invalid = Some("a tensor has more dimensions than a session takes");
        } else if tensor.strides.is_some() && strides.len() != tensor.shape.len() {
            self.invalid = Some("a tensor has a different number of strides than dimensions");
        }
        // The written lengths must not wrap, although the message will not be sent.
        let shape = &tensor.shape[..tensor.shape.len().min(u8::MAX.into())];
        let strides = &strides[..strides.len().min(shape.len())];
        self.ext(EXT_TENSOR, 30 + 8 * (shape.len() + strides.len()));
        self.body.extend_from_slice(&tensor.storage.to_bits().to_le_bytes());
        self.body.extend_from_slice(&tensor.byte_offset.to_le_bytes());
        self.dtype_content(tensor.dtype);
        self.device_content(tensor.device);
        self.body.extend_from_slice(&[shape.len() as u8, tensor.strides.is_some().into()]);
        self.dimensions(shape);
        self.dimensions(strides);
    }

    /// Writes the arguments of a call as a list, one level deep.
    pub(crate) fn args(&mut self, args: &[Value]) {
        self.array(args.len());
        self.depth += 1;
        args.iter().for_each(|arg| self.value(arg));
        self.depth -= 1;
    }

    pub(crate) fn value(&mut self, value: &Value) {
        self.values += 1;
        if self.values > MAX_VALUES {
            self.invalid =
                Some("a message would have more values than a session takes; use a tensor, bytes or a packed value");
            return;
        }
        match value {
            Value::Null => self.nil(),
            Value::Bool(value) => self.bool(*value),
            Value::Int(value) => self.int(*value),
            Value::Float(value) => self.float(*value),
            Value::Str(text) => self.str(text),
            Value::Bytes(bytes) => self.bytes(bytes),
            Value::Shape(shape) => self.shape(shape),
            Value::DataType(dtype) => self.dtype(*dtype),
            Value::Device(device) => self.device(*device),
            Value::List(values) => {
                self.array(values.len());
                self.nested(|this| values.iter().for_each(|value| this.value(value)));
            }
            Value::Map(pairs) => {
                self.map(pairs.len());
                self.nested(|this| {
                    pairs.iter().for_each(|(key, value)| {
                        this.value(key);
                        this.value(value);
                    });
                });
            }
            Value::Packed(packed) => {
                self.ext(EXT_PACKED, packed.as_bytes().len());
                self.body.extend_from_slice(packed.as_bytes());
            }
            Value::Object(Reference::Function(handle)) => self.reference(EXT_FUNCTION, *handle),
            Value::Object(Reference::Module(handle)) => self.reference(EXT_MODULE, *handle),
            Value::Object(Reference::Object(handle)) => self.reference(EXT_OBJECT, *handle),
            Value::Object(Reference::Tensor(tensor)) => self.tensor(tensor),
            Value::Object(Reference::Pipe(handle)) => {
                self.has_pipes = true;
                self.reference(EXT_PIPE, *handle);
            }
        }
    }

    /// Writes the content of a list or a map, one level deeper.
    fn nested(&mut self, write: impl FnOnce(&mut Self)) {
        if self.depth >= MAX_DEPTH {
            self.invalid = Some("values are nested too deeply");
            return;
        }
        self.depth += 1;
        write(self);
        self.depth -= 1;
    }
}

/// Reader of one message.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    body: &'a [u8],
    payload: Bytes,
    /// Number of values read so far.
    pub(super) values: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(body: &'a [u8], payload: Bytes) -> Self {
        Self { body, payload, values: 0 }
    }

    /// Checks that neither body nor payload has bytes left over.
    pub(crate) fn finish(self) -> Result<()> {
        match self.body.len() + self.payload.len() {
            0 => Ok(()),
            left => Err(CodecError::Trailing(left)),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.body.split_at_checked(len).ok_or(CodecError::Truncated)?;
        self.body = rest;
        Ok(taken)
    }

    fn fixed<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| CodecError::Truncated)
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.fixed::<1>()?[0])
    }

    fn marker(&mut self) -> Result<Marker> {
        self.byte().map(Marker::from_u8)
    }

    fn peek(&self) -> Result<u8> {
        self.body.first().copied().ok_or(CodecError::Truncated)
    }

    /// Reads a big-endian number of `WIDTH` bytes.
    fn number<const WIDTH: usize>(&mut self) -> Result<u64> {
        Ok(self.fixed::<WIDTH>()?.iter().fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn number_len<const WIDTH: usize>(&mut self) -> Result<usize> {
        usize::try_from(self.number::<WIDTH>()?).map_err(|_| CodecError::OutOfRange)
    }

    /// Returns true if the next value is nil, and consumes it in that case.
    pub(crate) fn nil(&mut self) -> Result<bool> {
        let nil = self.peek()? == NIL;
        if nil {
            self.byte()?;
        }
        Ok(nil)
    }

    pub(crate) fn uint(&mut self) -> Result<u64> {
        match self.marker()? {
            Marker::FixPos(small) => Ok(small.into()),
            Marker::U8 => self.number::<1>(),
            Marker::U16 => self.number::<2>(),
            Marker::U32 => self.number::<4>(),
            Marker::U64 => self.number::<8>(),
            other => Err(unexpected(other)),
        }
    }

    /// Reads exactly `N` bytes of MessagePack's own `bin` type.
    pub(crate) fn bin<const N: usize>(&mut self) -> Result<[u8; N]> {
        let len = match self.marker()? {
            Marker::Bin8 => self.number_len::<1>()?,
            Marker::Bin16 => self.number_len::<2>()?,
            Marker::Bin32 => self.number_len::<4>()?,
            other => return Err(unexpected(other)),
        };
        if len == N { self.fixed() } else { Err(CodecError::OutOfRange) }
    }

    pub(crate) fn handle(&mut self) -> Result<Handle> {
        self.uint().map(Handle::from_bits)
    }

    pub(crate) fn array(&mut self) -> Result<usize> {
        match self.marker()? {
            Marker::FixArray(len) => Ok(len.into()),
            Marker::Array16 => self.number_len::<2>(),
            Marker::Array32 => self.number_len::<4>(),
            other => Err(unexpected(other)),
        }
    }

    pub(crate) fn map(&mut self) -> Result<usize> {
        match self.marker()? {
            Marker::FixMap(len) => Ok(len.into()),
            Marker::Map16 => self.number_len::<2>(),
            Marker::Map32 => self.number_len::<4>(),
            other => Err(unexpected(other)),
        }
    }

    pub(crate) fn str(&mut self) -> Result<String> {
        let marker = self.marker()?;
        self.str_after(marker)
    }

    fn str_after(&mut self, marker: Marker) -> Result<String> {
        let len = match marker {
            Marker::FixStr(len) => len.into(),
            Marker::Str8 => self.number_len::<1>()?,
            Marker::Str16 => self.number_len::<2>()?,
            Marker::Str32 => self.number_len::<4>()?,
            other => return Err(unexpected(other)),
        };
        let text = std::str::from_utf8(self.take(len)?).map_err(|_| CodecError::NotUtf8)?;
        Ok(text.to_owned())
    }

    /// Reads an extension and returns its type and content.
    fn ext_after(&mut self, marker: Marker) -> Result<(u8, Self)> {
        let len = match marker {
            Marker::FixExt1 => 1,
            Marker::FixExt2 => 2,
            Marker::FixExt4 => 4,
            Marker::FixExt8 => 8,
            Marker::FixExt16 => 16,
            Marker::Ext8 => self.number_len::<1>()?,
            Marker::Ext16 => self.number_len::<2>()?,
            Marker::Ext32 => self.number_len::<4>()?,
            other => return Err(unexpected(other)),
        };
        let kind = self.byte()?;
        Ok((kind, Reader::new(self.take(len)?, Bytes::new())))
    }

    fn ext(&mut self, expected: u8) -> Result<Self> {
        let marker = self.marker()?;
        match self.ext_after(marker)? {
            (kind, content) if kind == expected => Ok(content),
            (kind, _) => Err(CodecError::Unexpected(kind)),
        }
    }

    pub(crate) fn bytes(&mut self) -> Result<Bytes> {
        let content = self.ext(EXT_BYTES)?;
        self.bytes_content(content)
    }

    /// Reads the length of a bytes value whose payload has not been received.
    pub(crate) fn bytes_len(&mut self) -> Result<u64> {
        let mut content = self.ext(EXT_BYTES)?;
        let len = content.le64()?;
        content.finish()?;
        Ok(len)
    }

    fn bytes_content(&mut self, mut content: Reader<'_>) -> Result<Bytes> {
        let len = content.le64()?;
        content.finish()?;
        match usize::try_from(len) {
            Ok(len) if len <= self.payload.len() => Ok(self.payload.split_to(len)),
            _ => Err(CodecError::Truncated),
        }
    }

    fn le64(&mut self) -> Result<u64> {
        self.fixed().map(u64::from_le_bytes)
    }

    pub(crate) fn dtype(&mut self) -> Result<DataType> {
        let mut content = self.ext(EXT_DTYPE)?;
        let dtype = content.dtype_content()?;
        content.finish()?;
        Ok(dtype)
    }

    fn dtype_content(&mut self) -> Result<DataType> {
        let [code, bits, low, high] = self.fixed()?;
        Ok(DataType { code: DataTypeCode(code), bits, lanes: u16::from_le_bytes([low, high]) })
    }

    pub(crate) fn device(&mut self) -> Result<Device> {
        let mut content = self.ext(EXT_DEVICE)?;
        let device = content.device_content()?;
        content.finish()?;
        Ok(device)
    }

    fn device_content(&mut self) -> Result<Device> {
        let (kind, index) = (self.fixed().map(i32::from_le_bytes)?, self.fixed().map(i32::from_le_bytes)?);
        Ok(Device::new(DeviceType(kind), index))
    }

    pub(crate) fn shape(&mut self) -> Result<Vec<i64>> {
        let content = self.ext(EXT_SHAPE)?;
        content.shape_content()
    }

    fn shape_content(mut self) -> Result<Vec<i64>> {
        if !self.body.len().is_multiple_of(8) {
            return Err(CodecError::Truncated);
        }
        self.dimensions(self.body.len() / 8)
    }

    fn dimensions(&mut self, count: usize) -> Result<Vec<i64>> {
        let bytes = self.take(8 * count)?;
        Ok(bytes.chunks_exact(8).map(|bytes| i64::from_le_bytes(bytes.try_into().unwrap_or_default())).collect())
    }

    pub(crate) fn tensor(&mut self) -> Result<TensorRef> {
        let content = self.ext(EXT_TENSOR)?;
        content.tensor_content()
    }

    fn tensor_content(mut self) -> Result<TensorRef> {
        let (storage, byte_offset) = (Handle::from_bits(self.le64()?), self.le64()?);
        let (dtype, device) = (self.dtype_content()?, self.device_content()?);
        let [dimensions, strided] = self.fixed()?;
        let dimensions = usize::from(dimensions);
        if dimensions > MAX_DIMENSIONS || strided > 1 {
            return Err(CodecError::OutOfRange);
        }
        let shape = self.dimensions(dimensions)?;
        let strides = if strided == 1 { Some(self.dimensions(dimensions)?) } else { None };
        self.finish()?;
        Ok(TensorRef { storage, byte_offset, shape, strides, dtype, device })
    }

    fn reference_content(mut self) -> Result<Handle> {
        let handle = Handle::from_bits(self.le64()?);
        self.finish()?;
        Ok(handle)
    }

    pub(crate) fn value(&mut self, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(CodecError::TooDeep);
        }
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(CodecError::TooMany);
        }
        let marker = self.marker()?;
        Ok(match marker {
            Marker::Null => Value::Null,
            Marker::False => Value::Bool(false),
            Marker::True => Value::Bool(true),
            Marker::FixPos(small) => Value::Int(small.into()),
            Marker::FixNeg(small) => Value::Int(small.into()),
            Marker::U8 => Value::Int(self.number::<1>()? as i64),
            Marker::U16 => Value::Int(self.number::<2>()? as i64),
            Marker::U32 => Value::Int(self.number::<4>()? as i64),
            Marker::U64 => Value::Int(i64::try_from(self.number::<8>()?).map_err(|_| CodecError::OutOfRange)?),
            Marker::I8 => Value::Int((self.number::<1>()? as i8).into()),
            Marker::I16 => Value::Int((self.number::<2>()? as i16).into()),
            Marker::I32 => Value::Int((self.number::<4>()? as i32).into()),
            Marker::I64 => Value::Int(self.number::<8>()? as i64),
            Marker::F32 => Value::Float(f32::from_bits(self.number::<4>()? as u32).into()),
            Marker::F64 => Value::Float(f64::from_bits(self.number::<8>()?)),
            Marker::FixStr(_) | Marker::Str8 | Marker::Str16 | Marker::Str32 => Value::Str(self.str_after(marker)?),
            Marker::FixArray(len) => self.list(len.into(), depth)?,
            Marker::Array16 => {
                let len = self.number_len::<2>()?;
                self.list(len, depth)?
            }
            Marker::Array32 => {
                let len = self.number_len::<4>()?;
                self.list(len, depth)?
            }
            Marker::FixMap(len) => self.pairs(len.into(), depth)?,
            Marker::Map16 => {
                let len = self.number_len::<2>()?;
                self.pairs(len, depth)?
            }
            Marker::Map32 => {
                let len = self.number_len::<4>()?;
                self.pairs(len, depth)?
            }
            _ => {
                let (kind, mut content) = self.ext_after(marker)?;
                match kind {
                    EXT_BYTES => Value::Bytes(self.bytes_content(content)?),
                    EXT_SHAPE => Value::Shape(content.shape_content()?),
                    EXT_DTYPE => {
                        let dtype = content.dtype_content()?;
                        content.finish()?;
                        Value::DataType(dtype)
                    }
                    EXT_DEVICE => {
                        let device = content.device_content()?;
                        content.finish()?;
                        Value::Device(device)
                    }
                    EXT_PACKED => Value::Packed(Packed::from_bytes(Bytes::copy_from_slice(content.body))),
                    EXT_FUNCTION => Value::Object(Reference::Function(content.reference_content()?)),
                    EXT_MODULE => Value::Object(Reference::Module(content.reference_content()?)),
                    EXT_OBJECT => Value::Object(Reference::Object(content.reference_content()?)),
                    EXT_TENSOR => Value::Object(Reference::Tensor(content.tensor_content()?.into())),
                    EXT_PIPE => Value::Object(Reference::Pipe(content.reference_content()?)),
                    other => return Err(CodecError::Unexpected(other)),
                }
            }
        })
    }

    fn list(&mut self, len: usize, depth: usize) -> Result<Value> {
        // Every element takes at least one byte, so a count beyond the body's length is wrong and
        // must not reserve memory.
        if len > self.body.len() {
            return Err(CodecError::Truncated);
        }
        (0..len).map(|_| self.value(depth + 1)).collect::<Result<_>>().map(Value::List)
    }

    fn pairs(&mut self, len: usize, depth: usize) -> Result<Value> {
        // Every pair takes at least two bytes; see `list`.
        if len > self.body.len() / 2 {
            return Err(CodecError::Truncated);
        }
        let pair = |_| Ok((self.value(depth + 1)?, self.value(depth + 1)?));
        (0..len).map(pair).collect::<Result<_>>().map(Value::Map)
    }
}

/// Encodes a value as body and payload.
pub fn encode_value(value: &Value) -> (Vec<u8>, Vec<Bytes>) {
    let mut writer = Writer::default();
    writer.value(value);
    (writer.body, writer.payload)
}

/// Decodes the output of [`encode_value`].
///
/// # Errors
///
/// Malformed input. Never reserves more memory than the input's own size.
pub fn decode_value(body: &[u8], payload: Bytes) -> Result<Value> {
    let mut reader = Reader::new(body, payload);
    let value = reader.value(0)?;
    reader.finish()?;
    Ok(value)
}
