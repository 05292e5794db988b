//! Objects of a session, which are named by handles: functions, modules, tensors, and the
//! application's own.
//!
//! This file and `context.rs` import each other: a function's arguments come with its context, and
//! a context finds and calls functions.

use std::any::Any;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;

use crate::dlpack::Device;
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::context::Context;
use crate::tensor::{Access, Borrow, Storage, Tensor};
use crate::trace::{self, TraceContext};
use crate::value::Value;

/// A value as functions at the origin see it: with the objects themselves in it.
pub type LocalValue = Value<Object>;

/// An object of a session.
#[derive(Clone)]
#[non_exhaustive]
pub enum Object {
    /// A function.
    Function(Function),
    /// A module.
    Module(Arc<dyn Module>),
    /// A tensor, or a view of one.
    Tensor(Tensor),
    /// An object of a type that the application defines.
    Opaque(Opaque),
}

impl Object {
    /// Returns the name of the object's type, as error messages use it.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::Function(_) => "function",
            Self::Module(_) => "module",
            Self::Tensor(_) => "tensor",
            Self::Opaque(opaque) => opaque.type_name,
        }
    }
}

impl fmt::Debug for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Object({})", self.type_name())
    }
}

/// An object of a type that only the application knows.
#[derive(Clone)]
pub struct Opaque {
    value: Arc<dyn Any + Send + Sync>,
    type_name: &'static str,
}

impl Opaque {
    /// Wraps `value`.
    pub fn new<T: Any + Send + Sync>(value: Arc<T>) -> Self {
        Self { value, type_name: std::any::type_name::<T>() }
    }

    /// Returns the value, if it is a `T`.
    pub fn downcast<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.value.clone().downcast().ok()
    }

    /// Returns the Rust name of the value's type.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({})", self.type_name)
    }
}

/// Kind of a function, which determines its thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionKind {
    /// On the thread of its lane. It may run for any time.
    Blocking,
    /// On the thread that reads requests. It promises not to block: all other requests on that
    /// connection wait for it.
    Inline,
    /// As a future, on the runtime that the session was given.
    Async,
}

/// Types of a function's parameters and return, for people and for `rpc.functions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// Types of the positional parameters.
    pub params: Vec<Cow<'static, str>>,
    /// Type of the return value.
    pub returns: Cow<'static, str>,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}) -> {}", self.params.join(", "), self.returns)
    }
}

/// A function that sessions can call. Cheap to clone.
#[derive(Clone)]
pub struct Function {
    inner: Arc<FunctionInner>,
    /// Name under which the function was registered, for errors.
    name: Option<Arc<str>>,
}

impl Function {
    pub(crate) fn from_parts(
        kind: FunctionKind,
        signature: Signature,
        access: Vec<Option<Access>>,
        body: Body,
    ) -> Self {
        Self {
            inner: Arc::new(FunctionInner { kind, signature, access, exclusive: false, origin: None, body }),
            name: None,
        }
    }

    /// Wraps a function that borrows every tensor argument for writing. `origin` is the object that
    /// it was made from.
    pub(crate) fn exclusive(
        kind: FunctionKind,
        signature: Signature,
        origin: Option<Arc<dyn Any + Send + Sync>>,
        body: Body,
    ) -> Self {
        Self {
            inner: Arc::new(FunctionInner { kind, signature, access: Vec::new(), exclusive: true, origin, body }),
            name: None,
        }
    }

