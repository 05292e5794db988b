//! The client's side of a session: one shared state, and two pumps that move its bytes.

mod blocking;
mod idle_poller;
mod state;
mod task;

pub use self::blocking::BlockingClientSession;
pub use self::task::ClientSession;
