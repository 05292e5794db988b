//! A client with arbitrary commands and arbitrary bytes of a server: each request ends once, and
//! nothing panics.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../rpc-core/tests/protocol/pair/mod.rs"]
mod pair;
#[path = "../../rpc-core/tests/protocol/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::client_ops::run(input));
