//! A handshake takes any bytes, in pieces. The first byte says which side it is and how large the
//! pieces are.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../rpc-core/tests/protocol/pair/mod.rs"]
mod pair;
#[path = "../../rpc-core/tests/protocol/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::handshake::run(input));
