//! TVM for `rpc-core`: compiled modules and libraries that follow the ABI of TVM-FFI.
#![doc = include_str!("../README.md")]
#![cfg(all(unix, target_pointer_width = "64"))]

mod ffi;

pub use ffi::{TvmFfi, TvmFfiOptions};
