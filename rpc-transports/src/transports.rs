//! The transports of this crate, one file each.

#[cfg(feature = "exec")]
// Telling the kernel, between fork and exec, that a child must die with its parent.
#[allow(unsafe_code)]
pub mod exec;
pub mod memory;
#[cfg(feature = "quic")]
pub(crate) mod quic;
#[cfg(feature = "tcp")]
pub(crate) mod tcp;
#[cfg(feature = "tls")]
pub(crate) mod tls;
#[cfg(feature = "unix")]
pub(crate) mod unix;
#[cfg(any(feature = "unix", feature = "exec"))]
mod unix_buffer;
