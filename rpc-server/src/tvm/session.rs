//! A session of a client of TVM: its handles, and its requests as those of a [`Session`].

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use rpc_core::dlpack::dense_strides;
use rpc_core::limits::MemoryLease;
use rpc_core::{
    DataType, Device, ErrorKind, Handle, HandleTable, MemoryQuota, Operation, Packed, Reference, RpcError, RpcSession,
    Session, SharedSession, TensorRef, Value,
};
use rpc_tvm::wire::{CallResult, ResultKind, TensorHeader, Text, WireValue};

use super::server_function::ServerFunction;
use super::time_evaluator::TimeEvaluator;

/// Handle of the system library, a module without functions. No table has such a handle: its tag is
/// never 0.
const SYSTEM_LIBRARY: u64 = 0xffff;

/// Session of a client of TVM.
///
/// Handles are minted here: a tensor of the client is a handle and offsets from it, while a view
/// that a function has returned begins somewhere in its storage.
pub(super) struct TvmSession {
    session: Session,
    handles: HandleTable<Held>,
    queued: Arc<MemoryQuota>,
    /// Streams that the client has made the current ones. Other devices have their default stream.
    current_streams: HashMap<Device, u64>,
    /// True if the session is one with a further server of TVM, whose own functions serve the
    /// client.
    is_of_tvm: bool,
    /// True if the session is one with a further server.
    is_forwarded: bool,
}

/// Object that a client holds.
pub(super) enum Held {
    /// A function of the session.
    Function(Handle),
    /// A module of the session.
    Module(Handle),
    /// An object of the session that only its functions know.
    Object(Handle),
    /// Memory of a tensor, from an offset in its storage on.
    Memory { storage: Handle, offset: u64 },
    /// A stream.
    Stream { stream: Handle, device: Device },
    /// A value that has no form of its own on the wire.
    Value {
        value: Value,
        /// Memory of the value in bytes.
        size: u64,
        #[allow(dead_code, reason = "held for its drop")]
        lease: MemoryLease,
    },
    /// A function that measures another one.
    TimeEvaluator(Arc<TimeEvaluator>),
}

impl TvmSession {
    pub(super) fn new(session: Session, queued: Arc<MemoryQuota>, max_handles: usize) -> Result<Self, RpcError> {
        let mut seed = [0; 2];
        getrandom::fill(&mut seed).map_err(|error| RpcError::internal(format!("no random numbers: {error}")))?;
        // Tag 0 is that of handles that no table has.
        let seed = u16::from_le_bytes(seed).max(1);
        let handles = HandleTable::new(seed.into(), max_handles);
        Ok(Self { session, handles, queued, current_streams: HashMap::new(), is_of_tvm: false, is_forwarded: false })
    }

    /// Puts a session with a further server in the place of this server's, of which nothing was
    /// asked yet. `is_of_tvm` says that the further one speaks TVM's protocol, and not the native
    /// one.
    pub(super) fn forward_to(&mut self, next: Session, is_of_tvm: bool) {
        (self.session, self.is_of_tvm, self.is_forwarded) = (next, is_of_tvm, true);
    }

    /// Returns true if the session is one with a further server.
    pub(super) fn is_forwarded(&self) -> bool {
        self.is_forwarded
    }

    /// Returns the function of this server with a name, if this server is to serve it.
    pub(super) fn server_function_named(&self, name: &str) -> Option<ServerFunction> {
        ServerFunction::from_name(name).filter(|function| self.serves(*function))
    }

    /// Returns the function of this server behind a handle, if there is one.
    pub(super) fn server_function(&self, handle: u64) -> Option<ServerFunction> {
        ServerFunction::from_handle(handle).filter(|function| self.serves(*function))
    }

    /// Returns true if this server is to serve the function. A further server of TVM has functions
    /// of its own for files, modules and measurements; copies to it are made by this one. A native
    /// one has the same operations as this server's own session.
    fn serves(&self, function: ServerFunction) -> bool {
        !self.is_of_tvm || function == ServerFunction::MaxPacketSize
    }

