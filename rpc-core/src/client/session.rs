//! The client's view: a [`Session`] with all its operations, and references that free what they refer to.
//!
//! Every operation returns an [`Action`], which does nothing until it is awaited, waited for on a plain thread
//! ([`Action::wait`]), or started. All forms are the same code.
//!
//! ```
//! use rpc_core::{LocalSession, Registry, Session};
//!
//! let registry = Registry::new();
//! registry.add("add", |a: i64, b: i64| a + b);
//! let session = Session::new(LocalSession::new(registry));
//! let add = session.function::<(i64, i64), i64>("add").wait()?;
//! assert_eq!(add.call((1, 2)).wait()?, 3);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```
//!
//! The other way, a function of the session may call a closure of the client, see [`crate::client::callbacks`]:
//!
//! ```
//! use rpc_core::{Context, Function, LocalSession, Registry, Session};
//!
//! let registry = Registry::new();
//! registry.add("train", |context: Context, epochs: i64, report: Function| -> rpc_core::Result<()> {
//!     for epoch in 1..=epochs {
//!         context.call(&report, vec![epoch.into(), (1.0 / epoch as f64).into()])?;
//!     }
//!     Ok(())
//! });
//! let session = Session::new(LocalSession::new(registry));
//! let (sender, losses) = std::sync::mpsc::channel();
//! let report = session.callback(move |_epoch: i64, loss: f64| sender.send(loss)).wait()?;
//! session.get_function("train").wait()?.call::<()>((3, &report)).wait()?;
//! drop(report);
//! assert_eq!(losses.iter().collect::<Vec<_>>(), [1.0, 0.5, 1.0 / 3.0]);
//! # Ok::<(), rpc_core::RpcError>(())
//! ```

use std::any::Any;
use std::fmt;
use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use crate::blocking;
use crate::client::callbacks;
use crate::client::copies::{CopyFrom, CopyTo};
use crate::client::held_lane;
use crate::device::DeviceAttribute;
use crate::dlpack::{self, DataType, Device, Element};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::{ArgScope, FromReply, IntoArg, IntoArgs};
use crate::handle::Handle;
use crate::reply::{PendingReply, Submission};
use crate::session::{Lane, Operation, Request, RpcSession, SharedSession, release};
use crate::trace::{self, TraceContext};
use crate::value::{Reference, TensorRef, Value};

/// A session of any kind, with all operations. Cheap to clone; clones are the same session.
#[derive(Clone)]
pub struct Session(SharedSession);

impl Session {
    /// The operations of `session`.
    pub fn new(session: impl RpcSession) -> Self {
        Self(Arc::new(session))
    }

    /// The session itself, to submit requests to or to wrap.
    pub fn shared(&self) -> &SharedSession {
        &self.0
    }

