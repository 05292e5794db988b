//! The opener of `tracker://` addresses: sessions with the servers that a tracker gives out.

use rpc_core::Session;

use super::client::{SCHEME, address_of, connect};
use crate::address::{Address, AddressError};
use crate::connect::{ConnectError, Connector, OpenedBy, SessionOpener};
use crate::transport::{BoxFuture, Properties};

/// Opener of `tracker://` addresses, and of those such as `tracker+tls://`, in which the scheme by
/// which the tracker is reached follows the plus sign.
///
/// The client itself asks the tracker, through its hops, and dials the server that it is given
/// through them as well.
#[derive(Debug)]
pub(crate) struct TrackerOpener;

impl SessionOpener for TrackerOpener {
    fn schemes(&self) -> &[&str] {
        &[SCHEME]
    }

    fn serves(&self, scheme: &str) -> bool {
        scheme.strip_prefix(SCHEME).is_some_and(|rest| rest.is_empty() || rest.starts_with('+'))
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        match address_of(at) {
            Some(tracker) if !self.serves(tracker.scheme()) => Ok(Properties::default()),
            _ => Err(AddressError::invalid(at, "no tracker can be asked there; write tracker://host:port/KEY")),
        }
    }

    fn opened_by(&self) -> OpenedBy {
        OpenedBy::Client
    }

    fn open<'a>(&'a self, to: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(connect(connector, to))
    }
}
