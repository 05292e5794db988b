//! State of a server, which its handles, its connections and their sessions share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use rpc_core::{ErrorKind, MemoryQuota, OpenFileQuota};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::admission::SessionSlots;
use super::mailbox::Mailbox;
use super::options::{ServeOptions, SessionFactory};
use super::relay::pool::ServerPool;
use crate::handshake::handshake_slots::HandshakeLimit;
use crate::handshake::identity_proofs::Access;
use crate::transport::Dial;

/// State of a server.
pub(super) struct ServerState {
    pub(super) this: Weak<Self>,
    /// Name by which the server finds itself in the path of a chain.
    pub(super) name: String,
    pub(super) factory: Arc<dyn SessionFactory>,
    pub(super) options: ServeOptions,
    /// Clients that the server serves, and the number of changes so far. Number 0 is reserved for
    /// the side that dials.
    pub(super) access: Mutex<(u64, Arc<Access>)>,
    /// Settings by which further servers are dialled.
    pub(super) onward: Mutex<Dial>,
    /// Connections by id, including those in their handshake.
    pub(super) connections: Mutex<HashMap<u64, Arc<Mailbox>>>,
    pub(super) next_connection: AtomicU64,
    pub(super) handshakes: Arc<HandshakeLimit>,
    pub(super) slots: Arc<SessionSlots>,
    pub(super) parked: ServerPool,
    /// Bytes that all sessions may have queued.
    pub(super) queued: Arc<MemoryQuota>,
    /// Descriptors that may be open for all sessions, beside their connections.
    pub(super) open_files: OpenFileQuota,
    pub(super) listeners: Mutex<Vec<JoinHandle<()>>>,
    pub(super) draining: AtomicBool,
    /// Notified when the server stops accepting.
    pub(super) closing: Notify,
    /// Notified whenever a session has ended.
    pub(super) ended: Notify,
}

impl ServerState {
    pub(super) fn new(factory: Arc<dyn SessionFactory>, options: ServeOptions) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            name: unique_name(),
            factory,
            access: Mutex::new((1, Arc::new(options.access.clone()))),
            connections: Mutex::default(),
            next_connection: AtomicU64::new(1),
            handshakes: HandshakeLimit::new(options.max_handshakes),
            onward: Mutex::new(options.onward.clone()),
            queued: MemoryQuota::new("max_total_queued", options.max_total_queued, None),
            open_files: OpenFileQuota::new("max_total_open_files", options.max_total_open_files, None),
            parked: ServerPool::default(),
            slots: SessionSlots::new(options.max_sessions, options.max_sessions_per_peer),
            listeners: Mutex::default(),
            options,
            draining: AtomicBool::new(false),
            closing: Notify::new(),
            ended: Notify::new(),
        })
    }

    /// Returns the settings by which further servers are dialled at present. Nobody is asked at the
    /// terminal of this process, since the server dials for its clients.
    pub(super) fn onward(&self) -> Dial {
        let onward = self.onward.lock().clone();
        Dial { may_prompt: false, ..onward }
    }

    /// Returns the connections by id.
    pub(super) fn connections(&self) -> MutexGuard<'_, HashMap<u64, Arc<Mailbox>>> {
        self.connections.lock()
    }

    /// Reports a client that got no session.
    pub(super) fn refused(&self, reason: ErrorKind) {
        if let Some(observer) = &self.options.observer {
            observer.refused(reason);
        }
    }
}

/// Entry of a connection. It exists until the connection's task is over and its session freed, also
/// if both are dropped with their runtime.
pub(super) struct ConnectionEntry {
    server: Arc<ServerState>,
    id: u64,
    /// True once the connection has had a session.
    pub(super) served: AtomicBool,
}

impl ConnectionEntry {
    pub(super) fn new(server: Arc<ServerState>, id: u64) -> Self {
        Self { server, id, served: AtomicBool::new(false) }
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.server.connections().remove(&self.id);
        self.server.ended.notify_waiters();
    }
}

/// Duration that is practically infinite, and that all clocks can still add.
pub(super) const UNLIMITED: Duration = Duration::from_secs(365 * 24 * 3600);

/// Returns a name that no other server has.
fn unique_name() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    match crate::handshake::identity_proofs::random() {
        Ok(random) => random.iter().take(8).map(|byte| format!("{byte:02x}")).collect(),
        // The process id is unique at least among the servers of one machine.
        Err(_) => format!("{}-{number}", std::process::id()),
    }
}
