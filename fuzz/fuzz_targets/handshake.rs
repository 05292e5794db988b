//! A handshake with arbitrary bytes, in pieces. The first byte decides the side and the size of the
//! pieces.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../rpc-core/tests/protocol/pair/mod.rs"]
mod pair;
#[path = "../../rpc-core/tests/protocol/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::handshake::run(input));
