//! `RpcSession`, the trait that every session implements, and the requests that it takes.
//!
//! # Contract
//!
//! Every session keeps these rules; one conformance suite checks them for each implementation.
//!
//! 1. **Order.** A request names a [`Lane`]. Within a lane each request completes before the next
//!    one starts, in the order of admission. Lanes have no order among each other, and none waits
//!    for another.
//! 2. **Pipelining.** Any number of requests may be in flight. Each gets exactly one terminal
//!    reply, cancelled ones too. Queues are bounded; a full one delays admission, and loses
//!    nothing.
//! 3. **Deadlines and cancellation.** When a deadline passes the caller is told at once. Dropping a
//!    pending reply cancels the request if it has not begun, and discards its result if it has.
//! 4. **Errors** are data ([`RpcError`](crate::RpcError)) and keep all their facts over every hop.
//! 5. **Copies** are many [`Operation::Write`] and [`Operation::Read`] requests, none larger than a
//!    chunk.
//! 6. **Results that are kept.** With [`Request::pipe`] the result stays in the session, and later
//!    requests of the same lane name it before it is there, by the handle that the client has
//!    chosen. If the request fails, so do those that name its result, before they begin, with its
//!    kind of error. The result is freed as an object is, and with the session.
//! 7. **Ends.** Peer death, a cut link, a silent peer, an orderly shutdown and draining are
//!    different errors, and every pending request gets the error at once. All objects of a session
//!    are freed when it ends.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;

use crate::device::DeviceAttribute;
use crate::dlpack::{DataType, Device, DeviceType};
use crate::error::RpcError;
use crate::handle::{Handle, PipeId};
use crate::printable::beginning;
use crate::reply::Submission;
use crate::tensor::Borrow;
use crate::trace::TraceContext;
use crate::value::{TensorRef, Value};

/// Sequence of requests that complete one after the other. The lanes of a session run concurrently
/// and share its objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lane(pub u32);

impl Lane {
    /// Lane of requests that name none.
    pub const DEFAULT: Self = Self(0);

    /// A new lane for each request: it waits for no other request, and none waits for it.
    pub const CONCURRENT: Self = Self(u32::MAX);
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::CONCURRENT { f.write_str("concurrent") } else { write!(f, "{}", self.0) }
    }
}

/// A request: an operation with its lane, deadline and trace context.
#[derive(Debug)]
pub struct Request {
    /// Lane of the request.
    pub lane: Lane,
    /// Time at which the caller stops waiting. It crosses hops as time remaining.
    pub deadline: Option<Instant>,
    /// Trace context of the span in which the request is made. It crosses hops unchanged; a write
    /// that is received [in place](RpcSession::write_in_place) carries none.
    pub trace: Option<TraceContext>,
    /// Handle under which the session keeps the result for later requests of the same lane; the
    /// reply is null then. `None` replies with the result.
    pub pipe: Option<PipeId>,
    /// The operation to perform.
    pub operation: Operation,
}

impl Request {
    /// Returns a request on the default lane, without a deadline or a trace context.
    pub fn new(operation: Operation) -> Self {
        Self { lane: Lane::DEFAULT, deadline: None, trace: None, pipe: None, operation }
    }

    /// Moves the request to `lane`.
    #[must_use]
    pub fn on(mut self, lane: Lane) -> Self {
        self.lane = lane;
        self
    }
}

