//! The context of a call: everything that a running function may request from its session
//! ([`Context`]), and the session's side of it ([`Host`]).
//!
//! `object.rs` says why these files import each other.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::Mutex;

use crate::access_control::{AccessControl, Permission};
use crate::device::{Devices, Memory, Stream};
use crate::dlpack::{DataType, Device, DeviceType};
use crate::error::{ErrorKind, Result, RpcError};
use crate::function::function::{Function, Signature, Started};
use crate::function::invocation::Invocation;
use crate::function::object::{LocalValue, Module};
use crate::limits::{MemoryLease, OpenFileLease, SessionLimits, StagingLease};
use crate::reply::Responder;
use crate::session::Lane;
use crate::tensor::{Access, Borrow, Layout, Tensor};
use crate::trace::TraceContext;

/// Context of a call, with access to its session. A parameter of this type takes no argument.
#[derive(Clone)]
pub struct Context {
    host: Arc<dyn Host>,
    lane: Lane,
    deadline: Option<Instant>,
    trace: Option<TraceContext>,
    responder: Option<Responder>,
    /// Device of the work, if its owner has chosen one.
    device: Option<Device>,
    /// Record of the devices that functions use, if an owner keeps one.
    used: Option<Arc<UsedDevices>>,
}

/// Record of the devices on which functions have memory or submit work, as far as they get those
/// from a [`Context`] that [records](Context::recording_devices) it. Host memory is not among them.
#[derive(Debug, Default)]
pub struct UsedDevices(Mutex<Vec<Device>>);

impl UsedDevices {
    /// Adds a device, unless it is there or is the host.
    pub fn add(&self, device: Device) {
        let mut devices = self.0.lock();
        if device.kind != DeviceType::CPU && !devices.contains(&device) {
            devices.push(device);
        }
    }

    /// Removes a device, until it is used again.
    pub fn remove(&self, device: Device) {
        self.0.lock().retain(|other| *other != device);
    }

    /// Returns the devices, in the order of their first use.
    pub fn all(&self) -> Vec<Device> {
        self.0.lock().clone()
    }
}

/// The session as its functions see it. Implemented by sessions.
pub trait Host: Send + Sync {
    /// Returns the devices of the session.
    fn devices(&self) -> &Devices;

    /// Returns the rights of the session's client; `None` for all.
    fn access_control(&self) -> Option<&Arc<dyn AccessControl>>;

    /// Returns the function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`], and [`ErrorKind::Refused`] if the client may not call it.
    fn function(&self, name: &str) -> Result<Function>;

    /// Returns the registered functions that the client may call, by name.
    fn functions(&self) -> Vec<(String, Signature)>;

    /// Loads a module with the loader of that name, or else with the first that accepts the path.
    /// `context` is that of the request.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if no loader accepts it, [`ErrorKind::Refused`] if the client may
    /// load none, and errors of the loader.
    fn load_module(&self, loader: Option<&str>, path: &str, context: &Context) -> Result<Arc<dyn Module>>;

    /// Returns the session's folder, if it has one.
    fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>>;

    /// Returns a value that the embedding program gave to the session, by its type.
    fn extension(&self, type_id: std::any::TypeId) -> Option<Arc<dyn Any + Send + Sync>>;

    /// Allocates a tensor that counts against the session's memory.
    ///
    /// # Errors
    ///
    /// Errors of the device, and a limit that is reached.
    fn allocate(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
        alignment: u64,
    ) -> Result<Tensor>;

    /// Returns the stream of `device` for the work of `lane`: the one that was set for it, or else
    /// the default one.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    fn stream(&self, lane: Lane, device: Device) -> Result<Arc<dyn Stream>>;

