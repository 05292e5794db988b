//! Objects: what lives in a session and is named by handles.

use std::any::Any;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use crate::device::{Devices, Memory, Stream};
use crate::dlpack::{DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::loader::LoadRequest;
use crate::local::SessionLimits;
use crate::reply::Responder;
use crate::session::Lane;
use crate::tensor::{Access, Borrow, Layout, Storage, Tensor};
use crate::trace::{self, TraceContext};
use crate::value::Value;

/// A value as functions see it, at the origin: with the objects themselves in it.
pub type LocalValue = Value<Object>;

/// Something that lives in a session.
#[derive(Clone)]
#[non_exhaustive]
pub enum Object {
    /// A function.
    Function(Function),
    /// A module.
    Module(Arc<dyn Module>),
    /// A tensor, or a view of one.
    Tensor(Tensor),
    /// Anything that the application made.
    Opaque(Opaque),
}

impl Object {
    /// The name of the object's type, as error messages use it.
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

    /// The value, if it is a `T`.
    pub fn downcast<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.value.clone().downcast().ok()
    }

    /// The Rust name of the value's type.
    pub fn type_name(&self) -> &'static str {
        self.type_name
    }
}

impl fmt::Debug for Opaque {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opaque({})", self.type_name)
    }
}

/// Where a function runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FunctionKind {
    /// On the thread of its lane. It may take as long as it likes.
    Blocking,
    /// Where the request was read. It promises not to block: everything else on that connection waits for it.
    Inline,
    /// As a future, on the runtime that the session was given.
    Async,
}

/// What a function takes and returns, for people and for `rpc.functions`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature {
    /// The types of the positional parameters.
    pub params: Vec<Cow<'static, str>>,
    /// The type of the return.
    pub returns: Cow<'static, str>,
}

impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}) -> {}", self.params.join(", "), self.returns)
    }
}

/// A function that sessions can call. Cheap to clone.
#[derive(Clone)]
pub struct Function(Arc<FunctionInner>);

impl Function {
    pub(crate) fn from_parts(
        kind: FunctionKind,
        signature: Signature,
        access: Vec<Option<Access>>,
        body: Body,
    ) -> Self {
        Self(Arc::new(FunctionInner { kind, signature, access, exclusive: false, origin: None, body }))
    }

    /// A function that borrows every tensor argument for writing. `origin` is what it was made from.
    pub(crate) fn exclusive(
        kind: FunctionKind,
        signature: Signature,
        origin: Option<Arc<dyn Any + Send + Sync>>,
        body: Body,
    ) -> Self {
        Self(Arc::new(FunctionInner { kind, signature, access: Vec::new(), exclusive: true, origin, body }))
    }

    /// Where the function runs.
    pub fn kind(&self) -> FunctionKind {
        self.0.kind
    }

    /// What the function takes and returns.
    pub fn signature(&self) -> &Signature {
        &self.0.signature
    }

    /// What the function was made from, if that is a `T`: whoever wraps foreign functions finds them again when they come
    /// back as arguments.
    pub fn origin<T: Any + Send + Sync>(&self) -> Option<&T> {
        self.0.origin.as_ref()?.downcast_ref()
    }

    /// Whether any parameter borrows a tensor.
    pub(crate) fn borrows_tensors(&self) -> bool {
        self.0.exclusive || self.0.access.iter().any(Option::is_some)
    }

    /// The storages that the function borrows, with the arguments that they are from, in the order of these.
    pub(crate) fn borrowed_args<'a>(&self, args: &'a [LocalValue]) -> Vec<(usize, &'a Arc<Storage>, Access)> {
        if self.0.exclusive {
            return all_storages(args);
        }
        let borrowed = |(index, arg): (usize, &'a LocalValue)| match arg {
            Value::Object(Object::Tensor(tensor)) => {
                Some((index, tensor.storage(), self.0.access.get(index).copied().flatten()?))
            }
            _ => None,
        };
        args.iter().enumerate().filter_map(borrowed).collect()
    }

    /// Runs the function, or starts its future. A panic becomes an error.
    pub(crate) fn start(&self, mut invocation: Invocation) -> Started {
        let trace = invocation.context.trace;
        let _served = trace::serve(trace);
        let outcome = catch_unwind(AssertUnwindSafe(|| match &self.0.body {
            Body::Direct(body) => Started::Done(body(&mut invocation)),
            Body::Async(body) => match body(&mut invocation) {
                Ok(future) => Started::Future(CatchPanic { future, trace }),
                Err(error) => Started::Done(Err(error)),
            },
        }));
        outcome.unwrap_or_else(|payload| Started::Done(Err(panic_error(&*payload))))
    }
}

