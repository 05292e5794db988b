//! The context of a call: everything that a running function may ask of its session ([`Context`]), and what a session
//! provides for that ([`Host`]).
//!
//! This file and `object.rs` import each other: a function's arguments come with its context, and a context finds and calls
//! functions.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use crate::device::{Devices, Memory, Stream};
use crate::dlpack::{DataType, Device};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::object::{Function, Invocation, LocalValue, Module, Signature, Started};
use crate::limits::SessionLimits;
use crate::reply::Responder;
use crate::session::Lane;
use crate::tensor::{Access, Borrow, Layout, Tensor};
use crate::trace::TraceContext;

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

    /// Loads a module with the loader of that name, or else with the first that accepts the path. `context` is that of the
    /// request.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if no loader takes it, and the loader's own.
    fn load_module(&self, loader: Option<&str>, path: &str, context: &Context) -> Result<Arc<dyn Module>>;

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
        self.host.load_module(loader, path, self)
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
