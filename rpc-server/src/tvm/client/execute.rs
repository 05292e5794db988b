//! The requests of callers as those of the wire, one after the other.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use rpc_core::reply::Outcome;
use rpc_core::{DataType, Device, DeviceAttribute, ErrorKind, Handle, Operation, RpcError, TensorRef, Value};
use rpc_tvm::wire::{CallResult, Expected, Request, ServerReply, TensorHeader, WireValue, shutdown};

use super::client_function::ClientFunction;
use super::containers::Arguments;
use super::link::Frame;
use super::objects::{Held, Memory, Objects, other_kind};
use super::server_calls::{call, server_function, unexpected};
use super::state::{ClientCore, closed};
use super::values::{self, ObjectKind, Received, checked_device, checked_name, piece};
use super::{containers, files, functions};

/// Room in bytes for a request that carries no data, with the longest of names.
const SMALL: u64 = 5 << 10;

/// Bytes in front of the data of a copy, with the header of a tensor of one dimension.
const COPY_HEADER: u64 = 44 + 8;

/// Smallest piece of a copy in bytes. The smallest buffers of servers have some hundred bytes.
const MIN_PIECE: u64 = 64;

/// Largest attribute of a device that is parsed, in bytes.
const MAX_DIMENSIONS_TEXT: usize = 256;

/// Serves the requests of a session until its end, and returns the reason for that.
///
/// A request is on the wire before the next one is taken, and one of several steps is complete: so
/// they have an effect in the order in which they were submitted.
pub(super) async fn execute(core: &Arc<ClientCore>) -> RpcError {
    while let Some((id, operation)) = core.next().await {
        match operation {
            Operation::Release { handles } => {
                for handle in handles {
                    core.link.room(0).await;
                    // It may have been freed by a request meanwhile.
                    let removed = core.objects.lock().remove(handle);
                    if let Ok((held, was_current)) = removed {
                        core.leave_stream(was_current).await;
                        core.free(&held);
                    }
                }
            }
            Operation::Shutdown if core.begin(id) => {
                core.settled(id).await;
                core.link.finish(shutdown()).await;
                core.complete(id, Ok(Value::Null));
                return closed();
            }
            operation if core.begin(id) => {
                if let Err(error) = core.perform(id, operation).await {
                    core.complete(id, Err(error));
                }
            }
            _ => {}
        }
    }
    core.link.answered().await;
    core.link.finish(shutdown()).await;
    closed()
}

