//! What the sessions of a server share: the count of what they hold, and the care of their folders.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{
    ErrorKind, Lane, LocalSession, MemoryQuota, Request, Result, RpcError, RpcSession, SharedSession, Submission,
    WorkspaceFiles,
};

use crate::workspace::{Workspace, WorkspaceRoot};

/// What the functions of a server can find out about it, with [`Context::extension`](rpc_core::Context::extension).
pub struct ServerState {
    started: Instant,
    key: Option<String>,
    runtime: Option<tokio::runtime::Handle>,
    memory: Arc<MemoryQuota>,
    next_id: AtomicU64,
    live: Mutex<HashMap<u64, Weak<ServedSession>>>,
}

/// What all sessions together hold.
pub(crate) struct Totals {
    pub(crate) sessions: u64,
    pub(crate) handles: u64,
    pub(crate) memory_bytes: u64,
}

impl ServerState {
    pub(crate) fn new(key: Option<String>, max_total_memory: u64) -> Arc<Self> {
        Arc::new(Self {
            started: Instant::now(),
            key,
            runtime: tokio::runtime::Handle::try_current().ok(),
            memory: MemoryQuota::new("max_total_memory", max_total_memory, None),
            next_id: AtomicU64::new(0),
            live: Mutex::default(),
        })
    }

    /// When the server started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// The key that clients may name the server by.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// The runtime on which asynchronous functions run, if the server was started on one.
    pub fn runtime(&self) -> Option<&tokio::runtime::Handle> {
        self.runtime.as_ref()
    }

    pub(crate) fn totals(&self) -> Totals {
        // Taken out of the lock: the last reference to a session may be dropped here, and that takes the lock.
        let live: Vec<_> = self.live().values().filter_map(Weak::upgrade).collect();
        Totals {
            sessions: live.len() as u64,
            handles: live.iter().map(|session| session.inner.usage().handles).sum(),
            memory_bytes: self.memory.used(),
        }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<u64, Weak<ServedSession>>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ServerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerState")
            .field("key", &self.key)
            .field("sessions", &self.live().len())
            .finish_non_exhaustive()
    }
}

impl ServerState {
    /// What all sessions count their memory against.
    pub(crate) fn memory(&self) -> &Arc<MemoryQuota> {
        &self.memory
    }

    /// Counts `inner` for as long as it lives.
    pub(crate) fn count(self: &Arc<Self>, inner: LocalSession) -> SharedSession {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let session = Arc::new(ServedSession { id, inner, state: self.clone() });
        self.live().insert(id, Arc::downgrade(&session));
        session
    }
}

/// A local session that is counted while it lives.
struct ServedSession {
    id: u64,
    inner: LocalSession,
    state: Arc<ServerState>,
}

impl Drop for ServedSession {
    fn drop(&mut self) {
        self.state.live().remove(&self.id);
    }
}

impl RpcSession for ServedSession {
    fn submit(&self, request: Request) -> Submission {
        self.inner.submit(request)
    }

    fn is_local(&self) -> bool {
        true
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.write_in_place(lane, to, offset, len)
    }

    fn ended(&self) -> Submission {
        self.inner.ended()
    }
}

/// The folder of a served session. A private one is made when it is first used: most sessions exchange no files.
pub struct SessionWorkspace {
    source: Mutex<Source>,
    cleaner: Arc<Cleaner>,
}

pub(crate) enum Source {
    /// To be made there.
    Private(WorkspaceRoot),
    Opened(Workspace),
    /// Given to the cleaner.
    Gone,
}

impl SessionWorkspace {
    pub(crate) fn new(source: Source, cleaner: Arc<Cleaner>) -> Self {
        Self { source: Mutex::new(source), cleaner }
    }

    /// The folder, made if need be. Blocks.
    ///
    /// # Errors
    ///
    /// The file system failed.
    pub fn open(&self) -> Result<Workspace> {
        let mut source = self.source.lock().unwrap_or_else(PoisonError::into_inner);
        let workspace = match &*source {
            Source::Opened(workspace) => return Ok(workspace.clone()),
            Source::Private(root) => root.private()?,
            Source::Gone => return Err(RpcError::new(ErrorKind::Closed, "the session has ended")),
        };
        *source = Source::Opened(workspace.clone());
        Ok(workspace)
    }
}

impl Drop for SessionWorkspace {
    fn drop(&mut self) {
        let source = self.source.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Source::Opened(workspace) = std::mem::replace(source, Source::Gone) {
            self.cleaner.drop_later(workspace);
        }
    }
}

impl WorkspaceFiles for SessionWorkspace {
    fn resolve(&self, path: &str) -> Result<PathBuf> {
        WorkspaceFiles::resolve(&self.open()?, path)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl fmt::Debug for SessionWorkspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SessionWorkspace")
    }
}

impl WorkspaceFiles for Workspace {
    fn resolve(&self, path: &str) -> Result<PathBuf> {
        Ok(Self::resolve(self, path)?)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// A thread that drops workspaces: removing the files of a session can take long, and sessions end on threads that serve
/// others.
pub(crate) struct Cleaner {
    /// `None` once dropping has begun, or if there is no thread.
    queue: Option<Sender<Workspace>>,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    pub(crate) fn start() -> Arc<Self> {
        let (queue, workspaces) = mpsc::channel::<Workspace>();
        let run = move || workspaces.into_iter().for_each(drop);
        let thread = std::thread::Builder::new().name("rpc-cleaner".into()).spawn(run);
        let thread =
            thread.map_err(|error| tracing::warn!(%error, "workspaces are removed where their sessions end")).ok();
        Arc::new(Self { queue: thread.is_some().then_some(queue), thread })
    }

    /// The queue is not bounded: each entry stands for a session, and those are.
    fn drop_later(&self, workspace: Workspace) {
        if let Some(queue) = &self.queue {
            // If the thread is gone the workspace comes back, and is dropped here.
            let _ = queue.send(workspace);
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.queue = None;
        // A process that ends must not leave files behind. The cleaner's own thread holds no reference to it.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