/// Operation of a request. The documentation of each variant names its reply.
#[derive(Debug)]
#[non_exhaustive]
pub enum Operation {
    /// Looks up the function registered under `name`. The reply is a function reference.
    GetFunction {
        /// Name under which the function is registered.
        name: String,
    },
    /// Calls a function. The reply is the function's return value.
    Call {
        /// Handle of the function.
        function: Handle,
        /// Arguments of the call.
        args: Vec<Value>,
    },
    /// Allocates a zeroed, densely packed tensor. The reply is a tensor reference.
    Alloc {
        /// Device that holds the tensor.
        device: Device,
        /// Type of the elements.
        dtype: DataType,
        /// Dimensions, outermost first.
        shape: Vec<i64>,
        /// Memory scope of the device; `None` is its ordinary memory.
        scope: Option<String>,
        /// Alignment in bytes, a power of two; zero leaves it to the device.
        alignment: u64,
    },
    /// Copies `data` into a densely packed tensor. The reply is null. At most one chunk.
    Write {
        /// Destination.
        to: Box<TensorRef>,
        /// Offset in the tensor, in bytes.
        offset: u64,
        /// Bytes to write.
        data: Bytes,
    },
    /// Reads from a densely packed tensor. The reply is bytes. At most one chunk.
    ///
    /// The reply of a local session borrows the tensor: drop it before writing to that tensor.
    Read {
        /// Source.
        from: Box<TensorRef>,
        /// Offset in the tensor, in bytes.
        offset: u64,
        /// Number of bytes.
        len: u64,
        /// Buffer for the bytes. A session may read straight into it and reply null, or ignore it.
        into: Option<ReadBuffer>,
    },
    /// Copies between two tensors of the session with equal byte counts, on any two devices. The
    /// reply is null.
    Copy {
        /// Source.
        from: Box<TensorRef>,
        /// Destination.
        to: Box<TensorRef>,
    },
    /// Frees an object. The reply is null, or an error if the handle names no object.
    Free {
        /// Handle of the object.
        handle: Handle,
    },
    /// Frees objects without a reply: the submission is complete when it returns, and nothing is
    /// awaited. Dropped references use this operation, so a session must not block or fail here.
    Release {
        /// Handles of the objects.
        handles: Vec<Handle>,
    },
    /// Reads an attribute of a device. The type of the reply depends on the attribute; it is null
    /// if the device does not have the attribute.
    Attribute {
        /// The device.
        device: Device,
        /// Attribute to read.
        attribute: DeviceAttribute,
    },
    /// Creates a stream. The reply is an object reference.
    CreateStream {
        /// Device of the stream.
        device: Device,
    },
    /// Makes a stream the current one of its device for this lane's later requests. The reply is
    /// null.
    SetStream {
        /// Device of the stream.
        device: Device,
        /// The stream; `None` is the device's default stream.
        stream: Option<Handle>,
    },
    /// Waits until all work issued to the stream has completed. The reply is null.
    StreamWait {
        /// Device of the stream.
        device: Device,
        /// The stream; `None` is the device's current stream.
        stream: Option<Handle>,
    },
    /// Lets work that is issued to a stream from now on begin after the work issued to another
    /// stream so far. The reply is null, and need not wait for that work.
    StreamWaitFor {
        /// Device of the stream that waits.
        device: Device,
        /// The stream that waits; `None` is the device's current stream.
        stream: Option<Handle>,
        /// Device of the stream that is waited for.
        other_device: Device,
        /// The stream that is waited for; `None` is its device's current stream.
        other: Option<Handle>,
    },
    /// Loads a module. The reply is a module reference.
    LoadModule {
        /// Path in the session's workspace, or a name that a loader knows.
        path: String,
        /// Name of the loader; `None` lets the loaders decide by the path.
        loader: Option<String>,
    },
    /// Looks up a function of a module. The reply is a function reference.
    ModuleFunction {
        /// Handle of the module.
        module: Handle,
        /// Name of the function in the module.
        name: String,
    },
    /// Reads a result that the session keeps. The reply is the result, whose objects have handles
    /// of their own.
    Fetch {
        /// Handle of the result, a [`PipeId`].
        handle: Handle,
    },
    /// Shuts the session down: requests admitted before complete and are answered, then this one
    /// is.
    Shutdown,
}

/// A buffer that a session may read into, shared between the request and the caller that waits for
/// it.
#[derive(Clone)]
pub struct ReadBuffer(Arc<Mutex<Option<BytesMut>>>);

