//! Tests that cross crates. The centre is [`mod@conformance`]: one suite over everything that implements
//! [`RpcSession`](rpc_core::RpcSession), instantiated with one line for each transport.
//!
//! Read first [`fixture`] (where a session comes from), then [`scene`] (what a clause works with) and [`functions`] (what
//! the origin serves).

// A helper that panics has found what it was looking for.
#![allow(clippy::unwrap_used)]

pub mod accelerator;
pub mod conformance;
#[path = "../../disco/examples/digits/model.rs"]
pub mod digits;
pub mod fixture;
pub mod forwarder;
pub mod functions;
pub mod scene;
pub mod spmd;
pub mod tvm_ffi;
