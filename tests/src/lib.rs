//! Tools for tests that cross crates: workers of Disco, native modules, bad networks, accelerators.
//!
//! The suite of a session's contract is a crate of its own, [`rpc_conformance`]; `tests/sessions`
//! runs it over every kind of session.

// A helper panics where the test fails.
#![allow(clippy::unwrap_used)]

pub mod accelerator;
#[path = "../../disco/examples/digits/model.rs"]
pub mod digits;
mod documents;
pub mod forwarder;
pub mod fuzz_targets;
pub mod native;
pub mod simulated_network;
pub mod spmd;
pub mod tvm_ffi;

pub use rpc_conformance::{functions, harness};
