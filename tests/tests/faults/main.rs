//! Tests of faults: processes that die, bad networks, hostile peers, dropped futures, and Disco
//! sessions under all of these.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]

mod browser;
mod cancel_safety;
mod disco;
mod fuzz_targets;
mod hostile;
mod hostile_indirect;
#[path = "../../../rpc-core/tests/protocol/kept_inputs.rs"]
mod kept_inputs;
mod network;
mod peers;
mod pool;
mod processes;
mod reshard;
mod simulation;
