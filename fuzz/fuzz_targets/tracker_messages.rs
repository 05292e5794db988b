//! See `rpc_tests::fuzz_targets::tracker_messages`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rpc_tests::fuzz_targets::tracker_messages(input));
