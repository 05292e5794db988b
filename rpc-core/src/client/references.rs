//! References to objects of a session: each owns a handle, and frees its object when it is dropped.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::client::action::{Action, NamedResult, OnReply, OneRequest, PinnedReference, RequestPins, ResultPin};
use crate::client::promise::{Promise, drop_promise};
use crate::client::session::Session;
use crate::dlpack::{DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::convert::{ArgScope, FromReply, IntoArg, IntoArgs};
use crate::handle::Handle;
use crate::session::{Lane, Operation, Request, SharedSession, is_same, no_result, release};
use crate::value::{Reference, TensorRef, Value};

/// One handle and its session. The last reference frees the object.
pub(crate) struct Owned {
    session: SharedSession,
    handle: Handle,
    /// True once the object was freed explicitly, so that dropping has nothing left to do.
    freed: AtomicBool,
    /// Request that the object is the result of, if it may not be there yet.
    promise: Option<Box<Promise>>,
}

impl Owned {
    pub(crate) fn new(handle: Handle, session: &SharedSession) -> Arc<Self> {
        Arc::new(Self { session: session.clone(), handle, freed: AtomicBool::new(false), promise: None })
    }

    /// Creates the reference to a result that the session keeps.
    pub(crate) fn promised(handle: Handle, session: &SharedSession, promise: Promise) -> Arc<Self> {
        let (session, freed) = (session.clone(), AtomicBool::new(false));
        Arc::new(Self { session, handle, freed, promise: Some(Box::new(promise)) })
    }

    pub(crate) fn handle(&self) -> Handle {
        self.handle
    }

    pub(crate) fn session(&self) -> &SharedSession {
        &self.session
    }

    /// Returns the lane of a result that may not be there yet.
    pub(crate) fn lane(&self) -> Option<Lane> {
        self.promise.as_ref().map(|promise| promise.lane())
    }

    /// Returns the layout of a tensor that is being allocated.
    pub(crate) fn promised_tensor(&self) -> Option<&TensorRef> {
        self.promise.as_ref().and_then(|promise| promise.tensor.as_ref())
    }

    /// Returns the error of the request that the object was to be the result of, once it is known.
    pub(crate) fn promised_error(&self) -> Option<RpcError> {
        self.promise.as_ref().and_then(|promise| promise.error())
    }

    /// Makes the session send the request that the object is the result of soon.
    pub(crate) fn send_soon(&self) {
        if let Some(promise) = &self.promise {
            promise.send_soon();
        }
    }

    /// Returns the error to report for a request that names the object and has failed with `error`.
    /// A session that has refused a request does not know that its result was to be kept.
    pub(crate) fn explained(&self, error: RpcError) -> RpcError {
        match error.kind() {
            ErrorKind::InvalidHandle => self.absence().unwrap_or(error),
            _ => error,
        }
    }

    /// Returns the handle of a kept result in a request to `session`.
    pub(crate) fn kept_in(&self, session: &SharedSession) -> Result<Handle> {
        if is_same(&self.session, session) {
            Ok(self.handle)
        } else {
            Err(RpcError::new(ErrorKind::ApiMisuse, "the result belongs to another session: fetch it first"))
        }
    }

    /// Adds the pins of a request that names the object.
    pub(crate) fn pin_into(self: &Arc<Self>, pins: &mut Vec<PinnedReference>) {
        pins.push(self.pin());
        self.pin_result_into(pins);
    }

    /// Adds the pin of a result that may not be there yet, for a request that pins the object
    /// otherwise.
    pub(crate) fn pin_result_into(self: &Arc<Self>, pins: &mut Vec<PinnedReference>) {
        if self.promise.is_some() {
            pins.push(Arc::new(ResultPin(self.clone())));
        }
    }

    pub(crate) fn handle_in(&self, session: &SharedSession) -> Result<Handle> {
        if is_same(&self.session, session) {
            Ok(self.handle)
        } else {
            Err(RpcError::new(ErrorKind::InvalidHandle, "the object belongs to another session"))
        }
    }

    /// Frees the object now. If that is cancelled before it takes effect, dropping the reference
    /// frees it.
    pub(crate) fn free_in(self: &Arc<Self>, session: &SharedSession) -> Action<()> {
        let operation = self.handle_in(session).map(|handle| Operation::Free { handle });
        // The operation keeps the reference, as the one that it frees.
        OneRequest::new(session, operation).on_reply(self.clone()).into()
    }

    pub(crate) fn pin(self: &Arc<Self>) -> PinnedReference {
        self.clone()
    }
}

impl NamedResult for Owned {
    fn check_lane(&self, lane: Lane) -> Result<()> {
        self.promise.as_ref().map_or(Ok(()), |promise| promise.check_lane(lane))
    }

    fn absence(&self) -> Option<RpcError> {
        let promise = self.promise.as_ref()?;
        promise.error().map(|error| no_result(promise.name, &error))
    }
}

impl OnReply for Owned {
    fn succeeded(&self) {
        // The object is freed, so that dropping the reference does nothing.
        self.freed.store(true, Ordering::Relaxed);
    }

    fn failed(&self, error: RpcError) -> RpcError {
        self.explained(error)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        if !*self.freed.get_mut() {
            let release = Request::new(Operation::Release { handles: vec![self.handle] });
            self.session.submit(release).reply().detach();
        }
        if let Some(promise) = self.promise.take() {
            drop_promise(promise);
        }
    }
}

macro_rules! references {
    ($($(#[$doc:meta])* $name:ident, $variant:ident, $what:literal;)*) => {
        $(
            $(#[$doc])*
            #[derive(Clone)]
            pub struct $name(pub(crate) Arc<Owned>);

            impl $name {
                /// Returns the handle, still owned by this reference.
                pub fn handle(&self) -> Handle {
                    self.0.handle
                }

                /// Returns the session where the object lives.
                pub fn session(&self) -> Session {
                    Session::from(self.0.session.clone())
                }

                /// Frees the object now, and fails if it does not exist. Other clones of this
                /// reference become invalid.
                pub fn free(self) -> Action<()> {
                    self.0.free_in(&self.0.session)
                }
            }

            impl FromReply for $name {
                fn type_kind() -> Option<&'static str> {
                    Some($what)
                }

                fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
                    match value {
                        Value::Object(Reference::$variant(handle)) => Ok(Self(Owned::new(handle, session))),
                        other => Err(unexpected($what, &other, session)),
                    }
                }
            }

            impl IntoArg for &$name {
                fn type_kind() -> Option<&'static str> {
                    Some($what)
                }

                fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
                    let handle = self.0.handle_in(scope.session)?;
                    self.0.pin_into(&mut scope.pins);
                    Ok(Value::Object(Reference::$variant(handle)))
                }
            }

            /// Kept until the reply, and freed then if this was the last reference.
            impl IntoArg for $name {
                fn type_kind() -> Option<&'static str> {
                    Some($what)
                }

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
    /// A module of a session. Dropping the last clone frees it there; functions obtained from it
    /// stay.
    RemoteModule, Module, "module";
    /// An object of a type that the application defines, or a stream. Dropping the last clone frees
    /// it there.
    RemoteObject, Object, "object";
}

fn unexpected(expected: &str, value: &Value, session: &SharedSession) -> RpcError {
    release(session, value);
    RpcError::invalid_argument(format!("expected {expected}, got {}", value.type_name()))
}

impl RemoteFunction {
    /// Returns the reference without its type.
    pub(crate) fn into_pin(self) -> PinnedReference {
        self.0
    }

    /// Reverses [`into_pin`](Self::into_pin).
    pub(crate) fn from_pin(pin: PinnedReference) -> Result<Self> {
        pin.downcast::<Owned>().map(Self).map_err(|_| RpcError::internal("a reference of another type"))
    }

    /// Calls the function. Arguments are a tuple of values and references; the return is converted
    /// to `R`.
    ///
    /// # Errors
    ///
    /// Those of the function, with its message and backtrace; [`ErrorKind::InvalidArgument`] if
    /// arguments or return do not fit; and errors of the session.
    pub fn call<R: FromReply>(&self, args: impl IntoArgs) -> Action<R> {
        self.session().call_func(self, args)
    }
}

impl RemoteModule {
    /// Looks up the function `name` of the module.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    pub fn function(&self, name: &str) -> Action<RemoteFunction> {
        let operation = Operation::ModuleFunction { module: self.0.handle, name: name.to_owned() };
        let mut others = Vec::new();
        self.0.pin_into(&mut others);
        let pins = RequestPins { function: None, others };
        OneRequest::new(&self.0.session, Ok(operation)).pinned(pins).into()
    }
}

/// A [`RemoteFunction`] with the types of its arguments and return.
pub struct TypedFunction<A, R> {
    function: RemoteFunction,
    types: PhantomData<fn(A) -> R>,
}

impl<A, R> TypedFunction<A, R> {
    /// Reverses [`RemoteFunction::into_pin`].
    pub(crate) fn from_pin(pin: PinnedReference) -> Result<Self> {
        Ok(Self { function: RemoteFunction::from_pin(pin)?, types: PhantomData })
    }
}

impl<A: IntoArgs, R: FromReply> TypedFunction<A, R> {
    /// Calls the function, like [`RemoteFunction::call`].
    pub fn call(&self, args: A) -> Action<R> {
        self.function.call(args)
    }

    /// Returns the function without its types.
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

/// A tensor of a session, or a view of one. Views share the storage; dropping the last of them
/// frees it.
#[derive(Clone)]
pub struct RemoteTensor(pub(crate) Arc<Owned>, TensorRef);

impl RemoteTensor {
    /// Returns the tensor that is, or will be, under the handle of `owned`.
    pub(crate) fn of_layout(owned: Arc<Owned>, layout: TensorRef) -> Self {
        Self(owned, layout)
    }

    /// Returns the handle of the storage, still owned by this reference.
    pub fn handle(&self) -> Handle {
        self.0.handle
    }

    /// Returns the session where the tensor lives.
    pub fn session(&self) -> Session {
        Session::from(self.0.session.clone())
    }

    /// Returns the dimensions.
    pub fn shape(&self) -> &[i64] {
        &self.1.shape
    }

    /// Returns the strides in elements, or `None` if densely packed.
    pub fn strides(&self) -> Option<&[i64]> {
        self.1.strides.as_deref()
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DataType {
        self.1.dtype
    }

    /// Returns the device of the tensor.
    pub fn device(&self) -> Device {
        self.1.device
    }

    /// Returns the start of the view in the storage, in bytes.
    pub fn byte_offset(&self) -> u64 {
        self.1.byte_offset
    }

    /// Returns the size in bytes of the elements, densely packed.
    pub fn size_bytes(&self) -> u64 {
        self.1.size_bytes().unwrap_or(0)
    }

    /// Returns another view of the same storage, `byte_offset` bytes behind the start of this one.
    /// Nothing is sent; the layout is checked when the view is used.
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

    /// Frees the storage now, and fails if it does not exist. Other views of it become invalid.
    pub fn free(self) -> Action<()> {
        self.0.free_in(&self.0.session)
    }

    /// Returns the reference to this view in a request to `session`.
    pub(crate) fn reference_in(&self, session: &SharedSession) -> Result<TensorRef> {
        self.0.handle_in(session)?;
        Ok(self.1.clone())
    }
}

impl FromReply for RemoteTensor {
    fn type_kind() -> Option<&'static str> {
        Some("tensor")
    }

    fn from_reply(value: Value, session: &SharedSession) -> Result<Self> {
        match value {
            Value::Object(Reference::Tensor(tensor)) => Ok(Self(Owned::new(tensor.storage, session), *tensor)),
            other => Err(unexpected("tensor", &other, session)),
        }
    }
}

impl IntoArg for &RemoteTensor {
    fn type_kind() -> Option<&'static str> {
        Some("tensor")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        let reference = self.reference_in(scope.session)?;
        self.0.pin_into(&mut scope.pins);
        Ok(reference.into())
    }
}

/// Kept until the reply, and freed then if this was the last reference.
impl IntoArg for RemoteTensor {
    fn type_kind() -> Option<&'static str> {
        Some("tensor")
    }

    fn into_arg(self, scope: &mut ArgScope<'_>) -> Result<Value> {
        (&self).into_arg(scope)
    }
}

impl fmt::Debug for RemoteTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RemoteTensor({} {:?} on {}, {})", self.1.dtype, self.1.shape, self.1.device, self.0.handle)
    }
}