    /// Gives the function the name that errors call it by, unless it has one. A registry and a
    /// [`FunctionModule`](crate::FunctionModule) do so.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name.get_or_insert_with(|| name.into());
        self
    }

    /// Returns the name that errors call the function by.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Puts the argument, and the function if it has a name, in front of an error's message.
    pub(crate) fn argument_error(&self, index: usize, error: RpcError) -> RpcError {
        error.context(argument(index, self.name()))
    }

    /// Returns the kind of the function, which determines its thread.
    pub fn kind(&self) -> FunctionKind {
        self.inner.kind
    }

    /// Returns the types of the parameters and the return.
    pub fn signature(&self) -> &Signature {
        &self.inner.signature
    }

    /// Returns the object that the function was made from, if that is a `T`: bridges to foreign
    /// code use it to recognise their functions when they come back as arguments.
    pub fn origin<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.inner.origin.as_ref()?.downcast_ref()
    }

    /// Returns true if any parameter borrows a tensor.
    pub(crate) fn borrows_tensors(&self) -> bool {
        self.inner.exclusive || self.inner.access.iter().any(Option::is_some)
    }

    /// Returns the storages that the function borrows, with the index of their argument, in the
    /// order of the arguments.
    pub(crate) fn borrowed_args<'a>(&self, args: &'a [LocalValue]) -> Vec<(usize, &'a Arc<Storage>, Access)> {
        if self.inner.exclusive {
            return all_storages(args);
        }
        let borrowed = |(index, arg): (usize, &'a LocalValue)| match arg {
            Value::Object(Object::Tensor(tensor)) => {
                Some((index, tensor.storage(), self.inner.access.get(index).copied().flatten()?))
            }
            _ => None,
        };
        args.iter().enumerate().filter_map(borrowed).collect()
    }

    /// Runs the function, or starts its future. A panic becomes an error.
    pub(crate) fn start(&self, mut invocation: Invocation) -> Started {
        let trace = invocation.context.trace();
        invocation.function.clone_from(&self.name);
        let _served = trace::serve(trace);
        let outcome = catch_unwind(AssertUnwindSafe(|| match &self.inner.body {
            Body::Direct(body) => Started::Done(body(&mut invocation)),
            Body::Async(body) => match body(&mut invocation) {
                Ok(future) => Started::Future(CatchPanic { future, trace }),
                Err(error) => Started::Done(Err(error)),
            },
        }));
        outcome.unwrap_or_else(|payload| Started::Done(Err(panic_error(&*payload))))
    }
}

/// Returns the storages of all tensors in `args`, in lists and maps too, each once and for writing.
fn all_storages(args: &[LocalValue]) -> Vec<(usize, &Arc<Storage>, Access)> {
    fn visit<'a>(value: &'a LocalValue, found: &mut impl FnMut(&'a Arc<Storage>)) {
        match value {
            Value::Object(Object::Tensor(tensor)) => found(tensor.storage()),
            Value::List(values) => values.iter().for_each(|value| visit(value, found)),
            Value::Map(pairs) => pairs.iter().for_each(|(key, value)| {
                visit(key, found);
                visit(value, found);
            }),
            _ => {}
        }
    }

    let (mut seen, mut storages) = (HashSet::new(), Vec::new());
    for (index, arg) in args.iter().enumerate() {
        visit(arg, &mut |storage| {
            if seen.insert(Arc::as_ptr(storage)) {
                storages.push((index, storage, Access::Write));
            }
        });
    }
    storages
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function{}", self.inner.signature)
    }
}

/// Future of an asynchronous function.
pub type BoxFuture = Pin<Box<dyn Future<Output = Result<LocalValue>> + Send>>;

/// Conversion of a call's arguments, followed by the call.
type Conversion<T> = Box<dyn Fn(&mut Invocation) -> Result<T> + Send + Sync>;

/// Body of a function, by the kind of its result.
pub(crate) enum Body {
    Direct(Conversion<LocalValue>),
    Async(Conversion<BoxFuture>),
}

struct FunctionInner {
    kind: FunctionKind,
    signature: Signature,
    /// Access of each positional parameter to a tensor. Further arguments are not borrowed.
    access: Vec<Option<Access>>,
    /// True if every tensor argument is borrowed for writing instead, each storage once.
    exclusive: bool,
    origin: Option<Arc<dyn Any + Send + Sync>>,
    body: Body,
}

/// Result of [`Function::start`].
pub(crate) enum Started {
    Done(Result<LocalValue>),
    Future(CatchPanic),
}

/// Future of a function, which turns panics into errors.
pub(crate) struct CatchPanic {
    future: BoxFuture,
    /// Trace context of the request that it serves.
    trace: Option<TraceContext>,
}