impl ClientCore {
    /// Performs a request. It is complete later, unless there is an error.
    async fn perform(self: &Arc<Self>, id: u64, operation: Operation) -> Result<(), RpcError> {
        match operation {
            Operation::GetFunction { name } => self.get_function(id, name).await,
            Operation::Call { function, args } => self.call(id, function, args).await,
            Operation::Alloc { device, dtype, shape, scope, alignment } => {
                self.alloc(id, device, dtype, shape, scope, alignment).await
            }
            Operation::Write { to, offset, data } => self.write(id, &to, offset, data).await,
            Operation::Read { from, offset, len, into: _ } => self.read(id, &from, offset, len).await,
            Operation::Copy { from, to } => self.copy(id, &from, &to).await,
            Operation::Free { handle } => {
                // From here on nobody's end stops the request, so that what is removed is freed.
                self.room(id, SMALL).await?;
                let (held, was_current) = self.objects.lock().remove(handle)?;
                self.leave_stream(was_current).await;
                match held.freeing() {
                    Some(request) => self.send_at_once(id, &request, |_, _| Ok(Value::Null)),
                    None => self.complete(id, Ok(Value::Null)),
                }
                Ok(())
            }
            Operation::Attribute { device, attribute } => self.attribute(id, device, attribute).await,
            Operation::CreateStream { device } => {
                let device = checked_device(device)?;
                let keep = move |core: &Self, value| match value {
                    WireValue::Pointer(stream) => {
                        core.keep(Received::Object(Held::Stream { device, stream }, ObjectKind::Object))
                    }
                    _ => Err(unexpected("a stream")),
                };
                self.send(id, &Request::CreateStream { device }, keep).await
            }
            Operation::SetStream { device, stream } => {
                let device = checked_device(device)?;
                self.room(id, SMALL).await?;
                let request = {
                    let mut objects = self.objects.lock();
                    let stream = stream.map_or(Ok(0), |stream| objects.stream(device, stream))?;
                    objects.set_current_stream(device, stream);
                    Request::SetStream { device, stream }
                };
                self.send_at_once(id, &request, |_, _| Ok(Value::Null));
                Ok(())
            }
            Operation::StreamWait { device, stream } => {
                let device = checked_device(device)?;
                let stream = {
                    let objects = self.objects.lock();
                    stream.map_or(Ok(objects.current_stream(device)), |stream| objects.stream(device, stream))?
                };
                self.send(id, &Request::StreamSync { device, stream }, |_, _| Ok(Value::Null)).await
            }
            // The protocol has no order among streams: the server waits for the other one here, and
            // whatever is issued later comes behind its work.
            Operation::StreamWaitFor { device, stream, other_device, other } => {
                let (device, other_device) = (checked_device(device)?, checked_device(other_device)?);
                let other = {
                    let objects = self.objects.lock();
                    stream.map_or(Ok(0), |stream| objects.stream(device, stream))?;
                    let current = objects.current_stream(other_device);
                    other.map_or(Ok(current), |other| objects.stream(other_device, other))?
                };
                let wait = Request::StreamSync { device: other_device, stream: other };
                self.send(id, &wait, |_, _| Ok(Value::Null)).await
            }
            Operation::LoadModule { path, loader } => self.load_module(id, path, loader).await,
            Operation::ModuleFunction { module, name } => self.module_function(id, module, name).await,
            other => Err(RpcError::unsupported(format!("TVM's protocol has no {}", other.name()))),
        }
    }

    /// Sends a request of one value when there is room. `finish` makes the outcome of that.
    async fn send(
        self: &Arc<Self>,
        id: u64,
        request: &Request,
        finish: impl FnOnce(&Self, WireValue) -> Outcome + Send + 'static,
    ) -> Result<(), RpcError> {
        self.room(id, SMALL).await?;
        self.send_at_once(id, request, finish);
        Ok(())
    }

    /// Sends a request of one value, for which there is room.
    fn send_at_once(
        self: &Arc<Self>,
        id: u64,
        request: &Request,
        finish: impl FnOnce(&Self, WireValue) -> Outcome + Send + 'static,
    ) {
        let core = self.clone();
        self.link.send(Frame::of(request), move |reply| {
            let outcome = match reply {
                Ok(ServerReply::Value(value)) => finish(&core, value),
                Ok(_) => Err(unexpected("one value")),
                Err(error) => Err(error),
            };
            core.complete(id, outcome);
        });
    }

    async fn get_function(self: &Arc<Self>, id: u64, name: String) -> Result<(), RpcError> {
        if let Some(function) = ClientFunction::from_name(&name) {
            self.complete(id, self.keep(Received::Object(Held::Ours(function), ObjectKind::Function)));
            return Ok(());
        }
        let name = checked_name(name, "the name of a function")?;
        let found = name.clone();
        let keep = move |core: &Self, value| match value {
            WireValue::None | WireValue::Pointer(0) => {
                Err(RpcError::not_found(format!("the server has no function '{}'", found.as_str())))
            }
            WireValue::Pointer(handle) => {
                let held = Objects::function(handle, None, found.as_str());
                core.keep(Received::Object(held, ObjectKind::Function))
            }
            _ => Err(unexpected("the handle of a function")),
        };
        self.send(id, &Request::GetFunction { name }, keep).await
    }