/// The storages of all tensors in `args`, in lists and maps too, each once and for writing.
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
        write!(f, "Function{}", self.0.signature)
    }
}

/// The future of an asynchronous function.
pub type BoxFuture = Pin<Box<dyn Future<Output = Result<LocalValue>> + Send>>;

/// Converts the arguments of a call, and goes on from there.
type Conversion<T> = Box<dyn Fn(&mut Invocation) -> Result<T> + Send + Sync>;

/// What a function does: at once, or as a future.
pub(crate) enum Body {
    Direct(Conversion<LocalValue>),
    Async(Conversion<BoxFuture>),
}

struct FunctionInner {
    kind: FunctionKind,
    signature: Signature,
    /// How each positional parameter uses a tensor. The rest are not borrowed.
    access: Vec<Option<Access>>,
    /// Every tensor argument is borrowed for writing instead, each storage once.
    exclusive: bool,
    origin: Option<Arc<dyn Any + Send + Sync>>,
    body: Body,
}

/// What [`Function::start`] leaves.
pub(crate) enum Started {
    Done(Result<LocalValue>),
    Future(CatchPanic),
}

/// A function's future, whose panics are errors.
pub(crate) struct CatchPanic {
    future: BoxFuture,
    /// Of the request that it serves.
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

/// The error of a panic on this thread, with its message and place.
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

/// One argument on its way into a function.
#[derive(Debug)]
pub struct Arg {
    pub(crate) value: LocalValue,
    /// Taken before the call, as the parameter's [`FromArg::ACCESS`](crate::function::convert::FromArg::ACCESS) asked.
    pub(crate) borrow: Option<Borrow>,
}

/// One call of a function, as the function's conversion code sees it.
pub struct Invocation {
    pub(crate) args: Args,
    pub(crate) context: Context,
}

/// The arguments that are left.
pub(crate) struct Args {
    pub(crate) values: std::vec::IntoIter<LocalValue>,
    /// The borrows taken for the call, by argument index, in ascending order.
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
        Self { args, context }
    }

    /// All arguments and borrows that are left.
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

/// What a function may ask of the session that it runs in. A parameter of this type takes no argument.
#[derive(Clone)]
pub struct Context {
    host: Arc<dyn Host>,
    lane: Lane,
    deadline: Option<Instant>,
    trace: Option<TraceContext>,
    responder: Option<Responder>,
}

/// The session, as its functions see it. Implemented by sessions.
pub trait Host: Send + Sync {
    /// The devices of the session.
    fn devices(&self) -> &Devices;

    /// The function registered under `name`.
    fn function(&self, name: &str) -> Option<Function>;

    /// All registered functions, by name.
    fn functions(&self) -> Vec<(String, Signature)>;

    /// Loads a module with the loader of that name, or else with the first that accepts the path.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if no loader takes it, and the loader's own.
    fn load_module(&self, loader: Option<&str>, request: &LoadRequest<'_>) -> Result<Arc<dyn Module>>;

    /// The session's folder, if it has one.
    fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>>;

    /// Something that the embedding program gave to the session, by type.
    fn extension(&self, type_id: std::any::TypeId) -> Option<Arc<dyn Any + Send + Sync>>;

    /// Allocates a tensor that counts against the session's memory.
    ///
    /// # Errors
    ///
    /// The device's, and a limit that is reached.
    fn allocate(&self, device: Device, dtype: DataType, shape: &[i64], scope: Option<&str>) -> Result<Tensor>;

    /// The stream of `device` for the work of `lane`: the one that was set for it, or else the default one.
    ///
    /// # Errors
    ///
    /// The device's.
    fn stream(&self, lane: Lane, device: Device) -> Result<Arc<dyn Stream>>;

    /// A tensor in memory that somebody else has allocated, which counts against the session's from now on.
    ///
    /// # Errors
    ///
    /// A limit that is reached, and a layout that the memory has no room for.
    fn adopt(&self, device: Device, memory: Box<dyn Memory>, layout: Layout<'_>) -> Result<Tensor>;

    /// What the session may hold and queue.
    fn limits(&self) -> &SessionLimits;

    /// Counts one thread that a function starts for itself, until the place is dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    fn reserve_thread(&self) -> Result<ThreadPlace>;

    /// What the session holds at present.
    fn usage(&self) -> Usage;
}

/// A thread that counts against the limits of its session, until this is dropped.
pub struct ThreadPlace(#[allow(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>);

impl ThreadPlace {
    /// A place that is given back when `held` is dropped.
    pub fn new(held: impl Any + Send + Sync) -> Self {
        Self(Box::new(held))
    }
}

impl std::fmt::Debug for ThreadPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ThreadPlace")
    }
}

/// What a session holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Live handles.
    pub handles: u64,
    /// Bytes of device memory, running calls' included.
    pub memory_bytes: u64,
}

/// The folder of a session, where files are exchanged and modules are loaded from.
pub trait WorkspaceFiles: Send + Sync {
    /// The real path of the regular file `path` of the workspace.
    ///
    /// # Errors
    ///
    /// A path that leaves the workspace, or that is no file.
    fn resolve(&self, path: &str) -> Result<PathBuf>;

