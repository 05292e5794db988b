//! Dialling and listening on any kind of address: the one place that knows all transports.

use crate::address::{Address, AddressKind};
use crate::channel::{BlockingChannel, Channel};
use crate::error::TransportError;
use crate::listener::Listener;
use crate::transport::{DialOptions, ListenOptions};
use crate::transports::memory;

#[cfg(feature = "exec")]
use crate::transports::exec;
#[cfg(feature = "quic")]
use crate::transports::quic;
#[cfg(feature = "tcp")]
use crate::transports::tcp;
#[cfg(feature = "tls")]
use crate::transports::tls;
#[cfg(feature = "unix")]
use crate::transports::unix;
#[cfg(not(feature = "exec"))]
use absent as exec;
#[cfg(not(feature = "quic"))]
use absent as quic;
#[cfg(not(feature = "tcp"))]
use absent as tcp;
#[cfg(not(feature = "tls"))]
use absent as tls;
#[cfg(not(feature = "unix"))]
use absent as unix;

/// Opens a channel to the peer at `address`. Needs a tokio runtime with I/O and time.
///
/// The key of the address plays no part: it is for the handshake. Dropping the future gives up the
/// attempt; a child that was being started is ended.
///
/// # Errors
///
/// [`TransportError`], which says what to look at.
pub async fn dial(address: &Address, options: &DialOptions) -> Result<Channel, TransportError> {
    match address.kind() {
        AddressKind::Tcp { .. } => tcp::dial(address, options).await,
        AddressKind::Tls { .. } => tls::dial(address, options).await,
        AddressKind::Quic { .. } => quic::dial(address, options).await,
        AddressKind::Unix { .. } => unix::dial(address, options).await,
        AddressKind::Exec { .. } => exec::dial(address, options).await,
        AddressKind::Memory { .. } => memory::dial(address, options).await,
        AddressKind::Local => Err(TransportError::unsupported(address, NO_CHANNEL)),
        AddressKind::Tracker { .. } => Err(TransportError::unsupported(address, NO_TRACKER)),
    }
}

/// Opens a channel to `address` at the end of `way`, which leads there.
///
/// # Errors
///
/// As [`dial`]; [`TransportError::Unsupported`] for addresses that are not reached by a stream of bytes.
pub(crate) async fn dial_through(
    address: &Address,
    options: &DialOptions,
    way: Channel,
) -> Result<Channel, TransportError> {
    match address.kind() {
        AddressKind::Tcp { .. } | AddressKind::Unix { .. } | AddressKind::Memory { .. } => Ok(way),
        AddressKind::Tls { .. } => tls::dial_through(address, options, way).await,
        AddressKind::Quic { .. } | AddressKind::Exec { .. } | AddressKind::Local | AddressKind::Tracker { .. } => Err(
            TransportError::unsupported(address, "cannot be reached through a tunnel, which passes a stream of bytes"),
        ),
    }
}

/// Opens a channel on this thread, without a runtime. Blocks for up to the time limit.
///
/// # Errors
///
/// As [`dial`]; `memory:`, `tls://` and `quic://` addresses are [`TransportError::Unsupported`].
pub fn dial_blocking(address: &Address, options: &DialOptions) -> Result<BlockingChannel, TransportError> {
    match address.kind() {
        AddressKind::Tcp { .. } => tcp::dial_blocking(address, options),
        AddressKind::Unix { .. } => unix::dial_blocking(address, options),
        AddressKind::Exec { .. } => exec::dial_blocking(address, options),
        AddressKind::Memory { .. } | AddressKind::Tls { .. } | AddressKind::Quic { .. } => {
            Err(TransportError::unsupported(address, "have no plain socket to block on; dial from async code"))
        }
        AddressKind::Local => Err(TransportError::unsupported(address, NO_CHANNEL)),
        AddressKind::Tracker { .. } => Err(TransportError::unsupported(address, NO_TRACKER)),
    }
}

/// Listens on `address`. Needs a tokio runtime with I/O and time.
///
/// # Errors
///
/// [`TransportError`]; `exec:` and `local:` addresses are [`TransportError::Unsupported`].
pub async fn bind(address: &Address, options: &ListenOptions) -> Result<Listener, TransportError> {
    match address.kind() {
        AddressKind::Tcp { .. } => tcp::bind(address, options).await,
        AddressKind::Tls { .. } => tls::bind(address, options).await,
        AddressKind::Quic { .. } => quic::bind(address, options).await,
        AddressKind::Unix { .. } => unix::bind(address, options).await,
        AddressKind::Memory { .. } => memory::bind(address, options).await,
        AddressKind::Exec { .. } => {
            Err(TransportError::unsupported(address, "can only be dialled; listen on a tcp:// or unix: address"))
        }
        AddressKind::Local => Err(TransportError::unsupported(address, NO_CHANNEL)),
        AddressKind::Tracker { .. } => Err(TransportError::unsupported(address, NO_TRACKER)),
    }
}

const NO_CHANNEL: &str = "need no channel; use a local session";

const NO_TRACKER: &str =
    "stand for whichever server the tracker gives out; only a Connector can ask for it, as the last address";

/// Stands in for each transport that is switched off.
#[cfg(not(all(feature = "quic", feature = "unix", feature = "exec")))]
#[allow(dead_code, reason = "child processes are never listened on")]
mod absent {
    use super::{Address, BlockingChannel, Channel, DialOptions, ListenOptions, Listener, TransportError};

    const WHY: &str = "are switched off in this build; enable the Cargo feature of that name";

    pub(super) async fn dial(address: &Address, _options: &DialOptions) -> Result<Channel, TransportError> {
        Err(TransportError::unsupported(address, WHY))
    }

    pub(super) async fn dial_through(
        address: &Address,
        _options: &DialOptions,
        _way: Channel,
    ) -> Result<Channel, TransportError> {
        Err(TransportError::unsupported(address, WHY))
    }

    pub(super) fn dial_blocking(address: &Address, _options: &DialOptions) -> Result<BlockingChannel, TransportError> {
        Err(TransportError::unsupported(address, WHY))
    }

    pub(super) async fn bind(address: &Address, _options: &ListenOptions) -> Result<Listener, TransportError> {
        Err(TransportError::unsupported(address, WHY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_cannot_be_done_is_unsupported_and_says_why() {
        let local = Address::local();
        let memory = Address::memory("dispatch").unwrap();
        let exec = Address::exec(["cat"]).unwrap();
        for error in [
            dial(&local, &DialOptions::default()).await.unwrap_err(),
            dial_blocking(&memory, &DialOptions::default()).unwrap_err(),
            bind(&exec, &ListenOptions::default()).await.unwrap_err(),
            bind(&local, &ListenOptions::default()).await.unwrap_err(),
        ] {
            assert!(matches!(error, TransportError::Unsupported { .. }), "{error:?}");
        }
    }
}
