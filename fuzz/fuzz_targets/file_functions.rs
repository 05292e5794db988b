//! See `rpc_tests::fuzz_targets::file_functions`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rpc_tests::fuzz_targets::file_functions(input));
