//! Workspaces of served sessions, and the thread that removes them.

use std::any::Any;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rpc_core::limits::OpenFileLease;
use rpc_core::{ErrorKind, OpenFileQuota, Result, RpcError, WorkspaceFiles};

use crate::workspace::{Workspace, WorkspaceRoot};

/// Workspace of a served session. A private one is created at its first use, because most sessions
/// exchange no files.
pub struct SessionWorkspace {
    source: Mutex<WorkspaceSource>,
    cleaner: Arc<Cleaner>,
    /// Quota that the workspace itself counts against.
    open_files: OpenFileQuota,
}

/// Descriptors of a workspace: the folder, that of writes in progress, and its lock.
pub(crate) const FILES_OF_WORKSPACE: u64 = 3;

pub(crate) enum WorkspaceSource {
    /// Private workspace that has not been created yet, and its root.
    Private(WorkspaceRoot),
    Opened(Workspace, OpenFileLease),
    /// Workspace that the cleaner has taken over.
    Released,
}

impl SessionWorkspace {
    pub(crate) fn new(source: WorkspaceSource, cleaner: Arc<Cleaner>, open_files: OpenFileQuota) -> Self {
        Self { source: Mutex::new(source), cleaner, open_files }
    }

    /// Returns the workspace, and creates it if needed. Blocks.
    ///
    /// # Errors
    ///
    /// The session may have no more open files, or the file system failed.
    pub fn open(&self) -> Result<Workspace> {
        let mut source = self.source.lock();
        let root = match &*source {
            WorkspaceSource::Opened(workspace, _) => return Ok(workspace.clone()),
            WorkspaceSource::Private(root) => root,
            WorkspaceSource::Released => return Err(RpcError::new(ErrorKind::Closed, "the session has ended")),
        };
        let open = self.open_files.reserve(FILES_OF_WORKSPACE)?;
        let workspace = root.private()?;
        *source = WorkspaceSource::Opened(workspace.clone(), open);
        Ok(workspace)
    }
}

impl Drop for SessionWorkspace {
    fn drop(&mut self) {
        let source = self.source.get_mut();
        if let WorkspaceSource::Opened(workspace, open) = std::mem::replace(source, WorkspaceSource::Released) {
            self.cleaner.drop_later((workspace, open));
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

/// A thread that drops workspaces and related values: removing files can take long, and sessions
/// end on threads that serve others.
pub(crate) struct Cleaner {
    /// Queue of the thread. `None` after the start of the drop, or if there is no thread.
    queue: Option<Sender<Box<dyn Any + Send>>>,
    thread: Option<JoinHandle<()>>,
}

impl Cleaner {
    pub(crate) fn start() -> Arc<Self> {
        let (queue, value) = mpsc::channel::<Box<dyn Any + Send>>();
        let run = move || value.into_iter().for_each(drop);
        let thread = std::thread::Builder::new().name("rpc-cleaner".into()).spawn(run);
        let thread =
            thread.map_err(|error| tracing::warn!(%error, "cannot start the thread that removes workspaces")).ok();
        Arc::new(Self { queue: thread.is_some().then_some(queue), thread })
    }

    /// Returns a cleaner without a thread, for workspaces whose drop is quick.
    pub(crate) fn none() -> Arc<Self> {
        Arc::new(Self { queue: None, thread: None })
    }

    /// Waits until all values queued so far have been dropped, or for `limit`. Returns true if they
    /// have been dropped. Blocks.
    pub(crate) fn flush(&self, limit: Duration) -> bool {
        let (dropped, wait) = mpsc::channel::<()>();
        self.drop_later(dropped);
        // The thread drops the sender, which ends the channel; nothing is sent.
        wait.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    /// Queues a value to be dropped. The queue is not bounded: each entry stands for a session, and
    /// those are limited.
    pub(crate) fn drop_later(&self, value: impl Any + Send) {
        if let Some(queue) = &self.queue {
            // If the thread is gone, the error returns the value, which is dropped here.
            let _ = queue.send(Box::new(value));
        }
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.queue = None;
        // The thread is joined, because a process that ends must leave no files. The thread has no
        // reference to the cleaner.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
