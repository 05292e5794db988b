//! The requests of a client.

use bytes::{BufMut, Bytes};
use rpc_core::{DataType, Device};

use super::frame::{followed_by, frame};
use super::frame_code::FrameCode;
use super::reader::{Reader, WireError};
use super::tensor_header::TensorHeader;
use super::value::{Text, WireValue, decode_values, encode_bytes, encode_values, index};

/// Version of the protocol in `InitServer`: one text for TVM 0.8 and all later releases.
pub const PROTOCOL_VERSION: &str = "0.8.0";

/// A request of a client. The data of a copy to the server do not belong to it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Request {
    /// Ends the session. Has no reply.
    Shutdown,
    /// Begins the session.
    Init {
        /// Version of the protocol.
        version: Text,
        /// Constructor of the session: its name, and its arguments. Empty for a session here.
        constructor: Vec<WireValue>,
    },
    /// Calls a function.
    Call {
        /// Handle of the function.
        function: u64,
        /// Arguments of the call.
        args: Vec<WireValue>,
    },
    /// Reads the first bytes of a tensor. The reply is the bytes.
    CopyFrom {
        /// The tensor.
        from: TensorHeader,
        /// Number of bytes.
        len: u64,
    },
    /// Looks up a function. The reply is its handle, or 0.
    GetFunction {
        /// Name of the function.
        name: Text,
    },
    /// Frees an object.
    Free {
        /// Handle of the object; 0 for none.
        handle: u64,
    },
    /// Makes a device the current one.
    SetDevice {
        /// The device.
        device: Device,
    },
    /// Reads an attribute of a device.
    Attribute {
        /// The device.
        device: Device,
        /// Number of the attribute.
        kind: i64,
    },
    /// Allocates bytes. The reply is their handle.
    AllocBytes {
        /// Device that holds them.
        device: Device,
        /// Number of bytes.
        len: i64,
        /// Alignment in bytes.
        alignment: i64,
        /// Type of what will be stored.
        hint: DataType,
    },
    /// Allocates a tensor. The reply is the handle of its memory.
    Alloc {
        /// Shape, data type and device; the rest means nothing.
        header: TensorHeader,
        /// Memory scope of the device.
        scope: Option<Text>,
    },
    /// Frees memory that was allocated.
    FreeData {
        /// Device that holds it.
        device: Device,
        /// Handle of the memory.
        data: u64,
    },
    /// Waits for a stream; 0 is the default one.
    StreamSync {
        /// Device of the stream.
        device: Device,
        /// Handle of the stream.
        stream: u64,
    },
    /// Copies between two tensors.
    CopyAmong {
        /// Source.
        from: TensorHeader,
        /// Destination.
        to: TensorHeader,
        /// Stream of the copy; 0 is the default one.
        stream: u64,
    },
    /// Creates a stream. The reply is its handle.
    CreateStream {
        /// Device of the stream.
        device: Device,
    },
    /// Frees a stream.
    FreeStream {
        /// Device of the stream.
        device: Device,
        /// Handle of the stream.
        stream: u64,
    },
    /// Makes a stream the current one of its device; 0 is the default one.
    SetStream {
        /// Device of the stream.
        device: Device,
        /// Handle of the stream.
        stream: u64,
    },
    /// Asks for the current stream of a device. The reply is its handle.
    CurrentStream {
        /// The device.
        device: Device,
    },
}

/// Reason why a frame is no request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// The frame is malformed, and what follows it cannot be trusted.
    Malformed(WireError),
    /// The frame is well-formed, and its values are not those of the request. The session goes on.
    Values(String),
}

impl From<WireError> for RequestError {
    fn from(error: WireError) -> Self {
        Self::Malformed(error)
    }
}

impl Request {
    /// Decodes the body of a frame; not that of `CopyToRemote`, whose data follow its header.
    pub(super) fn decode(code: FrameCode, body: Bytes) -> Result<Self, RequestError> {
        let mut reader = Reader::new(body, code.name());
        match code {
            FrameCode::Shutdown => {
                reader.finish()?;
                Ok(Self::Shutdown)
            }
            FrameCode::InitServer => {
                let version = reader.bytes()?;
                let version = Text::try_from(version).map_err(|_| reader.error("the version is not UTF-8"))?;
                let constructor = decode_values(&mut reader)?;
                reader.finish()?;
                Ok(Self::Init { version, constructor })
            }
            FrameCode::CallFunc => {
                let function = reader.u64()?;
                let args = decode_values(&mut reader)?;
                reader.finish()?;
                Ok(Self::Call { function, args })
            }
            FrameCode::CopyFromRemote => {
                let from = TensorHeader::decode(&mut reader)?;
                let len = reader.u64()?;
                reader.finish()?;
                Ok(Self::CopyFrom { from, len })
            }
            code if code.is_request() && code != FrameCode::CopyToRemote => {
                let values = decode_values(&mut reader)?;
                reader.finish()?;
                Self::of_values(code, Values { code, at: 0, values })
            }
            _ => Err(reader.error("a server does not take such frames").into()),
        }
    }

