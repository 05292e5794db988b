//! The server's side: opens sessions that processes of their own serve.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rpc_core::limits::MemoryLease;
use rpc_core::{ErrorKind, Request, RpcError, RpcSession, SharedSession, Submission, Usage};
use rpc_transports::{Channel, Connector, OpenRequest};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use super::fate::Limits;
use super::io::ProcessIo;
use super::keeper::{self, Started, Tenancy};
use super::messages::SetUp;
use super::{GRACE, is_possible};
use crate::config::{ByteSize, ConfigError, ServeConfig};
use crate::modules::DigestList;
use crate::server::wire_limits;
use crate::session::{Cleaner, Counted, Holder, ServerState};
use crate::workspace::{Workspace, WorkspaceRoot};

/// Opens isolated sessions for one server.
pub(crate) struct Isolation {
    config: String,
    module_digests: Option<DigestList>,
    limits: Limits,
    /// What each session has set aside of the memory of all.
    share: Option<u64>,
    connector: Connector,
    workspaces: WorkspaceRoot,
    cleaner: Arc<Cleaner>,
    state: Arc<ServerState>,
    residents: Arc<Residents>,
    /// A process that waits for its session, so that the next client does not wait for a process.
    spare: Arc<Mutex<Spare>>,
}

impl Isolation {
    /// Prepares to open sessions. Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NoIsolationHook`].
    pub(crate) fn new(
        config: &ServeConfig,
        module_digests: Option<DigestList>,
        workspaces: WorkspaceRoot,
        cleaner: Arc<Cleaner>,
        state: Arc<ServerState>,
    ) -> Result<Self, ConfigError> {
        if !is_possible() {
            return Err(ConfigError::NoIsolationHook);
        }
        raise_file_limit();
        let connector = Connector::new()
            .keep_alive(config.keep_alive.0)
            .handshake_timeout(config.handshake_timeout.0)
            .limits(wire_limits(config));
        let total_is_limited = config.total_memory() != ByteSize::UNLIMITED;
        let isolation = Self {
            config: config.to_toml()?,
            module_digests,
            limits: Limits::of(config),
            share: total_is_limited.then_some(config.max_memory.0),
            connector,
            workspaces,
            cleaner,
            state,
            residents: Arc::default(),
            spare: Arc::default(),
        };
        isolation.prepare_spare();
        Ok(isolation)
    }

