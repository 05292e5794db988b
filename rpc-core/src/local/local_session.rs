//! A local session and its builder. The session ends when its last clone is dropped.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::LocalInner;
use super::deadlines::Deadlines;
use super::device_gate::{DeviceGate, SessionGate};
use super::lanes::{Backlog, Capacity, Lanes};
use super::spawner::Spawner;
use super::sync;
use super::thread_quota::ThreadQuota;
use super::threads::Threads;
use crate::access_control::AccessControl;
use crate::device::Devices;
use crate::error::{ErrorKind, RpcError};
use crate::function::context::{Host, Usage, WorkspaceFiles};
use crate::function::registry::Registry;
use crate::handle::{HandleQuota, HandleTable};
use crate::limits::{OpenFileQuota, SessionLimits};
use crate::memory_quota::MemoryQuota;
use crate::reply::Submission;
use crate::session::{InPlaceWrite, Lane, Operation, Request, RpcSession, SharedSession};
use crate::value::{TensorRef, Value};

/// This process's functions and devices as a session. Cheap to clone; clones are the same session.
///
/// Dropping the last clone ends the session and frees all that it held. Objects that a running
/// function uses stay until it returns.
#[derive(Clone)]
pub struct LocalSession(Arc<EndOnDrop>);

/// Ends the session when the last [`LocalSession`] is dropped. Running jobs hold only the inner
/// part.
struct EndOnDrop(Arc<LocalInner>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end(RpcError::new(ErrorKind::Closed, "the session was dropped"));
    }
}

impl LocalSession {
    /// Returns the part that running jobs hold.
    #[cfg(test)]
    pub(super) fn local_inner(&self) -> &Arc<LocalInner> {
        &self.0.0
    }

    /// Creates a session with the functions of `registry`, the device `cpu`, and default limits.
    pub fn new(registry: Registry) -> Self {
        Self::builder(registry).build()
    }

    /// Returns a builder for a session with the functions of `registry`.
    pub fn builder(registry: Registry) -> LocalSessionBuilder {
        LocalSessionBuilder::new(registry)
    }

    /// Ends the session now: requests that have not begun fail with `error`, and all objects are
    /// freed. Callers of a running function continue to wait for it.
    pub fn close(&self, error: RpcError) {
        self.0.0.end(error);
    }

    /// Returns the session's current use of handles and memory.
    pub fn usage(&self) -> Usage {
        self.0.0.usage()
    }

    /// Returns the numbers and sizes of the requests that are not complete.
    pub fn backlog(&self) -> Backlog {
        self.0.0.lanes.lock().backlog()
    }
}

impl fmt::Debug for LocalSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LocalSession").field(&self.usage()).finish()
    }
}

impl RpcSession for LocalSession {
    fn submit(&self, request: Request) -> Submission {
        self.0.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.0)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn into_shared(self) -> SharedSession {
        self.0
    }
}

impl RpcSession for EndOnDrop {
    fn submit(&self, request: Request) -> Submission {
        match request.operation {
            Operation::Release { handles } => {
                self.0.release(handles);
                Submission::ready(Ok(Value::Null))
            }
            Operation::Shutdown => self.0.shut_down(),
            _ => self.0.submit(request),
        }
    }

    fn is_local(&self) -> bool {
        true
    }

    fn keeps_results(&self) -> bool {
        true
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.0.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        let (submission, responder) = self.0.pending();
        responder.admit();
        self.0.closing.lock().watchers.push(responder);
        // `end` sets the flag first and takes the watchers then, so that one of the two sees the
        // other.
        if self.0.gone.load(Ordering::SeqCst)
            && let Some(error) = self.0.lanes.lock().ended.clone()
        {
            let watchers = std::mem::take(&mut self.0.closing.lock().watchers);
            for watcher in watchers {
                watcher.complete(Err(error.clone()));
            }
        }
        submission
    }
}

/// Builder of a [`LocalSession`].
pub struct LocalSessionBuilder {
    registry: Registry,
    access: Option<Arc<dyn AccessControl>>,
    devices: Devices,
    limits: SessionLimits,
    total_memory: Option<Arc<MemoryQuota>>,
    total_threads: Option<Arc<ThreadQuota>>,
    total_handles: Option<Arc<HandleQuota>>,
    open_files: Option<OpenFileQuota>,
    workspace: Option<Arc<dyn WorkspaceFiles>>,
    extensions: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    spawner: Option<Arc<dyn Spawner>>,
    gate: Option<Arc<dyn DeviceGate>>,
    seed: Option<u64>,
}