    /// The thing itself, for functions that know its type.
    fn as_any(&self) -> &dyn Any;
}

impl Context {
    pub(crate) fn new(
        host: Arc<dyn Host>,
        lane: Lane,
        deadline: Option<Instant>,
        trace: Option<TraceContext>,
        responder: Option<Responder>,
    ) -> Self {
        Self { host, lane, deadline, trace, responder }
    }

    /// A context for work that goes on after the call has returned, such as that of a thread which it has started: it is of
    /// the same session, and has neither deadline nor caller.
    #[must_use]
    pub fn detached(&self) -> Self {
        Self { host: self.host.clone(), lane: self.lane, deadline: None, trace: None, responder: None }
    }

    /// Counts one thread that the function starts for itself, for work that outlives the call, against what the session may
    /// have. The thread keeps the place until it ends.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    pub fn reserve_thread(&self) -> Result<ThreadPlace> {
        self.host.reserve_thread()
    }

    /// What the session may hold and queue, for functions that start something outside of it on its behalf.
    pub fn limits(&self) -> &SessionLimits {
        self.host.limits()
    }

    /// The devices of the session.
    pub fn devices(&self) -> &Devices {
        self.host.devices()
    }

    /// Loads a module with the loader of that name, or else with the first that accepts the path. It may block.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if no loader takes it, and the loader's own.
    pub fn load_module(&self, path: &str, loader: Option<&str>) -> Result<Arc<dyn Module>> {
        self.host.load_module(loader, &LoadRequest { path, context: self })
    }