    /// Creates a tensor in memory that other code has allocated. It counts against the session's
    /// memory from now on.
    ///
    /// # Errors
    ///
    /// A limit that is reached, and a layout that does not fit the memory.
    fn adopt(&self, device: Device, memory: Box<dyn Memory>, layout: Layout<'_>) -> Result<Tensor>;

    /// Counts bytes that a function keeps, beside tensors, against the session's memory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    fn reserve_memory(&self, bytes: u64) -> Result<MemoryLease>;

    /// Counts bytes of data on their way against the session's staging memory. May wait.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    fn stage(&self, bytes: u64) -> Result<StagingLease<'_>>;

    /// Counts descriptors that a function is about to open against the session's open files.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    fn reserve_open_files(&self, count: u64) -> Result<OpenFileLease>;

    /// Returns the limit of the session's open files.
    fn max_open_files(&self) -> u64;

    /// Returns the session's limits.
    fn limits(&self) -> &SessionLimits;

    /// Counts one thread that a function starts for itself, until the returned value is dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    fn reserve_thread(&self) -> Result<ThreadPermit>;

    /// Returns the session's current use of handles and memory.
    fn usage(&self) -> Usage;

    /// Returns true once the session has ended. Its objects are freed after that.
    fn has_ended(&self) -> bool;
}

/// A thread that counts against the limits of its session until this value is dropped.
pub struct ThreadPermit(#[allow(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>);

impl ThreadPermit {
    /// Wraps `held`, whose drop ends the count.
    pub fn new(held: impl Any + Send + Sync) -> Self {
        Self(Box::new(held))
    }
}

impl std::fmt::Debug for ThreadPermit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ThreadPermit")
    }
}

/// Use of resources by a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Usage {
    /// Number of live handles.
    pub handles: u64,
    /// Bytes of device memory, including that of running calls.
    pub memory_bytes: u64,
}

/// Folder of a session, for file transfers and for loading modules.
pub trait WorkspaceFiles: Send + Sync {
    /// Returns the real path of the regular file `path` in the workspace.
    ///
    /// # Errors
    ///
    /// A path that leaves the workspace, or that is not a file.
    fn resolve(&self, path: &str) -> Result<PathBuf>;

    /// Returns the concrete type, for functions that know it.
    fn as_any(&self) -> &dyn Any;
}

/// Probe of a session's end. Does not keep the session alive.
#[derive(Clone)]
pub struct EndProbe(Weak<dyn Host>);

impl EndProbe {
    /// Returns true once the session has ended.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.0.upgrade().is_none_or(|session| session.has_ended())
    }
}

impl std::fmt::Debug for EndProbe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EndProbe").field("has_ended", &self.has_ended()).finish()
    }
}

impl Context {
    pub(crate) fn new(
        host: Arc<dyn Host>,
        lane: Lane,
        deadline: Option<Instant>,
        trace: Option<TraceContext>,
        responder: Option<Responder>,
    ) -> Self {
        Self { host, lane, deadline, trace, responder, device: None, used: None }
    }

    /// Returns a context for work that continues after the call has returned, such as that of a
    /// thread that it has started. It belongs to the same session, and has neither deadline nor
    /// caller.
    #[must_use]
    pub fn detached(&self) -> Self {
        let Self { host, lane, device, used, .. } = self;
        let (host, used) = (host.clone(), used.clone());
        Self { host, lane: *lane, deadline: None, trace: None, responder: None, device: *device, used }
    }

    /// Returns this context for work on `device`: a module that is loaded with it is loaded there,
    /// if its loader has a choice.
    #[must_use]
    pub fn on_device(&self, device: Device) -> Self {
        Self { device: Some(device), ..self.clone() }
    }

    /// Returns this context with a record of the devices that functions use by it: those on which
    /// they allocate or adopt memory, and whose streams they request. Its owner can so wait for
    /// them.
    #[must_use]
    pub fn recording_devices(&self, used: Arc<UsedDevices>) -> Self {
        Self { used: Some(used), ..self.clone() }
    }

    /// Adds a device to the record, if there is one and the device could be used.
    fn record<T>(&self, device: Device, outcome: Result<T>) -> Result<T> {
        if let (Some(used), Ok(_)) = (&self.used, &outcome) {
            used.add(device);
        }
        outcome
    }

    /// Returns the device of the work, if its owner has chosen one by
    /// [`on_device`](Self::on_device).
    pub fn chosen_device(&self) -> Option<Device> {
        self.device
    }

