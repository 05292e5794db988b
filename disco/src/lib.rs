//! SPMD over sessions: one controller drives N workers, each behind any session of `rpc-core`.
//!
//! Of this, the collectives are here: [`ccl`]. What is planned:
//!
//! * A controller issues commands (call a function, create or copy a tensor, run a collective) that every worker executes in
//!   the same order. A register named once stands for one value on each worker.
//! * The link to a worker is an `RpcSession`, so that workers may be threads, child processes, nodes over a network, or
//!   devices behind a chain of hops, by changing addresses and nothing else.
//! * Collectives move data between the workers directly, and not through the controller.
//! * A worker's death is an error to everybody who waits, and not a hang.

#![deny(unsafe_code)]

pub mod ccl;
