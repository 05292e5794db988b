//! Serving: sessions of any kind behind channels of any kind.

mod admission;
mod connection;
pub(crate) mod filter;
mod forward;
mod mailbox;
mod options;
mod relay;
mod server;
mod splice;
mod task;
mod timeouts;

pub use self::forward::Onward;
pub use self::options::{OpenRequest, ServeObserver, ServeOptions, SessionFactory};
pub use self::relay::ParkOptions;
pub use self::server::{Server, TokioSpawner};