    fn of_values(code: FrameCode, mut values: Values) -> Result<Self, RequestError> {
        let request = match code {
            FrameCode::GetGlobalFunc => Self::GetFunction { name: values.text()? },
            FrameCode::FreeHandle => Self::Free { handle: values.handle()? },
            FrameCode::DevSetDevice => Self::SetDevice { device: values.device()? },
            FrameCode::DevGetAttr => Self::Attribute { device: values.device()?, kind: values.int()? },
            FrameCode::DevAllocData => Self::AllocBytes {
                device: values.device()?,
                len: values.int()?,
                alignment: values.int()?,
                hint: values.dtype()?,
            },
            FrameCode::DevFreeData => Self::FreeData { device: values.device()?, data: values.handle()? },
            FrameCode::DevStreamSync => Self::StreamSync { device: values.device()?, stream: values.handle()? },
            FrameCode::CopyAmongRemote => {
                Self::CopyAmong { from: values.tensor()?, to: values.tensor()?, stream: values.handle()? }
            }
            FrameCode::DevAllocDataWithScope => {
                Self::Alloc { header: values.tensor()?, scope: values.optional_text()? }
            }
            FrameCode::DevCreateStream => Self::CreateStream { device: values.device()? },
            FrameCode::DevFreeStream => Self::FreeStream { device: values.device()?, stream: values.handle()? },
            FrameCode::DevSetStream => Self::SetStream { device: values.device()?, stream: values.handle()? },
            FrameCode::DevGetCurrentStream => Self::CurrentStream { device: values.device()? },
            other => return Err(RequestError::Values(format!("{} is no request", other.name()))),
        };
        values.finish()?;
        Ok(request)
    }

    /// Returns the request on the wire.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let call = |code, values: &[WireValue]| frame(code, |body| encode_values(values, body));
        let (device, pointer) = (WireValue::Device, WireValue::Pointer);
        match self {
            Self::Shutdown => super::reply::shutdown(),
            Self::Init { version, constructor } => frame(FrameCode::InitServer, |body| {
                encode_bytes(version.as_str().as_bytes(), body);
                encode_values(constructor, body);
            }),
            Self::Call { function, args } => frame(FrameCode::CallFunc, |body| {
                body.put_u64_le(*function);
                encode_values(args, body);
            }),
            Self::CopyFrom { from, len } => frame(FrameCode::CopyFromRemote, |body| {
                from.encode(body);
                body.put_u64_le(*len);
            }),
            Self::GetFunction { name } => call(FrameCode::GetGlobalFunc, &[WireValue::Str(name.clone())]),
            Self::Free { handle } => call(FrameCode::FreeHandle, &[pointer(*handle)]),
            Self::SetDevice { device: at } => call(FrameCode::DevSetDevice, &[device(*at)]),
            Self::Attribute { device: at, kind } => call(FrameCode::DevGetAttr, &[device(*at), WireValue::Int(*kind)]),
            Self::AllocBytes { device: at, len, alignment, hint } => call(
                FrameCode::DevAllocData,
                &[device(*at), WireValue::Int(*len), WireValue::Int(*alignment), WireValue::DataType(*hint)],
            ),
            Self::Alloc { header, scope } => {
                let scope = scope.clone().map_or(WireValue::None, WireValue::Str);
                call(FrameCode::DevAllocDataWithScope, &[WireValue::Tensor(header.clone()), scope])
            }
            Self::FreeData { device: at, data } => call(FrameCode::DevFreeData, &[device(*at), pointer(*data)]),
            Self::StreamSync { device: at, stream } => call(FrameCode::DevStreamSync, &[device(*at), pointer(*stream)]),
            Self::CopyAmong { from, to, stream } => call(
                FrameCode::CopyAmongRemote,
                &[WireValue::Tensor(from.clone()), WireValue::Tensor(to.clone()), pointer(*stream)],
            ),
            Self::CreateStream { device: at } => call(FrameCode::DevCreateStream, &[device(*at)]),
            Self::FreeStream { device: at, stream } => call(FrameCode::DevFreeStream, &[device(*at), pointer(*stream)]),
            Self::SetStream { device: at, stream } => call(FrameCode::DevSetStream, &[device(*at), pointer(*stream)]),
            Self::CurrentStream { device: at } => call(FrameCode::DevGetCurrentStream, &[device(*at)]),
        }
    }

    /// Returns what goes in front of `len` bytes that are written to the beginning of a tensor.
    #[must_use]
    pub fn encode_copy_to_header(to: &TensorHeader, len: u64) -> Vec<u8> {
        followed_by(Self::encode_copy_to(to, &[]), len)
    }

    /// Returns what goes in front of `len` bytes that are the last argument of a call.
    #[must_use]
    pub fn encode_call_of_bytes(function: u64, mut args: Vec<WireValue>, len: u64) -> Vec<u8> {
        args.push(WireValue::Bytes(Bytes::new()));
        followed_by(Self::Call { function, args }.encode(), len)
    }

    /// Returns the frame that writes `data` to the beginning of a tensor.
    #[must_use]
    pub fn encode_copy_to(to: &TensorHeader, data: &[u8]) -> Vec<u8> {
        frame(FrameCode::CopyToRemote, |body| {
            to.encode(body);
            encode_bytes(data, body);
        })
    }
}