    async fn call(self: &Arc<Self>, id: u64, function: Handle, args: Vec<Value>) -> Result<(), RpcError> {
        let held = self.objects.lock().get(function)?.clone();
        let handle = match held {
            Held::Ours(function) => {
                let outcome = functions::call(function, self, id, args).await;
                self.complete(id, outcome);
                return Ok(());
            }
            Held::Function { handle, .. } => handle,
            _ => return Err(other_kind(function, "function")),
        };
        let Arguments { values, built } = containers::build(self, id, args).await?;
        let frame = self.call_frame(handle, values);
        let sendable = match frame {
            Ok(frame) => self.room(id, frame.len()).await.map(|()| frame),
            Err(error) => Err(error),
        };
        let frame = sendable.inspect_err(|_| self.release(built.clone()))?;
        let core = self.clone();
        self.link.send(frame, move |reply| {
            core.release(built);
            let outcome = reply.and_then(|reply| match reply {
                ServerReply::Call(result) => core.receive(result),
                _ => Err(unexpected("the result of a call")),
            });
            core.complete(id, outcome);
        });
        Ok(())
    }

    async fn alloc(
        self: &Arc<Self>,
        id: u64,
        device: Device,
        dtype: DataType,
        shape: Vec<i64>,
        scope: Option<String>,
        alignment: u64,
    ) -> Result<(), RpcError> {
        let device = checked_device(device)?;
        let tensor = TensorRef { storage: Handle::from_bits(0), byte_offset: 0, shape, strides: None, dtype, device };
        let len = tensor.size_bytes()?;
        if tensor.shape.len() > rpc_tvm::wire::MAX_DIMENSIONS {
            return Err(RpcError::invalid_argument(format!("no tensor has {} dimensions", tensor.shape.len())));
        }
        let shape = tensor.shape.clone();
        let header = TensorHeader { data: 0, device, dtype, shape, byte_offset: 0 };
        let scope = scope.map(|scope| checked_name(scope, "a memory scope")).transpose()?;
        let keep = move |core: &Self, value| match value {
            WireValue::Pointer(data) => {
                let memory = Memory { data, device, offset: 0, len, tensor: None };
                core.keep(Received::Object(Held::Memory(memory), ObjectKind::Tensor(tensor)))
            }
            _ => Err(unexpected("memory")),
        };
        if alignment == 0 {
            return self.send(id, &Request::Alloc { header, scope }, keep).await;
        }
        // The request with an alignment has no scope.
        if let Some(scope) = scope.filter(|scope| scope.as_str() != "global") {
            let text = format!("a server of TVM takes no alignment of memory in the scope '{}'", scope.as_str());
            return Err(RpcError::unsupported(text));
        }
        let alignment = i64::try_from(alignment).ok().filter(|alignment| alignment.count_ones() == 1);
        let alignment = alignment.ok_or_else(|| RpcError::invalid_argument("the alignment is not a power of two"))?;
        let len = i64::try_from(len).map_err(|_| RpcError::new(ErrorKind::OutOfMemory, "the tensor is too large"))?;
        self.send(id, &Request::AllocBytes { device, len, alignment, hint: dtype }, keep).await
    }

    async fn write(self: &Arc<Self>, id: u64, to: &TensorRef, offset: u64, data: Bytes) -> Result<(), RpcError> {
        let header = values::header(&self.objects.lock(), to)?;
        let len = data.len() as u64;
        check_range(to, offset, len)?;
        if len == 0 {
            self.complete(id, Ok(Value::Null));
            return Ok(());
        }
        let waits_for_device = header.device != Device::cpu();
        // One at a time, as there is room: a small server takes small frames, and many of them.
        let frames = self.pieces(&header, len)?.map(|(at, size)| {
            let part = data.slice(at as usize..(at + size) as usize);
            let head = Request::encode_copy_to_header(&piece(&header, offset + at, size), size);
            Frame { parts: vec![head.into(), part], expected: Expected::Value, waits_for_device, lease: None }
        });
        self.send_all(id, frames.chain(sync(self, header.device))).await
    }

