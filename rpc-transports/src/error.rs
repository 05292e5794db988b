//! Errors of transports: why a channel or a listener could not be had.

use std::borrow::Cow;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::address::{Address, AddressError};

/// Why a channel could not be had. Each variant names the address as text.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransportError {
    /// The address is none of a known transport.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// The host answered that nobody listens there.
    #[error("{address} refused the connection; is a server listening there?")]
    Refused {
        /// What was dialled.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Nothing answered in time.
    #[error("no answer from {address} within {limit:?}; is the host up, and does no firewall drop packets?")]
    TimedOut {
        /// What was dialled.
        address: String,
        /// How long was waited.
        limit: Duration,
    },
    /// No network leads there.
    #[error("no route to {address}; is this machine on the right network?")]
    Unreachable {
        /// What was dialled.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The host name has no address.
    #[error("cannot find the host of {address}; is its name right?")]
    Resolve {
        /// What was dialled or to be listened on.
        address: String,
        /// What the resolver said.
        source: Arc<io::Error>,
    },
    /// There is no such socket file, or no such folder to make it in.
    #[error("no such file or folder: {address}; has the server been started?")]
    NotFound {
        /// What was dialled or to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// This user may not use the address.
    #[error("not permitted to use {address}; is this the right user?")]
    PermissionDenied {
        /// What was dialled or to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Somebody else listens there.
    #[error("{address} is in use; stop what listens there or choose another address")]
    AddressInUse {
        /// What was to be listened on.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The address is right, and this cannot be done with it.
    #[error("cannot use {address}: {scheme} addresses {why}")]
    Unsupported {
        /// What was dialled or to be listened on.
        address: String,
        /// Its kind.
        scheme: String,
        /// The rest of a sentence that starts with "such addresses".
        why: Cow<'static, str>,
    },
    /// The two sides did not agree on how to encrypt the channel, or one does not trust the other's
    /// certificate.
    #[error("no secure channel with {address}; {hint}")]
    Insecure {
        /// What was dialled.
        address: String,
        /// What TLS or QUIC said.
        source: Arc<io::Error>,
        /// What to look at.
        hint: &'static str,
    },
    /// The server does not take the client's certificate, or wants one. Where the server says so
    /// only after the client has a channel, the same is said of the session.
    #[error("the server refused the connection: {problem}")]
    Unauthenticated {
        /// What was dialled.
        address: String,
        /// What the server has against the certificate.
        problem: &'static str,
        /// What TLS or QUIC said.
        source: Arc<io::Error>,
    },
    /// The child process did not start.
    #[error("cannot start {address}; is the program installed, executable and on PATH?")]
    Spawn {
        /// The command.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// The far side ended the channel while it was being set up, or the listener is gone.
    #[error("{address} closed the connection")]
    Closed {
        /// The far side.
        address: String,
        /// What the system said.
        source: Arc<io::Error>,
    },
    /// Anything else that the system reports.
    #[error("input or output failed on {address}")]
    Io {
        /// The far side.
        address: String,
        /// What the system said.
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

    /// The address that the error is about.
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
            | Self::Unsupported { address, .. }
            | Self::Insecure { address, .. }
            | Self::Unauthenticated { address, .. }
            | Self::Spawn { address, .. }
            | Self::Closed { address, .. }
            | Self::Io { address, .. } => address,
        }
    }

    /// Makes the error of a transport that cannot do what is asked of it. `why` is the rest of a
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