impl ReadBuffer {
    /// Shares `buffer`, to be filled over its whole length.
    pub fn new(buffer: BytesMut) -> Self {
        Self(Arc::new(Mutex::new(Some(buffer))))
    }

    /// Takes the buffer: the session takes it to fill it, the caller once the reply has arrived.
    /// Returns `None` while the other side has it.
    pub fn take(&self) -> Option<BytesMut> {
        self.0.lock().take()
    }

    /// Puts the buffer back, filled or not.
    pub fn put_back(&self, buffer: BytesMut) {
        *self.0.lock() = Some(buffer);
    }
}

impl fmt::Debug for ReadBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadBuffer")
    }
}

impl Operation {
    /// Returns the operation's name, for logs and errors.
    pub fn name(&self) -> &'static str {
        match self {
            Self::GetFunction { .. } => "get_function",
            Self::Call { .. } => "call",
            Self::Alloc { .. } => "alloc",
            Self::Write { .. } => "write",
            Self::Read { .. } => "read",
            Self::Copy { .. } => "copy",
            Self::Free { .. } => "free",
            Self::Release { .. } => "release",
            Self::Attribute { .. } => "attribute",
            Self::CreateStream { .. } => "create_stream",
            Self::SetStream { .. } => "set_stream",
            Self::StreamWait { .. } => "stream_wait",
            Self::StreamWaitFor { .. } => "stream_wait_for",
            Self::LoadModule { .. } => "load_module",
            Self::ModuleFunction { .. } => "module_function",
            Self::Fetch { .. } => "fetch",
            Self::Shutdown => "shutdown",
        }
    }

    /// Calls `visit` with every handle that the operation names.
    pub fn for_each_handle(&self, visit: &mut impl FnMut(Handle)) {
        match self {
            Self::Call { function, args } => {
                visit(*function);
                args.iter().for_each(|arg| arg.for_each_object(&mut |object| visit(object.handle())));
            }
            Self::Write { to: tensor, .. } | Self::Read { from: tensor, .. } => visit(tensor.storage),
            Self::Copy { from, to } => {
                visit(from.storage);
                visit(to.storage);
            }
            Self::Free { handle } | Self::Fetch { handle } | Self::ModuleFunction { module: handle, .. } => {
                visit(*handle);
            }
            Self::Release { handles } => handles.iter().copied().for_each(visit),
            Self::SetStream { stream, .. } | Self::StreamWait { stream, .. } => stream.iter().copied().for_each(visit),
            Self::StreamWaitFor { stream, other, .. } => stream.iter().chain(other).copied().for_each(visit),
            Self::GetFunction { .. }
            | Self::Alloc { .. }
            | Self::Attribute { .. }
            | Self::CreateStream { .. }
            | Self::LoadModule { .. }
            | Self::Shutdown => {}
        }
    }

    /// Returns true if the operation names a result that the session keeps.
    pub(crate) fn names_pipes(&self) -> bool {
        let mut names = false;
        self.for_each_handle(&mut |handle| names |= handle.is_pipe());
        names
    }

    /// Returns the memory in bytes that the operation keeps while it waits, apart from a small
    /// constant: what it counts for in queues.
    pub(crate) fn memory(&self) -> usize {
        match self {
            Self::Call { function, args } => {
                let (mut objects, mut names_pipes) = (0, function.is_pipe());
                let mut of_arg = |arg: &Value| {
                    if arg.may_hold_objects() {
                        arg.for_each_object(&mut |object| {
                            objects += 1;
                            names_pipes |= object.handle().is_pipe();
                        });
                    }
                    arg.size_hint()
                };
                let values: usize = args.iter().map(&mut of_arg).sum();
                values + if names_pipes { objects * PIN_BYTES } else { 0 }
            }
            Self::Write { to, data, .. } => data.len() + to.boxed_bytes(),
            Self::Read { from, .. } if from.device.kind == DeviceType::CPU => from.boxed_bytes(),
            // The bytes are copied to host memory first.
            Self::Read { from, len, .. } => {
                from.boxed_bytes().saturating_add(usize::try_from(*len).unwrap_or(usize::MAX))
            }
            Self::Copy { from, to } => from.boxed_bytes() + to.boxed_bytes(),
            Self::Alloc { shape, scope, .. } => {
                size_of::<i64>() * shape.capacity() + scope.as_ref().map_or(0, String::capacity)
            }
            Self::GetFunction { name } | Self::ModuleFunction { name, .. } => name.capacity(),
            Self::LoadModule { path, loader } => path.capacity() + loader.as_ref().map_or(0, String::capacity),
            _ => 0,
        }
    }
}