    pub(super) fn session(&self) -> &Session {
        &self.session
    }

    pub(super) fn shared(&self) -> &SharedSession {
        self.session.shared()
    }

    pub(super) fn queued(&self) -> &Arc<MemoryQuota> {
        &self.queued
    }

    /// Submits an operation, and waits for its outcome.
    pub(super) async fn submit(&self, operation: Operation) -> Result<Value, RpcError> {
        self.shared().submit(rpc_core::Request::new(operation)).reply().await
    }

    /// Returns a function of the session.
    pub(super) async fn find_function(&self, name: &str) -> Result<Handle, RpcError> {
        function_handle(self.submit(Operation::GetFunction { name: name.to_owned() }).await?)
    }

    /// Calls a function of the session by its name.
    pub(super) async fn call(&self, name: &str, args: Vec<Value>) -> Result<Value, RpcError> {
        let function = self.find_function(name).await?;
        let called = self.submit(Operation::Call { function, args }).await;
        self.session.release(&Reference::Function(function).into());
        called
    }

    /// Returns a module that the client holds, as an argument.
    pub(super) fn module(&self, module: u64) -> Result<Value, RpcError> {
        match self.handles.get(Handle::from_bits(module)) {
            Ok(Held::Module(module)) => Ok(Reference::Module(*module).into()),
            _ if module == SYSTEM_LIBRARY => {
                Err(RpcError::unsupported("the system library imports no modules, and no module imports it"))
            }
            _ => Err(unknown(module, "module")),
        }
    }

    /// Returns a function of a module that the client holds.
    pub(super) async fn find_in_module(&self, module: u64, name: &str) -> Result<Handle, RpcError> {
        if module == SYSTEM_LIBRARY {
            return Err(RpcError::not_found(format!("the system library has no function '{name}'")));
        }
        let Ok(Held::Module(module)) = self.handles.get(Handle::from_bits(module)) else {
            return Err(unknown(module, "module"));
        };
        function_handle(self.submit(Operation::ModuleFunction { module: *module, name: name.to_owned() }).await?)
    }

    /// Does the same as [`find_in_module`](Self::find_in_module) without the imports of the module.
    pub(super) async fn find_own_function(&self, module: u64, name: &str) -> Result<Handle, RpcError> {
        if module == SYSTEM_LIBRARY {
            return self.find_in_module(module, name).await;
        }
        let args = vec![self.module(module)?, name.into()];
        function_handle(self.call("rpc.module.own_function", args).await?)
    }

    /// Returns the system library, which has no functions: code is never linked into a server.
    pub(super) fn system_library() -> CallResult {
        CallResult::Object(ResultKind::Module, SYSTEM_LIBRARY)
    }

    /// Returns what a handle of the client stands for.
    pub(super) fn held(&self, handle: u64) -> Result<&Held, RpcError> {
        self.handles.get(Handle::from_bits(handle))
    }

    /// Returns the stream that the client has made the current one; 0 is the default one.
    pub(super) fn current_stream(&self, device: Device) -> u64 {
        self.current_streams.get(&device).copied().unwrap_or(0)
    }

    /// Makes a stream the current one.
    pub(super) async fn select_stream(&mut self, device: Device, stream: u64) -> Result<(), RpcError> {
        self.set_stream(device, stream).await?;
        if stream == 0 {
            self.current_streams.remove(&device);
        } else {
            self.current_streams.insert(device, stream);
        }
        Ok(())
    }

    /// Makes a stream the current one for a moment.
    pub(super) async fn set_stream(&self, device: Device, stream: u64) -> Result<(), RpcError> {
        let stream = if stream == 0 { None } else { Some(self.stream(device, stream)?) };
        self.submit(Operation::SetStream { device, stream }).await.map(drop)
    }

