//! The conformance suite over every kind of session. A new transport is one more line.

rpc_tests::conformance!(local = rpc_tests::fixture::Local::new());
rpc_tests::conformance!(local_with_a_runtime = rpc_tests::fixture::Local::spawning());
