//! The session: the one trait that everything implements, and the requests that it takes.
//!
//! # Contract
//!
//! Every session keeps these rules, and one conformance suite checks them for each implementation.
//!
//! 1. **Order.** A request names a [`Lane`]. Within a lane each request completes before the next one starts, in the
//!    order in which they were admitted. Across lanes nothing is promised, and none waits for another.
//! 2. **Pipelining.** Any number of requests may be in flight. Each gets exactly one terminal reply, cancelled ones too.
//!    Queues are bounded; a full one delays admission, and loses nothing.
//! 3. **Deadlines and cancellation.** When a deadline passes the caller is told at once. Dropping a pending reply cancels
//!    the request if it has not begun, and discards its result if it has.
//! 4. **Errors** are data ([`RpcError`](crate::RpcError)) and keep all their facts over every hop.
//! 5. **Copies** are many [`Operation::Write`] and [`Operation::Read`] requests, none larger than a chunk.
//! 6. **Ends.** Peer death, a cut link, a silent peer, an orderly shutdown and draining are different errors, and every
//!    pending request hears of them at once. All objects of a session are freed when it ends.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use bytes::{Bytes, BytesMut};

use crate::device::DeviceAttribute;
use crate::dlpack::{DataType, Device};
use crate::handle::Handle;
use crate::reply::Submission;
use crate::tensor::Borrow;
use crate::trace::TraceContext;
use crate::value::{TensorRef, Value};

/// A sequence of requests that complete one after the other. Lanes of one session run beside each other and share its
/// objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Lane(pub u32);

impl Lane {
    /// The lane of whoever names none.
    pub const DEFAULT: Self = Self(0);

    /// Not one lane but a new one for each request: it waits for nothing and nothing waits for it.
    pub const CONCURRENT: Self = Self(u32::MAX);
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::CONCURRENT { f.write_str("concurrent") } else { write!(f, "{}", self.0) }
    }
}

/// One request: what is asked, in which order, and until when.
#[derive(Debug)]
pub struct Request {
    /// The order that it belongs to.
    pub lane: Lane,
    /// When the caller stops waiting. It crosses hops as time remaining.
    pub deadline: Option<Instant>,
    /// The span that it is made in. It crosses hops unchanged; a write that is received
    /// [in place](RpcSession::write_in_place) goes without.
    pub trace: Option<TraceContext>,
    /// What is asked.
    pub operation: Operation,
}

impl Request {
    /// A request on the default lane, without a deadline or a trace context.
    pub fn new(operation: Operation) -> Self {
        Self { lane: Lane::DEFAULT, deadline: None, trace: None, operation }
    }

    /// Moves the request to `lane`.
    #[must_use]
    pub fn on(mut self, lane: Lane) -> Self {
        self.lane = lane;
        self
    }
}

/// What a request asks for. The comment at each says what the reply is.
#[derive(Debug)]
#[non_exhaustive]
pub enum Operation {
    /// The function registered under `name`; the reply is a function reference.
    GetFunction {
        /// The registered name.
        name: String,
    },
    /// Calls a function; the reply is what it returns.
    Call {
        /// The function.
        function: Handle,
        /// Its arguments.
        args: Vec<Value>,
    },
    /// Allocates a zeroed, densely packed tensor; the reply is a tensor reference.
    Alloc {
        /// Where.
        device: Device,
        /// The type of the elements.
        dtype: DataType,
        /// The dimensions.
        shape: Vec<i64>,
        /// A memory scope of the device; `None` is its ordinary memory.
        scope: Option<String>,
    },
    /// Copies `data` into a densely packed tensor; the reply is null. No larger than a chunk.
    Write {
        /// The tensor.
        to: TensorRef,
        /// Where in the tensor, in bytes.
        offset: u64,
        /// What.
        data: Bytes,
    },
    /// Reads from a densely packed tensor; the reply is bytes. No larger than a chunk.
    ///
    /// The reply of a local session borrows the tensor: drop it before writing to that tensor.
    Read {
        /// The tensor.
        from: TensorRef,
        /// Where in the tensor, in bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Where the bytes should go. A session may receive them right there, and then the reply is null; or ignore it.
        into: Option<ReadBuffer>,
    },
    /// Copies between two tensors of the session with equally many bytes, on whichever devices; the reply is null.
    Copy {
        /// The source.
        from: TensorRef,
        /// The destination.
        to: TensorRef,
    },
    /// Frees an object; the reply is null, or an error if the handle names none.
    Free {
        /// The object.
        handle: Handle,
    },
    /// Frees objects without a reply: the submission is complete when it returns, and nothing is awaited. This is what
    /// dropped references use, so a session must not block or fail here.
    Release {
        /// The objects.
        handles: Vec<Handle>,
    },
    /// An attribute of a device; the reply depends on the attribute, and is null where the device has no such thing.
    Attribute {
        /// The device.
        device: Device,
        /// Which attribute.
        attribute: DeviceAttribute,
    },
    /// Creates a stream; the reply is an object reference.
    CreateStream {
        /// On which device.
        device: Device,
    },
    /// Makes a stream the current one of its device for this lane's later requests; the reply is null.
    SetStream {
        /// The device.
        device: Device,
        /// The stream; `None` is the device's default stream.
        stream: Option<Handle>,
    },
    /// Completes when all that was issued to the stream has; the reply is null.
    StreamWait {
        /// The device.
        device: Device,
        /// The stream; `None` is the device's current stream.
        stream: Option<Handle>,
    },
    /// Loads a module; the reply is a module reference.
    LoadModule {
        /// A path in the session's workspace, or a name that a loader knows.
        path: String,
        /// Which loader; `None` lets the loaders decide by the path.
        loader: Option<String>,
    },
    /// A function of a module; the reply is a function reference.
    ModuleFunction {
        /// The module.
        module: Handle,
        /// The name in the module.
        name: String,
    },
    /// Ends the session in good order: what was admitted before completes, its replies arrive, then this one does.
    Shutdown,
}