    pub(super) async fn wait_for_stream(&self, device: Device, stream: u64) -> Result<(), RpcError> {
        let current = self.current_stream(device);
        if stream == current {
            return self.submit(Operation::StreamWait { device, stream: None }).await.map(drop);
        }
        if stream != 0 {
            let stream = Some(self.stream(device, stream)?);
            return self.submit(Operation::StreamWait { device, stream }).await.map(drop);
        }
        // The default stream has no handle: it is the current one for a moment.
        self.set_stream(device, 0).await?;
        let waited = self.submit(Operation::StreamWait { device, stream: None }).await;
        self.set_stream(device, current).await?;
        waited.map(drop)
    }

    pub(super) fn stream(&self, device: Device, stream: u64) -> Result<Handle, RpcError> {
        match self.handles.get(Handle::from_bits(stream)) {
            Ok(Held::Stream { stream, device: of }) if *of == device => Ok(*stream),
            Ok(Held::Stream { device: of, .. }) => {
                Err(RpcError::invalid_argument(format!("the stream is one of {of}, and not of {device}")))
            }
            _ => Err(unknown(stream, "stream")),
        }
    }

    /// Frees an object. The number 0 and the functions of this server need not be freed.
    pub(super) async fn free(&mut self, handle: u64) -> Result<(), RpcError> {
        if handle == 0 || handle == SYSTEM_LIBRARY || self.server_function(handle).is_some() {
            return Ok(());
        }
        // A stream that is freed is the current one no more.
        if let Ok(&Held::Stream { device, .. }) = self.handles.get(Handle::from_bits(handle))
            && self.current_stream(device) == handle
        {
            self.select_stream(device, 0).await?;
        }
        let held = self.handles.remove(Handle::from_bits(handle)).map_err(|_| unknown(handle, "object"))?;
        match held {
            Held::Function(handle)
            | Held::Module(handle)
            | Held::Object(handle)
            | Held::Memory { storage: handle, .. }
            | Held::Stream { stream: handle, .. } => self.submit(Operation::Free { handle }).await.map(drop),
            Held::Value { value, .. } => {
                self.session.release(&value);
                Ok(())
            }
            Held::TimeEvaluator(evaluator) => {
                self.session.release(&evaluator.objects());
                Ok(())
            }
        }
    }

    /// Returns a handle for an object of the session, which is freed if there is none left.
    pub(super) fn hold(&mut self, held: Held) -> Result<u64, RpcError> {
        if let Err(error) = self.handles.check_room(1) {
            let handles = match held {
                Held::Function(handle)
                | Held::Module(handle)
                | Held::Object(handle)
                | Held::Memory { storage: handle, .. }
                | Held::Stream { stream: handle, .. } => vec![handle],
                Held::Value { value, .. } => value.handles(),
                Held::TimeEvaluator(evaluator) => evaluator.objects().handles(),
            };
            let release = rpc_core::Request::new(Operation::Release { handles });
            self.shared().submit(release).reply().detach();
            return Err(error);
        }
        self.handles.insert(held).map(Handle::to_bits)
    }

    /// Returns the `len` bytes of memory where a tensor of the client begins. The session checks
    /// that they exist.
    pub(super) fn flat(&self, header: &TensorHeader, len: u64) -> Result<TensorRef, RpcError> {
        let (storage, byte_offset) = self.memory(header)?;
        let len = i64::try_from(len).map_err(|_| RpcError::invalid_argument(format!("no tensor has {len} bytes")))?;
        let (shape, dtype) = (vec![len], DataType::U8);
        Ok(TensorRef { storage, byte_offset, shape, strides: None, dtype, device: header.device })
    }