    /// The function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    pub fn get_function(&self, name: &str) -> Action<RemoteFunction> {
        self.action(Operation::GetFunction { name: name.to_owned() })
    }

    /// As [`get_function`](Self::get_function), with the types of its arguments and return.
    ///
    /// The types are checked when it is called, by the function itself.
    pub fn function<A: IntoArgs, R: FromReply>(&self, name: &str) -> Action<TypedFunction<A, R>> {
        self.action(Operation::GetFunction { name: name.to_owned() })
    }

    /// Calls `function`, as [`RemoteFunction::call`].
    pub fn call_func<R: FromReply>(&self, function: &RemoteFunction, args: impl IntoArgs) -> Action<R> {
        let mut scope = ArgScope { session: &self.0, pins: Vec::new() };
        let request = function
            .0
            .handle_in(&self.0)
            .and_then(|function| Ok(Request::new(Operation::Call { function, args: args.into_args(&mut scope)? })));
        let pins = scope.pins;
        Action {
            session: self.0.clone(),
            request,
            function: Some(function.0.clone()),
            pins,
            frees: None,
            result: PhantomData,
        }
    }

    /// Allocates a zeroed, densely packed tensor.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::DeviceUnavailable`], [`ErrorKind::OutOfMemory`], [`ErrorKind::LimitExceeded`], and
    /// [`ErrorKind::InvalidArgument`] for an impossible shape.
    pub fn alloc(&self, device: Device, dtype: DataType, shape: &[i64]) -> Action<RemoteTensor> {
        self.alloc_in_scope(device, dtype, shape, None)
    }

    /// As [`alloc`](Self::alloc), in a memory scope of the device, such as `global`.
    pub fn alloc_in_scope(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
    ) -> Action<RemoteTensor> {
        let scope = scope.map(str::to_owned);
        self.action(Operation::Alloc { device, dtype, shape: shape.to_vec(), scope })
    }

    /// Allocates a tensor on `cpu:0` and fills it.
    ///
    /// # Errors
    ///
    /// As [`alloc`](Self::alloc) and [`copy_to_remote`](Self::copy_to_remote); `data` must have as many elements as
    /// `shape`.
    pub async fn upload<T: Element>(&self, shape: &[i64], data: &[T]) -> Result<RemoteTensor> {
        let elements = dlpack::element_count(shape)?;
        if elements != data.len() as u64 {
            let got = data.len();
            return Err(RpcError::invalid_argument(format!(
                "shape {shape:?} has {elements} elements, and {got} were given"
            )));
        }
        let tensor = self.alloc(Device::cpu(), T::DATA_TYPE, shape).await?;
        self.copy_to_remote(&tensor, dlpack::to_bytes(data)).await?;
        Ok(tensor)
    }

    /// Reads a densely packed tensor as a vector of its elements.
    ///
    /// # Errors
    ///
    /// As [`copy_from_remote`](Self::copy_from_remote); the tensor must have elements of type `T`.
    pub async fn download<T: Element>(&self, tensor: &RemoteTensor) -> Result<Vec<T>> {
        if tensor.dtype() != T::DATA_TYPE {
            let (expected, got) = (T::DATA_TYPE, tensor.dtype());
            return Err(RpcError::invalid_argument(format!("expected a tensor of {expected}, got one of {got}")));
        }
        let bytes = self.copy_from_remote(tensor).await?;
        Ok(dlpack::from_bytes(&bytes))
    }

    /// Copies bytes into a densely packed tensor, from its start unless [`CopyTo::offset`] says otherwise, in chunks that
    /// follow each other closely.
    ///
    /// A copy that is cancelled or cut leaves its range unspecified.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the bytes do not fit, and whatever ends the session.
    pub fn copy_to_remote(&self, tensor: &RemoteTensor, data: impl Into<bytes::Bytes>) -> CopyTo {
        CopyTo::new(self.0.clone(), tensor.reference_in(&self.0), tensor.0.pin(), data.into())
    }

    /// Reads the bytes of a densely packed tensor, all of them unless [`CopyFrom::range`] says otherwise.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if the range does not fit, and whatever ends the session.
    pub fn copy_from_remote(&self, tensor: &RemoteTensor) -> CopyFrom {
        CopyFrom::new(self.0.clone(), tensor.reference_in(&self.0), tensor.0.pin())
    }

    /// Copies between two tensors of the session that have equally many bytes, without passing through the client.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidArgument`] if dtype or size differ, or if the two overlap.
    pub fn copy_among_remote(&self, from: &RemoteTensor, to: &RemoteTensor) -> Action<()> {
        let pins = vec![from.0.pin(), to.0.pin()];
        let request = from
            .reference_in(&self.0)
            .and_then(|from| Ok(Request::new(Operation::Copy { from, to: to.reference_in(&self.0)? })));
        Action { session: self.0.clone(), request, function: None, pins, frees: None, result: PhantomData }
    }

    /// Frees an object now, and says whether it was there. Dropping a reference frees as well, without an answer.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidHandle`] if the handle names nothing: twice freed, or of another session.
    pub fn free_handle(&self, handle: Handle) -> Action<()> {
        self.action(Operation::Free { handle })
    }

    /// An attribute of a device; null where the device has no such thing.
    pub fn attribute(&self, device: Device, attribute: DeviceAttribute) -> Action<Value> {
        self.action(Operation::Attribute { device, attribute })
    }

    /// Creates a stream of a device.
    pub fn create_stream(&self, device: Device) -> Action<RemoteObject> {
        self.action(Operation::CreateStream { device })
    }

    /// Frees a stream. What was issued to it still completes.
    pub fn free_stream(&self, stream: RemoteObject) -> Action<()> {
        stream.0.free_in(&self.0)
    }

    /// Makes `stream` the current one of `device` for later requests of the same lane; `None` is the default stream.
    pub fn set_stream(&self, device: Device, stream: Option<&RemoteObject>) -> Action<()> {
        self.action_on(stream_handle(stream, &self.0), stream_pin(stream), |stream| Operation::SetStream {
            device,
            stream,
        })
    }

    /// Resolves when all that was issued to `stream` has completed; `None` is the lane's current stream of `device`.
    pub fn stream_wait(&self, device: Device, stream: Option<&RemoteObject>) -> Action<()> {
        self.action_on(stream_handle(stream, &self.0), stream_pin(stream), |stream| Operation::StreamWait {
            device,
            stream,
        })
    }

    /// Loads a module: a file of the session's workspace, or one that the server registered by name.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if there is no such file, or no loader takes it.
    pub fn load_module(&self, path: &str) -> Action<RemoteModule> {
        self.action(Operation::LoadModule { path: path.to_owned(), loader: None })
    }

    /// As [`load_module`](Self::load_module), with the loader of that name.
    pub fn load_module_with(&self, loader: &str, path: &str) -> Action<RemoteModule> {
        self.action(Operation::LoadModule { path: path.to_owned(), loader: Some(loader.to_owned()) })
    }

    /// Whether the session's objects live in this process.
    pub fn is_local(&self) -> bool {
        self.0.is_local()
    }

    /// Whether what passes between this process and the first peer on the way to the objects can be neither read nor changed by others, as over TLS
    /// and QUIC. Of what is behind that peer this says nothing.
    pub fn is_encrypted(&self) -> bool {
        self.0.is_encrypted()
    }

    /// Ends the session in good order: what was admitted before completes first. [Callbacks](crate::client::callbacks) do not go on:
    /// what waits for one fails.
    pub fn shutdown(&self) -> Action<()> {
        self.action(Operation::Shutdown)
    }

    /// Resolves when the session has ended, to the reason.
    pub async fn ended(&self) -> RpcError {
        match self.0.ended().reply().await {
            Err(error) => error,
            Ok(_) => RpcError::new(ErrorKind::Closed, "the session has ended"),
        }
    }

    /// Frees all objects that a raw value names.
    pub fn release(&self, value: &Value) {
        release(&self.0, value);
    }

    fn action<T: FromReply>(&self, operation: Operation) -> Action<T> {
        Action {
            session: self.0.clone(),
            request: Ok(Request::new(operation)),
            function: None,
            pins: Vec::new(),
            frees: None,
            result: PhantomData,
        }
    }

    fn action_on<T: FromReply, H>(
        &self,
        handle: Result<H>,
        pins: Vec<Arc<dyn Any + Send + Sync>>,
        operation: impl FnOnce(H) -> Operation,
    ) -> Action<T> {
        let request = handle.map(|handle| Request::new(operation(handle)));
        Action { session: self.0.clone(), request, function: None, pins, frees: None, result: PhantomData }
    }
}

