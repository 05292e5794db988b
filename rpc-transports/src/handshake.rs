//! The handshake: its steps and drivers, the limit on those in progress, and proofs of identity.

pub(crate) mod capability;
#[cfg(feature = "tls")]
pub mod certificates;
pub(crate) mod driver;
pub(crate) mod files;
pub(crate) mod handshake_slots;
pub mod identity_proofs;
pub(crate) mod peer_identity;
mod secret_proof;
mod security;
mod steps;
mod tokens;