    /// Opens a session in a process of its own. Cancel-safe: a process that nobody wants is ended.
    ///
    /// # Errors
    ///
    /// The workspace, the share of the memory, or the process cannot be had.
    pub(crate) async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let share = self.share.map(|bytes| self.state.memory().reserve(bytes)).transpose()?;
        let workspace = self.workspace(request).await?;
        let set_up = SetUp {
            config: self.config.clone(),
            workspace: workspace.lend(),
            uptime: self.state.started().elapsed(),
            module_digests: self.module_digests.clone(),
        };
        let remains = Remains { _workspace: workspace, _share: share, _resident: Residents::enter(&self.residents) };
        let Started { stream, mut tenancy } = self.process().await.map_err(cannot_start)?;
        let cleaner = self.cleaner.clone();
        tenancy.afterwards(move || cleaner.drop_later(remains));
        stream.set_nonblocking(true)?;
        let process = tenancy.process().clone();
        let peer = format!("isolated process {}", process.pid().as_raw_nonzero());
        let mut io = ProcessIo { stream: UnixStream::from_std(stream)?, process, limits: self.limits };
        io.write_all(&set_up.to_bytes()?).await.map_err(cannot_start)?;
        let session = self.connector.connect_channel(Channel::new(io, peer)).await;
        let session = session.map_err(|error| error.into_rpc_error().context(CANNOT_START))?;
        let next = session.shared().clone();
        Ok(self.state.count(|counted| IsolatedSession { next, tenancy, _counted: counted }))
    }

    /// Waits until no process is left, and no private workspace of one; kills those that take longer than `limit`.
    pub(crate) async fn end(&self, limit: Duration) {
        drop(self.replace_spare(Spare::Unwanted));
        if tokio::time::timeout(limit, self.residents.gone()).await.is_err() {
            keeper::kill_all(&self.state);
            // Deleting large workspaces may take longer; the next server on this folder would finish that.
            let _ = tokio::time::timeout(GRACE, self.residents.gone()).await;
        }
    }

    async fn workspace(&self, request: &OpenRequest) -> Result<Workspace, RpcError> {
        let root = self.workspaces.clone();
        let named = request.workspace.as_ref().map(|name| (request.identity.clone(), name.clone()));
        let open = move || match named {
            Some((identity, name)) => root.named(&identity, &name),
            None => root.private(),
        };
        let opened = tokio::task::spawn_blocking(open).await;
        Ok(opened.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?)
    }

    /// The spare process, if there is one that lives, or a new one.
    async fn process(&self) -> std::io::Result<Started> {
        let started = match self.replace_spare(Spare::Wanted) {
            Spare::Ready(spare) if !spare.tenancy.process().has_ended() => spare,
            _ => start(self.state.clone(), &self.residents).await?,
        };
        self.prepare_spare();
        Ok(started)
    }

    fn prepare_spare(&self) {
        let (state, residents, spare) = (self.state.clone(), self.residents.clone(), Arc::downgrade(&self.spare));
        tokio::spawn(async move {
            match start(state, &residents).await {
                Ok(started) => {
                    let Some(spare) = spare.upgrade() else { return };
                    let mut spare = spare.lock().unwrap_or_else(PoisonError::into_inner);
                    if let Spare::Wanted = *spare {
                        *spare = Spare::Ready(started);
                    }
                }
                // The next client will hear of it, if it lasts.
                Err(error) => tracing::warn!(%error, "cannot start a process in advance"),
            }
        });
    }

    fn replace_spare(&self, spare: Spare) -> Spare {
        std::mem::replace(&mut *self.spare.lock().unwrap_or_else(PoisonError::into_inner), spare)
    }
}

#[derive(Default)]
enum Spare {
    #[default]
    Wanted,
    Ready(Started),
    /// The server has stopped.
    Unwanted,
}

/// Starts a process that is counted until it is gone.
async fn start(state: Arc<ServerState>, residents: &Arc<Residents>) -> std::io::Result<Started> {
    let resident = Residents::enter(residents);
    let mut started = keeper::start(state).await?;
    started.tenancy.afterwards(move || drop(resident));
    Ok(started)
}

const CANNOT_START: &str = "cannot start the process of the session";

fn cannot_start(error: std::io::Error) -> RpcError {
    RpcError::new(ErrorKind::Io, error.to_string()).context(CANNOT_START)
}

/// A session takes four of our files. Many systems allow a program few at first, and as many as it needs if it asks.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::debug!(%error, "the limit on open files stays as it is");
    }
}

/// A session that a process of its own serves.
struct IsolatedSession {
    /// Declared first: the process is told of the end before it is given its time to end.
    next: SharedSession,
    tenancy: Tenancy,
    _counted: Counted,
}

impl RpcSession for IsolatedSession {
    fn submit(&self, request: Request) -> Submission {
        self.next.submit(request)
    }

    fn ended(&self) -> Submission {
        self.next.ended()
    }
}

impl Holder for IsolatedSession {
    fn usage(&self) -> Usage {
        self.tenancy.process().usage()
    }
}

/// What is given up when the process is gone, in this order.
struct Remains {
    _workspace: Workspace,
    _share: Option<MemoryLease>,
    _resident: Resident,
}

/// Counts the processes that are not gone with all that they had.
#[derive(Default)]
struct Residents {
    count: AtomicUsize,
    left: Notify,
}

struct Resident(Arc<Residents>);

impl Residents {
    fn enter(this: &Arc<Self>) -> Resident {
        this.count.fetch_add(1, Ordering::AcqRel);
        Resident(this.clone())
    }

    async fn gone(&self) {
        loop {
            let left = self.left.notified();
            let mut left = std::pin::pin!(left);
            left.as_mut().enable();
            if self.count.load(Ordering::Acquire) == 0 {
                return;
            }
            left.await;
        }
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.left.notify_waiters();
    }
}
