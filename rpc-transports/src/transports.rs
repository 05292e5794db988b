//! The transports of this crate, one file each. Each owns its own settings.

#[cfg(feature = "exec")]
pub mod exec;
pub mod memory;
#[cfg(feature = "quic")]
pub mod quic;
#[cfg(feature = "exec")]
pub mod ssh;
#[cfg(feature = "tcp")]
pub mod tcp;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(feature = "unix")]
pub mod unix;
#[cfg(any(feature = "unix", feature = "exec"))]
mod unix_buffer;
