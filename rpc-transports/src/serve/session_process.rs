//! The process that a session may be handed to, as the server that accepts its client sees it, and
//! the messages between the two.

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use rpc_core::proto::Negotiated;
use rpc_core::{MemoryQuota, RpcError};
use serde::{Deserialize, Serialize};

/// Another process that can serve a session over its client's socket. The factory of the session
/// offers it by [`HandoffOffer::set`].
#[async_trait]
pub trait SessionProcess: Send + Sync + 'static {
    /// Passes the connection to the process. From here on the process alone reads and writes. What
    /// it has queued counts against `queued`, which is part of the quota of all sessions.
    ///
    /// # Errors
    ///
    /// The connection cannot be passed. It stays usable, and this process serves the session.
    async fn take(&self, connection: PassedConnection, queued: Arc<MemoryQuota>) -> io::Result<()>;

    /// Tells the process to take no new requests, and to end the session when all are answered.
    fn go_away(&self);

    /// Tells the process to end the session, and the client the reason.
    fn close(&self, reason: &RpcError);

    /// Gives the process its last time: it is killed if it has not ended by then.
    fn end_soon(&self);

    /// Does what [`end_soon`](Self::end_soon) does, and resolves when the process has ended. It
    /// writes nothing more to the socket then.
    async fn exited(&self);

    /// Returns true once the client has closed its side of the connection.
    fn client_is_gone(&self) -> bool;

    /// Resolves to the process's report on the end of the session. Never resolves if the process
    /// ends without one: then the session that the factory has opened ends.
    async fn ended(&self) -> EndReport;
}

/// Connection on its way to another process.
#[derive(Debug)]
pub struct PassedConnection {
    /// Socket of the client.
    pub socket: OwnedFd,
    /// File of the mark at which the output stands.
    pub mark: OwnedFd,
    /// State of the connection.
    pub state: ConnectionState,
}

/// State of a connection after its handshake, for the process that serves the session.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ConnectionState {
    /// Protocol of the connection, and its state.
    pub protocol: PassedProtocol,
    /// Input that was read beyond the handshake.
    pub input: Vec<u8>,
    /// Address of the client, for the log.
    pub peer: String,
    /// Process that the client is, if sessions may share memory with it.
    pub process: Option<u32>,
}

/// Protocol of a connection that is passed to another process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PassedProtocol {
    /// The native protocol, with the settings that both sides have agreed on.
    Native(Box<Negotiated>),
    /// A [dialect](crate::Dialect).
    Dialect {
        /// Name of the dialect.
        name: String,
        /// Identity of the client, as text with the kind of its proof.
        identity: String,
        /// State of the connection, in the dialect's own form.
        state: Vec<u8>,
    },
}

/// Report of a process on the end of the session that it has served.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EndReport {
    /// Reason of the end.
    pub reason: RpcError,
    /// Number of requests of the client.
    pub requests: u64,
    /// Bytes from the client.
    pub received: u64,
    /// Bytes to the client.
    pub sent: u64,
    /// True if the client was sent a last message, which it may not have received yet.
    pub last_message_sent: bool,
}

/// Offer of a session's factory to have the session served by another process. Cheap to clone;
/// clones are the same offer.
#[derive(Clone, Default)]
pub struct HandoffOffer(Arc<OnceLock<Arc<dyn SessionProcess>>>);

impl HandoffOffer {
    /// Offers a process, which gets the socket of the client if it is a bare one. Then the session
    /// that the factory returns sees no request; it is kept as long as the client has its session,
    /// and its end ends that. Later calls have no effect.
    pub fn set(&self, process: Arc<dyn SessionProcess>) {
        let _ = self.0.set(process);
    }

    pub(super) fn get(&self) -> Option<&Arc<dyn SessionProcess>> {
        self.0.get()
    }
}

impl fmt::Debug for HandoffOffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HandoffOffer").field(&self.0.get().is_some()).finish()
    }
}
