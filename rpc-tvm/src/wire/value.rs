//! Values and sequences of them.

use bytes::{BufMut, Bytes};
use rpc_core::{DataType, Device};

use super::reader::{Reader, WireError};
use super::tensor_header::{TensorHeader, decode_device, decode_dtype, encode_device, encode_dtype};

/// Largest number of values in a sequence. A value takes four bytes or more on the wire and more in
/// memory, so that this bounds what a frame grows to when it is decoded.
pub const MAX_VALUES: usize = 4096;

/// Maximum length in bytes of the text of an error, of which more is left out.
const MAX_EXCEPTION: usize = 16 << 10;

/// Type indices, as TVM-FFI numbers them.
pub(super) mod index {
    pub(in crate::wire) const NONE: i32 = 0;
    pub(in crate::wire) const INT: i32 = 1;
    pub(in crate::wire) const BOOL: i32 = 2;
    pub(in crate::wire) const FLOAT: i32 = 3;
    pub(in crate::wire) const POINTER: i32 = 4;
    pub(in crate::wire) const DATA_TYPE: i32 = 5;
    pub(in crate::wire) const DEVICE: i32 = 6;
    pub(in crate::wire) const TENSOR_HEADER: i32 = 7;
    pub(in crate::wire) const RAW_STR: i32 = 8;
    pub(in crate::wire) const BYTE_ARRAY: i32 = 9;
    pub(in crate::wire) const SMALL_STR: i32 = 11;
    pub(in crate::wire) const SMALL_BYTES: i32 = 12;
    pub(in crate::wire) const OBJECT: i32 = 64;
    pub(in crate::wire) const STR: i32 = 65;
    pub(in crate::wire) const BYTES: i32 = 66;
    pub(in crate::wire) const FUNCTION: i32 = 68;
    pub(in crate::wire) const SHAPE: i32 = 69;
    pub(in crate::wire) const TENSOR: i32 = 70;
    pub(in crate::wire) const ARRAY: i32 = 71;
    pub(in crate::wire) const MAP: i32 = 72;
    pub(in crate::wire) const MODULE: i32 = 73;
    pub(in crate::wire) const OBJECT_REF: i32 = 115;
}

/// A value on the wire. Numbers that name objects are handles of the server.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum WireValue {
    /// No value.
    None,
    /// A signed integer.
    Int(i64),
    /// A truth value.
    Bool(bool),
    /// A floating-point number.
    Float(f64),
    /// A handle in results and in requests that are no calls; 0 names nothing.
    Pointer(u64),
    /// A data type.
    DataType(DataType),
    /// A device.
    Device(Device),
    /// A tensor, without its data.
    Tensor(TensorHeader),
    /// Text.
    Str(Text),
    /// Bytes.
    Bytes(Bytes),
    /// A function of the server, as an argument.
    Function(u64),
    /// A module of the server, as an argument.
    Module(u64),
    /// Another object of the server, as an argument.
    Object(u64),
}

/// Text in UTF-8, which shares the memory of the frame that it came in.
#[derive(Clone, PartialEq, Eq)]
pub struct Text(Bytes);

impl Text {
    /// Returns the length in bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there is no text.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        // Checked when it was made.
        std::str::from_utf8(&self.0).unwrap_or_default()
    }
}

impl TryFrom<Bytes> for Text {
    type Error = std::str::Utf8Error;

    fn try_from(bytes: Bytes) -> Result<Self, Self::Error> {
        std::str::from_utf8(&bytes)?;
        Ok(Self(bytes))
    }
}

impl From<String> for Text {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Self(Bytes::copy_from_slice(text.as_bytes()))
    }
}

impl std::fmt::Debug for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self.as_str(), f)
    }
}

impl From<&str> for WireValue {
    fn from(text: &str) -> Self {
        Self::Str(text.into())
    }
}

impl WireValue {
    /// Returns the name of the value's type, for errors.
    #[must_use]
    pub const fn type_name(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Int(_) => "int",
            Self::Bool(_) => "bool",
            Self::Float(_) => "float",
            Self::Pointer(_) => "pointer",
            Self::DataType(_) => "DataType",
            Self::Device(_) => "Device",
            Self::Tensor(_) => "DLTensor*",
            Self::Str(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::Function(_) => "Function",
            Self::Module(_) => "Module",
            Self::Object(_) => "Object",
        }
    }

    /// Appends the value to `output`, in the form in which peers of TVM send it: a text without NUL
    /// as `RawStr`, and bytes as `ByteArrayPtr`.
    pub fn encode(&self, output: &mut impl BufMut) {
        match self {
            Self::None => output.put_i32_le(index::NONE),
            Self::Int(value) => {
                output.put_i32_le(index::INT);
                output.put_i64_le(*value);
            }
            Self::Bool(value) => {
                output.put_i32_le(index::BOOL);
                output.put_i64_le((*value).into());
            }
            Self::Float(value) => {
                output.put_i32_le(index::FLOAT);
                output.put_f64_le(*value);
            }
            Self::Pointer(handle) => encode_handle(index::POINTER, *handle, output),
            Self::DataType(dtype) => {
                output.put_i32_le(index::DATA_TYPE);
                encode_dtype(*dtype, output);
                output.put_i32_le(0);
            }
            Self::Device(device) => {
                output.put_i32_le(index::DEVICE);
                encode_device(*device, output);
            }
            Self::Tensor(header) => {
                output.put_i32_le(index::TENSOR_HEADER);
                header.encode(output);
            }
            // A receiver ends the plain form at the first NUL.
            Self::Str(text) if text.0.contains(&0) => encode_boxed_text(&text.0, output),
            Self::Str(text) => {
                output.put_i32_le(index::RAW_STR);
                encode_bytes(&text.0, output);
            }
            Self::Bytes(bytes) => {
                output.put_i32_le(index::BYTE_ARRAY);
                encode_bytes(bytes, output);
            }
            Self::Function(handle) => encode_handle(index::FUNCTION, *handle, output),
            Self::Module(handle) => encode_handle(index::MODULE, *handle, output),
            Self::Object(handle) => {
                output.put_i32_le(index::OBJECT_REF);
                encode_handle(index::OBJECT_REF, *handle, output);
            }
        }
    }

