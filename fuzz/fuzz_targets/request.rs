//! Requests and replies: a request that decodes also encodes, and replies decode or are refused.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../rpc-core/tests/protocol/pair/mod.rs"]
mod pair;
#[path = "../../rpc-core/tests/protocol/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::request::run(input));