fn stream_handle(stream: Option<&RemoteObject>, session: &SharedSession) -> Result<Option<Handle>> {
    stream.map(|stream| stream.0.handle_in(session)).transpose()
}

fn stream_pin(stream: Option<&RemoteObject>) -> Vec<Arc<dyn Any + Send + Sync>> {
    stream.map(|stream| stream.0.pin()).into_iter().collect()
}

impl From<SharedSession> for Session {
    fn from(session: SharedSession) -> Self {
        Self(session)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Session")
    }
}

impl RpcSession for Session {
    fn submit(&self, request: Request) -> Submission {
        self.0.submit(request)
    }

    fn is_local(&self) -> bool {
        self.0.is_local()
    }

    fn is_encrypted(&self) -> bool {
        self.0.is_encrypted()
    }

    fn write_in_place(
        &self,
        lane: Lane,
        to: &TensorRef,
        offset: u64,
        len: u64,
    ) -> Option<crate::session::InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        self.0.ended()
    }
}

/// An operation that has not been started: await it, [`wait`](Self::wait) for it, or [`start`](Self::start) it.
#[must_use = "an action does nothing until it is awaited, waited for or started"]
pub struct Action<T> {
    session: SharedSession,
    request: Result<Request>,
    /// Kept as the pins are; nearly every call has this one, and no other.
    function: Option<Arc<Owned>>,
    pins: Vec<Arc<dyn Any + Send + Sync>>,
    /// What has nothing left to free once this is done.
    frees: Option<Arc<Owned>>,
    result: PhantomData<fn() -> T>,
}

