//! State that the sessions of a server share: its key, its runtime, and the totals of their usage.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::session::InPlaceWrite;
use rpc_core::value::TensorRef;
use rpc_core::{Lane, LocalSession, MemoryQuota, Request, RpcSession, SharedSession, Submission, Usage};
use rpc_transports::Machine;

use super::recent_errors::RecentErrors;
use crate::leases::{LeaseTable, SessionLeases};

/// State of a server for its functions: [`Context::extension`](rpc_core::Context::extension)
/// returns it.
pub struct ServerState {
    started: Instant,
    key: Option<String>,
    runtime: Option<tokio::runtime::Handle>,
    memory: Arc<MemoryQuota>,
    /// Leases of the server. The process of one session has none, and asks the server.
    leases: Option<Arc<LeaseTable>>,
    errors: Arc<RecentErrors>,
    next_id: AtomicU64,
    live: Mutex<HashMap<u64, Weak<dyn UsageSource>>>,
    view: SessionView,
}

/// View of this process on the sessions of the server.
enum SessionView {
    /// View on sessions in this process.
    InProcess,
    /// View on sessions with processes of their own, which report their usage.
    Reported,
    /// View of the process of one session. The function asks the server for totals.
    Single(Box<dyn Fn(Usage) -> Option<ServerTotals> + Send + Sync>),
}

/// Client of a session, for functions: [`Context::extension`](rpc_core::Context::extension) returns
/// it, except in sessions with a process of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client {
    /// Address of the client, as text for people.
    pub peer: String,
    /// Machine that the client is on, as the transport knows it.
    pub machine: Machine,
    /// Identity that the client has proven; `anonymous` without proof.
    pub identity: String,
    /// The same with the kind of its proof, such as `token:alice`: the holder of the certificate
    /// `alice` is another client than the holder of the token.
    pub peer_identity: String,
    /// True if the client has come through a hop, whose machine `machine` is then.
    pub through_hop: bool,
}

/// Session that is counted in the totals.
pub(crate) trait UsageSource: Send + Sync {
    /// Returns the usage that this process knows of.
    fn usage(&self) -> Usage;
}

/// Objects and memory of all sessions of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServerTotals {
    /// Live sessions.
    pub sessions: u64,
    /// Objects of the sessions.
    pub handles: u64,
    /// Bytes of device memory of the sessions, and of calls that still run though their session has
    /// ended.
    pub memory_bytes: u64,
}

impl ServerState {
    /// Returns the state of a server. `isolated` is true if each session has a process of its own.
    pub(crate) fn new(
        key: Option<String>,
        max_total_memory: u64,
        isolated: bool,
        leases: Option<Arc<LeaseTable>>,
        errors: Arc<RecentErrors>,
    ) -> Arc<Self> {
        let view = if isolated { SessionView::Reported } else { SessionView::InProcess };
        let state = Self::with(key, max_total_memory, Instant::now(), view);
        Arc::new(Self { leases, errors, ..state })
    }

    /// Returns the state for a session process. `totals` reports the usage of the session to the
    /// server and returns the totals.
    pub(crate) fn for_single_session(
        key: Option<String>,
        started: Instant,
        totals: impl Fn(Usage) -> Option<ServerTotals> + Send + Sync + 'static,
    ) -> Arc<Self> {
        // The server has reserved this session's share of the total already.
        Arc::new(Self::with(key, u64::MAX, started, SessionView::Single(Box::new(totals))))
    }

    fn with(key: Option<String>, max_total_memory: u64, started: Instant, view: SessionView) -> Self {
        Self {
            started,
            key,
            runtime: tokio::runtime::Handle::try_current().ok(),
            memory: MemoryQuota::new("max_total_memory", max_total_memory, None),
            leases: None,
            errors: Arc::default(),
            next_id: AtomicU64::new(0),
            live: Mutex::default(),
            view,
        }
    }

