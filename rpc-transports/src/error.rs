//! Errors of transports: the reasons why there is no channel or no listener.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::address::{Address, AddressError};
use crate::self_start::EndlessStart;

/// Reason why there is no channel or no listener. Each variant names the address as text.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// Malformed address, or one that no known transport accepts.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// Refused connection: the host answered that no server listens there.
    #[error("{address} refused the connection; is a server listening there?")]
    Refused {
        /// Address that was dialled.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Missing answer within the time limit.
    #[error(
        "no answer from {address} within {limit:?}; is the host up, does a server listen there, and does no firewall \
         drop packets?"
    )]
    TimedOut {
        /// Address that was dialled.
        address: String,
        /// Time limit.
        limit: Duration,
    },
    /// Missing route to the host.
    #[error("no route to {address}; is this machine on the right network?")]
    Unreachable {
        /// Address that was dialled.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Host name without an address.
    #[error("cannot find the host of {address}; is its name right?")]
    Resolve {
        /// Address that was dialled or to be listened on.
        address: String,
        /// Error of the resolver.
        source: Arc<io::Error>,
    },
    /// Missing socket file.
    #[error("no such file: {address}; has the server been started?")]
    NotFound {
        /// Address that was dialled or to be listened on.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Address that this user may not use.
    #[error("not permitted to use {address}; is this the right user?")]
    PermissionDenied {
        /// Address that was dialled or to be listened on.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Address on which another server listens.
    #[error("{address} is in use; stop what listens there or choose another address")]
    AddressInUse {
        /// Address to be listened on.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Range of ports in which each one is taken.
    #[error("no port from {first} to {last} is free for {address}; stop what listens there or choose other ports")]
    PortsInUse {
        /// Address to be listened on.
        address: String,
        /// First port that was tried.
        first: u16,
        /// Last port that was tried.
        last: u16,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Folder that is missing, so that the socket file cannot be there, nor be made.
    #[error("the folder {folder} of {address} does not exist; is the path right?")]
    NoFolder {
        /// Address that was dialled or to be listened on.
        address: String,
        /// The folder.
        folder: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Correct address that does not support the operation.
    #[error("cannot use {address}: {scheme} addresses {why}")]
    Unsupported {
        /// Address that was dialled or to be listened on.
        address: String,
        /// Scheme of the address.
        scheme: String,
        /// Reason: the rest of a sentence that starts with "such addresses".
        why: Cow<'static, str>,
    },
    /// Failed encryption: the two sides did not agree on how to encrypt the channel, or one does
    /// not trust the other's certificate.
    #[error("no secure channel with {address}; {hint}")]
    Insecure {
        /// Address that was dialled.
        address: String,
        /// Error of TLS or QUIC.
        source: Arc<io::Error>,
        /// Hint at the cause.
        hint: &'static str,
    },
    /// Client certificate that the server does not accept, or demands. If the server says so only
    /// after the client has a channel, the session fails with the same reason.
    #[error("the server refused the connection: {problem}")]
    Unauthenticated {
        /// Address that was dialled.
        address: String,
        /// Objection of the server to the certificate.
        problem: &'static str,
        /// Error of TLS or QUIC.
        source: Arc<io::Error>,
    },
    /// Child process that did not start.
    #[error("cannot start {program} for {address}; is it installed, executable and on PATH?")]
    Spawn {
        /// Address that was dialled.
        address: String,
        /// Program that was to be started on this machine.
        program: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Child process that was not started, because this program might start itself without end.
    #[error("will not start {address}")]
    EndlessStart {
        /// Address with the command.
        address: String,
        /// Reason, and the remedy.
        source: EndlessStart,
    },
    /// Channel that the far side ended during set-up, or listener that is gone.
    #[error("{address} closed the connection")]
    Closed {
        /// Address of the far side.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
    /// Any other error that the system reports.
    #[error("input or output failed on {address}")]
    Io {
        /// Address of the far side.
        address: String,
        /// Error of the system.
        source: Arc<io::Error>,
    },
}

impl TransportError {
    /// Sorts an error of the system into a variant.
    ///
    /// The kernel's own time-out counts as [`Unreachable`](Self::Unreachable), since no limit was
    /// set that it could name.
    pub fn from_io(address: impl Into<String>, error: io::Error) -> Self {
        use io::ErrorKind as Kind;
        let address = address.into();
        let kind = error.kind();
        let source = Arc::new(error);
        match kind {
            Kind::ConnectionRefused => Self::Refused { address, source },
            Kind::TimedOut | Kind::HostUnreachable | Kind::NetworkUnreachable | Kind::NetworkDown => {
                Self::Unreachable { address, source }
            }
            Kind::NotFound => Self::NotFound { address, source },
            Kind::PermissionDenied => Self::PermissionDenied { address, source },
            Kind::AddrInUse => Self::AddressInUse { address, source },
            Kind::ConnectionReset
            | Kind::ConnectionAborted
            | Kind::BrokenPipe
            | Kind::NotConnected
            | Kind::UnexpectedEof => Self::Closed { address, source },
            _ => Self::Io { address, source },
        }
    }

    /// Returns the address that the error is about.
    #[must_use]
    pub fn address(&self) -> &str {
        match self {
            Self::Address(error) => error.text(),
            Self::Refused { address, .. }
            | Self::TimedOut { address, .. }
            | Self::Unreachable { address, .. }
            | Self::Resolve { address, .. }
            | Self::NotFound { address, .. }
            | Self::PermissionDenied { address, .. }
            | Self::AddressInUse { address, .. }
            | Self::PortsInUse { address, .. }
            | Self::NoFolder { address, .. }
            | Self::Unsupported { address, .. }
            | Self::Insecure { address, .. }
            | Self::Unauthenticated { address, .. }
            | Self::Spawn { address, .. }
            | Self::EndlessStart { address, .. }
            | Self::Closed { address, .. }
            | Self::Io { address, .. } => address,
        }
    }

    /// Makes the error of a transport that does not support an operation. `why` is the rest of a
    /// sentence that starts with "such addresses".
    pub fn unsupported(address: &Address, why: impl Into<Cow<'static, str>>) -> Self {
        Self::Unsupported { address: address.to_string(), scheme: address.scheme().to_owned(), why: why.into() }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use rustix::io::Errno;

    use super::*;

    #[test]
    fn messages_are_lower_case_without_full_stop_and_leave_the_cause_to_source() {
        let error = io::Error::from(Errno::CONNREFUSED);
        let cause = error.to_string();
        let error = TransportError::from_io("tcp://h:1", error);
        let text = error.to_string();
        assert!(text.starts_with("tcp://h:1 refused"), "{text}");
        assert!(!text.ends_with('.') && !text.contains(&cause), "{text}");
        assert_eq!(error.source().unwrap().to_string(), cause);
    }
}