impl<T: FromReply> Action<T> {
    /// Moves the operation to `lane`; [`Lane::DEFAULT`] without this.
    pub fn lane(mut self, lane: Lane) -> Self {
        self.request = self.request.map(|request| request.on(lane));
        self
    }

    /// Lets the operation run beside all others.
    pub fn concurrent(self) -> Self {
        self.lane(Lane::CONCURRENT)
    }

    /// Fails the operation at `deadline` with [`ErrorKind::DeadlineExceeded`].
    pub fn deadline(mut self, deadline: Instant) -> Self {
        if let Ok(request) = &mut self.request {
            request.deadline = Some(deadline);
        }
        self
    }

    /// As [`deadline`](Self::deadline), from now on.
    pub fn timeout(self, timeout: Duration) -> Self {
        match Instant::now().checked_add(timeout) {
            Some(deadline) => self.deadline(deadline),
            None => self,
        }
    }

    /// Names the span that the operation belongs to; the [current](trace::current) one when it starts without this.
    pub fn trace(mut self, trace: TraceContext) -> Self {
        if let Ok(request) = &mut self.request {
            request.trace = Some(trace);
        }
        self
    }

    /// Submits the operation without waiting for it.
    pub fn start(self) -> Pending<T> {
        let submission = match self.request.and_then(|request| {
            held_lane::check(&self.session, request.lane)?;
            Ok(request)
        }) {
            Ok(mut request) => {
                if let Operation::Shutdown = request.operation {
                    callbacks::stop_all(&self.session);
                }
                request.trace = request.trace.or_else(trace::current);
                self.session.submit(request)
            }
            Err(error) => Submission::ready(Err(error)),
        };
        let _pins = (self.function, self.pins);
        let stage = Stage::Submitted(submission);
        Pending { session: self.session, stage, _pins, frees: self.frees, result: PhantomData }
    }

    /// Performs the operation on the calling thread.
    ///
    /// # Errors
    ///
    /// The operation's own; and [`ErrorKind::ApiMisuse`] inside an async runtime.
    pub fn wait(self) -> Result<T> {
        // Nothing is submitted before it is known that waiting is possible.
        blocking::block_on(async { self.start().await })?
    }
}

impl<T: FromReply> IntoFuture for Action<T> {
    type Output = Result<T>;
    type IntoFuture = Pending<T>;

    fn into_future(self) -> Pending<T> {
        self.start()
    }
}

impl<T> fmt::Debug for Action<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Action").field(&self.request).finish()
    }
}

/// An operation under way. Dropping it cancels the operation if it has not begun.
#[must_use = "dropping a pending operation cancels it"]
pub struct Pending<T> {
    session: SharedSession,
    stage: Stage,
    /// Until the reply: the request may not have reached the session before.
    _pins: (Option<Arc<Owned>>, Vec<Arc<dyn Any + Send + Sync>>),
    frees: Option<Arc<Owned>>,
    result: PhantomData<fn() -> T>,
}

enum Stage {
    Submitted(Submission),
    Admitted(PendingReply),
    Refused(RpcError),
    Over,
}

impl<T: FromReply> Pending<T> {
    /// Resolves when the operation has its place in the order: this is where a full queue is felt.
    ///
    /// # Errors
    ///
    /// Why it was refused. The operation itself then fails with the same error.
    pub async fn admitted(&mut self) -> Result<()> {
        if let Stage::Submitted(submission) = &mut self.stage {
            self.stage = match submission.await {
                Ok(pending) => Stage::Admitted(pending),
                Err(error) => Stage::Refused(error),
            };
        }
        match &self.stage {
            Stage::Refused(error) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Asks for cancellation and keeps waiting for the terminal reply.
    pub fn cancel(&self) {
        match &self.stage {
            Stage::Submitted(submission) => submission.cancel(),
            Stage::Admitted(pending) => pending.cancel(),
            Stage::Refused(_) | Stage::Over => {}
        }
    }

    /// Waits on the calling thread.
    ///
    /// # Errors
    ///
    /// As [`Action::wait`].
    pub fn wait(self) -> Result<T> {
        blocking::block_on(self)?
    }
}

impl<T: FromReply> Future for Pending<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        loop {
            match &mut self.stage {
                Stage::Submitted(submission) => match Pin::new(submission).poll(cx) {
                    Poll::Pending => return Poll::Pending,
                    Poll::Ready(Ok(pending)) => self.stage = Stage::Admitted(pending),
                    Poll::Ready(Err(error)) => self.stage = Stage::Refused(error),
                },
                Stage::Admitted(pending) => {
                    let Poll::Ready(outcome) = Pin::new(pending).poll(cx) else { return Poll::Pending };
                    self.stage = Stage::Over;
                    if let (Ok(_), Some(freed)) = (&outcome, &self.frees) {
                        freed.freed.store(true, Ordering::Relaxed);
                    }
                    return Poll::Ready(outcome.and_then(|value| T::from_reply(value, &self.session)));
                }
                Stage::Refused(error) => return Poll::Ready(Err(error.clone())),
                Stage::Over => {
                    return Poll::Ready(Err(RpcError::new(
                        ErrorKind::ApiMisuse,
                        "an operation was polled after its end",
                    )));
                }
            }
        }
    }
}