    /// Returns the time at which the server started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Returns the key of the server.
    pub fn key(&self) -> Option<&str> {
        self.key.as_deref()
    }

    /// Returns the runtime of asynchronous functions, if the server was started on one.
    pub fn runtime(&self) -> Option<&tokio::runtime::Handle> {
        self.runtime.as_ref()
    }

    /// Returns what all sessions hold. In the process of an isolated session it blocks while the
    /// server answers.
    pub fn totals(&self) -> ServerTotals {
        let here = self.totals_here();
        match &self.view {
            SessionView::Single(ask) => {
                ask(Usage { handles: here.handles, memory_bytes: here.memory_bytes }).unwrap_or(here)
            }
            SessionView::InProcess | SessionView::Reported => here,
        }
    }

    /// Returns the totals of the sessions that this process knows of.
    pub(crate) fn totals_here(&self) -> ServerTotals {
        // Collected first: dropping the last reference to a session takes the lock.
        let live: Vec<_> = self.live().values().filter_map(Weak::upgrade).collect();
        let usages: Vec<_> = live.iter().map(|session| session.usage()).collect();
        let memory_bytes = match &self.view {
            // The quota of the process of one session is that of the session alone.
            SessionView::Reported | SessionView::Single(_) => usages.iter().map(|usage| usage.memory_bytes).sum(),
            SessionView::InProcess => self.memory.used(),
        };
        ServerTotals {
            sessions: usages.len() as u64,
            handles: usages.iter().map(|usage| usage.handles).sum(),
            memory_bytes,
        }
    }

    fn live(&self) -> MutexGuard<'_, HashMap<u64, Weak<dyn UsageSource>>> {
        self.live.lock()
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
    /// Returns the quota that the memory of all sessions counts against.
    pub(crate) fn memory(&self) -> &Arc<MemoryQuota> {
        &self.memory
    }

    /// Returns the leases of the server; `None` in the process of one session.
    pub(crate) fn leases(&self) -> Option<&Arc<LeaseTable>> {
        self.leases.as_ref()
    }

    /// Returns the last errors of the server.
    pub(crate) fn errors(&self) -> &Arc<RecentErrors> {
        &self.errors
    }

    /// Counts the session that `make` returns for as long as it keeps its argument.
    pub(crate) fn count<H: UsageSource + 'static>(self: &Arc<Self>, make: impl FnOnce(SessionCount) -> H) -> Arc<H> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let holder = Arc::new(make(SessionCount { id, state: self.clone() }));
        let weak = Arc::downgrade(&holder);
        self.live().insert(id, weak);
        holder
    }

    /// Wraps `inner` in a session that is counted while it lives, and owns its leases.
    pub(crate) fn count_local(
        self: &Arc<Self>,
        inner: LocalSession,
        leases: Option<Arc<SessionLeases>>,
    ) -> SharedSession {
        self.count(|counted| ServedSession { inner, _leases: leases, _counted: counted })
    }
}

/// Entry of a session in the totals, until dropped.
pub(crate) struct SessionCount {
    id: u64,
    state: Arc<ServerState>,
}

impl Drop for SessionCount {
    fn drop(&mut self) {
        self.state.live().remove(&self.id);
    }
}

/// Local session that is counted while it lives, with its leases.
struct ServedSession {
    inner: LocalSession,
    _leases: Option<Arc<SessionLeases>>,
    _counted: SessionCount,
}

impl UsageSource for ServedSession {
    fn usage(&self) -> Usage {
        self.inner.usage()
    }
}

impl RpcSession for ServedSession {
    fn submit(&self, request: Request) -> Submission {
        self.inner.submit(request)
    }

    fn inner(&self) -> Option<&dyn RpcSession> {
        Some(&self.inner)
    }

    fn write_in_place(&self, lane: Lane, to: &TensorRef, offset: u64, len: u64) -> Option<InPlaceWrite> {
        self.inner.write_in_place(lane, to, offset, len)
    }
}
