//! Servers: sessions of any kind behind channels of any kind.

mod access_record;
mod admission;
mod authorization;
mod capabilities;
mod client_connection;
mod connection;
mod dialect;
pub(crate) mod filter;
mod forward;
mod further_servers;
mod handoff;
mod mailbox;
mod options;
mod output_mark;
pub(crate) mod received;
mod relay;
mod server;
pub(crate) mod session_process;
mod stages;
mod stall_timeouts;
mod state;
mod task;

pub use self::access_record::SessionNote;
pub use self::authorization::{Authorization, Authorizer};
pub use self::capabilities::{CapabilityClient, CapabilitySessions};
pub use self::client_connection::ClientConnection;
pub use self::dialect::activity::{DialectActivity, Receiving, Working};
pub use self::dialect::connection::{DialectConnection, DialectHandoff, DialectRequest, FurtherServers, ServerNotices};
pub use self::dialect::relayed::RelayedConnection;
pub use self::dialect::{Dialect, Dialects, MAX_FIRST_BYTES, Recognition};
pub use self::further_servers::Onward;
pub use self::options::{OpenRequest, ServeObserver, ServeOptions, SessionFactory};
pub use self::relay::ParkOptions;
pub use self::server::{Server, TokioSpawner};
