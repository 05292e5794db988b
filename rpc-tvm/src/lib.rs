//! TVM for `rpc-core`: compiled modules and libraries that follow the ABI of TVM-FFI, and TVM's own
//! RPC protocol.
#![doc = include_str!("../README.md")]

#[cfg(all(unix, target_pointer_width = "64"))]
mod ffi;
pub mod wire;

#[cfg(all(unix, target_pointer_width = "64"))]
pub use ffi::{TvmFfi, TvmFfiOptions};