    /// Returns the storage of a tensor, and its offset there.
    fn memory(&self, header: &TensorHeader) -> Result<(Handle, u64), RpcError> {
        let Ok(Held::Memory { storage, offset }) = self.handles.get(Handle::from_bits(header.data)) else {
            return Err(unknown(header.data, "memory"));
        };
        let offset = offset.checked_add(header.byte_offset);
        let offset = offset.ok_or_else(|| RpcError::invalid_argument("the byte offset of a tensor overflows"))?;
        Ok((*storage, offset))
    }

    /// Returns the arguments of a call, and the lease of what they take beside the request.
    pub(super) fn arguments(&self, args: Vec<WireValue>) -> Result<(Vec<Value>, MemoryLease), RpcError> {
        // Texts are copied, and so is what a handle stands for, which may be named repeatedly.
        let copied = |arg: &WireValue| match arg {
            WireValue::Str(text) => text.len() as u64,
            WireValue::Object(handle) => match self.handles.get(Handle::from_bits(*handle)) {
                Ok(Held::Value { size, .. }) => *size,
                _ => 0,
            },
            _ => 0,
        };
        let lease = self.queued.reserve(args.iter().map(copied).fold(0, u64::saturating_add))?;
        let args = args
            .into_iter()
            .enumerate()
            .map(|(at, arg)| self.argument(arg).map_err(|error| error.context(format_args!("argument {at}"))));
        Ok((args.collect::<Result<_, _>>()?, lease))
    }

    fn argument(&self, arg: WireValue) -> Result<Value, RpcError> {
        let held = |handle: u64| self.handles.get(Handle::from_bits(handle));
        Ok(match arg {
            WireValue::None | WireValue::Pointer(0) => Value::Null,
            WireValue::Int(value) => Value::Int(value),
            WireValue::Bool(value) => Value::Bool(value),
            WireValue::Float(value) => Value::Float(value),
            WireValue::DataType(dtype) => Value::DataType(dtype),
            WireValue::Device(device) => Value::Device(device),
            WireValue::Str(text) => Value::Str(text.as_str().to_owned()),
            WireValue::Bytes(bytes) => Value::Bytes(bytes),
            WireValue::Tensor(header) => {
                let (storage, byte_offset) = self.memory(&header)?;
                let TensorHeader { device, dtype, shape, .. } = header;
                TensorRef { storage, byte_offset, shape, strides: None, dtype, device }.into()
            }
            WireValue::Function(handle) => match held(handle) {
                Ok(Held::Function(function)) => Reference::Function(*function).into(),
                _ if self.server_function(handle).is_some() => {
                    return Err(RpcError::unsupported("a function of the server itself cannot be an argument"));
                }
                _ => return Err(unknown(handle, "function")),
            },
            WireValue::Module(handle) => match held(handle) {
                Ok(Held::Module(module)) => Reference::Module(*module).into(),
                _ if handle == 0 => {
                    return Err(RpcError::unsupported("the module that stands for the session cannot be an argument"));
                }
                _ => return Err(unknown(handle, "module")),
            },
            WireValue::Object(handle) => match held(handle) {
                Ok(Held::Object(object)) => Reference::Object(*object).into(),
                Ok(Held::Value { value, .. }) => value.clone(),
                _ => return Err(unknown(handle, "object")),
            },
            WireValue::Pointer(_) => {
                return Err(RpcError::invalid_argument("a pointer names nothing at the server, and cannot be used"));
            }
            other => return Err(RpcError::unsupported(format!("{} cannot be an argument", other.type_name()))),
        })
    }