    async fn read(self: &Arc<Self>, id: u64, from: &TensorRef, offset: u64, len: u64) -> Result<(), RpcError> {
        let header = values::header(&self.objects.lock(), from)?;
        check_range(from, offset, len)?;
        if len > self.max_message {
            return Err(RpcError::limit("max_message", self.max_message, len));
        }
        let ask = |at: u64, size: u64| {
            let from = piece(&header, offset + at, size);
            let mut frame = Frame::of(&Request::CopyFrom { from, len: size });
            frame.expected = Expected::Data { len: size };
            frame
        };
        let pieces = self.pieces(&header, len)?;
        if pieces.len() == 1 && header.device == Device::cpu() {
            let (core, frame) = (self.clone(), ask(0, len));
            self.room(id, frame.len()).await?;
            self.link.send(frame, move |reply| {
                let outcome = reply.and_then(|reply| match reply {
                    ServerReply::Data(data) => Ok(Value::Bytes(data)),
                    _ => Err(unexpected("the bytes of a tensor")),
                });
                core.complete(id, outcome);
            });
            return Ok(());
        }
        let _lease = self.memory.reserve(len)?;
        let mut data = BytesMut::with_capacity(len as usize);
        for (at, size) in pieces {
            match self.link.ask(ask(at, size)).await? {
                ServerReply::Data(part) => data.extend_from_slice(&part),
                _ => return Err(unexpected("the bytes of a tensor")),
            }
        }
        if let Some(frame) = sync(self, header.device) {
            self.link.ask(frame).await?;
        }
        self.complete(id, Ok(Value::Bytes(data.freeze())));
        Ok(())
    }

    /// Returns the offsets and lengths of the pieces in which `len` bytes of a tensor are copied.
    fn pieces(
        &self,
        tensor: &TensorHeader,
        len: u64,
    ) -> Result<impl ExactSizeIterator<Item = (u64, u64)> + use<>, RpcError> {
        let largest = self.max_packet.saturating_sub(COPY_HEADER);
        if largest < MIN_PIECE {
            return Err(RpcError::unsupported(format!("the server takes frames of {} bytes only", self.max_packet)));
        }
        // Pieces of whole elements. An element that is larger than a frame has to be divided.
        let step = values::element_size(tensor.dtype).filter(|size| !16_u64.is_multiple_of(*size) && *size <= largest);
        let largest = largest - largest % step.unwrap_or(16);
        let count = usize::try_from(len.div_ceil(largest)).map_err(|_| RpcError::internal("a copy beyond memory"))?;
        Ok((0..count).map(move |at| (at as u64 * largest, largest.min(len - at as u64 * largest))))
    }

    async fn copy(self: &Arc<Self>, id: u64, from: &TensorRef, to: &TensorRef) -> Result<(), RpcError> {
        let (len, room) = (from.size_bytes()?, to.size_bytes()?);
        if len != room || from.dtype != to.dtype {
            let text = format!("cannot copy {len} bytes of {} to {room} bytes of {}", from.dtype, to.dtype);
            return Err(RpcError::invalid_argument(text));
        }
        let frames = {
            let objects = self.objects.lock();
            let (from, to) = (values::header(&objects, from)?, values::header(&objects, to)?);
            let end = |header: &TensorHeader| header.byte_offset + len;
            if from.data == to.data && from.byte_offset == to.byte_offset {
                drop(objects);
                self.complete(id, Ok(Value::Null));
                return Ok(());
            }
            if from.data == to.data && from.byte_offset < end(&to) && to.byte_offset < end(&from) {
                return Err(RpcError::invalid_argument("the two tensors of the copy overlap"));
            }
            let device = if from.device == Device::cpu() { to.device } else { from.device };
            let stream = objects.current_stream(device);
            drop(objects);
            let copy = Frame::of(&Request::CopyAmong { from, to, stream });
            std::iter::once(copy).chain(sync(self, device))
        };
        self.send_all(id, frames).await
    }

    /// Sends frames of one value each, and completes the request with the first error among the
    /// replies.
    async fn send_all(self: &Arc<Self>, id: u64, frames: impl Iterator<Item = Frame> + Send) -> Result<(), RpcError> {
        let failed: Arc<Mutex<Option<RpcError>>> = Arc::default();
        let mut frames = frames.peekable();
        while let Some(frame) = frames.next() {
            let is_last = frames.peek().is_none();
            self.room(id, frame.len()).await?;
            let (core, failed) = (self.clone(), failed.clone());
            self.link.send(frame, move |reply| {
                let mut failed = failed.lock();
                if let Err(error) = reply {
                    failed.get_or_insert(error);
                }
                if is_last {
                    let outcome = failed.take().map_or(Ok(Value::Null), Err);
                    drop(failed);
                    core.complete(id, outcome);
                }
            });
        }
        Ok(())
    }