impl LocalSessionBuilder {
    /// Creates a builder for a session with the functions of `registry`.
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            registry,
            access: None,
            devices: Devices::new(),
            limits: SessionLimits::default(),
            total_memory: None,
            total_threads: None,
            total_handles: None,
            open_files: None,
            workspace: None,
            extensions: HashMap::new(),
            spawner: None,
            gate: None,
            seed: None,
        }
    }

    /// Sets the devices of the session; only `cpu` by default.
    #[must_use]
    pub fn devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// Sets the rights of the session's client. By default it may do everything that the session
    /// offers.
    #[must_use]
    pub fn access_control(mut self, access: Arc<dyn AccessControl>) -> Self {
        self.access = Some(access);
        self
    }

    /// Sets the session's limits.
    #[must_use]
    pub fn limits(mut self, limits: SessionLimits) -> Self {
        self.limits = limits;
        self
    }

    /// Sets a limit on memory that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_memory(mut self, quota: Arc<MemoryQuota>) -> Self {
        self.total_memory = Some(quota);
        self
    }

    /// Sets a limit on threads that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_threads(mut self, quota: Arc<ThreadQuota>) -> Self {
        self.total_threads = Some(quota);
        self
    }

    /// Sets a limit on objects that several sessions share, besides the session's own.
    #[must_use]
    pub fn total_handles(mut self, quota: Arc<HandleQuota>) -> Self {
        self.total_handles = Some(quota);
        self
    }

    /// Sets the limit on the files, sockets and other descriptors that functions
    /// [keep open](crate::Context::reserve_open_files) for the session; no limit by default.
    #[must_use]
    pub fn open_files(mut self, quota: OpenFileQuota) -> Self {
        self.open_files = Some(quota);
        self
    }

    /// Sets the session's folder; none by default.
    #[must_use]
    pub fn workspace(mut self, workspace: Arc<dyn WorkspaceFiles>) -> Self {
        self.workspace = Some(workspace);
        self
    }

    /// Adds a value that functions find by its type
    /// ([`Context::extension`](crate::Context::extension)).
    #[must_use]
    pub fn extension<T: Any + Send + Sync>(mut self, extension: Arc<T>) -> Self {
        self.extensions.insert(TypeId::of::<T>(), extension);
        self
    }

    /// Sets the executor for the futures of asynchronous functions. By default each occupies a
    /// thread while it runs, as blocking functions do.
    #[must_use]
    pub fn spawner(mut self, spawner: Arc<dyn Spawner>) -> Self {
        self.spawner = Some(spawner);
        self
    }

    /// Sets the gate that requests pass before they use a device; none by default.
    #[must_use]
    pub fn device_gate(mut self, gate: Arc<dyn DeviceGate>) -> Self {
        self.gate = Some(gate);
        self
    }

    /// Sets the seed of the tag that distinguishes this session's handles from others'; random by
    /// default. For reproducible tests.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
        self
    }

    /// Builds the session.
    pub fn build(self) -> LocalSession {
        crate::panics::install_hook();
        let limits = self.limits;
        // `RandomState` draws its keys from the operating system.
        let seed = self.seed.unwrap_or_else(|| RandomState::new().hash_one(0));
        let capacity = Capacity { requests: limits.max_requests.max(1), bytes: limits.max_queued_bytes };
        let threads = Threads::new(limits.max_threads, self.total_threads);
        let mut table = HandleTable::new(seed, limits.max_handles);
        if let Some(quota) = self.total_handles {
            table = table.within(quota);
        }
        let staging = MemoryQuota::new("max_queued", limits.max_queued_bytes as u64, self.total_memory.clone());
        let memory = MemoryQuota::new("max_memory", limits.max_memory, self.total_memory);
        let inner = Arc::new_cyclic(|this| LocalInner {
            this: this.clone(),
            limits,
            registry: self.registry,
            devices: match &self.access {
                Some(access) => self.devices.within(access.clone()),
                None => self.devices,
            },
            access: self.access,
            memory,
            staging,
            open_files: self.open_files.unwrap_or_else(|| OpenFileQuota::new("max_open_files", u64::MAX, None)),
            workspace: self.workspace,
            extensions: self.extensions,
            spawner: self.spawner,
            gate: self.gate.map(|gate| SessionGate::new(gate, this.clone())),
            table: Mutex::new(table),
            pipes: Mutex::default(),
            lanes: sync::Mutex::new(Lanes::new(capacity, threads)),
            deadlines: Mutex::new(Deadlines::new()),
            streams: Mutex::default(),
            closing: Mutex::default(),
            gone: AtomicBool::new(false),
            next_id: AtomicU64::new(1),
        });
        LocalSession(Arc::new(EndOnDrop(inner)))
    }
}

impl fmt::Debug for LocalSessionBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalSessionBuilder").field("limits", &self.limits).finish_non_exhaustive()
    }
}
