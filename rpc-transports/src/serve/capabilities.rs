//! Sessions for the holders of capabilities that the server has made.

use rpc_core::proto::{Hello, Role};
use rpc_core::{ErrorKind, RpcError, SharedSession};

use super::client_connection::ClientConnection;
use super::connection::Connection;
use crate::handshake::capability::{CapabilityId, CapabilityTable};

/// Capabilities that a server has made, and the sessions of their holders.
///
/// A capability is a secret for one connection of a peer whom the server does not know otherwise. A
/// session of the server makes it, and passes it to its client; the client passes it to the peer,
/// which [dials by it](crate::Tokens::capability).
pub trait CapabilitySessions: CapabilityTable {
    /// Opens the session of a client that has proven the capability with this id, and uses it up.
    /// Of several calls for one capability at most one succeeds. Must not block.
    ///
    /// # Errors
    ///
    /// As [`find`](CapabilityTable::find), and other reasons to give the client no session.
    fn open(&self, id: CapabilityId, client: &CapabilityClient) -> Result<SharedSession, RpcError>;
}

/// Client that has proven a capability.
#[derive(Debug)]
#[non_exhaustive]
pub struct CapabilityClient {
    /// Address that the client comes from, as text for people.
    pub peer: String,
    /// True if its connection can neither be read nor changed on its route.
    pub is_encrypted: bool,
    /// Connection of the client.
    pub connection: ClientConnection,
}

impl Connection {
    /// Opens the session of a client that has proven the capability named `id`, which is all that
    /// it may ask for.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Refused`] if the client asks for anything else, and errors of
    /// [`CapabilitySessions::open`].
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
}
