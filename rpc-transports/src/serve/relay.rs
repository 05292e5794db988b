//! Relays: servers that nobody can dial dial out and wait, and a relay leads clients to them.

mod dial_out;
pub(super) mod pool;

pub use self::dial_out::ParkOptions;