    /// The function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    pub fn function(&self, name: &str) -> Result<Function> {
        self.host.function(name).ok_or_else(|| RpcError::not_found(format!("no function is registered as '{name}'")))
    }

    /// All registered functions, by name.
    pub fn functions(&self) -> Vec<(String, Signature)> {
        self.host.functions()
    }

    /// The session's folder, if it has one.
    pub fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>> {
        self.host.workspace()
    }

    /// Something that the embedding program gave to the session, by type.
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.host.extension(std::any::TypeId::of::<T>())?.downcast().ok()
    }

    /// Allocates a zeroed, densely packed tensor that counts against the session's memory.
    ///
    /// # Errors
    ///
    /// The device's, and a limit that is reached.
    pub fn allocate(&self, device: Device, dtype: DataType, shape: &[i64]) -> Result<Tensor> {
        self.host.allocate(device, dtype, shape, None)
    }

    /// As [`allocate`](Self::allocate), in a memory scope of the device, such as `global`.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn allocate_in_scope(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
    ) -> Result<Tensor> {
        self.host.allocate(device, dtype, shape, scope)
    }

    /// The stream of `device` for the work of this call: the one that its lane has set, or else the device's default one.
    ///
    /// # Errors
    ///
    /// The device's.
    pub fn stream(&self, device: Device) -> Result<Arc<dyn Stream>> {
        self.host.stream(self.lane, device)
    }

    /// Makes a tensor of memory on `device` that somebody else has allocated, such as a library. It counts against the
    /// session's memory until it is dropped.
    ///
    /// # Errors
    ///
    /// A limit that is reached; [`ErrorKind::InvalidArgument`] for a layout that reaches beyond the memory.
    pub fn adopt(&self, device: Device, memory: Box<dyn Memory>, layout: Layout<'_>) -> Result<Tensor> {
        self.host.adopt(device, memory, layout)
    }

    /// What the session holds at present.
    pub fn usage(&self) -> Usage {
        self.host.usage()
    }

    /// The lane of the request.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// When the caller stops waiting.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The span that the function runs in: the caller's, or one that a session on the way has made of it, as a server does
    /// that exports spans.
    ///
    /// Requests that the function makes itself carry it already, see [`crate::trace`].
    pub fn trace(&self) -> Option<TraceContext> {
        self.trace
    }

    /// Whether both are of one session.
    pub(crate) fn is_of_the_session_of(&self, other: &Self) -> bool {
        Arc::as_ptr(&self.host).cast::<()>() == Arc::as_ptr(&other.host).cast::<()>()
    }

    /// Whether nobody waits for the result any more: cancelled, past the deadline, or the session is gone. A function
    /// that runs for long asks from time to time, and returns early.
    pub fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_over)
    }

    /// Calls `function` from inside a call, at once and on this thread: a nested call is not queued behind its caller,
    /// which would wait for ever.
    ///
    /// # Errors
    ///
    /// The function's; [`ErrorKind::Busy`] if it needs a tensor that is borrowed, by this call or another;
    /// [`ErrorKind::ApiMisuse`] if `function` is asynchronous: use [`call_async`](Self::call_async).
    pub fn call(&self, function: &Function, args: Vec<LocalValue>) -> Result<LocalValue> {
        match self.start_nested(function, args, Vec::new())? {
            Started::Done(outcome) => outcome,
            Started::Future(_) => Err(RpcError::new(
                ErrorKind::ApiMisuse,
                "an asynchronous function was called from a blocking one: use call_async",
            )),
        }
    }

    /// As [`call`](Self::call), for functions of any kind.
    ///
    /// # Errors
    ///
    /// The function's; [`ErrorKind::Busy`] if it needs a tensor that is borrowed.
    pub async fn call_async(&self, function: &Function, args: Vec<LocalValue>) -> Result<LocalValue> {
        match self.start_nested(function, args, Vec::new())? {
            Started::Done(outcome) => outcome,
            Started::Future(future) => future.await,
        }
    }

    /// Calls `function` at once, on this thread, and lends it the tensors that the caller has borrowed itself: `function`
    /// gets those of `held` that it needs, and the other borrows end before it starts. The caller must not touch any of
    /// these tensors from then on. An asynchronous function runs to its end on this thread.
    ///
    /// For bridges to foreign code, which borrow every tensor of a call; see [`Function::foreign`].
    ///
    /// # Errors
    ///
    /// As [`call_async`](Self::call_async).
    pub fn call_lending(&self, function: &Function, args: Vec<LocalValue>, held: Vec<Borrow>) -> Result<LocalValue> {
        match self.start_nested(function, args, held)? {
            Started::Done(outcome) => outcome,
            Started::Future(future) => crate::blocking::block_on(future)?,
        }
    }

    fn start_nested(&self, function: &Function, args: Vec<LocalValue>, mut held: Vec<Borrow>) -> Result<Started> {
        let mut borrows = Vec::new();
        for (index, storage, access) in function.borrowed_args(&args) {
            let at_hand = held.iter().position(|borrow| Arc::ptr_eq(borrow.storage(), storage));
            let borrow = match (at_hand, access) {
                (Some(place), Access::Read) => {
                    held[place].downgrade();
                    held[place].share()
                }
                (Some(place), Access::Write) => Some(held.swap_remove(place)).filter(|held| held.access() == access),
                // A reader does not queue behind writers that wait, perhaps for this very call.
                (None, Access::Read) => storage.try_read(),
                (None, Access::Write) => storage.try_borrow(access),
            };
            borrows.push((index, borrow.ok_or_else(|| busy(index))?));
        }
        drop(held);
        Ok(function.start(Invocation::new(args, borrows, self.clone())))
    }
}

/// The error of a nested call whose argument `index` is borrowed in a conflicting way: waiting might be for its own caller.
fn busy(index: usize) -> RpcError {
    RpcError::new(
        ErrorKind::Busy,
        format!(
            "the tensor in argument {index} is borrowed, and a nested call does not wait: one writer excludes others"
        ),
    )
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context").field("lane", &self.lane).field("deadline", &self.deadline).finish_non_exhaustive()
    }
}

/// Several functions under one roof, found by name.
pub trait Module: Send + Sync {
    /// For loaders that know their own modules again when these come back as arguments. None of them.
    fn as_any(&self) -> Option<&dyn Any> {
        None
    }

    /// A new instance of the module, set up to run on `device`, for modules that are only code and have to be set up before they
    /// run. `None`, the default: this one serves every device. It may block.
    ///
    /// # Errors
    ///
    /// The module's, and [`ErrorKind::DeviceUnavailable`].
    fn instance(&self, context: &Context, device: Device) -> Result<Option<Arc<dyn Module>>> {
        let _ = (context, device);
        Ok(None)
    }

    /// What the module calls itself.
    fn name(&self) -> &str;

    /// The function `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`].
    fn function(&self, name: &str) -> Result<Function>;

    /// All functions, by name.
    fn functions(&self) -> Vec<(String, Signature)>;
}
