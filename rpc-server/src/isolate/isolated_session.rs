//! Isolated sessions, as the server sees them: a proxy to the session process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use rpc_core::limits::{MemoryLease, OpenFileLease};
use rpc_core::{
    AccessControl as _, ErrorKind, Permission, Request, RpcError, RpcSession, SessionLimits, SharedSession, Submission,
    Usage,
};
use rpc_transports::program::Program;
use rpc_transports::{Channel, Connector, OpenRequest, SessionFactory};
use tokio::io::AsyncWriteExt;
use tokio::net::UnixStream;
use tokio::sync::Notify;

use super::compiler_cache::CompilerCache;
use super::exit_cause::ProcessLimits;
use super::messages::{MESSAGES, SessionSetup};
use super::process_io::ProcessIo;
use super::supervisor::{self, ProcessGuard, Started};
use super::{GRACE, RUN_GRACE, is_possible};
use crate::config::{ByteSize, ConfigError, ServeConfig};
use crate::leases::LeaseRequest;
use crate::modules::DigestList;
use crate::policy::{rights_of, session_limits_within};
use crate::recent_logs::{self, LogRing};
use crate::server::functions_used::NotingSession;
use crate::server::server_state::{ServerState, SessionCount, UsageSource};
use crate::server::session_workspace::Cleaner;
use crate::server::{spin_time, wire_limits};
use crate::workspace::{Workspace, WorkspaceRoot};

/// Factory of the isolated sessions of one server.
pub(crate) struct Isolation {
    config: String,
    module_digests: Option<DigestList>,
    limits: ProcessLimits,
    /// Log lines of the server, if clients may read them.
    logs: Option<Arc<LogRing>>,
    /// Bytes that each session reserves of the total memory.
    share: Option<u64>,
    /// True if processes may serve the sockets of clients. False where the requests are counted or
    /// traced, which is done here.
    may_pass_sockets: bool,
    connector: Connector,
    /// Program that processes run.
    program: Arc<Program>,
    workspaces: WorkspaceRoot,
    cleaner: Arc<Cleaner>,
    state: Arc<ServerState>,
    processes: Arc<ProcessCount>,
    /// Time that processes have to end after their sessions.
    grace: Duration,
    /// Process started in advance, so that the next client need not wait for one.
    spare: Arc<Mutex<Spare>>,
}

impl Isolation {
    /// Returns a factory and starts the first process in advance. Needs a tokio runtime.
    ///
    /// # Errors
    ///
    /// [`ConfigError::NoIsolationHook`].
    pub(crate) fn new(
        config: &ServeConfig,
        program: Program,
        module_digests: Option<DigestList>,
        workspaces: WorkspaceRoot,
        cleaner: Arc<Cleaner>,
        state: Arc<ServerState>,
    ) -> Result<Self, ConfigError> {
        if !is_possible() {
            return Err(ConfigError::NoIsolationHook);
        }
        let connector = Connector::new()
            .keep_alive(config.keep_alive.0)
            .spin(spin_time(config))
            .handshake_timeout(config.handshake_timeout.0)
            .limits(wire_limits(config));
        let total_is_limited = config.total_memory() != ByteSize::UNLIMITED;
        let logs = recent_logs::ring().filter(|_| config.allow_logs == Some(true));
        // A program that keeps no log lines has none to show.
        let passed = ServeConfig { allow_logs: Some(logs.is_some()), ..config.clone() };
        let isolation = Self {
            config: passed.to_toml()?,
            module_digests,
            limits: ProcessLimits::of(config),
            logs,
            share: total_is_limited.then_some(config.max_memory.0),
            may_pass_sockets: config.metrics.is_none() && config.otlp_endpoint.is_none(),
            connector,
            program: Arc::new(program),
            workspaces,
            cleaner,
            state,
            processes: Arc::default(),
            grace: if config.allow_run.is_empty() { GRACE } else { GRACE + RUN_GRACE },
            spare: Arc::default(),
        };
        isolation.prepare_spare();
        Ok(isolation)
    }