/// Returns true if the body of a `GetGlobalFunc` is one of TVM 0.20 or earlier, which writes the
/// numbers of all types in front of all values: one value, a text, and its length.
pub(super) fn is_of_old_client(body: &[u8]) -> bool {
    let number = |at: usize| body.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(i32::from_le_bytes);
    let len = body.get(8..16).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    number(0) == Some(1) && number(4) == Some(index::SMALL_STR) && len == Some((body.len() as u64).wrapping_sub(16))
}

/// Values of a request, taken one after the other.
struct Values {
    code: FrameCode,
    at: usize,
    values: Vec<WireValue>,
}

impl Values {
    fn next(&mut self, expected: &str) -> Result<WireValue, RequestError> {
        let value = self.values.get_mut(self.at).map(|value| std::mem::replace(value, WireValue::None));
        self.at += 1;
        value.ok_or_else(|| {
            let (name, at) = (self.code.name(), self.at);
            RequestError::Values(format!("{name} has no value {at}, which is of type {expected}"))
        })
    }

    fn mismatch(&self, expected: &str, value: &WireValue) -> RequestError {
        let (name, at, found) = (self.code.name(), self.at, value.type_name());
        RequestError::Values(format!("{name}: Cannot convert from type `{found}` to `{expected}` (value {at})"))
    }

    fn text(&mut self) -> Result<Text, RequestError> {
        match self.next("str")? {
            WireValue::Str(text) => Ok(text),
            other => Err(self.mismatch("str", &other)),
        }
    }

    fn optional_text(&mut self) -> Result<Option<Text>, RequestError> {
        match self.next("Optional[str]")? {
            WireValue::None => Ok(None),
            WireValue::Str(text) => Ok(Some(text)),
            other => Err(self.mismatch("Optional[str]", &other)),
        }
    }

    /// Takes a handle, for which none means 0.
    fn handle(&mut self) -> Result<u64, RequestError> {
        match self.next("pointer")? {
            WireValue::Pointer(handle) => Ok(handle),
            WireValue::None => Ok(0),
            other => Err(self.mismatch("pointer", &other)),
        }
    }

    fn int(&mut self) -> Result<i64, RequestError> {
        match self.next("int")? {
            WireValue::Int(value) => Ok(value),
            WireValue::Bool(value) => Ok(value.into()),
            other => Err(self.mismatch("int", &other)),
        }
    }

    fn device(&mut self) -> Result<Device, RequestError> {
        match self.next("Device")? {
            WireValue::Device(device) => Ok(device),
            other => Err(self.mismatch("Device", &other)),
        }
    }

    fn dtype(&mut self) -> Result<DataType, RequestError> {
        match self.next("DataType")? {
            WireValue::DataType(dtype) => Ok(dtype),
            other => Err(self.mismatch("DataType", &other)),
        }
    }

    fn tensor(&mut self) -> Result<TensorHeader, RequestError> {
        match self.next("DLTensor*")? {
            WireValue::Tensor(header) => Ok(header),
            other => Err(self.mismatch("DLTensor*", &other)),
        }
    }

    fn finish(self) -> Result<(), RequestError> {
        let (expected, found) = (self.at, self.values.len());
        if expected == found {
            return Ok(());
        }
        Err(RequestError::Values(format!("{} takes {expected} values, and got {found}", self.code.name())))
    }
}