    /// Returns the result of a call as the client gets it, with handles for its objects.
    pub(super) fn result(&mut self, value: Value) -> Result<CallResult, RpcError> {
        Ok(match value {
            Value::Null => CallResult::Plain(WireValue::None),
            Value::Bool(value) => CallResult::Plain(WireValue::Bool(value)),
            Value::Int(value) => CallResult::Plain(WireValue::Int(value)),
            Value::Float(value) => CallResult::Plain(WireValue::Float(value)),
            Value::DataType(dtype) => CallResult::Plain(WireValue::DataType(dtype)),
            Value::Device(device) => CallResult::Plain(WireValue::Device(device)),
            Value::Str(text) => CallResult::Str(Text::from(text)),
            Value::Bytes(bytes) => CallResult::Bytes(bytes),
            // A `serde` value has no counterpart in TVM.
            Value::Packed(packed) => CallResult::Bytes(packed.as_bytes().clone()),
            value @ Value::Shape(_) => self.hold_value(value, ResultKind::Shape)?,
            value @ Value::List(_) => self.hold_value(value, ResultKind::Array)?,
            value @ Value::Map(_) => self.hold_value(value, ResultKind::Map)?,
            Value::Object(Reference::Function(handle)) => {
                CallResult::Object(ResultKind::Function, self.hold(Held::Function(handle))?)
            }
            Value::Object(Reference::Module(handle)) => {
                CallResult::Object(ResultKind::Module, self.hold(Held::Module(handle))?)
            }
            Value::Object(Reference::Object(handle)) => {
                CallResult::Object(ResultKind::Object, self.hold(Held::Object(handle))?)
            }
            Value::Object(Reference::Tensor(tensor)) => self.tensor_result(*tensor)?,
            other => {
                self.session.release(&other);
                let name = other.type_name();
                return Err(RpcError::unsupported(format!("the function returned {name}, which TVM's clients lack")));
            }
        })
    }

    fn hold_value(&mut self, value: Value, kind: ResultKind) -> Result<CallResult, RpcError> {
        let size = value.size_hint() as u64;
        match self.queued.reserve(size) {
            // Bytes in it may be a part of a larger message, which would stay with them.
            Ok(lease) => Ok(CallResult::Object(kind, self.hold(Held::Value { value: apart(value), size, lease })?)),
            Err(error) => {
                self.session.release(&value);
                Err(error)
            }
        }
    }

    /// Returns a tensor under a handle of its own: clients drop the offset of a tensor that they
    /// get, so that it is kept here.
    fn tensor_result(&mut self, tensor: TensorRef) -> Result<CallResult, RpcError> {
        let TensorRef { storage, byte_offset: offset, shape, strides, dtype, device } = tensor;
        let handle = self.hold(Held::Memory { storage, offset })?;
        if strides.is_some_and(|strides| strides != dense_strides(&shape)) {
            self.handles.remove(Handle::from_bits(handle))?;
            let release = rpc_core::Request::new(Operation::Release { handles: vec![storage] });
            self.shared().submit(release).reply().detach();
            let text = "the function returned a tensor with gaps (strides), which cannot travel to a client of TVM";
            return Err(RpcError::unsupported(text));
        }
        let header = TensorHeader { data: handle, device, dtype, shape, byte_offset: 0 };
        Ok(CallResult::Tensor(header, handle))
    }
}

/// Returns the value with memory of its own for all bytes in it.
fn apart(value: Value) -> Value {
    match value {
        Value::Bytes(bytes) => Value::Bytes(Bytes::copy_from_slice(&bytes)),
        Value::Packed(packed) => Value::Packed(Packed::from_bytes(Bytes::copy_from_slice(packed.as_bytes()))),
        Value::List(items) => Value::List(items.into_iter().map(apart).collect()),
        Value::Map(entries) => Value::Map(entries.into_iter().map(|(key, value)| (apart(key), apart(value))).collect()),
        other => other,
    }
}

fn function_handle(value: Value) -> Result<Handle, RpcError> {
    match value {
        Value::Object(Reference::Function(handle)) => Ok(handle),
        other => Err(RpcError::internal(format!("a function was looked up, and {} was found", other.type_name()))),
    }
}

pub(super) fn unknown(handle: u64, expected: &str) -> RpcError {
    let text = format!("handle {handle:#x} names no {expected} of this session: it was freed, or never given out");
    RpcError::new(ErrorKind::InvalidHandle, text)
}