    /// Waits until all processes and their private workspaces are gone. Kills processes after
    /// `limit`.
    pub(crate) async fn end(&self, limit: Duration) {
        drop(self.replace_spare(Spare::Stopped));
        if tokio::time::timeout(limit, self.processes.none_left()).await.is_err() {
            supervisor::kill_all(&self.state);
            // Deleting large workspaces may take longer; the next server on this folder finishes
            // it.
            let _ = tokio::time::timeout(GRACE, self.processes.none_left()).await;
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

    /// Returns the spare process if it is alive and runs, or starts another.
    async fn process(&self) -> std::io::Result<Started> {
        let can_serve = |spare: &Started| {
            let process = spare.process_guard.process();
            !process.has_ended() && !process.is_stopped()
        };
        let started = match self.replace_spare(Spare::Missing) {
            Spare::Ready(spare) if can_serve(&spare) => spare,
            _ => start(self.program.clone(), &self.workspaces, self.state.clone(), &self.processes, self.grace).await?,
        };
        self.prepare_spare();
        Ok(started)
    }

    fn prepare_spare(&self) {
        let (state, processes, spare) = (self.state.clone(), self.processes.clone(), Arc::downgrade(&self.spare));
        let (program, workspaces, grace) = (self.program.clone(), self.workspaces.clone(), self.grace);
        tokio::spawn(async move {
            match start(program, &workspaces, state, &processes, grace).await {
                Ok(started) => {
                    let Some(spare) = spare.upgrade() else { return };
                    let mut spare = spare.lock();
                    if let Spare::Missing = *spare {
                        *spare = Spare::Ready(started);
                    }
                }
                // If the cause persists, the next client gets the error.
                Err(error) => rpc_core::log_limited!(WARN, %error, "cannot start a session process in advance"),
            }
        });
    }

    fn replace_spare(&self, spare: Spare) -> Spare {
        std::mem::replace(&mut *self.spare.lock(), spare)
    }
}

#[async_trait]
impl SessionFactory for Isolation {
    /// Opens a session in a process of its own. Cancel-safe: the process ends if the future is
    /// dropped.
    ///
    /// # Errors
    ///
    /// The workspace, the share of the memory, or the process is not available.
    async fn open(&self, request: &OpenRequest) -> Result<SharedSession, RpcError> {
        let rights = rights_of(request)?;
        let may_read_logs = rights.as_ref().is_none_or(|rights| rights.check(&Permission::Logs).is_ok());
        let open = request.open_files.reserve(FILES_OF_SESSION)?;
        let share = self.share.map(|max_memory| {
            let limits = SessionLimits { max_memory, ..SessionLimits::default() };
            self.state.memory().reserve(session_limits_within(rights.as_deref(), limits).max_memory)
        });
        let share = share.transpose()?;
        let workspace = self.workspace(request).await?;
        let setup = SessionSetup {
            version: MESSAGES.version(),
            config: self.config.clone(),
            workspace: workspace.lend(),
            uptime: self.state.started().elapsed(),
            module_digests: self.module_digests.clone(),
            identity: request.peer_identity.to_string(),
            is_encrypted: request.is_encrypted,
            rights: rights.as_ref().map(|rights| rights.passed()),
        };
        let resources = SessionResources {
            _workspace: workspace,
            _share: share,
            _open: open,
            _counted: ProcessCount::enter(&self.processes),
        };
        let Started { stream, mut process_guard, compiler_cache } = self.process().await.map_err(cannot_start)?;
        let (cleaner, process) = (self.cleaner.clone(), process_guard.process().clone());
        if let Some(leases) = self.state.leases() {
            // Checked here, too: code of the client runs in the process that asks.
            let check = move |request: &LeaseRequest| match &rights {
                Some(rights) => {
                    rights.check(&Permission::Device(request.device))?;
                    rights.check(&Permission::LeasePriority(request.priority))
                }
                None => Ok(()),
            };
            let session = leases.open_session(&request.peer_identity, request.connection.clone());
            process.set_leases(session, Box::new(check));
        }
        if let Some(logs) = self.logs.clone().filter(|_| may_read_logs) {
            process.set_logs(logs);
        }
        let ended = process.clone();
        process_guard.on_exit(move || {
            // A device is free once the process that may still use it has ended.
            ended.end_leases();
            cleaner.drop_later(compiler_cache);
            cleaner.drop_later(resources);
        });
        stream.set_nonblocking(true)?;
        let peer = format!("isolated process {}", process.pid().as_raw_nonzero());
        let errors = self.state.errors().clone();
        let mut io = ProcessIo { stream: UnixStream::from_std(stream)?, process, limits: self.limits, errors };
        io.write_all(&setup.to_bytes()?).await.map_err(cannot_start)?;
        let session = self.connector.connect_channel(Channel::new(io, peer)).await;
        let session = session.map_err(|error| error.into_rpc_error().context(CANNOT_START))?;
        let next = session.shared().clone();
        let process = process_guard.process().clone();
        let used = process.functions_used().clone();
        request.note.set(used.clone());
        if self.may_pass_sockets {
            request.handoff.set(process);
        }
        let session = self.state.count(|counted| IsolatedSession { next, process_guard, _counted: counted });
        Ok(NotingSession::wrap(session, used))
    }
}

#[derive(Default)]
enum Spare {
    #[default]
    Missing,
    Ready(Started),
    /// The server has stopped.
    Stopped,
}

/// Files of the server that a session in a process of its own takes beside its connection: the
/// workspace, its staging folder and its lock, the process, two sockets to it, and two more
/// descriptors of the client's socket, which the process serves.
pub(crate) const FILES_OF_SESSION: u64 = 8;

/// Starts a process that is counted until it has ended.
async fn start(
    program: Arc<Program>,
    workspaces: &WorkspaceRoot,
    state: Arc<ServerState>,
    processes: &Arc<ProcessCount>,
    grace: Duration,
) -> std::io::Result<Started> {
    let counted = ProcessCount::enter(processes);
    let mut started = supervisor::start(program, CompilerCache::new(workspaces), state, grace).await?;
    started.process_guard.on_exit(move || drop(counted));
    Ok(started)
}

const CANNOT_START: &str = "cannot start the process of the session";

fn cannot_start(error: std::io::Error) -> RpcError {
    RpcError::new(ErrorKind::Io, error.to_string()).context(CANNOT_START)
}

/// A session that a process of its own serves.
struct IsolatedSession {
    /// Session with the process. Declared first, so that the process learns of the end of the
    /// session before its grace begins.
    next: SharedSession,
    process_guard: ProcessGuard,
    _counted: SessionCount,
}

impl RpcSession for IsolatedSession {
    fn submit(&self, request: Request) -> Submission {
        self.next.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&*self.next)
    }
}

impl Drop for IsolatedSession {
    fn drop(&mut self) {
        self.process_guard.process().session_ends();
    }
}

impl UsageSource for IsolatedSession {
    fn usage(&self) -> Usage {
        self.process_guard.process().usage()
    }
}

/// Resources released after the end of the process, in this order.
struct SessionResources {
    _workspace: Workspace,
    _share: Option<MemoryLease>,
    _open: OpenFileLease,
    _counted: CountedProcess,
}

/// Count of processes that have not ended, or whose resources are not released.
#[derive(Default)]
struct ProcessCount {
    count: AtomicUsize,
    left: Notify,
}

struct CountedProcess(Arc<ProcessCount>);

impl ProcessCount {
    fn enter(this: &Arc<Self>) -> CountedProcess {
        this.count.fetch_add(1, Ordering::AcqRel);
        CountedProcess(this.clone())
    }

    async fn none_left(&self) {
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

impl Drop for CountedProcess {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::AcqRel);
        self.0.left.notify_waiters();
    }
}