/// A buffer that a session may read into, shared between the request and whoever waits for it.
#[derive(Clone)]
pub struct ReadBuffer(Arc<Mutex<Option<BytesMut>>>);

impl ReadBuffer {
    /// Lends out `buffer`, to be filled over its whole length.
    pub fn new(buffer: BytesMut) -> Self {
        Self(Arc::new(Mutex::new(Some(buffer))))
    }

    /// Takes the buffer: the session, to fill it; or the owner, when the reply is there. `None` if the other has it.
    pub fn take(&self) -> Option<BytesMut> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Puts the buffer back, filled or not.
    pub fn put_back(&self, buffer: BytesMut) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(buffer);
    }
}

impl fmt::Debug for ReadBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReadBuffer")
    }
}

impl Operation {
    /// The operation's name, for logs and errors.
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
            Self::LoadModule { .. } => "load_module",
            Self::ModuleFunction { .. } => "module_function",
            Self::Shutdown => "shutdown",
        }
    }
}

/// A place where functions run and memory lives.
///
/// One method is required. Local, remote and forwarding sessions implement it, and so do wrappers that add limits,
/// metrics or policy. Callers use the operations on [`Session`](crate::Session), which owns an
/// `Arc<dyn RpcSession>`; see the [module documentation](self) for the contract.
pub trait RpcSession: Send + Sync + 'static {
    /// Takes one request.
    ///
    /// Never blocks. The submission's first stage resolves when the request has its place in the order, which is where
    /// back-pressure is felt; requests of one lane are admitted in the order in which they were submitted. After the end
    /// of the session every submission resolves to the error that ended it.
    fn submit(&self, request: Request) -> Submission;

    /// Whether the session's objects live in this process.
    fn is_local(&self) -> bool {
        false
    }

    /// Whether what passes between this process and the first peer on the way to the objects can be neither read nor changed by others. Of what is
    /// behind that peer this says nothing. By default it is not; a session around another one passes the question on.
    fn is_encrypted(&self) -> bool {
        false
    }

    /// Offers memory to receive a [`Operation::Write`] in place, instead of taking the bytes: for servers that are about
    /// to read `len` bytes from a socket.
    ///
    /// `None`, the default, says: submit the write with its bytes. Otherwise the lane is held until the returned write is
    /// finished or dropped.
    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        let _ = (lane, to, offset, len);
        None
    }

    /// Resolves when the session has ended, to the error that ended it ([`ErrorKind::Closed`](crate::ErrorKind::Closed)
    /// for a shutdown in good order). The default never resolves.
    fn ended(&self) -> Submission {
        Submission::never()
    }
}

/// A session of any kind, shared by everything that refers to its objects.
pub type SharedSession = Arc<dyn RpcSession>;

/// Frees all objects in `value`. Never blocks.
pub fn release(session: &SharedSession, value: &Value) {
    let handles = value.handles();
    if !handles.is_empty() {
        session.submit(Request::new(Operation::Release { handles })).reply().detach();
    }
}

impl<S: RpcSession + ?Sized> RpcSession for Arc<S> {
    fn submit(&self, request: Request) -> Submission {
        (**self).submit(request)
    }

    fn is_local(&self) -> bool {
        (**self).is_local()
    }

    fn is_encrypted(&self) -> bool {
        (**self).is_encrypted()
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        (**self).write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        (**self).ended()
    }
}

/// A write whose bytes are received straight into the tensor. The lane waits for it.
///
/// Dropping it before it is filled is a write that was cut short: the range is left unspecified.
pub struct InPlaceWrite {
    borrow: Option<Borrow>,
    /// Where in the storage.
    start: usize,
    len: usize,
    filled: usize,
    /// Lets the lane go on. Called after the borrow is released.
    resume: Option<Box<dyn FnOnce() + Send>>,
}

impl InPlaceWrite {
    /// A write of `len` bytes at `start` of the storage that `borrow` borrows for writing; `resume` is called once, when
    /// the write is over. `None` if the storage is not in host memory or too small.
    pub fn new(mut borrow: Borrow, start: usize, len: usize, resume: Box<dyn FnOnce() + Send>) -> Option<Self> {
        borrow.bytes_mut().filter(|bytes| start.checked_add(len).is_some_and(|end| end <= bytes.len()))?;
        Some(Self { borrow: Some(borrow), start, len, filled: 0, resume: Some(resume) })
    }

    /// The part that has not been filled yet.
    pub fn unfilled(&mut self) -> &mut [u8] {
        let (start, end) = (self.start + self.filled, self.start + self.len);
        match self.borrow.as_mut().and_then(Borrow::bytes_mut) {
            Some(bytes) => &mut bytes[start..end],
            None => &mut [],
        }
    }

    /// Says that the first `count` bytes of [`unfilled`](Self::unfilled) have been written.
    pub fn advance(&mut self, count: usize) {
        self.filled = (self.filled + count).min(self.len);
    }

    /// How many bytes are still to come.
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