/// Largest part of an error's message that goes into those of dependent requests, in bytes.
const MAX_MESSAGE: usize = 1024;

/// Returns the error of requests that name the result of a request that has failed.
pub(crate) fn no_result(name: &str, error: &RpcError) -> RpcError {
    let text = error.message();
    let (text, name) = (beginning(text, MAX_MESSAGE), beginning(name, MAX_MESSAGE));
    let mut kept = RpcError::new(error.kind(), format!("no result, because the earlier '{name}' failed: {text}"));
    if let Some(kind) = error.application_kind() {
        kept = kept.with_application_kind(beginning(kind, MAX_MESSAGE));
    }
    kept
}

/// Memory in bytes that an object takes in a call that waits and names kept results, beside the
/// argument: such a call keeps its arguments as they came, and its objects in a map.
const PIN_BYTES: usize = 128;

/// A session: an environment in which functions run and memory lives.
///
/// One method is required. Local, remote and forwarding sessions implement it, and so do wrappers
/// that add limits, metrics or policy. Callers use the operations on [`Session`](crate::Session),
/// which owns an `Arc<dyn RpcSession>`; see the [module documentation](self) for the contract.
pub trait RpcSession: Send + Sync + 'static {
    /// Submits one request.
    ///
    /// Never blocks. The submission's first stage resolves when the request is admitted, that is,
    /// when its position in its lane is fixed; this is where back-pressure is felt. Requests of one
    /// lane are admitted in the order in which they were submitted. After the end of the session
    /// every submission resolves to the error that ended it.
    fn submit(&self, request: Request) -> Submission;

    /// Returns the session inside, if this one wraps another and adds limits, metrics or a policy.
    ///
    /// [`is_local`](Self::is_local), [`is_encrypted`](Self::is_encrypted) and
    /// [`ended`](Self::ended) are those of the session inside by default. Requests are never passed
    /// on by default, and neither is [`write_in_place`](Self::write_in_place), which a wrapper
    /// withholds if it has to see every write.
    fn inner(&self) -> Option<&dyn RpcSession> {
        None
    }

    /// Returns true if the session's objects live in this process.
    fn is_local(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_local())
    }

    /// Returns true if others can neither read nor change the traffic between this process and the
    /// first peer on the way to the objects. Makes no statement about the links behind that peer.
    fn is_encrypted(&self) -> bool {
        self.inner().is_some_and(|inner| inner.is_encrypted())
    }

    /// Returns true if the session keeps results for later requests ([`Request::pipe`]), as far as
    /// this process can know: a server further on that does not refuses each such request with
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported).
    fn keeps_results(&self) -> bool {
        self.inner().is_some_and(|inner| inner.keeps_results())
    }

    /// Offers memory to receive an [`Operation::Write`] in place, instead of taking its bytes. Used
    /// by servers that are about to read `len` bytes from a socket.
    ///
    /// The default, `None`, means: submit the write with its bytes. Otherwise the lane is held
    /// until the returned write is finished or dropped.
    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        let _ = (lane, to, offset, len);
        None
    }

    /// Resolves when the session has ended, to the error that ended it
    /// ([`ErrorKind::Closed`](crate::ErrorKind::Closed) after an orderly shutdown). The default is
    /// the end of the session inside; without one it never resolves.
    fn ended(&self) -> Submission {
        self.inner().map_or_else(Submission::never, |inner| inner.ended())
    }

    /// Returns the session as a shared pointer.
    ///
    /// Objects belong to one such pointer ([`is_same`]). A session that is cheap to clone returns
    /// the pointer that its clones share, so that each of them knows the objects of the others.
    fn into_shared(self) -> SharedSession
    where
        Self: Sized,
    {
        Arc::new(self)
    }
}

