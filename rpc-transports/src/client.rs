//! The client's side of a session: one shared state, and two pumps that move its bytes.

mod blocking;
mod idle_poller;
mod protocol;
mod state;
mod task;

use std::time::Duration;

use rpc_core::proto::EndpointConfig;

pub use self::blocking::{BlockingClientSession, BlockingSession};
pub use self::protocol::{Bulk, ClientProtocol};
pub use self::task::ClientSession;

/// Settings of a client's session.
pub(crate) struct SessionConfig {
    pub(crate) endpoint: EndpointConfig,
    /// Longest time for which a thread looks for input before it sleeps.
    pub(crate) spin: Duration,
}
