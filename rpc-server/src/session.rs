//! What the sessions of a server share: the count of what they hold, and the care of their folders.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{
    ErrorKind, Lane, LocalSession, MemoryQuota, Request, Result, RpcError, RpcSession, SharedSession, Submission,
    Usage, WorkspaceFiles,
};

use crate::workspace::{Workspace, WorkspaceRoot};

/// What the functions of a server can find out about it, with [`Context::extension`](rpc_core::Context::extension).
pub struct ServerState {
    started: Instant,
    key: Option<String>,
    runtime: Option<tokio::runtime::Handle>,
    memory: Arc<MemoryQuota>,
    next_id: AtomicU64,
    live: Mutex<HashMap<u64, Weak<dyn Holder>>>,
    view: View,
}

/// What this process sees of the server.
enum View {
    /// All of it: the sessions are here.
    Whole,
    /// The sessions, each in a process of its own, as they report themselves.
    Reports,
    /// One session; the server is asked about the others.
    One(Box<dyn Fn(Usage) -> Option<Totals> + Send + Sync>),
}

/// Who a session's client is, for functions that want to know: [`Context::extension`](rpc_core::Context::extension) finds it. Not
/// in sessions with a process of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// The address that it comes from.
    pub peer: String,
    /// Whom it has proven to be; `anonymous` without proof.
    pub identity: String,
}

/// A session that is counted.
pub(crate) trait Holder: Send + Sync {
    /// What it holds, as far as it is known here.
    fn usage(&self) -> Usage;
}

/// What all sessions together hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) sessions: u64,
    pub(crate) handles: u64,
    pub(crate) memory_bytes: u64,
}

impl ServerState {
    /// The state of a server; `isolated` says that each of its sessions has a process of its own.
    pub(crate) fn new(key: Option<String>, max_total_memory: u64, isolated: bool) -> Arc<Self> {
        let view = if isolated { View::Reports } else { View::Whole };
        Arc::new(Self::with(key, max_total_memory, Instant::now(), view))
    }

    /// The state of the process of one session; `totals` tells the server what this one holds,
    /// and asks what all of them do.
    pub(crate) fn of_one(
        key: Option<String>,
        started: Instant,
        totals: impl Fn(Usage) -> Option<Totals> + Send + Sync + 'static,
    ) -> Arc<Self> {
        // The server has set this session's part of the total aside.
        Arc::new(Self::with(key, u64::MAX, started, View::One(Box::new(totals))))
    }

    fn with(key: Option<String>, max_total_memory: u64, started: Instant, view: View) -> Self {
        Self {
            started,
            key,
            runtime: tokio::runtime::Handle::try_current().ok(),
            memory: MemoryQuota::new("max_total_memory", max_total_memory, None),
            next_id: AtomicU64::new(0),
            live: Mutex::default(),
            view,
        }
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
        let here = self.totals_here();
        match &self.view {
            View::One(ask) => ask(Usage { handles: here.handles, memory_bytes: here.memory_bytes }).unwrap_or(here),
            View::Whole | View::Reports => here,
        }
    }

    /// What the sessions hold that this process knows of.
    pub(crate) fn totals_here(&self) -> Totals {
        // Taken out of the lock: the last reference to a session may be dropped here, and that takes the lock.
        let live: Vec<_> = self.live().values().filter_map(Weak::upgrade).collect();
        let usages: Vec<_> = live.iter().map(|session| session.usage()).collect();
        let memory_bytes = match &self.view {
            View::Reports => usages.iter().map(|usage| usage.memory_bytes).sum(),
            View::Whole | View::One(_) => self.memory.used(),
        };
        Totals { sessions: usages.len() as u64, handles: usages.iter().map(|usage| usage.handles).sum(), memory_bytes }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<u64, Weak<dyn Holder>>> {
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

    /// Counts what `make` makes for as long as that keeps what it is given.
    pub(crate) fn count<H: Holder + 'static>(self: &Arc<Self>, make: impl FnOnce(Counted) -> H) -> Arc<H> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let holder = Arc::new(make(Counted { id, state: self.clone() }));
        let weak = Arc::downgrade(&holder);
        self.live().insert(id, weak);
        holder
    }

    /// Counts `inner` for as long as it lives.
    pub(crate) fn count_local(self: &Arc<Self>, inner: LocalSession) -> SharedSession {
        self.count(|counted| ServedSession { inner, _counted: counted })
    }
}

/// A place among the sessions that are counted, until dropped.
pub(crate) struct Counted {
    id: u64,
    state: Arc<ServerState>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.state.live().remove(&self.id);
    }
}

/// A local session that is counted while it lives.
struct ServedSession {
    inner: LocalSession,
    _counted: Counted,
}

impl Holder for ServedSession {
    fn usage(&self) -> Usage {
        self.inner.usage()
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

/// A thread that drops workspaces, and what goes with them: removing the files of a session can take long, and sessions end
/// on threads that serve others.
pub(crate) struct Cleaner {
    /// `None` once dropping has begun, or if there is no thread.
    queue: Option<Sender<Box<dyn Any + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    pub(crate) fn start() -> Arc<Self> {
        let (queue, leavings) = mpsc::channel::<Box<dyn Any + Send>>();
        let run = move || leavings.into_iter().for_each(drop);
        let thread = std::thread::Builder::new().name("rpc-cleaner".into()).spawn(run);
        let thread =
            thread.map_err(|error| tracing::warn!(%error, "workspaces are removed where their sessions end")).ok();
        Arc::new(Self { queue: thread.is_some().then_some(queue), thread })
    }

    /// Without a thread, for workspaces that take no time to be dropped.
    pub(crate) fn none() -> Arc<Self> {
        Arc::new(Self { queue: None, thread: None })
    }

    /// Waits until what was given up before has been dropped, for `limit` at most. Says whether it has. Blocks.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let (dropped, wait) = mpsc::channel::<()>();
        self.drop_later(dropped);
        // Nothing is ever sent: the end of the channel is what tells.
        wait.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    /// The queue is not bounded: each entry stands for a session, and those are.
    pub(crate) fn drop_later(&self, leavings: impl Any + Send) {
        if let Some(queue) = &self.queue {
            // If the thread is gone they come back, and are dropped here.
            let _ = queue.send(Box::new(leavings));
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