/// A session of any kind, shared by all references to its objects.
pub type SharedSession = Arc<dyn RpcSession>;

/// Returns true if both are the same session, and not only of the same kind.
pub fn is_same(one: &SharedSession, other: &SharedSession) -> bool {
    Arc::as_ptr(one).cast::<()>() == Arc::as_ptr(other).cast::<()>()
}

/// Frees all objects in `value`. Never blocks.
pub fn release(session: &SharedSession, value: &Value) {
    let handles = value.handles();
    if !handles.is_empty() {
        session.submit(Request::new(Operation::Release { handles })).reply().detach();
    }
}

impl<S: RpcSession> RpcSession for Arc<S> {
    fn submit(&self, request: Request) -> Submission {
        (**self).submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&**self)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        (**self).write_in_place(lane, to, offset, len)
    }

    fn into_shared(self) -> SharedSession {
        self
    }
}

impl RpcSession for SharedSession {
    fn submit(&self, request: Request) -> Submission {
        (**self).submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&**self)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        (**self).write_in_place(lane, to, offset, len)
    }

    fn into_shared(self) -> SharedSession {
        self
    }
}

/// A write whose bytes are received straight into the tensor. The lane is held until it is dropped.
///
/// Dropping it before it is filled is a write that was cut short: the content of the range is then
/// unspecified.
pub struct InPlaceWrite {
    borrow: Option<Borrow>,
    /// Offset in the storage, in bytes.
    start: usize,
    len: usize,
    filled: usize,
    /// Function that releases the lane. Called after the borrow is released.
    resume: Option<Box<dyn FnOnce() + Send>>,
}

impl InPlaceWrite {
    /// Creates a write of `len` bytes at `start` of the storage that `borrow` borrows for writing.
    /// `resume` is called once, when the write is over. Returns `None` if the storage is not in
    /// host memory or too small.
    pub fn new(mut borrow: Borrow, start: usize, len: usize, resume: Box<dyn FnOnce() + Send>) -> Option<Self> {
        borrow.bytes_mut().filter(|bytes| start.checked_add(len).is_some_and(|end| end <= bytes.len()))?;
        Some(Self { borrow: Some(borrow), start, len, filled: 0, resume: Some(resume) })
    }

    /// Returns the part that has not been filled yet.
    pub fn unfilled(&mut self) -> &mut [u8] {
        let (start, end) = (self.start + self.filled, self.start + self.len);
        match self.borrow.as_mut().and_then(Borrow::bytes_mut) {
            Some(bytes) => &mut bytes[start..end],
            None => &mut [],
        }
    }

    /// Records that the first `count` bytes of [`unfilled`](Self::unfilled) have been written.
    pub fn advance(&mut self, count: usize) {
        self.filled = (self.filled + count).min(self.len);
    }

    /// Returns the number of bytes still to be filled.
    pub fn remaining(&self) -> usize {
        self.len - self.filled
    }
}

impl Drop for InPlaceWrite {
    fn drop(&mut self) {
        drop(self.borrow.take());
        if let Some(resume) = self.resume.take() {
            resume();
        }
    }
}

impl fmt::Debug for InPlaceWrite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InPlaceWrite({} of {} bytes)", self.filled, self.len)
    }
}
