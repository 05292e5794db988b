//! Facts about an accepted connection, the session that the server's factory opens for it, and its
//! end.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rpc_core::proto::{Hello, Role};
use rpc_core::{ErrorKind, OpenFileQuota, RpcError, SharedSession};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::access_record::SessionNote;
use super::authorization::AuthorizedClient;
use super::capabilities::CapabilityClient;
use super::client_connection::ClientConnection;
use super::further_servers::Onward;
use super::mailbox::Mailbox;
use super::options::OpenRequest;
use super::relay::ParkLimit;
use super::session_process::HandoffOffer;
use super::state::{ConnectionEntry, ServerState};
use crate::channel::{ChannelIo, Machine};

/// Facts about an accepted connection.
pub(super) struct Connection {
    pub(super) server: Arc<ServerState>,
    pub(super) peer: String,
    /// Machine of the client, by which sessions are counted.
    pub(super) machine: Machine,
    /// Key that the server has for the clients of this connection.
    pub(super) key: String,
    /// Quota of the descriptors that the client can have opened, beside the connection.
    pub(super) open_files: OpenFileQuota,
    /// True if the connection has the last descriptor of the process. Its client is told so, and
    /// gets no session.
    pub(super) has_last_descriptor: bool,
    pub(super) mailbox: Arc<Mailbox>,
    pub(super) entry: Arc<ConnectionEntry>,
    /// Limit on the clients that come through a relay, if this connection leads to one.
    pub(super) park: Option<ParkLimit>,
    /// Note on what the client uses.
    pub(super) note: SessionNote,
    /// Offer of the factory to have the session served by another process.
    pub(super) handoff: HandoffOffer,
}

/// Request for a session of the server's factory. Empty texts stand for none.
pub(super) struct SessionRequest<'a> {
    pub(super) key: &'a str,
    pub(super) workspace: &'a str,
    pub(super) ticket: &'a str,
    /// Servers that the client has come through.
    pub(super) path: &'a [String],
    pub(super) is_encrypted: bool,
}

impl Connection {
    /// Opens the session of a client that has proven the capability named `id`, which is all that
    /// it may ask for.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the client asks for anything else, and errors of
    /// [`CapabilitySessions::open`](super::capabilities::CapabilitySessions::open).
    pub(super) fn open_capability(
        &self,
        hello: &Hello,
        id: &str,
        is_encrypted: bool,
    ) -> Result<SharedSession, RpcError> {
        self.takes_sessions()?;
        let asks_for_more = !hello.forward.is_empty() || hello.tunnel || hello.role != Role::Client;
        let is_relayed = self.park.is_some() || self.server.options.relay;
        let Some(sessions) = self.server.options.capabilities.as_ref().filter(|_| !asks_for_more && !is_relayed) else {
            let text = "a capability is for one session at the server that has made it, and no tunnel or hop";
            return Err(RpcError::new(ErrorKind::Refused, text));
        };
        let connection = ClientConnection::new(&self.mailbox);
        sessions.open(id.parse()?, &CapabilityClient { peer: self.peer.clone(), is_encrypted, connection })
    }

    /// Returns the key that the client has to be allowed to use. Empty for none.
    pub(super) fn key_to_check<'a>(&'a self, hello: &'a Hello) -> &'a str {
        if hello.tunnel && !self.leads_to_parked(hello) {
            // The key of the server at the end of a tunnel is not known here.
            return "";
        }
        // For another server it is the key that the client asks for. That server checks that it has
        // this key.
        if self.server.options.relay || !hello.forward.is_empty() { &hello.key } else { &self.key }
    }

    /// Returns true if the client wants a tunnel that a server which waits at this relay makes.
    pub(super) fn leads_to_parked(&self, hello: &Hello) -> bool {
        self.server.options.relay && hello.tunnel && !hello.key.is_empty()
    }

    /// Checks that the connection has not the last descriptor of the process.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::LimitExceeded`].
    pub(super) fn check_descriptors(&self) -> Result<(), RpcError> {
        if self.has_last_descriptor {
            let text = "the server's process can open no more files or connections: its operator has to raise the \
                        limit (ulimit -n, LimitNOFILE) or allow fewer sessions (--max-sessions)";
            return Err(RpcError::new(ErrorKind::LimitExceeded, text));
        }
        Ok(())
    }

    /// Checks that the server takes new sessions.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Draining`].
    pub(super) fn takes_sessions(&self) -> Result<(), RpcError> {
        if self.server.draining.load(Ordering::Acquire) {
            return Err(RpcError::new(ErrorKind::Draining, "the server is going away and takes no new sessions"));
        }
        Ok(())
    }

    /// Opens a session by the server's factory.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Draining`], and the factory's reason why the client gets no session.
    pub(super) async fn open_session(
        &self,
        request: SessionRequest<'_>,
        client: &AuthorizedClient,
    ) -> Result<SharedSession, RpcError> {
        self.check_descriptors()?;
        self.takes_sessions()?;
        let named = |name: &str| (!name.is_empty()).then(|| name.to_owned());
        let request = OpenRequest {
            peer: self.peer.clone(),
            machine: self.machine,
            is_encrypted: request.is_encrypted,
            identity: client.identity.name().to_owned(),
            peer_identity: client.identity.clone(),
            access: client.access().cloned(),
            key: named(request.key),
            workspace: named(request.workspace),
            ticket: named(request.ticket),
            open_files: self.open_files.clone(),
            onward: Onward::new(self.server.this.clone(), request.path, client.clone(), self.open_files.clone()),
            note: self.note.clone(),
            connection: ClientConnection::new(&self.mailbox),
            handoff: self.handoff.clone(),
        };
        self.server.factory.open(&request).await
    }
}

/// Logs that a client got no session. Operators search the log for refused clients and the reasons.
pub(super) fn log_refusal(peer: &str, error: &RpcError) {
    match error.kind() {
        ErrorKind::Unauthenticated | ErrorKind::Refused | ErrorKind::LimitExceeded => {
            rpc_core::log_limited!(WARN, peer, %error, "refused a client");
        }
        _ => tracing::debug!(peer, %error, "no session"),
    }
}

/// Logs that a handshake has ended in favour of others.
pub(super) fn log_eviction(peer: &str, limit: usize) {
    tracing::debug!(peer, limit, "a handshake gave way: too many are in progress, or the server stops");
}

/// Time that a client may take to read the last message.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// Ends the outgoing direction, and waits for the client to end the other one. A channel that is
/// closed with unread input is reset, which loses all output that the client has not received by
/// then.
pub(super) async fn drain_and_close(io: &mut dyn ChannelIo) {
    let close = async {
        io.shutdown().await?;
        let mut discarded = [0; 4096];
        while io.read(&mut discarded).await? > 0 {}
        io::Result::Ok(())
    };
    // A broken channel needs nothing more.
    let _ = tokio::time::timeout(LINGER, close).await;
}
