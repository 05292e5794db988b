//! Sessions at the far end of a channel: driven by a task, or by the threads that wait for them.

mod blocking;
mod task;

pub use self::blocking::BlockingClientSession;
pub(crate) use self::blocking::dial_hands_blocking;
pub use self::task::ClientSession;
