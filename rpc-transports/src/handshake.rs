//! Handshakes: who drives them, how many may be under way, and what proves who a peer is.

#[cfg(feature = "tls")]
pub mod certificates;
pub(crate) mod driver;
pub(crate) mod half_open;
pub mod identity;
