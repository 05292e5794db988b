//! The trait of session openers: ways to a session that go over no channel of the native protocol.
//!
//! Three files import each other by their nature: this one, the connector, which openers work with,
//! and the registry, in which the connector finds them.

use std::fmt;

use rpc_core::Session;

use super::connector::Connector;
use super::error::ConnectError;
use crate::address::{Address, AddressError};
use crate::transport::{BoxFuture, Properties};

/// A way to a session that goes over no channel of the native protocol: the functions of this
/// process, a server that a tracker gives out, a peer that speaks another protocol.
///
/// An opener is registered with [`Transports::with_opener`](crate::Transports::with_opener), beside
/// the transports. From then on [`Connector::connect`] opens sessions at its addresses, wherever
/// the registry is given: in clients, servers, Disco's nodes and the programs of the command line.
///
/// An address of an opener can only be the last stop of a chain, since a session leads nowhere
/// further. [`opened_by`](Self::opened_by) says which end of the chain opens it. The rules for
/// addresses hold as for transports: patterns of operators, grants of trackers, and the cautious
/// default of [`Properties`].
pub trait SessionOpener: fmt::Debug + Send + Sync + 'static {
    /// Returns the schemes of the addresses that this opener serves, in lower case. Errors list
    /// them.
    fn schemes(&self) -> &[&str];

    /// Returns true if the opener serves addresses with this scheme. By default, those that
    /// [`schemes`](Self::schemes) lists.
    fn serves(&self, scheme: &str) -> bool {
        self.schemes().contains(&scheme)
    }

    /// Returns the properties of the way to `at`, without opening anything. Called for each address
    /// before it is used.
    ///
    /// The default implementation accepts all well-formed addresses, with the cautious default of
    /// [`Properties`].
    ///
    /// # Errors
    ///
    /// [`AddressError`] if the opener does not accept the address: see [`AddressError::invalid`].
    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        let _ = at;
        Ok(Properties::default())
    }

    /// Returns the address in its canonical spelling, with which operators' patterns are compared.
    /// The default implementation returns the same address.
    ///
    /// # Errors
    ///
    /// As [`check`](Self::check).
    fn canonical(&self, at: &Address) -> Result<Address, AddressError> {
        Ok(at.clone())
    }

    /// Returns the end of the chain that opens the session. The default is
    /// [`LastHop`](OpenedBy::LastHop).
    fn opened_by(&self) -> OpenedBy {
        OpenedBy::LastHop
    }

    /// Opens a session at `to`, which [`check`](Self::check) has accepted and which has no key: the
    /// requested one is [`Connector::requested_key`]. Called in a tokio runtime with I/O and time.
    ///
    /// The terms of the call are those of `connector`: credentials and time limit in
    /// [`Connector::terms`]. [`Connector::open_channel`] dials by them, and refuses encrypted
    /// channels to servers that were not verified. An opener that is
    /// [opened by the client](OpenedBy::Client) is also called where the connector
    /// [has hops](Connector::has_hops), and connects through them or refuses. Dropping the future
    /// gives up the attempt.
    fn open<'a>(&'a self, to: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>>;

    /// Opens a session on this thread, without a runtime, as with
    /// [`Connector::open_channel_blocking`] and [`Connector::start_blocking`]. Returns `None` if
    /// the opener cannot. A background runtime of the process then calls [`open`](Self::open).
    fn open_blocking(&self, to: &Address, connector: &Connector) -> Option<Result<Session, ConnectError>> {
        let _ = (to, connector);
        None
    }
}

/// The end of a chain that opens a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenedBy {
    /// The last hop, with its own credentials, if its operator lets clients be forwarded there; the
    /// client itself where there are no hops. So a peer that only the last hop can reach works as
    /// any other target.
    LastHop,
    /// The client itself, whether it has hops or not. Servers refuse to forward to such addresses,
    /// and trackers cannot grant them.
    Client,
    /// The client itself, where it has no hops. With hops the request goes to the last one, which
    /// refuses it, as all servers do.
    DirectClient,
}