    async fn attribute(self: &Arc<Self>, id: u64, device: Device, attribute: DeviceAttribute) -> Result<(), RpcError> {
        let (device, code) = (checked_device(device)?, attribute.code());
        // Those from 1000 on are this project's own.
        if code >= 1000 {
            self.complete(id, Ok(Value::Null));
            return Ok(());
        }
        let request = Request::Attribute { device, kind: code.into() };
        self.send(id, &request, move |_, value| attribute_value(attribute, value)).await
    }

    async fn load_module(self: &Arc<Self>, id: u64, path: String, loader: Option<String>) -> Result<(), RpcError> {
        if let Some(loader) = loader {
            let text = format!("a server of TVM chooses the loader by the name of the file, and none by '{loader}'");
            return Err(RpcError::unsupported(text));
        }
        let path = files::module_path(self, path)?;
        let load = server_function(self, "tvm.rpc.server.load_module").await?;
        let result = call(self, load, vec![WireValue::Str(path)]).await?;
        self.complete(id, self.receive(result));
        Ok(())
    }

    async fn module_function(self: &Arc<Self>, id: u64, module: Handle, name: String) -> Result<(), RpcError> {
        let number = self.objects.lock().module(module)?;
        let name = checked_name(name, "the name of a function")?;
        let find = server_function(self, "tvm.rpc.server.ModuleGetFunction").await?;
        let args = vec![WireValue::Module(number), WireValue::Str(name.clone()), WireValue::Bool(true)];
        let outcome = match call(self, find, args).await? {
            CallResult::Plain(_) => Err(RpcError::not_found(format!("the module has no function '{}'", name.as_str()))),
            CallResult::Object(_, handle) => {
                let held = Objects::function(handle, Some(module), name.as_str());
                self.keep(Received::Object(held, ObjectKind::Function))
            }
            _ => Err(unexpected("a function of the module")),
        };
        self.complete(id, outcome);
        Ok(())
    }
}

/// Returns the frame that waits for a copy. On `cpu` a copy is complete with its reply.
fn sync(core: &ClientCore, device: Device) -> Option<Frame> {
    let stream = core.objects.lock().current_stream(device);
    (device != Device::cpu()).then(|| Frame::of(&Request::StreamSync { device, stream }))
}

/// Checks that bytes lie in a tensor.
fn check_range(tensor: &TensorRef, offset: u64, len: u64) -> Result<(), RpcError> {
    let size = tensor.size_bytes()?;
    if offset.checked_add(len).is_some_and(|end| end <= size) {
        return Ok(());
    }
    Err(RpcError::invalid_argument(format!("{len} bytes at offset {offset} are not in a tensor of {size} bytes")))
}

fn attribute_value(attribute: DeviceAttribute, value: WireValue) -> Outcome {
    Ok(match (attribute, value) {
        (DeviceAttribute::Exists, WireValue::Int(value)) => Value::Bool(value != 0),
        (DeviceAttribute::Exists, WireValue::Bool(value)) => Value::Bool(value),
        (DeviceAttribute::Exists, WireValue::None) => Value::Bool(false),
        (DeviceAttribute::MaxThreadDimensions, WireValue::Str(text)) if text.len() <= MAX_DIMENSIONS_TEXT => {
            serde_json::from_str(text.as_str()).map_or_else(|_| Value::Str(text.as_str().to_owned()), Value::Shape)
        }
        (_, WireValue::None) => Value::Null,
        (_, WireValue::Int(value)) => Value::Int(value),
        (_, WireValue::Bool(value)) => Value::Bool(value),
        (_, WireValue::Float(value)) => Value::Float(value),
        (_, WireValue::Str(text)) => Value::Str(text.as_str().to_owned()),
        _ => return Err(unexpected("an attribute of a device")),
    })
}
