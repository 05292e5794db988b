//! Tests of sessions: the conformance suite over every kind of session, placed graphs, a client in
//! Python, `ssh`, modules of TVM-FFI, staging, and long links.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod conformance;
mod long_links;
mod placement;
mod python_client;
mod ssh;
mod staging;
mod tvm_client;
mod tvm_ffi;
