//! Errors of connecting: the reasons why there is no session.

use rpc_core::{ErrorKind, RpcError};

use crate::address::AddressError;
use crate::error::TransportError;

/// Reason why there is no session.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// Malformed or unknown address.
    #[error("bad address")]
    Address(#[from] AddressError),
    /// Failure to open a channel.
    #[error("cannot reach the peer")]
    Transport(#[source] TransportError),
    /// Failure to get a session from a peer, or from a hop behind it, that was reached.
    #[error("no session with the peer")]
    Session(#[from] RpcError),
}

impl ConnectError {
    /// Converts the error into an error of a session, with the same facts.
    pub fn into_rpc_error(self) -> RpcError {
        match self {
            Self::Address(error) => RpcError::new(ErrorKind::InvalidArgument, error.to_string()),
            Self::Transport(error) => {
                let kind = match &error {
                    TransportError::Insecure { .. } | TransportError::Unauthenticated { .. } => {
                        ErrorKind::Unauthenticated
                    }
                    TransportError::Unsupported { .. } | TransportError::EndlessStart { .. } => ErrorKind::Unsupported,
                    TransportError::PermissionDenied { .. } => ErrorKind::Refused,
                    TransportError::TimedOut { .. } => ErrorKind::PeerSilent,
                    _ => ErrorKind::PeerLost,
                };
                let address = error.address().to_owned();
                let mut text = error.to_string();
                let mut cause = std::error::Error::source(&error);
                while let Some(error) = cause {
                    text += &format!(": {error}");
                    cause = error.source();
                }
                RpcError::new(kind, text).with_peer(address)
            }
            Self::Session(error) => error,
        }
    }
}

impl From<TransportError> for ConnectError {
    fn from(error: TransportError) -> Self {
        match error {
            TransportError::Address(error) => Self::Address(error),
            error => Self::Transport(error),
        }
    }
}

impl From<ConnectError> for RpcError {
    fn from(error: ConnectError) -> Self {
        error.into_rpc_error()
    }
}
