//! Servers: sessions of any kind behind channels of any kind.

mod admission;
mod connection;
pub(crate) mod filter;
mod forward;
mod mailbox;
mod onward;
mod options;
mod relay;
mod server;
mod splice;
mod stall_timeouts;
mod state;
mod task;

pub use self::onward::Onward;
pub use self::options::{OpenRequest, ServeObserver, ServeOptions, SessionFactory};
pub use self::relay::ParkOptions;
pub use self::server::{Server, TokioSpawner};
