//! A function that can be called: its kind, its signature, the tensors that it borrows, and how it
//! is run. A panic in it becomes an error. `handler.rs` makes functions of closures.
//!
//! `object.rs` says why these files import each other.

use std::any::Any;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;

use crate::error::{Result, RpcError};
use crate::function::invocation::{Invocation, argument};
use crate::function::object::{LocalValue, Object};
use crate::panics::panic_error;
use crate::tensor::{Access, Storage};
use crate::trace::{self, TraceContext};
use crate::value::Value;

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
pub struct Function(Arc<Labelled>);

/// Content of a [`Function`]: the function itself, and what people call it.
#[derive(Clone)]
struct Labelled {
    inner: Arc<FunctionInner>,
    /// Name under which the function was registered, for errors.
    name: Option<Arc<str>>,
    /// Description for people.
    description: Option<Arc<str>>,
}

impl Function {
    pub(crate) fn from_parts(
        kind: FunctionKind,
        signature: Signature,
        access: Vec<Option<Access>>,
        body: Body,
    ) -> Self {
        Self::unlabelled(FunctionInner { kind, signature, access, exclusive: false, origin: None, body })
    }

    /// Wraps a function that borrows every tensor argument for writing. `origin` is the object that
    /// it was made from.
    pub(crate) fn exclusive(
        kind: FunctionKind,
        signature: Signature,
        origin: Option<Arc<dyn Any + Send + Sync>>,
        body: Body,
    ) -> Self {
        Self::unlabelled(FunctionInner { kind, signature, access: Vec::new(), exclusive: true, origin, body })
    }

    fn unlabelled(inner: FunctionInner) -> Self {
        Self(Arc::new(Labelled { inner: Arc::new(inner), name: None, description: None }))
    }

    /// Gives the function the name that errors call it by, unless it has one. A registry and a
    /// [`FunctionModule`](crate::FunctionModule) do so.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        if self.0.name.is_none() {
            Arc::make_mut(&mut self.0).name = Some(name.into());
        }
        self
    }

    /// Returns the name that errors call the function by.
    pub fn name(&self) -> Option<&str> {
        self.0.name.as_deref()
    }

    /// Returns the function with a description for people.
    #[must_use]
    pub fn described(mut self, description: impl Into<String>) -> Self {
        Arc::make_mut(&mut self.0).description = Some(description.into().into());
        self
    }

    /// Returns the description for people, if the function has one.
    pub fn description(&self) -> Option<&str> {
        self.0.description.as_deref()
    }

    /// Puts the argument, and the function if it has a name, in front of an error's message.
    pub(crate) fn argument_error(&self, index: usize, error: RpcError) -> RpcError {
        error.context(argument(index, self.name()))
    }

    /// Returns the kind of the function, which determines its thread.
    pub fn kind(&self) -> FunctionKind {
        self.0.inner.kind
    }

    /// Returns the types of the parameters and the return.
    pub fn signature(&self) -> &Signature {
        &self.0.inner.signature
    }

    /// Returns the object that the function was made from, if that is a `T`: bridges to foreign
    /// code use it to recognise their functions when they come back as arguments.
    pub fn origin<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.0.inner.origin.as_ref()?.downcast_ref()
    }

    /// Returns true if any parameter borrows a tensor.
    pub(crate) fn borrows_tensors(&self) -> bool {
        self.0.inner.exclusive || self.0.inner.access.iter().any(Option::is_some)
    }

    /// Returns the storages that the function borrows, with the index of their argument, in the
    /// order of the arguments.
    pub(crate) fn borrowed_args<'a>(&self, args: &'a [LocalValue]) -> Vec<(usize, &'a Arc<Storage>, Access)> {
        if self.0.inner.exclusive {
            return all_storages(args);
        }
        let borrowed = |(index, arg): (usize, &'a LocalValue)| match arg {
            Value::Object(Object::Tensor(tensor)) => {
                Some((index, tensor.storage(), self.0.inner.access.get(index).copied().flatten()?))
            }
            _ => None,
        };
        args.iter().enumerate().filter_map(borrowed).collect()
    }

    /// Runs the function, or starts its future. A panic becomes an error.
    pub(crate) fn start(&self, mut invocation: Invocation) -> Started {
        let trace = invocation.context.trace();
        invocation.function.clone_from(&self.0.name);
        let _served = trace::serve(trace);
        let outcome = catch_unwind(AssertUnwindSafe(|| match &self.0.inner.body {
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
        write!(f, "Function{}", self.0.inner.signature)
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