impl Future for CatchPanic {
    type Output = Result<LocalValue>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        let _served = trace::serve(self.trace);
        catch_unwind(AssertUnwindSafe(|| self.future.as_mut().poll(cx)))
            .unwrap_or_else(|payload| std::task::Poll::Ready(Err(panic_error(&*payload))))
    }
}

/// Returns the error for a panic on this thread, with its message and location.
pub(crate) fn panic_error(payload: &(dyn Any + Send)) -> RpcError {
    let message = payload
        .downcast_ref::<&str>()
        .map(|message| (*message).to_owned())
        .or_else(|| payload.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "the function panicked with a value that is no text".to_owned());
    let error = RpcError::new(ErrorKind::Panic, message).may_have_run(true);
    match crate::panics::take_backtrace() {
        Some(backtrace) => error.with_backtrace(backtrace),
        None => error,
    }
}

/// One argument of a call, before its conversion.
#[derive(Debug)]
pub struct Arg {
    pub(crate) value: LocalValue,
    /// Borrow taken before the call, as the parameter's
    /// [`FromArg::ACCESS`](crate::function::convert::FromArg::ACCESS) requires.
    pub(crate) borrow: Option<Borrow>,
}

/// One call of a function, as the function's conversion code sees it.
pub struct Invocation {
    pub(crate) args: Args,
    pub(crate) context: Context,
    /// Name of the function, for errors.
    pub(crate) function: Option<Arc<str>>,
}

/// Returns an argument's description for an error, such as "argument 0 of `add`".
pub(crate) fn argument(index: usize, function: Option<&str>) -> String {
    match function {
        Some(name) => format!("argument {index} of `{name}`"),
        None => format!("argument {index}"),
    }
}

/// The remaining arguments.
pub(crate) struct Args {
    pub(crate) values: std::vec::IntoIter<LocalValue>,
    /// Borrows taken for the call, by argument index, in ascending order.
    borrows: std::iter::Peekable<std::vec::IntoIter<(usize, Borrow)>>,
    pub(crate) next: usize,
}

impl Iterator for Args {
    type Item = LocalValue;

    fn next(&mut self) -> Option<LocalValue> {
        self.next += 1;
        self.values.next()
    }
}

impl Invocation {
    pub(crate) fn new(values: Vec<LocalValue>, borrows: Vec<(usize, Borrow)>, context: Context) -> Self {
        let args = Args { values: values.into_iter(), borrows: borrows.into_iter().peekable(), next: 0 };
        Self { args, context, function: None }
    }

    /// Takes all remaining arguments and borrows.
    pub(crate) fn take_all(&mut self) -> (Vec<LocalValue>, Vec<Borrow>) {
        let borrows = self.args.borrows.by_ref().map(|(_, borrow)| borrow).collect();
        (self.args.by_ref().collect(), borrows)
    }

    pub(crate) fn next_arg(&mut self) -> Option<Arg> {
        let index = self.args.next;
        let value = self.args.next()?;
        let borrow = self.args.borrows.next_if(|(at, _)| *at == index).map(|(_, borrow)| borrow);
        Some(Arg { value, borrow })
    }
}

/// A collection of functions, which are found by name.
pub trait Module: Send + Sync {
    /// Returns the concrete type, for loaders that recognise their own modules when these come back
    /// as arguments. `None` by default.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// Returns a new instance of the module, set up to run on `device`, for modules that are only
    /// code and have to be set up before they run. `None`, the default, means that this module
    /// serves every device. It may block.
    ///
    /// # Errors
    ///
    /// Errors of the module, and [`ErrorKind::DeviceUnavailable`].
    fn instance(&self, context: &Context, device: Device) -> Result<Option<Arc<dyn Module>>> {
        let _ = (context, device);
        Ok(None)
    }

    /// Returns the module's name.
    fn name(&self) -> &str;

    /// Returns the function `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    fn function(&self, name: &str) -> Result<Function>;

    /// Returns all functions, by name.
    fn functions(&self) -> Vec<(String, Signature)>;
}