    /// Counts one thread that the function starts for itself, for work that outlives the call,
    /// against the session's limit. The thread keeps the returned value until it ends. The last
    /// thread that the session may have is left for blocking functions.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    pub fn reserve_thread(&self) -> Result<ThreadPermit> {
        self.host.reserve_thread()
    }

    /// Counts bytes that the function keeps for its caller beyond the call, and that are in no
    /// tensor, against the session's `max_memory`, until the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`], naming the limit that was reached.
    pub fn reserve_memory(&self, bytes: u64) -> Result<MemoryLease> {
        self.host.reserve_memory(bytes)
    }

    /// Counts bytes that the function holds while it runs, such as those of its result, against the
    /// session's [`max_queued_bytes`](SessionLimits::max_queued_bytes), until the lease is dropped.
    /// Waits for its turn where the session, or all sessions together, have used up their limits
    /// ([`MemoryQuota::stage`](crate::limits::MemoryQuota::stage)). A function may have one such
    /// lease at a time, and calls no other function with it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`]: `bytes` alone are more than the session's limit.
    /// [`ErrorKind::Cancelled`]: no caller waits for the function any more when its turn has come.
    pub fn stage(&self, bytes: u64) -> Result<StagingLease<'_>> {
        let staged = self.host.stage(bytes)?;
        if self.is_cancelled() {
            return Err(RpcError::new(ErrorKind::Cancelled, "no caller waits for the result any more"));
        }
        Ok(staged)
    }

    /// Counts files, sockets and other descriptors that the function is about to open, and keeps
    /// open beyond the call, against the session's
    /// [`open_files`](crate::LocalSessionBuilder::open_files), until the lease is dropped.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`], naming the limit that was reached.
    pub fn reserve_open_files(&self, count: u64) -> Result<OpenFileLease> {
        self.host.reserve_open_files(count)
    }

    /// Returns the limit of [`reserve_open_files`](Self::reserve_open_files), for functions that
    /// start processes on the session's behalf.
    #[must_use]
    pub fn max_open_files(&self) -> u64 {
        self.host.max_open_files()
    }

    /// Returns the session's limits, for functions that start work outside of it on its behalf.
    pub fn limits(&self) -> &SessionLimits {
        self.host.limits()
    }

    /// Returns the devices of the session.
    pub fn devices(&self) -> &Devices {
        self.host.devices()
    }

    /// Returns the rights of the session's client. `None` if it may do everything that the session
    /// offers.
    pub fn access_control(&self) -> Option<&Arc<dyn AccessControl>> {
        self.host.access_control()
    }

    /// Checks that the session's client has a permission.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`], with the reason.
    pub fn authorize(&self, permission: &Permission<'_>) -> Result<()> {
        self.access_control().map_or(Ok(()), |access| access.check(permission))
    }

    /// Loads a module with the loader of that name, or else with the first that accepts the path.
    /// It may block.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`] if no loader accepts it, [`ErrorKind::Refused`] if the session's
    /// client may load none, and errors of the loader.
    pub fn load_module(&self, path: &str, loader: Option<&str>) -> Result<Arc<dyn Module>> {
        self.host.load_module(loader, path, self)
    }

    /// Returns the function registered under `name`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::NotFound`], and [`ErrorKind::Refused`] if the session's client may not call it.
    pub fn function(&self, name: &str) -> Result<Function> {
        self.host.function(name)
    }

    /// Returns the registered functions that the session's client may call, by name.
    pub fn functions(&self) -> Vec<(String, Signature)> {
        self.host.functions()
    }

    /// Returns the session's folder, if it has one.
    pub fn workspace(&self) -> Option<&Arc<dyn WorkspaceFiles>> {
        self.host.workspace()
    }

    /// Returns a value that the embedding program gave to the session, by its type.
    pub fn extension<T: Any + Send + Sync>(&self) -> Option<Arc<T>> {
        self.host.extension(std::any::TypeId::of::<T>())?.downcast().ok()
    }

    /// Allocates a zeroed, densely packed tensor that counts against the session's memory.
    ///
    /// # Errors
    ///
    /// Errors of the device, and a limit that is reached.
    pub fn allocate(&self, device: Device, dtype: DataType, shape: &[i64]) -> Result<Tensor> {
        self.allocate_in_scope(device, dtype, shape, None)
    }

    /// Allocates like [`allocate`](Self::allocate), in a memory scope of the device, such as
    /// `global`.
    ///
    /// # Errors
    ///
    /// As [`allocate`](Self::allocate).
    pub fn allocate_in_scope(
        &self,
        device: Device,
        dtype: DataType,
        shape: &[i64],
        scope: Option<&str>,
    ) -> Result<Tensor> {
        self.record(device, self.host.allocate(device, dtype, shape, scope, 0))
    }

    /// Returns the stream of `device` for the work of this call: the one that its lane has set, or
    /// else the device's default one.
    ///
    /// # Errors
    ///
    /// Errors of the device.
    pub fn stream(&self, device: Device) -> Result<Arc<dyn Stream>> {
        self.record(device, self.host.stream(self.lane, device))
    }

    /// Creates a tensor in memory on `device` that other code, such as a library, has allocated. It
    /// counts against the session's memory until it is dropped.
    ///
    /// # Errors
    ///
    /// A limit that is reached; [`ErrorKind::InvalidArgument`] for a layout that reaches beyond the
    /// memory.
    pub fn adopt(&self, device: Device, memory: Box<dyn Memory>, layout: Layout<'_>) -> Result<Tensor> {
        self.record(device, self.host.adopt(device, memory, layout))
    }

    /// Returns the session's current use of handles and memory.
    pub fn usage(&self) -> Usage {
        self.host.usage()
    }

    /// Returns the lane of the request.
    pub fn lane(&self) -> Lane {
        self.lane
    }

    /// Returns the time at which the caller stops waiting.
    pub fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Returns the span that the function runs in: the caller's, or one derived from it by a
    /// session on the way, such as a server that exports spans.
    ///
    /// Requests that the function makes itself carry it already, see [`crate::trace`].
    pub fn trace(&self) -> Option<TraceContext> {
        self.trace
    }

    /// Returns true if both contexts belong to the same session.
    pub(crate) fn is_of_the_session_of(&self, other: &Self) -> bool {
        Arc::as_ptr(&self.host).cast::<()>() == Arc::as_ptr(&other.host).cast::<()>()
    }

    /// Returns a probe of the session's end, for objects that outlive the call. An object that is
    /// dropped can so tell if its client has freed it, or the session has ended.
    #[must_use]
    pub fn end_probe(&self) -> EndProbe {
        EndProbe(Arc::downgrade(&self.host))
    }

    /// Returns true if the result is no longer needed: the call was cancelled, its deadline has
    /// passed, or the session has ended. A function that runs for long checks this from time to
    /// time, and returns early.
    pub fn is_cancelled(&self) -> bool {
        self.responder.as_ref().is_some_and(Responder::is_over)
    }

    /// Calls `function` from inside a call, at once and on this thread: a nested call is not queued
    /// behind its caller, where it would wait for ever.
    ///
    /// # Errors
    ///
    /// Those of the function; [`ErrorKind::Busy`] if it needs a tensor that is borrowed, by this
    /// call or another; [`ErrorKind::ApiMisuse`] if `function` is asynchronous: use
    /// [`call_async`](Self::call_async).
    pub fn call(&self, function: &Function, args: Vec<LocalValue>) -> Result<LocalValue> {
        match self.start_nested(function, args, Vec::new())? {
            Started::Done(outcome) => outcome,
            Started::Future(_) => Err(RpcError::new(
                ErrorKind::ApiMisuse,
                "an asynchronous function was called from a blocking one: use call_async",
            )),
        }
    }

    /// Calls a function like [`call`](Self::call), for functions of any kind.
    ///
    /// # Errors
    ///
    /// Those of the function; [`ErrorKind::Busy`] if it needs a tensor that is borrowed.
    pub async fn call_async(&self, function: &Function, args: Vec<LocalValue>) -> Result<LocalValue> {
        match self.start_nested(function, args, Vec::new())? {
            Started::Done(outcome) => outcome,
            Started::Future(future) => future.await,
        }
    }

    /// Calls `function` at once, on this thread, and lends it the tensors that the caller has
    /// borrowed itself: `function` gets those of `held` that it needs, and the other borrows end
    /// before it starts. The caller must not touch any of these tensors from then on. An
    /// asynchronous function runs to its end on this thread.
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
                (Some(at), Access::Read) => {
                    held[at].downgrade();
                    held[at].share()
                }
                (Some(at), Access::Write) => Some(held.swap_remove(at)).filter(|held| held.access() == access),
                // A reader does not queue behind waiting writers, which may wait for this very
                // call.
                (None, Access::Read) => storage.try_read(),
                (None, Access::Write) => storage.try_borrow(access),
            };
            borrows.push((index, borrow.ok_or_else(|| busy(index))?));
        }
        drop(held);
        Ok(function.start(Invocation::new(args, borrows, self.clone())))
    }
}

/// Error of a nested call whose argument `index` is borrowed in a conflicting way. Waiting might be
/// for its own caller.
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
