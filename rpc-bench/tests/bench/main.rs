//! Tests of the program `rpc-bench`: one binary, since each one links for seconds.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod disco;
mod forward;
mod rpc;
mod scale;
mod send;
