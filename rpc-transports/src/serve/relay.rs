//! Relays: servers that cannot be dialled dial out and wait at a relay, which connects clients to
//! them.

mod dial_out;
pub(super) mod pool;

pub(super) use self::dial_out::ParkLimit;
pub use self::dial_out::ParkOptions;
