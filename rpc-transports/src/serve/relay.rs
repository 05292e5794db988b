//! Relays: servers that cannot be dialled dial out and wait at a relay, which connects clients to
//! them.

mod dial_out;
mod park_places;
pub(super) mod pool;

pub use self::dial_out::ParkOptions;
pub(super) use self::park_places::ParkLimit;
