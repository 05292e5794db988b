//! Connecting: from an address, and the hops in front of it, to a session.

mod connector;
mod error;
mod hop;
pub(crate) mod local;
mod opener;
mod tunnel;

pub use self::connector::Connector;
pub(crate) use self::connector::expect_no_input;
pub use self::error::ConnectError;
pub(crate) use self::hop::Hop;
pub use self::opener::{OpenedBy, SessionOpener};
pub use self::tunnel::Tunnel;
