//! Replies of a server: returns, exceptions, and the data of copies.

use std::time::Duration;

use bytes::{BufMut, Bytes};

use super::frame::{followed_by, frame};
use super::frame_code::FrameCode;
use super::reader::WireError;
use super::tensor_header::TensorHeader;
use super::value::{Text, WireValue, encode_boxed_text, encode_bytes, encode_values, index};

/// Result of a call, as the client takes it apart.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum CallResult {
    /// A plain value: none, int, bool, float, data type or device.
    Plain(WireValue),
    /// Text.
    Str(Text),
    /// Bytes.
    Bytes(Bytes),
    /// A tensor, and the handle by which it is freed.
    Tensor(TensorHeader, u64),
    /// Another object by its handle.
    Object(ResultKind, u64),
}

impl CallResult {
    /// Takes the values of a call's result apart. The first of them says what the others are.
    pub(super) fn of_values(values: Vec<WireValue>) -> Result<Self, WireError> {
        let wrong = |values: &[WireValue]| {
            let names: Vec<_> = values.iter().take(4).map(WireValue::type_name).collect();
            WireError::new(format!("the server returned values that are no result of a call: {}", names.join(", ")))
        };
        let mut rest = values.into_iter();
        let (first, second, third) = (rest.next(), rest.next(), rest.next());
        let (Some(WireValue::Int(kind)), Some(value), None) = (&first, second, rest.next()) else {
            return Err(wrong(&first.into_iter().collect::<Vec<_>>()));
        };
        let kind = i32::try_from(*kind).unwrap_or(-1);
        Ok(match (kind, value, third) {
            (_, WireValue::Tensor(header), Some(WireValue::Pointer(handle))) => Self::Tensor(header, handle),
            (_, WireValue::Tensor(_), None) => {
                return Err(WireError::new(
                    "the function returned its own argument, which servers of TVM cannot send back: use the argument",
                ));
            }
            (_, value, Some(third)) => return Err(wrong(&[value, third])),
            (_, WireValue::Str(text), None) => Self::Str(text),
            (_, WireValue::Bytes(bytes), None) => Self::Bytes(bytes),
            (index::POINTER, value @ WireValue::Pointer(_), None) => Self::Plain(value),
            (kind, WireValue::Pointer(handle), None) if kind >= index::OBJECT => {
                Self::Object(ResultKind::of_index(kind), handle)
            }
            (
                kind,
                value @ (WireValue::None
                | WireValue::Int(_)
                | WireValue::Bool(_)
                | WireValue::Float(_)
                | WireValue::DataType(_)
                | WireValue::Device(_)),
                None,
            ) if kind < index::OBJECT => Self::Plain(value),
            (_, value, None) => return Err(wrong(&[value])),
        })
    }
}

/// Kind of an object in a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResultKind {
    /// A function.
    Function,
    /// A module.
    Module,
    /// A shape.
    Shape,
    /// A list of values.
    Array,
    /// A map of values.
    Map,
    /// An object of another type.
    Object,
}

impl ResultKind {
    const fn of_index(index: i32) -> Self {
        match index {
            index::FUNCTION => Self::Function,
            index::MODULE => Self::Module,
            index::SHAPE => Self::Shape,
            index::ARRAY => Self::Array,
            index::MAP => Self::Map,
            _ => Self::Object,
        }
    }

    const fn index(self) -> i32 {
        match self {
            Self::Function => index::FUNCTION,
            Self::Module => index::MODULE,
            Self::Shape => index::SHAPE,
            Self::Array => index::ARRAY,
            Self::Map => index::MAP,
            Self::Object => index::OBJECT,
        }
    }
}

/// Returns the frame of a request's result: one value, or those of a call ([`returned_call`]).
#[must_use]
pub fn returned(values: &[WireValue]) -> Vec<u8> {
    frame(FrameCode::Return, |body| encode_values(values, body))
}

/// Returns the frame of a call's result. Its first value says what follows.
#[must_use]
pub fn returned_call(result: CallResult) -> Vec<u8> {
    let tagged = |index: i32, value| returned(&[WireValue::Int(index.into()), value]);
    match result {
        CallResult::Plain(value) => {
            let index = match value {
                WireValue::Int(_) => index::INT,
                WireValue::Bool(_) => index::BOOL,
                WireValue::Float(_) => index::FLOAT,
                WireValue::DataType(_) => index::DATA_TYPE,
                WireValue::Device(_) => index::DEVICE,
                // Others have a variant of their own, and would break the client here.
                _ => return tagged(index::NONE, WireValue::None),
            };
            tagged(index, value)
        }
        CallResult::Str(text) => tagged(index::STR, WireValue::Str(text)),
        CallResult::Bytes(bytes) => tagged(index::BYTES, WireValue::Bytes(bytes)),
        CallResult::Tensor(header, handle) => {
            let kind = WireValue::Int(index::TENSOR.into());
            returned(&[kind, WireValue::Tensor(header), WireValue::Pointer(handle)])
        }
        CallResult::Object(kind, handle) => tagged(kind.index(), WireValue::Pointer(handle)),
    }
}

/// Returns the frame of a text as the result of a request that is no call, in the boxed form that
/// clients take there.
#[must_use]
pub fn returned_text(text: &str) -> Vec<u8> {
    frame(FrameCode::Return, |body| {
        body.put_i32_le(1);
        encode_boxed_text(text.as_bytes(), body);
    })
}

/// Returns what goes in front of `len` bytes that are the result of a call.
#[must_use]
pub fn returned_bytes_header(len: u64) -> Vec<u8> {
    followed_by(returned_call(CallResult::Bytes(Bytes::new())), len)
}

/// Returns the frame of an error. The client ends the text at a NUL, so that one is written as
/// `\0`.
#[must_use]
pub fn exception(text: &str) -> Vec<u8> {
    let text = text.replace('\0', "\\0");
    frame(FrameCode::Exception, |body| encode_values(&[WireValue::Str(text.into())], body))
}

/// Returns the frame of an error for clients up to TVM 0.20, which cannot read the form of later
/// ones.
pub(super) fn exception_for_old_client(text: &str) -> Vec<u8> {
    frame(FrameCode::Exception, |body| {
        body.put_i32_le(1);
        // One number of a type for each value, and then the values.
        body.put_i32_le(index::SMALL_STR);
        encode_bytes(text.as_bytes(), body);
    })
}

/// Returns what goes in front of `len` bytes that were read from a tensor.
#[must_use]
pub fn copy_ack_header(len: u64) -> [u8; 12] {
    let mut header = [0; 12];
    header[..8].copy_from_slice(&len.saturating_add(4).to_le_bytes());
    header[8..].copy_from_slice(&FrameCode::CopyAck.number().to_le_bytes());
    header
}

/// Returns the frame by which a side ends the session.
#[must_use]
pub fn shutdown() -> Vec<u8> {
    frame(FrameCode::Shutdown, |_| {})
}

/// Returns the text of the error by which a client learns that its session has lasted for as long
/// as it may. Clients know it by its beginning.
#[must_use]
pub fn timeout_text(limit: Duration) -> String {
    format!(
        "RPCSessionTimeoutError: Your {:?}s session has expired, try to increase the \"session_timeout\" value.",
        limit.as_secs_f64()
    )
}