    fn decode(reader: &mut Reader) -> Result<Self, WireError> {
        Ok(match reader.i32()? {
            index::NONE => Self::None,
            index::INT => Self::Int(reader.i64()?),
            index::BOOL => Self::Bool(reader.i64()? != 0),
            index::FLOAT => Self::Float(f64::from_bits(reader.u64()?)),
            index::POINTER => Self::Pointer(reader.u64()?),
            index::DATA_TYPE => {
                let dtype = decode_dtype(reader)?;
                reader.i32()?;
                Self::DataType(dtype)
            }
            index::DEVICE => Self::Device(decode_device(reader)?),
            index::TENSOR_HEADER => Self::Tensor(TensorHeader::decode(reader)?),
            index::RAW_STR => Self::Str(text(until_nul(reader.bytes()?), reader)?),
            index::BYTE_ARRAY => Self::Bytes(reader.bytes()?),
            index::FUNCTION => Self::Function(reader.u64()?),
            index::MODULE => Self::Module(reader.u64()?),
            boxed @ (index::SMALL_STR | index::SMALL_BYTES | index::OBJECT..) if is_boxed(boxed) => {
                Self::decode_boxed(boxed, reader)?
            }
            unknown => return Err(reader.error(format_args!("a value of type index {unknown} does not travel"))),
        })
    }

    /// Decodes the rest of a boxed value, of which the second index alone decides.
    fn decode_boxed(first: i32, reader: &mut Reader) -> Result<Self, WireError> {
        match reader.u32()?.cast_signed() {
            index::STR => {
                let bytes = reader.bytes()?;
                Ok(Self::Str(text(bytes, reader)?))
            }
            index::BYTES => Ok(Self::Bytes(reader.bytes()?)),
            index::OBJECT_REF => Ok(Self::Object(reader.u64()?)),
            second => Err(reader
                .error(format_args!("an object of type index {first} is boxed as {second}, and not as 65, 66 or 115"))),
        }
    }
}

/// Returns true for the indices of values that are boxed: all objects but those that travel in a
/// form of their own, or not at all.
const fn is_boxed(first: i32) -> bool {
    !matches!(first, 67..=78)
}

/// Appends a sequence of values.
pub fn encode_values(values: &[WireValue], output: &mut impl BufMut) {
    output.put_i32_le(i32::try_from(values.len()).unwrap_or(i32::MAX));
    for value in values {
        value.encode(output);
    }
}

/// Decodes a sequence of values.
pub(super) fn decode_values(reader: &mut Reader) -> Result<Vec<WireValue>, WireError> {
    let count = reader.i32()?;
    let checked = usize::try_from(count).ok().filter(|&count| count <= MAX_VALUES);
    let count = checked.ok_or_else(|| reader.error(format_args!("{count} values, of at most {MAX_VALUES}")))?;
    // Each value has an index.
    if count > reader.left() / 4 {
        return Err(reader.error(format_args!("{count} values in {} bytes", reader.left())));
    }
    let mut values = Vec::with_capacity(count);
    for _ in 0..count {
        values.push(WireValue::decode(reader)?);
    }
    Ok(values)
}

/// Decodes the body of an exception: one text, in whatever form. The end of a text beyond
/// [`MAX_EXCEPTION`] is left out, and bytes that are no UTF-8 are replaced.
pub(super) fn decode_exception(mut reader: Reader) -> Result<String, WireError> {
    let count = reader.i32()?;
    let kind = reader.i32()?;
    if kind != index::RAW_STR {
        // The form of a boxed text has a second number.
        reader.u32()?;
    }
    let mut text = until_nul(reader.bytes()?);
    if count != 1 {
        return Err(reader.error(format_args!("an error of {count} values")));
    }
    text.truncate(MAX_EXCEPTION);
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn encode_handle(index: i32, handle: u64, output: &mut impl BufMut) {
    output.put_i32_le(index);
    output.put_u64_le(handle);
}

/// Appends a text in its boxed form, which may contain NUL.
pub(super) fn encode_boxed_text(text: &[u8], output: &mut impl BufMut) {
    output.put_i32_le(index::STR);
    output.put_i32_le(index::STR);
    encode_bytes(text, output);
}

pub(super) fn encode_bytes(bytes: &[u8], output: &mut impl BufMut) {
    output.put_u64_le(bytes.len() as u64);
    output.put_slice(bytes);
}

/// Returns the bytes in front of the first NUL.
fn until_nul(mut bytes: Bytes) -> Bytes {
    let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
    bytes.truncate(end);
    bytes
}

fn text(bytes: Bytes, reader: &Reader) -> Result<Text, WireError> {
    Text::try_from(bytes).map_err(|error| reader.error(format_args!("a text is not UTF-8: {error}")))
}
