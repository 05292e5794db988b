//! Frame headers: an arbitrary one is refused, or its decoded form encodes to the same bytes.

#![no_main]

#[allow(dead_code, reason = "the tests use more of it")]
#[path = "../../rpc-core/tests/protocol/pair/mod.rs"]
mod pair;
#[path = "../../rpc-core/tests/protocol/targets/mod.rs"]
mod targets;

libfuzzer_sys::fuzz_target!(|input: &[u8]| targets::frame_decoder::run(input));