impl<T> fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Pending")
    }
}

/// One handle and its session. The last reference frees the object.
struct Owned {
    session: SharedSession,
    handle: Handle,
    /// Freed explicitly, so that dropping has nothing left to do.
    freed: AtomicBool,
}

impl Owned {
    fn new(handle: Handle, session: &SharedSession) -> Arc<Self> {
        Arc::new(Self { session: session.clone(), handle, freed: AtomicBool::new(false) })
    }

    fn handle_in(&self, session: &SharedSession) -> Result<Handle> {
        if Arc::as_ptr(&self.session).cast::<()>() == Arc::as_ptr(session).cast::<()>() {
            Ok(self.handle)
        } else {
            Err(RpcError::new(ErrorKind::InvalidHandle, "the object belongs to another session"))
        }
    }

    /// Frees the object now. If that is cancelled on its way, dropping the reference frees it.
    fn free_in(self: &Arc<Self>, session: &SharedSession) -> Action<()> {
        let request = self.handle_in(session).map(|handle| Request::new(Operation::Free { handle }));
        Action {
            session: session.clone(),
            request,
            function: None,
            pins: Vec::new(),
            frees: Some(self.clone()),
            result: PhantomData,
        }
    }

    fn pin(self: &Arc<Self>) -> Arc<dyn Any + Send + Sync> {
        self.clone()
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !*self.freed.get_mut() {
            let release = Request::new(Operation::Release { handles: vec![self.handle] });
            self.session.submit(release).reply().detach();
        }
    }
}

macro_rules! references {
    ($($(#[$doc:meta])* $name:ident, $variant:ident, $what:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone)]
            pub struct $name(Arc<Owned>);

            impl $name {
                /// The handle, still owned by this reference.
                pub fn handle(&self) -> Handle {
                    self.0.handle
                }

                /// The session where the object lives.
                pub fn session(&self) -> Session {
                    Session(self.0.session.clone())
                }

                /// Frees the object now, and says whether it was there. Other clones of this reference become invalid.
                pub fn free(self) -> Action<()> {
                    self.0.free_in(&self.0.session)
                }
            }

            impl FromReply for $name {
                fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
                    match value {
                        Value::Object(Reference::$variant(handle)) => Ok(Self(Owned::new(handle, session))),
                        other => Err(unexpected($what, &other, session)),
                    }
                }
            }

            impl IntoArg for &$name {
                fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
                    let handle = self.0.handle_in(scope.session)?;
                    scope.pins.push(self.0.pin());
                    Ok(Value::Object(Reference::$variant(handle)))
                }
            }

            /// Kept until the reply, and freed then if this was the last reference.
            impl IntoArg for $name {
                fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
                    (&self).into_arg(scope)
                }
            }

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, concat!(stringify!($name), "({})"), self.0.handle)
                }
            }
        )*
    };
}

references! {
    /// A function of a session. Dropping the last clone frees it there.
    RemoteFunction, Function, "function";
    /// A module of a session. Dropping the last clone frees it there; functions that were got from it stay.
    RemoteModule, Module, "module";
    /// An object of the application's own, or a stream. Dropping the last clone frees it there.
    RemoteObject, Object, "object";
}

fn unexpected(expected: &str, value: &Value, session: &SharedSession) -> RpcError {
    release(session, value);
    RpcError::invalid_argument(format!("expected {expected}, got {}", value.type_name()))
}

impl RemoteFunction {
    /// Calls the function. Arguments are a tuple of values and references; the return is converted to `R`.
    ///
    /// # Errors
    ///
    /// The function's own, with its message and backtrace; [`ErrorKind::InvalidArgument`] if arguments or return do not
    /// fit; and whatever ends the session.
    pub fn call<R: FromReply>(&self, args: impl IntoArgs) -> Action<R> {
        self.session().call_func(self, args)
    }
}

