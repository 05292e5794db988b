//! Sessions for the holders of capabilities that the server has made.

use rpc_core::{RpcError, SharedSession};

use super::client_connection::ClientConnection;
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
