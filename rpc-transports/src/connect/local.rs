//! The opener of `local:` addresses: sessions with the functions of the process that connects.

use rpc_core::{LocalSession, Session};

use super::connector::Connector;
use super::error::ConnectError;
use super::opener::{OpenedBy, SessionOpener};
use crate::address::{Address, AddressError};
use crate::transport::{BoxFuture, Properties};

/// Opener of `local:` addresses. It declares no properties, so that patterns with `*` do not stand
/// for this process.
#[derive(Debug)]
pub(crate) struct Local;

impl SessionOpener for Local {
    fn schemes(&self) -> &[&str] {
        &["local"]
    }

    fn check(&self, at: &Address) -> Result<Properties, AddressError> {
        if at.rest() != Some("") || at.parameters().next().is_some() {
            let problem = "it says more than there is to say about this process; write local:";
            return Err(AddressError::invalid(at, problem));
        }
        Ok(Properties::default())
    }

    fn opened_by(&self) -> OpenedBy {
        OpenedBy::DirectClient
    }

    fn open<'a>(&'a self, _: &'a Address, connector: &'a Connector) -> BoxFuture<'a, Result<Session, ConnectError>> {
        Box::pin(async { Ok(session(connector)) })
    }

    fn open_blocking(&self, _: &Address, connector: &Connector) -> Option<Result<Session, ConnectError>> {
        Some(Ok(session(connector)))
    }
}

fn session(connector: &Connector) -> Session {
    Session::new(LocalSession::new(connector.local_functions().cloned().unwrap_or_default()))
}