impl RemoteModule {
    /// The function `name` of the module.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    pub fn function(&self, name: &str) -> Action<RemoteFunction> {
        let name = name.to_owned();
        self.session()
            .action_on(Ok(self.0.handle), vec![self.0.pin()], |module| Operation::ModuleFunction { module, name })
    }
}

/// A [`RemoteFunction`] with the types of its arguments and return.
pub struct TypedFunction<A, R> {
    function: RemoteFunction,
    types: PhantomData<fn(A) -> R>,
}

impl<A: IntoArgs, R: FromReply> TypedFunction<A, R> {
    /// Calls the function, as [`RemoteFunction::call`].
    pub fn call(&self, args: A) -> Action<R> {
        self.function.call(args)
    }

    /// The function without its types.
    pub fn untyped(&self) -> &RemoteFunction {
        &self.function
    }
}

impl<A, R> Clone for TypedFunction<A, R> {
    fn clone(&self) -> Self {
        Self { function: self.function.clone(), types: PhantomData }
    }
}

impl<A, R> fmt::Debug for TypedFunction<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.function.fmt(f)
    }
}

impl<A: IntoArgs, R: FromReply> FromReply for TypedFunction<A, R> {
    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        RemoteFunction::from_reply(value, session).map(|function| Self { function, types: PhantomData })
    }
}

/// A tensor of a session, or a view of one. Views share the storage; dropping the last of them frees it.
#[derive(Clone)]
pub struct RemoteTensor(Arc<Owned>, TensorRef);

impl RemoteTensor {
    /// The handle of the storage, still owned by this reference.
    pub fn handle(&self) -> Handle {
        self.0.handle
    }

    /// The session where the tensor lives.
    pub fn session(&self) -> Session {
        Session(self.0.session.clone())
    }

    /// The dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.1.shape
    }

    /// The strides in elements, or `None` if densely packed.
    pub fn strides(&self) -> Option<&[i64]> {
        self.1.strides.as_deref()
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DataType {
        self.1.dtype
    }

    /// Where the tensor lies.
    pub fn device(&self) -> Device {
        self.1.device
    }

    /// Where the view starts in the storage, in bytes.
    pub fn byte_offset(&self) -> u64 {
        self.1.byte_offset
    }

    /// The bytes of the elements, densely packed.
    pub fn size_bytes(&self) -> u64 {
        self.1.size_bytes().unwrap_or(0)
    }

    /// Another view of the same storage, `byte_offset` bytes behind the start of this one. Nothing is sent; the layout is
    /// checked when the view is used.
    #[must_use]
    pub fn view(&self, byte_offset: u64, dtype: DataType, shape: &[i64], strides: Option<&[i64]>) -> Self {
        let reference = TensorRef {
            storage: self.1.storage,
            byte_offset: self.1.byte_offset.saturating_add(byte_offset),
            shape: shape.to_vec(),
            strides: strides.map(<[i64]>::to_vec),
            dtype,
            device: self.1.device,
        };
        Self(self.0.clone(), reference)
    }

    /// Frees the storage now, and says whether it was there. Other views of it become invalid.
    pub fn free(self) -> Action<()> {
        self.0.free_in(&self.0.session)
    }

    /// What names this view in a request to `session`.
    pub(crate) fn reference_in(&self, session: &SharedSession) -> Result<TensorRef> {
        self.0.handle_in(session)?;
        Ok(self.1.clone())
    }
}

impl FromReply for RemoteTensor {
    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        match value {
            Value::Object(Reference::Tensor(tensor)) => Ok(Self(Owned::new(tensor.storage, session), tensor)),
            other => Err(unexpected("tensor", &other, session)),
        }
    }
}

impl IntoArg for &RemoteTensor {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let reference = self.reference_in(scope.session)?;
        scope.pins.push(self.0.pin());
        Ok(reference.into())
    }
}

/// Kept until the reply, and freed then if this was the last reference.
impl IntoArg for RemoteTensor {
    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        (&self).into_arg(scope)
    }
}

impl fmt::Debug for RemoteTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteTensor({} {:?} on {}, {})", self.1.dtype, self.1.shape, self.1.device, self.0.handle)
    }
}
