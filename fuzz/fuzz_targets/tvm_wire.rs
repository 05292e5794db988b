//! See `rpc_tests::fuzz_targets::tvm_wire`.

#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| rpc_tests::fuzz_targets::tvm_wire(input));
